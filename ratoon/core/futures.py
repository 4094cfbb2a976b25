"""Futures that stand for several others."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from concurrent.futures import Future, InvalidStateError
from contextlib import suppress
from typing import Any


def all_done(futures: Sequence[Future[Any]]) -> Future[None]:
    """A future that is done when all of these are, with the first error among them. To cancel it cancels all."""
    whole: Future[None] = Future()
    left, lock = [len(futures)], threading.Lock()

    def note(_: Future[Any]) -> None:
        with lock:
            left[0] -= 1
            if left[0]:
                return
        failed = next((one.exception() for one in futures if not one.cancelled() and one.exception()), None)
        with suppress(InvalidStateError):  # it was cancelled
            whole.set_result(None) if failed is None else whole.set_exception(failed)

    for future in futures:
        future.add_done_callback(note)
    whole.add_done_callback(lambda done: [one.cancel() for one in futures] if done.cancelled() else None)
    return whole
