"""The Triton kernel for steps in which every request has a few tokens: those that check drafts, that append tokens
without a choice, and short continuations. Norm and rotation of heads, write of the new keys and values, and attention,
in one launch, as triton_decode.py does for requests of one token.

Imported on a CUDA device only, and under Triton's interpreter in tests.
"""

import triton
import triton.language as tl

from ratoon.attention.triton_decode import as_kept, load_factors, load_rows, store_tokens, transform
from ratoon.attention.triton_kernels import add_tile, load_pages, load_tile, split_of, store_result
from ratoon.layers.triton.dependent import wait_for_kernel_before


@triton.jit(do_not_specialize=["stride_table", "window", "num_splits", "min_share"])
def few_tokens_kernel(
    q_ptr, k_ptr, v_ptr, out_ptr, cache_ptr, table_ptr, query_start_ptr, seq_lens_ptr, slots_ptr, positions_ptr,
    cos_sin_ptr, axes_ptr, q_weight_ptr, k_weight_ptr, acc_ptr, peak_ptr, total_ptr, arrived_ptr, sinks_ptr,
    stride_axis, q_eps, k_eps, scale, stride_q, stride_k, stride_v, stride_q_head, stride_k_head, stride_v_head,
    stride_block, stride_table, window, num_splits, min_share, HEAD_DIM: tl.constexpr, DIM_PAD: tl.constexpr,
    HALF: tl.constexpr, GROUP: tl.constexpr, KV_HEADS: tl.constexpr, BLOCK_SIZE: tl.constexpr, BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr, NEW: tl.constexpr, HAS_Q_NORM: tl.constexpr, HAS_K_NORM: tl.constexpr,
    HAS_ROTARY: tl.constexpr, HAS_AXES: tl.constexpr, HAS_WINDOW: tl.constexpr, PAIRED: tl.constexpr,
    SPLIT: tl.constexpr, MERGE_ROWS: tl.constexpr, SPLITS_PAD: tl.constexpr, SOFT_CAP: tl.constexpr,
    HAS_SINKS: tl.constexpr, DEPENDENT: tl.constexpr,
):  # fmt: skip
    """Grid: requests, KV heads, splits. The rows of a tile are all query tokens of a request, BLOCK_M // GROUP at most,
    times the query heads of a KV head. Its earlier keys are divided among splits as decode_kernel does; the first one
    adds the new keys, NEW at most. Not for pages that are read in pairs."""
    request, kv_head, split = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    token = tl.load(query_start_ptr + request)
    query_len = tl.load(query_start_ptr + request + 1) - token
    seq_len = tl.load(seq_lens_ptr + request)
    begin, end = 0, seq_len - query_len
    if HAS_WINDOW:
        begin = tl.maximum(0, end + 1 - window)
    low, high, num_active = begin // BLOCK_N * BLOCK_N, end, 1
    if SPLIT:
        low, high, num_active = split_of(split, begin, end, num_splits, min_share, BLOCK_N, 0, False)
    # Without waiting for the kernel before: a kernel behind this one relies on the first split of any request.
    if (query_len <= 0) | ((split > 0) & (split >= num_active)):
        return
    table_ptr += request.to(tl.int64) * stride_table
    rows, new = tl.arange(0, BLOCK_M), tl.arange(0, NEW)
    # Rows behind the last query are those of the last query, and are not stored.
    tokens, new_tokens = tl.minimum(rows // GROUP, query_len - 1), tl.minimum(new, query_len - 1)
    peak, total = tl.full([BLOCK_M], float("-inf"), tl.float32), tl.zeros([BLOCK_M], tl.float32)
    q = tl.zeros([BLOCK_M, DIM_PAD], q_ptr.dtype.element_ty)
    acc = tl.zeros([BLOCK_M, DIM_PAD], tl.float32)
    key = tl.zeros([NEW, DIM_PAD], cache_ptr.dtype.element_ty)
    value = key
    pages = load_pages(table_ptr, low, end, BLOCK_SIZE, BLOCK_N)
    slots = tl.load(slots_ptr + token + new_tokens).to(tl.int64)[:, None]
    q_weights, q_others, q_cos, q_sin = load_factors(
        positions_ptr + (token + tokens)[:, None], cos_sin_ptr, axes_ptr, stride_axis, q_weight_ptr, BLOCK_M, HEAD_DIM,
        DIM_PAD, HALF, HAS_Q_NORM, HAS_ROTARY, HAS_AXES,
    )  # fmt: skip
    k_weights, k_others, k_cos, k_sin = load_factors(
        positions_ptr + (token + new_tokens)[:, None], cos_sin_ptr, axes_ptr, stride_axis, k_weight_ptr, NEW, HEAD_DIM,
        DIM_PAD, HALF, HAS_K_NORM, HAS_ROTARY, HAS_AXES,
    )  # fmt: skip
    q_rows = q_ptr + (token + tokens).to(tl.int64) * stride_q + (kv_head * GROUP + rows % GROUP) * stride_q_head
    k_rows = k_ptr + (token + new_tokens).to(tl.int64) * stride_k + kv_head * stride_k_head
    v_rows = v_ptr + (token + new_tokens).to(tl.int64) * stride_v + kv_head * stride_v_head
    in_rows, is_new = (rows < query_len * GROUP)[:, None], (new < query_len)[:, None]
    # The loop waits for the kernel before this one in its first turn, as that of decode_kernel does.
    for start in range(low, tl.maximum(high, low + 1), BLOCK_N):
        next_pages = load_pages(table_ptr, start + BLOCK_N, end, BLOCK_SIZE, BLOCK_N)
        k, v = load_tile(
            pages, start, begin, end, cache_ptr, kv_head, stride_block, HEAD_DIM, DIM_PAD, KV_HEADS, BLOCK_SIZE,
            BLOCK_N, PAIRED, True,
        )  # fmt: skip
        if start == low:
            if DEPENDENT:
                wait_for_kernel_before()
            q_x, q_y = load_rows(q_rows[:, None], in_rows, HEAD_DIM, DIM_PAD, HALF, HAS_ROTARY)
            k_x, k_y = load_rows(k_rows[:, None], is_new, HEAD_DIM, DIM_PAD, HALF, HAS_ROTARY)
            value, _ = load_rows(v_rows[:, None], is_new, HEAD_DIM, DIM_PAD, HALF, False)
            q = transform(
                q_x, q_y, q_weights, q_others, q_cos, q_sin, q_eps, HEAD_DIM, HAS_Q_NORM, HAS_ROTARY, False
            ).to(q_ptr.dtype.element_ty)
            key = transform(k_x, k_y, k_weights, k_others, k_cos, k_sin, k_eps, HEAD_DIM, HAS_K_NORM, HAS_ROTARY, False)
            key, value = as_kept(key, cache_ptr.dtype.element_ty), as_kept(value, cache_ptr.dtype.element_ty)
            if split == 0:
                store_tokens(
                    key, value, slots, is_new, cache_ptr, kv_head, stride_block, HEAD_DIM, DIM_PAD, KV_HEADS, BLOCK_SIZE
                )
        acc, _, peak, total = add_tile(
            acc, peak, peak, total, k, v, q, q, start, end, end + tokens, end + tokens, rows, out_ptr, scale, window, 0,
            BLOCK_N, False, HAS_WINDOW, False, PAIRED, True, 0, SOFT_CAP,
        )  # fmt: skip
        pages = next_pages
    if split == 0:
        acc, _, peak, total = add_tile(
            acc, peak, peak, total, key, value, q, q, end, seq_len, end + tokens, end + tokens, rows, out_ptr, scale,
            window, 0, NEW, True, HAS_WINDOW, False, PAIRED, True, 0, SOFT_CAP,
        )  # fmt: skip
    store_result(
        acc, peak, total, token, 0, query_len * GROUP, kv_head, request, split, num_active, 0, num_splits, out_ptr,
        acc_ptr, peak_ptr, total_ptr, arrived_ptr, sinks_ptr, HEAD_DIM, DIM_PAD, GROUP, KV_HEADS, BLOCK_M, SPLIT,
        MERGE_ROWS, SPLITS_PAD, False, False, False, HAS_SINKS,
    )  # fmt: skip
