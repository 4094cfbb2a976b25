"""Starts the CUDA driver and Triton in a thread while torch is imported: each takes some tenths of a second in which
the interpreter is free. Importing this imports neither. What fails here is found, and said, when they are used."""

from __future__ import annotations

import ctypes
import os
import threading
from contextlib import suppress

DEVICE_VARIABLE = "RATOON_DEVICE"  # overrides what the device "auto" means (CUDA if available)
LIBRARY = "libcuda.so.1"


def start_driver(device: str) -> threading.Thread | None:
    """`device`: the setting. None: it is not CUDA. The thread need not be waited for."""
    is_certain = device != "auto"  # otherwise torch may have no CUDA
    if device == "auto":
        device = os.environ.get(DEVICE_VARIABLE) or "cuda"
    kind, _, index = device.partition(":")
    if kind != "cuda" or not (index or "0").isdecimal():
        return None
    number = int(index or 0) if is_certain else None
    thread = threading.Thread(target=_start, args=(number,), name="ratoon-cuda-driver", daemon=True)
    thread.start()
    return thread


def _start(number: int | None) -> None:
    """`number`: of the device whose context is made too, the one that torch will use."""
    with suppress(OSError, AttributeError):  # no driver
        library = ctypes.CDLL(LIBRARY)  # its functions are called without holding the interpreter
        if library.cuInit(0) != 0:
            return
        device, context = ctypes.c_int(), ctypes.c_void_p()
        if number is not None and library.cuDeviceGet(ctypes.byref(device), number) == 0:
            library.cuDevicePrimaryCtxRetain(ctypes.byref(context), device)
        _start_triton()


def _start_triton() -> None:
    with suppress(ImportError):
        from triton.runtime.cache import triton_key

        triton_key()  # which it keeps: a hash of its own files, of 0.4 GB, and part of the name of every kernel
