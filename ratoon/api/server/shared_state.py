"""The service's state as one of several front ends reaches it: through its link to the service's process (service.py).

What is only noted (names, places that are given back, events) is not waited for: the service takes it in order, before
anything that this front end asks later. What is asked by another front end is in order as well, where it depends on an
answer that a client has got: the service knows a request before the first of its outputs.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable
from typing import Any

from ratoon.api.server.response_items import FoundItem, StoredItems
from ratoon.api.server.response_store import EventPage, StoredResponse
from ratoon.api.server.service_calls import (
    Conversation,
    EndedResponse,
    NamedConversation,
    named_conversation,
    progress_of,
    record_of,
    stored,
    stored_conversation,
    turn_of,
)
from ratoon.api.server.stored_turns import StoredConversation, Turn
from ratoon.core.adapters import Adapter
from ratoon.core.health import Health
from ratoon.engine.async_llm import AsyncLLM
from ratoon.engine.output.roots import Root
from ratoon.engine.processes.link import Link
from ratoon.observe.metrics import EngineMetrics, MetricsFigures


class SharedState:
    outlives_front_ends = True

    def __init__(self, link: Callable[[], Link], model_name: str, service_pid: int) -> None:
        self._link = link
        self._model_name = model_name
        self._service_pid = service_pid
        self.health: Callable[[], Health] = Health
        self.llm: AsyncLLM  # of this front end; set before it serves
        self._num_changes = 0  # of adapters, that the service has told of
        self.responses = SharedResponses(link)

    async def take_places(self, owner: str | None, count: int) -> str | None:
        asked = self._link().call("take_places", owner, count)
        try:
            refusal: str | None = await asyncio.shield(asked)
        except asyncio.CancelledError:  # the client has left, and the places may be taken nevertheless
            asked.add_done_callback(lambda done: self._give_back_if_taken(done, owner, count))
            raise
        return refusal

    def _give_back_if_taken(self, done: asyncio.Future[Any], owner: str | None, count: int) -> None:
        if not done.cancelled() and done.exception() is None and done.result() is None:
            self.give_places_back(owner, count)

    def give_places_back(self, owner: str | None, count: int) -> None:
        self._link().tell("give_places_back", owner, count)

    async def num_unfinished(self) -> int:
        found: int = await self._link().call("num_unfinished")
        return found

    def note_name(self, owner: str | None, name: str, request_id: str) -> None:
        self._link().tell("note_name", owner, name, request_id)

    async def resolve(self, name: str, owner: str | None) -> str:
        found: str = await self._link().call("resolve", name, owner)
        return found

    async def list_roots(self, owner: str | None) -> list[Root]:
        found: list[Root] = await self._link().call("list_roots", owner)
        return found

    async def abort(self, request_id: str, owner: str | None, of_any_owner: bool) -> int:
        found: int = await self._link().call("abort_by_id", request_id, owner, of_any_owner)
        return found

    async def abort_running(self, owner: str | None, request_id: str) -> None:
        """The service has been asked to end a request of this front end."""
        await self.llm.abort(request_id, owner)

    async def load_adapter(self, name: str, path: str, in_place: bool) -> Adapter:
        """This front end, which has the model's metadata, reads the headers; the service tells all front ends."""
        adapter: Adapter = await asyncio.to_thread(self.llm.engine.adapters.inspect, path)
        await self._link().call("add_adapter", name, adapter, in_place)
        return adapter

    async def unload_adapter(self, name: str) -> None:
        await self._link().call("remove_adapter", name)

    async def begin(self) -> None:
        """Names of adapters may have changed since the service was started: it has those that count."""
        num_before = self._num_changes
        named = await self._link().call("join_adapters", self.llm.list_adapters())
        if self._num_changes == num_before:  # else it was told of newer ones behind these
            self.llm.engine.adapters.replace(named)

    def note_adapters(self, named: dict[str, Adapter]) -> None:
        if self.llm.engine is not None:  # else it asks for them when it has started
            self._num_changes += 1
            self.llm.engine.adapters.replace(named)

    async def metrics(self) -> EngineMetrics:
        parts: list[MetricsFigures] = await self._link().call("collect_metrics")
        metrics = EngineMetrics(self._model_name, self._service_pid)
        for part in parts:
            metrics.add(part)
        metrics.watch(self.health)
        metrics.name_adapters(self.llm.adapter_names)
        return metrics


class SharedResponses:
    """The responses of all front ends, of which this one generates some."""

    def __init__(self, link: Callable[[], Link]) -> None:
        self._link = link
        self._logged: set[str] = set()  # ids of those whose events are logged
        self.own: dict[tuple[str | None, str], StoredResponse] = {}  # that run in this front end, by owner and id

    def add(self, response: StoredResponse) -> None:
        self.take_over(response)
        self._link().tell("add_response", *self._as_sent(response))

    async def add_background(self, response: StoredResponse) -> None:
        self.take_over(response)
        await self._link().call("add_response", *self._as_sent(response))

    def take_over(self, response: StoredResponse) -> None:
        """The response is generated by this front end from now on."""
        self.own[response.owner, response.id] = response

    def _as_sent(self, response: StoredResponse) -> tuple[Any, Any]:
        return record_of(response, response.id in self._logged), progress_of(response)

    def settle(self, response: StoredResponse) -> None:
        if not response.is_running:
            self.own.pop((response.owner, response.id), None)
        self._link().tell("settle_response", response.id, response.owner, progress_of(response))

    def open_log(self, response: StoredResponse) -> None:
        self._logged.add(response.id)

    def log_events(self, response: StoredResponse, events: list[bytes], num_tokens: int) -> None:
        self._link().tell("log_events", response.id, response.owner, events, num_tokens)

    def end_log(self, response: StoredResponse) -> None:
        self._logged.discard(response.id)
        self._link().tell("end_log", response.id, response.owner)

    async def find_ended(self, response_id: str, owner: str | None) -> StoredResponse | None:
        found: EndedResponse | None = await self._link().call("find_ended_response", response_id, owner)
        if found is None:
            return None
        response = stored(found.record, found.progress, turn_of(found.before))
        response.ended.set()
        return response

    async def find_items(self, ids: Iterable[str], owner: str | None) -> dict[str, FoundItem]:
        asked = list(ids)
        found = await self._link().call("find_items", asked, owner) if asked else {}
        return {item_id: FoundItem(item, num_bytes) for item_id, (item, num_bytes) in found.items()}

    async def answer(self, response_id: str, owner: str | None) -> list[bytes] | None:
        parts: list[bytes] | None = await self._link().call("answer_of_response", response_id, owner)
        return parts

    async def turn(self, response_id: str, owner: str | None) -> Turn | None:
        found: Conversation | None = await self._link().call("conversation_of_response", response_id, owner)
        return None if found is None else turn_of(found)

    async def num_dropped_events(self, response_id: str, owner: str | None) -> int | None:
        found: int | None = await self._link().call("num_dropped_events", response_id, owner)
        return found

    async def read_events(self, response_id: str, owner: str | None, start: int) -> EventPage | None:
        page: EventPage | None = await self._link().call("read_events", response_id, owner, start)
        return page

    async def cancel(self, response_id: str, owner: str | None) -> list[bytes] | None:
        parts: list[bytes] | None = await self._link().call("cancel_response", response_id, owner)
        return parts

    async def delete(self, response_id: str, owner: str | None) -> bool:
        done: bool = await self._link().call("delete_response", response_id, owner)
        return done

    # ---- conversations ----

    async def add_conversation(self, conversation: StoredConversation) -> None:
        await self._link().call("add_conversation", named_conversation(conversation))

    async def find_conversation(self, conversation_id: str, owner: str | None) -> StoredConversation | None:
        return await self._conversation("find_conversation", conversation_id, owner)

    async def set_metadata(
        self, conversation_id: str, owner: str | None, metadata: dict[str, str]
    ) -> StoredConversation | None:
        return await self._conversation("set_metadata", conversation_id, owner, metadata)

    async def add_items(self, conversation_id: str, owner: str | None, items: StoredItems) -> StoredConversation | None:
        return await self._conversation("add_items", conversation_id, owner, items)

    async def remove_item(
        self, conversation_id: str, owner: str | None, item_id: str
    ) -> tuple[StoredConversation, bool] | None:
        asked = self._link().call("remove_item", conversation_id, owner, item_id)
        found: tuple[NamedConversation, bool] | None = await asked
        return None if found is None else (stored_conversation(found[0]), found[1])

    async def delete_conversation(self, conversation_id: str, owner: str | None) -> bool:
        done: bool = await self._link().call("delete_conversation", conversation_id, owner)
        return done

    async def _conversation(self, method: str, *arguments: Any) -> StoredConversation | None:
        found: NamedConversation | None = await self._link().call(method, *arguments)
        return None if found is None else stored_conversation(found)
