"""A picture of a run over HTTP: how stage-2 TTFT and whole conversations are spread, and the tokens of stage 2."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from statistics import median
from typing import TYPE_CHECKING

from ratoon.benchmarks.loadgen.plot import new_figure
from ratoon.benchmarks.two_stage.over_http.experiment import Measured
from ratoon.benchmarks.two_stage.over_http.measures import WaySummary
from ratoon.benchmarks.two_stage.over_http.run import Trip
from ratoon.benchmarks.two_stage.plot import POINT_COLOR, STAGE_COLORS
from ratoon.benchmarks.two_stage.ways import HTTP_WAYS

if TYPE_CHECKING:
    from matplotlib.axes import Axes

WAY_COLORS = {"no_reuse": "#8a8a8a", "prefix_cache": POINT_COLOR, "continuation": STAGE_COLORS[1]}


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
    for way in HTTP_WAYS:
        if way.key not in summaries:
            continue
        trips = [trip for one in measured.rounds if way.key in one for trip in one[way.key].trips.values()]
        values = [1e3 * value for trip in trips if trip.succeeded and (value := read(trip)) is not None]
        if values:
            label = f"{way.label}, median {median(values):,.0f} ms"
            axes.ecdf(values, color=WAY_COLORS[way.key], linewidth=2.0, label=label)
    axes.set(title=title, xlabel="milliseconds", ylabel="share of conversations", ylim=(0, 1.02))
    axes.yaxis.set_major_formatter(lambda value, position: f"{value:.0%}")
    axes.grid(alpha=0.25)
    if axes.lines:
        axes.legend(loc="best", fontsize=8)


def _draw_tokens(axes: Axes, summaries: Mapping[str, WaySummary]) -> None:
    ways = [way for way in HTTP_WAYS if way.key in summaries]
    labels = [way.label for way in ways]
    bottom = [0.0] * len(ways)
    for label, color in (("computed", STAGE_COLORS[1]), ("cached", STAGE_COLORS[0])):
        heights = [getattr(summaries[way.key], f"{label}_tokens") for way in ways]
        axes.bar(labels, heights, bottom=bottom, color=color, label=label)
        bottom = [low + height for low, height in zip(bottom, heights)]
    for index, way in enumerate(ways):
        one = summaries[way.key]
        text = f"{one.computed_tokens:,} computed\n{one.cached_tokens:,} cached"
        axes.text(index, bottom[index], text, ha="center", va="bottom", fontsize=8)
    axes.set(title="Prompt tokens of stage 2", ylabel="tokens", ylim=(0, max([*bottom, 1.0]) * 1.3))
    axes.grid(axis="y", alpha=0.25)
    axes.set_axisbelow(True)
    axes.legend(loc="upper right", fontsize=8, ncols=2)
