"""How the engine processes are, as a client sees them."""

from __future__ import annotations

import enum
from dataclasses import dataclass, field


class EngineState(enum.StrEnum):
    STARTING = "starting"  # for the first time
    OK = "ok"
    STALLED = "stalled"  # the process lives, but nothing was heard of it for a while, or a step takes very long
    RESTARTING = "restarting"  # it died; requests in flight go on when it is back
    DEAD = "dead"  # it could not be brought back


@dataclass(frozen=True, slots=True)
class EngineHealth:
    index: int
    state: EngineState
    pid: int | None = None
    num_restarts: int = 0
    detail: str = ""
    paused: bool = False
    asleep: bool = False
    num_bad_messages: int = 0  # garbage that was ignored, on either side of its sockets


@dataclass(frozen=True, slots=True)
class Health:
    """All engines together. Requests are answered while one of them is well."""

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
