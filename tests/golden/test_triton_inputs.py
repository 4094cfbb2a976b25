"""Whole engines whose inputs are prepared by kernels, as on CUDA, give the results of those that prepare them on the
host: each step alone, and padded to the sizes of graphs. The kernels run under Triton's interpreter, a graph runs its
function again, and everything else is the CPU path."""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from typing import Any
from unittest.mock import patch

import pytest

from ratoon.execution import choices
from ratoon.execution.model_runner import ModelRunner
from tests.golden import tiny_models
from tests.golden.test_cuda import greedy, searches, states, texts_over_encoders

pytestmark = pytest.mark.skipif(
    os.environ.get("TRITON_INTERPRET") != "1" or find_spec("triton") is None, reason="needs Triton's interpreter"
)


class RunAgain:
    """In place of a graph."""

    def __init__(self, function: Any) -> None:
        self.replay = function


@contextmanager
def inputs_on_device(padded: bool) -> Iterator[None]:
    runners: list[ModelRunner] = []

    def make(*arguments: Any, **settings: Any) -> ModelRunner:
        settings |= {"inputs_on_device": True, "capture": RunAgain if padded else None}
        runners.append(ModelRunner(*arguments, **settings))
        return runners[-1]

    with patch.object(choices, "ModelRunner", make):
        yield
    for runner in runners:
        assert (runner.graphs is not None and runner.graphs.stats.num_graphs > 1) == padded


# Steps run alone or padded: each kind of request once, in the way that fewer other tests see.


@pytest.mark.parametrize(
    ("make", "padded"), [(tiny_models.tiny_mistral, True), (tiny_models.tiny_qwen3, False)], ids=["padded", "alone"]
)
@pytest.mark.one_in(2)
def test_a_batch_gets_the_same_tokens(make, padded):
    tiny = make()
    expected = greedy(tiny, "cpu")
    with inputs_on_device(padded):
        assert greedy(tiny, "cpu") == expected


def test_searches_and_continuations_find_the_same_texts():
    tiny = tiny_models.tiny_qwen2()
    expected = searches(tiny, "cpu")
    with inputs_on_device(padded=True):
        assert searches(tiny, "cpu") == expected


def test_hidden_states_are_the_same_to_the_bit():
    tiny = tiny_models.tiny_llama()
    expected = states(tiny, "cpu")
    with inputs_on_device(padded=True):
        found = states(tiny, "cpu")
    assert found.keys() == expected.keys()
    assert all(found[name].equal(expected[name]) for name in expected)


@pytest.mark.parametrize(("family", "padded"), [("marian", False), ("t5", True)], ids=["alone", "padded"])
@pytest.mark.one_in(2)
def test_texts_over_encoders_are_the_same_with_little_memory(family, padded):
    expected, _ = texts_over_encoders(family, "cpu", 100)
    with inputs_on_device(padded):
        found, swapped = texts_over_encoders(family, "cpu", 13, swap_bytes=2**22)
    assert found == expected and swapped
