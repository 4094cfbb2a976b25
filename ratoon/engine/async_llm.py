"""AsyncLLM: many callers on one event loop, one engine behind them, in processes of its own.

It hands requests over, and one task takes what comes back and gives it to whoever waits for it. Input and output
processing are the synchronous engine's own; how engine processes live, die and come back is the client's.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Iterable
from typing import TYPE_CHECKING, Any, Protocol, Unpack

from ratoon.core.config import EngineConfig
from ratoon.core.health import Health
from ratoon.core.messages import EngineReady
from ratoon.core.outputs import EmbeddingOutput, RequestOutput
from ratoon.core.params import PoolingParams, SamplingParams
from ratoon.core.request import EngineCoreOutputs, EngineCoreRequest
from ratoon.core.settings import EngineSettings
from ratoon.core.stats import SchedulerStats
from ratoon.engine.input_processor import Prompt

if TYPE_CHECKING:
    from ratoon.models.source import ModelSource
    from ratoon.models.tokenizer import Tokenizer


class AsyncEngineClient(Protocol):
    """What AsyncLLM needs of the way to the engine cores."""

    ready: EngineReady  # of the first engine; set once `start` has returned

    async def start(self) -> None:
        """Start the engine processes and wait until they are ready. Raises what made one fail (ConfigError, …)."""

    def add_request(self, request: EngineCoreRequest) -> None:
        """Hand a request over; never waits. What is wrong with it comes back as an output with `refusal`.
        EngineDeadError once the engine is given up."""

    def abort_requests(self, request_ids: list[str]) -> None: ...

    async def get_outputs(self) -> EngineCoreOutputs:
        """The next step's outputs, of whichever engine. EngineDeadError once the engine is given up."""
        ...

    async def call_utility(self, method: str, *arguments: Any) -> list[Any]:
        """Call a utility on every engine; their results, in the engines' order."""
        ...

    def health(self) -> Health: ...

    async def shutdown(self) -> None: ...
