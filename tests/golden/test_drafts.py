"""Guesses at next tokens, right and wrong, through whole engines: they change no token and no log-probability."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from ratoon import LLM, SamplingParams
from ratoon.core.outputs import RequestOutput
from tests.golden.engines import engine, scheduler_of

PROMPTS = [[5, 6, 7, 8], [9, 10], list(range(20, 60)), [5, 6, 7, 8, 11]]
FAMILIES = ["llama with grouped heads", "mistral with a window wider than a block", "gpt2"]
PARAMS = {
    "greedy": SamplingParams(temperature=0.0, max_tokens=30, ignore_eos=True),
    "drawn": SamplingParams(temperature=1.0, top_p=0.9, seed=3, max_tokens=30, ignore_eos=True),
    "choices": SamplingParams(temperature=0.9, seed=5, n=3, max_tokens=20, ignore_eos=True, logprobs=2),
    "penalised": SamplingParams(temperature=0.8, seed=7, repetition_penalty=1.4, max_tokens=30, ignore_eos=True),
    "stopped": SamplingParams(temperature=0.0, stop_token_ids=[3, 50, 90], min_tokens=4, max_tokens=40),
}


def answers(outputs: list[RequestOutput]) -> list[Any]:
    return [
        (choice.token_ids, choice.finish_reason, choice.cumulative_logprob)
        for output in outputs
        for choice in output.outputs
    ]


def guess_with(llm: LLM, known: dict[tuple[int, ...], list[int]], is_right: Callable[[int], bool]) -> list[int]:
    """Guess the next tokens of branches by the texts that are `known`, by prompt and choice. Returns how many were
    guessed, for each step of a branch that has some."""
    scheduler = scheduler_of(llm)
    schedule = scheduler.schedule
    lengths: list[int] = []

    def with_guesses() -> Any:
        for branch in scheduler.state.running:
            branch.plans_ahead = False
            text = known.get((*branch.token_ids[: branch.num_prompt_tokens], branch.choice))
            if text is None or branch.num_pending or branch.num_computed_tokens != branch.num_tokens - 1:
                continue
            done = branch.num_output_tokens
            tokens = text[done : done + 1 + done % 5]
            branch.propose([t if is_right(done + place) else (t + 1) % 90 for place, t in enumerate(tokens)])
        plan = schedule()
        lengths.extend(map(len, plan.scheduled_spec_decode_tokens.values()))
        return plan

    scheduler.schedule = with_guesses
    return lengths


@pytest.mark.parametrize("params", PARAMS.values(), ids=PARAMS.keys())
@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.one_in(3)
def test_guesses_change_no_text(family: str, params: SamplingParams) -> None:
    prompts = [{"prompt_token_ids": prompt} for prompt in PROMPTS]
    with engine(family) as llm:
        outputs = llm.generate(prompts, params, progress=False)
        expected = answers(outputs)
        known = {
            (*prompt, choice.index): list(choice.token_ids)
            for prompt, output in zip(PROMPTS, outputs)
            for choice in output.outputs
        }
        lengths = guess_with(llm, known, lambda place: place % 4 != 3)
        again = llm.generate(prompts, params, progress=False)
        assert answers(again) == expected
        assert len(lengths) > 5 and max(lengths) > 2, "there were guesses"
