"""Products of up to 64 rows with a weight, by tensor cores, in one kernel with what stands before and behind them: the
RMS norm of the input, the gate's activation, the addition to the residual stream.

A step of few rows reads every weight once and little else, so what counts is that weights are on their way all the
time. A program loads all its weights before it waits for its input (launch.py), to the registers in which the tensor
cores take them: this is for weights that a GPU's registers hold at once. Each warp multiplies what it loaded itself:
warps share a program's outputs or parts of its sums, or both, and add the parts up at the end. Where few outputs would
leave multiprocessors without work, several programs share a sum; the last one to arrive adds the parts up, always in
the same order.

An RMS norm scales a row, so it is applied to the sums: y = s · ((x · factors) Wᵀ), and s is computed on the way.

Where a row must have the same bits among any number of rows, sums have the order of wide.py: each warp has a segment of
inputs that follow each other, and multiplies 16 of them at a time, in order; four threads exchange what they loaded for
that. A program's warps have the segments of one group, or of all groups, one after the other.

Written in Gluon, in which a kernel decides where in registers and shared memory its numbers lie. It can't run under
Triton's interpreter.
"""

from __future__ import annotations

from typing import NamedTuple

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

Tensor = torch.Tensor

MIN_ROWS = 8  # the other side; rows are padded to it
REGISTER_BYTES = 128  # of a warp: four for each thread
MAX_REGISTERS = 144  # of a thread, for its weights and inputs, that leave enough for the rest


def panel_product(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    panel: Panel,
    arrivals: Tensor,
    *,
    scales: Tensor | None = None,
    norm: RMSWeights | None = None,
    gated: bool = False,
    residual: Tensor | None = None,
    dependent: bool = False,
    segment: int | None = None,
) -> Tensor:
    """x [T, in] in 16 bits, weight [out, in] → [T, out]. `scales` [out], in float32: of a weight in 8 bits.

    `arrivals`: a zero for each PANEL_OUTPUTS outputs, and zero again after it; of this weight alone. `gated`: the
    weight holds a gate and an up part, one above the other; the result [T, out / 2] is silu of the one times the other.
    `residual` [T, out] is added to in place and returned. `dependent`: launch before the kernel ahead has ended.
    `segment`: inputs of a warp's segment, where a row must have the same bits among any number of rows.
    """
    rows, width = x.shape
    outputs = weight.shape[0] // 2 if gated else weight.shape[0]
    y = torch.empty((rows, outputs), dtype=x.dtype, device=x.device) if residual is None else residual
    parts = y
    if panel.splits > 1:
        assert norm is None and not gated
        parts = torch.empty((panel.splits, rows, outputs), dtype=torch.float32, device=x.device)
    step = PANEL_STEP_BYTES // weight.dtype.itemsize  # four threads, 16 bytes each
    steps, groups = triton.cdiv(width, panel.splits * panel.k_warps * step), 1
    if segment is not None:
        assert scales is None
        steps, groups = segment // step, triton.cdiv(width, panel.splits * panel.k_warps * segment)
        assert groups == 1 or not (gated or norm)
    block_rows = max(MIN_ROWS, triton.next_power_of_2(rows))
    weight_rows = (2 if gated else 1) * panel.outputs // panel.out_warps
    num_registers = steps * (weight_rows * PANEL_STEP_BYTES + block_rows * step * x.itemsize) // REGISTER_BYTES
    together = segment is None and steps > 1 and block_rows == MIN_ROWS and num_registers <= MAX_REGISTERS
    launch(
        _panel_kernel, (triton.cdiv(outputs, panel.outputs), panel.splits),
        x, weight if scales is None else weight.view(torch.uint8), weight if scales is None else scales,
        weight if bias is None else bias, weight if norm is None else norm.weight, y, parts, arrivals,
        x.stride(0), y.stride(0), rows, outputs, 0.0 if norm is None else norm.eps,
        WIDTH=width, BLOCK_ROWS=block_rows, BLOCK_OUT=panel.outputs, STEP=step, STEPS=steps, GROUPS=groups,
        TOGETHER=together, SPLITS=panel.splits, WHOLE=width == panel.splits * groups * panel.k_warps * steps * step,
        K_WARPS=panel.k_warps, OUT_WARPS=panel.out_warps, IN_SEGMENTS=segment is not None,
        SCALED=scales is not None, BIAS=bias is not None, NORM=norm is not None, GATED=gated,
        ADD=residual is not None, num_warps=panel.k_warps * panel.out_warps, **launch_options(dependent),
    )  # fmt: skip
    return y


@gluon.jit(do_not_specialize=["rows"])
def _panel_kernel(
    x, weight, scales, bias, norm, y, parts, arrivals, x_stride, y_stride, rows, outputs, eps,
    WIDTH: gl.constexpr, BLOCK_ROWS: gl.constexpr, BLOCK_OUT: gl.constexpr, STEP: gl.constexpr, STEPS: gl.constexpr,
    GROUPS: gl.constexpr, TOGETHER: gl.constexpr, SPLITS: gl.constexpr, WHOLE: gl.constexpr, K_WARPS: gl.constexpr,
    OUT_WARPS: gl.constexpr, IN_SEGMENTS: gl.constexpr, SCALED: gl.constexpr, BIAS: gl.constexpr, NORM: gl.constexpr,
    GATED: gl.constexpr, ADD: gl.constexpr, DEPENDENT: gl.constexpr,
):  # fmt: skip
    if DEPENDENT:
        gdc_launch_dependents()
    # [parts of the sum, outputs, rows]. A thread holds 16 bytes of a weight's row that follow each other.
    mma: gl.constexpr = gl.NVMMADistributedLayout([2, 0], [K_WARPS, OUT_WARPS, 1], [1, 16, 8])
    left: gl.constexpr = gl.DotOperandLayout(0, mma, STEP // 4)
    right: gl.constexpr = gl.DotOperandLayout(1, mma, STEP // 4)
    APART: gl.constexpr = STEPS * STEP if IN_SEGMENTS else STEP  # from one warp to the next
    SPAN: gl.constexpr = STEP if IN_SEGMENTS else K_WARPS * STEP  # from one step of a warp to the next
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
    parted: gl.constexpr = _parted_layout(BLOCK_OUT, K_WARPS, OUT_WARPS)
    flat: gl.constexpr = gl.SliceLayout(0, parted)  # [O, T]
    scale, up_scale, added, up_added = _load_epilogue(scales, bias, outputs, BLOCK_OUT, flat, SCALED, BIAS, GATED)
    total = gl.zeros([K_WARPS, BLOCK_OUT, BLOCK_ROWS], gl.float32, mma)
    up_total = total
    squares = gl.zeros([K_WARPS, BLOCK_ROWS], gl.float32, gl.SliceLayout(1, right))
    tiles = ()
    up_tiles = ()
    factors = ()
    for step in gl.static_range(GROUPS * STEPS):
        offset = step // STEPS * GROUP_SPAN + step % STEPS * SPAN
        tiles = tiles + (load_part(weights, column + offset, WIDTH, WHOLE),)  # type: ignore[assignment]  # noqa: RUF005
        if GATED:
            up_tiles = up_tiles + (load_part(up_weights, column + offset, WIDTH, WHOLE),)  # type: ignore[assignment]  # noqa: RUF005
        if NORM:
            factors = factors + (load_part(norm, place + offset, WIDTH, WHOLE),)  # type: ignore[assignment]  # noqa: RUF005
    if DEPENDENT:
        gdc_wait()
    pieces = ()
    for step in gl.static_range(GROUPS * STEPS):  # all on their way before the first is used
        offset = step // STEPS * GROUP_SPAN + step % STEPS * SPAN
        pieces = pieces + (load_part(inputs, place + offset, WIDTH, WHOLE),)  # type: ignore[assignment]  # noqa: RUF005
    residual = gl.to_tensor(0.0)
    if ADD:
        places, inside = _places(y, y_stride, rows, outputs, BLOCK_OUT, BLOCK_ROWS, flat)
        residual = gl.load(places, mask=inside, other=0.0).to(gl.float32)
    epilogue = Epilogue(scale, up_scale, added, up_added, residual)
    wide_tiles = ()
    wide_up_tiles = ()
    for step in gl.static_range(GROUPS * STEPS):
        wide_tiles = wide_tiles + (_widen(tiles[step], SCALED),)  # type: ignore[assignment]  # noqa: RUF005
        if GATED:
            wide_up_tiles = wide_up_tiles + (_widen(up_tiles[step], SCALED),)  # type: ignore[assignment]  # noqa: RUF005
    # Products that add to the same sums wait for each other: where a warp has those of 16 outputs alone, there are two
    # with weights in 8 bits. With others that gains nothing, and so a row has the same bits among any number of rows.
    CHAINS: gl.constexpr = 2 if TOGETHER and SCALED and BLOCK_OUT == 16 * OUT_WARPS and not GATED else 1
    if TOGETHER:
        pieces = _after_all(pieces, STEPS, CHAINS)
    if TOGETHER and SCALED:
        wide_tiles = _after_all(wide_tiles, STEPS, CHAINS)
        if GATED:
            wide_up_tiles = _after_all(wide_up_tiles, STEPS, 1)
    second_total = total
    earlier = ()
    for step in gl.static_range(GROUPS * STEPS):
        if step > 0 and step % STEPS == 0:
            earlier = earlier + (total,)  # type: ignore[assignment]  # noqa: RUF005
            total = gl.zeros([K_WARPS, BLOCK_OUT, BLOCK_ROWS], gl.float32, mma)
        values = pieces[step]  # type: ignore[var-annotated]
        if NORM:
            squares, values = apply_norm(squares, values, factors[step])
        values = _ordered(values, IN_SEGMENTS)
        if step % CHAINS == 1:
            second_total = mma_v2(wide_tiles[step], values, second_total)
        else:
            total = mma_v2(_ordered(wide_tiles[step], IN_SEGMENTS), values, total)
        if GATED:
            up_total = mma_v2(_ordered(wide_up_tiles[step], IN_SEGMENTS), values, up_total)
    if CHAINS == 2:
        total += second_total
    _end(
        earlier, total, up_total, squares, epilogue, y, parts, arrivals, y_stride, rows, outputs, eps, WIDTH, GROUPS,
        SPLITS, parted, SCALED, BIAS, NORM, GATED, ADD,
    )  # fmt: skip


class Epilogue(NamedTuple):
    """What the end of a tile needs beside the sums: loaded before them, so that the end does not wait for it. What is
    not needed is zero."""

    scales: gl.tensor  # [O, 1]
    up_scales: gl.tensor
    bias: gl.tensor
    up_bias: gl.tensor
    residual: gl.tensor  # [O, T]


@gluon.constexpr_function
def _parted_layout(block_out, k_warps, out_warps):
    """[parts of the sum, outputs, rows]: all parts of a sum belong to one thread, which has outputs that follow each
    other."""
    lanes = min(block_out // 4, 32)
    return gl.BlockedLayout([k_warps, 4, 1], [1, lanes, 32 // lanes], [1, 1, k_warps * out_warps], [1, 2, 0])


@gluon.jit
def _load_epilogue(
    scales, bias, outputs, BLOCK_OUT: gl.constexpr, flat: gl.constexpr,
    SCALED: gl.constexpr, BIAS: gl.constexpr, GATED: gl.constexpr,
):  # fmt: skip
    """What comes with the weight. The kernel before this one has not written it."""
    output = gl.program_id(0) * BLOCK_OUT + gl.arange(0, BLOCK_OUT, layout=gl.SliceLayout(1, flat))[:, None]
    scale = gl.to_tensor(0.0)
    up_scale, added, up_added = scale, scale, scale
    if SCALED:
        scale = gl.load(scales + output, mask=output < outputs, other=0.0)
    if BIAS:
        added = gl.load(bias + output, mask=output < outputs, other=0.0).to(gl.float32)
    if GATED and SCALED:
        up_scale = gl.load(scales + outputs + output, mask=output < outputs, other=0.0)
    if GATED and BIAS:
        up_added = gl.load(bias + outputs + output, mask=output < outputs, other=0.0).to(gl.float32)
    return scale, up_scale, added, up_added


@gluon.jit
def _places(y, y_stride, rows, outputs, BLOCK_OUT: gl.constexpr, BLOCK_ROWS: gl.constexpr, flat: gl.constexpr):
    """The places of a tile in the result."""
    output = gl.program_id(0) * BLOCK_OUT + gl.arange(0, BLOCK_OUT, layout=gl.SliceLayout(1, flat))[:, None]
    row = gl.arange(0, BLOCK_ROWS, layout=gl.SliceLayout(0, flat))[None, :]
    return y + row * y_stride + output, (output < outputs) & (row < rows)


@gluon.jit
def _end(
    earlier, total, up_total, squares, epilogue, y, parts, arrivals, y_stride, rows, outputs, eps,
    WIDTH: gl.constexpr, GROUPS: gl.constexpr, SPLITS: gl.constexpr, parted: gl.constexpr, SCALED: gl.constexpr,
    BIAS: gl.constexpr, NORM: gl.constexpr, GATED: gl.constexpr, ADD: gl.constexpr,
):  # fmt: skip
    """The program's sums over all its warps, or over all programs, and what follows the product."""
    BLOCK_OUT: gl.constexpr = total.shape[1]
    BLOCK_ROWS: gl.constexpr = total.shape[2]
    flat: gl.constexpr = gl.SliceLayout(0, parted)  # [O, T]
    tile = gl.program_id(0)
    split = gl.program_id(1)
    if GROUPS == 1:
        sums = gl.sum(gl.convert_layout(total, parted), axis=0)  # by a single exchange
    else:
        sums = gl.sum(gl.convert_layout(earlier[0], parted), axis=0)
        for group in gl.static_range(1, GROUPS - 1):
            sums += gl.sum(gl.convert_layout(earlier[group], parted), axis=0)
        sums += gl.sum(gl.convert_layout(total, parted), axis=0)
    up_sums = sums
    if GATED:
        up_sums = gl.sum(gl.convert_layout(up_total, parted), axis=0)
    if NORM:
        scale = gl.convert_layout(row_scale(squares, eps, WIDTH, parted), gl.SliceLayout(0, flat))[None, :]
        sums *= scale
        up_sums *= scale
    if SPLITS == 1:
        _finish(y, epilogue, sums, up_sums, y_stride, rows, outputs, flat, SCALED, BIAS, GATED, ADD)
    else:
        place, inside = _places(parts, outputs.to(gl.int64), rows, outputs, BLOCK_OUT, BLOCK_ROWS, flat)
        stride = rows.to(gl.int64) * outputs
        gl.store(place + split * stride, sums, mask=inside)
        gl.thread_barrier()
        if gl.atomic_add(arrivals + tile, 1, sem="acq_rel") == SPLITS - 1:
            gl.thread_barrier()
            sums = gl.zeros([BLOCK_OUT, BLOCK_ROWS], gl.float32, flat)
            for other in gl.static_range(SPLITS):
                sums += gl.load(place + other * stride, mask=inside, other=0.0, cache_modifier=".cg")
            _finish(y, epilogue, sums, sums, y_stride, rows, outputs, flat, SCALED, BIAS, GATED, ADD)
            gl.store(arrivals + tile, 0)


@gluon.jit
def load_part(numbers, place, WIDTH: gl.constexpr, WHOLE: gl.constexpr):
    """Zeros behind the last input, unless there is nothing behind it."""
    if WHOLE:
        return gl.load(numbers + place)
    else:
        return gl.load(numbers + place, mask=place < WIDTH, other=0.0)


@gluon.jit
def _after_all(parts, COUNT: gl.constexpr, FIRST: gl.constexpr):
    """Returns the parts so that the first ones depend on all. Otherwise the assembler, to save registers, spreads loads
    and conversions between the products, where each load waits for those before it. With more rows there are products
    enough to hide that."""
    tied = ()
    for place in gl.static_range(COUNT):
        if place < FIRST:
            tied = tied + (_mix(parts, COUNT, place),)  # type: ignore[assignment]  # noqa: RUF005
        else:
            tied = tied + (parts[place],)  # type: ignore[assignment]  # noqa: RUF005
    return tied


@gluon.jit
def _mix(parts, COUNT: gl.constexpr, PLACE: gl.constexpr):
    CODE: gl.constexpr = _mix_code(COUNT, PLACE)
    REGISTERS: gl.constexpr = "=r" + ",r" * COUNT
    return gl.inline_asm_elementwise(CODE, REGISTERS, parts, dtype=parts[0].dtype, is_pure=True, pack=2)


@gluon.constexpr_function
def _mix_code(count, place):
    """One of `count` registers, changed by the bits of all of them under a mask. The mask is 0, because grids have one
    layer, which the assembler does not know."""
    mixed = "".join(f"lop3.b32 z, ${number + 1}, m, z, 0xea;" for number in range(count))  # z |= number & m
    start = "mov.u32 m, %nctaid.z; sub.u32 m, m, 1; mov.b32 z, 0;"
    return f"{{ .reg .b32 z, m; {start} {mixed} or.b32 $0, ${place + 1}, z; }}"


@gluon.jit
def apply_norm(squares, values, factors):
    """All of an RMS norm but the row's scale: the squares that it follows from, and the values times the weight."""
    wide = values.to(gl.float32)
    return squares + gl.sum(wide * wide, axis=1), _multiply_pairs(values, factors)


@gluon.jit
def row_scale(squares, eps, WIDTH: gl.constexpr, parted: gl.constexpr):
    """[parts, T] sums of squares → [T] what a norm multiplies with."""
    square = gl.sum(gl.convert_layout(squares, gl.SliceLayout(1, parted)), axis=0)
    return gl.rsqrt(square / WIDTH + eps)


@gluon.jit
def _multiply_pairs(values, factors):
    """Two products of 16 bits in one instruction, with the rounding of single ones."""
    if values.dtype == gl.bfloat16:
        return gl.inline_asm_elementwise(
            "mul.rn.bf16x2 $0, $1, $2;", "=r,r,r", [values, factors], dtype=gl.bfloat16, is_pure=True, pack=2
        )
    else:
        return gl.inline_asm_elementwise(
            "mul.rn.f16x2 $0, $1, $2;", "=r,r,r", [values, factors], dtype=gl.float16, is_pure=True, pack=2
        )


@gluon.jit
def _ordered(numbers, IN_SEGMENTS: gl.constexpr):
    if IN_SEGMENTS:
        return _in_order(numbers)
    else:
        return numbers


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
def _widen(tile, SCALED: gl.constexpr):
    if SCALED:
        return _to_bfloat16(tile)
    else:
        return tile


@gluon.jit
def _to_bfloat16(tile):
    """Four numbers of e4m3 at a time, exactly: each behind a byte of its sign, then its bits to where bfloat16 has
    them, then the exponents' difference of 120 by a multiplication, which is also right for the smallest numbers."""
    return gl.inline_asm_elementwise(
        """
        {
        .reg .b32 t, m;
        mov.b32 m, 0x7b807b80;
        prmt.b32 t, $2, 0, 0x9180;
        shl.b32 t, t, 4;
        and.b32 t, t, 0x87f087f0;
        mul.rn.bf16x2 $0, t, m;
        prmt.b32 t, $2, 0, 0xb3a2;
        shl.b32 t, t, 4;
        and.b32 t, t, 0x87f087f0;
        mul.rn.bf16x2 $1, t, m;
        }
        """,
        "=r,=r,r", [tile], dtype=gl.bfloat16, is_pure=True, pack=4,
    )  # fmt: skip


@gluon.jit
def _finish(
    y, epilogue, sums, up_sums, y_stride, rows, outputs, flat: gl.constexpr,
    SCALED: gl.constexpr, BIAS: gl.constexpr, GATED: gl.constexpr, ADD: gl.constexpr,
):  # fmt: skip
    """What follows the product, with the roundings that it has alone."""
    kind: gl.constexpr = y.dtype.element_ty
    sums = _finish_sums(sums, epilogue.scales, epilogue.bias, kind, SCALED, BIAS)
    if GATED:
        up_sums = _finish_sums(up_sums, epilogue.up_scales, epilogue.up_bias, kind, SCALED, BIAS)
        gate = sums / (1.0 + gl.exp(-sums))
        sums = (gate.to(kind).to(gl.float32) * up_sums).to(kind).to(gl.float32)
    if ADD:
        sums += epilogue.residual
    places, inside = _places(y, y_stride, rows, outputs, sums.shape[0], sums.shape[1], flat)
    gl.store(places, sums.to(kind), mask=inside)


@gluon.jit
def _finish_sums(sums, scales, bias, kind: gl.constexpr, SCALED: gl.constexpr, BIAS: gl.constexpr):
    if SCALED:
        sums *= scales
    if BIAS:
        sums += bias
    return sums.to(kind).to(gl.float32)
