"""Speech on the CPU in fp32: Whisper with several clips at once, against transformers and CTranslate2.

    .venv/bin/python bench/speech.py --ct2-python .venv-ct2/bin/python

transcription: clips up to their end, from the samples to tokens, and the same with the features ready. pieces: where
the time goes: features, encoder, first token and decode steps, each alone. Keys and values of cross-attention count to
the first token, where the peers make them. A step is what many tokens take beyond one, shared out; the end token is
held back. Clips are cuts of one recording that differ in where they begin and end.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
import wave
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

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
from peers.conversion import converted_model
from peers.process import EngineFailedError, EngineProcess
from peers.speech import LANGUAGE, SAMPLE_RATE, TASK, Cuts

SEED = 0
REPOSITORY = Path(__file__).resolve().parent.parent
MODEL = REPOSITORY / ".cache" / "models" / "whisper-tiny"
RECORDING = REPOSITORY / "tests" / "data" / "audio" / "jfk.wav"
CTRANSLATE2 = "ctranslate2"
AIMS = {"transformers": "above 1×", CTRANSLATE2: "at least 0.83×"}  # within 1.2 times its time
WHOLE_ROWS = {"whole": Row("samples to tokens", aims=AIMS), "ready": Row("features to tokens")}
PIECES = {
    "features": Row("features", "ms"),
    "encoder": Row("encoder", "ms"),
    "first": Row("first token after it", "ms"),
    "step": Row("decode step", "ms"),
}
WARM_UP_TOKENS = 2


@dataclass(frozen=True)
class Sizes:
    clips: int = 8  # at once
    longest_start: float = 1.0  # seconds of the recording that a clip leaves out at its start, at most
    longest_end: float = 2.5  # and at its end
    tokens: int = 60  # of an answer, at most
    step_tokens: int = 33  # the first tells what comes before decode steps, the others what a step takes


QUICK = Sizes(clips=2, tokens=4, step_tokens=3)


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

    def hand_over(self, engine: EngineProcess, cuts: Cuts) -> float:
        """Returns the seconds that the features took."""
        seconds: float = engine.call("take_clips", recording=self._recording, cuts=cuts).value["features"]
        return seconds


class SpeechBenchmark(Program):
    doc = __doc__
    parts = ("transcription", "pieces")
    peers = (OURS, CTRANSLATE2, "transformers")
    quick = True

    def add_options(self, parser: argparse.ArgumentParser) -> None:
        add_speech_options(parser)

    def prepare(self) -> None:
        self.sizes = QUICK if self.args.quick else Sizes()
        self.source, self.task = open_recording(self.args, self.sizes)

    def measure(self) -> None:
        args = self.args
        with ExitStack() as stack:
            engines: Engines = {}
            for name in args.engines:
                model = converted_model(args.model, args.ct2_python) if name == CTRANSLATE2 else args.model
                worker = f"{name}_speech_worker"
                engines[name] = self.add_engine(stack, name, model, log=f"{name}_speech", worker=worker)
                self.source.start(engines[name])
            for part in args.parts:
                measure = measure_transcription if part == "transcription" else measure_pieces
                self.found[part] = measure(engines, self.source, self.task, self.sizes, args.rounds)

    def title(self) -> str:
        return f"{self.args.model.name} in fp32, {self.args.threads} threads, {self.args.rounds} rounds"

    def report(self) -> Iterator[str]:
        for part, result in self.found.items():
            if part == "transcription":
                yield format_transcription(result, self.sizes)
            else:
                yield format_comparison(f"Pieces, {self.sizes.clips} clips at once", PIECES, result)


def add_speech_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--model", type=Path, default=MODEL, metavar="FOLDER", help="default: Whisper-tiny's")
    recording = "16 kHz, one channel; default: that of the tests"
    parser.add_argument("--recording", type=Path, default=RECORDING, metavar="WAV", help=recording)


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
        for row in WHOLE_ROWS:
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


def measure_pieces(engines: Engines, source: ClipSource, task: Task, sizes: Sizes, rounds: int) -> dict[str, Any]:
    comparison = Comparison()
    for index in range(-1, rounds):  # the first one warms up
        say(f"pieces, round {index + 1}/{rounds}")
        cuts = source.cuts()
        for name in in_turn(engines, index):
            for row, seconds in _pieces(name, engines[name], source, cuts, task, sizes).items():
                if index >= 0:
                    comparison.record(row, name, seconds)
    return comparison.summary()


def _pieces(
    name: str, engine: EngineProcess, source: ClipSource, cuts: Cuts, task: Task, sizes: Sizes
) -> dict[str, float]:
    features = source.hand_over(engine, cuts)
    before = num_encoder_runs(name, engine)
    encoded = engine.call("encode").value
    arguments = {"prompt": task.prompt, "num_tokens": sizes.step_tokens, "end_token": task.end_token}
    decoded = engine.call("decode", **arguments).value
    verify_encoder_runs(name, engine, before, sizes.clips)  # by encode(), and none by decode()
    lengths = {len(token_ids) for token_ids in decoded["token_ids"]}
    if lengths != {sizes.step_tokens}:
        raise EngineFailedError(f"{name} generated {sorted(lengths)} tokens, not {sizes.step_tokens} for each clip")
    return {
        "features": features,
        "encoder": encoded["encoder"],
        "first": encoded.get("cross", 0.0) + decoded["first"],
        "step": (decoded["all"] - decoded["first"]) / (sizes.step_tokens - 1),
    }


def num_encoder_runs(name: str, engine: EngineProcess) -> int:
    return int(engine.call("num_encoder_runs").value) if name == OURS else 0


def verify_encoder_runs(name: str, engine: EngineProcess, before: int, expected: int) -> None:
    """Ours finds what it has heard: here it must have run its encoder so often."""
    runs = num_encoder_runs(name, engine) - before
    if name == OURS and runs != expected:
        raise EngineFailedError(f"the encoder was run for {runs} clips, not for {expected}")


def format_transcription(result: dict[str, Any], sizes: Sizes, rows: dict[str, Row] = WHOLE_ROWS) -> str:
    lengths = result["answer_lengths"]
    lines = [format_comparison(f"{sizes.clips} clips at once", rows, result)]
    lines.append(f"  Answers have {min(lengths)} to {max(lengths)} tokens.")
    for name, same in result["same"].items():
        lines.append(f"  Answers identical to Ratoon's, {name}: {sum(same):.0f} of {len(same)}")
    return "\n".join(lines)


if __name__ == "__main__":
    sys.exit(SpeechBenchmark().run())
