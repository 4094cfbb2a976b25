"""Several engines for a blocking caller (LLM): the clients of async_client.py, on an event loop in its own thread."""

from __future__ import annotations

import asyncio
import queue
import threading
from collections.abc import Callable, Coroutine, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, TypeVar

from ratoon.core.config import EngineConfig, FrontEndConfig
from ratoon.core.errors import EngineDeadError
from ratoon.core.health import Health
from ratoon.core.request import EngineCoreOutputs, EngineCoreRequest
from ratoon.engine.processes.moving_client import client_of_settings
from ratoon.observe.startup import StartupTimer

MAX_STEPS_AHEAD = 4  # that the caller has not taken; the engines wait then
MEANS = ("kv_usage",)  # figures of an engine that are shares, and not counts

T = TypeVar("T")


class SyncDPClient:
    """Engines that share the requests. `get_output` waits for the next step of any of them."""

    def __init__(self, config: EngineConfig, own: FrontEndConfig, timer: StartupTimer) -> None:
        self._arrived: queue.SimpleQueue[EngineCoreOutputs | EngineDeadError] = queue.SimpleQueue()
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="engine clients", daemon=True)
        self._thread.start()
        self._has_room = asyncio.Event()
        self._pumping: asyncio.Task[None] | None = None
        try:
            self._client = self._call(lambda: client_of_settings(config, own, timer))
            self._wait(self._client.start())
            self._pumping = self._call(lambda: self._loop.create_task(self._pump()))
        except BaseException:
            self._end_loop()
            raise

    def add_request(self, request: EngineCoreRequest) -> None:
        self._call(lambda: self._client.add_request(request))

    @contextmanager
    def together(self) -> Iterator[None]:
        self._call(self._client.collect)
        try:
            yield
        finally:
            self._call(self._client.send_collected)

    def abort_requests(self, request_ids: list[str]) -> None:
        self._call(lambda: self._client.abort_requests(request_ids))

    def stop_requests(self, stopped: dict[str, int | None]) -> None:
        self._call(lambda: self._client.stop_requests(stopped))

    def forget_roots(self, branch_ids: list[str]) -> None:
        self._call(lambda: self._client.forget_roots(branch_ids))

    def has_work(self) -> bool:
        return not self._arrived.empty() or self._call(lambda: self._client.has_work or not self._arrived.empty())

    def get_output(self) -> EngineCoreOutputs:
        step = self._arrived.get()
        self._loop.call_soon_threadsafe(self._has_room.set)
        if isinstance(step, EngineDeadError):
            self._arrived.put(step)  # for the next call
            raise step
        return step

    def work_between_calls(self) -> None:
        """The processes do it by themselves."""

    def call_utility(self, method: str, *arguments: Any) -> Any:
        """Call a utility on every running engine; what their results are together."""
        return combine(self._wait(self._client.call_utility(method, *arguments)))

    def describe(self) -> dict[str, Any]:
        """Resolved settings and memory figures of the first engine, for display."""
        return self._client.ready.description

    def health(self) -> Health:
        return self._call(self._client.health)

    def shutdown(self) -> None:
        if self._thread.is_alive():
            if self._pumping is not None:
                self._call(self._pumping.cancel)
            self._wait(self._client.shutdown())
            self._end_loop()

    async def _pump(self) -> None:
        try:
            while True:
                while self._arrived.qsize() >= MAX_STEPS_AHEAD:
                    self._has_room.clear()
                    await self._has_room.wait()
                for step in await self._client.get_outputs():
                    self._arrived.put(step)
        except EngineDeadError as error:
            self._arrived.put(error)

    def _call(self, function: Callable[[], T]) -> T:
        """Call a function on the event loop, behind all earlier calls, and wait for its result."""

        async def call() -> T:
            return function()

        return self._wait(call())

    def _wait(self, work: Coroutine[Any, Any, T]) -> T:
        return asyncio.run_coroutine_threadsafe(work, self._loop).result()

    def _end_loop(self) -> None:
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()


def combine(results: Sequence[Any]) -> Any:
    """What the results of several engines are together: counts are added, one that is not true makes all so, shares are
    averaged, texts are listed, lists are joined."""
    first = results[0]
    if len(results) == 1 or first is None:
        return first
    if isinstance(first, bool):
        return all(results)
    if isinstance(first, (int, float)):
        return sum(results)
    if isinstance(first, dict):
        combined = {name: combine([result[name] for result in results]) for name in first}
        return combined | {name: combined[name] / len(results) for name in MEANS if name in combined}
    if isinstance(first, list):
        return [one for result in results for one in result]
    return ", ".join(map(str, results)) if isinstance(first, str) else list(results)
