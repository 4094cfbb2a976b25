"""Processes of a pipeline that are killed at any moment, and a host that is gone for a while: no answer is lost or
changed, and nothing is left behind."""

from __future__ import annotations

import asyncio
import os
import random
import signal
import sys

import pytest

if sys.platform != "linux":
    pytest.skip("workers in processes need Linux", allow_module_level=True)

from ratoon import AsyncLLM
from ratoon.core.health import EngineState
from ratoon.distributed.cluster import SECRET_VARIABLE
from ratoon.engine.processes.ledger import MAX_STRIKES
from tests.faults.kills import number_of_kills
from tests.faults.processes import FAMILY, SETTINGS, is_running, model_name
from tests.faults.test_engine_death import read_stream
from tests.faults.test_worker_death import workers_of
from tests.golden.engines import model_folder
from tests.golden.nodes import SECRET, RunningNode, free_port
from tests.waiting import until, wait_until

STAGES = SETTINGS | {"pipeline_parallel_size": 2}


@pytest.mark.slow
@pytest.mark.parametrize("num_kills", [3, pytest.param(number_of_kills(8), marks=pytest.mark.full)])
def test_streams_survive_kills_of_any_process_of_a_pipeline(num_kills: int) -> None:
    dice = random.Random(9)
    shared_memory = set(os.listdir("/dev/shm"))
    seen: set[int] = set()

    async def run() -> None:
        async with AsyncLLM(model_name(), **STAGES) as llm:
            right = {seed: await read_stream(llm, seed) for seed in range(6)}
            kills = 0

            async def keep_streaming(seed: int) -> None:
                while kills < num_kills:
                    assert await read_stream(llm, seed) == right[seed]

            async def keep_killing() -> None:
                nonlocal kills
                while kills < num_kills:
                    await asyncio.sleep(0.8 * dice.random())
                    engine = llm.health().engines[0].pid
                    if engine is None or llm.health().state != EngineState.OK:
                        continue
                    # A request that sees three deaths and no token counts as their cause: wait for its token.
                    if any(entry.strikes >= MAX_STRIKES - 1 for entry in llm._client._ledger._entries.values()):
                        continue
                    workers = workers_of(engine)
                    seen.update((engine, *workers))
                    if len(workers) == 2:
                        os.kill([*workers, engine][kills % 3], signal.SIGKILL)
                        kills += 1

            await asyncio.gather(*(keep_streaming(seed) for seed in range(6)), keep_killing())
            await until("it is back", lambda: llm.health().ok)
            seen.update(workers_of(llm.health().engines[0].pid))
            (books,) = await llm._client.call_utility("check")
            assert books["num_used_blocks"] == 0 and books["num_requests"] == 0
        await until("all processes have ended", lambda: not any(is_running(pid) for pid in seen))

    asyncio.run(run())
    assert set(os.listdir("/dev/shm")) <= shared_memory


@pytest.mark.slow
def test_streams_survive_a_host_that_is_gone_for_a_while(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its worker is killed, then node 0's engine, then the host itself: the engine waits until another one joins."""
    monkeypatch.setenv(SECRET_VARIABLE, SECRET)
    shared_memory = set(os.listdir("/dev/shm"))
    folder, port = model_folder(FAMILY), free_port()
    nodes = [RunningNode(folder, port)]
    seen: set[int] = set()

    async def run() -> None:
        async with AsyncLLM(model_name(), nnodes=2, master_port=port, **STAGES) as llm:
            right = {seed: await read_stream(llm, seed) for seed in range(4)}

            async def hurt_while_streaming(hurt: str) -> None:
                streams = [asyncio.create_task(read_stream(llm, seed)) for seed in right]
                (node,), engine = nodes, llm.health().engines[0]
                seen.update((*node.pids, *workers_of(engine.pid)))
                if hurt == "host":
                    nodes.pop().close()
                    await until("it is noticed", lambda: llm.health().engines[0].num_restarts > engine.num_restarts)
                    nodes.append(RunningNode(folder, port))
                else:
                    assert engine.pid is not None
                    os.kill(node.pids[0] if hurt == "worker" else engine.pid, signal.SIGKILL)
                assert dict(enumerate(await asyncio.gather(*streams))) == right
                await until("it is back", lambda: llm.health().ok)

            for hurt in ("worker", "engine", "host"):
                await hurt_while_streaming(hurt)

    asyncio.run(run())
    for node in nodes:
        node.close()
    wait_until("all processes have ended", lambda: not any(is_running(pid) for pid in seen))
    assert set(os.listdir("/dev/shm")) <= shared_memory
