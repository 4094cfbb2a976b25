"""Products of up to 64 rows with a weight that is too large for registers (panel.py), on Hopper: the weight streams
through shared memory, and tensor cores take it from there.

What counts is that weights are on their way all the time. The product is transposed: the weight's rows are the side of
64 that Hopper's products (wgmma) have, the input's rows the other one, which can be short. A program computes a tile of
outputs, or a part of its sums where few tiles would leave multiprocessors without work; the last program of a tile to
arrive adds the parts up, always in the same order. Parts are written and read, so there should be few of them. A
program's first weights are on their way before it waits for its input (dependent.py).

In the same kernel: the gate's activation, the addition to the residual stream, the scales of weights and inputs in 8
bits. A norm before the product, or the input's conversion to 8 bits, is a kernel by itself.

Written in Gluon, for compute capability 9.0. It can't run under Triton's interpreter.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import triton
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from ratoon.layers.product_choices import Stream
from ratoon.layers.triton.dependent import launch_options
from ratoon.layers.triton.launch import launch

Tensor = torch.Tensor

MIN_ROWS = 8  # the other side; rows are padded to it
ALIGNMENT = 16  # bytes, of what is copied in boxes
PART_REGISTERS = gl.constexpr(128)  # of a thread, for the sums of other programs that are read at once


def stream_product(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    choice: Stream,
    arrivals: Tensor,
    *,
    scales: Tensor | None = None,
    row_scales: Tensor | None = None,
    gated: bool = False,
    residual: Tensor | None = None,
    dependent: bool = False,
) -> Tensor:
    """x [T, in], weight [out, in] → [T, out] in 16 bits. In 8 bits, both of them, with `scales` [out] and `row_scales`
    [T, 1] in float32: the result is bfloat16.

    `arrivals`: a zero for each 64 outputs, and zero again after it; of this weight alone. `gated`: the weight holds a
    gate and an up part, one above the other; the result [T, out / 2] is silu of the one times the other. `residual`
    [T, out] is added to in place and returned. `dependent`: launch before the kernel ahead has ended.
    """
    rows, width = x.shape
    if x.stride(0) * x.itemsize % ALIGNMENT or x.data_ptr() % ALIGNMENT or x.stride(1) != 1:
        x = x.clone(memory_format=torch.contiguous_format)
    dtype = x.dtype if scales is None else torch.bfloat16
    outputs = weight.shape[0] // 2 if gated else weight.shape[0]
    y = torch.empty((rows, outputs), dtype=dtype, device=x.device) if residual is None else residual
    block_rows = max(MIN_ROWS, triton.next_power_of_2(rows))
    step = choice.step_bytes // weight.itemsize
    steps = triton.cdiv(width, step)
    steps_each = triton.cdiv(steps, choice.splits)
    splits, tiles = triton.cdiv(steps, steps_each), triton.cdiv(outputs, choice.outputs)
    layout = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=8 * weight.itemsize, rank=2)
    parts = y
    if splits > 1:
        tile_numbers = (2 if gated else 1) * choice.outputs * block_rows
        parts = torch.empty((splits, tiles, tile_numbers), dtype=torch.float32, device=x.device)
    launch(
        _stream_kernel, (tiles, splits),
        describe(x, [block_rows, step], layout), describe(weight, [choice.outputs, step], layout),
        y if scales is None else scales, y if row_scales is None else row_scales,
        y if bias is None else bias, y, parts, arrivals, y.stride(0), rows, outputs, steps, steps_each,
        BLOCK_ROWS=block_rows, BLOCK_OUT=choice.outputs, STEP=step, STAGES=choice.stages, SHARED=splits > 1,
        SCALED=scales is not None, BIAS=bias is not None, GATED=gated, ADD=residual is not None,
        num_warps=choice.num_warps, **launch_options(dependent),
    )  # fmt: skip
    return y


def describe(numbers: Tensor, box: list[int], layout: Any) -> TensorDescriptor:
    return TensorDescriptor(numbers, list(numbers.shape), list(numbers.stride()), box, layout)


@gluon.jit(do_not_specialize=["rows", "steps", "steps_each"])
def _stream_kernel(
    x, weight, scales, row_scales, bias, y, parts, arrivals, y_stride, rows, outputs, steps, steps_each,
    BLOCK_ROWS: gl.constexpr, BLOCK_OUT: gl.constexpr, STEP: gl.constexpr, STAGES: gl.constexpr, SHARED: gl.constexpr,
    SCALED: gl.constexpr, BIAS: gl.constexpr, GATED: gl.constexpr, ADD: gl.constexpr,
    DEPENDENT: gl.constexpr,
):  # fmt: skip
    if DEPENDENT:
        gdc_launch_dependents()
    PARTS: gl.constexpr = 2 if GATED else 1
    mma: gl.constexpr = gl.NVMMADistributedLayout(
        [3, 0], [gl.num_warps(), 1], [16, BLOCK_ROWS, 256 // weight.dtype.primitive_bitwidth]
    )
    first_output = gl.program_id(0) * BLOCK_OUT
    first = gl.program_id(1) * steps_each
    end = gl.minimum(first + steps_each, steps)
    tiles = gl.allocate_shared_memory(weight.dtype, [STAGES * PARTS, BLOCK_OUT, STEP], weight.layout)
    inputs = gl.allocate_shared_memory(x.dtype, [STAGES, BLOCK_ROWS, STEP], x.layout)
    ready = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for stage in gl.static_range(STAGES):
        mbarrier.init(ready.index(stage), count=1)
    fence_async_shared()
    for stage in gl.static_range(STAGES):
        copy_weights(weight, tiles, ready, stage, first_output, first + stage, end, outputs, BLOCK_ROWS)
    if DEPENDENT:
        gdc_wait()
    for stage in gl.static_range(STAGES):
        copy_inputs(x, inputs, ready, stage, 0, first + stage, end)
    epilogue = _load_epilogue(
        scales, row_scales, bias, y, y_stride, rows, outputs, BLOCK_OUT, BLOCK_ROWS, mma, SCALED, BIAS, GATED, ADD
    )  # fmt: skip
    sums = gl.zeros([BLOCK_OUT, BLOCK_ROWS], gl.float32, mma)
    up_sums = sums
    stage = 0
    phase = 0
    for step in range(first, end):
        mbarrier.wait(ready.index(stage), phase)
        values = inputs.index(stage).permute((1, 0))
        if GATED:
            gate = warpgroup_mma(tiles.index(2 * stage), values, sums, is_async=True)
            up = warpgroup_mma(tiles.index(2 * stage + 1), values, up_sums, is_async=True)
            sums, up_sums = warpgroup_mma_wait(0, deps=[gate, up])
        else:
            product = warpgroup_mma(tiles.index(stage), values, sums, is_async=True)
            sums = warpgroup_mma_wait(0, deps=[product])
        gl.thread_barrier()  # all warps have read
        copy_weights(weight, tiles, ready, stage, first_output, step + STAGES, end, outputs, BLOCK_ROWS)
        copy_inputs(x, inputs, ready, stage, 0, step + STAGES, end)
        stage += 1
        if stage == STAGES:
            stage = 0
            phase ^= 1
    if SHARED:
        _add_parts(sums, up_sums, epilogue, y, parts, arrivals, y_stride, rows, outputs, SCALED, BIAS, GATED, ADD)
    else:
        _finish(sums, up_sums, epilogue, y, y_stride, rows, outputs, SCALED, BIAS, GATED, ADD)


@gluon.jit
def copy_weights(weight, tiles, ready, stage, output, step, end, outputs, BLOCK_ROWS: gl.constexpr):
    """Copies the weights of a step from this output on, if there is one; the barrier waits for its inputs too. Two
    parts for each stage: those of a gate, and behind `outputs` those of what it multiplies."""
    BLOCK_OUT: gl.constexpr = weight.block_shape[0]
    STEP: gl.constexpr = weight.block_shape[1]
    PARTS: gl.constexpr = tiles.shape[0] // ready.shape[0]
    exists = step < end
    barrier = ready.index(stage)
    BYTES: gl.constexpr = (PARTS * BLOCK_OUT + BLOCK_ROWS) * STEP * weight.dtype.primitive_bitwidth // 8
    mbarrier.expect(barrier, BYTES, pred=exists)
    column = step * STEP
    tma.async_copy_global_to_shared(weight, [output, column], barrier, tiles.index(stage * PARTS), pred=exists)
    if PARTS == 2:
        up_tile = tiles.index(stage * PARTS + 1)
        tma.async_copy_global_to_shared(weight, [outputs + output, column], barrier, up_tile, pred=exists)


@gluon.jit
def copy_inputs(x, inputs, ready, stage, row, step, end):
    column = step * x.block_shape[1]
    tma.async_copy_global_to_shared(x, [row, column], ready.index(stage), inputs.index(stage), pred=step < end)


@gluon.jit
def _add_parts(
    sums, up_sums, epilogue, y, parts, arrivals, y_stride, rows, outputs,
    SCALED: gl.constexpr, BIAS: gl.constexpr, GATED: gl.constexpr, ADD: gl.constexpr,
):  # fmt: skip
    """The sums of all programs that share a tile, by the last of them."""
    BLOCK_OUT: gl.constexpr = sums.shape[0]
    BLOCK_ROWS: gl.constexpr = sums.shape[1]
    mma: gl.constexpr = sums.type.layout
    NUMBERS: gl.constexpr = (2 if GATED else 1) * BLOCK_OUT * BLOCK_ROWS  # of a part
    AT_ONCE: gl.constexpr = max(1, min(4, PART_REGISTERS * 32 * gl.num_warps() // NUMBERS))
    tile, split, splits = gl.program_id(0), gl.program_id(1), gl.num_programs(1)
    output = gl.arange(0, BLOCK_OUT, layout=gl.SliceLayout(1, mma))[:, None]
    row = gl.arange(0, BLOCK_ROWS, layout=gl.SliceLayout(0, mma))[None, :]
    part = parts + tile * NUMBERS + output * BLOCK_ROWS + row
    stride = gl.num_programs(0) * NUMBERS
    gl.store(part + split * stride, sums)
    if GATED:
        gl.store(part + split * stride + BLOCK_OUT * BLOCK_ROWS, up_sums)
    gl.thread_barrier()
    if gl.atomic_add(arrivals + tile, 1, sem="acq_rel") == splits - 1:
        gl.thread_barrier()
        sums = gl.zeros([BLOCK_OUT, BLOCK_ROWS], gl.float32, mma)
        up_sums = sums
        for first in range(0, splits, AT_ONCE):
            for number in gl.static_range(AT_ONCE):
                other = part + (first + number) * stride
                exists = (output >= 0) & (row >= 0) & (first + number < splits)
                sums += gl.load(other, mask=exists, other=0.0, cache_modifier=".cg")
                if GATED:
                    other += BLOCK_OUT * BLOCK_ROWS
                    up_sums += gl.load(other, mask=exists, other=0.0, cache_modifier=".cg")
        _finish(sums, up_sums, epilogue, y, y_stride, rows, outputs, SCALED, BIAS, GATED, ADD)
        gl.store(arrivals + tile, 0)


class Epilogue(NamedTuple):
    """What the end of a tile needs beside the sums. What is not needed is zero."""

    scales: gl.tensor  # [O, 1]
    up_scales: gl.tensor
    row_scales: gl.tensor  # [1, T]
    bias: gl.tensor  # [O, 1]
    up_bias: gl.tensor
    residual: gl.tensor  # [O, T], in the layout that it is stored in


@gluon.constexpr_function
def _flat_layout(block_out, num_warps):
    """A thread has outputs that follow each other."""
    lanes = min(block_out // 4, 32)
    return gl.BlockedLayout([4, 1], [lanes, 32 // lanes], [1, num_warps], [0, 1])


@gluon.jit
def _load_epilogue(
    scales, row_scales, bias, y, y_stride, rows, outputs, BLOCK_OUT: gl.constexpr, BLOCK_ROWS: gl.constexpr,
    mma: gl.constexpr, SCALED: gl.constexpr, BIAS: gl.constexpr, GATED: gl.constexpr, ADD: gl.constexpr,
):  # fmt: skip
    """Loads, before the sums, what is applied behind them, so that their end does not wait for it."""
    output = gl.program_id(0) * BLOCK_OUT + gl.arange(0, BLOCK_OUT, layout=gl.SliceLayout(1, mma))[:, None]
    row = gl.arange(0, BLOCK_ROWS, layout=gl.SliceLayout(0, mma))[None, :]
    factors = gl.to_tensor(0.0)
    up_factors, row_factors, added, up_added, residual = factors, factors, factors, factors, factors
    if SCALED:
        factors = gl.load(scales + output, mask=output < outputs, other=0.0)
        row_factors = gl.load(row_scales + row, mask=row < rows, other=0.0)
    if BIAS:
        added = gl.load(bias + output, mask=output < outputs, other=0.0).to(gl.float32)
    if GATED and SCALED:
        up_factors = gl.load(scales + outputs + output, mask=output < outputs, other=0.0)
    if GATED and BIAS:
        up_added = gl.load(bias + outputs + output, mask=output < outputs, other=0.0).to(gl.float32)
    if ADD:
        places, inside = _places(y, y_stride, rows, outputs, BLOCK_OUT, BLOCK_ROWS)
        residual = gl.load(places, mask=inside, other=0.0)
    return Epilogue(factors, up_factors, row_factors, added, up_added, residual)


@gluon.jit
def _places(y, y_stride, rows, outputs, BLOCK_OUT: gl.constexpr, BLOCK_ROWS: gl.constexpr):
    """The places of a tile in the result."""
    flat: gl.constexpr = _flat_layout(BLOCK_OUT, gl.num_warps())
    output = gl.program_id(0) * BLOCK_OUT + gl.arange(0, BLOCK_OUT, layout=gl.SliceLayout(1, flat))[:, None]
    row = gl.arange(0, BLOCK_ROWS, layout=gl.SliceLayout(0, flat))[None, :]
    return y + row * y_stride + output, (output < outputs) & (row < rows)


@gluon.jit
def _finish(
    sums, up_sums, epilogue, y, y_stride, rows, outputs,
    SCALED: gl.constexpr, BIAS: gl.constexpr, GATED: gl.constexpr, ADD: gl.constexpr,
):  # fmt: skip
    """What follows the product, with the roundings that it has alone."""
    kind: gl.constexpr = y.dtype.element_ty
    sums = _scale_sums(sums, epilogue.scales, epilogue.row_scales, epilogue.bias, kind, SCALED, BIAS)
    if GATED:
        up_sums = _scale_sums(up_sums, epilogue.up_scales, epilogue.row_scales, epilogue.up_bias, kind, SCALED, BIAS)
        gate = sums.to(gl.float32) / (1.0 + gl.exp(-sums.to(gl.float32)))
        sums = (gate.to(kind).to(gl.float32) * up_sums.to(gl.float32)).to(kind)
    sums = gl.convert_layout(sums, _flat_layout(sums.shape[0], gl.num_warps()))
    if ADD:
        sums = (sums.to(gl.float32) + epilogue.residual.to(gl.float32)).to(kind)
    places, inside = _places(y, y_stride, rows, outputs, sums.shape[0], sums.shape[1])
    gl.store(places, sums, mask=inside)


@gluon.jit
def _scale_sums(sums, scales, row_scales, bias, kind: gl.constexpr, SCALED: gl.constexpr, BIAS: gl.constexpr):
    if SCALED:
        sums *= row_scales
        sums *= scales
    if BIAS:
        sums += bias
    return sums.to(kind)
