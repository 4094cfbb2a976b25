"""A server of either engine as a process: start it, wait until it is healthy, end it and all that it started."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from contextlib import suppress
from pathlib import Path
from typing import Any

from peers.machine import processes_of
from peers.process import EngineFailedError

POLL_SECONDS = 0.25
END_SECONDS = 20.0
SHOWN_LINES = 40  # of the log of a server that did not start: the cause may be that of one of its processes
COMMANDS = {
    "ratoon": ["-m", "ratoon", "serve"],
    "vllm": ["-m", "vllm.entrypoints.cli.main", "serve"],
}


class Server:
    """`with Server("ratoon", model, …) as server:` and then `server.url`. EngineFailedError: it did not start."""

    def __init__(
        self, engine: str, model: Path, settings: dict[str, Any], module_path: str, log: Path, start_seconds: float
    ) -> None:
        self.engine = engine
        self.log = log
        port = free_port()
        self.url = f"http://127.0.0.1:{port}"
        self._command = [sys.executable, *COMMANDS[engine], str(model), "--host", "127.0.0.1", "--port", str(port)]
        self._command += as_options(settings)
        self._environment = {**os.environ, "PYTHONPATH": module_path, "HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1"}
        self._start_seconds = start_seconds
        self._process: subprocess.Popen[bytes] | None = None

    def __enter__(self) -> Server:
        self.log.parent.mkdir(parents=True, exist_ok=True)
        with self.log.open("wb") as log:
            self._process = subprocess.Popen(
                self._command, stdout=log, stderr=log, env=self._environment, start_new_session=True
            )
        deadline = time.monotonic() + self._start_seconds
        while not self._is_healthy():
            if self._process.poll() is not None or time.monotonic() > deadline:
                self.__exit__()
                tail = "\n".join(self.log.read_text(encoding="utf-8", errors="replace").splitlines()[-SHOWN_LINES:])
                raise EngineFailedError(f"the server of {self.engine} did not start; its log ends with:\n{tail}")
            time.sleep(POLL_SECONDS)
        return self

    def __exit__(self, *error: object) -> None:
        process, self._process = self._process, None
        if process is None:
            return
        started = set(processes_of(process.pid)) | {process.pid}
        process.send_signal(signal.SIGTERM)
        with suppress(subprocess.TimeoutExpired):
            process.wait(END_SECONDS)
        for pid in started & (set(processes_of(process.pid)) | {process.pid}):
            if process.poll() is None or pid != process.pid:
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
        process.wait()

    def cpu_seconds(self) -> tuple[float, float]:
        """Processor time since the start: of the process that serves HTTP, and of all others together."""
        assert self._process is not None, "the server is not running"
        used = processes_of(self._process.pid)
        own = used.pop(self._process.pid, 0.0)
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
