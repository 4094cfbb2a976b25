"""Events of requests in the engine, sent with their next outputs: queued, scheduled, preempted, prefill chunks.

The time is an argument. There are a few events per request and none per token, so that they cost little; chunks are
recorded for traced requests only.
"""

from __future__ import annotations

from ratoon.core.request import EngineCoreEvent, EngineCoreEventType, EngineCoreOutput
from ratoon.scheduling.branch import Branch, Request

MAX_EVENTS = 1024  # of a request between two outputs; further ones are dropped


class EventLog:
    def __init__(self) -> None:
        # By request id, from the first schedule on, when the queued event is recorded too. So it is usually empty while
        # requests wait or decode.
        self._unsent: dict[str, list[EngineCoreEvent]] = {}
        self._chunks: list[tuple[int, EngineCoreEvent]] = []  # of steps in flight, by their numbers

    def __bool__(self) -> bool:
        return bool(self._unsent)

    def scheduled(self, branch: Branch, now: float) -> None:
        request = branch.request
        if request.queued_time is not None:
            self._note(request, EngineCoreEvent(EngineCoreEventType.QUEUED, request.queued_time))
            request.queued_time = None
        self._note(request, EngineCoreEvent(EngineCoreEventType.SCHEDULED, now, choice=branch.choice))

    def preempted(self, branch: Branch, now: float) -> None:
        self._note(branch.request, EngineCoreEvent(EngineCoreEventType.PREEMPTED, now, choice=branch.choice))

    def chunk(self, branch: Branch, num_tokens: int, step: int, now: float) -> None:
        """A part of a prompt is in the step being planned."""
        event = EngineCoreEvent(EngineCoreEventType.PREFILL_CHUNK, now, 0.0, num_tokens, branch.choice)
        self._note(branch.request, event)
        self._chunks.append((step, event))

    def step_done(self, step: int, now: float) -> None:
        for number, event in self._chunks:
            if number <= step:
                event.seconds = max(0.0, now - event.timestamp)
        self._chunks = [(number, event) for number, event in self._chunks if number > step]

    def _note(self, request: Request, event: EngineCoreEvent) -> None:
        events = self._unsent.setdefault(request.request_id, [])
        if len(events) < MAX_EVENTS:
            events.append(event)

    def tell(self, outputs: list[EngineCoreOutput]) -> None:
        """Attach them to the first output of each request."""
        unsent = self._unsent
        for output in outputs:
            if output.request_id in unsent:
                output.events = unsent.pop(output.request_id)

    def request_ids(self) -> set[str]:
        """The requests with unsent events, for checks."""
        return set(self._unsent)
