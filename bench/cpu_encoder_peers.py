"""Whisper and BART with weights in 8 bits on the CPU: Ratoon against CTranslate2, speed and errors.

    .venv/bin/python bench/cpu_encoder_peers.py --rounds 3
    .venv/bin/python bench/cpu_encoder_peers.py --quantization float32      # the same in fp32

Engines run in processes of their own and take turns within every round; those that wait are stopped. Ratios are taken
within a round. Whisper-tiny has its own weights; BART has the shape of bart-base and random weights, and its errors are
those of a small real one.
"""

from __future__ import annotations

import argparse
import sys
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from comparison import Row
from cpu_peers import OURS, say
from encoder_beam_parts import search
from encoder_beam_parts import sizes as beam_sizes
from encoder_beam_parts.models import make_model, vocab_size
from encoder_peer_parts import errors
from export_hf import CACHE_FOLDER
from peers.conversion import converted_model
from peers.process import EngineProcess, engine_python
from program import Program, add_options, settle_options
from speech import MODEL, RECORDING
from speech_parts import sizes as speech_sizes
from speech_parts import transcription
from speech_parts.clips import ClipSource, read_task
from workloads import PromptSource

SEED = 0
PEER = "ctranslate2"
PARTS = ("whisper", "bart")
FAMILY = "bart"
ROOM = 4  # positions of the decoder beyond an answer
FLOATS = "float32"
DECODED = "ratoon, float32"
AIMS = {PEER: "at least 1.5×"}  # at the same errors
SPEECH_ROWS = {"whole": Row("samples to tokens", aims=AIMS), "ready": Row("features to tokens")}


class EncoderPeers(Program):
    def __init__(self, args: argparse.Namespace) -> None:
        super().__init__(args, " and ".join(args.parts), beam_sizes.QUICK if args.quick else beam_sizes.Sizes())
        self.precision = args.quantization
        self.settings: dict[str, dict[str, Any]] = {
            OURS: {"quantization": "none" if args.quantization == FLOATS else args.quantization},
            PEER: {"compute_type": args.quantization},
        }

    def measure(self) -> None:
        for part in self.args.parts:
            with ExitStack() as stack:
                self.parts[part] = self._measure_whisper(stack) if part == "whisper" else self._measure_bart(stack)

    def _measure_whisper(self, stack: ExitStack) -> dict[str, Any]:
        from transformers import AutoTokenizer

        args, sizes = self.args, speech_sizes.QUICK if self.args.quick else speech_sizes.Sizes()
        task, source = read_task(args.model), ClipSource(args.recording, sizes)
        engines = {name: self._engine(stack, name, args.model, "speech_worker") for name in (OURS, PEER)}
        for engine in engines.values():
            source.start(engine)
        result = transcription.measure(engines, source, task, sizes, args.rounds, say)
        tokenizer = AutoTokenizer.from_pretrained(args.model)
        say("whisper: word errors")
        found = {name: errors.speech_errors(engine, task, tokenizer) for name, engine in engines.items()}
        if args.quantization != FLOATS:
            decoded = self._engine(stack, OURS, args.model, "speech_worker", {"quantization": "none"})
            source.start(decoded)
            found[DECODED] = errors.speech_errors(decoded, task, tokenizer)
        return {**result, "errors": found, "table": transcription.format_table(result, sizes, SPEECH_ROWS)}

    def _measure_bart(self, stack: ExitStack) -> dict[str, Any]:
        args, sizes = self.args, self.sizes
        model = make_model(FAMILY, sizes.full_models, CACHE_FOLDER)
        errors.complete_bart(model)
        source = PromptSource(SEED, vocab_size(FAMILY, sizes.full_models))
        engines = {name: self._engine(stack, name, model, BART_WORKERS[name]) for name in (OURS, PEER)}
        for engine in engines.values():
            engine.start(source.prompt(sizes.input))
        result = search.measure(FAMILY, engines, source, sizes, args.rounds, say)
        say("bart: words whose phonemes are other ones")
        found = self._spelling_errors(stack)
        return {**result, "errors": found, "table": search.format_table(FAMILY, result, sizes)}

    def _spelling_errors(self, stack: ExitStack) -> dict[str, float]:
        """Against Ratoon's own answers in float32."""
        model = errors.spelling_model()
        settings = {DECODED: {"quantization": "none"}, **self.settings}
        answers = {}
        for name, of_engine in settings.items():
            kind = PEER if name == PEER else OURS
            engine = self._engine(stack, kind, model, BART_WORKERS[kind], of_engine)
            engine.start(errors.spellings()[0])
            answers[name] = errors.spelling_answers(engine)
            engine.close()
        return {
            name: sum(one != other for one, other in zip(found, answers[DECODED], strict=True)) / len(found)
            for name, found in answers.items()
        }

    def _engine(
        self, stack: ExitStack, name: str, model: Path, worker: str, settings: dict[str, Any] | None = None
    ) -> EngineProcess:
        args = self.args
        engine = EngineProcess(
            name,
            engine_python(name, ctranslate2_python=args.ct2_python),
            converted_model(model, args.ct2_python, args.quantization) if name == PEER else model,
            args.threads,
            CACHE_FOLDER / "logs" / f"{name}_encoder.log",
            max(self.sizes.tokens, errors.MOST_TOKENS) + ROOM,
            worker=f"{name}_{worker}" if worker else None,
            settings=self.settings[name] if settings is None else settings,
        )
        return self.add_engine(stack, name, engine)

    def format_part(self, part: str) -> str:
        result = self.parts[part]
        what = "Word error rate" if part == "whisper" else "Words whose phonemes are not those of float32"
        rates = ", ".join(f"{name} {rate:.1%}" for name, rate in result["errors"].items())
        return f"{part}\n{result['table']}\n  {what}: {rates}"

    def draw(self, path: Path, title: str) -> None:
        raise SystemExit("--plot: there is no picture of these tables")


BART_WORKERS = {OURS: "", PEER: "encoder_worker"}  # after the engine's name


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    add_options(parser, PARTS)
    parser.add_argument("--quantization", choices=("int8", FLOATS), default="int8", help="default: %(default)s")
    parser.add_argument("--ct2-python", metavar="PATH", help="the Python of an environment that has ctranslate2")
    parser.add_argument("--model", type=Path, default=MODEL, metavar="FOLDER", help="default: Whisper-tiny's")
    parser.add_argument("--recording", type=Path, default=RECORDING, metavar="WAV", help="default: that of the tests")
    args = parser.parse_args()
    settle_options(parser, args, PARTS)
    return args


if __name__ == "__main__":
    sys.exit(EncoderPeers(parse_arguments()).run())
