"""What a run records: each conversation in each way, in rounds. Data only."""

from __future__ import annotations

import msgspec

from ratoon.benchmarks.loadgen.measures import RequestRecord
from ratoon.benchmarks.two_stage.conversations import Conversation
from ratoon.benchmarks.two_stage.ways import Beam


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
