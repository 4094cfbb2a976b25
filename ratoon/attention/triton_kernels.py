"""The Triton kernels of the "triton" backend: write of keys and values, attention over pages, merge of split keys.

Imported on a CUDA device only (and under Triton's interpreter in tests). triton_backend.py chooses tiles and grids.

A page is [2, kv_heads, block_size, head_dim]: keys, then values. The rows of a tile are query tokens × the query heads
of one KV head, so keys and values are read once for all heads that share them. Scores are kept in base 2: `scale`
includes log2(e).
"""

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait


@triton.jit
def _wait_for_previous_kernel():
    """With programmatic dependent launch a kernel begins while the one before it still runs. Every program waits here
    before it reads what that one wrote, or writes anything, and also before it ends without work: kernels behind it
    rely on it. What earlier kernels wrote, such as the numbers of the step, may be read before."""
    gdc_wait()
    gdc_launch_dependents()


@triton.jit
def _find_request(query_start_ptr, tile, num_requests, GROUP: tl.constexpr, BLOCK_M: tl.constexpr):
    """The request of a tile when requests have as many tiles as they need. The tiles of request r begin at
    start · GROUP // BLOCK_M + r: never too few, because a floor loses less than the one that each request adds."""
    low = 0
    high = num_requests
    while high - low > 1:
        middle = (low + high) // 2
        first = tl.load(query_start_ptr + middle) * GROUP // BLOCK_M + middle
        low = tl.where(first <= tile, middle, low)
        high = tl.where(first <= tile, high, middle)
    return low


@triton.jit
def _visible_keys(
    context, first_token, last_token, seq_len, window, CAUSAL: tl.constexpr, HAS_WINDOW: tl.constexpr
):  # fmt: skip
    """The keys that at least one row of a tile sees: begin, end. Everything between them was written by its request;
    before them there may be blocks of another."""
    begin = 0
    end = seq_len
    if CAUSAL:
        end = tl.minimum(seq_len, context + last_token + 1)
    if HAS_WINDOW:
        begin = tl.maximum(0, context + first_token - window + 1)
    return begin, end


@triton.jit
def _split_of(split, begin, end, num_splits, BLOCK_N: tl.constexpr, CHUNK: tl.constexpr, SUFFIX: tl.constexpr):
    """The keys of one split, low to high, and how many splits have any. CHUNK 0: equal shares in whole tiles, from
    `begin` (SUFFIX) or from its tile; otherwise splits are CHUNK keys long and begin at multiples of it, whatever the
    batch."""
    if CHUNK == 0:
        first = begin
        if not SUFFIX:
            first = begin // BLOCK_N * BLOCK_N
        num_tiles = tl.cdiv(end - first, BLOCK_N)
        share = tl.maximum(tl.cdiv(num_tiles, num_splits), 1)
        num_active = tl.cdiv(num_tiles, share)
        low = first + split * share * BLOCK_N
        high = tl.minimum(end, low + share * BLOCK_N)
    else:
        first = begin // CHUNK
        num_active = tl.cdiv(end, CHUNK) - first
        low = tl.maximum(begin // BLOCK_N * BLOCK_N, (first + split) * CHUNK)
        high = tl.minimum(end, (first + split + 1) * CHUNK)
    return low, high, num_active


@triton.jit
def _fold(peak, total, acc, peak_next, total_next, acc_next):
    """Two partial results of one row → their combination. The order of operations is spelled out, because the merge
    kernel and a program that folds by itself must round alike."""
    top = tl.maximum(peak, peak_next)
    safe = tl.where(top == float("-inf"), 0.0, top)
    old, new = tl.exp2(peak - safe), tl.exp2(peak_next - safe)
    total = tl.fma(total, old, total_next * new)
    acc = tl.fma(acc, tl.broadcast_to(old[:, None], acc.shape), acc_next * new[:, None])
    return top, total, acc


@triton.jit
def _load_pages(table_ptr, start, end, BLOCK_SIZE: tl.constexpr, BLOCK_N: tl.constexpr):
    """The pages of the keys of a tile. Table entries beyond the end are undefined. They are read a tile ahead: loads
    that wait for the page numbers in the same turn of the loop would take a stage of its pipeline away."""
    keys = start + tl.arange(0, BLOCK_N)
    return tl.load(table_ptr + keys // BLOCK_SIZE, mask=keys < end, other=0)


@triton.jit
def _attend_tile(
    acc, peak, total, pages, q, start, begin, end, positions, heads, key_ptr, bias_ptr, scale, stride_block, window,
    reach, HEAD_DIM: tl.constexpr, DIM_PAD: tl.constexpr, KV_HEADS: tl.constexpr, BLOCK_SIZE: tl.constexpr,
    BLOCK_N: tl.constexpr, CAUSAL: tl.constexpr, HAS_WINDOW: tl.constexpr, HAS_BIAS: tl.constexpr,
    MASKED: tl.constexpr,
):  # fmt: skip
    """One tile of keys and values into the running maximum peak, sum total and weighted sum acc of each row."""
    keys = start + tl.arange(0, BLOCK_N)
    dims = tl.arange(0, DIM_PAD)
    offsets = pages.to(tl.int64) * stride_block + (keys % BLOCK_SIZE) * HEAD_DIM
    k_ptrs = key_ptr + offsets[:, None] + dims[None, :]
    v_ptrs = k_ptrs + KV_HEADS * BLOCK_SIZE * HEAD_DIM
    if HEAD_DIM == DIM_PAD:
        k = tl.load(k_ptrs)
    else:
        k = tl.load(k_ptrs, mask=dims[None, :] < HEAD_DIM, other=0.0)
    k = k.to(q.dtype)  # from fp8
    scores = tl.dot(q, tl.trans(k), input_precision="ieee")  # [BLOCK_M, BLOCK_N]
    if HAS_BIAS:
        distances = keys[None, :] - positions[:, None]
        inside = (distances >= -reach) & (distances <= reach)
        bias_ptrs = bias_ptr + heads[:, None] * (2 * reach + 1) + distances + reach
        scores = scores * scale + tl.load(bias_ptrs, mask=inside, other=0.0) * 1.4426950408889634
    if MASKED:
        visible = (keys < end)[None, :]
        if CAUSAL:
            visible = visible & (keys[None, :] <= positions[:, None])
        if HAS_WINDOW:
            visible = visible & (keys[None, :] > positions[:, None] - window)
        scores = tl.where(visible, scores, float("-inf"))
    top = tl.max(scores, 1)
    if not HAS_BIAS:
        top = top * scale
    top = tl.maximum(peak, top)
    # A row that has seen no key yet: -inf less -inf would be NaN.
    safe = top
    if MASKED:
        safe = tl.where(top == float("-inf"), 0.0, top)
    if HAS_BIAS:
        weights = tl.exp2(scores - safe[:, None])
    else:
        weights = tl.exp2(scores * scale - safe[:, None])
    shrink = tl.exp2(peak - safe)
    total = total * shrink + tl.sum(weights, 1)
    acc = acc * shrink[:, None]
    # A weight of zero times a NaN would be NaN: what no row sees is not read.
    if MASKED:
        readable = ((keys >= begin) & (keys < end))[:, None]
        if HEAD_DIM != DIM_PAD:
            readable = readable & (dims[None, :] < HEAD_DIM)
        v = tl.load(v_ptrs, mask=readable, other=0.0)
    elif HEAD_DIM == DIM_PAD:
        v = tl.load(v_ptrs)
    else:
        v = tl.load(v_ptrs, mask=dims[None, :] < HEAD_DIM, other=0.0)
    v = v.to(q.dtype)
    acc = tl.dot(weights.to(v.dtype), v, acc, input_precision="ieee")
    return acc, top, total


@triton.jit
def _attend_keys(
    q, low, high, begin, end, clear_begin, clear_end, positions, heads, key_ptr, table_ptr, bias_ptr, scale,
    stride_block, window, reach, HEAD_DIM: tl.constexpr, DIM_PAD: tl.constexpr, KV_HEADS: tl.constexpr,
    BLOCK_SIZE: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, CAUSAL: tl.constexpr,
    HAS_WINDOW: tl.constexpr, HAS_BIAS: tl.constexpr, CLEAR_LOOP: tl.constexpr,
):  # fmt: skip
    """Keys low to high. CLEAR_LOOP: tiles that all rows see whole, clear_begin to clear_end, have a loop without
    masks."""
    peak = tl.full([BLOCK_M], float("-inf"), tl.float32)
    total = tl.zeros([BLOCK_M], tl.float32)
    acc = tl.zeros([BLOCK_M, DIM_PAD], tl.float32)
    rest = low
    pages = _load_pages(table_ptr, low, end, BLOCK_SIZE, BLOCK_N)
    if CLEAR_LOOP:
        clear_low = tl.minimum(tl.maximum(low, tl.cdiv(clear_begin, BLOCK_N) * BLOCK_N), high)
        clear_high = tl.maximum(clear_low, tl.minimum(high, clear_end) // BLOCK_N * BLOCK_N)
        if HAS_WINDOW:
            for start in range(low, clear_low, BLOCK_N):
                next_pages = _load_pages(table_ptr, start + BLOCK_N, end, BLOCK_SIZE, BLOCK_N)
                acc, peak, total = _attend_tile(
                    acc, peak, total, pages, q, start, begin, end, positions, heads, key_ptr, bias_ptr, scale,
                    stride_block, window, reach, HEAD_DIM, DIM_PAD, KV_HEADS, BLOCK_SIZE, BLOCK_N, CAUSAL, HAS_WINDOW,
                    HAS_BIAS, True,
                )  # fmt: skip
                pages = next_pages
        for start in range(clear_low, clear_high, BLOCK_N):
            next_pages = _load_pages(table_ptr, start + BLOCK_N, end, BLOCK_SIZE, BLOCK_N)
            acc, peak, total = _attend_tile(
                acc, peak, total, pages, q, start, begin, end, positions, heads, key_ptr, bias_ptr, scale,
                stride_block, window, reach, HEAD_DIM, DIM_PAD, KV_HEADS, BLOCK_SIZE, BLOCK_N, CAUSAL, HAS_WINDOW,
                HAS_BIAS, False,
            )  # fmt: skip
            pages = next_pages
        rest = clear_high
    for start in range(rest, high, BLOCK_N):
        next_pages = _load_pages(table_ptr, start + BLOCK_N, end, BLOCK_SIZE, BLOCK_N)
        acc, peak, total = _attend_tile(
            acc, peak, total, pages, q, start, begin, end, positions, heads, key_ptr, bias_ptr, scale,
            stride_block, window, reach, HEAD_DIM, DIM_PAD, KV_HEADS, BLOCK_SIZE, BLOCK_N, CAUSAL, HAS_WINDOW,
            HAS_BIAS, True,
        )  # fmt: skip
        pages = next_pages
    return acc, peak, total


@triton.jit
def _merge_rows(
    rows, in_rows, num_active, num_splits, acc_ptr, peak_ptr, total_ptr, out_ptr, HEAD_DIM: tl.constexpr,
    DIM_PAD: tl.constexpr, SPLITS_PAD: tl.constexpr, IN_ORDER: tl.constexpr,
):  # fmt: skip
    """The output of rows (token · heads + head) from their partial results, which lie side by side. IN_ORDER: folded
    one after the other, as a program does that attends to all keys itself."""
    dims = tl.arange(0, DIM_PAD)
    in_dims = dims < HEAD_DIM
    places = rows.to(tl.int64) * num_splits
    if IN_ORDER:
        peak = tl.full(rows.shape, float("-inf"), tl.float32)
        total = tl.zeros(rows.shape, tl.float32)
        acc = tl.zeros([rows.shape[0], DIM_PAD], tl.float32)
        for split in range(num_active):
            peak_next = tl.load(peak_ptr + places + split, mask=in_rows, other=float("-inf"), cache_modifier=".cg")
            total_next = tl.load(total_ptr + places + split, mask=in_rows, other=0.0, cache_modifier=".cg")
            acc_next = tl.load(
                acc_ptr + (places + split)[:, None] * HEAD_DIM + dims[None, :],
                mask=in_rows[:, None] & in_dims[None, :], other=0.0, cache_modifier=".cg",
            )  # fmt: skip
            peak, total, acc = _fold(peak, total, acc, peak_next, total_next, acc_next)
    else:
        splits = tl.arange(0, SPLITS_PAD)
        places = places[:, None] + splits[None, :]  # [rows, splits]
        there = in_rows[:, None] & (splits < num_active)[None, :]
        acc = tl.load(
            acc_ptr + places[:, :, None] * HEAD_DIM + dims[None, None, :],
            mask=there[:, :, None] & in_dims[None, None, :], other=0.0, cache_modifier=".cg",
        )  # fmt: skip
        peak = tl.load(peak_ptr + places, mask=there, other=float("-inf"), cache_modifier=".cg")
        total = tl.load(total_ptr + places, mask=there, other=0.0, cache_modifier=".cg")
        top = tl.max(peak, 1)
        top = tl.where(top == float("-inf"), 0.0, top)
        shares = tl.exp2(peak - top[:, None])
        total = tl.sum(total * shares, 1)
        acc = tl.sum(acc * shares[:, :, None], 1)  # [rows, DIM_PAD]
    out = acc / tl.where(total == 0.0, 1.0, total)[:, None]
    out_ptrs = out_ptr + rows.to(tl.int64)[:, None] * HEAD_DIM + dims[None, :]
    tl.store(out_ptrs, out.to(out_ptr.dtype.element_ty), mask=in_rows[:, None] & in_dims[None, :])


@triton.jit(
    do_not_specialize=[
        "stride_table", "num_requests", "shortest", "longest", "window", "reach", "num_splits", "first_slot",
        "num_slots",
    ]
)  # fmt: skip
def attention_kernel(
    q_ptr, out_ptr, cache_ptr, table_ptr, query_start_ptr, seq_lens_ptr, bias_ptr, acc_ptr, peak_ptr, total_ptr,
    arrived_ptr, begins_ptr, scale, stride_q_token, stride_q_head, stride_block, stride_table, num_requests, shortest,
    longest, window, reach, num_splits, first_slot, num_slots, HEAD_DIM: tl.constexpr, DIM_PAD: tl.constexpr,
    GROUP: tl.constexpr, KV_HEADS: tl.constexpr, BLOCK_SIZE: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    CAUSAL: tl.constexpr, HAS_WINDOW: tl.constexpr, HAS_BIAS: tl.constexpr, CLEAR_LOOP: tl.constexpr,
    TILES: tl.constexpr, SPLIT: tl.constexpr, CHUNK: tl.constexpr, MERGE_ROWS: tl.constexpr, SPLITS_PAD: tl.constexpr,
    SUFFIX: tl.constexpr, KEEP_PARTS: tl.constexpr, DEPENDENT: tl.constexpr,
):  # fmt: skip
    """Grid: tiles of rows, KV heads, splits. Only requests with shortest … longest query tokens take part.

    TILES: of each request; 0: as many as it needs, found by search. SPLIT: the keys of a tile are divided among
    programs, and the last of them to arrive merges (MERGE_ROWS > 0), or a merge kernel does. CHUNK: see _split_of;
    without SPLIT a program attends to the chunks one after the other. SUFFIX: a request's keys begin at begins_ptr.
    KEEP_PARTS: results stay in parts, from first_slot on of the num_slots of each row, even if there is one alone.
    """
    if TILES == 0:
        place = tl.num_programs(0) - 1 - tl.program_id(0)  # later rows see more keys: they begin first
        request = _find_request(query_start_ptr, place, num_requests, GROUP, BLOCK_M)
    else:
        place = tl.program_id(0)
        request = place // TILES
    query_start = tl.load(query_start_ptr + request)
    query_len = tl.load(query_start_ptr + request + 1) - query_start
    seq_len = tl.load(seq_lens_ptr + request)
    if TILES == 0:
        tile = place - (query_start * GROUP // BLOCK_M + request)
    else:
        tile = place % TILES
    num_rows = query_len * GROUP
    first_row = tile * BLOCK_M
    if DEPENDENT:
        _wait_for_previous_kernel()
    if (first_row >= num_rows) | (query_len < shortest) | (query_len > longest):
        return
    context = seq_len - query_len  # position of the first query
    first_token = first_row // GROUP
    last_token = (tl.minimum(first_row + BLOCK_M, num_rows) - 1) // GROUP
    begin, end = _visible_keys(context, first_token, last_token, seq_len, window, CAUSAL, HAS_WINDOW)
    if SUFFIX:
        begin = tl.load(begins_ptr + request)
    split = tl.program_id(2)
    if SPLIT:
        low, high, num_active = _split_of(split, begin, end, num_splits, BLOCK_N, CHUNK, SUFFIX)
        if KEEP_PARTS:
            if split >= num_active:
                return
        elif split >= tl.maximum(num_active, 1):
            return
    else:
        low, high, num_active = begin // BLOCK_N * BLOCK_N, end, 1
    # What every row sees whole
    clear_begin, clear_end = 0, end
    if CAUSAL:
        clear_end = tl.minimum(end, context + first_token + 1)
    if HAS_WINDOW:
        clear_begin = tl.maximum(0, context + last_token - window + 1)

    kv_head = tl.program_id(1)
    rows = first_row + tl.arange(0, BLOCK_M)
    in_rows = rows < num_rows
    tokens = rows // GROUP
    heads = kv_head * GROUP + rows % GROUP
    positions = context + tokens
    dims = tl.arange(0, DIM_PAD)
    row_mask = in_rows[:, None] & (dims < HEAD_DIM)[None, :]
    q_ptrs = q_ptr + (query_start + tokens).to(tl.int64) * stride_q_token + heads * stride_q_head
    q = tl.load(q_ptrs[:, None] + dims[None, :], mask=row_mask, other=0.0)
    key_ptr = cache_ptr + kv_head * BLOCK_SIZE * HEAD_DIM
    table_ptr += request.to(tl.int64) * stride_table

    if CHUNK > 0 and not SPLIT:
        peak = tl.full([BLOCK_M], float("-inf"), tl.float32)
        total = tl.zeros([BLOCK_M], tl.float32)
        acc = tl.zeros([BLOCK_M, DIM_PAD], tl.float32)
        for chunk in range(begin // CHUNK, tl.cdiv(end, CHUNK)):
            acc_next, peak_next, total_next = _attend_keys(
                q, tl.maximum(low, chunk * CHUNK), tl.minimum(high, chunk * CHUNK + CHUNK), begin, end, clear_begin,
                clear_end, positions, heads, key_ptr, table_ptr, bias_ptr, scale, stride_block, window, reach, HEAD_DIM,
                DIM_PAD, KV_HEADS, BLOCK_SIZE, BLOCK_M, BLOCK_N, CAUSAL, HAS_WINDOW, HAS_BIAS, CLEAR_LOOP,
            )  # fmt: skip
            peak, total, acc = _fold(peak, total, acc, peak_next, total_next, acc_next)
    else:
        acc, peak, total = _attend_keys(
            q, low, high, begin, end, clear_begin, clear_end, positions, heads, key_ptr, table_ptr, bias_ptr, scale,
            stride_block, window, reach, HEAD_DIM, DIM_PAD, KV_HEADS, BLOCK_SIZE, BLOCK_M, BLOCK_N, CAUSAL, HAS_WINDOW,
            HAS_BIAS, CLEAR_LOOP,
        )  # fmt: skip

    out_rows = (query_start + tokens).to(tl.int64) * (KV_HEADS * GROUP) + heads
    is_whole = num_active <= 1
    if KEEP_PARTS:
        is_whole = False
    if is_whole:
        out = acc / tl.where(total == 0.0, 1.0, total)[:, None]
        out_ptrs = out_ptr + out_rows[:, None] * HEAD_DIM + dims[None, :]
        tl.store(out_ptrs, out.to(out_ptr.dtype.element_ty), mask=row_mask)
    elif SPLIT:
        places = out_rows * num_slots + first_slot + split
        tl.store(peak_ptr + places, peak, mask=in_rows, cache_modifier=".cg")
        tl.store(total_ptr + places, total, mask=in_rows, cache_modifier=".cg")
        tl.store(acc_ptr + places[:, None] * HEAD_DIM + dims[None, :], acc, mask=row_mask, cache_modifier=".cg")
        if MERGE_ROWS > 0:
            arrived_ptr += place * KV_HEADS + kv_head
            tl.debug_barrier()  # all threads have stored before one of them says so
            if tl.atomic_add(arrived_ptr, 1, sem="acq_rel", scope="gpu") == num_active - 1:
                tl.store(arrived_ptr, 0)
                for row in range(first_row, tl.minimum(first_row + BLOCK_M, num_rows), MERGE_ROWS):
                    merged = row + tl.arange(0, MERGE_ROWS)
                    merged_rows = (query_start + merged // GROUP) * (KV_HEADS * GROUP) + kv_head * GROUP
                    _merge_rows(
                        merged_rows + merged % GROUP, merged < num_rows, num_active, num_splits, acc_ptr, peak_ptr,
                        total_ptr, out_ptr, HEAD_DIM, DIM_PAD, SPLITS_PAD, CHUNK > 0,
                    )  # fmt: skip


@triton.jit(do_not_specialize=["longest", "window", "num_splits"])
def merge_kernel(
    out_ptr, query_start_ptr, seq_lens_ptr, acc_ptr, peak_ptr, total_ptr, longest, window, num_splits,
    HEAD_DIM: tl.constexpr, DIM_PAD: tl.constexpr, GROUP: tl.constexpr, KV_HEADS: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, CAUSAL: tl.constexpr, HAS_WINDOW: tl.constexpr,
    TILES: tl.constexpr, CHUNK: tl.constexpr,
    MERGE_ROWS: tl.constexpr, SPLITS_PAD: tl.constexpr,
):  # fmt: skip
    """What attention_kernel left in parts. Grid: tiles and KV heads as there, MERGE_ROWS rows each."""
    request, tile = tl.program_id(0) // TILES, tl.program_id(0) % TILES
    query_start = tl.load(query_start_ptr + request)
    query_len = tl.load(query_start_ptr + request + 1) - query_start
    seq_len = tl.load(seq_lens_ptr + request)
    num_rows = query_len * GROUP
    first_row = tile * BLOCK_M
    first_merged = first_row + tl.program_id(2) * MERGE_ROWS
    if (first_merged >= num_rows) | (query_len > longest):
        return
    last_token = (tl.minimum(first_row + BLOCK_M, num_rows) - 1) // GROUP
    begin, end = _visible_keys(seq_len - query_len, first_row // GROUP, last_token, seq_len, window, CAUSAL, HAS_WINDOW)
    _, _, num_active = _split_of(0, begin, end, num_splits, BLOCK_N, CHUNK, False)
    if num_active <= 1:
        return
    rows = first_merged + tl.arange(0, MERGE_ROWS)
    merged = (query_start + rows // GROUP) * (KV_HEADS * GROUP) + tl.program_id(1) * GROUP + rows % GROUP
    _merge_rows(
        merged, rows < num_rows, num_active, num_splits, acc_ptr, peak_ptr, total_ptr, out_ptr, HEAD_DIM, DIM_PAD,
        SPLITS_PAD, CHUNK > 0,
    )  # fmt: skip


@triton.jit(do_not_specialize=["num_rows"])
def merge_slots_kernel(
    out_ptr, acc_ptr, peak_ptr, total_ptr, num_rows, num_slots, HEAD_DIM: tl.constexpr, DIM_PAD: tl.constexpr,
    ROWS: tl.constexpr, SLOTS_PAD: tl.constexpr,
):  # fmt: skip
    """Rows (token · heads + head) from the slots that were written: peaks of the others are -inf. A row without any
    stays as it is."""
    rows = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    slots, dims = tl.arange(0, SLOTS_PAD), tl.arange(0, DIM_PAD)
    in_dims = dims < HEAD_DIM
    places = rows.to(tl.int64)[:, None] * num_slots + slots[None, :]
    there = (rows < num_rows)[:, None] & (slots < num_slots)[None, :]
    peak = tl.load(peak_ptr + places, mask=there, other=float("-inf"))
    there = peak > float("-inf")
    total = tl.load(total_ptr + places, mask=there, other=0.0)
    acc = tl.load(
        acc_ptr + places[:, :, None] * HEAD_DIM + dims[None, None, :], mask=there[:, :, None] & in_dims[None, None, :],
        other=0.0,
    )  # fmt: skip
    top = tl.max(peak, 1)
    written = top > float("-inf")
    shares = tl.exp2(peak - tl.where(written, top, 0.0)[:, None])
    total = tl.where(written, tl.sum(total * shares, 1), 1.0)
    out = tl.sum(acc * shares[:, :, None], 1) / total[:, None]
    out_ptrs = out_ptr + rows.to(tl.int64)[:, None] * HEAD_DIM + dims[None, :]
    tl.store(out_ptrs, out.to(out_ptr.dtype.element_ty), mask=written[:, None] & in_dims[None, :])


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
def _normed(x, scale, weight):
    """Rounded to the dtype of x before the weight, as TorchOps does."""
    return ((x.to(tl.float32) * scale[:, None]).to(x.dtype).to(tl.float32) * weight[None, :]).to(x.dtype)


@triton.jit
def _transform_heads(
    first, second, rest, tokens, in_rows, positions_ptr, cos_sin_ptr, weight_ptr, eps, HEAD_DIM: tl.constexpr,
    HALF: tl.constexpr, HALF_PAD: tl.constexpr, REST_PAD: tl.constexpr, HAS_NORM: tl.constexpr,
    HAS_ROTARY: tl.constexpr,
):  # fmt: skip
    """RMS norm of each head, then the rotation of its first 2 · HALF elements, in float32 and rounded once."""
    half = tl.arange(0, HALF_PAD)
    if HAS_NORM:
        columns = 2 * HALF + tl.arange(0, REST_PAD)
        x, y, z = first.to(tl.float32), second.to(tl.float32), rest.to(tl.float32)
        squares = tl.sum(x * x, 1) + tl.sum(y * y, 1)
        if 2 * HALF < HEAD_DIM:
            squares += tl.sum(z * z, 1)
        scale = tl.rsqrt(squares / HEAD_DIM + eps)
        in_second = (half < HALF) & (half + HALF < HEAD_DIM)
        first = _normed(first, scale, tl.load(weight_ptr + half, mask=half < HALF, other=0.0).to(tl.float32))
        second = _normed(second, scale, tl.load(weight_ptr + HALF + half, mask=in_second, other=0.0).to(tl.float32))
        if 2 * HALF < HEAD_DIM:
            rest = _normed(
                rest, scale, tl.load(weight_ptr + columns, mask=columns < HEAD_DIM, other=0.0).to(tl.float32)
            )
    x, y = first.to(tl.float32), second.to(tl.float32)
    if HAS_ROTARY:
        positions = tl.load(positions_ptr + tokens, mask=in_rows, other=0).to(tl.int64)
        angles = cos_sin_ptr + positions[:, None] * (2 * HALF) + half[None, :]
        in_half = in_rows[:, None] & (half < HALF)[None, :]
        cos = tl.load(angles, mask=in_half, other=0.0)
        sin = tl.load(angles + HALF, mask=in_half, other=0.0)
        x, y = x * cos - y * sin, y * cos + x * sin
    return x, y, rest


@triton.jit(do_not_specialize=["num_tokens"])
def store_kernel(
    q_ptr, k_ptr, v_ptr, cache_ptr, slots_ptr, positions_ptr, cos_sin_ptr, q_weight_ptr, k_weight_ptr, q_eps, k_eps,
    num_tokens, stride_q, stride_k, stride_v, stride_q_head, stride_k_head, stride_v_head, stride_block,
    Q_HEADS: tl.constexpr, KV_HEADS: tl.constexpr, HEAD_DIM: tl.constexpr, BLOCK_SIZE: tl.constexpr,
    HALF: tl.constexpr, HALF_PAD: tl.constexpr, REST_PAD: tl.constexpr, HAS_Q_NORM: tl.constexpr,
    HAS_K_NORM: tl.constexpr, HAS_ROTARY: tl.constexpr, TOKENS: tl.constexpr, HEADS: tl.constexpr,
    DEPENDENT: tl.constexpr,
):  # fmt: skip
    """Grid: TOKENS tokens each, HEADS heads each: first those of queries, transformed in place, then those of keys,
    transformed into the cache, then those of values. Q_HEADS 0: queries stay as they are."""
    q_blocks: tl.constexpr = (Q_HEADS + HEADS - 1) // HEADS
    kv_blocks: tl.constexpr = (KV_HEADS + HEADS - 1) // HEADS
    block = tl.program_id(1)
    rows = tl.arange(0, TOKENS * HEADS)
    tokens = tl.program_id(0) * TOKENS + rows // HEADS
    token_offsets = tokens.to(tl.int64)
    if DEPENDENT:
        _wait_for_previous_kernel()
    if block < q_blocks:
        heads = block * HEADS + rows % HEADS
        in_rows = (tokens < num_tokens) & (heads < Q_HEADS)
        q_ptrs = q_ptr + token_offsets * stride_q + heads * stride_q_head
        first, second, rest = _load_parts(q_ptrs, in_rows, HEAD_DIM, HALF, HALF_PAD, REST_PAD)
        first, second, rest = _transform_heads(
            first, second, rest, tokens, in_rows, positions_ptr, cos_sin_ptr, q_weight_ptr, q_eps, HEAD_DIM, HALF,
            HALF_PAD, REST_PAD, HAS_Q_NORM, HAS_ROTARY,
        )  # fmt: skip
        _store_parts(q_ptrs, in_rows, first, second, rest, HEAD_DIM, HALF, HALF_PAD, REST_PAD)
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
            first, second, rest, tokens, in_rows, positions_ptr, cos_sin_ptr, k_weight_ptr, k_eps, HEAD_DIM, HALF,
            HALF_PAD, REST_PAD, HAS_K_NORM, HAS_ROTARY,
        )  # fmt: skip
    else:
        v_ptrs = v_ptr + token_offsets * stride_v + heads * stride_v_head
        first, second, rest = _load_parts(v_ptrs, in_rows, HEAD_DIM, HALF, HALF_PAD, REST_PAD)
        cache_ptrs += KV_HEADS * BLOCK_SIZE * HEAD_DIM
        first, second = first.to(tl.float32), second.to(tl.float32)
    _store_parts(cache_ptrs, in_rows, first, second, rest, HEAD_DIM, HALF, HALF_PAD, REST_PAD)
