"""The norm before a product whose sums are cut in segments, for rows that are multiplied by wide.py: in two halves,
with the bits that the kernel for few rows (panel.py) has.

Written in Gluon. It can't run under Triton's interpreter.
"""

from __future__ import annotations

import torch
import triton
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from ratoon.layers.ops import RMSWeights
from ratoon.layers.product_choices import PANEL_STEP_BYTES
from ratoon.layers.triton.dependent import launch_options
from ratoon.layers.triton.launch import launch
from ratoon.layers.triton.panel import MIN_ROWS, apply_norm, load_part, row_scale

Tensor = torch.Tensor


def apply_factors(
    x: Tensor, norm: RMSWeights, segment: int, warps: int, dependent: bool = False
) -> tuple[Tensor, Tensor]:
    """The norm of x [T, in] in its two halves, with the bits that panel_product has: x times the norm's
    weights, and the scale of each row [T], in float32, for the sums of the product behind it."""
    rows, width = x.shape
    scaled = torch.empty((rows, width), dtype=x.dtype, device=x.device)
    scales = torch.empty(rows, dtype=torch.float32, device=x.device)
    step = PANEL_STEP_BYTES // x.dtype.itemsize
    steps = segment // step
    launch(
        _factors_kernel, (triton.cdiv(rows, MIN_ROWS),), x, norm.weight, scaled, scales, x.stride(0), rows, norm.eps,
        WIDTH=width, BLOCK_ROWS=MIN_ROWS, STEP=step, STEPS=steps, WHOLE=width == warps * segment,
        K_WARPS=warps, num_warps=warps, **launch_options(dependent),
    )  # fmt: skip
    return scaled, scales


@gluon.jit(do_not_specialize=["rows"])
def _factors_kernel(
    x, norm, scaled, scales, x_stride, rows, eps, WIDTH: gl.constexpr, BLOCK_ROWS: gl.constexpr, STEP: gl.constexpr,
    STEPS: gl.constexpr, WHOLE: gl.constexpr, K_WARPS: gl.constexpr, DEPENDENT: gl.constexpr,
):  # fmt: skip
    """Layouts and order of operations are those of _panel_kernel: a sum of squares has the same bits."""
    mma: gl.constexpr = gl.NVMMADistributedLayout([2, 0], [K_WARPS, 1, 1], [1, 16, 8])
    right: gl.constexpr = gl.DotOperandLayout(1, mma, STEP // 4)
    row = gl.program_id(0) * BLOCK_ROWS + gl.arange(0, BLOCK_ROWS, layout=gl.SliceLayout(0, gl.SliceLayout(1, right)))
    place = (
        gl.arange(0, K_WARPS, layout=gl.SliceLayout(1, gl.SliceLayout(2, right)))[:, None, None] * (STEPS * STEP)
        + gl.arange(0, STEP, layout=gl.SliceLayout(0, gl.SliceLayout(2, right)))[None, :, None]
    )  # [parts, S, 1]
    inputs = x + gl.minimum(row, rows - 1).to(gl.int64)[None, None, :] * x_stride
    results = scaled + row.to(gl.int64)[None, None, :] * WIDTH
    squares = gl.zeros([K_WARPS, BLOCK_ROWS], gl.float32, gl.SliceLayout(1, right))
    if DEPENDENT:
        gdc_launch_dependents()
        gdc_wait()
    for step in gl.static_range(STEPS):
        values = load_part(inputs, place + step * STEP, WIDTH, WHOLE)
        squares, values = apply_norm(squares, values, load_part(norm, place + step * STEP, WIDTH, WHOLE))
        inside = (row < rows)[None, None, :] & (place + step * STEP < WIDTH)
        gl.store(results + (place + step * STEP), values, mask=inside)
    parted: gl.constexpr = gl.BlockedLayout([K_WARPS, 4, 1], [1, 4, 8], [1, 1, K_WARPS], [1, 2, 0])
    scale = row_scale(squares, eps, WIDTH, parted)
    row = gl.program_id(0) * BLOCK_ROWS + gl.arange(0, BLOCK_ROWS, layout=scale.type.layout)
    gl.store(scales + row, scale, mask=row < rows)
