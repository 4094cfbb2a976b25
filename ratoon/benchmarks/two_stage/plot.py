"""A picture of a run: how stage-2 TTFT and whole conversations are spread, and the tokens of stage 2."""

from __future__ import annotations

import textwrap
from collections.abc import Callable, Mapping
from statistics import median
from typing import TYPE_CHECKING

from ratoon.benchmarks.loadgen.plot import new_figure
from ratoon.benchmarks.two_stage.measures import WaySummary
from ratoon.benchmarks.two_stage.trips import WAYS, Measured, Trip

if TYPE_CHECKING:
    from matplotlib.axes import Axes

COLORS = ("#8a8a8a", "#c2571a", "#2f7d4f", "#e3a27c", "#8fc0a2")  # of the ways, in their order
COMPUTED_COLOR, CACHED_COLOR = "#2f7d4f", "#b9c4bd"


def draw(path: str, title: str, measured: Measured, summaries: Mapping[str, WaySummary]) -> None:
    from matplotlib.ticker import LogLocator, NullFormatter

    figure = new_figure(title, 15, 4.8)
    first, second, third = figure.subplots(1, 3)
    _draw_spread(first, measured, summaries, "Stage-2 time to first token", _stage2_ttft)
    first.set_xscale("log")  # the ways lie orders of magnitude apart
    first.xaxis.set_major_locator(LogLocator(subs=(1.0, 2.0, 5.0)))
    first.xaxis.set_minor_formatter(NullFormatter())
    for axes in (first, second):
        axes.xaxis.set_major_formatter(lambda value, position: f"{value:,.0f}")
    _draw_spread(second, measured, summaries, "Both stages", lambda trip: trip.seconds)
    _draw_tokens(third, summaries)
    figure.savefig(path)


def _stage2_ttft(trip: Trip) -> float | None:
    return None if trip.stage2 is None else trip.stage2.ttft


def _draw_spread(
    axes: Axes,
    measured: Measured,
    summaries: Mapping[str, WaySummary],
    title: str,
    read: Callable[[Trip], float | None],
) -> None:
    """The share of conversations at or below each time, a line for each way."""
    for way, color in zip(WAYS, COLORS, strict=True):
        if way.key not in summaries:
            continue
        trips = measured.trips(way.key)
        values = [1e3 * value for trip in trips if trip.succeeded and (value := read(trip)) is not None]
        if values:
            label = f"{way.label}, median {median(values):,.0f} ms"
            axes.ecdf(values, color=color, linewidth=2.0, label=label)
    axes.set(title=title, xlabel="milliseconds", ylabel="share of conversations", ylim=(0, 1.02))
    axes.yaxis.set_major_formatter(lambda value, position: f"{value:.0%}")
    axes.grid(alpha=0.25)
    if axes.lines:
        axes.legend(loc="best", fontsize=8)


def _draw_tokens(axes: Axes, summaries: Mapping[str, WaySummary]) -> None:
    ways = [way for way in WAYS if way.key in summaries]
    labels = [textwrap.fill(way.label, 13) for way in ways]
    bottom = [0.0] * len(ways)
    for label, color in (("computed", COMPUTED_COLOR), ("cached", CACHED_COLOR)):
        heights = [getattr(summaries[way.key], f"{label}_tokens") for way in ways]
        axes.bar(labels, heights, bottom=bottom, color=color, label=label)
        bottom = [low + height for low, height in zip(bottom, heights)]
    for index, way in enumerate(ways):
        one = summaries[way.key]
        text = f"{one.computed_tokens:,} computed\n{one.cached_tokens:,} cached"
        axes.text(index, bottom[index], text, ha="center", va="bottom", fontsize=8)
    axes.set(title="Prompt tokens of stage 2", ylabel="tokens", ylim=(0, max([*bottom, 1.0]) * 1.3))
    axes.grid(axis="y", alpha=0.25)
    axes.tick_params(axis="x", labelsize=7.5)
    axes.set_axisbelow(True)
    axes.legend(loc="upper right", fontsize=8, ncols=2)
