"""The largest library of torch, loaded by a thread while an engine of this process still starts.

Linking it takes a fifth of a second, in which Python can run: `import torch` then finds it there. Nothing else of torch
is loaded, and nothing depends on it.
"""

from __future__ import annotations

import contextlib
import ctypes
import importlib.util
import os
import platform
import sys
import threading
from pathlib import Path


def start_loading_torch_library() -> threading.Thread | None:
    """Returns the thread; None where there is nothing to load ahead."""
    path = _library_path()
    if path is None or "torch" in sys.modules:
        return None
    # Not a daemon: a process must not end while a library initialises itself.
    thread = threading.Thread(target=_load, args=(path,), name="load torch's library")
    thread.start()
    return thread


def _library_path() -> Path | None:
    """None for a build with CUDA, whose libraries find each other in ways of their own."""
    spec = importlib.util.find_spec("torch")  # looks for the package without importing it
    if spec is None or spec.origin is None:
        return None
    folder = Path(spec.origin).parent / "lib"
    path = folder / f"libtorch_cpu{'.dylib' if platform.system() == 'Darwin' else '.so'}"
    return path if path.exists() and not (folder / "libtorch_cuda.so").exists() else None


def _load(path: Path) -> None:
    """Where it fails, `import torch` will say what is wrong."""
    # A function that is called by ctypes runs without the interpreter's lock; making a CDLL of the path would hold it.
    with contextlib.suppress(OSError, AttributeError, TypeError):  # a system without dlopen
        dlopen = ctypes.CDLL(None).dlopen
        dlopen.argtypes, dlopen.restype = (ctypes.c_char_p, ctypes.c_int), ctypes.c_void_p
        dlopen(os.fsencode(path), os.RTLD_NOW)
