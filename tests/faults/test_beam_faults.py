"""Beam searches in steps that go wrong: only the search at fault fails, others get their numbers, nothing is left."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator
from itertools import count
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from ratoon import LLM, BeamSearchParams, SamplingParams
from ratoon.core.params import GenerationParams
from ratoon.core.plan import SchedulerOutput
from ratoon.layers.native_ops import native_ops_reasons
from tests.depths import DEPTHS
from tests.golden.answers import Numbers, numbers_of, open_search, start, whole
from tests.golden.engines import check_nothing_left, engine, model_folder, scheduler_of
from tests.golden.tiny_models import random_token_ids

pytestmark = pytest.mark.skipif(
    bool(native_ops_reasons(torch.device("cpu"), torch.float32)), reason="torch's products depend on the batch"
)

FAMILY = "llama with grouped heads"
BEFORE, AFTER = "before the forward pass", "after it"
PROMPT = random_token_ids(14, seed=14)
BEAMS = BeamSearchParams(beam_width=4, n=4, max_tokens=8, ignore_eos=True)
REQUESTS: list[tuple[list[int], GenerationParams]] = [
    (PROMPT, BEAMS),
    (random_token_ids(20, seed=2), SamplingParams(temperature=0.9, seed=3, n=2, max_tokens=9, ignore_eos=True)),
    (random_token_ids(17, seed=3), BeamSearchParams(beam_width=3, n=2, max_tokens=9, ignore_eos=True)),
    # One that is alone in a failed step is at fault; with two in flight, beams and forks wait for results where others
    # do not: so there are two others.
    (random_token_ids(11, seed=4), SamplingParams(temperature=0.0, max_tokens=9, ignore_eos=True)),
    (random_token_ids(9, seed=5), SamplingParams(temperature=0.8, seed=1, max_tokens=9, ignore_eos=True)),
]


@pytest.fixture(scope="module", params=DEPTHS, ids="{} in flight".format)
def llm(request: pytest.FixtureRequest) -> Iterator[LLM]:
    with engine(FAMILY, num_blocks=120, max_steps_in_flight=request.param) as built:
        yield built


@pytest.fixture(scope="module")
def right(llm: LLM) -> list[Numbers]:
    """What each request gets alone."""
    return [numbers_of(start(llm, prompt, params)) for prompt, params in REQUESTS]


def answers(llm: LLM) -> list[Any]:
    """All at once: the numbers, or the error."""
    prompts, params = zip(*REQUESTS)
    outputs = llm.generate(list(prompts), list(params), progress=False)
    return [numbers_of(output) if output.error is None else output.error for output in outputs]


class Failing:
    """Steps that `fails` names raise, before the model has computed anything or when all is computed."""

    def __init__(
        self, llm: LLM, patch: pytest.MonkeyPatch, when: str, fails: Callable[[SchedulerOutput], bool]
    ) -> None:
        self.num_failed = 0
        self.plans: list[SchedulerOutput] = []
        self._fails = fails
        executor = llm._client.core.executor
        inputs = executor._worker.runner.inputs
        self._wrap(patch, executor, "execute_model", self._note_plan)
        if when == BEFORE:
            self._wrap(patch, inputs, "prepare", self._fail)
        else:
            self._wrap(patch, executor, "sample_tokens", self._fail)

    def _wrap(self, patch: pytest.MonkeyPatch, owner: Any, name: str, first: Callable[..., None]) -> None:
        function = getattr(owner, name)

        def wrapped(*arguments: Any) -> Any:
            first(*arguments)
            return function(*arguments)

        patch.setattr(owner, name, wrapped)

    def _note_plan(self, plan: SchedulerOutput) -> None:
        self.plans.append(plan)

    def _fail(self, *arguments: Any) -> None:
        if self._fails(self.plans[-1]):
            self.num_failed += 1
            raise RuntimeError("no luck")


@pytest.mark.parametrize("when", [BEFORE, AFTER])
@pytest.mark.parametrize("number", range(1, 9))
@pytest.mark.one_in(3)
def test_a_step_that_fails_once_changes_no_bit(
    llm: LLM, right: list[Numbers], monkeypatch: pytest.MonkeyPatch, number: int, when: str
) -> None:
    steps = count(1)
    failing = Failing(llm, monkeypatch, when, lambda plan: next(steps) == number)
    assert answers(llm) == right
    assert failing.num_failed == 1
    monkeypatch.undo()
    check_nothing_left(llm)
    assert answers(llm) == right


@pytest.mark.parametrize("when", [BEFORE, AFTER])
@pytest.mark.one_in(3)
def test_a_search_whose_steps_always_fail_fails_alone(
    llm: LLM, right: list[Numbers], monkeypatch: pytest.MonkeyPatch, when: str
) -> None:
    failing = Failing(
        llm, monkeypatch, when, lambda plan: any(step.num_beams == BEAMS.beam_width for step in plan.beam_steps)
    )
    assert answers(llm) == ["RuntimeError: no luck", *right[1:]]
    assert failing.num_failed == 2  # beside others, then alone
    monkeypatch.undo()
    check_nothing_left(llm)
    assert answers(llm) == right


def test_a_continuing_search_in_a_failed_step_inherits_again(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    parent = start(llm, PROMPT, BEAMS, retain_kv=60)
    expected = numbers_of(llm.generate_continuation(parent, [5], BEAMS))
    child = open_search(llm, "child", [5], BEAMS, parent)
    neighbour = llm.stream(*REQUESTS[1])
    next(child)
    next(neighbour)  # a step of both
    next(child)
    failing = Failing(llm, monkeypatch, BEFORE, lambda plan: failing.num_failed == 0)
    *_, last = child
    assert failing.num_failed == 1
    # Behind what it inherits only the suffix and one token are computed once more. Its id begins with the caller's.
    counts = [plan.num_scheduled_tokens for plan in failing.plans]
    assert [num for each in counts for name, num in each.items() if name.startswith("child")] == [2]
    assert numbers_of(last) == expected and last.prompt_token_ids == [*whole(parent), 5]
    neighbour.close()
    assert llm.reset_prefix_cache()  # and no lease
    check_nothing_left(llm)


@pytest.mark.parametrize("num_steps", range(1, 8))
@pytest.mark.one_in(2)
def test_an_abort_in_the_middle_of_a_search_leaves_nothing_behind(llm: LLM, num_steps: int) -> None:
    stream = open_search(llm, f"aborted {num_steps}", PROMPT, BEAMS, retain_kv=60)
    for _ in range(num_steps):
        next(stream)
    assert scheduler_of(llm).kv_cache.usage > 0
    stream.close()
    check_nothing_left(llm)


def test_a_search_that_meets_a_nan_on_its_way_fails_alone(llm: LLM, right: list[Numbers], tmp_path: Path) -> None:
    """A token that only this search tries makes its numbers NaN, and they stay in the memory that it gives back."""
    others = {token for numbers in right[1:] for text in numbers for token in text[0]}
    prompts = {token for prompt, _ in REQUESTS for token in prompt}
    poison = next(token for token in right[0][0][0][2:-1] if token not in others | prompts)
    folder = shutil.copytree(model_folder(FAMILY), tmp_path / "poisoned")
    tensors = load_file(folder / "model.safetensors")
    tensors["model.embed_tokens.weight"][poison] = torch.nan
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    with LLM(str(folder), device="cpu", num_blocks=20, num_threads=1, skip_tokenizer=True, max_num_seqs=32) as poisoned:
        for _ in range(2):
            found = answers(poisoned)
            assert "NaN" in found[0]
            assert found[1:] == right[1:]
            check_nothing_left(poisoned)
