"""Activations, alone or gating a second half, and the rotation of heads by position."""

from __future__ import annotations

from functools import cache

import torch
import triton
import triton.language as tl

from ratoon.layers.triton.dependent import launch_options, wait_for_kernel_before
from ratoon.layers.triton.launch import Launcher, launch
from ratoon.layers.triton.norms import warps_of

Tensor = torch.Tensor

BLOCK = 1024  # numbers of a program


def activation(x: Tensor, kind: str) -> Tensor:
    """x [T, W], its rows any distance apart → [T, W], in new memory. Kinds are those of Ops."""
    rows, width = x.shape
    y = x.new_empty((rows, width))
    grid = (rows, -(-width // BLOCK))
    _activation_launcher(kind, False, False)(grid, x, y, x.stride(0), x.stride(1), width)
    return y


def gated_activation(x: Tensor, kind: str, dependent: bool = False) -> Tensor:
    """[T, 2·I] → [T, I], in new memory: the activation of the first half times the second. `dependent`: launch before
    the kernel ahead has ended."""
    rows, width = x.shape[0], x.shape[1] // 2
    y = x.new_empty((rows, width))
    grid = (rows, -(-width // BLOCK))
    _activation_launcher(kind, True, dependent)(grid, x, y, x.stride(0), x.stride(1), width)
    return y


@cache
def _activation_launcher(kind: str, gated: bool, dependent: bool) -> Launcher:
    return Launcher(
        _activation_kernel,
        KIND=kind,
        GATED=gated,
        BLOCK=BLOCK,
        num_warps=warps_of(BLOCK),
        **launch_options(dependent),
    )


def rotary(q: Tensor, k: Tensor, positions: Tensor, cos_sin: Tensor, axes: Tensor | None = None) -> None:
    """Rotates heads in place, as Ops.rotary does. One program turns all heads of a token."""
    rows, heads, _ = q.shape
    half = cos_sin.shape[1] // 2
    block_heads = triton.next_power_of_2(max(heads, k.shape[1]))
    block = triton.next_power_of_2(half)
    launch(
        _rotary_kernel, (rows,),
        q, k, positions, cos_sin, q.stride(0), q.stride(1), q.stride(2), k.stride(0), k.stride(1), k.stride(2),
        cos_sin.stride(0), heads, k.shape[1], half, q if axes is None else axes, positions.stride(0),
        HAS_AXES=axes is not None, BLOCK_HEADS=block_heads, BLOCK=block,
        num_warps=min(warps_of(block_heads * block), 8),
    )  # fmt: skip


@triton.jit
def activate(x, KIND: tl.constexpr):
    """x in float32."""
    if KIND == "silu":
        return x * tl.sigmoid(x)
    elif KIND == "relu":
        return tl.maximum(x, 0.0)
    elif KIND == "quick_gelu":
        return x * tl.sigmoid(1.702 * x)
    elif KIND == "gelu":
        return 0.5 * x * (1.0 + tl.erf(x * 0.7071067811865476))
    else:
        tl.static_assert(KIND == "gelu_new" or KIND == "gelu_pytorch_tanh", "an unknown activation")
        # 0.5 · (1 + tanh(u)) is sigmoid(2 · u)
        return x * tl.sigmoid(1.5957691216057308 * (x + 0.044715 * x * x * x))


@triton.jit
def _activation_kernel(
    x, y, row_stride, stride, width,
    KIND: tl.constexpr, GATED: tl.constexpr, BLOCK: tl.constexpr, DEPENDENT: tl.constexpr,
):  # fmt: skip
    if DEPENDENT:
        wait_for_kernel_before()
    row = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = columns < width
    places = x + row * row_stride + columns * stride
    values = tl.load(places, mask=inside, other=0.0)
    result = activate(values.to(tl.float32), KIND).to(values.dtype)
    if GATED:
        second = tl.load(places + width * stride, mask=inside, other=0.0)
        result = (result.to(tl.float32) * second.to(tl.float32)).to(values.dtype)
    tl.store(y + row * width + columns, result, mask=inside)


@triton.jit
def _rotary_kernel(
    q, k, positions, cos_sin, q_row, q_head, q_stride, k_row, k_head, k_stride, table_row, heads, kv_heads, half, axes,
    axis_stride, HAS_AXES: tl.constexpr, BLOCK_HEADS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    columns = tl.arange(0, BLOCK)[None, :]
    head = tl.arange(0, BLOCK_HEADS)[:, None]
    within = columns < half
    if HAS_AXES:
        axis = tl.load(axes + columns, mask=within, other=0)
        angles = cos_sin + tl.load(positions + axis * axis_stride + row).to(tl.int64) * table_row
    else:
        angles = cos_sin + tl.load(positions + row).to(tl.int64) * table_row
    cos = tl.load(angles + columns, mask=within, other=0.0)
    sin = tl.load(angles + half + columns, mask=within, other=0.0)
    _turn(q + row * q_row + head * q_head + columns * q_stride, half * q_stride, cos, sin, within & (head < heads))
    _turn(k + row * k_row + head * k_head + columns * k_stride, half * k_stride, cos, sin, within & (head < kv_heads))


@triton.jit
def _turn(places, distance, cos, sin, inside):
    """`distance` numbers lie between the two parts of a pair."""
    first = tl.load(places, mask=inside, other=0.0)
    second = tl.load(places + distance, mask=inside, other=0.0)
    wide_first, wide_second = first.to(tl.float32), second.to(tl.float32)
    tl.store(places, (wide_first * cos - wide_second * sin).to(first.dtype), mask=inside)
    tl.store(places + distance, (wide_second * cos + wide_first * sin).to(first.dtype), mask=inside)
