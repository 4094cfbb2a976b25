"""What AsyncLLM stands on, played from a script: no process, no model, no torch. And tests on an event loop."""

from __future__ import annotations

import asyncio
import functools
from collections.abc import Callable, Coroutine
from types import SimpleNamespace
from typing import Any, ClassVar

from ratoon.core.errors import EngineDeadError, RequestError
from ratoon.core.health import EngineHealth, EngineState, Health
from ratoon.core.messages import EngineReady
from ratoon.core.request import EngineCoreOutput, EngineCoreOutputs, EngineCoreRequest
from ratoon.core.stats import SchedulerStats
from tests.unit.engine.fakes import FakeClient, Script, byte_tokenizer, echo, model_config, refusal

MAX_MODEL_LEN = 64
SECONDS = 120.0  # a test that hangs should say so


def on_event_loop(test: Callable[..., Coroutine[Any, Any, None]]) -> Callable[..., None]:
    @functools.wraps(test)
    def run(*arguments: Any, **fixtures: Any) -> None:
        asyncio.run(asyncio.wait_for(test(*arguments, **fixtures), SECONDS))

    return run


class FakeAsyncClient:
    """An AsyncEngineClient over the scripted engine core. It steps by itself unless `by_hand` is set."""

    def __init__(self, script: Script = echo, by_hand: bool = False) -> None:
        self.core = FakeClient(script)
        self.by_hand = by_hand
        self.ready = EngineReady({"device": "fake"}, MAX_MODEL_LEN, 16)
        self.calls: list[tuple[Any, ...]] = []  # of utilities
        self.results: dict[str, Any] = {}  # what they answer
        self.fail_to_start: Exception | None = None
        self.started = asyncio.Event()
        self.num_shutdowns = 0
        self.num_steps = 0
        self._steps_left = 0
        self._waiting: list[EngineCoreOutputs | Exception] = []
        self._news = asyncio.Event()
        self._dead = False

    async def start(self) -> None:
        if self.fail_to_start is not None:
            raise self.fail_to_start
        self.started.set()

    def add_request(self, request: EngineCoreRequest) -> None:
        if self._dead:
            raise EngineDeadError("gone")
        try:
            self.core.add_request(request)
        except RequestError as error:
            self.send(refusal(request, error))
        self._news.set()

    def abort_requests(self, request_ids: list[str]) -> None:
        self.core.abort_requests(request_ids)

    def stop_requests(self, stopped: dict[str, int | None]) -> None:
        self.core.stop_requests(stopped)

    def step(self, count: int = 1) -> None:
        """Allow so many steps, if they are taken by hand."""
        self._steps_left += count
        self._news.set()

    def send(self, *outputs: EngineCoreOutput, stats: SchedulerStats | None = None) -> None:
        """Bring these outputs, whatever the script says."""
        self._waiting.append(EngineCoreOutputs(list(outputs), stats))
        self._news.set()

    def die(self, error: Exception | None = None) -> None:
        self._dead = True
        self._waiting.append(error or EngineDeadError("gone"))
        self._news.set()

    async def get_outputs(self) -> list[EngineCoreOutputs]:
        while True:
            if self._waiting:
                first = self._waiting.pop(0)
                if isinstance(first, Exception):
                    raise first
                return [first]
            if self.core.has_work() and (not self.by_hand or self._steps_left):
                self._steps_left -= 1
                self.num_steps += 1
                outputs = self.core.get_output()
                outputs.scheduler_stats = SchedulerStats(num_steps=self.num_steps)
                return [outputs]
            self._news.clear()
            await self._news.wait()

    async def call_utility(self, method: str, *arguments: Any) -> list[Any]:
        self.calls.append((method, *arguments))
        return [self.results.get(method)]

    async def add_replica(self) -> int:
        self.calls.append(("add_replica",))
        return 1

    async def drain_replica(self, index: int, seconds: float) -> None:
        self.calls.append(("drain_replica", index, seconds))

    def health(self) -> Health:
        return Health([EngineHealth(0, EngineState.DEAD if self._dead else EngineState.OK)])

    async def shutdown(self) -> None:
        self.num_shutdowns += 1


class FakeSource(SimpleNamespace):
    prompts: ClassVar[dict[str, str]] = {}
    default_prompt: str | None = None

    def load_tokenizer(self) -> Any:
        return self.tokenizer


def fake_source() -> FakeSource:
    return FakeSource(
        name="fake",
        config=model_config(),
        generation_defaults={"temperature": 0.5},
        pooling=None,
        chat_template="{{ messages }}",
        tokenizer=byte_tokenizer(),
    )
