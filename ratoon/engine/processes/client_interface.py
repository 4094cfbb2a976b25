"""The interfaces of clients of engine cores, in this process or in others, that the front ends use."""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Any, Protocol

from ratoon.core.health import Health
from ratoon.core.messages import EngineReady
from ratoon.core.request import EngineCoreOutputs, EngineCoreRequest


class RequestClient(Protocol):
    """The part of a client that the front end uses. Nothing here waits."""

    def add_request(self, request: EngineCoreRequest) -> None:
        """Hand a request over. RequestError if an engine in this process can never serve it; from another process that
        comes back as an output with `refusal`. EngineDeadError once the engine is given up."""

    def abort_requests(self, request_ids: list[str]) -> None: ...

    def stop_requests(self, stopped: dict[str, int | None]) -> None:
        """Ends branches as an abort does, because a stop string ended them here: leases that they asked for are
        granted, and hidden states are read where the number of tokens that count is given."""

    def health(self) -> Health:
        """The state of each engine that a request may name."""
        ...

    def forget_roots(self, branch_ids: list[str]) -> None:
        """Has the engines drop the texts of these branches, which are those of no root any more. What is handed over
        later is not drafted from them."""


class EngineClient(RequestClient, Protocol):
    """The client of LLMEngine: one engine, and one caller, which waits."""

    def together(self) -> AbstractContextManager[None]:
        """Requests that are handed over inside begin together: the first step that has one of them has all that fit."""
        ...

    def get_output(self) -> EngineCoreOutputs: ...

    def has_work(self) -> bool: ...

    def work_between_calls(self) -> None:
        """The caller has its results: a moment for what makes later requests faster."""

    def call_utility(self, method: str, *arguments: Any) -> Any: ...

    def describe(self) -> dict[str, Any]:
        """Resolved settings and memory figures, for display."""
        ...

    def shutdown(self) -> None: ...


class AsyncEngineClient(RequestClient, Protocol):
    """The client of AsyncLLMEngine: one or several engines, and many callers on one event loop."""

    @property
    def ready(self) -> EngineReady:
        """The facts that the first engine reported when it was ready; there are none before `start` has returned."""
        ...

    async def start(self) -> None:
        """Start the engine processes and wait until they are ready. Raises the error of one that failed (ConfigError,
        …)."""

    async def get_outputs(self) -> list[EngineCoreOutputs]:
        """The outputs of the next step, of any engine, and of all further steps that have come. EngineDeadError once
        the engine is given up."""
        ...

    async def call_utility(self, method: str, *arguments: Any) -> list[Any]:
        """Call a utility on every engine; their results, in the engines' order."""
        ...

    async def add_replica(self) -> int:
        """Starts another engine and waits until it is ready. Returns its index. Raises why it did not start."""
        ...

    async def drain_replica(self, index: int, seconds: float = ...) -> None:
        """Gives this engine no further request, waits until it has none left, at most so long, and ends it. What it has
        left then is continued by the others."""
        ...

    async def shutdown(self) -> None: ...
