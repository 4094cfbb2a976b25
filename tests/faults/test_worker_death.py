"""Processes of a replica of two ranks that are killed or stopped, at any moment: no answer is lost or changed, and
nothing is left behind."""

from __future__ import annotations

import asyncio
import os
import random
import signal
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

if sys.platform != "linux":
    pytest.skip("workers in processes need Linux", allow_module_level=True)

from ratoon import AsyncLLM
from ratoon.engine.processes import replica
from tests.faults.executors import IMPATIENT
from tests.faults.kills import number_of_kills, survive_kills
from tests.faults.processes import SETTINGS, is_running, model_name, workers_of
from tests.faults.test_engine_death import read_stream
from tests.waiting import until

RANKS = SETTINGS | {"tensor_parallel_size": 2}
STAGES = SETTINGS | {"pipeline_parallel_size": 2}


@pytest.fixture
def temporary_files(monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Where all processes of a test have their temporary files. Its name is short, as those of sockets have to be."""
    model_name()  # which is there for later tests
    with tempfile.TemporaryDirectory(prefix="r") as folder:
        monkeypatch.setenv("TMPDIR", folder)
        monkeypatch.setattr(tempfile, "tempdir", folder)
        yield Path(folder)


@pytest.mark.slow
@pytest.mark.parametrize("num_kills", [3, pytest.param(number_of_kills(12), marks=pytest.mark.full)])
def test_streams_survive_kills_of_any_process_of_a_replica(num_kills: int, temporary_files: Path) -> None:
    dice = random.Random(6)

    async def some_time() -> None:
        await asyncio.sleep(dice.choice([0.05, 0.3, 0.8]) * dice.random())

    survive_kills(RANKS, num_kills, some_time, lambda processes, kills: dice.choice(processes))
    assert os.listdir(temporary_files) == []


@pytest.mark.slow
def test_a_worker_that_dies_while_there_is_no_work_is_replaced_at_once() -> None:
    async def run() -> None:
        async with AsyncLLM(model_name(), **RANKS) as llm:
            right = await read_stream(llm, 1)
            engine = llm.health().engines[0].pid
            assert engine is not None
            os.kill(workers_of(engine)[1], signal.SIGKILL)
            await until("the engine has ended", lambda: llm.health().engines[0].num_restarts == 1)
            await until("it is back", lambda: llm.health().ok)
            assert await read_stream(llm, 1) == right

    asyncio.run(run())


@pytest.mark.slow
@pytest.mark.parametrize(
    ("settings", "seconds"),
    [
        (RANKS, 1.0),
        pytest.param(RANKS, 10.0, marks=pytest.mark.full),
        pytest.param(STAGES, 10.0, marks=pytest.mark.full),
    ],
    ids=["ranks-1", "ranks-10", "stages-10"],
)
def test_a_worker_that_is_stopped_for_a_while_loses_nothing(settings: dict[str, Any], seconds: float) -> None:
    """The other rank waits for it inside a sum or for its rows, and the ring fills up."""
    shared_memory = set(os.listdir("/dev/shm"))

    async def run() -> None:
        async with AsyncLLM(model_name(), **settings) as llm:
            right = {seed: await read_stream(llm, seed) for seed in range(6)}
            for stopped in workers_of(llm.health().engines[0].pid):
                streams = [asyncio.create_task(read_stream(llm, seed)) for seed in right]
                await asyncio.sleep(0.05)
                os.kill(stopped, signal.SIGSTOP)
                try:
                    await asyncio.sleep(seconds)
                finally:
                    os.kill(stopped, signal.SIGCONT)
                assert await asyncio.gather(*streams) == list(right.values())
            assert llm.health().engines[0].num_restarts == 0

    asyncio.run(run())
    assert set(os.listdir("/dev/shm")) <= shared_memory


@pytest.mark.slow
@pytest.mark.full
@pytest.mark.parametrize("settings", [RANKS, STAGES], ids=["ranks", "stages"])
def test_a_worker_that_is_stopped_for_longer_than_a_step_may_take_is_replaced(settings: dict[str, Any]) -> None:
    shared_memory = set(os.listdir("/dev/shm"))

    async def run() -> None:
        async with AsyncLLM(model_name(), executor=IMPATIENT, **settings) as llm:
            right = {seed: await read_stream(llm, seed) for seed in range(6)}
            for number in range(2):
                engine = llm.health().engines[0]
                stopped = workers_of(engine.pid)[number]
                streams = [asyncio.create_task(read_stream(llm, seed)) for seed in right]
                os.kill(stopped, signal.SIGSTOP)
                assert await asyncio.gather(*streams) == list(right.values())
                assert not is_running(stopped)
                await until("it is back", lambda: llm.health().ok)
                assert llm.health().engines[0].num_restarts > number

    asyncio.run(run())
    assert set(os.listdir("/dev/shm")) <= shared_memory


@pytest.mark.slow
@pytest.mark.full
@pytest.mark.parametrize("limit", [None, 3.0], ids=["shorter", "longer"])
def test_an_engine_of_a_group_that_is_stopped_loses_nothing(
    limit: float | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It goes on after a while, or is replaced once it has been silent for longer than the limit."""
    if limit is not None:
        monkeypatch.setattr(replica, "SILENCE_IS_DEATH", limit)

    async def run() -> None:
        async with AsyncLLM(model_name(), data_parallel_size=2, **RANKS) as llm:
            right = {seed: await read_stream(llm, seed) for seed in range(6)}
            for number in range(2):
                stopped = llm.health().engines[number].pid
                assert stopped is not None
                workers = workers_of(stopped)
                streams = [asyncio.create_task(read_stream(llm, seed)) for seed in right]
                os.kill(stopped, signal.SIGSTOP)
                if limit is None:
                    await asyncio.sleep(3.0)
                    os.kill(stopped, signal.SIGCONT)
                assert await asyncio.gather(*streams) == list(right.values())
                if limit is None:
                    assert llm.health().engines[number].pid == stopped
                    continue
                await until(
                    "it is replaced with its ranks", lambda pids=(stopped, *workers): not any(map(is_running, pids))
                )
                await until("it is back", lambda: llm.health().ok)

    asyncio.run(run())
