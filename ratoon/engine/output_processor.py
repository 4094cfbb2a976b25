"""Engine outputs to what callers get, for every request that is under way on this side of the engine.

It never calls the engine. It returns what must be sent to it: ids that ended here first (at a stop string, say),
and requests for the hidden states that an ended request has asked for. What becomes of one request is worked out by its
RequestState.
"""

from __future__ import annotations

import dataclasses
import time
from collections import deque
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any, NamedTuple

from ratoon.core.config import MAX_ROOTS
from ratoon.core.errors import RequestError, UnknownParentError
from ratoon.core.outputs import HiddenStatesOutput
from ratoon.core.request import EngineCoreOutputs, EngineCoreRequest, FinishReason
from ratoon.engine.extraction_requests import extract_from_root
from ratoon.engine.hidden_states import HiddenStatesSelector, Selection
from ratoon.engine.hidden_states_budget import HiddenStatesBudget
from ratoon.engine.request_measures import count_tokens, measure_end, measure_tokens
from ratoon.engine.request_state import Output, Reading, RequestState, make_request_state
from ratoon.engine.request_traces import trace_of
from ratoon.engine.roots import Root, RootTable
from ratoon.observe.logging import get_logger

if TYPE_CHECKING:
    from ratoon.observe.metrics import EngineMetrics
    from ratoon.observe.throughput import ThroughputLog
    from ratoon.observe.tracing import RequestTracer

# Seconds that the memory of an ended request is kept until the reader of its hidden states has come. It is given
# back as soon as they are read; this is for readers that never come.
READING_LEASE = 30.0
# Requests for hidden states that are in the engine at a time, of those that no caller knows of. It refuses more
# than it can queue, and no requested states should be lost to that.
MAX_READERS = 256

logger = get_logger(__name__)


class Processed(NamedTuple):
    """The consequences of an event."""

    outputs: list[Output]  # for callers
    stopped: list[str]  # ids that the engine should end: they ended here alone
    extractions: list[EngineCoreRequest]  # to be handed to the engine, after that


class OutputProcessor:
    """Requests go in by `add_request`; `process_outputs`, `abort_requests` and `fail_request` give their outputs.

    A generating request gives RequestOutputs, one or many as its `output_kind` asks. A pooling request gives one
    EmbeddingOutput and one for hidden states a HiddenStatesOutput, when it ends; if it failed, `error` is set and there
    is no vector or tensor. All stand in the same list: `request_id` and `owner` say whose they are, `finished` that
    nothing more will come. What the engine refused has `refusal`, the RequestError that a caller should get; `error`
    says the same as text.

    A request with `return_hidden_states` has not ended before they are there. They are read for it by requests that no
    caller knows of; if one of these fails, the text is given all the same.

    Callers' ids are an owner's own: they neither collide with nor reveal those of other owners.
    """

    def __init__(
        self,
        tokenizer: Any | None,
        clock: Callable[[], float] = time.monotonic,
        metrics: EngineMetrics | None = None,
        selector: HiddenStatesSelector | None = None,  # needed where requests ask for hidden states
        max_roots: int = MAX_ROOTS,
        budget: HiddenStatesBudget | None = None,  # of the hidden states that come with answers
        tracer: RequestTracer | None = None,
        throughput: ThroughputLog | None = None,
    ) -> None:
        self._tokenizer = tokenizer
        self._clock = clock
        self._metrics = metrics
        self._selector = selector
        self._budget = HiddenStatesBudget() if budget is None else budget
        self._tracer = tracer
        self._throughput = throughput
        self._states: dict[str, RequestState] = {}  # by internal id
        self._internal_ids: dict[tuple[str | None, str], str] = {}  # by owner and the caller's id
        self._readers_waiting: deque[EngineCoreRequest] = deque()
        self._readers: set[str] = set()  # in the engine, by internal id
        self.roots = RootTable(max_roots)  # what has ended and can be continued

    def add_request(
        self,
        request: EngineCoreRequest,
        prompt: str | None,
        selection: Selection | None = None,
        encoder_prompt: str | None = None,
    ) -> None:
        """Before it is handed to the engine. `selection` comes with a request for hidden states; the prompts are texts,
        for reading."""
        state = make_request_state(request, prompt, self._tokenizer, selection, encoder_prompt)
        if self.is_running(state.external_id, state.owner):
            raise RequestError("request_id", f"{state.external_id!r} is in use", "an id that no unfinished request has")
        params = state.params
        if params is not None and params.return_hidden_states is not None and request.retain_kv is None:
            request.retain_kv = READING_LEASE
        self._internal_ids[state.owner, state.external_id] = state.request_id
        self._states[state.request_id] = state

    def has_unfinished_requests(self) -> bool:
        return bool(self._states)

    def num_unfinished_requests(self) -> int:
        return len(self._internal_ids)

    def find_root(self, external_id: str, owner: str | None = None) -> Root:
        """A request that can be continued: one that has ended, or that runs, as far as it has come."""
        state = self._find(external_id, owner) if isinstance(external_id, str) else None
        if state is not None and state.answer is None:
            return state.snapshot()
        return self.roots.find(external_id, owner)

    def find_original(self, external_id: str, owner: str | None = None) -> Root:
        """The same, for reading its hidden states."""
        try:
            return self.find_root(external_id, owner)
        except UnknownParentError:
            raise UnknownParentError(
                "original_request_id", f"there is no request {external_id!r}", "the id of one that has ended or runs"
            ) from None

    def is_running(self, external_id: str, owner: str | None = None) -> bool:
        return (owner, external_id) in self._internal_ids

    def _find(self, external_id: str, owner: str | None) -> RequestState | None:
        return self._states.get(self._internal_ids.get((owner, external_id), ""))

    # ---- what the engine sent ----

    def process_outputs(self, outputs: EngineCoreOutputs) -> Processed:
        """Whatever goes wrong here with one request ends that request, with an error, and no other."""
        now = self._clock()
        sampled = outputs.timestamp or None
        touched: dict[str, RequestState] = {}
        done = Processed([], [], [])
        for output in outputs.outputs:
            state = self._states.get(output.request_id)
            # The engine may have been a step ahead of an abort: its late outputs are dropped.
            if state is None or output.choice >= len(state.choices) or state.choices[output.choice].finished:
                continue
            choice = state.choices[output.choice]
            state.engine = outputs.engine_index
            try:
                state.take(choice, output, now, sampled)
            except Exception as error:
                touched.pop(state.request_id, None)
                done.stopped.append(state.request_id)
                self._give_up(state, error, now, done)
                continue
            touched[state.request_id] = state
            if choice.finished and not output.finished:
                done.stopped.append(state.abort_id(choice))
        for state in touched.values():
            try:
                state.end_choices_that_never_began()
                self._deliver(state, now, done)
            except Exception as error:
                done.stopped.append(state.request_id)
                self._give_up(state, error, now, done)
        self._let_readers_in(done)
        return done

    def _deliver(self, state: RequestState, now: float, done: Processed) -> None:
        """The caller's output for what changed, if there is one to give; forget the request once it is finished."""
        if self._metrics is not None and state.got_tokens:
            measure_tokens(self._metrics, state, now)
        if self._throughput is not None:
            count_tokens(self._throughput, state)
        state.got_tokens = False
        state.num_new_tokens = 0
        if not state.finished:
            result = state.next_output(finished=False)
            if result is not None:
                done.outputs.append(result)
            return
        state.metrics.finished_time = now
        if not self._begin_reading(state, now):
            self._finish(state, now, done)

    def _finish(self, state: RequestState, now: float, done: Processed) -> None:
        """The last output of a request that has ended, and whose hidden states, if it asked for them, are there."""
        result = state.next_output(finished=True)
        self._forget(state)
        self._hand_out(state, result, now, done)

    def _give_up(self, state: RequestState, error: Exception, now: float, done: Processed) -> None:
        logger.error("request %s failed in the front end", state.external_id, exc_info=error)
        state.error = f"{type(error).__name__}: {error}"
        state.metrics.finished_time = now
        result = state.last_output()
        self._forget(state)
        self._hand_out(state, result, now, done)

    def _hand_out(self, state: RequestState, result: Output | None, now: float, done: Processed) -> None:
        if state.reads is None:
            if result is not None:
                done.outputs.append(result)
            return
        original, choice = state.reads
        assert isinstance(result, HiddenStatesOutput) and original.reading is not None
        del original.reading.readers[state.request_id]
        original.reading.states[choice] = result
        if original.reading.readers:
            return
        try:
            self._finish(original, now, done)
        except Exception as error:
            self._give_up(original, error, now, done)

    def _forget(self, state: RequestState) -> None:
        del self._states[state.request_id]
        if state.reads is None:
            del self._internal_ids[state.owner, state.external_id]
        else:
            self._readers.discard(state.request_id)
        root = state.as_root() if state.error is None else None
        if root is not None:
            self.roots.add(root)
        if self._metrics is not None:
            measure_end(self._metrics, state)
        if self._tracer is not None and state.trace_headers is not None:
            self._tracer.record(trace_of(state))

    # ---- hidden states of requests that have ended ----

    def _begin_reading(self, state: RequestState, now: float) -> bool:
        """Have the hidden states read that a request asked for, of each choice. False: there is nothing to wait for."""
        params = None if state.params is None else state.params.return_hidden_states
        if params is None or not state.ended_well:
            return False
        assert self._selector is not None
        reading, root = Reading(), state.snapshot()
        requests = []
        for choice in range(len(state.choices)):
            request_id = f"{state.request_id}.{choice}.states"
            try:
                request, selection = extract_from_root(
                    self._selector, request_id, root, choice, params, ends_lease=not state.leased
                )
                hold = self._budget.reserve(selection.num_bytes, state.owner)
            except RequestError as error:
                reading.states[choice] = _not_there(state, error.inside("return_hidden_states"))
                continue
            request.external_id = state.external_id
            request.arrival_time = now
            requests.append(request)
            selection = dataclasses.replace(selection, hold=hold)
            reader = reading.readers[request_id] = make_request_state(request, None, None, selection)
            reader.reads = state, choice
        state.reading = reading
        self._states.update(reading.readers)
        self._readers_waiting += requests
        return bool(requests)

    def _let_readers_in(self, done: Processed) -> None:
        while self._readers_waiting and len(self._readers) < MAX_READERS:
            request = self._readers_waiting.popleft()
            if request.request_id in self._states:  # not taken back meanwhile
                self._readers.add(request.request_id)
                done.extractions.append(request)

    def fail_extraction(self, request_id: str, error: Exception) -> Processed:
        """The engine did not take one of the extractions that were to be handed to it."""
        done = Processed([], [], [])
        state = self._states.get(request_id)
        if state is not None:
            state.end(FinishReason.ERROR, error)
            self._deliver(state, self._clock(), done)
        self._let_readers_in(done)
        return done

    # ---- what ends from this side ----

    def abort_requests(self, external_ids: Iterable[str], owner: str | None = None) -> Processed:
        """End requests here: their last outputs, and the ids to abort in the engine."""
        return self._end(external_ids, owner, FinishReason.ABORT, None)

    def fail_request(self, external_id: str, error: Exception, owner: str | None = None) -> Output | None:
        """End a request that the engine could not take or carry out; a RequestError becomes its `refusal`."""
        results = self._end([external_id], owner, FinishReason.ERROR, error).outputs
        return results[0] if results else None

    def _end(
        self, external_ids: Iterable[str], owner: str | None, reason: FinishReason, error: Exception | None
    ) -> Processed:
        done = Processed([], [], [])
        now = self._clock()
        for external_id in external_ids:
            state = self._find(external_id, owner)
            if state is None:
                continue
            # Of a request whose hidden states are being read, only the reading is left to end.
            for ending in [state] if state.reading is None else list(state.reading.readers.values()):
                done.stopped.append(ending.request_id)
                try:
                    ending.end(reason, error)
                    self._deliver(ending, now, done)
                except Exception as failure:
                    self._give_up(ending, failure, now, done)
        self._let_readers_in(done)
        return done


def _not_there(state: RequestState, error: RequestError) -> HiddenStatesOutput:
    """What was asked for turned out not to exist."""
    assert state.params is not None and state.params.return_hidden_states is not None
    params = state.params.return_hidden_states
    return HiddenStatesOutput(
        state.external_id, None, params.dtype, [], [], [], error=str(error), refusal=error, owner=state.owner
    )
