"""A few steps as a picture: lanes of the device, of the thread that launches steps and of the one that plans them. On a
CPU, a lane of kernels by their kind, and below it what a step spends its time on."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from ratoon.benchmarks.loadgen.plot import new_figure
from ratoon.benchmarks.timeline.measure import Timeline
from ratoon.benchmarks.timeline.spans import (
    ATTENTION,
    BETWEEN,
    CORE,
    DEVICE,
    KERNELS,
    LANES,
    OUTPUTS,
    PLANNING,
    PREPARATION,
    PRODUCTS,
    REST,
    ROWS,
    SAMPLING,
    STEPS,
    WAIT,
    Span,
    kind_of,
)

if TYPE_CHECKING:
    from matplotlib.axes import Axes

SHOWN_STEPS = 4
WAIT_COLOUR = "#dddddd"
COLOURS = {
    DEVICE: "#c2571a",
    "launch": "#2f7d4f",
    "sample": "#7fb58f",
    "plan": "#33658a",
    "update": "#86a8c4",
    "outputs": "#b9a44c",
    WAIT: WAIT_COLOUR,
    PRODUCTS: "#c2571a",
    ATTENTION: "#e0a458",
    ROWS: "#8c2f39",
    SAMPLING: "#7fb58f",
    "prepare": "#1d4d33",
}
PART_COLOURS = {
    PRODUCTS: COLOURS[PRODUCTS],
    ATTENTION: COLOURS[ATTENTION],
    ROWS: COLOURS[ROWS],
    BETWEEN: COLOURS["launch"],
    SAMPLING: COLOURS[SAMPLING],
    PREPARATION: COLOURS["prepare"],
    PLANNING: COLOURS["plan"],
    OUTPUTS: COLOURS["outputs"],
    REST: WAIT_COLOUR,
}


def draw(path: Path, title: str, timeline: Timeline) -> None:
    """Needs matplotlib."""
    begin, end = window(timeline)
    parts = timeline.parts
    figure = new_figure(title, 12, 5.2 if parts else 3.4)
    axes, shares = figure.subplots(2, 1, height_ratios=(3, 1)) if parts else (figure.add_subplot(), None)
    lanes = [lane for lane in LANES if any(span.lane == lane for span in timeline.spans)]
    for place, lane in enumerate(reversed(lanes)):
        by_name: dict[str, list[tuple[float, float]]] = {}
        for span in sorted(timeline.spans, key=lambda span: span.begin):  # what is inside others is drawn over them
            if span.lane == lane and span.end > begin and span.begin < end:
                first, last = max(span.begin, begin), min(span.end, end)
                by_name.setdefault(_name(span), []).append(((first - begin) / 1e3, (last - first) / 1e3))
        for name, bars in by_name.items():
            axes.broken_barh(bars, (place - 0.35, 0.7), facecolor=COLOURS.get(name, "#888888"), label=name)
    axes.set_yticks(range(len(lanes)), lanes[::-1])
    axes.set(xlabel="milliseconds", xlim=(0, (end - begin) / 1e3))
    axes.legend(loc="upper center", bbox_to_anchor=(0.5, 1.2), ncols=len(COLOURS), fontsize=8, frameon=False)
    if shares is not None:
        draw_shares(shares, parts)
    figure.savefig(str(path))


def draw_shares(axes: Axes, parts: dict[str, float]) -> None:
    """One bar: a step by kind of work, and the share of each in the legend."""
    total, left = sum(parts.values()), 0.0
    for part, milliseconds in parts.items():
        label = f"{part} {milliseconds / total:.1%}"
        axes.barh([0], [milliseconds], left=left, color=PART_COLOURS[part], label=label, height=0.7)
        left += milliseconds
    axes.set_yticks([0], ["a step"])
    axes.set(xlabel="milliseconds", xlim=(0, total))
    axes.legend(loc="upper center", bbox_to_anchor=(0.5, -0.6), ncols=5, fontsize=8, frameon=False)


def _name(span: Span) -> str:
    if span.lane == KERNELS:
        return kind_of(span.name)
    return DEVICE if span.lane == DEVICE else span.name


def window(timeline: Timeline) -> tuple[float, float]:
    """The time that is shown: from the launch of a step in the middle to that of a step a few later, or all of a
    prompt."""
    if timeline.prompt_len:
        return timeline.begin, timeline.end
    launches = sorted(span.begin for span in timeline.spans if span.name == "launch" and span.lane == STEPS)
    if len(launches) < 2:
        launches = sorted(span.begin for span in timeline.spans if span.lane == CORE) or [timeline.begin, timeline.end]
    last = min(len(launches) - 1, len(launches) // 2 + SHOWN_STEPS // 2)
    return launches[max(0, last - SHOWN_STEPS)], launches[last]
