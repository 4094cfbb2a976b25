"""Several owners in one scheduler: admission order, preemption, eviction of leases, and that no owner starves."""

from __future__ import annotations

import pytest

from ratoon.scheduling.scheduler import Scheduler
from ratoon.scheduling.shares import OwnerShares, fair_split
from tests.unit.scheduling.steps import PRIORITY, add, new_ids, request_of, scheduler_of, step


def finish(scheduler: Scheduler, most: int = 500) -> list[str]:
    """Run to the end. The branches in the order in which they came in."""
    order = []
    for _ in range(most):
        if not scheduler.has_unfinished_requests():
            return order
        order += new_ids(step(scheduler)[0])
    raise AssertionError("it does not end")


def lease(scheduler: Scheduler, request_id: str, owner: str, prompt: int = 7) -> None:
    request = request_of(request_id, prompt, owner=owner, max_tokens=1)
    request.retain_kv = 1000.0
    scheduler.add_request(request)
    while scheduler.has_unfinished_requests():
        step(scheduler)


# ---- the counters ----


def test_who_comes_back_starts_level_with_the_others() -> None:
    shares = OwnerShares()
    for owner in ("ada", "bob"):
        shares.join(owner)
    shares.charge("ada", 100)
    shares.charge("bob", 70)
    shares.join("eve")
    assert shares.served("eve") == 70
    shares.leave("ada")
    shares.join("ada")
    assert shares.served("ada") == 100, "leaving does not pay a debt"
    for owner in ("ada", "bob", "eve"):
        shares.leave(owner)
    assert not shares.contended and shares.served("ada") == 0
    shares.check([])


@pytest.mark.parametrize(
    ("budget", "wants", "given"),
    [
        (10, {"a": 100, "b": 100}, {"a": 5, "b": 5}),
        (10, {"a": 100, "b": 2}, {"a": 8, "b": 2}),
        (10, {"a": 3, "b": 2}, {"a": 3, "b": 2}),
        (2, {"a": 9, "b": 9, "c": 9}, {"a": 0, "b": 1, "c": 1}),
    ],
)
def test_a_budget_is_split_fairly(budget: int, wants: dict, given: dict) -> None:
    assert fair_split(budget, wants) == given


# ---- the order of those that wait ----


def test_a_single_request_does_not_wait_behind_another_owners_queue() -> None:
    scheduler = scheduler_of(max_num_seqs=2, num_blocks=1000)
    for number in range(20):
        add(scheduler, f"a{number}", 8, max_tokens=4, owner="ada")
    step(scheduler)
    add(scheduler, "b", 8, max_tokens=4, owner="bob")
    order = finish(scheduler)
    assert order[0] == "b", "it takes a row beyond the other's share at once"
    assert sorted(set(order)) == sorted({"b", *(f"a{number}" for number in range(1, 20))})


def test_owners_take_turns_by_the_tokens_that_they_got() -> None:
    scheduler = scheduler_of(max_num_seqs=1, num_blocks=1000)
    for number in range(4):
        add(scheduler, f"a{number}", 16, max_tokens=2, owner="ada")
    for number in range(8):
        add(scheduler, f"b{number}", 4, max_tokens=2, owner="bob")
    order = finish(scheduler)
    assert [name for name in order if name[0] == "a"] == ["a0", "a1", "a2", "a3"], "an owner's own keep their order"
    assert order.index("b3") < order.index("a2"), "short ones get in oftener"


def test_without_owners_the_order_is_that_of_arrival() -> None:
    scheduler = scheduler_of(max_num_seqs=1, num_blocks=1000)
    names = [f"r{number}" for number in range(6)]
    for name in names:
        add(scheduler, name, 8, max_tokens=2)
    assert finish(scheduler) == names


def test_priorities_go_before_shares() -> None:
    scheduler = scheduler_of(max_num_seqs=1, num_blocks=1000, policy=PRIORITY)
    for number in range(3):
        add(scheduler, f"a{number}", 8, max_tokens=2, owner="ada", priority=0)
    add(scheduler, "b", 8, max_tokens=2, owner="bob", priority=1)
    assert finish(scheduler) == ["a0", "a1", "a2", "b"]


# ---- what runs ----


def test_rows_beyond_an_owners_share_are_given_to_another_that_waits() -> None:
    scheduler = scheduler_of(max_num_seqs=4, num_blocks=1000)
    for number in range(4):
        add(scheduler, f"a{number}", 8, owner="ada")
    step(scheduler)
    for number in range(4):
        add(scheduler, f"b{number}", 8, owner="bob")
    preempted, come_in = [], []
    for _ in range(8):
        plan, _ = step(scheduler)
        preempted += plan.preempted_req_ids
        come_in += new_ids(plan)
    assert preempted == ["a3", "a2"] and come_in == ["b0", "b1"], "each has its share, and nothing more changes hands"


def test_memory_beyond_an_owners_share_is_given_to_another_that_waits() -> None:
    scheduler = scheduler_of(num_blocks=13, caching=False, max_model_len=40)
    for number in range(3):
        add(scheduler, f"a{number}", 12, max_tokens=4, owner="ada")
    step(scheduler)
    add(scheduler, "b", 12, max_tokens=4, owner="bob")
    plan, _ = step(scheduler)
    assert plan.preempted_req_ids == ["a2"] and new_ids(plan) == ["b"]
    finish(scheduler)


def test_a_branch_whose_blocks_another_was_just_admitted_to_is_not_taken() -> None:
    """The blocks are written in this step, or never."""
    prompt = list(range(100, 124))
    scheduler = scheduler_of(max_num_seqs=3, max_prefill_chunk=8)
    add(scheduler, "a0", 4, owner="ada")
    add(scheduler, "a1", prompt, owner="ada")
    step(scheduler)
    add(scheduler, "b", prompt, owner="bob")
    add(scheduler, "c", 4, owner="cleo")
    plan, _ = step(scheduler)
    (new,) = [new for new in plan.scheduled_new_reqs if new.req_id == "b"]
    assert new.num_computed_tokens > 8, "it reads what a1 writes in this step"
    assert "a1" in plan.num_scheduled_tokens and "a1" not in plan.preempted_req_ids
    finish(scheduler)


def test_the_first_branch_of_an_owner_is_not_taken_for_another() -> None:
    """However large it is: it would never end."""
    scheduler = scheduler_of(num_blocks=11, caching=False, max_model_len=40)
    add(scheduler, "long", 30, max_tokens=9, owner="ada")
    step(scheduler)
    add(scheduler, "b", 12, max_tokens=4, owner="bob")
    order, preempted = [], []
    while scheduler.has_unfinished_requests():
        plan, _ = step(scheduler)
        order += new_ids(plan)
        preempted += plan.preempted_req_ids
    assert order == ["b"] and not preempted


def test_a_long_prompt_leaves_part_of_each_step_to_another_owner() -> None:
    scheduler = scheduler_of(max_num_batched_tokens=16, num_blocks=1000, max_model_len=2000)
    add(scheduler, "a", 800, max_tokens=1, owner="ada")
    step(scheduler)
    add(scheduler, "b", 24, max_tokens=1, owner="bob")
    plan, _ = step(scheduler)
    assert plan.num_scheduled_tokens == {"a": 8, "b": 8}
    plan, _ = step(scheduler)
    assert plan.num_scheduled_tokens == {"a": 8, "b": 8}


# ---- leases ----


def test_leases_of_the_owner_that_holds_most_make_room() -> None:
    scheduler = scheduler_of(num_blocks=41)  # half of them, 20, for leases: ten of two blocks each
    for number in range(2):
        lease(scheduler, f"b{number}", "bob")
    for number in range(40):
        lease(scheduler, f"a{number}", "ada")
    assert all(scheduler.leases.find(f"b{number}") for number in range(2))
    assert [name for name in (f"a{number}" for number in range(40)) if scheduler.leases.find(name)] == [
        f"a{number}" for number in range(32, 40)
    ]


def test_requests_beyond_their_share_do_not_take_another_owners_leases() -> None:
    scheduler = scheduler_of(num_blocks=21, caching=False, max_model_len=60)
    for number in range(3):
        lease(scheduler, f"b{number}", "bob")
    assert scheduler.leases.num_blocks == 6
    for number in range(12):
        add(scheduler, f"a{number}", 12, max_tokens=8, owner="ada")
    finish(scheduler)
    assert all(scheduler.leases.find(f"b{number}") for number in range(3))


def test_one_request_gets_all_the_memory_it_needs_whoever_has_leases() -> None:
    scheduler = scheduler_of(num_blocks=21, caching=False, max_model_len=80)
    for number in range(5):
        lease(scheduler, f"b{number}", "bob")
    add(scheduler, "a", 60, max_tokens=18, owner="ada")
    assert finish(scheduler) == ["a"]
