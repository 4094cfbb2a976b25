"""Products of a few rows with a weight: what a decode step of small batches spends its time on.

Every weight is read once, at the speed of memory; a program computes a few outputs of all rows, with sums in float32.
What stands before and behind the product goes into the same kernel: the RMS norm of the input (each program computes
it again, the input is small), the gate's activation, the addition to the residual stream. Each of them rounds as it
does alone.

With programmatic dependent launch (launch.py) a kernel loads its first weights before it waits for its input.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from ratoon.layers.ops import RMSWeights
from ratoon.layers.product_choices import Tile
from ratoon.layers.triton.dependent import launch_options, start_kernel_behind, wait_for_kernel_before
from ratoon.layers.triton.elementwise import activate
from ratoon.layers.triton.launch import launch

Tensor = torch.Tensor

MAX_NORM_WIDTH = 8192  # of an input that is normed inside the kernel


def gemv(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    tile: Tile,
    *,
    scales: Tensor | None = None,
    norm: RMSWeights | None = None,
    gated: str | None = None,
    residual: Tensor | None = None,
    dependent: bool = False,
) -> Tensor:
    """x [T, in] with T up to 4, weight [out, in] → [T, out]. `scales` [out], in float32: of a weight in 8 bits.

    `gated`: the weight holds a gate and an up part, one above the other; the result [T, out / 2] is this activation of
    the one times the other. `residual` [T, out] is added to in place and returned. `dependent`: launch before the
    kernel ahead has ended.
    """
    rows, width = x.shape
    outputs = weight.shape[0] if gated is None else weight.shape[0] // 2
    y = x.new_empty((rows, outputs)) if residual is None else residual
    launch(
        _gemv_kernel, (triton.cdiv(outputs, tile.outputs),),
        x, weight, scales, weight if bias is None else bias, weight if norm is None else norm.weight, y,
        x.stride(0), y.stride(0), outputs, 0.0 if norm is None else norm.eps,
        WIDTH=width, ROWS=rows, SCALED=scales is not None, BIAS=bias is not None, NORM=norm is not None, GATED=gated,
        ADD=residual is not None, BLOCK_OUT=tile.outputs,
        BLOCK_IN=min(tile.inputs, triton.next_power_of_2(width)),
        BLOCK_NORM=1 if norm is None else triton.next_power_of_2(width),
        num_warps=tile.num_warps, num_stages=1, **launch_options(dependent),
    )  # fmt: skip
    return y


@triton.jit
def _gemv_kernel(
    x, weight, scales, bias, norm, y, x_stride, y_stride, outputs, eps, WIDTH: tl.constexpr,
    ROWS: tl.constexpr, SCALED: tl.constexpr, BIAS: tl.constexpr, NORM: tl.constexpr, GATED: tl.constexpr,
    ADD: tl.constexpr, DEPENDENT: tl.constexpr, BLOCK_OUT: tl.constexpr, BLOCK_IN: tl.constexpr,
    BLOCK_NORM: tl.constexpr,
):  # fmt: skip
    if DEPENDENT:
        start_kernel_behind()
    output = tl.program_id(0) * BLOCK_OUT + tl.arange(0, BLOCK_OUT)  # [O]
    column = tl.arange(0, BLOCK_IN)[None, :]  # [1, I]
    exists = (output < outputs)[:, None]
    first = weight + output.to(tl.int64)[:, None] * WIDTH + column  # [O, I]
    second = weight + (output.to(tl.int64) + outputs)[:, None] * WIDTH + column  # of the up part
    here = exists & (column < WIDTH)
    tile = tl.load(first, mask=here, other=0.0)
    up_tile = tile
    if GATED is not None:
        up_tile = tl.load(second, mask=here, other=0.0)
    if DEPENDENT:
        wait_for_kernel_before()
    # One input row after the other, by name: a further dimension would move the tile between threads.
    scale0, scale1, scale2, scale3 = 1.0, 1.0, 1.0, 1.0
    if NORM:
        scale0 = _norm_scale(x, WIDTH, eps, BLOCK_NORM)
        if ROWS > 1:
            scale1 = _norm_scale(x + x_stride, WIDTH, eps, BLOCK_NORM)
        if ROWS > 2:
            scale2 = _norm_scale(x + 2 * x_stride, WIDTH, eps, BLOCK_NORM)
        if ROWS > 3:
            scale3 = _norm_scale(x + 3 * x_stride, WIDTH, eps, BLOCK_NORM)
    sum0 = tl.zeros((BLOCK_OUT, BLOCK_IN), tl.float32)
    sum1, sum2, sum3, up0, up1, up2, up3 = sum0, sum0, sum0, sum0, sum0, sum0, sum0
    for start in range(0, WIDTH, BLOCK_IN):
        wide, wide_up = tile.to(tl.float32), up_tile.to(tl.float32)
        coming = start + BLOCK_IN
        here = exists & (column + coming < WIDTH)
        tile = tl.load(first + coming, mask=here, other=0.0)
        if GATED is not None:
            up_tile = tl.load(second + coming, mask=here, other=0.0)
        values = _load_input(x, norm, scale0, start + column, WIDTH, NORM)
        sum0 += wide * values
        if GATED is not None:
            up0 += wide_up * values
        if ROWS > 1:
            values = _load_input(x + x_stride, norm, scale1, start + column, WIDTH, NORM)
            sum1 += wide * values
            if GATED is not None:
                up1 += wide_up * values
        if ROWS > 2:
            values = _load_input(x + 2 * x_stride, norm, scale2, start + column, WIDTH, NORM)
            sum2 += wide * values
            if GATED is not None:
                up2 += wide_up * values
        if ROWS > 3:
            values = _load_input(x + 3 * x_stride, norm, scale3, start + column, WIDTH, NORM)
            sum3 += wide * values
            if GATED is not None:
                up3 += wide_up * values
    _store_row(y, scales, bias, sum0, up0, output, outputs, SCALED, BIAS, GATED, ADD)
    if ROWS > 1:
        _store_row(y + y_stride, scales, bias, sum1, up1, output, outputs, SCALED, BIAS, GATED, ADD)
    if ROWS > 2:
        _store_row(y + 2 * y_stride, scales, bias, sum2, up2, output, outputs, SCALED, BIAS, GATED, ADD)
    if ROWS > 3:
        _store_row(y + 3 * y_stride, scales, bias, sum3, up3, output, outputs, SCALED, BIAS, GATED, ADD)


@triton.jit
def _norm_scale(x, WIDTH: tl.constexpr, eps, BLOCK: tl.constexpr):
    column = tl.arange(0, BLOCK)
    values = tl.load(x + column, mask=column < WIDTH, other=0.0).to(tl.float32)
    return tl.rsqrt(tl.sum(values * values, axis=0) / WIDTH + eps)


@triton.jit
def _load_input(x, norm, scale, column, WIDTH: tl.constexpr, NORM: tl.constexpr):
    """[1, I] in float32."""
    values = tl.load(x + column, mask=column < WIDTH, other=0.0)
    if NORM:
        factors = tl.load(norm + column, mask=column < WIDTH, other=0.0).to(tl.float32)
        normed = (values.to(tl.float32) * scale).to(values.dtype).to(tl.float32)
        values = (normed * factors).to(values.dtype)
    return values.to(tl.float32)


@triton.jit
def _store_row(
    y, scales, bias, sums, up_sums, output, outputs,
    SCALED: tl.constexpr, BIAS: tl.constexpr, GATED: tl.constexpr, ADD: tl.constexpr,
):  # fmt: skip
    """The row's sums [O, I] over I, and what follows the product."""
    exists = output < outputs
    kind = y.dtype.element_ty
    total = _finish_sum(tl.sum(sums, axis=1), scales, bias, output, exists, SCALED, BIAS).to(kind).to(tl.float32)
    if GATED is not None:
        up = _finish_sum(tl.sum(up_sums, axis=1), scales, bias, output + outputs, exists, SCALED, BIAS)
        total = activate(total, GATED).to(kind).to(tl.float32) * up.to(kind).to(tl.float32)
    if ADD:
        total = total.to(kind).to(tl.float32) + tl.load(y + output, mask=exists, other=0.0).to(tl.float32)
    tl.store(y + output, total.to(kind), mask=exists)


@triton.jit
def _finish_sum(total, scales, bias, output, exists, SCALED: tl.constexpr, BIAS: tl.constexpr):
    if SCALED:
        total *= tl.load(scales + output, mask=exists, other=0.0)
    if BIAS:
        total += tl.load(bias + output, mask=exists, other=0.0).to(tl.float32)
    return total
