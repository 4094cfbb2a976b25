"""Attention of long queries on Hopper, in Gluon: TMA copies of pages, asynchronous products, specialised warps.

Imported on a GPU of compute capability 9.0 only: Gluon has no interpreter. triton_prefill.py decides which layers run
here; all others run in triton_kernels.py, which computes the same.

A program stays on its multiprocessor and takes tiles of rows (query tokens × the query heads of a KV head) in rounds.
Two of its warps copy pages, one keys and one values, into rings of tiles in shared memory; the first also finds the
next tile of rows for all. Two groups of four warps attend, each with half of the rows. A group begins the product of
its queries with the next keys and that of its weights with the values before, and computes the softmax of the one while
the other runs. The groups begin their products in turns, so that one multiplies while the other has its softmax. Keys
are visited from the last to the first, so tiles with masks come first.
"""

from typing import NamedTuple

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from triton.language.extra.cuda import gdc_wait

from ratoon.attention.triton_kernels import _find_request, _visible_keys
from ratoon.layers.triton.dependent import wait_for_kernel_before

FIELDS = gl.constexpr(12)  # of a Tile
PANEL = gl.constexpr(64)  # columns of a swizzled row of 128 bytes
TILE_LAYOUT = gl.constexpr(gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=2))


class Sizes(NamedTuple):
    """Constants of a compiled kernel."""

    HEAD_DIM: gl.constexpr
    DIM: gl.constexpr  # HEAD_DIM in whole panels: copies fill the rest of a row with zeros
    GROUP: gl.constexpr  # query heads of a KV head
    KV_HEADS: gl.constexpr
    BLOCK_SIZE: gl.constexpr
    BLOCK_M: gl.constexpr  # rows of a tile
    BLOCK_N: gl.constexpr  # keys of a tile
    STAGES: gl.constexpr  # tiles of a ring
    CAUSAL: gl.constexpr
    HAS_WINDOW: gl.constexpr
    HAS_SINKS: gl.constexpr


class Requests(NamedTuple):
    """Where tiles of rows come from. Their places: as many as all requests could need, times KV heads."""

    query_start_ptr: gl.tensor
    seq_lens_ptr: gl.tensor
    num_requests: gl.tensor
    num_places: gl.tensor
    shortest: gl.tensor
    window: gl.tensor


class Tile(NamedTuple):
    """Rows that a program attends with, and the keys that they see."""

    is_used: gl.tensor  # 0: there are no more
    request: gl.tensor
    kv_head: gl.tensor
    query_start: gl.tensor
    num_rows: gl.tensor  # of the request
    first_row: gl.tensor
    context: gl.tensor  # position of the request's first query
    seq_len: gl.tensor
    begin: gl.tensor  # of the keys that at least one row sees
    end: gl.tensor
    highest: gl.tensor  # the first key of the last tile of keys
    num_tiles: gl.tensor  # of keys; at least one


class Plan(NamedTuple):
    """The next tiles of rows of a program, in shared memory: one warp looks for them, the others read."""

    fields: gl.shared_memory_descriptor  # [2 · fields of a tile, 1]
    ready: gl.shared_memory_descriptor  # barriers [2]
    free: gl.shared_memory_descriptor


class Ring(NamedTuple):
    """Tiles of keys or values in shared memory."""

    tiles: gl.shared_memory_descriptor  # [stages, BLOCK_N, DIM]
    boxes: gl.shared_memory_descriptor  # the same memory, as it is copied: [stages · panels · pages, keys, PANEL]
    ready: gl.shared_memory_descriptor  # barriers [stages]: copied
    free: gl.shared_memory_descriptor  # barriers [stages]: both groups of warps have read it


@gluon.jit
def _next_tile(round_, requests, sizes: gl.constexpr):
    """The next tile of this program, from a round on. Programs take their places from both ends of a round in turns:
    later rows see more keys and come first, and the sums must be even."""
    num_programs = gl.num_programs(0)
    num_rounds = gl.cdiv(requests.num_places, num_programs)
    is_used, round_ = gl.to_tensor(False), gl.to_tensor(round_)
    request, kv_head, first_row, query_start, query_len, seq_len = 0, 0, 0, 0, 0, 0
    while (round_ < num_rounds) & (not is_used):
        turn = gl.program_id(0)
        if round_ % 2 == 1:
            turn = num_programs - 1 - turn
        place = round_ * num_programs + turn
        if place < requests.num_places:
            kv_head = place % sizes.KV_HEADS
            place = requests.num_places // sizes.KV_HEADS - 1 - place // sizes.KV_HEADS
            request = _find_request(
                requests.query_start_ptr, place, requests.num_requests, sizes.GROUP, sizes.BLOCK_M
            )  # fmt: skip
            query_start = gl.load(requests.query_start_ptr + request)
            query_len = gl.load(requests.query_start_ptr + request + 1) - query_start
            seq_len = gl.load(requests.seq_lens_ptr + request)
            first_row = (place - (query_start * sizes.GROUP // sizes.BLOCK_M + request)) * sizes.BLOCK_M
            is_used = (first_row < query_len * sizes.GROUP) & (query_len >= requests.shortest)
        round_ += 1
    num_rows = gl.where(is_used, query_len * sizes.GROUP, 0)
    context = seq_len - query_len
    first_token = first_row // sizes.GROUP
    last_token = (gl.minimum(first_row + sizes.BLOCK_M, num_rows) - 1) // sizes.GROUP
    begin, end = _visible_keys(
        context, first_token, last_token, context + last_token, seq_len, requests.window, sizes.CAUSAL, sizes.HAS_WINDOW
    )  # fmt: skip
    lowest = begin // sizes.BLOCK_N * sizes.BLOCK_N
    highest = gl.maximum((end - 1) // sizes.BLOCK_N * sizes.BLOCK_N, lowest)
    num_tiles = (highest - lowest) // sizes.BLOCK_N + 1
    return round_, Tile(
        is_used.to(gl.int32), request, kv_head, query_start, num_rows, first_row, context, seq_len, begin, end, highest,
        num_tiles,
    )  # fmt: skip


@gluon.jit
def _publish(plan, number, tile):
    """Tile `number` of the program."""
    stage = number % 2
    mbarrier.wait(plan.free.index(stage), (number // 2 & 1) ^ 1)
    layout: gl.constexpr = gl.BlockedLayout([1], [32], [gl.num_warps()], [0])
    for field in gl.static_range(FIELDS):
        value = gl.full([1], 0, gl.int32, layout) + tile[field]
        plan.fields.index(stage * FIELDS + field).store(value)
    mbarrier.arrive(plan.ready.index(stage))


@gluon.jit
def _receive(plan, number):
    stage = number % 2
    mbarrier.wait(plan.ready.index(stage), number // 2 & 1)
    layout: gl.constexpr = gl.BlockedLayout([1], [32], [gl.num_warps()], [0])
    values = ()
    for field in gl.static_range(FIELDS):
        values += (gl.max(plan.fields.index(stage * FIELDS + field).load(layout), 0),)
    mbarrier.arrive(plan.free.index(stage))
    return Tile(
        values[0], values[1], values[2], values[3], values[4], values[5], values[6], values[7], values[8], values[9],
        values[10], values[11],
    )  # fmt: skip


# ---- The warps that copy


@gluon.jit
def _copy_tile(lines, ring, count, row_ptr, start, seq_len, first_line, lines_each, sizes: gl.constexpr):
    """Keys or values into tile `count` of a ring, page by page. first_line: of the head in a page. Table entries beyond
    the sequence are undefined: the null block stands for them."""
    BOX: gl.constexpr = min(sizes.BLOCK_SIZE, sizes.BLOCK_N)
    BOXES: gl.constexpr = sizes.BLOCK_N // BOX
    PANELS: gl.constexpr = sizes.DIM // PANEL
    stage = count % sizes.STAGES
    ready = ring.ready.index(stage)
    pages = ()  # read before the wait: they take as long as it does
    for box in gl.static_range(BOXES):
        key = start + box * BOX
        pages += (gl.load(row_ptr + key // sizes.BLOCK_SIZE, mask=key < seq_len, other=0),)  # type: ignore[assignment]
    mbarrier.wait(ring.free.index(stage), (count // sizes.STAGES & 1) ^ 1)
    mbarrier.expect(ready, sizes.BLOCK_N * sizes.DIM * 2)
    for box in gl.static_range(BOXES):
        line = pages[box] * lines_each + first_line + (start + box * BOX) % sizes.BLOCK_SIZE
        for panel in gl.static_range(PANELS):
            target = ring.boxes.index((stage * PANELS + panel) * BOXES + box)
            tma.async_copy_global_to_shared(lines, [line, panel * PANEL], ready, target)


@gluon.jit
def _copy_part(lines, lines_each, ring, count, table_ptr, stride_table, tile, sizes: gl.constexpr, PART: gl.constexpr):
    """The keys (PART 0) or the values (PART 1) that a tile of rows sees."""
    row_ptr = table_ptr + tile.request.to(gl.int64) * stride_table
    first_line = (PART * sizes.KV_HEADS + tile.kv_head) * sizes.BLOCK_SIZE
    for index in range(tile.num_tiles):
        start = tile.highest - index * sizes.BLOCK_N
        _copy_tile(lines, ring, count + index, row_ptr, start, tile.seq_len, first_line, lines_each, sizes)
    return count + tile.num_tiles


@gluon.jit
def _copy_keys(
    lines, lines_each, ring, table_ptr, stride_table, plan, requests, sizes: gl.constexpr, DEPENDENT: gl.constexpr
):  # fmt: skip
    """Finds the tiles of the program, too."""
    if DEPENDENT:
        gdc_wait()
    count, number = 0, 0
    round_, tile = _next_tile(0, requests, sizes)
    _publish(plan, number, tile)
    while tile.is_used != 0:
        count = _copy_part(lines, lines_each, ring, count, table_ptr, stride_table, tile, sizes, 0)
        round_, tile = _next_tile(round_, requests, sizes)
        number += 1
        _publish(plan, number, tile)


@gluon.jit
def _copy_values(
    lines, lines_each, ring, table_ptr, stride_table, plan, sizes: gl.constexpr, DEPENDENT: gl.constexpr
):  # fmt: skip
    if DEPENDENT:
        gdc_wait()
    count, number = 0, 0
    tile = _receive(plan, number)
    while tile.is_used != 0:
        count = _copy_part(lines, lines_each, ring, count, table_ptr, stride_table, tile, sizes, 1)
        number += 1
        tile = _receive(plan, number)


# ---- The warps that attend


@gluon.jit
def _clear_values(ring, stage, start, begin, end, sizes: gl.constexpr):
    """Values of keys that the request has not written, or that lie before its window: a weight of zero times a NaN
    would be NaN. Both groups of warps do this to the same tile, and write the same."""
    BOX: gl.constexpr = min(sizes.BLOCK_SIZE, sizes.BLOCK_N)
    BOXES: gl.constexpr = sizes.BLOCK_N // BOX
    PANELS: gl.constexpr = sizes.DIM // PANEL
    layout: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0])
    for box in range(BOXES):
        first = start + box * BOX
        if (first < begin) | (first + BOX > end):
            keys = first + gl.arange(0, BOX, layout=gl.SliceLayout(1, layout))
            readable = (keys >= begin) & (keys < end)
            for panel in gl.static_range(PANELS):
                buffer = ring.boxes.index((stage * PANELS + panel) * BOXES + box)
                values = buffer.load(layout)
                buffer.store(gl.where(readable[:, None], values, gl.zeros_like(values)))
    fence_async_shared()


@gluon.jit
def _rows_of(tile, half, sizes: gl.constexpr, LAYOUT: gl.constexpr):
    """The rows of half a tile: token, head, whether it is one of the request."""
    ROWS: gl.constexpr = sizes.BLOCK_M // 2
    rows = tile.first_row + half * ROWS + gl.arange(0, ROWS, layout=gl.SliceLayout(1, LAYOUT))
    tokens = (tile.query_start + rows // sizes.GROUP).to(gl.int64)
    return tokens, tile.kv_head * sizes.GROUP + rows % sizes.GROUP, rows < tile.num_rows


@gluon.jit
def _load_queries(q_ptr, stride_token, stride_head, tile, half, sizes: gl.constexpr, LAYOUT: gl.constexpr):
    """[rows, DIM]"""
    tokens, heads, in_rows = _rows_of(tile, half, sizes, LAYOUT)
    dims = gl.arange(0, sizes.DIM, layout=gl.SliceLayout(0, LAYOUT))
    q_ptrs = q_ptr + (tokens * stride_token + heads * stride_head)[:, None] + dims[None, :]
    return gl.load(q_ptrs, mask=in_rows[:, None] & (dims < sizes.HEAD_DIM)[None, :], other=0.0)


@gluon.jit
def _store_output(out_ptr, out, tile, half, sizes: gl.constexpr):
    LAYOUT: gl.constexpr = out.type.layout
    tokens, heads, in_rows = _rows_of(tile, half, sizes, LAYOUT)
    dims = gl.arange(0, sizes.DIM, layout=gl.SliceLayout(0, LAYOUT))
    out_ptrs = out_ptr + ((tokens * (sizes.KV_HEADS * sizes.GROUP) + heads) * sizes.HEAD_DIM)[:, None] + dims[None, :]
    gl.store(out_ptrs, out, mask=in_rows[:, None] & (dims < sizes.HEAD_DIM)[None, :])


@gluon.jit
def _with_sinks(sinks_ptr, peak, total, tile, half, sizes: gl.constexpr, LAYOUT: gl.constexpr):
    """Returns the factor of each row's weighted sum, where each head has a sink: a score in base e without a value.
    Rows behind the last of the request have no sum, and are not stored."""
    _, heads, in_rows = _rows_of(tile, half, sizes, LAYOUT)
    sinks = gl.load(sinks_ptr + heads, mask=in_rows, other=0.0) * 1.4426950408889634
    top = gl.maximum(peak, sinks)
    keep = gl.exp2(peak - top)
    return keep / (total * keep + gl.exp2(sinks - top))


@gluon.jit
def _weigh(
    scores, peak, total, start, first_key, last_key, scale, HAS_WINDOW: gl.constexpr, MASKED: gl.constexpr
):  # fmt: skip
    """Scores of a tile → weights, and the running maximum and sum of each row; `shrink`: what the sums before are
    multiplied by."""
    if MASKED:
        keys = start + gl.arange(0, scores.shape[1], layout=gl.SliceLayout(0, scores.type.layout))
        visible = keys[None, :] <= last_key[:, None]
        if HAS_WINDOW:
            visible = visible & (keys[None, :] >= first_key[:, None])
        scores = gl.where(visible, scores, float("-inf"))
    top = gl.maximum(peak, gl.max(scores, 1) * scale)
    safe = top
    if MASKED:  # a row that has seen no key yet: -inf less -inf would be NaN
        safe = gl.where(top == float("-inf"), 0.0, top)
    weights = gl.exp2(scores * scale - safe[:, None])
    shrink = gl.exp2(peak - safe)
    total = total * shrink + gl.sum(weights, 1)
    return weights, top, total, shrink


@gluon.jit
def _attend_tile(
    acc, weights, peak, total, queries, keys, values, count, start, first_key, last_key, scale, anchor, turns, turn,
    half, sizes: gl.constexpr, MASKED: gl.constexpr, SCORES: gl.constexpr,
):  # fmt: skip
    """The weights of the tile before times its values, into acc; the weights of tile `count` of the ring."""
    stage = count % sizes.STAGES
    previous = (count - 1) % sizes.STAGES
    mbarrier.wait(keys.ready.index(stage), count // sizes.STAGES & 1)
    mbarrier.wait(turns.index(half), turn & 1)
    ROWS: gl.constexpr = sizes.BLOCK_M // 2
    zeros = gl.zeros([ROWS, sizes.BLOCK_N], gl.float32, SCORES)
    next_scores = warpgroup_mma(queries, keys.tiles.index(stage).permute((1, 0)), zeros, use_acc=False, is_async=True)
    mbarrier.wait(values.ready.index(previous), (count - 1) // sizes.STAGES & 1)
    next_acc = warpgroup_mma(weights, values.tiles.index(previous), acc, is_async=True)
    mbarrier.arrive(turns.index(1 - half))
    scores = warpgroup_mma_wait(1, deps=[next_scores])
    mbarrier.arrive(keys.free.index(stage))
    next_weights, peak, total, shrink = _weigh(
        scores, peak, total, start, first_key, last_key, scale, sizes.HAS_WINDOW, MASKED
    )  # fmt: skip
    # Without a write to memory that needs its results, the assembler moves the softmax behind the wait.
    anchor.store(total)
    acc, next_weights = warpgroup_mma_wait(0, deps=[next_acc, next_weights])
    mbarrier.arrive(values.free.index(previous))
    acc = acc * gl.convert_layout(shrink, gl.SliceLayout(1, acc.type.layout))[:, None]
    weights = gl.convert_layout(next_weights.to(weights.dtype), weights.type.layout)
    return acc, weights, peak, total


@gluon.jit
def _attend(
    half, q_ptr, out_ptr, sinks_ptr, query_buffers, keys, values, anchors, turns, scale, stride_q_token, stride_q_head,
    plan, window, sizes: gl.constexpr,
):  # fmt: skip
    """Attends with one half of the rows of each tile."""
    BLOCK_N: gl.constexpr = sizes.BLOCK_N
    DIM: gl.constexpr = sizes.DIM
    STAGES: gl.constexpr = sizes.STAGES
    ROWS: gl.constexpr = sizes.BLOCK_M // 2
    SCORES: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK_N, 16])
    ACC: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, DIM, 16])
    WEIGHTS: gl.constexpr = gl.DotOperandLayout(0, ACC, 2)
    MEMORY: gl.constexpr = gl.BlockedLayout([1, 8], [256 // DIM, DIM // 8], [4, 1], [1, 0])
    dtype: gl.constexpr = out_ptr.dtype.element_ty
    queries, anchor = query_buffers.index(half), anchors.index(half)
    count = 0
    turn = -1
    number = 0
    tile = _receive(plan, number)
    loaded = _load_queries(q_ptr, stride_q_token, stride_q_head, tile, half, sizes, MEMORY)
    while tile.is_used != 0:
        queries.store(loaded)
        fence_async_shared()

        # The keys that each row sees, and the tiles that all rows see whole: first_clear … end_clear
        positions = tile.first_row + half * ROWS + gl.arange(0, ROWS, layout=gl.SliceLayout(1, SCORES))
        positions = tile.context + positions // sizes.GROUP
        last_key = gl.full([ROWS], 0, gl.int32, gl.SliceLayout(1, SCORES)) + (tile.end - 1)
        first_key = last_key
        clear_begin, clear_end = 0, tile.end
        if sizes.CAUSAL:
            last_key = gl.minimum(last_key, positions)
            clear_end = gl.minimum(tile.end, tile.context + tile.first_row // sizes.GROUP + 1)
        if sizes.HAS_WINDOW:
            first_key = positions - window + 1
            last_token = (gl.minimum(tile.first_row + sizes.BLOCK_M, tile.num_rows) - 1) // sizes.GROUP
            clear_begin = gl.maximum(0, tile.context + last_token - window + 1)
        first_clear = (tile.highest - clear_end // BLOCK_N * BLOCK_N) // BLOCK_N + 1
        first_clear = gl.minimum(gl.maximum(first_clear, 1), tile.num_tiles)
        end_clear = (tile.highest - gl.cdiv(clear_begin, BLOCK_N) * BLOCK_N) // BLOCK_N + 1
        end_clear = gl.minimum(gl.maximum(end_clear, first_clear), tile.num_tiles)

        stage = count % STAGES
        mbarrier.wait(keys.ready.index(stage), count // STAGES & 1)
        zeros = gl.zeros([ROWS, BLOCK_N], gl.float32, SCORES)
        scores = warpgroup_mma(queries, keys.tiles.index(stage).permute((1, 0)), zeros, use_acc=False, is_async=True)
        scores = warpgroup_mma_wait(0, deps=[scores])
        mbarrier.arrive(keys.free.index(stage))
        peak = gl.full([ROWS], float("-inf"), gl.float32, gl.SliceLayout(1, SCORES))
        total = gl.zeros([ROWS], gl.float32, gl.SliceLayout(1, SCORES))
        acc = gl.zeros([ROWS, DIM], gl.float32, ACC)
        weights, peak, total, _ = _weigh(
            scores, peak, total, tile.highest, first_key, last_key, scale, sizes.HAS_WINDOW, True
        )  # fmt: skip
        weights = gl.convert_layout(weights.to(dtype), WEIGHTS)
        if tile.highest + BLOCK_N > tile.seq_len:
            mbarrier.wait(values.ready.index(stage), count // STAGES & 1)
            _clear_values(values, stage, tile.highest, 0, tile.seq_len, sizes)
        for index in range(1, first_clear):
            acc, weights, peak, total = _attend_tile(
                acc, weights, peak, total, queries, keys, values, count + index, tile.highest - index * BLOCK_N,
                first_key, last_key, scale, anchor, turns, turn + index, half, sizes, True, SCORES,
            )  # fmt: skip
        for index in range(first_clear, end_clear):
            acc, weights, peak, total = _attend_tile(
                acc, weights, peak, total, queries, keys, values, count + index, tile.highest - index * BLOCK_N,
                first_key, last_key, scale, anchor, turns, turn + index, half, sizes, False, SCORES,
            )  # fmt: skip
        if sizes.HAS_WINDOW:
            for index in range(end_clear, tile.num_tiles):
                acc, weights, peak, total = _attend_tile(
                    acc, weights, peak, total, queries, keys, values, count + index, tile.highest - index * BLOCK_N,
                    first_key, last_key, scale, anchor, turns, turn + index, half, sizes, True, SCORES,
                )  # fmt: skip

        count += tile.num_tiles
        turn += tile.num_tiles - 1
        stage = (count - 1) % STAGES
        mbarrier.wait(values.ready.index(stage), (count - 1) // STAGES & 1)
        if sizes.HAS_WINDOW:
            lowest = tile.highest - (tile.num_tiles - 1) * BLOCK_N
            if lowest < tile.begin:
                _clear_values(values, stage, lowest, tile.begin, tile.seq_len, sizes)
        next_acc = warpgroup_mma(weights, values.tiles.index(stage), acc, is_async=True)
        # The next queries arrive while this tile ends.
        number += 1
        next_tile = _receive(plan, number)
        loaded = _load_queries(q_ptr, stride_q_token, stride_q_head, next_tile, half, sizes, MEMORY)
        acc = warpgroup_mma_wait(0, deps=[next_acc])
        mbarrier.arrive(values.free.index(stage))
        if sizes.HAS_SINKS:
            inverse = _with_sinks(sinks_ptr, peak, total, tile, half, sizes, SCORES)
            acc = acc * gl.convert_layout(inverse, gl.SliceLayout(1, ACC))[:, None]
        else:
            total = gl.convert_layout(total, gl.SliceLayout(1, ACC))
            acc = acc * (1.0 / gl.where(total == 0.0, 1.0, total))[:, None]
        _store_output(out_ptr, gl.convert_layout(acc.to(dtype), MEMORY), tile, half, sizes)
        tile = next_tile


@gluon.jit
def _make_ring(dtype: gl.constexpr, sizes: gl.constexpr):
    BOX: gl.constexpr = min(sizes.BLOCK_SIZE, sizes.BLOCK_N)
    NUM_BOXES: gl.constexpr = sizes.STAGES * (sizes.BLOCK_N // BOX) * (sizes.DIM // PANEL)
    tiles = gl.allocate_shared_memory(dtype, [sizes.STAGES, sizes.BLOCK_N, sizes.DIM], TILE_LAYOUT)
    boxes = tiles._reinterpret(dtype, [NUM_BOXES, BOX, PANEL], TILE_LAYOUT)
    ready = gl.allocate_shared_memory(gl.int64, [sizes.STAGES, 1], mbarrier.MBarrierLayout())
    free = gl.allocate_shared_memory(gl.int64, [sizes.STAGES, 1], mbarrier.MBarrierLayout())
    for stage in gl.static_range(sizes.STAGES):
        mbarrier.init(ready.index(stage), count=1)
        mbarrier.init(free.index(stage), count=2)
    return Ring(tiles, boxes, ready, free)


@gluon.jit
def _make_plan():
    fields = gl.allocate_shared_memory(gl.int32, [2 * FIELDS, 1], gl.SwizzledSharedLayout(1, 1, 1, [0]))
    ready = gl.allocate_shared_memory(gl.int64, [2, 1], mbarrier.MBarrierLayout())
    free = gl.allocate_shared_memory(gl.int64, [2, 1], mbarrier.MBarrierLayout())
    for stage in gl.static_range(2):
        mbarrier.init(ready.index(stage), count=1)
        mbarrier.init(free.index(stage), count=3)
    return Plan(fields, ready, free)


@gluon.jit(do_not_specialize=["stride_table", "num_places", "num_requests", "shortest", "window"])
def prefill_kernel(
    q_ptr, out_ptr, lines, table_ptr, query_start_ptr, seq_lens_ptr, sinks_ptr, scale, stride_q_token, stride_q_head,
    lines_each, stride_table, num_places, num_requests, shortest, window, HEAD_DIM: gl.constexpr, DIM: gl.constexpr,
    GROUP: gl.constexpr, KV_HEADS: gl.constexpr, BLOCK_SIZE: gl.constexpr, BLOCK_M: gl.constexpr,
    BLOCK_N: gl.constexpr, STAGES: gl.constexpr, CAUSAL: gl.constexpr, HAS_WINDOW: gl.constexpr,
    HAS_SINKS: gl.constexpr, DEPENDENT: gl.constexpr,
):  # fmt: skip
    """Grid: programs, which take places (tiles of rows × KV heads) in rounds. Only requests with `shortest` or more
    query tokens take part. lines: the pages as [blocks · lines_each, HEAD_DIM], one head of one key or value in a line.
    """
    if DEPENDENT:
        wait_for_kernel_before()
    dtype: gl.constexpr = out_ptr.dtype.element_ty
    sizes: gl.constexpr = Sizes(
        HEAD_DIM, DIM, GROUP, KV_HEADS, BLOCK_SIZE, BLOCK_M, BLOCK_N, STAGES, CAUSAL, HAS_WINDOW, HAS_SINKS
    )  # fmt: skip
    requests = Requests(query_start_ptr, seq_lens_ptr, num_requests, num_places, shortest, window)
    queries = gl.allocate_shared_memory(dtype, [2, BLOCK_M // 2, DIM], TILE_LAYOUT)
    keys, values = _make_ring(dtype, sizes), _make_ring(dtype, sizes)
    plan = _make_plan()
    anchors = gl.allocate_shared_memory(gl.float32, [2, BLOCK_M // 2], gl.SwizzledSharedLayout(1, 1, 1, [0]))
    turns = gl.allocate_shared_memory(gl.int64, [2, 1], mbarrier.MBarrierLayout())
    mbarrier.init(turns.index(0), count=1)
    mbarrier.init(turns.index(1), count=1)
    mbarrier.arrive(turns.index(0))  # the first turn
    fence_async_shared()
    gl.warp_specialize(
        [
            (_attend, (
                0, q_ptr, out_ptr, sinks_ptr, queries, keys, values, anchors, turns, scale, stride_q_token,
                stride_q_head, plan, window, sizes,
            )),
            (_attend, (
                1, q_ptr, out_ptr, sinks_ptr, queries, keys, values, anchors, turns, scale, stride_q_token,
                stride_q_head, plan, window, sizes,
            )),
            (_copy_keys, (lines, lines_each, keys, table_ptr, stride_table, plan, requests, sizes, DEPENDENT)),
            (_copy_values, (lines, lines_each, values, table_ptr, stride_table, plan, sizes, DEPENDENT)),
        ],
        [4, 1, 1],  # warps of all but the first, and their registers
        [232, 40, 40],
    )  # fmt: skip
