"""Speech on the CPU in fp32: Whisper with several clips at once, against transformers and CTranslate2.

    .venv/bin/python bench/speech.py --ct2-python .venv-ct2/bin/python

Engines run in processes of their own and take turns within every round; those that wait are stopped. Ratios are taken
within a round. What is measured is in speech_parts/, the engines in peers/.
"""

from __future__ import annotations

import argparse
import sys
import wave
from contextlib import ExitStack
from pathlib import Path

from cpu_peers import OURS, say
from export_hf import CACHE_FOLDER
from peers.conversion import converted_model
from peers.process import EngineProcess, engine_python
from program import Program, add_options, settle_options, verify_names
from speech_parts import pieces, transcription
from speech_parts.clips import ClipSource, Task, read_task
from speech_parts.plot import draw
from speech_parts.sizes import QUICK, Engines, Sizes

REPOSITORY = Path(__file__).resolve().parent.parent
MODEL = REPOSITORY / ".cache" / "models" / "whisper-tiny"
RECORDING = REPOSITORY / "tests" / "data" / "audio" / "jfk.wav"
CTRANSLATE2 = "ctranslate2"
ENGINES = (OURS, CTRANSLATE2, "transformers")
PARTS = {"transcription": transcription, "pieces": pieces}


class SpeechBenchmark(Program):
    def __init__(self, args: argparse.Namespace, sizes: Sizes, source: ClipSource, task: Task) -> None:
        super().__init__(args, args.model.name, sizes)
        self.source = source
        self.task = task

    def measure(self) -> None:
        with ExitStack() as stack:
            engines = self._start_engines(stack)
            for part in self.args.parts:
                measure = PARTS[part].measure
                self.parts[part] = measure(engines, self.source, self.task, self.sizes, self.args.rounds, say)

    def _start_engines(self, stack: ExitStack) -> Engines:
        args = self.args
        engines: Engines = {}
        for name in args.engines:
            engine = EngineProcess(
                name,
                engine_python(name, ctranslate2_python=args.ct2_python),
                converted_model(args.model, args.ct2_python) if name == CTRANSLATE2 else args.model,
                args.threads,
                CACHE_FOLDER / "logs" / f"{name}_speech.log",
                worker=f"{name}_speech_worker",
            )
            engines[name] = self.add_engine(stack, name, engine)
            self.source.start(engine)
        return engines

    def format_part(self, part: str) -> str:
        return PARTS[part].format_table(self.parts[part], self.sizes)

    def draw(self, path: Path, title: str) -> None:
        draw(path, title, self.parts, self.sizes)


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    add_options(parser, PARTS)
    parser.add_argument("--engines", help="default: ratoon, transformers, and ctranslate2 if its Python is given")
    parser.add_argument("--ct2-python", metavar="PATH", help="the Python of an environment that has ctranslate2")
    parser.add_argument(
        "--model", type=Path, default=MODEL, metavar="FOLDER", help="Hugging Face folder; default: Whisper-tiny's"
    )
    parser.add_argument(
        "--recording",
        type=Path,
        default=RECORDING,
        metavar="WAV",
        help="16 kHz, one channel; default: that of the tests",
    )
    args = parser.parse_args()
    settle_options(parser, args, PARTS)
    given = [name for name in ENGINES if name != CTRANSLATE2 or args.ct2_python]
    args.engines = verify_names(parser, "--engines", args.engines.split(",") if args.engines else given, ENGINES)
    if OURS not in args.engines:
        parser.error(f"--engines: {','.join(args.engines)}; expected {OURS} among them")
    if not set(args.engines) <= set(given):
        parser.error(f"--engines: {CTRANSLATE2}; expected --ct2-python with it")
    return args


def main() -> int:
    args = parse_arguments()
    sizes = QUICK if args.quick else Sizes()
    try:
        task = read_task(args.model)
    except (OSError, KeyError) as error:
        hint = "expected a Whisper for many languages; `make test` brings Whisper-tiny to .cache/models/"
        print(f"error: --model: {args.model}: {error!r}; {hint}", file=sys.stderr)
        return 1
    try:
        source = ClipSource(args.recording, sizes)
    except (OSError, EOFError, wave.Error) as error:
        hint = "expected a WAV file, 16 kHz, one channel, 16 bits"
        print(f"error: --recording: {args.recording}: {error!r}; {hint}", file=sys.stderr)
        return 1
    return SpeechBenchmark(args, sizes, source, task).run()


if __name__ == "__main__":
    sys.exit(main())
