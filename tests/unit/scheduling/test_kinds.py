"""A new kind of request is one file: here it is defined by the test, without changes to the scheduler."""

from __future__ import annotations

import msgspec
import pytest

from ratoon.core.errors import RequestError
from ratoon.core.outputs import LogprobsLists, ModelRunnerOutput, PromptLogprobsChunk
from ratoon.core.params import SamplingParams
from ratoon.core.plan import SchedulerOutput
from ratoon.core.request import EngineCoreOutput, EngineCoreRequest, FinishReason
from ratoon.scheduling.branch import Request
from ratoon.scheduling.kinds import registry
from ratoon.scheduling.kinds.interface import RequestKind
from ratoon.scheduling.scheduler import Scheduler
from ratoon.scheduling.task import Task
from tests.unit.scheduling.steps import add, answer_of, new_ids, scheduler_of


class ScoreParams(msgspec.Struct, tag="score"):
    """The log-probability of the prompt's last token given the others."""

    scale: float = 1.0


class ScoreTask(Task):
    def __init__(self, params: ScoreParams) -> None:
        self.params = params

    @property
    def needs_every_prompt_row(self) -> bool:
        return True

    def params_for(self, choice: int) -> SamplingParams:
        return SamplingParams(prompt_logprobs=0)

    def complete(self, plan: SchedulerOutput, branch_id: str) -> None:
        """The runner sends the prompt's log-probabilities unasked: nothing is sampled."""


class ScoreKind(RequestKind):
    params_type = ScoreParams
    task_type = ScoreTask
    generates = False

    def verify_own(self, request: EngineCoreRequest) -> None:
        if len(request.prompt_token_ids) < 2:
            raise RequestError("prompt", "has one token", "two at least")

    def open(self, request: EngineCoreRequest, sequence_number: int) -> Request:
        opened = Request(request, sequence_number, self.max_total_tokens(request))
        opened.task = ScoreTask(request.params)
        return opened

    def take(self, plan: SchedulerOutput, output: ModelRunnerOutput) -> list[EngineCoreOutput]:
        outputs = []
        for branch_id, chunk in list(output.prompt_logprobs.items()):
            branch = self._state.branches.get(branch_id)
            if branch is None or not isinstance(branch.request.task, ScoreTask):
                continue
            del output.prompt_logprobs[branch_id]
            if branch.num_computed_tokens == branch.num_tokens:
                score = branch.request.task.params.scale * chunk.rows.logprobs[-1][0]
                outputs.append(EngineCoreOutput(branch_id, [], finish_reason=FinishReason.STOP, score=score))
                self._state.release([branch])
        return outputs


@pytest.fixture
def scheduler(monkeypatch: pytest.MonkeyPatch) -> Scheduler:
    monkeypatch.setattr(registry, "KINDS", [ScoreKind, *registry.KINDS])
    return scheduler_of(max_num_batched_tokens=8)


def score(name: str, length: int) -> EngineCoreRequest:
    return EngineCoreRequest(name, list(range(length)), ScoreParams(scale=2.0))


def test_a_kind_of_one_file_is_planned_beside_the_others_and_takes_its_own_results(scheduler: Scheduler) -> None:
    scheduler.add_request(score("s", 10))  # in two steps
    add(scheduler, "a", 3, max_tokens=2)
    found: list[EngineCoreOutput] = []
    while scheduler.has_unfinished_requests():
        plan = scheduler.schedule()
        result = answer_of(plan)
        if "s" in plan.num_scheduled_tokens:
            assert "s" not in plan.sampled_req_ids
            result.prompt_logprobs["s"] = PromptLogprobsChunk(1, LogprobsLists([[3]], [[-1.5]], [1]))
        found += scheduler.update_from_output(plan, result)
        scheduler.check()
    assert [output.score for output in found if output.request_id == "s"] == [-3.0]
    assert sum(len(output.new_token_ids) for output in found if output.request_id == "a") == 2


def test_it_waits_is_aborted_and_leaves_no_memory_behind(scheduler: Scheduler) -> None:
    scheduler.add_request(score("s", 10))
    assert new_ids(scheduler.schedule()) == ["s"]
    (output,) = scheduler.abort_requests(["s"])
    assert output.finish_reason == FinishReason.ABORT
    scheduler.check()
    assert scheduler.kv_cache.usage == 0.0


def test_it_refuses_what_it_can_t_do_and_what_no_kind_can(scheduler: Scheduler) -> None:
    with pytest.raises(RequestError, match="two at least"):
        scheduler.add_request(score("s", 1))
    with pytest.raises(RequestError, match="max_model_len"):
        scheduler.add_request(score("s", scheduler.max_model_len + 1))
