"""The kernels that draw tokens of rows with filters (top_k, top_p, min_p), from lists of a row's largest tokens and of
those near its threshold. sampling.py launches them."""

import triton
import triton.language as tl

from ratoon.layers.triton.dependent import wait_for_kernel_before
from ratoon.layers.triton.sampling_parts import (
    INF,
    LARGEST_INT,
    bits_of,
    choose_unfiltered,
    count_true,
    divide,
    draw_token,
    exp_of,
    first_above,
    float_of_key,
    is_finite,
    least_of,
    least_of_mass,
    load_chunks,
    load_divisor,
    load_logits,
    load_scaled,
    middle_of,
    ordered_key,
    probabilities_of,
    store_token,
)
from ratoon.layers.triton.sampling_search import search_threshold

# In place of a row's threshold
_NOT_FOUND = tl.constexpr(-1)
_NEARLY_FOUND = tl.constexpr(-2)  # it is between two others
_LISTED = tl.constexpr(-3)  # its largest tokens are listed
_DRAWN = tl.constexpr(-4)  # its token is known


@triton.jit
def list_largest(
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
    divisor = load_divisor(temperature, row)
    # [GROUPS, GROUPED], and the largest of each line
    groups = tl.arange(0, GROUPS)[:, None] * GROUPED + tl.arange(0, GROUPED)[None, :]
    keys = ordered_key(tl.load(of_groups + row * num_groups + groups, mask=groups < num_groups, other=-INF))
    keys = tl.where(groups < num_groups, keys, -LARGEST_INT - 1)
    lines = tl.max(keys, 1)
    _, peak, weights = load_chunks(maxima, sums, num_chunks, row, divisor, CHUNKS)
    total = tl.sum(weights, 0).to(tl.float32)
    is_filtered = (tl.load(temperature + row) != 0) & ((k > 0) | (p < 1) | (m > 0))
    if (is_filtered & is_finite(peak) & (total < INF)) == 0:
        choose_unfiltered(
            logits, num_columns, temperature, maxima, sums, num_chunks, uniforms, token_ids, bad, row, True, CHUNK,
            CHUNKS,
        )  # fmt: skip
        tl.store(threshold + row, _DRAWN)
        return

    # The least logit of the list: what min_p needs, or one that leaves enough lines and not too many.
    num_lines = (num_groups + GROUPED - 1) // GROUPED
    least = ordered_key(tl.full([], -INF, tl.float32))
    if m > 0:
        # A little lower than exactly: rounding.
        least = ordered_key(peak + divisor * (tl.log(m) - 1e-4) - 1e-6 * tl.abs(peak))
    is_bounded = (k == 0) & (m > 0)  # by min_p
    only_top_p = (k == 0) & (m == 0)
    wanted = tl.where(k > 0, tl.minimum(k, num_columns).to(tl.int32), tl.minimum(WANTED, (num_lines + 1) // 2))
    num_chosen = num_lines  # lines that are not below the least
    if m > 0:
        num_chosen = tl.where(is_bounded, 0, count_true(lines >= least))
    scaled_peak = divide(peak, divisor)
    num_listed = LIST_ROOM + 1
    known_mass = 0.0  # of the list
    is_possible = True
    while is_possible & (num_listed > LIST_ROOM):
        above = ordered_key(peak) + 1
        while (num_chosen > wanted + (wanted >> 1)) & (least + 1 < above):
            middle = middle_of(least, above)
            count = count_true(lines >= middle)
            num_chosen = tl.where(count >= wanted, count, num_chosen)
            least = tl.where(count >= wanted, middle, least)
            above = tl.where(count >= wanted, above, middle)
        num_groups_chosen = count_true(tl.sum((keys >= least).to(tl.int32), 1))
        above = ordered_key(peak) + 1
        while (num_groups_chosen > GROUP_ROOM) & (least + 1 < above) & (is_bounded == 0):
            middle = middle_of(least, above)
            count = count_true(tl.sum((keys >= middle).to(tl.int32), 1))
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
        state = bits_of(m * probabilities_of(scaled_peak, scaled_peak, total))
    if only_top_p & ((is_listed == 0) | (known_mass < p.to(tl.float32) * 0.99999)):
        low, high = _sample_threshold(
            logits, num_columns, divisor, scaled_peak, total, tl.where(is_listed, least, ordered_key(peak) + 1),
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
        x = load_logits(logits, columns, num_columns)
        is_listed = (ordered_key(x) >= least) & (columns < num_columns)
        at = num_listed + tl.cumsum(is_listed.to(tl.int32), 0) - 1
        fits = is_listed & (at < LIST_ROOM)
        tl.store(listed + at, x, mask=fits)
        tl.store(listed_ids + at, columns, mask=fits)
        num_listed += count_true(is_listed)
        if with_mass:
            mass += tl.sum(tl.where(is_listed, exp_of(divide(x, divisor) - peak), 0.0), 0) / total
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
    x = load_logits(logits, columns, num_columns)
    sampled = probabilities_of(divide(x, divisor), scaled_peak, total)
    sampled = tl.where((ordered_key(x) < highest) & (columns < num_columns), sampled, 0.0)
    share = (p - known_mass) / (1.0 - known_mass)  # of the others' mass
    upper = bits_of(probabilities_of(divide(float_of_key(highest), divisor), scaled_peak, total)) + 1
    low, high = tl.full([], 0, tl.int32), upper
    if share < 1.0:
        squares = tl.sum(sampled * sampled, 0)
        low, high = _around(sampled, tl.sum(sampled, 0), squares, share, tl.maximum(upper - (16 << 23), 0), upper)
    return low, high


@triton.jit
def _around(sampled, mass, squares, share, low, high):
    """Bits around the value above which this share of all mass is, by the mass of a sample: four standard deviations to
    both sides, as far as `low` and `high`."""
    bits = bits_of(sampled)
    margin = 4.0 * tl.sqrt(tl.maximum(share * (1.0 - share), 0.01) * squares)
    not_low, not_high = high, low
    for _ in range(12):
        middle = middle_of(low, not_low)
        is_low = tl.sum(tl.where(bits >= middle, sampled, 0.0), 0) >= share * mass + margin
        low = tl.where(is_low, middle, low)
        not_low = tl.where(is_low, not_low, middle)
        middle = middle_of(not_high, high)
        is_high = tl.sum(tl.where(bits >= middle, sampled, 0.0), 0) < share * mass - margin
        high = tl.where(is_high, middle, high)
        not_high = tl.where(is_high, not_high, middle)
    return low, high


@triton.jit
def draw_from_list(
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
        divisor = load_divisor(temperature, row)
        _, peak, weights = load_chunks(maxima, sums, num_chunks, row, divisor, CHUNKS)
        total = tl.sum(weights, 0).to(tl.float32)
        peak = divide(peak, divisor)
        k, p, m, uniform = tl.load(top_k + row), tl.load(top_p + row), tl.load(min_p + row), tl.load(uniforms + row)
        num_listed, least = tl.load(between + row * 2), tl.load(between + row * 2 + 1)
        # No token that is not listed has a larger probability.
        beyond = bits_of(probabilities_of(divide(float_of_key(least - 1), divisor), peak, total))
        beyond = tl.where(num_listed == num_columns, 0, beyond)
        listed += row * ROW_ROOM
        place = -1
        if num_listed <= SHORT_LIST:
            place = _place_in_list(listed, num_listed, beyond, divisor, peak, total, k, p, m, uniform, SHORT_LIST, True)
        else:
            place = _place_in_list(listed, num_listed, beyond, divisor, peak, total, k, p, m, uniform, LIST_ROOM, False)
        if place >= 0:
            token = tl.load(listed_ids + row * LIST_ROOM + place)
            store_token(token_ids, bad, row, token, False, num_columns)
        tl.store(threshold + row, tl.where(place >= 0, _DRAWN, _NOT_FOUND))


@triton.jit
def _place_in_list(
    listed, num_listed, beyond, divisor, peak, total, k, p, m, uniform, ROOM: tl.constexpr, SORTED: tl.constexpr
):
    """The place of the token in the list, or -1 if the filters leave others too. No other has bits above `beyond`."""
    slots = tl.arange(0, ROOM)
    x = tl.load(listed + slots, mask=slots < num_listed, other=-INF)
    probabilities = probabilities_of(divide(x, divisor), peak, total)
    bits = tl.where(slots < num_listed, bits_of(probabilities), -1)
    masses = probabilities.to(tl.float64)
    largest = probabilities_of(peak, peak, total)
    floor, high = bits_of(m * largest), bits_of(largest) + 1
    only_top_p = (k == 0) & (m == 0) & (beyond > 0)
    if SORTED:
        descending = tl.sort(bits, descending=True)
        cumulative = tl.cumsum(tl.maximum(descending, 0).to(tl.float32, bitcast=True).to(tl.float64), 0)
    if (k > 0) & (k <= num_listed):
        if SORTED:
            kth = tl.sum(tl.where(slots == k - 1, descending, 0), 0)
        else:
            ones = (bits >= 0).to(tl.float64)
            kth = least_of_mass(bits, ones, tl.full([], 0, tl.int32), high, k.to(tl.float64))
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
                bound = least_of_mass(bits, masses, tl.maximum(floor, least_of(bits, 0)), high, limit)
    kept = tl.where(bits >= bound, masses, 0.0)
    place = tl.maximum(first_above(kept, slots, uniform * tl.sum(kept, 0)), 0)
    is_settled = (floor > beyond) | (beyond == 0) | (only_top_p & (bound > beyond))
    return tl.where(is_settled & (bound >= 0), place, -1)


@triton.jit
def list_near(
    logits, row_stride, num_columns, temperature, maxima, sums, num_chunks, threshold, between, masses, near, num_near,
    NEAR_ROOM: tl.constexpr, CHUNK: tl.constexpr, CHUNKS: tl.constexpr, DEPENDENT: tl.constexpr,
):  # fmt: skip
    """Lists for each chunk of a row whose threshold is between two numbers: the tokens there, and the mass of all
    tokens, of those above, and of those there."""
    if DEPENDENT:
        wait_for_kernel_before()
    chunk, row = tl.program_id(0), tl.program_id(1).to(tl.int64)
    if tl.load(threshold + row) == _NEARLY_FOUND:
        divisor = load_divisor(temperature, row)
        _, peak, weights = load_chunks(maxima, sums, num_chunks, row, divisor, CHUNKS)
        total = tl.sum(weights, 0).to(tl.float32)
        peak = divide(peak, divisor)
        low, high = tl.load(between + row * 2), tl.load(between + row * 2 + 1)
        logits += row * row_stride
        while chunk < num_chunks:
            place = row * num_chunks + chunk
            count = 0
            whole, above, there = (tl.full([], 0.0, tl.float64),) * 3
            for start in range(0, CHUNK, 1024):
                columns = chunk * CHUNK + start + tl.arange(0, 1024)
                p = probabilities_of(load_scaled(logits, columns, num_columns, divisor), peak, total)
                bits = bits_of(p)
                is_near = (bits >= low) & (bits < high) & (bits > 0)
                at = count + tl.cumsum(is_near.to(tl.int32), 0) - 1
                tl.store(near + place * NEAR_ROOM + at, p, mask=is_near & (at < NEAR_ROOM))
                count += count_true(is_near)
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
def draw_others(
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
    divisor = load_divisor(temperature, row)
    _, peak, weights = load_chunks(maxima, sums, num_chunks, row, divisor, CHUNKS)
    total = tl.sum(weights, 0).to(tl.float32)
    peak = divide(peak, divisor)
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
                weights += tl.sum(tl.where(bits_of(candidates) >= least, candidates, 0.0).to(tl.float64), 1)
                start += AT_ONCE
            is_summed = least >= 0
    if least == _NOT_FOUND:
        k, p, m = tl.load(top_k + row), tl.load(top_p + row), tl.load(min_p + row)
        least = search_threshold(logits, num_columns, divisor, peak, total, k, p, m, listed, BLOCK, PIVOTS, LIST_ROOM)
    if is_summed == 0:
        weights = _sum_kept(logits, num_columns, divisor, peak, total, least, num_chunks, CHUNK, CHUNKS)
    uniform = tl.load(uniforms + row)
    token = draw_token(logits, num_columns, divisor, uniform, weights, peak, total, least, True, CHUNK, CHUNKS)
    store_token(token_ids, bad, row, token, False, num_columns)


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
        bits = bits_of(candidates)
        missing -= tl.sum(tl.where(bits >= high, candidates, 0.0).to(tl.float64), 0)
        is_nearer = (bits >= low) & (bits < high) & (bits > 0)
        at = num_listed + tl.cumsum(is_nearer.to(tl.int32), 0) - 1
        tl.store(listed + at, candidates, mask=is_nearer & (at < ROW_ROOM))
        num_listed += count_true(is_nearer)
        start += AT_ONCE
    tl.debug_barrier()
    slots = tl.arange(0, ROW_ROOM)
    nearer = tl.load(listed + slots, mask=slots < num_listed, other=0.0)
    masses = nearer.to(tl.float64)
    result = tl.full([], _NOT_FOUND, tl.int32)
    if (num_listed <= ROW_ROOM) & (missing > 0) & (tl.sum(masses, 0) >= missing):
        result = least_of_mass(bits_of(nearer), masses, low, high, missing)
    return result


@triton.jit
def _sum_kept(logits, num_columns, divisor, peak, total, least, num_chunks, CHUNK: tl.constexpr, CHUNKS: tl.constexpr):
    """The mass [CHUNKS] of each chunk of a row that its threshold keeps."""
    chunks = tl.arange(0, CHUNKS)
    kept = tl.zeros([CHUNKS], tl.float64)
    chunk = 0
    while chunk < num_chunks:
        x = load_scaled(logits, chunk * CHUNK + tl.arange(0, CHUNK), num_columns, divisor)
        p = probabilities_of(x, peak, total)
        mass = tl.sum(tl.where(bits_of(p) >= least, p, 0.0).to(tl.float64), 0)
        kept = tl.where(chunks == chunk, mass, kept)
        chunk += 1
    return kept
