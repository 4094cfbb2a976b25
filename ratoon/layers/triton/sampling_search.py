"""The threshold of a row's filters by several passes over the row, by one program: for rows whose largest tokens, and a
sample, do not tell it."""

import triton
import triton.language as tl

from ratoon.layers.triton.sampling_parts import bits_of, least_of_mass, load_scaled, probabilities_of

_LEAST_KEY = tl.constexpr((127 - 52) << 23)  # bits of 2^-52, the least probability that is not 0


@triton.jit
def _count_above(
    logits, num_columns: tl.constexpr, divisor, peak, total, pivots, BLOCK: tl.constexpr, PIVOTS: tl.constexpr
):
    """How many probabilities of a row have bits above each pivot, and their exact sums."""
    counts = tl.zeros([PIVOTS], tl.int32)
    masses = tl.zeros([PIVOTS], tl.float64)
    for start in range(0, num_columns, BLOCK):
        x = load_scaled(logits, start + tl.arange(0, BLOCK), num_columns, divisor)
        p = probabilities_of(x, peak, total)
        above = bits_of(p)[:, None] > pivots[None, :]  # [BLOCK, PIVOTS]
        counts += tl.sum(above.to(tl.int32), 0)
        masses += tl.sum(tl.where(above, p.to(tl.float64)[:, None], 0.0), 0)
    return counts, masses


@triton.jit
def _list_between(logits, num_columns: tl.constexpr, divisor, peak, total, low, high, listed, BLOCK: tl.constexpr):
    """Store the probabilities of a row whose bits are above `low` and not above `high`. Returns their number."""
    num_listed = 0
    for start in range(0, num_columns, BLOCK):
        x = load_scaled(logits, start + tl.arange(0, BLOCK), num_columns, divisor)
        p = probabilities_of(x, peak, total)
        bits = bits_of(p)
        between = (bits > low) & (bits <= high)
        tl.store(listed + num_listed + tl.cumsum(between.to(tl.int32), 0) - 1, p, mask=between)
        num_listed += tl.sum(between.to(tl.int32), 0)
    return num_listed


@triton.jit
def _search(
    logits, num_columns: tl.constexpr, divisor, peak, total, low, high, by_mass, limit, listed,
    BLOCK: tl.constexpr, PIVOTS: tl.constexpr, LIST_ROOM: tl.constexpr,
):  # fmt: skip
    """The least bits v above `low` for which the probabilities above v number fewer than `limit`, or (by mass) have
    together less than `limit` of the mass above `low`. Any value that separates the same tokens may be returned.

    At `low` the condition is false, at `high` it is true. Passes over the row narrow the two down until what lies
    between them fits into a list.
    """
    places = tl.arange(0, PIVOTS)
    num_low, num_high = num_columns, 0
    whole, mass_high = tl.full([], 0.0, tl.float64), tl.full([], 0.0, tl.float64)
    is_first = True
    while (high - low > 1) & (is_first | (num_low - num_high > LIST_ROOM)):
        pivots = (low + (high - low).to(tl.int64) * places // PIVOTS).to(tl.int32)  # the first is `low`
        counts, masses = _count_above(logits, num_columns, divisor, peak, total, pivots, BLOCK, PIVOTS)
        whole = tl.where(is_first, tl.max(masses, 0), whole)
        holds = tl.where(by_mass, masses < limit * whole, counts < limit)
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
        # What is missing in mass, or in number: entries of the same weight.
        weights = tl.where(by_mass, p.to(tl.float64), (p > 0).to(tl.float64))
        missing = tl.where(by_mass, limit * whole - mass_high, limit - num_high)
        result = least_of_mass(bits_of(p), weights, result, high + 1, missing)
    return result


@triton.jit
def search_threshold(
    logits, num_columns: tl.constexpr, divisor, peak, total, k, p, m, listed,
    BLOCK: tl.constexpr, PIVOTS: tl.constexpr, LIST_ROOM: tl.constexpr,
):  # fmt: skip
    """The bits of the least probability that a row's filters keep, or a value that separates the same tokens."""
    largest = probabilities_of(peak, peak, total)
    high = bits_of(largest)
    result = bits_of(m * largest)
    for turn in range(2):  # top_k, then top_p of what is left
        by_mass = turn == 1
        low = tl.where(by_mass, tl.maximum(result, _LEAST_KEY), _LEAST_KEY) - 1
        if tl.where(by_mass, p < 1, (k > 0) & (k < num_columns)):
            limit = tl.where(by_mass, p, k.to(tl.float64))
            found = _search(
                logits, num_columns, divisor, peak, total, low, high, by_mass, limit, listed, BLOCK, PIVOTS, LIST_ROOM
            )
            result = tl.maximum(result, found)
    return result
