"""The Triton kernels of the "triton" backend: attention over pages, and merge of split keys.

Imported on a CUDA device only (and under Triton's interpreter in tests). triton_plan.py chooses tiles and splits;
triton_store.py writes keys and values, triton_decode.py does both for requests of one token.

A page is [2, kv_heads, block_size, head_dim]: keys, then values. The rows of a tile are query tokens × the query heads
of one KV head, so keys and values are read once for all heads that share them. Scores are kept in base 2: `scale`
includes log2(e).
"""

import triton
import triton.language as tl

from ratoon.layers.triton.dependent import INTERPRETED, wait_for_kernel_before

_INTERPRETED = tl.constexpr(INTERPRETED)


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
def _last_key(ends_ptr, token, position, HAS_ENDS: tl.constexpr):
    """The last key that a token of the batch sees, or each of several. HAS_ENDS: where ends_ptr says so, it is behind
    the token's own position."""
    last = position
    if HAS_ENDS:
        last = tl.maximum(position, tl.load(ends_ptr + token))
    return last


@triton.jit
def _visible_keys(
    context, first_token, last_token, last_key, seq_len, window, CAUSAL: tl.constexpr, HAS_WINDOW: tl.constexpr
):  # fmt: skip
    """The keys that at least one row of a tile sees: begin, end. Everything between them was written by its request;
    before them there may be blocks of another. `last_key`: that its last row sees, if attention is causal."""
    begin = 0
    end = seq_len
    if CAUSAL:
        end = tl.minimum(seq_len, last_key + 1)
    elif HAS_WINDOW:
        end = tl.minimum(seq_len, context + last_token + window)
    if HAS_WINDOW:
        begin = tl.maximum(0, context + first_token - window + 1)
    return begin, end


@triton.jit
def find_share(
    query_start_ptr, seq_lens_ptr, num_requests, shortest, longest, num_splits, min_share, GROUP: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, REQUESTS_PAD: tl.constexpr,
):  # fmt: skip
    """The work of this program when programs are divided among the tiles of all requests by their keys: → the request,
    its tile, the tile's split, how many tiles of keys a split has, and the number of the tile's first program; the
    request is `num_requests` for a program without work. There are more programs than tiles, at most `num_splits` for
    each, and fewer where a split would have fewer than `min_share` tiles of keys."""
    place, num_places = tl.program_id(0), tl.num_programs(0)
    requests = tl.arange(0, REQUESTS_PAD)
    here = requests < num_requests
    query_lens = tl.load(query_start_ptr + requests + 1, mask=here, other=0)
    query_lens -= tl.load(query_start_ptr + requests, mask=here, other=0)
    seq_lens = tl.load(seq_lens_ptr + requests, mask=here, other=0)
    tiles = tl.where((query_lens >= shortest) & (query_lens <= longest), tl.cdiv(query_lens * GROUP, BLOCK_M), 0)
    key_tiles = tl.where(tiles > 0, tl.cdiv(seq_lens, BLOCK_N), 0)
    share = tl.cdiv(tl.sum(tiles * key_tiles), tl.maximum(num_places - tl.sum(tiles), 1))
    share = tl.maximum(tl.maximum(share, min_share), tl.cdiv(tl.max(key_tiles), num_splits))
    splits = tl.maximum(tl.cdiv(key_tiles, share), 1)
    programs = tiles * splits
    before = tl.cumsum(programs) <= place
    request = tl.sum(before.to(tl.int32))
    offset = place - tl.sum(tl.where(before, programs, 0))
    splits_here = tl.maximum(tl.sum(tl.where(requests == request, splits, 0)), 1)
    split = offset % splits_here
    request = tl.where(request < num_requests, request, num_requests)
    return request, offset // splits_here, split, share, place - split


@triton.jit
def split_of(
    split, begin, end, num_splits, min_share, BLOCK_N: tl.constexpr, CHUNK: tl.constexpr, SUFFIX: tl.constexpr
):  # fmt: skip
    """The keys of one split, low to high, and how many splits have any. CHUNK 0: equal shares in whole tiles, at least
    `min_share` of them, from `begin` (SUFFIX) or from its tile; otherwise splits are CHUNK keys long and begin at
    multiples of it, whatever the batch."""
    if CHUNK == 0:
        first = begin
        if not SUFFIX:
            first = begin // BLOCK_N * BLOCK_N
        num_tiles = tl.cdiv(end - first, BLOCK_N)
        share = tl.maximum(tl.cdiv(num_tiles, num_splits), min_share)
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
    """Two partial results of one row → their combination. The order of operations is spelled out, because a program
    that merges and one that folds by itself must round alike."""
    top = tl.maximum(peak, peak_next)
    safe = tl.where(top == float("-inf"), 0.0, top)
    old, new = tl.exp2(peak - safe), tl.exp2(peak_next - safe)
    if len(total.shape) == 2:
        total = tl.fma(total, tl.broadcast_to(old[:, None], total.shape), total_next * new[:, None])
    else:
        total = tl.fma(total, old, total_next * new)
    acc = tl.fma(acc, tl.broadcast_to(old[:, None], acc.shape), acc_next * new[:, None])
    return top, total, acc


@triton.jit
def divide_by_sums(acc, peak, total, sinks_ptr, heads, in_rows, HAS_SINKS: tl.constexpr):
    """Rows from their weighted sums [N, …], maxima and sums of weights, when all of their parts are together.
    HAS_SINKS: sinks_ptr has a score of each head, in base e, that has no value: it is one more term of the sum. The
    order of operations is spelled out, see _fold."""
    if HAS_SINKS:
        sinks = tl.load(sinks_ptr + heads, mask=in_rows, other=0.0) * 1.4426950408889634
        top = tl.maximum(peak, sinks)
        keep = tl.exp2(peak - top)
        total = tl.fma(total, keep, tl.exp2(sinks - top))
        acc = acc * keep[:, None]
    return acc / tl.where(total == 0.0, 1.0, total)[:, None]


@triton.jit
def load_pages(table_ptr, start, end, BLOCK_SIZE: tl.constexpr, BLOCK_N: tl.constexpr):
    """The pages of the keys of a tile. Table entries beyond the end are undefined. They are read a tile ahead: loads
    that wait for the page numbers in the same turn of the loop would take a stage of its pipeline away."""
    keys = start + tl.arange(0, BLOCK_N)
    return tl.load(table_ptr + keys // BLOCK_SIZE, mask=keys < end, other=0)


@triton.jit
def _unpack_pairs(pairs):
    """Two fp8 numbers in 16 bits → both in float16. Tensor cores take operands of 16 bits from shared memory in the
    order that they need; bytes they would get one by one."""
    if _INTERPRETED:
        even = (pairs & 0xFF).to(tl.uint8).to(tl.float8e4nv, bitcast=True).to(tl.float16)
        odd = (pairs >> 8).to(tl.uint8).to(tl.float8e4nv, bitcast=True).to(tl.float16)
    else:  # four numbers at a time; Triton would move each byte by itself
        even, odd = tl.inline_asm_elementwise(
            """
            {
                .reg .b32 evens, odds;
                .reg .b16 low, high, unused;
                prmt.b32 evens, $2, 0, 0x0020;
                prmt.b32 odds, $2, 0, 0x0031;
                mov.b32 {low, unused}, evens;
                mov.b32 {high, unused}, odds;
                cvt.rn.f16x2.e4m3x2 $0, low;
                cvt.rn.f16x2.e4m3x2 $1, high;
            }
            """,
            "=r,=r,r",
            [pairs],
            dtype=(tl.float16, tl.float16),
            is_pure=True,
            pack=2,
        )
    return even, odd


@triton.jit
def cap_scores(scores, SOFT_CAP: tl.constexpr):
    """Scores in base 2 under a soft cap in the same unit: cap · tanh(score / cap). 0: there is none."""
    if SOFT_CAP > 0.0:
        scores = SOFT_CAP * (2.0 * tl.sigmoid(scores * (2.0 / SOFT_CAP)) - 1.0)
    return scores


@triton.jit
def _weigh(
    scores, peak, total, keys, end, positions, last_keys, heads, bias_ptr, scale, window, reach, CAUSAL: tl.constexpr,
    HAS_WINDOW: tl.constexpr, HAS_BIAS: tl.constexpr, MASKED: tl.constexpr, SOFT_CAP: tl.constexpr,
):  # fmt: skip
    """Scores [BLOCK_M, BLOCK_N] → weights, the factor of earlier ones, and the running maximum and sum of each row. A
    sum by products (see sums_of) is left to the caller."""
    IS_SCALED: tl.constexpr = HAS_BIAS or SOFT_CAP > 0.0
    if IS_SCALED:
        scores = cap_scores(scores * scale, SOFT_CAP)
    if HAS_BIAS:
        distances = keys[None, :] - positions[:, None]
        inside = (distances >= -reach) & (distances <= reach)
        bias_ptrs = bias_ptr + heads[:, None] * (2 * reach + 1) + distances + reach
        scores = scores + tl.load(bias_ptrs, mask=inside, other=0.0) * 1.4426950408889634
    if MASKED:
        visible = (keys < end)[None, :]
        if CAUSAL:
            visible = visible & (keys[None, :] <= last_keys[:, None])
        if HAS_WINDOW:
            visible = visible & (keys[None, :] > positions[:, None] - window)
            if not CAUSAL:
                visible = visible & (keys[None, :] < positions[:, None] + window)
        scores = tl.where(visible, scores, float("-inf"))
    top = tl.max(scores, 1)
    if not IS_SCALED:
        top = top * scale
    top = tl.maximum(peak, top)
    # A row that has seen no key yet: -inf less -inf would be NaN.
    safe = top
    if MASKED:
        safe = tl.where(top == float("-inf"), 0.0, top)
    if IS_SCALED:
        weights = tl.exp2(scores - safe[:, None])
    else:
        weights = tl.exp2(scores * scale - safe[:, None])
    shrink = tl.exp2(peak - safe)
    if len(total.shape) == 1:
        total = total * shrink + tl.sum(weights, 1)
    return weights, shrink, top, total


@triton.jit
def sums_of(BLOCK_M: tl.constexpr, dtype: tl.constexpr, CHUNK: tl.constexpr):
    """The running sum of each row's weights, at first. The order in which threads add weights up depends on the shape
    of a tile. With CHUNK it must not: the sum is a product with ones, which adds 16 of them at a time like any other,
    [BLOCK_M, 16] with equal columns. float32 has one shape of tiles only."""
    if CHUNK > 0 and dtype != tl.float32:
        total = tl.zeros([BLOCK_M, 16], tl.float32)
    else:
        total = tl.zeros([BLOCK_M], tl.float32)
    return total


@triton.jit
def row_sums(total):
    """[BLOCK_M] of what sums_of began."""
    if len(total.shape) == 2:
        total = tl.max(total, 1)
    return total


@triton.jit
def _multiply_values(weights, v, acc):
    return tl.dot(weights, v.to(weights.dtype), acc, input_precision="ieee")


@triton.jit
def load_tile(
    pages, start, begin, end, cache_ptr, kv_head, stride_block, HEAD_DIM: tl.constexpr, DIM_PAD: tl.constexpr,
    KV_HEADS: tl.constexpr, BLOCK_SIZE: tl.constexpr, BLOCK_N: tl.constexpr, PAIRED: tl.constexpr, MASKED: tl.constexpr,
):  # fmt: skip
    """A tile of keys and one of values, [BLOCK_N, DIM_PAD], or half as wide if PAIRED: pairs of fp8 in 16 bits. Values
    that no row sees are not read: a weight of zero times a NaN would be NaN."""
    ROW: tl.constexpr = HEAD_DIM // 2 if PAIRED else HEAD_DIM
    ROW_PAD: tl.constexpr = DIM_PAD // 2 if PAIRED else DIM_PAD
    ZERO: tl.constexpr = 0 if PAIRED else 0.0
    if PAIRED:
        cache_ptr = cache_ptr.to(tl.pointer_type(tl.uint16), bitcast=True)
        stride_block = stride_block // 2
    keys = start + tl.arange(0, BLOCK_N)
    columns = tl.arange(0, ROW_PAD)
    offsets = pages.to(tl.int64) * stride_block + (keys % BLOCK_SIZE) * ROW
    k_ptrs = cache_ptr + kv_head * (BLOCK_SIZE * ROW) + offsets[:, None] + columns[None, :]
    v_ptrs = k_ptrs + KV_HEADS * BLOCK_SIZE * ROW
    if ROW == ROW_PAD:
        k = tl.load(k_ptrs)
    else:
        k = tl.load(k_ptrs, mask=columns[None, :] < ROW, other=ZERO)
    if MASKED:
        readable = ((keys >= begin) & (keys < end))[:, None]
        if ROW != ROW_PAD:
            readable = readable & (columns[None, :] < ROW)
        v = tl.load(v_ptrs, mask=readable, other=ZERO)
    elif ROW == ROW_PAD:
        v = tl.load(v_ptrs)
    else:
        v = tl.load(v_ptrs, mask=columns[None, :] < ROW, other=ZERO)
    return k, v


@triton.jit
def add_tile(
    acc, acc_odd, peak, total, k, v, q, q_odd, start, end, positions, last_keys, heads, bias_ptr, scale, window, reach,
    BLOCK_N: tl.constexpr, CAUSAL: tl.constexpr, HAS_WINDOW: tl.constexpr, HAS_BIAS: tl.constexpr, PAIRED: tl.constexpr,
    MASKED: tl.constexpr, CHUNK: tl.constexpr, SOFT_CAP: tl.constexpr,
):  # fmt: skip
    """A tile into the running maximum peak, sum total and weighted sum acc of each row. PAIRED: q and acc have a part
    for each half of the pairs. CHUNK: the tile is attended to by itself, then folded."""
    keys = start + tl.arange(0, BLOCK_N)
    if PAIRED:
        k_even, k_odd = _unpack_pairs(k)
        scores = tl.dot(q_odd, tl.trans(k_odd), tl.dot(q, tl.trans(k_even)))  # [BLOCK_M, BLOCK_N]
    else:
        scores = tl.dot(q, tl.trans(k.to(q.dtype)), input_precision="ieee")
    if CHUNK > 0:
        weights, _, peak_next, total_next = _weigh(
            scores, tl.full(peak.shape, float("-inf"), tl.float32), tl.zeros(total.shape, tl.float32), keys, end,
            positions, last_keys, heads, bias_ptr, scale, window, reach, CAUSAL, HAS_WINDOW, HAS_BIAS, MASKED,
            SOFT_CAP,
        )  # fmt: skip
        weights = weights.to(q.dtype)
        if len(total.shape) == 2:
            total_next = tl.dot(weights, tl.full([BLOCK_N, 16], 1.0, tl.float32).to(weights.dtype))
        nothing = tl.zeros(acc.shape, tl.float32)
        if PAIRED:
            v_even, v_odd = _unpack_pairs(v)
            odd_next = _multiply_values(weights, v_odd, nothing)
            _, _, acc_odd = _fold(peak, total, acc_odd, peak_next, total_next, odd_next)
            acc_next = _multiply_values(weights, v_even, nothing)
        else:
            acc_next = _multiply_values(weights, v, nothing)
        peak, total, acc = _fold(peak, total, acc, peak_next, total_next, acc_next)
    else:
        weights, shrink, peak, total = _weigh(
            scores, peak, total, keys, end, positions, last_keys, heads, bias_ptr, scale, window, reach, CAUSAL,
            HAS_WINDOW, HAS_BIAS, MASKED, SOFT_CAP,
        )  # fmt: skip
        weights = weights.to(q.dtype)
        if PAIRED:
            v_even, v_odd = _unpack_pairs(v)
            acc = _multiply_values(weights, v_even, acc * shrink[:, None])
            acc_odd = _multiply_values(weights, v_odd, acc_odd * shrink[:, None])
        else:
            acc = _multiply_values(weights, v, acc * shrink[:, None])
    return acc, acc_odd, peak, total


@triton.jit
def _attend_tiles(
    acc, acc_odd, peak, total, pages, q, q_odd, low, high, begin, end, positions, last_keys, heads, cache_ptr,
    table_ptr, bias_ptr, kv_head, scale, stride_block, window, reach, HEAD_DIM: tl.constexpr, DIM_PAD: tl.constexpr,
    KV_HEADS: tl.constexpr, BLOCK_SIZE: tl.constexpr, BLOCK_N: tl.constexpr, CAUSAL: tl.constexpr,
    HAS_WINDOW: tl.constexpr, HAS_BIAS: tl.constexpr, PAIRED: tl.constexpr, MASKED: tl.constexpr, CHUNK: tl.constexpr,
    SOFT_CAP: tl.constexpr,
):  # fmt: skip
    """The tiles of keys low to high. `pages`: those of the first tile; → also those of the tile behind."""
    for start in range(low, high, BLOCK_N):
        next_pages = load_pages(table_ptr, start + BLOCK_N, end, BLOCK_SIZE, BLOCK_N)
        k, v = load_tile(
            pages, start, begin, end, cache_ptr, kv_head, stride_block, HEAD_DIM, DIM_PAD, KV_HEADS, BLOCK_SIZE,
            BLOCK_N, PAIRED, MASKED,
        )  # fmt: skip
        acc, acc_odd, peak, total = add_tile(
            acc, acc_odd, peak, total, k, v, q, q_odd, start, end, positions, last_keys, heads, bias_ptr, scale, window,
            reach, BLOCK_N, CAUSAL, HAS_WINDOW, HAS_BIAS, PAIRED, MASKED, CHUNK, SOFT_CAP,
        )  # fmt: skip
        pages = next_pages
    return acc, acc_odd, peak, total, pages


@triton.jit
def attend_keys(
    q, low, high, begin, end, clear_begin, clear_end, positions, last_keys, heads, cache_ptr, table_ptr, bias_ptr,
    kv_head, scale, stride_block, window, reach, HEAD_DIM: tl.constexpr, DIM_PAD: tl.constexpr, KV_HEADS: tl.constexpr,
    BLOCK_SIZE: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, CAUSAL: tl.constexpr,
    HAS_WINDOW: tl.constexpr, HAS_BIAS: tl.constexpr, PAIRED: tl.constexpr, CLEAR_LOOP: tl.constexpr,
    CHUNK: tl.constexpr, SOFT_CAP: tl.constexpr,
):  # fmt: skip
    """Keys low to high → weighted sums [BLOCK_M, DIM_PAD], maxima, sums. CLEAR_LOOP: tiles that all rows see whole,
    clear_begin to clear_end, have a loop without masks. PAIRED: products in float16, which holds all numbers of fp8.
    CHUNK: see add_tile."""
    peak = tl.full([BLOCK_M], float("-inf"), tl.float32)
    total = sums_of(BLOCK_M, q.dtype, CHUNK)
    if PAIRED:
        q = tl.clamp(q.to(tl.float32), -65504.0, 65504.0).to(tl.float16)
        q, q_odd = tl.split(tl.reshape(q, [BLOCK_M, DIM_PAD // 2, 2]))
        acc = tl.zeros([BLOCK_M, DIM_PAD // 2], tl.float32)
        acc_odd = acc
    else:
        acc = tl.zeros([BLOCK_M, DIM_PAD], tl.float32)
        q_odd, acc_odd = q, peak  # not used
    pages = load_pages(table_ptr, low, end, BLOCK_SIZE, BLOCK_N)
    if CLEAR_LOOP:
        clear_low = tl.minimum(tl.maximum(low, tl.cdiv(clear_begin, BLOCK_N) * BLOCK_N), high)
        clear_high = tl.maximum(clear_low, tl.minimum(high, clear_end) // BLOCK_N * BLOCK_N)
        if HAS_WINDOW:
            acc, acc_odd, peak, total, pages = _attend_tiles(
                acc, acc_odd, peak, total, pages, q, q_odd, low, clear_low, begin, end, positions, last_keys, heads,
                cache_ptr, table_ptr, bias_ptr, kv_head, scale, stride_block, window, reach, HEAD_DIM, DIM_PAD,
                KV_HEADS, BLOCK_SIZE, BLOCK_N, CAUSAL, HAS_WINDOW, HAS_BIAS, PAIRED, True, CHUNK, SOFT_CAP,
            )  # fmt: skip
        acc, acc_odd, peak, total, pages = _attend_tiles(
            acc, acc_odd, peak, total, pages, q, q_odd, clear_low, clear_high, begin, end, positions, last_keys, heads,
            cache_ptr, table_ptr, bias_ptr, kv_head, scale, stride_block, window, reach, HEAD_DIM, DIM_PAD, KV_HEADS,
            BLOCK_SIZE, BLOCK_N, CAUSAL, HAS_WINDOW, HAS_BIAS, PAIRED, False, CHUNK, SOFT_CAP,
        )  # fmt: skip
        low = clear_high
    acc, acc_odd, peak, total, pages = _attend_tiles(
        acc, acc_odd, peak, total, pages, q, q_odd, low, high, begin, end, positions, last_keys, heads, cache_ptr,
        table_ptr, bias_ptr, kv_head, scale, stride_block, window, reach, HEAD_DIM, DIM_PAD, KV_HEADS, BLOCK_SIZE,
        BLOCK_N, CAUSAL, HAS_WINDOW, HAS_BIAS, PAIRED, True, CHUNK, SOFT_CAP,
    )  # fmt: skip
    if PAIRED:
        acc = tl.interleave(acc, acc_odd)
    return acc, peak, row_sums(total)


@triton.jit
def _load_part(
    places, in_rows, acc_ptr, peak_ptr, total_ptr, HEAD_DIM: tl.constexpr, DIM_PAD: tl.constexpr
):  # fmt: skip
    dims = tl.arange(0, DIM_PAD)
    peak = tl.load(peak_ptr + places, mask=in_rows, other=float("-inf"), cache_modifier=".cg")
    total = tl.load(total_ptr + places, mask=in_rows, other=0.0, cache_modifier=".cg")
    acc_ptrs = acc_ptr + places[:, None] * HEAD_DIM + dims[None, :]
    mask = in_rows[:, None] & (dims < HEAD_DIM)[None, :]
    return peak, total, tl.load(acc_ptrs, mask=mask, other=0.0, cache_modifier=".cg")


@triton.jit
def _load_parts(
    places, in_rows, num_active, acc_ptr, peak_ptr, total_ptr, HEAD_DIM: tl.constexpr, DIM_PAD: tl.constexpr,
    SPLITS_PAD: tl.constexpr,
):  # fmt: skip
    """The partial results of each row, combined."""
    dims = tl.arange(0, DIM_PAD)
    splits = tl.arange(0, SPLITS_PAD)
    places = places[:, None] + splits[None, :]  # [rows, splits]
    there = in_rows[:, None] & (splits < num_active)[None, :]
    acc = tl.load(
        acc_ptr + places[:, :, None] * HEAD_DIM + dims[None, None, :],
        mask=there[:, :, None] & (dims < HEAD_DIM)[None, None, :], other=0.0, cache_modifier=".cg",
    )  # fmt: skip
    peak = tl.load(peak_ptr + places, mask=there, other=float("-inf"), cache_modifier=".cg")
    total = tl.load(total_ptr + places, mask=there, other=0.0, cache_modifier=".cg")
    top = tl.max(peak, 1)
    shares = tl.exp2(peak - tl.where(top == float("-inf"), 0.0, top)[:, None])
    return top, tl.sum(total * shares, 1), tl.sum(acc * shares[:, :, None], 1)  # the last one [rows, DIM_PAD]


@triton.jit
def _merge_rows(
    rows, in_rows, num_active, num_slots, acc_ptr, peak_ptr, total_ptr, out_ptr, sinks_ptr, HEAD_DIM: tl.constexpr,
    DIM_PAD: tl.constexpr, NUM_HEADS: tl.constexpr, SPLITS_PAD: tl.constexpr, IN_ORDER: tl.constexpr,
    HAS_SINKS: tl.constexpr,
):  # fmt: skip
    """The output of rows (token · heads + head) from their partial results, SPLITS_PAD at most, which lie side by side.
    IN_ORDER: folded one after the other, as a program does that attends to all keys itself."""
    dims = tl.arange(0, DIM_PAD)
    in_dims = dims < HEAD_DIM
    places = rows.to(tl.int64) * num_slots
    if IN_ORDER:
        peak = tl.full(rows.shape, float("-inf"), tl.float32)
        total = tl.zeros(rows.shape, tl.float32)
        acc = tl.zeros([rows.shape[0], DIM_PAD], tl.float32)
        for first in range(0, num_active, 8):
            for number in tl.static_range(
                8
            ):  # their loads do not wait for each other; one that is not there is nothing
                split = first + number
                peak_next, total_next, acc_next = _load_part(
                    places + split, in_rows & (split < num_active), acc_ptr, peak_ptr, total_ptr, HEAD_DIM, DIM_PAD
                )
                peak, total, acc = _fold(peak, total, acc, peak_next, total_next, acc_next)
    else:
        peak, total, acc = _load_parts(
            places, in_rows, num_active, acc_ptr, peak_ptr, total_ptr, HEAD_DIM, DIM_PAD, SPLITS_PAD
        )
    out = divide_by_sums(acc, peak, total, sinks_ptr, rows % NUM_HEADS, in_rows, HAS_SINKS)
    out_ptrs = out_ptr + rows.to(tl.int64)[:, None] * HEAD_DIM + dims[None, :]
    tl.store(out_ptrs, out.to(out_ptr.dtype.element_ty), mask=in_rows[:, None] & in_dims[None, :])


@triton.jit
def _store_whole(
    acc, peak, total, heads, out_rows, in_rows, out_ptr, sinks_ptr, HEAD_DIM: tl.constexpr, DIM_PAD: tl.constexpr,
    HAS_SINKS: tl.constexpr,
):  # fmt: skip
    dims = tl.arange(0, DIM_PAD)
    out = divide_by_sums(acc, peak, total, sinks_ptr, heads, in_rows, HAS_SINKS)
    out_ptrs = out_ptr + out_rows[:, None] * HEAD_DIM + dims[None, :]
    tl.store(out_ptrs, out.to(out_ptr.dtype.element_ty), mask=in_rows[:, None] & (dims < HEAD_DIM)[None, :])


@triton.jit
def _store_part(
    acc, peak, total, places, in_rows, acc_ptr, peak_ptr, total_ptr, HEAD_DIM: tl.constexpr, DIM_PAD: tl.constexpr
):  # fmt: skip
    dims = tl.arange(0, DIM_PAD)
    tl.store(peak_ptr + places, peak, mask=in_rows, cache_modifier=".cg")
    tl.store(total_ptr + places, total, mask=in_rows, cache_modifier=".cg")
    acc_ptrs = acc_ptr + places[:, None] * HEAD_DIM + dims[None, :]
    tl.store(acc_ptrs, acc, mask=in_rows[:, None] & (dims < HEAD_DIM)[None, :], cache_modifier=".cg")


@triton.jit
def store_result(
    acc, peak, total, query_start, first_row, num_rows, kv_head, place, split, num_active, num_before, num_slots,
    out_ptr, acc_ptr, peak_ptr, total_ptr, arrived_ptr, sinks_ptr, HEAD_DIM: tl.constexpr, DIM_PAD: tl.constexpr,
    GROUP: tl.constexpr, KV_HEADS: tl.constexpr, BLOCK_M: tl.constexpr, SPLIT: tl.constexpr, MERGE_ROWS: tl.constexpr,
    SPLITS_PAD: tl.constexpr, IN_ORDER: tl.constexpr, KEEP_PARTS: tl.constexpr, SUFFIX: tl.constexpr,
    HAS_SINKS: tl.constexpr,
):  # fmt: skip
    """The rows of a tile: output, or a part of it if others of `num_active` splits have more. The last of them to
    arrive (counted at `place`) merges the parts. SUFFIX: a kernel before this one left `num_before` parts, which are
    merged too. KEEP_PARTS: a later one merges."""
    rows = first_row + tl.arange(0, BLOCK_M)
    in_rows = rows < num_rows
    first_head = query_start.to(tl.int64) * (KV_HEADS * GROUP) + kv_head * GROUP
    out_rows = first_head + rows // GROUP * (KV_HEADS * GROUP) + rows % GROUP
    places = out_rows * num_slots
    is_whole = num_active <= 1
    if KEEP_PARTS:
        is_whole = False
    if is_whole:
        if SUFFIX:
            for slot in range(num_before):
                peak_next, total_next, acc_next = _load_part(
                    places + slot, in_rows, acc_ptr, peak_ptr, total_ptr, HEAD_DIM, DIM_PAD
                )
                peak, total, acc = _fold(peak, total, acc, peak_next, total_next, acc_next)
        heads = kv_head * GROUP + rows % GROUP
        _store_whole(
            acc, peak, total, heads, out_rows, in_rows, out_ptr, sinks_ptr, HEAD_DIM, DIM_PAD, HAS_SINKS
        )  # fmt: skip
    elif SPLIT:
        places += num_before + split
        _store_part(acc, peak, total, places, in_rows, acc_ptr, peak_ptr, total_ptr, HEAD_DIM, DIM_PAD)
        if not KEEP_PARTS:
            arrived_ptr += place * KV_HEADS + kv_head
            tl.debug_barrier()  # all threads have stored before one of them says so
            if tl.atomic_add(arrived_ptr, 1, sem="acq_rel", scope="gpu") == num_active - 1:
                tl.store(arrived_ptr, 0)
                for row in range(first_row, tl.minimum(first_row + BLOCK_M, num_rows), MERGE_ROWS):
                    merged = row + tl.arange(0, MERGE_ROWS)
                    _merge_rows(
                        first_head + merged // GROUP * (KV_HEADS * GROUP) + merged % GROUP, merged < num_rows,
                        num_before + num_active, num_slots, acc_ptr, peak_ptr, total_ptr, out_ptr, sinks_ptr, HEAD_DIM,
                        DIM_PAD, KV_HEADS * GROUP, SPLITS_PAD, IN_ORDER, HAS_SINKS,
                    )  # fmt: skip


@triton.jit
def _find_work(
    query_start_ptr, seq_lens_ptr, num_requests, shortest, longest, num_splits, min_share, tiles_each,
    GROUP: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, TILES: tl.constexpr, REQUESTS_PAD: tl.constexpr,
):  # fmt: skip
    """→ the request of this program, its tile, the tile's split, how many tiles of keys a split has at least, and the
    number under which the tile's programs are counted. The request is `num_requests` for a program without work."""
    place, split = tl.program_id(0), tl.program_id(2)
    if TILES == "shared":
        request, tile, split, min_share, place = find_share(
            query_start_ptr, seq_lens_ptr, num_requests, shortest, longest, num_splits, min_share, GROUP, BLOCK_M,
            BLOCK_N, REQUESTS_PAD,
        )  # fmt: skip
    elif TILES == "each":
        request, tile = place // tiles_each, place % tiles_each
    else:
        place = tl.num_programs(0) - 1 - place  # later rows see more keys: they begin first
        request = _find_request(query_start_ptr, place, num_requests, GROUP, BLOCK_M)
        tile = place - (tl.load(query_start_ptr + request) * GROUP // BLOCK_M + request)
    return request, tile, split, min_share, place


@triton.jit(
    do_not_specialize=[
        "stride_table", "num_requests", "shortest", "longest", "window", "reach", "num_splits", "min_share",
        "tiles_each", "prefix_splits", "num_slots",
    ]
)  # fmt: skip
def attention_kernel(
    q_ptr, out_ptr, cache_ptr, table_ptr, query_start_ptr, seq_lens_ptr, bias_ptr, acc_ptr, peak_ptr, total_ptr,
    arrived_ptr, begins_ptr, ends_ptr, scale, stride_q_token, stride_q_head, stride_block, stride_table, num_requests,
    shortest, longest, window, reach, num_splits, min_share, tiles_each, prefix_splits, num_slots,
    HEAD_DIM: tl.constexpr, DIM_PAD: tl.constexpr, GROUP: tl.constexpr, KV_HEADS: tl.constexpr,
    BLOCK_SIZE: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, CAUSAL: tl.constexpr,
    HAS_WINDOW: tl.constexpr, HAS_BIAS: tl.constexpr, PAIRED: tl.constexpr, CLEAR_LOOP: tl.constexpr,
    TILES: tl.constexpr, REQUESTS_PAD: tl.constexpr, SPLIT: tl.constexpr, CHUNK: tl.constexpr,
    MERGE_ROWS: tl.constexpr, SPLITS_PAD: tl.constexpr, PREFIX_TILE: tl.constexpr, KEEP_PARTS: tl.constexpr,
    HAS_ENDS: tl.constexpr, HAS_SINKS: tl.constexpr, SOFT_CAP: tl.constexpr, DEPENDENT: tl.constexpr,
):  # fmt: skip
    """Grid: tiles of rows, KV heads, splits. Only requests with shortest … longest query tokens take part.

    TILES: which tiles of rows there are: "each" request has `tiles_each`; "found": as many as it needs, found by
    search; "shared": tiles and splits are found by find_share. SPLIT: the keys of a tile are divided among programs,
    and the last of them to arrive merges MERGE_ROWS rows at a time. CHUNK: see split_of; without SPLIT a program
    attends to the chunks one after the other. PREFIX_TILE > 0: a request's keys begin at begins_ptr; those before it
    were attended to by a launch with KEEP_PARTS, in prefix_splits, by tiles of so many keys. Its results stay in parts,
    in the num_slots of each row. HAS_ENDS: see _last_key. HAS_SINKS: bias_ptr has them, see divide_by_sums.

    What differs from batch to batch is no constant where that costs nothing: each value would be another kernel.
    """
    request, tile, split, min_share, place = _find_work(
        query_start_ptr, seq_lens_ptr, num_requests, shortest, longest, num_splits, min_share, tiles_each, GROUP,
        BLOCK_M, BLOCK_N, TILES, REQUESTS_PAD,
    )  # fmt: skip
    has_request = True
    if TILES == "shared":
        has_request = request < num_requests
        request = tl.minimum(request, num_requests - 1)
    query_start = tl.load(query_start_ptr + request)
    query_len = tl.load(query_start_ptr + request + 1) - query_start
    seq_len = tl.load(seq_lens_ptr + request)
    num_rows = query_len * GROUP
    first_row = tile * BLOCK_M
    if DEPENDENT:
        wait_for_kernel_before()
    if (not has_request) | (first_row >= num_rows) | (query_len < shortest) | (query_len > longest):
        return
    context = seq_len - query_len  # position of the first query
    first_token = first_row // GROUP
    last_token = (tl.minimum(first_row + BLOCK_M, num_rows) - 1) // GROUP
    last_key = _last_key(ends_ptr, query_start + last_token, context + last_token, HAS_ENDS)
    begin, end = _visible_keys(context, first_token, last_token, last_key, seq_len, window, CAUSAL, HAS_WINDOW)
    num_before = 0
    if PREFIX_TILE > 0:
        begin = tl.load(begins_ptr + request)
        _, _, num_before = split_of(0, 0, begin, prefix_splits, min_share, PREFIX_TILE, 0, False)
    if SPLIT:
        low, high, num_active = split_of(split, begin, end, num_splits, min_share, BLOCK_N, CHUNK, PREFIX_TILE > 0)
        if KEEP_PARTS:
            if split >= num_active:
                return
        elif split >= tl.maximum(num_active, 1):
            return
    else:
        low, high, num_active = begin // BLOCK_N * BLOCK_N, end, 1
        if PREFIX_TILE > 0:
            low = begin
    # What every row sees whole
    clear_begin, clear_end = 0, end
    if CAUSAL:
        clear_end = tl.minimum(end, _last_key(ends_ptr, query_start + first_token, context + first_token, HAS_ENDS) + 1)
    elif HAS_WINDOW:
        clear_end = tl.minimum(end, context + first_token + window)
    if HAS_WINDOW:
        clear_begin = tl.maximum(0, context + last_token - window + 1)

    kv_head = tl.program_id(1)
    rows = first_row + tl.arange(0, BLOCK_M)
    tokens = rows // GROUP
    heads = kv_head * GROUP + rows % GROUP
    positions = context + tokens
    last_keys = _last_key(ends_ptr, query_start + tl.minimum(tokens, last_token), positions, HAS_ENDS)
    dims = tl.arange(0, DIM_PAD)
    q_ptrs = q_ptr + (query_start + tokens).to(tl.int64) * stride_q_token + heads * stride_q_head
    row_mask = (rows < num_rows)[:, None] & (dims < HEAD_DIM)[None, :]
    q = tl.load(q_ptrs[:, None] + dims[None, :], mask=row_mask, other=0.0)
    table_ptr += request.to(tl.int64) * stride_table
    acc, peak, total = attend_keys(
        q, low, high, begin, end, clear_begin, clear_end, positions, last_keys, heads, cache_ptr, table_ptr, bias_ptr,
        kv_head, scale, stride_block, window, reach, HEAD_DIM, DIM_PAD, KV_HEADS, BLOCK_SIZE, BLOCK_M, BLOCK_N, CAUSAL,
        HAS_WINDOW, HAS_BIAS, PAIRED, CLEAR_LOOP, CHUNK, SOFT_CAP,
    )  # fmt: skip
    store_result(
        acc, peak, total, query_start, first_row, num_rows, kv_head, place, split, num_active, num_before, num_slots,
        out_ptr, acc_ptr, peak_ptr, total_ptr, arrived_ptr, bias_ptr, HEAD_DIM, DIM_PAD, GROUP, KV_HEADS, BLOCK_M,
        SPLIT, MERGE_ROWS, SPLITS_PAD, CHUNK > 0, KEEP_PARTS, PREFIX_TILE > 0, HAS_SINKS,
    )  # fmt: skip
