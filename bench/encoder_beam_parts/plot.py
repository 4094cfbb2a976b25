"""The results of encoder_beams.py as a picture: a panel for each family. Needs matplotlib."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from cpu_peers import OURS

from encoder_beam_parts.search import GROWTH_AIM
from encoder_beam_parts.sizes import Sizes

if TYPE_CHECKING:
    from matplotlib.axes import Axes

COLORS = {"greedy_step": "#b9c4bd", "beams_step": "#2f7d4f"}
ORANGE = "#c2571a"


def draw(path: Path, title: str, parts: dict[str, dict[str, Any]], sizes: Sizes) -> None:
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(5 * len(parts), 4.6), dpi=130, layout="constrained")
    FigureCanvasAgg(figure)
    figure.suptitle(title, fontsize=11)
    for axes, (family, result) in zip(figure.subplots(1, len(parts), squeeze=False)[0], parts.items()):
        _draw_steps(axes, result, sizes)
        axes.set_title(f"{family}: one step after {sizes.input} tokens")
    figure.savefig(path)


def _draw_steps(axes: Axes, result: dict[str, Any], sizes: Sizes) -> None:
    seconds = result["seconds"]
    engines = list(seconds["greedy_step"])
    labels = {"greedy_step": "greedy", "beams_step": f"{sizes.width} beams"}
    for offset, (key, color) in zip((-0.2, 0.2), COLORS.items()):
        heights = [1e3 * seconds[key][name]["median"] for name in engines]
        places = [index + offset for index in range(len(engines))]
        bars = axes.bar(places, heights, 0.4, color=color, label=labels[key])
        axes.bar_label(bars, [f"{height:.3g}" for height in heights], fontsize=8)
    aim = GROWTH_AIM * 1e3 * seconds["greedy_step"][OURS]["median"]
    place = engines.index(OURS) + 0.2
    axes.hlines(aim, place - 0.2, place + 0.2, color=ORANGE, linewidth=2, label="at most, by the aim")
    axes.set_xticks(range(len(engines)), engines)
    axes.set_ylabel("milliseconds")
    axes.margins(y=0.15)
    axes.grid(axis="y", alpha=0.25)
    axes.set_axisbelow(True)
    axes.legend(fontsize=8)
