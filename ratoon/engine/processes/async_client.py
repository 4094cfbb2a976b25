"""Clients of engine cores in other processes, for an event loop: one engine (AsyncMPClient), several that the caller
chooses from (DPAsyncMPClient), several that are balanced (DPLBAsyncMPClient).

An engine that dies is started again. Its requests continue after the tokens that they already have: immediately in
another engine if there is one, otherwise after the restart.
"""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any, Protocol

import zmq

from ratoon.core.config import EngineConfig, verify_engine_config
from ratoon.core.errors import ConfigError, EngineAwayError, EngineDeadError, RequestError
from ratoon.core.faults import error_of
from ratoon.core.health import Health
from ratoon.core.messages import (
    BlocksTold,
    DPWave,
    EngineMessageType,
    EngineReady,
    ForgottenRoots,
    UtilityCall,
    UtilityResult,
)
from ratoon.core.request import EngineCoreOutput, EngineCoreOutputs, EngineCoreRequest, EngineCoreRequestType
from ratoon.engine.processes.balancer import LoadBalancer
from ratoon.engine.processes.coordinator import DPCoordinator
from ratoon.engine.processes.kv_index import KVIndex
from ratoon.engine.processes.launch import EngineProcess, EngineRun
from ratoon.engine.processes.ledger import Entry, Ledger
from ratoon.engine.processes.replica import Replica, verify_message
from ratoon.engine.processes.socket_directory import SocketDirectory
from ratoon.engine.processes.zmq_context import SocketContext
from ratoon.observe.logging import get_logger
from ratoon.observe.startup import StartupTimer

logger = get_logger(__name__)

SECONDS_BETWEEN_LOOKS = 1.0
SECONDS_BETWEEN_LOOKS_AT_THE_LAST = 0.05  # requests of an engine that leaves
SECONDS_BETWEEN_GREETINGS = 0.02  # polls of the socket of an engine that is ready and has not connected
SECONDS_TO_END = 5.0
MESSAGES_AT_ONCE = 256  # then other tasks run


class Elsewhere(Protocol):
    """Runs engines on other hosts."""

    def connect(self) -> None:
        """May take seconds, and is called before anything else."""
        ...

    def run_engine(self, run: EngineRun) -> EngineProcess:
        """Begins a run of an engine."""
        ...

    def close(self) -> None:
        """Is called when all engines have ended."""
        ...


class AsyncMPClient:
    """The engine, or engines, of one front end. All methods belong to one event loop."""

    def __init__(
        self,
        config: EngineConfig,
        timer: StartupTimer,
        num_engines: int = 1,
        elsewhere: Elsewhere | None = None,  # None: engines are processes of this host
    ) -> None:
        verify_engine_config(config)
        self._timer = timer
        self._context = SocketContext()
        self._directory = SocketDirectory()
        self._config = config
        self._elsewhere = elsewhere
        self.replicas = [self._make_replica(index, num_engines) for index in range(num_engines)]
        self.coordinator = DPCoordinator(num_engines, config.data_parallel_lockstep)
        self._ledger = Ledger()
        # With the process that sent them: it waits until they are taken. None: there will be no more.
        self._outputs: asyncio.Queue[tuple[EngineCoreOutputs, EngineProcess | None] | None] = asyncio.Queue()
        self._calls: dict[int, tuple[Replica, asyncio.Future[UtilityResult]]] = {}
        self._num_calls = 0
        self._tasks: list[asyncio.Task[None]] = []
        self._closed = False
        self._paused = False  # requested states of the engines; repeated to an engine that is restarted
        self._dead: EngineDeadError | None = None
        self._dispatch_is_due = False
        self._is_collecting = False  # requests wait for those that come with them
        self.state_changed: Callable[[], None] = lambda: None  # is called when an engine can serve, or no longer can

    def _make_replica(self, index: int, num_engines: int) -> Replica:
        run_engine = EngineProcess if self._elsewhere is None else self._elsewhere.run_engine
        replica = Replica(self._config, index, num_engines, self._context, self._directory, run_engine=run_engine)
        replica.state_changed = lambda: self.state_changed()
        return replica

    # ---- life ----

    async def start(self) -> None:
        """Start the engine processes and wait until all are ready. Raises the error of one that failed."""
        if self._elsewhere is not None:
            await asyncio.to_thread(self._elsewhere.connect)
        with self._timer.phase("start the engine processes"):
            first_starts = []
            for replica in self.replicas:
                started: asyncio.Future[None] = asyncio.get_running_loop().create_future()
                first_starts.append(started)
                self._tasks.append(asyncio.create_task(self._keep_alive(replica, started)))
            try:
                await asyncio.gather(*first_starts)
            except BaseException:
                await self.shutdown()
                raise
            self._timer.include(self.ready.startup)
        self._tasks.append(asyncio.create_task(self._watch()))

    @property
    def ready(self) -> EngineReady:
        ready = self.replicas[0].ready
        assert ready is not None, "the engine was not started"
        return ready

    async def shutdown(self) -> None:
        if self._closed:
            return
        self._closed = True
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        self._give_up(EngineDeadError("the engine was shut down"))
        await asyncio.gather(*(asyncio.to_thread(replica.end, SECONDS_TO_END) for replica in self.replicas))
        if self._elsewhere is not None:
            await asyncio.to_thread(self._elsewhere.close)
        self._context.term()
        self._directory.remove()

    async def add_replica(self) -> int:
        """Starts another engine and waits until it is ready. Returns its index. Raises why it did not start."""
        problem = "the requests of this service are not divided among engines"
        raise RequestError("replicas", problem, "start it with --replicas 2 or more, or with --ray")

    async def drain_replica(self, index: int, seconds: float = math.inf) -> None:
        """Gives this engine no further request, waits until it has none left, at most so long, and ends it. What it has
        left then is continued by the others."""
        replica = self.replicas[index] if 0 <= index < len(self.replicas) else None
        if replica is None or not replica.has_process or replica.is_leaving:
            there = [one.index for one in self.replicas if one.has_process and not one.is_leaving]
            raise RequestError("replica", f"there is no engine {index} that runs", f"one of {there}")
        if not any(other.can_serve for other in self.replicas if other is not replica):
            raise RequestError("replica", f"no other engine than {index} can take requests", "add one first")
        self._verify_independent()
        replica.begin_to_leave()
        deadline = time.monotonic() + seconds
        while self._ledger.num_in(index) and time.monotonic() < deadline:
            await asyncio.sleep(SECONDS_BETWEEN_LOOKS_AT_THE_LAST)
        deadline = time.monotonic() + SECONDS_TO_END
        while replica.has_process:
            replica.process.ask_to_end()
            if time.monotonic() > deadline:
                replica.process.kill()
            await asyncio.sleep(SECONDS_BETWEEN_LOOKS_AT_THE_LAST)

    def _verify_independent(self) -> None:
        if self.coordinator.lockstep:
            raise RequestError(
                "replicas", "engines that step together are as many as they were at the start", "a restart"
            )

    def health(self) -> Health:
        figures = self.coordinator.figures
        return Health(
            [
                replace(replica.health(), num_running=queue.num_running, num_waiting=queue.num_waiting)
                for replica, queue in zip(self.replicas, figures)
            ]
        )

    # ---- requests ----

    def add_request(self, request: EngineCoreRequest) -> None:
        """Adds a request, and never waits. A request that arrives while no engine is ready is sent when one is.
        Requests of one turn of the event loop are sent together."""
        if self._dead is not None:
            raise self._dead
        self._verify(request)
        verify_message(request)
        self._ledger.add(request)
        if not self._dispatch_is_due:
            self._dispatch_is_due = True
            asyncio.get_running_loop().call_soon(self._dispatch)

    def collect(self) -> None:
        """Requests that are added wait until `send_collected`."""
        self._is_collecting = True

    def send_collected(self) -> None:
        self._is_collecting = False
        self._dispatch()

    @property
    def has_work(self) -> bool:
        """Whether there are requests, or outputs that were not taken."""
        return len(self._ledger) > 0 or not self._outputs.empty()

    def abort_requests(self, request_ids: list[str]) -> None:
        self._take_back(EngineCoreRequestType.ABORT, *self._ledger.abort(request_ids))

    def stop_requests(self, stopped: dict[str, int | None]) -> None:
        self._take_back(EngineCoreRequestType.STOP, *self._ledger.stop(stopped))

    def forget_roots(self, branch_ids: list[str]) -> None:
        for replica in self.replicas:
            if replica.can_serve:  # one that is started again has no texts
                replica.send(EngineCoreRequestType.FORGET_ROOTS, ForgottenRoots(branch_ids))

    def _take_back(self, kind: EngineCoreRequestType, to_send: Mapping[int, Any], ended: list[Entry]) -> None:
        for engine, message in to_send.items():
            self.replicas[engine].send(kind, message)
        for entry in ended:
            self._entry_ended(entry)
        self._dispatch()

    async def get_outputs(self) -> list[EngineCoreOutputs]:
        item = await self._outputs.get()
        steps: list[EngineCoreOutputs] = []
        while item is not None:
            outputs, process = item
            steps.append(outputs)
            if process is not None:
                process.acknowledge_outputs()
            if self._outputs.empty():
                return steps
            item = self._outputs.get_nowait()
        self._outputs.put_nowait(None)  # for the next call
        if steps:
            return steps
        assert self._dead is not None
        raise self._dead

    async def call_utility(self, method: str, *arguments: Any) -> list[Any]:
        """Call a utility on every running engine; their results, in the engines' order."""
        if self._dead is not None:
            raise self._dead
        futures = []
        for replica in self.replicas:
            if not replica.can_serve:
                continue
            self._num_calls += 1
            future: asyncio.Future[UtilityResult] = asyncio.get_running_loop().create_future()
            self._calls[self._num_calls] = replica, future
            futures.append(future)
            call = UtilityCall(self._num_calls, method, list(arguments))
            replica.send(EngineCoreRequestType.UTILITY, call)
        if not futures:
            raise EngineAwayError("no engine is ready; it is being restarted")
        if method in ("pause", "resume"):
            self._paused = method == "pause"
        results = await asyncio.gather(*futures)
        for result in results:
            if result.fault is not None:
                raise error_of(result.fault)
        return [result.result for result in results]

    # ---- choice of the engine, which differs between the clients ----

    def _verify(self, request: EngineCoreRequest) -> None:
        rank = request.data_parallel_rank
        if rank is not None and not 0 <= rank < len(self.replicas):
            raise RequestError(
                "data_parallel_rank", f"there is no engine {rank}", f"0 to {len(self.replicas) - 1}, or leave it out"
            )

    def _choose(self, entry: Entry, candidates: Sequence[int]) -> int | None:
        """The engine for a request. None: it is not to be sent yet."""
        return candidates[0]

    def _request_for(self, entry: Entry) -> EngineCoreRequest:
        """The request as its engine gets it."""
        return entry.current_request()

    def _cannot_go_on(self) -> bool:
        """Whether no engine is left that could serve, now or later."""
        return not any(replica.can_serve or replica.is_coming_back for replica in self.replicas)

    def _note_started(self, outputs: EngineCoreOutputs) -> None:
        """Requests have their first token, or further ones."""

    def _note_blocks(self, replica: Replica, told: BlocksTold) -> None:
        """Is called when an engine has told what happened to its blocks."""

    def _request_ended(self, request_id: str) -> None: ...

    def _entry_ended(self, entry: Entry) -> None:
        self._request_ended(entry.request.request_id)

    def _engine_lost(self, engine: int) -> None:
        """Is called when an engine was lost, and its cache with it."""

    # ---- engines ----

    def _dispatch(self) -> None:
        """Send waiting requests for which an engine is ready."""
        self._dispatch_is_due = False
        if self._is_collecting:
            return
        waiting = self._ledger.ready_to_go()
        if not waiting:  # as after most messages; with many engines, looking at each would take longer than the message
            return
        candidates = [replica.index for replica in self.replicas if replica.can_serve]
        if not candidates or (self.coordinator.lockstep and len(candidates) < len(self.replicas)):
            return  # engines that step together can't without one of them
        chosen: dict[int, list[EngineCoreRequest]] = {}
        for entry in waiting:
            wanted = entry.request.data_parallel_rank
            if wanted is not None and wanted not in candidates:
                continue  # it waits for the engine that it named
            preferred = entry.request.preferred_rank
            if wanted is None and preferred in candidates:
                wanted = preferred
            engine = self._choose(entry, candidates if wanted is None else [wanted])
            if engine is None:
                continue
            self._ledger.handed_over(entry, engine)
            chosen.setdefault(engine, []).append(self._request_for(entry))
        for engine, requests in chosen.items():
            self.replicas[engine].send_requests(requests)
            self._start_wave(self.coordinator.request_sent())

    def _start_wave(self, wave: DPWave | None) -> None:
        """Start a round of a wave on all engines; None: there is none to start."""
        if wave is not None:
            for replica in self.replicas:
                replica.send(EngineCoreRequestType.START_DP_WAVE, wave)

    async def _keep_alive(self, replica: Replica, started: asyncio.Future[None]) -> None:
        """Run an engine across restarts. A first start that fails is an error for the caller; later ones are
        tried again."""
        while True:
            if replica.start():
                await self._run(replica, started)
            replica.on_exit()
            delay = await asyncio.to_thread(replica.cleanup)
            if not started.done():
                replica.give_up()
                started.set_exception(replica.failure())
                return
            self._handle_death(replica)
            if replica.is_leaving:
                return
            if delay is None:
                if self._cannot_go_on():
                    self._give_up(EngineDeadError(f"the engine could not be restarted: {replica.failure()}"))
                return
            await asyncio.sleep(delay)

    async def _run(self, replica: Replica, started: asyncio.Future[None]) -> None:
        """Receive the engine's messages until its process has exited."""
        process, loop = replica.process, asyncio.get_running_loop()
        gone: asyncio.Future[None] = loop.create_future()
        loop.add_reader(process.death_fd, _settle, gone)
        # This descriptor is edge-triggered: all messages must be read before it signals again.
        loop.add_reader(process.outputs.getsockopt(zmq.FD), self._take_all, replica, started)
        try:
            self._take_all(replica, started)
            await gone
        finally:
            loop.remove_reader(process.death_fd)
            loop.remove_reader(process.outputs.getsockopt(zmq.FD))
        while process.outputs.poll(0):  # messages that it sent before it died
            self._handle(replica, process.outputs.recv_multipart(), started)

    def _take_all(self, replica: Replica, started: asyncio.Future[None]) -> None:
        """Take all pending messages, a limited number in a turn of the loop."""
        if not replica.is_being_read:
            self._take_messages(replica, started)

    def _take_messages(self, replica: Replica, started: asyncio.Future[None]) -> None:
        replica.is_being_read = False
        if not replica.has_process or replica.process.closed:
            return  # it ended since this was called for
        process = replica.process
        for _ in range(MESSAGES_AT_ONCE):
            try:
                frames = process.outputs.recv_multipart(zmq.NOBLOCK)
            except zmq.Again:
                return
            try:
                self._handle(replica, frames, started)
            except Exception:
                logger.exception("engine %d: a message can't be processed", replica.index)
                process.kill()
                return
        replica.is_being_read = True
        asyncio.get_running_loop().call_soon(self._take_messages, replica, started)

    def _handle(self, replica: Replica, frames: list[bytes], started: asyncio.Future[None]) -> None:
        taken = replica.take(frames)
        if taken is None:
            return
        kind, message = taken
        if kind == EngineMessageType.OUTPUTS:
            self._record(message)
            self._outputs.put_nowait((message, replica.process))
        elif kind == EngineMessageType.UTILITY_RESULT:
            _, future = self._calls.pop(message.call_id, (None, None))
            if future is not None and not future.done():
                future.set_result(message)
        elif kind == EngineMessageType.BLOCKS_TOLD:
            self._note_blocks(replica, message)
        elif kind == EngineMessageType.DP_WAVE_REPORT:
            self._start_wave(self.coordinator.reported(replica.index, message))
        elif kind == EngineMessageType.READY:
            self._begin_to_serve(replica, replica.process, started)

    def _begin_to_serve(self, replica: Replica, process: EngineProcess, started: asyncio.Future[None]) -> None:
        """The engine is ready. If it can't be reached yet, it is polled without blocking other tasks."""
        if not replica.has_process or replica.process is not process or process.closed:
            return  # it has ended
        replica.look_for_connection()
        if not replica.can_serve:
            loop = asyncio.get_running_loop()
            loop.call_later(SECONDS_BETWEEN_GREETINGS, self._begin_to_serve, replica, process, started)
            return
        _settle(started)
        if self._paused:
            replica.send(EngineCoreRequestType.UTILITY, UtilityCall(0, "pause"))  # its answer is not waited for
        self._dispatch()

    def _record(self, outputs: EngineCoreOutputs) -> None:
        self.coordinator.note_outputs(outputs)
        self._note_started(outputs)
        for entry in self._ledger.record(outputs):
            self._entry_ended(entry)
        self._dispatch()  # a suspect may have been cleared

    def _handle_death(self, replica: Replica) -> None:
        for call_id, (asked, future) in list(self._calls.items()):
            if asked is replica:
                del self._calls[call_id]
                if not future.done():
                    future.set_exception(EngineAwayError("the engine process died before it answered"))
        self.coordinator.engine_lost(replica.index)
        self._engine_lost(replica.index)
        failed: list[EngineCoreOutput] = []
        if replica.is_leaving:
            self._ledger.engine_left(replica.index)
        else:
            failed = self._ledger.engine_died(replica.index)
        if failed:
            for output in failed:
                self._request_ended(output.request_id)
            self._outputs.put_nowait((EngineCoreOutputs(failed, engine_index=replica.index), None))
        self._dispatch()

    async def _watch(self) -> None:
        while True:
            await asyncio.sleep(SECONDS_BETWEEN_LOOKS)
            for replica in self.replicas:
                replica.end_if_hung()
            self._look_at_engines()

    def _look_at_engines(self) -> None:
        """Is called every second."""

    def _give_up(self, error: EngineDeadError) -> None:
        if self._dead is not None:
            return
        self._dead = error
        self._ledger.fail_all(str(error))
        for _, future in self._calls.values():
            if not future.done():
                future.set_exception(error)
        self._calls.clear()
        self._outputs.put_nowait(None)


class DPAsyncMPClient(AsyncMPClient):
    """Several engines. The caller names one (`data_parallel_rank`), or they take turns."""

    _next = 0

    def _choose(self, entry: Entry, candidates: Sequence[int]) -> int:
        self._next += 1
        return candidates[self._next % len(candidates)]


class DPLBAsyncMPClient(AsyncMPClient):
    """Several engines. A request is sent to the engine with the least work for it: short queues, and cached
    prefixes."""

    _index: KVIndex | None = None  # None: engines tell nothing of their blocks

    async def start(self) -> None:
        cache = self._config.cache
        self._index = KVIndex() if cache.tells_client else None
        await super().start()
        ready = self.ready
        self.balancer = LoadBalancer(
            len(self.replicas), ready.block_size, self._index, cache.host_bytes > 0, ready.whole_images
        )

    async def add_replica(self) -> int:
        if self._dead is not None:
            raise self._dead
        self._verify_independent()
        index = self.balancer.add_engine()
        self.coordinator.add_engine()
        replica = self._make_replica(index, index + 1)
        self.replicas.append(replica)
        started: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._tasks.append(asyncio.create_task(self._keep_alive(replica, started)))
        await asyncio.shield(started)  # a caller that no longer waits does not end it
        return index

    def _choose(self, entry: Entry, candidates: Sequence[int]) -> int | None:
        self.balancer.ended(entry.request.request_id)  # where it was before
        return self.balancer.choose(entry.request, candidates)

    def _note_started(self, outputs: EngineCoreOutputs) -> None:
        for output in outputs.outputs:
            if output.new_token_ids:
                self.balancer.started(output.request_id)

    def _note_blocks(self, replica: Replica, told: BlocksTold) -> None:
        if self._index is not None and not self._index.take(replica.index, told):
            logger.warning("engine %d: a message about its blocks was lost; it tells of all of them", replica.index)
            replica.send(EngineCoreRequestType.UTILITY, UtilityCall(0, "tell_blocks"))  # its answer is not waited for

    def _request_ended(self, request_id: str) -> None:
        self.balancer.ended(request_id)

    def _entry_ended(self, entry: Entry) -> None:
        if entry.engine is not None:  # the next turn of a conversation begins with this answer
            answered = entry.request.prompt_token_ids + entry.choices[0].token_ids
            self.balancer.learn(entry.engine, entry.request, answered)
        super()._entry_ended(entry)

    def _engine_lost(self, engine: int) -> None:
        self.balancer.forget(engine)


def _settle(future: asyncio.Future[None]) -> None:
    if not future.done():
        future.set_result(None)


def make_async_client(
    config: EngineConfig, num_replicas: int, timer: StartupTimer, balanced: bool = True, on_ray: bool = False
) -> AsyncMPClient:
    if on_ray:
        if config.data_parallel_lockstep:
            problem = "engines that step together (data_parallel_lockstep) are processes of one host"
            raise ConfigError("ray", problem, "one of the two")
        from ratoon.engine.processes.ray_engines import RayEngines

        return DPLBAsyncMPClient(config, timer, num_replicas, RayEngines(config, num_replicas))
    if num_replicas == 1:
        return AsyncMPClient(config, timer)
    kind = DPLBAsyncMPClient if balanced else DPAsyncMPClient
    return kind(config, timer, num_replicas)
