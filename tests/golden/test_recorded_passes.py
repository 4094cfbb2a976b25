"""Whole engines on the CPU whose small steps are recorded passes give what they give call by call, to the bit."""

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any
from unittest.mock import patch

import pytest
import torch

from ratoon.execution import choices
from ratoon.execution.model_runner import ModelRunner
from ratoon.layers.native import library
from tests.golden import tiny_models
from tests.golden.test_cuda import greedy, searches, states, texts_over_encoders

pytestmark = pytest.mark.skipif(library() is None, reason="no kernels for this processor; `make setup` builds them")

FAMILIES = {
    "llama": tiny_models.tiny_llama,
    "mistral": tiny_models.tiny_mistral,
    "qwen2": tiny_models.tiny_qwen2,
    "qwen3": partial(tiny_models.tiny_qwen3, head_dim=32),
    "gpt2": tiny_models.tiny_gpt2,
}


@contextmanager
def engines(recorded: bool) -> Iterator[None]:
    runners: list[ModelRunner] = []

    def make(*arguments: Any, **settings: Any) -> ModelRunner:
        assert settings["record"], "the worker asks for it by itself"
        runners.append(ModelRunner(*arguments, **settings | {"record": recorded}))
        return runners[-1]

    with patch.object(choices, "ModelRunner", make):
        yield
    assert runners
    for runner in runners:
        assert (runner.recorded is not None and len(runner.recorded) > 0) == recorded


def with_and_without(function: Any, *arguments: Any, **settings: Any) -> list[Any]:
    results = []
    for recorded in (False, True):
        with engines(recorded):
            results.append(function(*arguments, **settings))
    return results


@pytest.mark.parametrize("family", FAMILIES)
def test_a_batch_gets_the_same_tokens(family):
    alone, recorded = with_and_without(greedy, FAMILIES[family](), "cpu")
    assert recorded == alone


def test_searches_and_continuations_find_the_same_texts():
    alone, recorded = with_and_without(searches, tiny_models.tiny_qwen2(), "cpu")
    assert recorded == alone


def test_hidden_states_are_the_same():
    alone, recorded = with_and_without(states, tiny_models.tiny_llama(), "cpu")
    assert recorded.keys() == alone.keys()
    assert all(torch.equal(recorded[name], alone[name]) for name in alone)


@pytest.mark.parametrize("family", ["bart", "marian", "whisper", "t5"])
def test_texts_over_encoders_are_the_same_with_little_memory(family):
    with engines(recorded=False):
        expected, _ = texts_over_encoders(family, "cpu", 100)
    with engines(recorded=True):
        found, swapped = texts_over_encoders(family, "cpu", 13, swap_bytes=2**22)
    assert found == expected and swapped
