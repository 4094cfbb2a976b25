"""LLM: a model that answers, in this process. Prompts in, outputs back; one call at a time, on one thread, but for
`abort`, `pause` and `resume`.

It turns what people pass (one prompt or many, text, token ids, conversations) into requests and collects their outputs.
How they are carried out is the engine's.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import suppress
from types import TracebackType
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias, overload

from ratoon.api.arguments import (
    UseTqdm,
    in_conversation,
    is_many,
    is_sequence,
    one_for_each,
    refuse_lora,
    verify_beam_search_params,
    wants_progress,
    with_index,
    with_output_kind,
)
from ratoon.api.interrupts import interrupts_held_back
from ratoon.api.progress import request_progress
from ratoon.core.config import EngineConfig, SchedulingPolicy, resolve_max_model_len
from ratoon.core.errors import RequestError, UnknownParentError
from ratoon.core.outputs import EmbeddingOutput, HiddenStatesOutput, RequestOutput
from ratoon.core.params import (
    BeamSearchParams,
    GenerationParams,
    HiddenStatesParams,
    PoolingParams,
    RequestOutputKind,
    SamplingParams,
)
from ratoon.core.request import EngineCoreRequest
from ratoon.core.settings import configure
from ratoon.core.stats import SchedulerStats
from ratoon.engine.default_params import default_beam_search_params, default_sampling_params, warn_of_ignored_keys
from ratoon.engine.hidden_states import Selection
from ratoon.engine.input_processor import InputProcessor
from ratoon.engine.llm_engine import LLMEngine
from ratoon.engine.output_processor import OutputProcessor
from ratoon.engine.prompts import Prompt, Suffix, texts_of
from ratoon.engine.request_state import Output
from ratoon.engine.roots import Root
from ratoon.engine.torch_tensors import with_torch_tensors
from ratoon.observe.startup import StartupTimer
from ratoon.observe.throughput import ThroughputLog
from ratoon.observe.tracing import make_tracer, trace_context
from ratoon.transcription.options import TEMPERATURES, Task, TranscriptionOptions

if TYPE_CHECKING:
    from ratoon.models.tokenizer import Tokenizer
    from ratoon.transcription.audio import Audio
    from ratoon.transcription.results import Transcription

Message: TypeAlias = Mapping[str, Any]  # {"role": ..., "content": ...}
Params: TypeAlias = GenerationParams | Sequence[GenerationParams] | None
MakeRequest: TypeAlias = Callable[[str, Prompt, Any, int], EngineCoreRequest]  # of an id, a prompt, params, a priority
MAX_EXTRACTIONS = 256  # of a list, in the engine at a time: it turns away what is more than it can queue
Source: TypeAlias = Prompt | RequestOutput  # what has hidden states


class Checked(NamedTuple):
    """A request that can be handed over."""

    request: EngineCoreRequest
    prompt: str | None = None  # its text, where it has one
    selection: Selection | None = None  # of hidden states
    encoder_prompt: str | None = None  # the other text, of an encoder-decoder model

    @property
    def external_id(self) -> str:
        assert self.request.external_id is not None
        return self.request.external_id


class LLM:
    """A model and an engine for it.

        with LLM("smollm2-135m") as llm:
            for output in llm.generate(["One prompt.", "Another."], SamplingParams(max_tokens=32)):
                print(output.outputs[0].text)

    `model` is a folder, a GGUF file, a hub id or the name of an embedded model. What is left out is chosen to fit the
    model and the machine. Errors: ModelError (the model can't be read), ConfigError (it can't run with these settings).
    """

    def __init__(
        self,
        model: str,
        *,
        process: bool = False,  # run the engine in a process of its own, which is started again should it die
        startup_timer: StartupTimer | None = None,
        **settings: Any,  # of docs/settings.md
    ) -> None:
        front_end, config = configure(model, {"seed": 0, "disable_log_stats": True, **settings})
        self._throughput = None if front_end.disable_log_stats else ThroughputLog()
        endpoint = front_end.otlp_traces_endpoint
        self._tracer = None if endpoint is None else make_tracer(endpoint, model)
        self.startup_timer = startup_timer if startup_timer is not None else StartupTimer()
        self._start(config, front_end.seed, front_end.skip_tokenizer, process)

    def _start(self, config: EngineConfig, seed: int | None, skip_tokenizer: bool, process: bool) -> None:
        timer = self.startup_timer
        with timer.phase("find model"):
            from ratoon.models.source import resolve_model

            self.source = resolve_model(config.model, config.hf_overrides)
            config = config.with_(max_model_len=resolve_max_model_len(config.max_model_len, self.source.config))
        self._tokenizer: Tokenizer | None = None
        if not skip_tokenizer:
            with timer.phase("load tokenizer"):
                self._tokenizer = self.source.load_tokenizer()
        from ratoon.engine.client import make_client

        self.config = config
        self._client = make_client(config, self.source, timer, process)
        defaults = self.source.generation_defaults
        self._default_params = default_sampling_params(defaults)
        self._default_search = default_beam_search_params(defaults)
        warn_of_ignored_keys(self.source.name, self.source.ignored_generation_keys)
        input_processor = InputProcessor(
            self.source.config,
            self._tokenizer,
            defaults,
            config.max_model_len,
            config.max_logprobs,
            seed,
            kv_capacity=self._client.describe().get("kv_capacity_tokens"),
            block_size=config.cache.block_size,
            max_lease_seconds=config.cache.max_lease_seconds,
            max_hidden_states_bytes=config.max_hidden_states_bytes,
            pooling=self.source.pooling,
        )
        output_processor = OutputProcessor(
            self._tokenizer,
            selector=input_processor.selector,
            max_roots=config.max_roots,
            tracer=self._tracer,
            throughput=self._throughput,
        )
        if self._tracer is not None:
            self._tracer.model_name = self.source.name
        self.engine = LLMEngine(self._client, input_processor, output_processor, self._throughput)
        self._num_requests = 0
        self._inboxes: dict[str, deque[Any]] = {}  # by request id: whose outputs these are
        self._closed = False
        timer.finish()

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling_params: Params = None,
        *,
        priority: int | Sequence[int] | None = None,
        cache_salt: str | None = None,
        retain_kv: float | None = None,  # seconds that the memory is kept for continuations, once an answer has ended
        trace_headers: Mapping[str, str] | None = None,  # traceparent, tracestate: the span that this belongs to
        progress: bool = True,
        use_tqdm: UseTqdm = None,  # vLLM's name of progress
        lora_request: None = None,  # there are no adapters
    ) -> list[RequestOutput]:
        """Answer prompts, and return their outputs in the same order.

        A prompt is text, a list of token ids, {"prompt": text} or {"prompt_token_ids": ids}. An encoder-decoder model
        reads it with its encoder; {"encoder_prompt": prompt, "decoder_prompt": prompt} begins the answer as well. An
        encoder that hears reads {"audio": floats, "sampling_rate": 16000}. Params and priority are one for all, or a
        list with one for each. Every prompt is checked before the first is started: a bad one raises RequestError with
        its index. A request of a batch that fails later has `error` set and the finish reason
        "error", and the others go on; one that is alone, and that the engine refuses, raises. With BeamSearchParams the
        choices of an output are the best texts that a beam search found, the best first.
        """
        refuse_lora(lora_request)
        checked = self._check(prompts, sampling_params, priority, cache_salt, RequestOutputKind.FINAL_ONLY, retain_kv)
        self._trace(checked, trace_headers)
        outputs: dict[str, RequestOutput] = {}
        with request_progress(len(checked), wants_progress(progress, use_tqdm)) as advance:
            for output in self._run(checked):
                outputs[output.request_id] = output
                advance(1, sum(len(choice.token_ids) for choice in output.outputs))
        return [outputs[one.external_id] for one in checked]

    def beam_search(
        self,
        prompts: Prompt | Sequence[Prompt],
        params: BeamSearchParams | Sequence[BeamSearchParams],
        *,
        priority: int | Sequence[int] | None = None,
        cache_salt: str | None = None,
        retain_kv: float | None = None,
        progress: bool = True,
        use_tqdm: UseTqdm = None,
        lora_request: None = None,
    ) -> list[RequestOutput]:
        """`generate` with BeamSearchParams: search for the most probable texts behind each prompt."""
        verify_beam_search_params(params)
        return self.generate(
            prompts,
            params,
            priority=priority,
            cache_salt=cache_salt,
            retain_kv=retain_kv,
            progress=progress,
            use_tqdm=use_tqdm,
            lora_request=lora_request,
        )

    def continue_from(
        self,
        parent: RequestOutput | str,
        suffix: Suffix = "",
        sampling_params: GenerationParams | None = None,
        *,
        choice: int = 0,
        at: int | None = None,
        wait: bool = True,
        retain_kv: float | None = None,
        prompt: Prompt | None = None,  # the whole of it, suffix included, in case the parent is forgotten
        cache_salt: str | None = None,  # of that prompt; a parent has its own
        trace_headers: Mapping[str, str] | None = None,
    ) -> RequestOutput:
        """Go on from a request that has ended: behind its tokens, then `suffix` (text or token ids), a new answer.

        Nothing that is still there of the parent is computed again. With `retain_kv` on the parent that is all of it;
        the output's `continuation` says how it was. `choice` names one of several, `at` a place in the parent: so many
        of its tokens, prompt and answer together. A parent that still runs is waited for, or with `wait=False` forked
        where it is; a beam search can only be waited for. Where there is no such request, or it is too long ago,
        `prompt` is answered like any other, and the output's `continuation` says so; without one, UnknownParentError.
        """
        self._verify_open()
        parent_id = parent.request_id if isinstance(parent, RequestOutput) else parent
        processor = self.engine.output_processor
        while wait and isinstance(parent_id, str) and processor.is_running(parent_id):
            self._step()
        params = self.get_default_params() if sampling_params is None else sampling_params
        params = with_output_kind(params, RequestOutputKind.FINAL_ONLY)
        request_id, inputs = str(self._num_requests), self.engine.input_processor
        texts: tuple[str | None, str | None] = (None, None)
        try:
            root = processor.find_root(parent_id)
        except UnknownParentError:
            if prompt is None:
                raise
            request = inputs.process(
                request_id, prompt, params, cache_salt=cache_salt, retain_kv=retain_kv, in_place_of=str(parent_id)
            )
            texts = texts_of(prompt, request.encoder_input is not None)
        else:
            request = inputs.process_continuation(
                request_id, root, suffix, params, choice=choice, at=at, retain_kv=retain_kv
            )
        self._num_requests += 1
        checked = [Checked(request, texts[0], encoder_prompt=texts[1])]
        self._trace(checked, trace_headers)
        (output,) = self._run(checked)
        assert isinstance(output, RequestOutput)
        return output

    def stream(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling_params: Params = None,
        *,
        priority: int | Sequence[int] | None = None,
        cache_salt: str | None = None,
        trace_headers: Mapping[str, str] | None = None,
    ) -> Generator[RequestOutput, None, None]:
        """Answer prompts, and yield what is new as it comes: each output holds only new text and tokens.

        Of a beam search each holds all of the best text so far, which may be another one than before; the last has the
        texts that it found. Request ids tell the prompts apart, in their order. Closing the iterator takes back what is
        unfinished.
        """
        checked = self._check(prompts, sampling_params, priority, cache_salt, RequestOutputKind.DELTA)
        self._trace(checked, trace_headers)
        return self._run(checked)

    def chat(
        self,
        messages: Sequence[Message] | Sequence[Sequence[Message]],
        sampling_params: Params = None,
        *,
        priority: int | Sequence[int] | None = None,
        cache_salt: str | None = None,
        trace_headers: Mapping[str, str] | None = None,
        progress: bool = True,
        use_tqdm: UseTqdm = None,  # vLLM's name of progress
        lora_request: None = None,
        chat_template: str | None = None,  # in the place of the model's own, or the name of one that it has
        add_generation_prompt: bool | None = None,  # None: unless continue_final_message is set
        continue_final_message: bool = False,  # go on with the last message, which is the assistant's
        tools: list[dict[str, Any]] | None = None,
        chat_template_kwargs: Mapping[str, Any] | None = None,  # further variables for the template
    ) -> list[RequestOutput]:
        """Answer a conversation, or several, through the model's chat template. The rest is as in `generate`."""
        variables = {
            "add_generation_prompt": add_generation_prompt,
            "continue_final_message": continue_final_message,
            "tools": tools,
            **({} if chat_template is None else {"chat_template": chat_template}),
            **(chat_template_kwargs or {}),
        }
        refuse_lora(lora_request)
        options: dict[str, Any] = {
            "priority": priority,
            "cache_salt": cache_salt,
            "trace_headers": trace_headers,
            "progress": wants_progress(progress, use_tqdm),
        }
        if not is_sequence(messages):
            raise RequestError("messages", f"{type(messages).__name__} is not a list", "a list of messages")
        if not messages or not is_sequence(messages[0]):
            prompt = self.chat_prompt(messages, **variables)  # type: ignore[arg-type]
            return self.generate(prompt, sampling_params, **options)
        prompts = []
        for index, conversation in enumerate(messages):
            try:
                prompts.append(self.chat_prompt(conversation, **variables))  # type: ignore[arg-type]
            except RequestError as error:
                raise in_conversation(error, index) from None
        return self.generate(prompts, sampling_params, **options)

    def embed(
        self,
        prompts: Prompt | Sequence[Prompt],
        pooling_params: PoolingParams | Sequence[PoolingParams] | None = None,
        *,
        priority: int | Sequence[int] | None = None,
        cache_salt: str | None = None,
        progress: bool = True,
        use_tqdm: UseTqdm = None,
        lora_request: None = None,
    ) -> list[EmbeddingOutput]:
        """The vectors of prompts, in the same order: hidden states behind the final norm, of the last token or their
        mean over all tokens. Prompts, params and errors are as in `generate`; what fails has `error` set and no vector.
        """
        refuse_lora(lora_request)
        checked = self._check_pooling(prompts, pooling_params, priority, cache_salt)
        outputs: dict[str, EmbeddingOutput] = {}
        with request_progress(len(checked), wants_progress(progress, use_tqdm)) as advance:
            for output in self._run(checked):
                outputs[output.request_id] = output
                advance(1, len(output.prompt_token_ids))
        return [outputs[one.external_id] for one in checked]

    @overload
    def hidden_states(
        self,
        source: Source | None = None,
        params: HiddenStatesParams | None = None,
        *,
        original_request_id: str | None = None,
        choice: int = 0,
        cache_salt: str | None = None,
        progress: bool = True,
    ) -> HiddenStatesOutput: ...

    @overload
    def hidden_states(
        self,
        source: Sequence[Source] | None = None,
        params: HiddenStatesParams | Sequence[HiddenStatesParams] | None = None,
        *,
        original_request_id: Sequence[str] | None = None,
        choice: int | Sequence[int] = 0,
        cache_salt: str | None = None,
        progress: bool = True,
    ) -> list[HiddenStatesOutput]: ...

    def hidden_states(
        self,
        source: Source | Sequence[Source] | None = None,
        params: HiddenStatesParams | Sequence[HiddenStatesParams] | None = None,
        *,
        original_request_id: str | Sequence[str] | None = None,
        choice: int | Sequence[int] = 0,
        cache_salt: str | None = None,
        progress: bool = True,
    ) -> HiddenStatesOutput | list[HiddenStatesOutput]:
        """Hidden states of a prompt, or of a request: its output, or its id as `original_request_id`. For a list of
        them a list, in the same order.

        What is still there of a request is not computed again. One that still runs (a stream) is read as far as it has
        come; `choice` names one of several. Each is checked before the first is started; errors are as in `generate`:
        what fails in a list has `error` set and no tensor. UnknownParentError: there is no such request, or it is too
        long ago. TooLargeError: more bytes than `max_hidden_states_bytes`. DeadlineError: its time is over.
        """
        checked, single = self._check_extractions(source, original_request_id, params, choice, cache_salt)
        outputs: dict[str, HiddenStatesOutput] = {}
        with request_progress(len(checked), progress) as advance:
            for output in self._run(checked):
                outputs[output.request_id] = output
                advance(1, len(output.positions))
        in_order = [outputs[one.external_id] for one in checked]
        return in_order[0] if single else in_order

    def transcribe(
        self,
        audio: Audio | list[Audio],
        *,
        language: str | None = None,  # a code or a name; None: found out
        task: Task = "transcribe",  # or translate: to English
        timestamps: bool = True,
        prompt: str | None = None,  # text before the recording: names to spell right, a style
        temperature: float | Sequence[float] = TEMPERATURES,  # tried one after the other, until a text is good
        beam_size: int | None = None,  # None: greedy
        progress: bool = True,
        **further: Any,  # of TranscriptionOptions
    ) -> Transcription | list[Transcription]:
        """What a recording of any length says, or of a list each, in the same order; all of them run together.

        A recording is a path, the bytes of a file, an open file, or (samples, sampling rate). One that can't be read,
        or that fails, raises; in a list it has `error` set, and the others go on. RequestError: the model is none for
        speech, or an option has no meaning.
        """
        from ratoon.transcription.blocking import SteppedEngine, transcribe_recordings
        from ratoon.transcription.transcriber import make_transcriber

        self._verify_open()
        options = TranscriptionOptions(
            language=language,
            task=task,
            timestamps=timestamps,
            prompt=prompt,
            temperature=temperature,
            beam_size=beam_size,
            **further,
        )
        engine = SteppedEngine(self._begin, self._step, self._end)
        transcriber = make_transcriber(self.source, self.get_tokenizer(), engine, self.config.max_model_len)
        single = not isinstance(audio, list)
        recordings = [audio] if single else audio
        found = transcribe_recordings(engine, transcriber, recordings, options, progress=progress, single=single)
        return found[0] if single else found

    def chat_prompt(self, messages: Sequence[Message], **template_variables: Any) -> dict[str, Any]:
        """A conversation as a prompt for `generate` or `stream`, through the model's chat template."""
        tokenizer = self.get_tokenizer()
        text = tokenizer.apply_chat_template(messages, **template_variables)
        return {"prompt": text, "prompt_token_ids": tokenizer.encode(text, add_special_tokens=False)}

    def get_tokenizer(self) -> Tokenizer:
        if self._tokenizer is None:
            raise RequestError("tokenizer", "was not loaded", "build the LLM without skip_tokenizer")
        return self._tokenizer

    @property
    def has_chat_template(self) -> bool:
        return self._tokenizer is not None and self.source.chat_template is not None

    def get_default_params(self) -> GenerationParams:
        """What a call without params uses: the model's generation defaults over ours. BeamSearchParams where the
        model's files ask for a beam search."""
        return (self._default_params if self._default_search is None else self._default_search).clone()

    def get_default_sampling_params(self) -> SamplingParams:
        """The same for a call that samples, and for `stream`, which does not search by itself."""
        return self._default_params.clone()

    def get_default_beam_search_params(self) -> BeamSearchParams | None:
        """The same for a beam search; None where the model's files ask for none."""
        return None if self._default_search is None else self._default_search.clone()

    def reset_prefix_cache(self) -> bool:
        """Forget cached prefixes. False: requests are under way, and nothing was changed."""
        return self._client.reset_prefix_cache()

    def abort(self, request_ids: str | Sequence[str]) -> None:
        """End requests that are under way, by the ids that their outputs have: each gets a last output, with the finish
        reason "abort". From any thread; what a step that runs meanwhile brings for them is dropped."""
        ids = [request_ids] if isinstance(request_ids, str) else request_ids
        self._hand_out(self.engine.abort_request(ids))

    def pause(self) -> None:
        """No further step until `resume`: requests under way keep their places and their memory. From any thread; a
        call that waits for outputs waits on, so only another thread can resume it."""
        self._client.call_utility("pause")

    def resume(self) -> None:
        self._client.call_utility("resume")

    def stats(self) -> SchedulerStats:
        return self._client.stats()

    def describe(self) -> dict[str, Any]:
        """The resolved settings and the memory figures."""
        return self._client.describe()

    def close(self) -> None:
        """Give the engine's memory back. The LLM can't be used afterwards."""
        if not self._closed:
            self._closed = True
            self._client.shutdown()
            if self._tracer is not None:
                self._tracer.shutdown()

    def __enter__(self) -> LLM:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _check(
        self,
        prompts: Prompt | Sequence[Prompt],
        params: Params,
        priority: int | Sequence[int] | None,
        cache_salt: str | None,
        output_kind: RequestOutputKind,
        retain_kv: float | None = None,
    ) -> list[Checked]:
        """All prompts as requests to generate, or RequestError; nothing is started."""
        processor = self.engine.input_processor
        # What is told as it comes only grows, and the best text of a search may become another one.
        defaults = self._default_params if output_kind == RequestOutputKind.DELTA else self.get_default_params()
        if params is None or isinstance(params, (SamplingParams, BeamSearchParams)):
            # Shared by all: no prompt's index belongs to the error.
            processor.verify_params(with_output_kind(params or defaults, output_kind))

        def make_request(request_id: str, prompt: Prompt, one_params: Any, one_priority: int) -> EngineCoreRequest:
            one_params = with_output_kind(one_params, output_kind)
            return processor.process(
                request_id, prompt, one_params, priority=one_priority, cache_salt=cache_salt, retain_kv=retain_kv
            )

        return self._make_requests(prompts, "sampling_params", params, defaults, priority, make_request)

    def _check_pooling(
        self,
        prompts: Prompt | Sequence[Prompt],
        params: PoolingParams | Sequence[PoolingParams] | None,
        priority: int | Sequence[int] | None,
        cache_salt: str | None,
    ) -> list[Checked]:
        """The same for vectors."""
        processor = self.engine.input_processor
        if params is None or isinstance(params, PoolingParams):
            processor.verify_pooling_params(params or PoolingParams())

        def make_request(request_id: str, prompt: Prompt, one_params: Any, one_priority: int) -> EngineCoreRequest:
            return processor.process_pooling(
                request_id, prompt, one_params, priority=one_priority, cache_salt=cache_salt
            )

        return self._make_requests(prompts, "pooling_params", params, PoolingParams(), priority, make_request)

    def _check_extractions(
        self,
        source: Source | Sequence[Source] | None,
        original_request_id: str | Sequence[str] | None,
        params: HiddenStatesParams | Sequence[HiddenStatesParams] | None,
        choice: int | Sequence[int],
        cache_salt: str | None,
    ) -> tuple[list[Checked], bool]:
        """The same for hidden states, and whether it is one alone."""
        self._verify_open()
        if (source is None) == (original_request_id is None):
            raise RequestError("source", "or original_request_id says what to read", "one of the two")
        field, asked = ("source", source) if source is not None else ("original_request_id", original_request_id)
        single = not (is_many(asked) if source is not None else is_sequence(asked))
        sources: list[Any] = [asked] if single else list(asked)  # type: ignore[arg-type]
        each = zip(
            sources,
            one_for_each("params", params, len(sources), HiddenStatesParams()),
            one_for_each("choice", choice, len(sources), 0),
        )
        checked: list[Checked] = []
        for index, (one, one_params, one_choice) in enumerate(each):
            try:
                request, selection = self.engine.input_processor.process_extraction(
                    str(self._num_requests + index),
                    self._original(one) if source is None or isinstance(one, RequestOutput) else one,
                    one_params,
                    choice=one_choice,
                    cache_salt=cache_salt,
                )
            except RequestError as error:
                raise error if single else with_index(error, index, field) from None
            checked.append(Checked(request, selection=selection))
        self._num_requests += len(checked)
        return checked, single

    def _original(self, request: RequestOutput | str) -> Root:
        request_id = request.request_id if isinstance(request, RequestOutput) else request
        return self.engine.output_processor.find_original(request_id)

    def _verify_open(self) -> None:
        if self._closed:
            raise RequestError("llm", "is closed", "build another LLM")

    def _make_requests(
        self,
        prompts: Prompt | Sequence[Prompt],
        params_field: str,
        params: Any,
        default_params: Any,
        priority: int | Sequence[int] | None,
        make_request: MakeRequest,
    ) -> list[Checked]:
        self._verify_open()
        single = not is_many(prompts)
        prompt_list: list[Prompt] = [prompts] if single else list(prompts)  # type: ignore[arg-type, list-item]
        params_list = one_for_each(params_field, params, len(prompt_list), default_params)
        priorities = one_for_each("priority", priority, len(prompt_list), 0)
        if any(priorities) and self.config.scheduler.policy != SchedulingPolicy.PRIORITY:
            raise RequestError(
                "priority", "has no meaning first come, first served", 'build the LLM with policy="priority"'
            )
        checked: list[Checked] = []
        for index, (prompt, one_params, one_priority) in enumerate(zip(prompt_list, params_list, priorities)):
            try:
                request = make_request(str(self._num_requests + index), prompt, one_params, one_priority)
            except RequestError as error:
                raise error if single else with_index(error, index) from None
            text, encoder_text = texts_of(prompt, request.encoder_input is not None)
            checked.append(Checked(request, text, encoder_prompt=encoder_text))
        self._num_requests += len(checked)
        return checked

    def _run(self, checked: list[Checked]) -> Generator[Any, None, None]:
        """Submit requests and yield their outputs (RequestOutput, EmbeddingOutput for a vector, HiddenStatesOutput for
        hidden states) until all have ended. Left early, it takes back the rest."""
        inbox: deque[Any] = deque()
        waiting = deque(checked)
        unfinished = {one.external_id for one in checked}
        try:
            while unfinished:
                while waiting and (waiting[0].selection is None or len(unfinished) - len(waiting) < MAX_EXTRACTIONS):
                    self._submit(waiting.popleft(), inbox)
                if not inbox:
                    self._step()
                while inbox:
                    output = inbox.popleft()
                    if output.finished:
                        unfinished.discard(output.request_id)
                    if output.refusal is not None and len(checked) == 1:
                        raise output.refusal
                    with_torch_tensors(output)
                    yield output
        finally:
            with interrupts_held_back():
                self.engine.abort_request(unfinished)
            for one in checked:
                self._inboxes.pop(one.external_id, None)

    def _trace(self, checked: list[Checked], headers: Mapping[str, str] | None) -> None:
        context = trace_context(headers)
        if self._tracer is not None:
            for one in checked:
                one.request.trace_headers = context

    def _submit(self, one: Checked, inbox: deque[Any]) -> None:
        if self._tracer is not None and one.request.trace_headers is None:
            one.request.trace_headers = {}
        self._inboxes[one.external_id] = inbox
        try:
            self.engine.submit(*one)
        except RequestError as error:
            inbox.append(self.engine.refuse(*one, error=error))

    def _begin(self, prompt: Prompt, params: GenerationParams, inbox: deque[Any]) -> str:
        """Start a request on its own, whose one output goes to the inbox; its id. It ends with `_end`."""
        (checked,) = self._check(prompt, params, None, None, RequestOutputKind.FINAL_ONLY)
        self._submit(checked, inbox)
        return checked.external_id

    def _end(self, request_id: str) -> None:
        """Take a request back, or forget it if it has ended."""
        with interrupts_held_back():
            self.engine.abort_request([request_id])
        self._inboxes.pop(request_id, None)
        with suppress(UnknownParentError):
            self.engine.output_processor.roots.remove(request_id)

    def _step(self) -> None:
        """One engine step. Its outputs go to those who wait for them: a stream may be open while another call runs."""
        with interrupts_held_back():
            self._hand_out(self.engine.step())

    def _hand_out(self, outputs: list[Output]) -> None:
        for output in outputs:
            inbox = self._inboxes.get(output.request_id)
            if inbox is not None:
                inbox.append(output)
