"""The interface of a kind of request: admission, planning and results.

A kind is one object per scheduler, for all requests of that kind; the state of one of them is in the request's task.
The defaults are for requests that are planned as branches in the common queues, token by token.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, ClassVar

from ratoon.core.errors import RequestError
from ratoon.core.outputs import ModelRunnerOutput
from ratoon.core.plan import SchedulerOutput
from ratoon.core.request import EngineCoreOutput, EngineCoreRequest
from ratoon.memory.sequence import TokenSequence
from ratoon.scheduling.admission import (
    longest_total,
    verify_continuation,
    verify_encoder_input,
    verify_media,
    verify_memory,
    verify_prompt,
)
from ratoon.scheduling.branch import Branch, Request
from ratoon.scheduling.preemption import Preemption
from ratoon.scheduling.shared_prefills import Admission, SharedPrefills
from ratoon.scheduling.shares import Owner
from ratoon.scheduling.state import SchedulerState
from ratoon.scheduling.step_draft import StepDraft
from ratoon.scheduling.task import Task


class RequestKind:
    params_type: ClassVar[type[Any]]  # the params of a request of this kind
    task_type: ClassVar[type[Task]]
    plans_rows: ClassVar[bool] = False  # it plans more than the tokens of branches in the common queues
    generates: ClassVar[bool] = True  # it generates tokens after the prompt
    resumes: ClassVar[bool] = False  # it can resume after tokens that another engine output

    def __init__(self, state: SchedulerState, beginnings: SharedPrefills, preemption: Preemption) -> None:
        self._state = state
        self._beginnings = beginnings
        self._preemption = preemption

    # ---- admission ----

    def verify(self, request: EngineCoreRequest) -> bytes:
        """Raise RequestError for a request that could never finish. Returns its prompt, packed."""
        state = self._state
        packed = verify_prompt(request, state.config, state.kv_cache.max_model_len, self.generates)
        verify_encoder_input(request, state.kv_cache)
        if request.mm_features:
            verify_media(request, state.config, state.max_step_tokens, state.media.cache.capacity)
        state.adapters.verify(request.adapter)
        if request.resumed is not None and not self.resumes:
            raise RequestError("resumed", "has no meaning but for sampled tokens", "None: it starts again")
        self.verify_own(request)
        verify_continuation(request)
        self.verify_memory(request)
        return packed

    def verify_own(self, request: EngineCoreRequest) -> None:
        """The checks specific to this kind."""
        raise NotImplementedError

    def verify_memory(self, request: EngineCoreRequest) -> None:
        max_new_tokens = self.max_new_tokens(request)
        verify_memory(request, self._state.kv_cache, self._state.max_step_tokens, max_new_tokens)

    def max_new_tokens(self, request: EngineCoreRequest) -> int | None:
        """The most tokens to generate after the prompt; None: as many as fit."""
        return 0

    def max_total_tokens(self, request: EngineCoreRequest) -> int:
        max_model_len = self._state.kv_cache.max_model_len
        return longest_total(len(request.prompt_token_ids), self.max_new_tokens(request), max_model_len)

    def open(self, request: EngineCoreRequest, sequence_number: int) -> Request:
        """The request with its task and its first branches."""
        raise NotImplementedError

    def enqueue(self, request: Request) -> None:
        """Queue it. May raise RequestError."""
        waiting = self._state.waiting
        place = waiting.add if request.adapter is None else waiting.insert  # it may have waited for its adapter
        for branch in request.unfinished_branches:  # one, unless the request is resumed from another engine
            place(branch)

    def enqueue_again(self, branch: Branch) -> None:
        """Queue a preempted branch in front of later ones."""
        self._state.waiting.prepend(branch)

    # ---- a step is planned; those with `plans_rows` are asked in each ----

    def plan_running(self, step: StepDraft) -> None:
        """Plans running requests, after decoding branches and before long prompts."""

    def wanted_tokens(self) -> Iterable[tuple[Owner, int]]:
        """What owners could run of this kind in a step, beside their branches in the common queues."""
        return ()

    def held_back(self, step: StepDraft) -> tuple[Owner, int] | None:
        """The tokens that long prompts must leave to this kind, for a request of this owner."""
        return None

    def plan_early(self, step: StepDraft) -> bool:
        """Plans requests before waiting branches are admitted. False: there is no room, and nothing else may be
        admitted either."""
        return True

    def plan_late(self, step: StepDraft) -> None:
        """Plans requests after waiting branches were admitted."""

    def close(self, step: StepDraft) -> None:
        """The step is complete."""

    def preempt_others(self, request: Request) -> None:
        """Preempts other requests of this kind, because this request runs alone."""

    # ---- the same for single requests ----

    def plan_alone(self, step: StepDraft, request: Request) -> bool:
        """Plan a request that runs alone. False: plan it as a branch in the common queues."""
        return False

    def resume(self, step: StepDraft, branch: Branch) -> Admission | None:
        """Admit a swapped-out branch. None: admit it as any other."""
        return None

    # ---- results ----

    def fork(self, plan: SchedulerOutput) -> list[Branch]:
        """The branches that this plan creates, before its results are applied. They are queued afterwards."""
        return []

    def unfork(self, plan: SchedulerOutput) -> None:
        """The plan failed: they are not created."""

    def take(self, plan: SchedulerOutput, output: ModelRunnerOutput) -> list[EngineCoreOutput]:
        """The new outputs of every choice; finished branches end. Results for branches that ended while the step ran
        are dropped; a branch without an expected result fails, since it would wait forever."""
        raise NotImplementedError

    # ---- time, and checks ----

    def end_overdue(self) -> list[EngineCoreOutput]:
        """End the requests whose deadline has passed."""
        return []

    def next_deadline(self) -> float | None:
        """The next deadline; None: there is none."""
        return None

    def queued(self) -> tuple[Sequence[Branch], Sequence[Branch]]:
        """The running and waiting branches in this kind's own queues, for checks."""
        return (), ()

    def held(self) -> Sequence[TokenSequence]:
        """The sequences that hold blocks besides branches and leases, for checks."""
        return ()
