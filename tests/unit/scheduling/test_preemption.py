"""Which branch is preempted when memory is short, and how it resumes."""

from __future__ import annotations

from ratoon.core.plan import SchedulerOutput
from ratoon.memory.sequence import TokenSequence
from ratoon.scheduling.scheduler import Scheduler
from tests.unit.scheduling.steps import PRIORITY, add, new_ids, scheduler_of, step


def run_until_preemption(scheduler: Scheduler) -> SchedulerOutput:
    for _ in range(50):
        plan, _ = step(scheduler)
        if plan.preempted_req_ids:
            return plan
    raise AssertionError("no branch was preempted")


def test_the_latest_arrival_gives_way_and_the_first_goes_on() -> None:
    scheduler = scheduler_of(num_blocks=7)
    for name in "abc":
        add(scheduler, name, 7, max_tokens=10)
    step(scheduler)
    step(scheduler)  # all six blocks are full now
    plan, outputs = step(scheduler)
    assert plan.preempted_req_ids == ["c"]
    assert set(plan.num_scheduled_tokens) == {"a", "b"}
    assert set(outputs) == {("a", 0), ("b", 0)}
    assert scheduler.stats().num_preemptions == 1


def test_the_least_urgent_gives_way_whenever_it_came() -> None:
    scheduler = scheduler_of(num_blocks=7, policy=PRIORITY)
    add(scheduler, "b", 7, max_tokens=10, priority=1, arrival=1.0)
    add(scheduler, "c", 7, max_tokens=10, priority=0, arrival=2.0)
    step(scheduler)
    add(scheduler, "a", 6, max_tokens=10, priority=3, arrival=0.0)
    plan = run_until_preemption(scheduler)
    assert plan.preempted_req_ids == ["a"]


def test_a_branch_already_in_the_plan_is_taken_out_again_with_its_tokens() -> None:
    """a comes first in the batch and b needs memory: a, the least urgent, leaves the plan it was in."""
    scheduler = scheduler_of(num_blocks=6, policy=PRIORITY, max_num_batched_tokens=20)
    add(scheduler, "a", 5, max_tokens=10, priority=9)
    step(scheduler)
    add(scheduler, "b", 11, max_tokens=8, priority=0)
    step(scheduler)
    plan, outputs = step(scheduler)  # b fills its third block, a goes on in its second
    assert set(plan.num_scheduled_tokens) == {"a", "b"}
    plan, outputs = step(scheduler)
    assert plan.preempted_req_ids == ["a"]
    assert plan.num_scheduled_tokens == {"b": 1} and plan.total_num_scheduled_tokens == 1
    assert plan.sampled_req_ids == ["b"] and plan.scheduled_cached_reqs.req_ids == ["b"]
    assert set(outputs) == {("b", 0)}


def test_blocks_named_in_a_plan_that_their_branch_left_are_not_found() -> None:
    """a's last chunk is in the plan, with two blocks named in advance, when b needs memory and a must leave."""
    scheduler = scheduler_of(num_blocks=8, policy=PRIORITY, max_prefill_chunk=8)
    prompt = list(range(24))
    add(scheduler, "a", prompt, max_tokens=1, priority=9)
    step(scheduler)
    add(scheduler, "b", 4, max_tokens=4, priority=0)
    step(scheduler)
    plan, _ = step(scheduler)
    assert plan.preempted_req_ids == ["a"] and plan.num_scheduled_tokens == {"b": 1}
    assert scheduler.kv_cache.get_computed_blocks(TokenSequence("c", prompt))[1] == 16


def test_a_copy_for_a_branch_that_left_the_plan_is_not_carried_out() -> None:
    """The choices of a share a partial block. One of them gets a copy; then b, more urgent, takes its memory."""
    scheduler = scheduler_of(num_blocks=5, policy=PRIORITY)
    add(scheduler, "a", 6, max_tokens=3, n=2, priority=9)
    add(scheduler, "b", 4, max_tokens=5, priority=0)
    step(scheduler)
    scheduler.state.running.reverse()  # the order in a batch may be any: a#1, b, a
    plan = scheduler.schedule()
    assert set(plan.num_scheduled_tokens) == {"a", "b"}
    assert plan.block_copies == [] and plan.scheduled_new_reqs == []
    scheduler.check()


def test_a_preempted_branch_comes_back_in_full_with_its_output() -> None:
    scheduler = scheduler_of(num_blocks=7, caching=False)
    for name in "abc":
        add(scheduler, name, 7, max_tokens=4)
    step(scheduler, {"c": 21})
    step(scheduler, {"c": 22})
    plan, _ = step(scheduler)
    assert plan.preempted_req_ids == ["c"]
    while not plan.scheduled_new_reqs:
        plan, outputs = step(scheduler)
    (again,) = plan.scheduled_new_reqs
    assert again.req_id == "c" and again.num_prompt_tokens == 7
    assert again.token_ids[7:] == [21, 22] and again.num_computed_tokens == 0
    assert plan.num_scheduled_tokens["c"] == 9
    assert outputs["c", 0].new_token_ids == [7], "the output goes on where it was"


def test_a_preempted_branch_finds_its_own_blocks_again_and_does_not_report_them() -> None:
    scheduler = scheduler_of(num_blocks=8)
    for name in "abc":
        add(scheduler, name, 7, max_tokens=10)
    step(scheduler)
    plan, outputs = step(scheduler)
    while "b" not in new_ids(plan):
        plan, outputs = step(scheduler)
    assert plan.scheduled_new_reqs[0].num_computed_tokens == 12
    assert outputs["b", 0].num_cached_tokens == 0, "cached prompt tokens are those of the first time"
    assert scheduler.stats().prefix_cache.queries == 21, "and so are lookups"


def test_nobody_comes_in_while_somebody_is_preempted() -> None:
    scheduler = scheduler_of(num_blocks=7)
    for name in "abc":
        add(scheduler, name, 7, max_tokens=10)
    step(scheduler)
    step(scheduler)
    add(scheduler, "d", 1, max_tokens=1)
    plan, _ = step(scheduler)
    assert plan.preempted_req_ids == ["c"] and new_ids(plan) == []


def test_the_preempted_resume_before_those_who_came_later() -> None:
    scheduler = scheduler_of(num_blocks=7, caching=False)
    for name in "abcd":
        add(scheduler, name, 7, max_tokens=10)
    order = []
    while scheduler.has_requests():
        plan, _ = step(scheduler)
        order += new_ids(plan)
    assert order[:3] == ["a", "b", "c"]
    assert order.count("c") > 1 and order.index("d") > order.index("c", 3)


def test_without_chunks_a_preempted_branch_longer_than_the_budget_still_comes_back() -> None:
    scheduler = scheduler_of(num_blocks=11, max_num_batched_tokens=8, enable_chunked_prefill=False, caching=False)
    add(scheduler, "a", 3, max_tokens=30)
    add(scheduler, "b", 3, max_tokens=30)
    finished = set()
    for _ in range(300):
        _, outputs = step(scheduler)
        finished |= {key for key, output in outputs.items() if output.finished}
    assert finished == {("a", 0), ("b", 0)}
    assert scheduler.stats().num_preemptions > 0


def test_a_single_branch_that_fills_the_pool_ends() -> None:
    scheduler = scheduler_of(num_blocks=6)
    add(scheduler, "a", 10, max_tokens=10)
    outputs = {}
    while scheduler.has_unfinished_requests():
        _, outputs = step(scheduler)
    assert str(outputs["a", 0].finish_reason) == "length"
    assert scheduler.stats().num_preemptions == 0


def test_others_give_way_to_a_request_on_trial_however_late_it_came() -> None:
    """They do not run until it gets a token, so it would wait for their memory forever."""
    scheduler = scheduler_of(num_blocks=9, caching=False, max_prefill_chunk=4)
    add(scheduler, "a", 16, max_tokens=6)
    for _ in range(4):
        step(scheduler)
    add(scheduler, "b", 16, max_tokens=2)
    plan = scheduler.schedule()
    assert plan.num_scheduled_tokens == {"a": 1, "b": 4}
    assert scheduler.step_failed(plan, "no luck") == []  # the step failed
    for _ in range(30):
        plan, _ = step(scheduler)
        assert not plan.is_empty or not scheduler.has_unfinished_requests()
    assert not scheduler.has_unfinished_requests()
