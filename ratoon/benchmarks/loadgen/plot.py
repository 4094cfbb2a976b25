"""A picture of a load run: distributions of latencies, and the run over time."""

from __future__ import annotations

import importlib.util
import textwrap
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from ratoon.benchmarks.loadgen.measures import Distribution, RequestRecord, distribution
from ratoon.benchmarks.loadgen.run import Round
from ratoon.core.errors import ConfigError, RequestError

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

LATENCIES: tuple[tuple[str, str, Callable[[RequestRecord], list[float | None]]], ...] = (
    ("Time to first token", "ttft", lambda record: [record.ttft]),
    ("Pauses between chunks (ITL)", "itl", lambda record: list(record.itl)),
    ("Whole request (E2E)", "e2e", lambda record: [record.e2e]),
)
COLOR, SECOND_COLOR, GUIDE_COLOR = "#2f7d4f", "#c2571a", "#8a8a8a"
NUM_BINS = 60
FORMATS = (".png", ".svg", ".pdf")


def check_plotting(path: str) -> None:
    """Errors about the picture are raised before the run."""
    if not path.endswith(FORMATS):
        raise RequestError(
            "--plot", f"{path!r} is not a supported picture format", f"a name that ends in {' or '.join(FORMATS)}"
        )
    if importlib.util.find_spec("matplotlib") is None:
        raise ConfigError("--plot", "needs matplotlib, which is not installed", "pip install matplotlib")


def new_figure(title: str, width: float, height: float) -> Figure:
    """An empty picture of so many inches, which needs no display."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(width, height), dpi=130, layout="constrained")
    figure.suptitle(textwrap.fill(title, int(10 * width)), fontsize=12)
    return figure


def draw(path: str, title: str, rounds: Sequence[Round], limits_ms: dict[str, float]) -> None:
    """Three distributions above (a line for each round), the first round over time below."""
    figure = new_figure(title, 12, 7.5)
    grid = figure.add_gridspec(2, 3, height_ratios=[1.0, 0.9])
    for column, (label, name, read) in enumerate(LATENCIES):
        _draw_spread(figure.add_subplot(grid[0, column]), label, rounds, read, limits_ms.get(name))
    _draw_timeline(
        figure.add_subplot(grid[1, :]), rounds[0], "Over time" if len(rounds) == 1 else "Over time, first round"
    )
    figure.savefig(path)


def _draw_spread(
    axes: Axes,
    label: str,
    rounds: Sequence[Round],
    read: Callable[[RequestRecord], list[float | None]],
    limit_ms: float | None,
) -> None:
    """The share of values at or below each value: a line for each round."""
    columns = [[value for record in one.records if record.succeeded for value in read(record)] for one in rounds]
    spread = distribution(value for column in columns for value in column)
    axes.set(title=label, ylabel="share of values" if label.startswith("Time") else "", ylim=(0, 1.02))
    axes.yaxis.set_major_formatter(lambda value, position: f"{value:.0%}")
    axes.grid(alpha=0.25)
    if spread is None:
        axes.text(0.5, 0.5, "no values", ha="center", transform=axes.transAxes, color=GUIDE_COLOR)
        return
    unit, in_unit = ("seconds", 1e-3) if spread.p99 >= 5000 else ("milliseconds", 1.0)
    axes.set(xlabel=unit, xlim=[edge * in_unit for edge in _span(spread, limit_ms)])
    for column in columns:
        if values := [value * 1e3 * in_unit for value in column if value is not None]:
            axes.ecdf(values, color=COLOR, linewidth=1.8, alpha=1.0 if len(rounds) == 1 else 0.5)
    for share, name, dashes in ((0.5, "median", ":"), (0.99, "p99", "--")):
        value = getattr(spread, name)
        axes.axvline(
            value * in_unit,
            0,
            share / 1.02,
            color=GUIDE_COLOR,
            linewidth=1.2,
            linestyle=dashes,
            label=f"{name} {value:,.1f} ms",
        )
    if limit_ms is not None:
        axes.axvline(limit_ms * in_unit, color=SECOND_COLOR, linewidth=1.4, label=f"limit {limit_ms:,g} ms")
    axes.legend(loc="best", fontsize=8)


def _span(spread: Distribution, limit_ms: float | None) -> tuple[float, float]:
    """What to show of an axis: nearly all values, without a few outliers."""
    high = spread.max if spread.max < 2 * spread.p99 else 1.3 * spread.p99
    low = spread.min
    if limit_ms is not None:
        low, high = min(low, limit_ms), max(high, limit_ms)
    margin = 0.06 * (high - low) or 0.5
    return (0.0 if low < 0.5 * high else low - margin), high + margin


def _draw_timeline(axes: Axes, one: Round, label: str) -> None:
    """Tokens a second in even slices of time, and the requests that were under way."""
    width = max(one.seconds, 1e-3) / NUM_BINS
    tokens = [0] * NUM_BINS
    for record in one.records:
        for moment, count in zip(record.chunk_times, record.chunk_tokens):
            tokens[min(int(moment / width), NUM_BINS - 1)] += count
    edges = [width * index for index in range(NUM_BINS + 1)]
    axes.stairs([count / width for count in tokens], edges, fill=True, color=COLOR, alpha=0.35, label="output tok/s")
    axes.set(title=label, xlabel="seconds", ylabel="output tokens per second", xlim=(0, one.seconds))
    axes.grid(alpha=0.25)
    right: Any = axes.twinx()
    moments, running = _running(one)
    right.step(moments, running, where="post", color=SECOND_COLOR, linewidth=1.5, label="requests under way")
    right.set_ylabel("requests under way")
    right.set_ylim(0, max(running) * 1.15 + 0.5)
    right.yaxis.get_major_locator().set_params(integer=True)
    handles = axes.get_legend_handles_labels(), right.get_legend_handles_labels()
    axes.legend(handles[0][0] + handles[1][0], handles[0][1] + handles[1][1], loc="upper right", fontsize=8)
    axes.set_ylim(0, max(max(tokens) / width * 1.25, 1.0))


def _running(one: Round) -> tuple[list[float], list[int]]:
    """How many requests were under way from each moment on."""
    changes = sorted(
        change
        for record in one.records
        for change in ((record.started, 1), (one.seconds if record.ended is None else record.ended, -1))
    )
    moments, counts, running = [0.0], [0], 0
    for moment, change in changes:
        running += change
        moments.append(moment)
        counts.append(running)
    return moments, counts
