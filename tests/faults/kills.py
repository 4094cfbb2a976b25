"""Processes of an engine of several ranks, killed under load: no answer is lost or changed, and nothing is left behind.

RATOON_KILLS=50 asks for more kills than a run of all tests has time for."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Awaitable, Callable
from contextlib import suppress
from typing import Any

from ratoon import AsyncLLM
from ratoon.core.health import EngineState
from ratoon.engine.processes.ledger import MAX_STRIKES
from tests.faults.processes import is_running, model_name, workers_of
from tests.faults.test_engine_death import read_stream
from tests.waiting import until

NUM_STREAMS = 6


def number_of_kills(usual: int) -> int:
    return int(os.environ.get("RATOON_KILLS", usual))


def survive_kills(
    settings: dict[str, Any],  # of an engine of two ranks
    num_kills: int,
    some_time: Callable[[], Awaitable[None]],  # passes before each kill
    choose: Callable[[list[int], int], int],  # among the two ranks and their engine, by the number of kills so far
) -> None:
    shared_memory = set(os.listdir("/dev/shm"))
    seen: set[int] = set()
    kills = 0

    async def keep_streaming(llm: AsyncLLM, seed: int, right: Any) -> None:
        while kills < num_kills:
            assert await read_stream(llm, seed) == right

    async def keep_killing(llm: AsyncLLM) -> None:
        nonlocal kills
        while kills < num_kills:
            await some_time()
            engine = llm.health().engines[0].pid
            if engine is None or llm.health().state != EngineState.OK:
                continue
            # A request that sees three deaths and no token counts as their cause: wait for its token.
            if any(entry.strikes >= MAX_STRIKES - 1 for entry in llm._client._ledger._entries.values()):
                continue
            workers = workers_of(engine)
            seen.update((engine, *workers))
            if len(workers) == 2:
                with suppress(ProcessLookupError):  # it has just ended, with another one
                    os.kill(choose([*workers, engine], kills), signal.SIGKILL)
                    kills += 1

    async def run() -> None:
        async with AsyncLLM(model_name(), **settings) as llm:
            right = [await read_stream(llm, seed) for seed in range(NUM_STREAMS)]
            streams = (keep_streaming(llm, seed, right[seed]) for seed in range(NUM_STREAMS))
            await asyncio.gather(*streams, keep_killing(llm))
            await until("it is back", lambda: llm.health().ok)
            seen.update(workers_of(llm.health().engines[0].pid))
            (books,) = await llm._client.call_utility("check")
            assert books["num_used_blocks"] == 0 and books["num_requests"] == 0
        await until("all processes have ended", lambda: not any(is_running(pid) for pid in seen))

    asyncio.run(run())
    assert set(os.listdir("/dev/shm")) <= shared_memory
