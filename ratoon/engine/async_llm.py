"""AsyncLLM: many callers on one event loop, one engine behind them, in processes of its own.

It checks requests, hands them over and yields what comes back. Input and output processing are the synchronous engine's
own; who waits for what is kept by the OutputHandler; how engine processes live, die and come back is the client's.
"""

from __future__ import annotations

import asyncio
import dataclasses
import math
import secrets
import time
from collections.abc import AsyncGenerator, Callable, Iterable, Mapping, Sequence
from contextlib import aclosing, suppress
from functools import partial
from types import TracebackType
from typing import TYPE_CHECKING, Any

import msgspec

from ratoon.core.config import SchedulingPolicy
from ratoon.core.errors import (
    DeadlineError,
    EngineAwayError,
    EngineDeadError,
    EngineError,
    RequestError,
    UnknownParentError,
)
from ratoon.core.health import EngineHealth, EngineState, Health
from ratoon.core.outputs import EmbeddingOutput, HiddenStatesOutput, RequestOutput
from ratoon.core.params import BeamSearchParams, GenerationParams, HiddenStatesParams, PoolingParams, SamplingParams
from ratoon.core.request import EngineCoreRequest
from ratoon.core.settings import configure
from ratoon.core.stats import SchedulerStats
from ratoon.engine.answers import arrange_beside
from ratoon.engine.client_interface import AsyncEngineClient
from ratoon.engine.default_params import default_beam_search_params, default_sampling_params, warn_of_ignored_keys
from ratoon.engine.hidden_states import Selection
from ratoon.engine.hidden_states_budget import HiddenStatesBudget
from ratoon.engine.input_processor import InputProcessor
from ratoon.engine.output_collector import OutputCollector
from ratoon.engine.output_handler import OutputHandler
from ratoon.engine.output_processor import OutputProcessor
from ratoon.engine.prompts import Prompt, PromptPair, Suffix, parse_prompt, texts_of
from ratoon.engine.request_state import Output
from ratoon.engine.roots import Root
from ratoon.models.tokenizer import LONG_TEXT, Tokenizer
from ratoon.observe.logging import get_logger
from ratoon.observe.startup import StartupTimer
from ratoon.observe.throughput import ThroughputLog
from ratoon.observe.tracing import make_tracer, trace_context

if TYPE_CHECKING:
    from ratoon.models.source import ModelSource
    from ratoon.observe.metrics import EngineMetrics

__all__ = ["AsyncEngineClient", "AsyncLLM"]

logger = get_logger(__name__)

DRAIN_POLL = 0.02  # seconds
MANY_PIECES = 256  # entries of `positions`, each of which may be as long as a sequence
MANY_WORDS = 100  # that may not appear in an answer: tokenising more of them takes its time
DEADLINE_GRACE = 0.5  # seconds that an engine has to say that a deadline is over


class AsyncLLM:
    """A model and engines for it, for use with asyncio.

        async with AsyncLLM("smollm2-135m") as llm:
            async for output in llm.generate("One prompt.", SamplingParams(max_tokens=32)):
                print(output.outputs[0].text)

    Takes the model and the settings that LLM takes. All methods belong on the event loop that `start` ran on.
    """

    def __init__(
        self,
        model: str,
        *,
        metrics: EngineMetrics | None = None,
        client: AsyncEngineClient | None = None,  # in the place of engine processes
        startup_timer: StartupTimer | None = None,
        **settings: Any,  # of docs/settings.md
    ) -> None:
        """Checks the settings (ConfigError); `start` does the rest."""
        front_end, self.config = configure(model, settings)
        self.metrics = metrics
        self._throughput = None if front_end.disable_log_stats else ThroughputLog()
        endpoint = front_end.otlp_traces_endpoint
        self.tracer = None if endpoint is None else make_tracer(endpoint, model)
        self.startup_timer = startup_timer if startup_timer is not None else StartupTimer()
        self.hidden_states_budget = HiddenStatesBudget(front_end.max_total_hidden_states_bytes)
        self._num_replicas = front_end.num_replicas
        self._seed = front_end.seed
        self._skip_tokenizer = front_end.skip_tokenizer
        self._tokenizer: Tokenizer | None = None
        self._client = client
        self._handler: OutputHandler | None = None  # from the start to the end
        self._ended = False
        self._drain_until = math.inf
        self._shutdown_lock = asyncio.Lock()

    # ---- beginning and end ----

    async def start(self) -> None:
        """Start engine and tokenizer, side by side. ModelError: the model can't be read; ConfigError: it can't run with
        these settings; EngineError: an engine process failed."""
        if self._ended:
            raise EngineError("the engine has ended: build another AsyncLLM")
        if self._handler is not None:
            return
        client = self._client
        if client is None:
            from ratoon.engine.async_client import make_async_client

            client = self._client = make_async_client(self.config, self._num_replicas, self.startup_timer)
        starting = asyncio.create_task(client.start())
        try:
            await asyncio.gather(starting, asyncio.to_thread(self._load_model))
            if self._ended:
                raise EngineError("the engine was shut down while it started")
        except BaseException:
            self._ended = True
            starting.cancel()
            await asyncio.gather(starting, return_exceptions=True)
            await client.shutdown()
            raise
        self._serve(client)
        self.startup_timer.finish()

    def _load_model(self) -> None:
        """All that the front end knows of the model. Weights, and torch with them, are the engine's."""
        from ratoon.models.source import resolve_model

        self.source: ModelSource = resolve_model(self.config.model, self.config.hf_overrides)
        if not self._skip_tokenizer:
            self._tokenizer = self.source.load_tokenizer()

    def _serve(self, client: AsyncEngineClient) -> None:
        defaults = self.source.generation_defaults
        self.config = self.config.with_(max_model_len=client.ready.max_model_len)
        self._default_params = default_sampling_params(defaults)
        self._default_search = default_beam_search_params(defaults)
        warn_of_ignored_keys(self.source.name, self.source.ignored_generation_keys)
        self._input_processor = InputProcessor(
            self.source.config,
            self._tokenizer,
            defaults,
            self.config.max_model_len,
            self.config.max_logprobs,
            self._seed,
            kv_capacity=client.ready.description.get("kv_capacity_tokens"),
            block_size=client.ready.block_size,
            max_lease_seconds=self.config.cache.max_lease_seconds,
            max_hidden_states_bytes=self.config.max_hidden_states_bytes,
            pooling=self.source.pooling,
        )
        output_processor = OutputProcessor(
            self._tokenizer,
            metrics=self.metrics,
            selector=self._input_processor.selector,
            max_roots=self.config.max_roots,
            budget=self.hidden_states_budget,
            tracer=self.tracer,
            throughput=self._throughput,
        )
        self._handler = OutputHandler(client, output_processor, self.metrics, self._throughput)
        if self.metrics is not None:
            self.metrics.watch(client.health)
        if self.tracer is not None:
            self.tracer.model_name = self.source.name

    async def shutdown(self, drain_seconds: float = 0.0) -> None:
        """Take no more requests, wait so long for those under way, abort the rest, end the engine processes.

        May be called again; a call that is less patient shortens the wait of one that is under way.
        """
        self._ended = True
        self._drain_until = min(self._drain_until, time.monotonic() + drain_seconds)
        async with self._shutdown_lock:
            handler, client = self._handler, self._client
            if handler is None or client is None:
                return
            while handler.collectors and time.monotonic() < self._drain_until:
                await asyncio.sleep(DRAIN_POLL)
            handler.abort_all()
            await handler.stop()
            await client.shutdown()
            self._handler = None
            if self.tracer is not None:
                await asyncio.to_thread(self.tracer.shutdown)

    async def __aenter__(self) -> AsyncLLM:
        await self.start()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.shutdown()

    # ---- requests ----

    async def generate(
        self,
        prompt: Prompt,
        sampling_params: GenerationParams | None = None,
        request_id: str | None = None,
        *,
        priority: int = 0,
        cache_salt: str | None = None,
        data_parallel_rank: int | None = None,
        arrival_time: float | None = None,  # on the clock of time.monotonic
        retain_kv: float | None = None,  # seconds that the memory is kept for continuations, once the answer has ended
        owner: str | None = None,  # only for the same owner it can be continued
        in_place_of: str | None = None,  # the id of a forgotten parent: the output's `continuation` tells of it
        trace_headers: Mapping[str, str] | None = None,  # traceparent, tracestate: the span that this belongs to
    ) -> AsyncGenerator[RequestOutput, None]:
        """Answer a prompt, and yield outputs as the params' `output_kind` asks until one is `finished`.

        BeamSearchParams make a beam search of it: the last output has its `n` best texts, the best first. With the kind
        CUMULATIVE every step before brings one output, with the best text so far.

        RequestError is raised at the first step for a request that can't be served, and EngineDeadError when the engine
        is gone for good. A request that fails later ends with an output that has `error` set and the finish reason
        "error". Closing the generator, or cancelling the task that waits for it, aborts the request.
        """
        handler = self._running()
        process = partial(
            self._input_processor.process,
            _request_id(request_id),
            prompt,
            self.get_default_params() if sampling_params is None else sampling_params,
            priority=priority,
            cache_salt=cache_salt,
            arrival_time=time.monotonic() if arrival_time is None else arrival_time,
            retain_kv=retain_kv,
            owner=owner,
            in_place_of=in_place_of,
        )
        request, collector = await self._begin(
            process,
            priority,
            data_parallel_rank,
            prompt=prompt,
            in_thread=_has_many_words(sampling_params),
            trace_headers=trace_headers,
        )
        async with aclosing(_outputs_of(handler, request, collector)) as outputs:
            async for output in outputs:
                yield output

    async def generate_continuation(
        self,
        parent_request_id: str,
        suffix: Suffix = "",
        sampling_params: GenerationParams | None = None,
        request_id: str | None = None,
        *,
        choice: int = 0,
        at: int | None = None,
        wait: bool = True,
        priority: int = 0,
        data_parallel_rank: int | None = None,  # None: where the parent ran, whose memory is there
        retain_kv: float | None = None,
        owner: str | None = None,
        prompt: Prompt | None = None,  # the whole of it, suffix included, in case the parent is forgotten
        cache_salt: str | None = None,  # of that prompt; a parent has its own
        trace_headers: Mapping[str, str] | None = None,
    ) -> AsyncGenerator[RequestOutput, None]:
        """Go on from a request that has ended: behind its tokens, then `suffix` (text or token ids), a new answer.

        Nothing that is still there of the parent is computed again; with `retain_kv` on the parent that is all of it.
        `choice` names one of several, `at` a place in the parent: so many of its tokens, prompt and answer together. A
        parent that still runs is waited for, or with `wait=False` forked where it is; a beam search can only be waited
        for. Where there is no such request, because it is too long ago or another owner's, `prompt` is answered like
        any other, and the output's `continuation` says so; without one, UnknownParentError. The rest is as in
        `generate`.
        """
        handler = self._running()
        arrival_time = time.monotonic()
        try:
            parent = await self.find_parent(parent_request_id, wait=wait, owner=owner)
        except UnknownParentError:
            if prompt is None:
                raise
            logger.debug("there is no request %s to continue: the prompt is used in its place", parent_request_id)
            ordinary = self.generate(
                prompt,
                sampling_params,
                request_id,
                priority=priority,
                cache_salt=cache_salt,
                data_parallel_rank=data_parallel_rank,
                arrival_time=arrival_time,
                retain_kv=retain_kv,
                owner=owner,
                in_place_of=parent_request_id,
                trace_headers=trace_headers,
            )
            async with aclosing(ordinary) as outputs:
                async for output in outputs:
                    yield output
            return
        process = partial(
            self._input_processor.process_continuation,
            _request_id(request_id),
            parent,
            suffix,
            self.get_default_params() if sampling_params is None else sampling_params,
            choice=choice,
            at=at,
            priority=priority,
            arrival_time=arrival_time,
            retain_kv=retain_kv,
        )
        request, collector = await self._begin(
            process,
            priority,
            data_parallel_rank,
            suffix=suffix,
            in_thread=_has_many_words(sampling_params),
            trace_headers=trace_headers,
        )
        async with aclosing(_outputs_of(handler, request, collector)) as outputs:
            async for output in outputs:
                yield output

    async def find_parent(self, request_id: str, *, wait: bool = True, owner: str | None = None) -> Root:
        """What a continuation would go on from. UnknownParentError at once, and not behind a wait for somebody else's
        request: how long it takes must not tell that there is one."""
        handler = self._running()
        root = handler.output_processor.find_root(request_id, owner)
        if not wait:
            return root
        await handler.wait_for_end(request_id, owner)
        return handler.output_processor.find_root(request_id, owner)

    def list_roots(self, owner: str | None = None) -> list[Root]:
        """This owner's ended requests that can be continued, the newest first."""
        return self._running().output_processor.roots.list(owner)

    async def forget(self, request_id: str, owner: str | None = None) -> None:
        """Continue an ended request no more, and give back what its leases hold. UnknownParentError: there is none."""
        root = self._running().output_processor.roots.remove(request_id, owner)
        if root.leased:
            with suppress(EngineAwayError):  # an engine that is started again has no leases
                await self._call("end_leases", [root.branch_id(choice) for choice in range(len(root.choices))])

    async def embed(
        self,
        prompt: Prompt,
        pooling_params: PoolingParams | None = None,
        request_id: str | None = None,
        *,
        priority: int = 0,
        cache_salt: str | None = None,
        owner: str | None = None,  # another owner may use the same request_id
        trace_headers: Mapping[str, str] | None = None,
    ) -> EmbeddingOutput:
        """A prompt as a vector. RequestError if it can't be served, EngineError if it failed."""
        handler = self._running()
        process = partial(
            self._input_processor.process_pooling,
            _request_id(request_id),
            prompt,
            PoolingParams() if pooling_params is None else pooling_params,
            priority=priority,
            cache_salt=cache_salt,
            arrival_time=time.monotonic(),
            owner=owner,
        )
        request, collector = await self._begin(process, priority, prompt=prompt, trace_headers=trace_headers)
        output = await _only_output_of(handler, request, collector)
        assert isinstance(output, EmbeddingOutput)
        return output

    async def extract_hidden_states(
        self,
        prompt: Prompt | None = None,
        params: HiddenStatesParams | None = None,
        request_id: str | None = None,
        *,
        original_request_id: str | None = None,
        choice: int = 0,
        cache_salt: str | None = None,  # of a prompt
        owner: str | None = None,
        trace_headers: Mapping[str, str] | None = None,
    ) -> HiddenStatesOutput:
        """Hidden states of a prompt, or of a request that has ended or still runs, as far as it has come; `choice` is
        one of several. Cancelling the task aborts it.

        RequestError: there is no such position or layer, or it can't be served; UnknownParentError: no such request, or
        another owner's; TooLargeError: more bytes than the engine's `max_hidden_states_bytes`; QueueFullError: too many
        wait already, or what they got is still held (`max_total_hidden_states_bytes`); DeadlineError: its `deadline` is
        over; EngineError: it failed.
        """
        handler = self._running()
        params = HiddenStatesParams() if params is None else params
        source: Prompt | Root
        if prompt is not None and original_request_id is None:
            source = prompt
        elif prompt is None and original_request_id is not None:
            source = handler.output_processor.find_original(original_request_id, owner)
        else:
            raise RequestError("prompt", "or original_request_id says what to read", "one of the two")
        process = partial(
            self._input_processor.process_extraction,
            _request_id(request_id),
            source,
            params,
            choice=choice,
            cache_salt=cache_salt,
            arrival_time=time.monotonic(),
            owner=owner,
        )
        request, collector = await self._begin(
            process, prompt=prompt, in_thread=_names_many(params.positions), trace_headers=trace_headers
        )
        try:
            # The engine keeps the time. This is for one that is paused, or that is being started again.
            async with asyncio.timeout(None if params.deadline is None else params.deadline + DEADLINE_GRACE):
                output = await _only_output_of(handler, request, collector)
        except TimeoutError:
            raise DeadlineError("deadline", f"its {params.deadline:g} s are over", "more time") from None
        assert isinstance(output, HiddenStatesOutput)
        return output

    async def abort(self, request_id: str | Iterable[str], owner: str | None = None) -> None:
        """End requests of this owner, by the callers' ids: each gets a last output, with the finish reason "abort"."""
        if self._handler is not None:
            self._handler.abort([request_id] if isinstance(request_id, str) else request_id, owner)

    def num_unfinished_requests(self) -> int:
        return 0 if self._handler is None else len(self._handler.collectors)

    def _running(self) -> OutputHandler:
        """The way to an engine that takes requests, or an error that says why there is none."""
        if self._handler is not None and self._handler.dead is not None:
            raise EngineDeadError(*self._handler.dead.args)
        if self._ended:
            raise EngineError("the engine is shut down")
        if self._handler is None:
            raise EngineError("the engine is not started")
        return self._handler

    def _verify_placement(self, priority: int, data_parallel_rank: int | None) -> None:
        if priority and self.config.scheduler.policy != SchedulingPolicy.PRIORITY:
            raise RequestError(
                "priority",
                "has no meaning first come, first served",
                'start the engine with policy="priority" (--policy priority)',
            )
        is_number = isinstance(data_parallel_rank, int) and not isinstance(data_parallel_rank, bool)
        if data_parallel_rank is not None and not (is_number and 0 <= data_parallel_rank < self._num_replicas):
            raise RequestError(
                "data_parallel_rank", f"{data_parallel_rank!r} is no engine", f"from 0 to {self._num_replicas - 1}"
            )

    async def _begin(
        self,
        process: Callable[[], EngineCoreRequest | tuple[EngineCoreRequest, Selection]],
        priority: int = 0,
        data_parallel_rank: int | None = None,
        *,
        prompt: Prompt | None = None,  # None: it is about an earlier request, and brings a suffix at most
        suffix: Suffix = "",
        in_thread: bool = False,  # it takes long for another reason
        trace_headers: Mapping[str, str] | None = None,
    ) -> tuple[EngineCoreRequest, OutputCollector]:
        """Check a request and hand it over. Whatever is raised, nothing of it is left behind."""
        try:
            self._verify_placement(priority, data_parallel_rank)
            context = trace_context(trace_headers)
            if in_thread or (_takes_long(suffix) if prompt is None else _takes_long_to_read(prompt)):
                made = await asyncio.to_thread(process)  # the event loop has others to serve
            else:
                made = process()
            request, selection = made if isinstance(made, tuple) else (made, None)
            if selection is not None:
                hold = self.hidden_states_budget.reserve(selection.num_bytes, request.owner)
                selection = dataclasses.replace(selection, hold=hold)
            request.data_parallel_rank = data_parallel_rank
            request.trace_headers = None if self.tracer is None else context
            handler = self._running()  # asked again: much may have happened in a thread
            has_encoder = request.encoder_input is not None
            text, encoder_text = (None, None) if prompt is None else texts_of(prompt, has_encoder)
            return request, handler.submit(request, text, selection, encoder_text)
        except RequestError:
            if self.metrics is not None:
                self.metrics.record_refused()
            raise

    # ---- the model and the engine ----

    def chat_prompt(self, messages: Sequence[Mapping[str, Any]], **template_variables: Any) -> dict[str, Any]:
        """A conversation as a prompt for `generate`, through the model's chat template."""
        tokenizer = self.get_tokenizer()
        text = tokenizer.apply_chat_template(messages, **template_variables)
        return {"prompt": text, "prompt_token_ids": tokenizer.encode(text, add_special_tokens=False)}

    def get_tokenizer(self) -> Tokenizer:
        if self._tokenizer is None:
            raise RequestError("tokenizer", "was not loaded", "start the engine without skip_tokenizer")
        return self._tokenizer

    @property
    def eos_token_ids(self) -> tuple[int, ...]:
        """The tokens that end an answer."""
        return self._input_processor.eos_token_ids

    @property
    def has_chat_template(self) -> bool:
        return self._tokenizer is not None and self.source.chat_template is not None

    def verify_generates(self) -> None:
        """RequestError: the model is for vectors alone."""
        self._input_processor.verify_generates()

    def get_default_params(self) -> GenerationParams:
        """What a request without params uses: the model's generation defaults over ours. BeamSearchParams where the
        model's files ask for a beam search."""
        return (self._default_params if self._default_search is None else self._default_search).clone()

    def get_default_sampling_params(self) -> SamplingParams:
        """The same for a request that samples."""
        return self._default_params.clone()

    def get_default_beam_search_params(self) -> BeamSearchParams | None:
        """The same for a beam search; None where the model's files ask for none."""
        return None if self._default_search is None else self._default_search.clone()

    def describe(self) -> dict[str, Any]:
        """The resolved settings and the memory figures, of the first engine."""
        assert self._client is not None
        return dict(self._client.ready.description)

    def health(self) -> Health:
        if self._client is None:
            return Health([EngineHealth(index, EngineState.STARTING) for index in range(self._num_replicas)])
        return self._client.health()

    async def pause(self) -> None:
        """No further step until `resume`. Requests keep their places, and new ones queue up."""
        await self._call("pause")

    async def resume(self) -> None:
        await self._call("resume")

    async def reset_prefix_cache(self) -> bool:
        """Forget cached prefixes. False: requests are under way in an engine, and there nothing was changed."""
        return all(await self._call("reset_prefix_cache"))

    async def stats(self) -> list[SchedulerStats]:
        """One for each engine."""
        return [msgspec.convert(figures, SchedulerStats) for figures in await self._call("stats")]

    async def start_profile(self) -> None:
        await self._call("start_profile")

    async def stop_profile(self) -> list[str]:
        """The paths of the traces, one for each engine."""
        return await self._call("stop_profile")

    async def sleep(self, level: int = 1) -> None:
        """Give memory back while nobody asks anything: the KV cache (1), the weights as well (2)."""
        await self._call("sleep", level)

    async def wake_up(self) -> None:
        await self._call("wake_up")

    async def _call(self, method: str, *arguments: Any) -> list[Any]:
        self._running()
        assert self._client is not None
        return await self._client.call_utility(method, *arguments)


async def _outputs_of(
    handler: OutputHandler, request: EngineCoreRequest, collector: OutputCollector
) -> AsyncGenerator[RequestOutput, None]:
    """What comes for a request, until it has ended or nobody wants it any more."""
    try:
        finished = False
        while not finished:
            output = await collector.get()
            assert isinstance(output, RequestOutput)
            if output.refusal is not None:
                raise output.refusal
            finished = output.finished
            if output.hidden_states is not None:
                await arrange_beside(output)
            yield output
    finally:
        handler.release(request, collector)


async def _only_output_of(handler: OutputHandler, request: EngineCoreRequest, collector: OutputCollector) -> Output:
    """The output of a request that has just one, if all went well."""
    try:
        output = await collector.get()
    finally:
        handler.release(request, collector)
    if output.refusal is not None:
        raise output.refusal
    if output.error is not None:
        raise EngineError(output.error)
    await arrange_beside(output)
    return output


def _takes_long_to_read(prompt: Prompt) -> bool:
    parsed = parse_prompt(prompt)
    parts = [parsed.encoder, parsed.decoder] if isinstance(parsed, PromptPair) else [parsed]
    return any(
        part.audio is not None or (part.token_ids is None and _takes_long(part.text))
        for part in parts
        if part is not None
    )


def _names_many(positions: Any) -> bool:
    return isinstance(positions, Sequence) and len(positions) > MANY_PIECES


def _has_many_words(params: GenerationParams | None) -> bool:
    words = getattr(params, "bad_words", None)
    return isinstance(words, list) and (len(words) > MANY_WORDS or any(map(_takes_long, words)))


def _takes_long(text: Any) -> bool:
    return isinstance(text, str) and len(text) > LONG_TEXT


def _request_id(asked: str | None) -> str:
    """One that nobody can guess, for who brings none: an id is all that it takes to abort a request."""
    return secrets.token_hex(16) if asked is None else asked
