"""Watches an event loop: the longest that any of its callbacks kept it, in processor time of its thread.

Processor time does not depend on what else the machine does; time that the collector of garbage takes is not the
callback's, and is left out.
"""

from __future__ import annotations

import asyncio
import gc
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any
from unittest import mock

LONGEST_CALLBACK = 0.05  # seconds that nothing on the event loop of a server may exceed


@dataclass
class LoopWatch:
    longest: float = 0.0
    callback: str = ""
    _collecting_since: float = 0.0
    _collected: float = 0.0

    def check(self) -> None:
        assert self.longest < LONGEST_CALLBACK, f"{self.longest * 1000:.0f} ms on the event loop: {self.callback}"

    def begin_again(self) -> None:
        self.longest, self.callback = 0.0, ""


@contextmanager
def watching_loop() -> Iterator[LoopWatch]:
    """Watches every loop of asyncio's own kind while the block runs."""
    watch = LoopWatch()
    run = asyncio.Handle._run

    def timed_run(handle: asyncio.Handle) -> None:
        start, collected = time.thread_time(), watch._collected
        try:
            run(handle)
        finally:
            seconds = time.thread_time() - start - (watch._collected - collected)
            if seconds > watch.longest:
                watch.longest, watch.callback = seconds, repr(handle)[:500]

    def note_collection(phase: str, info: dict[str, Any]) -> None:
        if phase == "start":
            watch._collecting_since = time.thread_time()
        else:
            watch._collected += time.thread_time() - watch._collecting_since

    gc.callbacks.append(note_collection)
    try:
        with mock.patch.object(asyncio.Handle, "_run", timed_run):
            yield watch
    finally:
        gc.callbacks.remove(note_collection)
