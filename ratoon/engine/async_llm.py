"""AsyncLLM: many callers on one event loop, one engine or several in separate processes.

It checks requests, sends them and yields their outputs, through the front end that LLM uses as well
(front_end.py). Engine processes and their restarts are the client's task.
"""

from __future__ import annotations

import asyncio
import math
import os
import time
from collections.abc import AsyncGenerator, Callable, Iterable, Sequence
from contextlib import aclosing, suppress
from functools import partial
from typing import TYPE_CHECKING, Any, TypeAlias, Unpack

import msgspec

from ratoon.core.adapters import Adapter
from ratoon.core.engine_map import EngineMapReport
from ratoon.core.errors import EngineAwayError, EngineError, UnknownParentError
from ratoon.core.outputs import (
    ClassificationOutput,
    EmbeddingOutput,
    HiddenStatesOutput,
    RequestOutput,
    RerankOutput,
    ScoringOutput,
)
from ratoon.core.params import BeamSearchParams, GenerationParams, HiddenStatesParams, PoolingParams, RequestOutputKind
from ratoon.core.prepared import prepared
from ratoon.core.stats import SchedulerStats
from ratoon.engine.async_llm_engine import AsyncLLMEngine
from ratoon.engine.base_llm import BaseLLM, Message
from ratoon.engine.front_end import Key, Prepared, id_of, note_forgotten, verify_beam_search_params, with_output_kind
from ratoon.engine.input.prompts import Prompt, Suffix
from ratoon.engine.input.request_options import (
    ChatOptions,
    ContinuationOptions,
    ExtractionOptions,
    GenerationOptions,
    PoolingOptions,
    split_chat_options,
    verify_keywords,
)
from ratoon.engine.output.output_collector import Take
from ratoon.engine.output.output_processor import OutputProcessor, no_original
from ratoon.engine.output.roots import Root
from ratoon.engine.output.vectors import cut_to, verify_classifier, verify_dimensions
from ratoon.engine.processes.client_interface import AsyncEngineClient
from ratoon.engine.scoring import (
    ScoreOptions,
    document_pairs,
    label_output,
    pairs_of,
    plan_scores,
    ranked_outputs,
    score_outputs,
    with_prompt,
)
from ratoon.observe.startup import StartupTimer

if TYPE_CHECKING:
    from ratoon.engine.processes.hub_client import SharedRoots
    from ratoon.observe.metrics import EngineMetrics

Params: TypeAlias = GenerationParams | None
Id: TypeAlias = str | None  # None: one that can't be guessed
Outputs: TypeAlias = AsyncGenerator[RequestOutput, None]


class AsyncLLM(BaseLLM):
    """A model and engines for it, for use with asyncio.

        async with AsyncLLM("smollm2-135m") as llm:
            async for output in llm.generate("One prompt.", SamplingParams(max_tokens=32)):
                print(output.outputs[0].text)

    Takes the model and the settings that LLM takes, and has its methods, for one prompt a call. All of them belong on
    the event loop that `start` ran on.
    """

    def __init__(
        self,
        model: str,
        *,
        metrics: EngineMetrics | None = None,
        client: AsyncEngineClient | None = None,  # in the place of engine processes
        startup_timer: StartupTimer | None = None,
        **settings: Any,  # docs/settings.md lists them
    ) -> None:
        """Checks the settings (ConfigError); `start` does the rest."""
        super().__init__(model, settings, metrics, startup_timer)
        self._client = client
        self._shared_roots: SharedRoots | None = getattr(client, "shared_roots", None)
        self._drain_until = math.inf
        self._shutdown_lock = asyncio.Lock()

    async def start(self) -> None:
        """Start engine and tokenizer, side by side. ModelError: the model can't be read; ConfigError: it can't run with
        these settings; EngineError: an engine process failed."""
        if self._ended:
            raise EngineError("the engine has ended: build another AsyncLLM")
        if self.engine is not None:
            return
        if self._client is None:
            from ratoon.engine.processes.moving_client import client_of_settings

            own = self.front_end_config
            self._client = client_of_settings(self.config, own, self.startup_timer)
        client: AsyncEngineClient = self._client
        starting = asyncio.create_task(client.start())
        try:
            await asyncio.gather(starting, asyncio.to_thread(self._load_model, StartupTimer()))
            if self._ended:
                raise EngineError("the engine was shut down while it started")
        except BaseException:
            self._ended = True
            starting.cancel()
            await asyncio.gather(starting, return_exceptions=True)
            await client.shutdown()
            raise
        await asyncio.to_thread(self._name_adapters)
        ready = client.ready
        self.engine = self._wire(AsyncLLMEngine, client, ready.description, ready.max_model_len, ready.block_size)
        roots = self.engine.output_processor.roots
        if leases := roots.leases_to_restore():
            answers = await client.call_utility("restore_leases", leases)
            roots.note_restored(branch_id for answer in answers for branch_id in answer)
        self.startup_timer.finish()

    async def shutdown(self, drain_seconds: float = 0.0) -> None:
        """Take no more requests, wait so long for those under way, abort the rest, end the engine processes.

        May be called again; a call that is less patient shortens the wait of one that is under way.
        """
        self._ended = True
        self._drain_until = min(self._drain_until, time.monotonic() + drain_seconds)
        async with self._shutdown_lock:
            if self.engine is None or self.engine.stopped:
                return
            await self.engine.shutdown(lambda: self._drain_until)
            if self.tracer is not None:
                await asyncio.to_thread(self.tracer.shutdown)

    async def __aenter__(self) -> AsyncLLM:
        await self.start()
        return self

    async def __aexit__(self, *error: object) -> None:
        await self.shutdown()

    # ---- replicas ----

    async def add_replica(self) -> int:
        """Start another engine beside the others and wait until it is ready. Returns its index. RequestError: the
        service was started with one engine alone; ConfigError, EngineError: the engine did not start."""
        index: int = await self._running().client.add_replica()
        return index

    async def drain_replica(self, index: int, seconds: float = math.inf) -> None:
        """End an engine without loss: it gets no further request and ends when it has answered those that it has. After
        `seconds` the others continue what is left. RequestError: there is no such engine, or no other one."""
        await self._running().client.drain_replica(index, seconds)

    # ---- adapters ----

    async def load_adapter(self, name: str, path: str | os.PathLike[str], *, in_place: bool = True) -> Adapter:
        """`LLM.load_adapter`; files are read in a thread."""
        return await asyncio.to_thread(self._adapters.add, name, path, in_place=in_place)

    async def unload_adapter(self, name: str) -> None:
        """`LLM.unload_adapter`."""
        self._adapters.remove(name)

    # ---- requests ----

    def generate(
        self,
        prompt: Prompt,
        sampling_params: Params = None,
        request_id: Id = None,
        *,
        take: Take | None = None,
        **options: Unpack[GenerationOptions],
    ) -> Outputs:
        """`LLM.generate` for one prompt: yields outputs as the params' `output_kind` asks until one is `finished`.

        RequestError is raised at the first step for a request that can't be served, and EngineDeadError when the engine
        is gone for good. A request that fails later ends with an output that has `error` set and the finish reason
        "error". Closing the generator, or cancelling the task that waits for it, aborts the request.

        `take` is called with each output but the last while the generator's caller waits for one; it must not block.
        If it returns True, the output is not yielded. A server with many streams saves a change of tasks for each token
        that way.
        """
        verify_keywords("generate", options, GenerationOptions)
        prepare = partial(AsyncLLMEngine.prepare, prompt=prompt, params=sampling_params)
        return self._outputs(prepare, request_id, options, take, prompt=prompt, params=sampling_params)

    async def stream(
        self,
        prompt: Prompt,
        sampling_params: Params = None,
        request_id: Id = None,
        **options: Unpack[GenerationOptions],
    ) -> Outputs:
        """`LLM.stream` for one prompt: each output holds only new text and tokens, whatever `output_kind` says."""
        params = self._running().default_params if sampling_params is None else sampling_params
        params = with_output_kind(params, RequestOutputKind.DELTA)
        async with aclosing(self.generate(prompt, params, request_id, **options)) as outputs:
            async for output in outputs:
                yield output

    def beam_search(
        self, prompt: Prompt, params: BeamSearchParams, request_id: Id = None, **options: Unpack[GenerationOptions]
    ) -> Outputs:
        """`LLM.beam_search` for one prompt. The last output has the `n` best texts, the best first; with the kind
        CUMULATIVE every step before brings one output, with the best text so far."""
        verify_beam_search_params(params)
        return self.generate(prompt, params, request_id, **options)

    async def chat(
        self,
        messages: Sequence[Message],
        sampling_params: Params = None,
        request_id: Id = None,
        **options: Unpack[ChatOptions],
    ) -> Outputs:
        """`LLM.chat` for one conversation. The rest is as in `generate`."""
        verify_keywords("chat", options, ChatOptions)
        variables, left = split_chat_options(options)
        prompt = await asyncio.to_thread(self.chat_prompt, messages, **variables)
        async with aclosing(self.generate(prompt, sampling_params, request_id, **left)) as outputs:
            async for output in outputs:
                yield output

    async def generate_continuation(
        self,
        parent_request_id: RequestOutput | str,
        suffix: Suffix = "",
        sampling_params: Params = None,
        request_id: Id = None,
        *,
        take: Take | None = None,
        **options: Unpack[ContinuationOptions],
    ) -> Outputs:
        """`LLM.generate_continuation`; outputs, errors and `take` are as in `generate`."""
        verify_keywords("generate_continuation", options, ContinuationOptions)
        if options.get("arrival_time") is None:
            options["arrival_time"] = time.monotonic()  # before the wait
        parent_id, owner, prompt = id_of(parent_request_id), options.get("owner"), options.get("prompt")
        parent = await self._find_parent_or_id(parent_id, owner, prompt, wait=False)
        if options.pop("wait", True) and isinstance(parent, Root):
            parent = await self._find_parent_or_id(parent_id, owner, prompt, wait=True)
        prepare: Callable[..., Prepared] = partial(
            AsyncLLMEngine.prepare_continuation, parent=parent, suffix=suffix, params=sampling_params
        )
        read = {"prompt": None if isinstance(parent, Root) else prompt, "suffix": suffix, "params": sampling_params}
        async with aclosing(self._running().answer(prepare, request_id, options, take, **read)) as outputs:
            async for output in outputs:
                yield output

    async def embed(
        self,
        prompt: Prompt,
        pooling_params: PoolingParams | None = None,
        request_id: Id = None,
        *,
        dimensions: int | None = None,
        prompt_name: str | None = None,
        **options: Unpack[PoolingOptions],
    ) -> EmbeddingOutput:
        """`LLM.embed` for one prompt. RequestError if it can't be served, EngineError if it failed."""
        verify_keywords("embed", options, PoolingOptions)
        if dimensions is not None:
            verify_dimensions(dimensions, self.source.config)
            pooling_params = cut_to(dimensions, pooling_params)
        prompt = with_prompt(self.source.prompts, self.source.default_prompt, prompt, prompt_name)
        prepare = partial(AsyncLLMEngine.prepare_pooling, prompt=prompt, params=pooling_params)
        output: EmbeddingOutput = await self._running().answer_once(prepare, request_id, options, prompt=prompt)
        return output

    async def classify(
        self,
        prompt: Prompt,
        activation: str | None = None,
        request_id: Id = None,
        **options: Unpack[PoolingOptions],
    ) -> ClassificationOutput:
        """`LLM.classify` for one prompt."""
        verify_classifier(self.source.config)
        params = PoolingParams(classify=True, activation=activation)
        return label_output(await self.embed(prompt, params, request_id, **options), self.source.config)

    async def score(
        self,
        text_1: str | Sequence[str],
        text_2: str | Sequence[str],
        *,
        instruction: str | None = None,
        truncate_prompt_tokens: int | None = None,
        activation: str | None = None,
        **options: Unpack[PoolingOptions],
    ) -> list[ScoringOutput]:
        """`LLM.score`. EngineError: a pair failed."""
        pairs, fields = pairs_of(text_1, text_2)
        wanted = ScoreOptions(instruction, truncate_prompt_tokens, None, activation)
        return await self._scores(pairs, fields, wanted, options)

    async def rerank(
        self,
        query: str,
        documents: Sequence[str],
        top_n: int | None = None,
        *,
        instruction: str | None = None,
        truncate_prompt_tokens: int | None = None,
        max_tokens_per_doc: int | None = None,
        activation: str | None = None,
        **options: Unpack[PoolingOptions],
    ) -> list[RerankOutput]:
        """`LLM.rerank`."""
        pairs, fields = document_pairs(query, documents, top_n)
        wanted = ScoreOptions(instruction, truncate_prompt_tokens, max_tokens_per_doc, activation)
        return ranked_outputs(documents, await self._scores(pairs, fields, wanted, options), top_n)

    async def _scores(
        self, pairs: list[tuple[str, str]], fields: list[str], wanted: ScoreOptions, options: PoolingOptions
    ) -> list[ScoringOutput]:
        assert self.config.max_model_len is not None, "the engine has started"
        plan = await asyncio.to_thread(
            plan_scores,
            self.source.config,
            self._tokenizer,
            self.config.max_model_len,
            self.source.prompts,
            pairs,
            fields,
            wanted,
        )
        outputs = await asyncio.gather(*(self.embed(prompt, plan.params, **options) for prompt in plan.prompts))
        return score_outputs(plan, outputs, len(pairs))

    async def extract_hidden_states(
        self,
        prompt: Prompt | RequestOutput | None = None,
        params: HiddenStatesParams | None = None,
        request_id: Id = None,
        **options: Unpack[ExtractionOptions],
    ) -> HiddenStatesOutput:
        """`LLM.extract_hidden_states` for one prompt or request, as a numpy array (bfloat16 as uint16). EngineError: it
        failed. Cancelling the task aborts it."""
        original = options.pop("original_request_id", None)
        source = await self._find_source(prompt, original, options.get("owner"))
        prepare = partial(AsyncLLMEngine.prepare_extraction, source=source, params=params)
        read = {"prompt": None if isinstance(source, Root) else source, "params": params}
        deadline = None if params is None else params.deadline
        output: HiddenStatesOutput = await self._running().answer_once(prepare, request_id, options, deadline, **read)
        return output

    async def _outputs(
        self, prepare: Callable[..., Prepared], request_id: Id, options: Any, take: Take | None, **read: Any
    ) -> Outputs:
        async with aclosing(self._running().answer(prepare, request_id, options, take, **read)) as outputs:
            async for output in outputs:
                yield output

    async def abort(self, request_id: str | Iterable[str], owner: str | None = None) -> None:
        """End requests of this owner, by the callers' ids: each gets a last output, with the finish reason "abort"."""
        if self.engine is not None:
            self.engine.abort([request_id] if isinstance(request_id, str) else request_id, owner)

    # ---- earlier requests, and the engines ----

    async def find_parent(self, request_id: str, *, wait: bool = True, owner: str | None = None) -> Root:
        """What a continuation would go on from. UnknownParentError at once, and not after a wait for another owner's
        request: how long it takes must not tell that there is one."""
        root = await self._find_root(request_id, owner, wait=False)
        return await self._find_root(request_id, owner, wait=True) if wait else root

    async def _find_root(self, request_id: str, owner: str | None, wait: bool) -> Root:
        """Find a request of this front end or, where several share their roots, of any other one."""
        processor: OutputProcessor = self._running().output_processor
        if wait:
            await self._running().wait_for_end(request_id, owner)
        if self._shared_roots is None or processor.is_running(request_id, owner):
            return processor.find_root(request_id, owner)
        return await self._shared_roots.find(request_id, owner, wait)

    async def _find_parent_or_id(self, parent_id: str, owner: str | None, prompt: Any, wait: bool) -> Root | str:
        """What a continuation goes on from; the id, if it is forgotten and there is a prompt in its place."""
        try:
            return await self._find_root(parent_id, owner, wait)
        except UnknownParentError:
            if prompt is None:
                raise
            return note_forgotten(parent_id)

    async def _find_source(self, prompt: Any, original: Any, owner: str | None) -> Any:
        """What hidden states are read of: a prompt, or the request that an output or an id names."""
        if isinstance(prompt, RequestOutput) and original is None:
            prompt, original = None, prompt.request_id
        if self._shared_roots is None or original is None or self._is_running(original, owner):
            return self._running().find_source(prompt, original, owner)
        self._running().verify_one_source(prompt, original)
        try:
            return await self._shared_roots.find(original, owner, wait=False)
        except UnknownParentError:
            raise no_original(original) from None

    def _is_running(self, request_id: str, owner: str | None) -> bool:
        return self._running().output_processor.is_running(request_id, owner)

    async def end_leases(self, root_id: str, owner: str | None = None, *, of_any_owner: bool = False) -> int:
        """Free what is leased for an ended request, by its owner's id of it; it can still be continued. Returns the
        number of its leases."""
        return sum(await self._call("end_leases_of", root_id, owner, of_any_owner))

    def find_running(self, request_id: str, owner: str | None = None, *, of_any_owner: bool = False) -> list[Key]:
        """The unfinished requests of this front end with this id: at most one of an owner."""
        return [
            key
            for key in self._running().unfinished_keys()
            if key[1] == request_id and (of_any_owner or key[0] == owner)
        ]

    async def forget(self, request_id: str, owner: str | None = None) -> None:
        """Delete an ended request, and free what its leases hold. UnknownParentError: there is none."""
        if self._shared_roots is not None:
            self._running()
            await self._shared_roots.remove(request_id, owner)
            return
        root = self._running().output_processor.roots.remove(request_id, owner)
        self._running().tell_dropped_roots()
        if root.leased:
            with suppress(EngineAwayError):  # an engine that is started again has no leases
                await self._call("end_leases", root.branch_ids)

    async def reset_prefix_cache(self) -> bool:
        """Forget cached prefixes. False: requests are under way in an engine, and there nothing was changed."""
        return all(await self._call("reset_prefix_cache"))

    async def engine_maps(self, watcher_id: str) -> list[EngineMapReport]:
        """What each engine that runs is doing: all of it for a watcher that asks for the first time, or after long, and
        then what changed since it asked last. An engine collects this only while there are watchers."""
        return [msgspec.convert(report, prepared(EngineMapReport)) for report in await self._call("map", watcher_id)]

    async def stats(self) -> list[SchedulerStats]:
        """One for each engine."""
        return [msgspec.convert(figures, prepared(SchedulerStats)) for figures in await self._call("stats")]
