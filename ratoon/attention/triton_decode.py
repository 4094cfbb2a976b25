"""The Triton kernel for steps in which every request has one token: norm and rotation of heads, write of the new key
and value, and attention, in one launch.

Keys and values of earlier tokens are in their pages; those of the new token are used from registers. Imported on a CUDA
device only, and under Triton's interpreter in tests.
"""

import triton
import triton.language as tl

from ratoon.attention.triton_kernels import attend_keys, load_pages, load_tile, split_of, store_result
from ratoon.attention.triton_store import normed
from ratoon.layers.triton.launch import wait_for_kernel_before


@triton.jit
def _load_angles(position, cos_sin_ptr, DIM_PAD: tl.constexpr, HALF: tl.constexpr):
    """Of a position, for the elements of a head: their own factors, and those of the elements that are mixed in."""
    dims = tl.arange(0, DIM_PAD)
    angles = cos_sin_ptr + position.to(tl.int64) * (2 * HALF) + dims % HALF
    cos = tl.load(angles, mask=dims < 2 * HALF, other=1.0)
    sin = tl.load(angles + HALF, mask=dims < 2 * HALF, other=0.0)
    return cos, tl.where(dims < HALF, -sin, sin)


@triton.jit
def _partners(DIM_PAD: tl.constexpr, HALF: tl.constexpr):
    """The elements of a head that a rotation mixes with its elements."""
    dims = tl.arange(0, DIM_PAD)
    return tl.where(dims < HALF, dims + HALF, tl.where(dims < 2 * HALF, dims - HALF, dims))


@triton.jit
def _load_weights(weight_ptr, HEAD_DIM: tl.constexpr, DIM_PAD: tl.constexpr, HALF: tl.constexpr):
    """Of a norm: those of the elements of a head, and those of their partners."""
    in_dims = tl.arange(0, DIM_PAD) < HEAD_DIM
    weights = tl.load(weight_ptr + tl.arange(0, DIM_PAD), mask=in_dims, other=0.0)
    others = tl.load(weight_ptr + _partners(DIM_PAD, HALF), mask=in_dims, other=0.0)
    return weights.to(tl.float32), others.to(tl.float32)


@triton.jit
def _load_heads(
    row_ptrs, in_rows, cos, sin, weights, other_weights, eps, HEAD_DIM: tl.constexpr, DIM_PAD: tl.constexpr,
    HALF: tl.constexpr, HAS_NORM: tl.constexpr, HAS_ROTARY: tl.constexpr,
):  # fmt: skip
    """Heads of one token in float32, after norm and rotation: as triton_store.py's, but with all elements of a head in
    one tensor. Those that a rotation mixes in are loaded a second time, in their place."""
    dims = tl.arange(0, DIM_PAD)
    mask = in_rows[:, None] & (dims < HEAD_DIM)[None, :]
    x = tl.load(row_ptrs[:, None] + dims[None, :], mask=mask, other=0.0)
    y = x
    if HAS_ROTARY:
        y = tl.load(row_ptrs[:, None] + _partners(DIM_PAD, HALF)[None, :], mask=mask, other=0.0)
    if HAS_NORM:
        squares = tl.sum(x.to(tl.float32) * x.to(tl.float32), 1)
        scale = tl.rsqrt(squares / HEAD_DIM + eps)
        x = normed(x, scale, weights)
        if HAS_ROTARY:
            y = normed(y, scale, other_weights)
    x = x.to(tl.float32)
    if HAS_ROTARY:
        x = tl.fma(x, tl.broadcast_to(cos[None, :], x.shape), y.to(tl.float32) * sin[None, :])
    return x


@triton.jit
def _as_kept(x, dtype: tl.constexpr):
    if dtype == tl.float8e4nv:  # it has no infinity: larger numbers become the largest
        x = tl.clamp(x, -448.0, 448.0)
    return x.to(dtype)


@triton.jit
def _add_key(acc, peak, total, q, key, value, scale, is_seen):
    """One more key [1, DIM_PAD] and its value, if this program is the one that sees it."""
    score = tl.sum(q.to(tl.float32) * key.to(tl.float32), 1) * scale
    score = tl.where(is_seen, score, float("-inf"))
    top = tl.maximum(peak, score)
    shrink, weight = tl.exp2(peak - top), tl.exp2(score - top)
    acc = acc * shrink[:, None] + weight[:, None] * value.to(tl.float32)
    return acc, top, total * shrink + weight


@triton.jit(do_not_specialize=["stride_table", "window", "num_splits", "min_share"])
def decode_kernel(
    q_ptr, k_ptr, v_ptr, out_ptr, cache_ptr, table_ptr, query_start_ptr, seq_lens_ptr, slots_ptr, positions_ptr,
    cos_sin_ptr, q_weight_ptr, k_weight_ptr, acc_ptr, peak_ptr, total_ptr, arrived_ptr, q_eps, k_eps, scale, stride_q,
    stride_k, stride_v, stride_q_head, stride_k_head, stride_v_head, stride_block, stride_table, window, num_splits,
    min_share, HEAD_DIM: tl.constexpr, DIM_PAD: tl.constexpr, HALF: tl.constexpr, GROUP: tl.constexpr,
    KV_HEADS: tl.constexpr, BLOCK_SIZE: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    HAS_Q_NORM: tl.constexpr, HAS_K_NORM: tl.constexpr, HAS_ROTARY: tl.constexpr, HAS_WINDOW: tl.constexpr,
    PAIRED: tl.constexpr, SPLIT: tl.constexpr, MERGE_ROWS: tl.constexpr, SPLITS_PAD: tl.constexpr, LOADED: tl.constexpr,
    DEPENDENT: tl.constexpr,
):  # fmt: skip
    """Grid: requests, KV heads, splits. A request's earlier keys are divided among as many splits as have `min_share`
    tiles of BLOCK_N keys; the first one adds the new key. LOADED: its first tile is loaded while kernels before this
    one still run: none of a step writes keys of earlier tokens."""
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
    position, slot = tl.load(positions_ptr + token), tl.load(slots_ptr + token).to(tl.int64)
    token = token.to(tl.int64)
    one, rows, dims = tl.arange(0, 1), tl.arange(0, BLOCK_M), tl.arange(0, DIM_PAD)
    cos = dims.to(tl.float32)
    sin, q_weights, q_others, k_weights, k_others = cos, cos, cos, cos, cos
    if HAS_ROTARY:
        cos, sin = _load_angles(position, cos_sin_ptr, DIM_PAD, HALF)
    if HAS_Q_NORM:
        q_weights, q_others = _load_weights(q_weight_ptr, HEAD_DIM, DIM_PAD, HALF)
    if HAS_K_NORM:
        k_weights, k_others = _load_weights(k_weight_ptr, HEAD_DIM, DIM_PAD, HALF)
    k_tile, v_tile = cos, cos
    if LOADED:
        pages = load_pages(table_ptr, low, end, BLOCK_SIZE, BLOCK_N)
        k_tile, v_tile = load_tile(
            pages, low, begin, end, cache_ptr, kv_head, stride_block, HEAD_DIM, DIM_PAD, KV_HEADS, BLOCK_SIZE, BLOCK_N,
            PAIRED, True,
        )  # fmt: skip
    if DEPENDENT:
        wait_for_kernel_before()
    q_ptrs = q_ptr + token * stride_q + (kv_head * GROUP + rows) * stride_q_head
    q = _load_heads(
        q_ptrs, rows < GROUP, cos, sin, q_weights, q_others, q_eps, HEAD_DIM, DIM_PAD, HALF, HAS_Q_NORM, HAS_ROTARY
    ).to(q_ptr.dtype.element_ty)
    key = _load_heads(
        k_ptr + token * stride_k + kv_head * stride_k_head + one, one == 0, cos, sin, k_weights, k_others, k_eps,
        HEAD_DIM, DIM_PAD, HALF, HAS_K_NORM, HAS_ROTARY,
    )  # fmt: skip
    value = _load_heads(
        v_ptr + token * stride_v + kv_head * stride_v_head + one, one == 0, cos, sin, k_weights, k_others, k_eps,
        HEAD_DIM, DIM_PAD, HALF, False, False,
    )  # fmt: skip
    key, value = _as_kept(key, cache_ptr.dtype.element_ty), _as_kept(value, cache_ptr.dtype.element_ty)
    if split == 0:
        cache_ptrs = cache_ptr + slot // BLOCK_SIZE * stride_block + kv_head * (BLOCK_SIZE * HEAD_DIM) + dims[None, :]
        cache_ptrs += slot % BLOCK_SIZE * HEAD_DIM
        tl.store(cache_ptrs, key, mask=(dims < HEAD_DIM)[None, :])
        tl.store(cache_ptrs + KV_HEADS * BLOCK_SIZE * HEAD_DIM, value, mask=(dims < HEAD_DIM)[None, :])
    acc, peak, total = attend_keys(
        q, k_tile, v_tile, low, high, begin, end, 0, end, rows * 0 + end, rows, cache_ptr, table_ptr, out_ptr, kv_head,
        scale, stride_block, window, 0, HEAD_DIM, DIM_PAD, KV_HEADS, BLOCK_SIZE, BLOCK_M, BLOCK_N, False, HAS_WINDOW,
        False, PAIRED, False, LOADED,
    )  # fmt: skip
    acc, peak, total = _add_key(acc, peak, total, q, key, value, scale, split == 0)
    store_result(
        acc, peak, total, token, 0, GROUP, kv_head, request, split, num_active, 0, num_splits, out_ptr, acc_ptr,
        peak_ptr, total_ptr, arrived_ptr, HEAD_DIM, DIM_PAD, GROUP, KV_HEADS, BLOCK_M, SPLIT, MERGE_ROWS, SPLITS_PAD,
        False, False, False,
    )  # fmt: skip
