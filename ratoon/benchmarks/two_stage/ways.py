"""What is compared: the ways to get from stage 1 to stage 2 (what is kept, what happens in between, what is sent), and
whether two of them found the same beams. Data only."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum

import msgspec

SCORE_TOLERANCE = 1e-4  # rounding of a sum of log-probabilities by the order of additions


class Between(Enum):
    """What happens to the KV cache between the stages."""

    NOTHING = "nothing"
    FORGET = "forget"  # it is emptied
    FILL = "fill"  # other requests use all of it that is free


@dataclass(frozen=True, slots=True)
class Way:
    key: str
    label: str
    continues: bool  # stage 2 continues a leased parent; else the whole text is sent as a new request
    between: Between = Between.NOTHING


NO_REUSE = Way("no_reuse", "no reuse", continues=False, between=Between.FORGET)
PREFIX_CACHE = Way("prefix_cache", "prefix cache", continues=False)
CONTINUATION = Way("continuation", "continuation", continues=True)
HTTP_WAYS = (NO_REUSE, PREFIX_CACHE, CONTINUATION)  # a client can't empty or fill a server's memory
WAYS = (
    *HTTP_WAYS,
    Way("prefix_cache_under_pressure", "prefix cache, memory filled", continues=False, between=Between.FILL),
    Way("continuation_under_pressure", "continuation, memory filled", continues=True, between=Between.FILL),
)


class Beam(msgspec.Struct, frozen=True):
    token_ids: tuple[int, ...]
    score: float


def shared_beams(found: Sequence[Beam], wanted: Sequence[Beam]) -> float:
    """The share of the wanted ones that were found, with the same scores."""
    scores = {beam.token_ids: beam.score for beam in found}
    same = [abs(scores.get(beam.token_ids, float("inf")) - beam.score) <= SCORE_TOLERANCE for beam in wanted]
    return sum(same) / len(same) if same else 1.0
