"""Clips of one recording that differ in where they begin and end, and what is asked of them."""

from __future__ import annotations

import json
import random
import wave
from dataclasses import dataclass
from pathlib import Path

from peers.process import EngineFailedError, EngineProcess
from peers.speech import LANGUAGE, SAMPLE_RATE, TASK, Cuts

from speech_parts.sizes import Sizes

SEED = 0


@dataclass(frozen=True)
class Task:
    """In the model's own tokens."""

    prompt: list[int]  # of the decoder: start, language, task, no timestamps
    end_token: int

    def answer(self, token_ids: list[int]) -> list[int]:
        """Without the end token and what fills a batch up after it."""
        return token_ids[: token_ids.index(self.end_token)] if self.end_token in token_ids else token_ids


def read_task(model: Path) -> Task:
    """KeyError: the model has no tokens for languages and tasks."""
    facts = json.loads((model / "generation_config.json").read_text(encoding="utf-8"))
    start, no_timestamps = facts["decoder_start_token_id"], facts["no_timestamps_token_id"]
    prompt = [start, facts["lang_to_id"][f"<|{LANGUAGE}|>"], facts["task_to_id"][TASK], no_timestamps]
    return Task(prompt, facts["eos_token_id"])


class ClipSource:
    """Other clips every time, and the same ones in every run. wave.Error: the recording is none that can be cut."""

    def __init__(self, recording: Path, sizes: Sizes) -> None:
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

    def start(self, engine: EngineProcess) -> None:
        engine.start_with("take_clips", recording=self._recording, cuts=self.cuts())

    def hand_over(self, engine: EngineProcess, cuts: Cuts) -> float:
        """The seconds that the features took."""
        seconds: float = engine.call("take_clips", recording=self._recording, cuts=cuts).value["features"]
        return seconds

    def _samples_up_to(self, seconds: float) -> int:
        return self._random.randrange(int(seconds * SAMPLE_RATE) + 1)


def verify_encoder_runs(engine: EngineProcess, before: int, expected: int) -> None:
    """Ours finds what it has heard: here it must have run its encoder so often."""
    runs = engine.call("num_encoder_runs").value - before
    if runs != expected:
        raise EngineFailedError(f"the encoder was run for {runs} clips, not for {expected}")
