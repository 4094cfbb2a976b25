"""What is compared, the ways to get from stage 1 to stage 2 (what is kept, what happens in between, what is sent), and
what a run records: each conversation in each way, in rounds. Data only."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum

import msgspec

from ratoon.benchmarks.loadgen.measures import RequestRecord
from ratoon.benchmarks.two_stage.conversations import Conversation

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


class Trip(msgspec.Struct):
    """One conversation in one way."""

    stage1: RequestRecord
    stage2: RequestRecord | None = None  # None: stage 1 failed
    answer: list[int] = []  # of stage 1
    beams: list[Beam] = []
    texts: list[str] = []  # of the beams; empty if they are not decoded
    source: str | None = None  # of what stage 2 reused

    @property
    def succeeded(self) -> bool:
        return self.stage1.succeeded and self.stage2 is not None and self.stage2.succeeded

    @property
    def seconds(self) -> float | None:
        """Both stages, from the sending of the first to the end of the second."""
        if not self.succeeded:
            return None
        assert self.stage2 is not None and self.stage2.ended is not None
        return self.stage2.ended - self.stage1.started


class Turn(msgspec.Struct):
    """All conversations of a round in one way, in their order; one that was cut off before it began is missing."""

    trips: dict[int, Trip]
    seconds: float
    interrupted: bool = False
    runner_tokens: int | None = None  # of stage 2's prompts, by the runner's own count; None: it can't be asked


Round = dict[str, Turn]  # by the way's key


class Measured(msgspec.Struct):
    conversations: list[list[Conversation]]  # of each round
    rounds: list[Round]  # the last may be cut off

    @property
    def interrupted(self) -> bool:
        return any(turn.interrupted for one in self.rounds for turn in one.values())

    def turns(self, key: str) -> list[Turn]:
        return [one[key] for one in self.rounds if key in one]

    def trips(self, key: str) -> list[Trip]:
        return [trip for turn in self.turns(key) for trip in turn.trips.values()]
