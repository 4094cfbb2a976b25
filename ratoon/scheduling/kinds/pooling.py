"""Pooling: the answer to a prompt is one vector, and nothing is sampled."""

from __future__ import annotations

from ratoon.core.errors import RequestError
from ratoon.core.outputs import ModelRunnerOutput
from ratoon.core.params import PoolingParams, SamplingParams
from ratoon.core.plan import SchedulerOutput
from ratoon.core.request import EngineCoreOutput, EngineCoreRequest, FinishReason
from ratoon.scheduling.branch import Branch, Request
from ratoon.scheduling.kinds.interface import RequestKind
from ratoon.scheduling.task import Task


class PoolingTask(Task):
    __slots__ = ("pooling_params",)

    pooling_params: PoolingParams

    def __init__(self, params: SamplingParams, pooling_params: PoolingParams) -> None:
        super().__init__(params)
        self.pooling_params = pooling_params

    @property
    def needs_every_prompt_row(self) -> bool:
        """A mean is over all its rows."""
        return self.pooling_params.pooling in ("mean", "first")

    @property
    def can_be_swapped(self) -> bool:
        """Of a mean the runner keeps more than blocks, which is lost when it gives way."""
        return not self.needs_every_prompt_row

    def complete(self, plan: SchedulerOutput, branch_id: str) -> None:
        plan.pooled_req_ids.append(branch_id)


class PoolingKind(RequestKind):
    task_type = PoolingTask
    generates = False

    @staticmethod
    def serves(request: EngineCoreRequest) -> bool:
        return request.pooling_params is not None

    def verify_own(self, request: EngineCoreRequest) -> None:
        """A prompt has one vector: what belongs to generated tokens has no meaning beside it."""
        assert request.pooling_params is not None
        request.pooling_params.verify()
        params = request.sampling_params
        if params.n != 1:
            raise RequestError("n", f"is {params.n}, and a prompt has one vector", "1")
        if params.prompt_logprobs is not None:
            raise RequestError("prompt_logprobs", "are not computed while a prompt is pooled", "None")
        if request.resumed is not None:
            raise RequestError("resumed", "has no meaning for a vector", "None: it is computed anew")

    def open(self, request: EngineCoreRequest, sequence_number: int) -> Request:
        assert request.pooling_params is not None
        opened = Request(request, sequence_number, self.max_total_tokens(request))
        opened.task = PoolingTask(request.sampling_params, request.pooling_params)
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
            if branch is None or branch.num_computed_tokens != branch.num_tokens:
                continue  # it failed or was aborted; its id may be in use again
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
