"""The figures of a run: each variant's latencies, throughput and tokens, and whether the results agree."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import msgspec

from ratoon.benchmarks.loadgen.measures import Distribution, RequestRecord, Summary, distribution
from ratoon.benchmarks.loadgen.measures import summarize as summarize_records
from ratoon.benchmarks.two_stage.conversations import Conversation
from ratoon.benchmarks.two_stage.trips import NO_REUSE, WAYS, Measured, Trip, Way, shared_beams


class Evaluation(msgspec.Struct, frozen=True):
    """Shares, from 0 to 1. The first two are against the way without reuse; None: there was nothing to compare."""

    same_answers: float | None  # conversations whose stage 1 gave the same tokens
    same_beams: float | None  # beams of the same tokens and score
    hits: float | None  # conversations with a reference answer among their beams
    hits_at_1: float | None  # with one that is the best beam


class WaySummary(msgspec.Struct, frozen=True):
    stage1: Summary
    stage2: Summary
    both_ms: Distribution | None  # from the sending of stage 1 to the end of stage 2
    conversations_per_second: float
    output_tokens_per_second: float  # of both stages
    cached_tokens: int  # of the prompts of stage 2
    computed_tokens: int
    ttft_advantage: float | None  # how many times less stage 2's median is than without reuse
    sources: list[str]  # of what stage 2 reused: all that occurred
    runner_agrees: bool | None  # its own count is that of `computed_tokens`; None: it can't be asked
    evaluation: Evaluation

    @property
    def num_failed(self) -> int:
        return self.stage1.num_failed + self.stage2.num_failed


def summarize(measured: Measured) -> dict[str, WaySummary]:
    """Summarises the ways that had a turn."""
    summaries: dict[str, WaySummary] = {}
    for way in [way for way in WAYS if measured.turns(way.key)]:
        summaries[way.key] = _summarize_way(way, measured, summaries.get(NO_REUSE.key))
    return summaries


def _summarize_way(way: Way, measured: Measured, baseline: WaySummary | None) -> WaySummary:
    turns, trips = measured.turns(way.key), measured.trips(way.key)
    seconds = sum(turn.seconds for turn in turns)
    stages = [
        summarize_records([trip.stage1 for trip in trips], seconds),
        summarize_records([trip.stage2 for trip in trips if trip.stage2 is not None], seconds),
    ]
    seconds_or_little = max(seconds, 1e-9)
    good = [trip.stage2 for trip in trips if trip.stage2 is not None and trip.succeeded]
    cached = sum(record.num_cached_tokens or 0 for record in good)
    computed = sum(record.num_prompt_tokens or 0 for record in good) - cached
    by_runner = [turn.runner_tokens for turn in turns if turn.runner_tokens is not None]
    return WaySummary(
        stage1=stages[0],
        stage2=stages[1],
        both_ms=distribution(trip.seconds for trip in trips),
        conversations_per_second=len(good) / seconds_or_little,
        output_tokens_per_second=sum(stage.output_tokens_per_second for stage in stages),
        cached_tokens=cached,
        computed_tokens=computed,
        ttft_advantage=_advantage(stages[1], stages[1] if baseline is None else baseline.stage2),
        sources=sorted({trip.source for trip in trips if trip.source is not None}),
        runner_agrees=sum(by_runner) == computed if by_runner else None,
        evaluation=_evaluate(way, measured),
    )


def _advantage(stage: Summary, baseline: Summary) -> float | None:
    if stage.ttft_ms is None or baseline.ttft_ms is None:
        return None
    return baseline.ttft_ms.median / max(stage.ttft_ms.median, 1e-9)


def _evaluate(way: Way, measured: Measured) -> Evaluation:
    same_answers: list[float] = []
    same_beams: list[float] = []
    hits: list[float] = []
    hits_at_1: list[float] = []
    for conversations, one in zip(measured.conversations, measured.rounds):
        if way.key not in one:
            continue
        wanted = one[NO_REUSE.key].trips if NO_REUSE.key in one else {}
        for index, trip in one[way.key].trips.items():
            if not trip.succeeded:
                continue
            other = wanted.get(index)
            if other is not None and other.succeeded:
                same_answers.append(trip.answer == other.answer)
                same_beams.append(shared_beams(trip.beams, other.beams))
            places = hit_places(conversations[index], trip)
            if places is not None:
                hits.append(bool(places))
                hits_at_1.append(0 in places)
    return Evaluation(_mean(same_answers), _mean(same_beams), _mean(hits), _mean(hits_at_1))


def hit_places(conversation: Conversation, trip: Trip) -> list[int] | None:
    """The beams that begin with a reference answer; None: there is no reference."""
    references = [text.strip() for text in conversation.references]
    if not references:
        return None
    return [
        place for place, text in enumerate(trip.texts) if any(text.strip().startswith(right) for right in references)
    ]


def _mean(values: Sequence[float]) -> float | None:
    return sum(values) / len(values) if values else None


def all_well(summaries: Iterable[WaySummary]) -> bool:
    """Nothing failed, all ways found the same, and the runner computed what outputs say."""
    return not any(
        one.num_failed
        or one.runner_agrees is False
        or one.evaluation.same_answers not in (None, 1.0)
        or one.evaluation.same_beams not in (None, 1.0)
        for one in summaries
    )


def errors_of(records: Iterable[RequestRecord]) -> list[str]:
    """The errors, each once."""
    return sorted({record.error for record in records if record.error is not None})
