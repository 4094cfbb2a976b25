"""Speech on the CPU: Whisper with several clips at once, against transformers and CTranslate2.

    .venv/bin/python bench/speech.py --ct2-python .venv-ct2/bin/python
    .venv/bin/python bench/speech.py --quantization int8 --engines ratoon,ctranslate2 --ct2-python .venv-ct2/bin/python

transcription: clips up to their end, from the samples to tokens, and the same with the features ready. Clips are cuts
of one recording that differ in where they begin and end. errors: the share of wrong, missing and additional words in
recorded sentences, also of Ratoon in float32 where others have fewer bits.
"""

from __future__ import annotations

import argparse
import json
import random
import re
import sys
import wave
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from export_hf import CACHE_FOLDER
from harness import (
    OURS,
    Comparison,
    Engines,
    Program,
    Row,
    format_comparison,
    in_turn,
    say,
)
from peers.conversion import FLOATS, converted_model, quantization_settings
from peers.process import EngineFailedError, EngineProcess
from peers.speech import LANGUAGE, SAMPLE_RATE, TASK, Cuts

SEED = 0
REPOSITORY = Path(__file__).resolve().parent.parent
MODEL = REPOSITORY / ".cache" / "models" / "whisper-tiny"
RECORDING = REPOSITORY / "tests" / "data" / "audio" / "jfk.wav"
CTRANSLATE2 = "ctranslate2"
AIMS = {"transformers": "above 1×", CTRANSLATE2: "at least 0.83×"}  # within 1.2 times its time
ROWS = {"whole": Row("samples to tokens", aims=AIMS), "ready": Row("features to tokens")}
DECODED = "ratoon, float32"
SENTENCES = REPOSITORY / "tests" / "data" / "speech" / "sentences.json"
SENTENCE_TOKENS = 60  # at most
WARM_UP_TOKENS = 2


@dataclass(frozen=True)
class Sizes:
    clips: int = 8  # at once
    longest_start: float = 1.0  # seconds of the recording that a clip leaves out at its start, at most
    longest_end: float = 2.5  # and at its end
    tokens: int = 60  # of an answer, at most


QUICK = Sizes(clips=2, tokens=4)


@dataclass(frozen=True)
class Task:
    """What is asked of clips, in the model's own tokens."""

    prompt: list[int]  # of the decoder: start, language, task, no timestamps
    end_token: int

    @classmethod
    def read(cls, model: Path) -> Task:
        """Raises KeyError for a model without tokens for languages and tasks."""
        facts = json.loads((model / "generation_config.json").read_text(encoding="utf-8"))
        start, no_timestamps = facts["decoder_start_token_id"], facts["no_timestamps_token_id"]
        prompt = [start, facts["lang_to_id"][f"<|{LANGUAGE}|>"], facts["task_to_id"][TASK], no_timestamps]
        return cls(prompt, facts["eos_token_id"])

    def answer(self, token_ids: list[int]) -> list[int]:
        """Returns an answer without the end token and what fills a batch up after it."""
        return token_ids[: token_ids.index(self.end_token)] if self.end_token in token_ids else token_ids


class ClipSource:
    """Gives other clips every time, and the same ones in every run."""

    def __init__(self, recording: Path, sizes: Sizes) -> None:
        """Raises wave.Error for a recording that can't be cut."""
        self._recording = str(recording.resolve())
        self._sizes = sizes
        self._random = random.Random(SEED)
        with wave.open(self._recording) as file:
            form = (file.getframerate(), file.getnchannels(), file.getsampwidth())
            self._num_samples = file.getnframes()
        if form != (SAMPLE_RATE, 1, 2):
            raise wave.Error(f"it has {form[0]} Hz, {form[1]} channels and {8 * form[2]} bits")

    def cuts(self) -> Cuts:
        return [self._cut() for _ in range(self._sizes.clips)]

    def _cut(self) -> list[int]:
        start = self._samples_up_to(self._sizes.longest_start)
        return [start, self._num_samples - self._samples_up_to(self._sizes.longest_end)]

    def _samples_up_to(self, seconds: float) -> int:
        return self._random.randrange(int(seconds * SAMPLE_RATE) + 1)

    def start(self, engine: EngineProcess) -> None:
        engine.start_with("take_clips", recording=self._recording, cuts=self.cuts())

    def hand_over(self, engine: EngineProcess, cuts: Cuts) -> None:
        engine.call("take_clips", recording=self._recording, cuts=cuts)


class SpeechBenchmark(Program):
    doc = __doc__
    parts = ("transcription", "errors")
    peers = (OURS, CTRANSLATE2, "transformers")
    quick = True

    def add_options(self, parser: argparse.ArgumentParser) -> None:
        parser.add_argument("--quantization", choices=(FLOATS, "int8"), default=FLOATS, help="default: %(default)s")
        parser.add_argument("--model", type=Path, default=MODEL, metavar="FOLDER", help="default: Whisper-tiny's")
        recording = "16 kHz, one channel; default: that of the tests"
        parser.add_argument("--recording", type=Path, default=RECORDING, metavar="WAV", help=recording)

    def prepare(self) -> None:
        self.sizes = QUICK if self.args.quick else Sizes()
        self.source, self.task = open_recording(self.args, self.sizes)

    def measure(self) -> None:
        args = self.args
        with ExitStack() as stack:
            engines = {name: self._start(stack, name, args.quantization) for name in args.engines}
            if "transcription" in args.parts:
                found = measure_transcription(engines, self.source, self.task, self.sizes, args.rounds)
                self.found["transcription"] = found
            if "errors" in args.parts:
                if args.quantization != FLOATS:
                    engines[DECODED] = self._start(stack, OURS, FLOATS)
                self.found["errors"] = self._errors(engines)

    def _start(self, stack: ExitStack, name: str, quantization: str) -> EngineProcess:
        args = self.args
        model = converted_model(args.model, args.ct2_python, quantization) if name == CTRANSLATE2 else args.model
        more = {"worker": f"{name}_speech_worker", "settings": quantization_settings(name, quantization)}
        engine = self.add_engine(stack, name, model, log=f"{name}_speech", **more)
        self.source.start(engine)
        return engine

    def _errors(self, engines: Engines) -> dict[str, float]:
        from transformers import AutoTokenizer

        tokenizer = AutoTokenizer.from_pretrained(self.args.model)
        return {name: word_errors(engine, self.task, tokenizer) for name, engine in engines.items()}

    def title(self) -> str:
        bits = f"{self.args.model.name} in {self.args.quantization}"
        return f"{bits}, {self.args.threads} threads, {self.args.rounds} rounds"

    def report(self) -> Iterator[str]:
        if "transcription" in self.found:
            yield format_transcription(self.found["transcription"], self.sizes)
        if "errors" in self.found:
            rates = self.found["errors"].items()
            yield f"Word error rate: {', '.join(f'{name} {rate:.1%}' for name, rate in rates)}"


def open_recording(args: argparse.Namespace, sizes: Sizes) -> tuple[ClipSource, Task]:
    try:
        task = Task.read(args.model)
    except (OSError, KeyError) as error:
        hint = "expected a Whisper for many languages; `make test` brings Whisper-tiny to .cache/models/"
        raise EngineFailedError(f"--model: {args.model}: {error!r}; {hint}") from None
    try:
        return ClipSource(args.recording, sizes), task
    except (OSError, EOFError, wave.Error) as error:
        hint = "expected a WAV file, 16 kHz, one channel, 16 bits"
        raise EngineFailedError(f"--recording: {args.recording}: {error!r}; {hint}") from None


def measure_transcription(
    engines: Engines, source: ClipSource, task: Task, sizes: Sizes, rounds: int
) -> dict[str, Any]:
    comparison = Comparison()
    cuts = source.cuts()
    for name in engines:
        say(f"transcription, warm-up: {name}")
        source.hand_over(engines[name], cuts)
        engines[name].call("transcribe", prompt=task.prompt, num_tokens=WARM_UP_TOKENS, ready=False)
    lengths: list[int] = []
    for index in range(rounds):
        say(f"transcription, round {index + 1}/{rounds}")
        for row in ROWS:
            cuts = source.cuts()
            answers = {}
            for name in in_turn(engines, index):
                source.hand_over(engines[name], cuts)
                before = num_encoder_runs(name, engines[name])
                arguments = {"prompt": task.prompt, "num_tokens": sizes.tokens, "ready": row == "ready"}
                result = engines[name].call("transcribe", **arguments)
                verify_encoder_runs(name, engines[name], before, sizes.clips)
                comparison.record(row, name, result.seconds)
                answers[name] = [task.answer(token_ids) for token_ids in result.value]
            ours = answers.pop(OURS)
            lengths += map(len, ours)
            for name, theirs in answers.items():
                comparison.record_same(name, [float(mine == other) for mine, other in zip(ours, theirs, strict=True)])
    return {**comparison.summary(), "answer_lengths": lengths}


def num_encoder_runs(name: str, engine: EngineProcess) -> int:
    return int(engine.call("num_encoder_runs").value) if name == OURS else 0


def verify_encoder_runs(name: str, engine: EngineProcess, before: int, expected: int) -> None:
    """Ours finds what it has heard: here it must have run its encoder so often."""
    runs = num_encoder_runs(name, engine) - before
    if name == OURS and runs != expected:
        raise EngineFailedError(f"the encoder was run for {runs} clips, not for {expected}")


def format_transcription(result: dict[str, Any], sizes: Sizes) -> str:
    lengths = result["answer_lengths"]
    lines = [format_comparison(f"{sizes.clips} clips at once", ROWS, result)]
    lines.append(f"  Answers have {min(lengths)} to {max(lengths)} tokens.")
    for name, same in result["same"].items():
        lines.append(f"  Answers identical to Ratoon's, {name}: {sum(same):.0f} of {len(same)}")
    return "\n".join(lines)


def join_sentences() -> tuple[Path, list[list[int]], list[str]]:
    """Returns one recording of all sentences, where each begins and ends, and what is said."""
    sentences = json.loads(SENTENCES.read_text(encoding="utf-8"))
    path = CACHE_FOLDER / "sentences.wav"
    path.parent.mkdir(parents=True, exist_ok=True)
    cuts: list[list[int]] = []
    with wave.open(str(path), "wb") as joined:
        for sentence in sentences:
            with wave.open(str(SENTENCES.parent / sentence["file"])) as file:
                if not cuts:
                    joined.setparams(file.getparams())
                first = cuts[-1][1] if cuts else 0
                cuts.append([first, first + file.getnframes()])
                joined.writeframes(file.readframes(file.getnframes()))
    return path, cuts, [sentence["text"] for sentence in sentences]


def word_errors(engine: EngineProcess, task: Task, tokenizer: Any) -> float:
    """Returns the share of wrong, missing and additional words."""
    path, cuts, texts = join_sentences()
    engine.call("take_clips", recording=str(path.resolve()), cuts=cuts)
    answers = engine.call("transcribe", prompt=task.prompt, num_tokens=SENTENCE_TOKENS, ready=False).value
    heard = [tokenizer.decode(task.answer(tokens), skip_special_tokens=True) for tokens in answers]
    pairs = [(_words(said), _words(text)) for said, text in zip(texts, heard, strict=True)]
    return sum(edit_distance(*pair) for pair in pairs) / sum(len(said) for said, _ in pairs)


def _words(text: str) -> list[str]:
    return re.findall(r"[a-z0-9']+", text.lower())


def edit_distance(a: Sequence[str], b: Sequence[str]) -> int:
    row = list(range(len(b) + 1))
    for i, one in enumerate(a, 1):
        before, row[0] = row[0], i
        for j, other in enumerate(b, 1):
            before, row[j] = row[j], min(row[j] + 1, row[j - 1] + 1, before + (one != other))
    return row[-1]


if __name__ == "__main__":
    sys.exit(SpeechBenchmark().run())
