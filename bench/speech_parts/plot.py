"""The results of speech.py as a picture: a panel for each part that was measured. Needs matplotlib."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from cpu_peers import OURS

from speech_parts import pieces, transcription
from speech_parts.sizes import Sizes

if TYPE_CHECKING:
    from matplotlib.axes import Axes

COLORS = {OURS: "#2f7d4f", "ctranslate2": "#c2571a", "transformers": "#b9c4bd"}
ROWS = {"transcription": transcription.ROWS, "pieces": pieces.ROWS}


def draw(path: Path, title: str, parts: dict[str, dict[str, Any]], sizes: Sizes) -> None:
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(6 * len(parts), 4.6), dpi=130, layout="constrained")
    FigureCanvasAgg(figure)
    figure.suptitle(title, fontsize=11)
    titles = {"transcription": f"{sizes.clips} clips at once", "pieces": "Where the time goes"}
    for axes, (part, result) in zip(figure.subplots(1, len(parts), squeeze=False)[0], parts.items()):
        labels = {key: row.label.replace(" ", "\n", 1) for key, row in ROWS[part].items()}
        draw_engines(axes, labels, result["seconds"], in_ms=part == "pieces")
        axes.set_title(titles[part])
    figure.savefig(path)


def draw_engines(axes: Axes, labels: dict[str, str], seconds: dict[str, Any], in_ms: bool) -> None:
    """A group of bars for each row, a bar for each engine."""
    engines = [name for name in COLORS if name in next(iter(seconds.values()))]
    width = 0.8 / len(engines)
    for place, name in enumerate(engines):
        heights = [(1e3 if in_ms else 1) * seconds[row][name]["median"] for row in labels]
        offset = (place - (len(engines) - 1) / 2) * width
        bars = axes.bar(
            [index + offset for index in range(len(labels))], heights, width, color=COLORS[name], label=name
        )
        axes.bar_label(bars, [f"{height:,.0f}" if height >= 100 else f"{height:.2g}" for height in heights], fontsize=8)
    axes.set_xticks(range(len(labels)), list(labels.values()))
    axes.set_ylabel("milliseconds" if in_ms else "seconds")
    if in_ms:
        axes.set_yscale("log")  # from a decode step to the encoder
    axes.margins(y=0.2)
    axes.grid(axis="y", alpha=0.25)
    axes.set_axisbelow(True)
    axes.legend(fontsize=8)
