"""Times of several engines for the same work: what they spread over, how many times faster we are, a table of both."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, TypeAlias

from cpu_peers import OURS, format_spread, spread

Summary: TypeAlias = dict[str, dict[str, dict[str, float]]]  # row → engine → median, min, max


@dataclass(frozen=True)
class Row:
    label: str
    unit: str = "s"  # or ms
    aims: dict[str, str] = field(default_factory=dict)  # peer → what its ratio should be


class Comparison:
    """What was measured so far: row → engine → seconds, one value a round."""

    def __init__(self) -> None:
        self.samples: dict[str, dict[str, list[float]]] = {}
        self.same: dict[str, list[float]] = {}  # peer → share of an answer that is also ours, one for each answer

    def record(self, row: str, engine: str, seconds: float) -> None:
        self.samples.setdefault(row, {}).setdefault(engine, []).append(seconds)

    def record_same(self, engine: str, shares: list[float]) -> None:
        self.same.setdefault(engine, []).extend(shares)

    def summary(self) -> dict[str, Any]:
        return {
            "samples": self.samples,
            "seconds": {
                row: {name: spread(values) for name, values in by_engine.items()}
                for row, by_engine in self.samples.items()
            },
            "ratios": {
                row: {
                    name: spread([theirs / ours for ours, theirs in zip(by_engine[OURS], values, strict=True)])
                    for name, values in by_engine.items()
                    if name != OURS
                }
                for row, by_engine in self.samples.items()
            },
            "same": self.same,
        }


def format_comparison(title: str, rows: dict[str, Row], result: dict[str, Any]) -> str:
    seconds: Summary = result["seconds"]
    ratios: Summary = result["ratios"]
    engines = sorted(next(iter(seconds.values())), key=lambda name: (name != OURS, name))  # they took turns
    lines = [[title, "", *engines, *(f"{OURS} vs {name}" for name in engines if name != OURS)]]
    for key, row in rows.items():
        times = [format_spread(_in_unit(seconds[key][name], row.unit)) for name in engines]
        aims = {name: f", aim {aim}" for name, aim in row.aims.items()}
        against = [format_spread(ratios[key][name], "×") + aims.get(name, "") for name in engines if name != OURS]
        lines.append([f"  {row.label}", row.unit, *times, *against])
    return align(lines)


def align(rows: Sequence[Sequence[str]]) -> str:
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return "\n".join("  ".join(cell.ljust(width) for cell, width in zip(row, widths)).rstrip() for row in rows)


def _in_unit(seconds: dict[str, float], unit: str) -> dict[str, float]:
    factor = {"s": 1.0, "ms": 1e3}[unit]
    return {name: factor * value for name, value in seconds.items()}
