"""The kernel that takes longest to compile, that of long queries on Hopper GPUs, as it will surely be launched: its
constants follow from the model's config, so that compiling begins before torch is imported. A guess that is wrong costs
a compilation that nothing uses. Imports neither torch nor, but for the guessed launch itself, Triton.
"""

from __future__ import annotations

from functools import cache
from typing import Any

from ratoon.core.config import EngineConfig, ModelConfig
from ratoon.layers.triton.compiler_process import Launch

BLOCK_M, BLOCK_N, STAGES = 128, 128, 2
HEAD_DIMS = range(64, 129, 8)  # that the kernel serves: rows of pages are multiples of 16 bytes
_PANEL = 64  # columns that are copied at once: 128 bytes
HOPPER = 90
_DTYPES = {"bfloat16": "bf16", "float16": "fp16"}
ALIGNMENT = 16  # that Triton compiles for, in bytes and elements
ArgumentType = tuple[str, bool]  # Triton's name, and whether the value is a multiple of 16


@cache
def prefill_constants(
    num_heads: int,
    num_kv_heads: int,
    head_dim: int,
    block_size: int,
    causal: bool,
    has_window: bool,
    has_sinks: bool = False,
) -> dict[str, Any]:
    """Constants and options of prefill_kernel. Not to be changed: they are kept."""
    return {
        "HEAD_DIM": head_dim,
        "DIM": -(-head_dim // _PANEL) * _PANEL,
        "GROUP": num_heads // num_kv_heads,
        "KV_HEADS": num_kv_heads,
        "BLOCK_SIZE": block_size,
        "BLOCK_M": BLOCK_M,
        "BLOCK_N": BLOCK_N,
        "STAGES": STAGES,
        "CAUSAL": causal,
        "HAS_WINDOW": has_window,
        "HAS_SINKS": has_sinks,
        "num_warps": 4,
    }


def prefill_box(block_size: int) -> list[int]:
    """What is copied at once: keys and columns."""
    return [min(block_size, BLOCK_N), _PANEL]


def expected_launches(config: EngineConfig, model: ModelConfig) -> list[Launch]:
    """One for each kind of layer, of a compute capability; on other GPUs there are none."""
    dtype = model.checkpoint_dtype if config.dtype == "auto" else config.dtype
    if config.dtype == "auto" and dtype not in _DTYPES:
        dtype = "bfloat16"
    is_other = config.attention_backend not in ("auto", "triton") or config.batch_invariant
    # That kernel has none of these.
    is_other = is_other or model.attention_soft_cap is not None or model.latent is not None
    is_other = is_other or model.head_dim not in HEAD_DIMS
    if is_other or dtype not in _DTYPES or not model.causal or model.encoder:
        return []
    windows = dict.fromkeys(model.window_of_layer(index) is not None for index in range(model.num_layers))
    return [
        Launch(
            __name__,
            "prefill_launch",
            {
                "num_heads": model.num_heads,
                "num_kv_heads": model.num_kv_heads,
                "head_dim": model.head_dim,
                "block_size": config.cache.block_size,
                "dtype": dtype,
                "has_window": has_window,
                "has_sinks": model.attention_sinks,
            },
            HOPPER,
        )
        for has_window in windows
    ]


def prefill_launch(
    num_heads: int,
    num_kv_heads: int,
    head_dim: int,
    block_size: int,
    dtype: str,
    has_window: bool,
    has_sinks: bool = False,
) -> tuple[Any, list[ArgumentType], dict[str, Any]]:
    """The kernel, the types of its arguments as triton_prefill.py gives them, its constants and options."""
    from ratoon.attention.triton_prefill_kernels import TILE_LAYOUT, prefill_kernel
    from ratoon.layers.triton.dependent import launch_options

    name = _DTYPES[dtype]
    lines = f"tensordesc<{name}{prefill_box(block_size)},{TILE_LAYOUT.value!r}>"
    strides = ((num_heads + 2 * num_kv_heads) * head_dim, head_dim, 2 * num_kv_heads * block_size)
    types = [(f"*{name}", True), (f"*{name}", True), (lines, False), *[("*i32", True)] * 3]
    types += [("*fp32" if has_sinks else f"*{name}", True), ("fp32", False)]  # sinks, or what stands in their place
    types += [("i32", stride % ALIGNMENT == 0) for stride in strides]
    types += [("i32", False)] * 5  # that Triton does not specialise on
    constants = prefill_constants(num_heads, num_kv_heads, head_dim, block_size, True, has_window, has_sinks)
    return prefill_kernel, types, {**constants, **launch_options(dependent=True)}
