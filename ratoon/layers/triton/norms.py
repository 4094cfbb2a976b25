"""Norms by row: RMS and layer norm over the hidden size, alone or after adding to the residual stream, and by head.

A row is computed by one program from that row alone, in float32, with the roundings of TorchOps: a sum with the
residual is rounded before it is normed, and an RMS norm before the weight is applied, if that has 16 bits too.
"""

from __future__ import annotations

from functools import cache

import torch
import triton
import triton.language as tl

from ratoon.layers.triton.dependent import launch_options, wait_for_kernel_before
from ratoon.layers.triton.launch import Launcher, launch

Tensor = torch.Tensor

MAX_HEADS_OF_A_PROGRAM = 8


def rms_norm(x: Tensor, weight: Tensor, eps: float, residual: Tensor | None = None, dependent: bool = False) -> Tensor:
    """x [T, H] → [T, H], in new memory. With `residual`, that is added to in place first, and the sum is normed.
    `dependent`: launch before the kernel ahead has ended."""
    rows, width = x.shape
    y = x.new_empty((rows, width))
    added = x if residual is None else residual
    launcher = _rms_norm_launcher(width, residual is not None, dependent)
    launcher((rows,), x, added, weight, y, x.stride(0), added.stride(0), width, eps)
    return y


@cache
def _rms_norm_launcher(width: int, add: bool, dependent: bool) -> Launcher:
    block = triton.next_power_of_2(width)
    return Launcher(_rms_norm_kernel, ADD=add, BLOCK=block, num_warps=warps_of(block), **launch_options(dependent))


def layer_norm(x: Tensor, weight: Tensor, bias: Tensor | None, eps: float, residual: Tensor | None = None) -> Tensor:
    """Normalises rows with the mean subtracted and a bias added."""
    rows, width = x.shape
    y = x.new_empty((rows, width))
    added = x if residual is None else residual
    block = triton.next_power_of_2(width)
    launch(
        _layer_norm_kernel, (rows,),
        x, added, weight, weight if bias is None else bias, y, x.stride(0), added.stride(0), width, eps,
        ADD=residual is not None, BIAS=bias is not None, BLOCK=block, num_warps=warps_of(block),
    )  # fmt: skip
    return y


def head_rms_norm(x: Tensor, weight: Tensor, eps: float) -> None:
    """x [T, heads, head_dim], any strides, in place. weight [head_dim] or [heads, head_dim]."""
    rows, heads, head_dim = x.shape
    block_heads = min(triton.next_power_of_2(heads), MAX_HEADS_OF_A_PROGRAM)
    block = triton.next_power_of_2(head_dim)
    launch(
        _head_rms_norm_kernel, (rows, triton.cdiv(heads, block_heads)),
        x, weight, x.stride(0), x.stride(1), x.stride(2), heads, head_dim, eps, OWN_WEIGHTS=weight.dim() == 2,
        BLOCK_HEADS=block_heads, BLOCK=block, num_warps=warps_of(block_heads * block),
    )  # fmt: skip


def warps_of(block: int) -> int:
    """The number of warps of a program over `block` numbers: 8 numbers for each thread, which is 16 bytes of 16-bit
    numbers."""
    return min(max(block // 256, 1), 16)


@triton.jit
def apply_factors(normed, factors, dtype: tl.constexpr):
    """A norm in float32 times its weight, in `dtype`. It is rounded before as well, unless the weight is in float32."""
    if factors.dtype != tl.float32:
        normed = normed.to(dtype).to(tl.float32)
    return (normed * factors.to(tl.float32)).to(dtype)


@triton.jit
def _rms_norm_kernel(
    x, residual, weight, y, x_stride, residual_stride, width, eps,
    ADD: tl.constexpr, BLOCK: tl.constexpr, DEPENDENT: tl.constexpr,
):  # fmt: skip
    if DEPENDENT:
        wait_for_kernel_before()
    row = tl.program_id(0).to(tl.int64)
    columns = tl.arange(0, BLOCK)
    inside = columns < width
    values = tl.load(x + row * x_stride + columns, mask=inside, other=0.0)
    if ADD:
        sums = residual + row * residual_stride + columns
        before = tl.load(sums, mask=inside, other=0.0)
        values = (before.to(tl.float32) + values.to(tl.float32)).to(values.dtype)
        tl.store(sums, values, mask=inside)
    wide = values.to(tl.float32)
    scale = tl.rsqrt(tl.sum(wide * wide, axis=0) / width + eps)
    factors = tl.load(weight + columns, mask=inside, other=0.0)
    tl.store(y + row * width + columns, apply_factors(wide * scale, factors, values.dtype), mask=inside)


@triton.jit
def _layer_norm_kernel(
    x, residual, weight, bias, y, x_stride, residual_stride, width, eps,
    ADD: tl.constexpr, BIAS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    columns = tl.arange(0, BLOCK)
    inside = columns < width
    values = tl.load(x + row * x_stride + columns, mask=inside, other=0.0)
    if ADD:
        sums = residual + row * residual_stride + columns
        before = tl.load(sums, mask=inside, other=0.0)
        values = (before.to(tl.float32) + values.to(tl.float32)).to(values.dtype)
        tl.store(sums, values, mask=inside)
    wide = values.to(tl.float32)
    mean = tl.sum(wide, axis=0) / width
    centred = tl.where(inside, wide - mean, 0.0)
    scale = tl.rsqrt(tl.sum(centred * centred, axis=0) / width + eps)
    result = centred * scale * tl.load(weight + columns, mask=inside, other=0.0).to(tl.float32)
    if BIAS:
        result += tl.load(bias + columns, mask=inside, other=0.0).to(tl.float32)
    tl.store(y + row * width + columns, result.to(values.dtype), mask=inside)


@triton.jit
def _head_rms_norm_kernel(
    x, weight, row_stride, head_stride, stride, heads, head_dim, eps,
    OWN_WEIGHTS: tl.constexpr, BLOCK_HEADS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1) * BLOCK_HEADS + tl.arange(0, BLOCK_HEADS)[:, None]
    columns = tl.arange(0, BLOCK)[None, :]
    inside = (head < heads) & (columns < head_dim)
    places = x + row * row_stride + head * head_stride + columns * stride
    values = tl.load(places, mask=inside, other=0.0)
    wide = values.to(tl.float32)
    scale = tl.rsqrt(tl.sum(wide * wide, axis=1) / head_dim + eps)
    if OWN_WEIGHTS:
        factors = tl.load(weight + head * head_dim + columns, mask=inside, other=0.0)
    else:
        factors = tl.load(weight + columns, mask=columns < head_dim, other=0.0)
    tl.store(places, apply_factors(wide * scale[:, None], factors, values.dtype), mask=inside)
