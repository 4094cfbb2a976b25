"""Sampling: one token a row from logits, by pure tensor functions over a batch: edits, filters, the draw,
log-probabilities.

There are no requests and no state here: execution/sampling/sampler.py decides which rows need which function. On a GPU
the kernels of layers/triton do the same; they are imported when they are used, since a CPU's installation has no
Triton. On a CPU the kernel of layers/native draws where it was built, and torch elsewhere: the same tokens.

A row's result is independent of the other rows, bit for bit: every operation works within one row, and probabilities
are rounded to multiples of 2^-52 before they are added up, so that sums in float64 are exact in any order. The random
number of a row is a hash of its seed and position.
"""

from __future__ import annotations

import enum
from collections.abc import Callable
from typing import NamedTuple

import numpy as np
import torch

from ratoon.layers import native

Tensor = torch.Tensor

CHUNK = 256  # columns per chunk in the two-level draw and argmax
SMALL_TOP_K = 128  # candidates for rows whose top_k is below this; also for alternatives in log-probabilities
NUCLEUS_CANDIDATES = 512  # candidates for rows with top_p or min_p; a row that needs more sorts its whole vocabulary
CANDIDATE_GROUPS = 16  # see top_candidates
MAX_LISTED = 1024  # alternatives that kernels choose; for more, torch sorts
KERNEL_DEVICES = ("cuda", "meta")  # types; on the latter launches are recorded, see layers/triton/compilation.py

_GOLDEN = np.uint64(0x9E3779B97F4A7C15)
_MASK64 = (1 << 64) - 1


# ---------------------------------------------------------------------------------------------------------------------
# Random numbers


def uniform(seeds: np.ndarray, positions: np.ndarray) -> np.ndarray:
    """One number in [0, 1) for each pair of a seed (uint64) and a position: float64 with 53 random bits.

    A hash, not a generator: nothing is kept between calls, so preemption, replay and batching do not change what a
    branch draws. The seed is mixed before the position is added: neighbouring seeds (the choices of one request) would
    otherwise yield shifted copies of one sequence.
    """
    with np.errstate(over="ignore"):  # arithmetic modulo 2^64 is intended
        key = _mix(seeds.astype(np.uint64) + _GOLDEN)
        mixed = _mix(key + positions.astype(np.uint64) * _GOLDEN)
    return (mixed >> np.uint64(11)).astype(np.float64) * 2.0**-53


def _mix(x: np.ndarray) -> np.ndarray:
    """The finaliser of splitmix64: every bit of the input reaches every bit of the output."""
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))


def seed_to_uint64(seed: int) -> int:
    """Seeds may be negative: the two's complement."""
    return seed & _MASK64


# ---------------------------------------------------------------------------------------------------------------------
# Edits of logits, in place. Entry e of the index lists is the cell (row_ids[e], token_ids[e]); cells are distinct.


def apply_penalties(
    logits: Tensor,  # [R, V]
    row_ids: Tensor,  # [E]
    token_ids: Tensor,  # [E] every token that the row's prompt or output holds, once
    output_counts: Tensor,  # [E] float32: how often the output holds it; 0 for tokens of the prompt alone
    repetition: Tensor,  # [E] the three penalties of the entry's row
    frequency: Tensor,
    presence: Tensor,
) -> None:
    """Repetition looks at prompt and output, frequency and presence at the output alone."""
    values = logits[row_ids, token_ids]
    values = torch.where(values > 0, values / repetition, values * repetition)
    values -= frequency * output_counts
    values -= presence * (output_counts > 0)
    logits[row_ids, token_ids] = values


def add_bias(logits: Tensor, row_ids: Tensor, token_ids: Tensor, bias: Tensor) -> None:
    logits[row_ids, token_ids] += bias


def forbid_tokens(logits: Tensor, row_ids: Tensor, token_ids: Tensor) -> None:
    """Forbids tokens of rows, for bad words and min_tokens. Cells may repeat here."""
    _fill_cells(logits, row_ids, token_ids, -torch.inf)


def allow_only(logits: Tensor, rows: Tensor, row_ids: Tensor, token_ids: Tensor) -> None:
    """Forbids, in `rows`, every token that is not among the entries."""
    kept = logits[row_ids, token_ids]
    logits.index_fill_(0, rows, -torch.inf)
    logits[row_ids, token_ids] = kept


def allow_bits(logits: Tensor, rows: Tensor, words: Tensor) -> None:
    """Forbids, in `rows` [N], every token whose bit in `words` [N, W] int32 is not set; the lowest bit of the first
    word is token 0."""
    if _has_kernel(logits) and logits.is_contiguous():
        kernels = native.library()
        assert kernels is not None
        rows, words = rows.long().contiguous(), words.contiguous()
        pointers = logits.data_ptr(), logits.shape[1], rows.data_ptr(), len(rows), words.data_ptr(), words.shape[1]
        kernels.ratoon_allow_bits(*pointers)
        return
    if logits.device.type == "cuda" and logits.dtype == torch.float32:
        from ratoon.layers.triton import bits

        bits.allow_bits(logits, rows, words)
        return
    places = torch.arange(32, dtype=torch.int32, device=logits.device)
    forbidden = ((words[:, :, None] >> places) & 1 == 0).flatten(1)[:, : logits.shape[1]]  # [N, V]
    logits[rows] = logits[rows].masked_fill_(forbidden, -torch.inf)


def logits_of_tokens(logits: Tensor, rows: Tensor, token_ids: Tensor) -> Tensor:
    """Returns the logits of these tokens in `rows` [N]: [N, K]; -inf where `token_ids` [N, K] is -1."""
    found = logits[rows[:, None], token_ids.clamp_min(0)]
    return found.masked_fill_(token_ids < 0, -torch.inf)


def force_tokens(logits: Tensor, rows: Tensor, row_ids: Tensor, token_ids: Tensor) -> None:
    """Forbids, in `rows`, every token that is not among the entries, and makes the entries equal."""
    logits.index_fill_(0, rows, -torch.inf)
    _fill_cells(logits, row_ids, token_ids, 0.0)


def _fill_cells(logits: Tensor, row_ids: Tensor, token_ids: Tensor, value: float) -> None:
    """Assigning a number by index would copy it from the host, and wait for a GPU."""
    logits.index_put_((row_ids, token_ids), logits.new_full((), value))


# ---------------------------------------------------------------------------------------------------------------------
# Choosing a token


class Chosen(NamedTuple):
    token_ids: Tensor  # [R] int64, always a valid id
    bad: Tensor  # [R] bool: NaN or infinite logits, or no token left; the row's token is undefined


class Mode(enum.IntEnum):
    """What the rows of a batch need at most. A row gets the same token in every mode that has what it needs."""

    GREEDY = 0
    RANDOM = 1  # temperature
    FILTERED = 2  # top_k, top_p, min_p as well


class Masks(NamedTuple):
    """The tokens that are possible in some of the rows [R]."""

    mask_of: Tensor  # [R] int32: the place of the row's mask; -1: it has none
    words: Tensor  # [N, W] int32, as `allow_bits` has them


def sample_plain(
    logits: Tensor,  # [R, V]
    temperature: Tensor,  # [R] float32; 0: the largest logit
    top_k: Tensor,  # [R] int64; 0: all
    top_p: Tensor,  # [R] float64; 1: all
    min_p: Tensor,  # [R] float32; 0: all
    uniforms: Tensor,  # [R] float64 in [0, 1)
    mode: Mode,
    masks: Masks | None = None,
) -> Chosen:
    """One token for each row, whatever the rows need. Shapes depend on those of the arguments alone, and on a GPU
    nothing waits for the device, so a CUDA graph can hold it. Logits that a mask forbids become -inf in `logits`."""
    if logits.device.type in KERNEL_DEVICES:
        from ratoon.layers.triton import sampling as kernels

        draws, filters = mode >= Mode.RANDOM, mode is Mode.FILTERED
        return Chosen(*kernels.sample_plain(logits, temperature, top_k, top_p, min_p, uniforms, draws, filters, masks))
    if masks is not None:
        rows = (masks.mask_of >= 0).nonzero().squeeze(1)
        allow_bits(logits, rows, masks.words[masks.mask_of[rows].long()])
    logits = logits.float()
    largest = greedy(logits)
    if mode is Mode.GREEDY:
        return largest
    is_greedy = temperature == 0
    divisor = torch.where(is_greedy, 1.0, temperature)
    if mode is Mode.RANDOM:
        drawn = draw(logits, divisor, uniforms)
    else:
        drawn = draw_filtered(logits, divisor, Filters(top_k, top_p, min_p), uniforms)
    return Chosen(*(torch.where(is_greedy, ours, theirs) for ours, theirs in zip(largest, drawn)))


def greedy(logits: Tensor) -> Chosen:
    """The largest logit of each row [R, V], the lowest id among equals.

    In two steps because torch's argmax over long rows is ten times slower than its amax.
    """
    if logits.device.type in KERNEL_DEVICES:
        from ratoon.layers.triton import sampling as kernels

        return Chosen(*kernels.greedy(logits))
    if _has_kernel(logits):
        from ratoon.layers.native.recording import new_bytes

        library = native.library()
        assert library is not None
        logits = logits.contiguous()
        num_rows, num_columns = logits.shape
        ids, is_bad = new_bytes(8 * num_rows).view(torch.int64), new_bytes(num_rows).view(torch.bool)
        library.ratoon_greedy(logits.data_ptr(), num_rows, num_columns, ids.data_ptr(), is_bad.data_ptr())
        return Chosen(ids, is_bad)
    chunk = chunk_maxima(logits).argmax(dim=-1)  # [R]; NaN counts as the largest
    columns = _chunk_columns(chunk, logits)
    inside = logits.gather(1, columns).argmax(dim=-1, keepdim=True)
    token_ids = columns.gather(1, inside)
    bad = ~logits.gather(1, token_ids).isfinite()
    return Chosen(token_ids.squeeze(1), bad.squeeze(1))


def draw(logits: Tensor, temperature: Tensor, uniforms: Tensor) -> Chosen:
    """Draw from softmax(logits / temperature): [R, V], [R], [R] float64 in [0, 1)."""
    if _has_kernel(logits):
        return _draw_by_kernel(logits, temperature, None, uniforms)
    return draw_from(exact_probabilities(logits / temperature[:, None]), uniforms)


DrawRows = Callable[["Tensor | slice"], Chosen]  # rows of the batch → what was drawn for them


class Filters(NamedTuple):
    """The filters of a draw, one value per row. Each keeps the tokens whose probability reaches some value, so together
    they are one threshold. Tokens of equal probability are kept or removed together."""

    top_k: Tensor  # [R] int64; 0: all
    top_p: Tensor  # [R] float64; 1: all
    min_p: Tensor  # [R] float32; 0: all

    def select(self, rows: Tensor | slice) -> Filters:
        return Filters(self.top_k[rows], self.top_p[rows], self.min_p[rows])


def draw_filtered(logits: Tensor, temperature: Tensor, filters: Filters, uniforms: Tensor) -> Chosen:
    """Draw after temperature, min_p, top_k and top_p, in this order; each applies to what the one before left."""
    if logits.device.type != "cpu" or logits.shape[1] <= NUCLEUS_CANDIDATES * 4:
        # Finding the rows that need a sort would synchronise with the device.
        return _draw_from_all(logits, temperature, filters, uniforms)
    small = (filters.top_k > 0) & (filters.top_k < SMALL_TOP_K)
    return _in_two_groups(
        small,
        lambda rows: _draw_small_top_k(logits[rows], temperature[rows], filters.select(rows), uniforms[rows]),
        lambda rows: _draw_nucleus(logits[rows], temperature[rows], filters.select(rows), uniforms[rows]),
    )


def _draw_from_all(logits: Tensor, temperature: Tensor, filters: Filters, uniforms: Tensor) -> Chosen:
    if _has_kernel(logits):
        return _draw_by_kernel(logits, temperature, filters, uniforms)
    return _draw_sorted(exact_probabilities(logits / temperature[:, None]), filters, uniforms)


def _has_kernel(logits: Tensor) -> bool:
    return logits.device.type == "cpu" and logits.dtype == torch.float32 and native.library() is not None


def _draw_by_kernel(logits: Tensor, temperature: Tensor, filters: Filters | None, uniforms: Tensor) -> Chosen:
    """What `_draw_sorted` does, or `draw_from` where there are no filters, without sorting."""
    kernels = native.library()
    assert kernels is not None
    scaled = logits if bool((temperature == 1).all()) else logits / temperature[:, None]
    probabilities = torch.softmax(scaled, dim=-1).contiguous()  # as exact_probabilities begins; the kernel rounds them
    num_rows, num_columns = probabilities.shape
    token_ids = torch.empty(num_rows, dtype=torch.int64)
    bad = torch.empty(num_rows, dtype=torch.bool)
    arguments = [] if filters is None else [filters.top_k.long(), filters.top_p.double(), filters.min_p.float()]
    kept = [argument.contiguous() for argument in (*arguments, uniforms.double())]  # until the call returns
    pointers = [None] * (4 - len(kept)) + [argument.data_ptr() for argument in kept]
    kernels.ratoon_draw(
        probabilities.data_ptr(), num_rows, num_columns, *pointers, token_ids.data_ptr(), bad.data_ptr()
    )
    return Chosen(token_ids, bad)


def _draw_sorted(probabilities: Tensor, filters: Filters, uniforms: Tensor) -> Chosen:
    """The general method, by a full sort."""
    return draw_from(filtered(probabilities, filters), uniforms)


def filtered(probabilities: Tensor, filters: Filters) -> Tensor:
    """0 in the place of exact probabilities [R, V] that do not pass the filters."""
    threshold, _ = keep_threshold(_sort(probabilities), filters)
    return _cut(probabilities, threshold)


def typical(logits: Tensor, filters: Filters, masses: Tensor) -> Tensor:
    """Returns a mask [R, V] of the tokens that locally typical sampling keeps: of those that pass the filters, the
    ones whose surprise (-log p) is nearest to the expected surprise, until their probabilities sum up to `masses` [R].
    At least one is kept. Tokens that are as near as the last one are kept with it."""
    passed = filtered(exact_probabilities(logits), filters).double()
    probabilities = passed / passed.sum(dim=-1, keepdim=True)
    surprise = -probabilities.log()
    expected = torch.where(probabilities > 0, surprise * probabilities, 0.0).sum(dim=-1, keepdim=True)
    distance = (surprise - expected).abs()  # infinite for tokens that are not possible
    nearest, order = distance.sort(dim=-1)
    mass_before = probabilities.gather(1, order).cumsum(dim=-1)
    last = (mass_before < masses[:, None]).sum(dim=-1).clamp_max(logits.shape[1] - 1)
    furthest = nearest.gather(1, last[:, None])
    return (distance <= furthest) & (probabilities > 0)


def _draw_small_top_k(logits: Tensor, temperature: Tensor, filters: Filters, uniforms: Tensor) -> Chosen:
    """Draws from the top candidates only: tokens beyond top_k need no exponential."""
    values, token_ids = top_candidates(logits, SMALL_TOP_K)
    probabilities = exact_probabilities(values / temperature[:, None])
    threshold, floor = keep_threshold(probabilities.flip(-1), filters)
    settled = _nothing_beyond(probabilities[:, -1], floor)
    return _in_two_groups(
        settled,
        lambda rows: _draw_candidates(probabilities[rows], token_ids[rows], threshold[rows], uniforms[rows]),
        lambda rows: _draw_nucleus(logits[rows], temperature[rows], filters.select(rows), uniforms[rows]),
    )


def _draw_nucleus(logits: Tensor, temperature: Tensor, filters: Filters, uniforms: Tensor) -> Chosen:
    """Draws from the nucleus of each row, and sorts only rows for which the top candidates are not enough."""
    if _has_kernel(logits):
        return _draw_by_kernel(logits, temperature, filters, uniforms)
    probabilities = exact_probabilities(logits / temperature[:, None])
    values, token_ids = top_candidates(probabilities, NUCLEUS_CANDIDATES)
    only_top_p = (filters.top_k == 0) & (filters.min_p == 0)
    threshold, floor = keep_threshold(values.flip(-1), filters)
    if only_top_p.any():
        of_whole, _ = keep_threshold(values.flip(-1), filters, chunk_sums(probabilities).sum(dim=-1))
        threshold = torch.where(only_top_p, of_whole, threshold)
    last = values[:, -1]
    settled = _nothing_beyond(last, floor) | (only_top_p & (threshold > last))
    return _in_two_groups(
        settled,
        lambda rows: _draw_candidates(values[rows], token_ids[rows], threshold[rows], uniforms[rows]),
        lambda rows: _draw_sorted(probabilities[rows], filters.select(rows), uniforms[rows]),
    )


def _nothing_beyond(last: Tensor, floor: Tensor) -> Tensor:
    """Where [R] every token that min_p and top_k leave is among the candidates, of which `last` [R] is the least."""
    return (last < floor) | (last == 0)


def _cut(probabilities: Tensor, threshold: Tensor) -> Tensor:
    """0 where a probability is below its row's threshold. (torch.where takes three times as long on a CPU.)"""
    return probabilities.clone().ge_(threshold[:, None]).mul_(probabilities)


def _draw_candidates(probabilities: Tensor, token_ids: Tensor, threshold: Tensor, uniforms: Tensor) -> Chosen:
    """Draw from [R, K] candidates in the order of their ids, as draw_from does: both give the same token."""
    token_ids, order = token_ids.sort(dim=-1)
    kept = _cut(probabilities, threshold).gather(1, order)
    cumulative = kept.cumsum(dim=-1, dtype=torch.float64)
    total = cumulative[:, -1]
    place = first_above(cumulative, uniforms * total)
    return Chosen(token_ids.gather(1, place[:, None]).squeeze(1), ~(total > 0))


def _in_two_groups(first: Tensor, draw_first: DrawRows, draw_rest: DrawRows) -> Chosen:
    """Draw the rows where `first` is set in one way, the others in another. CPU only: it reads `first` on the host."""
    num_first = int(first.sum())
    if num_first == len(first):
        return draw_first(slice(None))
    if num_first == 0:
        return draw_rest(slice(None))
    token_ids = torch.empty(len(first), dtype=torch.int64)
    bad = torch.empty(len(first), dtype=torch.bool)
    for mask, draw_rows in ((first, draw_first), (~first, draw_rest)):
        rows = mask.nonzero().squeeze(1)
        token_ids[rows], bad[rows] = draw_rows(rows)
    return Chosen(token_ids, bad)


def exact_probabilities(logits: Tensor) -> Tensor:
    """Softmax, with each probability rounded to a multiple of 2^-52: the sums of a row in float64 are then exact."""
    probabilities = torch.softmax(logits, dim=-1)
    # float32 in [2^-29, 2^-28) has steps of 2^-52, and larger numbers have larger ones.
    return probabilities.add_(2.0**-29).sub_(2.0**-29)


def keep_threshold(ascending: Tensor, filters: Filters, whole: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """The least probability that passes all filters [R], and that which passes min_p and top_k [R].

    `ascending` [R, K] holds exact probabilities in rising order: all of a row, or the largest. In the latter case
    `whole` [R] is the mass that min_p and top_k leave, if that is more than what they leave of these K.
    """
    num_columns = ascending.shape[1]
    mass = ascending.cumsum(dim=-1, dtype=torch.float64)
    kth = ascending.gather(1, (num_columns - filters.top_k).clamp(0, num_columns - 1)[:, None]).squeeze(1)
    limited = (filters.top_k > 0) & (filters.top_k <= num_columns)
    floor = torch.maximum(torch.where(limited, kth, 0.0), filters.min_p * ascending[:, -1])
    if whole is None:
        num_below = torch.searchsorted(ascending, floor[:, None])
        below = torch.where(num_below > 0, mass.gather(1, (num_below - 1).clamp_min(0)), 0.0).squeeze(1)
        whole = mass[:, -1] - below
    # A token is kept while the mass of the larger ones is below top_p: while its place in the ascending sum is above
    # the rest. The largest is always kept.
    rest = mass[:, -1] - filters.top_p * whole
    last = torch.searchsorted(mass, rest[:, None], right=True).clamp_max(num_columns - 1)
    return ascending.gather(1, last).squeeze(1), floor


def draw_from(probabilities: Tensor, uniforms: Tensor) -> Chosen:
    """Invert the cumulative distribution, first over chunks of columns, then inside one chunk."""
    cumulative = chunk_sums(probabilities).cumsum(dim=-1)  # [R, C] float64
    total = cumulative[:, -1]
    target = uniforms * total
    chunk = first_above(cumulative, target)
    before = torch.where(chunk > 0, cumulative.gather(1, (chunk - 1).clamp_min(0)[:, None]).squeeze(1), 0.0)
    columns = _chunk_columns(chunk, probabilities)  # [R, CHUNK]
    inside = first_above(probabilities.gather(1, columns).cumsum(dim=-1, dtype=torch.float64), target - before)
    token_ids = columns.gather(1, inside[:, None]).squeeze(1)
    return Chosen(token_ids, ~(total > 0))  # a row with a NaN has a NaN total


def first_above(cumulative: Tensor, target: Tensor) -> Tensor:
    """The first column [R] whose cumulative sum is above the target.

    Such a column added something to the sum, so its own probability is not 0. The second count holds this where
    rounding brings the target up to the total: it finds the last column that added something.
    """
    found = (cumulative <= target[:, None]).sum(dim=-1)
    last = (cumulative < cumulative[:, -1:]).sum(dim=-1)
    return torch.minimum(found, last)


# ---------------------------------------------------------------------------------------------------------------------
# Log-probabilities


class TokenLogprobs(NamedTuple):
    token_ids: Tensor  # [R, 1 + num_top] int64: the row's own token, then the most probable ones
    logprobs: Tensor  # [R, 1 + num_top] float32
    ranks: Tensor  # [R] int64, of the row's own token: 1 + the number of larger logits


def token_logprobs(logits: Tensor, token_ids: Tensor, num_top: int) -> TokenLogprobs:
    """Log-probabilities of one token a row and of `num_top` alternatives, in the logits as they are."""
    num_top = min(num_top, logits.shape[1])
    if logits.device.type in KERNEL_DEVICES and num_top <= MAX_LISTED:
        from ratoon.layers.triton import top

        return TokenLogprobs(*top.token_logprobs(logits, token_ids, num_top))
    logits = logits.float()
    own = token_ids[:, None]
    # A fixed number of candidates: which of two equal ones comes first must not depend on what other rows ask for.
    values, top_ids = top_candidates(logits, min(max(SMALL_TOP_K, num_top), logits.shape[1]))
    ids = torch.cat([own, _lower_ids_first(values, top_ids)[:, :num_top]], dim=1)
    logprobs = torch.log_softmax(logits, dim=-1).gather(1, ids)
    return TokenLogprobs(ids, logprobs, _ranks(logits, logits.gather(1, own), values))


def _lower_ids_first(values: Tensor, token_ids: Tensor) -> Tensor:
    """The ids [R, K] by falling value, equal values by rising id."""
    by_id, order = token_ids.sort(dim=-1)
    return by_id.gather(1, values.gather(1, order).sort(dim=-1, descending=True, stable=True).indices)


def _ranks(logits: Tensor, own: Tensor, leading: Tensor) -> Tensor:
    """1 + how many logits of the row are above `own` [R, 1]; `leading` [R, K] are the row's largest."""
    if logits.device.type != "cpu":
        return (logits > own).sum(dim=-1) + 1
    ranks = (leading > own).sum(dim=-1) + 1
    missing = (own < leading[:, -1:]).squeeze(1).nonzero().squeeze(1)  # larger ones lie beyond the leading ones
    if len(missing):
        ranks[missing] = (logits[missing] > own[missing]).sum(dim=-1) + 1
    return ranks


# ---------------------------------------------------------------------------------------------------------------------
# The largest of a row


def top_candidates(x: Tensor, num_candidates: int) -> tuple[Tensor, Tensor]:
    """The largest values of each row, descending, and their columns: [R, V] → two of [R, num_candidates].

    As topk, but faster on long rows. Columns w apart form a group of CANDIDATE_GROUPS members; the largest K values are
    in the K groups with the largest maxima, and only those are examined.
    """
    num_rows, num_columns = x.shape
    width = num_columns // CANDIDATE_GROUPS  # number of groups
    if width <= num_candidates:
        values, columns = x.topk(num_candidates, dim=-1)
        return values, columns
    body = x[:, : width * CANDIDATE_GROUPS].unflatten(1, (CANDIDATE_GROUPS, width))  # group g: body[:, :, g]
    groups = body.amax(dim=1).topk(num_candidates, dim=-1, sorted=False).indices  # [R, K]
    member_groups = groups[:, None, :].expand(-1, CANDIDATE_GROUPS, -1)  # [R, G, K]
    columns = member_groups + torch.arange(CANDIDATE_GROUPS, device=x.device)[:, None] * width
    values, columns = body.gather(2, member_groups).flatten(1), columns.flatten(1)  # [R, G·K]
    if width * CANDIDATE_GROUPS < num_columns:
        rest = torch.arange(width * CANDIDATE_GROUPS, num_columns, device=x.device)
        values = torch.cat([values, x[:, rest]], dim=1)
        columns = torch.cat([columns, rest.expand(num_rows, -1)], dim=1)
    values, places = values.topk(num_candidates, dim=-1)
    return values, columns.gather(1, places)


def _sort(x: Tensor) -> Tensor:
    """Sorts each row in rising order."""
    if x.device.type == "cpu":  # numpy sorts values only; torch sorts indices too, which takes four times as long
        return torch.from_numpy(np.sort(x.numpy(), axis=-1))
    return x.sort(dim=-1).values


# ---------------------------------------------------------------------------------------------------------------------
# Chunks of columns


def chunk_maxima(x: Tensor) -> Tensor:
    """[R, V] → [R, ceil(V / CHUNK)]. NaN wins."""
    body, tail = _split_chunks(x)
    if tail is None:
        return body.amax(dim=-1)
    return torch.cat([body.amax(dim=-1), tail.amax(dim=-1, keepdim=True)], dim=1)


def chunk_sums(x: Tensor) -> Tensor:
    """[R, V] float32 → [R, ceil(V / CHUNK)] float64."""
    body, tail = _split_chunks(x)
    sums = body.sum(dim=-1, dtype=torch.float64)
    if tail is None:
        return sums
    return torch.cat([sums, tail.sum(dim=-1, keepdim=True, dtype=torch.float64)], dim=1)


def _split_chunks(x: Tensor) -> tuple[Tensor, Tensor | None]:
    """The whole chunks [R, C, CHUNK], and the columns that are left over."""
    num_whole = x.shape[1] // CHUNK
    body = x[:, : num_whole * CHUNK].unflatten(1, (num_whole, CHUNK))
    return body, x[:, num_whole * CHUNK :] if x.shape[1] % CHUNK else None


def _chunk_columns(chunk: Tensor, x: Tensor) -> Tensor:
    """The columns of one chunk for each row: [R] → [R, CHUNK]. Past the end the last column repeats.

    The repeats come after the column itself, so the first hit is always the column and never a repeat.
    """
    columns = chunk[:, None] * CHUNK + torch.arange(CHUNK, device=x.device)
    return columns.clamp_max(x.shape[1] - 1)
