"""The Triton kernels for many requests of one token: the keys of all requests are divided among as many programs as run
at once, so that all of them end together, whatever the lengths.

The tiles of keys of all requests are numbered, once for each KV head. Program p of G takes those from p · N / G to
(p + 1) · N / G in one loop, of one request after the other, so that tiles are on their way at any time. A request that
is cut leaves a part of its result with each of its programs, and the last of them to arrive merges the parts.
plan_kernel lists the tiles, once a step.

Keys are the rows of products, and query heads, few as they are, the columns: 8 of them, where rows would be 16 at
least. With 16 columns Triton takes Hopper's own products, and ptxas 12.8 sets no address for one of their operands.
Imported on a CUDA device only, and under Triton's interpreter in tests.
"""

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_wait

from ratoon.attention.triton_kernels import _fold, _load_part, _unpack_pairs, divide_by_sums
from ratoon.layers.triton.dependent import INTERPRETED, start_kernel_behind, wait_for_kernel_before

_INTERPRETED = tl.constexpr(INTERPRETED)
_FIRST = tl.constexpr(1)  # flags of a tile: the first one of its request
_LAST = tl.constexpr(2)  # and the last, which holds the newest key


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


@triton.jit(do_not_specialize=["stride_table", "lines_each", "num_requests", "window", "capacity"])
def plan_kernel(
    query_start_ptr, seq_lens_ptr, table_ptr, plan_ptr, boxes_ptr, stride_table, lines_each, num_requests, window,
    capacity, BLOCK_SIZE: tl.constexpr, BLOCK_N: tl.constexpr, BOX: tl.constexpr, HAS_WINDOW: tl.constexpr,
    STEP: tl.constexpr, DEPENDENT: tl.constexpr,
):  # fmt: skip
    """Grid: requests. plan_ptr: the number of all tiles, then of each tile, behind one another and `capacity` apart,
    its request's token, its request's first tile, how many tiles that has, and which keys of it are seen with its
    flags. boxes_ptr: of each tile, where its boxes of keys begin, which are pages, or parts of one as large as a tile:
    in lines of a head of one key or value, of which a page has `lines_each`. Kernels behind this one start when it has
    ended: they read the plan before they wait."""
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
    if request == 0:
        tl.store(plan_ptr, num_tiles)
    plan_ptr += 16
    token, end = tl.load(query_start_ptr + request), tl.load(seq_lens_ptr + request)
    begin = end * 0
    if HAS_WINDOW:
        begin = tl.maximum(0, end - window)
    first_key = begin // BLOCK_N * BLOCK_N
    for start in range(0, count, STEP):
        tiles = start + tl.arange(0, STEP)
        here = tiles < count
        keys = first_key + tiles * BLOCK_N
        low, high = tl.maximum(begin - keys, 0), tl.minimum(end - keys, BLOCK_N)
        flags = tl.where(tiles == 0, _FIRST, 0) + tl.where(tiles == count - 1, _LAST, 0)
        tl.store(plan_ptr + first + tiles, token, mask=here)
        tl.store(plan_ptr + capacity + first + tiles, first, mask=here)
        tl.store(plan_ptr + 2 * capacity + first + tiles, count, mask=here)
        tl.store(plan_ptr + 3 * capacity + first + tiles, low | (high << 12) | (flags << 24), mask=here)
    EACH: tl.constexpr = BLOCK_N // BOX
    for start in range(0, count * EACH, STEP):
        boxes = start + tl.arange(0, STEP)
        keys = first_key + boxes * BOX
        seen = (boxes < count * EACH) & (keys < end)
        pages = tl.load(table_ptr + request.to(tl.int64) * stride_table + keys // BLOCK_SIZE, mask=seen, other=0)
        tl.store(boxes_ptr + first * EACH + boxes, pages * lines_each + keys % BLOCK_SIZE, mask=boxes < count * EACH)
    if not _INTERPRETED:
        tl.inline_asm_elementwise("fence.acq_rel.gpu; // dummy $0", "=r", [], tl.int32, False, 1)


# ---- Attention


@triton.jit
def _load_plan(ptrs):
    """Loads numbers of the plan from the L2 cache: another one may hold the numbers of an earlier step."""
    return tl.load(ptrs, cache_modifier=".cg")


@triton.jit
def _load_boxes(boxes_ptr, tile, BLOCK_N: tl.constexpr, BOX: tl.constexpr):
    return _load_plan(boxes_ptr + tile * (BLOCK_N // BOX) + tl.arange(0, BLOCK_N) // BOX)


@triton.jit
def _seen(keys, bounds, HAS_WINDOW: tl.constexpr):
    """Marks the keys of a tile that its request attends to: they are before its end, and in its window."""
    seen = keys < ((bounds >> 12) & 0xFFF)
    if HAS_WINDOW:
        seen = seen & (keys >= (bounds & 0xFFF))
    return seen


@triton.jit
def _load_tile(
    boxes, bounds, cache_ptr, HEAD_DIM: tl.constexpr, KV_HEADS: tl.constexpr, BLOCK_SIZE: tl.constexpr,
    BLOCK_N: tl.constexpr, BOX: tl.constexpr, HAS_WINDOW: tl.constexpr, PAIRED: tl.constexpr,
):  # fmt: skip
    """Keys [BLOCK_N, HEAD_DIM] and values [HEAD_DIM, BLOCK_N], or half as wide if PAIRED: pairs of fp8 in 16 bits.
    Values that are not seen are not read: a weight of zero times a NaN would be NaN."""
    ROW: tl.constexpr = HEAD_DIM // 2 if PAIRED else HEAD_DIM
    VALUES: tl.constexpr = KV_HEADS * BLOCK_SIZE * ROW  # from a page's keys to its values
    ZERO: tl.constexpr = 0 if PAIRED else 0.0
    keys, columns = tl.arange(0, BLOCK_N), tl.arange(0, ROW)
    offsets = boxes.to(tl.int64) * ROW + keys % BOX * ROW
    seen = _seen(keys, bounds, HAS_WINDOW)
    k = tl.load(cache_ptr + offsets[:, None] + columns[None, :])
    v = tl.load(cache_ptr + VALUES + offsets[None, :] + columns[:, None], mask=seen[None, :], other=ZERO)
    return k, v


@triton.jit
def _load_queries(
    q_ptr, token, stride_q_token, stride_q_head, HEAD_DIM: tl.constexpr, GROUP: tl.constexpr, HEADS: tl.constexpr,
    PAIRED: tl.constexpr,
):  # fmt: skip
    """[HEADS, HEAD_DIM]; PAIRED: in two halves, the even columns and the odd ones, in float16."""
    heads = tl.arange(0, HEADS)[:, None]
    q_ptrs = q_ptr + token.to(tl.int64) * stride_q_token + heads * stride_q_head
    if PAIRED:
        q_ptrs += 2 * tl.arange(0, HEAD_DIM // 2)[None, :]
        even = tl.load(q_ptrs, mask=heads < GROUP, other=0.0)
        odd = tl.load(q_ptrs + 1, mask=heads < GROUP, other=0.0)
    else:
        even = tl.load(q_ptrs + tl.arange(0, HEAD_DIM)[None, :], mask=heads < GROUP, other=0.0)
        odd = even  # not used
    return even, odd


@triton.jit
def _as_half(q):
    return tl.trans(tl.clamp(q.to(tl.float32), -65504.0, 65504.0).to(tl.float16))


@triton.jit
def _score(k, q, q_odd, PAIRED: tl.constexpr):
    """[BLOCK_N, HEADS]"""
    if PAIRED:
        even, odd = _unpack_pairs(k)
        scores = tl.dot(odd, _as_half(q_odd), tl.dot(even, _as_half(q)))
    else:
        scores = tl.dot(k, tl.trans(q))
    return scores


@triton.jit
def _add_values(acc, acc_odd, weights, v, dtype: tl.constexpr, PAIRED: tl.constexpr):
    """[HEAD_DIM, HEADS], or half as many rows twice."""
    if PAIRED:
        even, odd = _unpack_pairs(v)
        weights = weights.to(tl.float16)
        acc = tl.dot(even, weights, acc)
        acc_odd = tl.dot(odd, weights, acc_odd)
    else:
        acc = tl.dot(v, weights.to(dtype), acc)
    return acc, acc_odd


@triton.jit
def _program_of(tile, total, num_programs):
    """The program that takes a tile: the last p with p · total // num_programs <= tile."""
    return (((tile + 1).to(tl.int64) * num_programs - 1) // total).to(tl.int32)


@triton.jit
def _store_columns(
    acc, acc_odd, places, in_rows, ptr, HEAD_DIM: tl.constexpr, PAIRED: tl.constexpr, SHARED: tl.constexpr
):  # fmt: skip
    """Columns of acc as rows at `places`. SHARED: other programs read them."""
    modifier: tl.constexpr = ".cg" if SHARED else ""
    if PAIRED:
        dims = 2 * tl.arange(0, HEAD_DIM // 2)
        ptrs = ptr + places[None, :] * HEAD_DIM + dims[:, None]
        tl.store(ptrs, acc.to(ptr.dtype.element_ty), mask=in_rows[None, :], cache_modifier=modifier)
        tl.store(ptrs + 1, acc_odd.to(ptr.dtype.element_ty), mask=in_rows[None, :], cache_modifier=modifier)
    else:
        ptrs = ptr + places[None, :] * HEAD_DIM + tl.arange(0, HEAD_DIM)[:, None]
        tl.store(ptrs, acc.to(ptr.dtype.element_ty), mask=in_rows[None, :], cache_modifier=modifier)


@triton.jit
def _merge_parts(
    tile, low, high, num_tiles, num_programs, tokens_ptr, capacity, out_ptr, acc_ptr, peak_ptr, total_ptr, arrived_ptr,
    sinks_ptr, HEAD_DIM: tl.constexpr, GROUP: tl.constexpr, HEADS: tl.constexpr, KV_HEADS: tl.constexpr,
    HAS_SINKS: tl.constexpr,
):  # fmt: skip
    """Merges the parts of a tile's request, if low to high is not all of it: this part is stored, and the last program
    to arrive writes the output from all parts, in their order."""
    first = _load_plan(tokens_ptr + capacity + tile)
    behind = first + _load_plan(tokens_ptr + 2 * capacity + tile)
    if (first < low) | (behind > high):
        program = _program_of(first, num_tiles, num_programs)
        last_program = _program_of(behind - 1, num_tiles, num_programs)
        if tl.atomic_add(arrived_ptr + program, 1, sem="acq_rel", scope="gpu") == last_program - program:
            tl.store(arrived_ptr + program, 0)
            rows = tl.arange(0, HEADS)
            in_rows = rows < GROUP
            peak, sums, acc = _load_part(
                (2 * program + 1) * GROUP + rows, in_rows, acc_ptr, peak_ptr, total_ptr, HEAD_DIM, HEAD_DIM
            )
            for other in range(program + 1, last_program + 1):
                peak_next, sums_next, acc_next = _load_part(
                    2 * other * GROUP + rows, in_rows, acc_ptr, peak_ptr, total_ptr, HEAD_DIM, HEAD_DIM
                )
                peak, sums, acc = _fold(peak, sums, acc, peak_next, sums_next, acc_next)
            out = divide_by_sums(acc, peak, sums, sinks_ptr, rows, in_rows, HAS_SINKS)
            out_rows = _load_plan(tokens_ptr + tile).to(tl.int64) * (KV_HEADS * GROUP) + rows
            out_ptrs = out_ptr + out_rows[:, None] * HEAD_DIM + tl.arange(0, HEAD_DIM)[None, :]
            tl.store(out_ptrs, out.to(out_ptr.dtype.element_ty), mask=in_rows[:, None])


@triton.jit(do_not_specialize=["capacity"])
def balanced_kernel(
    q_ptr, out_ptr, cache_ptr, plan_ptr, boxes_ptr, acc_ptr, peak_ptr, total_ptr, arrived_ptr, sinks_ptr, scale,
    stride_q_token, stride_q_head, capacity, HEAD_DIM: tl.constexpr, GROUP: tl.constexpr, HEADS: tl.constexpr,
    KV_HEADS: tl.constexpr, BLOCK_SIZE: tl.constexpr, BLOCK_N: tl.constexpr, BOX: tl.constexpr,
    HAS_WINDOW: tl.constexpr, PAIRED: tl.constexpr, STAGES: tl.constexpr, HAS_SINKS: tl.constexpr,
    DEPENDENT: tl.constexpr,
):  # fmt: skip
    """Grid: programs of a KV head, KV heads. Each has room for two parts: of a request that began before its share, and
    of one that ends behind it. HAS_SINKS: see divide_by_sums."""
    # Before the wait: no kernel of a step writes these but plan_kernel, which has ended.
    num_tiles = _load_plan(plan_ptr)
    program, num_programs = tl.program_id(0), tl.minimum(tl.num_programs(0), num_tiles)
    if program >= num_programs:
        if DEPENDENT:
            wait_for_kernel_before()
        return
    low = (program.to(tl.int64) * num_tiles // num_programs).to(tl.int32)
    high = ((program + 1).to(tl.int64) * num_tiles // num_programs).to(tl.int32)
    tokens_ptr = plan_ptr + 16
    bounds_ptr = tokens_ptr + 3 * capacity
    if DEPENDENT:
        # Tiles are loaded in front of the loop, while kernels before this one still run. They may be unless they hold a
        # key that the kernel before this one stores.
        start_kernel_behind()
        ahead = low + tl.arange(0, 8)
        is_loaded = ahead < tl.minimum(low + STAGES, high)
        bounds_ahead = tl.load(bounds_ptr + ahead, mask=is_loaded, other=0, cache_modifier=".cg")
        if tl.max(bounds_ahead >> 24, 0) >= _LAST:
            gdc_wait()
    kv_head = tl.program_id(1)
    q_ptr += kv_head * GROUP * stride_q_head
    out_ptr += kv_head * GROUP * HEAD_DIM
    if PAIRED:
        cache_ptr = cache_ptr.to(tl.pointer_type(tl.uint16), bitcast=True)
    DIMS: tl.constexpr = HEAD_DIM // 2 if PAIRED else HEAD_DIM
    cache_ptr += kv_head * (BLOCK_SIZE * DIMS)
    parts_ptr = kv_head * tl.num_programs(0)  # the number of this head's first program
    acc_ptr += parts_ptr * (2 * GROUP * HEAD_DIM)
    peak_ptr += parts_ptr * (2 * GROUP)
    total_ptr += parts_ptr * (2 * GROUP)
    arrived_ptr += parts_ptr
    sinks_ptr += kv_head * GROUP
    rows = tl.arange(0, HEADS)
    acc = tl.zeros([DIMS, HEADS], tl.float32)
    acc_odd = acc
    peak = tl.full([HEADS], float("-inf"), tl.float32)
    sums = tl.zeros([BLOCK_N, HEADS], tl.float32)
    q = tl.zeros([HEADS, DIMS], q_ptr.dtype.element_ty)
    q_odd = q
    boxes = _load_boxes(boxes_ptr, low, BLOCK_N, BOX)
    bounds = _load_plan(bounds_ptr + low)
    next_token = _load_plan(tokens_ptr + tl.minimum(low + 1, high - 1))
    is_whole = low < 0
    for tile in range(low, high):
        # What is known of a tile is read a turn ahead.
        behind = tl.minimum(tile + 1, high - 1)
        next_boxes = _load_boxes(boxes_ptr, behind, BLOCK_N, BOX)
        next_bounds = _load_plan(bounds_ptr + behind)
        later_token = _load_plan(tokens_ptr + tl.minimum(tile + 2, high - 1))
        k, v = _load_tile(boxes, bounds, cache_ptr, HEAD_DIM, KV_HEADS, BLOCK_SIZE, BLOCK_N, BOX, HAS_WINDOW, PAIRED)
        if tile == low:
            if DEPENDENT:
                gdc_wait()
            token = _load_plan(tokens_ptr + tile)
            q, q_odd = _load_queries(q_ptr, token, stride_q_token, stride_q_head, HEAD_DIM, GROUP, HEADS, PAIRED)
        next_q, next_odd = _load_queries(
            q_ptr, next_token, stride_q_token, stride_q_head, HEAD_DIM, GROUP, HEADS, PAIRED
        )
        flags = bounds >> 24
        is_first = flags % 2 == _FIRST
        is_whole = is_whole | is_first
        seen = _seen(tl.arange(0, BLOCK_N), bounds, HAS_WINDOW)
        scores = tl.where(seen[:, None], _score(k, q, q_odd, PAIRED) * scale, float("-inf"))
        # A tile has at least one key that is seen.
        peak = tl.where(is_first, float("-inf"), peak)
        top = tl.maximum(peak, tl.max(scores, 0))
        shrink = tl.exp2(peak - top)
        weights = tl.exp2(scores - top[None, :])
        # Selected: of another request these may be infinite.
        sums = tl.where(is_first, 0.0, sums * shrink[None, :]) + weights
        acc = tl.where(is_first, 0.0, acc * shrink[None, :])
        if PAIRED:
            acc_odd = tl.where(is_first, 0.0, acc_odd * shrink[None, :])
        acc, acc_odd = _add_values(acc, acc_odd, weights, v, q_ptr.dtype.element_ty, PAIRED)
        peak = top
        if (flags >= _LAST) | (tile == high - 1):
            sum_here = tl.sum(sums, 0)
            if is_whole & (flags >= _LAST):
                inverse = 1.0 / sum_here
                if HAS_SINKS:
                    sinks = tl.load(sinks_ptr + rows, mask=rows < GROUP, other=0.0) * 1.4426950408889634
                    highest = tl.maximum(peak, sinks)
                    keep = tl.exp2(peak - highest)
                    inverse = keep / (sum_here * keep + tl.exp2(sinks - highest))
                inverse = inverse[None, :]
                out_row = _load_plan(tokens_ptr + tile).to(tl.int64) * (KV_HEADS * GROUP)
                _store_columns(
                    acc * inverse, acc_odd * inverse, out_row + rows, rows < GROUP, out_ptr, HEAD_DIM, PAIRED, False
                )
            else:
                places = (2 * program + is_whole.to(tl.int32)) * GROUP + rows
                tl.store(peak_ptr + places, peak, mask=rows < GROUP, cache_modifier=".cg")
                tl.store(total_ptr + places, sum_here, mask=rows < GROUP, cache_modifier=".cg")
                _store_columns(acc, acc_odd, places, rows < GROUP, acc_ptr, HEAD_DIM, PAIRED, True)
            is_whole = low < 0
        q, q_odd, boxes, bounds, next_token = next_q, next_odd, next_boxes, next_bounds, later_token
    tl.debug_barrier()  # all threads have stored before one of them says so
    # A program has a part of the request that it begins with, and of the one that it ends with, or of one alone.
    _merge_parts(
        low, low, high, num_tiles, num_programs, tokens_ptr, capacity, out_ptr, acc_ptr, peak_ptr, total_ptr,
        arrived_ptr, sinks_ptr, HEAD_DIM, GROUP, HEADS, KV_HEADS, HAS_SINKS,
    )  # fmt: skip
    if _load_plan(tokens_ptr + low) != _load_plan(tokens_ptr + high - 1):
        _merge_parts(
            high - 1, low, high, num_tiles, num_programs, tokens_ptr, capacity, out_ptr, acc_ptr, peak_ptr, total_ptr,
            arrived_ptr, sinks_ptr, HEAD_DIM, GROUP, HEADS, KV_HEADS, HAS_SINKS,
        )  # fmt: skip
