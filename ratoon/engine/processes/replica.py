"""One engine across restarts: started, ready, dead, restarted. Keeps its state; waiting for it is the task of the
clients (mp_client.py, async_client.py).
"""

from __future__ import annotations

import logging
import signal
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import msgspec
import zmq

from ratoon.core.config import EngineConfig
from ratoon.core.errors import EngineError, RatoonError, RequestError
from ratoon.core.faults import error_of
from ratoon.core.health import EngineHealth, EngineState
from ratoon.core.messages import EngineMessageType, EngineReady, Fault, Heartbeat
from ratoon.core.request import AddedTogether, EngineCoreRequest, EngineCoreRequestType, Extraction
from ratoon.core.wire import encode
from ratoon.engine.processes.launch import EngineProcess, EngineRun
from ratoon.engine.processes.socket_directory import SocketDirectory
from ratoon.observe.logging import get_logger

logger = get_logger(__name__)

MAX_FAILED_STARTS = 5  # in a row; then it is given up
LONGEST_RESTART_DELAY = 10.0
SILENCE_IS_STALLED = 5.0  # seconds without a heartbeat
SILENCE_IS_DEATH = 60.0  # then it is killed and restarted
SECONDS_TO_CONNECT = 30.0  # for one that is ready
STEP_IS_STALLED = 60.0
STEP_IS_DEATH = 600.0  # no step takes so long
# Prompt tokens of requests in one message: more than a step computes, and decoded in a millisecond or so, in which the
# engine's loop can't go on
MAX_TOKENS_TOGETHER = 65_536


class Replica:
    def __init__(
        self,
        config: EngineConfig,
        index: int,
        num_engines: int,
        context: zmq.Context[Any],
        directory: SocketDirectory,
        clock: Callable[[], float] = time.monotonic,
        run_engine: Callable[[EngineRun], EngineProcess] = EngineProcess,
    ) -> None:
        self.index = index
        self.is_leaving = False  # it is given no further request, and not started again
        self._run_engine = run_engine
        self.state = EngineState.STARTING
        self.state_changed: Callable[[], None] = lambda: None  # is called in the loop of the client
        self.num_restarts = 0
        self.ready: EngineReady | None = None  # what it said when it was last ready
        self.start_error: RatoonError | None = None  # why its last start failed, if it could say so
        self._config = config
        self._num_engines = num_engines
        self._context = context
        self.is_being_read = False  # more of its messages are read in the loop's next turn
        self._directory = directory
        self._clock = clock
        self._process: EngineProcess | None = None
        self._num_runs = 0
        self._num_failed_starts = 0
        self._heartbeat = Heartbeat()
        self._last_heard = 0.0
        self._ready_since: float | None = None  # when the process that runs said so
        self._detail = ""
        self._was_ready = False
        self._num_bad_messages = 0  # of earlier runs

    @property
    def process(self) -> EngineProcess:
        assert self._process is not None, "the engine was not started"
        return self._process

    @property
    def has_process(self) -> bool:
        return self._process is not None

    @property
    def can_serve(self) -> bool:
        return self.state == EngineState.OK

    @property
    def is_coming_back(self) -> bool:
        return self.state in (EngineState.STARTING, EngineState.RESTARTING)

    def start(self) -> bool:
        """False: not even a process could be made (no memory, no descriptors); it counts as one that died at once."""
        self.start_error = None
        self._last_heard = self._clock()
        self._heartbeat = Heartbeat()
        self._ready_since = None
        self._num_runs += 1
        try:
            self._process = self._run_engine(
                EngineRun(self._config, self.index, self._num_engines, self._num_runs, self._context, self._directory)
            )
        except (OSError, zmq.ZMQError) as error:
            self.start_error = EngineError(f"its process can't be made: {error}")
            return False
        except RatoonError as error:
            self.start_error = error
            return False
        return True

    def send(self, kind: EngineCoreRequestType, message: Any) -> None:
        self.process.send(kind, message)

    def send_requests(self, requests: Sequence[EngineCoreRequest]) -> None:
        """Sends requests that are to begin together."""
        for group in _groups(requests):
            if len(group) > 1:
                self.send(EngineCoreRequestType.ADD_TOGETHER, AddedTogether(group))
            else:
                self.send(kind_of(group[0]), group[0])

    def take(self, frames: Sequence[bytes]) -> tuple[EngineMessageType, Any] | None:
        """Decode the engine's message, and record its state. None: the message was invalid."""
        decoded = self.process.decode(frames)
        if decoded is None:
            return None
        self._last_heard = self._clock()
        kind, message = decoded
        if kind == EngineMessageType.READY:
            self.ready = message
            self._ready_since = self._clock()
            self.look_for_connection()
        elif kind == EngineMessageType.START_FAILED:
            assert isinstance(message, Fault)
            self.start_error = error_of(message)
            self.process.ask_to_end()  # it waits for that: its message has arrived
        elif kind == EngineMessageType.HEARTBEAT:
            self._heartbeat = message
            self.process.read_input_socket()
        return decoded

    @property
    def awaits_connection(self) -> bool:
        """Whether the engine has said that it is ready, on one socket, and can't yet be reached on the other."""
        return self._ready_since is not None and not self.can_serve

    def look_for_connection(self) -> None:
        """An engine that is ready can serve once it can be reached, which it has long been as a rule. Never waits."""
        self.process.read_input_socket()
        if self.awaits_connection and self.process.connected and not self.is_leaving:
            self._num_failed_starts = 0
            self._detail = ""
            self._enter(EngineState.OK)
        elif self.awaits_connection and self._clock() - (self._ready_since or 0.0) > SECONDS_TO_CONNECT:
            self.start_error = EngineError("it is ready, but its socket can't be reached")
            self.process.kill()

    def begin_to_leave(self) -> None:
        """Gives it no further request. Those that it has go on."""
        self.is_leaving = True
        self._enter(EngineState.DRAINING)

    def on_exit(self) -> None:
        """The process is gone: nothing can be handed to it any more."""
        self._was_ready = self.can_serve
        self._enter(EngineState.DRAINED if self.is_leaving else EngineState.RESTARTING)

    def _enter(self, state: EngineState) -> None:
        self.state = state
        self.state_changed()

    def cleanup(self) -> float | None:
        """Release the resources of the lost process, which may be slow. Seconds to wait before another start;
        None: give up."""
        was_ready = self._was_ready
        self._detail = str(self.start_error or "")
        if self._process is not None:
            code = self._process.close()
            self._num_bad_messages += self._process.num_bad_messages + self._heartbeat.num_bad_messages
            self._heartbeat = Heartbeat()
            ending = self._process.lost or f"its process {_ending(code)}"
            self._detail = ending + (f" ({self.start_error})" if self.start_error else "")
            self._process = None
        if self.is_leaving:
            logger.info("engine %d has left", self.index)
            return None
        first_start = self._num_runs == 1 and not was_ready  # reported to the caller
        logger.log(logging.DEBUG if first_start else logging.ERROR, "engine %d: %s", self.index, self._detail)
        if not was_ready:
            self._num_failed_starts += 1
        if self._num_failed_starts >= MAX_FAILED_STARTS:
            self.state = EngineState.DEAD
            return None
        self.num_restarts += 1
        if was_ready:
            return 0.0
        return min(0.1 * 4 ** (self._num_failed_starts - 1), LONGEST_RESTART_DELAY)

    def give_up(self) -> None:
        """Its first start has failed, and it is not tried again."""
        self.state = EngineState.DEAD

    def failure(self) -> RatoonError:
        """The error that says why the engine did not start, or died."""
        return self.start_error or EngineError(f"engine {self.index}: {self._detail}")

    def end_if_hung(self) -> None:
        """A process that has not answered for long is killed, because requests wait for it."""
        if self._process is None:
            return
        if not self._process.is_placed:
            self._last_heard = self._clock()
        silence = self._clock() - self._last_heard
        if silence > SILENCE_IS_DEATH or self._heartbeat.step_seconds > STEP_IS_DEATH:
            logger.error("engine %d does not answer and is killed", self.index)
            self._process.kill()

    @property
    def is_silent(self) -> bool:
        """Whether it runs and has not been heard for some seconds."""
        return self.has_process and self._clock() - self._last_heard > SILENCE_IS_STALLED

    def health(self) -> EngineHealth:
        state, detail = self.state, self._detail
        if state == EngineState.OK:
            silence = self._clock() - self._last_heard
            if silence > SILENCE_IS_STALLED:
                state, detail = EngineState.STALLED, f"no heartbeat for {silence:.0f} s"
            elif self._heartbeat.step_seconds > STEP_IS_STALLED:
                state, detail = EngineState.STALLED, f"a step has taken {self._heartbeat.step_seconds:.0f} s"
        process = self._process
        return EngineHealth(
            index=self.index,
            state=state,
            pid=None if process is None else process.pid,
            num_restarts=self.num_restarts,
            detail=detail,
            paused=self._heartbeat.paused,
            asleep=self._heartbeat.asleep,
            num_bad_messages=self._num_bad_messages
            + self._heartbeat.num_bad_messages
            + (0 if process is None else process.num_bad_messages),
        )

    def end(self, grace_seconds: float) -> None:
        """Ends the engine's process, which is no longer needed."""
        self.state = EngineState.DEAD
        if self._process is not None:
            self._process.close(grace_seconds)
            self._process = None


def verify_message(request: EngineCoreRequest) -> None:
    """RequestError: a field has a value that no message can hold, such as half a surrogate pair. Sent with others, the
    request would keep them from being sent. Token ids are whole numbers below the vocabulary's size."""
    try:
        encode(msgspec.structs.replace(request, prompt_token_ids=[]))
    except (ValueError, OverflowError) as error:
        expected = "text of whole characters, and whole numbers of 64 bits"
        raise RequestError(_unfit_field(request), f"can't be sent to the engine: {error}", expected) from None


def _unfit_field(message: msgspec.Struct) -> str:
    """Returns the first field that no message can hold, by its own name where it is one of a field's fields."""
    for name in message.__struct_fields__:
        value = getattr(message, name)
        try:
            encode(value)
        except (ValueError, OverflowError):
            return (_unfit_field(value) if isinstance(value, msgspec.Struct) else "") or name
    return ""


def kind_of(request: EngineCoreRequest) -> EngineCoreRequestType:
    """Returns the kind of a message with this request alone."""
    is_extraction = isinstance(request.params, Extraction)
    return EngineCoreRequestType.HIDDEN_STATES_EXTRACT if is_extraction else EngineCoreRequestType.ADD


def _groups(requests: Sequence[EngineCoreRequest]) -> Iterator[list[EngineCoreRequest]]:
    """Yields the requests in order, in groups that are not too large for one message."""
    group: list[EngineCoreRequest] = []
    num_tokens = 0
    for request in requests:
        num_tokens += len(request.prompt_token_ids)
        if group and num_tokens > MAX_TOKENS_TOGETHER:
            yield group
            group, num_tokens = [], len(request.prompt_token_ids)
        group.append(request)
    if group:
        yield group


def _ending(code: int) -> str:
    if code < 0:
        try:
            return f"was ended by {signal.Signals(-code).name}"
        except ValueError:
            return f"was ended by signal {-code}"
    return f"ended with code {code}"
