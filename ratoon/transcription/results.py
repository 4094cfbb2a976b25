"""What a transcription is: a text in segments, each with its times and confidence figures, and the progress bar of
running transcriptions."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

from ratoon.transcription.words import Word


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
    no_speech_prob: float | None  # None: not requested
    words: list[Word] | None = None  # None: not requested


@dataclass(slots=True)
class Transcription:
    task: str
    language: str | None = None  # a code; None: the recording could not be read
    language_probability: float | None = None  # if it was detected
    duration: float = 0.0  # seconds
    segments: list[Segment] = field(default_factory=list)
    word_timestamps: bool = False  # whether words were requested
    error: str | None = None  # of one among several that failed

    @property
    def text(self) -> str:
        return "".join(segment.text for segment in self.segments).strip()

    @property
    def words(self) -> list[Word] | None:
        """The words of all segments, if they were requested."""
        if not self.word_timestamps:
            return None
        return [word for segment in self.segments for word in segment.words or ()]


@dataclass(slots=True)
class Progress:
    """Progress of a running transcription."""

    transcription: Transcription  # all of it so far
    segments: list[Segment]  # that are new, and will not change
    seconds_done: float  # of its duration


Follow = Callable[[int, Progress], None]  # told of a recording, by its place among several, what is new


MAX_BARS = 8  # of single recordings, at a time


@contextmanager
def audio_progress(names: Sequence[str], wanted: bool) -> Iterator[Follow]:
    """Yields what is to be told the news. In a pipe, or if not wanted, it does nothing with them."""
    if not wanted or not sys.stderr.isatty():
        yield lambda index, progress: None
        return
    from rich.console import Console
    from rich.progress import BarColumn, TaskID, TextColumn, TimeElapsedColumn
    from rich.progress import Progress as Bars

    bars = Bars(
        TextColumn("{task.description}"),
        BarColumn(),
        TextColumn("{task.completed:.0f}/{task.total:.0f} s"),
        TextColumn("{task.fields[speed]}"),
        TimeElapsedColumn(),
        console=Console(stderr=True),
        transient=True,
    )
    begin = time.monotonic()
    tasks: dict[int, TaskID] = {}
    done: dict[int, float] = {}  # seconds of each
    durations: dict[int, float] = {}
    with bars:
        overall = bars.add_task(f"{len(names)} recordings", total=0, speed="", visible=len(names) > 1)

        def follow(index: int, progress: Progress) -> None:
            duration = durations[index] = progress.transcription.duration
            done[index] = progress.seconds_done
            speed = f"{sum(done.values()) / max(time.monotonic() - begin, 1e-9):.1f}× real time"
            bars.update(overall, total=sum(durations.values()), completed=sum(done.values()), speed=speed)
            if index not in tasks and len(tasks) < MAX_BARS:
                tasks[index] = bars.add_task(names[index], total=duration, speed="" if len(names) > 1 else speed)
            if index in tasks:
                bars.update(tasks[index], completed=done[index], speed="" if len(names) > 1 else speed)
                if done[index] >= duration and len(names) > 1:
                    bars.remove_task(tasks.pop(index))

        yield follow
