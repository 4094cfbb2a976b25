"""Which sequences hold and share the cross table of an encoder input, and when it is freed or invalid."""

from __future__ import annotations

import pytest

from ratoon.core.request import InheritedFrom
from ratoon.scheduling.scheduler import Scheduler
from tests.unit.scheduling.encoding import (
    add_encoded,
    answer_to,
    continuation,
    document,
    encoded,
    encoder_blocks,
    encoder_scheduler,
    finish,
    new_of,
    step,
)
from tests.unit.scheduling.steps import new_ids


def held_blocks(scheduler: Scheduler) -> int:
    return scheduler.kv_cache.num_usable_blocks - scheduler.kv_cache.num_free_blocks


# ---- the end of a request ----


def test_an_abort_gives_the_table_back_and_leaves_it_findable() -> None:
    scheduler = encoder_scheduler()
    add_encoded(scheduler, "a", 5, document(6))
    step(scheduler)
    scheduler.abort_requests(["a"])
    scheduler.check()
    assert held_blocks(scheduler) == 0
    add_encoded(scheduler, "b", 5, document(6))
    assert step(scheduler)[0].encoder_steps == []


def test_an_abort_while_the_encoder_runs_does_not_take_the_table_from_others() -> None:
    scheduler = encoder_scheduler()
    add_encoded(scheduler, "a", 5, document(6))
    add_encoded(scheduler, "b", 5, document(6))
    scheduler.schedule()
    scheduler.abort_requests(["a"])
    scheduler.check()
    cross = scheduler.state.branches["b"].cross
    assert cross is not None and cross.block_ids == [1, 2]


@pytest.mark.parametrize("when", ["in its first step", "later"])
def test_what_a_failed_request_has_read_is_written_anew_for_the_next(when: str) -> None:
    """The table may not be the cause. Other holders keep it and go on."""
    scheduler = encoder_scheduler()
    add_encoded(scheduler, "a", 5, document(6))
    step(scheduler)
    add_encoded(scheduler, "b", 5, document(6))
    if when == "later":
        step(scheduler)
    plan = scheduler.schedule()
    result = answer_to(plan)
    result.errors["b"] = "NaN"
    scheduler.update_from_output(plan, result)
    scheduler.check()
    add_encoded(scheduler, "c", 5, document(6))
    plan, _ = step(scheduler)
    (blocks,) = encoder_blocks(plan).values()
    assert new_of(plan, "c").cross_block_ids == blocks and set(blocks).isdisjoint([1, 2])
    cross = scheduler.state.branches["a"].cross
    assert cross is not None and cross.block_ids == [1, 2]
    finish(scheduler)
    assert held_blocks(scheduler) == 0


def test_requests_that_are_tried_apart_run_their_encoder_inputs_again() -> None:
    scheduler = encoder_scheduler()
    add_encoded(scheduler, "a", 5, document(6), max_tokens=2)
    add_encoded(scheduler, "b", 5, 3, max_tokens=2)
    plan = scheduler.schedule()
    assert scheduler.step_failed(plan, "no luck") == []
    scheduler.check()
    assert held_blocks(scheduler) == 0
    assert [list(encoder_blocks(step(scheduler)[0])) for _ in range(2)] == [["a"], ["b"]]
    finish(scheduler)


def test_a_branch_that_gives_way_gives_its_table_back_unless_others_hold_it() -> None:
    scheduler = encoder_scheduler(num_blocks=9, caching=False)
    add_encoded(scheduler, "a", 7, document(4), max_tokens=14)
    add_encoded(scheduler, "b", 7, document(4), max_tokens=6)
    add_encoded(scheduler, "c", 3, document(8, number=1), max_tokens=6)
    step(scheduler)  # one block of both, two and two, and three of c: all
    for _ in range(5):
        plan, _ = step(scheduler)
        if plan.preempted_req_ids:
            break
    assert plan.preempted_req_ids == ["c"] and scheduler.state.branches["c"].cross is None
    plans = finish(scheduler)
    (again,) = [plan for plan in plans if "c" in new_ids(plan)]
    assert list(encoder_blocks(again)) == ["c"] and again.num_scheduled_tokens["c"] >= 4
    assert scheduler.stats().num_encoder_runs == 3


# ---- choices and beams ----


def test_all_choices_read_one_table_which_goes_with_the_last_of_them() -> None:
    scheduler = encoder_scheduler()
    add_encoded(scheduler, "a", 4, document(6), n=3, max_tokens=4)
    plan, _ = step(scheduler)
    assert encoder_blocks(plan) == {"a": [1, 2]} and held_blocks(scheduler) == 2 + 1
    plan, _ = step(scheduler)
    assert [new.cross_block_ids for new in plan.scheduled_new_reqs] == [[1, 2], [1, 2]]
    assert [new.num_encoder_positions for new in plan.scheduled_new_reqs] == [6, 6]
    scheduler.abort_requests(["a#0", "a#1"])
    scheduler.check()
    (branch,) = scheduler.state.running
    assert branch.branch_id == "a#2" and branch.cross is not None
    assert sum(len(plan.encoder_steps) for plan in finish(scheduler)) == 0 and held_blocks(scheduler) == 0


def test_choices_that_there_is_no_row_for_find_the_table_when_they_come_in() -> None:
    scheduler = encoder_scheduler(max_num_seqs=1)
    add_encoded(scheduler, "a", 4, document(6), n=3, max_tokens=2)
    plans = finish(scheduler)
    assert [name for plan in plans for name in new_ids(plan)] == ["a", "a#1", "a#2"]
    assert sum(len(plan.encoder_steps) for plan in plans) == 1


def test_beams_share_the_table_of_their_trunk() -> None:
    scheduler = encoder_scheduler()
    add_encoded(scheduler, "s", 4, document(6), width=3, max_tokens=4)
    plan, _ = step(scheduler)
    assert encoder_blocks(plan) == {"s": [1, 2]}
    step(scheduler)
    assert held_blocks(scheduler) == 2 + 1 + 3
    assert sum(len(plan.encoder_steps) for plan in finish(scheduler)) == 0 and held_blocks(scheduler) == 0


def test_beams_that_lost_their_memory_find_the_table_or_have_it_written_again() -> None:
    scheduler = encoder_scheduler(num_blocks=13, caching=False)
    add_encoded(scheduler, "a", 7, 4, max_tokens=17)
    add_encoded(scheduler, "s", 4, 8, width=3, max_tokens=7)
    plans = finish(scheduler)
    runs = [name for plan in plans for name in encoder_blocks(plan)]
    assert scheduler.stats().num_preemptions > 0 and runs == ["a", "s", "s"]


# ---- leases and continuations ----


def test_a_lease_keeps_the_table_and_a_continuation_inherits_it_without_a_run() -> None:
    scheduler = encoder_scheduler(num_blocks=13)
    parent = encoded("a", 6, document(6), retain_kv=1000.0, max_tokens=2)
    scheduler.add_request(parent)
    finish(scheduler)
    assert held_blocks(scheduler) == 2 + 2 and scheduler.leases.num_blocks == 4
    add_encoded(scheduler, "b", 20, 4, max_tokens=4)  # takes every block that is not held
    finish(scheduler)
    scheduler.add_request(continuation("c", parent, [7, 7], [5, 5], max_tokens=2))
    plan, outputs = step(scheduler)
    assert plan.encoder_steps == [] and plan.num_scheduled_tokens == {"c": 3}
    new = new_of(plan, "c")
    assert (new.cross_block_ids, new.num_encoder_positions, new.num_computed_tokens) == ([1, 2], 6, 7)
    assert outputs["c"].inherited_from == InheritedFrom.LEASE
    finish(scheduler)
    scheduler.tick(2000.0)
    scheduler.check()
    assert held_blocks(scheduler) == 0


def test_a_continuation_of_a_parent_that_runs_shares_its_table() -> None:
    scheduler = encoder_scheduler()
    parent = encoded("a", 6, document(6), max_tokens=20)
    scheduler.add_request(parent)
    for _ in range(3):
        step(scheduler)
    scheduler.add_request(continuation("b", parent, [7, 7], [5], max_tokens=2))
    plan, outputs = step(scheduler)
    assert plan.encoder_steps == [] and new_of(plan, "b").cross_block_ids == [1, 2]
    assert outputs["b"].inherited_from == InheritedFrom.LEASE


def test_a_continuation_whose_lease_is_gone_runs_the_encoder_where_the_table_is_gone_too() -> None:
    scheduler = encoder_scheduler(num_blocks=9)
    parent = encoded("a", 6, document(6), retain_kv=1000.0, max_tokens=2)
    scheduler.add_request(parent)
    finish(scheduler)
    add_encoded(scheduler, "b", 24, 4, max_tokens=4)
    finish(scheduler)
    assert len(scheduler.leases) == 0
    scheduler.add_request(continuation("c", parent, [7, 7], [5], max_tokens=2))
    plan, outputs = step(scheduler)
    assert list(encoder_blocks(plan)) == ["c"] and plan.num_scheduled_tokens == {"c": 9}
    assert outputs["c"].inherited_from == InheritedFrom.RECOMPUTED


def test_the_best_texts_of_a_search_keep_the_table_with_their_leases() -> None:
    scheduler = encoder_scheduler()
    search = encoded("s", 4, document(6), retain_kv=1000.0, width=2, max_tokens=3)
    scheduler.add_request(search)
    finish(scheduler)
    kept = scheduler.leases.find("s")
    assert kept is not None and kept.cross is not None and kept.cross.block_ids == [1, 2]
    scheduler.add_request(continuation("c", search, kept.token_ids[4:], [5], max_tokens=1))
    assert step(scheduler)[0].encoder_steps == []
