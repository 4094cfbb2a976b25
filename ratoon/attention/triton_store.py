"""The Triton kernel that writes keys and values to their pages, with the norm and the rotation of heads before it.

Imported on a CUDA device only, and under Triton's interpreter in tests.
"""

import triton
import triton.language as tl

from ratoon.layers.triton.dependent import wait_for_kernel_before
from ratoon.layers.triton.norms import apply_factors


@triton.jit
def _load_parts(
    row_ptrs, in_rows, HEAD_DIM: tl.constexpr, HALF: tl.constexpr, HALF_PAD: tl.constexpr, REST_PAD: tl.constexpr
):
    """Heads in three parts of columns: two halves, and what follows them. The elements that a rotation mixes are in one
    thread, so results may overwrite them."""
    half = tl.arange(0, HALF_PAD)
    second = HALF + half
    first_part = tl.load(row_ptrs[:, None] + half[None, :], mask=in_rows[:, None] & (half < HALF)[None, :], other=0.0)
    in_second = (half < HALF) & (second < HEAD_DIM)
    second_part = tl.load(row_ptrs[:, None] + second[None, :], mask=in_rows[:, None] & in_second[None, :], other=0.0)
    rest = 2 * HALF + tl.arange(0, REST_PAD)
    rest_part = tl.load(
        row_ptrs[:, None] + rest[None, :], mask=in_rows[:, None] & (rest < HEAD_DIM)[None, :], other=0.0
    )
    return first_part, second_part, rest_part


@triton.jit
def _store_parts(
    row_ptrs, in_rows, first_part, second_part, rest_part, HEAD_DIM: tl.constexpr, HALF: tl.constexpr,
    HALF_PAD: tl.constexpr, REST_PAD: tl.constexpr,
):  # fmt: skip
    half = tl.arange(0, HALF_PAD)
    second = HALF + half
    dtype = row_ptrs.dtype.element_ty
    if dtype == tl.float8e4nv:  # it has no infinity: larger numbers become the largest
        first_part, second_part = tl.clamp(first_part, -448.0, 448.0), tl.clamp(second_part, -448.0, 448.0)
        rest_part = tl.clamp(rest_part.to(tl.float32), -448.0, 448.0)
    in_second = (half < HALF) & (second < HEAD_DIM)
    tl.store(row_ptrs[:, None] + half[None, :], first_part.to(dtype), mask=in_rows[:, None] & (half < HALF)[None, :])
    tl.store(row_ptrs[:, None] + second[None, :], second_part.to(dtype), mask=in_rows[:, None] & in_second[None, :])
    if 2 * HALF < HEAD_DIM:
        rest = 2 * HALF + tl.arange(0, REST_PAD)
        tl.store(
            row_ptrs[:, None] + rest[None, :], rest_part.to(dtype), mask=in_rows[:, None] & (rest < HEAD_DIM)[None, :]
        )


@triton.jit
def normed(x, scale, weight):
    """The norm of x, with the roundings of TorchOps."""
    return apply_factors(x.to(tl.float32) * scale[:, None], weight, x.dtype)


@triton.jit
def greatest_square(x):
    """The greatest square of each row [rows], which sum_squares takes."""
    return tl.max(x.to(tl.float32) * x.to(tl.float32), 1)


@triton.jit
def sum_squares(x, greatest, EXACT: tl.constexpr):
    """The sum of the squares of each row [rows]. EXACT, for numbers of 16 bits: in float64 and without rounding, so
    that it does not depend on the order; squares below 2**-22 of the row's greatest, which rounding could reach, are
    left out."""
    squares = x.to(tl.float32) * x.to(tl.float32)
    if EXACT:
        squares = tl.where(squares * 4194304.0 < greatest[:, None], 0.0, squares).to(tl.float64)
    return tl.sum(squares, 1)


@triton.jit
def _transform_heads(
    first, second, rest, tokens, in_rows, positions_ptr, cos_sin_ptr, axes_ptr, stride_axis, weight_ptr, eps,
    HEAD_DIM: tl.constexpr, HALF: tl.constexpr, HALF_PAD: tl.constexpr, REST_PAD: tl.constexpr, HAS_NORM: tl.constexpr,
    HAS_ROTARY: tl.constexpr, HAS_AXES: tl.constexpr, EXACT: tl.constexpr,
):  # fmt: skip
    """RMS norm of each head, then the rotation of its first 2 · HALF elements, in float32 and rounded once."""
    half = tl.arange(0, HALF_PAD)
    if HAS_NORM:
        columns = 2 * HALF + tl.arange(0, REST_PAD)
        greatest = in_rows  # not used
        if EXACT:
            greatest = tl.maximum(greatest_square(first), greatest_square(second))
            if 2 * HALF < HEAD_DIM:
                greatest = tl.maximum(greatest, greatest_square(rest))
        squares = sum_squares(first, greatest, EXACT) + sum_squares(second, greatest, EXACT)
        if 2 * HALF < HEAD_DIM:
            squares += sum_squares(rest, greatest, EXACT)
        scale = tl.rsqrt(squares.to(tl.float32) / HEAD_DIM + eps)
        in_second = (half < HALF) & (half + HALF < HEAD_DIM)
        first = normed(first, scale, tl.load(weight_ptr + half, mask=half < HALF, other=0.0))
        second = normed(second, scale, tl.load(weight_ptr + HALF + half, mask=in_second, other=0.0))
        if 2 * HALF < HEAD_DIM:
            rest = normed(rest, scale, tl.load(weight_ptr + columns, mask=columns < HEAD_DIM, other=0.0))
    x, y = first.to(tl.float32), second.to(tl.float32)
    if HAS_ROTARY:
        in_half = in_rows[:, None] & (half < HALF)[None, :]
        if HAS_AXES:
            axes = tl.load(axes_ptr + half, mask=half < HALF, other=0)
            places = axes[None, :] * stride_axis + tokens[:, None]
            positions = tl.load(positions_ptr + places, mask=in_half, other=0).to(tl.int64)
        else:
            positions = tl.load(positions_ptr + tokens, mask=in_rows, other=0).to(tl.int64)[:, None]
        angles = cos_sin_ptr + positions * (2 * HALF) + half[None, :]
        cos = tl.load(angles, mask=in_half, other=0.0)
        sin = tl.load(angles + HALF, mask=in_half, other=0.0)
        # Spelled out: triton_decode.py rotates too, and must round alike.
        x, y = tl.fma(x, cos, -(y * sin)), tl.fma(y, cos, x * sin)
    return x, y, rest


@triton.jit(do_not_specialize=["num_tokens"])
def store_kernel(
    q_ptr, k_ptr, v_ptr, cache_ptr, slots_ptr, positions_ptr, cos_sin_ptr, axes_ptr, q_weight_ptr, k_weight_ptr,
    stride_axis, q_eps, k_eps, num_tokens, stride_q, stride_k, stride_v, stride_q_head, stride_k_head, stride_v_head,
    stride_block, Q_HEADS: tl.constexpr, KV_HEADS: tl.constexpr, Q_DIM: tl.constexpr, HEAD_DIM: tl.constexpr,
    BLOCK_SIZE: tl.constexpr, HALF: tl.constexpr, HALF_PAD: tl.constexpr, REST_PAD: tl.constexpr,
    HAS_Q_NORM: tl.constexpr, HAS_K_NORM: tl.constexpr, HAS_ROTARY: tl.constexpr, HAS_AXES: tl.constexpr,
    TOKENS: tl.constexpr, HEADS: tl.constexpr, EXACT: tl.constexpr, DEPENDENT: tl.constexpr,
):  # fmt: skip
    """Grid: TOKENS tokens each, HEADS heads each: first those of queries, transformed in place, then those of keys,
    transformed into the cache, then those of values. Q_HEADS 0: queries stay as they are. Q_DIM: the first numbers of a
    query's head, those of all that are transformed. EXACT: see sum_squares."""
    q_blocks: tl.constexpr = (Q_HEADS + HEADS - 1) // HEADS
    kv_blocks: tl.constexpr = (KV_HEADS + HEADS - 1) // HEADS
    block = tl.program_id(1)
    rows = tl.arange(0, TOKENS * HEADS)
    tokens = tl.program_id(0) * TOKENS + rows // HEADS
    token_offsets = tokens.to(tl.int64)
    if DEPENDENT:
        wait_for_kernel_before()
    if block < q_blocks:
        heads = block * HEADS + rows % HEADS
        in_rows = (tokens < num_tokens) & (heads < Q_HEADS)
        q_ptrs = q_ptr + token_offsets * stride_q + heads * stride_q_head
        first, second, rest = _load_parts(q_ptrs, in_rows, Q_DIM, HALF, HALF_PAD, REST_PAD)
        first, second, rest = _transform_heads(
            first, second, rest, tokens, in_rows, positions_ptr, cos_sin_ptr, axes_ptr, stride_axis, q_weight_ptr,
            q_eps, Q_DIM, HALF, HALF_PAD, REST_PAD, HAS_Q_NORM, HAS_ROTARY, HAS_AXES, EXACT,
        )  # fmt: skip
        _store_parts(q_ptrs, in_rows, first, second, rest, Q_DIM, HALF, HALF_PAD, REST_PAD)
        return
    heads = (block - q_blocks) % kv_blocks * HEADS + rows % HEADS
    in_rows = (tokens < num_tokens) & (heads < KV_HEADS)
    slots = tl.load(slots_ptr + tokens, mask=in_rows, other=0).to(tl.int64)
    cache_ptrs = cache_ptr + slots // BLOCK_SIZE * stride_block
    cache_ptrs += heads * (BLOCK_SIZE * HEAD_DIM) + slots % BLOCK_SIZE * HEAD_DIM
    if block < q_blocks + kv_blocks:
        k_ptrs = k_ptr + token_offsets * stride_k + heads * stride_k_head
        first, second, rest = _load_parts(k_ptrs, in_rows, HEAD_DIM, HALF, HALF_PAD, REST_PAD)
        first, second, rest = _transform_heads(
            first, second, rest, tokens, in_rows, positions_ptr, cos_sin_ptr, axes_ptr, stride_axis, k_weight_ptr,
            k_eps, HEAD_DIM, HALF, HALF_PAD, REST_PAD, HAS_K_NORM, HAS_ROTARY, HAS_AXES, EXACT,
        )  # fmt: skip
    else:
        v_ptrs = v_ptr + token_offsets * stride_v + heads * stride_v_head
        first, second, rest = _load_parts(v_ptrs, in_rows, HEAD_DIM, HALF, HALF_PAD, REST_PAD)
        cache_ptrs += KV_HEADS * BLOCK_SIZE * HEAD_DIM
        first, second = first.to(tl.float32), second.to(tl.float32)
    _store_parts(cache_ptrs, in_rows, first, second, rest, HEAD_DIM, HALF, HALF_PAD, REST_PAD)
