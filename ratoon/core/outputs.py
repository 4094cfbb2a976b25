"""Results: what the runner hands back for a step, and what a caller gets for a request."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import msgspec

from ratoon.core.errors import RequestError
from ratoon.core.wire import WireTensor


class LogprobsLists(msgspec.Struct, array_like=True, gc=False):
    """Log-probabilities of generated tokens, a row for each token: the sampled token first, then the top ones.

    All three lists have one entry a row. Row lengths differ when branches ask for different numbers.
    """

    token_ids: list[list[int]]
    logprobs: list[list[float]]
    sampled_ranks: list[int]  # 1 = the most probable


class PromptLogprobsChunk(msgspec.Struct, array_like=True, gc=False):
    """The same for consecutive prompt tokens; `start` is the prompt position of the first row's token (≥ 1)."""

    start: int
    rows: LogprobsLists


class BeamCandidates(msgspec.Struct, array_like=True, gc=False):
    """The best continuations of a search's beams, best first, as parallel lists."""

    scores: list[float]  # the beam's score and the token's log-probability
    beams: list[int]  # which beam it continues
    token_ids: list[int]


class ModelRunnerOutput(msgspec.Struct, array_like=True, omit_defaults=True, gc=False):
    """What one step produced, in plain lists: nothing here keeps a device tensor alive.

    `req_ids` are the sampled branches (children of `fanout` included); the other lists run parallel to it.
    """

    req_ids: list[str] = []
    sampled_token_ids: list[list[int]] = []  # one list a branch; more than one token with speculation
    logprobs: dict[str, LogprobsLists] = {}  # only branches that asked
    prompt_logprobs: dict[str, PromptLogprobsChunk] = {}
    pooled: dict[str, WireTensor] = {}  # float32 [hidden], for `pooled_req_ids`
    candidates: dict[str, BeamCandidates] = {}  # for `beam_steps` that want them
    hidden_states: dict[str, WireTensor] = {}  # [layers, rows, hidden], for `captures`
    errors: dict[str, str] = {}  # branches that this step failed, and why (NaN logits, for one)


@dataclass(slots=True)
class Logprob:
    """One alternative at one position."""

    logprob: float
    rank: int | None = None
    decoded_token: str | None = None


TokenLogprobs = dict[int, Logprob]  # token id → Logprob
SampleLogprobs = list[TokenLogprobs]
PromptLogprobs = list[TokenLogprobs | None]  # the first prompt token has none


@dataclass(slots=True)
class RequestMetrics:
    """Times in seconds on one clock; counts of tokens."""

    arrival_time: float = 0.0
    first_token_time: float | None = None
    finished_time: float | None = None
    num_generation_tokens: int = 0

    @property
    def time_to_first_token(self) -> float | None:
        return None if self.first_token_time is None else self.first_token_time - self.arrival_time


@dataclass(slots=True)
class CompletionOutput:
    """One choice of a request."""

    index: int
    text: str
    token_ids: Sequence[int]
    cumulative_logprob: float | None = None
    logprobs: SampleLogprobs | None = None
    finish_reason: str | None = None  # "stop", "length", "abort" or "error"
    stop_reason: int | str | None = None  # the stop token or string that ended it
    score: float | None = None  # of a beam search: the sum of log-probabilities after the length penalty

    @property
    def finished(self) -> bool:
        return self.finish_reason is not None


@dataclass(slots=True)
class EmbeddingOutput:
    """What a caller gets for a pooling request, once, at its end."""

    request_id: str
    prompt: str | None
    prompt_token_ids: list[int]
    embedding: Any  # a numpy array, float32 [hidden], or as many as `dimensions` asked for; None if it failed
    num_cached_tokens: int = 0
    metrics: RequestMetrics | None = None
    error: str | None = None
    refusal: RequestError | None = None  # the engine could never serve it
    owner: str | None = None  # whose it is: ids are an owner's own

    @property
    def finished(self) -> bool:
        return True


@dataclass(slots=True)
class HiddenStatesOutput:
    """Hidden states of a sequence, once, when all are there. Rows are in the order in which they were asked for."""

    request_id: str  # of the extraction
    # [layers, positions, hidden]: from LLM a torch tensor; from AsyncLLM, which does without torch, a numpy array, in
    # which the bytes of bfloat16 are uint16; None if it failed
    tensor: Any
    dtype: str
    layers: list[int | str]
    positions: list[int]  # in the whole sequence, prompt and output
    token_ids: list[int]  # at these positions
    computed_tokens: int = 0  # rows that were run for it
    num_cached_tokens: int = 0  # tokens whose keys and values were there
    source: str | None = None  # of those: "lease", "prefix_cache" or "recomputed", where it reads an earlier request
    metrics: RequestMetrics | None = None
    error: str | None = None
    refusal: RequestError | None = None
    owner: str | None = None

    @property
    def finished(self) -> bool:
        return True


@dataclass(slots=True)
class Continuation:
    """How a continuation began."""

    parent: str  # the id of the request that it continues
    inherited_tokens: int  # of its prompt, that were not computed again
    computed_tokens: int  # of its prompt, that were
    source: str  # "lease", "prefix_cache" or "recomputed"
    fallback: bool = False  # the parent is forgotten: the prompt that came along was used in its place


@dataclass(slots=True)
class RequestOutput:
    """What a caller gets for a request: all of it, or what is new, as `output_kind` asks."""

    request_id: str
    prompt: str | None
    prompt_token_ids: list[int] | None
    outputs: list[CompletionOutput]
    finished: bool
    prompt_logprobs: PromptLogprobs | None = None
    metrics: RequestMetrics | None = None
    num_cached_tokens: int | None = None
    error: str | None = None
    refusal: RequestError | None = None  # the engine could never serve it; `error` says the same as text
    continuation: Continuation | None = None  # of a request that continues another, from its first token on
    # Of a request with `return_hidden_states`, on its last output: one entry for each choice
    hidden_states: list[HiddenStatesOutput] | None = None
    # Of an encoder-decoder model; `prompt` and `prompt_token_ids` are then the decoder's. Audio has no tokens.
    encoder_prompt: str | None = None
    encoder_prompt_token_ids: list[int] | None = None
    kv_transfer_params: dict[str, object] | None = field(default=None)
    owner: str | None = None  # whose it is: ids are an owner's own
