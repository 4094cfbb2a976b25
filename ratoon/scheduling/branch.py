"""Requests and their branches as the scheduler sees them: state only. What to do with them is the scheduler's.

A request owns n branches, one for each choice. Branch 0 computes the prompt; the others are forked from it when the
prompt is done, and from then on every branch lives, waits and ends on its own. A beam search has one branch, the trunk
of its BeamGroup, and its choices are the texts that it ends with. An extraction of hidden states has one that is never
sampled from.
"""

from __future__ import annotations

import enum
from hashlib import blake2b

from ratoon.core.outputs import PromptLogprobsChunk
from ratoon.core.params import SamplingParams
from ratoon.core.request import EngineCoreRequest
from ratoon.memory.hashing import ExtraKeys
from ratoon.memory.sequence import TokenSequence
from ratoon.scheduling.beam_group import BeamGroup
from ratoon.scheduling.extraction import ExtractionState

_MASK_64 = (1 << 64) - 1


class BranchStatus(enum.IntEnum):
    WAITING = 0  # never ran
    RUNNING = 1
    PREEMPTED = 2  # ran, lost its memory, waits to run again
    FINISHED = 3


class Request:
    """What all branches of a request have in common."""

    __slots__ = (
        "arrival_time",
        "beams",
        "branch_ids",
        "branches",
        "continuation_of",
        "encoder_input",
        "extraction",
        "finished_choices",
        "forked",
        "max_total_tokens",
        "next_prompt_logprob",
        "num_choices",
        "num_inheritable_tokens",
        "num_prompt_tokens",
        "owner",
        "params",
        "params_without_prompt",
        "pooling_params",
        "priority",
        "prompt_logprobs",
        "queued_time",
        "request_id",
        "retain_kv",
        "sequence_number",
        "stop_token_ids",
        "traced",
    )

    def __init__(self, request: EngineCoreRequest, max_model_len: int, sequence_number: int) -> None:
        params = request.sampling_params
        self.request_id = request.request_id
        self.params = params
        self.pooling_params = request.pooling_params
        self.encoder_input = request.encoder_input
        self.num_choices = params.n
        self.num_prompt_tokens = len(request.prompt_token_ids)
        self.max_total_tokens = longest_total(self.num_prompt_tokens, max_new_tokens(request), max_model_len)
        self.stop_token_ids = stop_tokens_of(params, request.eos_token_id)
        self.continuation_of = request.continuation_of
        self.num_inheritable_tokens = self.num_prompt_tokens - len(request.continuation_token_ids or ())
        self.retain_kv = request.retain_kv
        self.owner = request.owner
        self.priority = request.priority
        self.arrival_time = request.arrival_time
        self.sequence_number = sequence_number
        self.queued_time: float | None = None  # until it is told, with its first schedule
        self.traced = request.trace_headers is not None  # told of every part of its prompt
        self.branch_ids = [branch_id_of(request.request_id, choice) for choice in range(params.n)]
        self.finished_choices: set[int] = set()
        self.forked = params.n == 1 or request.beam_params is not None  # nothing to fork
        # Prompt log-probabilities wait here for the first token. A prompt that is preempted computes its first rows
        # again, so the request remembers the next position that it has not got yet; the first prompt token has none.
        self.prompt_logprobs: list[PromptLogprobsChunk] = []
        self.next_prompt_logprob = 1
        self.params_without_prompt = params
        if params.prompt_logprobs is not None:
            self.params_without_prompt = params.clone()
            self.params_without_prompt.prompt_logprobs = None
        extra_keys = extra_keys_of(request)
        self.branches: list[Branch] = [Branch(self, 0, list(request.prompt_token_ids), extra_keys)]
        if request.resumed is not None:
            self._resume(request, extra_keys)
        self.beams: BeamGroup | None = None
        if request.beam_params is not None:
            (trunk,) = self.branches
            max_new = self.max_total_tokens - self.num_prompt_tokens
            self.beams = BeamGroup(trunk, request.beam_params, max_new, request.retain_kv is not None)
            trunk.num_rows = request.beam_params.beam_width

        self.extraction: ExtractionState | None = None
        if request.extraction is not None:
            self.extraction = ExtractionState(self.branches[0], request.extraction)

    def _resume(self, request: EngineCoreRequest, extra_keys: ExtraKeys) -> None:
        """All choices are past their prompt: each goes on behind the tokens that it had given elsewhere, as a branch
        does that was preempted. The caller has what belongs to the prompt."""
        assert request.resumed is not None
        self.forked = True
        self.next_prompt_logprob = self.num_prompt_tokens
        self.branches = []
        for choice, resumed in enumerate(request.resumed):
            branch = Branch(self, choice, request.prompt_token_ids + resumed.token_ids, extra_keys)
            branch.status = BranchStatus.FINISHED if resumed.finished else BranchStatus.PREEMPTED
            if resumed.finished:
                self.finished_choices.add(choice)
            self.branches.append(branch)

    @property
    def wants_prompt_logprobs(self) -> bool:
        """Are there prompt rows that somebody asked for and that are not computed yet?"""
        return self.params.prompt_logprobs is not None and self.next_prompt_logprob < self.num_prompt_tokens

    @property
    def needs_every_prompt_row(self) -> bool:
        """Must the whole prompt be computed, whatever the prefix cache has of it? A mean is over all its rows."""
        return self.wants_prompt_logprobs or self.pools_first_rows

    @property
    def pools_first_rows(self) -> bool:
        return self.pooling_params is not None and self.pooling_params.pooling in ("mean", "first")

    @property
    def can_be_swapped(self) -> bool:
        """Are its blocks all that there is of it? Of a mean the runner keeps more, which is lost when it gives way."""
        return not self.pools_first_rows

    @property
    def encoder_tokens_for_rules(self) -> list[int]:
        """The encoder's tokens, if the runner needs them to know which are impossible."""
        if self.encoder_input is None or not self.params.encoder_no_repeat_ngram_size:
            return []
        return self.encoder_input.token_ids or []

    def fork_branch(self, choice: int) -> Branch:
        """A further choice at the end of the prompt, without memory yet."""
        root = self.branches[0]
        branch = Branch(self, choice, root.token_ids[: self.num_prompt_tokens], root.extra_keys)
        branch.num_cached_tokens = root.num_cached_tokens
        self.branches.append(branch)
        return branch


class Branch(TokenSequence):
    """One choice: a token sequence with a status, a place in the order, and its own random stream."""

    __slots__ = (
        "choice",
        "known_to_runner",
        "max_total_tokens",
        "num_cached_tokens",
        "num_rows",
        "order",
        "request",
        "request_id",
        "seed",
        "status",
        "stop_token_ids",
    )

    def __init__(self, request: Request, choice: int, token_ids: list[int], extra_keys: ExtraKeys) -> None:
        super().__init__(request.branch_ids[choice], token_ids, extra_keys)
        self.request = request
        self.choice = choice
        self.seed = branch_seed(request.params.seed, request.request_id, choice)
        self.status = BranchStatus.WAITING
        self.num_cached_tokens = 0  # prompt tokens that came from the prefix cache when it first ran
        self.known_to_runner = False  # the runner has a row for it
        self.num_rows = 1  # that it takes on the runner; a search needs one for each beam
        # Copies of the request's, one attribute away: these are read for every branch in every step.
        self.request_id = request.request_id
        self.max_total_tokens = request.max_total_tokens
        self.stop_token_ids = request.stop_token_ids
        # First come, first served; the scheduler puts the priority in front where the policy asks for it.
        self.order = (request.priority, request.arrival_time, request.sequence_number, choice)

    @property
    def num_prompt_tokens(self) -> int:
        return self.request.num_prompt_tokens

    @property
    def num_output_tokens(self) -> int:
        return self.num_tokens - self.request.num_prompt_tokens

    @property
    def sampling_params(self) -> SamplingParams:
        """What the runner needs to know: prompt log-probabilities only where they are still wanted."""
        request = self.request
        return request.params if self.choice == 0 and request.wants_prompt_logprobs else request.params_without_prompt

    def append_tokens(self, token_ids: list[int]) -> None:
        self.token_ids.extend(token_ids)
        self.num_tokens += len(token_ids)


def branch_id_of(request_id: str, choice: int) -> str:
    return request_id if choice == 0 else f"{request_id}#{choice}"


def max_new_tokens(request: EngineCoreRequest) -> int | None:
    """What may be generated behind the prompt, at most; None: as much as fits."""
    if request.pooling_params is not None or request.extraction is not None:
        return 0
    return request.sampling_params.max_tokens if request.beam_params is None else request.beam_params.max_tokens


def longest_total(num_prompt_tokens: int, max_tokens: int | None, max_model_len: int) -> int:
    """Prompt and output together, at most."""
    return max_model_len if max_tokens is None else min(num_prompt_tokens + max_tokens, max_model_len)


def stop_tokens_of(params: SamplingParams, eos_token_id: int | None) -> frozenset[int]:
    """The tokens that end a branch. The InputProcessor has normally worked them out."""
    if params.all_stop_token_ids is not None:
        return frozenset(params.all_stop_token_ids)
    stops = set(params.stop_token_ids or ())
    if eos_token_id is not None and not params.ignore_eos:
        stops.add(eos_token_id)
    return frozenset(stops)


def extra_keys_of(request: EngineCoreRequest) -> ExtraKeys:
    """What besides tokens must agree before two requests may share blocks."""
    keys = []
    if request.adapter is not None:
        keys.append(("adapter", request.adapter))
    if request.cache_salt is not None:
        keys.append(("salt", request.cache_salt))
    if request.encoder_input is not None:
        keys.append(("encoder", request.encoder_input.content_hash.hex()))
    return ExtraKeys(keys)


def branch_seed(seed: int | None, request_id: str, choice: int) -> int:
    """A branch's own seed, 0 to 2**63 - 1: the same for the same request seed and choice, on every machine."""
    if seed is None:
        seed = int.from_bytes(blake2b(request_id.encode("utf-8", "surrogatepass"), digest_size=8).digest(), "little")
    # The splitmix64 finaliser over evenly spaced inputs: neighbouring seeds and choices share no pattern.
    state = (seed + (choice + 1) * 0x9E3779B97F4A7C15) & _MASK_64
    state = ((state ^ (state >> 30)) * 0xBF58476D1CE4E5B9) & _MASK_64
    state = ((state ^ (state >> 27)) * 0x94D049BB133111EB) & _MASK_64
    return (state ^ (state >> 31)) >> 1
