"""Engines on the nodes of a Ray cluster, as seen by the front end.

An actor on a node starts the engine's process there and waits for its end. Messages do not go through Ray: the process
connects to the front end's sockets over TCP. They are encrypted, and each side knows the other's key (CURVE): keys are
made for every run of an engine, and reach the node as an argument of the actor. So does the secret by which engines
that send each other blocks know each other. When the front end ends, Ray ends its actors, and an engine process ends
with the actor that started it.
"""

from __future__ import annotations

import contextlib
import os
import threading
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import msgspec
import zmq
from zmq.auth.thread import ThreadAuthenticator

from ratoon.core.config import EngineConfig
from ratoon.core.messages import EngineLaunch, SocketKeys
from ratoon.distributed.ray_cluster import connect_to_ray, describe, room_of_rank
from ratoon.engine.processes.launch import EngineProcess, EngineRun
from ratoon.engine.processes.ray_node import EngineActor
from ratoon.observe.logging import get_logger

logger = get_logger(__name__)

LOST = 1  # the exit code of a process that was lost with its actor or node
SECONDS_TO_BE_KILLED = 30.0
ANY_DOMAIN = "*"


class KnownKeys:
    """The public keys of engines that may connect; asked for each connection, in a thread of the authenticator."""

    def __init__(self) -> None:
        self._keys: set[bytes] = set()

    def add(self, key: bytes) -> None:
        self._keys.add(key)

    def remove(self, key: bytes) -> None:
        self._keys.discard(key)

    def callback(self, domain: str, key: bytes) -> bool:
        return key in self._keys


class RayEngines:
    """Runs the engines of one client on a cluster."""

    def __init__(self, config: EngineConfig, num_engines: int, kv_secret: str | None = None) -> None:
        """`kv_secret` is what engines that send each other blocks know each other by."""
        self._config = config
        self._num_engines = num_engines
        self._num_threads = config.num_threads
        self.kv_secret = kv_secret
        self._authenticator: ThreadAuthenticator | None = None
        self.known_keys = KnownKeys()

    def connect(self) -> None:
        """Reaches the cluster. ConfigError: Ray is not installed; EngineError: there is no cluster."""
        self.ray = ray = connect_to_ray("ray")
        self.host = str(ray.util.get_node_ip_address())
        config = self._config
        device, each = room_of_rank(ray, config.device, config.num_threads, self._num_engines)
        num_ranks = config.num_ranks
        if config.executor == "ray":
            self.room = {"CPU": 1.0}  # its ranks have their own
        elif device == "cpu":
            self.room = {"CPU": each["CPU"] * num_ranks}
            self._num_threads = config.num_threads or int(each["CPU"])
        else:
            self.room = {"CPU": 1.0, "GPU": float(num_ranks)}
        logger.info("each engine takes %s of the Ray cluster", describe(self.room))

    def run_engine(self, run: EngineRun) -> EngineProcess:
        """Begins a run of an engine: on a node that has room for it, once there is one."""
        if self._authenticator is None:
            self._authenticator = ThreadAuthenticator(run.context)
            self._authenticator.start()
            self._authenticator.configure_curve_callback(ANY_DOMAIN, self.known_keys)
        # Alone, as far as it can see: a node shows it no other cores and devices than its own.
        config = run.config.with_(num_threads=self._num_threads)
        return RayEngineProcess(self, replace(run, config=config, num_engines=1))

    def close(self) -> None:
        if self._authenticator is not None:
            self._authenticator.stop()
            self._authenticator = None


class RayEngineProcess(EngineProcess):
    """One run of an engine on a node."""

    def __init__(self, engines: RayEngines, run: EngineRun) -> None:
        self._engines = engines
        self._pid: int | None = None
        self._code: int | None = None  # None: it runs
        self._has_ended = threading.Event()
        self._was_asked = False
        self.is_placed = False
        super().__init__(run)

    def _bind(self, launch: EngineLaunch) -> None:
        public, secret = zmq.curve_keypair()
        their_public, their_secret = zmq.curve_keypair()
        self._their_key = their_public
        self._engines.known_keys.add(their_public)
        launch.keys = SocketKeys(public, their_public, their_secret)
        launch.kv_secret = self._engines.kv_secret
        host = self._engines.host
        addresses = []
        for socket in (self.inputs, self.outputs):
            socket.setsockopt(zmq.CURVE_SERVER, 1)
            socket.setsockopt(zmq.CURVE_SECRETKEY, secret)
            socket.setsockopt(zmq.IPV6, int(":" in host))
            socket.bind(f"tcp://[{host}]:*" if ":" in host else f"tcp://{host}:*")
            addresses.append(socket.getsockopt(zmq.LAST_ENDPOINT).rstrip(b"\0").decode())
        launch.input_address, launch.output_address = addresses

    def _spawn(self, launch: EngineLaunch) -> None:
        ray, room = self._engines.ray, self._engines.room
        remote = ray.remote(max_concurrency=EngineActor.NUM_THREADS)(EngineActor)
        options = {"num_cpus": room["CPU"], "num_gpus": room.get("GPU", 0), "max_restarts": 0}
        self._actor = remote.options(scheduling_strategy="SPREAD", **options).remote()
        self.death_fd, self._kept_open = os.pipe()
        message = msgspec.msgpack.encode(launch)
        threading.Thread(target=self._watch, args=(ray, message), name=f"engine-{self.index}", daemon=True).start()

    def _watch(self, ray: Any, launch: bytes) -> None:
        """Starts the process and waits for its end. Then the descriptor closes that the client watches."""
        code = LOST
        try:
            self._pid = ray.get(self._actor.start.remote(launch))
            self.is_placed = True
            code = ray.get(self._actor.wait.remote())
        except Exception as error:  # of Ray: the actor, its node or the cluster is gone
            logger.debug("engine %d is lost: %s", self.index, error)
            self.lost = "its process was lost with its node, or was killed"
        self._code = code
        self.is_placed = True
        self._has_ended.set()
        os.close(self._kept_open)
        self._call(ray.kill, self._actor)  # an actor that has done its work; its room is free for another

    @property
    def pid(self) -> int | None:
        """The process id on its node; None: it is not known yet."""
        return self._pid

    def kill(self) -> None:
        self._call(self._engines.ray.kill, self._actor)

    def ask_to_end(self) -> None:
        if not self._has_ended.is_set() and not self._was_asked:
            self._was_asked = True
            self._call(self._actor.end.remote)

    def _wait(self, grace_seconds: float) -> int:
        if not self._has_ended.wait(grace_seconds):
            self.kill()
            self._has_ended.wait(SECONDS_TO_BE_KILLED)
        self._engines.known_keys.remove(self._their_key)
        return LOST if self._code is None else self._code

    def _call(self, method: Callable[..., Any], *arguments: Any) -> None:
        """A call of Ray, which raises errors of many kinds if the cluster is gone."""
        with contextlib.suppress(Exception):
            method(*arguments)
