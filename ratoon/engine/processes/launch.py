"""An engine process in its parent: start, connection, monitoring and end. One object is one run of it.

What to do when it dies is not decided here (replica.py, and the clients above it).
"""

from __future__ import annotations

import contextlib
import os
import secrets
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from subprocess import TimeoutExpired
from typing import Any

import zmq

from ratoon.core.config import EngineConfig
from ratoon.core.messages import (
    LAST_WORD,
    BlocksTold,
    DPWaveReport,
    EngineLaunch,
    EngineMessageType,
    EngineReady,
    Fault,
    Heartbeat,
    UtilityResult,
    engine_identity,
)
from ratoon.core.processes import start_process
from ratoon.core.request import EngineCoreOutputs, EngineCoreRequestType
from ratoon.core.wire import Decoder, WireError, encode
from ratoon.engine.processes.socket_directory import SocketDirectory
from ratoon.observe.logging import get_logger

logger = get_logger(__name__)

MOST_AT_ONCE = 64  # foreign messages that are read in one call: the rest waits until other tasks have run
LONGEST_GREETING = 1024  # bytes


@dataclass(frozen=True, slots=True)
class EngineRun:
    """What a run of an engine process is made of."""

    config: EngineConfig
    index: int  # of the engine
    num_engines: int  # that share the host
    number: int  # of this run, from 1 on
    context: zmq.Context[Any]
    directory: SocketDirectory  # of its sockets


class EngineProcess:
    """One run of an engine process on this host; ray_engines.py has those of other hosts. Its sockets are its own:
    nothing of an earlier run can be mistaken for it."""

    is_placed = True  # whether it could begin to run; a cluster may have to wait for room
    lost = ""  # how it was lost, if its exit code does not tell

    def __init__(self, run: EngineRun) -> None:
        index, context = run.index, run.context
        self.index = index
        self.num_bad_messages = 0
        self.closed = False
        self._num_outputs_taken = 0
        self.connected = False  # sent messages arrive
        self._paths: list[Path] = []  # of its sockets
        self._secret = secrets.token_bytes(16)
        self._identity = engine_identity(index, secrets.token_hex(8))
        self._decoders: dict[bytes, Decoder[Any]] = {
            EngineMessageType.READY.value: Decoder(EngineReady),
            EngineMessageType.START_FAILED.value: Decoder(Fault),
            EngineMessageType.OUTPUTS.value: Decoder(EngineCoreOutputs),
            EngineMessageType.UTILITY_RESULT.value: Decoder(UtilityResult),
            EngineMessageType.HEARTBEAT.value: Decoder(Heartbeat),
            EngineMessageType.DP_WAVE_REPORT.value: Decoder(DPWaveReport),
            EngineMessageType.BLOCKS_TOLD.value: Decoder(BlocksTold),
        }
        self.inputs = context.socket(zmq.ROUTER)
        self.inputs.setsockopt(zmq.ROUTER_MANDATORY, 1)  # sending to an engine that can't be reached is an error
        self.inputs.setsockopt(zmq.SNDHWM, 0)  # requests that were accepted are never dropped
        self.inputs.setsockopt(zmq.MAXMSGSIZE, LONGEST_GREETING)  # of what is read
        self.inputs.setsockopt(zmq.LINGER, 0)
        self.outputs = context.socket(zmq.PULL)
        self.outputs.setsockopt(zmq.LINGER, 0)
        launch = EngineLaunch(
            config=run.config,
            index=index,
            num_engines=run.num_engines,
            secret=self._secret,
            identity=self._identity,
            input_address=run.directory.address(f"{index}-{run.number}-in"),
            output_address=run.directory.address(f"{index}-{run.number}-out"),
        )
        try:
            self._bind(launch)
            self._spawn(launch)
        except BaseException:
            self._close_sockets()
            raise

    def _bind(self, launch: EngineLaunch) -> None:
        self._paths = [
            Path(address.removeprefix("ipc://")) for address in (launch.input_address, launch.output_address)
        ]
        self.inputs.bind(launch.input_address)
        self.outputs.bind(launch.output_address)

    def _spawn(self, launch: EngineLaunch) -> None:
        # Nothing is written to this pipe. The parent's end becomes readable when the process exits.
        self.death_fd, kept_open = os.pipe()
        try:
            module = "ratoon.engine.processes.core_process"
            self._process = start_process(module, [str(kept_open)], [kept_open], launch)
        except BaseException:
            os.close(self.death_fd)
            raise
        finally:
            os.close(kept_open)

    @property
    def pid(self) -> int | None:
        return self._process.pid

    def send(self, kind: EngineCoreRequestType, message: Any) -> None:
        """Never waits. What is sent to a process that has just died is lost; its death is noticed elsewhere."""
        try:
            self.inputs.send_multipart([self._identity, kind.value, *encode(message)], zmq.NOBLOCK)
        except zmq.ZMQError as error:
            logger.debug("engine %d can't be reached: %s", self.index, error)

    def acknowledge_outputs(self) -> None:
        """Tell the engine that another of its messages with outputs was taken: it does not run far ahead of us."""
        if not self.closed:
            self._num_outputs_taken += 1
            self.send(EngineCoreRequestType.OUTPUTS_TAKEN, self._num_outputs_taken)

    def decode(self, frames: Sequence[bytes]) -> tuple[EngineMessageType, Any] | None:
        """A message from the engine's output socket; None for an invalid one, which is counted."""
        try:
            if len(frames) < 3 or not secrets.compare_digest(frames[0], self._secret):
                raise WireError("it does not come from the engine")
            decoder = self._decoders.get(frames[1])
            if decoder is None:
                raise WireError(f"of the unknown kind {frames[1][:16]!r}")
            return EngineMessageType(frames[1]), decoder.decode(frames[2:])
        except WireError as error:
            self._count_garbage(str(error))
            return None

    def read_input_socket(self) -> None:
        """An engine writes here once, when it has connected: any other message is foreign. Never waits."""
        for _ in range(MOST_AT_ONCE):
            try:
                frames = self.inputs.recv_multipart(zmq.NOBLOCK)
            except zmq.Again:
                return
            if frames == [self._identity, self._secret]:
                self.connected = True
            else:
                self._count_garbage("only the engine writes to this socket")

    def _count_garbage(self, reason: str) -> None:
        self.num_bad_messages += 1
        if self.num_bad_messages in (1, 10, 100) or self.num_bad_messages % 1000 == 0:
            logger.warning("%d messages of engine %d were ignored: %s", self.num_bad_messages, self.index, reason)

    def kill(self) -> None:
        self._process.kill()

    def ask_to_end(self) -> None:
        """A last message tells it that the parent runs, and cleans up itself."""
        assert self._process.stdin is not None
        with contextlib.suppress(BrokenPipeError):
            if not self._process.stdin.closed:
                self._process.stdin.write(LAST_WORD)
            self._process.stdin.close()

    def close(self, grace_seconds: float = 0.0) -> int:
        """End the process, if it still runs, and release its resources. Its exit code."""
        self.ask_to_end()
        code = self._wait(grace_seconds)
        self._close_sockets()
        os.close(self.death_fd)
        return code

    def _wait(self, grace_seconds: float) -> int:
        """Waits so long for its end, then ends it. Its exit code."""
        try:
            return self._process.wait(grace_seconds)
        except TimeoutExpired:
            self._process.kill()
            return self._process.wait()

    def _close_sockets(self) -> None:
        self.closed = True
        self.inputs.close()
        self.outputs.close()
        for path in self._paths:
            path.unlink(missing_ok=True)
