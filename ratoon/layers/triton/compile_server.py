"""The program that compiles kernels for another process (compiler_process.py), into Triton's cache on disk.

Requests come on standard input; the digest of each is written to standard output when its compilation has ended, well
or not. It has one thread, so each kernel can be compiled in a fork of it, which has what was imported and hashed here.

torch is not imported: that takes seconds, and those of the process that waits here as well where both read and compile
the same files. The modules that kernels are in get a stand-in for it.
"""

from __future__ import annotations

import ctypes
import gc
import heapq
import importlib
import os
import select
import signal
import sys
import time
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import SimpleNamespace
from typing import Any, NamedTuple

import triton

from ratoon.layers.triton.compiler_process import LENGTH, MARK, Finish, Launch, Modules, Request, decode
from ratoon.layers.triton.internals import (
    IS_KNOWN,
    GPUTarget,
    JITFunction,
    cache_key_of,
    get_cache_manager,
    make_launcher,
    options_of,
    source_of_kernel,
    triton_key,
)
from ratoon.layers.triton.kernel_cache import KernelCache, use_kernel_cache
from ratoon.layers.triton.kernel_requests import all_functions, digests_of, launcher_digest, request_of, settle_key

PR_SET_PDEATHSIG = 1  # of Linux's prctl
SECONDS_FOR_ONE = 60.0
EFFORT_OF_LAUNCHER = 2000  # as of a kernel with so many characters of source
_POLL = 1.0  # seconds


def main() -> None:
    if not IS_KNOWN:  # the other process compiles what it launches
        return
    requests, report = os.dup(0), os.dup(1)
    nothing = os.open(os.devnull, os.O_RDWR)
    for number in (0, 1):  # compilers may print
        os.dup2(nothing, number)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    KernelCache.falls_back = False  # the other process would not look there
    use_kernel_cache()
    sys.meta_path.insert(0, StandInFinder())
    CompileServer(requests, report, max_processes=int(sys.argv[2])).run()


class Task(NamedTuple):
    """A compilation to be done. Tasks are in the order of effort: all are done when the last one is."""

    negative_effort: int
    digest: str
    work: Callable[[], Any]


class StandIn:
    """Stands in for torch and all that is in it. What modules do with it when they are imported has no effect on their
    kernels: aliases of types, and functions that are not called here."""

    __path__: tuple[str, ...] = ()  # as of a package

    def __init__(self, *args: Any, **options: Any) -> None:
        pass

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return StandIn()

    def __call__(self, *args: Any, **options: Any) -> Any:
        return StandIn()

    def __or__(self, other: object) -> Any:
        return self

    __ror__ = __or__


class StandInFinder(MetaPathFinder, Loader):
    def find_spec(self, name: str, path: Any = None, target: Any = None) -> ModuleSpec | None:
        return ModuleSpec(name, self, is_package=True) if name.partition(".")[0] == "torch" else None

    def create_module(self, spec: ModuleSpec) -> Any:
        return StandIn()

    def exec_module(self, module: Any) -> None:
        pass


class CompileServer:
    def __init__(self, requests: int, report: int, max_processes: int) -> None:
        self._requests = requests
        self._report = report
        self._max_processes = max_processes
        self._parent = os.getppid()
        self._buffer = b""
        self._urgent: list[Task] = []  # a heap: those that take longest first
        self._later: deque[Task] = deque()  # in the order of their requests
        # By process: digest, when it is killed, whether it is urgent
        self._running: dict[int, tuple[str, float, bool]] = {}
        self._num_urgent = 0  # of those
        self._modules: deque[str] = deque()
        self._seen: set[str] = set()
        self._is_finishing = False
        self._mark: str | None = None
        self._last_sign = 0.0
        self._woken, waking = os.pipe()
        os.set_blocking(waking, False)
        signal.signal(signal.SIGCHLD, lambda *_: None)
        signal.set_wakeup_fd(waking)

    def run(self) -> None:
        gc.disable()  # it would write to memory that is shared with forked processes
        triton_key()  # kept
        while not self._is_finishing or self._urgent or self._later or self._running:
            self._start_some()
            has_chore = bool(self._modules) and not self._urgent
            readable, _, _ = select.select([self._requests, self._woken], [], [], 0.0 if has_chore else _POLL)
            if self._woken in readable:
                os.read(self._woken, 4096)
            if self._requests in readable:
                self._receive()
            elif has_chore:
                self._prepare(self._modules.popleft())
            self._reap()
            self._give_sign()
            if os.getppid() != self._parent:
                end_group()
        if self._mark is not None:
            with suppress(OSError):
                get_cache_manager(self._mark).put("", MARK)

    def _receive(self) -> None:
        data = os.read(self._requests, 2**16)
        if not data:  # the other process has ended
            end_group()
        self._buffer += data
        while len(self._buffer) >= LENGTH.size:
            end = LENGTH.size + LENGTH.unpack_from(self._buffer)[0]
            if len(self._buffer) < end:
                break
            message = self._buffer[LENGTH.size : end]
            self._buffer = self._buffer[end:]
            self._accept(decode(message))

    def _accept(self, message: Request | Launch | Modules | Finish) -> None:
        if isinstance(message, Modules):
            self._modules += message.names
        elif isinstance(message, Finish):
            self._is_finishing = True
            self._mark = message.mark
        elif isinstance(message, Launch):
            with suppress(Exception):  # it will be asked for again, or was not right
                self._accept(request_for(message))
        elif message.digest not in self._seen:
            self._seen.add(message.digest)
            try:
                self._queue(message)
            except Exception:  # the kernel is not there, or can't be hashed; the other process will say so
                for digest in digests_of(message):
                    self._tell(digest)

    def _queue(self, request: Request) -> None:
        source = source_of(request)
        target = GPUTarget("cuda", request.capability, 32)
        effort = effort_of(source.fn)

        def add(digest: str, effort: int, work: Callable[[], Any]) -> None:
            if request.is_urgent:
                heapq.heappush(self._urgent, Task(-effort, digest, work))
            else:
                self._later.append(Task(-effort, digest, work))

        def compile_kernel() -> Any:
            return triton.compile(source, target=target, options=request.options)

        launcher = launcher_digest(request.module, request.name, request.signature, request.constants)
        if launcher is None:
            add(request.digest, effort, lambda: make_launcher(source, compile_kernel().metadata))
            return
        add(request.digest, effort, compile_kernel)
        if launcher not in self._seen:
            self._seen.add(launcher)
            add(launcher, EFFORT_OF_LAUNCHER, lambda: make_launcher(source, PLAIN))

    def _start_some(self) -> None:
        while self._urgent and len(self._running) < self._max_processes:
            self._start(heapq.heappop(self._urgent), is_urgent=True)
        # Nothing waits for the others: few at a time, and none beside urgent ones.
        while self._later and not self._num_urgent and len(self._running) < max(1, self._max_processes // 4):
            self._start(self._later.popleft(), is_urgent=False)

    def _start(self, task: Task, is_urgent: bool) -> None:
        try:
            pid = os.fork()
        except OSError:  # no memory, or too many processes
            self._tell(task.digest)
            return
        if pid == 0:
            status = 1
            try:
                signal.set_wakeup_fd(-1)
                signal.signal(signal.SIGCHLD, signal.SIG_DFL)
                with suppress(OSError, AttributeError):
                    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
                if not is_urgent:
                    os.nice(10)
                task.work()
                status = 0
            finally:
                os._exit(status)
        self._num_urgent += is_urgent
        self._running[pid] = task.digest, time.monotonic() + SECONDS_FOR_ONE, is_urgent

    def _reap(self) -> None:
        now = time.monotonic()
        for pid, (digest, deadline, is_urgent) in list(self._running.items()):
            if now > deadline:
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            if os.waitpid(pid, os.WNOHANG)[0]:
                del self._running[pid]
                self._num_urgent -= is_urgent
                self._tell(digest)

    def _prepare(self, module: str) -> None:
        with suppress(Exception):
            for value in list(vars(importlib.import_module(module)).values()):
                if isinstance(value, JITFunction):
                    settle_key(value)

    def _tell(self, digest: str) -> None:
        try:
            os.write(self._report, f"{digest}\n".encode())
        except OSError:  # the other process has ended
            end_group()
        self._last_sign = time.monotonic()

    def _give_sign(self) -> None:
        if time.monotonic() - self._last_sign >= _POLL:
            self._tell("")


def end_group() -> None:
    """End this process and those that it started, and their compilers."""
    if os.getpgrp() == os.getpid():
        os.killpg(0, signal.SIGKILL)
    os._exit(1)


def source_of(request: Request) -> Any:
    kernel: Any = importlib.import_module(request.module)
    for part in request.name.split("."):
        kernel = getattr(kernel, part)
    settle_key(kernel)
    return source_of_kernel(kernel, request.signature, request.constants, request.attrs)


def request_for(launch: Launch) -> Request:
    """Makes the request that Triton makes of a launch with tensors, for which it would import torch."""
    function = getattr(importlib.import_module(launch.module), launch.function)
    kernel, types, named = function(**launch.arguments)
    names = kernel.arg_names
    signature = dict.fromkeys(names, "constexpr") | {name: kind for name, (kind, _) in zip(names, types)}
    constants = {(names.index(name),): value for name, value in named.items() if name in names}
    attrs = {(place,): [["tt.divisibility", 16]] for place, (_, is_multiple) in enumerate(types) if is_multiple}
    target = GPUTarget("cuda", launch.capability, 32)
    backend, options = options_of(target, {name: value for name, value in named.items() if name not in names})
    settle_key(kernel)
    source = source_of_kernel(kernel, signature, constants, attrs)
    return request_of(cache_key_of(source, backend, options), source, target, options, is_urgent=True)


def effort_of(kernel: JITFunction[Any]) -> int:
    """Characters of source of the kernel and of all functions that it calls: the time to compile grows with it."""
    return sum(len(function.src) for function in all_functions(kernel))


# What a launcher reads of a kernel's metadata, without its effect on the C function
PLAIN = SimpleNamespace(
    global_scratch_size=0,
    global_scratch_align=1,
    profile_scratch_size=0,
    profile_scratch_align=1,
    launch_cooperative_grid=False,
    launch_pdl=False,
)
