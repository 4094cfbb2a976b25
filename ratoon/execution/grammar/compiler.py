"""Compiled grammars of running requests: compiled in threads, and kept by their content.

The library and the model's tokenizer are loaded with the first grammar, or in an idle moment before it.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor

import msgspec

from ratoon.core.errors import RequestError
from ratoon.core.structured import StructuredOutput
from ratoon.execution.grammar.interface import CompiledGrammar, GrammarLibrary

MAX_KEPT_BYTES = 256 * 2**20
NUM_THREADS = 2


class GrammarCompiler:
    """To be used from any thread."""

    def __init__(self, open_library: Callable[[], GrammarLibrary], max_kept_bytes: int = MAX_KEPT_BYTES) -> None:
        self._open_library = open_library
        self._library: GrammarLibrary | None = None
        self._library_lock = threading.Lock()
        self._failed_ahead = False
        self._max_kept_bytes = max_kept_bytes
        self._kept: OrderedDict[bytes, CompiledGrammar] = OrderedDict()  # the least recently used first
        self._num_kept_bytes = 0
        self._under_way: dict[bytes, Future[CompiledGrammar]] = {}
        self._lock = threading.Lock()
        self._pool: ThreadPoolExecutor | None = None

    @property
    def library(self) -> GrammarLibrary:
        with self._library_lock:
            if self._library is None:
                self._library = self._open_library()
            return self._library

    @property
    def can_open_ahead(self) -> bool:
        return self._library is None and not self._failed_ahead

    def open_ahead(self) -> None:
        """Load the library now: it holds Python's lock for as long as it reads the tokenizer (half a second with 49,152
        tokens), and steps would wait. If that fails, the first grammar tries again and says why."""
        try:
            _ = self.library
        except Exception:
            self._failed_ahead = True

    def prepare(self, asked: StructuredOutput) -> Future[CompiledGrammar]:
        """Compile it in another thread, or find it. The future raises RequestError if it can't be compiled. One that
        is asked for again while it is compiled is compiled once."""
        key = content_of(asked)
        with self._lock:
            found = self._find(key)
            if found is not None:
                done: Future[CompiledGrammar] = Future()
                done.set_result(found)
                return done
            if key not in self._under_way:
                if self._pool is None:
                    self._pool = ThreadPoolExecutor(NUM_THREADS, thread_name_prefix="grammars")
                self._under_way[key] = self._pool.submit(self._compile, key, asked)
            return self._under_way[key]

    def get(self, asked: StructuredOutput) -> CompiledGrammar:
        """One that was prepared. It is compiled again if it is no longer kept."""
        key = content_of(asked)
        with self._lock:
            found = self._find(key)
        return self._compile(key, asked) if found is None else found

    def shutdown(self) -> None:
        if self._pool is not None:
            self._pool.shutdown(wait=False, cancel_futures=True)

    def _compile(self, key: bytes, asked: StructuredOutput) -> CompiledGrammar:
        try:
            compiled = self.library.compile(asked)
            with self._lock:
                self._keep(key, compiled)
            return compiled
        except RequestError as error:
            raise error.inside("structured_output") from None
        finally:
            with self._lock:
                self._under_way.pop(key, None)

    def _find(self, key: bytes) -> CompiledGrammar | None:
        found = self._kept.get(key)
        if found is not None:
            self._kept.move_to_end(key)
        return found

    def _keep(self, key: bytes, compiled: CompiledGrammar) -> None:
        if key in self._kept:
            return
        self._kept[key] = compiled
        self._num_kept_bytes += compiled.num_bytes
        while self._num_kept_bytes > self._max_kept_bytes and len(self._kept) > 1:
            _, dropped = self._kept.popitem(last=False)
            self._num_kept_bytes -= dropped.num_bytes


def content_of(asked: StructuredOutput) -> bytes:
    """What its compiled form depends on."""
    plain = msgspec.structs.replace(asked, begins_after=None, continue_grammar=False, first_token=None)
    return msgspec.msgpack.encode(plain)
