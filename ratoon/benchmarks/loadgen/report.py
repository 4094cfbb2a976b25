"""The figures of a load run as text, and as an object for programs."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from typing import Any

import msgspec

from ratoon.benchmarks.loadgen.measures import RequestRecord, Summary
from ratoon.benchmarks.loadgen.run import Round

COLUMNS = ("mean", "median", "p90", "p95", "p99")
LATENCIES = (
    ("time to first token", "ttft_ms"),
    ("time per output token", "tpot_ms"),
    ("between chunks (ITL)", "itl_ms"),
    ("whole request (E2E)", "e2e_ms"),
)
KNOWN_SHARE = 0.05
LATE_MS = 100.0  # a generator that is later than this limits the figures


def format_report(summaries: Sequence[Summary], limits_ms: dict[str, float]) -> str:
    """Several rounds show the median of each figure, and in brackets the lowest and the highest."""
    lines = [
        *_counts(summaries),
        "",
        *_throughput(summaries),
        "",
        *_latency_table(summaries),
    ]
    if limits_ms:
        wanted = ", ".join(f"{name} {limit:g} ms" for name, limit in limits_ms.items())
        share = _figure(summaries, lambda one: 100 * one.goodput.share if one.goodput else None, 1)
        rate = _figure(summaries, lambda one: one.goodput.rate if one.goodput else None, 2)
        lines += ["", _line("goodput", f"{share} % of requests, {rate} req/s within {wanted}")]
    return "\n".join(lines)


def format_warnings(summaries: Sequence[Summary], all_new: bool) -> list[str]:
    """Warnings about the figures. `all_new`: no prompt should have been cached."""
    warnings = []
    late = max(one.max_lateness_ms for one in summaries)
    if late > LATE_MS:
        warnings.append(f"requests were sent up to {late:.0f} ms late: this machine can't generate that load")
    cached = max(one.cached_share or 0.0 for one in summaries)
    if all_new and cached > KNOWN_SHARE:
        warnings.append(f"{cached:.0%} of the prompts were cached from an earlier run; another --seed makes new ones")
    return warnings


def _counts(summaries: Sequence[Summary]) -> list[str]:
    requests = _figure(summaries, lambda one: one.num_succeeded, 0)
    total = _figure(summaries, lambda one: one.num_requests, 0)
    lines = [
        _line("requests", f"{requests} of {total} answered in {_figure(summaries, lambda one: one.seconds, 2)} s"),
    ]
    errors: dict[str, int] = {}
    for one in summaries:
        for kind, count in one.errors.items():
            errors[kind] = errors.get(kind, 0) + count
    if errors:
        lines.append(_line("failed", ", ".join(f"{kind}: {count}" for kind, count in errors.items())))
    if unfinished := sum(one.num_unfinished for one in summaries):
        lines.append(_line("unfinished", str(unfinished)))
    cached = _figure(summaries, lambda one: None if one.cached_share is None else 100 * one.cached_share, 1)
    prompt_tokens = _figure(summaries, lambda one: one.num_prompt_tokens, 0)
    lines.append(_line("prompt tokens", prompt_tokens + (f", {cached} % of them cached" if cached != "-" else "")))
    per_chunk = _figure(summaries, lambda one: one.tokens_per_chunk, 2)
    output_tokens = _figure(summaries, lambda one: one.num_output_tokens, 0)
    lines.append(_line("output tokens", f"{output_tokens}, {per_chunk} in a chunk"))
    lines.append(_line("peak concurrency", _figure(summaries, lambda one: one.peak_concurrency, 0)))
    return lines


def _throughput(summaries: Sequence[Summary]) -> list[str]:
    return [
        _line("requests", f"{_figure(summaries, lambda one: one.requests_per_second, 2)} req/s"),
        _line("output tokens", f"{_figure(summaries, lambda one: one.output_tokens_per_second, 1)} tok/s"),
        _line("all tokens", f"{_figure(summaries, lambda one: one.total_tokens_per_second, 1)} tok/s"),
    ]


def _latency_table(summaries: Sequence[Summary]) -> list[str]:
    """A row for each latency; of several rounds, below it the lowest and the highest."""
    rows = [["ms", *COLUMNS]]
    for label, name in LATENCIES:
        found = [one for summary in summaries if (one := getattr(summary, name)) is not None]
        columns = [[float(getattr(one, column)) for one in found] for column in COLUMNS]
        rows.append([label, *(format_number(statistics.median(values)) if values else "-" for values in columns)])
        if len(found) > 1:
            rows.append(["", *(f"{format_number(min(values))}–{format_number(max(values))}" for values in columns)])
    widths = [max(8, *(len(row[column]) for row in rows)) for column in range(1, len(COLUMNS) + 1)]
    return [f"{row[0]:<24}" + "  ".join(f"{cell:>{width}}" for cell, width in zip(row[1:], widths)) for row in rows]


def format_number(value: float) -> str:
    """Four digits or so: more would be noise."""
    return f"{value:,.{2 if value < 100 else 1 if value < 1000 else 0}f}"


def _figure(summaries: Sequence[Summary], read: Callable[[Summary], float | None], digits: int) -> str:
    values = [value for one in summaries if (value := read(one)) is not None]
    if not values:
        return "-"
    middle = f"{statistics.median(values):,.{digits}f}"
    low, high = f"{min(values):,.{digits}f}", f"{max(values):,.{digits}f}"
    return middle if low == high else f"{middle} ({low}–{high})"


def _line(label: str, text: str) -> str:
    return f"{label:<24}{text}"


def as_object(settings: dict[str, Any], rounds: Sequence[Round], summaries: Sequence[Summary]) -> dict[str, Any]:
    """Everything that was measured, for a file."""
    return {
        "settings": settings,
        "rounds": [
            {
                "interrupted": one.interrupted,
                "summary": msgspec.to_builtins(summary),
                "requests": [record_as_dict(record) for record in one.records],
            }
            for one, summary in zip(rounds, summaries)
        ],
    }


def record_as_dict(record: RequestRecord) -> dict[str, Any]:
    """The record, and the measures that follow from it."""

    def in_ms(seconds: float | None) -> float | None:
        return None if seconds is None else round(seconds * 1e3, 3)

    fields = msgspec.to_builtins(record)
    for name in ("scheduled", "started", "ended"):
        fields[name] = None if fields[name] is None else round(fields[name], 6)
    fields["chunk_times"] = [round(moment, 6) for moment in record.chunk_times]
    measures = {
        "ttft_ms": in_ms(record.ttft),
        "tpot_ms": in_ms(record.tpot),
        "e2e_ms": in_ms(record.e2e),
        "itl_ms": [in_ms(pause) for pause in record.itl],
    }
    return {**fields, **measures}
