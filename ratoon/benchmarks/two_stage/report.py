"""The figures of a run as text, and as an object for programs."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from ratoon.benchmarks.loadgen.measures import Distribution
from ratoon.benchmarks.loadgen.report import format_number, record_as_dict
from ratoon.benchmarks.two_stage.measures import WaySummary, all_well, errors_of
from ratoon.benchmarks.two_stage.settings import TwoStageSettings
from ratoon.benchmarks.two_stage.trips import WAYS, Measured, Trip, Turn

COLUMNS = ("median", "p90", "p99")
WAY_HEAD = (
    "", "stage-2 TTFT", "conversations/s", "output tok/s", "cached", "computed", "same answers", "same beams", "hits",
    "hits at 1", "from",
)  # fmt: skip


def describe(target: str, settings: TwoStageSettings) -> str:
    """A short description of the work."""
    count = settings.num_conversations
    parts = ["one conversation" if count == 1 else f"{count} conversations"]
    if settings.rounds > 1:
        parts[0] = f"{settings.rounds} × {parts[0]}"
    if settings.file is not None:
        parts.append(settings.file)
    else:
        parts += [f"prompt {settings.prompt_tokens}", f"stage 1 samples {settings.stage1_tokens}"]
        parts.append(f"suffix {settings.suffix_tokens}")
    parts.append(f"stage 2 beams {settings.beam_width} × {settings.beam_tokens}")
    if not math.isinf(settings.request_rate):
        parts.append(f"{settings.request_rate:g} a second")
    if settings.concurrency is not None and count > 1:
        parts.append("one at a time" if settings.concurrency == 1 else f"{settings.concurrency} at once")
    return f"two-stage of {target}: {', '.join(parts)}"


def format_latencies(summaries: Mapping[str, WaySummary]) -> str:
    """Three rows a way: stage 1, stage 2, both."""
    rows = [["ms", "", *(f"TTFT {name}" for name in COLUMNS), *(f"E2E {name}" for name in COLUMNS)]]
    for label, one in _labelled(summaries):
        rows.append([label, "stage 1", *_cells(one.stage1.ttft_ms), *_cells(one.stage1.e2e_ms)])
        rows.append(["", "stage 2", *_cells(one.stage2.ttft_ms), *_cells(one.stage2.e2e_ms)])
        rows.append(["", "both", *("",) * len(COLUMNS), *_cells(one.both_ms)])
    return _table(rows, num_texts=2)


def format_ways(summaries: Mapping[str, WaySummary]) -> str:
    """A row for each variant: results and cost."""
    rows = [list(WAY_HEAD)]
    for label, one in _labelled(summaries):
        found = one.evaluation
        rows.append(
            [
                label,
                "-" if one.ttft_advantage is None else f"{one.ttft_advantage:.1f}×",
                f"{one.conversations_per_second:.2f}",
                f"{one.output_tokens_per_second:,.1f}",
                f"{one.cached_tokens:,}",
                f"{one.computed_tokens:,}",
                *(_share(share) for share in (found.same_answers, found.same_beams, found.hits, found.hits_at_1)),
                ", ".join(one.sources),
            ]
        )
    kept = [column for column in range(len(rows[0])) if any(row[column] != "-" for row in rows[1:])]
    return _table([[row[column] for column in kept] for row in rows], num_texts=1)


def format_notes(measured: Measured, summaries: Mapping[str, WaySummary]) -> list[str]:
    """Warnings about the figures."""
    notes = []
    for way in WAYS:
        if way.key not in summaries:
            continue
        one = summaries[way.key]
        if way.continues and one.sources not in ([], ["lease"]):
            notes.append(
                f"{way.label}: not every parent kept its lease; a larger KV cache (--num-blocks) or a larger part of "
                "it for leases (--lease-fraction) would keep them"
            )
        if one.num_failed:
            trips = measured.trips(way.key)
            records = [record for trip in trips for record in (trip.stage1, trip.stage2) if record is not None]
            notes.append(f"{way.label}: {one.num_failed} requests failed: {'; '.join(errors_of(records))}")
        if one.runner_agrees is False:
            notes.append(f"{way.label}: the model runner computed another number of tokens than outputs say")
    return notes


def as_object(facts: Mapping[str, Any], measured: Measured, summaries: Mapping[str, WaySummary]) -> dict[str, Any]:
    """Everything that was measured, for a file."""
    labels = {way.key: way.label for way in WAYS}
    return {
        **facts,
        "ways": {key: {"label": labels[key], **msgspec.to_builtins(one)} for key, one in summaries.items()},
        "all_well": all_well(summaries.values()),
        "interrupted": measured.interrupted,
        "rounds": [{key: _turn_as_dict(turn) for key, turn in one.items()} for one in measured.rounds],
    }


def _turn_as_dict(turn: Turn) -> dict[str, Any]:
    return {"seconds": turn.seconds, "conversations": [_trip_as_dict(trip) for trip in turn.trips.values()]}


def _trip_as_dict(trip: Trip) -> dict[str, Any]:
    return {
        **msgspec.to_builtins(trip),
        "stage1": record_as_dict(trip.stage1),
        "stage2": None if trip.stage2 is None else record_as_dict(trip.stage2),
    }


def _labelled(summaries: Mapping[str, WaySummary]) -> list[tuple[str, WaySummary]]:
    return [(way.label, summaries[way.key]) for way in WAYS if way.key in summaries]


def _cells(found: Distribution | None) -> list[str]:
    return ["-" if found is None else format_number(getattr(found, name)) for name in COLUMNS]


def _share(value: float | None) -> str:
    return "-" if value is None else f"{value:.0%}" if value in (0.0, 1.0) else f"{value:.1%}"


def _table(rows: Sequence[Sequence[str]], num_texts: int) -> str:
    """The first columns, and a last one called "from", to the left; numbers to the right."""
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    texts = {*range(num_texts), *(column for column, name in enumerate(rows[0]) if name == "from")}
    return "\n".join(
        "  ".join(
            cell.ljust(width) if column in texts else cell.rjust(width)
            for column, (cell, width) in enumerate(zip(row, widths))
        ).rstrip()
        for row in rows
    )
