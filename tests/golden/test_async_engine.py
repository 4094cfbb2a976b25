"""AsyncLLM over a real engine core: the same answers as LLM, and nothing left in the engine, whenever requests are
cancelled."""

from __future__ import annotations

import asyncio
import random

import numpy as np
import pytest

from ratoon.core.errors import RequestError
from ratoon.core.params import PoolingParams, RequestOutputKind, SamplingParams
from ratoon.engine.async_llm import AsyncLLM
from tests.engines_async import ThreadEngineClient, make_thread_engine
from tests.golden.engines import engine, greedy, model_folder, oracle_tokens
from tests.golden.tiny_models import random_token_ids
from tests.unit.engine.fakes_async import on_event_loop

LLAMA = "llama with grouped heads"
PROMPTS = [random_token_ids(length, seed=length) for length in (1, 5, 16, 23, 40)]


def make(**settings) -> AsyncLLM:
    defaults = {"device": "cpu", "num_blocks": 96, "num_threads": 1, "max_num_seqs": 8}
    return make_thread_engine(str(model_folder(LLAMA)), **(defaults | settings))


async def assert_nothing_left(llm: AsyncLLM) -> None:
    """On either side. The engine's side audits its own books."""
    assert isinstance(llm._client, ThreadEngineClient)
    assert llm.num_unfinished_requests() == 0
    (books,) = await llm._client.call_utility("check")
    assert (books["num_requests"], books["num_used_blocks"]) == (0, 0)


async def tokens_of(llm: AsyncLLM, prompt: list[int], params: SamplingParams) -> list[int]:
    token_ids: list[int] = []
    async for output in llm.generate(prompt, params):
        for choice in output.outputs:
            token_ids += choice.token_ids
    return token_ids


@on_event_loop
async def test_streams_side_by_side_are_what_transformers_answers():
    async with make() as llm:
        params = greedy(12, output_kind=RequestOutputKind.DELTA)
        found = await asyncio.gather(*(tokens_of(llm, prompt, params) for prompt in PROMPTS * 3))
        assert found == [oracle_tokens(LLAMA, prompt, 12) for prompt in PROMPTS * 3]
        await assert_nothing_left(llm)


@on_event_loop
async def test_seeded_choices_are_those_of_the_synchronous_engine():
    params = SamplingParams(n=3, seed=5, temperature=1.0, max_tokens=8, ignore_eos=True)
    async with make() as llm:
        async for output in llm.generate(PROMPTS[3], params):
            last = output
    with engine(LLAMA) as synchronous:
        (wanted,) = synchronous.generate([PROMPTS[3]], params, progress=False)
    assert [choice.token_ids for choice in last.outputs] == [choice.token_ids for choice in wanted.outputs]


@on_event_loop
async def test_vectors_are_those_of_the_synchronous_engine():
    params = PoolingParams(pooling="mean", dimensions=7)
    async with make() as llm:
        found = await asyncio.gather(*(llm.embed(prompt, params) for prompt in PROMPTS))
        await assert_nothing_left(llm)
    with engine(LLAMA) as synchronous:
        wanted = synchronous.embed(PROMPTS, params, progress=False)
    for one, other in zip(found, wanted, strict=True):
        np.testing.assert_allclose(one.embedding, other.embedding, atol=1e-5)
        assert np.linalg.norm(one.embedding) == pytest.approx(1.0)


@on_event_loop
async def test_what_can_never_fit_is_refused_and_the_engine_goes_on():
    async with make(num_blocks=4) as llm:
        with pytest.raises(RequestError) as caught:
            await tokens_of(llm, random_token_ids(60, seed=1), greedy(4))
        assert caught.value.field == "prompt"
        assert await tokens_of(llm, PROMPTS[1], greedy(4, output_kind=RequestOutputKind.DELTA)) == oracle_tokens(
            LLAMA, PROMPTS[1], 4
        )
        await assert_nothing_left(llm)


@on_event_loop
async def test_callers_who_leave_at_any_moment_leave_nothing_in_the_engine():
    chance = random.Random(3)
    async with make(num_blocks=24) as llm:

        async def come_and_go(number: int) -> None:
            params = greedy(40, n=1 + number % 3, output_kind=RequestOutputKind(number % 3))
            outputs = llm.generate(PROMPTS[number % len(PROMPTS)], params, str(number))
            for _ in range(chance.randrange(5)):
                if await anext(outputs, None) is None:
                    break
            if number % 2:
                await llm.abort(str(number))
            await outputs.aclose()

        tasks = [asyncio.create_task(come_and_go(number)) for number in range(30)]
        await asyncio.sleep(0.05)
        for task in tasks[::5]:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await assert_nothing_left(llm)
        assert max(llm._client.num_aborts.values()) == 1
