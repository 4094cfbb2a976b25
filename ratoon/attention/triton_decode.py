"""The Triton kernel for steps in which every request has one token: norm and rotation of heads, write of the new key
and value, and attention, in one launch.

Keys and values of earlier tokens are in their pages; those of the new token are used from registers. Imported on a CUDA
device only, and under Triton's interpreter in tests.
"""

import triton
import triton.language as tl

from ratoon.attention.triton_kernels import (
    _fold,
    _merge_rows,
    _store_part,
    _store_whole,
    add_tile,
    attend_keys,
    cap_scores,
    load_pages,
    load_tile,
    row_sums,
    split_of,
    store_result,
    sums_of,
)
from ratoon.attention.triton_store import greatest_square, normed, sum_squares
from ratoon.layers.triton.dependent import wait_for_kernel_before


@triton.jit
def _partners(dims, HALF: tl.constexpr):
    """The elements of a head that a rotation mixes with its elements."""
    return tl.where(dims < HALF, dims + HALF, tl.where(dims < 2 * HALF, dims - HALF, dims))


@triton.jit
def load_factors(
    position_ptr, cos_sin_ptr, axes_ptr, stride_axis, weight_ptr, NUM: tl.constexpr, HEAD_DIM: tl.constexpr,
    DIM_PAD: tl.constexpr, HALF: tl.constexpr, HAS_NORM: tl.constexpr, HAS_ROTARY: tl.constexpr,
    HAS_AXES: tl.constexpr,
):  # fmt: skip
    """What the elements of NUM heads are multiplied with: the norm's weights, of them and of their partners, and the
    cosine and sine of their rotation. Each [NUM, DIM_PAD], though heads have them in common: then nothing has to change
    its place in registers. `position_ptr`: that of all heads, or [NUM, 1] of each."""
    dims = tl.arange(0, NUM)[:, None] * 0 + tl.arange(0, DIM_PAD)[None, :]
    weights = dims
    cos, sin = dims, dims  # not used
    if HAS_NORM:
        weights = tl.load(weight_ptr + dims, mask=dims < HEAD_DIM, other=0.0)
    others = weights
    if HAS_NORM and HAS_ROTARY:
        others = tl.load(weight_ptr + _partners(dims, HALF), mask=dims < HEAD_DIM, other=0.0)
    if HAS_ROTARY:
        if HAS_AXES:
            position_ptr += tl.load(axes_ptr + dims % HALF) * stride_axis
        angles = cos_sin_ptr + tl.load(position_ptr).to(tl.int64) * (2 * HALF) + dims % HALF
        cos = tl.load(angles, mask=dims < 2 * HALF, other=1.0)
        sin = tl.load(angles + HALF, mask=dims < 2 * HALF, other=0.0)
        sin = tl.where(dims < HALF, -sin, sin)
    return weights, others, cos, sin


@triton.jit
def load_rows(
    row_ptrs, in_rows, HEAD_DIM: tl.constexpr, DIM_PAD: tl.constexpr, HALF: tl.constexpr, HAS_ROTARY: tl.constexpr
):  # fmt: skip
    """The heads at `row_ptrs` [N, 1], as [N, DIM_PAD], and the partners of their elements in their places."""
    dims = tl.arange(0, DIM_PAD)[None, :]
    mask = in_rows & (dims < HEAD_DIM)
    x = tl.load(row_ptrs + dims, mask=mask, other=0.0)
    y = x
    if HAS_ROTARY:
        y = tl.load(row_ptrs + _partners(dims, HALF), mask=mask, other=0.0)
    return x, y


@triton.jit
def _load_heads(
    head_ptr, stride, count, NUM: tl.constexpr, HEAD_DIM: tl.constexpr, DIM_PAD: tl.constexpr, HALF: tl.constexpr,
    HAS_ROTARY: tl.constexpr,
):  # fmt: skip
    """`count` heads of one token [NUM, DIM_PAD], and the partners of their elements in their places."""
    heads = tl.arange(0, NUM)[:, None]
    return load_rows(head_ptr + heads * stride, heads < count, HEAD_DIM, DIM_PAD, HALF, HAS_ROTARY)


@triton.jit
def transform(
    x, y, weights, others, cos, sin, eps, HEAD_DIM: tl.constexpr, HAS_NORM: tl.constexpr, HAS_ROTARY: tl.constexpr,
    EXACT: tl.constexpr,
):  # fmt: skip
    """Heads in float32, after norm and rotation: as triton_store.py's, but with all elements of a head in one tensor.
    y: their partners. EXACT: the norm has the bits of that one, too."""
    if HAS_NORM:
        squares = sum_squares(x, greatest_square(x), EXACT).to(tl.float32)
        scale = tl.rsqrt(squares / HEAD_DIM + eps)
        x = normed(x, scale, weights)
        if HAS_ROTARY:
            y = normed(y, scale, others)
    x = x.to(tl.float32)
    if HAS_ROTARY:
        x = tl.fma(x, cos, y.to(tl.float32) * sin)
    return x


@triton.jit
def as_kept(x, dtype: tl.constexpr):
    x = x.to(tl.float32)
    if dtype == tl.float8e4nv:  # it has no infinity: larger numbers become the largest
        x = tl.clamp(x, -448.0, 448.0)
    return x.to(dtype)


@triton.jit
def store_tokens(
    key, value, slot, is_there, cache_ptr, kv_head, stride_block, HEAD_DIM: tl.constexpr, DIM_PAD: tl.constexpr,
    KV_HEADS: tl.constexpr, BLOCK_SIZE: tl.constexpr,
):  # fmt: skip
    """Writes keys and values [N, DIM_PAD] to their slots: one, or [N, 1]."""
    dims = tl.arange(0, DIM_PAD)[None, :]
    mask = is_there & (dims < HEAD_DIM)
    cache_ptrs = cache_ptr + slot // BLOCK_SIZE * stride_block + kv_head * (BLOCK_SIZE * HEAD_DIM) + dims
    cache_ptrs += slot % BLOCK_SIZE * HEAD_DIM
    tl.store(cache_ptrs, key, mask=mask)
    tl.store(cache_ptrs + KV_HEADS * BLOCK_SIZE * HEAD_DIM, value, mask=mask)


@triton.jit
def _halves(x):
    """The elements of rows with even and with odd places, for keys and values that are read in pairs."""
    return tl.split(tl.reshape(x, [x.shape[0], x.shape[1] // 2, 2]))


@triton.jit
def _repeat(x, BLOCK_M: tl.constexpr):
    """Heads [GROUP_PAD, …] one time after the other, to the rows of a tile."""
    if len(x.shape) == 1:
        x = tl.broadcast_to(x[None, :], [BLOCK_M // x.shape[0], x.shape[0]])
        return tl.reshape(x, [BLOCK_M])
    else:
        x = tl.broadcast_to(x[None, :, :], [BLOCK_M // x.shape[0], x.shape[0], x.shape[1]])
        return tl.reshape(x, [BLOCK_M, x.shape[2]])


@triton.jit(do_not_specialize=["stride_table", "window", "num_splits", "min_share"])
def decode_kernel(
    q_ptr, k_ptr, v_ptr, out_ptr, cache_ptr, table_ptr, query_start_ptr, seq_lens_ptr, slots_ptr, positions_ptr,
    cos_sin_ptr, axes_ptr, q_weight_ptr, k_weight_ptr, acc_ptr, peak_ptr, total_ptr, arrived_ptr, sinks_ptr,
    stride_axis, q_eps, k_eps, scale, stride_q, stride_k, stride_v, stride_q_head, stride_k_head, stride_v_head,
    stride_block, stride_table, window, num_splits, min_share, HEAD_DIM: tl.constexpr, DIM_PAD: tl.constexpr,
    HALF: tl.constexpr, GROUP: tl.constexpr, GROUP_PAD: tl.constexpr, KV_HEADS: tl.constexpr, BLOCK_SIZE: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, HAS_Q_NORM: tl.constexpr, HAS_K_NORM: tl.constexpr,
    HAS_ROTARY: tl.constexpr, HAS_AXES: tl.constexpr, HAS_WINDOW: tl.constexpr, PAIRED: tl.constexpr,
    SPLIT: tl.constexpr, MERGE_ROWS: tl.constexpr, SPLITS_PAD: tl.constexpr, SOFT_CAP: tl.constexpr,
    HAS_SINKS: tl.constexpr, DEPENDENT: tl.constexpr,
):  # fmt: skip
    """Grid: requests, KV heads, splits. A request's earlier keys are divided among as many splits as have `min_share`
    tiles of BLOCK_N keys; the first one adds the new key."""
    request, kv_head, split = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    token = tl.load(query_start_ptr + request)
    query_len = tl.load(query_start_ptr + request + 1) - token
    seq_len = tl.load(seq_lens_ptr + request)
    begin, end = 0, seq_len - 1
    if HAS_WINDOW:
        begin = tl.maximum(0, seq_len - window)
    low, high, num_active = begin // BLOCK_N * BLOCK_N, end, 1
    if SPLIT:
        low, high, num_active = split_of(split, begin, end, num_splits, min_share, BLOCK_N, 0, False)
    # Without waiting for the kernel before: a kernel behind this one relies on the first split of any request.
    if (query_len <= 0) | ((split > 0) & (split >= num_active)):
        return
    table_ptr += request.to(tl.int64) * stride_table
    rows = tl.arange(0, BLOCK_M)
    peak, total = tl.full([BLOCK_M], float("-inf"), tl.float32), tl.zeros([BLOCK_M], tl.float32)
    q = tl.zeros([BLOCK_M, DIM_PAD], q_ptr.dtype.element_ty)
    acc = tl.zeros([BLOCK_M, DIM_PAD], tl.float32)
    q_odd, acc_odd = q, total  # not used
    if PAIRED:
        q = tl.zeros([BLOCK_M, DIM_PAD // 2], tl.float16)
        acc = tl.zeros([BLOCK_M, DIM_PAD // 2], tl.float32)
        q_odd, acc_odd = q, acc
    pages = load_pages(table_ptr, low, end, BLOCK_SIZE, BLOCK_N)
    slot = tl.load(slots_ptr + token).to(tl.int64)
    q_weights, q_others, q_cos, q_sin = load_factors(
        positions_ptr + token, cos_sin_ptr, axes_ptr, stride_axis, q_weight_ptr, GROUP_PAD, HEAD_DIM, DIM_PAD, HALF,
        HAS_Q_NORM, HAS_ROTARY, HAS_AXES,
    )  # fmt: skip
    k_weights, k_others, k_cos, k_sin = load_factors(
        positions_ptr + token, cos_sin_ptr, axes_ptr, stride_axis, k_weight_ptr, 1, HEAD_DIM, DIM_PAD, HALF,
        HAS_K_NORM, HAS_ROTARY, HAS_AXES,
    )  # fmt: skip
    q_ptr += token.to(tl.int64) * stride_q + kv_head * GROUP * stride_q_head
    k_ptr += token.to(tl.int64) * stride_k + kv_head * stride_k_head
    v_ptr += token.to(tl.int64) * stride_v + kv_head * stride_v_head
    # The loop waits for the kernel before this one, in its first turn: Triton begins to load the tiles of the first
    # `num_stages` - 1 turns in front of the loop, so these are loaded while kernels before this one still run. They may
    # be, because no kernel of a step writes keys of earlier tokens.
    for start in range(low, tl.maximum(high, low + 1), BLOCK_N):
        next_pages = load_pages(table_ptr, start + BLOCK_N, end, BLOCK_SIZE, BLOCK_N)
        k, v = load_tile(
            pages, start, begin, end, cache_ptr, kv_head, stride_block, HEAD_DIM, DIM_PAD, KV_HEADS, BLOCK_SIZE,
            BLOCK_N, PAIRED, True,
        )  # fmt: skip
        if start == low:
            if DEPENDENT:
                wait_for_kernel_before()
            # All loads stand before what is computed from them: they take as long as one.
            q_x, q_y = _load_heads(q_ptr, stride_q_head, GROUP, GROUP_PAD, HEAD_DIM, DIM_PAD, HALF, HAS_ROTARY)
            k_x, k_y = _load_heads(k_ptr, 0, 1, 1, HEAD_DIM, DIM_PAD, HALF, HAS_ROTARY)
            value, _ = _load_heads(v_ptr, 0, 1, 1, HEAD_DIM, DIM_PAD, HALF, False)
            heads = transform(
                q_x, q_y, q_weights, q_others, q_cos, q_sin, q_eps, HEAD_DIM, HAS_Q_NORM, HAS_ROTARY, False
            ).to(q_ptr.dtype.element_ty)
            key = transform(k_x, k_y, k_weights, k_others, k_cos, k_sin, k_eps, HEAD_DIM, HAS_K_NORM, HAS_ROTARY, False)
            key, value = as_kept(key, cache_ptr.dtype.element_ty), as_kept(value, cache_ptr.dtype.element_ty)
            if split == 0:
                store_tokens(
                    key, value, slot, True, cache_ptr, kv_head, stride_block, HEAD_DIM, DIM_PAD, KV_HEADS, BLOCK_SIZE
                )
            score = cap_scores(tl.sum(heads.to(tl.float32) * key.to(tl.float32), 1) * scale, SOFT_CAP)
            peak = _repeat(tl.where(split == 0, score, float("-inf")), BLOCK_M)
            total += tl.where(split == 0, 1.0, 0.0)
            values = tl.where(split == 0, value.to(tl.float32), 0.0)
            if PAIRED:
                values, odd_values = _halves(values)
                acc_odd = tl.broadcast_to(odd_values, acc_odd.shape)
                heads, odd_heads = _halves(tl.clamp(heads.to(tl.float32), -65504.0, 65504.0).to(tl.float16))
                q_odd = _repeat(odd_heads, BLOCK_M)
            acc = tl.broadcast_to(values, acc.shape)
            q = _repeat(heads, BLOCK_M)
        acc, acc_odd, peak, total = add_tile(
            acc, acc_odd, peak, total, k, v, q, q_odd, start, end, rows * 0 + end, rows, rows, out_ptr, scale, window,
            0, BLOCK_N, False, HAS_WINDOW, False, PAIRED, True, 0, SOFT_CAP,
        )  # fmt: skip
        pages = next_pages
    if PAIRED:
        acc = tl.interleave(acc, acc_odd)
    store_result(
        acc, peak, total, token, 0, GROUP, kv_head, request, split, num_active, 0, num_splits, out_ptr, acc_ptr,
        peak_ptr, total_ptr, arrived_ptr, sinks_ptr, HEAD_DIM, DIM_PAD, GROUP, KV_HEADS, BLOCK_M, SPLIT, MERGE_ROWS,
        SPLITS_PAD, False, False, False, HAS_SINKS,
    )  # fmt: skip


@triton.jit
def _load_new_tile(
    tile, begin, end, cache_ptr, table_ptr, kv_head, stride_block, HEAD_DIM: tl.constexpr, DIM_PAD: tl.constexpr,
    KV_HEADS: tl.constexpr, BLOCK_SIZE: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """A tile of keys and one of values. What the last key's place holds is not used: it is written by this kernel."""
    pages = load_pages(table_ptr, tile * BLOCK_N, end, BLOCK_SIZE, BLOCK_N)
    return load_tile(
        pages, tile * BLOCK_N, begin, end - 1, cache_ptr, kv_head, stride_block, HEAD_DIM, DIM_PAD, KV_HEADS,
        BLOCK_SIZE, BLOCK_N, False, True,
    )  # fmt: skip


@triton.jit
def _attend_tile(
    q, k, v, key, value, tile, end, scale, window, HEAD_DIM: tl.constexpr, DIM_PAD: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, HAS_WINDOW: tl.constexpr, SOFT_CAP: tl.constexpr,
):  # fmt: skip
    """A tile by itself, with the new key and value in their places if they are in it: → weighted sums, maxima, sums."""
    rows = tl.arange(0, BLOCK_M)
    is_new = (tile * BLOCK_N + tl.arange(0, BLOCK_N) == end - 1)[:, None]
    k, v = tl.where(is_new, key, k), tl.where(is_new, value, v)
    acc, _, peak, total = add_tile(
        tl.zeros([BLOCK_M, DIM_PAD], tl.float32), rows, tl.full([BLOCK_M], float("-inf"), tl.float32),
        sums_of(BLOCK_M, q.dtype, BLOCK_N), k, v, q, q, tile * BLOCK_N, end, rows * 0 + (end - 1), rows, rows, rows,
        scale, window, 0, BLOCK_N, False, HAS_WINDOW, False, False, True, BLOCK_N, SOFT_CAP,
    )  # fmt: skip
    return acc, peak, row_sums(total)


@triton.jit(do_not_specialize=["stride_table", "window", "num_slots"])
def tiled_decode_kernel(
    q_ptr, k_ptr, v_ptr, out_ptr, cache_ptr, table_ptr, query_start_ptr, seq_lens_ptr, slots_ptr, positions_ptr,
    cos_sin_ptr, axes_ptr, q_weight_ptr, k_weight_ptr, acc_ptr, peak_ptr, total_ptr, arrived_ptr, sinks_ptr,
    stride_axis, q_eps, k_eps, scale, stride_q, stride_k, stride_v, stride_q_head, stride_k_head, stride_v_head,
    stride_block, stride_table, window, num_slots, HEAD_DIM: tl.constexpr, DIM_PAD: tl.constexpr, HALF: tl.constexpr,
    GROUP: tl.constexpr, GROUP_PAD: tl.constexpr, KV_HEADS: tl.constexpr, BLOCK_SIZE: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, HAS_Q_NORM: tl.constexpr, HAS_K_NORM: tl.constexpr,
    HAS_ROTARY: tl.constexpr, HAS_AXES: tl.constexpr, HAS_WINDOW: tl.constexpr, PAIRED: tl.constexpr,
    SPLIT: tl.constexpr, SOFT_CAP: tl.constexpr, HAS_SINKS: tl.constexpr, DEPENDENT: tl.constexpr,
):  # fmt: skip
    """Does what decode_kernel does, with the bits that attention_kernel has where tiles are attended to by themselves:
    the new key takes its place in the last tile. Not for pages in fp8.

    Grid: requests, KV heads, programs. SPLIT: programs take tiles in turns, and the last of them to arrive folds the
    results of all, which lie in num_slots of each row. Otherwise one program attends to all tiles, to the last one
    first: it is loaded before the kernel ahead has ended, as the first one of each program is with SPLIT."""
    request, kv_head, program, num_programs = tl.program_id(0), tl.program_id(1), tl.program_id(2), tl.num_programs(2)
    token = tl.load(query_start_ptr + request)
    query_len = tl.load(query_start_ptr + request + 1) - token
    end = tl.load(seq_lens_ptr + request)
    begin = 0
    if HAS_WINDOW:
        begin = tl.maximum(0, end - window)
    first, last = begin // BLOCK_N, (end - 1) // BLOCK_N
    num_tiles = last + 1 - first
    # Without waiting for the kernel before: a kernel behind this one relies on the first program of any request.
    if (query_len <= 0) | ((program > 0) & (program >= num_tiles)):
        return
    table_ptr += request.to(tl.int64) * stride_table
    tile = last
    if SPLIT:
        tile = first + program
    k, v = _load_new_tile(
        tile, begin, end, cache_ptr, table_ptr, kv_head, stride_block, HEAD_DIM, DIM_PAD, KV_HEADS, BLOCK_SIZE, BLOCK_N
    )
    slot = tl.load(slots_ptr + token).to(tl.int64)
    q_weights, q_others, q_cos, q_sin = load_factors(
        positions_ptr + token, cos_sin_ptr, axes_ptr, stride_axis, q_weight_ptr, GROUP_PAD, HEAD_DIM, DIM_PAD, HALF,
        HAS_Q_NORM, HAS_ROTARY, HAS_AXES,
    )  # fmt: skip
    k_weights, k_others, k_cos, k_sin = load_factors(
        positions_ptr + token, cos_sin_ptr, axes_ptr, stride_axis, k_weight_ptr, 1, HEAD_DIM, DIM_PAD, HALF,
        HAS_K_NORM, HAS_ROTARY, HAS_AXES,
    )  # fmt: skip
    if DEPENDENT:
        wait_for_kernel_before()
    q_ptr += token.to(tl.int64) * stride_q + kv_head * GROUP * stride_q_head
    k_ptr += token.to(tl.int64) * stride_k + kv_head * stride_k_head
    v_ptr += token.to(tl.int64) * stride_v + kv_head * stride_v_head
    q_x, q_y = _load_heads(q_ptr, stride_q_head, GROUP, GROUP_PAD, HEAD_DIM, DIM_PAD, HALF, HAS_ROTARY)
    k_x, k_y = _load_heads(k_ptr, 0, 1, 1, HEAD_DIM, DIM_PAD, HALF, HAS_ROTARY)
    value, _ = _load_heads(v_ptr, 0, 1, 1, HEAD_DIM, DIM_PAD, HALF, False)
    heads = transform(q_x, q_y, q_weights, q_others, q_cos, q_sin, q_eps, HEAD_DIM, HAS_Q_NORM, HAS_ROTARY, True)
    key = transform(k_x, k_y, k_weights, k_others, k_cos, k_sin, k_eps, HEAD_DIM, HAS_K_NORM, HAS_ROTARY, True)
    key, value = key.to(cache_ptr.dtype.element_ty), value.to(cache_ptr.dtype.element_ty)
    if program == 0:
        store_tokens(key, value, slot, True, cache_ptr, kv_head, stride_block, HEAD_DIM, DIM_PAD, KV_HEADS, BLOCK_SIZE)
    q = _repeat(heads.to(q_ptr.dtype.element_ty), BLOCK_M)
    rows = tl.arange(0, BLOCK_M)
    in_rows = rows < GROUP
    first_head = token.to(tl.int64) * (KV_HEADS * GROUP) + kv_head * GROUP
    out_rows, heads_of_rows = first_head + rows, kv_head * GROUP + rows
    if SPLIT:
        for place in range(program, num_tiles, num_programs):
            if place != program:
                k, v = _load_new_tile(
                    first + place, begin, end, cache_ptr, table_ptr, kv_head, stride_block, HEAD_DIM, DIM_PAD, KV_HEADS,
                    BLOCK_SIZE, BLOCK_N,
                )  # fmt: skip
            acc, peak, total = _attend_tile(
                q, k, v, key, value, first + place, end, scale, window, HEAD_DIM, DIM_PAD, BLOCK_M, BLOCK_N, HAS_WINDOW,
                SOFT_CAP,
            )  # fmt: skip
            if num_tiles == 1:
                _store_whole(
                    acc, peak, total, heads_of_rows, out_rows, in_rows, out_ptr, sinks_ptr, HEAD_DIM, DIM_PAD, HAS_SINKS
                )
            else:
                _store_part(
                    acc, peak, total, out_rows * num_slots + place, in_rows, acc_ptr, peak_ptr, total_ptr, HEAD_DIM,
                    DIM_PAD,
                )  # fmt: skip
        if num_tiles > 1:
            arrived_ptr += request * KV_HEADS + kv_head
            tl.debug_barrier()  # all threads have stored before one of them says so
            if tl.atomic_add(arrived_ptr, 1, sem="acq_rel", scope="gpu") == tl.minimum(num_programs, num_tiles) - 1:
                tl.store(arrived_ptr, 0)
                merged = tl.arange(0, GROUP_PAD)
                _merge_rows(
                    first_head + merged, merged < GROUP, num_tiles, num_slots, acc_ptr, peak_ptr, total_ptr, out_ptr,
                    sinks_ptr, HEAD_DIM, DIM_PAD, KV_HEADS * GROUP, 1, True, HAS_SINKS,
                )  # fmt: skip
    else:
        acc_last, peak_last, total_last = _attend_tile(
            q, k, v, key, value, last, end, scale, window, HEAD_DIM, DIM_PAD, BLOCK_M, BLOCK_N, HAS_WINDOW, SOFT_CAP
        )
        high = last * BLOCK_N  # the tiles before it are whole
        acc, peak, total = attend_keys(
            q, first * BLOCK_N, high, begin, high, begin, high, rows * 0 + (end - 1), rows, rows, cache_ptr, table_ptr,
            out_ptr, kv_head, scale, stride_block, window, 0, HEAD_DIM, DIM_PAD, KV_HEADS, BLOCK_SIZE, BLOCK_M, BLOCK_N,
            False, HAS_WINDOW, False, PAIRED, False, BLOCK_N, SOFT_CAP,
        )  # fmt: skip
        peak, total, acc = _fold(peak, total, acc, peak_last, total_last, acc_last)
        _store_whole(
            acc, peak, total, heads_of_rows, out_rows, in_rows, out_ptr, sinks_ptr, HEAD_DIM, DIM_PAD, HAS_SINKS
        )
