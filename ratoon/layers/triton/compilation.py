"""Compiling kernels before they are launched. Launches are recorded, with tensors that need no memory, and compiled.

A compilation holds the interpreter for a third of its time, so threads would not use many cores: another process
compiles the kernels into Triton's cache on disk (compiler_process.py), and this one loads them from there. Which
launches there will be is not known here: the functions that make them are called.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Executor, ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

from ratoon.layers.triton.compiler_process import MARK, CompilerProcess
from ratoon.layers.triton.internals import IS_KNOWN, AsyncCompileMode, JITFunction, get_cache_manager, runs_replaced
from ratoon.layers.triton.kernel_requests import digest_of, digests_of, request_of_compilation, settle_key
from ratoon.layers.triton.launch import recordings
from ratoon.version import __version__

Launch = Callable[..., Any]  # of a kernel, its arguments and options
MakeLaunches = Callable[[], None]

MAX_WAITING = 64  # threads, each for one kernel of another process
_GROUP = "__grp__"  # in front of the name of a file that lists those of a kernel
_one_at_a_time = threading.Lock()


@contextmanager
def launches_go_to(
    receive: Callable[[JITFunction[Any], Launch, tuple[Any, ...], dict[str, Any]], Any],
) -> Iterator[None]:
    """Kernels that this thread launches are not executed: `receive` gets each kernel, a function that compiles it, and
    the arguments and options of the launch. Other threads launch as ever."""
    thread = threading.get_ident()

    def make_run(run: Launch) -> Launch:
        def run_or_record(kernel: JITFunction[Any], *args: Any, grid: Any, warmup: bool = False, **options: Any) -> Any:
            if threading.get_ident() != thread:
                return run(kernel, *args, grid=grid, warmup=warmup, **options)
            return receive(kernel, run, args, options)

        return run_or_record

    with _one_at_a_time, runs_replaced(make_run):
        recordings.append(receive)
        try:
            yield
        finally:
            recordings.clear()


def _compile_only(kernel: JITFunction[Any], run: Launch, args: tuple[Any, ...], options: dict[str, Any]) -> None:
    settle_key(kernel)
    run(kernel, *args, grid=(1,), warmup=True, **options)


def is_cached(key: str) -> bool:
    """Whether Triton's cache on disk has the kernel of this key."""
    try:
        cache: Any = get_cache_manager(digest_of(key))
        groups = [name.removeprefix(_GROUP) for name in os.listdir(cache.cache_dir) if name.startswith(_GROUP)]
        return any(cache.get_group(name) for name in groups)
    except (OSError, AttributeError, TypeError):
        return False


def mark_of(keys: Sequence[str]) -> str:
    """The name of a mark in Triton's cache, which says that all kernels that belong to these are in it as well."""
    return digest_of("\n".join([__version__, *sorted(keys)]))


def is_marked(mark: str) -> bool:
    try:
        cache: Any = get_cache_manager(mark)
        return bool(cache.has_file(MARK))
    except (OSError, AttributeError):
        return False


class Compiler(AsyncCompileMode):
    """While it is entered, kernels are compiled by threads, and loaded. `process`: compiles them into the cache. What
    it does not deliver is compiled here, `num_cores` at a time."""

    def __init__(
        self, pool: Executor, load: Callable[[Any], Any], num_cores: int, process: CompilerProcess | None
    ) -> None:
        super().__init__(pool)
        self._load = load
        self._cores = threading.Semaphore(num_cores)
        self._process = process

    def submit(self, key: str, compile_fn: Callable[[], Any], finalize_fn: Callable[[Any], Any]) -> Any:
        request = None
        if key not in self.future_kernels and self._process is not None and not is_cached(key):
            request = request_of_compilation(key, compile_fn, is_urgent=True)
            self._process.send(request)

        def compile_and_load() -> Any:
            if request is not None:
                assert self._process is not None
                for digest in digests_of(request):
                    self._process.wait_for(digest)
            with self._cores:
                kernel = compile_fn()
                self._load(kernel)
            return kernel

        return super().submit(key, compile_and_load, finalize_fn)


def compile_launches(
    make_launches: MakeLaunches,
    num_cores: int,
    load: Callable[[Any], Any],
    process: CompilerProcess | None = None,
    when_recorded: Callable[[Sequence[str]], Any] = lambda keys: None,
) -> int:
    """Compile every kernel that `make_launches` launches. Returns how many there are, once all are compiled and `load`
    was called for each. Raises the first error. `when_recorded`: called with their keys when all are known. With a
    Triton that is not known here it does nothing: kernels are compiled at their first launch."""
    if not IS_KNOWN:
        return 0
    with ThreadPoolExecutor(num_cores if process is None else MAX_WAITING, "ratoon-compile") as pool:
        compiler = Compiler(pool, load, num_cores, process)
        with compiler:
            with launches_go_to(_compile_only):
                make_launches()
            when_recorded(list(compiler.future_kernels))
        return len(compiler.raw_futures)


class Sender(AsyncCompileMode):
    """While it is entered, kernels that are launched are compiled by another process when it has nothing else to do."""

    def __init__(self, process: CompilerProcess) -> None:
        super().__init__(None)
        self._process = process
        self._seen: set[str] = set()

    def submit(self, key: str, compile_fn: Callable[[], Any], finalize_fn: Callable[[Any], Any]) -> None:
        if key not in self._seen and not is_cached(key):
            self._process.send(request_of_compilation(key, compile_fn, is_urgent=False))
        self._seen.add(key)


def send_launches(make_launches: MakeLaunches, process: CompilerProcess) -> None:
    """Have every kernel that `make_launches` launches compiled into the cache, without waiting for it."""
    if not IS_KNOWN:
        return
    with Sender(process), launches_go_to(_compile_only):
        make_launches()
