"""Child processes that read programs and data of strangers: chat templates, grammars and images of requests.

A child is a new interpreter, not a fork of the caller. It has no open files but its two pipes and nothing of the
caller's environment; messages are frames of bytes. It ends when the caller closes its pipe, and so with the caller.
What a child may use is limited by the system: processor time, memory, files and processes.
"""

from __future__ import annotations

import os
import resource
import signal
import struct
import sys
from contextlib import suppress
from pathlib import Path
from subprocess import PIPE, Popen
from typing import IO

MAX_FRAME_BYTES = 64 * 2**20
# What the interpreter may need to start, and the time zone, which a template may use.
KEPT_VARIABLES = ("LD_LIBRARY_PATH", "DYLD_LIBRARY_PATH", "TZ")
START = "import sys; sys.path[:] = sys.argv[1:]; from {module} import serve; serve()"


class LimitedProcess:
    """A child that runs `serve` of a module. It sets its own limits (`limit_resources`) once it has imported what it
    needs."""

    def __init__(self, module: str) -> None:
        package = str(Path(__file__).parents[2])
        path = [package, *(entry for entry in sys.path if os.path.isabs(entry))]
        self.process = Popen(
            [sys.executable, "-I", "-S", "-c", START.format(module=module), *path],
            stdin=PIPE,
            stdout=PIPE,
            env={name: os.environ[name] for name in KEPT_VARIABLES if name in os.environ},
            cwd="/",
            start_new_session=True,  # the parent handles interrupts from the terminal
        )

    def send(self, frame: bytes | memoryview) -> None:
        """OSError: it has ended."""
        assert self.process.stdin is not None
        write_frame(self.process.stdin, frame)

    def receive(self) -> bytes | None:
        """None: it has ended."""
        assert self.process.stdout is not None
        return read_frame(self.process.stdout)

    def close(self) -> None:
        self.process.kill()
        with suppress(OSError), self.process:  # closes the pipes, and waits for the end
            pass


def reason_of(status: int) -> str:
    """Why a process ended, from its return code."""
    return signal.Signals(-status).name if status < 0 else f"status {status}"


# ---- in the child ----


def silence_errors() -> None:
    """What is written to the standard error goes nowhere."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stderr.fileno())


def limit_resources(max_address_space: int) -> None:
    """Allows this process no files, no further processes, and so many bytes of address space. macOS does not enforce
    the latter: there only time and the size of the output are limited."""
    limits = [(resource.RLIMIT_CORE, 0), (resource.RLIMIT_FSIZE, 0), (resource.RLIMIT_NPROC, 0)]
    if sys.platform == "linux":
        limits.append((resource.RLIMIT_AS, max_address_space))
    for kind, limit in limits:
        resource.setrlimit(kind, (limit, limit))


def address_space() -> int:
    """Bytes that this process has taken of it so far. 0 on macOS, where it is not limited."""
    try:
        with open("/proc/self/statm") as file:
            return int(file.read().split()[0]) * os.sysconf("SC_PAGE_SIZE")
    except OSError:
        return 0


def limit_processor_time(seconds: float) -> None:
    """Limits the time of the processor from now on; SIGPROF then ends the process. 0: no limit."""
    signal.setitimer(signal.ITIMER_PROF, seconds)


# ---- frames: their length, then their bytes ----


def write_frame(pipe: IO[bytes], frame: bytes | memoryview) -> None:
    pipe.write(struct.pack("<Q", len(frame)))
    pipe.write(frame)
    pipe.flush()


def read_frame(pipe: IO[bytes]) -> bytes | None:
    """None: the other side closed the pipe."""
    head = _read(pipe, 8)
    if head is None:
        return None
    (length,) = struct.unpack("<Q", head)
    return _read(pipe, length) if length <= MAX_FRAME_BYTES else None


def _read(pipe: IO[bytes], length: int) -> bytes | None:
    """Reads exactly `length` bytes, also from a pipe without a buffer, which returns what there is."""
    parts: list[bytes] = []
    while length > 0:
        part = pipe.read(length)
        if not part:
            return None
        parts.append(part)
        length -= len(part)
    return b"".join(parts)
