"""Requests under way in the engine, the callers who wait for them, and the task that brings what the engine sends.

One for each AsyncLLM, on its event loop. How outputs are made is the OutputProcessor's, and how a caller waits the
OutputCollector's; this connects them, and sees to it that nothing of a request is left when it or its caller goes.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable
from contextlib import suppress
from typing import TYPE_CHECKING

from ratoon.core.errors import EngineDeadError, EngineError
from ratoon.core.params import RequestOutputKind
from ratoon.core.request import EngineCoreOutput, EngineCoreOutputs, EngineCoreRequest
from ratoon.engine.client_interface import AsyncEngineClient
from ratoon.engine.output_collector import OutputCollector
from ratoon.engine.output_processor import OutputProcessor
from ratoon.engine.request_state import Output
from ratoon.observe.logging import get_logger

if TYPE_CHECKING:
    from ratoon.observe.metrics import EngineMetrics

SLICE = 128  # outputs that are handled before others on the event loop have their turn

logger = get_logger(__name__)


class OutputHandler:
    def __init__(
        self, client: AsyncEngineClient, output_processor: OutputProcessor, metrics: EngineMetrics | None
    ) -> None:
        self.dead: EngineDeadError | None = None  # why nothing will be answered any more
        self.collectors: dict[str, OutputCollector] = {}  # by the caller's id, as long as a request is unfinished
        self.output_processor = output_processor  # has the same requests
        self._waiting_for_ends: dict[str, list[asyncio.Future[None]]] = {}
        self._client = client
        self._metrics = metrics
        self._task = asyncio.create_task(self._run(), name="output handler")

    async def stop(self) -> None:
        self._task.cancel()
        await asyncio.gather(self._task, return_exceptions=True)

    # ---- callers ----

    def submit(self, request: EngineCoreRequest, text: str | None) -> OutputCollector:
        """Hand a request over. Whatever is raised, nothing of it is left behind."""
        pooling = request.pooling_params is not None
        collector = OutputCollector(RequestOutputKind.FINAL_ONLY if pooling else request.sampling_params.output_kind)
        self.output_processor.add_request(request, text)
        try:
            self._client.add_request(request)
        except Exception as error:
            self.output_processor.fail_request(_external_id(request), error)
            raise
        self.collectors[_external_id(request)] = collector
        return collector

    def release(self, request: EngineCoreRequest, collector: OutputCollector) -> None:
        """The caller is gone. A request that has not ended is aborted; another one may have its id by now."""
        external_id = _external_id(request)
        if self.collectors.get(external_id) is collector:
            del self.collectors[external_id]
            self.abort([external_id])
            self._tell_of_end(external_id)

    async def wait_for_end(self, external_id: str) -> None:
        """Returns at once for a request that is not under way."""
        if external_id in self.collectors:
            ended = asyncio.get_running_loop().create_future()
            self._waiting_for_ends.setdefault(external_id, []).append(ended)
            await ended

    def _tell_of_end(self, external_id: str) -> None:
        for ended in self._waiting_for_ends.pop(external_id, ()):
            if not ended.done():
                ended.set_result(None)

    def abort(self, external_ids: Iterable[str]) -> None:
        """End requests. Those who wait for them get a last output."""
        outputs, internal_ids = self.output_processor.abort_requests(external_ids)
        self._deliver(outputs)
        self._abort_in_engine(internal_ids)

    # ---- what comes back ----

    async def _run(self) -> None:
        try:
            while True:
                outputs = await self._client.get_outputs()
                if self._metrics is not None and outputs.scheduler_stats is not None:
                    self._metrics.record_engine(outputs.engine_index, outputs.scheduler_stats)
                for start in range(0, len(outputs.outputs), SLICE):
                    self._handle(outputs.outputs[start : start + SLICE], outputs.engine_index)
                    await asyncio.sleep(0)  # callers take what they got, new requests come in
        except EngineDeadError as error:
            self._die(error)
        except Exception as error:
            logger.exception("the output handler failed")
            self._die(EngineDeadError(f"the output handler failed: {type(error).__name__}: {error}"))

    def _handle(self, outputs: list[EngineCoreOutput], engine_index: int) -> None:
        part = EngineCoreOutputs(outputs, engine_index=engine_index)
        results, stopped = self.output_processor.process_outputs(part)
        self._deliver(results)
        if stopped:
            with suppress(EngineDeadError):  # what is dead has nothing left to stop
                self._client.stop_requests(stopped)

    def _deliver(self, outputs: list[Output]) -> None:
        for output in outputs:
            collector = self.collectors.get(output.request_id)
            if collector is None:
                continue
            if output.finished:
                del self.collectors[output.request_id]
                self._tell_of_end(output.request_id)
            try:
                collector.put(output)
            except Exception as error:  # ours to repair, and this caller's alone to suffer
                logger.exception("request %s failed in the front end", output.request_id)
                collector.fail(EngineError(f"{type(error).__name__}: {error}"))

    def _abort_in_engine(self, internal_ids: list[str]) -> None:
        if internal_ids:
            with suppress(EngineDeadError):  # what is dead has nothing left to abort
                self._client.abort_requests(internal_ids)

    def _die(self, error: EngineDeadError) -> None:
        """The engine is gone for good: all who wait hear of it."""
        self.dead = error
        collectors, self.collectors = self.collectors, {}
        for external_id, collector in collectors.items():
            self._tell_of_end(external_id)
            self.output_processor.fail_request(external_id, error)
            collector.fail(EngineDeadError(*error.args))  # one for each: they get a traceback of their own


def _external_id(request: EngineCoreRequest) -> str:
    return request.request_id if request.external_id is None else request.external_id
