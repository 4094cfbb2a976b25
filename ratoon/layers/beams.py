"""The best continuations of beam searches, from logits, as pure tensor functions: no state, no requests.

scheduling/beams.py chooses among them. Log-probabilities are those of torch.log_softmax, bit for bit on a CPU, and a
search's result does not depend on the other searches of the batch.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch

from ratoon.layers.sampling import CHUNK, chunk_maxima

Tensor = torch.Tensor
Edit = Callable[[Tensor], None]  # changes logits in place

MAX_COPIED = 1 << 22  # elements of the logits that are copied at a time
MAX_KEYS = 2048  # candidates of a search that kernels choose; for more, torch sorts, and waits for the device


class SearchRows(NamedTuple):
    """One search of a step: its rows of the logits, a row for each running beam, and what it asks for."""

    start: int
    stop: int
    num_candidates: int


class Candidates(NamedTuple):
    """Best first; among equals the lowest beam first, then the lowest token. -inf: fewer tokens were possible."""

    scores: np.ndarray  # [K] float32: the beam's score and the token's log-probability
    beams: np.ndarray  # [K] int64, counted from the search's first row
    tokens: np.ndarray  # [K] int64


class _Offsets(NamedTuple):
    """What turns logits into scores, one value per row. Added one by one, always in this order: each sum is rounded as
    in the definition, and rounding preserves the order of a row's logits."""

    peak: Tensor  # [R] the largest logit
    log_sum: Tensor  # [R] of the exponentials, the peak subtracted
    scores: Tensor  # [R] of the beams

    def select(self, rows: slice | Tensor) -> _Offsets:
        return _Offsets(self.peak[rows], self.log_sum[rows], self.scores[rows])

    def apply(self, logits: Tensor) -> Tensor:
        """[R, C] → [R, C]"""
        return (logits - self.peak[:, None]).sub_(self.log_sum[:, None]).add_(self.scores[:, None])


def best_candidates_of_searches(
    logits: Tensor,  # [R, V]; those in float32 are changed in place by `edit`
    scores: Tensor,  # [R] float32, of the beams
    searches: Sequence[SearchRows],
    edit: Edit | None = None,
    logprob_rows: Sequence[int] = (),  # rows in which `edit` gets log-probabilities, not logits
) -> list[Candidates | None]:
    """Returns for each search the best of all its beams' continuations: `num_candidates` of them, or all if there are
    fewer.

    `edit` does not renormalise: tokens that it does not change keep their probabilities. None for a search with a row
    of NaN or infinite logits, or with no token left.
    """
    if chosen_by_keys(logits.device, searches):
        keys = best_keys_of_searches(logits, scores, searches, edit, logprob_rows)
        return candidates_of_keys(keys.cpu().numpy(), searches, logits.shape[1])
    logits = logits.float()
    maxima = chunk_maxima(logits)  # [R, C]
    offsets = _Offsets(maxima.amax(dim=-1), _log_sums(logits), scores)
    sound = (offsets.peak.isfinite() & offsets.log_sum.isfinite()).tolist()
    if logprob_rows:
        _to_logprobs(logits, offsets, torch.tensor(logprob_rows, device=logits.device))
    if edit is not None:
        edit(logits)
    if edit is not None or logprob_rows:
        maxima = chunk_maxima(logits)
    maxima = offsets.apply(maxima)
    found: list[Candidates | None] = []
    for search in searches:
        rows = slice(search.start, search.stop)
        if all(sound[rows]):
            found.append(_choose(logits[rows], offsets.select(rows), maxima[rows], search.num_candidates))
        else:
            found.append(None)
    return found


def chosen_by_keys(device: torch.device, searches: Sequence[SearchRows]) -> bool:
    """Whether `best_keys_of_searches` is to be used."""
    return device.type == "cuda" and max(search.num_candidates for search in searches) <= MAX_KEYS


def best_keys_of_searches(
    logits: Tensor,  # [R, V] float32, or 16-bit if nothing changes them
    scores: Tensor,
    searches: Sequence[SearchRows],
    edit: Edit | None = None,
    logprob_rows: Sequence[int] = (),
) -> Tensor:
    """Chooses the best continuations on a GPU, for all searches at once and without waiting for the device. The result
    is one tensor [S, W] of keys, which `candidates_of_keys` reads on the host. The logits are read once, and once more
    after an edit."""
    from ratoon.layers.triton import top

    normalizers, maxima = top.normalizers_and_maxima(logits)
    offsets = _Offsets(*normalizers, scores)
    if logprob_rows:
        _to_logprobs(logits, offsets, _uploaded(logprob_rows, logits.device))
    if edit is not None:
        edit(logits)
        maxima = top.group_maxima(logits)
    starts, stops = [search.start for search in searches], [search.stop for search in searches]
    odd = [0] * (len(searches) % 2)  # the second row begins at 16 bytes, as kernels expect of all tensors
    bounds = _uploaded([starts + odd, stops + odd], logits.device)[:, : len(searches)]
    max_rows = max(search.stop - search.start for search in searches)
    num_wanted = max(search.num_candidates for search in searches)
    return top.best_keys(logits, normalizers, scores, maxima, bounds, max_rows, num_wanted)


class SearchShape(NamedTuple):
    """Upper bounds for the searches of a step, powers of two: what a graph is captured for."""

    num_searches: int
    max_rows: int  # of a search
    num_wanted: int

    @classmethod
    def of(cls, searches: Sequence[SearchRows]) -> SearchShape:
        numbers = (
            len(searches),
            max(search.stop - search.start for search in searches),
            max(search.num_candidates for search in searches),
        )
        return cls(*(1 << (number - 1).bit_length() for number in numbers))


def best_keys_of_shape(logits: Tensor, scores: Tensor, row_bounds: tuple[Tensor, Tensor], shape: SearchShape) -> Tensor:
    """Does what `best_keys_of_searches` does without an edit, for searches whose first rows and ends [S] are on the
    device. One without rows gets keys that mean nothing."""
    from ratoon.layers.triton import top

    normalizers, maxima = top.normalizers_and_maxima(logits)
    return top.best_keys(logits, normalizers, scores, maxima, row_bounds, shape.max_rows, shape.num_wanted)


def candidates_of_keys(keys: np.ndarray, searches: Sequence[SearchRows], vocab_size: int) -> list[Candidates | None]:
    """What keys [S, W], copied to the host, stand for."""
    from ratoon.layers.triton import top

    scores, places, unsound = top.unpack(keys)
    beams, tokens = np.divmod(places, vocab_size)
    found: list[Candidates | None] = []
    for index, search in enumerate(searches):
        num_found = min(search.num_candidates, (search.stop - search.start) * vocab_size)
        own = Candidates(scores[index, :num_found], beams[index, :num_found], tokens[index, :num_found])
        found.append(None if unsound[index] else own)
    return found


def _uploaded(numbers: Sequence[Any], device: torch.device) -> Tensor:
    """Copies numbers to the device as int64, without waiting for it (the host side is pinned)."""
    host = torch.tensor(numbers, dtype=torch.int64, pin_memory=device.type == "cuda")
    return host.to(device, non_blocking=True)


def _log_sums(logits: Tensor) -> Tensor:
    """The log_sum [R] of every row. The largest log-probability of a row is -log_sum."""
    highest = [torch.log_softmax(rows, dim=-1).amax(dim=-1) for rows in logits.split(_rows_at_once(logits))]
    return torch.cat(highest).neg_()


def _to_logprobs(logits: Tensor, offsets: _Offsets, rows: Tensor) -> None:
    """Replace these rows of logits by log-probabilities. The resulting scores stay the same, bit for bit."""
    for part in rows.split(_rows_at_once(logits)):
        logits[part] = (logits[part] - offsets.peak[part, None]).sub_(offsets.log_sum[part, None])
    for offset in (offsets.peak, offsets.log_sum):
        offset[rows] = offset[rows] * 0.0 + 0.0  # 0, but a row that is not sound stays so


def _rows_at_once(logits: Tensor) -> int:
    return max(1, MAX_COPIED // logits.shape[1])


def _choose(logits: Tensor, offsets: _Offsets, maxima: Tensor, num_candidates: int) -> Candidates:
    """The best of [B, V] logits. `maxima` [B, C] holds the best score of every chunk of columns, so that only chunks
    that can hold one of the best are examined: by numpy, whose calls take a fraction of torch's for so few numbers."""
    vocab_size, num_chunks = logits.shape[1], maxima.shape[1]
    chunks, least = _promising_chunks(maxima.cpu().numpy().ravel(), num_candidates)
    rows = chunks // num_chunks  # [G]
    columns = (chunks % num_chunks)[:, None] * CHUNK + np.arange(CHUNK)  # [G, CHUNK]
    inside = columns < vocab_size
    scores = _pick(logits, rows[:, None], np.minimum(columns, vocab_size - 1))
    for offset, sign in ((offsets.peak, -1), (offsets.log_sum, -1), (offsets.scores, 1)):  # as _Offsets.apply does
        scores += sign * offset.cpu().numpy()[rows, None]
    # Ordered by beam and token, which a stable sort keeps among equals.
    places = np.flatnonzero(inside & (scores >= least))
    values = scores.ravel()[places]
    order = np.argsort(-values, kind="stable")[:num_candidates]
    chosen = places[order]
    return Candidates(values[order], rows[chosen // CHUNK], columns.ravel()[chosen])


def _pick(logits: Tensor, rows: np.ndarray, columns: np.ndarray) -> np.ndarray:
    """Some of the logits, as a new array on the host."""
    if logits.device.type == "cpu":
        picked: np.ndarray = logits.numpy()[rows, columns]
        return picked
    places = (torch.from_numpy(rows).to(logits.device), torch.from_numpy(columns).to(logits.device))
    return logits[places].cpu().numpy()


def _promising_chunks(maxima: np.ndarray, num_candidates: int) -> tuple[np.ndarray, float]:
    """The chunks that hold the best candidates, in ascending order, and a lower bound of their scores.

    Every maximum is a candidate, so the best K candidates are no worse than the K-th best maximum. Of the chunks with
    exactly that maximum, the first K are enough; otherwise all chunks would be taken where all logits are equal.
    """
    if len(maxima) <= num_candidates:
        return np.arange(len(maxima)), -np.inf
    least = np.partition(maxima, -num_candidates)[-num_candidates]
    above = np.flatnonzero(maxima > least)
    level = np.flatnonzero(maxima == least)[:num_candidates]
    return np.sort(np.concatenate([above, level])), least
