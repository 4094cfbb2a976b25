"""The engine core in a process of its own: a busy loop, and threads around it for what comes in and goes out.

    input thread   DEALER socket → decoded messages → queue ┐
    main thread                                             └→ loop: take messages, step → PUSH socket
    heartbeat thread: tells the client how long the step under way has taken
    lifeline thread:  ends the process when standard input closes, that is when its parent is gone; one that is
                      stopped (SIGSTOP) is made to continue by the system then

The main thread sends what a step brought itself, in some microseconds. A thread for it would have to wait for Python's
lock, which the main thread holds while it launches the next step.

The loop is never more than a few steps ahead of what the client has taken: else a front end that is slower than the
engine would have a long queue of outputs, with those of new requests at its end.

The parent's side is launch.py. Run as `python -m ratoon.engine.processes.core_process FD`, where FD is a pipe that is
never written to: the parent sees it close when this process ends, however it ends.
"""

from __future__ import annotations

import contextlib
import gc
import os
import queue
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import zmq
from zmq.utils.monitor import recv_monitor_message

from ratoon.core.errors import RequestError
from ratoon.core.faults import fault_of
from ratoon.core.kv_events import BlockStored, Event
from ratoon.core.messages import (
    LAST_WORD,
    BlocksTold,
    DPWave,
    DPWaveReport,
    EngineLaunch,
    EngineMessageType,
    EngineReady,
    Fault,
    ForgottenRoots,
    Heartbeat,
    UtilityCall,
)
from ratoon.core.processes import continue_when_parent_dies, ignore_signals_of_the_group, read_launch
from ratoon.core.request import (
    AddedTogether,
    EngineCoreOutput,
    EngineCoreOutputs,
    EngineCoreRequest,
    EngineCoreRequestType,
    FinishReason,
)
from ratoon.core.wire import Decoder, WireError, encode
from ratoon.distributed.cluster import SECRET_VARIABLE
from ratoon.distributed.placement import place_engine
from ratoon.engine.build import build_core, calm_thread_pools, describe
from ratoon.engine.core import EngineCore
from ratoon.engine.processes.socket_directory import remove_if_abandoned
from ratoon.engine.processes.zmq_context import SocketContext
from ratoon.engine.utilities import EngineUtilities
from ratoon.observe.logging import configure_logging, forget_live_display, get_logger
from ratoon.observe.startup import StartupTimer

logger = get_logger(__name__)

STEPS_IN_ROUND = 32  # of a wave: at its end the engines that step together ask whether one of them has work
IPC = "ipc://"  # addresses that are files of this host
MAX_STEPS_AHEAD = 4  # messages with outputs that the client has not taken; the loop waits then
SECONDS_TO_TIDY_UP = 2.0
SECONDS_TO_END = 5.0  # once the parent is gone; a step that hangs is not waited for
SECONDS_TO_BE_HEARD = 30.0  # for the parent to read why the engine did not start


class Stop:
    """Put among the incoming messages: the loop should end."""


class Wake:
    """Put among them from another thread: the loop has work again."""


class EngineCoreProcess:
    def __init__(self, launch: EngineLaunch) -> None:
        self._launch = launch
        self._is_orphan = False
        self._has_lost_client = False
        self._context = SocketContext()
        self._inputs: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self._output_socket: zmq.Socket[bytes] | None = None
        self._output_lock = threading.Lock()
        self._num_outputs_sent = 0
        self._num_outputs_taken = 0
        self._num_told = 0  # messages about blocks
        self._num_bad_messages = 0
        self._step_began: float | None = None
        self._core: EngineCore | None = None
        # For engines that step together: the round that is on, and how many of its steps are left. None: each engine
        # steps by itself.
        self._wave = DPWave(0, 0)
        self._steps_left: int | None = None

    def run(self) -> int:
        for work in (self._read_messages, self._beat, self._hold_lifeline):
            threading.Thread(target=work, name=work.__name__, daemon=True).start()
        timer = StartupTimer()
        try:
            core = self._start(timer)
        except Exception as error:
            logger.debug("the engine did not start", exc_info=True)
            self._send(EngineMessageType.START_FAILED, fault_of(error))
            self._wait_for_stop()
            self._remove_directory()
            return 1
        self._core = core
        kv_config = core.executor.facts.kv_config
        timer.finish()
        phases = [(phase.name, phase.depth, phase.seconds) for phase in timer.rows()]
        ready = EngineReady(
            describe(core),
            core.executor.facts.max_model_len,
            kv_config.whole_blocks,
            phases,
            core.kv_address or core.executor.facts.encoder_address,
            core.config.scheduler.whole_images,
        )
        forget_live_display()  # the engine has started
        self._send(EngineMessageType.READY, ready)
        if core.config.cache.tells_client:
            core.tell_client(self._tell_blocks)
        # What start-up has made stays. Python's garbage collector would traverse it again and again, and a pass over
        # torch's modules takes 100 ms or more, in the middle of a step.
        gc.freeze()
        self._loop(core, EngineUtilities(core, self._launch.index))
        core.shutdown()
        self._remove_directory()
        return int(self._has_lost_client)

    def _start(self, timer: StartupTimer) -> EngineCore:
        from ratoon.models.source import resolve_model

        launch = self._launch
        if launch.kv_secret is not None:
            os.environ[SECRET_VARIABLE] = launch.kv_secret  # where connectors look for it
        if launch.config.data_parallel_lockstep and launch.num_engines > 1:
            self._steps_left = 0
        with timer.phase("find model"):
            source = resolve_model(launch.config.model, launch.config.hf_overrides, launch.config.model_backend)
        with timer.phase("import torch"):
            config = place_engine(launch.config, launch.index, launch.num_engines)
        core = build_core(config, source, timer, launch.index if launch.num_engines > 1 else None)
        core.executor.collective_rpc("allow_idle_work").result()  # this process has no other user of the device
        core.executor.when_failed = lambda problem: self._inputs.put(Fault("EngineError", "", problem))
        core.preparing.when_ready = lambda: self._inputs.put(Wake())
        return core

    def _wait_for_stop(self) -> None:
        """A parent that has read why the engine did not start closes the lifeline. A process that ended earlier could
        take the message with it: a socket sends in the background, and what has arrived is not yet read."""
        deadline = time.monotonic() + SECONDS_TO_BE_HEARD
        with contextlib.suppress(queue.Empty):
            while not isinstance(self._inputs.get(timeout=max(0.0, deadline - time.monotonic())), Stop):
                pass

    # ---- the loop ----

    def _loop(self, core: EngineCore, utilities: EngineUtilities) -> None:
        while self._take_messages(core, utilities):
            if not self._should_step(core):
                continue
            self._step_began = time.monotonic()
            num_passes = core.num_passes
            outputs = core.step() if core.can_step else None
            if self._steps_left is not None and core.num_passes == num_passes:
                core.run_idle_step()
            self._step_began = None
            if outputs is not None:
                self._send_outputs(outputs)
            if self._steps_left is not None:
                self._count_step(core)

    def _should_step(self, core: EngineCore) -> bool:
        if self._num_outputs_sent - self._num_outputs_taken >= MAX_STEPS_AHEAD:
            return False
        if self._steps_left is None:
            return core.can_step
        # In a round every engine steps, with work or without.
        return self._steps_left > 0 and not core.paused and not core.asleep

    def _count_step(self, core: EngineCore) -> None:
        assert self._steps_left is not None
        self._steps_left -= 1
        if self._steps_left == 0:
            report = DPWaveReport(self._wave.wave, self._wave.round, core.has_work())
            self._send(EngineMessageType.DP_WAVE_REPORT, report)

    def _take_messages(self, core: EngineCore, utilities: EngineUtilities) -> bool:
        """Process incoming messages; wait for one if there is no other work. False: the loop must end."""
        wait = not self._should_step(core)
        while True:
            try:
                message = self._inputs.get(block=wait, timeout=core.seconds_to_expiry() if wait else None)
            except queue.Empty:
                core.expire_leases()
                return True
            if isinstance(message, Stop):
                return False
            self._carry_out(message, core, utilities)
            wait = False

    def _carry_out(self, message: Any, core: EngineCore, utilities: EngineUtilities) -> None:
        if isinstance(message, EngineCoreRequest):
            self._add(message, core)
        elif isinstance(message, AddedTogether):
            for request in message.requests:
                self._add(request, core)
        elif isinstance(message, Wake):
            return
        elif isinstance(message, UtilityCall):
            self._send(EngineMessageType.UTILITY_RESULT, utilities.answer(message))
        elif isinstance(message, dict):
            core.stop_requests(message)
        elif isinstance(message, int):
            self._num_outputs_taken = message
        elif isinstance(message, ForgottenRoots):
            core.forget_roots(message.branch_ids)
        elif isinstance(message, DPWave):
            if self._steps_left is not None:
                self._wave, self._steps_left = message, STEPS_IN_ROUND
        elif isinstance(message, Fault):
            raise RuntimeError(f"the executor failed: {message.problem}")  # the client starts another process
        else:
            core.abort_requests(message)

    def _add(self, request: EngineCoreRequest, core: EngineCore) -> None:
        try:
            core.add_request(request)
        except RequestError as error:
            refusal = EngineCoreOutput(
                request.request_id, [], finish_reason=FinishReason.ERROR, error=str(error), refusal=fault_of(error)
            )
            self._send_outputs(EngineCoreOutputs([refusal]))

    # ---- threads ----

    def _read_messages(self) -> None:
        socket = self._context.socket(zmq.DEALER)
        socket.setsockopt(zmq.ROUTING_ID, self._launch.identity)
        socket.setsockopt(zmq.RCVHWM, 0)
        self._connect(socket, self._launch.input_address)
        socket.send(self._launch.secret)  # tells the client that the connection works
        decoders: dict[bytes, Callable[[list[bytes]], Any]] = {
            EngineCoreRequestType.ADD.value: Decoder(EngineCoreRequest).decode,
            EngineCoreRequestType.HIDDEN_STATES_EXTRACT.value: Decoder(EngineCoreRequest).decode,
            EngineCoreRequestType.ADD_TOGETHER.value: Decoder(AddedTogether).decode,
            EngineCoreRequestType.ABORT.value: Decoder(list[str]).decode,
            EngineCoreRequestType.STOP.value: Decoder(dict[str, int | None]).decode,
            EngineCoreRequestType.UTILITY.value: Decoder(UtilityCall).decode,
            EngineCoreRequestType.EXECUTOR_FAILED.value: Decoder(Fault).decode,
            EngineCoreRequestType.OUTPUTS_TAKEN.value: Decoder(int).decode,
            EngineCoreRequestType.START_DP_WAVE.value: Decoder(DPWave).decode,
            EngineCoreRequestType.FORGET_ROOTS.value: Decoder(ForgottenRoots).decode,
        }
        while True:
            kind, *frames = socket.recv_multipart()
            try:
                if kind not in decoders:
                    raise WireError(f"a message of the unknown kind {kind[:16]!r}")
                message = decoders[kind](frames)
                self._inputs.put(message)
                self._note_abort(message)
            except WireError as error:
                self._num_bad_messages += 1
                logger.warning("a message was ignored: %s", error)

    def _connect(self, socket: zmq.Socket[bytes], address: str) -> None:
        keys = self._launch.keys
        if keys is not None:
            socket.setsockopt(zmq.CURVE_SERVERKEY, keys.server)
            socket.setsockopt(zmq.CURVE_PUBLICKEY, keys.public)
            socket.setsockopt(zmq.CURVE_SECRETKEY, keys.secret)
            monitor = socket.get_monitor_socket(zmq.EVENT_HANDSHAKE_SUCCEEDED | zmq.EVENT_DISCONNECTED)
            threading.Thread(target=self._hold_connection, args=(monitor,), name="hold connection", daemon=True).start()
        socket.connect(address)

    def _hold_connection(self, monitor: zmq.Socket[bytes]) -> None:
        """Ends the process when its connection to a client on another host breaks: a new one would be made, but what
        was under way is lost. The client hands the requests to another run."""
        is_made = False
        while True:
            event = recv_monitor_message(monitor)["event"]
            if is_made and event == zmq.EVENT_DISCONNECTED:
                break
            is_made = is_made or event == zmq.EVENT_HANDSHAKE_SUCCEEDED
        logger.error("engine %d ends: its connection to the front end broke", self._launch.index)
        self._has_lost_client = True
        self._inputs.put(Stop())
        time.sleep(SECONDS_TO_END)
        os._exit(1)

    def _note_abort(self, message: Any) -> None:
        """An abort is told to the step under way as well. It keeps its place among the messages, because the request
        that it is about may still be waiting there."""
        if self._core is not None and isinstance(message, (list, dict)):
            self._core.note_abort(message)

    def _send(self, kind: EngineMessageType, message: Any, flags: int = 0) -> None:
        """Sends a message, from any thread. The socket sends in the background; it takes many more messages than the
        loop runs ahead."""
        frames = [self._launch.secret, kind.value, *encode(message)]
        with self._output_lock:
            if self._output_socket is None:
                self._output_socket = self._context.socket(zmq.PUSH)
                self._connect(self._output_socket, self._launch.output_address)
            self._output_socket.send_multipart(frames, flags)

    def _send_outputs(self, outputs: EngineCoreOutputs) -> None:
        outputs.engine_index = self._launch.index
        self._num_outputs_sent += 1
        self._send(EngineMessageType.OUTPUTS, outputs)

    def _tell_blocks(self, events: list[Event]) -> None:
        """Sends the client what happened to blocks, without their tokens: it knows blocks by hashes alone."""
        without_tokens = [
            BlockStored(event.block_hashes, None, [], event.block_size) if isinstance(event, BlockStored) else event
            for event in events
        ]
        self._send(EngineMessageType.BLOCKS_TOLD, BlocksTold(self._num_told, without_tokens))
        self._num_told += 1

    def _beat(self) -> None:
        while True:
            time.sleep(self._launch.heartbeat_interval)
            began, core = self._step_began, self._core
            heartbeat = Heartbeat(
                step_seconds=0.0 if began is None else time.monotonic() - began,
                num_bad_messages=self._num_bad_messages,
                paused=core is not None and core.paused,
                asleep=core is not None and core.asleep,
            )
            with contextlib.suppress(zmq.Again):  # the client has read nothing for long, so no more is sent
                self._send(EngineMessageType.HEARTBEAT, heartbeat, zmq.NOBLOCK)

    def _hold_lifeline(self) -> None:
        heard = b""
        while data := os.read(sys.stdin.fileno(), 4096):
            heard = data
        self._is_orphan = not heard.endswith(LAST_WORD)
        self._remove_sockets()
        self._inputs.put(Stop())
        time.sleep(SECONDS_TO_END)
        self._remove_directory()
        os._exit(1)

    def _remove_sockets(self) -> None:
        """Remove the sockets: a parent that was killed can't, and one that runs does not need them."""
        for address in (self._launch.input_address, self._launch.output_address):
            if address.startswith(IPC):
                Path(address.removeprefix(IPC)).unlink(missing_ok=True)

    def _remove_directory(self) -> None:
        """Remove the directory of a parent that was killed. The system may release its lock with a delay."""
        if not self._launch.input_address.startswith(IPC):
            return
        directory = Path(self._launch.input_address.removeprefix(IPC)).parent
        deadline = time.monotonic() + SECONDS_TO_TIDY_UP
        while self._is_orphan and directory.exists() and time.monotonic() < deadline:
            remove_if_abandoned(directory)
            time.sleep(0.01)


def main() -> int:
    ignore_signals_of_the_group()
    continue_when_parent_dies()
    os.set_inheritable(int(sys.argv[1]), False)
    calm_thread_pools()
    configure_logging()
    process = EngineCoreProcess(read_launch(sys.stdin.buffer, EngineLaunch))
    return process.run()


if __name__ == "__main__":
    sys.exit(main())
