"""What a transcription is: a text in segments, each with its times and with figures that say how sure the model was."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field


@dataclass(slots=True)
class Segment:
    start: float  # seconds from the beginning of the recording
    end: float
    text: str
    tokens: list[int]  # timestamps included
    # Of the window that it is a part of:
    seek: int  # where it begins, in hundredths of a second
    temperature: float  # that its text was found with
    avg_logprob: float
    compression_ratio: float  # high for a text that repeats itself
    no_speech_prob: float | None  # None: nobody asked


@dataclass(slots=True)
class Transcription:
    task: str
    language: str | None = None  # a code; None: not found out, because the recording could not be read
    language_probability: float | None = None  # of one that was found out
    duration: float = 0.0  # seconds
    segments: list[Segment] = field(default_factory=list)
    error: str | None = None  # of one among several that failed

    @property
    def text(self) -> str:
        return "".join(segment.text for segment in self.segments).strip()


@dataclass(slots=True)
class Progress:
    """News of a transcription that is under way."""

    transcription: Transcription  # all of it so far
    segments: list[Segment]  # that are new, and will not change
    seconds_done: float  # of its duration


Follow = Callable[[int, Progress], None]  # told of a recording, by its place among several, what is new
