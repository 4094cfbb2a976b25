"""Servers that are killed, and engines that are stopped or can't be reached: nothing outlives its server or is left
behind, and no loop is blocked."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path

import pytest
import zmq

from ratoon import LLM, AsyncLLM, EngineError
from ratoon.engine.processes import launch, replica
from ratoon.engine.processes.async_client import MESSAGES_AT_ONCE
from tests.faults.processes import PYTHONPATH, SETTINGS, is_running, model_name
from tests.faults.test_engine_death import read_stream
from tests.waiting import PATIENCE, until, wait_until

PROGRAM = """
import sys
from ratoon import LLM
llm = LLM(sys.argv[1], process=True, device="cpu", num_blocks=64, num_threads=1)
print(llm._client.health().engines[0].pid, llm._client._directory.path, flush=True)
sys.stdin.read()
"""


@pytest.fixture
def client(own_runtime_directory: Path) -> Iterator[tuple[subprocess.Popen[str], int, Path]]:
    """A process with an engine, the engine's process and the directory between them."""
    process = subprocess.Popen(
        [sys.executable, "-c", PROGRAM, model_name()],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": PYTHONPATH},
    )
    assert process.stdout is not None
    pid, _, directory = process.stdout.readline().strip().partition(" ")
    yield process, int(pid), Path(directory)
    process.kill()
    process.communicate()
    if is_running(int(pid)):
        os.kill(int(pid), signal.SIGKILL)


@pytest.mark.skipif(sys.platform != "linux", reason="needs prctl")
def test_a_stopped_engine_ends_with_its_killed_client_and_leaves_nothing(client):
    process, engine, directory = client
    assert directory.exists()
    os.kill(engine, signal.SIGSTOP)
    process.kill()
    wait_until("the engine ends", lambda: not is_running(engine))
    wait_until("the directory is removed", lambda: not directory.exists())


def test_an_engine_leaves_nothing_when_its_client_is_killed(client):
    process, engine, directory = client
    process.kill()
    wait_until("the engine ends", lambda: not is_running(engine))
    wait_until("the directory is removed", lambda: not directory.exists())


def test_what_is_left_when_both_are_killed_is_removed_by_the_next_start(client):
    process, engine, directory = client
    os.kill(engine, signal.SIGSTOP)  # it must not clean up
    os.kill(engine, signal.SIGKILL)
    process.kill()
    process.wait()
    wait_until("the engine ends", lambda: not is_running(engine))
    with LLM(model_name(), process=True, **SETTINGS) as llm:
        assert llm._client._directory.path.parent == directory.parent
        assert not directory.exists()


def test_a_stopped_engine_ends_with_a_client_that_shuts_down():
    llm = LLM(model_name(), process=True, **SETTINGS)
    engine = llm._client.health().engines[0].pid
    os.kill(engine, signal.SIGSTOP)
    llm.close()
    assert not is_running(engine)


class Squatter:
    """Another process connects to an engine's socket before the engine does, under identities that can be guessed."""

    def __init__(self) -> None:
        self.context = zmq.Context()
        self.sockets: list[zmq.Socket[bytes]] = []

    def take(self, path: Path) -> None:
        for name in (b"engine-0", b"0", b"engine"):
            taken = self.context.socket(zmq.DEALER)
            taken.setsockopt(zmq.ROUTING_ID, name)
            connected = taken.get_monitor_socket(zmq.EVENT_HANDSHAKE_SUCCEEDED)
            taken.connect(f"ipc://{path}")
            taken.send(b"secret")
            self.sockets.append(taken)
            assert connected.poll(PATIENCE * 1000)  # before the engine, which is started behind this
            taken.disable_monitor()

    def close(self) -> None:
        for taken in self.sockets:
            taken.close(linger=0)
        self.context.term()


def test_a_stranger_who_comes_first_takes_no_engines_place(monkeypatch):
    squatter = Squatter()
    spawn = launch.EngineProcess._spawn

    def squat_and_spawn(self, message):
        squatter.take(Path(message.input_address.removeprefix("ipc://")))
        spawn(self, message)

    monkeypatch.setattr(launch.EngineProcess, "_spawn", squat_and_spawn)

    async def run() -> None:
        async with AsyncLLM(model_name(), **SETTINGS) as llm:
            assert await read_stream(llm, 3)
            assert llm.health().engines[0].num_restarts == 0

    try:
        asyncio.run(run())
    finally:
        squatter.close()


def test_an_engine_that_is_ready_and_never_connects_is_given_up(monkeypatch):
    monkeypatch.setattr(replica, "SECONDS_TO_CONNECT", 0.5)
    monkeypatch.setattr(launch.EngineProcess, "read_input_socket", lambda self: None)
    with pytest.raises(EngineError, match="can't be reached"):
        LLM(model_name(), process=True, **SETTINGS)


def test_an_engine_that_is_ready_and_never_connects_does_not_block_the_loop(monkeypatch):
    monkeypatch.setattr(replica, "SECONDS_TO_CONNECT", PATIENCE)
    monkeypatch.setattr(launch.EngineProcess, "read_input_socket", lambda self: None)

    async def run() -> None:
        llm = AsyncLLM(model_name(), **SETTINGS)
        starting = asyncio.create_task(llm.start())
        await asyncio.sleep(0)
        await until("it is waited for", lambda: llm._client.replicas[0].awaits_connection)
        for _ in range(100):
            await asyncio.sleep(0.001)
        assert not starting.done()
        monkeypatch.setattr(replica, "SECONDS_TO_CONNECT", 0.0)
        with pytest.raises(EngineError, match="can't be reached"):
            await starting

    asyncio.run(run())


NUM_MESSAGES = 20_000


def test_a_flood_from_a_stranger_leaves_the_loop_free():
    """Other tasks have their turn after a bounded number of its messages."""

    async def run() -> None:
        async with AsyncLLM(model_name(), **SETTINGS) as llm:
            with zmq.Context() as context, context.socket(zmq.PUSH) as stranger:
                stranger.setsockopt(zmq.SNDHWM, 50_000)
                stranger.setsockopt(zmq.LINGER, 0)
                stranger.connect(f"ipc://{next(llm._client._directory.path.glob('0-*-out'))}")
                for _ in range(NUM_MESSAGES):
                    stranger.send_multipart([b"x", b"y", b"z"], zmq.NOBLOCK)
                reading = asyncio.create_task(read_stream(llm, 3))
                seen = [0]  # messages, after each turn of the loop
                while seen[-1] < NUM_MESSAGES or not reading.done():
                    await asyncio.sleep(0)
                    seen.append(llm.health().engines[0].num_bad_messages)
            assert max(later - earlier for earlier, later in pairwise(seen)) <= 2 * MESSAGES_AT_ONCE
            await reading

    asyncio.run(run())
