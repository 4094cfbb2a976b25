"""The actor that runs an engine process on its node of a Ray cluster. The front end's side is ray_engines.py."""

from __future__ import annotations

import contextlib
import os
from dataclasses import replace
from subprocess import Popen

import msgspec

from ratoon.core.config import EngineConfig
from ratoon.core.messages import LAST_WORD, EngineLaunch
from ratoon.core.prepared import prepared
from ratoon.core.processes import start_process
from ratoon.distributed.cluster import in_url

AT_NODE = "tcp://NODE:0"  # where an engine is to listen for others: any port of the address that its node has for Ray


class EngineActor:
    """Its arguments and results are data. When it ends, however it ends, the process's standard input closes, and the
    process ends."""

    NUM_THREADS = 3  # `wait` takes one for as long as the process runs

    def __init__(self) -> None:
        self._process: Popen[bytes] | None = None

    def start(self, launch: bytes) -> int:
        """Starts the process. Returns its id."""
        # A pipe that a parent on the same host would watch; here the parent is this actor, which waits instead.
        unread, kept_open = os.pipe()
        try:
            message = msgspec.msgpack.decode(launch, type=prepared(EngineLaunch))
            message.config = _at_this_node(message.config)
            module = "ratoon.engine.processes.core_process"
            self._process = start_process(module, [str(kept_open)], [kept_open], message)
        finally:
            os.close(kept_open)
            os.close(unread)
        return self._process.pid

    def wait(self) -> int:
        """Returns the process's exit code, when it has ended."""
        assert self._process is not None
        return self._process.wait()

    def end(self) -> None:
        """Asks the process to end; its parent goes on."""
        if self._process is None or self._process.stdin is None or self._process.stdin.closed:
            return
        with contextlib.suppress(BrokenPipeError):
            self._process.stdin.write(LAST_WORD)
            self._process.stdin.close()


def _at_this_node(config: EngineConfig) -> EngineConfig:
    """The settings of an engine that listens for others where they ask for it, at the address of its node."""
    cache = config.cache
    options, encoder_listen = cache.kv_connector_options, cache.encoder_listen
    if AT_NODE not in (options.get("listen"), encoder_listen):
        return config
    import ray

    here = f"tcp://{in_url(ray.util.get_node_ip_address())}:0"
    if options.get("listen") == AT_NODE:
        options = {**options, "listen": here}
    if encoder_listen == AT_NODE:
        encoder_listen = here
    return config.with_(cache=replace(cache, kv_connector_options=options, encoder_listen=encoder_listen))
