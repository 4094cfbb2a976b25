"""Compiling kernels before they are launched. Launches are recorded, with tensors that need no memory, and compiled.

A compilation holds the interpreter for a third of its time, so threads would not use many cores: a child process
records the same launches and compiles each kernel in a process of its own, into Triton's cache on disk. This process
loads them from there. Which launches there will be is not known here: the functions that make them are called.
"""

from __future__ import annotations

import ctypes
import gc
import hashlib
import inspect
import os
import signal
import threading
import warnings
import zlib
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Executor, ThreadPoolExecutor
from contextlib import contextmanager, suppress
from types import SimpleNamespace
from typing import Any

import triton
from triton.backends.compiler import GPUTarget
from triton.runtime import driver
from triton.runtime.cache import get_cache_manager
from triton.runtime.jit import JITFunction

from ratoon.layers.triton.launch import recordings

Launch = Callable[..., Any]  # of a kernel, its arguments and options
MakeLaunches = Callable[[], None]

PR_SET_PDEATHSIG = 1  # of Linux's prctl
NUM_RECORDERS = 4
FIRST_STAGE_ENDED = b"end\n"  # in place of a digest
SECONDS_FOR_ALL = 120.0  # that kernels of other processes are waited for
_one_at_a_time = threading.Lock()


@contextmanager
def launches_go_to(
    receive: Callable[[JITFunction[Any], Launch, tuple[Any, ...], dict[str, Any]], Any],
) -> Iterator[None]:
    """Kernels that this thread launches are not executed: `receive` gets each kernel, a function that compiles it, and
    the arguments and options of the launch. Other threads launch as ever."""
    thread = threading.get_ident()
    with _one_at_a_time:
        run = JITFunction.run

        def run_or_record(kernel: JITFunction[Any], *args: Any, grid: Any, warmup: bool = False, **options: Any) -> Any:
            if threading.get_ident() != thread:
                return run(kernel, *args, grid=grid, warmup=warmup, **options)
            return receive(kernel, run, args, options)

        JITFunction.run = run_or_record
        recordings.append(receive)
        try:
            yield
        finally:
            recordings.clear()
            JITFunction.run = run


def _compile_only(kernel: JITFunction[Any], run: Launch, args: tuple[Any, ...], options: dict[str, Any]) -> None:
    run(kernel, *args, grid=(1,), warmup=True, **options)


def is_cached(key: str) -> bool:
    """Whether Triton's cache on disk has the kernel of this key."""
    try:
        folder = get_cache_manager(digest_of(key)).cache_dir
        return any(name.startswith("__grp__") for name in os.listdir(folder))
    except (OSError, AttributeError, TypeError):
        return False


def digest_of(key: str) -> str:
    return hashlib.sha256(key.encode()).hexdigest()


# ---- in this process ----


class Compiler(triton.AsyncCompileMode):
    """While it is entered, kernels are compiled by threads, and loaded. `elsewhere`: another process compiles them."""

    def __init__(self, pool: Executor, load: Callable[[Any], Any], elsewhere: ForkedCompiler | None) -> None:
        super().__init__(pool)
        self._load = load
        self._elsewhere = elsewhere

    def submit(self, key: str, compile_fn: Callable[[], Any], finalize_fn: Callable[[Any], Any]) -> Any:
        def compile_and_load() -> Any:
            if self._elsewhere is not None and not is_cached(key):
                self._elsewhere.wait_for(key)
                if (launcher := launcher_key(compile_fn)) is not None:
                    self._elsewhere.wait_for(launcher)
            kernel = compile_fn()
            self._load(kernel)
            return kernel

        return super().submit(key, compile_and_load, finalize_fn)


def compile_launches(
    make_launches: MakeLaunches, num_threads: int, load: Callable[[Any], Any], elsewhere: ForkedCompiler | None = None
) -> int:
    """Compile every kernel that `make_launches` launches. Returns how many there are, once all are compiled and `load`
    was called for each. Raises the first error."""
    with ThreadPoolExecutor(num_threads, "ratoon-compile") as pool:
        compiler = Compiler(pool, load, elsewhere)
        with compiler, launches_go_to(_compile_only):
            make_launches()
        return len(compiler.raw_futures)


# ---- in other processes ----


class ForkedCompiler:
    """A child process that compiles what some functions launch, those of a later one when those of the earlier ones are
    done. It is forked here, so it must not use CUDA, nor must the functions. What the first one launches can be waited
    for."""

    def __init__(self, stages: Sequence[MakeLaunches], capability: int, max_processes: int) -> None:
        self._done: dict[str, threading.Event] = {}
        self._lock = threading.Lock()
        self._ended = threading.Event()
        reading, writing = os.pipe()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)  # there are threads; none of them is needed there
            self._pid = os.fork()
        if self._pid == 0:
            try:
                os.close(reading)
                compile_in_processes(stages, capability, max_processes, writing)
            finally:
                os._exit(0)
        os.close(writing)
        threading.Thread(target=self._listen, args=(reading,), name="ratoon-compiled", daemon=True).start()

    def wait_for(self, key: str) -> None:
        """Until it is in the cache. Returns without it if the first stage ends before, or takes too long."""
        self._event(digest_of(key)).wait(SECONDS_FOR_ALL)

    def _event(self, digest: str) -> threading.Event:
        with self._lock:
            event = self._done.setdefault(digest, threading.Event())
            if self._ended.is_set():
                event.set()
            return event

    def _release_all(self) -> None:
        with self._lock:
            self._ended.set()
            for event in self._done.values():
                event.set()

    def _listen(self, reading: int) -> None:
        with os.fdopen(reading) as lines:
            num_ended = 0
            for line in lines:
                num_ended += line.encode() == FIRST_STAGE_ENDED
                if num_ended >= NUM_RECORDERS:
                    self._release_all()
                self._event(line.strip()).set()
        self._release_all()
        with suppress(ChildProcessError):
            os.waitpid(self._pid, 0)


def compile_in_processes(stages: Sequence[MakeLaunches], capability: int, max_processes: int, report: int) -> None:
    """In a child: compile by children of it. The digest of each kernel's key is written to `report` when its process
    has ended, well or not."""
    global _one_at_a_time
    _one_at_a_time = threading.Lock()  # another thread of the parent may have held it
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    gc.disable()  # it would write to memory that is shared with the parent
    driver.set_active(AbsentDevice(capability))
    number = 0  # of this process: recording takes as long as compiling, so each records a part of the kernels
    while number < NUM_RECORDERS - 1 and os.fork() == 0:
        number += 1
    with suppress(OSError, AttributeError):
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    processes = Processes(max_processes, report)

    def compile_own(kernel: JITFunction[Any], run: Launch, args: tuple[Any, ...], options: dict[str, Any]) -> None:
        if zlib.crc32(kernel.fn.__name__.encode()) % NUM_RECORDERS == number:
            _compile_only(kernel, run, args, options)
        else:
            kernel.cache_key  # noqa: B018 (made on access; it depends on those that were made before it)

    for make_launches in stages:
        with suppress(Exception), processes, launches_go_to(compile_own):
            make_launches()
        processes.wait_for_all()
        if make_launches is stages[0]:
            os.write(report, FIRST_STAGE_ENDED)
        os.nice(10)  # what comes later is not waited for
        processes.max_processes = 1
    with suppress(ChildProcessError):  # the next recorder, which would be killed with this one
        while True:
            os.wait()


class Processes(triton.AsyncCompileMode):
    """While it is entered, every kernel that is launched is compiled in a forked process."""

    def __init__(self, max_processes: int, report: int) -> None:
        super().__init__(None)
        self.max_processes = max_processes
        self._report = report
        self._seen: set[str] = set()
        self._running: dict[int, str] = {}  # keys by process

    def submit(self, key: str, compile_fn: Callable[[], Any], finalize_fn: Callable[[Any], Any]) -> None:
        if key in self._seen:
            return
        self._seen.add(key)
        if is_cached(key):
            self._tell(key)
            return
        launcher = launcher_key(compile_fn)
        if launcher is None:
            self._run(key, lambda: make_launcher(compile_fn().metadata, compile_fn))
            return
        self._run(key, compile_fn)
        if launcher not in self._seen:
            self._seen.add(launcher)
            self._run(launcher, lambda: make_launcher(PLAIN, compile_fn))

    def _run(self, key: str, work: Callable[[], Any]) -> None:
        """In a process of its own, once there are few enough of them."""
        while len(self._running) >= self.max_processes:
            self._wait_for_one()
        pid = os.fork()
        if pid == 0:
            status = 1
            try:
                work()
                status = 0
            finally:
                os._exit(status)
        self._running[pid] = key

    def _tell(self, key: str) -> None:
        os.write(self._report, f"{digest_of(key)}\n".encode())

    def wait_for_all(self) -> None:
        while self._running:
            self._wait_for_one()

    def _wait_for_one(self) -> None:
        pid, _ = os.wait()
        key = self._running.pop(pid, None)
        if key is not None:  # else it is another recorder
            self._tell(key)


def source_of(compile_fn: Callable[[], Any]) -> Any:
    """The source that Triton's function would compile: a kernel with the types of its arguments."""
    return inspect.getclosurevars(compile_fn).nonlocals["src"]


def launcher_key(compile_fn: Callable[[], Any]) -> str | None:
    """The C function that launches a kernel is the same for all kernels of these arguments. None: it depends on how the
    kernel was compiled."""
    source = source_of(compile_fn)
    if any(str(kind).startswith("tensordesc") for kind in source.signature.values()):
        return None
    return f"launcher of {source.fn.__name__} {source.signature} {sorted(source.constants)}"


# What a launcher reads of a kernel's metadata, without its effect on the C function
PLAIN = SimpleNamespace(
    global_scratch_size=0,
    global_scratch_align=1,
    profile_scratch_size=0,
    profile_scratch_align=1,
    launch_cooperative_grid=False,
    launch_pdl=False,
)


def make_launcher(metadata: Any, compile_fn: Callable[[], Any]) -> None:
    """Have Triton compile that function, which it keeps in its cache too. The C compiler takes as long as Triton."""
    from triton.backends.nvidia.driver import CudaLauncher

    CudaLauncher(source_of(compile_fn), metadata)


class AbsentDevice:
    """What Triton asks of a driver before it compiles, for a GPU that this process does not use."""

    def __init__(self, capability: int) -> None:
        self._target = GPUTarget("cuda", capability, 32)

    def get_current_target(self) -> GPUTarget:
        return self._target

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int) -> int:
        return 0
