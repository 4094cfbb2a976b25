"""Engines that are added to a running service and drained from it: no answer is lost or changed."""

from __future__ import annotations

import asyncio

import pytest

from ratoon import AsyncLLM
from ratoon.core.errors import RequestError
from tests.faults.processes import SETTINGS, is_running, model_name
from tests.faults.test_engine_death import num_requests_in, read_stream
from tests.waiting import until


@pytest.mark.slow
def test_engines_come_and_go_under_load() -> None:
    async def run() -> None:
        async with AsyncLLM(model_name(), **SETTINGS, num_replicas=2) as llm:
            right = {seed: await read_stream(llm, seed) for seed in range(4)}
            streams = [asyncio.create_task(read_stream(llm, index % 4)) for index in range(16)]
            assert await llm.add_replica() == 2
            streams += [asyncio.create_task(read_stream(llm, index % 4)) for index in range(16)]
            await until("the new one works", lambda: num_requests_in(llm, 2) > 3)
            first, third = llm.health().engines[0].pid, llm.health().engines[2].pid
            assert first is not None and third is not None
            await llm.drain_replica(0)
            assert not is_running(first)
            await llm.drain_replica(2, seconds=0)  # what it has is continued by the last one
            assert not is_running(third)
            assert [engine.state for engine in llm.health().engines] == ["drained", "ok", "drained"]
            assert llm.health().ok
            for index, tokens in enumerate(await asyncio.gather(*streams)):
                assert tokens == right[index % 4]
            with pytest.raises(RequestError, match="no other engine than 1 can take requests"):
                await llm.drain_replica(1)
            with pytest.raises(RequestError, match=r"there is no engine 7 that runs; one of \[1\]"):
                await llm.drain_replica(7)
            assert await read_stream(llm, 1) == right[1]

    asyncio.run(run())


@pytest.mark.slow
def test_a_service_of_one_engine_says_how_it_could_have_more() -> None:
    async def run() -> None:
        async with AsyncLLM(model_name(), **SETTINGS) as llm:
            with pytest.raises(RequestError, match="--replicas 2 or more, or with --ray"):
                await llm.add_replica()

    asyncio.run(run())
