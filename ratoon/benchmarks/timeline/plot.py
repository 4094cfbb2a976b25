"""A few steps as a picture: lanes of the device, of the thread that launches steps and of the one that plans them."""

from __future__ import annotations

from pathlib import Path

from ratoon.benchmarks.loadgen.plot import new_figure
from ratoon.benchmarks.timeline.measure import Timeline
from ratoon.benchmarks.timeline.spans import CORE, DEVICE, LANES, STEPS, WAIT, Span

SHOWN_STEPS = 4
COLOURS = {
    DEVICE: "#c2571a",
    "launch": "#2f7d4f",
    "sample": "#7fb58f",
    "plan": "#33658a",
    "update": "#86a8c4",
    "outputs": "#b9a44c",
    WAIT: "#dddddd",
}


def draw(path: Path, title: str, timeline: Timeline) -> None:
    """Needs matplotlib."""
    begin, end = window(timeline)
    figure = new_figure(title, 12, 3.4)
    axes = figure.add_subplot()
    lanes = [lane for lane in LANES if any(span.lane == lane for span in timeline.spans)]
    for place, lane in enumerate(reversed(lanes)):
        by_name: dict[str, list[tuple[float, float]]] = {}
        for span in timeline.spans:
            if span.lane == lane and span.end > begin and span.begin < end:
                first, last = max(span.begin, begin), min(span.end, end)
                by_name.setdefault(_name(span), []).append(((first - begin) / 1e3, (last - first) / 1e3))
        for name, bars in by_name.items():
            axes.broken_barh(bars, (place - 0.35, 0.7), facecolor=COLOURS.get(name, "#888888"), label=name)
    axes.set_yticks(range(len(lanes)), lanes[::-1])
    axes.set(xlabel="milliseconds", xlim=(0, (end - begin) / 1e3))
    axes.legend(loc="upper center", bbox_to_anchor=(0.5, 1.2), ncols=len(COLOURS), fontsize=8, frameon=False)
    figure.savefig(str(path))


def _name(span: Span) -> str:
    return DEVICE if span.lane == DEVICE else span.name


def window(timeline: Timeline) -> tuple[float, float]:
    """From the launch of a step in the middle to that of a step a few later."""
    launches = sorted(span.begin for span in timeline.spans if span.name == "launch" and span.lane == STEPS)
    if len(launches) < 2:
        launches = sorted(span.begin for span in timeline.spans if span.lane == CORE) or [timeline.begin, timeline.end]
    last = min(len(launches) - 1, len(launches) // 2 + SHOWN_STEPS // 2)
    return launches[max(0, last - SHOWN_STEPS)], launches[last]
