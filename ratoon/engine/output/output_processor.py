"""Engine outputs to what callers get, for every request that is under way on this side of the engine.

It never calls the engine. It returns what must be sent to it: what ended here first, at a stop string for example. What
becomes of one request is worked out by its RequestState.
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

from ratoon.core.config import MAX_ROOTS
from ratoon.core.errors import RequestError, UnknownParentError
from ratoon.core.outputs import HiddenStatesOutput
from ratoon.core.params import HiddenStatesParams
from ratoon.core.readings import reading_id
from ratoon.core.request import EngineCoreOutputs, EngineCoreRequest, FinishReason, branch_id_of
from ratoon.engine.input.extraction_requests import extract_from_root
from ratoon.engine.input.hidden_states import HiddenStatesSelector, Selection
from ratoon.engine.output.hidden_states_budget import HiddenStatesBudget
from ratoon.engine.output.request_measures import count_tokens, measure_end, measure_tokens, trace_of
from ratoon.engine.output.request_state import Output, Reading, RequestState, make_request_state
from ratoon.engine.output.roots import Root, RootLog, RootTable
from ratoon.observe.logging import get_logger

if TYPE_CHECKING:
    from ratoon.observe.metrics import EngineMetrics
    from ratoon.observe.throughput import ThroughputLog
    from ratoon.observe.tracing import RequestTracer

logger = get_logger(__name__)


class Processed(NamedTuple):
    """The consequences of an event."""

    outputs: list[Output]  # for callers
    # Branches that ended at a stop string, with the number of their tokens where hidden states are read. Those that
    # ended in the engine, too, if a stop string could have ended them.
    stopped: dict[str, int | None]
    aborted: list[str]  # ids that the engine should abort, after that


class EndedRequests(Protocol):
    """Gets notice of the end of every request."""

    def note_end(self, owner: str | None, external_id: str, request_id: str, root: Root | None) -> None: ...


class OutputProcessor:
    """Requests go in by `add_request`; `process_outputs`, `abort_requests` and `fail_request` give their outputs.

    A generating request gives RequestOutputs, one or many as its `output_kind` asks. A pooling request gives one
    EmbeddingOutput and one for hidden states a HiddenStatesOutput, when it ends; if it failed, `error` is set and there
    is no vector or tensor. All stand in the same list: `request_id` and `owner` say whose they are, `finished` that
    nothing more will come. What the engine refused has `refusal`, the RequestError that a caller should get; `error`
    says the same as text.

    A request with `return_hidden_states` has not ended before they are there. The engine reads them when a choice has
    ended, and sends them as the outputs of a request of its own; if that fails, the text is given all the same.

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
        shared_roots: EndedRequests | None = None,  # of several front ends, in the place of this one's own
        notes_dropped_roots: bool = False,  # see RootTable
        root_log: RootLog | None = None,
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
        # What has ended and can be continued
        self.roots = RootTable(max_roots, notes_dropped=notes_dropped_roots and shared_roots is None, log=root_log)
        self.shared_roots = shared_roots

    def add_request(
        self,
        request: EngineCoreRequest,
        prompt: str | None,
        selection: Selection | None = None,
        encoder_prompt: str | None = None,
    ) -> None:
        """Adds a request, before it is handed to the engine. `selection` comes with a request for hidden states; the
        prompts are texts, for reading."""
        state = make_request_state(request, prompt, self._tokenizer, selection, encoder_prompt)
        if self.is_running(state.external_id, state.owner):
            raise RequestError("request_id", f"{state.external_id!r} is in use", "an id that no unfinished request has")
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
        """Finds the request whose hidden states are to be read: one that has ended, or that runs."""
        try:
            return self.find_root(external_id, owner)
        except UnknownParentError:
            raise no_original(external_id) from None

    def is_running(self, external_id: str, owner: str | None = None) -> bool:
        return (owner, external_id) in self._internal_ids

    def internal_id(self, external_id: str, owner: str | None = None) -> str | None:
        """Returns the engine's id of a request that is under way."""
        return self._internal_ids.get((owner, external_id))

    def _find(self, external_id: str, owner: str | None) -> RequestState | None:
        return self._states.get(self._internal_ids.get((owner, external_id), ""))

    # ---- what the engine sent ----

    def process_outputs(self, steps: Sequence[EngineCoreOutputs]) -> Processed:
        """What steps brought, in their order. A request that goes on gets one output for all of them.

        Whatever goes wrong here with one request ends that request, with an error, and no other."""
        now = self._clock()
        touched: dict[str, RequestState] = {}
        done = Processed([], {}, [])
        for step in steps:
            for request_id in self._take_step(step, now, touched, done):
                # Before the next step, which may bring the hidden states of a choice that has ended.
                if request_id in touched:
                    self._deliver_or_give_up(touched.pop(request_id), now, done)
        for state in touched.values():
            self._deliver_or_give_up(state, now, done)
        return done

    def _take_step(
        self, step: EngineCoreOutputs, now: float, touched: dict[str, RequestState], done: Processed
    ) -> list[str]:
        """Note what a step brought; the requests of which a choice has ended."""
        sampled = step.timestamp or None
        ended: list[str] = []
        states = self._states
        for output in step.outputs:
            state = states.get(output.request_id)
            # The engine may have been a step ahead of an abort: its late outputs are dropped.
            if state is None or output.choice >= len(state.choices):
                continue
            choice = state.choices[output.choice]
            if choice.finish_reason is not None:
                continue
            state.engine = step.engine_index
            try:
                state.take(choice, output, now, sampled)
            except Exception as error:
                touched.pop(state.request_id, None)
                done.aborted.append(state.request_id)
                self._give_up(state, error, now, done)
                continue
            touched[output.request_id] = state
            if choice.finish_reason is not None:
                state.tell_stop(choice, output.finished, done.stopped)
                ended.append(output.request_id)
        return ended

    def _deliver_or_give_up(self, state: RequestState, now: float, done: Processed) -> None:
        try:
            state.end_choices_that_never_began()
            self._deliver(state, now, done)
        except Exception as error:
            done.aborted.append(state.request_id)
            self._give_up(state, error, now, done)

    def _deliver(self, state: RequestState, now: float, done: Processed) -> None:
        """The caller's output for what changed, if there is one to give; forget the request once it is finished."""
        if self._metrics is not None and state.got_tokens:
            measure_tokens(self._metrics, state, now)
        if self._throughput is not None:
            count_tokens(self._throughput, state)
        state.got_tokens = False
        state.num_new_tokens = 0
        if state.states_asked is not None:
            self._begin_reading(state, state.states_asked, now, done)
        if not state.finished:
            result = state.next_output(finished=False)
            if result is not None:
                done.outputs.append(result)
            return
        state.metrics.finished_time = now
        if not state.ended_well:
            self._drop_readers(state, done)
        if not state.is_read:
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
        self._drop_readers(state, done)
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
        if original.is_read or not original.finished:
            return
        try:
            self._finish(original, now, done)
        except Exception as error:
            self._give_up(original, error, now, done)

    def _forget(self, state: RequestState) -> None:
        del self._states[state.request_id]
        if state.reads is None:
            del self._internal_ids[state.owner, state.external_id]
            root = state.as_root() if state.error is None else None
            if root is None:
                self.roots.note_dropped(branch_id_of(state.request_id, choice.index) for choice in state.choices)
            (self.shared_roots or self.roots).note_end(state.owner, state.external_id, state.request_id, root)
        if self._metrics is not None:
            measure_end(self._metrics, state)
        if self._tracer is not None and state.trace_headers is not None:
            self._tracer.record(trace_of(state))

    # ---- hidden states of texts that have ended ----

    def _begin_reading(self, state: RequestState, params: HiddenStatesParams, now: float, done: Processed) -> None:
        """The engine has begun to read the hidden states of choices that have just ended: expect its outputs."""
        assert self._selector is not None
        ended = [choice.index for choice in state.choices if choice.index in state.changed and choice.ended_well]
        if not ended:
            return
        root, state.reading = state.snapshot(), state.reading or Reading()
        for choice in ended:
            name = reading_id(root.branch_id(choice))
            try:
                request, selection = extract_from_root(self._selector, name, root, choice, params)
                hold = self._budget.reserve(selection.num_bytes, state.owner)
            except RequestError as error:
                state.reading.states[choice] = _not_there(state, params, error.inside("return_hidden_states"))
                done.aborted.append(name)
                continue
            request.external_id = state.external_id
            request.arrival_time = now
            reader = make_request_state(request, None, None, dataclasses.replace(selection, hold=hold))
            reader.reads = state, choice
            self._states[name] = state.reading.readers[name] = reader

    def _drop_readers(self, state: RequestState, done: Processed) -> None:
        """Drops the readers of a request that gives no hidden states, because not all of its texts are complete. The
        engine may already read those of a choice whose end is not known here."""
        if state.states_asked is not None:
            names = [reading_id(branch_id_of(state.request_id, choice.index)) for choice in state.choices]
            for name in names:
                self._states.pop(name, None)
            done.aborted.extend(names)
            state.reading = None

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
        done = Processed([], {}, [])
        now = self._clock()
        for external_id in external_ids:
            state = self._find(external_id, owner)
            if state is None:
                continue
            # Of a request whose texts have ended, only the reading of their hidden states is left to end.
            readers = [] if state.reading is None else list(state.reading.readers.values())
            for ending in readers if state.finished else [state]:
                done.aborted.append(ending.request_id)
                try:
                    ending.end(reason, error)
                    self._deliver(ending, now, done)
                except Exception as failure:
                    self._give_up(ending, failure, now, done)
        return done


def no_original(external_id: str) -> UnknownParentError:
    expected = "the id of one that has ended or runs"
    return UnknownParentError("original_request_id", f"there is no request {external_id!r}", expected)


def _not_there(state: RequestState, params: HiddenStatesParams, error: RequestError) -> HiddenStatesOutput:
    """What was asked for turned out not to exist."""
    return HiddenStatesOutput(
        state.external_id, None, params.dtype, [], [], [], error=str(error), refusal=error, owner=state.owner
    )
