"""The state of the engine processes, as a client sees it."""

from __future__ import annotations

import enum
from dataclasses import dataclass, field


class EngineState(enum.StrEnum):
    STARTING = "starting"  # for the first time
    OK = "ok"
    STALLED = "stalled"  # the process is alive but sends no heartbeats, or a step takes very long
    RESTARTING = "restarting"  # it died; requests in flight resume once it has restarted
    DRAINING = "draining"  # it gets no further request, and ends with those that it has
    DRAINED = "drained"  # it has ended because it was asked to
    DEAD = "dead"  # it could not be restarted


@dataclass(frozen=True, slots=True)
class EngineHealth:
    index: int
    state: EngineState
    pid: int | None = None
    num_restarts: int = 0
    detail: str = ""
    paused: bool = False
    asleep: bool = False
    num_bad_messages: int = 0  # malformed messages ignored, on either side of its sockets
    num_running: int = 0  # branches in its batch after its last step
    num_waiting: int = 0  # branches that waited for a place in it


@dataclass(frozen=True, slots=True)
class Health:
    """All engines together. Requests are answered while at least one engine is ok."""

    engines: list[EngineHealth] = field(default_factory=list)

    @property
    def state(self) -> EngineState:
        states = [engine.state for engine in self.engines]
        for state in (EngineState.OK, EngineState.STALLED, EngineState.RESTARTING, EngineState.STARTING):
            if state in states:
                return state
        return EngineState.DEAD

    @property
    def ok(self) -> bool:
        return self.state == EngineState.OK
