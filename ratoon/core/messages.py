"""Messages between an engine process and the client that started it, other than requests and outputs.

    client → engine  (ROUTER → DEALER)   kind (EngineCoreRequestType, one byte), message
    engine → client  (DEALER → ROUTER)   secret: once, when it has connected
    engine → client  (PUSH → PULL)       secret, kind (EngineMessageType, one byte), message

Secret and identity are generated for every started process: messages from other senders or from an earlier process are
recognised by them and dropped.
"""

from __future__ import annotations

import enum
from typing import Any

import msgspec

from ratoon.core.config import EngineConfig
from ratoon.core.kv_events import Event

LAST_WORD = b"."  # written to an engine's standard input before a parent that keeps running closes it


def engine_identity(index: int, run: str) -> bytes:
    """An engine's identity on the client's ROUTER socket. ZeroMQ ignores a second peer with the same identity, so each
    run gets a random one (`run`) that another process cannot claim first."""
    return f"engine-{index}-{run}".encode()


class EngineMessageType(enum.Enum):
    """What a message from the engine process is: one byte on the wire."""

    READY = b"\x00"
    START_FAILED = b"\x01"
    OUTPUTS = b"\x02"
    UTILITY_RESULT = b"\x03"
    HEARTBEAT = b"\x04"
    DP_WAVE_REPORT = b"\x05"
    BLOCKS_TOLD = b"\x06"


class SocketKeys(msgspec.Struct, frozen=True, gc=False):
    """Keys (CURVE) for the sockets of an engine that connects from another host: what is sent is encrypted, and each
    side knows the other by its key. New ones are made for every run."""

    server: bytes  # the client's public key
    public: bytes  # the engine's own
    secret: bytes


class EngineLaunch(msgspec.Struct, gc=False):
    """The parameters of an engine process, read from its standard input at start."""

    config: EngineConfig
    index: int  # rank among several engines
    num_engines: int
    secret: bytes
    identity: bytes  # its own on the client's ROUTER socket
    input_address: str
    output_address: str
    heartbeat_interval: float = 1.0
    keys: SocketKeys | None = None  # None: the sockets are files of this host
    kv_secret: str | None = None  # of the engines of a service that send each other blocks from other hosts


class EngineReady(msgspec.Struct, array_like=True, gc=False):
    """The model is loaded, and requests are accepted."""

    description: dict[str, Any]  # resolved settings and memory figures
    max_model_len: int
    block_size: int
    startup: list[tuple[str, int, float]] = []  # phases: name, depth, seconds
    kv_address: str = ""  # where other engines get its blocks or, if it only encodes, its outputs; empty: nowhere
    whole_images: bool = False  # rows of an image see each other in both directions, which hashes of blocks depend on


class Fault(msgspec.Struct, array_like=True, omit_defaults=True, gc=False):
    """An error of core/errors.py on the wire: its class and its text."""

    kind: str  # RequestError, ConfigError, ModelError; anything else is an EngineError
    subject: str
    problem: str
    expected: str = ""


class ForgottenRoots(msgspec.Struct, array_like=True, gc=False):
    """Branches whose texts the engine should not keep any more, because they are those of no root."""

    branch_ids: list[str]


class UtilityCall(msgspec.Struct, array_like=True, omit_defaults=True, gc=False):
    """A call of one of the engine's utilities, answered by a UtilityResult with the same number."""

    call_id: int
    method: str
    arguments: list[Any] = []


class UtilityResult(msgspec.Struct, array_like=True, omit_defaults=True, gc=False):
    call_id: int
    result: Any = None
    fault: Fault | None = None


class DPWave(msgspec.Struct, array_like=True, frozen=True, gc=False):
    """One round of a wave, which all data-parallel engines run together (engine/processes/coordinator.py)."""

    wave: int
    round: int  # within the wave


class DPWaveReport(msgspec.Struct, array_like=True, frozen=True, gc=False):
    """An engine has taken all steps of a round."""

    wave: int
    round: int
    has_work: bool  # whether there are requests left in it


class BlocksTold(msgspec.Struct, array_like=True, gc=False):
    """Tells what happened to the blocks that can be found in an engine, by their hashes: events have no tokens. A
    message comes before the outputs of the step that changed these blocks. The first one of a run, and one that was
    asked for (the utility `tell_blocks`), begins with AllBlocksCleared and tells of all of them."""

    number: int  # of the message; one that is missing was lost
    events: list[Event]


class Heartbeat(msgspec.Struct, array_like=True, omit_defaults=True, gc=False):
    """Sent at fixed intervals by a separate thread, so that a hanging step can be distinguished from a dead process."""

    step_seconds: float = 0.0  # duration so far of the step in flight; 0 between steps
    num_bad_messages: int = 0  # malformed messages received and ignored
    paused: bool = False
    asleep: bool = False
