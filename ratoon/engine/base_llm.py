"""What LLM and AsyncLLM have in common: settings, the model as the front end knows it, and questions about both.

Waiting for requests differs: LLM steps the engine, AsyncLLM uses an event loop.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, TypeAlias, TypeVar

from ratoon.core.adapters import Adapter
from ratoon.core.errors import ConfigError, EngineError, ModelError, RequestError
from ratoon.core.health import EngineHealth, EngineState, Health
from ratoon.core.params import BeamSearchParams, GenerationParams, SamplingParams
from ratoon.core.settings import configure
from ratoon.engine.adapters import AdapterRegistry
from ratoon.engine.front_end import FrontEnd
from ratoon.engine.input.chat_media import chat_media
from ratoon.engine.input.default_params import default_beam_search_params, default_sampling_params
from ratoon.engine.input.input_processor import InputProcessor
from ratoon.engine.input.prompts import Prompt
from ratoon.engine.output.hidden_states_budget import HiddenStatesBudget
from ratoon.engine.output.output_processor import OutputProcessor
from ratoon.engine.output.record_log import open_record_log
from ratoon.engine.output.roots import Root, RootLog
from ratoon.engine.processes.garbage import no_garbage_collection
from ratoon.engine.processes.torch_parts import start_loading_torch_library
from ratoon.models.media_parts import placeholder_texts
from ratoon.observe.logging import get_logger
from ratoon.observe.startup import StartupTimer
from ratoon.observe.throughput import ThroughputLog
from ratoon.observe.tracing import make_tracer

if TYPE_CHECKING:
    from ratoon.models.source import ModelSource
    from ratoon.models.tokenizer import Tokenizer
    from ratoon.observe.metrics import EngineMetrics

logger = get_logger(__name__)

Message: TypeAlias = Mapping[str, Any]  # {"role": ..., "content": ...}
Engine = TypeVar("Engine", bound=FrontEnd)


class BaseLLM:
    source: ModelSource

    def __init__(
        self,
        model: str,
        settings: Mapping[str, Any],
        metrics: EngineMetrics | None,
        startup_timer: StartupTimer | None,
    ) -> None:
        """Checks the settings (ConfigError), and loads nothing."""
        self.front_end_config, self.config = configure(model, settings)
        self.metrics = metrics
        self.startup_timer = startup_timer if startup_timer is not None else StartupTimer()
        endpoint = self.front_end_config.otlp_traces_endpoint
        self.tracer = None if endpoint is None else make_tracer(endpoint, model)
        self.hidden_states_budget = HiddenStatesBudget(self.front_end_config.max_total_hidden_states_bytes)
        self._adapters = AdapterRegistry(self.config.adapters, self._inspect_adapter)
        self._throughput = None if self.front_end_config.disable_log_stats else ThroughputLog()
        self._tokenizer: Tokenizer | None = None
        self._client: Any = None
        self.engine: Any = None  # once it runs
        self._ended = False

    def _load_model(self, timer: StartupTimer, engine_follows: bool = False) -> None:
        """The front end's part of the model. Weights, and torch, are loaded by the engine. `engine_follows`: in this
        process."""
        from ratoon.models.source import resolve_model

        if engine_follows:
            start_loading_torch_library()
        with timer.phase("find model"):
            self.source = resolve_model(self.config.model, self.config.hf_overrides, self.config.model_backend)
        if not self.front_end_config.skip_tokenizer:
            with timer.phase("load tokenizer"), no_garbage_collection():
                self._tokenizer = self.source.load_tokenizer()
            reads, token_of = self.source.config.media, self._tokenizer.id_to_token
            self._tokenizer.media_placeholders = placeholder_texts(reads, token_of)
            self._compare_vocabularies(self._tokenizer)

    def _compare_vocabularies(self, tokenizer: Tokenizer) -> None:
        """ConfigError: the model that drafts has other tokens, so that its guesses would mean something else."""
        from ratoon.models.source import resolve_model
        from ratoon.models.tokenizer import find_other_token

        draft = self.config.speculation.on_device
        if draft is None or draft.kind != "draft":
            return
        source = resolve_model(draft.path)
        try:
            other = source.load_tokenizer()
        except ModelError:  # a draft model needs none
            logger.info("%s has no tokenizer: its vocabulary is not compared with the model's", draft)
            return
        found = find_other_token(tokenizer, other)
        if found is not None:
            id, token, of_draft = found
            problem = f"{draft} has another vocabulary: token {id} is {of_draft!r} there, and {token!r} in the model"
            raise ConfigError("speculate", problem, "a smaller model of the same family")

    def _inspect_adapter(self, path: str) -> Adapter:
        """The adapter in these files. ModelError: it does not fit the model."""
        from ratoon.models.adapters import inspect

        if self.config.load_format == "dummy":
            from ratoon.models.build import collect_shapes

            shapes: Mapping[str, tuple[int, ...]] = collect_shapes(self.source.config)
        else:
            shapes = self.source.tensors.shapes()
        return inspect(path, shapes, self.config.adapters.max_lora_rank)

    def _name_adapters(self) -> None:
        """Adds the adapters that the settings name. ConfigError: one of them is not right."""
        for name, path in self.front_end_config.adapters.items():
            try:
                self._adapters.add(name, path)
            except RequestError as error:
                field = "name" if error.field == "lora_name" else "path"
                raise ConfigError("adapters", f"the {field} of {name!r}: {error.problem}", error.expected) from None

    def _wire(
        self,
        kind: type[Engine],
        client: Any,
        description: dict[str, Any],
        max_model_len: int | None = None,
        block_size: int | None = None,
    ) -> Engine:
        """Connect a client whose engine is ready with input and output processing."""
        source = self.source
        self.config = self.config.with_(max_model_len=max_model_len or self.config.max_model_len)
        self._description = description
        input_processor = InputProcessor(
            source.config,
            self._tokenizer,
            source.generation_defaults,
            self.config.max_model_len,
            self.config.max_logprobs,
            self.front_end_config.seed,
            kv_capacity=description.get("kv_capacity_tokens"),
            block_size=block_size or self.config.cache.block_size,
            max_lease_seconds=self.config.cache.max_lease_seconds,
            max_hidden_states_bytes=self.config.max_hidden_states_bytes,
            num_stages=self.config.pipeline_parallel_size,
            pooling=source.pooling,
            media=self.config.media,
        )
        shared_roots = getattr(client, "shared_roots", None)
        records = None if shared_roots is not None else open_record_log(self.config, "roots")
        output_processor = OutputProcessor(
            self._tokenizer,
            metrics=self.metrics,
            selector=input_processor.selector,
            max_roots=self.config.max_roots,
            budget=self.hidden_states_budget,
            tracer=self.tracer,
            throughput=self._throughput,
            shared_roots=shared_roots,
            notes_dropped_roots=self.config.speculation.keeps_texts,
            root_log=None if records is None else RootLog(records),
        )
        if self.tracer is not None:
            self.tracer.model_name = source.name
        if self.metrics is not None:
            self.metrics.watch(client.health)
            self.metrics.name_adapters(self.adapter_names)
        return kind(
            client,
            input_processor,
            output_processor,
            adapters=self._adapters,
            default_params=default_sampling_params(source.generation_defaults),
            default_search=default_beam_search_params(source.generation_defaults),
            policy=self.config.scheduler.policy,
            budget=self.hidden_states_budget,
            metrics=self.metrics,
            tracer=self.tracer,
            throughput=self._throughput,
        )

    def start_grammars(self) -> None:
        """Start the process that checks grammars of structured output now, rather than with the first of them."""
        self._running().input_processor.start_grammars()

    def _running(self) -> Any:
        """The engine, if it takes requests, or an error that says why there is none."""
        if self.engine is None:
            raise EngineError("the engine is shut down" if self._ended else "the engine is not started")
        self.engine.verify_running()
        return self.engine

    @property
    def _front_end(self) -> FrontEnd:
        """The part of the engine that answers questions after its end as well."""
        if self.engine is None:
            raise EngineError("the engine is not started")
        engine: FrontEnd = self.engine
        return engine

    # ---- the model ----

    def chat_prompt(self, messages: Sequence[Message], **template_variables: Any) -> dict[str, Any]:
        """A conversation as a prompt for `generate` or `stream`, through the model's chat template.

        Content may be a list of parts. An image is {"type": "image", "image": …} with a PIL image, an array, bytes or a
        path, or {"type": "image_url", "image_url": {"url": …}} with a path or a data URL; a video likewise.
        """
        tokenizer = self.get_tokenizer()
        media = chat_media(messages, tokenizer.media_placeholders)
        text = tokenizer.apply_chat_template(messages, **template_variables)
        prompt = {"prompt": text, "prompt_token_ids": tokenizer.encode(text, add_special_tokens=False)}
        return {**prompt, "multi_modal_data": media} if media else prompt

    def count_tokens(self, prompt: Prompt) -> int:
        """The number of tokens of a prompt, with those in the place of images; it is not run, but images are decoded.
        RequestError: it is longer than the model's length, or `generate` would refuse it for another reason."""
        return self._front_end.input_processor.count_tokens(prompt)

    def get_tokenizer(self) -> Tokenizer:
        if self._tokenizer is None:
            raise RequestError("tokenizer", "was not loaded", "start the engine without skip_tokenizer")
        return self._tokenizer

    @property
    def has_chat_template(self) -> bool:
        return self._tokenizer is not None and self.source.chat_template is not None

    @property
    def eos_token_ids(self) -> tuple[int, ...]:
        """The tokens that end an answer."""
        return self._front_end.input_processor.eos_token_ids

    def verify_generates(self) -> None:
        """RequestError: the model is for vectors alone."""
        self._front_end.input_processor.verify_generates()

    def get_default_params(self) -> GenerationParams:
        """What a request without params uses: the model's generation defaults over ours. BeamSearchParams where the
        model's files ask for a beam search."""
        return self._front_end.get_default_params()

    def get_default_sampling_params(self) -> SamplingParams:
        """The params of a request that samples and gives none; also those of `stream`, which does not search by
        itself."""
        return self._front_end.default_params.clone()

    def get_default_beam_search_params(self) -> BeamSearchParams | None:
        """The params of a beam search that gives none; None where the model's files ask for none."""
        search = self._front_end.default_search
        return None if search is None else search.clone()

    # ---- adapters ----

    def list_adapters(self) -> dict[str, Adapter]:
        """The adapters that requests may name."""
        return dict(self._adapters.named)

    def adapter_names(self) -> dict[str, str]:
        """The names of adapters by the digests of their files."""
        return {adapter.digest: name for name, adapter in self._adapters.named.items()}

    # ---- the engine ----

    def describe(self) -> dict[str, Any]:
        """The resolved settings and the memory figures; of several engines, those of the first."""
        return dict(self._description)

    def health(self) -> Health:
        if self._client is None:
            num_engines = self.front_end_config.num_engines
            return Health([EngineHealth(index, EngineState.STARTING) for index in range(num_engines)])
        health: Health = self._client.health()
        return health

    def num_unfinished_requests(self) -> int:
        return 0 if self.engine is None else self.engine.num_unfinished_requests()

    def list_roots(self, owner: str | None = None) -> list[Root]:
        """This owner's ended requests that can be continued, the newest first."""
        self._running()
        return self._front_end.output_processor.roots.list(owner)

    # ---- control. Of AsyncLLM these are to be awaited, and results are lists, one entry for each engine ----

    def pause(self) -> Any:
        """Runs no further step until `resume`: requests under way keep their places and their memory, and new ones
        queue up. From any thread; a running call of an LLM keeps waiting, so only another thread can resume it."""
        return self._call("pause")

    def resume(self) -> Any:
        return self._call("resume")

    def start_profile(self) -> Any:
        return self._call("start_profile")

    def stop_profile(self) -> Any:
        """The path of the trace."""
        return self._call("stop_profile")

    def sleep(self, level: int = 1) -> Any:
        """Free memory while there are no requests: the KV cache (1), the weights as well (2)."""
        return self._call("sleep", level)

    def wake_up(self) -> Any:
        return self._call("wake_up")

    def _call(self, method: str, *arguments: Any) -> Any:
        return self._running().client.call_utility(method, *arguments)
