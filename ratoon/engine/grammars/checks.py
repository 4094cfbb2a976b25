"""Checks what the texts of requests must match before they are queued, in another process (check_process.py).

The process is started with the first grammar, or ahead (`start`), and again if it ends. Findings are kept by content. A
request that was checked gets what the engine needs to compile it without another check (`complete`).
"""

from __future__ import annotations

import threading
import weakref
from collections import Counter, OrderedDict
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from itertools import count
from typing import Any, TypeAlias

import msgspec

from ratoon.core.errors import QueueFullError, RequestError
from ratoon.core.limited_process import LimitedProcess
from ratoon.core.prepared import prepared
from ratoon.core.shared_work import SharedWork
from ratoon.core.structured import StructuredOutput, content_of

MODULE = "ratoon.engine.grammars.check_process"
MAX_KEPT = 512  # findings
MAX_KEPT_BYTES = 64 * 2**20  # of their contents and translations
MAX_WAITING = 256  # checks of one owner

MAX_SECONDS = 5.0  # of processor time, for one grammar
MAX_WAIT_SECONDS = 60.0  # by the clock, from its beginning: the machine may be busy
MAX_MEMORY_BYTES = 256 * 2**20  # of address space, beyond what the process had before
IDLE_SECONDS = 2.0  # that a process waits for another grammar of its owner
QUIET_SECONDS = 0.2  # without a check, after which a process is made ready for that of any owner
NUM_PLACES = 4  # checks at once

_Key: TypeAlias = tuple[str | None, bytes]  # the owner, and the content of what is checked


# ---- messages ----


class Limits(msgspec.Struct, frozen=True):
    """The limits of one check, and of the process that waits for the next."""

    seconds: float = MAX_SECONDS
    wait_seconds: float = MAX_WAIT_SECONDS
    memory_bytes: int = MAX_MEMORY_BYTES
    idle_seconds: float = IDLE_SECONDS
    quiet_seconds: float = QUIET_SECONDS


class Vocabulary(msgspec.Struct, frozen=True):
    """What a process is started with."""

    tokenizer: str  # as the `tokenizers` library writes it
    vocab_size: int
    ends: list[int]  # tokens that end a text
    limits: Limits = Limits()
    num_places: int = NUM_PLACES


class Check(msgspec.Struct, frozen=True, tag=True):
    number: int
    owner: str | None
    asked: StructuredOutput


class Cancellation(msgspec.Struct, frozen=True, tag=True):
    """No caller waits for a check any longer."""

    number: int  # of the check


class Finding(msgspec.Struct, frozen=True):
    error: tuple[str, str, str] | None = None  # field in structured_output, problem, expected
    num_bytes: int = 0  # that the compiled grammar took
    is_large: bool = False
    translation: str | None = None  # see StructuredOutput
    is_final: bool = True  # the same check would find the same again


class CheckResult(msgspec.Struct, frozen=True):
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
        self._under_way: dict[_Key, SharedWork[Finding]] = {}
        self._counted: set[SharedWork[Finding]] = set()  # those in the next line
        self._num_waiting: Counter[str | None] = Counter()
        self._process: _Process | None = None

    def start(self) -> None:
        """Start the process ahead of the first grammar."""
        with self._lock:
            self._running()

    def check(self, asked: StructuredOutput, owner: str | None = None) -> Future[Finding]:
        """The values of `asked` were verified. One that its owner asks for again while it is checked is checked once;
        another owner's does not wait behind this one's. The future raises RequestError where a later check may find
        something else. A caller that no longer waits cancels it; if no other one waits, the check is ended.
        QueueFullError: too many of this owner wait."""
        content = content_of(asked)
        with self._lock:
            kept = self._find(content)
            if kept is not None:
                done: Future[Finding] = Future()
                done.set_result(kept)
                return done
            under_way = self._under_way.get((owner, content))
            joined = None if under_way is None else under_way.join()
            if joined is not None:
                return joined
            if self._num_waiting[owner] >= MAX_WAITING:
                problem = f"{MAX_WAITING} grammars wait to be compiled"
                raise QueueFullError("structured_output", problem, "send it again later")
            return self._begin((owner, content), asked)

    def _begin(self, key: _Key, asked: StructuredOutput) -> Future[Finding]:
        owner, content = key
        process = self._running()
        number = process.next_number()

        def abandon() -> None:
            self._leave(key, work)
            process.cancel(number)

        def settle(found: Finding | RequestError) -> None:
            if isinstance(found, Finding):
                with self._lock:
                    self._keep(content, found)
            self._leave(key, work)
            if isinstance(found, Finding):
                work.set_result(found)
            else:
                work.set_exception(found)

        work: SharedWork[Finding] = SharedWork(abandon)
        future = work.join()
        assert future is not None
        self._under_way[key] = work
        self._counted.add(work)
        self._num_waiting[owner] += 1
        process.submit(Check(number, owner, asked), settle)
        return future

    def _leave(self, key: _Key, work: SharedWork[Finding]) -> None:
        """It is no longer under way. Called twice where its last caller leaves while its result comes."""
        owner, _ = key
        with self._lock:
            if work not in self._counted:
                return
            self._counted.remove(work)
            if self._under_way.get(key) is work:  # not another one, which was begun when this one was abandoned
                del self._under_way[key]
            self._num_waiting[owner] -= 1
            if not self._num_waiting[owner]:
                del self._num_waiting[owner]

    def verify(self, asked: StructuredOutput, owner: str | None = None) -> None:
        """RequestError: it is malformed, unsatisfiable, not supported or too large. Waits for the check, if there was
        none before."""
        future = self.check(asked, owner)
        try:
            error = future.result().error
        finally:
            future.cancel()  # if this thread was interrupted
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

    def _find(self, key: bytes) -> Finding | None:
        found = self._kept.get(key)
        if found is not None:
            self._kept.move_to_end(key)
        return found

    def _keep(self, key: bytes, finding: Finding) -> None:
        if key in self._kept:  # another owner's check found it
            return
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
        self._waiting: dict[int, Callable[[Finding | RequestError], None]] = {}  # by number
        self._numbers = count()
        self._unsent: list[Check | Cancellation] = []
        self._has_unsent = threading.Condition(self._lock)
        self.has_ended = False
        for work in (self._send, self._receive):
            threading.Thread(target=work, name="grammar checks", daemon=True).start()

    def next_number(self) -> int:
        return next(self._numbers)

    def submit(self, check: Check, settle: Callable[[Finding | RequestError], None]) -> None:
        """`settle` is called once, from any thread, unless it is cancelled before."""
        with self._lock:
            if not self.has_ended:
                self._waiting[check.number] = settle
                self._unsent.append(check)
                self._has_unsent.notify()
                return
        settle(_ended())

    def cancel(self, number: int) -> None:
        with self._lock:
            if self._waiting.pop(number, None) is None or self.has_ended:
                return
            unsent = [job for job in self._unsent if job.number != number]
            if len(unsent) == len(self._unsent):
                unsent.append(Cancellation(number))
                self._has_unsent.notify()
            self._unsent = unsent

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
                    jobs, self._unsent = self._unsent, []
                for job in jobs:
                    self._child.send(msgspec.msgpack.encode(job))
        except (OSError, ValueError):  # it has ended, or was closed
            self._end()

    def _receive(self) -> None:
        try:
            while (frame := self._child.receive()) is not None:
                answer = msgspec.msgpack.decode(frame, type=prepared(CheckResult))
                with self._lock:
                    settle = self._waiting.pop(answer.number, None)
                if settle is None:
                    continue
                if answer.finding.error is not None and not answer.finding.is_final:
                    settle(_error_of(answer.finding.error))
                else:
                    settle(answer.finding)
        except (OSError, ValueError):
            pass
        finally:
            self._end()

    def _end(self) -> None:
        with self._lock:
            self.has_ended = True
            waiting = list(self._waiting.values())
            self._waiting.clear()
            self._has_unsent.notify_all()
        for settle in waiting:
            settle(_ended())


def _error_of(error: tuple[str, str, str]) -> RequestError:
    field, problem, expected = error
    if not field:
        return RequestError("structured_output", problem, expected)
    return RequestError(field, problem, expected).inside("structured_output")


def _ended() -> RequestError:
    return RequestError("structured_output", "the process that compiles grammars has ended", "send it again")
