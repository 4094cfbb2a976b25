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
from ratoon.distributed.cluster import SECRET_VARIABLE
from tests.faults.kills import number_of_kills, survive_kills
from tests.faults.processes import FAMILY, SETTINGS, is_running, model_name, workers_of
from tests.faults.test_engine_death import read_stream
from tests.golden.engines import model_folder
from tests.golden.nodes import SECRET, RunningNode
from tests.ports import free_port
from tests.waiting import until, wait_until

STAGES = SETTINGS | {"pipeline_parallel_size": 2}


@pytest.mark.slow
@pytest.mark.parametrize("num_kills", [3, pytest.param(number_of_kills(8), marks=pytest.mark.full)])
def test_streams_survive_kills_of_any_process_of_a_pipeline(num_kills: int) -> None:
    dice = random.Random(9)

    async def some_time() -> None:
        await asyncio.sleep(0.8 * dice.random())

    survive_kills(STAGES, num_kills, some_time, lambda processes, kills: processes[kills % len(processes)])


@pytest.mark.slow
@pytest.mark.full
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
