"""The largest of many numbers on a GPU, with their places: for beam candidates and for alternatives in
log-probabilities.

Rows of logits form searches: the beams of one search, or a single row. Numbers and places are packed into int64 keys,
so that one comparison orders by falling score and, among equals, by rising place. A search's best keys are found in two
rounds: its groups of columns by their maxima, then the tokens of the best groups. The best K tokens are in the K groups
that come first in the same order, because the maximum of a group comes before all its other tokens. Nothing waits for
the device.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import torch
import triton
import triton.language as tl

from ratoon.layers.triton.launch import launch

Tensor = torch.Tensor

GROUP = 256  # columns in a group
GROUPS_AT_ONCE = 16  # that one program reads
SEGMENT = 4096  # keys that one program orders, or more where more of them are wanted
_INF = tl.constexpr(float("inf"))
_MISSING = tl.constexpr(-(2**63))  # the key of no number: comes last
_UNSOUND = tl.constexpr(2**63 - 1)  # the key of a row of NaN or infinite logits: comes first
_PLACES = tl.constexpr(2**32 - 1)


class Normalizers(NamedTuple):
    """log_softmax of a row is (logits - peak) - log_sum."""

    peak: Tensor  # [R] float32: the largest logit
    log_sum: Tensor  # [R] float32


def normalizers_and_maxima(logits: Tensor) -> tuple[Normalizers, Tensor]:
    """From one pass over logits [R, V]. The maxima [R, ceil(V / GROUP)] are those of groups of columns. The normalizers
    of a row with a NaN, or without a finite number, are not finite."""
    num_rows, num_columns = logits.shape
    num_groups = triton.cdiv(num_columns, GROUP)
    num_parts = triton.cdiv(num_groups, GROUPS_AT_ONCE)
    device = logits.device
    maxima = torch.empty(num_rows, num_groups, dtype=torch.float32, device=device)
    parts = torch.empty(2, num_rows, num_parts, dtype=torch.float32, device=device)
    found = torch.empty(2, num_rows, dtype=torch.float32, device=device)
    launch(
        _reduce_groups, (num_parts, num_rows),
        logits, logits.stride(0), num_columns, maxima, *parts, num_groups, num_parts, True, GROUPS_AT_ONCE, GROUP,
        num_warps=4,
    )  # fmt: skip
    launch(_merge_parts, (num_rows,), *parts, *found, num_parts, triton.next_power_of_2(num_parts), num_warps=1)
    return Normalizers(*found), maxima


def group_maxima(logits: Tensor) -> Tensor:
    """The maxima alone."""
    num_rows, num_columns = logits.shape
    num_groups = triton.cdiv(num_columns, GROUP)
    num_parts = triton.cdiv(num_groups, GROUPS_AT_ONCE)
    maxima = torch.empty(num_rows, num_groups, dtype=torch.float32, device=logits.device)
    launch(
        _reduce_groups, (num_parts, num_rows),
        logits, logits.stride(0), num_columns, maxima, maxima, maxima, num_groups, num_parts, False, GROUPS_AT_ONCE,
        GROUP, num_warps=4,
    )  # fmt: skip
    return maxima


def best_keys(
    logits: Tensor,  # [R, V]
    normalizers: Normalizers,  # [R]
    scores: Tensor,  # [R] float32, of the beams
    maxima: Tensor,  # [R, G] from the same logits
    row_bounds: Tensor | tuple[Tensor, Tensor],  # [2, S] int64: the first row of each search, the row after its last
    max_rows: int,  # of a search
    num_wanted: int,  # a program keeps four times as many keys in registers
) -> Tensor:
    """[S, W] int64, W ≥ num_wanted: the keys of the best W tokens of each search, in no order. A key's place counts the
    tokens of the search, row after row. A score is ((logit - peak) - log_sum) + score, rounded at every step."""
    num_searches = row_bounds[0].shape[0]
    num_columns, num_groups = logits.shape[1], maxima.shape[1]
    width = max(triton.next_power_of_2(num_wanted), 2)
    segment = max(SEGMENT, 4 * width)
    offsets = (*normalizers, scores, *row_bounds)

    num_segments = triton.cdiv(max_rows * num_groups, segment)
    keys = torch.empty(num_searches, num_segments, width, dtype=torch.int64, device=logits.device)
    launch(
        _rank_groups, (num_segments, num_searches), maxima, *offsets, keys, num_groups, num_segments, segment, width,
        num_warps=8,
    )  # fmt: skip
    best_groups = _best_of(keys.flatten(1), width)  # [S, width]

    groups_at_once = segment // GROUP
    num_segments = triton.cdiv(width, groups_at_once)
    keys = torch.empty(num_searches, num_segments, width, dtype=torch.int64, device=logits.device)
    launch(
        _rank_tokens, (num_segments, num_searches),
        logits, logits.stride(0), num_columns, *offsets, best_groups, keys, num_groups, num_segments, groups_at_once,
        GROUP, width, num_warps=8,
    )  # fmt: skip
    return _best_of(keys.flatten(1), width)


def _best_of(keys: Tensor, width: int) -> Tensor:
    """[S, N] → [S, width], the largest."""
    while keys.shape[1] > width:
        num_searches, num_keys = keys.shape
        segment = min(max(SEGMENT, 4 * width), triton.next_power_of_2(num_keys))
        num_segments = triton.cdiv(num_keys, segment)
        best = torch.empty(num_searches, num_segments * width, dtype=torch.int64, device=keys.device)
        launch(
            _rank_keys, (num_segments, num_searches), keys, best, num_keys, num_segments, segment, width, num_warps=8
        )
        keys = best
    return keys


def unpack(keys: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Of keys [S, W], on any device: scores [S, W] float32, best first, their places [S, W] int64, and whether a row of
    the search was unsound [S]."""
    keys = keys.sort(dim=-1, descending=True).values
    high = keys >> 32
    bits = (high ^ ((high >> 31) & 0x7FFFFFFF)).to(torch.int32)
    return bits.view(torch.float32), 0xFFFFFFFF - (keys & 0xFFFFFFFF), keys[:, 0] == 2**63 - 1


def unpack_on_host(keys: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """The same by numpy, whose calls take a fraction of torch's for so few numbers."""
    keys = ~np.sort(~keys, axis=-1)  # the largest first
    high = keys >> 32
    bits = (high ^ ((high >> 31) & 0x7FFFFFFF)).astype(np.int32)
    return bits.view(np.float32), 0xFFFFFFFF - (keys & 0xFFFFFFFF), keys[:, 0] == 2**63 - 1


def token_logprobs(logits: Tensor, token_ids: Tensor, num_top: int) -> tuple[Tensor, Tensor, Tensor]:
    """Of each row [R]: ids and log-probabilities [R, 1 + num_top] of the given token and of the most probable ones, and
    the given token's rank [R]. Of equals the lower id comes first."""
    num_rows, num_columns = logits.shape
    (peak, log_sum), maxima = normalizers_and_maxima(logits)
    ids = token_ids[:, None]
    num_parts = triton.cdiv(num_columns, GROUP * GROUPS_AT_ONCE)
    larger = torch.empty(num_rows, num_parts, dtype=torch.int32, device=logits.device)
    launch(
        _count_larger, (num_parts, num_rows), logits, logits.stride(0), num_columns, token_ids, larger, num_parts,
        GROUP * GROUPS_AT_ONCE, num_warps=4,
    )  # fmt: skip
    if num_top:
        rows = torch.arange(num_rows + 1, device=logits.device)
        # By the logits themselves: log-probabilities of different logits may be equal.
        nothing = torch.zeros(num_rows, device=logits.device)
        bounds = torch.stack([rows[:-1], rows[1:]])
        _, top_ids, _ = unpack(best_keys(logits, Normalizers(nothing, nothing), nothing, maxima, bounds, 1, num_top))
        ids = torch.cat([ids, top_ids[:, :num_top].clamp_max(num_columns - 1)], dim=1)
    logprobs = (logits.gather(1, ids).float() - peak[:, None]) - log_sum[:, None]
    return ids, logprobs, larger.sum(dim=1) + 1


# ---------------------------------------------------------------------------------------------------------------------
# Kernels


@triton.jit
def _rank_key(scores, places):
    """The order of the keys is that of the scores; among equals the lower place has the larger key."""
    bits = (scores + 0.0).to(tl.int32, bitcast=True)  # -0 equals 0
    high = bits ^ ((bits >> 31) & 0x7FFFFFFF)
    return (high.to(tl.int64) << 32) | (_PLACES - places)


@triton.jit
def _score_keys(x, peak, log_sum, score, places):
    keys = _rank_key(((x - peak) - log_sum) + score, places)
    sound = (peak < _INF) & (peak > -_INF) & (log_sum < _INF) & (log_sum > -_INF)
    return tl.where(sound, keys, _UNSOUND)


@triton.jit
def _store_largest(out, keys, WIDTH: tl.constexpr):
    """The WIDTH largest of distinct keys. Tries the bits of the least of them from the highest to the lowest."""
    least = tl.where(tl.sum((keys >= 0).to(tl.int32), 0) >= WIDTH, tl.full([], 0, tl.int64), _MISSING)
    for bit in range(63):
        raised = least + (tl.full([], 1, tl.int64) << (62 - bit))
        least = tl.where(tl.sum((keys >= raised).to(tl.int32), 0) >= WIDTH, raised, least)
    chosen = (keys >= least) & (keys != _MISSING)
    places = tl.cumsum(chosen.to(tl.int32), 0) - 1
    tl.store(out + places, keys, mask=chosen & (places < WIDTH))  # keys of unsound rows are not distinct
    rest = tl.arange(0, WIDTH)
    tl.store(out + rest, _MISSING, mask=rest >= tl.sum(chosen.to(tl.int32), 0))


@triton.jit
def _reduce_groups(
    logits, row_stride, num_columns, maxima, peaks, sums, num_groups, num_parts,
    WITH_SUMS: tl.constexpr, GROUPS: tl.constexpr, GROUP: tl.constexpr,
):  # fmt: skip
    part, row = tl.program_id(0), tl.program_id(1).to(tl.int64)
    groups = part * GROUPS + tl.arange(0, GROUPS)
    columns = groups[:, None] * GROUP + tl.arange(0, GROUP)[None, :]  # [GROUPS, GROUP]
    x = tl.load(logits + row * row_stride + columns, mask=columns < num_columns, other=-_INF).to(tl.float32)
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
def _merge_parts(peaks, sums, peak_of_row, log_sum_of_row, num_parts, PARTS: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    parts = tl.arange(0, PARTS)
    tops = tl.load(peaks + row * num_parts + parts, mask=parts < num_parts, other=-_INF)
    of_parts = tl.load(sums + row * num_parts + parts, mask=parts < num_parts, other=0.0)
    peak = tl.max(tops, 0)
    total = tl.sum(of_parts.to(tl.float64) * tl.exp((tops - peak).to(tl.float64)), 0)
    tl.store(peak_of_row + row, peak)
    tl.store(log_sum_of_row + row, tl.log(total).to(tl.float32))


@triton.jit
def _rank_groups(
    maxima, peaks, log_sums, scores, starts, stops, best, num_groups, num_segments,
    SEGMENT: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    """The best groups among some of a search's, by their maxima."""
    segment, search = tl.program_id(0), tl.program_id(1).to(tl.int64)
    first, stop = tl.load(starts + search), tl.load(stops + search)
    places = segment * SEGMENT + tl.arange(0, SEGMENT).to(tl.int64)
    exists = places < (stop - first) * num_groups
    rows = first + places // num_groups
    x = tl.load(maxima + first * num_groups + places, mask=exists, other=0.0)
    peak = tl.load(peaks + rows, mask=exists, other=0.0)
    log_sum = tl.load(log_sums + rows, mask=exists, other=0.0)
    keys = _score_keys(x, peak, log_sum, tl.load(scores + rows, mask=exists, other=0.0), places)
    keys = tl.where(exists, keys, _MISSING)
    _store_largest(best + (search * num_segments + segment) * WIDTH, keys, WIDTH)


@triton.jit
def _rank_tokens(
    logits, row_stride, num_columns, peaks, log_sums, scores, starts, stops, best_groups, best, num_groups,
    num_segments,    GROUPS: tl.constexpr, GROUP: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    """The best tokens among those of some of a search's best groups."""
    segment, search = tl.program_id(0), tl.program_id(1).to(tl.int64)
    first = tl.load(starts + search)
    places = segment * GROUPS + tl.arange(0, GROUPS)
    group_keys = tl.load(best_groups + search * WIDTH + places, mask=places < WIDTH, other=_MISSING)
    unsound, exists = group_keys == _UNSOUND, (group_keys != _UNSOUND) & (group_keys != _MISSING)
    groups = tl.where(exists, _PLACES - (group_keys & _PLACES), 0)
    beams = groups // num_groups
    rows = first + beams
    columns = (groups % num_groups)[:, None] * GROUP + tl.arange(0, GROUP)[None, :]  # [GROUPS, GROUP]
    inside = exists[:, None] & (columns < num_columns)
    x = tl.load(logits + rows[:, None] * row_stride + columns, mask=inside, other=0.0).to(tl.float32)
    peak, log_sum, score = tl.load(peaks + rows), tl.load(log_sums + rows), tl.load(scores + rows)
    tokens = beams[:, None] * num_columns + columns
    keys = _score_keys(x, peak[:, None], log_sum[:, None], score[:, None], tokens)
    keys = tl.where(inside, keys, _MISSING)
    keys = tl.where(unsound[:, None], _UNSOUND, keys)
    keys = tl.reshape(keys, [GROUPS * GROUP])
    _store_largest(best + (search * num_segments + segment) * WIDTH, keys, WIDTH)


@triton.jit
def _rank_keys(keys, best, num_keys, num_segments, SEGMENT: tl.constexpr, WIDTH: tl.constexpr):
    segment, search = tl.program_id(0), tl.program_id(1).to(tl.int64)
    places = segment * SEGMENT + tl.arange(0, SEGMENT)
    found = tl.load(keys + search * num_keys + places, mask=places < num_keys, other=_MISSING)
    _store_largest(best + (search * num_segments + segment) * WIDTH, found, WIDTH)


@triton.jit
def _count_larger(logits, row_stride, num_columns, token_ids, larger, num_parts, CHUNK: tl.constexpr):
    """How many logits of a part of a row are larger than that of the row's token."""
    part, row = tl.program_id(0), tl.program_id(1).to(tl.int64)
    logits += row * row_stride
    own = tl.load(logits + tl.load(token_ids + row)).to(tl.float32)
    columns = part * CHUNK + tl.arange(0, CHUNK)
    x = tl.load(logits + columns, mask=columns < num_columns, other=-_INF).to(tl.float32)
    tl.store(larger + row * num_parts + part, tl.sum((x > own).to(tl.int32), 0))
