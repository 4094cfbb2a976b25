"""The Triton kernels of the expanded form of latent attention: heads have keys and values of their own, which are
products of the vectors, beside a part of the key that all heads share.

Both work on a segment of the keys of a step's requests, one request's behind the other's. Imported on a CUDA device
only, and under Triton's interpreter in tests.
"""

import triton
import triton.language as tl

from ratoon.attention.triton_kernels import divide_by_sums
from ratoon.attention.triton_latent_kernels import find_request


@triton.jit(do_not_specialize=["num_requests", "first_key", "last_key"])
def gather_kernel(
    pages_ptr, table_ptr, key_starts_ptr, out_ptr, num_requests, first_key, last_key, stride_block, stride_table,
    ROPE: tl.constexpr, VALUE: tl.constexpr, ROPE_PAD: tl.constexpr, VALUE_PAD: tl.constexpr, BLOCK_SIZE: tl.constexpr,
    KEYS: tl.constexpr,
):  # fmt: skip
    """Grid: tiles of KEYS keys of the segment. Its vectors, from the pages → out [keys, ROPE + VALUE]."""
    places = tl.program_id(0) * KEYS + tl.arange(0, KEYS)
    keys = first_key + places
    there = keys < last_key
    low, high, span = tl.zeros_like(keys), tl.zeros_like(keys) + num_requests, num_requests * 1
    while span > 1:
        middle = (low + high) // 2
        begins = tl.load(key_starts_ptr + middle, mask=there, other=0) <= keys
        low, high, span = tl.where(begins, middle, low), tl.where(begins, high, middle), (span + 1) // 2
    keys -= tl.load(key_starts_ptr + low, mask=there, other=0)  # from here on within their request
    blocks = tl.load(table_ptr + low.to(tl.int64) * stride_table + keys // BLOCK_SIZE, mask=there, other=0)
    lines = pages_ptr + blocks.to(tl.int64) * stride_block + keys % BLOCK_SIZE * (ROPE + VALUE)
    out_lines = out_ptr + places.to(tl.int64) * (ROPE + VALUE)
    rope, value = tl.arange(0, ROPE_PAD), tl.arange(0, VALUE_PAD)
    in_rope, in_value = there[:, None] & (rope < ROPE)[None, :], there[:, None] & (value < VALUE)[None, :]
    dtype = out_ptr.dtype.element_ty
    ropes = tl.load(lines[:, None] + rope[None, :], mask=in_rope, other=0.0)
    values = tl.load(lines[:, None] + ROPE + value[None, :], mask=in_value, other=0.0)
    tl.store(out_lines[:, None] + rope[None, :], ropes.to(dtype), mask=in_rope)
    tl.store(out_lines[:, None] + ROPE + value[None, :], values.to(dtype), mask=in_value)


@triton.jit
def _load_tile(lines, columns, in_keys, SIZE: tl.constexpr, PAD: tl.constexpr, MASKED: tl.constexpr):
    """The numbers of a tile of keys [keys, PAD]. Without a mask, loads are plain copies."""
    if MASKED:  # what is not there may be NaN, and zero times that is not zero
        return tl.load(lines[:, None] + columns[None, :], mask=in_keys[:, None] & (columns < SIZE)[None, :], other=0.0)
    if SIZE < PAD:
        return tl.load(lines[:, None] + columns[None, :], mask=(columns < SIZE)[None, :], other=0.0)
    return tl.load(lines[:, None] + columns[None, :])


@triton.jit
def _attend_to_tile(
    q_own, q_rope, acc, peak, total, own_lines, rope_lines, value_lines, keys, last_key, positions, scale,
    ROPE: tl.constexpr, NOPE: tl.constexpr, VALUE: tl.constexpr, ROPE_PAD: tl.constexpr, NOPE_PAD: tl.constexpr,
    VALUE_PAD: tl.constexpr, PRECISION: tl.constexpr, MASKED: tl.constexpr,
):  # fmt: skip
    """The running sums of a tile of rows, after a tile of keys. MASKED: not all rows see all of them, or some of them
    are not there."""
    in_keys = keys < last_key
    k_own = _load_tile(own_lines, tl.arange(0, NOPE_PAD), in_keys, NOPE, NOPE_PAD, MASKED)
    k_rope = _load_tile(rope_lines, tl.arange(0, ROPE_PAD), in_keys, ROPE, ROPE_PAD, MASKED)
    scores = tl.dot(q_own, tl.trans(k_own), input_precision=PRECISION)
    scores = tl.dot(q_rope, tl.trans(k_rope), scores, input_precision=PRECISION)
    if MASKED:
        scores = tl.where(in_keys[None, :] & (keys[None, :] <= positions[:, None]), scores, float("-inf"))
    top = tl.maximum(peak, tl.max(scores, 1) * scale)
    base = top
    if MASKED:  # of rows that have seen no key yet
        base = tl.where(top == float("-inf"), 0.0, top)
    weights = tl.exp2(scores * scale - base[:, None])
    keep = tl.exp2(peak - base)
    total = total * keep + tl.sum(weights, 1)
    values = _load_tile(value_lines, tl.arange(0, VALUE_PAD), in_keys, VALUE, VALUE_PAD, MASKED)
    acc = tl.dot(weights.to(values.dtype), values, acc * keep[:, None], input_precision=PRECISION)
    return acc, top, total


@triton.jit(do_not_specialize=["num_requests", "first_key", "last_key"])
def expanded_kernel(
    q_ptr, own_ptr, vectors_ptr, values_ptr, out_ptr, acc_ptr, peak_ptr, total_ptr, sinks_ptr, row_starts_ptr,
    q_starts_ptr, key_starts_ptr, scale, num_requests, first_key, last_key, stride_q, stride_q_head,
    HEADS: tl.constexpr, TILE_HEADS: tl.constexpr, WIDTH: tl.constexpr, ROPE: tl.constexpr, NOPE: tl.constexpr,
    VALUE: tl.constexpr, ROPE_PAD: tl.constexpr, NOPE_PAD: tl.constexpr, VALUE_PAD: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, IN_SEGMENTS: tl.constexpr, PRECISION: tl.constexpr,
    HAS_SINKS: tl.constexpr,
):  # fmt: skip
    """Grid: TILE_HEADS heads, tiles of BLOCK_M rows, groups of heads. The last rows of a request see most keys, and
    come first; the heads of a tile run side by side, and read what heads of other tiles read.

    Keys first_key to last_key of all have their own part in `own` [keys, HEADS, NOPE], the shared one at the front of
    `vectors` [keys, WIDTH], and `values` [keys, HEADS, VALUE]. IN_SEGMENTS: a request may have others, before and
    behind; until a row has seen all of its keys, its sums are in acc, peak and total [rows, HEADS]. `scale` is that of
    powers of two. HAS_SINKS: see divide_by_sums."""
    head = tl.program_id(2) * TILE_HEADS + tl.program_id(0)
    place = tl.num_programs(1) - 1 - tl.program_id(1)
    request, tile = find_request(row_starts_ptr, num_requests, place, BLOCK_M)
    begin = tl.load(row_starts_ptr + request)
    num_rows = tl.load(row_starts_ptr + request + 1) - begin
    first = tile * BLOCK_M
    if (first >= num_rows) | (head >= HEADS):
        return
    key_start = tl.load(key_starts_ptr + request)
    length = tl.load(key_starts_ptr + request + 1) - key_start
    context = length - num_rows  # the position of the request's first row
    keys_end = tl.minimum(length, context + first + BLOCK_M)  # that the last of the rows sees
    low, high = length * 0, keys_end
    if IN_SEGMENTS:
        low = tl.maximum(low, first_key - key_start)
        high = tl.minimum(high, last_key - key_start)
        if low >= high:
            return
    rows = first + tl.arange(0, BLOCK_M)
    in_rows, positions = rows < num_rows, context + rows
    rope, own, value = tl.arange(0, ROPE_PAD), tl.arange(0, NOPE_PAD), tl.arange(0, VALUE_PAD)
    tokens = (tl.load(q_starts_ptr + request) + rows).to(tl.int64)
    q_rows = q_ptr + tokens[:, None] * stride_q + head * stride_q_head
    q_rope = tl.load(q_rows + rope[None, :], mask=in_rows[:, None] & (rope < ROPE)[None, :], other=0.0)
    q_own = tl.load(q_rows + ROPE + own[None, :], mask=in_rows[:, None] & (own < NOPE)[None, :], other=0.0)
    in_out = in_rows[:, None] & (value < VALUE)[None, :]
    peak = tl.full([BLOCK_M], float("-inf"), tl.float32)
    total = tl.zeros([BLOCK_M], tl.float32)
    acc = tl.zeros([BLOCK_M, VALUE_PAD], tl.float32)
    states = (begin + rows).to(tl.int64) * HEADS + head
    if IN_SEGMENTS and low > 0:
        peak = tl.load(peak_ptr + states, mask=in_rows, other=0.0)
        total = tl.load(total_ptr + states, mask=in_rows, other=0.0)
        acc = tl.load(acc_ptr + states[:, None] * VALUE + value[None, :], mask=in_out, other=0.0)
    lines = (key_start - first_key + low).to(tl.int64) + tl.arange(0, BLOCK_N)
    own_lines = own_ptr + (lines * HEADS + head) * NOPE
    rope_lines = vectors_ptr + lines * WIDTH
    value_lines = values_ptr + (lines * HEADS + head) * VALUE
    num_clear = tl.maximum(tl.minimum(high, context + first + 1) - low, 0)  # keys that all rows see
    clear = low + num_clear // BLOCK_N * BLOCK_N
    for key in range(low, clear, BLOCK_N):
        acc, peak, total = _attend_to_tile(
            q_own, q_rope, acc, peak, total, own_lines, rope_lines, value_lines, key + tl.arange(0, BLOCK_N), high,
            positions, scale, ROPE, NOPE, VALUE, ROPE_PAD, NOPE_PAD, VALUE_PAD, PRECISION, False,
        )  # fmt: skip
        own_lines += BLOCK_N * HEADS * NOPE
        rope_lines += BLOCK_N * WIDTH
        value_lines += BLOCK_N * HEADS * VALUE
    for key in range(clear, high, BLOCK_N):
        acc, peak, total = _attend_to_tile(
            q_own, q_rope, acc, peak, total, own_lines, rope_lines, value_lines, key + tl.arange(0, BLOCK_N), high,
            positions, scale, ROPE, NOPE, VALUE, ROPE_PAD, NOPE_PAD, VALUE_PAD, PRECISION, True,
        )  # fmt: skip
        own_lines += BLOCK_N * HEADS * NOPE
        rope_lines += BLOCK_N * WIDTH
        value_lines += BLOCK_N * HEADS * VALUE
    if IN_SEGMENTS and high < keys_end:
        tl.store(peak_ptr + states, peak, mask=in_rows)
        tl.store(total_ptr + states, total, mask=in_rows)
        tl.store(acc_ptr + states[:, None] * VALUE + value[None, :], acc, mask=in_out)
        return
    out = divide_by_sums(acc, peak, total, sinks_ptr, rows * 0 + head, in_rows, HAS_SINKS)
    out_rows = out_ptr + (tokens * HEADS + head)[:, None] * VALUE
    tl.store(out_rows + value[None, :], out.to(out_ptr.dtype.element_ty), mask=in_out)
