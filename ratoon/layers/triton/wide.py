"""Products of many rows on Hopper, in which a sum's order depends on the weight's shape alone.

The sum over inputs is cut into segments. Within one, Hopper's products (wgmma) add up 16 inputs at a time, in order;
the sums of a group of segments are added in order, in float32, and then those of groups. A tile's size does not matter
for that, so it can follow the number of rows, and the kernels for few rows (stream.py, panel.py) that cut sums
in the same way compute the same bits.

Few tiles would not keep a GPU busy: then a program computes one group of a tile, and the last one to arrive adds the
groups up. Otherwise a program computes all of its tile.

Written in Gluon, for compute capability 9.0. It can't run under Triton's interpreter.
"""

from __future__ import annotations

import torch
import triton
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from ratoon.layers.invariant_choices import SEGMENT_STEP, WideTile
from ratoon.layers.triton.dependent import launch_options
from ratoon.layers.triton.launch import launch
from ratoon.layers.triton.stream import ALIGNMENT, copy_inputs, copy_weights, describe

Tensor = torch.Tensor

STEP = SEGMENT_STEP  # inputs that are copied at a time: 128 bytes of each row
ROW_TILES_OF_A_GROUP = 16  # programs that run at the same time share weights and inputs in the cache


def wide_product(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    choice: WideTile,
    segment: int,
    group: int,
    arrivals: Tensor,
    *,
    row_scales: Tensor | None = None,
    residual: Tensor | None = None,
    dependent: bool = False,
) -> Tensor:
    """x [T, in], weight [out, in], both in 16 bits → [T, out].

    `segment`: inputs of one, a multiple of STEP. `group`: segments of one. `arrivals`: a zero for each tile, and zero
    again after it; of this weight alone. `row_scales` [T], in float32, are multiplied with the sums. `residual`
    [T, out] is added to in place and returned. `dependent`: launch before the kernel ahead has ended.
    """
    rows, width = x.shape
    outputs = weight.shape[0]
    if x.stride(0) * x.itemsize % ALIGNMENT or x.data_ptr() % ALIGNMENT or x.stride(1) != 1:
        x = x.clone(memory_format=torch.contiguous_format)
    y = torch.empty((rows, outputs), dtype=x.dtype, device=x.device) if residual is None else residual
    if not rows:
        return y
    tiles = triton.cdiv(rows, choice.rows) * triton.cdiv(outputs, choice.outputs)
    groups = triton.cdiv(width, segment * group)
    is_shared = choice.is_shared and groups > 1
    parts = y
    if is_shared:
        assert tiles <= arrivals.shape[0]
        parts = torch.empty((groups, tiles, choice.rows * choice.outputs), dtype=torch.float32, device=x.device)
    layout = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=2)
    launch(
        _wide_kernel, (tiles, groups if is_shared else 1),
        describe(x, [choice.rows, STEP], layout), describe(weight, [choice.outputs, STEP], layout),
        y if bias is None else bias, y if row_scales is None else row_scales, y, parts, arrivals, y.stride(0), rows,
        outputs, triton.cdiv(width, STEP), segment // STEP, segment // STEP * group,
        BLOCK_ROWS=choice.rows, BLOCK_OUT=choice.outputs, STAGES=choice.stages, GROUPED=group > 1,
        CUT=groups > 1 and not is_shared, SHARED=is_shared, SCALED=row_scales is not None, BIAS=bias is not None,
        ADD=residual is not None, GROUP=ROW_TILES_OF_A_GROUP,
        num_warps=choice.num_warps, **launch_options(dependent),
    )  # fmt: skip
    return y


@gluon.jit(do_not_specialize=["rows", "steps", "steps_each", "group_steps"])
def _wide_kernel(
    x, weight, bias, row_scales, y, parts, arrivals, y_stride, rows, outputs, steps, steps_each, group_steps,
    BLOCK_ROWS: gl.constexpr, BLOCK_OUT: gl.constexpr, STAGES: gl.constexpr, GROUPED: gl.constexpr, CUT: gl.constexpr,
    SHARED: gl.constexpr,
    SCALED: gl.constexpr, BIAS: gl.constexpr, ADD: gl.constexpr, GROUP: gl.constexpr, DEPENDENT: gl.constexpr,
):  # fmt: skip
    if DEPENDENT:
        gdc_launch_dependents()
    first_row, first_output = _find_tile(rows, outputs, BLOCK_ROWS, BLOCK_OUT, GROUP)
    mma: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [gl.num_warps(), 1], [16, BLOCK_OUT, 16])
    inputs = gl.allocate_shared_memory(x.dtype, [STAGES, BLOCK_ROWS, x.block_shape[1]], x.layout)
    weights = gl.allocate_shared_memory(weight.dtype, [STAGES, BLOCK_OUT, x.block_shape[1]], weight.layout)
    ready = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for stage in gl.static_range(STAGES):
        mbarrier.init(ready.index(stage), count=1)
    fence_async_shared()
    begin = gl.program_id(1) * group_steps
    end = steps
    if SHARED:
        end = gl.minimum(begin + group_steps, steps)
    for stage in gl.static_range(STAGES):
        copy_weights(weight, weights, ready, stage, first_output, begin + stage, end, outputs, BLOCK_ROWS)
    if DEPENDENT:
        gdc_wait()
    for stage in gl.static_range(STAGES):
        copy_inputs(x, inputs, ready, stage, first_row, begin + stage, end)
    total = gl.zeros([BLOCK_ROWS, BLOCK_OUT], gl.float32, mma)
    stage = 0
    phase = 0
    for first_of_group in range(begin, end, group_steps):
        group = gl.zeros([BLOCK_ROWS, BLOCK_OUT], gl.float32, mma)
        end_of_group = gl.minimum(first_of_group + group_steps, end)
        for first in range(first_of_group, end_of_group, steps_each):
            sums = gl.zeros([BLOCK_ROWS, BLOCK_OUT], gl.float32, mma)
            for step in range(first, gl.minimum(first + steps_each, end_of_group)):
                mbarrier.wait(ready.index(stage), phase)
                product = warpgroup_mma(inputs.index(stage), weights.index(stage).permute((1, 0)), sums, is_async=True)
                sums = warpgroup_mma_wait(1, deps=[product])
                gl.thread_barrier()  # all warps have read what the step before needed
                if step > begin:
                    before = gl.where(stage == 0, STAGES - 1, stage - 1)
                    copy_weights(
                        weight, weights, ready, before, first_output, step - 1 + STAGES, end, outputs, BLOCK_ROWS
                    )
                    copy_inputs(x, inputs, ready, before, first_row, step - 1 + STAGES, end)
                stage += 1
                if stage == STAGES:
                    stage = 0
                    phase ^= 1
            sums = warpgroup_mma_wait(0, deps=[sums])
            if GROUPED:
                group += sums
            else:
                group = sums
        if CUT:
            total += group
        else:
            total = group
    if SHARED:
        _add_parts(total, bias, row_scales, y, parts, arrivals, y_stride, first_row, first_output, rows, outputs,
                   SCALED, BIAS, ADD)  # fmt: skip
    else:
        _finish(total, bias, row_scales, y, y_stride, first_row, first_output, rows, outputs, SCALED, BIAS, ADD)


@gluon.jit
def _find_tile(rows, outputs, BLOCK_ROWS: gl.constexpr, BLOCK_OUT: gl.constexpr, GROUP: gl.constexpr):
    """→ the first row and output. Tiles of GROUP blocks of rows follow each other."""
    program = gl.program_id(0)
    row_tiles, out_tiles = gl.cdiv(rows, BLOCK_ROWS), gl.cdiv(outputs, BLOCK_OUT)
    first = program // (GROUP * out_tiles) * GROUP
    group = gl.minimum(row_tiles - first, GROUP)
    within = program % (GROUP * out_tiles)
    return (first + within % group) * BLOCK_ROWS, within // group * BLOCK_OUT


@gluon.jit
def _add_parts(
    sums, bias, row_scales, y, parts, arrivals, y_stride, first_row, first_output, rows, outputs,
    SCALED: gl.constexpr, BIAS: gl.constexpr, ADD: gl.constexpr,
):  # fmt: skip
    """The sums of all groups of a tile, by the last of its programs."""
    BLOCK_ROWS: gl.constexpr = sums.shape[0]
    BLOCK_OUT: gl.constexpr = sums.shape[1]
    mma: gl.constexpr = sums.type.layout
    NUMBERS: gl.constexpr = BLOCK_ROWS * BLOCK_OUT
    tile, group, groups = gl.program_id(0), gl.program_id(1), gl.num_programs(1)
    row = gl.arange(0, BLOCK_ROWS, layout=gl.SliceLayout(1, mma))[:, None]
    output = gl.arange(0, BLOCK_OUT, layout=gl.SliceLayout(0, mma))[None, :]
    part = parts + tile * NUMBERS + row * BLOCK_OUT + output
    stride = gl.num_programs(0) * NUMBERS
    gl.store(part + group * stride, sums)
    gl.thread_barrier()
    if gl.atomic_add(arrivals + tile, 1, sem="acq_rel") == groups - 1:
        gl.thread_barrier()
        sums = gl.zeros([BLOCK_ROWS, BLOCK_OUT], gl.float32, mma)
        for other in range(groups):
            sums += gl.load(part + other * stride, cache_modifier=".cg")
        _finish(sums, bias, row_scales, y, y_stride, first_row, first_output, rows, outputs, SCALED, BIAS, ADD)
        gl.store(arrivals + tile, 0)


@gluon.jit
def _finish(
    sums, bias, row_scales, y, y_stride, first_row, first_output, rows, outputs,
    SCALED: gl.constexpr, BIAS: gl.constexpr, ADD: gl.constexpr,
):  # fmt: skip
    """What follows the product, with the roundings that it has alone."""
    BLOCK_ROWS: gl.constexpr = sums.shape[0]
    BLOCK_OUT: gl.constexpr = sums.shape[1]
    mma: gl.constexpr = sums.type.layout
    kind: gl.constexpr = y.dtype.element_ty
    if SCALED:
        row = first_row + gl.arange(0, BLOCK_ROWS, layout=gl.SliceLayout(1, mma))
        sums *= gl.load(row_scales + row, mask=row < rows, other=0.0)[:, None]
    if BIAS:
        output = first_output + gl.arange(0, BLOCK_OUT, layout=gl.SliceLayout(0, mma))
        sums += gl.load(bias + output, mask=output < outputs, other=0.0).to(gl.float32)[None, :]
    LANES: gl.constexpr = min(BLOCK_OUT // 8, 32)
    flat: gl.constexpr = gl.BlockedLayout([1, 8], [32 // LANES, LANES], [gl.num_warps(), 1], [1, 0])
    sums = gl.convert_layout(sums.to(kind), flat)
    row = first_row + gl.arange(0, BLOCK_ROWS, layout=gl.SliceLayout(1, flat))
    output = first_output + gl.arange(0, BLOCK_OUT, layout=gl.SliceLayout(0, flat))
    places = y + row.to(gl.int64)[:, None] * y_stride + output[None, :]
    inside = (row < rows)[:, None] & (output < outputs)[None, :]
    if ADD:
        sums = (sums.to(gl.float32) + gl.load(places, mask=inside, other=0.0).to(gl.float32)).to(kind)
    gl.store(places, sums, mask=inside)
