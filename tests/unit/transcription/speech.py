"""A vocabulary like Whisper's over bytes, an engine that says what a script tells it to, and recordings made here."""

from __future__ import annotations

import asyncio
import io
import math
import re
import wave
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import cache
from importlib.util import find_spec

import numpy as np
import pytest
from tokenizers import Tokenizer as Backend
from tokenizers import decoders, models, pre_tokenizers

from ratoon.core.config import EncoderConfig, ModelConfig
from ratoon.core.outputs import CompletionOutput, Logprob, RequestOutput
from ratoon.core.params import BeamSearchParams, GenerationParams, HiddenStatesParams
from ratoon.models.token_bound import byte_level_alphabet
from ratoon.models.tokenizer import Tokenizer
from ratoon.transcription.vocabulary import SpeechVocabulary, find_vocabulary
from tests.unit.engine.fakes import model_config

needs_av = pytest.mark.skipif(find_spec("av") is None, reason="PyAV is not installed")
RATE = 16_000
NUM_MEL_BINS = 80
SPECIAL = [
    "<|endoftext|>", "<|startoftranscript|>", "<|en|>", "<|de|>", "<|fr|>", "<|yue|>", "<|translate|>",
    "<|transcribe|>", "<|startoflm|>", "<|startofprev|>", "<|nospeech|>", "<|notimestamps|>",
]  # fmt: skip
END, START, ENGLISH, GERMAN = 256, 257, 258, 259
TRANSLATE, TRANSCRIBE, PREVIOUS, NO_SPEECH, NO_TIMESTAMPS = 262, 263, 265, 266, 267
FIRST_TIMESTAMP = 268
VOCAB_SIZE = FIRST_TIMESTAMP + 1501
MAX_LENGTH = 448
ALIGNMENT_HEADS = [[0, 1], [1, 0]]
TIMESTAMP = re.compile(r"<(\d+\.\d\d)>")


def speech_config(**changes: object) -> ModelConfig:
    encoder = EncoderConfig(2, 2, 4, 16, max_position=1500, num_mel_bins=NUM_MEL_BINS)
    fields: dict = {
        "architecture": "WhisperForConditionalGeneration",
        "vocab_size": VOCAB_SIZE,
        "max_position": MAX_LENGTH,
        "eos_token_ids": (END,),
        "decoder_start_token_id": START,
        "encoder": encoder,
    }
    return model_config(**(fields | changes))


@cache
def speech_tokenizer(special: tuple[str, ...] = tuple(SPECIAL)) -> Tokenizer:
    backend = Backend(models.BPE(vocab=byte_level_alphabet(), merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens(list(special))
    return Tokenizer(backend, {"eos_token": "<|endoftext|>"})


def vocabulary(**changes: object) -> SpeechVocabulary:
    return find_vocabulary(speech_tokenizer(), speech_config(**changes), {})


def aligned_vocabulary() -> SpeechVocabulary:
    """Its model's files name two heads whose attention follows the sound."""
    return find_vocabulary(speech_tokenizer(), speech_config(), {"alignment_heads": ALIGNMENT_HEADS})


def english_vocabulary() -> SpeechVocabulary:
    return find_vocabulary(speech_tokenizer(), speech_config(vocab_size=51864), {})


def tokens_of(text: str) -> list[int]:
    """`<2.00>` is the timestamp of two seconds."""
    tokens: list[int] = []
    for place, part in enumerate(TIMESTAMP.split(text)):
        if place % 2:
            tokens.append(FIRST_TIMESTAMP + round(float(part) / 0.02))
        else:
            tokens += part.encode()
    return tokens


@dataclass
class Asked:
    features: np.ndarray
    prompt: list[int]
    params: GenerationParams

    @property
    def is_about_language(self) -> bool:
        return getattr(self.params, "allowed_token_ids", None) == [258, 259, 260, 261]

    @property
    def is_about_silence(self) -> bool:
        return getattr(self.params, "allowed_token_ids", None) == [NO_SPEECH]

    @property
    def start(self) -> float:
        """Of the window, in seconds: of a recording made by `numbered`."""
        return float(self.features[0, 0])


@dataclass
class Say:
    text: str
    logprob: float = -0.1  # of each token
    ended: bool = True


Script = Callable[[Asked], Say | str] | list[Say | str]


@dataclass
class FakeEngine:
    """`Generate` by a script: a function, or what the windows get one after the other."""

    script: Script
    language: int = ENGLISH
    no_speech_prob: float = 0.01
    asked: list[Asked] = field(default_factory=list)
    weighed: list[tuple[list[int], HiddenStatesParams]] = field(default_factory=list)
    running: int = 0
    most_running: int = 0
    given_up: int = 0

    def __post_init__(self) -> None:
        self._texts: Iterator[Say | str] = iter(self.script if isinstance(self.script, list) else [])

    @property
    def windows(self) -> list[Asked]:
        return [one for one in self.asked if not one.is_about_language and not one.is_about_silence]

    async def __call__(self, features: np.ndarray, prompt: list[int], params: GenerationParams) -> RequestOutput:
        asked = Asked(features, prompt, params)
        self.asked.append(asked)
        self.running += 1
        self.most_running = max(self.most_running, self.running)
        try:
            await asyncio.sleep(0.001)
        except asyncio.CancelledError:
            self.given_up += 1
            raise
        finally:
            self.running -= 1
        if asked.is_about_language:
            return output([self.language], math.log(0.75), params)
        if asked.is_about_silence:
            return output([NO_SPEECH], math.log(self.no_speech_prob), params)
        said = self.script(asked) if callable(self.script) else next(self._texts)
        said = Say(said) if isinstance(said, str) else said
        return output([*tokens_of(said.text), *([END] if said.ended else [])], said.logprob, params)

    async def cross_weights(self, features: np.ndarray, tokens: list[int], params: HiddenStatesParams) -> np.ndarray:
        """Token after token, each attends to the next tenth of a second."""
        self.weighed.append((tokens, params))
        ((first, _),) = params.positions
        weights = np.full((len(params.cross_heads), len(tokens) - first, 1500), 1e-5, np.float32)
        for place in range(len(tokens) - first):
            weights[:, place, 5 * place : 5 * place + 5] = 0.2
        return weights


def output(tokens: list[int], logprob: float, params: GenerationParams) -> RequestOutput:
    choice = CompletionOutput(0, "", tokens, cumulative_logprob=logprob * len(tokens), finish_reason="stop")
    if not isinstance(params, BeamSearchParams):
        choice.logprobs = [{token: Logprob(logprob)} for token in tokens]
    return RequestOutput("id", None, None, [choice], True)


def tone(seconds: float, rate: int = RATE, channels: int = 1, hertz: float = 440.0) -> np.ndarray:
    """16-bit samples [samples, channels]; every channel is the same."""
    times = np.arange(round(seconds * rate)) / rate
    samples = (np.sin(2 * np.pi * hertz * times) * 8000).astype(np.int16)
    return np.repeat(samples[:, None], channels, axis=1)


def wav(samples: np.ndarray, rate: int = RATE) -> bytes:
    file = io.BytesIO()
    with wave.open(file, "wb") as writer:
        writer.setnchannels(samples.shape[1])
        writer.setsampwidth(2)
        writer.setframerate(rate)
        writer.writeframes(samples.astype("<i2").tobytes())
    return file.getvalue()
