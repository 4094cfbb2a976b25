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

from ratoon.core.params import SamplingParams
from ratoon.execution import choices
from ratoon.execution.model_runner import ModelRunner
from ratoon.execution.passes.ends import Logits
from ratoon.execution.passes.rehearsal import Rehearsal
from ratoon.execution.sampling.mask_column import MaskColumn
from ratoon.execution.sampling.sampler import Sampler
from ratoon.execution.sampling.sampling_rows import SamplingRows
from tests.golden import tiny_models
from tests.golden.grammar_engines import forced_texts, grammar_engine
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


def test_a_structured_request_that_was_run_in_advance_changes_no_text() -> None:
    """Its steps, whose tokens are chosen behind a mask, are known to later requests."""
    asked = SamplingParams(structured_output={"regex": "[ab]{3,7}c"}, temperature=0.0, max_tokens=24)

    def texts_after(prepare: Any) -> list[str]:
        with inputs_on_device(padded=True), grammar_engine() as llm:
            runner = llm._client.core.executor._worker.runner
            prepare(runner)
            answers = [llm.generate(["hello"] * count, asked, progress=False) for count in (1, 1, 3, 3)]
            return [output.outputs[0].text for outputs in answers for output in outputs]

    def rehearse(runner: ModelRunner) -> None:
        rehearsal = Rehearsal(runner, 64)
        rehearsal.expect_grammars()
        while rehearsal.can_go_on:
            assert rehearsal.run_next()
        ends = [padded.end for key in runner.graphs._seen for padded in key.ends]
        assert any(isinstance(end, Logits) for end in ends)
        assert not runner.input_batch.row_of

    assert texts_after(rehearse) == texts_after(lambda runner: None)


def structured_texts() -> list[Any]:
    """Texts of fast grammars, some of which end, among others: two batches, so that the second has trusted grammars."""
    kinds: list[dict[str, Any] | None] = [
        {"json_object": True},
        {"regex": "[ab]{3,7}c"},
        {"choice": ["red", "green", "blue"]},
        {"regex": r"[a-z]+ [0-9]{2}"},
        None,
    ]
    each = [
        SamplingParams(
            structured_output=kinds[index % 5],
            temperature=(0.0, 1.0, 2.0)[index % 3],
            seed=100 + index,
            max_tokens=24,
            logprobs=1 if index == 19 else None,
        )
        for index in range(20)
    ]
    with grammar_engine(max_steps_in_flight=2) as llm:
        outputs = [
            output
            for asked in (each[:10], each[:10], each[10:])
            for output in llm.generate(["hello"] * len(asked), asked, progress=False)
        ]
    return [(output.error, output.outputs[0].token_ids, output.outputs[0].finish_reason) for output in outputs]


@pytest.mark.parametrize("in_thread", [True, False], ids=["thread", "at_once"])
@pytest.mark.one_in(2)
def test_texts_are_the_same_where_masks_are_filled_while_the_device_computes(in_thread, monkeypatch):
    with monkeypatch.context() as patched, inputs_on_device(padded=True):
        patched.setattr(Sampler, "masked_numbers", lambda *args: None)
        expected = structured_texts()
    steps: list[int] = []
    begin_masks, make_column = SamplingRows.begin_masks, MaskColumn.__init__

    def count(self: SamplingRows, slots: Any) -> Any:
        steps.append(len(slots))
        return begin_masks(self, slots)

    def make(self: MaskColumn, *args: Any) -> None:
        make_column(self, *args)
        if in_thread:  # in place of a stream, this thread waits
            self._wait_for_memory = lambda address, number: self.finish()

    monkeypatch.setattr(SamplingRows, "begin_masks", count)
    monkeypatch.setattr(MaskColumn, "__init__", make)
    with inputs_on_device(padded=True):
        assert structured_texts() == expected
    assert len(steps) > 8 and max(steps) > 4  # fewer on a busy machine: a grammar that seems slow is not waited for


@pytest.mark.parametrize("in_flight", [1, 2, 3])
@pytest.mark.one_in(3)
def test_text_without_a_choice_is_told_at_once_and_changes_no_token(in_flight):
    expected = forced_texts(jump_forward=False)
    with inputs_on_device(padded=True):
        found = forced_texts(max_steps_in_flight=in_flight)
    assert found.answers == expected.answers
    assert found.num_steps < expected.num_steps
    assert (found.num_known > 0) == (in_flight > 1)  # a step under way samples once more what was told


@pytest.mark.parametrize("padded", [True, False], ids=["padded", "alone"])
@pytest.mark.one_in(2)
def test_told_text_changes_no_token_beside_other_rules_and_where_memory_is_short(padded):
    expected = forced_texts(others=True, jump_forward=False)
    with inputs_on_device(padded):
        found = forced_texts(others=True, num_blocks=26)
    assert found.answers == expected.answers
    assert found.num_known > 0 and found.num_preemptions > 0


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
