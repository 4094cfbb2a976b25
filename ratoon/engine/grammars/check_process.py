"""The process in which grammars of requests are checked: validator.py, and trial.py with the vocabulary.

It loads the grammar library and the vocabulary once, and forks: a fork has limits on processor time and memory, and
checks grammars of one owner, one after the other. It is ended when its owner has had none for a while, when another
owner needs its place, after a grammar that took much memory, and by the system where a limit is exceeded, so that
nothing of a grammar stays behind. Several run at once, and a spare one, which has checked nothing yet, is made ahead in
quiet moments: forking takes longer than most checks. Owners take turns (core/turns.py). A check is quick or has low
priority: one that takes long, or is beside another one of the same owner, leaves the processor to the engine.

It imports no torch and has one thread of its own. checks.py is the other side.
"""

from __future__ import annotations

import gc
import math
import os
import selectors
import signal
import socket
import sys
import time
from contextlib import suppress
from dataclasses import dataclass, field
from typing import BinaryIO

import msgspec
from tokenizers import Tokenizer as Backend

from ratoon.core.errors import RequestError
from ratoon.core.heap import used_bytes
from ratoon.core.limited_process import (
    MAX_FRAME_BYTES,
    address_space,
    limit_processor_time,
    limit_resources,
    read_frame,
    silence_errors,
    write_frame,
)
from ratoon.core.prepared import prepared
from ratoon.core.structured import StructuredOutput
from ratoon.core.turns import Turns
from ratoon.engine.grammars.checks import Cancellation, Check, CheckResult, Finding, Vocabulary
from ratoon.engine.grammars.validator import find_malformed, find_problem, find_unsupported, shown, verify_ends
from ratoon.execution.grammar.llguidance_library import Llguidance
from ratoon.execution.grammar.notation import grammar_text
from ratoon.execution.grammar.trial import Tried, try_out
from ratoon.models.tokenizer import Tokenizer

QUICK_SECONDS = 0.1  # of processor time, at normal priority
LOW_PRIORITY = 15
MIN_LOOK_SECONDS = 0.01  # by the clock, between two looks at the processor time of a check
MAX_CHECKS_OF_FORK = 64
MAX_LEFT_BYTES = 16 * 2**20  # of address space, that checks may leave behind in a fork
MAX_SENT_BYTES = 2**15  # of a check that is sent to a fork, so that sending it never waits; a larger one is forked for
LONG_TRANSLATION = 2**13  # characters; writing more takes an engine milliseconds, in which its steps wait
LARGE_SECONDS = 0.05  # of processor time for compiling, from which on a grammar is large
MEASURED_SECONDS = 0.005  # and from which on its memory is measured: that takes a millisecond or two
EXPECTED = "a smaller one, with fewer repetitions and alternatives within each other"


def serve() -> None:
    """Checks grammars until the parent closes the pipe."""
    silence_errors()
    with open(sys.stdin.fileno(), "rb", buffering=0, closefd=False) as jobs:  # what follows is read by the loop
        first = read_frame(jobs)
    if first is not None:
        _Server(msgspec.msgpack.decode(first, type=prepared(Vocabulary))).run()


class _Report(msgspec.Struct, frozen=True):
    """A fork sends this after a check."""

    finding: Finding
    goes_on: bool  # it waits for another check


@dataclass(eq=False)
class _Fork:
    owner: str | None
    pid: int
    pipe: socket.socket
    check: Check | None  # None: it is idle
    began: float  # the check, or to be idle, by the clock
    cpu_began: float = 0.0  # the processor time that it had used then
    quick_until: float = 0.0  # by the clock; its processor time is looked at then
    has_low_priority: bool = False
    num_checks: int = 0  # that have ended
    received: bytearray = field(default_factory=bytearray)
    was_too_slow: bool = False
    was_cancelled: bool = False
    is_leaving: bool = False  # it gets no further check


class _Server:
    def __init__(self, vocabulary: Vocabulary) -> None:
        self._limits = vocabulary.limits
        self._num_places = vocabulary.num_places
        self._checker = _Checker(vocabulary)
        self._turns: Turns[Check] = Turns(vocabulary.num_places)
        self._checks: dict[int, Check] = {}  # by number, until they are answered or cancelled
        self._alone: set[int] = set()  # numbers of checks that get a fork of their own
        self._forks: dict[int, _Fork] = {}  # by pipe, the one that began first comes first
        self._spare: _Fork | None = None  # not among them
        self._quiet_since = time.monotonic()
        self._received = bytearray()
        self._selector = selectors.DefaultSelector()
        self._decoder: msgspec.msgpack.Decoder[Check | Cancellation] = msgspec.msgpack.Decoder(
            prepared(Check | Cancellation)
        )
        gc.freeze()  # what forks share with this process is not written to by collections
        gc.disable()

    def run(self) -> None:
        jobs = sys.stdin.fileno()
        self._selector.register(jobs, selectors.EVENT_READ)
        try:
            while True:
                for key, _ in self._selector.select(self._seconds_to_wait()):
                    if key.fd == jobs:
                        if not self._receive(jobs):
                            return
                    else:
                        self._read(self._forks[key.fd])
                self._watch()
                while (found := self._turns.begin()) is not None:
                    self._begin(found[1])
                if self._spare is None and time.monotonic() >= self._spare_is_due():
                    self._spare = self._fork(None)
        finally:
            for fork in self._all_forks():
                os.kill(fork.pid, signal.SIGKILL)

    def _receive(self, jobs: int) -> bool:
        """False: the parent closed the pipe."""
        data = os.read(jobs, 2**20)
        self._received += data
        while (frame := _take_frame(self._received)) is not None:
            job = self._decoder.decode(frame)
            if isinstance(job, Check):
                self._checks[job.number] = job
                self._turns.add(job.owner, job)
            else:
                self._cancel(job.number)
        return bool(data) and not _is_too_long(self._received)

    def _cancel(self, number: int) -> None:
        check = self._checks.pop(number, None)
        self._alone.discard(number)
        if check is None or self._turns.remove(check.owner, check):
            return
        for fork in self._forks.values():
            if fork.check is check:
                fork.was_cancelled = True
                os.kill(fork.pid, signal.SIGKILL)

    # ---- forks ----

    def _begin(self, check: Check) -> None:
        is_beside_another = self._turns.num_running_of(check.owner) > 1
        encoded = msgspec.msgpack.encode(check)
        fork = None
        can_be_sent = len(encoded) <= MAX_SENT_BYTES
        if check.number not in self._alone and can_be_sent:
            fork = self._idle_fork(check.owner, is_beside_another)
        if fork is None:
            self._make_room()
            fork = self._take_spare(check.owner) if can_be_sent else None
        if fork is None:
            fork = self._fork(check)
            self._watch_pipe(fork)
        else:
            fork.check = check
            with suppress(OSError):  # it has ended, which is read next
                fork.pipe.sendall(len(encoded).to_bytes(8, "little") + encoded)
        fork.began, fork.cpu_began = time.monotonic(), _processor_seconds(fork.pid)
        fork.quick_until = fork.began + QUICK_SECONDS
        if is_beside_another and not fork.has_low_priority:
            self._lower(fork)

    def _idle_fork(self, owner: str | None, has_low_priority: bool) -> _Fork | None:
        for fork in self._idle_forks():
            if fork.owner == owner and fork.has_low_priority == has_low_priority:
                return fork
        return None

    def _idle_forks(self) -> list[_Fork]:
        return [fork for fork in self._forks.values() if fork.check is None and not fork.is_leaving]

    def _make_room(self) -> None:
        """For another fork: idle ones are ended where there would be more than places."""
        num_staying = sum(not fork.is_leaving for fork in self._forks.values())
        for fork in sorted(self._idle_forks(), key=lambda idle: idle.began)[: num_staying - self._num_places + 1]:
            self._end(fork)

    def _end(self, fork: _Fork) -> None:
        fork.is_leaving = True
        with suppress(OSError):  # it has ended
            fork.pipe.shutdown(socket.SHUT_WR)

    def _all_forks(self) -> list[_Fork]:
        return [*self._forks.values(), *([] if self._spare is None else [self._spare])]

    def _spare_is_due(self) -> float:
        """Returns when a spare fork should be made, by the clock. While there are checks, none is."""
        return math.inf if self._checks else self._quiet_since + self._limits.quiet_seconds

    def _take_spare(self, owner: str | None) -> _Fork | None:
        fork, self._spare = self._spare, None
        if fork is None:
            return None
        if os.waitpid(fork.pid, os.WNOHANG)[0] != 0:  # the system has ended it, for want of memory
            fork.pipe.close()
            return None
        fork.owner = owner
        self._watch_pipe(fork)
        return fork

    def _watch_pipe(self, fork: _Fork) -> None:
        self._forks[fork.pipe.fileno()] = fork
        self._selector.register(fork.pipe, selectors.EVENT_READ)

    def _fork(self, check: Check | None) -> _Fork:
        """Fork for a check. None: the fork is a spare one."""
        own, others = socket.socketpair()
        pid = os.fork()
        if pid == 0:
            for inherited in (sys.stdin.fileno(), sys.stdout.fileno(), self._selector.fileno(), own.fileno()):
                os.close(inherited)
            for other in self._all_forks():
                os.close(other.pipe.fileno())
            self._check_and_exit(check, others)
        others.close()
        return _Fork(None if check is None else check.owner, pid, own, check, time.monotonic())

    def _check_and_exit(self, check: Check | None, pipe: socket.socket) -> None:
        """In the fork."""
        try:
            if check is None:
                self._checker.warm_up()  # it writes to most of the memory that a check writes to, which is then its own
            before = address_space()
            limit_resources(before + self._limits.memory_bytes)
            with pipe.makefile("rb") as jobs, pipe.makefile("wb") as answers:
                check = _next_check(jobs) if check is None else check
                num_left = MAX_CHECKS_OF_FORK
                while check is not None:
                    limit_processor_time(self._limits.seconds)
                    finding = self._checker.check(check.asked)
                    limit_processor_time(0)
                    num_left -= 1
                    goes_on = num_left > 0 and address_space() - before <= MAX_LEFT_BYTES
                    write_frame(answers, msgspec.msgpack.encode(_Report(finding, goes_on)))
                    check = _next_check(jobs) if goes_on else None
        except MemoryError:
            os.kill(os.getpid(), signal.SIGABRT)  # as the grammar library does
        finally:
            os._exit(0)

    def _read(self, fork: _Fork) -> None:
        try:
            data = fork.pipe.recv(2**20)
        except OSError:
            data = b""
        fork.received += data
        if not data:
            self._reap(fork)
        elif (frame := _take_frame(fork.received)) is not None:
            report = msgspec.msgpack.decode(frame, type=prepared(_Report))
            check, fork.check = fork.check, None
            fork.num_checks += 1
            fork.began = time.monotonic()
            fork.is_leaving |= not report.goes_on or fork.was_too_slow or fork.was_cancelled
            assert check is not None
            self._answer(check, report.finding)

    def _reap(self, fork: _Fork) -> None:
        """It has ended, with or without a check."""
        self._selector.unregister(fork.pipe)
        del self._forks[fork.pipe.fileno()]
        fork.pipe.close()
        _, status = os.waitpid(fork.pid, 0)
        if fork.check is not None:
            self._answer(fork.check, self._finding(fork, fork.check, os.waitstatus_to_exitcode(status)))

    def _answer(self, check: Check, finding: Finding | None) -> None:
        """None: it is checked again, in a fork of its own."""
        self._turns.end(check.owner)
        if check.number not in self._checks:  # it was cancelled
            return
        if finding is None:
            self._alone.add(check.number)
            self._turns.add(check.owner, check)
            return
        del self._checks[check.number]
        self._quiet_since = time.monotonic()
        self._alone.discard(check.number)
        write_frame(sys.stdout.buffer, msgspec.msgpack.encode(CheckResult(check.number, finding)))

    def _finding(self, fork: _Fork, check: Check, status: int) -> Finding | None:
        """Why a fork ended in a check. None: checks before this one may be to blame."""
        limits, field = self._limits, check.asked.kind or ""
        if status == -signal.SIGPROF:
            problem = f"takes more than {limits.seconds:g} seconds of processor time to compile and try out"
        elif fork.was_too_slow:
            problem = f"could not be compiled and tried out within {limits.wait_seconds:g} seconds"
            return Finding((field, problem, "a smaller one, or try again"), is_final=False)
        elif fork.num_checks > 0:
            return None
        elif status == -signal.SIGABRT:
            problem = f"takes more than {limits.memory_bytes // 2**20} MiB of memory to compile and try out"
        elif status == -signal.SIGSEGV:
            problem = "is nested too deeply"
        else:
            problem = f"the process that compiled it was ended (status {status})"
            return Finding((field, problem, "try again"), is_final=False)
        return Finding((field, problem, EXPECTED))

    # ---- by the clock ----

    def _watch(self) -> None:
        now = time.monotonic()
        for fork in self._forks.values():
            if fork.check is None:
                if now >= fork.began + self._limits.idle_seconds and not fork.is_leaving:
                    self._end(fork)
                continue
            if now >= fork.began + self._limits.wait_seconds and not fork.was_too_slow:
                fork.was_too_slow = True
                os.kill(fork.pid, signal.SIGKILL)
            if now >= fork.quick_until and not fork.has_low_priority:
                self._look_at(fork, now)

    def _look_at(self, fork: _Fork, now: float) -> None:
        """On a busy machine a check takes long by the clock that has hardly begun: low priority would starve it."""
        left = fork.cpu_began + QUICK_SECONDS - _processor_seconds(fork.pid)
        if left > 0:
            fork.quick_until = now + max(left, MIN_LOOK_SECONDS)
        else:
            self._lower(fork)

    def _lower(self, fork: _Fork) -> None:
        fork.has_low_priority = True
        with suppress(OSError):  # it is exiting
            os.setpriority(os.PRIO_PROCESS, fork.pid, LOW_PRIORITY)

    def _seconds_to_wait(self) -> float | None:
        watched = (fork for fork in self._forks.values() if not fork.is_leaving and not fork.was_too_slow)
        ends = [self._next_look(fork) for fork in watched]
        if self._spare is None:
            ends.append(self._spare_is_due())
        end = min(ends, default=math.inf)
        return None if end == math.inf else max(0.0, end - time.monotonic())

    def _next_look(self, fork: _Fork) -> float:
        """When something may have to be done to it, by the clock."""
        if fork.check is None:
            return fork.began + self._limits.idle_seconds
        too_slow = fork.began + self._limits.wait_seconds
        return too_slow if fork.has_low_priority else min(fork.quick_until, too_slow)


class _Checker:
    """Checks grammars with the vocabulary of a model. A model whose vocabulary the library can't read has no structured
    output: every check says so."""

    def __init__(self, vocabulary: Vocabulary) -> None:
        self._ends = vocabulary.ends
        self._unusable: str | None = None
        self._num_used_before: int | None = None  # bytes
        tokenizer = Tokenizer(Backend.from_str(vocabulary.tokenizer), {})
        self._special_tokens = frozenset(
            token for id in tokenizer.special_token_ids if (token := tokenizer.id_to_token(id)) is not None
        )
        self._end_texts = {tokenizer.id_to_token(id) or "" for id in vocabulary.ends} | {
            f"<[{id}]>" for id in vocabulary.ends
        }
        try:
            self._library = Llguidance(tokenizer, vocabulary.vocab_size)
        except Exception as error:
            self._unusable = f"can't be used with this model's tokenizer: {error}"
        self.warm_up()  # what the first check makes, forks find

    def warm_up(self) -> None:
        self.check(StructuredOutput(json_object=True))
        self._num_used_before = used_bytes()

    def check(self, asked: StructuredOutput) -> Finding:
        try:
            return self._check(asked)
        except RequestError as error:
            return Finding((error.field, error.problem, error.expected))
        except RecursionError:
            return Finding((asked.kind or "", "is nested too deeply", EXPECTED))

    def _check(self, asked: StructuredOutput) -> Finding:
        if self._unusable is not None:
            raise RequestError("", self._unusable, "leave it out")
        problem = find_malformed(asked)
        if problem is None:
            translation, tried = self._try_out(asked)
            problem = find_unsupported(asked, None)
        if problem is not None:
            raise RequestError(asked.kind or "", *problem)
        is_long = asked.json_schema is None and len(translation) > LONG_TRANSLATION
        return Finding(
            num_bytes=self._measure(tried),
            is_large=tried.compile_seconds > LARGE_SECONDS,
            translation=translation if is_long else None,
        )

    def _try_out(self, asked: StructuredOutput) -> tuple[str, Tried]:
        """The grammar in the notation of the library, and compiled."""
        kind = asked.kind or ""
        try:
            translation = grammar_text(asked, self._special_tokens)
            verify_ends(asked, translation, self._end_texts)
            tried = try_out(self._library, msgspec.structs.replace(asked, translation=translation), self._ends)
            return translation, tried
        except RequestError as error:
            problem = find_problem(asked, self._special_tokens)  # it knows where in a schema the problem is
            if problem is None:
                problem = shown(error.problem), error.expected or EXPECTED
            raise RequestError(kind, *problem) from None

    def _measure(self, tried: Tried) -> int:
        """The bytes that a compiled grammar takes, which is then freed. 0: few, or the system does not tell."""
        if tried.compile_seconds < MEASURED_SECONDS or self._num_used_before is None:
            return 0
        num_used = used_bytes() or 0
        num_bytes = max(0, num_used - self._num_used_before)
        tried.free()
        self._num_used_before = used_bytes()  # what it leaves behind is not the next one's
        return num_bytes


def _next_check(jobs: BinaryIO) -> Check | None:
    """None: the fork is not needed any longer."""
    frame = read_frame(jobs)
    return None if frame is None else msgspec.msgpack.decode(frame, type=prepared(Check))


def _processor_seconds(pid: int) -> float:
    """Returns the processor time that a process has used so far; without such a clock, the time."""
    if sys.platform != "linux":
        return time.monotonic()
    try:
        return time.clock_gettime((~pid << 3) | 2)  # the clock's id, as clock_getcpuclockid makes it
    except OSError:  # it has ended
        return 0.0


def _take_frame(received: bytearray) -> bytes | None:
    """None: it is not there as a whole."""
    length = int.from_bytes(received[:8], "little")
    if len(received) < 8 + length or len(received) < 8:
        return None
    frame = bytes(received[8 : 8 + length])
    del received[: 8 + length]
    return frame


def _is_too_long(received: bytearray) -> bool:
    return int.from_bytes(received[:8], "little") > MAX_FRAME_BYTES
