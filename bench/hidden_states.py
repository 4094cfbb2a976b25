"""What hidden states cost, on the CPU in fp32: in decode steps, in prefills, in throughput, and against transformers.

    .venv/bin/python bench/hidden_states.py

Engines run in processes of their own and take turns within every round; those that wait are stopped. Ratios are taken
within a round. What is measured is in hidden_parts/, the engines in peers/.
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

from cpu_peers import OURS, QUIET_LIMIT_SECONDS, say
from export_hf import CACHE_FOLDER, DEFAULT_FOLDER, MODEL, export_model
from hidden_parts import idle, latency, prefill, throughput
from hidden_parts.idle import BEFORE
from hidden_parts.plot import draw
from hidden_parts.sizes import QUICK, Sizes
from peers.machine import QUIET_SHARE, describe_machine, usable_cores, wait_for_quiet_machine
from peers.process import EngineFailedError, EngineProcess, engine_python
from peers.protocol import MAX_MODEL_LEN
from workloads import PromptSource

SEED = 0
PEER = "transformers"
PARTS = {"latency": latency, "throughput": throughput, "prefill": prefill, "idle": idle}
WITH_PEER = {"latency", "prefill"}


class StatesBenchmark:
    """One run: the engines, the prompts, and what was measured so far."""

    def __init__(self, args: argparse.Namespace, model: Path) -> None:
        self.args = args
        self.model = model
        self.sizes = QUICK if args.quick else Sizes()
        facts = json.loads((model / "config.json").read_text(encoding="utf-8"))
        self.max_model_len = min(MAX_MODEL_LEN, facts["max_position_embeddings"])
        self.source = PromptSource(SEED, facts["vocab_size"])
        self.engines: dict[str, EngineProcess] = {}
        self.parts: dict[str, dict[str, Any]] = {}

    def start_engines(self, stack: ExitStack) -> None:
        """Others than ours only where a part needs them."""
        names = [OURS]
        if self.args.peer and WITH_PEER & set(self.args.parts):
            names.append(PEER)
        if self.args.before is not None and "idle" in self.args.parts:
            names.append(BEFORE)
        for name in names:
            say(f"start-up: {name}")
            engine = EngineProcess(
                PEER if name == PEER else OURS,
                engine_python(name),
                self.model,
                self.args.threads,
                CACHE_FOLDER / "logs" / f"{name}.log",
                self.max_model_len,
                checkout=self.args.before if name == BEFORE else None,
            )
            stack.callback(engine.close)
            engine.start(self.source.prompt(self.sizes.idle_before))
            self.engines[name] = engine

    def measure(self) -> None:
        for part in self.args.parts:
            self.parts[part] = PARTS[part].measure(self.engines, self.source, self.sizes, self.args.rounds, say)

    @property
    def foreign_shares(self) -> list[float]:
        return [share for engine in self.engines.values() for share in engine.foreign_shares]


def print_report(benchmark: StatesBenchmark, quiet: bool | None) -> None:
    args, machine = benchmark.args, describe_machine()
    print(f"{benchmark.model.name} in fp32, {args.threads} threads, {args.rounds} rounds; ", end="")
    print(f"{machine['cpu']}, {machine['cores']} cores")
    for name, engine in benchmark.engines.items():
        print(f"  {name}: " + ", ".join(f"{package} {version}" for package, version in engine.versions.items()))
    if args.quick:
        print("  Quick sizes: this shows that the program works. The figures mean nothing.")
    print("Median (min–max). Ratios are taken round by round.")
    for part, result in benchmark.parts.items():
        print(f"\n{PARTS[part].format_table(result, benchmark.sizes)}")
    disturbed = [share for share in benchmark.foreign_shares if share > QUIET_SHARE]
    if disturbed:
        print(
            f"\nWarning: other programs used up to {max(disturbed):.0%} of the machine in {len(disturbed)} of "
            f"{len(benchmark.foreign_shares)} longer measurements."
        )
    if quiet is False:
        print(f"\nWarning: the machine did not get quiet within {QUIET_LIMIT_SECONDS} s.")


def result_as_dict(benchmark: StatesBenchmark, quiet: bool | None) -> dict[str, Any]:
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
    parser.add_argument("--no-peer", dest="peer", action="store_false", help="without transformers")
    parser.add_argument("--before", type=Path, metavar="FOLDER", help="a checkout of an earlier version, for idle")
    parser.add_argument("--rounds", type=int, default=5, metavar="N", help="default: %(default)s")
    parser.add_argument("--threads", type=int, default=len(usable_cores()), metavar="N", help="default: all cores")
    parser.add_argument("--model", type=Path, metavar="FOLDER", help=f"Hugging Face folder; default: {MODEL}'s")
    parser.add_argument("--json", type=Path, metavar="OUT", help="also write everything that was measured")
    parser.add_argument("--plot", type=Path, metavar="OUT.png", help="also draw it (needs matplotlib)")
    parser.add_argument("--no-wait", action="store_true", help="do not wait for a quiet machine")
    parser.add_argument("--quick", action="store_true", help="tiny sizes and one round: does it work at all?")
    args = parser.parse_args()
    args.parts = args.parts.split(",")
    if args.quick:
        args.rounds = 1
    if not set(args.parts) <= set(PARTS) or len(set(args.parts)) != len(args.parts):
        parser.error(f"--parts: {','.join(args.parts)}; expected each of these once at most: {', '.join(PARTS)}")
    if args.before is not None and not (args.before / "ratoon" / "__init__.py").exists():
        parser.error(f"--before: {args.before}; expected a folder that has the package ratoon in it")
    for option in ("rounds", "threads"):
        if getattr(args, option) < 1:
            parser.error(f"--{option}: {getattr(args, option)}; expected at least 1")
    return args


def main() -> int:
    args = parse_arguments()
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))  # so that engines are ended
    benchmark = StatesBenchmark(args, args.model or export_model(MODEL, DEFAULT_FOLDER))
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
