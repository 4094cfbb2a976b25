"""A server of either engine as a process: start it, wait until it is healthy, end it and all that it started."""

from __future__ import annotations

import os
import socket
import sys
import time
import urllib.error
import urllib.request
from pathlib import Path
from typing import Any

from peers.machine import processes_of
from service.server import OwnSession

POLL_SECONDS = 0.25
COMMANDS = {
    "ratoon": ["-m", "ratoon", "serve"],
    "vllm": ["-m", "vllm.entrypoints.cli.main", "serve"],
}


class Server(OwnSession):
    """`with Server("ratoon", model, …) as server:` and then `server.url`. ServerFailedError: it did not start."""

    def __init__(
        self, engine: str, model: Path, settings: dict[str, Any], module_path: str, log: Path, start_seconds: float
    ) -> None:
        super().__init__()
        self.log = log
        port = free_port()
        self.url = f"http://127.0.0.1:{port}"
        self._command = [sys.executable, *COMMANDS[engine], str(model), "--host", "127.0.0.1", "--port", str(port)]
        self._command += as_options(settings)
        self._environment = {**os.environ, "PYTHONPATH": module_path, "HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1"}
        self._start_seconds = start_seconds

    def __enter__(self) -> Server:
        self.launch(self._command, self._environment)
        assert self._process is not None
        deadline = time.monotonic() + self._start_seconds
        while not self._is_healthy():
            if self._process.poll() is not None or time.monotonic() > deadline:
                raise self.failure()
            time.sleep(POLL_SECONDS)
        return self

    def cpu_seconds(self) -> tuple[float, float]:
        """Processor time since the start: of the process that serves HTTP, and of all others together."""
        used = processes_of(self.pid)
        own = used.pop(self.pid, 0.0)
        return own, sum(used.values())

    def _is_healthy(self) -> bool:
        try:
            with urllib.request.urlopen(f"{self.url}/health", timeout=5) as answer:
                return bool(answer.status == 200)
        except (urllib.error.URLError, OSError):
            return False


def as_options(settings: dict[str, Any]) -> list[str]:
    """Command-line options: both engines name them after their settings."""
    options: list[str] = []
    for name, value in settings.items():
        option = f"--{name.replace('_', '-')}"
        options += [option] if value is True else [option, str(value)]
    return options


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
