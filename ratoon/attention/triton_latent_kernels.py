"""The Triton kernels of latent attention: heads read one vector of each token as key and, behind its first numbers, as
value.

A tile of rows is some tokens of one request times some heads, which all read the same vectors. Imported on a CUDA
device only, and under Triton's interpreter in tests.
"""

import triton
import triton.language as tl

from ratoon.attention.triton_kernels import divide_by_sums


@triton.jit
def find_request(starts_ptr, num_requests, tile, TOKENS: tl.constexpr):
    """The request of a tile, and which of its tiles it is. Request r has tiles from starts[r] // TOKENS + r on: enough
    for its tokens, and sometimes one more."""
    low, high = num_requests * 0, num_requests
    while high - low > 1:
        middle = (low + high) // 2
        if tl.load(starts_ptr + middle) // TOKENS + middle <= tile:
            low = middle
        else:
            high = middle
    return low, tile - (tl.load(starts_ptr + low) // TOKENS + low)


@triton.jit(do_not_specialize=["num_requests", "num_splits"])
def latent_kernel(
    q_rope_ptr, q_value_ptr, pages_ptr, table_ptr, starts_ptr, lens_ptr, out_ptr, acc_ptr, peak_ptr, total_ptr,
    sinks_ptr, scale, num_requests, num_splits, stride_rope, stride_rope_head, stride_value, stride_value_head,
    stride_block, stride_table, HEADS: tl.constexpr, ROPE: tl.constexpr, VALUE: tl.constexpr, ROPE_PAD: tl.constexpr,
    VALUE_PAD: tl.constexpr, BLOCK_SIZE: tl.constexpr, TILE_HEADS: tl.constexpr, TOKENS: tl.constexpr,
    BLOCK_N: tl.constexpr, SPLIT: tl.constexpr, PRECISION: tl.constexpr, HAS_SINKS: tl.constexpr,
):  # fmt: skip
    """Grid: tiles of TOKENS tokens, tiles of TILE_HEADS heads, splits of keys. Queries are in two parts, which may be
    in different places: for the rotated numbers of a vector, and for its values. `scale` is that of powers of two. With
    SPLIT, the weighted sum, the peak and the total of each row and split go to acc, peak and total [rows, splits]; else
    the result to out. HAS_SINKS: see divide_by_sums."""
    request, tile = find_request(starts_ptr, num_requests, tl.program_id(0), TOKENS)
    start, end = tl.load(starts_ptr + request), tl.load(starts_ptr + request + 1)
    first = start + tile * TOKENS
    if first >= end:
        return
    rows = tl.arange(0, TOKENS * TILE_HEADS)
    tokens, heads = first + rows // TILE_HEADS, tl.program_id(1) * TILE_HEADS + rows % TILE_HEADS
    in_rows = (tokens < end) & (heads < HEADS)
    length = tl.load(lens_ptr + request)
    positions = length - end + tokens  # of the rows in their sequence, which see keys up to there
    rope, value = tl.arange(0, ROPE_PAD), tl.arange(0, VALUE_PAD)
    in_rope, in_value = rope < ROPE, value < VALUE
    far = tokens.to(tl.int64)[:, None]
    rope_rows = q_rope_ptr + far * stride_rope + heads[:, None] * stride_rope_head
    value_rows = q_value_ptr + far * stride_value + heads[:, None] * stride_value_head
    q_rope = tl.load(rope_rows + rope[None, :], mask=in_rows[:, None] & in_rope[None, :], other=0.0)
    q_value = tl.load(value_rows + value[None, :], mask=in_rows[:, None] & in_value[None, :], other=0.0)
    keys_end = tl.minimum(length, length - end + first + TOKENS)  # that the last of the rows sees
    share = tl.cdiv(tl.cdiv(keys_end, BLOCK_N), num_splits) * BLOCK_N
    first_key = tl.program_id(2) * share
    last_key = tl.minimum(keys_end, first_key + share)
    peak = tl.full([TOKENS * TILE_HEADS], float("-inf"), tl.float32)
    total = tl.zeros([TOKENS * TILE_HEADS], tl.float32)
    acc = tl.zeros([TOKENS * TILE_HEADS, VALUE_PAD], tl.float32)
    for key in range(first_key, last_key, BLOCK_N):
        keys = key + tl.arange(0, BLOCK_N)
        there = keys < last_key
        blocks = tl.load(table_ptr + request.to(tl.int64) * stride_table + keys // BLOCK_SIZE, mask=there, other=0)
        lines = pages_ptr + blocks.to(tl.int64) * stride_block + keys % BLOCK_SIZE * (ROPE + VALUE)
        # What is not there may be NaN, and zero times that is not zero.
        k_rope = tl.load(lines[:, None] + rope[None, :], mask=there[:, None] & in_rope[None, :], other=0.0)
        values = tl.load(lines[:, None] + ROPE + value[None, :], mask=there[:, None] & in_value[None, :], other=0.0)
        k_rope, values = k_rope.to(q_rope.dtype), values.to(q_rope.dtype)
        scores = tl.dot(q_value, tl.trans(values), input_precision=PRECISION)
        scores = tl.dot(q_rope, tl.trans(k_rope), scores, input_precision=PRECISION) * scale
        scores = tl.where(there[None, :] & (keys[None, :] <= positions[:, None]), scores, float("-inf"))
        top = tl.maximum(peak, tl.max(scores, 1))
        base = tl.where(top == float("-inf"), 0.0, top)  # of rows that have seen no key yet
        weights = tl.exp2(scores - base[:, None])
        keep = tl.exp2(peak - base)
        total = total * keep + tl.sum(weights, 1)
        acc = tl.dot(weights.to(values.dtype), values, acc * keep[:, None], input_precision=PRECISION)
        peak = top
    places = tokens.to(tl.int64) * HEADS + heads
    if SPLIT:
        places = places * num_splits + tl.program_id(2)
        tl.store(peak_ptr + places, peak, mask=in_rows)
        tl.store(total_ptr + places, total, mask=in_rows)
        tl.store(acc_ptr + places[:, None] * VALUE + value[None, :], acc, mask=in_rows[:, None] & in_value[None, :])
    else:
        out = divide_by_sums(acc, peak, total, sinks_ptr, heads, in_rows, HAS_SINKS).to(out_ptr.dtype.element_ty)
        tl.store(out_ptr + places[:, None] * VALUE + value[None, :], out, mask=in_rows[:, None] & in_value[None, :])


@triton.jit(do_not_specialize=["num_splits"])
def merge_kernel(
    acc_ptr, peak_ptr, total_ptr, out_ptr, sinks_ptr, num_splits, HEADS: tl.constexpr, VALUE: tl.constexpr,
    PART: tl.constexpr, SPLITS_PAD: tl.constexpr, HAS_SINKS: tl.constexpr,
):  # fmt: skip
    """Grid: rows, and parts of PART numbers of their values. The splits of a row are put together, all loaded at once.
    Rows of padding get what happens to be there."""
    row, splits = tl.program_id(0).to(tl.int64), tl.arange(0, SPLITS_PAD)
    value = tl.program_id(1) * PART + tl.arange(0, PART)
    in_value, there = value < VALUE, splits < num_splits
    places = row * num_splits + splits
    peaks = tl.load(peak_ptr + places, mask=there, other=float("-inf"))
    totals = tl.load(total_ptr + places, mask=there, other=0.0)
    parts_mask = there[:, None] & in_value[None, :]
    parts = tl.load(acc_ptr + places[:, None] * VALUE + value[None, :], mask=parts_mask, other=0.0)
    top = tl.max(peaks, 0)
    shares = tl.exp2(peaks - tl.where(top == float("-inf"), 0.0, top))  # zero where a split has no keys
    acc = tl.sum(parts * shares[:, None], 0)
    total = tl.sum(totals * shares, 0)
    rows = row + tl.arange(0, 1)  # [1]
    out = divide_by_sums(
        acc[None, :], tl.expand_dims(top, 0), tl.expand_dims(total, 0), sinks_ptr, rows % HEADS, rows >= 0, HAS_SINKS
    )
    tl.store(out_ptr + rows[:, None] * VALUE + value[None, :], out.to(out_ptr.dtype.element_ty), mask=in_value[None, :])
