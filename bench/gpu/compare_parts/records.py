"""What was measured, one record for each figure: printed at once, read back from logs, shown as tables."""

from __future__ import annotations

import json
import statistics
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from harness import OURS, Panel, align, format_number

from compare_parts.work import FIGURES, PEER_FIGURES

MARK = "RESULT "  # begins a line with a record
ERROR_MARK = "ERROR "


@dataclass(frozen=True)
class Record:
    """One figure of one engine."""

    model: str
    variant: str
    engine: str
    what: str
    value: float  # median
    values: list[float] = field(default_factory=list)  # one a round
    first: float | None = None  # of the round before, which is not counted: it compiles and captures
    floor: float | None = None

    def line(self) -> str:
        return MARK + json.dumps(asdict(self))

    @property
    def text(self) -> str:
        if len(self.values) < 2:
            return format_number(self.value)
        return f"{format_number(self.value)} ({format_number(min(self.values))}–{format_number(max(self.values))})"


def summarize(values: Sequence[float], **names: Any) -> Record:
    """Of all rounds: the first is counted only if it is the only one."""
    counted = list(values[1:]) or list(values)
    first = values[0] if len(values) > 1 else None
    digits = [float(f"{value:.6g}") for value in counted]
    return Record(value=statistics.median(digits), values=digits, first=first and float(f"{first:.6g}"), **names)


def read_records(paths: Iterable[Path]) -> list[Record]:
    """From logs of earlier runs. A later record of a figure takes the place of an earlier one."""
    found: dict[tuple[str, ...], Record] = {}
    for path in paths:
        for line in path.read_text(encoding="utf-8", errors="replace").splitlines():
            if line.startswith(MARK):
                fields = json.loads(line.removeprefix(MARK))
                if fields.keys() <= Record.__dataclass_fields__.keys():  # other programs print such lines too
                    record = Record(**fields)
                    found[record.model, record.variant, record.engine, record.what] = record
    return list(found.values())


def format_tables(records: Sequence[Record]) -> str:
    """A table for each model and variant."""
    tables = []
    for model, variant in dict.fromkeys((record.model, record.variant) for record in records):
        chosen = [record for record in records if (record.model, record.variant) == (model, variant)]
        tables.append(_format_table(f"{model}, {variant}", chosen))
    return "\n\n".join(tables)


def _format_table(title: str, records: Sequence[Record]) -> str:
    by_key = {(record.engine, record.what): record for record in records}
    engines = sorted({record.engine for record in records}, key=lambda name: (name != OURS, name))
    peers = [name for name in engines if name != OURS and OURS in engines]
    rows = [[title, "", "floor", *engines, *(f"{OURS} vs {name}" for name in peers), "of the floor"]]
    for what, figure in FIGURES.items():
        shown = [by_key.get((name, what)) for name in engines]
        if not any(shown):
            continue
        floor = next((record.floor for record in shown if record is not None and record.floor is not None), None)
        ours = by_key.get((OURS, what))
        ratios = [ratio(ours, by_key.get((name, PEER_FIGURES.get(what, what)))) for name in peers]
        rows.append(
            [
                f"  {figure.label}",
                figure.unit,
                "" if floor is None else format_number(floor),
                *("–" if record is None else record.text for record in shown),
                *("–" if one is None else f"{one:.2f}×" for one in ratios),
                "" if ours is None or floor is None else f"{1 / times_of_floor(ours):.0%}",
            ]
        )
    return align(rows)


def ratio(ours: Record | None, theirs: Record | None) -> float | None:
    """How many times faster we are."""
    if ours is None or theirs is None:
        return None
    return FIGURES[ours.what].advantage(ours.value, theirs.value)


def times_of_floor(record: Record) -> float:
    """How many times as long as the floor it takes."""
    assert record.floor is not None
    return FIGURES[record.what].advantage(record.floor, record.value)


def panels(records: Sequence[Record]) -> list[Panel]:
    """Returns a panel for each model and variant: how many times as long as the floor each figure takes."""
    chosen = [record for record in records if record.floor is not None]
    found = []
    for model, variant in dict.fromkeys((record.model, record.variant) for record in chosen):
        bars: dict[str, dict[str, float]] = {}
        for record in chosen:
            if (record.model, record.variant) == (model, variant):
                bars.setdefault(FIGURES[record.what].label, {})[record.engine] = times_of_floor(record)
        aims = dict.fromkeys(bars, 1.0)
        found.append(Panel(f"{model}, {variant}", "times as long as the floor", bars, logarithmic=True, aims=aims))
    return found
