"""What belongs to the service and not to one of its front ends: the queue, names of requests, roots, stored responses
and metrics.

Where one process serves HTTP it is all in that process (OwnState). Where several do, it is in the process that owns the
engines (service.py), and a front end reaches it through its link (shared_state.py).
"""

from __future__ import annotations

from collections import OrderedDict
from contextlib import suppress
from typing import TYPE_CHECKING, Protocol

import msgspec

from ratoon.api.server.response_directory import OwnResponses, ResponseDirectory
from ratoon.api.server.response_log import ResponseLog
from ratoon.api.server.response_store import ResponseStore, StoredResponse
from ratoon.api.server.settings import ServerSettings
from ratoon.core.adapters import Adapter
from ratoon.core.errors import EngineError, UnknownParentError
from ratoon.core.prepared import prepared
from ratoon.core.shares import SharedLimit
from ratoon.engine.output.record_log import RecordLog, open_record_log

if TYPE_CHECKING:
    from ratoon.engine.async_llm import AsyncLLM
    from ratoon.engine.output.roots import Root
    from ratoon.observe.metrics import EngineMetrics


class RequestNames:
    """The clients' names of requests that run or can be continued."""

    def __init__(self, max_names: int, log: RecordLog | None = None) -> None:
        """`log`: where names of an earlier process are found, and those of this one are written."""
        self._max_names = max_names  # of each owner: one owner's requests do not evict another's
        self._ids: dict[str | None, OrderedDict[str, str]] = {}  # by owner: names and the ids of answers
        self._log = log
        if log is not None:
            for record in log.read():
                with suppress(msgspec.MsgspecError, IndexError):
                    self._note(*msgspec.msgpack.decode(record[0], type=prepared(tuple[str | None, str, str])))
            every = [(owner, *pair) for owner, ids in self._ids.items() for pair in ids.items()]
            log.replace([msgspec.msgpack.encode(one)] for one in every)

    def note(self, owner: str | None, name: str, request_id: str) -> None:
        self._note(owner, name, request_id)
        if self._log is not None:
            self._log.append([msgspec.msgpack.encode((owner, name, request_id))])

    def _note(self, owner: str | None, name: str, request_id: str) -> None:
        ids = self._ids.setdefault(owner, OrderedDict())
        ids[name] = request_id
        ids.move_to_end(name)
        if len(ids) > self._max_names:
            ids.popitem(last=False)

    def find(self, owner: str | None, name: str) -> str:
        """Returns the id of the request with this name; the name itself if there is none."""
        ids = self._ids.get(owner)
        return name if ids is None else ids.get(name, name)


def num_names(max_roots: int, max_queue: int) -> int:
    """Two names each, per key, of requests that run or can be continued."""
    return 2 * (max_roots + max_queue)


class Queue:
    """Places for unfinished prompts of all requests, which API keys share."""

    def __init__(self, max_queue: int) -> None:
        self.limit = SharedLimit(max_queue)

    def take(self, owner: str | None, count: int) -> str | None:
        """Takes places. Returns why there are none; None: they are taken."""
        return None if self.limit.take(owner, count) else self._why_full(owner)

    def give_back(self, owner: str | None, count: int) -> None:
        self.limit.give_back(owner, count)

    def _why_full(self, owner: str | None) -> str:
        queue = self.limit
        own = queue.held_by(owner)
        if own == queue.total:
            return f"{own} prompts are unfinished, and {queue.limit} is the limit; try again in a moment"
        num_owners = queue.num_owners + (0 if own else 1)
        return (
            f"{own} prompts of this API key are unfinished, and {queue.limit // num_owners} is its share of the queue, "
            f"which {num_owners} keys use; try again in a moment"
        )


class ServiceState(Protocol):
    outlives_front_ends: bool  # whether what runs in the background can be taken over by another front end

    @property
    def responses(self) -> ResponseDirectory: ...

    async def take_places(self, owner: str | None, count: int) -> str | None:
        """Takes places in the queue. Returns why there are none; None: they are taken."""
        ...

    def give_places_back(self, owner: str | None, count: int) -> None: ...

    async def num_unfinished(self) -> int:
        """The number of unfinished prompts of all requests."""
        ...

    def note_name(self, owner: str | None, name: str, request_id: str) -> None:
        """The owner may refer to the request by this name."""

    async def resolve(self, name: str, owner: str | None) -> str:
        """Returns the id of the request with this id or name. Ids take precedence."""
        ...

    async def list_roots(self, owner: str | None) -> list[Root]:
        """This owner's ended requests that can be continued, the newest first."""
        ...

    async def abort(self, request_id: str, owner: str | None, of_any_owner: bool) -> int:
        """Ends the unfinished requests with this id, of any front end. Returns how many there are."""
        ...

    async def begin(self) -> None:
        """The front end is about to serve."""

    async def load_adapter(self, name: str, path: str, in_place: bool) -> Adapter:
        """Lets requests to any front end name an adapter. RequestError: its name or its files are not right."""
        ...

    async def unload_adapter(self, name: str) -> None: ...

    async def metrics(self) -> EngineMetrics | None:
        """The metrics of all front ends together."""
        ...


class OwnState:
    """The state of a server whose HTTP is in one process."""

    outlives_front_ends = False

    def __init__(self, llm: AsyncLLM, settings: ServerSettings, store: ResponseStore | None = None) -> None:
        """`store`: stored responses that outlive the engine; None: it has one of its own."""
        self._llm = llm
        self.queue = Queue(settings.max_queue)
        most = num_names(llm.config.max_roots, settings.max_queue)
        self.names = RequestNames(most, open_record_log(llm.config, "names"))
        if store is None:
            records = open_record_log(llm.config, "responses")
            log = None if records is None else ResponseLog(records)
            store = ResponseStore(settings.max_responses, settings.max_response_bytes, log)
        self.responses = OwnResponses(store, self._forget_root)

    async def take_places(self, owner: str | None, count: int) -> str | None:
        return self.queue.take(owner, count)

    def give_places_back(self, owner: str | None, count: int) -> None:
        self.queue.give_back(owner, count)

    async def num_unfinished(self) -> int:
        return self.queue.limit.total

    def note_name(self, owner: str | None, name: str, request_id: str) -> None:
        self.names.note(owner, name, request_id)

    async def resolve(self, name: str, owner: str | None) -> str:
        try:
            await self._llm.find_parent(name, wait=False, owner=owner)
        except UnknownParentError:
            return self.names.find(owner, name)
        return name

    async def list_roots(self, owner: str | None) -> list[Root]:
        return self._llm.list_roots(owner)

    async def abort(self, request_id: str, owner: str | None, of_any_owner: bool) -> int:
        found = self._llm.find_running(request_id, owner, of_any_owner=of_any_owner)
        for found_owner, found_id in found:
            await self._llm.abort(found_id, found_owner)
        return len(found)

    async def begin(self) -> None:
        """All of the state is here."""

    async def load_adapter(self, name: str, path: str, in_place: bool) -> Adapter:
        return await self._llm.load_adapter(name, path, in_place=in_place)

    async def unload_adapter(self, name: str) -> None:
        await self._llm.unload_adapter(name)

    async def metrics(self) -> EngineMetrics | None:
        return self._llm.metrics

    async def _forget_root(self, response: StoredResponse) -> None:
        await forget_root(self._llm, response)


async def forget_root(llm: AsyncLLM, response: StoredResponse) -> None:
    """Frees the memory of a response that can't be continued any more."""
    with suppress(UnknownParentError, EngineError):  # a failed or cancelled one has no root
        await llm.forget(response.id, response.owner)
