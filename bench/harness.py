"""What benchmark programs share: options, a quiet machine, rounds and their spread, tables, pictures, JSON.

A program is a subclass of Program that has its own options, its workload and its table. Times of one engine by several
ways are `Times`, times of several engines for the same work a `Comparison`.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import statistics
import sys
from collections.abc import Iterable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar, TypeAlias

from export_hf import CACHE_FOLDER
from peers.machine import QUIET_SHARE, describe_machine, usable_cores, wait_for_quiet_machine
from peers.process import EngineFailedError, EngineProcess, engine_python
from peers.protocol import MAX_MODEL_LEN

OURS = "ratoon"
PYTHONS = {"vllm": "--vllm-python", "ctranslate2": "--ct2-python"}  # of engines in environments of their own
QUIET_LIMIT_SECONDS = 600
COLOURS = {OURS: "#2f7d4f", "vllm": "#c2571a", "ctranslate2": "#c2571a", "transformers": "#b9c4bd"}
PALETTE = ("#2f7d4f", "#c2571a", "#b9c4bd", "#7a8fb8", "#b8a07a", "#b87a7a")

Engines: TypeAlias = dict[str, EngineProcess]  # by name, as in the table
Spread: TypeAlias = dict[str, float]  # median, min, max


# ---- options ----


def positive(text: str) -> int:
    """The type of an option that is a whole number of at least 1."""
    number = int(text)
    if number < 1:
        raise argparse.ArgumentTypeError(f"{text}; expected at least 1")
    return number


def count(parser: argparse.ArgumentParser, option: str, default: int | None, what: str = "") -> None:
    """Adds an option that is a whole number of at least 1."""
    shown = "" if default is None else "default: %(default)s"
    parser.add_argument(
        option, type=positive, default=default, metavar="N", help="; ".join(filter(None, (what, shown)))
    )


def verify_names(parser: argparse.ArgumentParser, option: str, names: list[str], known: Iterable[str]) -> list[str]:
    """Returns the names of an option. One that is unknown or given twice ends the program."""
    known = list(known)
    if not set(names) <= set(known) or len(set(names)) != len(names):
        parser.error(f"{option}: {','.join(names)}; expected each of these once at most: {', '.join(known)}")
    return names


def add_python_option(parser: argparse.ArgumentParser, engine: str) -> None:
    parser.add_argument(PYTHONS[engine], metavar="PATH", help=f"the Python of an environment that has {engine}")


def python_of(args: argparse.Namespace, engine: str) -> str | None:
    found: str | None = getattr(args, PYTHONS[engine].removeprefix("--").replace("-", "_"), None)
    return found


# ---- a program ----


class Program:
    """One run of a benchmark: its options, the engines that it has started, and what was measured so far."""

    doc = ""  # the module's docstring; its first line is the help text
    rounds: ClassVar[int | None] = 5  # the default of --rounds; None: there is no such option
    threads: ClassVar[bool] = True  # whether there is --threads
    parts: ClassVar[Sequence[str]] = ()  # names of --parts, in order; the results of each are in `found`
    peers: ClassVar[Sequence[str]] = ()  # names of --engines, Ratoon among them
    plots: ClassVar[bool] = False  # whether there is --plot
    quick: ClassVar[bool] = False  # whether there is --quick

    def __init__(self, arguments: Sequence[str] | None = None) -> None:
        parser = argparse.ArgumentParser(description=" ".join(self.doc.split("\n\n")[0].split()))
        if self.parts:
            parser.add_argument("--parts", default=",".join(self.parts), help="default: %(default)s")
        if self.rounds is not None:
            count(parser, "--rounds", self.rounds)
        if self.threads:
            count(parser, "--threads", len(usable_cores()), "all cores")
        if self.peers:
            given = "those that need no other Python, or whose Python is given"
            parser.add_argument("--engines", help=f"of {', '.join(self.peers)}; default: {given}")
            for name in PYTHONS:
                if name in self.peers:
                    add_python_option(parser, name)
        if self.plots:
            parser.add_argument("--plot", type=Path, metavar="OUT.png", help="also draw it (needs matplotlib)")
        if self.quick:
            parser.add_argument("--quick", action="store_true", help="tiny sizes and one round: does it work at all?")
        parser.add_argument("--json", type=Path, metavar="OUT", help="also write everything that was measured")
        parser.add_argument("--no-wait", action="store_true", help="do not wait for a quiet machine")
        self.add_options(parser)
        self.args = args = parser.parse_args(arguments)
        if self.parts:
            args.parts = verify_names(parser, "--parts", args.parts.split(","), self.parts)
        if self.peers:
            args.engines = self._verify_engines(parser, args)
        if self.quick and args.quick and self.rounds is not None:
            args.rounds = 1
        self.check_options(parser, args)
        self.quiet: bool | None = None
        self.engines: list[tuple[str, EngineProcess]] = []
        self.found: dict[str, Any] = {}  # by part, or whatever the program's results are called

    def _verify_engines(self, parser: argparse.ArgumentParser, args: argparse.Namespace) -> list[str]:
        given = [name for name in self.peers if name not in PYTHONS or python_of(args, name)]
        names = args.engines.split(",") if args.engines else given
        verify_names(parser, "--engines", names, self.peers)
        if OURS not in names:
            parser.error(f"--engines: {','.join(names)}; expected {OURS} among them")
        for name in set(names) - set(given):
            parser.error(f"--engines: {name}; expected {PYTHONS[name]} with it")
        return names

    def add_options(self, parser: argparse.ArgumentParser) -> None:
        """Adds the program's own options."""

    def check_options(self, parser: argparse.ArgumentParser, args: argparse.Namespace) -> None:
        """Checks the program's own options, and puts them into the form that it wants."""

    def measure(self) -> None:
        """Fills `found`. Every engine is made known with `add_engine`."""
        raise NotImplementedError

    def report(self) -> Iterable[str]:
        """Returns the paragraphs of the report, without the machine and warnings."""
        raise NotImplementedError

    def title(self) -> str:
        """Returns what was measured, for the head of the report."""
        return ""

    def figures(self) -> dict[str, Any]:
        """Returns what the JSON file has beside the machine and the options."""
        return {"parts": self.found}

    def panels(self) -> list[Panel]:
        """Returns the bar charts of --plot."""
        return []

    def prepare(self) -> None:
        """Makes files that the measurement needs. It uses the machine, so it comes before the wait for a quiet one."""

    def add_engine(
        self, stack: ExitStack, name: str, model: Path, max_model_len: int = MAX_MODEL_LEN, log: str = "", **more: Any
    ) -> EngineProcess:
        """Makes the process of an engine, which the caller starts; it ends with the stack."""
        say(f"start-up: {name}")
        python = engine_python(name, python_of(self.args, "vllm"), python_of(self.args, "ctranslate2"))
        path = CACHE_FOLDER / "logs" / f"{log or name}.log"
        engine = EngineProcess(name, python, model, self.args.threads, path, max_model_len, **more)
        stack.callback(engine.close)
        self.engines.append((name, engine))
        return engine

    def run(self) -> int:
        """Runs the program and returns its exit status."""
        signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))  # so that processes are ended
        try:
            self.prepare()
            if not self.args.no_wait:
                say("waiting for a quiet machine")
                self.quiet = wait_for_quiet_machine(QUIET_LIMIT_SECONDS)
            self.measure()
        except (EngineFailedError, OSError) as error:
            print(f"error: {error}", file=sys.stderr)
            return 1
        except KeyboardInterrupt:
            print("interrupted", file=sys.stderr)
            return 130
        self.print_report()
        if self.args.json:
            self.save()
        if self.plots and self.args.plot:
            draw(self.args.plot, f"{self.title()}, {describe_machine()['cpu']}", self.panels())
        return 0

    def save(self) -> None:
        """Writes the JSON file. A program that is ended while it writes leaves the earlier one."""
        settings = {name: shown_setting(value) for name, value in vars(self.args).items() if name != "json"}
        versions = {name: engine.versions for name, engine in self.engines}
        result = {"machine": describe_machine(), "settings": settings, "quiet_at_start": self.quiet}
        result |= {"versions": versions, "foreign_cpu_share": self._foreign_shares, **self.figures()}
        written = self.args.json.with_name(f"{self.args.json.name}.part")
        written.write_text(json.dumps(result, indent=2) + "\n", encoding="utf-8")
        os.replace(written, self.args.json)

    @property
    def _foreign_shares(self) -> list[float]:
        return [share for _, engine in self.engines for share in getattr(engine, "foreign_shares", ())]

    def print_report(self) -> None:
        """Prints the machine, the engines, the report and warnings."""
        machine = describe_machine()
        print("; ".join(filter(None, (self.title(), f"{machine['cpu']}, {machine['cores']} cores"))))
        for name, engine in self.engines:
            print(f"  {name}: " + ", ".join(f"{package} {version}" for package, version in engine.versions.items()))
        if self.quick and self.args.quick:
            print("  Quick sizes: this shows that the program works. The figures mean nothing.")
        for paragraph in self.report():
            print(f"\n{paragraph}")
        print_disturbance(self._foreign_shares)
        if self.quiet is False:
            print(f"\nWarning: the machine did not get quiet within {QUIET_LIMIT_SECONDS} s.")


def shown_setting(value: Any) -> Any:
    """Returns an option's value as JSON has it."""
    return value if value is None or isinstance(value, bool | int | float | str | list | dict) else str(value)


def print_disturbance(shares: Sequence[float]) -> None:
    """Warns of other programs that used the machine during a measurement."""
    disturbed = [share for share in shares if share > QUIET_SHARE]
    if disturbed:
        print(
            f"\nWarning: other programs used up to {max(disturbed):.0%} of the machine in {len(disturbed)} of "
            f"{len(shares)} longer measurements."
        )


def say(text: str) -> None:
    """Shows progress on a terminal."""
    if sys.stderr.isatty():
        print(text, file=sys.stderr, flush=True)


def in_turn(names: Iterable[str], round_index: int) -> list[str]:
    """Returns the names in an order in which another one goes first in every round."""
    names = list(names)
    first = round_index % len(names)
    return names[first:] + names[:first]


# ---- figures ----


def spread(values: Sequence[float]) -> Spread:
    return {"median": statistics.median(values), "min": min(values), "max": max(values)}


def ratios_of(over: Sequence[float], under: Sequence[float]) -> Spread:
    """Returns the spread of ratios that are taken round by round."""
    return spread([above / below for above, below in zip(over, under, strict=True)])


def format_number(value: float) -> str:
    """Formats a number with about three digits."""
    if abs(value) >= 100:
        return f"{value:.0f}"
    return f"{value:.1f}" if abs(value) >= 10 else f"{value:.2f}" if abs(value) >= 1 else f"{value:.3f}"


def format_spread(values: Spread | None, mark: str = "", factor: float = 1.0) -> str:
    if values is None:
        return "–"
    median, low, high = (format_number(factor * values[name]) for name in ("median", "min", "max"))
    return f"{median}{mark} ({low}–{high})"


def align(rows: Sequence[Sequence[str]]) -> str:
    """Formats a table with columns of equal width; a short row has empty cells at its end."""
    longest = max(map(len, rows))
    rows = [[*row, *[""] * (longest - len(row))] for row in rows]
    widths = [max(map(len, column)) for column in zip(*rows)]
    return "\n".join("  ".join(cell.ljust(width) for cell, width in zip(row, widths)).rstrip() for row in rows)


def markdown(rows: Sequence[Sequence[str]]) -> str:
    """Formats a table in Markdown; the first row is its head."""
    lines = [f"| {' | '.join(row)} |" for row in rows]
    return "\n".join([lines[0], f"|{'---|' * len(rows[0])}", *lines[1:]])


@dataclass(frozen=True)
class Ratio:
    """A ratio between two ways of `Times`."""

    label: str
    over: str  # keys of samples
    under: str
    aim: str | None = None


class Times:
    """Seconds of several ways to the same thing, one value a round."""

    def __init__(self, labels: dict[str, str], ratios: dict[str, Ratio]) -> None:
        self.samples: dict[str, list[float]] = {key: [] for key in labels}
        self._ratios = ratios

    def record(self, round_of: dict[str, float]) -> None:
        for key, seconds in round_of.items():
            self.samples[key].append(seconds)

    def summary(self) -> dict[str, Any]:
        ratios = {
            key: ratios_of(self.samples[ratio.over], self.samples[ratio.under])
            for key, ratio in self._ratios.items()
            if ratio.over in self.samples and ratio.under in self.samples
        }
        seconds = {key: spread(values) for key, values in self.samples.items()}
        return {"samples": self.samples, "seconds": seconds, "ratios": ratios}


def format_times(title: str, labels: dict[str, str], ratios: dict[str, Ratio], result: dict[str, Any]) -> str:
    lines = [f"{title}, ms"]
    lines += [f"  {labels[key]:<52}{format_spread(values, '', 1e3)}" for key, values in result["seconds"].items()]
    for key, values in result["ratios"].items():
        aim = "" if ratios[key].aim is None else f"; the aim is {ratios[key].aim}"
        lines.append(f"  {ratios[key].label:<52}{format_spread(values, '×')}{aim}")
    return "\n".join(lines)


@dataclass(frozen=True)
class Row:
    """A row of a comparison's table."""

    label: str
    unit: str = "s"  # or ms
    aims: dict[str, str] = field(default_factory=dict)  # peer → what its ratio should be

    @property
    def factor(self) -> float:
        return {"s": 1.0, "ms": 1e3}[self.unit]


class Comparison:
    """Times of several engines: row → engine → seconds, one value a round."""

    def __init__(self) -> None:
        self.samples: dict[str, dict[str, list[float]]] = {}
        self.same: dict[str, list[float]] = {}  # peer → share of an answer that is also ours, one for each answer

    def record(self, row: str, engine: str, seconds: float) -> None:
        self.samples.setdefault(row, {}).setdefault(engine, []).append(seconds)

    def record_same(self, engine: str, shares: list[float]) -> None:
        self.same.setdefault(engine, []).extend(shares)

    def against(self, ours: str, theirs: str) -> dict[str, Spread]:
        """Returns by peer how many times faster our row is than a row of theirs."""
        mine = self.samples[ours][OURS]
        return {name: ratios_of(values, mine) for name, values in self.samples[theirs].items() if name != OURS}

    def summary(self) -> dict[str, Any]:
        return {
            "samples": self.samples,
            "seconds": {
                row: {name: spread(values) for name, values in by_engine.items()}
                for row, by_engine in self.samples.items()
            },
            "ratios": {row: self.against(row, row) for row in self.samples},
            "same": self.same,
        }


def format_comparison(title: str, rows: dict[str, Row], result: dict[str, Any]) -> str:
    seconds, ratios = result["seconds"], result["ratios"]
    engines = sorted(next(iter(seconds.values())), key=lambda name: (name != OURS, name))  # they took turns
    peers = [name for name in engines if name != OURS]
    lines = [[title, "", *engines, *(f"{OURS} vs {name}" for name in peers)]]
    for key, row in rows.items():
        times = [format_spread(seconds[key].get(name), "", row.factor) for name in engines]
        aims = {name: f", aim {aim}" for name, aim in row.aims.items()}
        against = [format_spread(ratios[key].get(name), "×") + aims.get(name, "") for name in peers]
        lines.append([f"  {row.label}", row.unit, *times, *against])
    return align(lines)


# ---- pictures ----


@dataclass(frozen=True)
class Panel:
    """A bar chart: a group of bars for each label, a bar for each series that has a value there."""

    title: str
    unit: str
    bars: dict[str, dict[str, float]]  # label → series → height
    logarithmic: bool = False
    aims: dict[str, float] = field(default_factory=dict)  # label → a line across its bars


def draw(path: Path, title: str, panels: Sequence[Panel]) -> None:
    """Draws the panels that have something to show beside each other. Needs matplotlib."""
    panels = [panel for panel in panels if any(panel.bars.values())]
    if not panels:
        print("no picture: nothing was compared", file=sys.stderr)
        return
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(6 * len(panels), 4.8), dpi=130, layout="constrained")
    FigureCanvasAgg(figure)
    figure.suptitle(title, fontsize=11)
    for axes, panel in zip(figure.subplots(1, len(panels), squeeze=False)[0], panels):
        series = list(dict.fromkeys(name for heights in panel.bars.values() for name in heights))
        width = 0.8 / len(series)
        for place, name in enumerate(series):
            shown = [(index, by_name[name]) for index, by_name in enumerate(panel.bars.values()) if name in by_name]
            places = [index + (place - (len(series) - 1) / 2) * width for index, _ in shown]
            colour = COLOURS.get(name, PALETTE[place % len(PALETTE)])
            bars = axes.bar(places, [height for _, height in shown], width, color=colour, label=name or None)
            axes.bar_label(bars, [format_number(height) for _, height in shown], fontsize=8)
        for index, label in enumerate(panel.bars):
            if label in panel.aims:
                axes.hlines(panel.aims[label], index - 0.4, index + 0.4, color="#444", linewidth=2)
        labels = [label.replace(" ", "\n", 1) if len(label) > 12 else label for label in panel.bars]
        axes.set_xticks(range(len(labels)), labels, fontsize=8)
        axes.set(title=panel.title, ylabel=panel.unit, yscale="log" if panel.logarithmic else "linear")
        axes.margins(y=0.2)
        axes.grid(axis="y", alpha=0.25)
        axes.set_axisbelow(True)
        if any(series):
            axes.legend(fontsize=8)
    figure.savefig(path)
