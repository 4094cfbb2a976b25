"""Requests that wait for what their rules need (the grammar of structured output), outside the scheduler's queues.

So no step and no other request waits for a compilation. They are handed over when it is done, and may end before: by an
abort, an error, or after too long. What a request that has ended waited for is cancelled.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable
from concurrent.futures import Future
from typing import Any, NamedTuple

from ratoon.core.errors import RatoonError, RequestError
from ratoon.core.faults import fault_of
from ratoon.core.request import EngineCoreOutput, EngineCoreRequest, FinishReason

MAX_SECONDS = 30.0  # that a request waits


class Waiting(NamedTuple):
    request: EngineCoreRequest
    future: Future[Any]
    deadline: float


class PreparedRequests:
    def __init__(self) -> None:
        self._waiting: dict[str, Waiting] = {}  # by request id, in the order of arrival
        self._is_ready = threading.Event()  # a future may be done
        self.when_ready: Callable[[], None] | None = None  # called from another thread, when a future is done

    def __len__(self) -> int:
        return len(self._waiting)

    @property
    def has_ready(self) -> bool:
        return self._is_ready.is_set() and any(waiting.future.done() for waiting in self._waiting.values())

    def add(self, request: EngineCoreRequest, future: Future[Any], now: float) -> None:
        if request.request_id in self._waiting:
            future.cancel()
            raise RequestError("request_id", f"{request.request_id!r} is in use", "another id")
        self._waiting[request.request_id] = Waiting(request, future, now + MAX_SECONDS)
        future.add_done_callback(self._note_done)

    def _note_done(self, _: Future[Any]) -> None:
        self._is_ready.set()
        if self.when_ready is not None:
            self.when_ready()

    def waiting(self) -> list[tuple[EngineCoreRequest, float]]:
        """The requests, and when each came."""
        return [(one.request, one.deadline - MAX_SECONDS) for one in self._waiting.values()]

    def wait(self, seconds: float) -> None:
        """For a caller that has nothing else to do: until one is ready, or so long."""
        self._is_ready.wait(seconds)

    def take_ready(self, add: Callable[[EngineCoreRequest], None]) -> list[EngineCoreOutput]:
        """Hand over those that are ready. The outputs of those that fail."""
        if not self._is_ready.is_set():
            return []
        self._is_ready.clear()
        outputs: list[EngineCoreOutput] = []
        for waiting in [one for one in self._waiting.values() if one.future.done()]:
            request = waiting.request
            del self._waiting[request.request_id]
            try:
                waiting.future.result()
                add(request)
            except Exception as error:
                outputs += failures(request, error)
        return outputs

    def abort(self, ids: Iterable[str]) -> list[EngineCoreOutput]:
        """Aborts those of the requests with these ids that wait here, and returns their outputs. Choices exist from the
        first token on, so a request ends as a whole."""
        outputs: list[EngineCoreOutput] = []
        for request_id in ids:
            waiting = self._waiting.pop(request_id, None)
            if waiting is not None:
                waiting.future.cancel()
                outputs += [
                    EngineCoreOutput(request_id, [], choice, FinishReason.ABORT)
                    for choice in range(waiting.request.num_choices)
                ]
        return outputs

    def expire(self, now: float) -> list[EngineCoreOutput]:
        overdue = [waiting for waiting in self._waiting.values() if waiting.deadline <= now]
        outputs: list[EngineCoreOutput] = []
        for request, future, _ in overdue:
            del self._waiting[request.request_id]
            future.cancel()
            problem = f"could not be compiled in {MAX_SECONDS:g} seconds"
            outputs += failures(request, RequestError("structured_output", problem, "a smaller schema or grammar"))
        return outputs

    def next_deadline(self) -> float | None:
        return min((waiting.deadline for waiting in self._waiting.values()), default=None)


def failures(request: EngineCoreRequest, error: Exception) -> list[EngineCoreOutput]:
    if not isinstance(error, RatoonError):
        error = RequestError("structured_output", f"can't be used: {error}", "leave it out")
    fault = fault_of(error)
    return [
        EngineCoreOutput(request.request_id, [], choice, FinishReason.ERROR, error=str(error), refusal=fault)
        for choice in range(request.num_choices)
    ]
