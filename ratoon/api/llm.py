"""LLM: a model that answers, in this process. Prompts in, outputs back; one call at a time, on one thread, but for
`abort`, `pause` and `resume`.

It takes one prompt or many (batches.py) and collects their outputs. Requests are checked and sent
by the engine (engine/front_end.py), which AsyncLLM has as well.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Generator, Iterable, Sequence
from contextlib import suppress
from typing import TYPE_CHECKING, Any, TypeAlias, Unpack

import msgspec

from ratoon.api.batches import (
    BatchChatOptions,
    Batches,
    BatchExtractionOptions,
    BatchOptions,
    BatchPoolingOptions,
    Ids,
    chat_prompts,
    split_progress,
)
from ratoon.api.terminal import request_progress
from ratoon.core.adapters import Adapter
from ratoon.core.config import resolve_max_model_len
from ratoon.core.errors import ConfigError, EngineAwayError
from ratoon.core.outputs import ClassificationOutput, EmbeddingOutput, RequestOutput, RerankOutput, ScoringOutput
from ratoon.core.params import BeamSearchParams, GenerationParams, HiddenStatesParams, PoolingParams, RequestOutputKind
from ratoon.core.prepared import prepared
from ratoon.core.stats import SchedulerStats
from ratoon.engine.base_llm import BaseLLM, Message
from ratoon.engine.front_end import Prepared, id_of, verify_beam_search_params
from ratoon.engine.input.prompts import Prompt, Suffix
from ratoon.engine.input.request_options import ContinuationOptions, split_chat_options, verify_keywords
from ratoon.engine.input.request_options import GenerationOptions as Options
from ratoon.engine.llm_engine import LLMEngine
from ratoon.engine.output.roots import Root
from ratoon.engine.output.vectors import cut_to, verify_classifier, verify_dimensions
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
from ratoon.transcription.options import TranscriptionOptions

if TYPE_CHECKING:
    from ratoon.observe.metrics import EngineMetrics
    from ratoon.transcription.audio import Audio
    from ratoon.transcription.results import Transcription

Prompts: TypeAlias = Prompt | Sequence[Prompt]
Params: TypeAlias = GenerationParams | Sequence[GenerationParams] | None
Source: TypeAlias = Prompt | RequestOutput  # what has hidden states


class LLM(BaseLLM):
    """A model and an engine for it.

        with LLM("smollm2-135m") as llm:
            for output in llm.generate(["One prompt.", "Another."], SamplingParams(max_tokens=32)):
                print(output.outputs[0].text)

    `model` is a folder, a GGUF file, a hub id or the name of an embedded model. Settings that are left out are chosen
    to fit the model and the machine. Errors: ModelError (the model can't be read), ConfigError (it can't run with these
    settings).
    """

    def __init__(
        self,
        model: str,
        *,
        metrics: EngineMetrics | None = None,
        process: bool = False,  # run the engine in a process of its own, which is started again should it die
        startup_timer: StartupTimer | None = None,
        **settings: Any,  # docs/settings.md lists them
    ) -> None:
        super().__init__(model, {"seed": 0, "disable_log_stats": True, **settings}, metrics, startup_timer)
        own = self.front_end_config
        if own.ray:
            raise ConfigError("ray", "an LLM runs its engine itself", 'executor="ray", or an AsyncLLM')
        self._load_model(self.startup_timer, engine_follows=not process and own.num_engines == 1)
        self._name_adapters()
        max_model_len = resolve_max_model_len(self.config.max_model_len, self.source.config)
        self.config = self.config.with_(max_model_len=max_model_len)
        if own.num_engines == 1:
            from ratoon.engine.processes.client import make_client

            self._client = make_client(self.config, self.source, self.startup_timer, process)
        else:
            from ratoon.engine.processes.client import make_dp_client

            self._client = make_dp_client(self.config, own, self.startup_timer)
        self.engine: LLMEngine = self._wire(LLMEngine, self._client, self._client.describe())
        roots = self.engine.output_processor.roots
        if leases := roots.leases_to_restore():
            roots.note_restored(self._call("restore_leases", leases))
        self._batches = Batches(self.engine)
        self.startup_timer.finish()

    def close(self) -> None:
        """Free the engine's memory. The LLM can't be used afterwards."""
        if not self._ended:
            self._ended = self.engine.ended = True
            self.engine.input_processor.close()
            self._client.shutdown()
            self.engine.output_processor.roots.close()
            if self.tracer is not None:
                self.tracer.shutdown()

    def __enter__(self) -> LLM:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    # ---- requests ----

    def generate(
        self, prompts: Prompts, sampling_params: Params = None, request_id: Ids = None, **options: Unpack[BatchOptions]
    ) -> list[RequestOutput]:
        """Answer prompts, and return their outputs in the same order.

        A prompt is text, a list of token ids, {"prompt": text} or {"prompt_token_ids": ids}. An encoder-decoder model
        reads it with its encoder; {"encoder_prompt": prompt, "decoder_prompt": prompt} begins the answer as well. An
        audio encoder reads {"audio": floats, "sampling_rate": 16000}. Params and priority are one for all, or a list
        with one for each. Every prompt is checked before the first is started: a bad one raises RequestError with its
        index. A request of a batch that fails later has `error` set and the finish reason "error", and the others go
        on; one that is alone, and that the engine refuses, raises. With BeamSearchParams the choices of an output are
        the best texts that a beam search found, the best first.
        """
        verify_keywords("generate", options, BatchOptions)
        wanted, left = split_progress(options)
        kind = RequestOutputKind.FINAL_ONLY
        prepared = self._batches.generations(prompts, sampling_params, request_id, kind, left)
        return self._collect(prepared, wanted, lambda output: sum(len(one.token_ids) for one in output.outputs))

    def stream(
        self, prompts: Prompts, sampling_params: Params = None, request_id: Ids = None, **options: Unpack[Options]
    ) -> Generator[RequestOutput, None, None]:
        """Answer prompts, and yield what is new as it comes: each output holds only new text and tokens.

        Of a beam search each holds all of the best text so far, which may be another one than before; the last has the
        texts that it found. Request ids tell the prompts apart, in their order. Closing the iterator aborts what is
        unfinished.
        """
        verify_keywords("stream", options, Options)
        kind = RequestOutputKind.DELTA
        return self.engine.run(self._batches.generations(prompts, sampling_params, request_id, kind, dict(options)))

    def beam_search(
        self,
        prompts: Prompts,
        params: BeamSearchParams | Sequence[BeamSearchParams],
        request_id: Ids = None,
        **options: Unpack[BatchOptions],
    ) -> list[RequestOutput]:
        """`generate` with BeamSearchParams: search for the most probable texts after each prompt."""
        verify_beam_search_params(params)
        return self.generate(prompts, params, request_id, **options)

    def chat(
        self,
        messages: Sequence[Message] | Sequence[Sequence[Message]],
        sampling_params: Params = None,
        request_id: Ids = None,
        **options: Unpack[BatchChatOptions],
    ) -> list[RequestOutput]:
        """Answer a conversation, or several, through the model's chat template. The rest is as in `generate`."""
        verify_keywords("chat", options, BatchChatOptions)
        variables, left = split_chat_options(options)
        prompts = chat_prompts(self.chat_prompt, messages, variables)
        return self.generate(prompts, sampling_params, request_id, **left)

    def generate_continuation(
        self,
        parent_request_id: RequestOutput | str,
        suffix: Suffix = "",
        sampling_params: GenerationParams | None = None,
        request_id: str | None = None,
        **options: Unpack[ContinuationOptions],
    ) -> RequestOutput:
        """Continue a request that has ended: after its tokens, then `suffix` (text or token ids), a new answer. With
        {"prompt": text, "multi_modal_data": …} as `suffix` it has images of its own; those of the parent stay.

        Cached keys and values of the parent are not computed again. With `retain_kv` on the parent that is all of it;
        the output's `continuation` says how it was. `choice` names one of several, `at` a place in the parent: so many
        of its tokens, prompt and answer together. A parent that still runs is waited for, or with `wait=False` forked
        where it is; a beam search can only be waited for. Where there is no such request, because it is too long ago or
        another owner's, `prompt` is answered like any other, and the output's `continuation` says so; without one,
        UnknownParentError.
        """
        verify_keywords("generate_continuation", options, ContinuationOptions)
        parent_id, owner = id_of(parent_request_id), options.get("owner")
        if options.pop("wait", True):
            self._running().wait_for_end(parent_id, owner)
        parent = self._running().find_parent(parent_id, owner, options.get("prompt"))
        given: dict[str, Any] = dict(options)
        (output,) = self.engine.run(self._batches.continuation(parent, suffix, sampling_params, request_id, given))
        assert isinstance(output, RequestOutput)
        return output

    def embed(
        self,
        prompts: Prompts,
        pooling_params: PoolingParams | Sequence[PoolingParams] | None = None,
        request_id: Ids = None,
        *,
        dimensions: int | None = None,
        prompt_name: str | None = None,
        **options: Unpack[BatchPoolingOptions],
    ) -> list[EmbeddingOutput]:
        """The vectors of prompts, in the same order: hidden states after the final norm, of the last token or their
        mean over all tokens. Prompts, params and errors are as in `generate`; what fails has `error` set and no vector.

        `dimensions` cuts them, where the model was trained so that they can be (matryoshka), before they are brought to
        length 1. `prompt_name` ("query", say) names a text of the model's files (`llm.source.prompts`) that is put
        before each of the texts.
        """
        verify_keywords("embed", options, BatchPoolingOptions)
        if dimensions is not None:
            verify_dimensions(dimensions, self.source.config)
            pooling_params = cut_to(dimensions, pooling_params)
        prompts = with_prompt(self.source.prompts, self.source.default_prompt, prompts, prompt_name)
        wanted, left = split_progress(options)
        prepared = self._batches.poolings(prompts, pooling_params, request_id, left)
        return self._collect(prepared, wanted, lambda output: len(output.prompt_token_ids))

    def classify(
        self,
        prompts: Prompts,
        activation: str | None = None,
        request_id: Ids = None,
        **options: Unpack[BatchPoolingOptions],
    ) -> list[ClassificationOutput]:
        """The labels of texts, by the model's head: probabilities in the order of its labels, and the most probable
        one. `activation` makes them of logits ("softmax", "sigmoid" or "none"); None: the model's own. RequestError:
        the model has no such head."""
        verify_classifier(self.source.config)
        params = PoolingParams(classify=True, activation=activation)
        outputs = self.embed(prompts, params, request_id, **options)
        return [label_output(output, self.source.config) for output in outputs]

    def score(
        self,
        text_1: str | Sequence[str],
        text_2: str | Sequence[str],
        *,
        instruction: str | None = None,
        truncate_prompt_tokens: int | None = None,
        activation: str | None = None,
        **options: Unpack[BatchPoolingOptions],
    ) -> list[ScoringOutput]:
        """The scores of pairs of texts: of one text and each of several, or of each of several and its counterpart.

        A reranker reads both at once; of a model that gives vectors it is the cosine. `instruction` is for models with
        a template. Pairs that are too long are refused, or with `truncate_prompt_tokens` cut to so many tokens (-1: to
        the model's length). RequestError: the model gives no scores."""
        pairs, fields = pairs_of(text_1, text_2)
        return self._scores(pairs, fields, ScoreOptions(instruction, truncate_prompt_tokens, None, activation), options)

    def rerank(
        self,
        query: str,
        documents: Sequence[str],
        top_n: int | None = None,
        *,
        instruction: str | None = None,
        truncate_prompt_tokens: int | None = None,
        max_tokens_per_doc: int | None = None,
        activation: str | None = None,
        **options: Unpack[BatchPoolingOptions],
    ) -> list[RerankOutput]:
        """The documents, or the best `top_n` of them, by falling score for the query. The rest is as in `score`;
        documents are cut to `max_tokens_per_doc` tokens before all else. EngineError: one of them failed."""
        pairs, fields = document_pairs(query, documents, top_n)
        wanted = ScoreOptions(instruction, truncate_prompt_tokens, max_tokens_per_doc, activation)
        return ranked_outputs(documents, self._scores(pairs, fields, wanted, options), top_n)

    def _scores(
        self, pairs: list[tuple[str, str]], fields: list[str], wanted: ScoreOptions, options: BatchPoolingOptions
    ) -> list[ScoringOutput]:
        assert self.config.max_model_len is not None, "the engine has started"
        plan = plan_scores(
            self.source.config, self._tokenizer, self.config.max_model_len, self.source.prompts, pairs, fields, wanted
        )
        return score_outputs(plan, self.embed(plan.prompts, plan.params, **options), len(pairs))

    def extract_hidden_states(
        self,
        prompts: Source | Sequence[Source] | None = None,
        params: HiddenStatesParams | Sequence[HiddenStatesParams] | None = None,
        request_id: Ids = None,
        **options: Unpack[BatchExtractionOptions],
    ) -> Any:  # HiddenStatesOutput, or a list of them
        """Hidden states of a prompt, or of a request: its output, or its id as `original_request_id`. For a list of
        them a list, in the same order.

        Cached keys and values of a request are not computed again. One that still runs (a stream) is read as far as it
        has come; `choice` names one of several. Each is checked before the first is started; errors are as in
        `generate`: what fails in a list has `error` set and no tensor. UnknownParentError: there is no such request, it
        is too long ago, or another owner's. TooLargeError: more bytes than `max_hidden_states_bytes`. QueueFullError:
        too many wait already, or what was asked for is still held (`max_total_hidden_states_bytes`). DeadlineError: its
        `deadline` is over.
        """
        verify_keywords("extract_hidden_states", options, BatchExtractionOptions)
        wanted, left = split_progress(options)
        prepared, single = self._batches.extractions(prompts, params, request_id, left)
        outputs = self._collect(prepared, wanted, lambda output: len(output.positions))
        return outputs[0] if single else outputs

    def transcribe(
        self, audio: Audio | list[Audio], *, progress: bool = True, **options: Any
    ) -> Transcription | list[Transcription]:
        """What a recording of any length says, or of a list each, in the same order; all of them run together.

        A recording is a path, the bytes of a file, an open file, or (samples, sampling rate). One that can't be read,
        or that fails, raises; in a list it has `error` set, and the others go on. Options are the fields of
        TranscriptionOptions. RequestError: the model is none for speech, or an option has no meaning.
        """
        from ratoon.transcription.blocking import transcribe_blocking
        from ratoon.transcription.transcriber import make_transcriber

        engine, chosen = self._running(), TranscriptionOptions(**options)

        def make(generate: Any) -> Any:
            return make_transcriber(self.source, self.get_tokenizer(), generate, self.config.max_model_len)

        return transcribe_blocking(engine, make, audio, chosen, progress)

    def abort(self, request_id: str | Iterable[str], owner: str | None = None) -> None:
        """End requests of this owner that are under way, by the ids that their outputs have: each gets a last output,
        with the finish reason "abort". From any thread; what a step that runs meanwhile brings for them is dropped."""
        self.engine.abort_request([request_id] if isinstance(request_id, str) else request_id, owner)

    def _collect(self, prepared: list[Prepared], progress: bool, num_tokens: Callable[[Any], int]) -> list[Any]:
        """The last outputs of requests, in the order of the requests."""
        outputs: dict[str, Any] = {}
        with request_progress(len(prepared), progress) as advance:
            for output in self.engine.run(prepared):
                outputs[output.request_id] = output
                advance(1, num_tokens(output))
        return [outputs[one.external_id] for one in prepared]

    # ---- adapters ----

    def load_adapter(self, name: str, path: str | os.PathLike[str], *, in_place: bool = True) -> Adapter:
        """Let requests name an adapter (LoRA): a PEFT folder or a GGUF file. A name in use is given to the new one, and
        requests under way keep theirs; without `in_place` it is refused. RequestError: the files do not fit the model,
        or are damaged."""
        return self._adapters.add(name, path, in_place=in_place)

    def unload_adapter(self, name: str) -> None:
        """New requests can't name it any more; those under way end with it. RequestError: there is none."""
        self._adapters.remove(name)

    # ---- earlier requests, and the engine ----

    def find_parent(self, request_id: str, *, wait: bool = True, owner: str | None = None) -> Root:
        """What a continuation would go on from. UnknownParentError: there is no such request for this owner."""
        if wait:
            self._running().wait_for_end(request_id, owner)
        root: Root = self._running().output_processor.find_root(request_id, owner)
        return root

    def forget(self, request_id: str, owner: str | None = None) -> None:
        """Delete an ended request, and free what its leases hold. UnknownParentError: there is none."""
        root = self._running().output_processor.roots.remove(request_id, owner)
        self._running().tell_dropped_roots()
        if root.leased:
            with suppress(EngineAwayError):  # an engine that is started again has no leases
                self._call("end_leases", root.branch_ids)

    def reset_prefix_cache(self) -> bool:
        """Empty the prefix cache. False: requests are running, and nothing was changed."""
        return bool(self._call("reset_prefix_cache"))

    def stats(self) -> SchedulerStats:
        return msgspec.convert(self._call("stats"), prepared(SchedulerStats))
