"""The results of beams.py as a picture: a panel for each part that was measured. Needs matplotlib."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from beam_parts.search import COLD, KNOWN
from beam_parts.sizes import Sizes

if TYPE_CHECKING:
    from matplotlib.axes import Axes

GREEN, ORANGE, PALE = "#2f7d4f", "#c2571a", "#b9c4bd"
LATENCIES = {
    "decode_step": "one decode\nstep",
    "ttft": "stage 2 after\na leased parent",
    "computed_ttft": "all computed",
}


def draw(path: Path, title: str, parts: dict[str, dict[str, Any]], sizes: Sizes) -> None:
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(5 * len(parts), 4.6), dpi=130, layout="constrained")
    FigureCanvasAgg(figure)
    figure.suptitle(title, fontsize=11)
    panels = {"latency": _draw_latency, "search": _draw_search, "steps": _draw_steps}
    for axes, (part, result) in zip(figure.subplots(1, len(parts), squeeze=False)[0], parts.items()):
        panels[part](axes, result, sizes)
        axes.grid(axis="y", alpha=0.25)
        axes.set_axisbelow(True)
    figure.savefig(path)


def _draw_latency(axes: Axes, result: dict[str, Any], sizes: Sizes) -> None:
    values = [1e3 * result["seconds"][key]["median"] for key in LATENCIES]
    bars = axes.bar(list(LATENCIES.values()), values, color=[PALE, GREEN, ORANGE])
    axes.bar_label(bars, [f"{value:,.0f} ms" for value in values], fontsize=9)
    axes.set(title=f"First result after {sizes.before} tokens", ylabel="milliseconds", yscale="log")
    axes.set_ylim(min(values) / 3, max(values) * 3)


def _draw_search(axes: Axes, result: dict[str, Any], sizes: Sizes) -> None:
    engines = list(result["seconds"][COLD])
    width = 0.4
    for offset, kind, color, label in ((-0.2, COLD, PALE, "new prompt"), (0.2, KNOWN, GREEN, "known before")):
        seconds = result["seconds"][kind]
        places = [index + offset for index, name in enumerate(engines) if name in seconds]
        heights = [seconds[name]["median"] for name in engines if name in seconds]
        bars = axes.bar(places, heights, width, color=color, label=label)
        axes.bar_label(
            bars, [f"{height:.2g} s" if height < 10 else f"{height:.0f} s" for height in heights], fontsize=8
        )
    axes.set_xticks(range(len(engines)), engines)
    title = f"Beams {sizes.width} × {sizes.tokens} after {sizes.before} tokens"
    axes.set(title=title, ylabel="seconds", yscale="log")
    axes.margins(y=0.3)
    axes.legend(loc="upper left", fontsize=8)


def _draw_steps(axes: Axes, result: dict[str, Any], sizes: Sizes) -> None:
    """A line for each number of beams over what stands before them: flat is the aim."""
    for index, width in enumerate(sizes.widths):
        shade = 0.25 + 0.75 * (index + 1) / len(sizes.widths)
        times = [1e3 * result["seconds"][prefix][width]["median"] for prefix in sizes.prefixes]
        axes.plot(sizes.prefixes, times, "o-", color=GREEN, alpha=shade, markersize=4, label=f"{width} beams")
    axes.set(title="One step", xlabel="tokens before the beams", ylabel="milliseconds")
    axes.set_ylim(bottom=0)
    handles, labels = axes.get_legend_handles_labels()
    axes.legend(handles[::-1], labels[::-1], fontsize=8)
