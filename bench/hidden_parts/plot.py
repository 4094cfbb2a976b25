"""The results of hidden_states.py as a picture: a panel for each part that was measured. Needs matplotlib."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from cpu_peers import OURS

from hidden_parts.idle import BEFORE
from hidden_parts.sizes import Sizes
from hidden_parts.throughput import AIMS

if TYPE_CHECKING:
    from matplotlib.axes import Axes

GREEN, ORANGE, PALE = "#2f7d4f", "#c2571a", "#b9c4bd"
# By key of a result: what stands below the bar, and its colour.
LATENCIES = {
    "decode_step": ("one decode\nstep", PALE),
    "read": ("states of the\nlast token", GREEN),
    "second_prefill": ("by a second\nprefill", ORANGE),
    "transformers": ("transformers", PALE),
}
PREFILLS = {
    "plain": ("plain\nprefill", PALE),
    "one_layer": ("states of\none layer", GREEN),
    "all_layers": ("states of\nall layers", GREEN),
    "transformers": ("transformers,\nall layers", ORANGE),
}
STEPS = {BEFORE: ("before", PALE), OURS: ("now", GREEN)}


def draw(path: Path, title: str, parts: dict[str, dict[str, Any]], sizes: Sizes) -> None:
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(5 * len(parts), 4.6), dpi=130, layout="constrained")
    FigureCanvasAgg(figure)
    figure.suptitle(title, fontsize=11)
    panels = {"latency": _draw_latency, "throughput": _draw_throughput, "prefill": _draw_prefill, "idle": _draw_idle}
    for axes, (part, result) in zip(figure.subplots(1, len(parts), squeeze=False)[0], parts.items()):
        panels[part](axes, result, sizes)
        axes.grid(axis="y", alpha=0.25)
        axes.set_axisbelow(True)
    figure.savefig(path)


def _draw_latency(axes: Axes, result: dict[str, Any], sizes: Sizes) -> None:
    values = _draw_times(axes, {key: found["median"] for key, found in result["seconds"].items()}, LATENCIES)
    axes.set(title=f"The last token of {sizes.before:,}", yscale="log")
    axes.set_ylim(min(values) / 3, max(values) * 3)


def _draw_throughput(axes: Axes, result: dict[str, Any], sizes: Sizes) -> None:
    rates = result["tokens_per_second"]
    without, *_ = (found["median"] for found in rates.values())
    for place, (share, found) in enumerate(rates.items()):
        drawn = axes.bar([place], [found["median"]], 0.6, color=GREEN if place else PALE)
        axes.bar_label(drawn, [f"{found['median']:,.0f}"], fontsize=9)
        if share in AIMS:
            axes.hlines(AIMS[share] * without, place - 0.3, place + 0.3, color=ORANGE, linewidth=2)
    axes.set_xticks(range(len(rates)), [f"{share} % ask" for share in rates])
    axes.set(title=f"{sizes.requests} requests at once (orange: the aim)", ylabel="tokens per second")


def _draw_prefill(axes: Axes, result: dict[str, Any], sizes: Sizes) -> None:
    _draw_times(axes, {key: found["median"] for key, found in result["seconds"].items()}, PREFILLS)
    axes.set(title=f"All positions of {sizes.before:,} tokens")


def _draw_idle(axes: Axes, result: dict[str, Any], sizes: Sizes) -> None:
    _draw_times(axes, {name: found["step"]["median"] for name, found in result["seconds"].items()}, STEPS)
    axes.set(title="A decode step with nothing to read")


def _draw_times(axes: Axes, seconds: dict[str, float], bars: dict[str, tuple[str, str]]) -> list[float]:
    shown = {key: bar for key, bar in bars.items() if key in seconds}
    values = [1e3 * seconds[key] for key in shown]
    drawn = axes.bar([label for label, _ in shown.values()], values, color=[color for _, color in shown.values()])
    axes.bar_label(drawn, [f"{value:,.0f} ms" if value >= 10 else f"{value:.1f} ms" for value in values], fontsize=9)
    axes.set(ylabel="milliseconds")
    axes.margins(y=0.15)
    return values
