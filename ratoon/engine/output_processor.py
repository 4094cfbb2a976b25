"""Engine outputs to what callers get, for every request that is under way on this side of the engine.

It never talks to the engine: what must be ended there, because it ended here first (at a stop string, say), it returns
as ids. What becomes of one request is worked out by its RequestState.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any

from ratoon.core.errors import RequestError
from ratoon.core.request import EngineCoreOutputs, EngineCoreRequest, FinishReason
from ratoon.engine.request_state import Output, RequestState, make_request_state
from ratoon.engine.roots import Root, RootTable
from ratoon.observe.logging import get_logger

if TYPE_CHECKING:
    from ratoon.observe.metrics import EngineMetrics

logger = get_logger(__name__)


class OutputProcessor:
    """Requests go in by `add_request`; `process_outputs`, `abort_requests` and `fail_request` give their outputs.

    A generating request gives RequestOutputs, one or many as its `output_kind` asks. A pooling request gives one
    EmbeddingOutput, when it ends; if it failed, `error` is set and `embedding` is None. Both stand in the same list:
    `request_id` and `owner` say whose they are, `finished` that nothing more will come. What the engine refused has
    `refusal`, the RequestError that a caller should get; `error` says the same as text.

    Callers' ids are an owner's own: what one calls his request neither meets nor tells what another one does.
    """

    def __init__(
        self,
        tokenizer: Any | None,
        clock: Callable[[], float] = time.monotonic,
        metrics: EngineMetrics | None = None,
    ) -> None:
        self._tokenizer = tokenizer
        self._clock = clock
        self._metrics = metrics
        self._states: dict[str, RequestState] = {}  # by internal id
        self._internal_ids: dict[tuple[str | None, str], str] = {}  # by owner and the caller's id
        self.roots = RootTable()  # what has ended and can be continued

    def add_request(self, request: EngineCoreRequest, prompt: str | None) -> None:
        state = make_request_state(request, prompt, self._tokenizer)
        if self.is_running(state.external_id, state.owner):
            raise RequestError("request_id", f"{state.external_id!r} is in use", "an id that no unfinished request has")
        self._internal_ids[state.owner, state.external_id] = state.request_id
        self._states[state.request_id] = state

    def has_unfinished_requests(self) -> bool:
        return bool(self._states)

    def num_unfinished_requests(self) -> int:
        return len(self._states)

    def find_root(self, external_id: str, owner: str | None = None) -> Root:
        """A request that can be continued: one that has ended, or that runs, as far as it has come."""
        state = self._find(external_id, owner) if isinstance(external_id, str) else None
        if state is not None and state.pooling_params is None:
            return state.snapshot()
        return self.roots.find(external_id, owner)

    def is_running(self, external_id: str, owner: str | None = None) -> bool:
        return (owner, external_id) in self._internal_ids

    def _find(self, external_id: str, owner: str | None) -> RequestState | None:
        return self._states.get(self._internal_ids.get((owner, external_id), ""))

    def process_outputs(self, outputs: EngineCoreOutputs) -> tuple[list[Output], list[str]]:
        """What callers get for this step, and the ids that the engine should abort: they ended here alone.

        Whatever goes wrong here with one request ends that request, with an error, and no other.
        """
        now = self._clock()
        touched: dict[str, RequestState] = {}
        results: list[Output] = []
        to_abort: list[str] = []
        for output in outputs.outputs:
            state = self._states.get(output.request_id)
            # The engine may have been a step ahead of an abort: what it still sends is nobody's.
            if state is None or output.choice >= len(state.choices) or state.choices[output.choice].finished:
                continue
            choice = state.choices[output.choice]
            state.engine = outputs.engine_index
            try:
                state.take(choice, output, now)
            except Exception as error:
                touched.pop(state.request_id, None)
                results.append(self._give_up(state, error, now))
                to_abort.append(state.request_id)
                continue
            touched[state.request_id] = state
            if choice.finished and not output.finished:
                to_abort.append(state.abort_id(choice))
        for state in touched.values():
            try:
                state.end_choices_that_never_began()
                result = self._deliver(state, now)
            except Exception as error:
                result = self._give_up(state, error, now)
                to_abort.append(state.request_id)
            if result is not None:
                results.append(result)
        return results, to_abort

    def abort_requests(self, external_ids: Iterable[str], owner: str | None = None) -> tuple[list[Output], list[str]]:
        """End requests here. Returns their last outputs, and the ids to abort in the engine."""
        return self._end(external_ids, owner, FinishReason.ABORT, None)

    def fail_request(self, external_id: str, error: Exception, owner: str | None = None) -> Output | None:
        """End a request that the engine could not take or carry out; a RequestError becomes its `refusal`."""
        results, _ = self._end([external_id], owner, FinishReason.ERROR, error)
        return results[0] if results else None

    def _end(
        self, external_ids: Iterable[str], owner: str | None, reason: FinishReason, error: Exception | None
    ) -> tuple[list[Output], list[str]]:
        results: list[Output] = []
        internal_ids = []
        now = self._clock()
        for external_id in external_ids:
            state = self._find(external_id, owner)
            if state is None:
                continue
            internal_ids.append(state.request_id)
            try:
                state.end(reason, error)
                result = self._deliver(state, now)
            except Exception as failure:
                result = self._give_up(state, failure, now)
            if result is not None:
                results.append(result)
        return results, internal_ids

    def _deliver(self, state: RequestState, now: float) -> Output | None:
        """The caller's output for what changed, if there is one to give; forget the request once it is finished."""
        if self._metrics is not None and state.got_tokens:
            self._measure_tokens(self._metrics, state, now)
        state.got_tokens = False
        state.num_new_tokens = 0
        finished = state.finished
        if finished:
            state.metrics.finished_time = now
        result = state.next_output(finished)
        if finished:
            self._forget(state)
        return result

    def _give_up(self, state: RequestState, error: Exception, now: float) -> Output:
        logger.error("request %s failed in the front end", state.external_id, exc_info=error)
        state.error = f"{type(error).__name__}: {error}"
        state.metrics.finished_time = now
        result = state.last_output()
        self._forget(state)
        return result

    def _forget(self, state: RequestState) -> None:
        del self._states[state.request_id]
        del self._internal_ids[state.owner, state.external_id]
        root = state.as_root() if state.error is None else None
        if root is not None:
            self.roots.add(root)
        if self._metrics is not None:
            self._measure_end(self._metrics, state)

    def _measure_tokens(self, metrics: EngineMetrics, state: RequestState, now: float) -> None:
        if state.last_token_time is None:
            metrics.record_first_token(now - state.metrics.arrival_time, len(state.prompt_token_ids))
            if state.continuation is not None:
                metrics.record_continuation(state.continuation.source)
        else:
            metrics.record_next_token(now - state.last_token_time)
        state.last_token_time = now
        metrics.record_generated(state.num_new_tokens)

    def _measure_end(self, metrics: EngineMetrics, state: RequestState) -> None:
        if state.refusal is not None:
            metrics.record_refused()
            return
        if state.pooled is not None:
            metrics.record_vector(len(state.prompt_token_ids))
        longest = max(len(choice.detokenizer.token_ids) for choice in state.choices)
        if state.metrics.first_token_time == state.metrics.finished_time:
            longest = 1  # all came at once, as of a beam search: nothing to learn about the time between tokens
        metrics.record_end(str(state.finish_reason), state.metrics, len(state.prompt_token_ids), longest)
