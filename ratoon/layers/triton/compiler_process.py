"""A process that compiles kernels into Triton's cache on disk, from where this one loads them: the side that asks for
them; the program is compile_server.py. Imports neither torch nor Triton, so that it can be started before they are.

It is started as a new program. A fork of this process would have copies of its locks, held by threads that it does not
have, and CUDA. Whatever happens to it, kernels that it does not deliver are compiled here.
"""

from __future__ import annotations

import json
import logging
import os
import queue
import signal
import struct
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from contextlib import suppress
from typing import TypeAlias

import msgspec

from ratoon.core.prepared import prepared

logger = logging.getLogger(__name__)

PROGRAM = """
import json, sys
sys.path[:] = json.loads(sys.argv[1])
from ratoon.layers.triton.compile_server import main
main()
"""
SECONDS_OF_SILENCE = 30.0  # after which it is taken to hang. It gives a sign every second, but not while it imports
MARK = "complete"
_POLL = 0.5  # seconds
LENGTH = struct.Struct("<I")  # of a message, in front of it


Number: TypeAlias = bool | int | float | str | None
Option: TypeAlias = Number | tuple[str | int | tuple[str, ...], ...]


class Message(msgspec.Struct, frozen=True, tag=True):
    pass


class Request(Message, frozen=True):
    """A kernel, as Triton's compiler takes it."""

    digest: str  # of its key; told when its compilation has ended, well or not
    module: str
    name: str
    capability: int
    signature: dict[str, str]
    constants: dict[tuple[int, ...], Number]
    attrs: dict[tuple[int, ...], list[list[str | int]]]
    options: dict[str, Option]
    is_urgent: bool


class Launch(Message, frozen=True):
    """A launch that is expected. `function` of `module` is called with `arguments`. It returns the kernel, for each
    argument that is no constant Triton's name of its type and whether it is a multiple of 16, and by name constants and
    options."""

    module: str
    function: str
    arguments: dict[str, Number]
    capability: int


class Modules(Message, frozen=True):
    """Modules to be imported while there is nothing else to do."""

    names: tuple[str, ...]


class Finish(Message, frozen=True):
    """End when everything is compiled. `mark`: a folder of Triton's cache that gets a file MARK then."""

    mark: str | None = None


class CompilerProcess:
    """Use `wait_for` after `send`. An end of this process ends that one."""

    def __init__(self, max_processes: int, command: Sequence[str] = ()) -> None:
        """`command`: the program to run, for tests. Raises OSError if it can't be started."""
        if not sys.executable or getattr(sys, "frozen", False):  # a program that would start itself again
            raise OSError("there is no Python interpreter but in this program")
        arguments = [sys.executable, "-c", PROGRAM, json.dumps([os.path.abspath(path) for path in sys.path])]
        self._process = subprocess.Popen(
            command or [*arguments, str(max_processes)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            env={**os.environ, "CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"},
            start_new_session=True,  # a group of its own, which is ended as a whole, and not by Ctrl-C
        )
        self._messages: queue.SimpleQueue[Message] = queue.SimpleQueue()
        self._events: dict[str, threading.Event] = {}
        self._lock = threading.Lock()
        self._has_ended = False
        self._finishing = False
        self._last_sign = time.monotonic()
        threading.Thread(target=self._write, name="ratoon-compiler-requests", daemon=True).start()
        threading.Thread(target=self._listen, name="ratoon-compiler-results", daemon=True).start()

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def has_finished(self) -> bool:
        """Whether it was told to finish, and has ended."""
        return self._finishing and self._has_ended

    def send(self, message: Request | Launch | Modules | Finish) -> None:
        """Never waits."""
        if isinstance(message, Finish):
            self._finishing = True
        self._messages.put(message)

    def wait_for(self, digest: str) -> None:
        """Waits until the request's compilation has ended. Returns without it if the process has ended or hangs."""
        event = self._event(digest)
        begin = time.monotonic()
        while not event.wait(_POLL):
            if time.monotonic() - max(begin, self._last_sign) > SECONDS_OF_SILENCE:
                self._give_up(f"gave no sign for {SECONDS_OF_SILENCE:.0f} s")

    def close(self) -> None:
        """End it now."""
        self._finishing = True
        self._kill()

    def _give_up(self, reason: str) -> None:
        with self._lock:
            is_first = not self._has_ended
            self._has_ended = True
            events = list(self._events.values())
        if is_first and not self._finishing:
            logger.warning("the process that compiles kernels %s: they are compiled by this one", reason)
        for event in events:
            event.set()
        self._kill()

    def _kill(self) -> None:
        with suppress(OSError):  # it has ended
            if self._process.poll() is None:
                os.killpg(self._process.pid, signal.SIGKILL)

    def _event(self, digest: str) -> threading.Event:
        with self._lock:
            event = self._events.setdefault(digest, threading.Event())
            if self._has_ended:
                event.set()
            return event

    def _write(self) -> None:
        stdin = self._process.stdin
        assert stdin is not None
        while True:
            message = self._messages.get()
            try:
                data = encode(message)
            except (TypeError, ValueError) as error:  # of a constant
                logger.debug("%s can't be sent: %s", message, error)
                if isinstance(message, Request):
                    self._event(message.digest).set()
                continue
            try:
                stdin.write(LENGTH.pack(len(data)) + data)
                stdin.flush()
            except (OSError, ValueError):  # it has ended, which the other thread notices
                return

    def _listen(self) -> None:
        assert self._process.stdout is not None
        with suppress(OSError, ValueError):
            for line in self._process.stdout:
                self._last_sign = time.monotonic()
                if digest := line.decode(errors="replace").strip():
                    self._event(digest).set()
        status = self._process.wait()
        self._give_up(f"has ended with status {status}")


def encode(message: Message) -> bytes:
    """Raises TypeError or ValueError if the other side would not read the same."""
    data = _encoder.encode(message)
    if decode(data) != message:
        raise ValueError("holds other things than numbers, strings and tuples of them")
    return data


def decode(data: bytes) -> Request | Launch | Modules | Finish:
    return _decoder.decode(data)


_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder(prepared(Request | Launch | Modules | Finish))
