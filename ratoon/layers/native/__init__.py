"""The CPU kernels as Python functions: finding the library for this processor, and its C signatures.

Plain ctypes: a call costs a microsecond or two and releases the interpreter, except where that would cost more than the
call. Pointers are passed as numbers; the
caller keeps the tensors alive and has checked that they are float32 and dense in their last dimension.
"""

from __future__ import annotations

import ctypes
import functools
import logging
import os
import platform
from pathlib import Path
from typing import Any

from ratoon.core.errors import ConfigError
from ratoon.core.machine import cpu_flags
from ratoon.layers.native.sources import digest_of

logger = logging.getLogger(__name__)

VARIABLE = "RATOON_KERNELS"  # a kernel set by name instead of the best one, or "none"
KERNEL_SETS = ("avx512amx", "avx512vnni", "avx512", "avx2", "neoni8mm", "neondot", "neon")

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
        ("unpack_from", ctypes.c_int32),
        ("matrices_from", ctypes.c_int32),
    )


class LowRankPart(ctypes.Structure):
    """`low_rank_part` of kernels.h."""

    _fields_ = (
        ("a", _POINTER),
        ("b", _POINTER),
        ("rank", _INT),
        ("column", _INT),
        ("out", _INT),
        ("scale", _FLOAT),
        ("format", ctypes.c_int32),
    )


class SavedTable(ctypes.Structure):
    """`saved_table` of kernels.h."""

    _fields_ = (("numbers", _POINTER), ("rows", _INT), ("format", _INT))


class RouteRule(ctypes.Structure):
    """`route_rule` of kernels.h."""

    _fields_ = (
        ("experts", _INT),
        ("top_k", _INT),
        ("scoring", _INT),
        ("renormalise", _INT),
        ("groups", _INT),
        ("top_groups", _INT),
        ("bias", _POINTER),
        ("scale", _FLOAT),
    )


class ExpertWeight(ctypes.Structure):
    """`expert_weight` of kernels.h."""

    _fields_ = (("packed", _POINTER), ("bias", _POINTER), ("quantised", _POINTER))


class ExpertLayer(ctypes.Structure):
    """`expert_layer` of kernels.h."""

    _fields_ = (
        ("experts", _INT),
        ("first", _INT),
        ("in_features", _INT),
        ("inner", _INT),
        ("out_features", _INT),
        ("parts", _INT),
        ("gate_up", _POINTER),
        ("down", _POINTER),
        ("activation", _INT),
        ("has_quantised", _INT),
        ("limit", _FLOAT),
    )


class DecodeInputs(ctypes.Structure):
    """`decode_inputs` of kernels.h."""

    _fields_ = (
        ("token_ids", _POINTER),
        ("num_computed", _POINTER),
        ("max_model_len", _INT),
        ("max_blocks", _INT),
        ("input_ids", _POINTER),
        ("positions", _POINTER),
        ("seq_lens", _POINTER),
        ("query_start", _POINTER),
    )


class DecodeTables(ctypes.Structure):
    """`decode_tables` of kernels.h."""

    _fields_ = (("block_tables", _POINTER), ("tables", _POINTER), ("slots", _POINTER), ("block_size", _INT))


class BlockPart(ctypes.Structure):
    """`block_part` of kernels.h."""

    _fields_ = (("bytes_at", _POINTER), ("bytes", _INT))


class MatchCalls(ctypes.Structure):
    """`match_calls` of kernels.h."""

    _fields_ = (
        ("consume", _POINTER),
        ("fill", _POINTER),
        ("is_accepting", _POINTER),
        ("mask_bytes", _INT),
        ("first_bytes", _POINTER),
        ("tokens", _INT),
        ("most_alike", _INT),
    )


_SIGNATURES: dict[str, tuple[object, list[object]]] = {
    "ratoon_sources": (ctypes.c_char_p, []),
    "ratoon_set_threads": (ctypes.c_int, [ctypes.c_int]),
    "ratoon_packed_size": (_INT, [_INT, _INT]),
    "ratoon_pack_weight": (None, [_POINTER, _INT, _INT, _POINTER]),
    "ratoon_linear": (None, [_POINTER, _INT, _INT, _POINTER, _INT, _INT, _POINTER, _POINTER, _INT]),
    "ratoon_encoder_linear": (
        ctypes.c_int,
        [_POINTER, _INT, _INT, _POINTER, _INT, _INT, _POINTER, ctypes.c_int, _POINTER, _INT],
    ),
    "ratoon_gated_mlp": (None, [_POINTER, _INT, _INT, *[_POINTER, _POINTER, _INT] * 2, _INT, _POINTER, _POINTER]),
    "ratoon_add_low_rank": (ctypes.c_int, [_POINTER, _INT, _INT, _INT, _POINTER, _INT, _INT, *[_POINTER] * 2, _INT]),
    "ratoon_low_rank_bytes": (_INT, [_INT, _INT, _INT]),
    "ratoon_pack_low_rank": (ctypes.c_int, [_POINTER, _INT, _INT, _INT, _POINTER]),
    "ratoon_replace_rows": (None, [_POINTER, _INT, _POINTER, _POINTER, *[_INT] * 3, _POINTER]),
    "ratoon_rms_norm": (None, [_POINTER, _INT, _POINTER, _INT, _POINTER, _FLOAT, _POINTER, _INT, _INT]),
    "ratoon_layer_norm": (None, [_POINTER, _INT, _POINTER, _INT, _POINTER, _POINTER, _FLOAT, _POINTER, _INT, _INT]),
    "ratoon_head_rms_norm": (None, [_POINTER, _INT, _POINTER, _INT, _FLOAT, _INT, _INT, _INT]),
    "ratoon_rotary": (None, [*[_POINTER, _INT, _INT] * 2, _INT, _INT, *[_POINTER] * 3, _INT, _INT]),
    "ratoon_embed": (ctypes.c_int, [_INT, _POINTER, _INT, _INT, _POINTER, _INT, _INT, _POINTER]),
    "ratoon_embed_part": (ctypes.c_int, [_INT, _POINTER, *[_INT] * 4, _POINTER, _INT, _INT, _POINTER]),
    "ratoon_silu_and_mul": (None, [_POINTER, _INT, _POINTER, _INT, _INT]),
    "ratoon_activation": (None, [_POINTER, _INT, _POINTER, _INT, _INT, ctypes.c_int]),
    "ratoon_gated_activation": (None, [_POINTER, _INT, _POINTER, _INT, _INT, ctypes.c_int]),
    "ratoon_scale": (None, [_POINTER, _INT, _INT, _INT, _FLOAT]),
    "ratoon_add": (None, [_POINTER, _INT, _POINTER, _INT, _INT, _INT]),
    "ratoon_soft_cap": (None, [_POINTER, _INT, _INT, _INT, _FLOAT]),
    "ratoon_clamped_swiglu": (None, [_POINTER, _INT, _POINTER, _INT, _INT, _FLOAT]),
    "ratoon_route": (None, [_POINTER, _POINTER, _INT, _INT, *[_POINTER] * 3]),
    "ratoon_experts_scratch": (_INT, [_POINTER, _INT, _INT]),
    "ratoon_experts": (ctypes.c_int, [_POINTER, _POINTER, _INT, _INT, _POINTER, _POINTER, _INT, _POINTER, _POINTER]),
    "ratoon_add_gated": (None, [*[_POINTER] * 3, *[_INT] * 3]),
    "ratoon_attention": (
        ctypes.c_int,
        [
            *[_POINTER, _INT] * 2,
            _INT,
            *[_POINTER, _INT] * 3,
            *[_POINTER] * 3,
            *[_INT] * 7,
            *[_POINTER] * 2,
            _INT,
            _FLOAT,
            _FLOAT,
            _POINTER,
        ],
    ),
    "ratoon_attention_bf16_scratch": (_INT, [_INT] * 4),
    "ratoon_attention_bf16": (None, [*[_POINTER, _INT] * 4, _POINTER, _INT, _INT, _FLOAT, _POINTER]),
    "ratoon_store_kv": (None, [*[_POINTER, _INT] * 2, _INT, *[_POINTER, _INT] * 2, _POINTER, *[_INT] * 4]),
    "ratoon_latent_attention": (
        ctypes.c_int,
        [*[_POINTER, _INT] * 2, _INT, *[_POINTER, _INT] * 3, *[_POINTER] * 3, *[_INT] * 6, _POINTER, _FLOAT, _POINTER],
    ),
    "ratoon_store_latent": (None, [_POINTER, _INT, _INT, *[_POINTER, _INT] * 2, _POINTER, *[_INT] * 3]),
    "ratoon_head_products": (ctypes.c_int, [_POINTER, *[_INT] * 6, _POINTER, _INT, _POINTER, _INT]),
    "ratoon_scan": (
        ctypes.c_int,
        [
            *[_POINTER, _INT] * 2,
            *[_POINTER] * 5,
            *[_FLOAT] * 2,
            *[_POINTER, _INT] * 3,
            *[_POINTER] * 3,
            *[_INT] * 7,
            _POINTER,
        ],
    ),
    "ratoon_group_bytes": (_INT, [_INT]),
    "ratoon_open_group": (_POINTER, [_POINTER, _INT, _INT, _INT]),
    "ratoon_close_group": (None, [_POINTER]),
    "ratoon_all_reduce": (ctypes.c_int, [_POINTER, _POINTER, _INT]),
    "ratoon_all_gather": (ctypes.c_int, [_POINTER, _POINTER, _INT, _INT, _INT, _POINTER]),
    "ratoon_all_to_all": (ctypes.c_int, [_POINTER, _POINTER, _INT, _POINTER, _POINTER]),
    "ratoon_run_program": (_INT, [_POINTER, _INT]),
    "ratoon_time_program": (_INT, [_POINTER, _INT, _POINTER]),
    "ratoon_prepare_decodes": (_INT, [_POINTER, _POINTER, _INT]),
    "ratoon_prepare_tables": (None, [_POINTER, _POINTER, _POINTER, _INT, _INT]),
    "ratoon_greedy": (None, [_POINTER, _INT, _INT, _POINTER, _POINTER]),
    "ratoon_draw": (None, [_POINTER, _INT, _INT, *[_POINTER] * 6]),
    "ratoon_match_texts": (None, [*[_POINTER] * 4, _INT, _POINTER, _INT, _POINTER]),
    "ratoon_allow_bits": (None, [_POINTER, _INT, _POINTER, _INT, _POINTER, _INT]),
    "ratoon_resize_width": (None, [_POINTER, *[_INT] * 3, _POINTER, _POINTER, _INT, _POINTER, _POINTER]),
    "ratoon_resize_height": (None, [_POINTER, _INT, _INT, _POINTER, _POINTER, _INT, _POINTER]),
    "ratoon_read_block": (ctypes.c_int, [ctypes.c_int, _POINTER, _INT, _POINTER, _INT]),
    # Of weights in 16 bits
    "ratoon_packed_size_16": (_INT, [_INT, _INT]),
    "ratoon_pack_weight_16": (None, [_POINTER, _INT, _INT, _INT, _POINTER]),
    # Of weights in 4 and 8 bits
    "ratoon_quantised_scratch": (_INT, [_INT]),
    "ratoon_quantised_kernel": (_INT, [_POINTER, _INT]),
    "ratoon_quantised_linear": (None, [_POINTER, _POINTER, _INT, _INT, _POINTER, _POINTER, _INT]),
    "ratoon_quantised_gated_mlp": (None, [_POINTER, _POINTER, _POINTER, _INT, _INT, *[_POINTER] * 3]),
    "ratoon_repack_codes": (None, [_INT, _POINTER, _INT, _INT, _POINTER]),
    "ratoon_repack_halves": (None, [_POINTER, _INT, _INT, _INT, _POINTER]),
    "ratoon_fit_scales": (None, [_POINTER, _INT, ctypes.c_int32, _POINTER, _POINTER]),
    "ratoon_encode": (None, [_POINTER, _INT, ctypes.c_int32, _POINTER, _POINTER, _POINTER]),
}


# Calls that are over before another thread could take the interpreter: having given it up, they would wait until that
# thread gives it back.
_BRIEF = ("ratoon_prepare_decodes", "ratoon_prepare_tables")


class Kernels:
    """The functions of a kernel set, as attributes. They are looked up for each call: while a pass is recorded
    (recording.py), others are in their place."""

    def __init__(self, loaded: ctypes.CDLL) -> None:
        self.functions: dict[str, Any] = {}
        holding = ctypes.PyDLL(loaded._name)  # the same library, whose calls keep the interpreter
        for name, (result, arguments) in _SIGNATURES.items():
            self.functions[name] = function = getattr(holding if name in _BRIEF else loaded, name)
            function.restype, function.argtypes = result, arguments
        # of those that can be recorded: the addresses of the functions that take their arguments as words
        recordable = [name for name in (*_SIGNATURES, "ratoon_copy") if hasattr(loaded, f"{name}_words")]
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


def has_bf16_matrices(head_dim: int) -> bool:
    """Whether `ratoon_attention_bf16` can serve heads of this size here."""
    kernels = library()
    wanted = kernels is not None and kernels.ratoon_attention_bf16_scratch(1, 1, 1, head_dim) > 0
    return wanted and "amx_bf16" in cpu_flags()


def reason_for_none() -> str:
    """Why `library` found nothing."""
    if os.environ.get(VARIABLE) == "none":
        return f"{VARIABLE} is none"
    if not _supported_sets():
        return "this processor has not the instructions that the kernels need (AVX2, FMA, F16C and BMI2, or NEON)"
    return "no kernels were built for this processor"


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
    if not _is_current(loaded):
        logger.warning("%s is not used: it was built from other sources; install the package again", path.name)
        return None
    if not loaded.ratoon_kernels_usable():
        return None  # the system refuses what the processor has
    return Kernels(loaded)


def _is_current(loaded: ctypes.CDLL) -> bool:
    """Whether a library was built from the C files that lie beside it. Without these, as in a wheel, it is."""
    digest = digest_of(Path(__file__).parent)
    if not digest:
        return True
    if not hasattr(loaded, "ratoon_sources"):
        return False
    loaded.ratoon_sources.restype = ctypes.c_char_p
    return bool(loaded.ratoon_sources() == digest.encode())


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
    flags = cpu_flags()
    if platform.machine() in ("aarch64", "arm64"):
        if "asimddp" not in flags:
            return ["neon"]
        return ["neoni8mm", "neondot", "neon"] if "i8mm" in flags else ["neondot", "neon"]
    supported = []
    if {"avx512f", "avx512bw", "avx512cd", "avx512dq", "avx512vl"} <= flags:
        if "avx512_vnni" in flags:
            supported += ["avx512amx", "avx512vnni"] if {"amx_tile", "amx_int8"} <= flags else ["avx512vnni"]
        supported.append("avx512")
    if {"avx2", "fma", "f16c", "bmi2"} <= flags:
        supported.append("avx2")
    return supported
