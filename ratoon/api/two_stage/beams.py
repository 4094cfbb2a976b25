"""What a search behind an answer found, and whether two searches found the same."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

SCORE_TOLERANCE = 1e-4  # what another order of additions may do to a sum of log-probabilities


class Beam(msgspec.Struct, frozen=True):
    token_ids: tuple[int, ...]
    score: float


def score_difference(found: Sequence[Beam], wanted: Sequence[Beam]) -> float | None:
    """The largest difference between scores of the same tokens; None: the tokens are not the same.

    Beams are sorted by score, so where scores agree, only such as are as good as equal can stand in another order.
    """
    scores = {beam.token_ids: beam.score for beam in wanted}
    if len(found) != len(wanted) or {beam.token_ids for beam in found} != scores.keys():
        return None
    return max(abs(beam.score - scores[beam.token_ids]) for beam in found)


def shared_beams(found: Sequence[Beam], wanted: Sequence[Beam]) -> float:
    """The share of the wanted ones that were found, with the same scores."""
    scores = {beam.token_ids: beam.score for beam in found}
    same = [abs(scores.get(beam.token_ids, float("inf")) - beam.score) <= SCORE_TOLERANCE for beam in wanted]
    return sum(same) / len(same) if same else 1.0
