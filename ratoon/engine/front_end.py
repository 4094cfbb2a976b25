"""The front end: requests on their way to the engine, and its outputs on their way back, for LLM and AsyncLLM alike.

It owns input and output processing, roots, budgets and what is observed of requests, and knows every kind of request.
It never waits: LLMEngine (llm_engine.py) drives it step by step, AsyncLLMEngine (async_llm_engine.py) on an event loop.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias, Unpack

import msgspec

from ratoon.core.adapters import Adapter
from ratoon.core.config import AdapterConfig, SchedulingPolicy
from ratoon.core.errors import EngineDeadError, EngineError, RequestError, UnknownParentError
from ratoon.core.outputs import RequestOutput
from ratoon.core.params import (
    BeamSearchParams,
    GenerationParams,
    HiddenStatesParams,
    PoolingParams,
    RequestOutputKind,
    SamplingParams,
)
from ratoon.core.request import EngineCoreOutputs, EngineCoreRequest
from ratoon.engine.adapters import AdapterRegistry
from ratoon.engine.input.hidden_states import Selection
from ratoon.engine.input.input_processor import InputProcessor
from ratoon.engine.input.prompts import Prompt, Suffix, texts_of
from ratoon.engine.input.request_options import GenerationOptions, PoolingOptions, RequestOptions
from ratoon.engine.output.hidden_states_budget import HiddenStatesBudget
from ratoon.engine.output.output_processor import OutputProcessor
from ratoon.engine.output.request_state import Output
from ratoon.engine.output.roots import Root
from ratoon.engine.processes.client_interface import RequestClient
from ratoon.observe.logging import get_logger
from ratoon.observe.tracing import trace_context

if TYPE_CHECKING:
    from ratoon.observe.metrics import EngineMetrics
    from ratoon.observe.throughput import ThroughputLog
    from ratoon.observe.tracing import RequestTracer

logger = get_logger(__name__)

Key: TypeAlias = tuple[str | None, str]  # the owner of a request, and the id that the owner gave it
Made: TypeAlias = EngineCoreRequest | tuple[EngineCoreRequest, Selection]


class Prepared(NamedTuple):
    """A request that was checked and can be handed over."""

    request: EngineCoreRequest
    prompt: str | None = None  # its text, where it has one
    selection: Selection | None = None  # of hidden states
    encoder_prompt: str | None = None  # the other text, of an encoder-decoder model

    @property
    def external_id(self) -> str:
        return self.request.external_id or self.request.request_id

    @property
    def key(self) -> Key:
        return self.request.owner, self.external_id


class FrontEnd:
    def __init__(
        self,
        client: RequestClient,
        input_processor: InputProcessor,
        output_processor: OutputProcessor,
        *,
        adapters: AdapterRegistry | None = None,  # None: requests may name none
        default_params: SamplingParams | None = None,
        default_search: BeamSearchParams | None = None,  # where the model's files ask for one
        policy: SchedulingPolicy = SchedulingPolicy.FCFS,
        budget: HiddenStatesBudget | None = None,
        metrics: EngineMetrics | None = None,
        tracer: RequestTracer | None = None,
        throughput: ThroughputLog | None = None,
    ) -> None:
        self.input_processor = input_processor
        self.output_processor = output_processor
        self.adapters = AdapterRegistry(AdapterConfig(), _no_adapters) if adapters is None else adapters
        self.ended = False  # it takes no more requests
        self.default_params = SamplingParams() if default_params is None else default_params
        self.default_search = default_search
        self._taker = client
        self._policy = policy
        self._budget = HiddenStatesBudget() if budget is None else budget
        self._metrics = metrics
        self._tracer = tracer
        self._throughput = throughput

    def verify_running(self) -> None:
        """EngineError: no request is taken any more."""
        if self.ended:
            raise EngineError("the engine is shut down")

    # ---- requests of each kind: checked, and made ready to be handed over. RequestError: nothing of it is left ----

    def prepare(
        self,
        request_id: str,
        prompt: Prompt,
        params: GenerationParams | None,
        **options: Unpack[GenerationOptions],
    ) -> Prepared:
        params = self.get_default_params() if params is None else params
        return self._prepare(partial(self.input_processor.process, request_id, prompt, params), prompt, options)

    def prepare_continuation(
        self,
        request_id: str,
        parent: Root | str,  # an id: it is forgotten, and the prompt is answered in its place
        suffix: Suffix,
        params: GenerationParams | None,
        *,
        choice: int = 0,
        at: int | None = None,
        prompt: Prompt | None = None,
        **options: Unpack[GenerationOptions],
    ) -> Prepared:
        if not isinstance(parent, Root):
            assert prompt is not None
            options["in_place_of"] = parent
            return self.prepare(request_id, prompt, params, **options)
        params = self.get_default_params() if params is None else params
        process = partial(
            self.input_processor.process_continuation, request_id, parent, suffix, params, choice=choice, at=at
        )
        own = {name: value for name, value in options.items() if name not in ("cache_salt", "owner")}  # the parent's
        return self._prepare(process, None, own, parent)

    def prepare_pooling(
        self, request_id: str, prompt: Prompt, params: PoolingParams | None, **options: Unpack[PoolingOptions]
    ) -> Prepared:
        params = PoolingParams() if params is None else params
        return self._prepare(partial(self.input_processor.process_pooling, request_id, prompt, params), prompt, options)

    def prepare_extraction(
        self,
        request_id: str,
        source: Prompt | Root,
        params: HiddenStatesParams | None,
        *,
        choice: Any = 0,
        **options: Unpack[RequestOptions],
    ) -> Prepared:
        params = HiddenStatesParams() if params is None else params
        process = partial(self.input_processor.process_extraction, request_id, source, params, choice=choice)
        return self._prepare(process, None, options, source if isinstance(source, Root) else None)

    def _prepare(
        self,
        process: Callable[..., Made],
        prompt: Prompt | None,
        given: Mapping[str, Any],
        parent: Root | None = None,  # that it goes on from, or reads
    ) -> Prepared:
        options = dict(given)
        named = self.adapters.find(options.pop("adapter", None), options.pop("lora_request", None))
        if parent is not None:
            named = self.adapters.inherit(parent.adapter, named)
        rank = options.pop("data_parallel_rank", None)
        self.verify_placement(options.get("priority", 0), rank)
        context = trace_context(options.pop("trace_headers", None))
        made = process(**options)
        request, selection = made if isinstance(made, tuple) else (made, None)
        request.data_parallel_rank = rank
        request.adapter = named if isinstance(named, Adapter) else None
        request.trace_headers = None if self._tracer is None else context
        text, encoder_text = (None, None) if prompt is None else texts_of(prompt, request.encoder_input is not None)
        return Prepared(request, text, selection, encoder_text)

    def verify_placement(self, priority: Any, rank: Any) -> None:
        if priority and self._policy != SchedulingPolicy.PRIORITY:
            raise RequestError(
                "priority",
                "has no meaning first come, first served",
                'start the engine with policy="priority" (--policy priority)',
            )
        if rank is None:
            return
        num_engines = len(self._taker.health().engines)  # engines are added while a service runs
        if not isinstance(rank, int) or isinstance(rank, bool) or not 0 <= rank < num_engines:
            raise RequestError("data_parallel_rank", f"{rank!r} is no engine", f"from 0 to {num_engines - 1}")

    def get_default_params(self) -> GenerationParams:
        return (self.default_params if self.default_search is None else self.default_search).clone()

    # ---- earlier requests ----

    def find_parent(self, parent_id: str, owner: str | None, prompt: Prompt | None) -> Root | str:
        """What a continuation goes on from; the id, if it is forgotten and there is a prompt in its place."""
        try:
            return self.output_processor.find_root(parent_id, owner)
        except UnknownParentError:
            if prompt is None:
                raise
            return note_forgotten(parent_id)

    def find_source(self, prompt: Any, original_request_id: Any, owner: str | None) -> Any:
        """What hidden states are read of: a prompt, or the request that an output or an id names."""
        self.verify_one_source(prompt, original_request_id)
        if isinstance(prompt, RequestOutput):
            original_request_id = prompt.request_id
        return (
            prompt if original_request_id is None else self.output_processor.find_original(original_request_id, owner)
        )

    @staticmethod
    def verify_one_source(prompt: Any, original_request_id: Any) -> None:
        if (prompt is None) == (original_request_id is None):
            raise RequestError("prompt", "or original_request_id says what to read", "one of the two")

    # ---- to the engine ----

    def hand_over(self, prepared: Prepared) -> None:
        """Whatever is raised, nothing of the request is left behind. RequestError: an engine in this process refused
        it; one in another process refuses it later, by an output with `refusal`."""
        request, text, selection, encoder_text = prepared
        if selection is not None:
            hold = self._budget.reserve(selection.num_bytes, request.owner)
            selection = dataclasses.replace(selection, hold=hold)
        self.output_processor.add_request(request, text, selection, encoder_text)
        try:
            self._taker.add_request(request)
        except Exception as error:
            self.output_processor.fail_request(prepared.external_id, error, request.owner)
            raise

    def end_requests(self, external_ids: Iterable[str], owner: str | None) -> list[Output]:
        """End requests, by their callers' ids; those that are unknown or finished are passed over. Their last
        outputs."""
        outputs, _, aborted = self.output_processor.abort_requests(external_ids, owner)
        self._abort(aborted)
        self.tell_dropped_roots()
        return outputs

    def _abort(self, request_ids: list[str]) -> None:
        if request_ids:
            with suppress(EngineDeadError):  # what is dead has nothing left to abort
                self._taker.abort_requests(request_ids)

    def tell_dropped_roots(self) -> None:
        """Tells the engines which roots are gone since the last call, if they keep texts of roots."""
        dropped = self.output_processor.roots.take_dropped()
        if dropped:
            with suppress(EngineDeadError):
                self._taker.forget_roots(dropped)

    def count_refused(self) -> None:
        if self._metrics is not None:
            self._metrics.record_refused()

    # ---- from the engine ----

    def process_outputs(self, steps: Sequence[EngineCoreOutputs]) -> list[Output]:
        """What steps brought for callers. The engine hears what ended here first, at a stop string for example."""
        outputs, stopped, aborted = self.output_processor.process_outputs(steps)
        if stopped:
            with suppress(EngineDeadError):
                self._taker.stop_requests(stopped)
        self._abort(aborted)
        self.tell_dropped_roots()
        return outputs

    def record_stats(self, step: EngineCoreOutputs) -> None:
        if step.scheduler_stats is None:
            return
        if self._metrics is not None:
            self._metrics.record_engine(step.engine_index, step.scheduler_stats)
        if self._throughput is not None:
            self._throughput.record_engine(step.engine_index, step.scheduler_stats)

    def has_unfinished_requests(self) -> bool:
        return self.output_processor.has_unfinished_requests()

    def num_unfinished_requests(self) -> int:
        return self.output_processor.num_unfinished_requests()


def _no_adapters(path: str) -> Adapter:
    raise AssertionError("the engine has no memory for adapters")


def with_output_kind(params: Any, kind: RequestOutputKind) -> GenerationParams:
    """A copy that asks for outputs of this kind. A beam search tells the best text anew where others tell what is new.
    RequestError: these are no params."""
    if isinstance(params, BeamSearchParams):
        kind = RequestOutputKind.CUMULATIVE if kind == RequestOutputKind.DELTA else kind
    elif not isinstance(params, SamplingParams):
        problem = f"{type(params).__name__} is not SamplingParams"
        raise RequestError("sampling_params", problem, "a SamplingParams or a BeamSearchParams")
    return msgspec.structs.replace(params, output_kind=kind)


def note_forgotten(parent_id: str) -> str:
    logger.debug("there is no request %s to continue: the prompt is used in its place", parent_id)
    return parent_id


def id_of(request: RequestOutput | str) -> str:
    return request.request_id if isinstance(request, RequestOutput) else request


def verify_beam_search_params(params: Any) -> None:
    """RequestError for anything but BeamSearchParams, or a list of them."""
    for one in params if isinstance(params, (list, tuple)) else [params]:
        if not isinstance(one, BeamSearchParams):
            raise RequestError("params", f"{one!r} is not BeamSearchParams", "BeamSearchParams(beam_width=…)")
