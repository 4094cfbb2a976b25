"""Pooling: the answer to a prompt is one vector, and nothing is sampled."""

from __future__ import annotations

from ratoon.core.outputs import ModelRunnerOutput
from ratoon.core.params import PoolingParams
from ratoon.core.plan import SchedulerOutput
from ratoon.core.request import EngineCoreOutput, EngineCoreRequest, FinishReason
from ratoon.scheduling.branch import Branch, Request
from ratoon.scheduling.kinds.interface import RequestKind
from ratoon.scheduling.task import Task


class PoolingTask(Task):
    __slots__ = ("params",)

    def __init__(self, params: PoolingParams) -> None:
        self.params = params

    @property
    def needs_every_prompt_row(self) -> bool:
        """A mean is over all its rows."""
        return self.params.pooling in ("mean", "first")

    @property
    def can_be_swapped(self) -> bool:
        """Whether its branch may be swapped: for a mean the runner keeps a sum, which is lost on preemption."""
        return not self.needs_every_prompt_row

    def params_for(self, choice: int) -> PoolingParams:
        return self.params

    def complete(self, plan: SchedulerOutput, branch_id: str) -> None:
        plan.pooled_req_ids.append(branch_id)


class PoolingKind(RequestKind):
    params_type = PoolingParams
    task_type = PoolingTask
    generates = False

    def verify_own(self, request: EngineCoreRequest) -> None:
        assert isinstance(request.params, PoolingParams)
        request.params.verify()

    def open(self, request: EngineCoreRequest, sequence_number: int) -> Request:
        assert isinstance(request.params, PoolingParams)
        opened = Request(
            request,
            sequence_number,
            self.max_total_tokens(request),
            whole_images=self._state.config.whole_images,
        )
        opened.task = PoolingTask(request.params)
        return opened

    def take(self, plan: SchedulerOutput, output: ModelRunnerOutput) -> list[EngineCoreOutput]:
        """A branch ends with its vector."""
        if not plan.pooled_req_ids:
            return []
        outputs: list[EngineCoreOutput] = []
        finished: list[Branch] = []
        missing: list[str] = []
        for branch_id in plan.pooled_req_ids:
            branch = self._state.branches.get(branch_id)
            if branch is None or branch.first_step > plan.step:
                continue  # failed or aborted; its id may have been reused
            vector = output.pooled.get(branch_id)
            if vector is None:
                missing.append(branch_id)
                continue
            finished.append(branch)
            outputs.append(
                EngineCoreOutput(
                    branch.request_id,
                    [],
                    finish_reason=FinishReason.STOP,
                    num_cached_tokens=branch.num_cached_tokens,
                    pooled=vector,
                )
            )
        self._state.release(finished)
        return outputs + self._state.fail_requests(missing, "the runner returned no vector")
