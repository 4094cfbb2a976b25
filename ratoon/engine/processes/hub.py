"""What the front ends of one service have in common: the engines, the requests that run, and those that have ended.

The hub runs in the process that owns the engines. Each front end has a link to it (link.py) and a number, its client
index. Requests pass through the hub to the engines' client, which records them (ledger.py), and outputs come back
through it, each to the front end of its request. A request is known here by its owner and id from the moment it is
handed over until its front end says that it has ended, and with which root: so any front end can wait for it, continue
it as far as it has come, or find its root.

A front end that is slower than the engines makes them wait, as a single one does, unless it has stopped answering: then
the others go on, and what is meant for it is held up to a limit. When a front end dies, its requests are aborted, but
for those that another one will take over.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

import msgspec

from ratoon.core.errors import EngineAwayError, EngineDeadError, RequestError, UnknownParentError
from ratoon.core.faults import fault_of
from ratoon.core.health import Health
from ratoon.core.outputs import LogprobsLists
from ratoon.core.params import BeamSearchParams, SamplingParams
from ratoon.core.prepared import prepared
from ratoon.core.readings import reading_id
from ratoon.core.request import EngineCoreOutput, EngineCoreOutputs, EngineCoreRequest, FinishReason, branch_id_of
from ratoon.engine.output.roots import Root, RootLog, RootTable
from ratoon.engine.processes.async_client import AsyncMPClient
from ratoon.engine.processes.link import Link
from ratoon.observe.logging import get_logger

logger = get_logger(__name__)

MAX_STEPS_BEHIND = 8  # messages with outputs that a front end has not taken; the engines wait then
SILENCE_IS_DEATH = 60.0  # seconds, after which a front end that takes nothing is ended
SECONDS_OF_SILENCE = 1.0  # after which a front end that takes nothing is not waited for
MAX_UNSENT_BYTES = 256 * 2**20  # for a front end that takes nothing,
SECONDS_WITH_MUCH_UNSENT = 10.0  # after which it is ended
HEALTH_INTERVAL = 0.25  # seconds between looks at the engines
STATES_SUFFIX = reading_id("")
_encode = msgspec.msgpack.Encoder().encode
_logprobs = msgspec.msgpack.Decoder(prepared(LogprobsLists))


@dataclass(eq=False, slots=True)
class Running:
    """A request that a front end has handed over, and not reported as ended."""

    request: EngineCoreRequest
    client_index: int
    ended: asyncio.Event = field(default_factory=asyncio.Event)
    token_ids: list[list[int]] = field(default_factory=list)  # of each choice so far
    engine: int | None = None
    # What the engine sent first, and last, of its one choice: for a front end that takes it over
    first: EngineCoreOutput | None = None
    last: EngineCoreOutput | None = None
    # The log-probabilities of its tokens so far, encoded, where another front end may need them; None: it does not
    logprobs: list[bytes] | None = None
    num_told: int = 0  # tokens that its front end has been sent
    is_paused: bool = False  # no more is sent, until its new front end asks for it

    @property
    def key(self) -> tuple[str | None, str]:
        return self.request.owner, self.request.external_id or self.request.request_id

    def logprobs_of(self, start: int, stop: int) -> LogprobsLists | None:
        """The log-probabilities of its tokens from one number to another."""
        if not self.logprobs:
            return None
        chunks = [_logprobs.decode(chunk) for chunk in self.logprobs]
        return LogprobsLists(
            [row for chunk in chunks for row in chunk.token_ids][start:stop],
            [row for chunk in chunks for row in chunk.logprobs][start:stop],
            [rank for chunk in chunks for rank in chunk.sampled_ranks][start:stop],
        )

    @property
    def branch_ids(self) -> list[str]:
        return [branch_id_of(self.request.request_id, choice) for choice in range(self.request.num_choices)]

    def as_root(self) -> Root:
        """The request as far as it has come."""
        request, params = self.request, self.request.generation_params
        asked = None if params is None else params.structured_output
        if asked is not None and asked.first_token is None:
            asked = msgspec.structs.replace(asked, first_token=len(request.prompt_token_ids))
        return Root(
            request_id=self.key[1],
            internal_id=request.request_id,
            prompt_token_ids=request.prompt_token_ids,
            choices=[list(tokens) for tokens in self.token_ids],
            cache_salt=request.cache_salt,
            adapter=request.adapter,
            owner=request.owner,
            engine=self.engine,
            leased_until=None if request.retain_kv is None else time.time() + request.retain_kv,
            session=request.session,
            retention=request.retention,
            searching=isinstance(params, BeamSearchParams),
            encoder_input=request.encoder_input,
            mm_features=request.mm_features,
            rope=request.rope,
            structured_output=asked,
        )


class Reader:
    """A front end as the hub sees it."""

    def __init__(self, index: int, link: Link) -> None:
        self.index = index
        self.link = link
        self.num_sent = 0
        self.num_taken = 0
        self.last_taken = time.monotonic()

    @property
    def is_behind(self) -> bool:
        return self.num_sent - self.num_taken >= MAX_STEPS_BEHIND

    @property
    def is_silent(self) -> bool:
        return time.monotonic() - self.last_taken > SECONDS_OF_SILENCE


class EngineHub:
    def __init__(
        self,
        client: AsyncMPClient,
        max_roots: int,
        kill: Callable[[int], None],
        survives: Callable[[str | None, str], bool] = lambda owner, external_id: False,
        notes_dropped_roots: bool = False,  # see RootTable
        root_log: RootLog | None = None,
    ) -> None:
        """`kill` ends the front end with this index, which takes nothing any more. `survives` tells whether the request
        with this owner and id goes on when its front end is gone, because another one will take it over."""
        self._survives = survives
        self.client = client
        self.roots = RootTable(max_roots, notes_dropped=notes_dropped_roots, log=root_log)
        self._kill = kill
        self._readers: dict[int, Reader] = {}
        self._running: dict[str, Running] = {}  # by internal id
        self._by_key: dict[tuple[str | None, str], Running] = {}
        self._progress = asyncio.Event()  # a front end has taken outputs, or is gone
        self._tasks: list[asyncio.Task[None]] = []
        self._health = Health()
        self.dead: EngineDeadError | None = None
        self.observe: Callable[[EngineCoreOutputs], None] = lambda step: None  # is told of every step

    # ---- life ----

    async def restore_leases(self) -> None:
        """Leases that the log of roots has go on in the engines, which have started."""
        if leases := self.roots.leases_to_restore():
            answers = await self.client.call_utility("restore_leases", leases)
            self.roots.note_restored(branch_id for answer in answers for branch_id in answer)

    def start(self) -> None:
        """Begin to route; the engines have started."""
        # A front end whose request a restarted engine answers has been told before that the engine is back.
        self.client.state_changed = self._tell_health
        self._tasks = [asyncio.create_task(self._pump()), asyncio.create_task(self._watch())]

    async def stop(self) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    def handlers(self, index: int) -> dict[str, Callable[..., Any]]:
        """Returns the functions that answer the calls of the front end with this index."""
        return {
            "add_request": lambda request: self._add(index, request),
            "abort_requests": self._abort,
            "stop_requests": self._stop,
            "outputs_taken": lambda count: self._taken(index, count),
            "request_ended": self._ended,
            "find_root": self.find_root,
            "remove_root": self.remove_root,
            "list_roots": self.roots.list,
            "call_utility": lambda name, arguments: self.client.call_utility(name, *arguments),
            "add_replica": self._add_replica,
            "drain_replica": self.client.drain_replica,
            "take_over": lambda request_id, num_tokens: self._take_over(index, request_id, num_tokens),
            "abort_by_id": self.abort_by_id,
        }

    def add_reader(self, index: int, link: Link) -> None:
        self._readers[index] = Reader(index, link)
        link.tell("ready", self.client.ready)
        link.tell("health", self.client.health())
        if self.dead is not None:
            link.tell("dead", str(self.dead))

    def remove_reader(self, index: int) -> None:
        """A front end is gone, and its requests with it, but for those that another one will take over."""
        self._readers.pop(index, None)
        aborted = []
        for running in [one for one in self._running.values() if one.client_index == index]:
            if self._survives(*running.key):
                running.is_paused = True
            else:
                aborted.append(running.request.request_id)
                self._forget(running)
                self.roots.note_dropped(running.branch_ids)
        self._abort(aborted)
        self._tell_dropped_roots()
        self._progress.set()

    # ---- requests ----

    def _add(self, index: int, request: EngineCoreRequest) -> None:
        running = Running(request, index, token_ids=[[] for _ in range(request.num_choices)])
        try:
            other = self._by_key.get(running.key)
            if other is not None:
                raise RequestError(
                    "request_id", f"{running.key[1]!r} is in use", "an id that no unfinished request has"
                )
            self.client.add_request(request)
        except (RequestError, EngineDeadError) as error:
            refusal = fault_of(error) if isinstance(error, RequestError) else None
            output = EngineCoreOutput(
                request.request_id, [], finish_reason=FinishReason.ERROR, error=str(error), refusal=refusal
            )
            self._send(self._readers[index], EngineCoreOutputs([output]))
            return
        if isinstance(request.params, SamplingParams) and request.params.logprobs is not None:
            running.logprobs = [] if self._survives(*running.key) else None
        self._running[request.request_id] = running
        self._by_key[running.key] = running

    def _abort(self, request_ids: list[str]) -> None:
        if request_ids and self.dead is None:
            self.client.abort_requests(request_ids)

    def abort_by_id(self, external_id: str, owner: str | None, of_any_owner: bool) -> int:
        """Has requests with this id ended by the front ends that they came from. Returns how many there are."""
        found = [key for key in self._by_key if key[1] == external_id and (of_any_owner or key[0] == owner)]
        for key in found:
            reader = self._readers.get(self._by_key[key].client_index)
            if reader is not None:
                reader.link.tell("abort_running", *key)
            else:
                self.drop_held(*key)
        return len(found)

    def _stop(self, stopped: dict[str, int | None]) -> None:
        if self.dead is None:
            self.client.stop_requests(stopped)

    def _ended(self, owner: str | None, external_id: str, request_id: str, root: Root | None) -> None:
        running = self._running.get(request_id)
        if running is not None:
            self._forget(running)
        if root is not None:
            self.roots.add(root)
        elif running is not None:
            self.roots.note_dropped(running.branch_ids)
        self._tell_dropped_roots()

    def _forget(self, running: Running) -> None:
        del self._running[running.request.request_id]
        del self._by_key[running.key]
        running.ended.set()

    def drop_held(self, owner: str | None, external_id: str) -> None:
        """End a held request that no front end will ask for."""
        running = self._by_key.get((owner, external_id))
        if running is not None and running.is_paused:
            self._abort([running.request.request_id])
            self._forget(running)
            self.roots.note_dropped(running.branch_ids)
            self._tell_dropped_roots()

    def held_request(self, owner: str | None, external_id: str) -> EngineCoreRequest | None:
        running = self._by_key.get((owner, external_id))
        return None if running is None else running.request

    def _take_over(self, index: int, request_id: str, num_tokens: int | None) -> None:
        """A front end takes over a held request, as one that it has handed over itself. It is sent the first
        `num_tokens` tokens, and no more until it asks again with None."""
        running = self._running.get(request_id)
        if running is None:
            return
        if num_tokens is not None:
            running.client_index, running.num_told, running.is_paused = index, 0, True
        known = running.token_ids[0]
        until = len(known) if num_tokens is None else min(num_tokens, len(known))
        new = known[running.num_told : until]
        model = running.first if running.num_told == 0 else None
        is_end = num_tokens is None and running.last is not None
        model = model or (running.last if is_end else None) or EngineCoreOutput(request_id, [])
        if new or is_end:
            last = running.last if is_end else None
            output = msgspec.structs.replace(
                model,
                new_token_ids=new,
                new_logprobs=running.logprobs_of(running.num_told, until),
                finish_reason=None if last is None else last.finish_reason,
                stop_reason=None if last is None else last.stop_reason,
                error=None if last is None else last.error,
            )
            self._send(self._readers[index], EngineCoreOutputs([output], engine_index=running.engine or 0))
        running.num_told = until
        running.is_paused = num_tokens is not None

    # ---- roots ----

    async def find_root(self, owner: str | None, external_id: str, wait: bool) -> Root:
        """A request that can be continued: one that has ended or, without `wait`, one that runs, as far as it has
        come."""
        while (running := self._by_key.get((owner, external_id))) is not None:
            if not wait and running.last is None and running.request.generation_params is not None:
                return running.as_root()
            await running.ended.wait()  # what the engine has ended is about to be a root
        return self.roots.find(external_id, owner)

    async def remove_root(self, owner: str | None, external_id: str) -> None:
        if (running := self._by_key.get((owner, external_id))) is not None and running.last is not None:
            await running.ended.wait()
        root = self.roots.remove(external_id, owner)
        self._tell_dropped_roots()
        if root.leased:
            with suppress(EngineAwayError):  # an engine that is started again has no leases
                await self.client.call_utility("end_leases", root.branch_ids)

    def _tell_dropped_roots(self) -> None:
        dropped = self.roots.take_dropped()
        if dropped and self.dead is None:
            self.client.forget_roots(dropped)

    def is_running(self, owner: str | None, external_id: str) -> bool:
        return (owner, external_id) in self._by_key

    def knows(self, owner: str | None, external_id: str) -> bool:
        """Whether there is a request, running or ended, with this id."""
        if self.is_running(owner, external_id):
            return True
        try:
            self.roots.find(external_id, owner)
        except UnknownParentError:
            return False
        return True

    # ---- outputs ----

    async def _pump(self) -> None:
        try:
            while True:
                await self._wait_for_readers()
                for step in await self.client.get_outputs():
                    self.observe(step)
                    self._route(step)
        except EngineDeadError as error:
            self.dead = error
            for reader in self._readers.values():
                reader.link.tell("dead", str(error))

    async def _wait_for_readers(self) -> None:
        while any(reader.is_behind and not reader.is_silent for reader in self._readers.values()):
            self._progress.clear()
            with suppress(TimeoutError):
                async with asyncio.timeout(SECONDS_OF_SILENCE):
                    await self._progress.wait()

    def _route(self, step: EngineCoreOutputs) -> None:
        parts: dict[int, list[EngineCoreOutput]] = {}
        for output in step.outputs:
            running = self._running.get(output.request_id)
            if running is None:
                running = self._running_of_reading(output.request_id)
                if running is None:
                    continue  # its front end is gone, or has ended it
            else:
                self._record(running, output, step.engine_index)
                if running.is_paused:
                    continue
                running.num_told = len(running.token_ids[0])
            parts.setdefault(running.client_index, []).append(output)
        for index, outputs in parts.items():
            if (reader := self._readers.get(index)) is not None:
                part = EngineCoreOutputs(outputs, timestamp=step.timestamp, engine_index=step.engine_index)
                self._send(reader, part)

    def _running_of_reading(self, request_id: str) -> Running | None:
        """The request whose hidden states are read under this id."""
        if not request_id.endswith(STATES_SUFFIX):
            return None
        branch_id = request_id.removesuffix(STATES_SUFFIX)
        return self._running.get(branch_id) or self._running.get(branch_id.rpartition("#")[0])

    def num_begun_tokens(self, step: EngineCoreOutputs) -> int:
        """The prompt tokens of requests of which this step, which is not routed yet, brings the first output."""
        begun = (self._running.get(output.request_id) for output in step.outputs)
        return sum(len(one.request.prompt_token_ids) for one in begun if one is not None and one.first is None)

    @staticmethod
    def _record(running: Running, output: EngineCoreOutput, engine: int) -> None:
        running.engine = engine
        if output.choice < len(running.token_ids):
            if output.replaces:
                running.token_ids[output.choice].clear()
            running.token_ids[output.choice] += output.new_token_ids
        if running.logprobs is not None and output.new_logprobs is not None:
            running.logprobs.append(_encode(output.new_logprobs))
        if running.first is None:
            running.first = output
        if output.finished and len(running.token_ids) == 1:
            running.last = output

    def _send(self, reader: Reader, outputs: EngineCoreOutputs) -> None:
        if reader.num_sent == reader.num_taken:
            reader.last_taken = time.monotonic()  # it had nothing to take
        reader.num_sent += 1
        reader.link.tell("outputs", outputs)
        seconds = time.monotonic() - reader.last_taken
        if reader.link.num_unsent_bytes > MAX_UNSENT_BYTES and seconds > SECONDS_WITH_MUCH_UNSENT:
            logger.error("front end %d takes nothing and is ended", reader.index)
            self._kill(reader.index)

    def _taken(self, index: int, count: int) -> None:
        reader = self._readers.get(index)
        if reader is not None:
            reader.num_taken, reader.last_taken = count, time.monotonic()
            self._progress.set()

    async def _add_replica(self) -> int:
        """All front ends know the new engine before its index is told."""
        index = await self.client.add_replica()
        self._tell_health()
        return index

    def _tell_health(self) -> None:
        health = self.client.health()
        if health != self._health:
            self._health = health
            for reader in self._readers.values():
                reader.link.tell("health", health)

    async def _watch(self) -> None:
        """Tell front ends how the engines are, whenever that changes."""
        while True:
            self._tell_health()
            for reader in list(self._readers.values()):
                if reader.num_sent > reader.num_taken and time.monotonic() - reader.last_taken > SILENCE_IS_DEATH:
                    logger.error("front end %d does not answer and is ended", reader.index)
                    self._kill(reader.index)
            await asyncio.sleep(HEALTH_INTERVAL)
