"""Watches an event loop: the longest that any of its callbacks kept it, in processor time of its thread.

Processor time does not depend on what else the machine does; time that the collector of garbage takes is not the
callback's, and is left out. A virtual machine that had no processor for a moment counts that moment too: a test
that found a long callback is repeated, and what is long by its work is long every time.
"""

from __future__ import annotations

import asyncio
import functools
import gc
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any
from unittest import mock

LONGEST_CALLBACK = 0.05  # seconds that nothing on the event loop of a server may exceed
ATTEMPTS = 3


class LongCallbackError(AssertionError):
    """Something kept the event loop for too long."""


@dataclass
class LoopWatch:
    longest: float = 0.0
    callback: str = ""
    _collecting_since: float = 0.0
    _collected: float = 0.0

    def check(self) -> None:
        if self.longest >= LONGEST_CALLBACK:
            raise LongCallbackError(f"{self.longest * 1000:.0f} ms on the event loop: {self.callback}")

    def begin_again(self) -> None:
        self.longest, self.callback = 0.0, ""

    def note(self, seconds: float, handle: asyncio.Handle) -> None:
        if seconds > self.longest:
            self.longest, self.callback = seconds, repr(handle)[:500]


def again_if_long(test: Callable[..., None]) -> Callable[..., None]:
    """Fails only if every attempt finds a long callback."""

    @functools.wraps(test)
    def run(*arguments: Any, **fixtures: Any) -> None:
        for _ in range(ATTEMPTS - 1):
            try:
                return test(*arguments, **fixtures)
            except LongCallbackError:
                pass
        test(*arguments, **fixtures)

    return run


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
