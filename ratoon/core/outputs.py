"""Results: what the runner returns for a step, and what a caller gets for a request."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import msgspec

from ratoon.core.adapters import AdapterReport
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
    """The log-probabilities of consecutive prompt tokens; `start` is the prompt position of the first row's token (≥
    1)."""

    start: int
    rows: LogprobsLists


class BeamCandidates(msgspec.Struct, array_like=True, gc=False):
    """The best continuations of a search's beams, best first, as parallel lists."""

    scores: list[float]  # the beam's score and the token's log-probability
    beams: list[int]  # which beam it continues
    token_ids: list[int]


class AsyncModelRunnerOutput(Protocol):
    """A step whose results may still be on their way from the device."""

    def get_output(self) -> ModelRunnerOutput:
        """Wait for them. From any thread, and more than once."""
        ...


class TransferReport(msgspec.Struct, array_like=True, omit_defaults=True, gc=False):
    """What became of `loads` and `stores` since the last report. A transfer that is in none of the lists is still under
    way. A block whose load failed has no defined content, and neither has a slot whose store failed."""

    loaded: list[int] = []  # device blocks
    failed_loads: list[int] = []
    stored: list[int] = []  # slots
    failed_stores: list[int] = []
    num_fetched: int = 0  # blocks that a connector was asked for, with the time that this took
    fetch_seconds: float = 0.0


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
    errors: dict[str, str] = {}  # branches that failed in this step, and why (such as NaN logits)
    completed: list[str] = []  # branches without a token: their grammar is complete, and no end token is possible
    # Branches without a token: the result of an earlier step has changed what follows in them
    known: list[str] = []
    # Branches without a token: what their grammar allows is not known yet. Their last token is to be computed again.
    late: list[str] = []
    # Branches that end because their grammar allows no token, and why: it exceeds a limit, or no text matches
    refused: dict[str, str] = {}
    transfers: TransferReport | None = None  # None: there are no news of blocks that are loaded or stored
    adapters: AdapterReport | None = None  # None: there are no news of adapters
    # Whether the step took longer than later ones of its size will: what these replay was compiled or captured in it
    has_prepared: bool = False
    # Guesses at the tokens behind those of this step, by branch, from a model or heads on the device
    draft_token_ids: dict[str, list[int]] = {}


@dataclass(slots=True)
class Logprob:
    """One alternative at one position."""

    logprob: float
    rank: int | None = None
    decoded_token: str | None = None


TokenLogprobs = dict[int, Logprob]  # token id → Logprob
SampleLogprobs = list[TokenLogprobs]
PromptLogprobs = Sequence[TokenLogprobs | None]  # the first prompt token has none


@dataclass(slots=True)
class RequestMetrics:
    """Timestamps of a request, in seconds of time.monotonic, and its token counts.

    The engine records queued, scheduled and sampled times; the front end records arrival, first token and end. All
    processes of one machine share this clock. Times outside of arrival and receipt are clamped to them, so no time span
    is negative.
    """

    arrival_time: float = 0.0
    first_token_time: float | None = None
    finished_time: float | None = None
    num_generation_tokens: int = 0
    queued_time: float | None = None  # the engine put it into its queue
    scheduled_time: float | None = None  # first entered the running batch
    sampled_first_time: float | None = None  # end of the step that sampled its first token,
    sampled_last_time: float | None = None  # and the last one so far
    num_preemptions: int = 0  # how often it, or one of its choices, was preempted
    num_draft_tokens: int = 0  # guesses at its tokens that steps have checked, from all sources
    num_accepted_tokens: int = 0  # of these, those that became its tokens
    num_accepted_prediction_tokens: int = 0  # the same of its `prediction` alone,
    num_rejected_prediction_tokens: int = 0  # and those that did not

    @property
    def time_to_first_token(self) -> float | None:
        return _between(self.arrival_time, self.first_token_time)

    @property
    def queue_time(self) -> float | None:
        """The seconds in the engine's queue, before the request was scheduled for the first time."""
        return _between(self.queued_time, self.scheduled_time)

    @property
    def prefill_time(self) -> float | None:
        """The seconds from when the request was first scheduled to the end of the step that sampled its first token."""
        return _between(self.scheduled_time, self.sampled_first_time)

    @property
    def decode_time(self) -> float | None:
        """The seconds from the first token to the last."""
        return _between(self.sampled_first_time, self.sampled_last_time)

    @property
    def inference_time(self) -> float | None:
        """Prefill and decode together."""
        return _between(self.scheduled_time, self.sampled_last_time)

    @property
    def e2e_latency(self) -> float | None:
        return _between(self.arrival_time, self.finished_time)


def _between(begin: float | None, end: float | None) -> float | None:
    return None if begin is None or end is None else end - begin


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
class ClassificationOutput:
    """The labels of a text."""

    request_id: str
    prompt_token_ids: list[int]
    probs: list[float] | None  # of each label, as the activation makes them of logits; None if it failed
    label: str | None = None  # the name of the most probable one
    metrics: RequestMetrics | None = None
    error: str | None = None
    refusal: RequestError | None = None

    @property
    def outputs(self) -> ClassificationOutput:
        """vLLM has the probabilities one level below: `output.outputs.probs`."""
        return self

    @property
    def num_classes(self) -> int:
        return len(self.probs or ())


@dataclass(slots=True)
class ScoringOutput:
    """The score of a pair of texts."""

    score: float | None  # None if it failed
    error: str | None = None

    @property
    def outputs(self) -> ScoringOutput:
        """vLLM has the score one level below: `output.outputs.score`."""
        return self


@dataclass(slots=True)
class RerankOutput:
    """A document, by its place in the list that was given, and its score for the query."""

    index: int
    score: float
    document: str


@dataclass(slots=True)
class EmbeddingOutput:
    """The result of a pooling request, returned once."""

    request_id: str
    prompt: str | None
    prompt_token_ids: list[int]
    embedding: Any  # a numpy array, float32 [hidden], or as many as `dimensions` asked for; None if it failed
    num_cached_tokens: int = 0
    metrics: RequestMetrics | None = None
    error: str | None = None
    refusal: RequestError | None = None  # the engine cannot serve this request
    owner: str | None = None  # whose it is: ids are unique per owner

    @property
    def outputs(self) -> EmbeddingOutput:
        """vLLM has the vector one level below: `output.outputs.embedding`."""
        return self

    @property
    def finished(self) -> bool:
        return True


@dataclass(slots=True)
class HiddenStatesOutput:
    """Hidden states of a sequence, returned once, when complete. Rows are in the requested order."""

    request_id: str  # of the extraction
    # [layers, positions, hidden]: from LLM a torch tensor; from AsyncLLM, which does not import torch, a numpy array,
    # with bfloat16 as uint16; None if it failed
    tensor: Any
    dtype: str
    layers: list[int | str]
    positions: list[int]  # in the whole sequence, prompt and output
    token_ids: list[int]  # at these positions
    computed_tokens: int = 0  # rows that were run for it
    num_cached_tokens: int = 0  # tokens whose keys and values were cached
    source: str | None = None  # of the cached tokens, if it reads an earlier request: see Continuation
    metrics: RequestMetrics | None = None
    error: str | None = None
    refusal: RequestError | None = None
    owner: str | None = None
    # With a lens (HiddenStatesParams), in the place of the tensor: of each layer and position, the length of the state,
    # and the most probable tokens by falling probability
    norms: list[list[float]] | None = None
    lens: list[list[TokenLogprobs]] | None = None
    # Set: rows are not in the requested order yet, and token ids are missing. Resolved before a caller gets it.
    arrangement: Any = field(default=None, repr=False, compare=False)

    @property
    def finished(self) -> bool:
        return True


@dataclass(slots=True)
class Continuation:
    """How a continuation began."""

    parent: str  # the id of the request that it continues
    inherited_tokens: int  # prompt tokens that were not computed again
    computed_tokens: int  # prompt tokens that were
    source: str  # "lease", "prefix_cache" or "recomputed"; "host" or "files": where the lease had moved
    fallback: bool = False  # the parent is forgotten: the full prompt sent with the request was used


@dataclass(slots=True)
class RequestOutput:
    """The result of a request: all of it or the new part, as `output_kind` says."""

    request_id: str
    prompt: str | None
    prompt_token_ids: list[int] | None
    outputs: list[CompletionOutput]
    finished: bool
    prompt_logprobs: PromptLogprobs | None = None
    metrics: RequestMetrics | None = None
    num_cached_tokens: int | None = None
    error: str | None = None
    refusal: RequestError | None = None  # the engine cannot serve this request; `error` has the same text
    continuation: Continuation | None = None  # set for a continuation, from its first token on
    # Of a request with `return_hidden_states`, on its last output: one entry for each choice
    hidden_states: list[HiddenStatesOutput] | None = None
    # For an encoder-decoder model; `prompt` and `prompt_token_ids` are then the decoder's. Audio has no tokens.
    encoder_prompt: str | None = None
    encoder_prompt_token_ids: list[int] | None = None
    owner: str | None = None  # whose it is: ids are unique per owner
    # At the end of a request with `do_remote_decode`: what the engine that goes on with it is to be given
    kv_transfer_params: dict[str, Any] | None = None
