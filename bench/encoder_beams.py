"""Beam search with an encoder, on the CPU in fp32: what a step costs against a greedy one, and against transformers.

    .venv/bin/python bench/encoder_beams.py

Engines run in processes of their own and take turns within every round; those that wait are stopped. Ratios are taken
within a round. What is measured, and on which models, is in encoder_beam_parts/, the engines in peers/.
"""

from __future__ import annotations

import argparse
import sys
from contextlib import ExitStack
from pathlib import Path

from cpu_peers import OURS, say
from encoder_beam_parts import search
from encoder_beam_parts.models import SHAPES, make_model, vocab_size
from encoder_beam_parts.plot import draw
from encoder_beam_parts.sizes import QUICK, Engines, Sizes
from export_hf import CACHE_FOLDER
from peers.process import EngineProcess, engine_python
from program import Program, add_options, settle_options
from workloads import PromptSource

SEED = 0
PEER = "transformers"
ROOM = 8  # positions of the decoder beyond an answer


class EncoderBeamsBenchmark(Program):
    """A part is a family of models. Its engines end with it."""

    def __init__(self, args: argparse.Namespace) -> None:
        models = [SHAPES[family][0] if not args.quick else f"tiny {family}" for family in args.parts]
        super().__init__(args, f"{' and '.join(models)} with random weights", QUICK if args.quick else Sizes())

    def measure(self) -> None:
        for family in self.args.parts:
            source = PromptSource(SEED, vocab_size(family, self.sizes.full_models))
            with ExitStack() as stack:
                engines = self._start_engines(stack, family, source)
                self.parts[family] = search.measure(family, engines, source, self.sizes, self.args.rounds, say)

    def _start_engines(self, stack: ExitStack, family: str, source: PromptSource) -> Engines:
        model = make_model(family, self.sizes.full_models, CACHE_FOLDER)
        engines: Engines = {}
        for name in (OURS, PEER) if self.args.peer else (OURS,):
            log = CACHE_FOLDER / "logs" / f"{name}_{family}.log"
            engine = EngineProcess(name, engine_python(name), model, self.args.threads, log, self.sizes.tokens + ROOM)
            engines[name] = self.add_engine(stack, name, engine)
            engine.start(source.prompt(self.sizes.input))
        return engines

    def format_part(self, part: str) -> str:
        return search.format_table(part, self.parts[part], self.sizes)

    def draw(self, path: Path, title: str) -> None:
        draw(path, title, self.parts, self.sizes)


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    add_options(parser, SHAPES)
    parser.add_argument("--no-peer", dest="peer", action="store_false", help="without transformers")
    args = parser.parse_args()
    settle_options(parser, args, SHAPES)
    return args


def main() -> int:
    return EncoderBeamsBenchmark(parse_arguments()).run()


if __name__ == "__main__":
    sys.exit(main())
