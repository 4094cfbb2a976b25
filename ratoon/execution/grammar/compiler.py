"""Compiled grammars of running requests: compiled in threads, and kept by their content.

What arrives here was checked within limits, in another process (engine/grammars/check_process.py): compiling it again
takes milliseconds, or as long as was measured there. Grammars that take long are compiled one at a time, owners in
turn, at low priority; the others do not wait for them. One that no request waits for any longer is not begun. The
library and the model's tokenizer are loaded with the first grammar, or in an idle moment before it. Memory of grammars
that have ended goes back to the system.
"""

from __future__ import annotations

import os
import threading
from collections import OrderedDict
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from typing import NamedTuple, TypeAlias

from ratoon.core.errors import RequestError
from ratoon.core.heap import HeapTrimmer
from ratoon.core.shared_work import SharedWork
from ratoon.core.structured import StructuredOutput, content_of
from ratoon.core.turns import Turns
from ratoon.execution.grammar.interface import CompiledGrammar, GrammarLibrary, GrammarState

MAX_KEPT_BYTES = 256 * 2**20
NUM_THREADS = 2
LOW_PRIORITY = 10  # of the thread that compiles large grammars
MAX_GROWN_BYTES = 2 * 2**20

_Key: TypeAlias = tuple[str | None, bytes]  # the owner, and the content of what is compiled


class KeptGrammar:
    """A compiled grammar, and what it takes of the memory for all of them. States of a grammar may share tables, which
    grow while texts are matched: what measures that calls `note_growth`. `on_freed` hears of its bytes when neither the
    compiler nor a text has it any longer."""

    def __init__(
        self,
        compiled: CompiledGrammar,
        num_bytes: int,
        on_growth: Callable[[KeptGrammar], None],
        on_freed: Callable[[int], None],
    ) -> None:
        self._compiled = compiled
        self._on_growth = on_growth
        self._on_freed = on_freed
        self.num_bytes = num_bytes
        self.num_grown_bytes = 0
        self.cost = compiled.cost

    def begin(self) -> GrammarState:
        return self._compiled.begin()

    def note_growth(self, num_bytes: int) -> None:
        """Its tables have grown by so many bytes. From any thread."""
        self.num_bytes += num_bytes
        self.num_grown_bytes += num_bytes
        self._on_growth(self)

    def __del__(self) -> None:
        self._on_freed(self.num_bytes)


class _Job(NamedTuple):
    key: _Key
    asked: StructuredOutput
    work: SharedWork[KeptGrammar]


class GrammarCompiler:
    """To be used from any thread."""

    def __init__(self, open_library: Callable[[], GrammarLibrary], max_kept_bytes: int = MAX_KEPT_BYTES) -> None:
        self._open_library = open_library
        self._library: GrammarLibrary | None = None
        self._library_lock = threading.Lock()
        self._failed_ahead = False
        self._max_kept_bytes = max_kept_bytes
        self._kept: OrderedDict[bytes, KeptGrammar] = OrderedDict()  # the least recently used first
        self._under_way: dict[_Key, SharedWork[KeptGrammar]] = {}
        self._large: Turns[_Job] = Turns(num_places=1)
        self._lock = threading.Lock()
        self._trimmer = HeapTrimmer()
        self._pool: ThreadPoolExecutor | None = None
        self._large_pool: ThreadPoolExecutor | None = None

    @property
    def library(self) -> GrammarLibrary:
        with self._library_lock:
            if self._library is None:
                self._library = self._open_library()
            return self._library

    @property
    def can_open_ahead(self) -> bool:
        return self._library is None and not self._failed_ahead

    def open_ahead(self) -> bool:
        """Load the library now: it holds Python's lock for as long as it reads the tokenizer (half a second with 49,152
        tokens), and steps would wait. False: that failed; the first grammar tries again and says why."""
        try:
            _ = self.library
        except Exception:
            self._failed_ahead = True
        return not self._failed_ahead

    @property
    def num_kept_bytes(self) -> int:
        return sum(kept.num_bytes for kept in self._kept.values())

    def prepare(self, asked: StructuredOutput, owner: str | None = None) -> Future[KeptGrammar]:
        """Compile it in another thread, or find it. The future raises RequestError if it can't be compiled. One that
        its owner asks for again while it is compiled is compiled once. A caller that no longer waits cancels its
        future: what has not begun then is not compiled."""
        content = content_of(asked)
        with self._lock:
            found = self._find(content)
            if found is not None:
                done: Future[KeptGrammar] = Future()
                done.set_result(found)
                return done
            under_way = self._under_way.get((owner, content))
            joined = None if under_way is None else under_way.join()
            return self._begin((owner, content), asked) if joined is None else joined

    def _begin(self, key: _Key, asked: StructuredOutput) -> Future[KeptGrammar]:
        owner, _ = key

        def abandon() -> None:
            with self._lock:
                self._leave(job)
                self._large.remove(owner, job)

        work: SharedWork[KeptGrammar] = SharedWork(abandon)
        job = _Job(key, asked, work)
        future = work.join()
        assert future is not None
        self._under_way[key] = work
        if asked.is_large:
            self._large.add(owner, job)
            self._threads_for_large().submit(self._compile_next_large)
        else:
            self._threads().submit(self._settle, job)
        return future

    def _leave(self, job: _Job) -> None:
        if self._under_way.get(job.key) is job.work:
            del self._under_way[job.key]

    def get(self, asked: StructuredOutput) -> KeptGrammar:
        """One that was prepared. It is compiled again if it is no longer kept."""
        key = content_of(asked)
        with self._lock:
            found = self._find(key)
        return self._compile(key, asked) if found is None else found

    def shutdown(self) -> None:
        self._trimmer.close()
        for pool in (self._pool, self._large_pool):
            if pool is not None:
                pool.shutdown(wait=False, cancel_futures=True)

    def _threads(self) -> ThreadPoolExecutor:
        if self._pool is None:
            self._pool = ThreadPoolExecutor(NUM_THREADS, thread_name_prefix="grammars")
        return self._pool

    def _threads_for_large(self) -> ThreadPoolExecutor:
        if self._large_pool is None:
            self._large_pool = ThreadPoolExecutor(1, "large grammars", initializer=_lower_priority)
        return self._large_pool

    def _compile_next_large(self) -> None:
        with self._lock:
            found = self._large.begin()
        if found is None:  # that for which this was submitted was abandoned
            return
        owner, job = found
        self._settle(job)
        with self._lock:
            self._large.end(owner)

    def _settle(self, job: _Job) -> None:
        if job.work.is_over:
            return
        _, content = job.key
        try:
            with self._lock:
                kept = self._find(content)  # another owner's, meanwhile
            if kept is None:
                kept = self._compile(content, job.asked)
        except BaseException as error:
            with self._lock:
                self._leave(job)
            job.work.set_exception(error)
        else:
            with self._lock:
                self._leave(job)
            job.work.set_result(kept)

    def _compile(self, content: bytes, asked: StructuredOutput) -> KeptGrammar:
        try:
            compiled = self.library.compile(asked)
        except RequestError as error:
            raise error.inside("structured_output") from None
        self._trimmer.start()
        num_bytes = max(compiled.num_bytes, asked.num_bytes or 0)
        kept = KeptGrammar(compiled, num_bytes, self._note_growth, self._trimmer.note_freed)
        with self._lock:
            self._kept.setdefault(content, kept)
            self._drop_beyond_limit()
        return kept

    def _find(self, key: bytes) -> KeptGrammar | None:
        found = self._kept.get(key)
        if found is not None:
            self._kept.move_to_end(key)
        return found

    def _note_growth(self, grown: KeptGrammar) -> None:
        """One that has grown much is not kept: compiled again, it is small."""
        with self._lock:
            if grown.num_grown_bytes > MAX_GROWN_BYTES:
                for key in [key for key, kept in self._kept.items() if kept is grown]:
                    del self._kept[key]
            self._drop_beyond_limit()

    def _drop_beyond_limit(self) -> None:
        """The least recently used go first. What running requests use stays in memory until these end."""
        num_bytes = self.num_kept_bytes
        while num_bytes > self._max_kept_bytes and len(self._kept) > 1:
            _, dropped = self._kept.popitem(last=False)
            num_bytes -= dropped.num_bytes


def _lower_priority() -> None:
    """Lowers the priority of this thread. On Linux a thread has a priority of its own; elsewhere it stays as it is."""
    if os.uname().sysname == "Linux":
        with suppress(OSError):
            os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), LOW_PRIORITY)
