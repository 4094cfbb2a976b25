"""Whole engines whose inputs are prepared by kernels, as on CUDA, give the results of those that prepare them on the
host. The kernels run under Triton's interpreter; everything else is the CPU path."""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from unittest.mock import patch

import pytest

from ratoon.execution import worker
from ratoon.execution.model_runner import ModelRunner
from tests.golden import tiny_models
from tests.golden.test_cuda import greedy, searches, states, texts_over_encoders

pytestmark = pytest.mark.skipif(
    os.environ.get("TRITON_INTERPRET") != "1" or find_spec("triton") is None, reason="needs Triton's interpreter"
)


@contextmanager
def inputs_on_device() -> Iterator[None]:
    def make(*arguments: object, **settings: object) -> ModelRunner:
        return ModelRunner(*arguments, **settings, inputs_on_device=True)  # type: ignore[arg-type]

    with patch.object(worker, "ModelRunner", make):
        yield


@pytest.mark.parametrize("make", [tiny_models.tiny_mistral, tiny_models.tiny_qwen3], ids=lambda make: make.__name__)
def test_a_batch_gets_the_same_tokens(make):
    tiny = make()
    expected = greedy(tiny, "cpu")
    with inputs_on_device():
        assert greedy(tiny, "cpu") == expected


def test_searches_and_continuations_find_the_same_texts():
    tiny = tiny_models.tiny_qwen2()
    expected = searches(tiny, "cpu")
    with inputs_on_device():
        assert searches(tiny, "cpu") == expected


def test_hidden_states_are_the_same_to_the_bit():
    tiny = tiny_models.tiny_llama()
    expected = states(tiny, "cpu")
    with inputs_on_device():
        found = states(tiny, "cpu")
    assert found.keys() == expected.keys()
    assert all(found[name].equal(expected[name]) for name in expected)


@pytest.mark.parametrize("family", ["marian", "t5"])
def test_texts_over_encoders_are_the_same_with_little_memory(family):
    expected, _ = texts_over_encoders(family, "cpu", 100)
    with inputs_on_device():
        found, swapped = texts_over_encoders(family, "cpu", 13, swap_bytes=2**22)
    assert found == expected and swapped
