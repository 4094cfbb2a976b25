"""A picture of a two-stage run: stage-2 TTFT, where the time of both stages goes, tokens computed, way by way."""

from __future__ import annotations

import textwrap
from collections.abc import Mapping, Sequence
from statistics import median
from typing import TYPE_CHECKING

from ratoon.benchmarks.loadgen.plot import new_figure
from ratoon.benchmarks.two_stage.experiment import Round
from ratoon.benchmarks.two_stage.measures import WaySummary
from ratoon.benchmarks.two_stage.ways import WAYS

if TYPE_CHECKING:
    from matplotlib.axes import Axes

STAGE_COLORS = ("#b9c4bd", "#2f7d4f")
POINT_COLOR = "#c2571a"
LABELS = [textwrap.fill(way.label, 13) for way in WAYS]


def draw(path: str, title: str, rounds: Sequence[Round], summaries: Mapping[str, WaySummary]) -> None:
    figure = new_figure(title, 16, 5.2)
    first, second, third = figure.subplots(1, 3)
    _draw_ttft(first, rounds, summaries)
    _draw_totals(second, rounds)
    _draw_computed(third, summaries)
    for axes in (first, second, third):
        axes.grid(axis="y", alpha=0.25)
        axes.set_axisbelow(True)
        axes.tick_params(axis="x", labelsize=7.5)
    figure.savefig(path)


def _draw_ttft(axes: Axes, rounds: Sequence[Round], summaries: Mapping[str, WaySummary]) -> None:
    """Medians as bars, rounds as points. The ways lie orders of magnitude apart, so the scale is logarithmic."""
    heights = [1e3 * summaries[way.key].ttft.seconds.median for way in WAYS]
    axes.bar(LABELS, heights, color=STAGE_COLORS[1], alpha=0.85)
    for index, (way, height) in enumerate(zip(WAYS, heights)):
        values = [1e3 * median(one[way.key].ttft_seconds) for one in rounds]
        axes.plot([index] * len(values), values, ".", color=POINT_COLOR, markersize=4)
        text = f"{height:,.0f} ms\n{summaries[way.key].ttft.advantage.median:.1f}×"
        axes.text(index, 1.06 * max(values), text, ha="center", va="bottom", fontsize=8)
    axes.set(title="Stage-2 time to first token", ylabel="milliseconds", yscale="log")
    axes.set_ylim(min(heights) / 3, max(heights) * 4)


def _draw_totals(axes: Axes, rounds: Sequence[Round]) -> None:
    bottom = [0.0] * len(WAYS)
    for label, color, attribute in zip(("stage 1", "stage 2"), STAGE_COLORS, ("stage1_seconds", "stage2_seconds")):
        heights = [median(getattr(one[way.key], attribute) for one in rounds) for way in WAYS]
        axes.bar(LABELS, heights, bottom=bottom, color=color, label=label)
        bottom = [low + height for low, height in zip(bottom, heights)]
    for index, height in enumerate(bottom):
        axes.text(index, height, f"{height:.2f} s", ha="center", va="bottom", fontsize=8)
    axes.set(title="Both stages", ylabel="seconds", ylim=(0, max(bottom) * 1.2))
    axes.legend(loc="upper right", fontsize=8, ncols=2)


def _draw_computed(axes: Axes, summaries: Mapping[str, WaySummary]) -> None:
    heights = [summaries[way.key].computed_tokens for way in WAYS]
    bars = axes.bar(LABELS, heights, color=STAGE_COLORS[1], alpha=0.85)
    sources = [", ".join(summaries[way.key].sources).replace("_", " ") for way in WAYS]
    axes.bar_label(bars, [f"{height:,.6g}\n{source}" for height, source in zip(heights, sources)], fontsize=8)
    axes.set(title="Prompt tokens computed in stage 2", ylabel="tokens", ylim=(0, max(heights) * 1.2))
