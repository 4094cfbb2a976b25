"""Ratoon against llama.cpp, CTranslate2, transformers and vLLM's CPU build: the same prompts, in one run, in turns.

    .venv/bin/python bench/cpu_peers.py --json result.json
    .venv/bin/python bench/cpu_peers.py --random smollm2-135m --threads 2,4,8,16 --rounds 2
    .venv/bin/python bench/cpu_peers.py --model FILE.gguf --workloads single,many-8,many-32,prefill

Two parts: `quantised` (a Q4 file, against llama.cpp with the same file and CTranslate2 in int8) and `float32`. Engines
run in processes of their own and take turns within every round; those that wait are stopped. Ratios are taken within a
round, so what slows the machine down for a minute slows all of them. The workloads are in workloads.py, the engines of
a part and their files in cpu_parts/engines.py, the workers in peers/.

Each result is a line when it comes. The file of --json is written after every workload, so a run that is cut off keeps
what it has.
"""

from __future__ import annotations

import argparse
import statistics
import sys
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeAlias

from cpu_parts.engines import (
    FLOAT32,
    FORMATS,
    MOST_REQUESTS,
    PARTS,
    QUANTISED,
    FileModels,
    Models,
    find_llama_server,
    has_embedded_model,
    missing_reason,
)
from cpu_parts.floors import Floors, measure_floors, shares
from export_hf import CACHE_FOLDER
from export_hf import MODEL as EMBEDDED
from harness import (
    OURS,
    QUIET_LIMIT_SECONDS,
    Panel,
    Program,
    add_python_option,
    count,
    format_number,
    format_spread,
    in_turn,
    markdown,
    print_disturbance,
    say,
    spread,
    verify_names,
)
from peers.machine import describe_machine, usable_cores
from peers.process import EngineFailedError, EngineProcess, Generation, engine_python
from random_models import SHAPES
from workloads import STARTUP, STARTUP_FIGURE, TINY, WORKLOADS, Call, Figure, PromptSource, Sizes

SEED = 0
WARM_UP_TOKENS = 2
WARM_UP_INPUT = 32  # tokens of each of several prompts

Samples: TypeAlias = dict[str, dict[str, list[float]]]  # figure → engine → one value a round


class Comparison:
    """One part with one number of threads: its engines, the prompts, and what was measured so far."""

    def __init__(self, args: argparse.Namespace, models: Models, part: str, name: str, threads: int) -> None:
        self.args = args
        self.models = models
        self.part = part
        self.format = name  # of the GGUF file
        self.threads = threads
        self.names = args.engines_of[part]
        self.sizes = args.sizes
        self.source = PromptSource(SEED, models.config["vocab_size"])
        self.engines: dict[str, EngineProcess] = {}
        self.samples: Samples = {}
        self.foreign_shares: list[float] = []
        self.outputs_like_ours: dict[str, list[bool]] = {}  # engine → is the answer Ratoon's, for each request
        self.weight_bytes = 0
        self.floors: Floors | None = None

    @property
    def title(self) -> str:
        return f"{self.format} file" if self.part == QUANTISED else self.part

    def run(self, save: Callable[[], None]) -> None:
        """`save` is called after every workload."""
        with ExitStack() as stack:
            self._start_engines(stack)
            save()
            if OURS in self.engines:
                self.weight_bytes = self.engines[OURS].call("read_bytes").value
                self.floors = measure_floors(self.threads, self.weight_bytes, self.args.limits)
            self._warm_up()
            self._measure(save)

    def _starts(self) -> list[list[str]]:
        """The engines that are started, round by round: all in the last one, those whose start is timed before it."""
        rounds = self.args.startup_rounds if STARTUP in self.args.workloads else 1
        earlier = [
            [name for name in in_turn(self.names, index) if self._times_start(name)] for index in range(rounds - 1)
        ]
        return [*earlier, in_turn(self.names, rounds - 1)]

    def _times_start(self, name: str) -> bool:
        return STARTUP in self.args.workloads and PARTS[self.part][name].takes(STARTUP)

    def _start_engines(self, stack: ExitStack) -> None:
        """Start-up is timed here: in all rounds but the last, the engines are ended again."""
        rounds = self._starts()
        for round_index, names in enumerate(rounds):
            prompt = self.source.prompt(self.sizes.input)
            for name in names:
                say(f"start-up {round_index + 1}/{len(rounds)}: {name}")
                engine = self._make_engine(name)
                stack.callback(engine.close)
                seconds = engine.start(prompt)
                if self._times_start(name):
                    self._record({STARTUP: STARTUP_FIGURE}, name, [seconds])
                    print(self._line(round_index, len(rounds), name, {STARTUP: STARTUP_FIGURE}, [seconds]), flush=True)
                if round_index < len(rounds) - 1:
                    engine.close()
                else:
                    self.engines[name] = engine

    def try_engine(self, name: str) -> None:
        """A start that is not counted. It also brings files into memory, so that the first engine does not read torch
        from the disk for the others. vLLM's takes minutes and is spared."""
        if name != "vllm":
            say(f"start-up, uncounted: {name}")
            engine = self._make_engine(name)
            try:
                engine.start(self.source.prompt(self.sizes.input))
            finally:
                engine.close()

    def _warm_up(self) -> None:
        """The shapes of every workload once."""
        for workload in self._workloads():
            for name in self._engines_for(workload, 0):
                say(f"warm-up: {workload}, {name}")
                calls = warm_up_calls(WORKLOADS[workload].plan(self.source, self.sizes))
                for call in calls:
                    run_call(self.engines[name], call)

    def _measure(self, save: Callable[[], None]) -> None:
        for round_index in range(self.args.rounds):
            for workload in self._workloads():
                calls = WORKLOADS[workload].plan(self.source, self.sizes)
                generations: dict[str, list[Generation]] = {}
                for name in self._engines_for(workload, round_index):
                    say(f"round {round_index + 1}/{self.args.rounds}: {workload}, {name}")
                    generations[name] = [run_call(self.engines[name], call) for call in calls]
                    self._note_foreign_shares(generations[name])
                    seconds = [generation.seconds for generation in generations[name]]
                    values = WORKLOADS[workload].evaluate(calls, seconds)
                    figures = WORKLOADS[workload].figures
                    self._record(figures, name, values)
                    print(self._line(round_index, self.args.rounds, name, figures, values), flush=True)
                self._compare_outputs(generations)
                save()

    def _line(self, round_index: int, rounds: int, engine: str, figures: dict[str, Figure], values: list[float]) -> str:
        shown = ", ".join(
            f"{figure.label} {format_number(value)} {figure.unit}" for figure, value in zip(figures.values(), values)
        )
        return f"{self.title}, {self.threads} threads, round {round_index + 1}/{rounds}, {engine}: {shown}"

    def _note_foreign_shares(self, generations: list[Generation]) -> None:
        self.foreign_shares += [one.foreign_share for one in generations if one.foreign_share is not None]

    def _compare_outputs(self, generations: dict[str, list[Generation]]) -> None:
        for name in generations:
            if name != OURS and OURS in generations:
                same = self.outputs_like_ours.setdefault(name, [])
                for ours, theirs in zip(generations[OURS], generations[name]):
                    same += [mine == other for mine, other in zip(ours.token_ids, theirs.token_ids)]

    def _make_engine(self, name: str) -> EngineProcess:
        engine = PARTS[self.part][name]
        settings = {**engine.settings, **self.models.settings.get(name, {})}
        if name == "llama-server":
            settings |= {"server": self.args.llama_server, "slots": min(MOST_REQUESTS, self.sizes.most_requests)}
        return EngineProcess(
            name,
            engine_python(name, self.args.vllm_python, self.args.ct2_python),
            self.models.find(engine.form, self.format),
            self.threads,
            CACHE_FOLDER / "logs" / f"{name}.log",
            self.models.max_model_len,
            worker=engine.worker,
            settings=settings,
        )

    def _engines_for(self, workload: str, round_index: int) -> list[str]:
        return [name for name in in_turn(self.names, round_index) if PARTS[self.part][name].takes(workload)]

    def _workloads(self) -> list[str]:
        """Those that a peer takes, where there is one."""
        wanted = [workload for workload in self.args.workloads if workload != STARTUP]
        needed = 2 if len(self.names) > 1 else 1
        return [workload for workload in wanted if len(self._engines_for(workload, 0)) >= needed]

    def _record(self, figures: dict[str, Figure], engine: str, values: list[float]) -> None:
        for figure, value in zip(figures, values):
            self.samples.setdefault(figure, {}).setdefault(engine, []).append(value)

    def floor_shares(self) -> dict[str, float]:
        if self.floors is None:
            return {}
        values = {key: statistics.median(found[OURS]) for key, found in self.samples.items() if OURS in found}
        facts = {
            "weight_bytes": self.weight_bytes,
            "num_product_weights": self.models.num_product_weights,
            "prefill_tokens": self.sizes.long_input,
            "kind": "int8" if self.part == QUANTISED else "float32",
        }
        return shares(self.floors, values, facts)


def warm_up_calls(calls: list[Call]) -> list[Call]:
    """The same shapes with short answers, and with short prompts where there are several."""
    return [
        replace(
            call,
            prompts=call.prompts if len(call.prompts) == 1 else [prompt[:WARM_UP_INPUT] for prompt in call.prompts],
            num_tokens=WARM_UP_TOKENS,
        )
        for call in calls
    ]


def run_call(engine: EngineProcess, call: Call) -> Generation:
    if call.width == 1:
        return engine.generate(call.prompts, call.num_tokens)
    (prompt,) = call.prompts
    result = engine.call("beam_search", prompt=prompt, width=call.width, num_tokens=call.num_tokens)
    beams = result.value["token_ids"]
    if len(beams) != call.width or {len(beam) for beam in beams} != {call.num_tokens}:
        raise EngineFailedError(f"{engine.engine} found {len(beams)} beams, not {call.width} of the full length")
    return Generation(result.seconds, beams, result.foreign_share)


def all_figures() -> dict[str, Figure]:
    """In the order of the table."""
    figures = {key: figure for workload in WORKLOADS.values() for key, figure in workload.figures.items()}
    return {**figures, STARTUP: STARTUP_FIGURE}


def summarize(samples: Samples) -> dict[str, dict[str, Any]]:
    """Median and spread for each figure and engine, and how many times faster than each peer we are in a round; `best`
    is the same against the peer that is the fastest in that round."""
    summary: dict[str, dict[str, Any]] = {}
    for key, figure in all_figures().items():
        by_engine = samples.get(key, {})
        if not by_engine:
            continue
        ratios = {
            name: [figure.advantage(*pair) for pair in zip(by_engine[OURS], values)]
            for name, values in by_engine.items()
            if OURS in by_engine and name != OURS
        }
        summary[key] = {
            "unit": figure.unit,
            "engines": {name: spread(values) for name, values in by_engine.items()},
            "ratios": {name: spread(values) for name, values in ratios.items()},
            "best": spread([min(of_round) for of_round in zip(*ratios.values())]) if ratios else None,
            "samples": by_engine,
        }
    return summary


def format_table(summary: dict[str, dict[str, Any]], engines: list[str]) -> str:
    """In Markdown."""
    peers = [name for name in engines if name != OURS and OURS in engines]
    rows = [["", "", *engines, *(f"vs {name}" for name in peers), *(["vs the best"] if len(peers) > 1 else [])]]
    for key, figure in all_figures().items():
        if key in summary:
            found = summary[key]
            values = [format_spread(found["engines"].get(name)) for name in engines]
            ratios = [format_spread(found["ratios"].get(name), "×") for name in peers]
            best = [format_spread(found["best"], "×")] if len(peers) > 1 else []
            rows.append([figure.label, figure.unit, *values, *ratios, *best])
    return markdown(rows)


def format_scaling(runs: list[dict[str, Any]]) -> str:
    """Ratoon with each number of threads, part by part; a figure that is worse with more threads is marked."""
    rows: list[list[str]] = []
    for part in dict.fromkeys(run["title"] for run in runs):
        of_part = sorted((run for run in runs if run["title"] == part), key=lambda run: int(run["threads"]))
        if not rows:
            rows = [["", *(f"{run['threads']} threads" for run in of_part)]]
        for key, figure in all_figures().items():
            values = [run["figures"].get(key, {}).get("engines", {}).get(OURS) for run in of_part]
            if any(values):
                rows.append([f"{part}, {figure.label}, {figure.unit}", *format_growth(values, figure)])
    return markdown(rows)


def format_growth(values: list[dict[str, float] | None], figure: Figure) -> list[str]:
    cells, before = [], None
    for value in values:
        slower = value and before and figure.advantage(value["median"], before["median"]) < 1
        cells.append((format_number(value["median"]) if value else "–") + (" (slower)" if slower else ""))
        before = value or before
    return cells


def print_part(comparison: Comparison) -> None:
    print(f"\n## {comparison.title}, {comparison.threads} threads\n")
    print(format_table(summarize(comparison.samples), comparison.names))
    print()
    for name, engine in comparison.engines.items():
        print(f"- {name}: " + ", ".join(f"{package} {version}" for package, version in engine.versions.items()))
    for name, same in comparison.outputs_like_ours.items():
        print(f"- Answers identical to Ratoon's, {name}: {sum(same)} of {len(same)}")
    if comparison.floors is None:
        print("- Floors of the machine: unknown, there is no C compiler and no --limits")
    else:
        mebibytes = comparison.weight_bytes / 2**20
        print(f"- At best, with {mebibytes:.0f} MiB of weights: {comparison.floors.describe()}")
    for what, share in comparison.floor_shares().items():
        print(f"- Ratoon's {what}: {share:.0%}")
    print_disturbance(comparison.foreign_shares)
    print(flush=True)


def run_as_dict(comparison: Comparison) -> dict[str, Any]:
    """What was measured so far."""
    return {
        "part": comparison.part,
        "title": comparison.title,
        "threads": comparison.threads,
        "versions": {name: engine.versions for name, engine in comparison.engines.items()},
        "figures": summarize(comparison.samples),
        "weight_bytes": comparison.weight_bytes,
        "floors": comparison.floors and comparison.floors._asdict(),
        "floor_shares": comparison.floor_shares(),
        "identical_answers": {
            name: {"identical": sum(same), "requests": len(same)} for name, same in comparison.outputs_like_ours.items()
        },
        "foreign_cpu_share": comparison.foreign_shares,
    }


class CpuPeers(Program):
    doc = __doc__
    rounds = 3
    threads = False
    parts = tuple(PARTS)
    plots = True

    def add_options(self, parser: argparse.ArgumentParser) -> None:
        self.names = {
            "engines": list(dict.fromkeys(name for engines in PARTS.values() for name in engines)),
            "workloads": [*WORKLOADS, STARTUP],
            "formats": list(FORMATS),
        }
        parser.add_argument("--engines", default=",".join(self.names["engines"]), help="default: those that are there")
        parser.add_argument("--workloads", default=",".join(self.names["workloads"]), help="default: %(default)s")
        made = "of the file that is made: Q4_0, Q4_1 or both (%(default)s)"
        parser.add_argument("--formats", default=FORMATS[0], help=made)
        weights = f"random weights of this shape; default: {EMBEDDED} with its own weights, if they are installed"
        models = parser.add_mutually_exclusive_group()
        models.add_argument("--random", choices=list(SHAPES), help=weights)
        models.add_argument(
            "--model",
            type=Path,
            metavar="FILE.gguf",
            help=f"a file as it is, in its own bits: the part {QUANTISED} alone",
        )
        count(parser, "--startup-rounds", None, "of the start-up workload; default: --rounds")
        threads = str(len(usable_cores()))
        parser.add_argument("--threads", default=threads, metavar="N[,N…]", help="default: all cores")
        parser.add_argument("--output", type=int, metavar="N", help=f"tokens of an answer (default: {Sizes.output})")
        for engine in ("vllm", "ctranslate2"):
            add_python_option(parser, engine)
        parser.add_argument("--llama-server", metavar="PATH", help="llama.cpp's server; default: on the PATH")
        parser.add_argument("--limits", metavar="PATH", help="limits.c as a program; default: compiled when needed")
        parser.add_argument("--tiny", action="store_true", help=argparse.SUPPRESS)  # does it work at all?

    def check_options(self, parser: argparse.ArgumentParser, args: argparse.Namespace) -> None:
        for option, known in self.names.items():
            setattr(args, option, verify_names(parser, f"--{option}", getattr(args, option).split(","), known))
        args.startup_rounds = args.startup_rounds or args.rounds
        try:
            args.threads = [int(number) for number in args.threads.split(",")]
        except ValueError:
            parser.error(f"--threads: {args.threads}; expected numbers with commas between them")
        if min(args.threads) < 1:
            parser.error(f"--threads: {args.threads}; expected at least 1")
        args.sizes = TINY if args.tiny else Sizes()
        if args.output is not None:
            if not 2 <= args.output <= 256:
                parser.error(f"--output: {args.output}; expected 2 to 256")
            args.sizes = replace(args.sizes, output=args.output)
        args.missing = {}
        if args.model is not None:
            self._take_file(parser, args)
        else:
            if args.random is None and not has_embedded_model():
                args.random = EMBEDDED
            self.models = Models(args.random, args.ct2_python)
        self._choose_engines(args)

    def _take_file(self, parser: argparse.ArgumentParser, args: argparse.Namespace) -> None:
        """Lengths of prompts and answers follow from its context, and parts that need another form are left out."""
        from ratoon.core.errors import ModelError

        if QUANTISED not in args.parts:
            parser.error(f"--model: {args.model} can run in the part {QUANTISED} alone; expected --parts with it")
        try:
            self.models = FileModels(args.model)
        except ModelError as error:
            parser.error(f"--model: {error}")
        args.random, args.formats = None, [self.models.name]
        args.sizes = args.sizes.within(self.models.max_model_len)
        for part in set(args.parts) - {QUANTISED}:
            args.missing[f"the part {part}"] = (
                "it needs the weights as a Hugging Face folder, and --model is a GGUF file"
            )
        args.parts = [QUANTISED]

    def _choose_engines(self, args: argparse.Namespace) -> None:
        """Says who takes part in which comparison, and why others do not."""
        args.llama_server = find_llama_server(args.llama_server)
        pythons = {"vllm": args.vllm_python, "ctranslate2": args.ct2_python}
        args.engines_of = {part: [] for part in args.parts}
        for part in args.parts:
            for name in PARTS[part].keys() & set(args.engines):
                reason = missing_reason(name, part, pythons, args.llama_server)
                if PARTS[part][name].form not in self.models.forms:
                    reason = "it can't load a GGUF file, which --model is"
                if reason is not None:
                    args.missing[name] = reason
            there = [name for name in PARTS[part] if name in args.engines and name not in args.missing]
            args.engines_of[part] = there
        args.parts = [part for part in args.parts if args.engines_of[part]]

    def prepare(self) -> None:
        """Every file is made, and every peer answers once. One that can't is left out; Ratoon has to."""
        args = self.args
        for part, names in args.engines_of.items():
            for name in [*names]:
                try:
                    for one in args.formats:
                        self.models.find(PARTS[part][name].form, one)
                    Comparison(args, self.models, part, args.formats[0], args.threads[0]).try_engine(name)
                except EngineFailedError as error:
                    if name == OURS:
                        raise
                    args.missing[name] = str(error)
                    names.remove(name)

    def measure(self) -> None:
        """Each part is printed when it is done, and what was measured is saved after every workload."""
        args = self.args
        self.comparisons = [
            Comparison(args, self.models, part, one, threads)
            for threads in args.threads
            for part in args.parts
            for one in (args.formats if part == QUANTISED else [FLOAT32])
        ]
        self._print_head()
        for comparison in self.comparisons:
            comparison.run(self.save if args.json else lambda: None)
            print_part(comparison)

    def _print_head(self) -> None:
        args, sizes, machine = self.args, self.args.sizes, describe_machine()
        print(f"{self.models.name}, {args.rounds} rounds; {machine['cpu']}, {machine['cores']} cores")
        print(f"{sizes.input} tokens in and {sizes.output} out, prefill of {sizes.long_input:,}, ", end="")
        print(f"{sizes.search_width} beams × {sizes.search_output} behind {sizes.search_input}")
        if args.tiny:
            print("Tiny sizes: this shows that the program works. The figures mean nothing.")
        print("Median (min–max). Ratios are taken round by round; above 1, Ratoon is the faster one.")
        for name, reason in args.missing.items():
            print(f"Left out, {name}: {reason}")
        if self.quiet is False:
            print(f"Warning: the machine did not get quiet within {QUIET_LIMIT_SECONDS} s.")
        print(flush=True)

    def title(self) -> str:
        return self.models.name

    def print_report(self) -> None:
        if len(self.args.threads) > 1:  # the parts were printed as they came
            print(f"## Ratoon by threads\n\n{format_scaling(self.figures()['runs'])}")

    def panels(self) -> list[Panel]:
        """Returns a chart for each table: how many times faster than each peer Ratoon is; a line is at one."""
        found = []
        for comparison in self.comparisons:
            figures = summarize(comparison.samples)
            bars = {
                all_figures()[key].label: {name: ratio["median"] for name, ratio in figure["ratios"].items()}
                for key, figure in figures.items()
                if figure["ratios"]
            }
            title = f"{comparison.title}, {comparison.threads} threads"
            found.append(Panel(title, "Ratoon's speed over each peer's", bars, aims=dict.fromkeys(bars, 1.0)))
        return found

    def figures(self) -> dict[str, Any]:
        runs = [run_as_dict(one) for one in self.comparisons if one.samples]
        return {"model": self.models.name, "left_out": self.args.missing, "runs": runs}


if __name__ == "__main__":
    sys.exit(CpuPeers().run())
