"""A worker for speech: the calls that it knows, and the clips of a recording, the same for every engine.

    take_clips(recording, cuts)              what is heard from now on; {"features": seconds that its features took}.
                                             The engine knows nothing else of it
    transcribe(prompt, num_tokens, ready)    greedy, all clips at once, up to the end token; the new tokens of each.
                                             From the samples, or with `ready` from the features
    encode()                                 {"encoder": seconds for all clips at once, …}; what it gives is kept
    decode(prompt, num_tokens, end_token)    from what was kept, the end token held back: {"token_ids": …,
                                             "first": seconds to one token of each clip, "all": to so many of each}

A cut is the number of a clip's first sample, and of the first after it. Needs numpy, which all engines have with them.
"""

from __future__ import annotations

import time
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
        self.encoded: Any = None

    @abstractmethod
    def extract(self) -> Any:
        """The clips' features."""

    @abstractmethod
    def generate(self, heard: Any, prompt: list[int], num_tokens: int, held_back: int | None = None) -> TokenIds:
        """Greedy, of all clips; `heard` is what `extract`, `samples` or `run_encoder` gave."""

    @abstractmethod
    def run_encoder(self) -> Any:
        """What comes of the features."""

    def samples(self) -> Any:
        """The clips in a form that the engine can read: its features, unless it makes them itself."""
        return self.extract()

    # ---- calls ----

    def calls(self) -> Calls:
        known = (self.take_clips, self.transcribe, self.encode, self.decode)
        return {call.__name__: call for call in known}

    def take_clips(self, recording: str, cuts: Cuts) -> dict[str, float]:
        self.clips = read_clips(recording, cuts)
        begin = time.perf_counter()
        self.features = self.extract()
        return {"features": time.perf_counter() - begin}

    def transcribe(self, prompt: list[int], num_tokens: int, ready: bool) -> TokenIds:
        return self.generate(self.features if ready else self.samples(), prompt, num_tokens)

    def encode(self) -> dict[str, float]:
        begin = time.perf_counter()
        self.encoded = self.run_encoder()
        return {"encoder": time.perf_counter() - begin}

    def decode(self, prompt: list[int], num_tokens: int, end_token: int) -> dict[str, Any]:
        begin = time.perf_counter()
        self.generate(self.encoded, prompt, 1, end_token)
        between = time.perf_counter()
        token_ids = self.generate(self.encoded, prompt, num_tokens, end_token)
        return {"first": between - begin, "all": time.perf_counter() - between, "token_ids": token_ids}


def read_clips(recording: str, cuts: Cuts) -> Clips:
    with wave.open(recording) as file:
        frames = file.readframes(file.getnframes())
    samples = np.frombuffer(frames, np.int16).astype(np.float32) / 32768
    return [np.ascontiguousarray(samples[begin:end]) for begin, end in cuts]
