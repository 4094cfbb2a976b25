"""Requests and their branches as the scheduler sees them: state only; the scheduler acts on it.

A request owns n branches, one for each choice. Branch 0 computes the prompt; the others are forked from it when the
prompt is computed, and from then on every branch runs, waits and ends independently. State specific to the request's
kind (kinds/) is in its task.
"""

from __future__ import annotations

import enum
from collections.abc import Sequence
from hashlib import blake2b

from ratoon.core.kv import IN_MEMORY
from ratoon.core.plan import BlockIds, NewRequestData
from ratoon.core.readings import asks_for_states
from ratoon.core.request import EngineCoreRequest, branch_id_of
from ratoon.memory.adapter_slots import NO_SLOT
from ratoon.memory.hashing import NO_EXTRA_KEYS, ExtraKeys
from ratoon.memory.sequence import TokenSequence
from ratoon.scheduling.media import MediaRun, media_of, overrides_of, spans_of
from ratoon.scheduling.task import Task

NEVER = 1 << 62  # a step number that is never reached
_MASK_64 = (1 << 64) - 1


class BranchStatus(enum.IntEnum):
    WAITING = 0  # never ran
    RUNNING = 1
    PREEMPTED = 2  # ran, was preempted, waits to run again
    FINISHED = 3


class Request:
    """The state that all branches of a request share."""

    __slots__ = (
        "adapter",
        "adapter_slot",
        "added_time",
        "arrival_time",
        "branch_ids",
        "branches",
        "continuation_of",
        "encoder_input",
        "external_id",
        "finished_choices",
        "is_branch",
        "kv_transfer",
        "max_total_tokens",
        "media",
        "num_choices",
        "num_inheritable_tokens",
        "num_prompt_tokens",
        "original",
        "overrides",
        "owner",
        "packed_prompt",
        "prediction",
        "priority",
        "queued_time",
        "receives_blocks",
        "request_id",
        "retain_kv",
        "retention",
        "seed",
        "sequence_number",
        "session",
        "speculates",
        "stop_token_ids",
        "task",
        "traced",
    )

    task: Task  # set by its kind

    def __init__(
        self,
        request: EngineCoreRequest,
        sequence_number: int,
        max_total_tokens: int,
        *,
        num_choices: int = 1,
        stop_token_ids: frozenset[int] = frozenset(),
        seed: int | None = None,
        speculates: bool = True,
        prediction: list[int] | None = None,
        whole_images: bool = False,
    ) -> None:
        self.request_id = request.request_id
        self.external_id = request.external_id or request.request_id  # for displays
        # Kept where hidden states are read when its texts have ended
        self.original = request if asks_for_states(request) else None
        self.encoder_input = request.encoder_input
        self.media = media_of(request, whole_images)  # by rising places
        self.overrides = overrides_of(request, self.media)
        self.adapter = request.adapter
        self.adapter_slot = NO_SLOT  # that it holds
        self.num_choices = num_choices
        self.num_prompt_tokens = len(request.prompt_token_ids)
        self.max_total_tokens = max_total_tokens
        self.stop_token_ids = stop_token_ids
        self.seed = seed
        self.speculates = speculates  # drafts of its tokens may be made
        self.prediction = prediction or []  # what its answer is expected to be
        self.continuation_of = request.continuation_of
        self.num_inheritable_tokens = self.num_prompt_tokens - len(request.continuation_token_ids or ())
        self.retain_kv = request.retain_kv
        self.retention = request.retention
        # What ends in another session supersedes nothing of it; salts are tenants.
        self.session = None if request.session is None else (request.owner, request.cache_salt, request.session)
        self.is_branch = request.is_branch
        transfer = request.kv_transfer
        self.kv_transfer = transfer.name if transfer is not None and transfer.sends else None  # where its blocks go
        self.receives_blocks = transfer is not None and not transfer.sends  # another engine has computed them for it
        self.owner = request.owner
        self.priority = request.priority
        self.arrival_time = request.arrival_time
        self.added_time = 0.0  # when it came to the scheduler, on the scheduler's own clock
        self.sequence_number = sequence_number
        self.queued_time: float | None = None  # until reported, when it is first scheduled
        self.traced = request.trace_headers is not None  # reports every prefill chunk
        self.branch_ids = [branch_id_of(request.request_id, choice) for choice in range(num_choices)]
        self.finished_choices: set[int] = set()
        self.packed_prompt = b""  # as NewRequestData has it; set once it is checked
        self.branches: list[Branch] = [
            Branch(self, 0, list(request.prompt_token_ids), extra_keys_of(request, self.media))
        ]

    @property
    def unfinished_branches(self) -> list[Branch]:
        return [branch for branch in self.branches if branch.status != BranchStatus.FINISHED]

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
        "draft_tokens",
        "drafts_of_device",
        "first_step",
        "known_to_runner",
        "max_total_tokens",
        "media_end",
        "num_cached_tokens",
        "num_drafts",
        "num_pending",
        "num_rows",
        "num_to_draft",
        "order",
        "plans_ahead",
        "request",
        "request_id",
        "rest",
        "seed",
        "speculates",
        "status",
        "stop_token_ids",
        "turn",
        "waits_to_draft",
    )

    def __init__(self, request: Request, choice: int, token_ids: list[int], extra_keys: ExtraKeys) -> None:
        super().__init__(request.branch_ids[choice], token_ids, extra_keys)
        self.request = request
        self.choice = choice
        self.stays_in_memory = request.retention == IN_MEMORY
        self.seed = branch_seed(request.seed, request.request_id, choice)
        self.status = BranchStatus.WAITING
        self.num_cached_tokens = 0  # prompt tokens that came from the prefix cache when it first ran
        self.known_to_runner = False  # the runner has a row for it
        # Tokens that steps in flight will sample, and that the runner feeds to the next step itself: they count as
        # tokens to compute, but their values are not known here.
        self.num_pending = 0
        self.draft_tokens: Sequence[int] = ()  # guesses at its next tokens, for its next step
        self.drafts_of_device = False  # which has made these guesses
        self.num_drafts = 0  # that the step in flight checks; until its result it has no other
        self.num_to_draft = 0  # tokens that the device drafts behind its next step
        self.speculates = False  # drafts of its tokens may be made
        self.waits_to_draft = False  # it is not planned while a token is pending: a draft comes behind it
        self.plans_ahead = False  # True: sampled tokens may be pending; else the next step waits for the result
        self.first_step = NEVER  # of this run: results of earlier steps are for an earlier branch with its id
        self.num_rows = 1  # in the runner; a search needs one per beam
        self.rest = (0, 0)  # how many tokens it had when it last rested, and for how many steps
        self.turn = 0  # its owner's round (turns.py) in which it last ran
        # Copied from the request, because they are read for every branch in every step.
        self.request_id = request.request_id
        self.max_total_tokens = request.max_total_tokens
        self.stop_token_ids = request.stop_token_ids
        self.media_end = request.media[-1].end if request.media else 0  # behind it are only tokens
        # First come, first served; with the priority policy the scheduler compares the priority first.
        self.order = (request.priority, request.arrival_time, request.sequence_number, choice)

    @property
    def num_prompt_tokens(self) -> int:
        return self.request.num_prompt_tokens

    @property
    def num_output_tokens(self) -> int:
        return self.num_tokens - self.request.num_prompt_tokens

    def propose(self, draft_tokens: Sequence[int], of_device: bool = False) -> None:
        """Let the next step check these guesses at the tokens behind those that are known, as many as fit in it.
        `of_device`: the device has made them."""
        self.draft_tokens, self.drafts_of_device = draft_tokens, of_device
        self.write_limit = 0  # that step needs memory for them

    def append_tokens(self, token_ids: list[int]) -> None:
        self.token_ids.extend(token_ids)
        self.num_tokens += len(token_ids)

    def as_new_request(self, block_ids: BlockIds) -> NewRequestData:
        """The full branch, for a runner that has no row for it."""
        request, encoder_token_ids = self.request, None
        if request.encoder_input is not None and request.task.reads_encoder_tokens:
            encoder_token_ids = request.encoder_input.token_ids
        return NewRequestData(
            req_id=self.branch_id,
            token_ids=self.token_ids.copy(),
            num_prompt_tokens=request.num_prompt_tokens,
            params=request.task.params_for(self.choice),
            seed=self.seed,
            block_ids=block_ids,
            num_computed_tokens=self.num_computed_tokens,
            cross_block_ids=[] if self.cross is None else self.cross.block_ids,
            num_encoder_positions=0 if self.cross is None else self.cross.num_positions,
            encoder_token_ids=encoder_token_ids or [],
            packed_prompt=request.packed_prompt,
            overrides=request.overrides,
            adapter_slot=request.adapter_slot,
        )


def extra_keys_of(request: EngineCoreRequest, media: Sequence[MediaRun] = ()) -> ExtraKeys:
    """What besides tokens must be equal for two requests to share blocks."""
    adapter = None if request.adapter is None else request.adapter.digest
    encoder_input = None if request.encoder_input is None else request.encoder_input.content_hash.hex()
    keys = tagged_keys(adapter, request.cache_salt, encoder_input)
    return ExtraKeys(keys, spans_of(request, media)) if keys or media else NO_EXTRA_KEYS


def tagged_keys(adapter: str | None, cache_salt: str | None, encoder_input: str | None) -> list[tuple[str, str]]:
    """`adapter` is a digest, and `encoder_input` a hash."""
    values = {"adapter": adapter, "salt": cache_salt, "encoder": encoder_input}
    return [(tag, value) for tag, value in values.items() if value is not None]


def branch_seed(seed: int | None, request_id: str, choice: int) -> int:
    """A branch's own seed, 0 to 2**63 - 1: the same for the same request seed and choice, on every machine."""
    if seed is None:
        seed = int.from_bytes(blake2b(request_id.encode("utf-8", "surrogatepass"), digest_size=8).digest(), "little")
    # The splitmix64 finaliser over evenly spaced inputs: neighbouring seeds and choices share no pattern.
    state = (seed + (choice + 1) * 0x9E3779B97F4A7C15) & _MASK_64
    state = ((state ^ (state >> 30)) * 0xBF58476D1CE4E5B9) & _MASK_64
    state = ((state ^ (state >> 27)) * 0x94D049BB133111EB) & _MASK_64
    return (state ^ (state >> 31)) >> 1
