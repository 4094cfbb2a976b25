"""Drafts from ended requests, through whole engines: the second time is shorter, and the text is the same."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from ratoon import AsyncLLM, SamplingParams
from ratoon.core.outputs import RequestOutput
from ratoon.core.stats import DraftStats
from tests.golden.engines import engine, model_folder, scheduler_of

FAMILY = "llama with grouped heads"
SETTINGS: dict[str, Any] = {"speculate": "roots", "speculate_max_seqs": 32}
PROMPT = list(range(20, 40))
PARAMS = {
    "greedy": SamplingParams(temperature=0.0, max_tokens=40, ignore_eos=True),
    "drawn": SamplingParams(temperature=1.0, seed=3, max_tokens=40, ignore_eos=True, logprobs=2),
    "choices": SamplingParams(temperature=1.0, seed=5, n=3, max_tokens=40, ignore_eos=True),
}


def ask(llm: Any, params: SamplingParams, prompt: list[int] = PROMPT) -> list[Any]:
    (output,) = llm.generate({"prompt_token_ids": prompt}, params, progress=False)
    return [(choice.token_ids, choice.cumulative_logprob, choice.logprobs) for choice in output.outputs]


def drafts_of(llm: Any) -> DraftStats:
    return scheduler_of(llm).stats().drafts.get("roots", DraftStats())


@pytest.mark.parametrize("depth", [1, 2, 3])
@pytest.mark.parametrize("name", PARAMS)
@pytest.mark.one_in(2)
def test_a_request_that_is_repeated_drafts_from_its_first_answer(name: str, depth: int) -> None:
    params = PARAMS[name]
    with engine(FAMILY) as llm:
        expected = ask(llm, params)
    with engine(FAMILY, max_steps_in_flight=depth, **SETTINGS) as llm:
        scheduler = scheduler_of(llm)
        assert ask(llm, params) == expected
        num_first, before = scheduler.planner.num_steps, drafts_of(llm).accepted_tokens
        assert ask(llm, params) == expected
        assert scheduler.planner.num_steps - num_first < num_first / 2
        assert drafts_of(llm).accepted_tokens - before > 25 * params.n
        scheduler.check()


def test_another_seed_drafts_wrong_tokens_and_gets_its_own_text() -> None:
    few = {5: 100.0, 6: 100.0, 7: 100.0}  # of so few tokens any three have occurred before
    others = [
        SamplingParams(temperature=1.0, seed=seed, max_tokens=30, ignore_eos=True, logit_bias=few) for seed in range(6)
    ]
    with engine(FAMILY) as llm:
        expected = [ask(llm, params) for params in others]
    with engine(FAMILY, speculate_min_acceptance=0.0, **SETTINGS) as llm:
        for _ in range(2):
            assert [ask(llm, params) for params in others] == expected
        stats = drafts_of(llm)
        assert 0 < stats.accepted_tokens < stats.draft_tokens


def test_nothing_is_drafted_from_a_root_that_is_evicted() -> None:
    params = PARAMS["greedy"]
    with engine(FAMILY, max_roots=1, **SETTINGS) as llm:
        expected = ask(llm, params)
        ask(llm, params, [7, 8, 9])  # the table has room for one
        before = drafts_of(llm).draft_tokens
        assert ask(llm, params) == expected
        assert drafts_of(llm).draft_tokens == before
        assert ask(llm, params) == expected
        assert drafts_of(llm).accepted_tokens > 25


def test_nothing_is_drafted_from_a_root_that_is_forgotten() -> None:
    params = PARAMS["greedy"]
    with engine(FAMILY, **SETTINGS) as llm:
        (output,) = llm.generate({"prompt_token_ids": PROMPT}, params, progress=False)
        llm.forget(output.request_id)
        assert ask(llm, params)[0][0] == output.outputs[0].token_ids
        assert drafts_of(llm).draft_tokens == 0


def test_without_roots_nothing_is_kept() -> None:
    with engine(FAMILY, max_roots=0, **SETTINGS) as llm:
        for _ in range(3):
            ask(llm, PARAMS["greedy"])
        assert drafts_of(llm).draft_tokens == 0


async def last_of(stream: Any) -> RequestOutput:
    async for output in stream:
        last = output
    return last


@pytest.mark.parametrize("num_replicas", [1, 2])
def test_over_the_process_border_other_owners_and_forgotten_roots_draft_nothing(num_replicas: int) -> None:
    settings = {"device": "cpu", "num_blocks": 96, "num_threads": 1, "skip_tokenizer": True, **SETTINGS}

    async def run() -> None:
        async with AsyncLLM(str(model_folder(FAMILY)), num_replicas=num_replicas, **settings) as llm:

            async def num_accepted(name: str, **options: Any) -> int:
                before = await total()
                output = await last_of(llm.generate({"prompt_token_ids": PROMPT}, params, name, **options))
                texts.add(tuple(output.outputs[0].token_ids))
                return await total() - before

            async def total() -> int:
                figures = await llm.stats()
                return sum(stats.drafts["roots"].accepted_tokens for stats in figures if "roots" in stats.drafts)

            params, texts = PARAMS["greedy"], set()
            assert await num_accepted("first", owner="ada", data_parallel_rank=0) == 0
            assert await num_accepted("second", owner="ada", data_parallel_rank=0) > 15
            assert await num_accepted("other", owner="bob", data_parallel_rank=0) == 0
            assert await num_accepted("salted", owner="ada", cache_salt="x", data_parallel_rank=0) == 0
            for name in ("first", "second"):
                await llm.forget(name, owner="ada")
            assert await num_accepted("third", owner="ada", data_parallel_rank=0) == 0
            assert await num_accepted("fourth", owner="ada", data_parallel_rank=0) > 15
            assert len(texts) == 1

    asyncio.run(run())
