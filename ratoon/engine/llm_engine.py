"""The synchronous engine: input processing, the engine core behind its client, output processing, in one step loop.

It serves one caller on one thread; only `abort_request` may be called from others. Lists of prompts, progress and chat
templates are the API's.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Iterable

from ratoon.core.errors import EngineError, RequestError
from ratoon.core.params import GenerationParams
from ratoon.core.request import EngineCoreRequest
from ratoon.engine.client_interface import EngineClient
from ratoon.engine.hidden_states import Selection
from ratoon.engine.input_processor import InputProcessor
from ratoon.engine.output_processor import OutputProcessor
from ratoon.engine.prompts import Prompt, texts_of
from ratoon.engine.request_state import Output
from ratoon.observe.throughput import ThroughputLog


class LLMEngine:
    def __init__(
        self,
        client: EngineClient,
        input_processor: InputProcessor,
        output_processor: OutputProcessor,
        throughput: ThroughputLog | None = None,
    ) -> None:
        self.client = client
        self.input_processor = input_processor
        self.output_processor = output_processor
        self._throughput = throughput
        self._lock = threading.Lock()  # the output processor belongs to who holds it

    def add_request(
        self,
        request_id: str,
        prompt: Prompt,
        params: GenerationParams,
        *,
        priority: int = 0,
        arrival_time: float | None = None,
        cache_salt: str | None = None,
    ) -> None:
        """Check a request and hand it to the engine. RequestError: nothing of it is left behind."""
        request = self.input_processor.process(
            request_id, prompt, params, priority=priority, arrival_time=arrival_time, cache_salt=cache_salt
        )
        text, encoder_text = texts_of(prompt, request.encoder_input is not None)
        self.submit(request, text, encoder_prompt=encoder_text)

    def submit(
        self,
        request: EngineCoreRequest,
        prompt: str | None,
        selection: Selection | None = None,
        encoder_prompt: str | None = None,
    ) -> None:
        """Hand over a request that was processed before. RequestError: the engine refused it. An engine in another
        process refuses it later: a step then brings an output with `refusal`. `selection` comes with a request for
        hidden states."""
        with self._lock:
            if self._throughput is not None and not self.has_unfinished_requests():
                self._throughput.begin_work()
            self.output_processor.add_request(request, prompt, selection, encoder_prompt)
            try:
                self.client.add_request(request)
            except Exception as error:
                self.output_processor.fail_request(request.external_id or request.request_id, error, request.owner)
                raise

    def refuse(
        self,
        request: EngineCoreRequest,
        prompt: str | None,
        selection: Selection | None = None,
        encoder_prompt: str | None = None,
        *,
        error: RequestError,
    ) -> Output:
        """The output of a request that the engine did not take, as if a step had brought it."""
        self.output_processor.add_request(request, prompt, selection, encoder_prompt)
        output = self.output_processor.fail_request(request.external_id or request.request_id, error, request.owner)
        assert output is not None
        return output

    def step(self) -> list[Output]:
        """Run one step and return what it brought for callers: nothing while the engine is paused."""
        if not self.client.has_work():
            if self.has_unfinished_requests():
                raise EngineError("the engine has no work left, but requests wait for their end")
            return []
        engine_outputs = self.client.get_output()
        with self._lock:
            outputs, stopped, extractions = self.output_processor.process_outputs(engine_outputs)
            if stopped:
                self.client.stop_requests(stopped)
            outputs += self._extract(extractions)
        if self._throughput is not None:
            if engine_outputs.scheduler_stats is not None:
                self._throughput.record_engine(engine_outputs.engine_index, engine_outputs.scheduler_stats)
            self._throughput.write_when_due(idle=not self.has_unfinished_requests())
        return outputs

    def abort_request(self, request_ids: Iterable[str]) -> list[Output]:
        """Take requests back, by the caller's ids; those that are unknown or finished are passed over. From any thread:
        what the step under way brings for them is dropped."""
        with self._lock:
            outputs, aborted, extractions = self.output_processor.abort_requests(request_ids)
            if aborted:
                self.client.abort_requests(aborted)
            return outputs + self._extract(extractions)

    def _extract(self, extractions: list[EngineCoreRequest]) -> list[Output]:
        """Have hidden states read that ended requests asked for."""
        outputs: list[Output] = []
        waiting = deque(extractions)
        while waiting:
            request = waiting.popleft()
            try:
                self.client.add_request(request)
            except Exception as error:  # the answer has its text all the same
                failed = self.output_processor.fail_extraction(request.request_id, error)
                outputs += failed.outputs
                waiting += failed.extractions
        return outputs

    def has_unfinished_requests(self) -> bool:
        return self.output_processor.has_unfinished_requests()

    def num_unfinished_requests(self) -> int:
        return self.output_processor.num_unfinished_requests()
