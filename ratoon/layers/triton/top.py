"""The largest of many numbers on a GPU, with their places: for beam candidates and for alternatives in
log-probabilities.

Rows of logits form searches: the beams of one search, or a single row. Numbers and places are packed into int64 keys,
so that one comparison orders by falling score and, among equals, by rising place. A search's best keys are found in two
rounds: its groups of columns by their maxima, then the tokens of the best groups. The best K tokens are in the K groups
that come first in the same order, because the maximum of a group comes before all its other tokens. Nothing waits for
the device.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import torch
import triton
import triton.language as tl

from ratoon.layers.triton.dependent import launch_options, wait_for_kernel_before
from ratoon.layers.triton.launch import launch

Tensor = torch.Tensor

GROUP = 256  # columns in a group
GROUPS_AT_ONCE = 16  # that one program reads
SEGMENT = 1024  # keys that one program (one warp) orders, or more where more of them are wanted
MERGED = 4096  # the same of lists of keys
FEWEST_SORTED, MAX_SORTED = 64, 512  # keys that one program sorts
_INF = tl.constexpr(float("inf"))
_MISSING = tl.constexpr(-(2**63))  # the key of no number: comes last
_UNSOUND = tl.constexpr(2**63 - 1)  # the key of a row of NaN or infinite logits: comes first
_PLACES = tl.constexpr(2**32 - 1)
_LARGEST_INT = tl.constexpr(2**31 - 1)


class Normalizers(NamedTuple):
    """log_softmax of a row is (logits - peak) - log_sum."""

    peak: Tensor  # [R] float32: the largest logit
    log_sum: Tensor  # [R] float32


def normalizers_and_maxima(logits: Tensor) -> tuple[Normalizers, Tensor]:
    """Computes both in one pass over logits [R, V]. The maxima [R, ceil(V / GROUP)] are those of groups of columns. The
    normalizers of a row with a NaN, or without a finite number, are not finite."""
    num_rows = len(logits)
    maxima, parts, num_parts = _reduced(logits)
    # Tensors of their own: kernels are compiled for aligned ones.
    found = [torch.empty(num_rows, dtype=torch.float32, device=logits.device) for _ in range(2)]
    launch(
        _merge_parts, (num_rows,), *parts, *found, num_parts, triton.next_power_of_2(num_parts), **_early(logits),
        num_warps=1,
    )  # fmt: skip
    return Normalizers(*found), maxima


def group_maxima(logits: Tensor) -> Tensor:
    """The maxima alone."""
    return _reduced(logits, with_sums=False)[0]


def _reduced(
    logits: Tensor, token_ids: Tensor | None = None, with_sums: bool = True
) -> tuple[Tensor, tuple[Tensor, ...], int]:
    """The maxima of groups. Of parts of each row [R, P]: the largest logit and the sum of exponentials, and how many
    logits are larger than that of the row's token, where there is one. P."""
    num_rows, num_columns = logits.shape
    num_groups = triton.cdiv(num_columns, GROUP)
    num_parts = triton.cdiv(num_groups, GROUPS_AT_ONCE)
    maxima = torch.empty(num_rows, num_groups, dtype=torch.float32, device=logits.device)
    parts = [maxima, maxima]  # not written
    if with_sums:
        shape = (num_rows, num_parts)
        parts = [torch.empty(shape, dtype=torch.float32, device=logits.device) for _ in range(2)]
    larger = maxima  # not written
    if token_ids is not None:
        larger = torch.empty(num_rows, num_parts, dtype=torch.int32, device=logits.device)
    launch(
        _reduce_groups, (num_parts, num_rows),
        logits, logits.stride(0), num_columns, maxima, *parts, num_groups, num_parts,
        larger if token_ids is None else token_ids, larger, with_sums, token_ids is not None, GROUPS_AT_ONCE, GROUP,
        num_warps=4,
    )  # fmt: skip
    return maxima, (*parts, *([] if token_ids is None else [larger])), num_parts


def _early(x: Tensor) -> dict[str, Any]:
    return launch_options(x.device.type != "cpu")


def best_keys(
    logits: Tensor,  # [R, V]
    normalizers: Normalizers,  # [R]
    scores: Tensor,  # [R] float32, of the beams
    maxima: Tensor,  # [R, G] from the same logits
    row_bounds: Tensor | tuple[Tensor, Tensor],  # [2, S] int64: the first row of each search, the row after its last
    max_rows: int,  # of a search
    num_wanted: int,  # a program keeps four times as many keys in registers
) -> Tensor:
    """[S, W] int64: keys of tokens of each search, in no order; those of the best `num_wanted` are among them. A key's
    place counts the tokens of the search, row after row. A score is ((logit - peak) - log_sum) + score, rounded at
    every step."""
    width = _width(num_wanted)
    offsets = (*normalizers, scores, *row_bounds)
    return _best_of(_key_lists(logits, maxima, offsets, row_bounds[0].shape[0], max_rows, width), width)


def _width(num_wanted: int) -> int:
    return max(triton.next_power_of_2(num_wanted), 8)


def _key_lists(
    logits: Tensor,
    maxima: Tensor,
    offsets: tuple[Tensor, ...] | None,  # None: every row is a search, and its logits are the scores
    num_searches: int,
    max_rows: int,
    width: int,
) -> Tensor:
    """[S, L · 2 · width]: L lists of keys, in which the best are."""
    num_columns, num_groups = logits.shape[1], maxima.shape[1]
    is_scored = offsets is not None
    offsets = (maxima,) * 5 if offsets is None else offsets
    segment = _segment(num_groups, width)
    num_segments = triton.cdiv(num_groups, segment)  # of a row
    keys = torch.empty(num_searches, max_rows * num_segments, 2 * width, dtype=torch.int64, device=logits.device)
    launch(
        _rank_groups, (num_segments, max_rows, num_searches), maxima, *offsets, keys, num_groups, is_scored, segment,
        width, **_early(logits), num_warps=_num_warps(segment),
    )  # fmt: skip
    best_groups = _best_of(keys.flatten(1), width)  # [S, 2 · width]

    groups_at_once = _segment(2 * width * GROUP, width) // GROUP
    num_segments = 2 * width // groups_at_once
    keys = torch.empty(num_searches, num_segments, 2 * width, dtype=torch.int64, device=logits.device)
    launch(
        _rank_tokens, (num_segments, num_searches),
        logits, logits.stride(0), num_columns, *offsets, best_groups, keys, num_groups, num_segments, is_scored,
        groups_at_once, GROUP, width, **_early(logits), num_warps=_num_warps(groups_at_once * GROUP),
    )  # fmt: skip
    return keys.flatten(1)


def _segment(num_keys: int, width: int) -> int:
    """Keys that one program orders."""
    return min(max(SEGMENT, 4 * width), triton.next_power_of_2(num_keys))


def _num_warps(segment: int) -> int:
    return min(max(segment // SEGMENT, 1), 8)


def _best_of(keys: Tensor, width: int) -> Tensor:
    """[S, N] → [S, 2 · width]: the largest, and others."""
    while keys.shape[1] > 2 * width:
        num_searches, num_keys = keys.shape
        segment = min(max(MERGED, 4 * width), triton.next_power_of_2(num_keys))
        num_segments = triton.cdiv(num_keys, segment)
        best = torch.empty(num_searches, num_segments * 2 * width, dtype=torch.int64, device=keys.device)
        launch(
            _rank_keys, (num_segments, num_searches), keys, best, num_keys, num_segments, segment, width,
            **_early(keys), num_warps=_num_warps(segment),
        )  # fmt: skip
        keys = best
    return keys


def unpack(keys: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Returns, of keys [S, W], the scores [S, W] float32, best first, their places [S, W] int64, and whether a row of
    the search was unsound [S]. It is done by numpy, whose calls take a fraction of torch's for so few numbers."""
    keys = ~np.sort(~keys, axis=-1)  # the largest first
    high = keys >> 32
    bits = (high ^ ((high >> 31) & 0x7FFFFFFF)).astype(np.int32)
    return bits.view(np.float32), 0xFFFFFFFF - (keys & 0xFFFFFFFF), keys[:, 0] == 2**63 - 1


def token_logprobs(logits: Tensor, token_ids: Tensor, num_top: int) -> tuple[Tensor, Tensor, Tensor]:
    """Returns for each row [R] the ids and log-probabilities [R, 1 + num_top] of the given token and of the most
    probable ones, and the given token's rank [R]. Of equals the lower id comes first. One pass over the logits,
    whatever is asked for."""
    num_rows, num_columns = logits.shape
    maxima, parts, num_parts = _reduced(logits, token_ids)
    keys, num_keys = token_ids, FEWEST_SORTED  # not read
    if num_top:
        # By the logits themselves: log-probabilities of different logits may be equal.
        width = _width(num_top)
        keys = _key_lists(logits, maxima, None, num_rows, 1, width)
        if keys.shape[1] > MAX_SORTED:
            keys = _best_of(keys, width)
        num_keys = keys.shape[1]
    ids = torch.empty(num_rows, 1 + num_top, dtype=torch.int64, device=logits.device)
    logprobs = torch.empty(num_rows, 1 + num_top, dtype=torch.float32, device=logits.device)
    ranks = torch.empty(num_rows, dtype=torch.int64, device=logits.device)
    launch(
        _list_logprobs, (num_rows,),
        logits, logits.stride(0), num_columns, token_ids, *parts, num_parts, keys, num_keys, ids, logprobs, ranks,
        num_top, triton.next_power_of_2(num_parts), triton.next_power_of_2(num_keys), **_early(logits),
        num_warps=1 if num_keys <= 256 else 4,
    )  # fmt: skip
    return ids, logprobs, ranks


# ---------------------------------------------------------------------------------------------------------------------
# Kernels


@triton.jit
def _rank_key(scores, places):
    """The order of the keys is that of the scores; among equals the lower place has the larger key."""
    bits = (scores + 0.0).to(tl.int32, bitcast=True)  # -0 equals 0
    high = bits ^ ((bits >> 31) & 0x7FFFFFFF)
    return (high.to(tl.int64) << 32) | (_PLACES - places.to(tl.int64))


@triton.jit
def _score_keys(x, peak, log_sum, score, places):
    keys = _rank_key(((x - peak) - log_sum) + score, places)
    sound = (peak < _INF) & (peak > -_INF) & (log_sum < _INF) & (log_sum > -_INF)
    return tl.where(sound, keys, _UNSOUND)


@triton.jit
def _store_largest(out, keys, WIDTH: tl.constexpr):
    """The WIDTH largest keys and up to as many of the next ones, in the order in which they are. Keys of equal scores
    are in the order of their places, so that only scores are compared: the range of the least of them is halved until
    few enough are left, or all that are too many are equal."""
    ROOM: tl.constexpr = 2 * WIDTH
    scores = tl.minimum((keys >> 32).to(tl.int32), _LARGEST_INT - 1)
    exists = keys != _MISSING
    found = tl.sum(exists.to(tl.int32), 0)  # that are not below `least`
    least = tl.min(tl.where(exists, scores, _LARGEST_INT), 0)
    above = tl.max(scores, 0) + 1  # fewer than WIDTH are not below this one
    while (found > ROOM) & (least + 1 < above):
        middle = (least >> 1) + (above >> 1) + (least & above & 1)
        count = tl.sum((scores >= middle).to(tl.int32), 0)
        is_enough = count >= WIDTH
        found = tl.where(is_enough, count, found)
        least = tl.where(is_enough, middle, least)
        above = tl.where(is_enough, above, middle)
    chosen = exists & (scores >= least)
    if found > ROOM:
        is_larger, is_equal = exists & (scores > least), exists & (scores == least)
        num_equal = ROOM - tl.sum(is_larger.to(tl.int32), 0)
        chosen = is_larger | (is_equal & (tl.cumsum(is_equal.to(tl.int32), 0) <= num_equal))
    tl.store(out + tl.cumsum(chosen.to(tl.int32), 0) - 1, keys, mask=chosen)
    rest = tl.arange(0, ROOM)
    tl.store(out + rest, _MISSING, mask=rest >= found)


@triton.jit
def _reduce_groups(
    logits, row_stride, num_columns, maxima, peaks, sums, num_groups, num_parts, token_ids, larger,
    WITH_SUMS: tl.constexpr, WITH_RANKS: tl.constexpr, GROUPS: tl.constexpr, GROUP: tl.constexpr,
):  # fmt: skip
    part, row = tl.program_id(0), tl.program_id(1).to(tl.int64)
    groups = part * GROUPS + tl.arange(0, GROUPS)
    columns = groups[:, None] * GROUP + tl.arange(0, GROUP)[None, :]  # [GROUPS, GROUP]
    logits += row * row_stride
    x = tl.load(logits + columns, mask=columns < num_columns, other=-_INF).to(tl.float32)
    if WITH_RANKS:
        own = tl.load(logits + tl.load(token_ids + row)).to(tl.float32)
        tl.store(larger + row * num_parts + part, tl.sum(tl.sum((x > own).to(tl.int32), 1), 0))
    if WITH_SUMS == 0:  # otherwise the sum is NaN, too
        x = tl.where(x == x, x, _INF)
    tops = tl.max(x, 1)
    tl.store(maxima + row * num_groups + groups, tops, mask=groups < num_groups)
    if WITH_SUMS:
        peak = tl.max(tops, 0)
        base = tl.where((peak < _INF) & (peak > -_INF), peak, 0.0)
        place = row * num_parts + part
        tl.store(peaks + place, peak)
        tl.store(sums + place, tl.sum(tl.sum(tl.exp(x - base), 1), 0))


@triton.jit
def _merged(peaks, sums, row, num_parts, PARTS: tl.constexpr):
    parts = tl.arange(0, PARTS)
    tops = tl.load(peaks + row * num_parts + parts, mask=parts < num_parts, other=-_INF)
    of_parts = tl.load(sums + row * num_parts + parts, mask=parts < num_parts, other=0.0)
    peak = tl.max(tops, 0)
    total = tl.sum(of_parts.to(tl.float64) * tl.exp((tops - peak).to(tl.float64)), 0)
    return peak, tl.log(total).to(tl.float32)


@triton.jit
def _merge_parts(peaks, sums, peak_of_row, log_sum_of_row, num_parts, PARTS: tl.constexpr, DEPENDENT: tl.constexpr):
    if DEPENDENT:
        wait_for_kernel_before()
    row = tl.program_id(0).to(tl.int64)
    peak, log_sum = _merged(peaks, sums, row, num_parts, PARTS)
    tl.store(peak_of_row + row, peak)
    tl.store(log_sum_of_row + row, log_sum)


@triton.jit
def _rank_groups(
    maxima, peaks, log_sums, scores, starts, stops, best, num_groups,
    IS_SCORED: tl.constexpr, SEGMENT: tl.constexpr, WIDTH: tl.constexpr, DEPENDENT: tl.constexpr,
):  # fmt: skip
    """The best groups among some of a row's, by their maxima."""
    if DEPENDENT:
        wait_for_kernel_before()
    beam, search = tl.program_id(1), tl.program_id(2).to(tl.int64)
    groups = tl.program_id(0) * SEGMENT + tl.arange(0, SEGMENT)
    places = beam * num_groups + groups
    row = search
    exists = groups < num_groups
    if IS_SCORED:
        row = tl.load(starts + search) + beam
        exists = exists & (row < tl.load(stops + search))
    x = tl.load(maxima + row * num_groups + groups, mask=exists, other=0.0)
    if IS_SCORED:
        is_row = row < tl.load(stops + search)
        peak = tl.load(peaks + row, mask=is_row, other=0.0)
        log_sum = tl.load(log_sums + row, mask=is_row, other=0.0)
        keys = _score_keys(x, peak, log_sum, tl.load(scores + row, mask=is_row, other=0.0), places)
    else:
        keys = _rank_key(x, places)
    keys = tl.where(exists, keys, _MISSING)
    list_of_search = beam * tl.num_programs(0) + tl.program_id(0)
    num_lists = tl.num_programs(0) * tl.num_programs(1)
    _store_largest(best + (search * num_lists + list_of_search) * (2 * WIDTH), keys, WIDTH)


@triton.jit(do_not_specialize=["num_segments"])
def _rank_tokens(
    logits, row_stride, num_columns, peaks, log_sums, scores, starts, stops, best_groups, best, num_groups,
    num_segments, IS_SCORED: tl.constexpr, GROUPS: tl.constexpr, GROUP: tl.constexpr, WIDTH: tl.constexpr,
    DEPENDENT: tl.constexpr,
):  # fmt: skip
    """The best tokens among those of some of a search's best groups."""
    if DEPENDENT:
        wait_for_kernel_before()
    segment, search = tl.program_id(0), tl.program_id(1).to(tl.int64)
    places = segment * GROUPS + tl.arange(0, GROUPS)
    group_keys = tl.load(best_groups + search * (2 * WIDTH) + places)
    unsound, exists = group_keys == _UNSOUND, (group_keys != _UNSOUND) & (group_keys != _MISSING)
    groups = tl.where(exists, _PLACES - (group_keys & _PLACES), 0).to(tl.int32)
    beams = groups // num_groups
    columns = (groups % num_groups)[:, None] * GROUP + tl.arange(0, GROUP)[None, :]  # [GROUPS, GROUP]
    inside = exists[:, None] & (columns < num_columns)
    tokens = beams[:, None].to(tl.int64) * num_columns + columns
    rows = search + beams
    if IS_SCORED:
        rows = tl.load(starts + search) + beams
    x = tl.load(logits + rows[:, None] * row_stride + columns, mask=inside, other=0.0).to(tl.float32)
    if IS_SCORED:
        peak, log_sum, score = tl.load(peaks + rows), tl.load(log_sums + rows), tl.load(scores + rows)
        keys = _score_keys(x, peak[:, None], log_sum[:, None], score[:, None], tokens)
    else:
        keys = _rank_key(x, tokens)
    keys = tl.where(inside, keys, _MISSING)
    keys = tl.where(unsound[:, None], _UNSOUND, keys)
    keys = tl.reshape(keys, [GROUPS * GROUP])
    _store_largest(best + (search * num_segments + segment) * (2 * WIDTH), keys, WIDTH)


@triton.jit(do_not_specialize=["num_segments"])
def _rank_keys(keys, best, num_keys, num_segments, SEGMENT: tl.constexpr, WIDTH: tl.constexpr, DEPENDENT: tl.constexpr):
    if DEPENDENT:
        wait_for_kernel_before()
    segment, search = tl.program_id(0), tl.program_id(1).to(tl.int64)
    places = segment * SEGMENT + tl.arange(0, SEGMENT)
    found = tl.load(keys + search * num_keys + places, mask=places < num_keys, other=_MISSING)
    _store_largest(best + (search * num_segments + segment) * (2 * WIDTH), found, WIDTH)


@triton.jit(do_not_specialize=["num_top"])
def _list_logprobs(
    logits, row_stride, num_columns, token_ids, peaks, sums, larger, num_parts, keys, num_keys, ids, logprobs, ranks,
    num_top, PARTS: tl.constexpr, KEYS: tl.constexpr, DEPENDENT: tl.constexpr,
):  # fmt: skip
    """The row's own token and its rank, then the best of its keys, best first."""
    if DEPENDENT:
        wait_for_kernel_before()
    row = tl.program_id(0).to(tl.int64)
    peak, log_sum = _merged(peaks, sums, row, num_parts, PARTS)
    own = tl.load(token_ids + row)
    logit = tl.load(logits + row * row_stride + own).to(tl.float32)
    first = row * (num_top + 1)
    tl.store(ids + first, own)
    tl.store(logprobs + first, (logit - peak) - log_sum)
    parts = tl.arange(0, PARTS)
    num_larger = tl.sum(tl.load(larger + row * num_parts + parts, mask=parts < num_parts, other=0), 0)
    tl.store(ranks + row, (num_larger + 1).to(tl.int64))
    if num_top > 0:
        places = tl.arange(0, KEYS)
        found = tl.load(keys + row * num_keys + places, mask=places < num_keys, other=_MISSING)
        found = tl.sort(found, descending=True)
        high = (found >> 32).to(tl.int32)
        x = (high ^ ((high >> 31) & 0x7FFFFFFF)).to(tl.float32, bitcast=True)
        tokens = tl.minimum(_PLACES - (found & _PLACES), num_columns - 1)
        tl.store(ids + first + 1 + places, tokens, mask=places < num_top)
        tl.store(logprobs + first + 1 + places, (x - peak) - log_sum, mask=places < num_top)
