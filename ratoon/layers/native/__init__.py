"""The CPU kernels as Python functions: finding the library for this processor, and its C signatures.

Plain ctypes: a call costs a microsecond or two and releases the interpreter. Pointers are passed as numbers; the
caller keeps the tensors alive and has checked that they are float32 and dense in their last dimension.
"""

from __future__ import annotations

import ctypes
import functools
import os
import platform
from pathlib import Path
from typing import Any

from ratoon.core.errors import ConfigError

VARIABLE = "RATOON_KERNELS"  # a kernel set by name instead of the best one, or "none"
KERNEL_SETS = ("avx512amx", "avx512vnni", "avx512", "avx2", "neondot", "neon")

_POINTER = ctypes.c_void_p
_INT = ctypes.c_int64
_FLOAT = ctypes.c_float


class QuantisedWeight(ctypes.Structure):
    """`quantised_weight` of quantised.h."""

    _fields_ = (
        ("codes", _POINTER),
        ("scales", _POINTER),
        ("offsets", _POINTER),
        ("bias", _POINTER),
        ("in_features", _INT),
        ("out_features", _INT),
        ("bits", ctypes.c_int32),
        ("group", ctypes.c_int32),
        ("multiplier", _FLOAT),
    )


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
    "ratoon_attention": (
        ctypes.c_int,
        [*[_POINTER, _INT] * 2, _INT, *[_POINTER, _INT] * 3, *[_POINTER] * 3, *[_INT] * 7, _POINTER, _INT, _FLOAT],
    ),
    "ratoon_store_kv": (None, [*[_POINTER, _INT] * 2, _INT, *[_POINTER, _INT] * 2, _POINTER, *[_INT] * 4]),
}
_PROGRAM_SIGNATURES: dict[str, tuple[object, list[object]]] = {"ratoon_run_program": (_INT, [_POINTER, _INT])}
_DRAW_SIGNATURES: dict[str, tuple[object, list[object]]] = {
    "ratoon_draw": (None, [_POINTER, _INT, _INT, *[_POINTER] * 6])
}
# Of weights in 16 bits. A library that was built before these and the next existed does without, and without recorded
# passes.
_WIDENING_SIGNATURES: dict[str, tuple[object, list[object]]] = {
    "ratoon_packed_size_16": (_INT, [_INT, _INT]),
    "ratoon_pack_weight_16": (None, [_POINTER, _INT, _INT, _INT, _POINTER]),
}
# Of weights in 4 and 8 bits.
_QUANTISED_SIGNATURES: dict[str, tuple[object, list[object]]] = {
    "ratoon_quantised_scratch": (_INT, [_INT]),
    "ratoon_quantised_linear": (None, [_POINTER, _POINTER, _INT, _INT, _POINTER, _POINTER, _INT]),
    "ratoon_quantised_gated_mlp": (None, [_POINTER, _POINTER, _POINTER, _INT, _INT, *[_POINTER] * 3]),
    "ratoon_fit_scales": (None, [_POINTER, _INT, ctypes.c_int32, _POINTER, _POINTER]),
    "ratoon_encode": (None, [_POINTER, _INT, ctypes.c_int32, _POINTER, _POINTER, _POINTER]),
}


class Kernels:
    """The functions of a kernel set, as attributes. They are looked up for each call: while a pass is recorded
    (recording.py), others are in their place."""

    def __init__(self, loaded: ctypes.CDLL, names: list[str]) -> None:
        self.functions = {name: getattr(loaded, name) for name in names}
        # of those that can be recorded: the addresses of the functions that take their arguments as words
        recordable = [name for name in (*names, "ratoon_copy") if hasattr(loaded, f"{name}_words")]
        self.words = {name: _address(loaded, f"{name}_words") for name in recordable}
        self.replace(self.functions)

    def replace(self, functions: dict[str, Any]) -> None:
        vars(self).update(functions)

    def __getattr__(self, name: str) -> Any:
        raise AttributeError(f"the kernel set has no {name}")


def library() -> Kernels | None:
    """The kernels for this processor, or None where there are none: then torch computes everything."""
    return _found()[1]


def kernel_set_name() -> str:
    """Which set `library` found: one of KERNEL_SETS, or "none"."""
    return _found()[0]


def has_widening_kernels() -> bool:
    """Whether the set has products with weights in 16 bits."""
    kernels = library()
    return kernels is not None and _WIDENING_SIGNATURES.keys() <= kernels.functions.keys()


def has_quantised_kernels() -> bool:
    """Whether the set has products with weights in 4 and 8 bits."""
    kernels = library()
    return kernels is not None and _QUANTISED_SIGNATURES.keys() <= kernels.functions.keys()


def can_record() -> bool:
    """Whether the set can replay recorded passes."""
    kernels = library()
    return kernels is not None and _PROGRAM_SIGNATURES.keys() <= kernels.functions.keys()


def can_draw() -> bool:
    """Whether the set can draw tokens."""
    kernels = library()
    return kernels is not None and _DRAW_SIGNATURES.keys() <= kernels.functions.keys()


@functools.cache
def _found() -> tuple[str, Kernels | None]:
    for kernel_set in _wanted_sets():
        loaded = _load(kernel_set)
        if loaded is not None:
            return kernel_set, loaded
    return "none", None


def _load(kernel_set: str) -> Kernels | None:
    path = Path(__file__).with_name(f"kernels_{kernel_set}{'.dylib' if platform.system() == 'Darwin' else '.so'}")
    if not path.exists():
        return None
    try:
        loaded = ctypes.CDLL(str(path))
    except OSError:  # built for another system
        return None
    if hasattr(loaded, "ratoon_kernels_usable") and not loaded.ratoon_kernels_usable():
        return None  # the system refuses what the processor has
    later = _WIDENING_SIGNATURES | _QUANTISED_SIGNATURES | _PROGRAM_SIGNATURES | _DRAW_SIGNATURES
    names = [*_SIGNATURES, *(name for name in later if hasattr(loaded, name))]
    for name in names:
        function = getattr(loaded, name)
        function.restype, function.argtypes = (_SIGNATURES | later)[name]
    return Kernels(loaded, names)


def _address(loaded: ctypes.CDLL, name: str) -> int:
    address = ctypes.cast(getattr(loaded, name), ctypes.c_void_p).value
    assert address is not None
    return address


def _wanted_sets() -> list[str]:
    """The sets to try, best first: those that this processor has, or the one that the environment names."""
    available, wanted = _supported_sets(), os.environ.get(VARIABLE, "")
    if wanted in ("", "auto"):
        return available
    if wanted == "none":
        return []
    if wanted not in KERNEL_SETS:
        raise ConfigError(VARIABLE, f"{wanted!r} is unknown", f"expected auto, none, {', '.join(KERNEL_SETS)}")
    if wanted not in available:
        raise ConfigError(
            VARIABLE, f"this processor can't run {wanted}", f"it can run {', '.join(available) or 'none'}"
        )
    return [wanted]


def _supported_sets() -> list[str]:
    """Kernel sets whose instructions this processor has, best first."""
    flags = _cpu_flags()
    if platform.machine() in ("aarch64", "arm64"):
        return ["neondot", "neon"] if "asimddp" in flags else ["neon"]
    supported = []
    if {"avx512f", "avx512bw", "avx512cd", "avx512dq", "avx512vl"} <= flags:
        if "avx512_vnni" in flags:
            supported += ["avx512amx", "avx512vnni"] if {"amx_tile", "amx_int8"} <= flags else ["avx512vnni"]
        supported.append("avx512")
    if {"avx2", "fma", "f16c", "bmi2"} <= flags:
        supported.append("avx2")
    return supported


def _cpu_flags() -> set[str]:
    """The names of instruction sets that Linux gives."""
    try:
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith(("flags", "Features")):
                return set(line.split(":", 1)[1].split())
    except OSError:
        pass
    return set()
