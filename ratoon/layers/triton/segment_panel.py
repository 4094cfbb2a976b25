"""Products of up to 64 rows with a small weight as in panel.py, in the order of sums of wide.py, for the same bits with
any number of rows: each warp has a segment of inputs that follow each other, and multiplies 16 of them at a time, in
order. Four threads exchange what they loaded for that. A program's warps have the segments of one group, or of all
groups, one after the other. Also the norm before such a product, for rows that are multiplied by wide.py.

Written in Gluon. It can't run under Triton's interpreter.
"""

from __future__ import annotations

import torch
import triton
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import mma_v2
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from ratoon.layers.ops import RMSWeights
from ratoon.layers.product_choices import PANEL_STEP_BYTES, Panel
from ratoon.layers.triton.dependent import launch_options
from ratoon.layers.triton.launch import launch
from ratoon.layers.triton.panel import MIN_ROWS, apply_norm, load_part

Tensor = torch.Tensor


def segment_panel_product(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    panel: Panel,
    arrivals: Tensor,
    segment: int,
    *,
    norm: RMSWeights | None = None,
    gated: bool = False,
    residual: Tensor | None = None,
    dependent: bool = False,
) -> Tensor:
    """x [T, in], weight [out, in], both in 16 bits → [T, out]. `segment`: inputs of a warp's segment.

    `arrivals`: a zero for each PANEL_OUTPUTS outputs, and zero again after it; of this weight alone. `gated`: the
    weight holds a gate and an up part, one above the other; the result [T, out / 2] is silu of the one times the other.
    `residual` [T, out] is added to in place and returned. `dependent`: launch before the kernel ahead has ended.
    """
    rows, width = x.shape
    outputs = weight.shape[0] // 2 if gated else weight.shape[0]
    y = torch.empty((rows, outputs), dtype=x.dtype, device=x.device) if residual is None else residual
    parts = y
    if panel.splits > 1:
        assert norm is None and not gated
        parts = torch.empty((panel.splits, rows, outputs), dtype=torch.float32, device=x.device)
    step = PANEL_STEP_BYTES // weight.dtype.itemsize  # four threads, 16 bytes each
    steps, groups = segment // step, triton.cdiv(width, panel.splits * panel.k_warps * segment)
    assert groups == 1 or not (gated or norm)
    launch(
        _segment_panel_kernel, (triton.cdiv(outputs, panel.outputs), panel.splits),
        x, weight, weight if bias is None else bias, weight if norm is None else norm.weight, y, parts, arrivals,
        x.stride(0), y.stride(0), rows, outputs, 0.0 if norm is None else norm.eps,
        WIDTH=width, BLOCK_ROWS=max(MIN_ROWS, triton.next_power_of_2(rows)), BLOCK_OUT=panel.outputs,
        STEP=step, STEPS=steps, GROUPS=groups, SPLITS=panel.splits,
        WHOLE=width == panel.splits * groups * panel.k_warps * steps * step,
        K_WARPS=panel.k_warps, OUT_WARPS=panel.out_warps,
        BIAS=bias is not None, NORM=norm is not None, GATED=gated,
        ADD=residual is not None, num_warps=panel.k_warps * panel.out_warps, **launch_options(dependent),
    )  # fmt: skip
    return y


@gluon.jit(do_not_specialize=["rows"])
def _segment_panel_kernel(
    x, weight, bias, norm, y, parts, arrivals, x_stride, y_stride, rows, outputs, eps,
    WIDTH: gl.constexpr, BLOCK_ROWS: gl.constexpr, BLOCK_OUT: gl.constexpr, STEP: gl.constexpr, STEPS: gl.constexpr,
    GROUPS: gl.constexpr, SPLITS: gl.constexpr, WHOLE: gl.constexpr, K_WARPS: gl.constexpr, OUT_WARPS: gl.constexpr,
    BIAS: gl.constexpr, NORM: gl.constexpr, GATED: gl.constexpr,
    ADD: gl.constexpr, DEPENDENT: gl.constexpr,
):  # fmt: skip
    if DEPENDENT:
        gdc_launch_dependents()
    # [parts of the sum, outputs, rows]. A thread holds 16 bytes of a weight's row that follow each other.
    mma: gl.constexpr = gl.NVMMADistributedLayout([2, 0], [K_WARPS, OUT_WARPS, 1], [1, 16, 8])
    left: gl.constexpr = gl.DotOperandLayout(0, mma, STEP // 4)
    right: gl.constexpr = gl.DotOperandLayout(1, mma, STEP // 4)
    APART: gl.constexpr = STEPS * STEP  # from one warp to the next
    GROUP_SPAN: gl.constexpr = STEPS * K_WARPS * STEP
    first = gl.program_id(1) * GROUP_SPAN
    output = gl.program_id(0) * BLOCK_OUT + gl.arange(0, BLOCK_OUT, layout=gl.SliceLayout(0, gl.SliceLayout(2, left)))
    weights = weight + gl.minimum(output, outputs - 1)[None, :, None].to(gl.int64) * WIDTH
    up_weights = weights + outputs.to(gl.int64) * WIDTH
    column = (
        first
        + gl.arange(0, K_WARPS, layout=gl.SliceLayout(1, gl.SliceLayout(2, left)))[:, None, None] * APART
        + gl.arange(0, STEP, layout=gl.SliceLayout(0, gl.SliceLayout(1, left)))[None, None, :]
    )  # [parts, 1, S]
    row = gl.arange(0, BLOCK_ROWS, layout=gl.SliceLayout(0, gl.SliceLayout(1, right)))
    inputs = x + gl.minimum(row, rows - 1)[None, None, :] * x_stride
    place = (
        first
        + gl.arange(0, K_WARPS, layout=gl.SliceLayout(1, gl.SliceLayout(2, right)))[:, None, None] * APART
        + gl.arange(0, STEP, layout=gl.SliceLayout(0, gl.SliceLayout(2, right)))[None, :, None]
    )  # [parts, S, 1]
    total = gl.zeros([K_WARPS, BLOCK_OUT, BLOCK_ROWS], gl.float32, mma)
    up_total = total
    squares = gl.zeros([K_WARPS, BLOCK_ROWS], gl.float32, gl.SliceLayout(1, right))
    tiles = ()
    up_tiles = ()
    factors = ()
    for step in gl.static_range(GROUPS * STEPS):
        offset = step // STEPS * GROUP_SPAN + step % STEPS * STEP
        tiles = tiles + (load_part(weights, column + offset, WIDTH, WHOLE),)  # type: ignore[assignment]  # noqa: RUF005
        if GATED:
            up_tiles = up_tiles + (load_part(up_weights, column + offset, WIDTH, WHOLE),)  # type: ignore[assignment]  # noqa: RUF005
        if NORM:
            factors = factors + (load_part(norm, place + offset, WIDTH, WHOLE),)  # type: ignore[assignment]  # noqa: RUF005
    if DEPENDENT:
        gdc_wait()
    pieces = ()
    for step in gl.static_range(GROUPS * STEPS):  # all on their way before the first is used
        offset = step // STEPS * GROUP_SPAN + step % STEPS * STEP
        pieces = pieces + (load_part(inputs, place + offset, WIDTH, WHOLE),)  # type: ignore[assignment]  # noqa: RUF005
    earlier = ()
    for step in gl.static_range(GROUPS * STEPS):
        if step > 0 and step % STEPS == 0:
            earlier = earlier + (total,)  # type: ignore[assignment]  # noqa: RUF005
            total = gl.zeros([K_WARPS, BLOCK_OUT, BLOCK_ROWS], gl.float32, mma)
        values = pieces[step]  # type: ignore[var-annotated]
        if NORM:
            squares, values = apply_norm(squares, values, factors[step])
        values = _in_order(values)
        total = mma_v2(_in_order(tiles[step]), values, total)
        if GATED:
            up_total = mma_v2(_in_order(up_tiles[step]), values, up_total)
    _end(
        earlier, total, up_total, squares, y, bias, parts, arrivals, y_stride, rows, outputs, eps, WIDTH,
        BLOCK_ROWS, BLOCK_OUT, GROUPS, SPLITS, K_WARPS, OUT_WARPS, BIAS, NORM, GATED, ADD,
    )  # fmt: skip


@gluon.jit
def _end(
    earlier, total, up_total, squares, y, bias, parts, arrivals, y_stride, rows, outputs, eps,
    WIDTH: gl.constexpr, BLOCK_ROWS: gl.constexpr, BLOCK_OUT: gl.constexpr, GROUPS: gl.constexpr, SPLITS: gl.constexpr,
    K_WARPS: gl.constexpr, OUT_WARPS: gl.constexpr, BIAS: gl.constexpr, NORM: gl.constexpr,
    GATED: gl.constexpr, ADD: gl.constexpr,
):  # fmt: skip
    """The program's sums over all its warps, or over all programs, and what follows the product."""
    tile = gl.program_id(0)
    split = gl.program_id(1)
    # All parts of a sum to one thread, by a single exchange.
    LANES: gl.constexpr = min(BLOCK_OUT // 4, 32)
    parted: gl.constexpr = gl.BlockedLayout(
        [K_WARPS, 4, 1], [1, LANES, 32 // LANES], [1, 1, K_WARPS * OUT_WARPS], [1, 2, 0]
    )
    flat: gl.constexpr = gl.SliceLayout(0, parted)  # [O, T]
    if GROUPS == 1:
        sums = gl.sum(gl.convert_layout(total, parted), axis=0)
    else:
        sums = gl.sum(gl.convert_layout(earlier[0], parted), axis=0)
        for group in gl.static_range(1, GROUPS - 1):
            sums += gl.sum(gl.convert_layout(earlier[group], parted), axis=0)
        sums += gl.sum(gl.convert_layout(total, parted), axis=0)
    up_sums = sums
    if GATED:
        up_sums = gl.sum(gl.convert_layout(up_total, parted), axis=0)
    output = tile * BLOCK_OUT + gl.arange(0, BLOCK_OUT, layout=gl.SliceLayout(1, flat))[:, None]
    row = gl.arange(0, BLOCK_ROWS, layout=gl.SliceLayout(0, flat))[None, :]
    if NORM:
        scale = gl.convert_layout(_row_scale(squares, eps, WIDTH, parted), gl.SliceLayout(0, flat))[None, :]
        sums *= scale
        up_sums *= scale
    if SPLITS == 1:
        _finish(y, bias, sums, up_sums, output, row, rows, outputs, y_stride, BIAS, GATED, ADD)
    else:
        inside = (output < outputs) & (row < rows)
        part = parts + row.to(gl.int64) * outputs + output
        gl.store(part + split.to(gl.int64) * rows * outputs, sums, mask=inside)
        gl.thread_barrier()
        if gl.atomic_add(arrivals + tile, 1, sem="acq_rel") == SPLITS - 1:
            gl.thread_barrier()
            sums = gl.zeros([BLOCK_OUT, BLOCK_ROWS], gl.float32, flat)
            for other in gl.static_range(SPLITS):
                sums += gl.load(
                    part + other * rows.to(gl.int64) * outputs, mask=inside, other=0.0, cache_modifier=".cg"
                )
            _finish(y, bias, sums, sums, output, row, rows, outputs, y_stride, BIAS, GATED, ADD)
            gl.store(arrivals + tile, 0)


def apply_factors(
    x: Tensor, norm: RMSWeights, segment: int, warps: int, dependent: bool = False
) -> tuple[Tensor, Tensor]:
    """The norm of x [T, in] in its two halves, with the bits that segment_panel_product has: x times the norm's
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
    """Layouts and order of operations are those of _segment_panel_kernel: a sum of squares has the same bits."""
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
    scale = _row_scale(squares, eps, WIDTH, parted)
    row = gl.program_id(0) * BLOCK_ROWS + gl.arange(0, BLOCK_ROWS, layout=scale.type.layout)
    gl.store(scales + row, scale, mask=row < rows)


@gluon.jit
def _row_scale(squares, eps, WIDTH: gl.constexpr, parted: gl.constexpr):
    """[parts, T] sums of squares → [T] what a norm multiplies with."""
    square = gl.sum(gl.convert_layout(squares, gl.SliceLayout(1, parted)), axis=0)
    return gl.rsqrt(square / WIDTH + eps)


@gluon.jit
def _in_order(numbers):
    """Four threads hold 32 inputs, 8 that follow each other each. A product would take the first 4 of each of them,
    then the others. They exchange pairs, so that it takes the first 16, in the order in which wgmma does:
    in the number of a pair, the two bits of the thread and the two of the register change places."""
    return gl.inline_asm_elementwise(
        """
        {
        .reg .b32 lane, bit, s, t, a, b, c, d;
        .reg .pred p, q;
        mov.u32 lane, %laneid;
        and.b32 bit, lane, 2;
        setp.ne.u32 p, bit, 0;
        and.b32 bit, lane, 1;
        setp.ne.u32 q, bit, 0;
        selp.b32 s, $4, $6, p;
        selp.b32 t, $5, $7, p;
        shfl.sync.bfly.b32 s, s, 2, 31, 0xffffffff;
        shfl.sync.bfly.b32 t, t, 2, 31, 0xffffffff;
        selp.b32 a, s, $4, p;
        selp.b32 b, t, $5, p;
        selp.b32 c, $6, s, p;
        selp.b32 d, $7, t, p;
        selp.b32 s, a, b, q;
        selp.b32 t, c, d, q;
        shfl.sync.bfly.b32 s, s, 1, 31, 0xffffffff;
        shfl.sync.bfly.b32 t, t, 1, 31, 0xffffffff;
        selp.b32 $0, s, a, q;
        selp.b32 $1, b, s, q;
        selp.b32 $2, t, c, q;
        selp.b32 $3, d, t, q;
        }
        """,
        "=&r,=&r,=&r,=&r,r,r,r,r", [numbers], dtype=numbers.dtype, is_pure=True, pack=8,
    )  # fmt: skip


@gluon.jit
def _finish(
    y, bias, sums, up_sums, output, row, rows, outputs, y_stride,
    BIAS: gl.constexpr, GATED: gl.constexpr, ADD: gl.constexpr,
):  # fmt: skip
    """What follows the product, with the roundings that it has alone."""
    kind: gl.constexpr = y.dtype.element_ty
    inside = (output < outputs) & (row < rows)
    sums = _finish_sums(sums, bias, output, output < outputs, kind, BIAS)
    if GATED:
        up_sums = _finish_sums(up_sums, bias, output + outputs, output < outputs, kind, BIAS)
        gate = sums / (1.0 + gl.exp(-sums))
        sums = (gate.to(kind).to(gl.float32) * up_sums).to(kind).to(gl.float32)
    places = y + row * y_stride + output
    if ADD:
        sums += gl.load(places, mask=inside, other=0.0).to(gl.float32)
    gl.store(places, sums.to(kind), mask=inside)


@gluon.jit
def _finish_sums(sums, bias, output, exists, kind: gl.constexpr, BIAS: gl.constexpr):
    if BIAS:
        sums += gl.load(bias + output, mask=exists, other=0.0).to(gl.float32)
    return sums.to(kind).to(gl.float32)
