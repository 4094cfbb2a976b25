"""Stored responses and conversations as routes and runs reach them. One object for all front ends of a server: where
there are several, it lives in the service's process, and front ends call it through their link (shared_state.py).

What generates a response is a run in one front end (response_runs.py). The directory knows the response, its events and
its end; while it runs, what it has so far is asked of its run.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterable
from functools import partial
from typing import Protocol

from ratoon.api.server.errors import refused
from ratoon.api.server.response_items import FoundItem, StoredItems
from ratoon.api.server.response_store import EventLog, EventPage, ResponseStore, StoredResponse
from ratoon.api.server.stored_turns import StoredConversation, Turn, items_of, turn_of_items
from ratoon.api.server.threads import off_loop
from ratoon.core.errors import EngineError, RequestError

Forget = Callable[[StoredResponse], Awaitable[None]]
TOO_LARGE = (
    "The responses that are being generated take all the memory that there is for them (--max-response-bytes), and "
    "this one most of it; ask for fewer log-probabilities or tokens, or for fewer responses at a time"
)


class ResponseDirectory(Protocol):
    """Responses of all front ends. An id of another owner is unknown."""

    def add(self, response: StoredResponse) -> None:
        """A run keeps its response from now on."""

    async def add_background(self, response: StoredResponse) -> None:
        """Adds a response that runs in the background: any front end can find it afterwards."""

    def settle(self, response: StoredResponse) -> None:
        """A response has grown, or has ended."""

    def open_log(self, response: StoredResponse) -> None:
        """The response has events from now on, which clients may follow."""

    def log_events(self, response: StoredResponse, events: list[bytes], num_tokens: int) -> None:
        """Further events, of the first `num_tokens` tokens of the answer."""

    def end_log(self, response: StoredResponse) -> None: ...

    async def find_ended(self, response_id: str, owner: str | None) -> StoredResponse | None:
        """A response at its end, for which this waits."""
        ...

    async def find_items(self, ids: Iterable[str], owner: str | None) -> dict[str, FoundItem]:
        """Items of this owner's stored responses, by id."""
        ...

    async def answer(self, response_id: str, owner: str | None) -> list[bytes] | None:
        """The response as JSON, finished or not, in parts."""
        ...

    async def turn(self, response_id: str, owner: str | None) -> Turn | None:
        """The conversation up to the response."""
        ...

    async def num_dropped_events(self, response_id: str, owner: str | None) -> int | None:
        """The oldest events that were dropped. None: it has no events."""
        ...

    async def read_events(self, response_id: str, owner: str | None, start: int) -> EventPage | None:
        """Waits for events from this number on. None: there is no such response, or it has no events."""
        ...

    async def cancel(self, response_id: str, owner: str | None) -> list[bytes] | None:
        """Ends one that runs in the background, and returns it as `answer` does. RequestError: it does not."""
        ...

    async def delete(self, response_id: str, owner: str | None) -> bool:
        """False: there is none."""
        ...

    # Conversations. None, of all that follow: there is none of this name that belongs to the owner.

    async def add_conversation(self, conversation: StoredConversation) -> None: ...

    async def find_conversation(self, conversation_id: str, owner: str | None) -> StoredConversation | None:
        """The conversation as it is now."""
        ...

    async def set_metadata(
        self, conversation_id: str, owner: str | None, metadata: dict[str, str]
    ) -> StoredConversation | None: ...

    async def add_items(
        self, conversation_id: str, owner: str | None, items: StoredItems
    ) -> StoredConversation | None: ...

    async def remove_item(
        self, conversation_id: str, owner: str | None, item_id: str
    ) -> tuple[StoredConversation, bool] | None:
        """Returns whether there was such an item, too."""
        ...

    async def delete_conversation(self, conversation_id: str, owner: str | None) -> bool:
        """False: there is none."""
        ...


class OwnResponses:
    """The responses of this process."""

    def __init__(self, store: ResponseStore, forget: Forget) -> None:
        """`forget` frees the memory of a response that can't be continued any more."""
        self.store = store
        self._forget = forget
        self._forgetting: set[asyncio.Task[None]] = set()  # the event loop itself keeps no reference

    def add(self, response: StoredResponse) -> None:
        self.forget(self.store.add(response))

    async def add_background(self, response: StoredResponse) -> None:
        self.add(response)

    def settle(self, response: StoredResponse) -> None:
        self.forget(self.store.settle(response))
        while (large := self.store.next_too_large()) is not None:
            large.error = {"code": "server_error", "message": TOO_LARGE}
            self._end_soon(large)

    def open_log(self, response: StoredResponse) -> None:
        response.log = EventLog()

    def log_events(self, response: StoredResponse, events: list[bytes], num_tokens: int) -> None:
        assert response.log is not None
        response.log.append(events)
        response.num_logged_tokens = num_tokens
        self.settle(response)

    def end_log(self, response: StoredResponse) -> None:
        if response.log is not None:
            response.log.end()

    async def find(self, response_id: str, owner: str | None) -> StoredResponse | None:
        return self.store.find(response_id, owner)

    async def find_ended(self, response_id: str, owner: str | None) -> StoredResponse | None:
        found = await self.find(response_id, owner)
        if found is not None:
            await found.ended.wait()
        return found

    async def find_items(self, ids: Iterable[str], owner: str | None) -> dict[str, FoundItem]:
        ids = list(ids)
        if not ids:
            return {}
        find = self.store.finder(owner)
        return await asyncio.to_thread(find, ids)

    async def answer(self, response_id: str, owner: str | None) -> list[bytes] | None:
        found = await self.find(response_id, owner)
        return None if found is None else await self._answer_of(found)

    @staticmethod
    async def _answer_of(found: StoredResponse) -> list[bytes]:
        if found.runner is not None and found.is_running:
            try:
                return await found.runner.answer(found)
            except EngineError:
                pass  # its front end has just died
        return await found.answer_parts()

    async def turn(self, response_id: str, owner: str | None) -> Turn | None:
        found = await self.find(response_id, owner)
        return None if found is None else found.turn

    async def num_dropped_events(self, response_id: str, owner: str | None) -> int | None:
        found = await self.find(response_id, owner)
        return None if found is None or found.log is None else found.log.num_dropped

    async def read_events(self, response_id: str, owner: str | None, start: int) -> EventPage | None:
        found = await self.find(response_id, owner)
        return None if found is None or found.log is None else await found.log.page(start)

    async def cancel(self, response_id: str, owner: str | None) -> list[bytes] | None:
        found = await self.find(response_id, owner)
        if found is None:
            return None
        if not found.is_background:
            problem = "the response does not run in the background"
            raise RequestError("response_id", problem, "close its connection instead")
        await self._cancel(found)
        return await found.answer_parts()

    async def delete(self, response_id: str, owner: str | None) -> bool:
        found = await self.find(response_id, owner)
        if found is None:
            return False
        await self._cancel(found)
        if self.store.find(response_id, owner) is found:  # not deleted meanwhile
            self.store.remove(found)
            self.forget([found])
        return True

    # ---- conversations ----

    async def add_conversation(self, conversation: StoredConversation) -> None:
        self.forget(self.store.add_conversation(conversation))

    async def find_conversation(self, conversation_id: str, owner: str | None) -> StoredConversation | None:
        return self.store.find_conversation(conversation_id, owner)

    async def set_metadata(
        self, conversation_id: str, owner: str | None, metadata: dict[str, str]
    ) -> StoredConversation | None:
        found = self.store.find_conversation(conversation_id, owner)
        if found is not None:
            self.forget(self.store.set_metadata(found, metadata))
        return found

    async def add_items(self, conversation_id: str, owner: str | None, items: StoredItems) -> StoredConversation | None:
        found = self.store.find_conversation(conversation_id, owner)
        if found is not None:
            self.forget(self.store.change_conversation(found, Turn(found.turn, items), found.response_id))
        return found

    async def remove_item(
        self, conversation_id: str, owner: str | None, item_id: str
    ) -> tuple[StoredConversation, bool] | None:
        """The rest of the items become one turn: those of responses that are stored do not change."""
        while (found := self.store.find_conversation(conversation_id, owner)) is not None:
            turn = found.turn
            items = await off_loop(found.num_bytes_of_turns, partial(items_of, turn))
            kept = [item for item in items if item["id"] != item_id]
            if len(kept) == len(items):
                return found, False
            rest = await off_loop(found.num_bytes_of_turns, partial(turn_of_items, kept))
            if found.turn is turn and self.store.find_conversation(conversation_id, owner) is found:
                self.forget(self.store.change_conversation(found, rest, None))
                return found, True
        return None

    async def delete_conversation(self, conversation_id: str, owner: str | None) -> bool:
        found = self.store.find_conversation(conversation_id, owner)
        if found is not None:
            self.store.remove_conversation(found)
        return found is not None

    async def _cancel(self, response: StoredResponse) -> None:
        """Cancels a response, without effect on one that has ended. One that a client waits for ends with its
        connection."""
        if response.is_background and response.is_running and self._end_soon(response):
            await response.ended.wait()

    @staticmethod
    def _end_soon(response: StoredResponse) -> bool:
        """Has a response in the background end as cancelled, or as failed if it has an error. False: it is about to."""
        if response.runner is not None:
            response.runner.cancel(response)
        elif response.work is not None:
            response.work.cancel()
        return response.runner is not None or response.work is not None

    def forget(self, responses: Iterable[StoredResponse]) -> None:
        """Frees the memory of responses that can't be continued any more."""
        for response in responses:
            task = asyncio.ensure_future(self._forget(response))
            self._forgetting.add(task)
            task.add_done_callback(self._forgetting.discard)


async def follow_events(
    responses: ResponseDirectory, response_id: str, owner: str | None, start: int
) -> AsyncGenerator[bytes, None]:
    """Yields events from the one with this number on, to the last one. ApiError if the reader is too slow to get them
    all."""
    while True:
        page = await responses.read_events(response_id, owner, start)
        if page is None:
            return  # deleted meanwhile
        page.check(start)
        if page.num_events:
            start += page.num_events
            yield page.events
        elif page.is_end:
            return


def check_events(num_dropped: int | None, start: int) -> None:
    """Raises ApiError if there are no events (None), or some of those from this number on were dropped."""
    if num_dropped is None:
        raise refused("stream", "the response was not created with background and stream", "leave it out")
    EventPage(b"", 0, num_dropped).check(start)
