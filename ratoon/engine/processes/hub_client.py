"""A front end's side of the hub (hub.py): the calls between them, the client of its engines, and the roots that front
ends share."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable
from typing import Any

from ratoon.core.errors import EngineDeadError
from ratoon.core.health import Health
from ratoon.core.messages import EngineReady
from ratoon.core.request import EngineCoreOutputs, EngineCoreRequest
from ratoon.engine.output.roots import Root
from ratoon.engine.processes.link import Link, Method

# Calls that the hub answers.
HUB_METHODS = {
    "add_request": Method((EngineCoreRequest,)),
    "abort_requests": Method((list[str],)),
    "stop_requests": Method((dict[str, int | None],)),
    "outputs_taken": Method((int,)),
    "request_ended": Method((str | None, str, str, Root | None)),
    "find_root": Method((str | None, str, bool), Root),
    "remove_root": Method((str | None, str)),
    "list_roots": Method((str | None,), list[Root]),
    "call_utility": Method((str, list[Any]), list[Any]),
    "add_replica": Method((), int),
    "drain_replica": Method((int, float)),
    "take_over": Method((str, int | None)),
    "abort_by_id": Method((str, str | None, bool), int),
}
# Calls that a front end answers.
FRONT_END_METHODS = {
    "ready": Method((EngineReady,)),
    "health": Method((Health,)),
    "outputs": Method((EngineCoreOutputs,)),
    "dead": Method((str,)),
    "abort_running": Method((str | None, str)),
}


class SharedRoots:
    """The hub's roots as a front end reaches them. What runs in this front end is found here first."""

    def __init__(self, link: Callable[[], Link]) -> None:
        self._link = link

    def note_end(self, owner: str | None, external_id: str, request_id: str, root: Root | None) -> None:
        self._link().tell("request_ended", owner, external_id, request_id, root)

    async def find(self, external_id: str, owner: str | None, wait: bool) -> Root:
        root: Root = await self._link().call("find_root", owner, external_id, wait)
        return root

    async def remove(self, external_id: str, owner: str | None) -> None:
        await self._link().call("remove_root", owner, external_id)

    async def list(self, owner: str | None) -> list[Root]:
        found: list[Root] = await self._link().call("list_roots", owner)
        return found


class HubClient:
    """The client of a front end whose engines belong to a hub in another process."""

    def __init__(self) -> None:
        self.shared_roots = SharedRoots(lambda: self.link)
        self.link: Link  # set before `start`
        self._ready: asyncio.Future[EngineReady] = asyncio.get_running_loop().create_future()
        self._health = Health()
        self._outputs: asyncio.Queue[EngineCoreOutputs | None] = asyncio.Queue()
        self._num_taken = 0
        self._dead: EngineDeadError | None = None

    def handlers(self) -> dict[str, Callable[..., Any]]:
        return {
            "ready": self._note_ready,
            "health": self._note_health,
            "outputs": self._outputs.put_nowait,
            "dead": self._die,
        }

    @property
    def ready(self) -> EngineReady:
        return self._ready.result()

    async def start(self) -> None:
        await self._ready

    def add_request(self, request: EngineCoreRequest) -> None:
        if self._dead is not None:
            raise self._dead
        self.link.tell("add_request", request)

    def take_over(self, request_id: str, num_tokens: int | None) -> None:
        """Has what another front end began sent here (EngineHub)."""
        self.link.tell("take_over", request_id, num_tokens)

    def abort_requests(self, request_ids: list[str]) -> None:
        self.link.tell("abort_requests", request_ids)

    def stop_requests(self, stopped: dict[str, int | None]) -> None:
        self.link.tell("stop_requests", stopped)

    def forget_roots(self, branch_ids: list[str]) -> None:
        """The hub has the roots, and tells the engines."""

    async def get_outputs(self) -> list[EngineCoreOutputs]:
        steps = [await self._outputs.get()]
        while not self._outputs.empty():
            steps.append(self._outputs.get_nowait())
        found = [step for step in steps if step is not None]
        if found:
            self._num_taken += len(found)
            self.link.tell("outputs_taken", self._num_taken)
        if len(found) < len(steps):
            self._outputs.put_nowait(None)  # for the next call
            if not found:
                assert self._dead is not None
                raise self._dead
        return found

    async def call_utility(self, method: str, *arguments: Any) -> list[Any]:
        results: list[Any] = await self.link.call("call_utility", method, list(arguments))
        return results

    async def add_replica(self) -> int:
        index: int = await self.link.call("add_replica")
        return index

    async def drain_replica(self, index: int, seconds: float = math.inf) -> None:
        await self.link.call("drain_replica", index, seconds)

    def health(self) -> Health:
        return self._health

    async def shutdown(self) -> None:
        """The engines belong to the hub."""

    def _note_ready(self, ready: EngineReady) -> None:
        if not self._ready.done():
            self._ready.set_result(ready)

    def _note_health(self, health: Health) -> None:
        self._health = health

    def _die(self, reason: str) -> None:
        self._dead = EngineDeadError(reason)
        self._outputs.put_nowait(None)
