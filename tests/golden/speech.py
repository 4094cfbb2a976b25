"""Recordings of tests/data, what is said in them, and how far a transcription is from that."""

from __future__ import annotations

import json
import re
import wave
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np

from tests.real_models import DATA

RATE = 16_000
JFK = DATA / "audio" / "jfk.wav"
JFK_TEXT = "And so my fellow Americans ask not what your country can do for you ask what you can do for your country."


class Sentence(NamedTuple):
    samples: np.ndarray
    text: str


def read_wav(path: Path) -> np.ndarray:
    """Samples of a plain file, 16 bits, one channel at 16 kHz: float32, from -1 to 1."""
    with wave.open(str(path)) as file:
        assert (file.getframerate(), file.getnchannels(), file.getsampwidth()) == (RATE, 1, 2)
        return np.frombuffer(file.readframes(file.getnframes()), "<i2").astype(np.float32) / 32768


def read_sentences() -> list[Sentence]:
    """Short sentences that a machine spoke, some of them in noise."""
    described = json.loads((DATA / "speech" / "sentences.json").read_text())
    return [Sentence(read_wav(DATA / "speech" / one["file"]), one["text"]) for one in described]


def words_of(text: str) -> list[str]:
    """Without case and punctuation."""
    return re.findall(r"[a-z0-9']+", text.lower())


def word_error_rate(spoken: Sequence[str], heard: Sequence[str]) -> float:
    """Words that are wrong, missing or too many in all texts together, for each word that was said."""
    errors = sum(_edits(words_of(one), words_of(other)) for one, other in zip(spoken, heard, strict=True))
    return errors / sum(len(words_of(text)) for text in spoken)


def _edits(wanted: list[str], found: list[str]) -> int:
    """The fewest words to replace, insert or leave out so that one becomes the other."""
    costs = list(range(len(found) + 1))  # of the first words of `found` from none of `wanted`
    for row, word in enumerate(wanted, start=1):
        diagonal, costs[0] = costs[0], row
        for column, other in enumerate(found, start=1):
            replaced = diagonal + (word != other)
            diagonal = costs[column]
            costs[column] = min(replaced, diagonal + 1, costs[column - 1] + 1)
    return costs[-1]
