"""What the front end and the engine core exchange, in both directions.

Wire types: msgspec structs without references to objects of one side.
"""

from __future__ import annotations

import enum
from typing import Any, TypeAlias

import msgspec

from ratoon.core.adapters import Adapter
from ratoon.core.encoder import EncoderInput
from ratoon.core.kv_transfer import KVTransfer
from ratoon.core.media import MediaFeature, RopePositions
from ratoon.core.messages import Fault
from ratoon.core.outputs import LogprobsLists, PromptLogprobsChunk
from ratoon.core.params import BeamSearchParams, GenerationParams, PoolingParams, SamplingParams
from ratoon.core.stats import SchedulerStats
from ratoon.core.wire import WireTensor


class EngineCoreRequestType(enum.Enum):
    """What a message to the engine core is: one byte on the wire."""

    ADD = b"\x00"
    ABORT = b"\x01"
    START_DP_WAVE = b"\x02"
    UTILITY = b"\x03"
    EXECUTOR_FAILED = b"\x04"
    HIDDEN_STATES_EXTRACT = b"\x05"
    # A stop string ended these choices: like ABORT, but leases and hidden states that they asked for are given
    STOP = b"\x07"
    OUTPUTS_TAKEN = b"\x06"  # how many output messages the client has received so far
    FORGET_ROOTS = b"\x08"  # the texts of these branches are those of no root any more
    ADD_TOGETHER = b"\x09"  # several requests of any kind, which the engine takes in before it plans a step


class FinishReason(enum.IntEnum):
    STOP = 0  # an eos or stop token, or a stop string
    LENGTH = 1  # max_tokens or the model's length
    ABORT = 2  # the caller cancelled it
    ERROR = 3  # it failed; the output's `error` says why

    def __str__(self) -> str:
        return _REASON_TEXTS[self]


_REASON_TEXTS = [reason.name.lower() for reason in FinishReason]  # a name is slow to read, and every choice has one


class ResumedChoice(msgspec.Struct, array_like=True, omit_defaults=True, gc=False):
    """A choice that an earlier engine process began: the tokens that were already output."""

    token_ids: list[int]
    finished: bool = False


class Extraction(msgspec.Struct, omit_defaults=True, gc=False, tag="extraction"):
    """Which hidden states of the prompt to read out; the prompt ends at the last requested position. Positions and
    layers are resolved: no negative numbers, no ranges."""

    positions: list[int]  # rising, each once
    layers: list[int]  # that the rows have passed: 0 is the embeddings, num_layers + 1 the final norm
    dtype: str = "float32"
    deadline: float | None = None  # seconds, from its arrival in the engine
    # Read the encoder's states instead of the decoder's: positions are those of the encoder input
    of_encoder: bool = False
    # Set: what comes for a state is not the state but its norm, then the ids of the most probable tokens, so many, and
    # then their log-probabilities, all as float32 (`lens_width` numbers)
    lens: int = 0
    # Set: what comes is not a state but the weights with which the row's cross-attention reads the encoder's positions,
    # in one head of each of `layers`, which are then counted from 0
    cross_heads: list[int] = []


def lens_width(num_tokens: int) -> int:
    """The numbers that stand in the place of a state where a lens was asked for."""
    return 1 + 2 * num_tokens


# What a request asks for, and so its kind: generation, beam search, one vector, hidden states
RequestParams: TypeAlias = SamplingParams | BeamSearchParams | PoolingParams | Extraction


class EngineCoreEventType(enum.IntEnum):
    """What happened to a request in the engine."""

    QUEUED = 1  # it waits to enter the running batch
    SCHEDULED = 2  # it, or one of its choices, entered the batch: for the first time, or again
    PREEMPTED = 3  # its memory was freed for others, and it waits again
    PREFILL_CHUNK = 4  # a part of its prompt was computed; recorded for traced requests only


class EngineCoreEvent(msgspec.Struct, array_like=True, omit_defaults=True, gc=False):
    """An event of a request, with the time at which it happened. Times are those of the engine's monotonic clock
    (time.monotonic), which on one machine is the same for all processes."""

    type: EngineCoreEventType
    timestamp: float  # seconds
    seconds: float = 0.0  # duration; for a chunk, that of its step
    num_tokens: int = 0  # of a chunk
    choice: int = 0


class EngineCoreRequest(msgspec.Struct, array_like=True, omit_defaults=True, gc=False):
    """A request, normalised: tokenised, checked, with every default filled in."""

    request_id: str  # internal id: the caller's id and eight random characters
    prompt_token_ids: list[int]
    params: RequestParams
    eos_token_id: int | None = None
    arrival_time: float = 0.0
    priority: int = 0  # lower goes first
    cache_salt: str | None = None  # requests with different salts never share cached blocks
    adapter: Adapter | None = None  # the digest of an adapter (LoRA) tags the cache in the same way
    data_parallel_rank: int | None = None
    external_id: str | None = None
    # For an encoder-decoder model: its encoder's input. The prompt is then the decoder's.
    encoder_input: EncoderInput | None = None
    # Images and other media of the prompt, by rising offset; and the positions that a model with `rope_axes` rotates
    # heads by.
    mm_features: list[MediaFeature] = []
    rope: RopePositions | None = None
    # Set: the prompt is the tokens of this branch, which has ended or still runs, and then `continuation_token_ids`.
    continuation_of: str | None = None
    continuation_token_ids: list[int] | None = None
    parent_id: str | None = None  # the caller's id of that request; without continuation_of: it is forgotten
    preferred_rank: int | None = None  # the engine that has the parent's memory; a preference only
    owner: str | None = None
    retain_kv: float | None = None  # seconds to lease its memory for continuations once it has ended
    # Set: resume after these tokens, one entry per choice. They are not output again.
    resumed: list[ResumedChoice] | None = None
    trace_headers: dict[str, str] | None = None  # W3C trace context of the caller; set, perhaps empty: it is traced
    session: str | None = None  # the owner's name of the session that its texts end in
    is_branch: bool = False  # of that session: it supersedes only roots that it contains whole
    retention: str | None = None  # one of RETENTIONS: where its blocks are kept
    kv_transfer: KVTransfer | None = None  # the blocks of its prompt come from another engine, or go to one
    # Of media that engines on other hosts have encoded: the address of such an engine, by the hash of the content
    encoded_at: dict[str, str] = {}

    @property
    def generation_params(self) -> GenerationParams | None:
        """The params of a request whose answer is text."""
        return self.params if isinstance(self.params, (SamplingParams, BeamSearchParams)) else None

    @property
    def num_choices(self) -> int:
        params = self.generation_params
        return 1 if params is None else params.n


class AddedTogether(msgspec.Struct, array_like=True, gc=False):
    """The requests that one call made: the first step that has one of them has all that fit."""

    requests: list[EngineCoreRequest]


def branch_id_of(request_id: str, choice: int) -> str:
    """The engine's id of one choice."""
    return request_id if choice == 0 else f"{request_id}#{choice}"


class EndedLease(msgspec.Struct):
    """The lease of a text, which an earlier process gave and whose time is not over."""

    branch_id: str
    root_id: str
    owner: str | None
    seconds: float  # until it ends
    token_ids: list[int]  # of the text, or those before its first image
    adapter: str | None = None  # the digest of its files
    cache_salt: str | None = None
    encoder_input: str | None = None  # a hash of it


class InheritedFrom(enum.IntEnum):
    """Where a continuation found the keys and values of its parent."""

    LEASE = 0  # a lease, or the parent still runs
    PREFIX_CACHE = 1  # full blocks that were not evicted yet
    RECOMPUTED = 2  # nowhere
    HOST = 3  # its lease had moved to host memory
    FILES = 4  # its lease had moved to a connector

    def __str__(self) -> str:
        return self.name.lower()


class CheckedDrafts(msgspec.Struct, array_like=True, gc=False):
    """A draft of a choice's next tokens that a step has checked."""

    source: str
    num_drafted: int
    num_accepted: int  # of its first tokens


class EngineCoreOutput(msgspec.Struct, array_like=True, omit_defaults=True, gc=False):
    """The result of one step for one choice of one request."""

    request_id: str
    new_token_ids: list[int]
    choice: int = 0  # which of the request's n choices
    finish_reason: FinishReason | None = None
    stop_reason: int | None = None  # the stop token, when one ended it
    new_logprobs: LogprobsLists | None = None
    prompt_logprobs: list[PromptLogprobsChunk] | None = None  # in prompt order, as steps bring them, on choice 0
    num_cached_tokens: int = 0  # prompt tokens that came from the prefix cache
    error: str | None = None
    refusal: Fault | None = None  # the engine cannot serve this request; `error` has the same text
    inherited_from: InheritedFrom | None = None  # for a continuation; `num_cached_tokens` says how much
    pooled: WireTensor | None = None  # float32 [hidden], at the end of a pooling request
    # For an extraction: the next of the requested rows, [layers, rows, hidden], and how many were run so far
    hidden_states: WireTensor | None = None
    first_row: int = 0  # index of the first of these rows among the requested positions
    num_rows_run: int = 0
    # For a beam search: the text's score, and, while it still searches, whether this is the whole best text so far.
    score: float | None = None  # the sum of log-probabilities after the length penalty
    cumulative_logprob: float | None = None  # the sum itself
    replaces: bool = False  # the tokens replace all earlier tokens of this choice
    num_texts: int | None = None  # set at its end, on choice 0, if it found fewer texts than the request has choices
    events: list[EngineCoreEvent] | None = None  # of the request, since its last output
    checked: CheckedDrafts | None = None  # the draft that the step has checked, if there was one
    # At the end of a request whose blocks go to another engine: what that one is to be given
    kv_transfer_params: dict[str, Any] | None = None

    @property
    def finished(self) -> bool:
        return self.finish_reason is not None

    @property
    def is_part_of_prompt(self) -> bool:
        """Whether these are only log-probabilities of a prompt that is not computed yet."""
        return self.prompt_logprobs is not None and not self.new_token_ids and not self.finished


class EngineCoreOutputs(msgspec.Struct, array_like=True, omit_defaults=True, gc=False):
    """All results of one step for one client."""

    outputs: list[EngineCoreOutput] = []
    scheduler_stats: SchedulerStats | None = None
    timestamp: float = 0.0  # when the step was done, on the clock of the events
    engine_index: int = 0
    # Branches of which the step computed tokens without sampling one: parts of prompts, beams, hidden states
    advanced: dict[str, int] = {}
