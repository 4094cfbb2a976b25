"""What the front ends need of the way to the engine cores, wherever those run. Who is on that way is told elsewhere."""

from __future__ import annotations

from typing import Any, Protocol

from ratoon.core.health import Health
from ratoon.core.messages import EngineReady
from ratoon.core.request import EngineCoreOutputs, EngineCoreRequest


class EngineClient(Protocol):
    """For LLMEngine: one engine, one caller, who waits."""

    def add_request(self, request: EngineCoreRequest) -> None:
        """Hand a request over. RequestError if the engine can never serve it; from another process that comes back as
        an output with `refusal` instead."""

    def abort_requests(self, request_ids: list[str]) -> None: ...

    def stop_requests(self, request_ids: list[str]) -> None:
        """Like an abort, for what a stop string ended here: what it asked to keep for continuations is kept."""

    def get_output(self) -> EngineCoreOutputs: ...

    def has_work(self) -> bool: ...


class AsyncEngineClient(Protocol):
    """For AsyncLLM: one or several engines, many callers on one event loop."""

    @property
    def ready(self) -> EngineReady:
        """Of the first engine; there once `start` has returned."""
        ...

    async def start(self) -> None:
        """Start the engine processes and wait until they are ready. Raises what made one fail (ConfigError, …)."""

    def add_request(self, request: EngineCoreRequest) -> None:
        """Hand a request over; never waits. What is wrong with it comes back as an output with `refusal`.
        EngineDeadError once the engine is given up."""

    def abort_requests(self, request_ids: list[str]) -> None: ...

    def stop_requests(self, request_ids: list[str]) -> None:
        """Like an abort, for what a stop string ended here: what it asked to keep for continuations is kept."""

    async def get_outputs(self) -> EngineCoreOutputs:
        """The next step's outputs, of whichever engine. EngineDeadError once the engine is given up."""
        ...

    async def call_utility(self, method: str, *arguments: Any) -> list[Any]:
        """Call a utility on every engine; their results, in the engines' order."""
        ...

    def health(self) -> Health: ...

    async def shutdown(self) -> None: ...
