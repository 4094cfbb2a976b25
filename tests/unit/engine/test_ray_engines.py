"""The sockets of engines on other hosts: encrypted, and only for an engine whose key was made for this run."""

from __future__ import annotations

import os
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import zmq

from ratoon.core.config import EngineConfig
from ratoon.core.messages import EngineLaunch, EngineMessageType, Heartbeat
from ratoon.core.wire import encode
from ratoon.engine.processes.launch import EngineRun
from ratoon.engine.processes.ray_engines import RayEngineProcess, RayEngines
from ratoon.engine.processes.socket_directory import SocketDirectory
from ratoon.engine.processes.zmq_context import SocketContext

MILLISECONDS = 5000


@pytest.fixture
def process(monkeypatch: pytest.MonkeyPatch) -> Iterator[RayEngineProcess]:
    """An engine that was placed nowhere; its launch is kept."""

    def spawn(self: Any, launch: EngineLaunch) -> None:
        self.launch = launch
        self._actor = SimpleNamespace(end=SimpleNamespace(remote=lambda: None))
        self.death_fd, self._kept_open = os.pipe()
        self._has_ended.set()

    monkeypatch.setattr(RayEngineProcess, "_spawn", spawn)
    context, directory = SocketContext(), SocketDirectory()
    engines = RayEngines(EngineConfig(model="none"), 1)
    engines.host, engines.ray = "127.0.0.1", SimpleNamespace(kill=lambda actor: None)
    made = engines.run_engine(EngineRun(EngineConfig(model="none"), 0, 1, 1, context, directory))
    assert isinstance(made, RayEngineProcess)
    yield made
    made.close()
    os.close(made._kept_open)
    engines.close()
    context.term()
    directory.remove()


def send(context: zmq.Context[Any], launch: EngineLaunch, keys: tuple[bytes, bytes, bytes] | None) -> zmq.Socket[bytes]:
    """A heartbeat with the right secret, by a connection with these keys."""
    socket = context.socket(zmq.PUSH)
    socket.setsockopt(zmq.LINGER, 0)
    if keys is not None:
        socket.curve_serverkey, socket.curve_publickey, socket.curve_secretkey = keys
    socket.connect(launch.output_address)
    socket.send_multipart([launch.secret, EngineMessageType.HEARTBEAT.value, *encode(Heartbeat(step_seconds=7.0))])
    return socket


def test_an_engine_is_heard_and_nothing_without_its_key(process: RayEngineProcess) -> None:
    launch: EngineLaunch = process.launch  # type: ignore[attr-defined]
    keys = launch.keys
    assert keys is not None
    assert launch.input_address.startswith("tcp://127.0.0.1:") and launch.num_engines == 1
    with zmq.Context() as context:
        strangers = [
            send(context, launch, None),
            send(context, launch, (keys.server, *zmq.curve_keypair())),
        ]
        assert not process.outputs.poll(500), "a stranger was heard"
        engine = send(context, launch, (keys.server, keys.public, keys.secret))
        assert process.outputs.poll(MILLISECONDS)
        decoded = process.decode(process.outputs.recv_multipart())
        assert decoded is not None and decoded[1].step_seconds == 7.0
        assert not process.outputs.poll(200), "a stranger was heard"
        for socket in (*strangers, engine):
            socket.close(0)


def test_the_key_of_a_run_is_not_accepted_after_it(process: RayEngineProcess) -> None:
    launch: EngineLaunch = process.launch  # type: ignore[attr-defined]
    assert launch.keys is not None
    known = process._engines.known_keys
    assert known.callback("*", launch.keys.public)
    process._wait(0.0)
    assert not known.callback("*", launch.keys.public)
