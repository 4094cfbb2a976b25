"""Requests under way in the engine, the callers who wait for them, and the task that brings what the engine sends.

One for each AsyncLLM, on its event loop. How outputs are made is the OutputProcessor's, and how a caller waits the
OutputCollector's; this connects them, and sees to it that nothing of a request is left when it or its caller goes.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Iterable, Iterator
from contextlib import suppress
from typing import TYPE_CHECKING, TypeAlias

from ratoon.core.errors import EngineDeadError, EngineError
from ratoon.core.params import RequestOutputKind
from ratoon.core.request import EngineCoreOutput, EngineCoreOutputs, EngineCoreRequest
from ratoon.core.stats import SchedulerStats
from ratoon.engine.client_interface import AsyncEngineClient
from ratoon.engine.hidden_states import Selection
from ratoon.engine.output_collector import OutputCollector
from ratoon.engine.output_processor import OutputProcessor
from ratoon.engine.request_state import Output
from ratoon.observe.logging import get_logger
from ratoon.observe.throughput import INTERVAL, ThroughputLog

if TYPE_CHECKING:
    from ratoon.observe.metrics import EngineMetrics

Key: TypeAlias = tuple[str | None, str]  # whose request it is, and how he calls it
SLICE = 128  # outputs that are handled before others on the event loop have their turn,
SLICE_TOKENS = 512  # or so many tokens: the texts that a beam search found come all at once
BYTES_LIKE_A_TOKEN = 2**13  # of hidden states, that take as long as a token

logger = get_logger(__name__)


class OutputHandler:
    def __init__(
        self,
        client: AsyncEngineClient,
        output_processor: OutputProcessor,
        metrics: EngineMetrics | None,
        throughput: ThroughputLog | None = None,
    ) -> None:
        self.dead: EngineDeadError | None = None  # why nothing will be answered any more
        self.collectors: dict[Key, OutputCollector] = {}  # as long as a request is unfinished
        self.output_processor = output_processor  # has the same requests
        self._waiting_for_ends: dict[Key, list[asyncio.Future[None]]] = {}
        self._client = client
        self._metrics = metrics
        self._throughput = throughput
        self._tasks = [asyncio.create_task(self._run(), name="output handler")]
        if throughput is not None:
            self._tasks.append(asyncio.create_task(self._write_throughput(throughput), name="throughput log"))

    async def stop(self) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    # ---- callers ----

    def submit(
        self,
        request: EngineCoreRequest,
        prompt: str | None,
        selection: Selection | None = None,
        encoder_prompt: str | None = None,
    ) -> OutputCollector:
        """Hand a request over. Whatever is raised, nothing of it is left behind."""
        has_text = request.pooling_params is None and request.extraction is None
        collector = OutputCollector(request.sampling_params.output_kind if has_text else RequestOutputKind.FINAL_ONLY)
        self.output_processor.add_request(request, prompt, selection, encoder_prompt)
        owner, external_id = key = _key(request)
        try:
            self._client.add_request(request)
        except Exception as error:
            self.output_processor.fail_request(external_id, error, owner)
            raise
        self.collectors[key] = collector
        return collector

    def release(self, request: EngineCoreRequest, collector: OutputCollector) -> None:
        """The caller is gone. A request that has not ended is aborted; another one may have its id by now."""
        owner, external_id = key = _key(request)
        if self.collectors.get(key) is collector:
            del self.collectors[key]
            self.abort([external_id], owner)
            self._tell_of_end(key)

    async def wait_for_end(self, external_id: str, owner: str | None = None) -> None:
        """Returns at once for a request that is not under way."""
        key = owner, external_id
        if key in self.collectors:
            ended = asyncio.get_running_loop().create_future()
            self._waiting_for_ends.setdefault(key, []).append(ended)
            await ended

    def _tell_of_end(self, key: Key) -> None:
        for ended in self._waiting_for_ends.pop(key, ()):
            if not ended.done():
                ended.set_result(None)

    def abort(self, external_ids: Iterable[str], owner: str | None = None) -> None:
        """End requests. Those who wait for them get a last output."""
        outputs, aborted, extractions = self.output_processor.abort_requests(external_ids, owner)
        self._deliver(outputs)
        if aborted:
            with suppress(EngineDeadError):  # what is dead has nothing left to abort
                self._client.abort_requests(aborted)
        self._extract(extractions)

    def abort_all(self) -> None:
        for owner, external_id in list(self.collectors):
            self.abort([external_id], owner)

    # ---- what comes back ----

    async def _run(self) -> None:
        try:
            while True:
                outputs = await self._client.get_outputs()
                if outputs.scheduler_stats is not None:
                    self._record_stats(outputs.engine_index, outputs.scheduler_stats)
                for part in _slices(outputs.outputs):
                    self._handle(part, outputs)
                    await asyncio.sleep(0)  # callers take what they got, new requests come in
        except EngineDeadError as error:
            self._die(error)
        except Exception as error:
            logger.exception("the output handler failed")
            self._die(EngineDeadError(f"the output handler failed: {type(error).__name__}: {error}"))

    def _record_stats(self, engine_index: int, stats: SchedulerStats) -> None:
        if self._metrics is not None:
            self._metrics.record_engine(engine_index, stats)
        if self._throughput is not None:
            self._throughput.record_engine(engine_index, stats)

    @staticmethod
    async def _write_throughput(throughput: ThroughputLog) -> None:
        while True:
            await asyncio.sleep(INTERVAL)
            throughput.write()

    def _handle(self, outputs: list[EngineCoreOutput], step: EngineCoreOutputs) -> None:
        part = EngineCoreOutputs(outputs, timestamp=step.timestamp, engine_index=step.engine_index)
        results, stopped, extractions = self.output_processor.process_outputs(part)
        self._deliver(results)
        if stopped:
            with suppress(EngineDeadError):  # what is dead has nothing left to stop
                self._client.stop_requests(stopped)
        self._extract(extractions)

    def _extract(self, extractions: list[EngineCoreRequest]) -> None:
        """Have hidden states read that ended requests asked for."""
        waiting = deque(extractions)
        while waiting:
            request = waiting.popleft()
            try:
                self._client.add_request(request)
            except Exception as error:  # the answer has its text all the same
                failed = self.output_processor.fail_extraction(request.request_id, error)
                self._deliver(failed.outputs)
                waiting += failed.extractions

    def _deliver(self, outputs: list[Output]) -> None:
        for output in outputs:
            key = output.owner, output.request_id
            collector = self.collectors.get(key)
            if collector is None:
                continue
            if output.finished:
                del self.collectors[key]
                self._tell_of_end(key)
            try:
                collector.put(output)
            except Exception as error:  # ours to repair, and this caller's alone to suffer
                logger.exception("request %s failed in the front end", output.request_id)
                collector.fail(EngineError(f"{type(error).__name__}: {error}"))

    def _die(self, error: EngineDeadError) -> None:
        """The engine is gone for good: all who wait hear of it."""
        self.dead = error
        collectors, self.collectors = self.collectors, {}
        for (owner, external_id), collector in collectors.items():
            self._tell_of_end((owner, external_id))
            output = self.output_processor.fail_request(external_id, error, owner)
            if output is not None and output.error is None:
                collector.put(output)  # its text was done, and only its hidden states are missing
            else:
                collector.fail(EngineDeadError(*error.args))  # one for each: they get a traceback of their own


def _key(request: EngineCoreRequest) -> Key:
    return request.owner, request.request_id if request.external_id is None else request.external_id


def _slices(outputs: list[EngineCoreOutput]) -> Iterator[list[EngineCoreOutput]]:
    part: list[EngineCoreOutput] = []
    num_tokens = 0
    for output in outputs:
        part.append(output)
        num_tokens += len(output.new_token_ids)
        if output.hidden_states is not None:
            num_tokens += output.hidden_states.data.nbytes // BYTES_LIKE_A_TOKEN
        if len(part) == SLICE or num_tokens >= SLICE_TOKENS:
            yield part
            part, num_tokens = [], 0
    if part:
        yield part
