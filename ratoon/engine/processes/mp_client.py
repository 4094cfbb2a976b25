"""The client of an engine core in another process, for a blocking caller: SyncMPClient.

When the process dies it is restarted, and requests continue after the tokens that they already have. One thread adds
requests and takes outputs; aborts and utilities may come from others.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import zmq

from ratoon.core.config import EngineConfig, verify_engine_config
from ratoon.core.errors import EngineAwayError, EngineDeadError
from ratoon.core.faults import error_of
from ratoon.core.health import Health
from ratoon.core.messages import EngineMessageType, ForgottenRoots, UtilityCall, UtilityResult
from ratoon.core.request import EngineCoreOutputs, EngineCoreRequest, EngineCoreRequestType
from ratoon.engine.processes.ledger import Ledger
from ratoon.engine.processes.replica import Replica, verify_message
from ratoon.engine.processes.socket_directory import SocketDirectory
from ratoon.engine.processes.zmq_context import SocketContext
from ratoon.observe.startup import StartupTimer

SECONDS_BETWEEN_LOOKS = 1.0  # at a silent process
SECONDS_TO_END = 5.0
SECONDS_FOR_OTHERS = 0.001  # for another thread to acquire the lock when nothing arrived


class SyncMPClient:
    """One engine process. `get_output` waits for its next step."""

    def __init__(self, config: EngineConfig, timer: StartupTimer) -> None:
        verify_engine_config(config)
        self._context = SocketContext()
        self._directory = SocketDirectory()
        self._replica = Replica(config, 0, 1, self._context, self._directory)
        self._ledger = Ledger()
        self._arrived: deque[EngineCoreOutputs] = deque()  # a few at most: the engine waits until they are taken
        self._results: dict[int, UtilityResult] = {}
        self._num_calls = 0
        self._lock = threading.RLock()  # guards sockets and ledger
        self._is_collecting = False  # requests that are handed over wait for those that come with them
        try:
            with timer.phase("start the engine process"):
                if not self._start_replica():
                    self._replica.on_exit()
                    self._replica.cleanup()
                    raise self._replica.failure()
                assert self._replica.ready is not None
                timer.include(self._replica.ready.startup)
        except BaseException:
            self.shutdown()
            raise

    def add_request(self, request: EngineCoreRequest) -> None:
        verify_message(request)
        with self._lock:
            self._ledger.add(request)
            self._dispatch()

    @contextmanager
    def together(self) -> Iterator[None]:
        self._is_collecting = True
        try:
            yield
        finally:
            with self._lock:
                self._is_collecting = False
                self._dispatch()

    def abort_requests(self, request_ids: list[str]) -> None:
        with self._lock:
            to_send, _ = self._ledger.abort(request_ids)
            for ids in to_send.values():
                self._replica.send(EngineCoreRequestType.ABORT, ids)
            self._dispatch()  # others may have waited for what was aborted

    def stop_requests(self, stopped: dict[str, int | None]) -> None:
        with self._lock:
            to_send, _ = self._ledger.stop(stopped)
            for counts in to_send.values():
                self._replica.send(EngineCoreRequestType.STOP, counts)
            self._dispatch()

    def forget_roots(self, branch_ids: list[str]) -> None:
        with self._lock:
            if self._replica.can_serve:  # one that is started again has no texts
                self._replica.send(EngineCoreRequestType.FORGET_ROOTS, ForgottenRoots(branch_ids))

    def has_work(self) -> bool:
        return bool(self._arrived) or len(self._ledger) > 0

    def get_output(self) -> EngineCoreOutputs:
        while True:
            with self._lock:
                if not self._arrived:
                    self._receive_or_revive()
                if self._arrived:
                    if self._replica.has_process:
                        self._replica.process.acknowledge_outputs()
                    return self._arrived.popleft()
            time.sleep(SECONDS_FOR_OTHERS)

    def work_between_calls(self) -> None:
        """The process does it by itself."""

    def call_utility(self, method: str, *arguments: Any) -> Any:
        with self._lock:
            self._num_calls += 1
            call_id, run = self._num_calls, self._replica.num_restarts
            self._replica.send(EngineCoreRequestType.UTILITY, UtilityCall(call_id, method, list(arguments)))
            while call_id not in self._results:
                self._receive_or_revive()
                if self._replica.num_restarts != run:
                    raise EngineAwayError(f"the engine process died before it answered {method!r}; it was restarted")
            result = self._results.pop(call_id)
        if result.fault is not None:
            raise error_of(result.fault)
        return result.result

    def describe(self) -> dict[str, Any]:
        """Resolved settings and memory figures, for display."""
        assert self._replica.ready is not None
        return self._replica.ready.description

    def health(self) -> Health:
        return Health([self._replica.health()])

    def shutdown(self) -> None:
        self._replica.end(SECONDS_TO_END)
        self._context.term()
        self._directory.remove()

    def _dispatch(self) -> None:
        if self._is_collecting or not self._replica.can_serve:
            return
        ready = self._ledger.ready_to_go()
        for entry in ready:
            self._ledger.handed_over(entry, 0)
        self._replica.send_requests([entry.current_request() for entry in ready])

    def _receive(self) -> bool:
        """Receive the engine's messages; wait briefly for one. False: the process has exited."""
        if not self._replica.has_process:
            return False
        process = self._replica.process
        poller = zmq.Poller()
        poller.register(process.outputs, zmq.POLLIN)
        poller.register(process.death_fd, zmq.POLLIN)
        if self._replica.awaits_connection:
            poller.register(process.inputs, zmq.POLLIN)
        events = dict(poller.poll(int(SECONDS_BETWEEN_LOOKS * 1000)))
        while process.outputs.poll(0):
            self._handle(process.outputs.recv_multipart())
        if self._replica.awaits_connection:
            self._replica.look_for_connection()
        self._replica.end_if_hung()
        return process.death_fd not in events

    def _handle(self, frames: list[bytes]) -> None:
        taken = self._replica.take(frames)
        if taken is None:
            return
        kind, message = taken
        if kind == EngineMessageType.OUTPUTS:
            self._ledger.record(message)
            self._arrived.append(message)
            self._dispatch()  # a suspect may have been cleared
        elif kind == EngineMessageType.UTILITY_RESULT:
            self._results[message.call_id] = message

    def _receive_or_revive(self) -> None:
        if self._receive():
            return
        self._replica.on_exit()
        delay = self._replica.cleanup()
        failed = self._ledger.engine_died(0)
        if failed:
            self._arrived.append(EngineCoreOutputs(failed))
        if delay is None:
            raise EngineDeadError(f"the engine could not be restarted: {self._replica.failure()}")
        time.sleep(delay)
        if self._start_replica():
            self._dispatch()

    def _start_replica(self) -> bool:
        """Start the process and wait until it is ready. False: it has exited again."""
        if not self._replica.start():
            return False
        while not self._replica.can_serve:
            if not self._receive():
                return False
        return True
