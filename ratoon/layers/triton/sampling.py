"""Choosing tokens on a GPU: the greedy choice, the draw and its filters, in a few passes over the logits.

Nothing waits for the device, and shapes depend on the arguments' shapes alone: CUDA graphs can hold every function. A
row is cut into chunks of fixed length, whatever the batch, so that a row's token does not depend on other rows.
layers/sampling.py has the definitions; there the sums are exact, here they are rounded, so that a number that falls
within about 1e-7 of a token's border may give its neighbour.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from ratoon.layers.triton.launch import launch

Tensor = torch.Tensor

CHUNK = 4096  # columns that one program reads
# For rows with filters, the largest tokens are listed, and usually all that the filters leave is among them.
GROUP = 32  # columns whose maximum is stored
WANTED = 256  # a list has at least as many tokens
GROUP_ROOM = 512  # groups that may hold them; more are possible only where many are equal
LIST_ROOM = 1024  # tokens of a list
GROUPS_AT_ONCE = 128
# Other rows are read several times.
PIVOTS = 8  # thresholds that are examined in one pass over a row
BLOCK = 2048  # columns at a time in such a pass

_INF = tl.constexpr(float("inf"))
# In place of a row's threshold
_NO_FILTER = tl.constexpr(-1)
_NOT_FOUND = tl.constexpr(-2)
_DRAWN = tl.constexpr(-3)  # its token is known
# Of the rounding to multiples of 2^-52, as in exact_probabilities
_ROUNDING = tl.constexpr(2.0**-29)
_LEAST_KEY = tl.constexpr((127 - 52) << 23)  # bits of 2^-52, the least probability that is not 0
_LOG2_E = tl.constexpr(1.4426950216293335)  # rounded to float32
_LOG2_E_REST = tl.constexpr(1.9259629911266175e-8)
_LN_2 = tl.constexpr(0.6931471805599453)


def sample_plain(
    logits: Tensor,  # [R, V] float32, bfloat16 or float16
    temperature: Tensor,  # [R] float32; 0: greedy
    top_k: Tensor,  # [R] int64
    top_p: Tensor,  # [R] float64
    min_p: Tensor,  # [R] float32
    uniforms: Tensor,  # [R] float64
    draws: bool,  # whether a row may have a temperature
    filters: bool,  # whether such a row may have filters
) -> tuple[Tensor, Tensor]:
    """Token ids [R] int64 and bad rows [R] bool; see layers/sampling.py."""
    num_rows, num_columns = logits.shape
    num_chunks = triton.cdiv(num_columns, CHUNK)
    device = logits.device
    maxima = torch.empty(num_rows, num_chunks, dtype=torch.float32, device=device)
    sums = torch.empty_like(maxima)
    token_ids = torch.empty(num_rows, dtype=torch.int64, device=device)
    bad = torch.empty(num_rows, dtype=torch.bool, device=device)
    if num_rows == 0:
        return token_ids, bad
    row = (logits, logits.stride(0), num_columns, temperature)
    sizes = {"CHUNK": CHUNK, "CHUNKS": triton.next_power_of_2(num_chunks)}
    of_groups = threshold = masses = maxima  # not read
    if filters:
        of_groups = torch.empty(num_rows, triton.cdiv(num_columns, GROUP), dtype=torch.float32, device=device)
        threshold = torch.empty(num_rows, dtype=torch.int32, device=device)
        masses = torch.empty(num_rows, num_chunks, dtype=torch.float64, device=device)
    launch(
        _reduce_chunks, (num_chunks, num_rows),
        *row, maxima, sums, of_groups, num_chunks, of_groups.shape[1] if filters else 0, draws, CHUNK, GROUP,
        num_warps=4,
    )  # fmt: skip
    if filters:
        wanted = (*row, top_k, top_p, min_p, maxima, sums, threshold)
        places = torch.empty(num_rows, GROUP_ROOM, dtype=torch.int32, device=device)
        listed = torch.empty(num_rows, LIST_ROOM, dtype=torch.float32, device=device)
        listed_ids = torch.empty(num_rows, LIST_ROOM, dtype=torch.int32, device=device)
        launch(
            _draw_from_list, (num_rows,),
            *wanted, uniforms, of_groups, places, listed, listed_ids, token_ids, bad, num_chunks, of_groups.shape[1],
            sizes["CHUNKS"], GROUP, triton.next_power_of_2(of_groups.shape[1]), WANTED, GROUP_ROOM, LIST_ROOM,
            GROUPS_AT_ONCE, num_warps=8,
        )  # fmt: skip
        launch(
            _find_threshold, (num_rows,), *wanted, listed, num_chunks, sizes["CHUNKS"], BLOCK, PIVOTS, LIST_ROOM,
            num_warps=8,
        )  # fmt: skip
        launch(
            _sum_kept, (num_chunks, num_rows), *row, maxima, sums, threshold, masses, num_chunks, **sizes, num_warps=4
        )
    launch(
        _pick, (num_rows,),
        *row, uniforms, maxima, sums, threshold, masses, token_ids, bad, num_chunks, draws, filters, **sizes,
        num_warps=8,
    )  # fmt: skip
    return token_ids, bad


def greedy(logits: Tensor) -> tuple[Tensor, Tensor]:
    """The same where all rows are greedy."""
    numbers = logits.new_empty(0, dtype=torch.float32)  # not read
    return sample_plain(logits, *(numbers,) * 5, draws=False, filters=False)


# ---------------------------------------------------------------------------------------------------------------------
# Parts of kernels


@triton.jit
def _exp(x):
    """Within two units of the last place. (tl.exp loses digits where x is large: it rounds x · log2(e).)"""
    x = tl.maximum(x, -200.0)  # 0; the product below would make NaN of -inf
    whole = x * _LOG2_E
    rest = tl.fma(x, _LOG2_E, -whole) + x * _LOG2_E_REST
    return tl.exp2(whole) * tl.fma(rest, _LN_2, 1.0)


@triton.jit
def _divide(x, divisor):
    """Rounded correctly, as a CPU divides, in half the time of tl.math.div_rn: one step of Newton's method corrects the
    product with the reciprocal. Infinite quotients need no correction, which would make NaN of them."""
    reciprocal = tl.math.div_rn(1.0, divisor)
    quotient = x * reciprocal
    corrected = tl.fma(tl.fma(-quotient, divisor, x), reciprocal, quotient)
    return tl.where(tl.abs(quotient) < _INF, corrected, quotient)


@triton.jit
def _divisor(temperature, row):
    value = tl.load(temperature + row)
    return tl.where(value == 0, 1.0, value)


@triton.jit
def _load_scaled(logits, columns, num_columns, divisor):
    """Logits over temperature; -inf past the end, inf for NaN, which marks the row as bad."""
    x = tl.load(logits + columns, mask=columns < num_columns, other=-_INF).to(tl.float32)
    x = _divide(x, divisor)
    return tl.where(x == x, x, _INF)


@triton.jit
def _load_logits(logits, columns, num_columns):
    x = tl.load(logits + columns, mask=columns < num_columns, other=-_INF).to(tl.float32)
    return tl.where(x == x, x, _INF)


@triton.jit
def _is_finite(x):
    return (x > -_INF) & (x < _INF)


@triton.jit
def _chunk_weights(tops, sums):
    """What each chunk adds to the sum of exponentials, the row's peak subtracted: [CHUNKS] float64."""
    return sums.to(tl.float64) * tl.exp((tops - tl.max(tops, 0)).to(tl.float64))


@triton.jit
def _probabilities(x, peak, total):
    """As exact_probabilities: multiples of 2^-52."""
    return (_divide(_exp(x - peak), total) + _ROUNDING) - _ROUNDING


@triton.jit
def _first_above(weights, places, target):
    """The first place whose cumulative weight is above the target, or the last that weighs something. -1: none."""
    cumulative = tl.cumsum(weights, 0)
    weighs = weights > 0
    last = tl.max(tl.where(weighs, places, -1), 0)
    return tl.minimum(tl.min(tl.where(weighs & (cumulative > target), places, 2147483647), 0), last)


@triton.jit
def _ordered(x):
    """Floats as int32 in the same order."""
    bits = (x + 0.0).to(tl.int32, bitcast=True)  # -0 equals 0
    return bits ^ ((bits >> 31) & 0x7FFFFFFF)


@triton.jit
def _kth_largest(keys, k):
    """Tries its bits from the highest to the lowest. The least int32 if there are fewer than k keys."""
    found = tl.where(tl.sum((keys >= 0).to(tl.int32), 0) >= k, 0, -2147483648)
    for bit in range(31):
        raised = found + (1 << (30 - bit))
        found = tl.where(tl.sum((keys >= raised).to(tl.int32), 0) >= k, raised, found)
    return found


@triton.jit
def _least_of_mass(bits, masses, limit):
    """The largest bits v for which the entries with bits ≥ v have at least this mass together; 0 if none have."""
    found = tl.full([], 0, tl.int32)
    for bit in range(31):
        raised = found + (1 << (30 - bit))
        found = tl.where(tl.sum(tl.where(bits >= raised, masses, 0.0), 0) >= limit, raised, found)
    return found


@triton.jit
def _has_filter(temperature, top_k, top_p, min_p):
    return (temperature != 0) & ((top_k > 0) | (top_p < 1) | (min_p > 0))


# ---------------------------------------------------------------------------------------------------------------------
# Kernels


@triton.jit(do_not_specialize=["num_groups"])
def _reduce_chunks(
    logits, row_stride, num_columns, temperature, maxima, sums, of_groups, num_chunks, num_groups,
    DRAWS: tl.constexpr, CHUNK: tl.constexpr, GROUP: tl.constexpr,
):  # fmt: skip
    """Of each chunk: the largest scaled logit, and the sum of exponentials, that one subtracted. Of the first
    `num_groups` groups of columns: the largest. With and without groups the same binary runs, so that sums are rounded
    alike and a row draws the same whether others of its batch have filters or not."""
    chunk, row = tl.program_id(0), tl.program_id(1).to(tl.int64)
    place = row * num_chunks + chunk
    if DRAWS:
        groups = chunk * (CHUNK // GROUP) + tl.arange(0, CHUNK // GROUP)
        columns = groups[:, None] * GROUP + tl.arange(0, GROUP)[None, :]
        x = _load_scaled(logits + row * row_stride, columns, num_columns, _divisor(temperature, row))
        tops = tl.max(x, 1)
        tl.store(of_groups + row * num_groups + groups, tops, mask=groups < num_groups)
        top = tl.max(tops, 0)
        tl.store(sums + place, tl.sum(tl.sum(_exp(x - tl.where(_is_finite(top), top, 0.0)), 1), 0))
    else:
        columns = chunk * CHUNK + tl.arange(0, CHUNK)
        top = tl.max(_load_logits(logits + row * row_stride, columns, num_columns), 0)
    tl.store(maxima + place, top)


@triton.jit
def _pick(
    logits, row_stride, num_columns, temperature, uniforms, maxima, sums, threshold, masses, token_ids, bad, num_chunks,
    DRAWS: tl.constexpr, FILTERS: tl.constexpr, CHUNK: tl.constexpr, CHUNKS: tl.constexpr,
):  # fmt: skip
    """The token of a row: first its chunk, then its place there."""
    row = tl.program_id(0).to(tl.int64)
    if FILTERS:
        least = tl.load(threshold + row)
        if least == _DRAWN:
            return
    chunks = tl.arange(0, CHUNKS)
    of_row = row * num_chunks + chunks
    tops = tl.load(maxima + of_row, mask=chunks < num_chunks, other=-_INF)
    peak = tl.max(tops, 0)
    is_bad = (peak == _INF) | (peak == -_INF)
    chunk = tl.min(tl.where(tops == peak, chunks, CHUNKS), 0)
    divisor = 1.0
    if DRAWS:
        is_greedy = tl.load(temperature + row) == 0
        divisor = _divisor(temperature, row)
        weights = _chunk_weights(tops, tl.load(sums + of_row, mask=chunks < num_chunks, other=0.0))
        total = tl.sum(weights, 0).to(tl.float32)
        if FILTERS:
            kept = tl.load(masses + of_row, mask=chunks < num_chunks, other=0.0)
            weights = tl.where(least >= 0, kept, weights)
        target = tl.load(uniforms + row) * tl.sum(weights, 0)
        drawn = tl.maximum(_first_above(weights, chunks, target), 0)
        own = tl.sum(tl.where(chunks == drawn, weights, 0.0), 0)
        before = tl.sum(tl.where(chunks < drawn, weights, 0.0), 0)
        share = (target - before) / own  # of the chunk's weight, before the token
        chunk = tl.where(is_greedy, chunk, drawn)
    columns = chunk * CHUNK + tl.arange(0, CHUNK)
    if DRAWS:
        x = _load_scaled(logits + row * row_stride, columns, num_columns, divisor)
        inside = _exp(x - tl.max(x, 0))
        if FILTERS:
            p = _probabilities(x, peak, total)
            p = tl.where(p.to(tl.int32, bitcast=True) >= least, p, 0.0)
            inside = tl.where(least >= 0, p, inside)
        inside = inside.to(tl.float64)
        token = _first_above(inside, columns, share * tl.sum(inside, 0))
        token = tl.where(is_greedy, tl.min(tl.where(x == peak, columns, num_columns), 0), token)
    else:
        x = _load_logits(logits + row * row_stride, columns, num_columns)
        token = tl.min(tl.where(x == peak, columns, num_columns), 0)
    token = tl.where(is_bad, 0, tl.minimum(tl.maximum(token, 0), num_columns - 1))
    tl.store(token_ids + row, token.to(tl.int64))
    tl.store(bad + row, is_bad)


@triton.jit
def _draw_from_list(
    logits, row_stride, num_columns, temperature, top_k, top_p, min_p, maxima, sums, threshold, uniforms, of_groups,
    places, listed, listed_ids, token_ids, bad, num_chunks, num_groups,
    CHUNKS: tl.constexpr, GROUP: tl.constexpr, GROUPS: tl.constexpr, WANTED: tl.constexpr, GROUP_ROOM: tl.constexpr,
    LIST_ROOM: tl.constexpr, AT_ONCE: tl.constexpr,
):  # fmt: skip
    """The token of a row with filters, if all that they leave is among its largest tokens, which are listed in the
    order of their ids."""
    row = tl.program_id(0).to(tl.int64)
    chunks = tl.arange(0, CHUNKS)
    of_row = row * num_chunks + chunks
    tops = tl.load(maxima + of_row, mask=chunks < num_chunks, other=-_INF)
    peak = tl.max(tops, 0)
    k, p, m = tl.load(top_k + row), tl.load(top_p + row), tl.load(min_p + row)
    if (_has_filter(tl.load(temperature + row), k, p, m) & _is_finite(peak)) == 0:
        tl.store(threshold + row, _NO_FILTER)
        return
    result = tl.full([], _NOT_FOUND, tl.int32)
    total = tl.sum(_chunk_weights(tops, tl.load(sums + of_row, mask=chunks < num_chunks, other=0.0)), 0)
    total = total.to(tl.float32)
    groups = tl.arange(0, GROUPS)
    keys = _ordered(tl.load(of_groups + row * num_groups + groups, mask=groups < num_groups, other=-_INF))
    least = _kth_largest(keys, WANTED)
    chosen = (keys >= least) & (groups < num_groups)
    num_chosen = tl.sum(chosen.to(tl.int32), 0)
    if num_chosen <= GROUP_ROOM:
        tl.store(places + row * GROUP_ROOM + tl.cumsum(chosen.to(tl.int32), 0) - 1, groups, mask=chosen)
        tl.debug_barrier()
        divisor = _divisor(temperature, row)
        num_listed = 0
        for start in range(0, GROUP_ROOM, AT_ONCE):
            turn = start + tl.arange(0, AT_ONCE)
            of_turn = tl.load(places + row * GROUP_ROOM + turn, mask=turn < num_chosen, other=num_groups)
            columns = of_turn[:, None] * GROUP + tl.arange(0, GROUP)[None, :]  # past the end where there is no group
            columns = tl.reshape(columns, [AT_ONCE * GROUP])
            x = _load_scaled(logits + row * row_stride, columns, num_columns, divisor)
            is_listed = (_ordered(x) >= least) & (columns < num_columns)
            at = num_listed + tl.cumsum(is_listed.to(tl.int32), 0) - 1
            fits = is_listed & (at < LIST_ROOM)
            tl.store(listed + row * LIST_ROOM + at, _probabilities(x, peak, total), mask=fits)
            tl.store(listed_ids + row * LIST_ROOM + at, columns, mask=fits)
            num_listed += tl.sum(is_listed.to(tl.int32), 0)
        tl.debug_barrier()
        if num_listed <= LIST_ROOM:
            slots = tl.arange(0, LIST_ROOM)
            probabilities = tl.load(listed + row * LIST_ROOM + slots, mask=slots < num_listed, other=0.0)
            bits = probabilities.to(tl.int32, bitcast=True)
            last = tl.min(tl.where(slots < num_listed, bits, 2147483647), 0)
            is_whole = num_listed == num_columns
            largest = tl.max(probabilities, 0)
            floor = (m * largest).to(tl.int32, bitcast=True)
            if (k > 0) & (k <= num_listed):
                floor = tl.maximum(floor, _kth_largest(bits, k))
            only_top_p = (k == 0) & (m == 0) & (is_whole == 0)
            masses = probabilities.to(tl.float64)
            bound = floor
            if p < 1:
                # Where only top_p cuts, what is left is all; its sum differs from 1 by rounding alone.
                whole = tl.where(only_top_p, 1.0, tl.sum(tl.where(bits >= floor, masses, 0.0), 0))
                bound = tl.maximum(floor, _least_of_mass(bits, masses, p * whole))
                bound = tl.minimum(bound, largest.to(tl.int32, bitcast=True))
            if (last < floor) | (last == 0) | is_whole | (only_top_p & (bound > last)):
                kept = tl.where(bits >= bound, masses, 0.0)
                place = _first_above(kept, slots, tl.load(uniforms + row) * tl.sum(kept, 0))
                token = tl.load(listed_ids + row * LIST_ROOM + tl.maximum(place, 0))
                tl.store(token_ids + row, token.to(tl.int64))
                tl.store(bad + row, False)
                result = tl.full([], _DRAWN, tl.int32)
    tl.store(threshold + row, result)


@triton.jit
def _count_above(
    logits, num_columns: tl.constexpr, divisor, peak, total, pivots, BLOCK: tl.constexpr, PIVOTS: tl.constexpr
):
    """How many probabilities of a row have bits above each pivot, and their exact sums."""
    counts = tl.zeros([PIVOTS], tl.int32)
    masses = tl.zeros([PIVOTS], tl.float64)
    for start in range(0, num_columns, BLOCK):
        x = _load_scaled(logits, start + tl.arange(0, BLOCK), num_columns, divisor)
        p = _probabilities(x, peak, total)
        above = p.to(tl.int32, bitcast=True)[:, None] > pivots[None, :]  # [BLOCK, PIVOTS]
        counts += tl.sum(above.to(tl.int32), 0)
        masses += tl.sum(tl.where(above, p.to(tl.float64)[:, None], 0.0), 0)
    return counts, masses


@triton.jit
def _list_between(logits, num_columns: tl.constexpr, divisor, peak, total, low, high, listed, BLOCK: tl.constexpr):
    """Store the probabilities of a row whose bits are above `low` and not above `high`. Returns their number."""
    num_listed = 0
    for start in range(0, num_columns, BLOCK):
        x = _load_scaled(logits, start + tl.arange(0, BLOCK), num_columns, divisor)
        p = _probabilities(x, peak, total)
        bits = p.to(tl.int32, bitcast=True)
        between = (bits > low) & (bits <= high)
        tl.store(listed + num_listed + tl.cumsum(between.to(tl.int32), 0) - 1, p, mask=between)
        num_listed += tl.sum(between.to(tl.int32), 0)
    return num_listed


@triton.jit
def _search(
    logits, num_columns: tl.constexpr, divisor, peak, total, low, high, limit, listed,
    BY_MASS: tl.constexpr, BLOCK: tl.constexpr, PIVOTS: tl.constexpr, LIST_ROOM: tl.constexpr,
):  # fmt: skip
    """The least bits v above `low` for which the probabilities above v number fewer than `limit`, or (BY_MASS) have
    together less than `limit` of the mass above `low`. Any value that separates the same tokens may be returned.

    Bits of positive floats are in the order of the floats. At `low` the condition is false, at `high` it is true.
    Passes over the row narrow the two down until what lies between them fits into a list.
    """
    places = tl.arange(0, PIVOTS)
    num_low, num_high = num_columns, 0
    whole, mass_high = tl.full([], 0.0, tl.float64), tl.full([], 0.0, tl.float64)
    is_first = True
    while (high - low > 1) & (is_first | (num_low - num_high > LIST_ROOM)):
        pivots = (low + (high - low).to(tl.int64) * places // PIVOTS).to(tl.int32)  # the first is `low`
        counts, masses = _count_above(logits, num_columns, divisor, peak, total, pivots, BLOCK, PIVOTS)
        if BY_MASS:
            whole = tl.where(is_first, tl.max(masses, 0), whole)
            holds = masses < limit * whole
        else:
            holds = counts < limit
        num_low = tl.min(tl.where(holds, num_low, counts), 0)
        num_high = tl.max(tl.where(holds, counts, num_high), 0)
        mass_high = tl.max(tl.where(holds, masses, mass_high), 0)
        low = tl.max(tl.where(holds, low, pivots), 0)
        high = tl.min(tl.where(holds, pivots, high), 0)
        is_first = False
    result = low + 1
    if high - low > 1:
        tl.debug_barrier()  # an earlier search has read its list
        num_listed = _list_between(logits, num_columns, divisor, peak, total, low, high, listed, BLOCK)
        tl.debug_barrier()
        slots = tl.arange(0, LIST_ROOM)
        p = tl.load(listed + slots, mask=slots < num_listed, other=0.0)
        bits = p.to(tl.int32, bitcast=True)
        if BY_MASS:
            result = tl.maximum(result, _least_of_mass(bits, p.to(tl.float64), limit * whole - mass_high))
        else:
            result = tl.maximum(result, _kth_largest(bits, limit - num_high))
    return result


@triton.jit
def _find_threshold(
    logits, row_stride, num_columns: tl.constexpr, temperature, top_k, top_p, min_p, maxima, sums, threshold, listed,
    num_chunks, CHUNKS: tl.constexpr, BLOCK: tl.constexpr, PIVOTS: tl.constexpr, LIST_ROOM: tl.constexpr,
):  # fmt: skip
    """The bits of the least probability that a row's filters keep, or a value that separates the same tokens."""
    row = tl.program_id(0).to(tl.int64)
    if tl.load(threshold + row) == _NOT_FOUND:
        chunks = tl.arange(0, CHUNKS)
        of_row = row * num_chunks + chunks
        tops = tl.load(maxima + of_row, mask=chunks < num_chunks, other=-_INF)
        peak = tl.max(tops, 0)
        total = tl.sum(_chunk_weights(tops, tl.load(sums + of_row, mask=chunks < num_chunks, other=0.0)), 0)
        total = total.to(tl.float32)
        k, p, least = tl.load(top_k + row), tl.load(top_p + row), tl.load(min_p + row)
        divisor = _divisor(temperature, row)
        logits += row * row_stride
        listed += row * LIST_ROOM
        largest = _probabilities(peak, peak, total)
        high = largest.to(tl.int32, bitcast=True)
        result = (least * largest).to(tl.int32, bitcast=True)
        if (k > 0) & (k < num_columns):
            low = tl.full([], _LEAST_KEY - 1, tl.int32)
            kth = _search(
                logits, num_columns, divisor, peak, total, low, high, k, listed, False, BLOCK, PIVOTS, LIST_ROOM
            )
            result = tl.maximum(result, kth)
        if p < 1:
            low = tl.maximum(result, _LEAST_KEY) - 1
            nucleus = _search(
                logits, num_columns, divisor, peak, total, low, high, p, listed, True, BLOCK, PIVOTS, LIST_ROOM
            )
            result = tl.maximum(result, nucleus)
        tl.store(threshold + row, result)


@triton.jit
def _sum_kept(
    logits, row_stride, num_columns, temperature, maxima, sums, threshold, masses, num_chunks,
    CHUNK: tl.constexpr, CHUNKS: tl.constexpr,
):  # fmt: skip
    """The mass of each chunk that a row's filters keep."""
    chunk, row = tl.program_id(0), tl.program_id(1).to(tl.int64)
    least = tl.load(threshold + row)
    if least >= 0:
        chunks = tl.arange(0, CHUNKS)
        of_row = row * num_chunks + chunks
        tops = tl.load(maxima + of_row, mask=chunks < num_chunks, other=-_INF)
        total = tl.sum(_chunk_weights(tops, tl.load(sums + of_row, mask=chunks < num_chunks, other=0.0)), 0)
        columns = chunk * CHUNK + tl.arange(0, CHUNK)
        x = _load_scaled(logits + row * row_stride, columns, num_columns, _divisor(temperature, row))
        p = _probabilities(x, tl.max(tops, 0), total.to(tl.float32))
        kept = tl.where(p.to(tl.int32, bitcast=True) >= least, p, 0.0).to(tl.float64)
        tl.store(masses + row * num_chunks + chunk, tl.sum(kept, 0))
