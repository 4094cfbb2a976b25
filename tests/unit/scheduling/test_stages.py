"""What the scheduler does for workers that are stages of a pipeline: a branch's next step waits for its token, which
the plan carries, and branches are spread over the steps that run at the same time."""

from __future__ import annotations

from ratoon.core.plan import SchedulerOutput
from ratoon.scheduling.scheduler import Scheduler
from tests.unit.scheduling.steps import add, answer_of, scheduler_of

STAGES = {"max_steps_of_branch": 1, "num_rounds": 2}


def with_prompts(count: int, **settings: object) -> Scheduler:
    """So many requests whose prompts are computed."""
    scheduler = scheduler_of(**(STAGES | settings))
    for number in range(count):
        add(scheduler, f"r{number}", 3)
    plan = scheduler.schedule()
    take(scheduler, plan, 7)
    return scheduler


def take(scheduler: Scheduler, plan: SchedulerOutput, token: int) -> None:
    scheduler.update_from_output(plan, answer_of(plan, dict.fromkeys(plan.req_ids, token)))
    scheduler.check()


def test_steps_in_flight_hold_other_branches_and_as_many_of_them() -> None:
    scheduler = with_prompts(4)
    first, second = scheduler.schedule(), scheduler.schedule()
    assert (first.req_ids, second.req_ids) == (["r0", "r1"], ["r2", "r3"])
    assert scheduler.schedule().is_void, "every branch waits for its token"
    take(scheduler, first, 8)
    third = scheduler.schedule()
    assert third.req_ids == ["r0", "r1"]
    take(scheduler, second, 8)
    assert scheduler.schedule().req_ids == ["r2", "r3"]


def test_a_plan_carries_the_tokens_that_it_computes_behind_prompts() -> None:
    scheduler = with_prompts(2)
    first, second = scheduler.schedule(), scheduler.schedule()
    assert [first.scheduled_cached_reqs.new_token_ids, second.scheduled_cached_reqs.new_token_ids] == [[[7]], [[7]]]
    take(scheduler, first, 9)
    assert scheduler.schedule().scheduled_cached_reqs.new_token_ids == [[9]]


def test_chunks_of_one_prompt_need_no_token_and_follow_each_other() -> None:
    scheduler = scheduler_of(**STAGES, max_num_batched_tokens=8)
    add(scheduler, "long", 20)
    plans = [scheduler.schedule() for _ in range(3)]
    assert [plan.num_scheduled_tokens for plan in plans] == [{"long": 8}, {"long": 8}, {"long": 4}]
    assert [plan.scheduled_cached_reqs.new_token_ids for plan in plans] == [[], [[]], [[]]]
    for plan in plans:
        take(scheduler, plan, 7)


def test_a_plan_behind_a_drain_leaves_no_branch_out() -> None:
    """What needs memory waits until no step is in flight; spreading branches then would make it wait again."""
    scheduler = with_prompts(4)
    first = scheduler.schedule()
    scheduler.state.wants_drain = True
    assert not scheduler.can_plan
    take(scheduler, first, 7)
    assert sorted(scheduler.schedule().req_ids) == ["r0", "r1", "r2", "r3"]


def test_owners_that_share_steps_are_spread_too() -> None:
    scheduler = scheduler_of(**STAGES)
    for number in range(4):
        add(scheduler, f"r{number}", 3, owner=f"owner {number % 2}")
    plan = scheduler.schedule()
    while not plan.is_void:
        take(scheduler, plan, 7)
        plan = scheduler.schedule()
        if len(scheduler.state.running) == 4 and not plan.scheduled_new_reqs:
            break
    second = scheduler.schedule()
    assert len(plan.req_ids) == len(second.req_ids) == 2 and not set(plan.req_ids) & set(second.req_ids)


def test_workers_that_feed_tokens_back_are_told_none() -> None:
    scheduler = scheduler_of(max_steps_in_flight=2)
    add(scheduler, "r", 3)
    take(scheduler, scheduler.schedule(), 7)
    plan, ahead = scheduler.schedule(), scheduler.schedule()
    assert plan.req_ids == ahead.req_ids == ["r"]
    assert plan.scheduled_cached_reqs.new_token_ids == []
