"""The fields for sampling, search and scheduling, shared by completions and chat. Extensions of OpenAI's protocol
are ordinary fields."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field, PlainValidator, WithJsonSchema

from ratoon.api.beams import find_companion, find_contradiction
from ratoon.api.server.errors import refused
from ratoon.api.server.protocol.base import (
    CONSTRAINTS,
    Entries,
    Int,
    LogitBias,
    Metadata,
    ModelName,
    RequestId,
    RequestModel,
    Size,
    Texts,
    TokenIds,
)
from ratoon.api.server.protocol.hidden_states import ReturnHiddenStates
from ratoon.api.server.protocol.structured import StructuredFields
from ratoon.core.errors import RequestError
from ratoon.core.params import BeamSearchParams, GenerationParams, HiddenStatesParams, RequestOutputKind, SamplingParams
from ratoon.engine.input.default_params import with_given

# Rules over logits, the same for sampling and for a search.
RULES = (
    "presence_penalty", "frequency_penalty", "repetition_penalty", "logit_bias", "allowed_token_ids", "bad_words",
    "no_repeat_ngram_size", "encoder_no_repeat_ngram_size", "forced_eos_token_id", "bad_words_ids",
)  # fmt: skip
# Same name and same meaning in BeamSearchParams.
BEAM_NAMES = (
    "n", "min_tokens", "length_penalty", "early_stopping", "stop_token_ids", "ignore_eos", "skip_special_tokens",
    "spaces_between_special_tokens", *RULES,
)  # fmt: skip


def _early_stopping(value: Any) -> bool | Literal["never"] | None:
    if value is None or isinstance(value, bool) or value == "never":
        return value
    raise ValueError('is neither true, false nor "never"')


EarlyStopping = Annotated[
    bool | Literal["never"] | None,
    PlainValidator(_early_stopping),
    WithJsonSchema({"enum": [True, False, "never", None]}),
]


class BeamFields(StructuredFields):
    use_beam_search: bool | None = Field(None, description="Search for the most probable texts instead of sampling")
    beam_width: Int | None = Field(None, description="Number of beams; default: best_of, the model's own, or n")
    length_penalty: float | None = Field(None, description="Above 0 favours long texts, below 0 short ones")
    early_stopping: EarlyStopping = Field(None, description="true: stop with the first beam_width finished texts")

    def refuse_companions(self) -> None:
        """Refuses options of a beam search where there is none."""
        name = find_companion(self._value)
        if name is not None:
            raise RequestError(name, "has no meaning without use_beam_search", "set that to true, or leave it out")

    def leaves_search_open(self) -> bool:
        """Whether the request sets neither a search nor sampling fields nor fields that contradict a search. A model
        that searches by default then does so. A temperature of 0 counts as a sampling field."""
        if self.use_beam_search is not None or self._value("temperature") is not None:
            return False
        return find_contradiction(self._value) is None and self._value("max_tokens") != 0

    def beam_search_params(
        self,
        defaults: BeamSearchParams | None,
        lengths: Mapping[str, int | None],
        stream: bool,
        return_hidden_states: HiddenStatesParams | None,
    ) -> BeamSearchParams:
        """RequestError for values that have no meaning, and for fields that contradict a search."""
        name = find_contradiction(self._value)
        if name is not None:
            raise RequestError(name, "contradicts use_beam_search, which samples nothing", "leave one of them out")
        given = self._given(BEAM_NAMES)
        width = self._width(1 if defaults is None else defaults.beam_width)
        given |= {"beam_width": width, "return_hidden_states": return_hidden_states, **lengths}
        given["structured_output"] = self.structured_output()
        given["output_kind"] = RequestOutputKind.CUMULATIVE if stream else RequestOutputKind.FINAL_ONLY
        params = with_given(BeamSearchParams(beam_width=width) if defaults is None else defaults, given)
        try:
            params.verify()
        except RequestError as error:
            if error.field != "beam_width" or self.beam_width is not None:
                raise
            field = "n" if self._value("best_of") is None else "best_of"  # which sets the width
            raise type(error)(field, error.problem, error.expected) from None
        return params

    def _width(self, default: int) -> int:
        width, best_of = self.beam_width, self._value("best_of")
        if width is not None and best_of not in (None, width):
            raise RequestError("best_of", f"{best_of} is not beam_width ({width})", "leave one of them out")
        asked = width if width is not None else best_of
        return max(default, self._value("n") or 1) if asked is None else asked

    def _given(self, names: Iterable[str]) -> dict[str, Any]:
        given = {name: value for name in names if (value := self._value(name)) is not None}
        if "logit_bias" in given:  # JSON has no keys but text
            given["logit_bias"] = {int(token): bias for token, bias in given["logit_bias"].items()}
        return given

    def _value(self, name: str) -> Any:
        return getattr(self, name, None)


# Same name and same meaning in SamplingParams. If left out (or null), the model's default applies.
SAMPLING_NAMES = (
    "n", "temperature", "top_p", "top_k", "min_p", "typical_p", "seed", "min_tokens", "stop", "stop_token_ids",
    "ignore_eos", "include_stop_str_in_output", "skip_special_tokens", "spaces_between_special_tokens", "speculate",
    *RULES,
)  # fmt: skip


CacheRetention = Literal["in_memory", "in-memory", "24h"]  # the second is how earlier clients of OpenAI write it
SessionName = Annotated[str, Field(max_length=512)]
ServiceTier = Literal["auto", "default", "flex", "scale", "priority"]


class StreamOptions(RequestModel):
    include_usage: bool | None = Field(None, description="Send a last chunk with the whole request's token counts")
    continuous_usage_stats: bool | None = Field(None, description="Send the counts so far with every chunk")
    include_obfuscation: bool | None = Field(None, description="Accepted, without effect")


class SamplingFields(BeamFields):
    UNSUPPORTED: ClassVar[Mapping[str, str]] = CONSTRAINTS
    model: ModelName
    temperature: float | None = Field(None, description="0: the likeliest token")
    top_p: float | None = Field(None, description="Sample from the likeliest tokens that sum up to this")
    n: Int | None = Field(None, description="Choices for each prompt")
    max_tokens: Size | None = Field(None, description="Longest answer, in tokens")
    stop: Texts | None = Field(None, description="End the answer before one of these texts")
    seed: Int | None = Field(None, description="The same seed gives the same answer")
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    logit_bias: LogitBias | None = Field(None, description="Token ids (as text) to numbers added to their logits")
    stream: bool | None = Field(None, description="Send the answer as server-sent events while it is generated")
    stream_options: StreamOptions | None = Field(None, description="Without stream, no effect")

    # Extensions: sampling
    top_k: Int | None = Field(None, description="Sample from this many of the likeliest tokens; 0 or -1: all")
    min_p: float | None = Field(None, description="Drop tokens below this times the likeliest one")
    typical_p: float | None = Field(None, description="Sample from the most typical tokens that sum up to this")
    repetition_penalty: float | None = None
    min_tokens: Size | None = Field(None, description="Minimum number of tokens")
    stop_token_ids: Entries[Int] | None = None
    ignore_eos: bool | None = Field(None, description="Continue after the model's end token")
    include_stop_str_in_output: bool | None = None
    skip_special_tokens: bool | None = None
    spaces_between_special_tokens: bool | None = None
    allowed_token_ids: Entries[Int] | None = Field(None, description="Sample from these tokens only")
    bad_words: Entries[str] | None = Field(None, description="Texts that never appear in the answer")
    no_repeat_ngram_size: Size | None = Field(None, description="No n-gram of this size occurs twice; 0: off")
    encoder_no_repeat_ngram_size: Size | None = Field(
        None, description="No n-gram of this size of the encoder's input (else of the prompt) occurs; 0: off"
    )
    forced_eos_token_id: TokenIds | None = Field(
        None, description="The last token of an answer that max_tokens ends: a token id, or several; []: any"
    )
    bad_words_ids: Entries[Entries[Int]] | None = Field(
        None, description="Sequences of token ids that never appear; []: none, not even the model's own"
    )
    prompt_logprobs: Int | None = Field(None, description="Alternatives for each token of the prompt")

    # Extensions: how the request is run and answered
    priority: Int | None = Field(None, description="Lower goes first; needs --policy priority")
    cache_salt: str | None = Field(None, description="Requests with different salts share no cached blocks")
    request_id: RequestId | None = Field(
        None,
        description="Becomes part of the answer's id; later requests may refer to the answer by it",
    )
    add_special_tokens: bool | None = Field(None, description="Add the tokenizer's special tokens")
    speculate: bool | None = Field(None, description="false: no drafts of its tokens, if the server makes some")
    data_parallel_rank: Size | None = Field(None, description="Which of several engines answers")
    return_token_ids: bool | None = Field(None, description="Return the token ids of prompt and answer")
    return_hidden_states: ReturnHiddenStates = Field(
        None, description="Return hidden states with the answer: true (its last token's), or which ones"
    )

    # Sessions
    prompt_cache_key: SessionName | None = Field(
        None, description="The name of a session, whose newest texts are kept longest in the cache; see X-Session-Id"
    )
    prompt_cache_retention: CacheRetention | None = Field(
        None,
        description="in_memory: nothing of it is written to --kv-files; 24h: kept there for a day, if there is room",
    )
    kv_transfer_params: dict[str, Any] | None = Field(
        None,
        description='vLLM\'s: {"do_remote_decode": true}: another engine goes on with it, and the answer has what that '
        "one is to be given; needs --kv-connector peers",
    )

    # Extensions: continuations
    retain_kv: float | None = Field(None, description="Keep the answer's memory for continuations, in seconds")
    continuation_of: str | None = Field(
        None, description="The id of an answer, or the request_id or X-Request-Id of its request: continue it"
    )
    continuation_choice: Size | None = Field(None, description="Which of its choices; default: the first")
    continuation_wait: bool | None = Field(
        None,
        description="false: continue an answer that is still being generated from its newest token, without waiting",
    )

    # Accepted, without effect
    user: str | None = Field(None, description="Accepted, without effect")
    metadata: Metadata | None = Field(None, description="Accepted, without effect")
    store: bool | None = Field(None, description="false: nothing is stored here")
    service_tier: ServiceTier | None = Field(None, description="Accepted, without effect")
    safety_identifier: str | None = Field(None, description="Accepted, without effect")

    def num_choices(self) -> int:
        return 1 if self.n is None else self.n

    def generation_params(
        self,
        defaults: SamplingParams,
        search: BeamSearchParams | None,  # the model's own, if its files ask for one
        lengths: Mapping[str, int | None],
        logprobs: int | None,
        prompt_logprobs: int | None,
    ) -> GenerationParams:
        """The request's fields over the model's defaults. RequestError for invalid values."""
        states = None if self.return_hidden_states is None else self.return_hidden_states.hidden_states_params()
        if self.use_beam_search or (search is not None and self.leaves_search_open()):
            return self.beam_search_params(search, lengths, bool(self.stream), states)
        self.refuse_companions()
        given = self._given(SAMPLING_NAMES)
        if given.get("top_k") == -1:
            given["top_k"] = 0
        given |= {"logprobs": logprobs, "prompt_logprobs": prompt_logprobs, "return_hidden_states": states, **lengths}
        given["structured_output"] = self.structured_output()
        given["output_kind"] = RequestOutputKind.DELTA if self.stream else RequestOutputKind.FINAL_ONLY
        params = with_given(defaults, given)
        params.verify()
        return params

    def check_companions(self) -> None:
        """Refuse values that are not supported."""
        if self.store:
            raise refused("store", "storing is not supported", "false, or leave it out", code="unsupported_parameter")
