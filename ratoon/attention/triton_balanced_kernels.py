"""The Triton kernels for many requests of one token: the keys of all requests are divided among as many programs as run
at once, so that all of them end together, whatever the lengths.

The tiles of keys of all requests are numbered, once for each KV head. Program p of G takes those from p · N / G to
(p + 1) · N / G, of one request after the other. A request that is cut leaves a part of its result with each of its
programs, and the last of them to arrive merges the parts. plan_kernel counts the tiles, once a step.

A program is one warp, and a multiprocessor has several of them: each has its own ring of tiles that are on their way,
and none waits for another one. Pages are copied as they are, by TMA.
Imported on a CUDA device only, and under Triton's interpreter in tests.
"""

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_wait

from ratoon.attention.triton_kernels import (
    _fold,
    _load_part,
    _store_part,
    _store_whole,
    _unpack_pairs,
    load_pages,
    load_tile,
)
from ratoon.layers.triton.dependent import INTERPRETED, wait_for_kernel_before

_INTERPRETED = tl.constexpr(INTERPRETED)


# ---- The plan


@triton.jit
def _count_tiles(
    requests, num_requests, query_start_ptr, seq_lens_ptr, window, BLOCK_N: tl.constexpr, HAS_WINDOW: tl.constexpr
):  # fmt: skip
    """How many tiles of keys requests have. Only requests of one token have any."""
    here = requests < num_requests
    query_lens = tl.load(query_start_ptr + requests + 1, mask=here, other=0)
    query_lens -= tl.load(query_start_ptr + requests, mask=here, other=0)
    seq_lens = tl.load(seq_lens_ptr + requests, mask=here & (query_lens == 1), other=0)
    tiles = tl.cdiv(seq_lens, BLOCK_N)
    if HAS_WINDOW:
        tiles -= tl.maximum(0, seq_lens - window) // BLOCK_N
    return tiles


@triton.jit(do_not_specialize=["num_requests", "num_programs", "window"])
def plan_kernel(
    query_start_ptr, seq_lens_ptr, plan_ptr, num_requests, num_programs, window, KV_HEADS: tl.constexpr,
    BLOCK_N: tl.constexpr, HAS_WINDOW: tl.constexpr, STEP: tl.constexpr, DEPENDENT: tl.constexpr,
):  # fmt: skip
    """Grid: requests. plan_ptr: the number of each request's first tile, the number of all, then the request at which
    each program begins. Kernels behind this one start when it has ended: they read the plan before they wait."""
    if DEPENDENT:
        gdc_wait()
    request = tl.program_id(0)
    first, count, num_tiles = request * 0, request * 0, request * 0
    for start in range(0, num_requests, STEP):
        others = start + tl.arange(0, STEP)
        counts = _count_tiles(others, num_requests, query_start_ptr, seq_lens_ptr, window, BLOCK_N, HAS_WINDOW)
        first += tl.sum(tl.where(others < request, counts, 0))
        count += tl.sum(tl.where(others == request, counts, 0))
        num_tiles += tl.sum(counts)
    tl.store(plan_ptr + request, first)
    if request == num_requests - 1:
        tl.store(plan_ptr + num_requests, num_tiles)
    if count > 0:
        total = (num_tiles * KV_HEADS).to(tl.int64)
        num_used = tl.minimum(num_programs, total)
        for kv_head in range(KV_HEADS):
            begin = kv_head * num_tiles + first
            low = tl.cdiv(begin * num_used, total).to(tl.int32)
            high = tl.cdiv((begin + count) * num_used, total).to(tl.int32)
            for program in range(low, high, STEP):
                places = program + tl.arange(0, STEP)
                tl.store(plan_ptr + num_requests + 1 + places, request, mask=places < high)
    if not _INTERPRETED:
        tl.inline_asm_elementwise("fence.acq_rel.gpu; // dummy $0", "=r", [], tl.int32, False, 1)


@triton.jit
def _program_of(tile, total, num_programs):
    """That takes a tile: the last p with p · total // num_programs <= tile."""
    return (((tile + 1).to(tl.int64) * num_programs - 1) // total).to(tl.int32)


# ---- Attention


@triton.jit
def _load_queries(
    q_ptr, token, kv_head, stride_q_token, stride_q_head, HEAD_DIM: tl.constexpr, GROUP: tl.constexpr,
    BLOCK_M: tl.constexpr, PAIRED: tl.constexpr,
):  # fmt: skip
    """[BLOCK_M, HEAD_DIM]; PAIRED: in two halves, the even columns and the odd ones, in float16."""
    rows = tl.arange(0, BLOCK_M)
    in_rows = (rows < GROUP)[:, None]
    q_ptrs = q_ptr + token.to(tl.int64) * stride_q_token + (kv_head * GROUP + rows)[:, None] * stride_q_head
    if PAIRED:
        q_ptrs += 2 * tl.arange(0, HEAD_DIM // 2)[None, :]
        even = tl.load(q_ptrs, mask=in_rows, other=0.0).to(tl.float32)
        odd = tl.load(q_ptrs + 1, mask=in_rows, other=0.0).to(tl.float32)
        even, odd = tl.clamp(even, -65504.0, 65504.0).to(tl.float16), tl.clamp(odd, -65504.0, 65504.0).to(tl.float16)
    else:
        even = tl.load(q_ptrs + tl.arange(0, HEAD_DIM)[None, :], mask=in_rows, other=0.0)
        odd = even  # not used
    return even, odd


@triton.jit
def _score(q, q_odd, k, PAIRED: tl.constexpr):
    """[BLOCK_M, keys]"""
    if PAIRED:
        k_even, k_odd = _unpack_pairs(k)
        scores = tl.dot(q_odd, tl.trans(k_odd), tl.dot(q, tl.trans(k_even)))
    else:
        scores = tl.dot(q, tl.trans(k))
    return scores


@triton.jit
def _add_values(acc, acc_odd, weights, v, dtype: tl.constexpr, PAIRED: tl.constexpr):
    if PAIRED:
        v_even, v_odd = _unpack_pairs(v)
        weights = weights.to(tl.float16)
        acc = tl.dot(weights, v_even, acc)
        acc_odd = tl.dot(weights, v_odd, acc_odd)
    else:
        acc = tl.dot(weights.to(dtype), v, acc)
    return acc, acc_odd


@triton.jit
def _add_tile(acc, acc_odd, peak, total, scores, v, scale, dtype: tl.constexpr, PAIRED: tl.constexpr):
    """A tile, of which at least one key is seen, into the running maximum, sum and weighted sum of each row."""
    top = tl.maximum(peak, tl.max(scores, 1) * scale)
    shrink = tl.exp2(peak - top)
    weights = tl.exp2(scores * scale - top[:, None])
    total = total * shrink + tl.sum(weights, 1)
    acc, acc_odd = _add_values(acc * shrink[:, None], acc_odd * shrink[:, None], weights, v, dtype, PAIRED)
    return acc, acc_odd, top, total


@triton.jit
def _add_two_tiles(
    acc, acc_odd, peak, total, scores, other_scores, v, other_v, scale, dtype: tl.constexpr, PAIRED: tl.constexpr
):  # fmt: skip
    top = tl.maximum(peak, tl.max(tl.maximum(scores, other_scores), 1) * scale)
    shrink = tl.exp2(peak - top)
    weights, others = tl.exp2(scores * scale - top[:, None]), tl.exp2(other_scores * scale - top[:, None])
    total = total * shrink + tl.sum(weights + others, 1)
    acc, acc_odd = _add_values(acc * shrink[:, None], acc_odd * shrink[:, None], weights, v, dtype, PAIRED)
    acc, acc_odd = _add_values(acc, acc_odd, others, other_v, dtype, PAIRED)
    return acc, acc_odd, top, total


@triton.jit
def _attend_boxes(
    acc, acc_odd, peak, total, q, q_odd, low, high, page, other_page, lines, lines_each, row_ptr, kv_head, scale,
    KV_HEADS: tl.constexpr, BLOCK_SIZE: tl.constexpr, BLOCK_N: tl.constexpr, BOX: tl.constexpr, STAGES: tl.constexpr,
    PAIRED: tl.constexpr,
):  # fmt: skip
    """Whole tiles of keys low to high, all of which are seen: one box or two each. `page`, `other_page`: of the first
    tile."""
    VALUES: tl.constexpr = KV_HEADS * BLOCK_SIZE  # lines from a page's keys to its values
    line, other_line = page * lines_each, other_page * lines_each
    first_line = kv_head * BLOCK_SIZE
    for start in tl.range(low, high, BLOCK_N, num_stages=STAGES):
        # Page numbers are read a turn ahead.
        behind = start + BLOCK_N
        next_line = tl.load(row_ptr + behind // BLOCK_SIZE, mask=behind < high, other=0) * lines_each
        if BOX < BLOCK_N:
            next_other = tl.load(row_ptr + (behind + BOX) // BLOCK_SIZE, mask=behind < high, other=0) * lines_each
            k, other_k = lines.load([line + first_line, 0]), lines.load([other_line + first_line, 0])
            v = lines.load([line + first_line + VALUES, 0])
            other_v = lines.load([other_line + first_line + VALUES, 0])
            scores, other_scores = _score(q, q_odd, k, PAIRED), _score(q, q_odd, other_k, PAIRED)
            acc, acc_odd, peak, total = _add_two_tiles(
                acc, acc_odd, peak, total, scores, other_scores, v, other_v, scale, q.dtype, PAIRED
            )
            other_line = next_other
        else:
            place = line + first_line + start % BLOCK_SIZE
            k, v = lines.load([place, 0]), lines.load([place + VALUES, 0])
            scores = _score(q, q_odd, k, PAIRED)
            acc, acc_odd, peak, total = _add_tile(acc, acc_odd, peak, total, scores, v, scale, q.dtype, PAIRED)
        line = next_line
    return acc, acc_odd, peak, total


@triton.jit
def _merge_parts(
    first, last, total, num_programs, out_row, out_ptr, acc_ptr, peak_ptr, total_ptr, arrived_ptr,
    HEAD_DIM: tl.constexpr, GROUP: tl.constexpr, GROUP_PAD: tl.constexpr,
):  # fmt: skip
    """A part of a request that is cut is stored; its tiles are `first` to `last`. The last program to arrive writes the
    output from all parts, in their order."""
    program, last_program = _program_of(first, total, num_programs), _program_of(last, total, num_programs)
    arrived_ptr += program
    tl.debug_barrier()  # all threads have stored before one of them says so
    if tl.atomic_add(arrived_ptr, 1, sem="acq_rel", scope="gpu") == last_program - program:
        tl.store(arrived_ptr, 0)
        rows = tl.arange(0, GROUP_PAD)
        in_rows = rows < GROUP
        peak, sums, acc = _load_part(
            (2 * program + 1) * GROUP + rows, in_rows, acc_ptr, peak_ptr, total_ptr, HEAD_DIM, HEAD_DIM
        )
        for other in range(program + 1, last_program + 1):
            peak_next, sums_next, acc_next = _load_part(
                2 * other * GROUP + rows, in_rows, acc_ptr, peak_ptr, total_ptr, HEAD_DIM, HEAD_DIM
            )
            peak, sums, acc = _fold(peak, sums, acc, peak_next, sums_next, acc_next)
        _store_whole(acc, sums, out_row + rows, in_rows, out_ptr, HEAD_DIM, HEAD_DIM)


@triton.jit
def _attend_masked(
    acc, acc_odd, peak, total, q, q_odd, start, begin, end, cache_ptr, row_ptr, kv_head, scale, stride_block,
    HEAD_DIM: tl.constexpr, KV_HEADS: tl.constexpr, BLOCK_SIZE: tl.constexpr, BLOCK_N: tl.constexpr,
    PAIRED: tl.constexpr,
):  # fmt: skip
    """A tile of which some keys are not seen: their values are not read, because a weight of zero times a NaN would be
    NaN."""
    pages = load_pages(row_ptr, start, end, BLOCK_SIZE, BLOCK_N)
    k, v = load_tile(
        pages, start, begin, end, cache_ptr, kv_head, stride_block, HEAD_DIM, HEAD_DIM, KV_HEADS, BLOCK_SIZE, BLOCK_N,
        PAIRED, True,
    )  # fmt: skip
    keys = start + tl.arange(0, BLOCK_N)
    scores = tl.where(((keys >= begin) & (keys < end))[None, :], _score(q, q_odd, k, PAIRED), float("-inf"))
    return _add_tile(acc, acc_odd, peak, total, scores, v, scale, q.dtype, PAIRED)


@triton.jit
def _find_request(request, plan_ptr, query_start_ptr, seq_lens_ptr):
    """Its first tile, the first one of the request behind, its token, the end of its keys."""
    first, behind = tl.load(plan_ptr + request), tl.load(plan_ptr + request + 1)
    return first, behind, tl.load(query_start_ptr + request), tl.load(seq_lens_ptr + request)


@triton.jit
def _first_key(tile, end, window, BLOCK_N: tl.constexpr, HAS_WINDOW: tl.constexpr):
    """The first key that a request sees, and the first one of one of its tiles."""
    begin = end * 0
    if HAS_WINDOW:
        begin = tl.maximum(0, end - window)
    return begin, (begin // BLOCK_N + tile) * BLOCK_N


@triton.jit
def _first_pages(row_ptr, low, begin, end, BLOCK_SIZE: tl.constexpr, BLOCK_N: tl.constexpr, BOX: tl.constexpr):
    """Of the first whole tile from key `low` on, if there is one. A tile has one page, or two."""
    low = tl.maximum(low, tl.cdiv(begin, BLOCK_N) * BLOCK_N)
    is_whole = low + BLOCK_N <= end
    page = tl.load(row_ptr + low // BLOCK_SIZE, mask=is_whole, other=0)
    other_page = page
    if BOX < BLOCK_N:
        other_page = tl.load(row_ptr + (low + BOX) // BLOCK_SIZE, mask=is_whole, other=0)
    return page, other_page


@triton.jit(do_not_specialize=["stride_table", "num_requests", "window"])
def balanced_kernel(
    q_ptr, out_ptr, cache_ptr, lines, table_ptr, query_start_ptr, seq_lens_ptr, plan_ptr, acc_ptr, peak_ptr, total_ptr,
    arrived_ptr, scale, stride_q_token, stride_q_head, stride_block, lines_each, stride_table, num_requests, window,
    HEAD_DIM: tl.constexpr, GROUP: tl.constexpr, GROUP_PAD: tl.constexpr, KV_HEADS: tl.constexpr,
    BLOCK_SIZE: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BOX: tl.constexpr, STAGES: tl.constexpr,
    HAS_WINDOW: tl.constexpr, PAIRED: tl.constexpr, DEPENDENT: tl.constexpr,
):  # fmt: skip
    """Grid: programs. Each has room for two parts: of a request that began before its share, and of one that ends
    behind it. lines: the pages as [blocks · lines_each, HEAD_DIM], one head of one key or value in a line; PAIRED: half
    as wide, pairs of fp8."""
    # Before the wait: no kernel of a step writes these but plan_kernel, which has ended.
    num_tiles = tl.load(plan_ptr + num_requests, cache_modifier=".cg")  # of a KV head
    total = num_tiles * KV_HEADS
    program, num_programs = tl.program_id(0), tl.minimum(tl.num_programs(0), total)
    low = (program.to(tl.int64) * total // tl.maximum(num_programs, 1)).to(tl.int32)
    high = ((program + 1).to(tl.int64) * total // tl.maximum(num_programs, 1)).to(tl.int32)
    is_used = program < num_programs
    request = tl.load(plan_ptr + num_requests + 1 + program, mask=is_used, other=0, cache_modifier=".cg")
    first, behind, token, end = _find_request(request, plan_ptr, query_start_ptr, seq_lens_ptr)
    tile = low
    kv_head = tile // tl.maximum(num_tiles, 1)
    begin, key_low = _first_key(tile - kv_head * num_tiles - first, end, window, BLOCK_N, HAS_WINDOW)
    page, other_page = _first_pages(
        table_ptr + request.to(tl.int64) * stride_table, key_low, begin, end, BLOCK_SIZE, BLOCK_N, BOX
    )
    if DEPENDENT:
        wait_for_kernel_before()
    if not is_used:
        return
    rows = tl.arange(0, BLOCK_M)
    COLUMNS: tl.constexpr = HEAD_DIM // 2 if PAIRED else HEAD_DIM
    while tile < high:
        first, behind = first + kv_head * num_tiles, behind + kv_head * num_tiles
        stop = tl.minimum(behind, high)
        next_head = stop // num_tiles
        # Behind the last request there is none: numbers of another one are loaded, and not used.
        next_request = tl.where(next_head > kv_head, 0, tl.minimum(request + 1, num_requests - 1))
        next_first, next_behind, next_token, next_end = _find_request(
            next_request, plan_ptr, query_start_ptr, seq_lens_ptr
        )
        acc = tl.zeros([BLOCK_M, COLUMNS], tl.float32)
        acc_odd = acc
        peak = tl.full([BLOCK_M], float("-inf"), tl.float32)
        sums = tl.zeros([BLOCK_M], tl.float32)
        row_ptr = table_ptr + request.to(tl.int64) * stride_table
        key_high = key_low + (stop - tile) * BLOCK_N
        q, q_odd = _load_queries(q_ptr, token, kv_head, stride_q_token, stride_q_head, HEAD_DIM, GROUP, BLOCK_M, PAIRED)
        # Tiles without masks; at most the first and the last one have masks.
        clear_low = tl.maximum(key_low, tl.cdiv(begin, BLOCK_N) * BLOCK_N)
        clear_high = tl.maximum(tl.minimum(key_high, end // BLOCK_N * BLOCK_N), clear_low)
        acc, acc_odd, peak, sums = _attend_boxes(
            acc, acc_odd, peak, sums, q, q_odd, clear_low, clear_high, page, other_page, lines, lines_each, row_ptr,
            kv_head, scale, KV_HEADS, BLOCK_SIZE, BLOCK_N, BOX, STAGES, PAIRED,
        )  # fmt: skip
        next_begin, next_low = _first_key(
            stop - next_head * num_tiles - next_first, next_end, window, BLOCK_N, HAS_WINDOW
        )
        page, other_page = _first_pages(
            table_ptr + next_request.to(tl.int64) * stride_table, next_low, next_begin, next_end, BLOCK_SIZE, BLOCK_N,
            BOX,
        )  # fmt: skip
        if HAS_WINDOW:  # noqa: SIM102 (a constant)
            if key_low < tl.minimum(clear_low, key_high):
                acc, acc_odd, peak, sums = _attend_masked(
                    acc, acc_odd, peak, sums, q, q_odd, key_low, begin, end, cache_ptr, row_ptr, kv_head, scale,
                    stride_block, HEAD_DIM, KV_HEADS, BLOCK_SIZE, BLOCK_N, PAIRED,
                )  # fmt: skip
        if clear_high < key_high:
            acc, acc_odd, peak, sums = _attend_masked(
                acc, acc_odd, peak, sums, q, q_odd, clear_high, begin, end, cache_ptr, row_ptr, kv_head, scale,
                stride_block, HEAD_DIM, KV_HEADS, BLOCK_SIZE, BLOCK_N, PAIRED,
            )  # fmt: skip
        if PAIRED:
            acc = tl.interleave(acc, acc_odd)
        out_row = token.to(tl.int64) * (KV_HEADS * GROUP) + kv_head * GROUP
        if tile < stop:  # a request of more tokens has no tiles here
            if (first >= low) & (behind <= high):
                _store_whole(acc, sums, out_row + rows, rows < GROUP, out_ptr, HEAD_DIM, HEAD_DIM)
            else:
                places = (2 * program + (first >= low).to(tl.int32)) * GROUP + rows
                _store_part(acc, peak, sums, places, rows < GROUP, acc_ptr, peak_ptr, total_ptr, HEAD_DIM, HEAD_DIM)
                _merge_parts(
                    first, behind - 1, total, num_programs, out_row, out_ptr, acc_ptr, peak_ptr, total_ptr, arrived_ptr,
                    HEAD_DIM, GROUP, GROUP_PAD,
                )  # fmt: skip
        tile, kv_head, request = stop, next_head, next_request
        first, behind, token, end = next_first, next_behind, next_token, next_end
        begin, key_low = next_begin, next_low
