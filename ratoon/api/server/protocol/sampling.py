"""The fields that say how to sample and how to run, shared by completions and chat. What OpenAI's protocol lacks stands
beside what it has: extensions are ordinary fields."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar, Literal

from pydantic import Field

from ratoon.api.server.errors import refused
from ratoon.api.server.protocol.base import (
    Entries,
    Int,
    LogitBias,
    Metadata,
    RequestId,
    RequestModel,
    Size,
    Texts,
    TokenIds,
)
from ratoon.api.server.protocol.beams import RULES, BeamFields
from ratoon.api.server.protocol.hidden_states import HiddenStatesFields, ReturnHiddenStates
from ratoon.api.server.protocol.unsupported import CONSTRAINTS
from ratoon.core.errors import RequestError
from ratoon.core.params import BeamSearchParams, GenerationParams, RequestOutputKind, SamplingParams
from ratoon.engine.default_params import with_given

# Same name and same meaning in SamplingParams. Left out (or null), the model's own default counts.
SAME_NAMES = (
    "n", "temperature", "top_p", "top_k", "min_p", "presence_penalty", "frequency_penalty", "repetition_penalty",
    "seed", "min_tokens", "stop", "stop_token_ids", "ignore_eos", "include_stop_str_in_output", "skip_special_tokens",
    "spaces_between_special_tokens", "allowed_token_ids", "bad_words", *RULES,
)  # fmt: skip


ServiceTier = Literal["auto", "default", "flex", "scale", "priority"]


class StreamOptions(RequestModel):
    include_usage: bool | None = Field(None, description="Send a last chunk with the whole request's token counts")
    continuous_usage_stats: bool | None = Field(None, description="Send the counts so far with every chunk")
    include_obfuscation: bool | None = Field(None, description="Accepted, without effect")


class SamplingFields(BeamFields):
    UNSUPPORTED: ClassVar[Mapping[str, str]] = CONSTRAINTS
    INNER: ClassVar[Mapping[str, type[RequestModel]]] = {
        "stream_options": StreamOptions,
        "return_hidden_states": HiddenStatesFields,
    }

    model: str = Field(min_length=1, description="The served model's name")
    temperature: float | None = Field(None, description="0 takes the likeliest token")
    top_p: float | None = Field(None, description="Sample from the likeliest tokens that sum up to this")
    n: Int | None = Field(None, description="Choices for each prompt")
    max_tokens: Size | None = Field(None, description="Longest answer, in tokens")
    stop: Texts | None = Field(None, description="End the answer before one of these texts")
    seed: Int | None = Field(None, description="The same seed gives the same answer")
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    logit_bias: LogitBias | None = Field(None, description="Token ids (as text) to what is added to their logits")
    stream: bool | None = Field(None, description="Send the answer as server-sent events while it is made")
    stream_options: StreamOptions | None = None

    # Extensions: sampling
    top_k: Int | None = Field(None, description="Sample from so many of the likeliest tokens; 0 or -1: all")
    min_p: float | None = Field(None, description="Drop tokens below this times the likeliest one")
    repetition_penalty: float | None = None
    min_tokens: Size | None = Field(None, description="No end before so many tokens")
    stop_token_ids: Entries[Int] | None = None
    ignore_eos: bool | None = Field(None, description="Go on behind the model's end token")
    include_stop_str_in_output: bool | None = None
    skip_special_tokens: bool | None = None
    spaces_between_special_tokens: bool | None = None
    allowed_token_ids: Entries[Int] | None = Field(None, description="Sample from these tokens alone")
    bad_words: Entries[str] | None = Field(None, description="Texts that never appear in the answer")
    no_repeat_ngram_size: Size | None = Field(None, description="No run of so many tokens comes twice; 0: none is")
    encoder_no_repeat_ngram_size: Size | None = Field(
        None, description="No run of so many tokens of the encoder's input (else of the prompt) comes; 0: any may"
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
        description="What the answer's id is made of; later requests may call the answer by it",
    )
    add_special_tokens: bool | None = Field(None, description="Add what the model expects around a text")
    data_parallel_rank: Size | None = Field(None, description="Which of several engines answers")
    return_token_ids: bool | None = Field(None, description="Put the token ids of prompt and answer into the answer")
    return_hidden_states: ReturnHiddenStates = Field(
        None, description="Read out states once the answer has ended: true (its last token's), or which ones"
    )

    # Extensions: going on from what has ended
    retain_kv: float | None = Field(None, description="Keep the answer's memory for continuations, so many seconds")
    continuation_of: str | None = Field(
        None, description="The id of an answer, or the request_id or X-Request-Id of its request: go on from it"
    )
    continuation_choice: Size | None = Field(None, description="Which of its choices; the first where it is left out")
    continuation_wait: bool | None = Field(
        None,
        description="false: go on from an answer that is still being made as it is now, and don't wait for its end",
    )

    # Accepted, without effect
    user: str | None = Field(None, description="Accepted, without effect")
    metadata: Metadata | None = Field(None, description="Accepted, without effect")
    store: bool | None = Field(None, description="false: nothing is stored here")
    service_tier: ServiceTier | None = Field(None, description="Accepted, without effect")
    safety_identifier: str | None = Field(None, description="Accepted, without effect")
    prompt_cache_key: str | None = Field(None, description="Accepted, without effect; see cache_salt")

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
        """What was asked for, over the model's defaults. RequestError for values that have no meaning."""
        states = None if self.return_hidden_states is None else self.return_hidden_states.hidden_states_params()
        if self.use_beam_search or (search is not None and self.leaves_search_open()):
            return self.beam_search_params(search, lengths, bool(self.stream), states)
        self.refuse_companions()
        given: dict[str, Any] = {name: value for name in SAME_NAMES if (value := getattr(self, name)) is not None}
        if self.logit_bias is not None:
            given["logit_bias"] = {int(token): bias for token, bias in self.logit_bias.items()}
        if given.get("top_k") == -1:
            given["top_k"] = 0
        given |= {"logprobs": logprobs, "prompt_logprobs": prompt_logprobs, "return_hidden_states": states, **lengths}
        given["output_kind"] = RequestOutputKind.DELTA if self.stream else RequestOutputKind.FINAL_ONLY
        params = with_given(defaults, given)
        params.verify()
        return params

    def check_companions(self) -> None:
        """Refuse what has no meaning here, or none without another field."""
        if self.store:
            raise refused("store", "nothing is stored here", "false, or leave it out", code="unsupported_parameter")
        options = self.stream_options
        if (
            not self.stream
            and options is not None
            and any(getattr(options, name) for name in StreamOptions.model_fields)
        ):
            raise RequestError("stream_options", "has no meaning without stream", "set stream to true, or leave it out")
