"""Options of a transcription, and the checks that do not depend on the model."""

from __future__ import annotations

import math
import operator
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

from ratoon.core.encoder import HIGHEST_RATE, LOWEST_RATE
from ratoon.core.errors import RequestError
from ratoon.core.params import BeamSearchParams
from ratoon.transcription.vocabulary import TASKS

Task = Literal["transcribe", "translate"]

# Tried in turn until a window's text passes the thresholds: openai-whisper's.
TEMPERATURES = (0.0, 0.2, 0.4, 0.6, 0.8, 1.0)
HIGHEST_TEMPERATURE = 2.0


@dataclass(frozen=True, slots=True)
class TranscriptionOptions:
    """Defaults are openai-whisper's, except that windows do not share text, as in transformers."""

    language: str | None = None  # a code or a name; None: detected
    task: Task = "transcribe"  # or translate: to English
    word_timestamps: bool = False  # find the words of each segment and their times
    timestamps: bool = True  # False: windows of 30 seconds, all at once; each is a segment
    prompt: str | None = None  # context before each window: spelling of names, a style
    temperature: float | Sequence[float] = TEMPERATURES
    beam_size: int | None = None  # None: greedy. Where a temperature is above 0, tokens are drawn.
    condition_on_previous_text: bool = False  # the text of the previous window is the context of the next

    # A text is tried again with the next temperature if it repeats itself more, or is less probable, than this.
    compression_ratio_threshold: float | None = 2.4
    logprob_threshold: float | None = -1.0  # the mean over tokens
    # A window is silence if this is more probable than that, and its text less probable than logprob_threshold.
    no_speech_threshold: float | None = 0.6

    @property
    def temperatures(self) -> tuple[float, ...]:
        given = self.temperature
        return (float(given),) if isinstance(given, (int, float)) else tuple(given)

    def verify(self) -> None:
        """Raise RequestError, naming the option, for any invalid value."""
        if self.language is not None and not isinstance(self.language, str):
            raise RequestError("language", f"{self.language!r} is not text", "a code such as en, or a name")
        if self.task not in TASKS:
            raise RequestError("task", f"{self.task!r} is unknown", " or ".join(TASKS))
        if self.prompt is not None and not isinstance(self.prompt, str):
            raise RequestError("prompt", f"{type(self.prompt).__name__} is not text", "text")
        if not isinstance(self.word_timestamps, bool):
            raise RequestError(
                "word_timestamps", f"{self.word_timestamps!r} is neither true nor false", "true or false"
            )
        self._verify_temperatures()
        if self.beam_size is not None:
            _verify_beam_size(self.beam_size)
        for name in ("compression_ratio_threshold", "logprob_threshold", "no_speech_threshold"):
            value = getattr(self, name)
            if value is not None and not _is_number(value):
                raise RequestError(name, f"{value!r} is not a finite number", "a number, or None")
        if self.condition_on_previous_text and not self.timestamps:
            raise RequestError(
                "condition_on_previous_text",
                "without timestamps all windows are read at once, and none comes before another",
                "leave one of the two out",
            )

    def _verify_temperatures(self) -> None:
        expected = f"a number from 0 to {HIGHEST_TEMPERATURE:g}, or several to try one after the other"
        given: Any = self.temperature
        values = given if isinstance(given, (list, tuple)) else [given]
        for value in values:
            if not _is_number(value) or not 0 <= value <= HIGHEST_TEMPERATURE:
                raise RequestError("temperature", f"{value!r} is out of range", expected)
        if not values:
            raise RequestError("temperature", "is empty", expected)


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)


def _verify_beam_size(beam_size: Any) -> None:
    try:
        BeamSearchParams(beam_width=beam_size).verify()
    except RequestError as error:
        raise RequestError("beam_size", error.problem, error.expected) from None


def verify_rate(rate: Any) -> int:
    """RequestError for anything but samples a second. From fewer than this, a file of no size would become hours."""
    try:
        value = None if isinstance(rate, bool) else operator.index(rate)
    except TypeError:
        value = None
    if value is None or not LOWEST_RATE <= value <= HIGHEST_RATE:
        expected = f"a whole number of samples a second, from {LOWEST_RATE} to {HIGHEST_RATE}"
        raise RequestError("file", f"the sampling rate is {rate!r}", expected)
    return value
