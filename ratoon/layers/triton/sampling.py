"""Choosing tokens on a GPU: the greedy choice, the draw and its filters, in a few passes over the logits.

Nothing waits for the device, and shapes depend on the arguments' shapes alone: CUDA graphs can hold every function. A
row is cut into chunks of fixed length, whatever the batch, so that a row's token does not depend on other rows.
layers/sampling.py has the definitions; there the sums are exact, here they are rounded, so that a number that falls
within about 1e-7 of a token's border may give its neighbour.

One pass over the logits gives maxima and sums. A row with filters then lists its largest tokens, and usually all that
the filters leave is among them. Otherwise, if only top_p cuts, a sample of the row tells about where its threshold is,
and a second pass lists what is near it; the sums of that pass show whether the sample was right. Rows for which all
this was not enough are searched in several passes.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from ratoon.layers.triton.launch import launch, launch_options, wait_for_kernel_before

Tensor = torch.Tensor

CHUNK = 4096  # columns that one program reads
# The list of the largest tokens
GROUP = 32  # columns whose maximum is stored
GROUPED = 8  # groups whose maxima are compared together
WANTED = 256  # tokens of a list, at least, where top_k does not tell how many are needed
GROUP_ROOM = 512  # groups that may hold them; more are possible only where many are equal
LIST_ROOM = 1024  # tokens of a list
SHORT_LIST = 256  # tokens that are drawn from in less time
GROUPS_AT_ONCE = 64
# The list of tokens near the threshold
SAMPLED_GROUPS = 256
NEAR_ROOM = 1024  # tokens of each chunk
NEAR_AT_ONCE = 64  # of each chunk
NEARER_ROOM = 4096  # tokens of all chunks
NEAR_PROGRAMS = 1024  # that list them, for all rows
# Other rows are read several times.
PIVOTS = 8  # thresholds that are examined in one pass over a row
BLOCK = 2048  # columns at a time in such a pass

_INF = tl.constexpr(float("inf"))
_LARGEST_INT = tl.constexpr(2**31 - 1)
# In place of a row's threshold
_NOT_FOUND = tl.constexpr(-1)
_NEARLY_FOUND = tl.constexpr(-2)  # it is between two others
_LISTED = tl.constexpr(-3)  # its largest tokens are listed
_DRAWN = tl.constexpr(-4)  # its token is known
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
    token_ids = torch.empty(num_rows, dtype=torch.int64, device=logits.device)
    bad = torch.empty(num_rows, dtype=torch.bool, device=logits.device)
    if num_rows == 0:
        return token_ids, bad

    def scratch(dtype: torch.dtype, *shape: int) -> Tensor:
        return torch.empty(num_rows, *shape, dtype=dtype, device=logits.device)

    maxima, sums = scratch(torch.float32, num_chunks), scratch(torch.float32, num_chunks)
    row = (logits, logits.stride(0), num_columns, temperature)
    reduced = (maxima, sums, num_chunks)
    sizes = {"CHUNK": CHUNK, "CHUNKS": triton.next_power_of_2(num_chunks)}
    early = launch_options(logits.device.type != "cpu")
    num_groups = triton.cdiv(num_columns, GROUP) if filters else 0
    of_groups = scratch(torch.float32, num_groups) if filters else maxima  # not read
    launch(
        _reduce_chunks, (num_chunks, num_rows), *row, *reduced, of_groups, num_groups, draws, CHUNK, GROUP, num_warps=4
    )
    if not filters:
        launch(_pick, (num_rows,), *row, *reduced, uniforms, token_ids, bad, draws, **sizes, **early, num_warps=8)
        return token_ids, bad
    wanted, found = (top_k, top_p, min_p, uniforms), (token_ids, bad)
    threshold, between = scratch(torch.int32), scratch(torch.int32, 2)
    listed, listed_ids = scratch(torch.float32, NEARER_ROOM), scratch(torch.int32, LIST_ROOM)
    launch(
        _list_largest, (num_rows,),
        *row, *reduced, *wanted, *found, threshold, between, of_groups, num_groups, scratch(torch.int32, GROUP_ROOM),
        listed, listed_ids, GROUP, triton.next_power_of_2(triton.cdiv(num_groups, GROUPED)), GROUPED, WANTED,
        GROUP_ROOM, NEARER_ROOM, LIST_ROOM, GROUPS_AT_ONCE, SAMPLED_GROUPS, **sizes, **early, num_warps=8, maxnreg=128,
    )  # fmt: skip
    launch(
        _draw_from_list, (num_rows,),
        *row[2:], *reduced, *wanted, *found, threshold, between, listed, listed_ids, NEARER_ROOM, LIST_ROOM, SHORT_LIST,
        CHUNKS=sizes["CHUNKS"], **early, num_warps=1,
    )  # fmt: skip
    masses, near = scratch(torch.float64, num_chunks, 3), scratch(torch.float32, num_chunks, NEAR_ROOM)
    num_near = scratch(torch.int32, num_chunks)
    num_programs = min(num_chunks, max(NEAR_PROGRAMS // num_rows, 1))  # of a row
    launch(
        _list_near, (num_programs, num_rows), *row, *reduced, threshold, between, masses, near, num_near, NEAR_ROOM,
        **sizes, **early, num_warps=4,
    )  # fmt: skip
    launch(
        _draw_others, (num_rows,),
        *row, *reduced, *wanted, *found, threshold, between, masses, near, num_near, listed,
        NEAR_ROOM, NEAR_AT_ONCE, NEARER_ROOM, BLOCK, PIVOTS, LIST_ROOM, **sizes, **early, num_warps=8,
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
    """Logits over temperature; -inf past the end, inf for NaN."""
    return _divide(_load_logits(logits, columns, num_columns), divisor)


@triton.jit
def _load_logits(logits, columns, num_columns):
    x = tl.load(logits + columns, mask=columns < num_columns, other=-_INF).to(tl.float32)
    return tl.where(x == x, x, _INF)


@triton.jit
def _is_finite(x):
    return (x > -_INF) & (x < _INF)


@triton.jit
def _load_chunks(maxima, sums, num_chunks, row, divisor, CHUNKS: tl.constexpr):
    """The largest logit of each chunk and of all, and what each chunk adds to the sum of exponentials, the largest
    logit of all subtracted [CHUNKS] float64. These weights are not numbers where the row is bad."""
    chunks = tl.arange(0, CHUNKS)
    exists = chunks < num_chunks
    tops = tl.load(maxima + row * num_chunks + chunks, mask=exists, other=-_INF)
    of_chunks = tl.load(sums + row * num_chunks + chunks, mask=exists, other=0.0)
    peak = tl.max(tops, 0)
    weights = of_chunks.to(tl.float64) * tl.exp((tops - peak).to(tl.float64) / divisor.to(tl.float64))
    return tops, peak, weights


@triton.jit
def _probabilities(x, peak, total):
    """As exact_probabilities: multiples of 2^-52."""
    return (_divide(_exp(x - peak), total) + _ROUNDING) - _ROUNDING


@triton.jit
def _bits(x):
    """Those of floats that are not negative are in the order of the floats."""
    return x.to(tl.int32, bitcast=True)


@triton.jit
def _ordered(x):
    """Floats as int32 in the same order."""
    bits = _bits(x + 0.0)  # -0 equals 0
    return bits ^ ((bits >> 31) & 0x7FFFFFFF)


@triton.jit
def _from_ordered(key):
    return (key ^ ((key >> 31) & 0x7FFFFFFF)).to(tl.float32, bitcast=True)


@triton.jit
def _middle(low, high):
    return (low >> 1) + (high >> 1) + (low & high & 1)


@triton.jit
def _count(condition):
    return tl.sum(condition.to(tl.int32), 0)


@triton.jit
def _least_of(bits, low):
    """The least that is not below `low`."""
    return tl.min(tl.where(bits >= low, bits, _LARGEST_INT), 0)


@triton.jit
def _first_above(weights, places, target):
    """The first place whose cumulative weight is above the target, or the last that weighs something. -1: none."""
    cumulative = tl.cumsum(weights, 0)
    weighs = weights > 0
    last = tl.max(tl.where(weighs, places, -1), 0)
    return tl.minimum(tl.min(tl.where(weighs & (cumulative > target), places, _LARGEST_INT), 0), last)


@triton.jit
def _least_of_mass(bits, masses, low, high, limit):
    """The largest bits v, of the entries', for which those with bits ≥ v have at least this mass together. Those with
    bits ≥ low have it, and none has bits ≥ high. The search ends when what is between the two is less than twice the
    least possible mass: a single entry."""
    mass_low, mass_high = tl.sum(tl.where(bits >= low, masses, 0.0), 0), tl.full([], 0.0, tl.float64)
    while (low + 1 < high) & (mass_low - mass_high >= 2.0 * low.to(tl.float32, bitcast=True)):
        middle = _middle(low, high)
        mass = tl.sum(tl.where(bits >= middle, masses, 0.0), 0)
        mass_low = tl.where(mass >= limit, mass, mass_low)
        mass_high = tl.where(mass >= limit, mass_high, mass)
        low = tl.where(mass >= limit, middle, low)
        high = tl.where(mass >= limit, high, middle)
    return _least_of(bits, low)


@triton.jit
def _find_largest(logits, num_columns, tops, peak, CHUNK: tl.constexpr, CHUNKS: tl.constexpr):
    """The token of the largest logit: first its chunk, then its place there."""
    chunk = tl.min(tl.where(tops == peak, tl.arange(0, CHUNKS), CHUNKS - 1), 0)
    columns = chunk * CHUNK + tl.arange(0, CHUNK)
    x = _load_logits(logits, columns, num_columns)
    return tl.min(tl.where(x == peak, columns, num_columns), 0)


@triton.jit
def _draw(
    logits, num_columns, divisor, uniform, weights, peak, total, least,
    FILTERED: tl.constexpr, CHUNK: tl.constexpr, CHUNKS: tl.constexpr,
):  # fmt: skip
    """A token by the weights of the chunks, and then by those of its tokens."""
    chunks = tl.arange(0, CHUNKS)
    target = uniform * tl.sum(weights, 0)
    chunk = tl.maximum(_first_above(weights, chunks, target), 0)
    own = tl.sum(tl.where(chunks == chunk, weights, 0.0), 0)
    before = tl.sum(tl.where(chunks < chunk, weights, 0.0), 0)
    share = (target - before) / own  # of the chunk's weight, before the token
    columns = chunk * CHUNK + tl.arange(0, CHUNK)
    x = _load_scaled(logits, columns, num_columns, divisor)
    if FILTERED:
        inside = _probabilities(x, peak, total)
        inside = tl.where(_bits(inside) >= least, inside, 0.0)
    else:
        inside = _exp(x - tl.max(x, 0))
    inside = inside.to(tl.float64)
    return _first_above(inside, columns, share * tl.sum(inside, 0))


@triton.jit
def _store_token(token_ids, bad, row, token, is_bad, num_columns):
    token = tl.where(is_bad, 0, tl.minimum(tl.maximum(token, 0), num_columns - 1))
    tl.store(token_ids + row, token.to(tl.int64))
    tl.store(bad + row, is_bad)


@triton.jit
def _choose_unfiltered(
    logits, num_columns, temperature, maxima, sums, num_chunks, uniforms, token_ids, bad, row,
    DRAWS: tl.constexpr, CHUNK: tl.constexpr, CHUNKS: tl.constexpr,
):  # fmt: skip
    """The token of a row without filters. `logits` are the row's own."""
    if DRAWS:
        divisor = _divisor(temperature, row)
        tops, peak, weights = _load_chunks(maxima, sums, num_chunks, row, divisor, CHUNKS)
        is_bad = (_is_finite(peak) & (tl.sum(weights, 0) < _INF)) == 0
    else:
        chunks = tl.arange(0, CHUNKS)
        tops = tl.load(maxima + row * num_chunks + chunks, mask=chunks < num_chunks, other=-_INF)
        peak = tl.max(tops, 0)
        is_bad = _is_finite(peak) == 0
    token = 0
    if is_bad == 0:
        if DRAWS:
            if tl.load(temperature + row) != 0:
                uniform = tl.load(uniforms + row)
                token = _draw(logits, num_columns, divisor, uniform, weights, peak, 1.0, 0, False, CHUNK, CHUNKS)
            else:
                token = _find_largest(logits, num_columns, tops, peak, CHUNK, CHUNKS)
        else:
            token = _find_largest(logits, num_columns, tops, peak, CHUNK, CHUNKS)
    _store_token(token_ids, bad, row, token, is_bad, num_columns)


# ---------------------------------------------------------------------------------------------------------------------
# Kernels


@triton.jit(do_not_specialize=["num_groups"])
def _reduce_chunks(
    logits, row_stride, num_columns, temperature, maxima, sums, num_chunks, of_groups, num_groups,
    DRAWS: tl.constexpr, CHUNK: tl.constexpr, GROUP: tl.constexpr,
):  # fmt: skip
    """Of each chunk: the largest logit, and the sum of exponentials over the temperature, that one subtracted. Of the
    first `num_groups` groups of columns: the largest. With and without groups the same binary runs, so that sums are
    rounded alike and a row draws the same whether others of its batch have filters or not. A NaN is seen in the sum."""
    chunk, row = tl.program_id(0), tl.program_id(1).to(tl.int64)
    place = row * num_chunks + chunk
    logits += row * row_stride
    if DRAWS:
        groups = chunk * (CHUNK // GROUP) + tl.arange(0, CHUNK // GROUP)
        columns = groups[:, None] * GROUP + tl.arange(0, GROUP)[None, :]
        x = tl.load(logits + columns, mask=columns < num_columns, other=-_INF).to(tl.float32)
        tops = tl.max(x, 1)
        tl.store(of_groups + row * num_groups + groups, tops, mask=groups < num_groups)
        top = tl.max(tops, 0)
        # log2(e) / temperature as a sum of two numbers. Both are above 0, so that -inf stays -inf.
        exact = tl.full([], 1.4426950408889634, tl.float64) / _divisor(temperature, row).to(tl.float64)
        scale = (_bits(exact.to(tl.float32)) - 1).to(tl.float32, bitcast=True)
        rest = (exact - scale.to(tl.float64)).to(tl.float32)
        below = x - tl.where(_is_finite(top), top, 0.0)
        tl.store(sums + place, tl.sum(tl.sum(tl.exp2(tl.fma(below, scale, below * rest)), 1), 0))
    else:
        columns = chunk * CHUNK + tl.arange(0, CHUNK)
        top = tl.max(_load_logits(logits, columns, num_columns), 0)
    tl.store(maxima + place, top)


@triton.jit
def _pick(
    logits, row_stride, num_columns, temperature, maxima, sums, num_chunks, uniforms, token_ids, bad,
    DRAWS: tl.constexpr, CHUNK: tl.constexpr, CHUNKS: tl.constexpr, DEPENDENT: tl.constexpr,
):  # fmt: skip
    if DEPENDENT:
        wait_for_kernel_before()
    row = tl.program_id(0).to(tl.int64)
    logits += row * row_stride
    _choose_unfiltered(
        logits, num_columns, temperature, maxima, sums, num_chunks, uniforms, token_ids, bad, row, DRAWS, CHUNK, CHUNKS
    )


@triton.jit
def _list_largest(
    logits, row_stride, num_columns, temperature, maxima, sums, num_chunks, top_k, top_p, min_p, uniforms, token_ids,
    bad, threshold, between, of_groups, num_groups, places, listed, listed_ids,
    GROUP: tl.constexpr, GROUPS: tl.constexpr, GROUPED: tl.constexpr, WANTED: tl.constexpr, GROUP_ROOM: tl.constexpr,
    ROW_ROOM: tl.constexpr, LIST_ROOM: tl.constexpr, AT_ONCE: tl.constexpr, SAMPLED: tl.constexpr, CHUNK: tl.constexpr,
    CHUNKS: tl.constexpr, DEPENDENT: tl.constexpr,
):  # fmt: skip
    """List the largest tokens of a row with filters, in the order of their ids. If they cannot be enough, tell about
    where the threshold of top_p is. The token of a row without filters is chosen here."""
    if DEPENDENT:
        wait_for_kernel_before()
    row = tl.program_id(0).to(tl.int64)
    logits += row * row_stride
    k, p, m = tl.load(top_k + row), tl.load(top_p + row), tl.load(min_p + row)
    divisor = _divisor(temperature, row)
    # [GROUPS, GROUPED], and the largest of each line
    groups = tl.arange(0, GROUPS)[:, None] * GROUPED + tl.arange(0, GROUPED)[None, :]
    keys = _ordered(tl.load(of_groups + row * num_groups + groups, mask=groups < num_groups, other=-_INF))
    keys = tl.where(groups < num_groups, keys, -_LARGEST_INT - 1)
    lines = tl.max(keys, 1)
    _, peak, weights = _load_chunks(maxima, sums, num_chunks, row, divisor, CHUNKS)
    total = tl.sum(weights, 0).to(tl.float32)
    is_filtered = (tl.load(temperature + row) != 0) & ((k > 0) | (p < 1) | (m > 0))
    if (is_filtered & _is_finite(peak) & (total < _INF)) == 0:
        _choose_unfiltered(
            logits, num_columns, temperature, maxima, sums, num_chunks, uniforms, token_ids, bad, row, True, CHUNK,
            CHUNKS,
        )  # fmt: skip
        tl.store(threshold + row, _DRAWN)
        return

    # The least logit of the list: what min_p needs, or one that leaves enough lines and not too many.
    num_lines = (num_groups + GROUPED - 1) // GROUPED
    least = _ordered(tl.full([], -_INF, tl.float32))
    if m > 0:
        # A little lower than exactly: rounding.
        least = _ordered(peak + divisor * (tl.log(m) - 1e-4) - 1e-6 * tl.abs(peak))
    is_bounded = (k == 0) & (m > 0)  # by min_p
    only_top_p = (k == 0) & (m == 0)
    wanted = tl.where(k > 0, tl.minimum(k, num_columns).to(tl.int32), tl.minimum(WANTED, (num_lines + 1) // 2))
    num_chosen = num_lines  # lines that are not below the least
    if m > 0:
        num_chosen = tl.where(is_bounded, 0, _count(lines >= least))
    scaled_peak = _divide(peak, divisor)
    num_listed = LIST_ROOM + 1
    known_mass = 0.0  # of the list
    is_possible = True
    while is_possible & (num_listed > LIST_ROOM):
        above = _ordered(peak) + 1
        while (num_chosen > wanted + (wanted >> 1)) & (least + 1 < above):
            middle = _middle(least, above)
            count = _count(lines >= middle)
            num_chosen = tl.where(count >= wanted, count, num_chosen)
            least = tl.where(count >= wanted, middle, least)
            above = tl.where(count >= wanted, above, middle)
        num_groups_chosen = _count(tl.sum((keys >= least).to(tl.int32), 1))
        above = _ordered(peak) + 1
        while (num_groups_chosen > GROUP_ROOM) & (least + 1 < above) & (is_bounded == 0):
            middle = _middle(least, above)
            count = _count(tl.sum((keys >= middle).to(tl.int32), 1))
            num_groups_chosen = tl.where(count >= wanted, count, num_groups_chosen)
            least = tl.where(count >= wanted, middle, least)
            above = tl.where(count >= wanted, above, middle)
        chosen = tl.reshape(keys >= least, [GROUPS * GROUPED])
        at = tl.cumsum(chosen.to(tl.int32), 0) - 1
        if num_groups_chosen <= GROUP_ROOM:
            tl.debug_barrier()  # an earlier list has been read
            tl.store(places + row * GROUP_ROOM + at, tl.arange(0, GROUPS * GROUPED), mask=chosen)
            tl.debug_barrier()
            num_listed, known_mass = _list_groups(
                logits, num_columns, divisor, scaled_peak, total, least, places + row * GROUP_ROOM, num_groups_chosen,
                num_groups, listed + row * ROW_ROOM, listed_ids + row * LIST_ROOM, only_top_p, GROUP, LIST_ROOM,
                AT_ONCE,
            )  # fmt: skip
        # The largest tokens may be close together: fewer lines, if they are too many.
        is_possible = only_top_p & (wanted > 1) & (num_chosen > 1)
        wanted = (wanted + 3) >> 2

    is_listed = num_listed <= LIST_ROOM
    state = tl.where(is_listed, _LISTED, _NOT_FOUND)
    low, high = num_listed, least
    if is_bounded & (p >= 1) & (is_listed == 0):
        state = _bits(m * _probabilities(scaled_peak, scaled_peak, total))
    if only_top_p & ((is_listed == 0) | (known_mass < p.to(tl.float32) * 0.99999)):
        low, high = _sample_threshold(
            logits, num_columns, divisor, scaled_peak, total, tl.where(is_listed, least, _ordered(peak) + 1),
            tl.where(is_listed, known_mass, 0.0), p.to(tl.float32), num_groups, GROUP, SAMPLED,
        )  # fmt: skip
        # Of a small vocabulary the list may be all there is.
        state = tl.where(is_listed & (num_listed == num_columns), _LISTED, _NEARLY_FOUND)
        low, high = tl.where(state == _LISTED, num_listed, low), tl.where(state == _LISTED, least, high)
    tl.store(threshold + row, state)
    tl.store(between + row * 2, low)
    tl.store(between + row * 2 + 1, high)


@triton.jit
def _list_groups(
    logits, num_columns, divisor, peak, total, least, places, num_places, num_groups, listed, listed_ids, with_mass,
    GROUP: tl.constexpr, LIST_ROOM: tl.constexpr, AT_ONCE: tl.constexpr,
):  # fmt: skip
    """Store the tokens of these groups whose ordered logits are at least `least`. Returns their number, and about their
    mass if that is wanted. Those without room are missing."""
    num_listed, mass = 0, 0.0
    start = 0
    while start < num_places:
        turn = start + tl.arange(0, AT_ONCE)
        of_turn = tl.load(places + turn, mask=turn < num_places, other=num_groups)
        columns = of_turn[:, None] * GROUP + tl.arange(0, GROUP)[None, :]  # past the end where there is no group
        columns = tl.reshape(columns, [AT_ONCE * GROUP])
        x = _load_logits(logits, columns, num_columns)
        is_listed = (_ordered(x) >= least) & (columns < num_columns)
        at = num_listed + tl.cumsum(is_listed.to(tl.int32), 0) - 1
        fits = is_listed & (at < LIST_ROOM)
        tl.store(listed + at, x, mask=fits)
        tl.store(listed_ids + at, columns, mask=fits)
        num_listed += _count(is_listed)
        if with_mass:
            mass += tl.sum(tl.where(is_listed, _exp(_divide(x, divisor) - peak), 0.0), 0) / total
        start += AT_ONCE
    return num_listed, mass


@triton.jit
def _sample_threshold(
    logits, num_columns, divisor, scaled_peak, total, highest, known_mass, p, num_groups,
    GROUP: tl.constexpr, SAMPLED: tl.constexpr,
):  # fmt: skip
    """Bits of probabilities between which the threshold of top_p probably is: the first is not above it, the second is.
    `known_mass` is that of all tokens whose ordered logits are at least `highest`; the others are sampled."""
    at = tl.arange(0, SAMPLED * GROUP)
    group = ((at // GROUP).to(tl.int64) * num_groups // SAMPLED).to(tl.int32)
    columns = group * GROUP + at % GROUP
    x = _load_logits(logits, columns, num_columns)
    sampled = _probabilities(_divide(x, divisor), scaled_peak, total)
    sampled = tl.where((_ordered(x) < highest) & (columns < num_columns), sampled, 0.0)
    share = (p - known_mass) / (1.0 - known_mass)  # of the others' mass
    upper = _bits(_probabilities(_divide(_from_ordered(highest), divisor), scaled_peak, total)) + 1
    low, high = tl.full([], 0, tl.int32), upper
    if share < 1.0:
        squares = tl.sum(sampled * sampled, 0)
        low, high = _around(sampled, tl.sum(sampled, 0), squares, share, tl.maximum(upper - (16 << 23), 0), upper)
    return low, high


@triton.jit
def _around(sampled, mass, squares, share, low, high):
    """Bits around the value above which this share of all mass is, by the mass of a sample: four standard deviations to
    both sides, as far as `low` and `high`."""
    bits = _bits(sampled)
    margin = 4.0 * tl.sqrt(tl.maximum(share * (1.0 - share), 0.01) * squares)
    not_low, not_high = high, low
    for _ in range(12):
        middle = _middle(low, not_low)
        is_low = tl.sum(tl.where(bits >= middle, sampled, 0.0), 0) >= share * mass + margin
        low = tl.where(is_low, middle, low)
        not_low = tl.where(is_low, not_low, middle)
        middle = _middle(not_high, high)
        is_high = tl.sum(tl.where(bits >= middle, sampled, 0.0), 0) < share * mass - margin
        high = tl.where(is_high, middle, high)
        not_high = tl.where(is_high, not_high, middle)
    return low, high


@triton.jit
def _draw_from_list(
    num_columns, temperature, maxima, sums, num_chunks, top_k, top_p, min_p, uniforms, token_ids, bad, threshold,
    between, listed, listed_ids,
    ROW_ROOM: tl.constexpr, LIST_ROOM: tl.constexpr, SHORT_LIST: tl.constexpr, CHUNKS: tl.constexpr,
    DEPENDENT: tl.constexpr,
):  # fmt: skip
    """The token of a row whose filters leave only tokens of its list."""
    if DEPENDENT:
        wait_for_kernel_before()
    row = tl.program_id(0).to(tl.int64)
    if tl.load(threshold + row) == _LISTED:
        divisor = _divisor(temperature, row)
        _, peak, weights = _load_chunks(maxima, sums, num_chunks, row, divisor, CHUNKS)
        total = tl.sum(weights, 0).to(tl.float32)
        peak = _divide(peak, divisor)
        k, p, m, uniform = tl.load(top_k + row), tl.load(top_p + row), tl.load(min_p + row), tl.load(uniforms + row)
        num_listed, least = tl.load(between + row * 2), tl.load(between + row * 2 + 1)
        # No token that is not listed has a larger probability.
        beyond = _bits(_probabilities(_divide(_from_ordered(least - 1), divisor), peak, total))
        beyond = tl.where(num_listed == num_columns, 0, beyond)
        listed += row * ROW_ROOM
        place = -1
        if num_listed <= SHORT_LIST:
            place = _place_in_list(listed, num_listed, beyond, divisor, peak, total, k, p, m, uniform, SHORT_LIST, True)
        else:
            place = _place_in_list(listed, num_listed, beyond, divisor, peak, total, k, p, m, uniform, LIST_ROOM, False)
        if place >= 0:
            token = tl.load(listed_ids + row * LIST_ROOM + place)
            _store_token(token_ids, bad, row, token, False, num_columns)
        tl.store(threshold + row, tl.where(place >= 0, _DRAWN, _NOT_FOUND))


@triton.jit
def _place_in_list(
    listed, num_listed, beyond, divisor, peak, total, k, p, m, uniform, ROOM: tl.constexpr, SORTED: tl.constexpr
):
    """The place of the token in the list, or -1 if the filters leave others too. No other has bits above `beyond`."""
    slots = tl.arange(0, ROOM)
    x = tl.load(listed + slots, mask=slots < num_listed, other=-_INF)
    probabilities = _probabilities(_divide(x, divisor), peak, total)
    bits = tl.where(slots < num_listed, _bits(probabilities), -1)
    masses = probabilities.to(tl.float64)
    largest = _probabilities(peak, peak, total)
    floor, high = _bits(m * largest), _bits(largest) + 1
    only_top_p = (k == 0) & (m == 0) & (beyond > 0)
    if SORTED:
        descending = tl.sort(bits, descending=True)
        cumulative = tl.cumsum(tl.maximum(descending, 0).to(tl.float32, bitcast=True).to(tl.float64), 0)
    if (k > 0) & (k <= num_listed):
        if SORTED:
            kth = tl.sum(tl.where(slots == k - 1, descending, 0), 0)
        else:
            ones = (bits >= 0).to(tl.float64)
            kth = _least_of_mass(bits, ones, tl.full([], 0, tl.int32), high, k.to(tl.float64))
        floor = tl.maximum(floor, kth)
    bound = floor
    if p < 1:
        # Where only top_p cuts, what is left is all; its sum differs from 1 by rounding alone.
        mass = tl.sum(tl.where(bits >= floor, masses, 0.0), 0)
        limit = p * tl.where(only_top_p, 1.0, mass)
        if SORTED:
            bound = tl.max(tl.where(cumulative >= limit, descending, -1), 0)
        else:
            bound = tl.full([], -1, tl.int32)
            if mass >= limit:
                bound = _least_of_mass(bits, masses, tl.maximum(floor, _least_of(bits, 0)), high, limit)
    kept = tl.where(bits >= bound, masses, 0.0)
    place = tl.maximum(_first_above(kept, slots, uniform * tl.sum(kept, 0)), 0)
    is_settled = (floor > beyond) | (beyond == 0) | (only_top_p & (bound > beyond))
    return tl.where(is_settled & (bound >= 0), place, -1)


@triton.jit
def _list_near(
    logits, row_stride, num_columns, temperature, maxima, sums, num_chunks, threshold, between, masses, near, num_near,
    NEAR_ROOM: tl.constexpr, CHUNK: tl.constexpr, CHUNKS: tl.constexpr, DEPENDENT: tl.constexpr,
):  # fmt: skip
    """Of each chunk of a row whose threshold is between two numbers: the tokens there, and the mass of all tokens, of
    those above, and of those there."""
    if DEPENDENT:
        wait_for_kernel_before()
    chunk, row = tl.program_id(0), tl.program_id(1).to(tl.int64)
    if tl.load(threshold + row) == _NEARLY_FOUND:
        divisor = _divisor(temperature, row)
        _, peak, weights = _load_chunks(maxima, sums, num_chunks, row, divisor, CHUNKS)
        total = tl.sum(weights, 0).to(tl.float32)
        peak = _divide(peak, divisor)
        low, high = tl.load(between + row * 2), tl.load(between + row * 2 + 1)
        logits += row * row_stride
        while chunk < num_chunks:
            place = row * num_chunks + chunk
            count = 0
            whole, above, there = (tl.full([], 0.0, tl.float64),) * 3
            for start in range(0, CHUNK, 1024):
                columns = chunk * CHUNK + start + tl.arange(0, 1024)
                p = _probabilities(_load_scaled(logits, columns, num_columns, divisor), peak, total)
                bits = _bits(p)
                is_near = (bits >= low) & (bits < high) & (bits > 0)
                at = count + tl.cumsum(is_near.to(tl.int32), 0) - 1
                tl.store(near + place * NEAR_ROOM + at, p, mask=is_near & (at < NEAR_ROOM))
                count += _count(is_near)
                mass = p.to(tl.float64)
                whole += tl.sum(mass, 0)
                above += tl.sum(tl.where(bits >= high, mass, 0.0), 0)
                there += tl.sum(tl.where(is_near, mass, 0.0), 0)
            tl.store(num_near + place, count)
            tl.store(masses + place * 3, whole)
            tl.store(masses + place * 3 + 1, above)
            tl.store(masses + place * 3 + 2, there)
            chunk += tl.num_programs(0)


@triton.jit
def _draw_others(
    logits, row_stride, num_columns: tl.constexpr, temperature, maxima, sums, num_chunks, top_k, top_p, min_p, uniforms,
    token_ids, bad, threshold, between, masses, near, num_near, listed,
    NEAR_ROOM: tl.constexpr, AT_ONCE: tl.constexpr, ROW_ROOM: tl.constexpr, BLOCK: tl.constexpr, PIVOTS: tl.constexpr,
    LIST_ROOM: tl.constexpr, CHUNK: tl.constexpr, CHUNKS: tl.constexpr, DEPENDENT: tl.constexpr,
):  # fmt: skip
    """The tokens of rows that the list of the largest tokens was not enough for."""
    if DEPENDENT:
        wait_for_kernel_before()
    row = tl.program_id(0).to(tl.int64)
    least = tl.load(threshold + row)
    if least == _DRAWN:
        return
    logits += row * row_stride
    listed += row * ROW_ROOM
    divisor = _divisor(temperature, row)
    _, peak, weights = _load_chunks(maxima, sums, num_chunks, row, divisor, CHUNKS)
    total = tl.sum(weights, 0).to(tl.float32)
    peak = _divide(peak, divisor)
    is_summed = False
    if least == _NEARLY_FOUND:
        chunks = tl.arange(0, CHUNKS)
        exists = chunks < num_chunks
        of_row = row * num_chunks + chunks
        counts = tl.load(num_near + of_row, mask=exists, other=0)
        whole = tl.sum(tl.load(masses + of_row * 3, mask=exists, other=0.0), 0)
        above = tl.load(masses + of_row * 3 + 1, mask=exists, other=0.0)
        there = tl.sum(tl.load(masses + of_row * 3 + 2, mask=exists, other=0.0), 0)
        missing = tl.load(top_p + row) * whole - tl.sum(above, 0)
        least = tl.full([], _NOT_FOUND, tl.int32)
        if (tl.max(counts, 0) <= NEAR_ROOM) & (missing > 0) & (there >= missing):
            lists = near + of_row * NEAR_ROOM
            low, high = tl.load(between + row * 2), tl.load(between + row * 2 + 1)
            least = _threshold_of_near(lists, counts, low, high, missing, there, listed, NEAR_ROOM, AT_ONCE, ROW_ROOM)
            weights = above
            start = 0
            while start < tl.max(counts, 0):
                candidates = _load_near(lists, counts, start, 1, AT_ONCE)
                weights += tl.sum(tl.where(_bits(candidates) >= least, candidates, 0.0).to(tl.float64), 1)
                start += AT_ONCE
            is_summed = least >= 0
    if least == _NOT_FOUND:
        k, p, m = tl.load(top_k + row), tl.load(top_p + row), tl.load(min_p + row)
        least = _search_threshold(logits, num_columns, divisor, peak, total, k, p, m, listed, BLOCK, PIVOTS, LIST_ROOM)
    if is_summed == 0:
        weights = _sum_kept(logits, num_columns, divisor, peak, total, least, num_chunks, CHUNK, CHUNKS)
    uniform = tl.load(uniforms + row)
    token = _draw(logits, num_columns, divisor, uniform, weights, peak, total, least, True, CHUNK, CHUNKS)
    _store_token(token_ids, bad, row, token, False, num_columns)


@triton.jit
def _load_near(near, counts, start, step, AT_ONCE: tl.constexpr):
    """[CHUNKS, AT_ONCE] tokens near the threshold; 0 where there is none."""
    slots = start + step * tl.arange(0, AT_ONCE)[None, :]
    return tl.load(near[:, None] + slots, mask=slots < counts[:, None], other=0.0)


@triton.jit
def _threshold_of_near(
    near, counts, low, high, missing, there, listed,
    NEAR_ROOM: tl.constexpr, AT_ONCE: tl.constexpr, ROW_ROOM: tl.constexpr,
):  # fmt: skip
    """The largest bits v for which the candidates with bits ≥ v have at least the missing mass. A sample of them tells
    about where it is, and the candidates that are nearer are listed."""
    sampled = _load_near(near, counts, 0, NEAR_ROOM // AT_ONCE, AT_ONCE)
    sampled = tl.reshape(sampled, [sampled.shape[0] * AT_ONCE])
    mass, squares = tl.sum(sampled, 0), tl.sum(sampled * sampled, 0)
    low, high = _around(sampled, mass, squares, (missing / there).to(tl.float32), low, high)
    num_listed, start = 0, 0
    while start < tl.max(counts, 0):
        candidates = _load_near(near, counts, start, 1, AT_ONCE)
        candidates = tl.reshape(candidates, [candidates.shape[0] * AT_ONCE])
        bits = _bits(candidates)
        missing -= tl.sum(tl.where(bits >= high, candidates, 0.0).to(tl.float64), 0)
        is_nearer = (bits >= low) & (bits < high) & (bits > 0)
        at = num_listed + tl.cumsum(is_nearer.to(tl.int32), 0) - 1
        tl.store(listed + at, candidates, mask=is_nearer & (at < ROW_ROOM))
        num_listed += _count(is_nearer)
        start += AT_ONCE
    tl.debug_barrier()
    slots = tl.arange(0, ROW_ROOM)
    nearer = tl.load(listed + slots, mask=slots < num_listed, other=0.0)
    masses = nearer.to(tl.float64)
    result = tl.full([], _NOT_FOUND, tl.int32)
    if (num_listed <= ROW_ROOM) & (missing > 0) & (tl.sum(masses, 0) >= missing):
        result = _least_of_mass(_bits(nearer), masses, low, high, missing)
    return result


@triton.jit
def _sum_kept(logits, num_columns, divisor, peak, total, least, num_chunks, CHUNK: tl.constexpr, CHUNKS: tl.constexpr):
    """The mass [CHUNKS] of each chunk of a row that its threshold keeps."""
    chunks = tl.arange(0, CHUNKS)
    kept = tl.zeros([CHUNKS], tl.float64)
    chunk = 0
    while chunk < num_chunks:
        x = _load_scaled(logits, chunk * CHUNK + tl.arange(0, CHUNK), num_columns, divisor)
        p = _probabilities(x, peak, total)
        mass = tl.sum(tl.where(_bits(p) >= least, p, 0.0).to(tl.float64), 0)
        kept = tl.where(chunks == chunk, mass, kept)
        chunk += 1
    return kept


# ---------------------------------------------------------------------------------------------------------------------
# The search in several passes, by one program


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
        above = _bits(p)[:, None] > pivots[None, :]  # [BLOCK, PIVOTS]
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
        bits = _bits(p)
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
        result = _least_of_mass(_bits(p), weights, result, high + 1, missing)
    return result


@triton.jit
def _search_threshold(
    logits, num_columns: tl.constexpr, divisor, peak, total, k, p, m, listed,
    BLOCK: tl.constexpr, PIVOTS: tl.constexpr, LIST_ROOM: tl.constexpr,
):  # fmt: skip
    """The bits of the least probability that a row's filters keep, or a value that separates the same tokens."""
    largest = _probabilities(peak, peak, total)
    high = _bits(largest)
    result = _bits(m * largest)
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
