"""What travels between an engine process and the client that started it, beside requests and outputs.

    client → engine  (ROUTER → DEALER)   kind (EngineCoreRequestType, one byte), message
    engine → client  (DEALER → ROUTER)   secret: once, when it has connected
    engine → client  (PUSH → PULL)       secret, kind (EngineMessageType, one byte), message

Secret and identity are made anew for every process that is started: what a stranger or a dead process sent is told
apart by them.
"""

from __future__ import annotations

import enum
from typing import Any

import msgspec

from ratoon.core.config import EngineConfig

LAST_WORD = b"."  # on an engine's standard input, before it is closed by a parent that goes on


def engine_identity(index: int, run: str) -> bytes:
    """What an engine is called on the client's ROUTER socket. Of two peers with one name the second is not heard: so
    each run has a name (`run`, drawn at random) that a stranger can't take before the engine does."""
    return f"engine-{index}-{run}".encode()


class EngineMessageType(enum.Enum):
    """What a message from the engine process is: one byte on the wire."""

    READY = b"\x00"
    START_FAILED = b"\x01"
    OUTPUTS = b"\x02"
    UTILITY_RESULT = b"\x03"
    HEARTBEAT = b"\x04"


class EngineLaunch(msgspec.Struct, gc=False):
    """All that an engine process is told when it starts, on its standard input."""

    config: EngineConfig
    index: int  # which of several engines it is
    num_engines: int
    secret: bytes
    identity: bytes  # its own on the client's ROUTER socket
    input_address: str
    output_address: str
    heartbeat_interval: float = 1.0


class EngineReady(msgspec.Struct, array_like=True, gc=False):
    """The model is loaded, and requests are welcome."""

    description: dict[str, Any]  # resolved settings and memory figures
    max_model_len: int
    block_size: int
    startup: list[tuple[str, int, float]] = []  # phases: name, depth, seconds


class Fault(msgspec.Struct, array_like=True, omit_defaults=True, gc=False):
    """An error of core/errors.py as it travels: its class, and what it says."""

    kind: str  # RequestError, ConfigError, ModelError; anything else is an EngineError
    subject: str
    problem: str
    expected: str = ""


class UtilityCall(msgspec.Struct, array_like=True, omit_defaults=True, gc=False):
    """A call of one of the engine's utilities, answered by a UtilityResult with the same number."""

    call_id: int
    method: str
    arguments: list[Any] = []


class UtilityResult(msgspec.Struct, array_like=True, omit_defaults=True, gc=False):
    call_id: int
    result: Any = None
    fault: Fault | None = None


class Heartbeat(msgspec.Struct, array_like=True, omit_defaults=True, gc=False):
    """Sent at fixed intervals by a thread of its own, so that a step which hangs can be told from a dead process."""

    step_seconds: float = 0.0  # how long the step under way has taken; 0 between steps
    num_bad_messages: int = 0  # garbage that came in and was ignored
    paused: bool = False
    asleep: bool = False
