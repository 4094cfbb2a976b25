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
    second: float = 0.0  # the longest of the others
    _collecting_since: float = 0.0
    _collected: float = 0.0

    def check(self) -> None:
        """A virtual machine counts time in which it had no processor as processor time: a single callback may have been
        in that, and be twice as long."""
        is_short = self.second < LONGEST_CALLBACK and self.longest < 2 * LONGEST_CALLBACK
        assert is_short, f"{self.longest * 1000:.0f} ms on the event loop: {self.callback}"

    def begin_again(self) -> None:
        self.longest, self.callback, self.second = 0.0, "", 0.0

    def note(self, seconds: float, handle: asyncio.Handle) -> None:
        if seconds > self.longest:
            self.longest, self.callback, self.second = seconds, repr(handle)[:500], self.longest
        elif seconds > self.second:
            self.second = seconds


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
            watch.note(time.thread_time() - start - (watch._collected - collected), handle)

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
