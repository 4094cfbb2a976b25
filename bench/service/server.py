"""`ratoon serve` as a process of its own: start it, see what it and its engines use, end it.

Linux alone: figures come from /proc, through peers/machine.py.
"""

from __future__ import annotations

import os
import resource
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from urllib.parse import urlsplit

from export_hf import CACHE_FOLDER
from peers.machine import PROC, processes_of
from peers.process import BENCH_FOLDER, EngineFailedError, engine_environment

STUB = "bench.stub_executor:StubExecutor"
START_SECONDS = 300.0
END_SECONDS = 20.0
SHOWN_LINES = 40  # of the log of a server that did not start: the cause may be that of one of its processes
WATCH_INTERVAL = 0.2
PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")


class ServerFailedError(EngineFailedError):
    """A server did not start, or ended on its own; the message has the end of its log."""


@dataclass(frozen=True)
class Usage:
    """What a process has used: processor time since its start, memory now."""

    cpu_seconds: float
    memory_bytes: int


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

    def __init__(
        self, options: list[str], environment: dict[str, str] | None = None, profile: Path | None = None
    ) -> None:
        super().__init__()
        launcher = ["-m", "ratoon"] if profile is None else ["-m", "service.sampled", str(profile.resolve())]
        self._command = [sys.executable, *launcher, "serve", *options, "--port", "0"]
        # The root is where engine processes find bench.stub_executor, the folder where a profiled server finds service.
        path = os.pathsep.join([str(BENCH_FOLDER.parent), str(BENCH_FOLDER)])
        self._environment = {**engine_environment("ratoon", 0), "PYTHONPATH": path, **(environment or {})}
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

    def usage(self) -> dict[str, Usage]:
        """By role: "server", "engine" (all of them together)."""
        found: dict[str, Usage] = {}
        for pid, seconds in processes_of(self.pid).items():
            try:
                role = "engine" if b"core_process" in (PROC / str(pid) / "cmdline").read_bytes() else "server"
                memory = int((PROC / str(pid) / "statm").read_text().split()[1]) * PAGE_BYTES
            except OSError:
                continue  # ended meanwhile
            before = found.get(role, Usage(0.0, 0))
            found[role] = Usage(before.cpu_seconds + seconds, before.memory_bytes + memory)
        return found

    def toggle_profile(self) -> None:
        """Begin to sample, or end it and write what was found."""
        os.kill(self.pid, signal.SIGUSR2)


@dataclass
class UsageRecord:
    """What was used over a phase, by role."""

    begin: dict[str, Usage] = field(default_factory=dict)
    peak_memory: dict[str, int] = field(default_factory=dict)
    end: dict[str, Usage] = field(default_factory=dict)
    seconds: float = 0.0

    def cpu_seconds(self, role: str) -> float:
        return self.end[role].cpu_seconds - self.begin[role].cpu_seconds

    def as_dict(self) -> dict[str, dict[str, float]]:
        return {
            role: {
                "cpu_seconds": self.cpu_seconds(role),
                "memory_begin": self.begin[role].memory_bytes,
                "memory_peak": self.peak_memory[role],
                "memory_end": self.end[role].memory_bytes,
            }
            for role in self.begin
        }


@contextmanager
def watch_usage(server: ServerProcess) -> Iterator[UsageRecord]:
    """Looks at the processes while the block runs; the record is whole after it."""
    record, stop = UsageRecord(), threading.Event()

    def look() -> dict[str, Usage]:
        usage = server.usage()
        for role, used in usage.items():
            record.peak_memory[role] = max(record.peak_memory.get(role, 0), used.memory_bytes)
        return usage

    def keep_looking() -> None:
        while not stop.wait(WATCH_INTERVAL):
            look()

    record.begin, begin = look(), time.monotonic()
    thread = threading.Thread(target=keep_looking, daemon=True)
    thread.start()
    try:
        yield record
    finally:
        stop.set()
        thread.join()
        record.seconds = time.monotonic() - begin
        record.end = look()


def allow_many_files() -> None:
    """A thousand streams need as many descriptors, here and in the processes that are started."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = 65536 if hard == resource.RLIM_INFINITY else min(hard, 65536)
    if soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
