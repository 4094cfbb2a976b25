"""The CPU kernels as Python functions: finding the library for this processor, and its C signatures.

Plain ctypes: a call costs a microsecond or two and releases the interpreter. Pointers are passed as numbers; whoever
calls keeps the tensors alive and has checked that they are float32 and dense in their last dimension.
"""

from __future__ import annotations

import ctypes
import functools
import platform
from pathlib import Path

_POINTER = ctypes.c_void_p
_INT = ctypes.c_int64
_FLOAT = ctypes.c_float

_SIGNATURES: dict[str, tuple[object, list[object]]] = {
    "ratoon_set_threads": (ctypes.c_int, [ctypes.c_int]),
    "ratoon_packed_size": (_INT, [_INT, _INT]),
    "ratoon_pack_weight": (None, [_POINTER, _INT, _INT, _POINTER]),
    "ratoon_linear": (None, [_POINTER, _INT, _INT, _POINTER, _INT, _INT, _POINTER, _POINTER, _INT]),
    "ratoon_gated_mlp": (None, [_POINTER, _INT, _INT, *[_POINTER, _POINTER, _INT] * 2, _INT, _POINTER, _POINTER]),
    "ratoon_rms_norm": (None, [_POINTER, _INT, _POINTER, _INT, _POINTER, _FLOAT, _POINTER, _INT, _INT]),
    "ratoon_layer_norm": (None, [_POINTER, _INT, _POINTER, _INT, _POINTER, _POINTER, _FLOAT, _POINTER, _INT, _INT]),
    "ratoon_head_rms_norm": (None, [_POINTER, _INT, _POINTER, _FLOAT, _INT, _INT, _INT]),
    "ratoon_rotary": (None, [_POINTER, _INT, _INT, _POINTER, _INT, _INT, _INT, _INT, _POINTER, _POINTER, _INT]),
    "ratoon_silu_and_mul": (None, [_POINTER, _INT, _POINTER, _INT, _INT]),
    "ratoon_activation": (None, [_POINTER, _INT, _POINTER, _INT, _INT, ctypes.c_int]),
    "ratoon_attention": (ctypes.c_int, [*[_POINTER, _INT] * 4, *[_POINTER] * 3, *[_INT] * 7, _POINTER, _INT, _FLOAT]),
    "ratoon_store_kv": (None, [_POINTER, _INT, _POINTER, _INT, _POINTER, _INT, _POINTER, *[_INT] * 4]),
}


@functools.cache
def library() -> ctypes.CDLL | None:
    """The kernels for this processor, or None where there are none: then torch computes everything."""
    suffix = ".dylib" if platform.system() == "Darwin" else ".so"
    for variant in _variants():
        path = Path(__file__).with_name(f"kernels_{variant}{suffix}")
        if path.exists():
            try:
                loaded = ctypes.CDLL(str(path))
            except OSError:  # built for another system
                continue
            for name, (result, arguments) in _SIGNATURES.items():
                function = getattr(loaded, name)
                function.restype, function.argtypes = result, arguments
            return loaded
    return None


def _variants() -> list[str]:
    """Instruction sets that this processor has, best first."""
    if platform.machine() in ("aarch64", "arm64"):
        return ["neon"]
    flags = _x86_flags()
    variants = []
    if {"avx512f", "avx512bw", "avx512cd", "avx512dq", "avx512vl"} <= flags:
        variants.append("avx512")
    if {"avx2", "fma", "f16c", "bmi2"} <= flags:
        variants.append("avx2")
    return variants


def _x86_flags() -> set[str]:
    try:
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("flags"):
                return set(line.split(":", 1)[1].split())
    except OSError:
        pass
    return set()
