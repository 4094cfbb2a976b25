"""Fills the masks of grammars in threads of their own, so that no step waits for a grammar that takes long.

Grammars are written by strangers, and some take milliseconds for each token. Masks of trusted grammars, which have been
fast so far, are filled together by one call of the library, and new ones one by one, each measured. Grammars that have
been slow wait in a queue of their own, whose thread has a low priority.
"""

from __future__ import annotations

import os
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from typing import Protocol

from ratoon.execution.grammar.interface import GrammarCost

SECONDS_FOR_SLOW = 0.002  # that a step waits for the mask of a grammar that has been slow,
SECONDS_FOR_OTHERS = 0.5  # and for that of another one, which is slow from then on, or waits for its thread
SECONDS_OF_MANY = 0.002  # for masks that are filled together: if these take longer,
SECONDS_OF_EACH = 0.0005  # each counted, the grammars among them are measured again
NICENESS_OF_SLOW = 10


class Fillable(Protocol):
    """Something with a mask."""

    cost: GrammarCost
    is_filled: bool

    def fill(self) -> None:
        """Fill the mask now, on the caller's thread. Raises nothing."""
        ...

    def note_seconds(self, seconds: float) -> None:
        """What `fill` took, of processor time."""
        ...


FillMany = Callable[[Sequence[Fillable]], None]


class MaskFiller:
    """To be used from any thread. `fill_many` fills the masks of several, faster than one by one."""

    def __init__(self, fill_many: FillMany, *, clock: Callable[[], float] = time.perf_counter) -> None:
        self._fill_many = fill_many
        self._clock = clock
        self._changed = threading.Condition()
        self._trusted: list[Fillable] = []
        self._new: deque[Fillable] = deque()
        self._slow: deque[Fillable] = deque()
        self._threads: list[threading.Thread] = []
        self._is_closed = False

    def begin(self, masks: Iterable[Fillable]) -> None:
        """Fill these beside what the caller does next. None of them is being filled."""
        with self._changed:
            for mask in masks:
                self._queue_of(mask.cost).append(mask)
            if not self._threads:
                for work in (self._fill_fast, self._fill_slow):
                    self._threads.append(threading.Thread(target=work, name=work.__name__, daemon=True))
                    self._threads[-1].start()
            self._changed.notify_all()

    def close(self) -> None:
        """End the threads. To be called before the interpreter ends: a thread within the library would crash then."""
        with self._changed:
            self._is_closed = True
            self._changed.notify_all()
        for thread in self._threads:
            thread.join()

    def wait(self, masks: Sequence[Fillable], *, for_one: bool = False) -> None:
        """Until all of these are filled; not for long for those of grammars that have been slow. `for_one`: the caller
        has nothing to do before one is filled."""
        start = time.monotonic()
        with self._changed:
            while missing := [mask for mask in masks if not mask.is_filled]:
                seconds = max(seconds_for(mask.cost) for mask in missing)
                if for_one and len(missing) == len(masks):
                    seconds = SECONDS_FOR_OTHERS
                left = start + seconds - time.monotonic()
                if left <= 0:
                    return
                self._changed.wait(left)

    def wait_for_all(self, masks: Sequence[Fillable]) -> None:
        """Until all of these are filled, which the library's own limits bound."""
        with self._changed:
            self._changed.wait_for(lambda: all(mask.is_filled for mask in masks))

    def _queue_of(self, cost: GrammarCost) -> list[Fillable] | deque[Fillable]:
        return self._slow if cost.is_slow else self._trusted if cost.is_trusted else self._new

    def _fill_fast(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._trusted or self._new or self._is_closed)
                if self._is_closed:
                    return
                together = [mask for mask in self._trusted if not mask.cost.is_slow]
                self._slow += [mask for mask in self._trusted if mask.cost.is_slow]
                self._trusted = []
                one = None if together or not self._new else self._new.popleft()
                if one is not None and one.cost.is_slow:  # by another text of its grammar, meanwhile
                    self._slow.append(one)
                    one = None
                self._changed.notify_all()
            if together:
                self._fill_together(together)
            if one is not None:
                self._fill_one(one)

    def _fill_together(self, masks: list[Fillable]) -> None:
        start = self._clock()
        self._fill_many(masks)
        if self._clock() - start > SECONDS_OF_MANY + SECONDS_OF_EACH * len(masks):
            for mask in masks:
                mask.cost.doubt()
        self._note_filled(masks)

    def _fill_slow(self) -> None:
        with suppress(OSError):  # a thread of its own has a priority of its own, on Linux
            if sys.platform == "linux":
                os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), NICENESS_OF_SLOW)
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._slow or self._is_closed)
                if self._is_closed:
                    return
                one = self._slow.popleft()
            self._fill_one(one)

    def _fill_one(self, mask: Fillable) -> None:
        start = time.thread_time()
        mask.fill()
        mask.note_seconds(time.thread_time() - start)
        self._note_filled([mask])

    def _note_filled(self, masks: Iterable[Fillable]) -> None:
        with self._changed:
            for mask in masks:
                mask.is_filled = True
            self._changed.notify_all()


def seconds_for(cost: GrammarCost) -> float:
    """How long a step waits for a mask of this grammar."""
    return SECONDS_FOR_SLOW if cost.is_slow else SECONDS_FOR_OTHERS
