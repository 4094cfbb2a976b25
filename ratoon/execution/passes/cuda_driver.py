"""Starts the CUDA driver, Triton and the process that compiles kernels while torch is imported: each takes some tenths
of a second in which the interpreter is free. Importing this imports none of them. What fails here is found, and said,
when they are used."""

from __future__ import annotations

import ctypes
import logging
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from threading import Lock, Thread
from typing import Any

from ratoon.core.machine import usable_cores
from ratoon.layers.triton.compiler_process import CompilerProcess, Launch, Modules

logger = logging.getLogger(__name__)

DEVICE_VARIABLE = "RATOON_DEVICE"  # overrides what the device "auto" means (CUDA if available)
LIBRARY = "libcuda.so.1"

MAJOR, MINOR = 75, 76  # attributes of a device: its compute capability

MIN_CORES = 4  # with fewer, a process for compiling is not worth its start
MAX_PROCESSES = 16  # of it, each compiles one kernel
KERNEL_MODULES = (  # the ones that compile longest first
    "ratoon.attention.triton_prefill_kernels",
    "ratoon.attention.triton_decode",
    "ratoon.attention.triton_store",
    "ratoon.execution.inputs.input_kernels",
    "ratoon.layers.triton.stream",
    "ratoon.layers.triton.panel",
    "ratoon.layers.triton.gemv",
    "ratoon.layers.triton.norms",
    "ratoon.layers.triton.elementwise",
    "ratoon.layers.triton.sampling",
)


@contextmanager
def starting_driver(device: str, launches: Sequence[Launch] = ()) -> Iterator[None]:
    """While torch is imported. `device`: the setting; if it is not CUDA, or there is no driver, nothing is started.
    `launches`: that are expected, and compiled from here on if they are for this GPU.

    Triton's packages import each other in circles, so two threads that import it at the same time would see half of it:
    this thread imports all of it before the other one starts, which imports nothing that is not there."""
    is_certain = device != "auto"  # otherwise torch may have no CUDA
    if device == "auto":
        device = os.environ.get(DEVICE_VARIABLE) or "cuda"
    kind, _, index = device.partition(":")
    library = load_library() if kind == "cuda" and (index or "0").isdecimal() else None
    if library is None:
        yield
        return
    number = int(index or 0) if is_certain else None
    process = start_compiler()
    args = (library, number, process, launches, import_triton())
    thread = Thread(target=_start, args=args, name="ratoon-cuda-driver", daemon=True)
    thread.start()
    try:
        yield
    finally:
        thread.join()


def load_library() -> Any:
    """None: there is no driver."""
    try:
        return ctypes.CDLL(LIBRARY)  # its functions are called without holding the interpreter
    except OSError:
        return None


def import_triton() -> Callable[[], Any] | None:
    """Returns a function that takes long the first time: a hash of Triton's own files, of 0.4 GB, which it keeps and
    which is part of the name of every kernel. None: Triton can't be imported."""
    with suppress(Exception):
        from ratoon.layers.triton.internals import triton_key

        return triton_key
    return None


def _start(
    library: Any,
    number: int | None,
    process: CompilerProcess | None,
    launches: Sequence[Launch],
    hash_triton: Callable[[], Any] | None,
) -> None:
    """`number`: of the device whose context is made too, the one that torch will use. None: that is not certain."""
    with suppress(AttributeError):
        device, context = ctypes.c_int(), ctypes.c_void_p()
        if library.cuInit(0) != 0 or library.cuDeviceGet(ctypes.byref(device), number or 0) != 0:
            return
        capability = 10 * read_attribute(library, device, MAJOR) + read_attribute(library, device, MINOR)
        for launch in launches:
            if process is not None and launch.capability == capability:
                process.send(launch)
        if number is not None:
            library.cuDevicePrimaryCtxRetain(ctypes.byref(context), device)
    if hash_triton is not None:
        with suppress(OSError):
            hash_triton()


def read_attribute(library: Any, device: ctypes.c_int, number: int) -> int:
    value = ctypes.c_int()
    library.cuDeviceGetAttribute(ctypes.byref(value), number, device)
    return value.value


# ---- the process that compiles kernels ----

_starting = Lock()
_started: list[CompilerProcess] = []


def start_compiler() -> CompilerProcess | None:
    """None: there are too few cores for it, or it can't be started."""
    with _starting:
        if not _started and usable_cores() >= MIN_CORES:
            try:
                process = CompilerProcess(min(usable_cores(), MAX_PROCESSES))
            except OSError as error:
                logger.warning("kernels are compiled by this process: no other one can be started: %s", error)
                return None
            process.send(Modules(KERNEL_MODULES))
            _started.append(process)
        return _started[-1] if _started else None


def take_compiler() -> CompilerProcess | None:
    """The one that was started, or a new one; it belongs to the caller."""
    start_compiler()
    with _starting:
        return _started.pop() if _started else None


def end_compiler() -> None:
    """The one that was started and not taken."""
    with _starting:
        if _started:
            _started.pop().close()
