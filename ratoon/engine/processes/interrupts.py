"""Defers Ctrl-C to the end of a step, so that the engine's state stays consistent."""

from __future__ import annotations

import _signal  # type: ignore[import-not-found]  # `signal` looks for the names of numbers at each call, for 10 µs
import threading
from types import FrameType

SIGINT: int = _signal.SIGINT


class interrupts_held_back:
    """Ctrl-C inside the block is raised at its end. A second one is raised at once: the block may hang.

    Does nothing on other threads than the main one, or if the program has its own handler. A class, not a generator:
    it is entered once a step.
    """

    __slots__ = ("_count", "_holds")

    def __enter__(self) -> None:
        self._count = 0
        self._holds = (
            threading.current_thread() is threading.main_thread()
            and _signal.getsignal(SIGINT) is _signal.default_int_handler
        )
        if self._holds:
            _signal.signal(SIGINT, self._note)

    def __exit__(self, *error: object) -> None:
        if self._holds:
            _signal.signal(SIGINT, _signal.default_int_handler)
            if self._count and error[0] is None:
                raise KeyboardInterrupt

    def _note(self, signal_number: int, frame: FrameType | None) -> None:
        self._count += 1
        if self._count > 1:
            raise KeyboardInterrupt
