"""What hidden states cost, on the CPU in fp32: in decode steps, in prefills, in throughput, and against transformers.

    .venv/bin/python bench/hidden_states.py

Engines run in processes of their own and take turns within every round; those that wait are stopped. Ratios are taken
within a round. What is measured is in hidden_parts/, the engines in peers/.
"""

from __future__ import annotations

import argparse
import json
import sys
from contextlib import ExitStack
from pathlib import Path

from cpu_peers import OURS, say
from export_hf import CACHE_FOLDER, DEFAULT_FOLDER, MODEL, export_model
from hidden_parts import idle, latency, prefill, throughput
from hidden_parts.idle import BEFORE
from hidden_parts.plot import draw
from hidden_parts.sizes import QUICK, Sizes
from peers.process import EngineProcess, engine_python
from peers.protocol import MAX_MODEL_LEN
from program import Program, add_options, settle_options
from workloads import PromptSource

SEED = 0
PEER = "transformers"
PARTS = {"latency": latency, "throughput": throughput, "prefill": prefill, "idle": idle}
WITH_PEER = {"latency", "prefill"}


class StatesBenchmark(Program):
    def __init__(self, args: argparse.Namespace, model: Path) -> None:
        super().__init__(args, model.name, QUICK if args.quick else Sizes())
        self.folder = model
        facts = json.loads((model / "config.json").read_text(encoding="utf-8"))
        self.max_model_len = min(MAX_MODEL_LEN, facts["max_position_embeddings"])
        self.source = PromptSource(SEED, facts["vocab_size"])

    def measure(self) -> None:
        with ExitStack() as stack:
            engines = self._start_engines(stack)
            for part in self.args.parts:
                self.parts[part] = PARTS[part].measure(engines, self.source, self.sizes, self.args.rounds, say)

    def _start_engines(self, stack: ExitStack) -> dict[str, EngineProcess]:
        """Others than ours only where a part needs them."""
        names = [OURS]
        if self.args.peer and WITH_PEER & set(self.args.parts):
            names.append(PEER)
        if self.args.before is not None and "idle" in self.args.parts:
            names.append(BEFORE)
        engines = {}
        for name in names:
            engine = EngineProcess(
                PEER if name == PEER else OURS,
                engine_python(name),
                self.folder,
                self.args.threads,
                CACHE_FOLDER / "logs" / f"{name}.log",
                self.max_model_len,
                checkout=self.args.before if name == BEFORE else None,
            )
            engines[name] = self.add_engine(stack, name, engine)
            engine.start(self.source.prompt(self.sizes.idle_before))
        return engines

    def format_part(self, part: str) -> str:
        return PARTS[part].format_table(self.parts[part], self.sizes)

    def draw(self, path: Path, title: str) -> None:
        draw(path, title, self.parts, self.sizes)


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    add_options(parser, PARTS)
    parser.add_argument("--no-peer", dest="peer", action="store_false", help="without transformers")
    parser.add_argument("--before", type=Path, metavar="FOLDER", help="a checkout of an earlier version, for idle")
    parser.add_argument("--model", type=Path, metavar="FOLDER", help=f"Hugging Face folder; default: {MODEL}'s")
    args = parser.parse_args()
    settle_options(parser, args, PARTS)
    if args.before is not None and not (args.before / "ratoon" / "__init__.py").exists():
        parser.error(f"--before: {args.before}; expected a folder that has the package ratoon in it")
    return args


def main() -> int:
    args = parse_arguments()
    return StatesBenchmark(args, args.model or export_model(MODEL, DEFAULT_FOLDER)).run()


if __name__ == "__main__":
    sys.exit(main())
