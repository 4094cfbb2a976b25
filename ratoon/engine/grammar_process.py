"""The process in which grammars of requests are checked: structured_validator.py, and trial.py with the vocabulary.

It loads the grammar library and the vocabulary once, and forks for each grammar: the fork has limits on processor time
and memory, checks one grammar, answers, and exits, so that nothing of a grammar stays behind. Several run at once.
Owners take turns (core/turns.py). A check is quick or has low priority: one that takes long, or is beside another one
of the same owner, leaves the processor to the engine.

It imports no torch and has one thread of its own. grammar_checks.py is the other side.
"""

from __future__ import annotations

import gc
import os
import selectors
import signal
import sys
import time
from contextlib import suppress
from dataclasses import dataclass

import msgspec
from tokenizers import Tokenizer as Backend

from ratoon.core.errors import RequestError
from ratoon.core.limited_process import (
    MAX_FRAME_BYTES,
    limit_processor_time,
    limit_resources,
    read_frame,
    silence_errors,
    write_frame,
)
from ratoon.core.structured import StructuredOutput
from ratoon.core.turns import Turns
from ratoon.engine.grammar_checks import Answer, Check, Finding, Vocabulary
from ratoon.engine.structured_validator import find_problem, shown, verify_ends
from ratoon.execution.grammar.llguidance_library import Llguidance
from ratoon.execution.grammar.notation import grammar_text
from ratoon.execution.grammar.trial import try_out
from ratoon.models.tokenizer import Tokenizer

QUICK_SECONDS = 0.1  # by the clock, at normal priority
LOW_PRIORITY = 15
LONG_TRANSLATION = 2**13  # characters; writing more takes an engine milliseconds, in which its steps wait
LARGE_SECONDS = 0.05  # of processor time for compiling, from which on a grammar is large
PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")
EXPECTED = "a smaller one, with fewer repetitions and alternatives within each other"


def serve() -> None:
    """Checks grammars until the parent closes the pipe."""
    silence_errors()
    with open(sys.stdin.fileno(), "rb", buffering=0, closefd=False) as jobs:  # what follows is read by the loop
        first = read_frame(jobs)
    if first is not None:
        _Server(msgspec.msgpack.decode(first, type=Vocabulary)).run()


@dataclass
class _Fork:
    check: Check
    pid: int
    pipe: int  # its answer comes here
    began: float
    has_low_priority: bool
    answer: bytes = b""
    was_too_slow: bool = False


class _Server:
    def __init__(self, vocabulary: Vocabulary) -> None:
        self._limits = vocabulary.limits
        self._checker = _Checker(vocabulary)
        self._turns: Turns[Check] = Turns(vocabulary.num_places)
        self._forks: dict[int, _Fork] = {}  # by pipe
        self._received = bytearray()
        self._selector = selectors.DefaultSelector()
        self._decoder = msgspec.msgpack.Decoder(Check)
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
                        self._read_answer(self._forks[key.fd])
                self._watch()
                while (found := self._turns.begin()) is not None:
                    self._fork(found[1])
        finally:
            for fork in self._forks.values():
                os.kill(fork.pid, signal.SIGKILL)

    def _receive(self, jobs: int) -> bool:
        """False: the parent closed the pipe."""
        data = os.read(jobs, 2**20)
        self._received += data
        while len(self._received) >= 8:
            length = int.from_bytes(self._received[:8], "little")
            if length > MAX_FRAME_BYTES:
                return False
            if len(self._received) < 8 + length:
                break
            check = self._decoder.decode(self._received[8 : 8 + length])
            del self._received[: 8 + length]
            self._turns.add(check.owner, check)
        return bool(data)

    def _fork(self, check: Check) -> None:
        receiving, sending = os.pipe()
        pid = os.fork()
        if pid == 0:
            os.close(receiving)
            self._check_and_exit(check, sending)
        os.close(sending)
        is_beside_another = self._turns.num_running_of(check.owner) > 1
        fork = _Fork(check, pid, receiving, time.monotonic(), has_low_priority=False)
        self._forks[receiving] = fork
        self._selector.register(receiving, selectors.EVENT_READ)
        if is_beside_another:
            self._lower(fork)

    def _check_and_exit(self, check: Check, sending: int) -> None:
        """In the fork."""
        try:
            for inherited in (sys.stdin.fileno(), sys.stdout.fileno()):
                os.close(inherited)
            limit_processor_time(self._limits.seconds)
            limit_resources(_address_space() + self._limits.memory_bytes)
            answer = msgspec.msgpack.encode(self._checker.check(check.asked))
            os.set_blocking(sending, True)
            with open(sending, "wb") as pipe:
                write_frame(pipe, answer)
        except MemoryError:
            os.kill(os.getpid(), signal.SIGABRT)  # as the grammar library does
        finally:
            os._exit(0)

    def _read_answer(self, fork: _Fork) -> None:
        data = os.read(fork.pipe, 2**20)
        fork.answer += data
        if data:
            return
        self._selector.unregister(fork.pipe)
        os.close(fork.pipe)
        del self._forks[fork.pipe]
        _, status = os.waitpid(fork.pid, 0)
        self._turns.end(fork.check.owner)
        finding = self._finding(fork, os.waitstatus_to_exitcode(status))
        write_frame(sys.stdout.buffer, msgspec.msgpack.encode(Answer(fork.check.number, finding)))

    def _finding(self, fork: _Fork, status: int) -> Finding:
        if len(fork.answer) >= 8:
            with suppress(msgspec.DecodeError):
                return msgspec.msgpack.decode(fork.answer[8:], type=Finding)
        limits, field = self._limits, fork.check.asked.kind or ""
        if status == -signal.SIGPROF:
            problem = f"takes more than {limits.seconds:g} seconds of processor time to compile and try out"
        elif fork.was_too_slow:
            problem = f"could not be compiled and tried out within {limits.wait_seconds:g} seconds"
            return Finding((field, problem, "a smaller one, or try again"), is_final=False)
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
            if now >= fork.began + self._limits.wait_seconds and not fork.was_too_slow:
                fork.was_too_slow = True
                os.kill(fork.pid, signal.SIGKILL)
            if now >= fork.began + QUICK_SECONDS and not fork.has_low_priority:
                self._lower(fork)

    def _lower(self, fork: _Fork) -> None:
        fork.has_low_priority = True
        with suppress(OSError):  # it is exiting
            os.setpriority(os.PRIO_PROCESS, fork.pid, LOW_PRIORITY)

    def _seconds_to_wait(self) -> float | None:
        ends = [
            fork.began + (self._limits.wait_seconds if fork.has_low_priority else QUICK_SECONDS)
            for fork in self._forks.values()
            if not fork.was_too_slow
        ]
        return max(0.0, min(ends) - time.monotonic()) if ends else None


class _Checker:
    """Checks grammars with the vocabulary of a model. A model whose vocabulary the library can't read has no structured
    output: every check says so."""

    def __init__(self, vocabulary: Vocabulary) -> None:
        self._ends = vocabulary.ends
        self._unusable: str | None = None
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
        self.check(StructuredOutput(json_object=True))  # what the first check makes, forks find

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
        kind = asked.kind or ""
        problem = find_problem(asked, self._special_tokens)
        if problem is not None:
            raise RequestError(kind, *problem)
        translation = grammar_text(asked, self._special_tokens)
        verify_ends(asked, translation, self._end_texts)
        before = _own_bytes()
        try:
            compile_seconds = try_out(
                self._library, msgspec.structs.replace(asked, translation=translation), self._ends
            )
        except RequestError as error:
            raise RequestError(kind, shown(error.problem), error.expected or EXPECTED) from None
        is_long = asked.json_schema is None and len(translation) > LONG_TRANSLATION
        return Finding(
            num_bytes=max(0, _own_bytes() - before),
            is_large=compile_seconds > LARGE_SECONDS,
            translation=translation if is_long else None,
        )


def _address_space() -> int:
    return _pages()[0] * PAGE_BYTES


def _own_bytes() -> int:
    """Memory that holds data, without pages of files."""
    _, resident, of_files = _pages()
    return (resident - of_files) * PAGE_BYTES


def _pages() -> tuple[int, int, int]:
    try:
        with open("/proc/self/statm") as file:
            size, resident, of_files = map(int, file.read().split()[:3])
            return size, resident, of_files
    except OSError:  # there is none on macOS, where address space is not limited
        return 0, 0, 0
