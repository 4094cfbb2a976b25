"""The figures of a two-stage run as text, and as an object for programs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from ratoon.benchmarks.two_stage.experiment import Round
from ratoon.benchmarks.two_stage.measures import Agreement, Figure, WaySummary
from ratoon.benchmarks.two_stage.settings import TwoStageSettings
from ratoon.benchmarks.two_stage.ways import WAYS

HEAD = ("", "stage-2 TTFT, ms", "", "stage 2, ms", "", "both stages, ms", "", "computed", "from")


def describe(model: str, settings: TwoStageSettings) -> str:
    """A short description of the work."""
    parts = [
        f"prompt {settings.prompt_tokens}",
        f"stage 1 samples {settings.stage1_tokens}",
        f"suffix {settings.suffix_tokens}",
        f"stage 2 beams {settings.beam_width} × {settings.beam_tokens}",
        f"{settings.requests} at once" if settings.requests > 1 else "one conversation",
        f"{settings.rounds} rounds" if settings.rounds > 1 else "one round",
    ]
    return f"two-stage of {model}: {', '.join(parts)}"


def format_table(summaries: Mapping[str, WaySummary]) -> str:
    """A row for each way; of several rounds, below it the lowest and the highest."""
    rows = [list(HEAD)]
    for way in WAYS:
        summary = summaries[way.key]
        figures = (summary.ttft, summary.stage2, summary.total)
        times = [cell for figure in figures for cell in (_ms(figure.seconds.median), _times(figure))]
        rows.append([way.label, *times, f"{summary.computed_tokens:,.6g}", ", ".join(summary.sources)])
        if any(figure.seconds.min < figure.seconds.max for figure in figures):
            spreads = [cell for figure in figures for cell in (_ms_range(figure), "")]
            rows.append(["", *spreads, "", ""])
    widths = [max(len(row[column]) for row in rows) for column in range(len(HEAD))]
    return "\n".join(_line(row, widths) for row in rows)


def format_agreement(agreement: Agreement) -> list[str]:
    """The results of the checks, a sentence each."""
    lines = []
    if agreement.same_answers and agreement.same_beams:
        difference = agreement.largest_score_difference
        scores = "to the bit" if difference == 0 else f"to within {difference:.0e}"
        lines.append(f"All ways found the same beams, with the same scores {scores}.")
    elif not agreement.same_answers:
        lines.append("The ways do NOT agree: they sampled different answers in stage 1.")
    else:
        lines.append("The ways do NOT agree: they found different beams.")
    if agreement.counts_agree is not None:
        verb = "agrees" if agreement.counts_agree else "does NOT agree"
        lines.append(f"The model runner's own count of computed tokens {verb} with the outputs'.")
    return lines


def format_notes(summaries: Mapping[str, WaySummary]) -> list[str]:
    """Warnings about rows."""
    notes = []
    for way in WAYS:
        sources = summaries[way.key].sources
        if way.continues and sources != ["lease"]:
            notes.append(
                f"{way.label}: not every parent kept its lease; a larger KV cache (--num-blocks) or "
                "a larger part of it for leases (--lease-fraction) would keep them"
            )
    return notes


def as_object(
    facts: Mapping[str, Any], rounds: Sequence[Round], summaries: Mapping[str, WaySummary], agreement: Agreement
) -> dict[str, Any]:
    """Everything that was measured, for a file. Times are in seconds."""
    return {
        **facts,
        "ways": {way.key: {"label": way.label, **msgspec.to_builtins(summaries[way.key])} for way in WAYS},
        "agreement": {**msgspec.to_builtins(agreement), "all_well": agreement.all_well},
        "rounds": [msgspec.to_builtins(one) for one in rounds],
    }


def _line(row: Sequence[str], widths: Sequence[int]) -> str:
    """Texts to the left, numbers to the right; a ratio stands close to its time."""
    cells = [row[0].ljust(widths[0])]
    for column in range(1, len(row) - 1):
        gap = " " if HEAD[column] == "" else "   "
        cells.append(gap + row[column].rjust(widths[column]))
    return ("".join(cells) + "   " + row[-1]).rstrip()


def _ms(seconds: float) -> str:
    """Three digits or so: more would be noise."""
    value = 1e3 * seconds
    return f"{value:,.{2 if value < 10 else 1 if value < 100 else 0}f}"


def _ms_range(figure: Figure) -> str:
    return f"{_ms(figure.seconds.min)}–{_ms(figure.seconds.max)}"


def _times(figure: Figure) -> str:
    value = figure.advantage.median
    return f"{value:.{2 if value < 10 else 1 if value < 100 else 0}f}×"
