"""A worker for speech: the calls that it knows, and the clips of a recording, the same for every engine.

    take_clips(recording, cuts)              what is heard from now on. The engine knows nothing else of it
    transcribe(prompt, num_tokens, ready)    greedy, all clips at once, up to the end token; the new tokens of each.
                                             From the samples, or with `ready` from the features

A cut is the number of a clip's first sample, and of the first after it. Needs numpy, which all engines have with them.
"""

from __future__ import annotations

import wave
from abc import ABC, abstractmethod
from typing import Any, TypeAlias

import numpy as np

from peers.protocol import Calls, TokenIds

Clips: TypeAlias = list[np.ndarray]  # float32 [samples], from -1 to 1
Cuts: TypeAlias = list[list[int]]

SAMPLE_RATE = 16_000
LANGUAGE = "en"
TASK = "transcribe"


class SpeechEngine(ABC):
    def __init__(self) -> None:
        self.clips: Clips = []
        self.features: Any = None  # in whatever form the engine reads them

    @abstractmethod
    def extract(self) -> Any:
        """The clips' features."""

    @abstractmethod
    def generate(self, heard: Any, prompt: list[int], num_tokens: int) -> TokenIds:
        """Greedy, of all clips; `heard` is what `extract` or `samples` gave."""

    def samples(self) -> Any:
        """The clips in a form that the engine can read: its features, unless it makes them itself."""
        return self.extract()

    # ---- calls ----

    def calls(self) -> Calls:
        return {"take_clips": self.take_clips, "transcribe": self.transcribe}

    def take_clips(self, recording: str, cuts: Cuts) -> None:
        self.clips = read_clips(recording, cuts)
        self.features = self.extract()

    def transcribe(self, prompt: list[int], num_tokens: int, ready: bool) -> TokenIds:
        return self.generate(self.features if ready else self.samples(), prompt, num_tokens)


def read_clips(recording: str, cuts: Cuts) -> Clips:
    with wave.open(recording) as file:
        frames = file.readframes(file.getnframes())
    samples = np.frombuffer(frames, np.int16).astype(np.float32) / 32768
    return [np.ascontiguousarray(samples[begin:end]) for begin, end in cuts]
