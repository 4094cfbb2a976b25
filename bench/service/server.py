"""`ratoon serve` as a process of its own: start it, see what it and its engines use, end it.

Linux alone: figures come from /proc, through peers/machine.py.
"""

from __future__ import annotations

import json
import os
import resource
import signal
import subprocess
import sys
import tempfile
import threading
from contextlib import suppress
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from export_hf import CACHE_FOLDER
from peers.machine import PROC, processes_of
from peers.process import BENCH_FOLDER, EngineFailedError, engine_environment

STUB = "bench.stub_executor:StubExecutor"
START_SECONDS = 300.0
END_SECONDS = 20.0
SHOWN_LINES = 40  # of the log of a server that did not start: the cause may be that of one of its processes


class ServerFailedError(EngineFailedError):
    """A server did not start, or ended on its own; the message has the end of its log."""


class OwnSession:
    """A server as a process that leads a session: it is ended together with all that it started."""

    log: Path

    def __init__(self) -> None:
        self._process: subprocess.Popen[str] | None = None

    def launch(self, command: list[str], environment: dict[str, str], stdout: int | None = None) -> None:
        """Starts it. What it prints goes to the log, unless `stdout` is a pipe."""
        self.log.parent.mkdir(parents=True, exist_ok=True)
        with self.log.open("wb") as log:
            self._process = subprocess.Popen(
                command, stdout=stdout or log, stderr=log, env=environment, text=True, start_new_session=True
            )

    def failure(self) -> ServerFailedError:
        """Ends it, and returns the error of a start that failed."""
        self.__exit__()
        tail = "\n".join(self.log.read_text(encoding="utf-8", errors="replace").splitlines()[-SHOWN_LINES:])
        return ServerFailedError(f"the server did not start; its log, {self.log}, ends with:\n{tail}")

    def __exit__(self, *error: object) -> None:
        process, self._process = self._process, None
        if process is None:
            return
        everything = set(processes_of(process.pid)) | {process.pid}
        process.send_signal(signal.SIGTERM)
        with suppress(subprocess.TimeoutExpired):
            process.wait(END_SECONDS)
        for pid in everything & (set(processes_of(process.pid)) | {process.pid}):
            if process.poll() is None or pid != process.pid:
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
        process.wait()
        if process.stdout is not None:
            process.stdout.close()

    @property
    def pid(self) -> int:
        assert self._process is not None, "the server is not running"
        return self._process.pid


class ServerProcess(OwnSession):
    """`with ServerProcess([MODEL, "--max-num-seqs", "8"]) as server:` and then `server.host`, `server.port`."""

    log = CACHE_FOLDER / "logs" / "server.log"

    def __init__(self, options: list[str], environment: dict[str, str] | None = None) -> None:
        super().__init__()
        self._command = [sys.executable, "-m", "ratoon", "serve", *options, "--port", "0"]
        # The root is where engine processes find bench.stub_executor.
        # The package of this repository, before what the host has in its own folders.
        path = os.pathsep.join([str(BENCH_FOLDER.parent), *filter(None, [os.environ.get("PYTHONPATH")])])
        own = {"PYTHONPATH": path, **(environment or {})}
        self._environment = {**engine_environment("ratoon", 0), **own}
        self.host, self.port = "", 0

    def __enter__(self) -> ServerProcess:
        allow_many_files()
        self.launch(self._command, self._environment, subprocess.PIPE)
        assert self._process is not None and self._process.stdout is not None
        # A start that hangs would block the read below; the end of the process unblocks it.
        patience = threading.Timer(START_SECONDS, self._process.kill)
        patience.start()
        line = self._process.stdout.readline()  # "http://HOST:PORT serves MODEL; …"
        patience.cancel()
        if not line:
            raise self.failure()
        address = urlsplit(line.split()[0])
        self.host, self.port = str(address.hostname), int(address.port or 0)
        return self

    def cpu_seconds(self) -> dict[str, float]:
        """Returns processor time since the start by role: "server", and "engine" for all engines together."""
        found = {"server": 0.0, "engine": 0.0}
        for pid, seconds in processes_of(self.pid).items():
            with suppress(OSError):  # it has ended meanwhile
                is_engine = b"core_process" in (PROC / str(pid) / "cmdline").read_bytes()
                found["engine" if is_engine else "server"] += seconds
        return found


def send_load(
    url: str, options: list[str], seconds: float, environment: dict[str, str] | None = None
) -> dict[str, Any]:
    """Returns the summary of `ratoon bench serve`, which runs as a process of its own. ServerFailedError: it has
    none."""
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "load.json"
        command = [sys.executable, "-m", "ratoon", "bench", "serve", "--url", url, "--json", str(out), *options]
        done = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=seconds, check=False)
        if not out.exists():
            raise ServerFailedError(f"the load generator failed: {done.stderr[-1500:]}")
        (result,) = json.loads(out.read_text(encoding="utf-8"))["rounds"]
    summary: dict[str, Any] = result["summary"]
    return summary


def allow_many_files() -> None:
    """A thousand streams need as many descriptors, here and in the processes that are started."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = 65536 if hard == resource.RLIM_INFINITY else min(hard, 65536)
    if soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
