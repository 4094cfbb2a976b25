"""Drafts from sources of their own, through whole engines: answers are the same as without, to the bit."""

from __future__ import annotations

from typing import Any

import pytest

from ratoon import LLM, SamplingParams
from ratoon.core.outputs import RequestOutput
from tests.golden.engines import engine, scheduler_of

PROMPTS = [[5, 6, 7, 8, 5, 6, 7], [9, 10], list(range(20, 50)) * 2, [5, 6, 7, 8, 11]]
FAMILIES = ["llama with grouped heads", "mistral with a window wider than a block", "gpt2"]
# One token that occurred before is enough for a draft, whatever its rows cost: many, of which most are wrong
SETTINGS: dict[str, Any] = {
    "speculate": "ngram", "speculate_ngram_min": 1, "speculate_min_acceptance": 0.0, "speculate_max_seqs": 32
}  # fmt: skip
PARAMS = {
    "greedy": SamplingParams(temperature=0.0, max_tokens=40, ignore_eos=True),
    "drawn": SamplingParams(temperature=1.0, top_p=0.9, seed=3, max_tokens=40, ignore_eos=True),
    "filtered": SamplingParams(
        temperature=0.7, top_k=5, min_p=0.05, seed=4, max_tokens=40, ignore_eos=True, logprobs=3
    ),
    "choices": SamplingParams(temperature=0.9, seed=5, n=3, max_tokens=30, ignore_eos=True, logprobs=2),
    "penalised": SamplingParams(
        temperature=0.8, seed=7, repetition_penalty=1.2, frequency_penalty=0.3, max_tokens=40, ignore_eos=True
    ),
    "stopped": SamplingParams(temperature=0.0, stop_token_ids=[3, 50, 90], min_tokens=4, max_tokens=40),
    "few": SamplingParams(temperature=0.0, max_tokens=3, ignore_eos=True),
    "biased": SamplingParams(
        temperature=0.0, max_tokens=40, logit_bias={5: 4.0, 6: 4.0}, no_repeat_ngram_size=4, ignore_eos=True
    ),
}


def answers(outputs: list[RequestOutput]) -> list[Any]:
    return [
        (choice.token_ids, choice.finish_reason, choice.stop_reason, choice.cumulative_logprob, choice.logprobs)
        for output in outputs
        for choice in output.outputs
    ]


def ask(llm: LLM, params: SamplingParams) -> list[Any]:
    return answers(llm.generate([{"prompt_token_ids": prompt} for prompt in PROMPTS], params, progress=False))


def num_checked(llm: LLM, source: str = "ngram") -> tuple[int, int]:
    """The tokens that were drafted, and accepted."""
    stats = scheduler_of(llm).stats().drafts.get(source)
    return (0, 0) if stats is None else (stats.draft_tokens, stats.accepted_tokens)


@pytest.mark.parametrize("depth", [1, 2, 3])
@pytest.mark.parametrize("family", FAMILIES)
def test_drafts_change_no_text_and_no_log_probability(family: str, depth: int) -> None:
    with engine(family) as llm:
        expected = {name: ask(llm, params) for name, params in PARAMS.items()}
    with engine(family, max_steps_in_flight=depth, **SETTINGS) as llm:
        for name, params in PARAMS.items():
            assert ask(llm, params) == expected[name], name
        num_drafted, num_accepted = num_checked(llm)
        assert 0 < num_accepted < num_drafted, "some were right, and some wrong"


def test_a_text_that_repeats_takes_fewer_steps() -> None:
    params = SamplingParams(temperature=0.0, max_tokens=60, ignore_eos=True, logit_bias={4: 100.0})
    prompt = {"prompt_token_ids": [1, 4, 4, 4, 4]}
    with engine(FAMILIES[0], speculate="ngram", speculate_max_seqs=32) as llm:
        llm.generate(prompt, params, progress=False)
        assert scheduler_of(llm).planner.num_steps < 20
        assert num_checked(llm)[1] > 40
        before = scheduler_of(llm).planner.num_steps
        params.speculate = False
        llm.generate(prompt, params, progress=False)
        assert scheduler_of(llm).planner.num_steps - before >= 60
