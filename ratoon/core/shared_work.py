"""Work that several callers wait for, and that is given up when none of them waits any longer."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import Generic, TypeVar

Result = TypeVar("Result")


class SharedWork(Generic[Result]):
    """Each caller has a future of its own (`join`), and leaves by cancelling it. When the last one has left before
    there is a result, `on_abandoned` is called, once. From any thread."""

    def __init__(self, on_abandoned: Callable[[], None]) -> None:
        self._on_abandoned = on_abandoned
        self._lock = threading.Lock()
        self._futures: list[Future[Result]] = []
        self._is_over = False

    def join(self) -> Future[Result] | None:
        """None: it was abandoned, or has its result."""
        future: Future[Result] = Future()
        with self._lock:
            if self._is_over:
                return None
            self._futures.append(future)
        future.add_done_callback(self._note_left)
        return future

    @property
    def is_over(self) -> bool:
        return self._is_over

    def set_result(self, result: Result) -> None:
        for future in self._take():
            future.set_result(result)

    def set_exception(self, error: BaseException) -> None:
        for future in self._take():
            future.set_exception(error)

    def _take(self) -> list[Future[Result]]:
        """Takes the callers that still wait; they can't be cancelled any more."""
        with self._lock:
            self._is_over = True
            futures, self._futures = self._futures, []
        return [future for future in futures if future.set_running_or_notify_cancel()]

    def _note_left(self, future: Future[Result]) -> None:
        if not future.cancelled():
            return
        with self._lock:
            if future in self._futures:
                self._futures.remove(future)
            if self._futures or self._is_over:
                return
            self._is_over = True
        self._on_abandoned()
