"""A progress bar for transcriptions: seconds of sound that are done, of each recording and of all. Terminals only."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from ratoon.api.transcription.results import Follow, Progress

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
