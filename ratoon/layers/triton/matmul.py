"""Products of any number of rows by tiles, in which a sum's order depends on the weight's shape alone.

The sum over inputs is cut into a fixed number of segments. With few rows a program computes one segment of a tile,
because few tiles would not keep a GPU busy, and a second kernel adds the segments up; with many rows one program
computes all segments of its tile and adds them in the same order. With one size of tile, a row's result has the same
bits in any batch.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from ratoon.layers.product_choices import Split
from ratoon.layers.triton.launch import launch

Tensor = torch.Tensor

ENOUGH_TILES = 96  # of all rows and outputs: to fill a GPU, no sum has to be cut
ROW_TILES_OF_A_GROUP = 16  # programs that run at the same time share weights and inputs in the cache
BLOCK_OF_SUM = 1024


def matmul(x: Tensor, weight: Tensor, bias: Tensor | None, tile: Split, residual: Tensor | None = None) -> Tensor:
    """x [T, in], weight [out, in] → [T, out]. `residual` [T, out] is added to in place and returned."""
    rows, width = x.shape
    outputs = weight.shape[0]
    y = x.new_empty((rows, outputs)) if residual is None else residual
    num_tiles = triton.cdiv(rows, tile.rows) * triton.cdiv(outputs, tile.outputs)
    whole = tile.splits == 1 or num_tiles >= ENOUGH_TILES
    target = y if whole else torch.empty((tile.splits, rows, outputs), dtype=torch.float32, device=x.device)
    steps = triton.cdiv(triton.cdiv(width, tile.inputs), tile.splits)
    launch(
        _matmul_kernel, (num_tiles, 1 if whole else tile.splits),
        x, weight, weight if bias is None else bias, target, x.stride(0), target.stride(-2), rows, outputs,
        WIDTH=width, SEGMENT=steps * tile.inputs, SPLITS=tile.splits, WHOLE=whole, BIAS=bias is not None,
        ADD=residual is not None, BLOCK_ROWS=tile.rows, BLOCK_OUT=tile.outputs, BLOCK_IN=tile.inputs,
        GROUP=ROW_TILES_OF_A_GROUP, num_warps=tile.num_warps, num_stages=tile.num_stages,
    )  # fmt: skip
    if not whole:
        launch(
            _sum_kernel, (rows, triton.cdiv(outputs, BLOCK_OF_SUM)),
            target, weight if bias is None else bias, y, y.stride(0), rows, outputs,
            SPLITS=tile.splits, BIAS=bias is not None, ADD=residual is not None, BLOCK=BLOCK_OF_SUM, num_warps=4,
        )  # fmt: skip
    return y


@triton.jit(do_not_specialize=["rows"])
def _matmul_kernel(
    x, weight, bias, y, x_stride, y_stride, rows, outputs, WIDTH: tl.constexpr, SEGMENT: tl.constexpr,
    SPLITS: tl.constexpr, WHOLE: tl.constexpr, BIAS: tl.constexpr, ADD: tl.constexpr, BLOCK_ROWS: tl.constexpr,
    BLOCK_OUT: tl.constexpr, BLOCK_IN: tl.constexpr, GROUP: tl.constexpr,
):  # fmt: skip
    program = tl.program_id(0)
    row_tiles, out_tiles = tl.cdiv(rows, BLOCK_ROWS), tl.cdiv(outputs, BLOCK_OUT)
    first = program // (GROUP * out_tiles) * GROUP  # row tile of the group
    group = tl.minimum(row_tiles - first, GROUP)
    within = program % (GROUP * out_tiles)
    row = (first + within % group) * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)  # [R]
    output = within // group * BLOCK_OUT + tl.arange(0, BLOCK_OUT)  # [O]
    inputs = x + row.to(tl.int64)[:, None] * x_stride  # [R, 1]
    weights = weight + output.to(tl.int64)[None, :] * WIDTH  # [1, O]
    inside = (row < rows)[:, None] & (output < outputs)[None, :]
    if WHOLE:
        total = tl.zeros((BLOCK_ROWS, BLOCK_OUT), tl.float32)
        for split in range(SPLITS):
            total += _segment(
                inputs, weights, split * SEGMENT, row, output, rows, outputs, WIDTH, SEGMENT, BLOCK_ROWS, BLOCK_OUT,
                BLOCK_IN,
            )  # fmt: skip
        places = y + row.to(tl.int64)[:, None] * y_stride + output[None, :]
        addends = tl.zeros((BLOCK_OUT,), tl.float32)
        if BIAS:
            addends = tl.load(bias + output, mask=output < outputs, other=0.0).to(tl.float32)
        _store(places, total, addends[None, :], inside, BIAS, ADD)
    else:
        split = tl.program_id(1)
        total = _segment(
            inputs, weights, split * SEGMENT, row, output, rows, outputs, WIDTH, SEGMENT, BLOCK_ROWS, BLOCK_OUT,
            BLOCK_IN,
        )  # fmt: skip
        part = row.to(tl.int64) + split.to(tl.int64) * rows
        tl.store(y + part[:, None] * y_stride + output[None, :], total, mask=inside)


@triton.jit
def _segment(
    inputs, weights, start, row, output, rows, outputs, WIDTH: tl.constexpr, SEGMENT: tl.constexpr,
    BLOCK_ROWS: tl.constexpr, BLOCK_OUT: tl.constexpr, BLOCK_IN: tl.constexpr,
):  # fmt: skip
    """The sum over SEGMENT inputs, from `start`: [R, O] in float32."""
    total = tl.zeros((BLOCK_ROWS, BLOCK_OUT), tl.float32)
    for step in range(0, SEGMENT, BLOCK_IN):
        column = start + step + tl.arange(0, BLOCK_IN)
        left = tl.load(inputs + column[None, :], mask=(row < rows)[:, None] & (column < WIDTH)[None, :], other=0.0)
        right = tl.load(
            weights + column[:, None], mask=(column < WIDTH)[:, None] & (output < outputs)[None, :], other=0.0
        )
        total = tl.dot(left, right, total, input_precision="ieee")
    return total


@triton.jit(do_not_specialize=["rows"])
def _sum_kernel(
    parts, bias, y, y_stride, rows, outputs,
    SPLITS: tl.constexpr, BIAS: tl.constexpr, ADD: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    output = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = output < outputs
    total = tl.zeros((BLOCK,), tl.float32)
    for split in range(SPLITS):
        total += tl.load(parts + (split * rows + row) * outputs + output, mask=inside, other=0.0)
    addends = total
    if BIAS:
        addends = tl.load(bias + output, mask=inside, other=0.0).to(tl.float32)
    _store(y + row * y_stride + output, total, addends, inside, BIAS, ADD)


@triton.jit
def _store(places, total, bias, inside, BIAS: tl.constexpr, ADD: tl.constexpr):
    kind = places.dtype.element_ty
    if BIAS:
        total += bias
    if ADD:
        total = total.to(kind).to(tl.float32) + tl.load(places, mask=inside, other=0.0).to(tl.float32)
    tl.store(places, total.to(kind), mask=inside)
