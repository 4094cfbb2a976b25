"""Checks what the texts of requests must match before they are queued, in another process (grammar_process.py).

The process is started with the first grammar, or ahead (`start`), and again if it ends. Findings are kept by content. A
request that was checked gets what the engine needs to compile it without another check (`complete`).
"""

from __future__ import annotations

import threading
import weakref
from collections import Counter, OrderedDict
from collections.abc import Sequence
from concurrent.futures import Future
from itertools import count
from typing import Any

import msgspec

from ratoon.core.errors import QueueFullError, RequestError
from ratoon.core.limited_process import LimitedProcess
from ratoon.core.structured import StructuredOutput, content_of

MODULE = "ratoon.engine.grammar_process"
MAX_KEPT = 512  # findings
MAX_KEPT_BYTES = 64 * 2**20  # of their contents and translations
MAX_WAITING = 256  # checks of one owner

MAX_SECONDS = 5.0  # of processor time, for one grammar
MAX_WAIT_SECONDS = 60.0  # by the clock, from its beginning: the machine may be busy
MAX_MEMORY_BYTES = 256 * 2**20  # of address space, beyond what the process had before
NUM_PLACES = 4  # checks at once


# ---- messages ----


class Limits(msgspec.Struct, frozen=True):
    """Of one check."""

    seconds: float = MAX_SECONDS
    wait_seconds: float = MAX_WAIT_SECONDS
    memory_bytes: int = MAX_MEMORY_BYTES


class Vocabulary(msgspec.Struct, frozen=True):
    """What a process is started with."""

    tokenizer: str  # as the `tokenizers` library writes it
    vocab_size: int
    ends: list[int]  # tokens that end a text
    limits: Limits = Limits()
    num_places: int = NUM_PLACES


class Check(msgspec.Struct, frozen=True):
    number: int
    owner: str | None
    asked: StructuredOutput


class Finding(msgspec.Struct, frozen=True):
    error: tuple[str, str, str] | None = None  # field in structured_output, problem, expected
    num_bytes: int = 0  # that the compiled grammar took
    is_large: bool = False
    translation: str | None = None  # see StructuredOutput
    is_final: bool = True  # the same check would find the same again


class Answer(msgspec.Struct, frozen=True):
    number: int
    finding: Finding


# ---- the front end's side ----


class GrammarChecks:
    """To be used from any thread."""

    def __init__(self, tokenizer: Any, vocab_size: int, ends: Sequence[int] = (), limits: Limits | None = None) -> None:
        self._tokenizer = tokenizer
        self._vocab_size = vocab_size
        self._ends = list(ends)
        self._limits = Limits() if limits is None else limits
        self._lock = threading.RLock()  # a check that fails at once is noted by the thread that asked
        self._kept: OrderedDict[bytes, Finding] = OrderedDict()  # the least recently used first
        self._num_kept_bytes = 0
        self._under_way: dict[bytes, Future[Finding]] = {}
        self._num_waiting: Counter[str | None] = Counter()
        self._process: _Process | None = None

    def start(self) -> None:
        """Start the process ahead of the first grammar."""
        with self._lock:
            self._running()

    def check(self, asked: StructuredOutput, owner: str | None = None) -> Future[Finding]:
        """The values of `asked` were verified. One that is asked for again while it is checked is checked once. The
        future raises RequestError where a later check may find something else. QueueFullError: too many of this owner
        wait."""
        key = content_of(asked)
        with self._lock:
            kept = self._find(key)
            if kept is not None:
                done: Future[Finding] = Future()
                done.set_result(kept)
                return done
            future = self._under_way.get(key)
            if future is not None:
                return future
            if self._num_waiting[owner] >= MAX_WAITING:
                problem = f"{MAX_WAITING} grammars wait to be compiled"
                raise QueueFullError("structured_output", problem, "send it again later")
            future = self._under_way[key] = Future()
            self._num_waiting[owner] += 1
            future.add_done_callback(lambda done: self._note(key, owner, done))
            self._running().submit(future, owner, asked)
            return future

    def verify(self, asked: StructuredOutput, owner: str | None = None) -> None:
        """RequestError: it is malformed, unsatisfiable, not supported or too large. Waits for the check, if there was
        none before."""
        error = self.check(asked, owner).result().error
        if error is not None:
            raise _error_of(error)

    def complete(self, asked: StructuredOutput) -> StructuredOutput:
        """With what was found when it was checked."""
        with self._lock:
            found = self._find(content_of(asked))
        if found is None:
            return asked
        return msgspec.structs.replace(
            asked, translation=found.translation, num_bytes=found.num_bytes, is_large=found.is_large
        )

    def close(self) -> None:
        with self._lock:
            process, self._process = self._process, None
        if process is not None:
            process.close()

    def _running(self) -> _Process:
        if self._process is None or self._process.has_ended:
            # A process that is no longer used ends with the object that started it
            self._process = _Process(self._tokenizer, self._vocab_size, self._ends, self._limits)
            weakref.finalize(self, self._process.close)
        return self._process

    def _note(self, key: bytes, owner: str | None, done: Future[Finding]) -> None:
        with self._lock:
            self._under_way.pop(key, None)
            self._num_waiting[owner] -= 1
            if not self._num_waiting[owner]:
                del self._num_waiting[owner]
            if done.exception() is None:
                self._keep(key, done.result())

    def _find(self, key: bytes) -> Finding | None:
        found = self._kept.get(key)
        if found is not None:
            self._kept.move_to_end(key)
        return found

    def _keep(self, key: bytes, finding: Finding) -> None:
        self._kept[key] = finding
        self._num_kept_bytes += _size_of(key, finding)
        while len(self._kept) > MAX_KEPT or (self._num_kept_bytes > MAX_KEPT_BYTES and len(self._kept) > 1):
            self._num_kept_bytes -= _size_of(*self._kept.popitem(last=False))


def _size_of(key: bytes, finding: Finding) -> int:
    return len(key) + len(finding.translation or "")


class _Process:
    """One run of the process, and the checks that it has. One thread writes to it, another one reads."""

    def __init__(self, tokenizer: Any, vocab_size: int, ends: list[int], limits: Limits) -> None:
        self._vocabulary = tokenizer, vocab_size, ends, limits
        self._child = LimitedProcess(MODULE)
        self._lock = threading.Lock()
        self._waiting: dict[int, Future[Finding]] = {}
        self._numbers = count()
        self._unsent: list[bytes] = []
        self._has_unsent = threading.Condition(self._lock)
        self.has_ended = False
        for work in (self._send, self._receive):
            threading.Thread(target=work, name="grammar checks", daemon=True).start()

    def submit(self, future: Future[Finding], owner: str | None, asked: StructuredOutput) -> None:
        with self._lock:
            if not self.has_ended:
                number = next(self._numbers)
                self._waiting[number] = future
                self._unsent.append(msgspec.msgpack.encode(Check(number, owner, asked)))
                self._has_unsent.notify()
                return
        future.set_exception(_ended())

    def close(self) -> None:
        self._end()
        self._child.close()

    def _send(self) -> None:
        tokenizer, vocab_size, ends, limits = self._vocabulary
        try:
            vocabulary = Vocabulary(tokenizer.backend.to_str(), vocab_size, ends, limits)
            self._child.send(msgspec.msgpack.encode(vocabulary))
            while True:
                with self._lock:
                    while not self._unsent and not self.has_ended:
                        self._has_unsent.wait()
                    if self.has_ended:
                        return
                    frames, self._unsent = self._unsent, []
                for frame in frames:
                    self._child.send(frame)
        except (OSError, ValueError):  # it has ended, or was closed
            self._end()

    def _receive(self) -> None:
        try:
            while (frame := self._child.receive()) is not None:
                answer = msgspec.msgpack.decode(frame, type=Answer)
                with self._lock:
                    future = self._waiting.pop(answer.number, None)
                if future is None:
                    continue
                if answer.finding.error is not None and not answer.finding.is_final:
                    future.set_exception(_error_of(answer.finding.error))
                else:
                    future.set_result(answer.finding)
        except (OSError, ValueError):
            pass
        finally:
            self._end()

    def _end(self) -> None:
        with self._lock:
            self.has_ended = True
            futures = list(self._waiting.values())
            self._waiting.clear()
            self._has_unsent.notify_all()
        for future in futures:
            future.set_exception(_ended())


def _error_of(error: tuple[str, str, str]) -> RequestError:
    field, problem, expected = error
    if not field:
        return RequestError("structured_output", problem, expected)
    return RequestError(field, problem, expected).inside("structured_output")


def _ended() -> RequestError:
    return RequestError("structured_output", "the process that compiles grammars has ended", "send it again")
