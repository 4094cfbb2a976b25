"""A server with several front ends: the process that owns the engines and all state, and starts the rest.

Front ends (front_end_process.py) accept connections from one socket. Each has a link to this process, where the
engines' client, roots (engine/processes/hub.py), the queue, names, stored responses and the sum of metrics are. A front
end that dies loses its connections and what they wait for, and is started again; what it generated in the background
goes on in another one. When this process ends, however it ends, front ends and engines end.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
import time
from collections import Counter, OrderedDict
from collections.abc import Callable
from contextlib import suppress
from subprocess import Popen, TimeoutExpired
from typing import Any

from ratoon.api.server.connections import release
from ratoon.api.server.response_directory import OwnResponses
from ratoon.api.server.response_items import StoredItems
from ratoon.api.server.response_log import ResponseLog
from ratoon.api.server.response_store import CANCELLED, FAILED, EventLog, ResponseStore, StoredResponse
from ratoon.api.server.runner import EXIT_DONE, EXIT_ENGINE, WATCH_INTERVAL, listening_to_signals, loop_factory
from ratoon.api.server.service_calls import (
    FRONT_END,
    SERVICE,
    Conversation,
    EndedResponse,
    FrontEndLaunch,
    NamedConversation,
    ResponseProgress,
    ResponseRecord,
    conversation_up_to,
    named_conversation,
    note_progress,
    progress_of,
    record_of,
    stored,
    stored_conversation,
)
from ratoon.api.server.settings import ServerSettings
from ratoon.api.server.state import Queue, RequestNames, num_names
from ratoon.api.server.stored_turns import StoredConversation, Turn
from ratoon.core.adapters import Adapter
from ratoon.core.errors import EngineError, RatoonError, UnknownParentError
from ratoon.core.faults import error_of
from ratoon.core.health import EngineState
from ratoon.core.messages import Fault
from ratoon.core.processes import start_process
from ratoon.core.request import EngineCoreOutputs
from ratoon.core.settings import configure
from ratoon.engine.adapters import AdapterRegistry
from ratoon.engine.output.record_log import open_record_log
from ratoon.engine.output.roots import RootLog
from ratoon.engine.processes.hub import EngineHub
from ratoon.engine.processes.link import Link
from ratoon.engine.processes.moving_client import client_of_settings
from ratoon.observe.logging import get_logger
from ratoon.observe.metrics import EngineMetrics, MetricsFigures
from ratoon.observe.startup import StartupTimer
from ratoon.observe.throughput import INTERVAL, ThroughputLog

logger = get_logger(__name__)

MODULE = "ratoon.api.server.front_end_process"
MAX_FAILED_STARTS = 5  # of a front end, in a row; then it is given up
SECONDS_TO_LEAVE = 10.0  # for a front end beyond the time that its requests have
SECONDS_TO_APPEAR = 1.0  # for a response behind the first output of its request
SECONDS_TO_TELL = 5.0  # front ends of adapters
SECONDS_FOR_METRICS = 1.0  # then the last report of a front end counts
MAX_RECENT_TURNS = 1024  # of conversations that a front end may be about to continue


class FrontEndSlot:
    """A front end across restarts."""

    def __init__(self, index: int) -> None:
        self.index = index
        self.process: Popen[bytes] | None = None
        self.link: Link | None = None
        self.started = asyncio.Event()
        self.failure: RatoonError | None = None  # why it did not start
        self.num_starts = 0
        self.num_failed_starts = 0
        self.is_given_up = False
        self.places: Counter[str | None] = Counter()  # in the queue, by owner
        self.figures: MetricsFigures | None = None  # its last report

    @property
    def serves(self) -> bool:
        return self.link is not None and self.link.is_open and self.started.is_set()


class RemoteRunner:
    """The front end that generates a response, as the store knows it."""

    def __init__(self, front_end: FrontEndSlot) -> None:
        self.front_end = front_end

    async def answer(self, response: StoredResponse) -> list[bytes]:
        if self.front_end.link is None:
            raise EngineError("the front end has ended")
        parts: list[bytes] = await self.front_end.link.call("answer_of_run", response.id, response.owner)
        return parts

    def cancel(self, response: StoredResponse) -> None:
        if self.front_end.link is not None:
            self.front_end.link.tell("cancel_run", response.id, response.owner, response.error)


class ServiceResponses(OwnResponses):
    """The responses of all front ends. One whose request runs is about to be added: it is waited for."""

    hub: EngineHub

    async def find(self, response_id: str, owner: str | None) -> StoredResponse | None:
        until = time.monotonic() + SECONDS_TO_APPEAR
        while (found := self.store.find(response_id, owner)) is None and self.hub.is_running(owner, response_id):
            if time.monotonic() > until:
                break  # it is not stored
            await asyncio.sleep(0.001)
        return found


class Service:
    def __init__(
        self, model: str, llm_settings: dict[str, Any], settings: ServerSettings, bound: socket.socket
    ) -> None:
        self._model = model
        self._settings = settings
        self._bound = bound
        own, self._config = configure(model, llm_settings)
        self._llm_settings = self._settings_of_front_end(llm_settings, own.max_total_hidden_states_bytes)
        self.startup_timer = StartupTimer()
        self._client = client_of_settings(self._config, own, self.startup_timer)
        records = open_record_log(self._config, "roots")
        self._hub = EngineHub(
            self._client,
            self._config.max_roots,
            self._kill,
            self._survives,
            self._config.speculation.keeps_texts,
            None if records is None else RootLog(records),
        )
        self._hub.observe = self._observe
        self._queue = Queue(settings.max_queue)
        self._adapters = AdapterRegistry(self._config.adapters, _inspected_elsewhere)
        self._have_joined = False  # a front end, with the adapters of the settings
        most = num_names(self._config.max_roots, settings.max_queue)
        self._names = RequestNames(most, open_record_log(self._config, "names"))
        records = open_record_log(self._config, "responses")
        log = None if records is None else ResponseLog(records)
        store = ResponseStore(settings.max_responses, settings.max_response_bytes, log)
        self._responses = ServiceResponses(store, self._forget_root)
        self._responses.hub = self._hub
        self._recent_turns: OrderedDict[tuple[str | None, str], Turn | None] = OrderedDict()
        self._orphans: dict[tuple[str | None, str], StoredResponse] = {}  # that wait for a front end
        self._metrics = EngineMetrics(model)  # of engines, and of front ends that are gone
        self._throughput = None if own.disable_log_stats else ThroughputLog()
        self._front_ends = [FrontEndSlot(index) for index in range(settings.num_api_servers)]
        self._tasks: list[asyncio.Task[Any]] = []
        self._engines_have_started = False
        self._is_draining = False
        self._signals: list[int] = []
        self._signalled = asyncio.Event()
        self._signalled_again = asyncio.Event()
        self.model_name = model

    def _settings_of_front_end(self, given: dict[str, Any], total: int | None) -> dict[str, Any]:
        """A front end has its part of the hidden states that are held, and room for one request's at least."""
        left = {**given, "disable_log_stats": True}
        if total is not None:
            part = max(total // self._settings.num_api_servers, self._config.max_hidden_states_bytes)
            left["max_total_hidden_states_bytes"] = part
        return left

    # ---- life ----

    async def run(self, on_ready: Callable[[], None], on_drain: Callable[[int], None]) -> int:
        """Serves until the end; returns the exit code. Errors at the start are raised."""
        with listening_to_signals(self._note_signal):
            signalled = asyncio.create_task(self._signalled.wait())
            try:
                self._bound.listen(2048)  # connections wait here until the first front end accepts them
                starting = asyncio.create_task(self._start())
                await asyncio.wait((starting, signalled), return_when=asyncio.FIRST_COMPLETED)
                if not starting.done():
                    starting.cancel()
                    await asyncio.gather(starting, return_exceptions=True)
                    return 128 + self._signals[0]
                starting.result()
                on_ready()
                watching = asyncio.create_task(self._until_lost())
                self._tasks.append(watching)
                await asyncio.wait((watching, signalled), return_when=asyncio.FIRST_COMPLETED)
                if self._signalled.is_set():
                    return await self._drain(on_drain)
                logger.error(watching.result())
                await self._drain(lambda num_prompts: None)
                return EXIT_ENGINE
            finally:
                signalled.cancel()
                await self._end()

    def _note_signal(self, number: int) -> None:
        self._signals.append(number)
        (self._signalled_again if self._signalled.is_set() else self._signalled).set()

    async def _start(self) -> None:
        for front_end in self._front_ends:
            self._tasks.append(asyncio.create_task(self._keep(front_end)))
        await self._client.start()
        self.startup_timer.finish()
        self._engines_have_started = True
        self._hub.start()
        await self._hub.restore_leases()
        if self._throughput is not None:
            self._tasks.append(asyncio.create_task(self._write_throughput(self._throughput)))
        for front_end in self._front_ends:
            if front_end.link is not None:
                self._hub.add_reader(front_end.index, front_end.link)
        for front_end in self._front_ends:
            await front_end.started.wait()
            if front_end.is_given_up:
                raise front_end.failure or EngineError(f"front end {front_end.index} did not start")

    async def _until_lost(self) -> str:
        """Returns why there is nothing left to serve with."""
        while True:
            if all(front_end.is_given_up for front_end in self._front_ends):
                return "no front end is left, and none can be started"
            health = self._client.health()
            if health.state == EngineState.DEAD:
                details = "; ".join(f"engine {engine.index}: {engine.detail}" for engine in health.engines)
                return f"no engine is left, and none can be started: {details}"
            await asyncio.sleep(WATCH_INTERVAL)

    async def _drain(self, on_drain: Callable[[int], None]) -> int:
        """Front ends refuse new requests, wait for those that run, abort the rest, and end."""
        self._is_draining = True
        seconds = self._settings.drain_seconds
        on_drain(self._queue.limit.total)
        logger.info("shutting down; %d prompts have %g seconds", self._queue.limit.total, seconds)
        for front_end in self._front_ends:
            if front_end.link is not None:
                front_end.link.tell("drain")
        leaving = asyncio.gather(*(self._left(front_end) for front_end in self._front_ends))
        again = asyncio.create_task(self._signalled_again.wait())
        try:
            await asyncio.wait(
                (leaving, again), timeout=seconds + SECONDS_TO_LEAVE, return_when=asyncio.FIRST_COMPLETED
            )
        finally:
            leaving.cancel()
            again.cancel()
        return 128 + self._signals[-1] if self._signalled_again.is_set() else EXIT_DONE

    @staticmethod
    async def _left(front_end: FrontEndSlot) -> None:
        if front_end.link is not None:
            await asyncio.shield(front_end.link.lost)

    async def _end(self) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        for front_end in self._front_ends:
            await asyncio.to_thread(_end_process, front_end.process)
        await self._hub.stop()
        await self._client.shutdown()
        release(self._bound, self._settings)

    # ---- front ends ----

    async def _keep(self, front_end: FrontEndSlot) -> None:
        """Run a front end across restarts."""
        while not self._is_draining:
            front_end.started.clear()
            front_end.num_starts += 1
            try:
                await self._launch(front_end)
                assert front_end.link is not None
                await asyncio.shield(front_end.link.lost)
            except OSError as error:
                front_end.failure = EngineError(f"the process of front end {front_end.index} can't be made: {error}")
            was_serving = front_end.started.is_set()
            code = await asyncio.to_thread(_end_process, front_end.process)
            self._lose(front_end)
            if self._is_draining:
                return
            front_end.num_failed_starts = 0 if was_serving else front_end.num_failed_starts + 1
            is_first = front_end.num_starts == 1 and not was_serving
            if not is_first:
                logger.error("front end %d: its process ended with code %s", front_end.index, code)
            if is_first or front_end.num_failed_starts >= MAX_FAILED_STARTS:
                front_end.is_given_up = True
                front_end.started.set()
                return
            await asyncio.sleep(0.0 if was_serving else 0.1 * 4**front_end.num_failed_starts)

    async def _launch(self, front_end: FrontEndSlot) -> None:
        ours, theirs = socket.socketpair()
        try:
            launch = FrontEndLaunch(
                model=self._model,
                llm_settings=self._llm_settings,
                settings=self._settings.of_front_end(),
                index=front_end.index,
                service_pid=os.getpid(),
            )
            descriptors = [theirs.fileno(), self._bound.fileno()]
            front_end.process = await asyncio.to_thread(
                start_process, MODULE, [str(number) for number in descriptors], descriptors, launch
            )
        except BaseException:
            ours.close()
            raise
        finally:
            theirs.close()
        front_end.link = await Link.open(ours, SERVICE, FRONT_END, self._handlers(front_end))
        if self._engines_have_started:  # else when they have
            self._hub.add_reader(front_end.index, front_end.link)

    def _kill(self, index: int) -> None:
        process = self._front_ends[index].process
        if process is not None:
            process.kill()

    def _lose(self, front_end: FrontEndSlot) -> None:
        """A front end is gone: take back what it held, and pass on what goes on without it."""
        front_end.link = front_end.process = None
        for owner, count in front_end.places.items():
            if count:
                self._queue.give_back(owner, count)
        front_end.places.clear()
        if front_end.figures is not None:
            self._metrics.add(front_end.figures)
            front_end.figures = None
        lost = [one for one in self._responses.store if _runs_in(one, front_end)]
        self._hub.remove_reader(front_end.index)
        for response in lost:
            if self._survives(response.owner, response.id):
                self._orphans[response.owner, response.id] = response
            else:
                self._end_response(response, CANCELLED)
        self._place_orphans()

    def _survives(self, owner: str | None, response_id: str) -> bool:
        """Whether this is a response in the background that another front end can go on with."""
        found = self._responses.store.find(response_id, owner)
        return not self._is_draining and found is not None and found.is_running and bool(found.body)

    def _place_orphans(self) -> None:
        serving = [front_end for front_end in self._front_ends if front_end.serves]
        for number, (key, response) in enumerate(list(self._orphans.items())):
            if serving:
                del self._orphans[key]
                task = asyncio.create_task(self._pass_on(response, serving[number % len(serving)]))
                self._tasks.append(task)
                task.add_done_callback(self._tasks.remove)

    async def _pass_on(self, response: StoredResponse, front_end: FrontEndSlot) -> None:
        assert front_end.link is not None
        response.runner = RemoteRunner(front_end)
        begun = self._hub.held_request(response.owner, response.id)
        link = front_end.link
        try:
            await link.call("go_on_with_response", record_of(response, response.log is not None), begun)
        except RatoonError as error:
            if link.is_open:  # else the response is lost again, with this front end
                response.error = {"code": "server_error", "message": f"the response can't be resumed: {error}"}
                self._hub.drop_held(response.owner, response.id)
                self._end_response(response, FAILED)

    def _end_response(self, response: StoredResponse, status: str) -> None:
        response.status, response.runner, response.body = status, None, b""
        if response.is_background and response.error is None:
            status = response.status = FAILED
            message = "the process that generated the response has died"
            response.error = {"code": "server_error", "message": message}
        if response.log is not None:
            response.log.end()
        self._responses.settle(response)
        response.ended.set()

    # ---- calls of front ends ----

    def _handlers(self, front_end: FrontEndSlot) -> dict[str, Callable[..., Any]]:
        responses = self._responses
        return self._hub.handlers(front_end.index) | {
            "started": lambda name: self._note_started(front_end, name),
            "start_failed": lambda fault: self._note_failure(front_end, fault),
            "take_places": lambda owner, count: self._take_places(front_end, owner, count),
            "give_places_back": lambda owner, count: self._give_places_back(front_end, owner, count),
            "num_unfinished": lambda: self._queue.limit.total,
            "note_name": self._names.note,
            "resolve": lambda name, owner: name if self._hub.knows(owner, name) else self._names.find(owner, name),
            "note_metrics": lambda figures: setattr(front_end, "figures", figures),
            "collect_metrics": self._collect_metrics,
            "add_response": lambda record, progress: self._add_response(front_end, record, progress),
            "settle_response": self._settle_response,
            "log_events": self._log_events,
            "end_log": self._end_log,
            "find_ended_response": self._find_ended_response,
            "find_items": self._find_items,
            "answer_of_response": responses.answer,
            "conversation_of_response": self._conversation_of,
            "num_dropped_events": responses.num_dropped_events,
            "read_events": responses.read_events,
            "cancel_response": responses.cancel,
            "delete_response": responses.delete,
            "add_conversation": lambda named: responses.add_conversation(stored_conversation(named)),
            "find_conversation": self._find_conversation,
            "set_metadata": self._set_metadata,
            "add_items": self._add_items,
            "remove_item": self._remove_item,
            "delete_conversation": responses.delete_conversation,
            "join_adapters": self._join_adapters,
            "add_adapter": self._add_adapter,
            "remove_adapter": self._remove_adapter,
        }

    def _note_started(self, front_end: FrontEndSlot, model_name: str) -> None:
        self.model_name = model_name
        front_end.started.set()
        self._place_orphans()

    @staticmethod
    def _note_failure(front_end: FrontEndSlot, fault: Fault) -> None:
        front_end.failure = error_of(fault)

    def _take_places(self, front_end: FrontEndSlot, owner: str | None, count: int) -> str | None:
        refusal = self._queue.take(owner, count)
        if refusal is None:
            front_end.places[owner] += count
        return refusal

    def _give_places_back(self, front_end: FrontEndSlot, owner: str | None, count: int) -> None:
        self._queue.give_back(owner, count)
        front_end.places[owner] -= count

    # ---- adapters ----

    def _join_adapters(self, named: dict[str, Adapter]) -> dict[str, Adapter]:
        """A front end has started. The first one brings the adapters of the settings; later ones get all that there are
        by then."""
        if not self._have_joined:
            self._have_joined = True
            self._adapters.replace(named)
        return dict(self._adapters.named)

    async def _add_adapter(self, name: str, adapter: Adapter, in_place: bool) -> None:
        self._adapters.note(name, adapter, in_place=in_place)
        await self._tell_of_adapters()

    async def _remove_adapter(self, name: str) -> None:
        self._adapters.remove(name)
        await self._tell_of_adapters()

    async def _tell_of_adapters(self) -> None:
        """Returns when every front end that serves has the same names. One that starts meanwhile asks for them."""
        links = [front_end.link for front_end in self._front_ends if front_end.link is not None]
        named = dict(self._adapters.named)
        told = (link.call("note_adapters", named) for link in links)
        with suppress(TimeoutError):  # a front end that does not answer is about to end
            await asyncio.wait_for(asyncio.gather(*told, return_exceptions=True), SECONDS_TO_TELL)

    # ---- metrics ----

    def _observe(self, step: EngineCoreOutputs) -> None:
        if step.scheduler_stats is not None:
            self._metrics.record_engine(step.engine_index, step.scheduler_stats)
        if self._throughput is not None:
            if step.scheduler_stats is not None:
                self._throughput.record_engine(step.engine_index, step.scheduler_stats)
            num_tokens = sum(len(output.new_token_ids) for output in step.outputs)
            self._throughput.record_tokens(step.engine_index, self._hub.num_begun_tokens(step), num_tokens)

    @staticmethod
    async def _write_throughput(throughput: ThroughputLog) -> None:
        while True:
            await asyncio.sleep(INTERVAL)
            throughput.write()

    async def _collect_metrics(self) -> list[MetricsFigures]:
        parts = await asyncio.gather(*(self._figures_of(front_end) for front_end in self._front_ends))
        return [self._metrics.figures(), *(part for part in parts if part is not None)]

    @staticmethod
    async def _figures_of(front_end: FrontEndSlot) -> MetricsFigures | None:
        if front_end.serves and front_end.link is not None:
            with suppress(EngineError, TimeoutError):
                front_end.figures = await asyncio.wait_for(front_end.link.call("metrics"), SECONDS_FOR_METRICS)
        return front_end.figures

    # ---- responses ----

    def _add_response(self, front_end: FrontEndSlot, record: ResponseRecord, progress: ResponseProgress) -> None:
        response = stored(record, progress, self._turn_before(record))
        response.runner = RemoteRunner(front_end)
        if record.is_logged:
            response.log = EventLog()
        self._responses.add(response)

    def _turn_before(self, record: ResponseRecord) -> Turn | None:
        if record.conversation_id is not None:
            return self._recent_turns.get((record.owner, _name_of_version(record)))
        if record.previous_id is None:
            return None
        previous = self._responses.store.find(record.previous_id, record.owner)
        return self._recent_turns.get((record.owner, record.previous_id)) if previous is None else previous.turn

    def _settle_response(self, response_id: str, owner: str | None, progress: ResponseProgress) -> None:
        response = self._responses.store.find(response_id, owner)
        if response is None or not response.is_running:
            return  # deleted
        note_progress(response, progress)
        if not response.is_running:
            response.runner = None
        self._responses.settle(response)
        if not response.is_running:
            response.ended.set()

    def _log_events(self, response_id: str, owner: str | None, events: list[bytes], num_tokens: int) -> None:
        response = self._responses.store.find(response_id, owner)
        if response is not None and response.log is not None:
            self._responses.log_events(response, events, num_tokens)

    def _end_log(self, response_id: str, owner: str | None) -> None:
        response = self._responses.store.find(response_id, owner)
        if response is not None:
            self._responses.end_log(response)

    async def _find_ended_response(self, response_id: str, owner: str | None) -> EndedResponse | None:
        found = await self._responses.find_ended(response_id, owner)
        if found is None:
            return None
        self._note_turn(owner, response_id, found.turn)
        return EndedResponse(record_of(found, False), progress_of(found), conversation_up_to(found.turn.before))

    def _note_turn(self, owner: str | None, name: str, turn: Turn | None) -> None:
        """A front end may continue this turn: what has it may be changed or deleted before the next turn is added."""
        self._recent_turns[owner, name] = turn
        self._recent_turns.move_to_end((owner, name))
        if len(self._recent_turns) > MAX_RECENT_TURNS:
            self._recent_turns.popitem(last=False)

    async def _find_conversation(self, conversation_id: str, owner: str | None) -> NamedConversation | None:
        return self._named(await self._responses.find_conversation(conversation_id, owner))

    async def _set_metadata(
        self, conversation_id: str, owner: str | None, metadata: dict[str, str]
    ) -> NamedConversation | None:
        return self._named(await self._responses.set_metadata(conversation_id, owner, metadata))

    async def _add_items(self, conversation_id: str, owner: str | None, items: StoredItems) -> NamedConversation | None:
        return self._named(await self._responses.add_items(conversation_id, owner, items))

    async def _remove_item(
        self, conversation_id: str, owner: str | None, item_id: str
    ) -> tuple[NamedConversation, bool] | None:
        found = await self._responses.remove_item(conversation_id, owner, item_id)
        return None if found is None else (named_conversation(found[0]), found[1])

    def _named(self, found: StoredConversation | None) -> NamedConversation | None:
        if found is None:
            return None
        self._note_turn(found.owner, f"{found.id}@{found.version}", found.turn)
        return named_conversation(found)

    async def _find_items(self, ids: list[str], owner: str | None) -> dict[str, tuple[dict[str, Any], int]]:
        found = await self._responses.find_items(ids, owner)
        return {item_id: (one.item, one.num_bytes) for item_id, one in found.items()}

    async def _conversation_of(self, response_id: str, owner: str | None) -> Conversation | None:
        turn = await self._responses.turn(response_id, owner)
        return None if turn is None else conversation_up_to(turn)

    async def _forget_root(self, response: StoredResponse) -> None:
        with suppress(UnknownParentError, EngineError):  # a failed or cancelled one has no root
            await self._hub.remove_root(response.owner, response.id)


def _name_of_version(record: ResponseRecord) -> str:
    return f"{record.conversation_id}@{record.conversation_version}"


def _inspected_elsewhere(path: str) -> Adapter:
    raise AssertionError("front ends read the headers of adapters")


def _runs_in(response: StoredResponse, front_end: FrontEndSlot) -> bool:
    runner = response.runner
    return response.is_running and isinstance(runner, RemoteRunner) and runner.front_end is front_end


def _end_process(process: Popen[bytes] | None) -> int | None:
    """Ends a process, if it still runs, and returns its exit code."""
    if process is None:
        return None
    if process.poll() is None:
        with contextlib.suppress(TimeoutExpired):
            process.wait(0.2)  # its link has ended: it is about to
        process.kill()
    if process.stdin is not None:
        with suppress(OSError):
            process.stdin.close()
    return process.wait()


def run_service(
    model: str,
    llm_settings: dict[str, Any],
    settings: ServerSettings,
    bound: socket.socket,
    on_ready: Callable[[Service], None],
    on_drain: Callable[[int], None] = lambda num_prompts: None,
) -> int:
    """Serves with several front ends until the end, on a new event loop; returns the exit code."""

    async def serve() -> int:
        service = Service(model, llm_settings, settings, bound)
        return await service.run(lambda: on_ready(service), on_drain)

    with asyncio.Runner(loop_factory=loop_factory()) as runner:
        return runner.run(serve())
