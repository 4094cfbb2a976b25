"""Branches that get no token, because what their grammar allows next is not known in time: they rest, and compute their
last token again."""

from __future__ import annotations

from itertools import pairwise

import pytest

from ratoon.core.outputs import ModelRunnerOutput
from ratoon.core.plan import SchedulerOutput
from ratoon.core.request import FinishReason
from ratoon.scheduling.scheduler import Scheduler
from tests.unit.scheduling.steps import BLOCK_SIZE, add, answer_of, scheduler_of, step


def leave_out(scheduler: Scheduler, plan: SchedulerOutput, *late: str) -> None:
    answer = answer_of(plan)
    tokens = dict(zip(answer.req_ids, answer.sampled_token_ids))
    kept = {name: found for name, found in tokens.items() if name not in late}
    outputs = scheduler.update_from_output(plan, ModelRunnerOutput(list(kept), list(kept.values()), late=list(late)))
    assert not {output.request_id for output in outputs} & set(late)
    scheduler.check()


@pytest.mark.parametrize("prompt", [BLOCK_SIZE - 1, BLOCK_SIZE, BLOCK_SIZE + 1])
def test_its_last_token_is_computed_again(prompt: int) -> None:
    scheduler = scheduler_of(max_steps_in_flight=1)
    add(scheduler, "a", prompt)
    plan = scheduler.schedule()
    leave_out(scheduler, plan, "a")
    plan, outputs = step(scheduler)
    assert plan.num_scheduled_tokens == {"a": 1} and plan.sampled_req_ids == ["a"]
    assert plan.scheduled_cached_reqs.num_computed_tokens == [prompt - 1]
    assert outputs["a", 0].new_token_ids == [7]


def test_others_go_on_while_it_rests_longer_each_time() -> None:
    scheduler = scheduler_of(max_steps_in_flight=1)
    add(scheduler, "a", 3)
    add(scheduler, "b", 3)
    plans = []
    for _ in range(16):
        plan = scheduler.schedule()
        plans.append("a" in plan.num_scheduled_tokens)
        assert "b" in plan.num_scheduled_tokens
        leave_out(scheduler, plan, *(["a"] if plans[-1] else []))
    runs = [index for index, runs in enumerate(plans) if runs]
    gaps = [later - earlier for earlier, later in pairwise(runs)]
    assert gaps == sorted(gaps) and len(set(gaps)) > 2
    # With a token it begins anew
    while "a" not in (plan := scheduler.schedule()).num_scheduled_tokens:
        scheduler.update_from_output(plan, answer_of(plan))
    scheduler.update_from_output(plan, answer_of(plan))
    plan = scheduler.schedule()
    assert "a" in plan.num_scheduled_tokens
    leave_out(scheduler, plan, "a")
    plans = [step(scheduler)[0] for _ in range(2)]
    assert "a" in {**plans[0].num_scheduled_tokens, **plans[1].num_scheduled_tokens}


def test_a_step_that_was_planned_ahead_brings_nothing_either() -> None:
    scheduler = scheduler_of(max_steps_in_flight=2)
    add(scheduler, "a", 5)
    first, second = scheduler.schedule(), scheduler.schedule()
    assert second.num_scheduled_tokens == {"a": 1}
    leave_out(scheduler, first, "a")
    assert scheduler.schedule().is_void
    leave_out(scheduler, second, "a")
    plan, outputs = step(scheduler)
    assert plan.scheduled_cached_reqs.num_computed_tokens == [4] and outputs["a", 0].new_token_ids == [7]


def test_one_that_ends_while_it_rests_leaves_nothing() -> None:
    scheduler = scheduler_of(max_steps_in_flight=1)
    add(scheduler, "a", 5)
    leave_out(scheduler, scheduler.schedule(), "a")
    (output,) = scheduler.abort_requests(["a"])
    assert output.finish_reason == FinishReason.ABORT and not scheduler.state.resting
    scheduler.check()


def test_a_grammar_at_fault_refuses_its_own_request_and_its_blocks_stay() -> None:
    scheduler = scheduler_of(max_steps_in_flight=1)
    add(scheduler, "a", [1] * 9, n=2)
    add(scheduler, "b", 3)
    plan = scheduler.schedule()
    answer = answer_of(plan)
    at = answer.req_ids.index("b")
    refused = dict.fromkeys(("a", "a#1"), "takes too long")
    outputs = scheduler.update_from_output(
        plan, ModelRunnerOutput(["b"], [answer.sampled_token_ids[at]], refused=refused)
    )
    scheduler.check()
    ended = [output for output in outputs if output.request_id == "a"]
    assert [output.choice for output in ended] == [0, 1]
    assert all(output.refusal is not None and output.refusal.problem == "takes too long" for output in ended)
    assert [output.new_token_ids for output in outputs if output.request_id == "b"] == [[7]]
    add(scheduler, "c", [1] * 9)
    _, outputs_of_c = step(scheduler)
    assert outputs_of_c["c", 0].num_cached_tokens == 8
