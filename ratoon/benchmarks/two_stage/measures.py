"""The figures of the rounds: each variant's with their spread, ratios, and whether all found the same beams."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence

import msgspec

from ratoon.benchmarks.two_stage.experiment import Round, Turn
from ratoon.benchmarks.two_stage.ways import NO_REUSE, SCORE_TOLERANCE, WAYS, score_difference


class Spread(msgspec.Struct, frozen=True):
    median: float
    min: float
    max: float


class Figure(msgspec.Struct, frozen=True):
    """One time over the rounds, and how many times less it is than with no reuse, round by round."""

    seconds: Spread
    advantage: Spread


class WaySummary(msgspec.Struct, frozen=True):
    ttft: Figure
    stage2: Figure
    total: Figure
    computed_tokens: float  # of a conversation's second prompt, on average
    sources: list[str]  # all that occurred


class Agreement(msgspec.Struct, frozen=True):
    """Whether all variants found the same, as they must."""

    same_answers: bool  # of stage 1
    same_beams: bool
    largest_score_difference: float  # between beams of the same tokens
    counts_agree: bool | None  # tokens computed, by the outputs and by the runner; None: the runner can't be asked

    @property
    def all_well(self) -> bool:
        return self.same_answers and self.same_beams and self.counts_agree is not False


def summarize(rounds: Sequence[Round]) -> dict[str, WaySummary]:
    return {way.key: _summarize_way([one[way.key] for one in rounds], _baseline(rounds)) for way in WAYS}


def _baseline(rounds: Sequence[Round]) -> list[Turn]:
    return [one[NO_REUSE.key] for one in rounds]


def _summarize_way(turns: Sequence[Turn], baseline: Sequence[Turn]) -> WaySummary:
    computed = [count for turn in turns for count in turn.computed_tokens]
    return WaySummary(
        ttft=_figure(turns, baseline, lambda turn: statistics.median(turn.ttft_seconds)),
        stage2=_figure(turns, baseline, lambda turn: turn.stage2_seconds),
        total=_figure(turns, baseline, lambda turn: turn.total_seconds),
        computed_tokens=statistics.mean(computed),
        sources=sorted({source for turn in turns for source in turn.sources}),
    )


def _figure(turns: Sequence[Turn], baseline: Sequence[Turn], read: Callable[[Turn], float]) -> Figure:
    return Figure(
        _spread([read(turn) for turn in turns]),
        _spread([read(base) / read(turn) for turn, base in zip(turns, baseline)]),
    )


def _spread(values: Sequence[float]) -> Spread:
    return Spread(statistics.median(values), min(values), max(values))


def compare(rounds: Sequence[Round]) -> Agreement:
    """Each way against the first, round by round."""
    differences = [0.0]
    same_answers = same_beams = True
    counts = []
    for one in rounds:
        reference = one[NO_REUSE.key]
        for turn in one.values():
            same_answers &= turn.answers == reference.answers
            for found, wanted in zip(turn.beams, reference.beams):
                difference = score_difference(found, wanted)
                same_beams &= difference is not None and difference <= SCORE_TOLERANCE
                differences.append(difference or 0.0)
            if turn.runner_tokens is not None:
                counts.append(turn.runner_tokens == sum(turn.computed_tokens))
    return Agreement(same_answers, same_beams, max(differences), all(counts) if counts else None)
