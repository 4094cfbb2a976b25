"""What runs in a step: the gap, the budget, chunks, order, and the plan as a diff."""

from __future__ import annotations

import msgspec
import pytest

from ratoon.core.plan import SchedulerOutput
from tests.unit.scheduling.steps import PRIORITY, add, answer_of, new_ids, scheduler_of, step


def test_a_prompt_runs_and_then_one_token_a_step() -> None:
    scheduler = scheduler_of()
    add(scheduler, "a", 6, max_tokens=3)
    plan, outputs = step(scheduler)
    assert plan.num_scheduled_tokens == {"a": 6} and plan.sampled_req_ids == ["a"]
    assert outputs["a", 0].new_token_ids == [7]
    plan, outputs = step(scheduler, {"a": 8})
    assert plan.num_scheduled_tokens == {"a": 1} and outputs["a", 0].new_token_ids == [8]
    _, outputs = step(scheduler)
    assert outputs["a", 0].finished
    assert not scheduler.has_unfinished_requests()


def test_a_branch_travels_in_full_once_and_then_by_what_changed() -> None:
    scheduler = scheduler_of()
    add(scheduler, "a", [1, 2, 3, 4, 5, 6, 7], seed=3)
    plan, _ = step(scheduler)
    (new,) = plan.scheduled_new_reqs
    assert (new.req_id, new.token_ids, new.num_prompt_tokens) == ("a", [1, 2, 3, 4, 5, 6, 7], 7)
    assert (new.block_ids, new.num_computed_tokens) == (([1, 2],), 0)
    plan, _ = step(scheduler)  # position 7: the last one of the second block
    known = plan.scheduled_cached_reqs
    assert plan.scheduled_new_reqs == []
    assert (known.req_ids, known.num_computed_tokens, known.new_block_ids) == (["a"], [7], [None])
    plan, _ = step(scheduler)
    known = plan.scheduled_cached_reqs
    assert (known.req_ids, known.num_computed_tokens, known.new_block_ids) == (["a"], [8], [([3],)])


def test_the_plan_does_not_change_when_the_branch_grows() -> None:
    scheduler = scheduler_of()
    add(scheduler, "a", [1, 2, 3])
    plan, _ = step(scheduler)
    step(scheduler)
    assert plan.scheduled_new_reqs[0].token_ids == [1, 2, 3]


def test_a_finished_branch_is_named_in_the_next_plan_once_even_if_nothing_runs() -> None:
    scheduler = scheduler_of()
    add(scheduler, "a", 4, max_tokens=1)
    plan, _ = step(scheduler)
    assert plan.finished_req_ids == []
    assert scheduler.has_requests() and not scheduler.has_unfinished_requests()
    plan, _ = step(scheduler)
    assert plan.is_empty and plan.finished_req_ids == ["a"]
    assert not scheduler.has_requests()
    plan, _ = step(scheduler)
    assert plan.finished_req_ids == []


def test_plans_survive_the_wire() -> None:
    scheduler = scheduler_of(max_num_batched_tokens=10, num_blocks=9)
    add(scheduler, "a", 6, n=3, logit_bias={3: 1.0}, max_tokens=9)
    add(scheduler, "b", 7, max_tokens=9)
    kinds = set()
    while scheduler.has_requests():
        plan, _ = step(scheduler)
        assert msgspec.msgpack.decode(msgspec.msgpack.encode(plan), type=SchedulerOutput) == plan
        kinds |= {name for name in plan.__struct_fields__ if getattr(plan, name)}
    assert {"fanout", "block_copies", "preempted_req_ids", "finished_req_ids", "scheduled_new_reqs"} <= kinds


def test_a_long_prompt_runs_in_chunks_and_only_the_last_is_sampled() -> None:
    scheduler = scheduler_of(max_num_batched_tokens=8)
    add(scheduler, "a", 20)
    seen = []
    for _ in range(3):
        plan, outputs = step(scheduler)
        seen.append((plan.num_scheduled_tokens["a"], plan.sampled_req_ids, len(outputs)))
    assert seen == [(8, [], 0), (8, [], 0), (4, ["a"], 1)]


def test_a_chunk_has_its_own_limit_within_the_budget() -> None:
    scheduler = scheduler_of(max_num_batched_tokens=20, max_prefill_chunk=6)
    add(scheduler, "a", 15)
    add(scheduler, "b", 15)
    plan, _ = step(scheduler)
    assert plan.num_scheduled_tokens == {"a": 6, "b": 6}
    assert plan.total_num_scheduled_tokens == 12


def test_decoding_and_prompts_share_a_step_and_its_budget() -> None:
    scheduler = scheduler_of(max_num_batched_tokens=8)
    add(scheduler, "a", 4)
    step(scheduler)
    add(scheduler, "b", 20)
    plan, _ = step(scheduler)
    assert plan.num_scheduled_tokens == {"a": 1, "b": 7}
    assert plan.sampled_req_ids == ["a"]


def test_without_chunks_a_prompt_waits_until_it_fits_whole() -> None:
    scheduler = scheduler_of(max_num_batched_tokens=8, enable_chunked_prefill=False)
    add(scheduler, "a", 5)
    add(scheduler, "b", 4)
    add(scheduler, "c", 1)
    plan, _ = step(scheduler)
    assert plan.num_scheduled_tokens == {"a": 5}, "b does not fit, and c does not overtake it"
    plan, _ = step(scheduler)
    assert plan.num_scheduled_tokens == {"a": 1, "b": 4, "c": 1}


def test_no_more_branches_run_than_there_are_rows() -> None:
    scheduler = scheduler_of(max_num_seqs=2)
    for name in "abc":
        add(scheduler, name, 4, max_tokens=2)
    plan, _ = step(scheduler)
    assert new_ids(plan) == ["a", "b"]
    plan, _ = step(scheduler)
    assert new_ids(plan) == []
    plan, _ = step(scheduler)
    assert new_ids(plan) == ["c"]


def test_priority_decides_who_comes_in_first() -> None:
    scheduler = scheduler_of(max_num_seqs=1, policy=PRIORITY)
    add(scheduler, "low", 4, priority=5, arrival=1.0)
    add(scheduler, "high", 4, priority=1, arrival=2.0)
    plan, _ = step(scheduler)
    assert new_ids(plan) == ["high"]


def test_a_burst_of_tokens_is_a_larger_gap_for_the_next_step() -> None:
    scheduler = scheduler_of()
    add(scheduler, "a", 4)
    plan = scheduler.schedule()
    result = answer_of(plan)
    result.sampled_token_ids = [[1, 2, 3]]
    (output,) = scheduler.update_from_output(plan, result)
    assert output.new_token_ids == [1, 2, 3]
    plan, _ = step(scheduler)
    assert plan.num_scheduled_tokens == {"a": 3}


# ---- prefix cache ----


def test_a_known_prefix_is_not_computed_again_and_the_output_says_so() -> None:
    scheduler = scheduler_of()
    add(scheduler, "a", list(range(10)), max_tokens=1)
    step(scheduler)
    add(scheduler, "b", [*range(8), 50, 51, 52])
    plan, outputs = step(scheduler)
    assert plan.num_scheduled_tokens == {"b": 3}
    assert plan.scheduled_new_reqs[0].num_computed_tokens == 8
    assert outputs["b", 0].num_cached_tokens == 8
    _, outputs = step(scheduler)
    assert outputs["b", 0].num_cached_tokens == 8
    assert (scheduler.stats().prefix_cache.queries, scheduler.stats().prefix_cache.hits) == (21, 8)


def test_two_equal_prompts_in_one_step_share_what_the_first_computes() -> None:
    scheduler = scheduler_of()
    add(scheduler, "a", list(range(9)))
    add(scheduler, "b", list(range(9)))
    plan, _ = step(scheduler)
    assert plan.num_scheduled_tokens == {"a": 9, "b": 1}
    first, second = plan.scheduled_new_reqs
    assert first.block_ids[0][:2] == second.block_ids[0][:2]


def test_tenants_with_different_salts_share_nothing() -> None:
    scheduler = scheduler_of()
    add(scheduler, "a", list(range(9)), salt="one", max_tokens=1)
    step(scheduler)
    add(scheduler, "b", list(range(9)), salt="two")
    plan, _ = step(scheduler)
    assert plan.num_scheduled_tokens == {"b": 9}


def test_the_last_token_of_a_known_prompt_is_always_computed() -> None:
    scheduler = scheduler_of()
    add(scheduler, "a", list(range(8)), max_tokens=1)
    step(scheduler)
    add(scheduler, "b", list(range(8)))
    plan, _ = step(scheduler)
    assert plan.num_scheduled_tokens == {"b": 4}


def test_a_waiting_request_is_counted_as_one_lookup_however_long_it_waits() -> None:
    scheduler = scheduler_of(num_blocks=6)
    add(scheduler, "a", 16, max_tokens=3)
    add(scheduler, "b", 12, max_tokens=3)
    while scheduler.has_requests():
        step(scheduler)
    assert scheduler.stats().prefix_cache.queries == 28


def test_the_cache_can_be_reset_between_requests_only() -> None:
    scheduler = scheduler_of()
    add(scheduler, "a", list(range(8)), max_tokens=2)
    step(scheduler)
    assert not scheduler.reset_prefix_cache()
    step(scheduler)
    assert scheduler.reset_prefix_cache()
    add(scheduler, "b", list(range(8)))
    plan, _ = step(scheduler)
    assert plan.num_scheduled_tokens == {"b": 8}


def test_statistics_describe_the_last_step() -> None:
    scheduler = scheduler_of(max_num_seqs=1, num_blocks=11)
    add(scheduler, "a", 8, max_tokens=4)
    add(scheduler, "b", 8, max_tokens=4)
    step(scheduler)
    stats = scheduler.stats()
    assert (stats.num_running, stats.num_waiting, stats.num_steps, stats.num_scheduled_tokens) == (1, 1, 1, 8)
    assert stats.kv_usage == pytest.approx(0.2)
    step(scheduler)
    assert stats.num_steps == 1, "a snapshot stays what it was"
    assert scheduler.stats().kv_usage == pytest.approx(0.3)


def test_a_long_prompt_does_not_silence_a_branch_that_came_in_after_it() -> None:
    scheduler = scheduler_of(max_num_batched_tokens=8)
    add(scheduler, "short", 2, n=2)
    add(scheduler, "long", 30)
    step(scheduler)
    assert [branch.branch_id for branch in scheduler.state.running] == ["short", "long", "short#1"]
    for _ in range(3):
        plan, _ = step(scheduler)
        assert plan.num_scheduled_tokens == {"short": 1, "short#1": 1, "long": 6}
