"""n > 1: one prompt, many branches."""

from __future__ import annotations

from ratoon.core.plan import BlockCopy
from ratoon.core.request import FinishReason
from ratoon.scheduling.branch import branch_seed
from tests.unit.scheduling.steps import add, answer_of, new_ids, scheduler_of, step


def test_the_prompt_is_computed_once_and_every_choice_gets_a_token_of_its_own() -> None:
    scheduler = scheduler_of()
    add(scheduler, "a", 6, n=3, seed=5)
    plan, outputs = step(scheduler, {"a": 1, "a#1": 2, "a#2": 3})
    assert plan.num_scheduled_tokens == {"a": 6}
    assert plan.fanout == {"a": [("a#1", branch_seed(5, "a", 1)), ("a#2", branch_seed(5, "a", 2))]}
    assert {choice: output.new_token_ids for (_, choice), output in outputs.items()} == {0: [1], 1: [2], 2: [3]}


def test_choices_travel_in_full_in_the_next_plan_on_shared_blocks() -> None:
    scheduler = scheduler_of()
    add(scheduler, "a", [1, 2, 3, 4, 5, 6], n=3)
    step(scheduler, {"a": 10, "a#1": 11, "a#2": 12})
    plan, _ = step(scheduler)
    assert plan.num_scheduled_tokens == {"a": 1, "a#1": 1, "a#2": 1}
    assert [(new.req_id, new.token_ids, new.num_computed_tokens) for new in plan.scheduled_new_reqs] == [
        ("a#1", [1, 2, 3, 4, 5, 6, 11], 6),
        ("a#2", [1, 2, 3, 4, 5, 6, 12], 6),
    ]
    assert [new.block_ids[0][0] for new in plan.scheduled_new_reqs] == [1, 1]
    # Two of three write to copies, the last holder in place; a new row's table holds its copy already.
    assert plan.block_copies == [BlockCopy("a", 0, 1, 2, 3), BlockCopy("a#1", 0, 1, 2, 4)]
    assert [new.block_ids[0][1] for new in plan.scheduled_new_reqs] == [4, 2]
    assert plan.scheduled_cached_reqs.new_block_ids == [None]


def test_a_prompt_in_chunks_forks_at_its_end_only() -> None:
    """The last chunk is a single token for which memory is there already: the fork must not be missed."""
    scheduler = scheduler_of(max_num_batched_tokens=5)
    add(scheduler, "a", 6, n=2)
    plan, _ = step(scheduler)
    assert plan.fanout == {}
    plan, outputs = step(scheduler)
    assert list(plan.fanout) == ["a"] and len(outputs) == 2
    plan, _ = step(scheduler)
    assert plan.fanout == {}


def test_choices_end_on_their_own() -> None:
    scheduler = scheduler_of()
    add(scheduler, "a", 6, n=3, stop_token_ids=[9], max_tokens=3)
    _, outputs = step(scheduler, {"a": 9, "a#2": 9})
    assert {choice: output.finish_reason for (_, choice), output in outputs.items()} == {
        0: FinishReason.STOP,
        1: None,
        2: FinishReason.STOP,
    }
    plan, _ = step(scheduler)
    assert plan.finished_req_ids == ["a"], "the runner never had a row for the third choice"
    assert plan.block_copies == [], "the last holder needs no copy"
    _, outputs = step(scheduler)
    assert outputs["a", 1].finish_reason == FinishReason.LENGTH
    assert not scheduler.has_unfinished_requests()


def test_choices_without_a_row_wait_without_memory_and_find_the_prompt_cached() -> None:
    scheduler = scheduler_of(max_num_seqs=2)
    add(scheduler, "a", 9, n=4, max_tokens=3)
    add(scheduler, "b", 9, max_tokens=3)
    _, outputs = step(scheduler, {"a#2": 30})
    assert len([key for key in outputs if key[0] == "a"]) == 4
    assert [branch.branch_id for branch in scheduler.state.running] == ["a", "b"]
    assert [branch.branch_id for branch in scheduler.state.waiting] == ["a#1", "a#2", "a#3"]
    step(scheduler)
    step(scheduler)
    plan, _ = step(scheduler)
    assert new_ids(plan) == ["a#1", "a#2"]
    assert [new.num_computed_tokens for new in plan.scheduled_new_reqs] == [8, 8]
    assert plan.scheduled_new_reqs[1].token_ids[9:] == [30]


def test_a_preempted_choice_resumes_alone() -> None:
    scheduler = scheduler_of(num_blocks=7)
    add(scheduler, "a", 6, n=4, max_tokens=12)
    finished = {}
    preempted: list[str] = []
    while scheduler.has_requests():
        plan, outputs = step(scheduler)
        preempted += plan.preempted_req_ids
        assert sum(map(len, plan.fanout.values())) in (0, 3)
        finished |= {key: output for key, output in outputs.items() if output.finished}
    assert preempted and len(finished) == 4
    assert scheduler.kv_cache.usage == 0.0


def test_a_prompt_preempted_before_its_end_forks_when_it_gets_there() -> None:
    scheduler = scheduler_of(num_blocks=7, max_num_batched_tokens=8)
    add(scheduler, "a", 8, max_tokens=16)
    step(scheduler)
    add(scheduler, "b", 20, n=2, max_tokens=2)
    fanouts, preempted = [], []
    while scheduler.has_requests():
        plan, _ = step(scheduler)
        fanouts += list(plan.fanout)
        preempted += plan.preempted_req_ids
    assert preempted and fanouts == ["b"]


def test_aborting_ends_choices_that_do_not_exist_yet() -> None:
    scheduler = scheduler_of()
    add(scheduler, "a", 6, n=3)
    outputs = scheduler.abort_requests(["a"])
    assert [(output.choice, output.finish_reason) for output in outputs] == [(i, FinishReason.ABORT) for i in range(3)]
    assert not scheduler.has_requests(), "the runner never heard of it"


def test_aborting_while_the_fork_is_in_flight_makes_no_orphans() -> None:
    scheduler = scheduler_of()
    add(scheduler, "a", 6, n=3)
    plan = scheduler.schedule()
    assert len(scheduler.abort_requests(["a"])) == 3
    assert scheduler.update_from_output(plan, answer_of(plan)) == []
    scheduler.check()
    assert scheduler.kv_cache.usage == 0.0
    assert scheduler.schedule().finished_req_ids == ["a"]


def test_aborting_reports_only_choices_that_are_not_finished() -> None:
    scheduler = scheduler_of()
    add(scheduler, "a", 6, n=2, stop_token_ids=[9])
    step(scheduler, {"a": 9})
    (output,) = scheduler.abort_requests(["a"])
    assert output.choice == 1
    scheduler.check()


def test_every_choice_reports_the_prompt_tokens_that_were_cached() -> None:
    scheduler = scheduler_of()
    add(scheduler, "a", list(range(9)), max_tokens=1)
    step(scheduler)
    add(scheduler, "b", list(range(9)), n=2)
    _, outputs = step(scheduler)
    assert [outputs["b", choice].num_cached_tokens for choice in (0, 1)] == [8, 8]
