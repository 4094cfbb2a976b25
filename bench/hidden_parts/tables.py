"""Times of several ways to the same thing: their spread, ratios between them, and a table of both."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from cpu_peers import format_spread, spread


@dataclass(frozen=True)
class Ratio:
    label: str
    over: str  # keys of samples
    under: str
    aim: str | None = None


def summarize(samples: dict[str, list[float]], ratios: dict[str, Ratio]) -> dict[str, Any]:
    """Ratios are taken round by round, between what was measured."""
    return {
        "samples": samples,
        "seconds": {key: spread(values) for key, values in samples.items()},
        "ratios": {
            key: spread([over / under for over, under in zip(samples[ratio.over], samples[ratio.under])])
            for key, ratio in ratios.items()
            if ratio.over in samples
        },
    }


def format_times(title: str, labels: dict[str, str], ratios: dict[str, Ratio], result: dict[str, Any]) -> str:
    lines = [f"{title}, ms"]
    for key, seconds in result["seconds"].items():
        in_ms = {name: 1e3 * value for name, value in seconds.items()}
        lines.append(f"  {labels[key]:<46}{format_spread(in_ms)}")
    for key, values in result["ratios"].items():
        aim = "" if ratios[key].aim is None else f"; the aim is {ratios[key].aim}"
        lines.append(f"  {ratios[key].label:<46}{format_spread(values, '×')}{aim}")
    return "\n".join(lines)
