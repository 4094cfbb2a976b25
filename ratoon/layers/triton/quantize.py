"""Activations in 8 bits (e4m3) with a scale for each row, alone, after an RMS norm or after the activation of a gate:
one pass over the row."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from ratoon.layers.fp8 import DTYPE, LARGEST, SMALLEST_SCALE
from ratoon.layers.ops import RMSWeights
from ratoon.layers.triton.dependent import launch_options, wait_for_kernel_before
from ratoon.layers.triton.elementwise import activate
from ratoon.layers.triton.launch import launch
from ratoon.layers.triton.norms import warps_of

Tensor = torch.Tensor

ROWS_READ_AT_ONCE = 256  # by the library's product, also beyond the last row


def quantize_rows(
    x: Tensor, norm: RMSWeights | None = None, is_gate: bool = False, dependent: bool = False
) -> tuple[Tensor, Tensor]:
    """x [T, in] → 8-bit numbers [T, in] and scales [T, 1] in float32. `is_gate`: x [T, 2·in], and what is quantised is
    silu of the first half times the second. `dependent`: launch before the kernel ahead has ended."""
    rows, width = x.shape
    if is_gate:
        width //= 2
    numbers = torch.empty((rows, width), dtype=DTYPE, device=x.device)
    padded = triton.cdiv(rows, ROWS_READ_AT_ONCE) * ROWS_READ_AT_ONCE
    scales = torch.empty((padded, 1), dtype=torch.float32, device=x.device)
    block = triton.next_power_of_2(width)
    launch(
        _quantize_kernel, (rows,),
        x, x if norm is None else norm.weight, numbers, scales, x.stride(0), width, 0.0 if norm is None else norm.eps,
        NORM=norm is not None, GATED=is_gate, LARGEST=LARGEST, SMALLEST=SMALLEST_SCALE, BLOCK=block,
        num_warps=warps_of(block), **launch_options(dependent),
    )  # fmt: skip
    return numbers, scales[:rows]


@triton.jit
def _quantize_kernel(
    x, norm, y, scales, x_stride, width, eps,
    NORM: tl.constexpr, GATED: tl.constexpr, LARGEST: tl.constexpr, SMALLEST: tl.constexpr, BLOCK: tl.constexpr,
    DEPENDENT: tl.constexpr,
):  # fmt: skip
    if DEPENDENT:
        wait_for_kernel_before()
    row = tl.program_id(0).to(tl.int64)
    columns = tl.arange(0, BLOCK)
    inside = columns < width
    values = tl.load(x + row * x_stride + columns, mask=inside, other=0.0)
    wide = values.to(tl.float32)
    if GATED:
        second = tl.load(x + row * x_stride + width + columns, mask=inside, other=0.0).to(tl.float32)
        wide = (activate(wide, "silu").to(values.dtype).to(tl.float32) * second).to(values.dtype).to(tl.float32)
    if NORM:
        factors = tl.load(norm + columns, mask=inside, other=0.0).to(tl.float32)
        scale = tl.rsqrt(tl.sum(wide * wide, axis=0) / width + eps)
        wide = (wide * scale).to(values.dtype).to(tl.float32) * factors
    scale = tl.maximum(tl.max(tl.abs(wide), axis=0) / LARGEST, SMALLEST)
    tl.store(scales + row, scale)
    numbers = tl.clamp(wide / scale, -LARGEST, LARGEST)
    tl.store(y + row * width + columns, numbers.to(y.dtype.element_ty), mask=inside)
