"""The interface of a kind of request: what it plans, what it makes of results, and how its requests come in.

A kind is one object in a scheduler, for all requests of that kind; what it knows of one of them is in the request's
task. What is said here holds for requests that are planned as branches in the common queues, token by token.
"""

from __future__ import annotations

from collections.abc import Sequence
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
    verify_memory,
    verify_prompt,
)
from ratoon.scheduling.beginnings import Admission, Beginnings
from ratoon.scheduling.branch import Branch, BranchStatus, Request
from ratoon.scheduling.preemption import Preemption
from ratoon.scheduling.state import SchedulerState
from ratoon.scheduling.step_draft import StepDraft
from ratoon.scheduling.task import Task


class RequestKind:
    params_type: ClassVar[type[Any]]  # what a request of this kind asks for
    task_type: ClassVar[type[Task]]
    plans_rows: ClassVar[bool] = False  # it has more to plan than the tokens of branches in the common queues
    generates: ClassVar[bool] = True  # tokens behind the prompt
    resumes: ClassVar[bool] = False  # it goes on behind tokens that another engine had given

    def __init__(self, state: SchedulerState, beginnings: Beginnings, preemption: Preemption) -> None:
        self._state = state
        self._beginnings = beginnings
        self._preemption = preemption

    # ---- requests come in ----

    def verify(self, request: EngineCoreRequest) -> None:
        """Raise RequestError for a request that could never run to its end."""
        state = self._state
        verify_prompt(request, state.config, state.kv_cache.max_model_len, self.generates)
        verify_encoder_input(request, state.kv_cache)
        if request.resumed is not None and not self.resumes:
            raise RequestError("resumed", "has no meaning but for sampled tokens", "None: it starts again")
        self.verify_own(request)
        verify_continuation(request)
        self.verify_memory(request)

    def verify_own(self, request: EngineCoreRequest) -> None:
        """The same for what only this kind has."""
        raise NotImplementedError

    def verify_memory(self, request: EngineCoreRequest) -> None:
        max_new_tokens = self.max_new_tokens(request)
        verify_memory(request, self._state.kv_cache, self._state.max_step_tokens, max_new_tokens)

    def max_new_tokens(self, request: EngineCoreRequest) -> int | None:
        """What may be generated behind the prompt, at most; None: as much as fits."""
        return 0

    def max_total_tokens(self, request: EngineCoreRequest) -> int:
        max_model_len = self._state.kv_cache.max_model_len
        return longest_total(len(request.prompt_token_ids), self.max_new_tokens(request), max_model_len)

    def open(self, request: EngineCoreRequest, sequence_number: int) -> Request:
        """The request with its task and its first branches."""
        raise NotImplementedError

    def enqueue(self, request: Request) -> None:
        """Let it wait for its turn. May raise RequestError."""
        for branch in request.branches:  # one, unless the request began elsewhere and is resumed
            if branch.status != BranchStatus.FINISHED:
                self._state.waiting.add(branch)

    def enqueue_again(self, branch: Branch) -> None:
        """It was set back, and goes before all that came later."""
        self._state.waiting.prepend(branch)

    # ---- a step is planned; those with `plans_rows` are asked in each ----

    def plan_running(self, step: StepDraft) -> None:
        """Behind the branches that decode, and before long prompts."""

    def held_back(self, step: StepDraft) -> int:
        """The tokens that long prompts leave to this kind."""
        return 0

    def plan_early(self, step: StepDraft) -> bool:
        """Before anything that waits comes in. False: there is no room, and nothing else may come in either."""
        return True

    def plan_late(self, step: StepDraft) -> None:
        """Behind all that came in."""

    def close(self, step: StepDraft) -> None:
        """Nothing more comes into the step."""

    def stand_back(self, request: Request) -> None:
        """This request runs alone: give back what requests of this kind hold beside it."""

    # ---- the same for single requests ----

    def plan_alone(self, step: StepDraft, request: Request) -> bool:
        """The request runs alone. False: as a branch in the common queues does."""
        return False

    def resume(self, step: StepDraft, branch: Branch) -> Admission | None:
        """Let a branch in again that was swapped out. None: as any other."""
        return None

    # ---- results ----

    def fork(self, plan: SchedulerOutput) -> list[Branch]:
        """The branches that come into being with this plan, before its results are taken. They get a place after."""
        return []

    def unfork(self, plan: SchedulerOutput) -> None:
        """The plan failed: they will not."""

    def take(self, plan: SchedulerOutput, output: ModelRunnerOutput) -> list[EngineCoreOutput]:
        """What is new for every choice, and the end of what is done. Results for branches that ended while the step ran
        are dropped; a branch that should have got one and did not fails, for it would wait for it forever."""
        raise NotImplementedError

    # ---- time, and checks ----

    def end_overdue(self) -> list[EngineCoreOutput]:
        """End the requests whose time is over."""
        return []

    def next_deadline(self) -> float | None:
        """When the next one's is; None: there is none."""
        return None

    def queued(self) -> tuple[Sequence[Branch], Sequence[Branch]]:
        """For checks: branches that run and branches that wait in queues of this kind's own."""
        return (), ()

    def held(self) -> Sequence[TokenSequence]:
        """For checks: what holds blocks beside branches and leases."""
        return ()
