"""An engine for AsyncLLM without another process: a real EngineCore in a thread of this one.

Where a test is not about processes, this starts faster and can be looked into.

    async with thread_engine("smollm2-135m") as llm:
        async for output in llm.generate("Hello"): ...
"""

from __future__ import annotations

import asyncio
import queue
import threading
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

from ratoon.core.config import EngineConfig, resolve_max_model_len
from ratoon.core.errors import EngineDeadError, RequestError
from ratoon.core.faults import fault_of
from ratoon.core.health import EngineHealth, EngineState, Health
from ratoon.core.messages import EngineReady
from ratoon.core.request import EngineCoreOutput, EngineCoreOutputs, EngineCoreRequest, FinishReason
from ratoon.core.settings import engine_config
from ratoon.engine.async_llm import AsyncLLM
from ratoon.engine.processes.client import InprocClient
from ratoon.models.source import resolve_model
from ratoon.observe.startup import StartupTimer


class ThreadEngineClient:
    """An AsyncEngineClient. All calls into the core happen on its thread, in the order in which they were made."""

    ready: EngineReady

    def __init__(self, config: EngineConfig) -> None:
        self.config = config
        self.inproc: InprocClient | None = None  # once started
        self.num_aborts: dict[str, int] = {}  # by internal id: how often it was aborted
        self._state = EngineState.STARTING
        self._calls: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._outputs: asyncio.Queue[EngineCoreOutputs | Exception] = asyncio.Queue()
        self._thread: threading.Thread | None = None

    async def start(self) -> None:
        self._loop = asyncio.get_running_loop()
        started: asyncio.Future[None] = self._loop.create_future()
        self._thread = threading.Thread(target=self._run, args=(started,), name="engine core", daemon=True)
        self._thread.start()
        await started
        self._state = EngineState.OK

    def add_request(self, request: EngineCoreRequest) -> None:
        if self._state == EngineState.DEAD:
            raise EngineDeadError("the engine is gone")
        self._calls.put(lambda: self._add(request))

    def abort_requests(self, request_ids: list[str]) -> None:
        for request_id in request_ids:
            self.num_aborts[request_id] = self.num_aborts.get(request_id, 0) + 1
        self._calls.put(lambda: self._core_client.abort_requests(request_ids))

    def stop_requests(self, stopped: dict[str, int | None]) -> None:
        for branch_id in stopped:
            self.num_aborts[branch_id] = self.num_aborts.get(branch_id, 0) + 1
        self._calls.put(lambda: self._core_client.stop_requests(stopped))

    async def get_outputs(self) -> list[EngineCoreOutputs]:
        outputs = await self._outputs.get()
        if isinstance(outputs, Exception):
            raise outputs
        return [outputs]

    async def add_replica(self) -> int:
        raise RequestError("replicas", "there is one engine", "a client of several")

    async def drain_replica(self, index: int, seconds: float) -> None:
        raise RequestError("replica", f"there is no other engine than {index}", "a client of several")

    async def call_utility(self, method: str, *arguments: Any) -> list[Any]:
        answer: asyncio.Future[Any] = self._loop.create_future()

        def call() -> None:
            try:
                result = self._core_client.call_utility(method, *arguments)
            except Exception as error:
                self._loop.call_soon_threadsafe(answer.set_exception, error)
            else:
                self._loop.call_soon_threadsafe(answer.set_result, result)

        self._calls.put(call)
        return [await answer]

    def health(self) -> Health:
        return Health([EngineHealth(0, self._state)])

    async def shutdown(self) -> None:
        self._calls.put(None)
        if self._thread is not None:
            await asyncio.to_thread(self._thread.join)
        self._state = EngineState.DEAD

    def die(self) -> None:
        """As if the process were gone for good."""
        self._state = EngineState.DEAD
        self._outputs.put_nowait(EngineDeadError("the engine is gone"))

    @property
    def _core_client(self) -> InprocClient:
        assert self.inproc is not None
        return self.inproc

    def _run(self, started: asyncio.Future[None]) -> None:
        try:
            source = resolve_model(self.config.model)
            max_model_len = resolve_max_model_len(self.config.max_model_len, source.config)
            config = self.config.with_(max_model_len=max_model_len)
            client = self.inproc = InprocClient(config, source, StartupTimer())
            self.ready = EngineReady(client.describe(), max_model_len, self.config.cache.block_size)
        except Exception as error:
            self._loop.call_soon_threadsafe(started.set_exception, error)
            return
        self._loop.call_soon_threadsafe(started.set_result, None)
        while self._take_calls():
            if client.core.can_step:
                self._send(client.get_output())
        client.shutdown()

    def _take_calls(self) -> bool:
        """Carry out what was asked for; with nothing else to do, wait for it. False: the end was asked for."""
        core = self._core_client.core
        while True:
            try:  # a grammar that is being compiled does not wake this thread when it is ready
                call = self._calls.get(block=not core.can_step, timeout=0.01 if len(core.preparing) else None)
            except queue.Empty:
                return True
            if call is None:
                return False
            call()

    def _add(self, request: EngineCoreRequest) -> None:
        try:
            self._core_client.add_request(request)
        except RequestError as error:
            fault = fault_of(error)
            refused = EngineCoreOutput(
                request.request_id, [], finish_reason=FinishReason.ERROR, error=str(error), refusal=fault
            )
            self._send(EngineCoreOutputs([refused]))

    def _send(self, outputs: EngineCoreOutputs) -> None:
        self._loop.call_soon_threadsafe(self._outputs.put_nowait, outputs)


@asynccontextmanager
async def thread_engine(model: str, *, skip_tokenizer: bool = False, **settings: Any) -> AsyncIterator[AsyncLLM]:
    """An AsyncLLM over a core in a thread, started; ended behind the block."""
    llm = make_thread_engine(model, skip_tokenizer=skip_tokenizer, **settings)
    async with llm:
        yield llm


def make_thread_engine(model: str, *, metrics: Any = None, skip_tokenizer: bool = False, **settings: Any) -> AsyncLLM:
    """The same, not started."""
    client = ThreadEngineClient(engine_config(model, **settings))
    return AsyncLLM(model, client=client, metrics=metrics, skip_tokenizer=skip_tokenizer, **settings)
