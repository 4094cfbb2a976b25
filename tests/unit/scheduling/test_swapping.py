"""Preempted branches that are swapped out and in: what is not computed again, and what is."""

from __future__ import annotations

import msgspec
import pytest

from ratoon.core.kv import SwapCosts
from ratoon.core.outputs import TransferReport
from ratoon.core.params import PoolingParams
from ratoon.core.plan import BlockTransfer, SchedulerOutput
from ratoon.scheduling.scheduler import Scheduler
from tests.unit.scheduling.encoding import (
    add_encoded,
    answer_to,
    document,
    encoder_blocks,
    encoder_scheduler,
    finish,
    new_of,
    step,
)
from tests.unit.scheduling.reading import extractions_of, read
from tests.unit.scheduling.steps import PRIORITY, add, new_ids, request_of


def short_of_memory(num_host_blocks: int = 10, **config: object) -> Scheduler:
    """Six blocks, which three branches fill: when the first needs another, the last is preempted."""
    return encoder_scheduler(7, num_host_blocks, cross=None, **config)


def preempt(scheduler: Scheduler) -> SchedulerOutput:
    """Up to the step in which a branch is preempted."""
    for _ in range(50):
        plan, _ = step(scheduler)
        if plan.preempted_req_ids:
            return plan
    raise AssertionError("no branch was preempted")


def preempt_last(scheduler: Scheduler, **params: object) -> SchedulerOutput:
    for name in "abc":
        add(scheduler, name, 7, max_tokens=6, **params)
    plan = preempt(scheduler)
    assert plan.preempted_req_ids == ["c"]
    return plan


def until_back(scheduler: Scheduler, name: str = "c") -> SchedulerOutput:
    """The plan with which a branch runs again, and in its `loads` all that was loaded before."""
    loads: list[BlockTransfer] = []
    for _ in range(50):
        plan, _ = step(scheduler)
        loads += plan.loads
        if name in new_ids(plan):
            return msgspec.structs.replace(plan, loads=loads)
    raise AssertionError(f"{name} does not come back")


def loaded_blocks(plan: SchedulerOutput) -> list[int]:
    return [load.block for load in plan.loads]


# ---- there and back ----


def test_a_branch_that_gives_way_goes_to_the_host_and_comes_back_as_it_was() -> None:
    scheduler = short_of_memory(caching=False)
    plan = preempt_last(scheduler)
    branch = scheduler.state.branches["c"]
    assert plan.stores == [BlockTransfer(5, 1), BlockTransfer(6, 2)] and plan.loads == []
    assert scheduler.kv_cache.is_swapped(branch) and branch.block_tables == []
    assert scheduler.kv_cache.num_free_slots == 8
    plan = until_back(scheduler)
    new = new_of(plan, "c")
    assert (new.num_computed_tokens, len(new.token_ids), plan.num_scheduled_tokens["c"]) == (8, 9, 1)
    assert [load.slot for load in plan.loads] == [1, 2]
    assert loaded_blocks(plan) == new.block_ids[0][:2] and len(new.block_ids[0]) == 3
    assert plan.stores == [] and scheduler.kv_cache.num_free_slots == 10


def test_nothing_is_computed_twice() -> None:
    scheduler = short_of_memory(caching=False)
    for name in "abc":
        add(scheduler, name, 7, max_tokens=10)
    plans = finish(scheduler)
    assert scheduler.stats().num_preemptions > 0
    assert sum(plan.total_num_scheduled_tokens for plan in plans) == 3 * (7 + 10 - 1)


def test_without_room_for_all_its_blocks_on_the_host_it_is_computed_again() -> None:
    scheduler = short_of_memory(num_host_blocks=1, caching=False)
    plan = preempt_last(scheduler)
    assert plan.stores == [] and not scheduler.kv_cache.is_swapped(scheduler.state.branches["c"])
    plan = until_back(scheduler)
    assert new_of(plan, "c").num_computed_tokens == 0 and plan.num_scheduled_tokens["c"] == 9
    assert scheduler.kv_cache.num_free_slots == 1


def test_one_that_still_finds_no_room_waits_on_the_host() -> None:
    scheduler = short_of_memory(caching=False)
    preempt_last(scheduler)
    for _ in range(2):
        plan, _ = step(scheduler)
        assert plan.loads == plan.stores == [] and new_ids(plan) == []
        assert scheduler.kv_cache.num_free_slots == 8


def test_choices_of_a_request_come_back_each_with_its_own_tokens() -> None:
    scheduler = encoder_scheduler(5, 10, cross=None, caching=False)
    add(scheduler, "a", 3, n=3, max_tokens=9)
    plans = finish(scheduler)
    assert scheduler.stats().num_preemptions > 0 and any(plan.loads for plan in plans)
    # The prompt once, and of each choice all tokens but the last
    assert sum(plan.total_num_scheduled_tokens for plan in plans) == 3 + 3 * 8


def test_a_prompt_goes_on_where_it_was_and_its_logprobs_come_each_once() -> None:
    scheduler = encoder_scheduler(8, 10, cross=None, policy=PRIORITY, max_prefill_chunk=8, caching=False)
    request = request_of("a", 24, max_tokens=1, priority=9)
    request.params.prompt_logprobs = 0
    scheduler.add_request(request)
    step(scheduler)
    add(scheduler, "b", 4, max_tokens=4, priority=0)
    step(scheduler)
    plan = preempt(scheduler)
    assert plan.preempted_req_ids == ["a"] and len(plan.stores) == 4
    plan = until_back(scheduler, "a")
    assert new_of(plan, "a").num_computed_tokens == 16 and plan.num_scheduled_tokens["a"] == 8


# ---- by cost ----


@pytest.mark.parametrize(
    ("block", "token", "is_swapped"),
    [(1.0, 1.0, True), (4.0, 1.0, True), (4.1, 1.0, False), (1e-5, 1e-6, False), (7e-5, 2e-5, True)],
)
def test_the_cheaper_way_is_taken(block: float, token: float, is_swapped: bool) -> None:
    """Two blocks, with eight tokens that were computed."""
    scheduler = short_of_memory(caching=False, swap_costs=SwapCosts(block, token))
    plan = preempt_last(scheduler)
    assert bool(plan.stores) == is_swapped
    assert new_of(until_back(scheduler), "c").num_computed_tokens == (8 if is_swapped else 0)
    finish(scheduler)
    assert scheduler.kv_cache.num_free_slots == 10


@pytest.mark.parametrize("caching", [False, True])
def test_tokens_that_others_hold_too_are_not_computed_again_and_do_not_count(caching: bool) -> None:
    """Of two choices of a request, one is preempted: the first block of three is the other's too."""
    scheduler = encoder_scheduler(6, 10, cross=None, caching=caching, swap_costs=SwapCosts(3.0, 1.0))
    add(scheduler, "a", 6, n=2, max_tokens=12)
    plan = preempt(scheduler)
    assert bool(plan.stores) == (not caching), "12 tokens and three blocks, or 8 tokens and three blocks"
    finish(scheduler)


@pytest.mark.parametrize(("block", "is_swapped"), [(4.0, True), (4.1, False)])
def test_a_search_counts_with_all_its_beams(block: float, is_swapped: bool) -> None:
    """Four blocks, and the cross table; four tokens of the prompt, and of three beams four each."""
    scheduler = encoder_scheduler(11, 50, caching=False, swap_costs=SwapCosts(block, 1.0))
    add_encoded(scheduler, "a", 7, 4, max_tokens=17)
    add_encoded(scheduler, "s", 4, 4, width=3, max_tokens=6)
    plan = preempt(scheduler)
    assert plan.preempted_req_ids == ["s"] and bool(plan.stores) == is_swapped
    finish(scheduler)


# ---- with encoder inputs ----


def test_a_cross_table_goes_along_and_comes_back_without_the_encoder() -> None:
    scheduler = encoder_scheduler(10, 10, caching=False)
    add_encoded(scheduler, "a", 7, 4, max_tokens=10)
    add_encoded(scheduler, "b", 7, 8, max_tokens=10)
    plan = preempt(scheduler)
    assert plan.preempted_req_ids == ["b"]
    assert len(plan.stores) == len(scheduler.state.branches["b"].token_ids) // 4 + 2
    plan = until_back(scheduler, "b")
    new = new_of(plan, "b")
    assert plan.encoder_steps == [] and plan.num_scheduled_tokens["b"] == 1
    restored = set(loaded_blocks(plan))
    assert restored == {*new.cross_block_ids, *new.block_ids[0][: len(restored) - 2]}
    assert scheduler.stats().num_encoder_runs == 2


def test_a_table_that_somebody_else_holds_stays_where_it_is() -> None:
    scheduler = encoder_scheduler(8, 10)
    add_encoded(scheduler, "a", 7, document(6), max_tokens=10)
    add_encoded(scheduler, "b", 7, document(6), max_tokens=10)
    plan = preempt(scheduler)
    table = scheduler.state.branches["a"].cross
    assert plan.preempted_req_ids == ["b"] and table is not None
    assert {store.block for store in plan.stores}.isdisjoint(table.block_ids)
    plan = until_back(scheduler, "b")
    assert plan.encoder_steps == [] and scheduler.stats().num_encoder_runs == 1


def test_who_comes_with_the_input_of_a_swapped_branch_has_its_table_brought_back() -> None:
    scheduler = encoder_scheduler(10, 10, caching=False, policy=PRIORITY)
    add_encoded(scheduler, "a", 7, 4, max_tokens=10, priority=1)
    add_encoded(scheduler, "b", 7, document(8), max_tokens=10, priority=2)
    preempt(scheduler)
    add_encoded(scheduler, "c", 2, document(8), max_tokens=1, priority=0)
    plan = until_back(scheduler, "c")
    assert plan.encoder_steps == [] and encoder_blocks(plan) == {}
    assert loaded_blocks(plan) == new_of(plan, "c").cross_block_ids
    finish(scheduler)
    assert scheduler.stats().num_encoder_runs == 2 and scheduler.kv_cache.num_free_slots == 10


def test_leases_do_not_go_for_one_that_could_not_come_back_all_the_same() -> None:
    scheduler = encoder_scheduler(12, 20, caching=False, policy=PRIORITY, lease_fraction=1.0)
    add_encoded(scheduler, "a", 7, 4, max_tokens=20, priority=1)
    add_encoded(scheduler, "b", 7, 16, max_tokens=20, priority=2)
    assert preempt(scheduler).preempted_req_ids == ["b"]  # with three blocks, and four of its table
    add_encoded(scheduler, "kept", 4, 4, max_tokens=1, priority=0, retain_kv=1000.0)
    until_back(scheduler, "kept")
    assert (scheduler.kv_cache.num_free_blocks, scheduler.leases.num_reclaimable_blocks()) == (4, 2)
    step(scheduler)
    assert len(scheduler.leases) == 1
    finish(scheduler)


# ---- beam searches ----


def preempt_search(num_host_blocks: int) -> tuple[Scheduler, SchedulerOutput]:
    """A search that has three beams with four tokens behind its prompt, three of them computed, when it is
    preempted."""
    scheduler = encoder_scheduler(11, num_host_blocks, caching=False)
    add_encoded(scheduler, "a", 7, 4, max_tokens=17)
    add_encoded(scheduler, "s", 4, 4, width=3, max_tokens=6)
    plan = preempt(scheduler)
    assert plan.preempted_req_ids == ["s"]
    return scheduler, plan


def test_beams_go_on_where_they_were_without_a_token_computed_again() -> None:
    scheduler, plan = preempt_search(50)
    (search,) = (trunk.request.task for trunk in scheduler.state.all_or_none.values())
    num_computed = search.search.num_tokens - 1
    assert len(plan.stores) == 1 + 3 + 1, "of the prompt, of each beam and of the cross table"
    assert scheduler.state.branches["s"].block_tables == [] and search.held() == []
    plan = until_back(scheduler, "s")
    new, (step_back,) = new_of(plan, "s"), plan.beam_steps
    assert new.num_computed_tokens == 4 and "s" not in plan.num_scheduled_tokens
    assert (step_back.num_tokens, step_back.num_computed_tokens) == (1, 4 + num_computed)
    assert step_back.num_restored_tokens == num_computed and step_back.num_candidates > 0
    assert step_back.parents == [0, 0, 0] and len(step_back.token_ids) == 3 * (num_computed + 1)
    restored = set(loaded_blocks(plan))
    assert restored >= {*new.block_ids[0], *new.cross_block_ids} and len(restored) == 5
    assert restored.intersection(step_back.block_ids[0]), "tables travel in full"
    assert step_back.first_columns == [1]
    finish(scheduler)
    assert scheduler.kv_cache.num_free_slots == 50 and scheduler.stats().num_encoder_runs == 2


def test_a_search_whose_cross_table_is_gone_runs_the_encoder_again_and_no_other_token() -> None:
    scheduler, _ = preempt_search(50)
    saved = scheduler.kv_cache._saved.find(scheduler.state.branches["s"])
    assert saved is not None and scheduler.kv_cache.store.tier is not None
    for slot in saved.cross:
        scheduler.kv_cache.store.tier.uncache(slot)
    plan = until_back(scheduler, "s")
    assert list(encoder_blocks(plan)) == ["s"] and new_of(plan, "s").cross_block_ids == encoder_blocks(plan)["s"]
    assert plan.beam_steps[0].num_restored_tokens > 0 and "s" not in plan.num_scheduled_tokens
    finish(scheduler)


@pytest.mark.parametrize("end", ["aborted", "failed", "failed step"])
def test_a_search_that_ends_or_is_lost_on_the_host_leaves_nothing_there(end: str) -> None:
    scheduler, plan = preempt_search(50)
    if end == "aborted":
        scheduler.abort_requests(["s"])
    elif end == "failed":
        scheduler.fail_requests(["s"], "it broke")
    else:
        lost = TransferReport(failed_stores=[store.slot for store in plan.stores])
        scheduler.state.take_transfers(lost)
    scheduler.check()
    assert scheduler.kv_cache.num_free_slots == 50
    if end == "failed step":
        assert new_of(until_back(scheduler, "s"), "s").num_computed_tokens == 0
    finish(scheduler)


def test_a_search_that_came_back_with_a_failed_step_is_computed_again() -> None:
    scheduler, _ = preempt_search(50)
    add_encoded(scheduler, "d", 3, 4, max_tokens=2)
    while not (plan := scheduler.schedule()).loads:
        scheduler.update_from_output(plan, answer_to(plan))
    assert scheduler.step_failed(plan, "no luck") == []
    scheduler.check()
    assert new_of(until_back(scheduler, "s"), "s").num_computed_tokens == 0
    finish(scheduler)
    assert scheduler.kv_cache.num_free_slots == 50


def test_with_room_for_its_prompt_alone_beams_are_computed_again() -> None:
    scheduler, plan = preempt_search(4)
    assert len(plan.stores) == 2  # of the prompt and of the cross table, one block each
    plan = until_back(scheduler, "s")
    # The prompt's last token runs once more, the encoder does not.
    assert new_of(plan, "s").num_computed_tokens == 3 and plan.num_scheduled_tokens["s"] == 1
    assert plan.encoder_steps == [] and scheduler.stats().num_encoder_runs == 2
    finish(scheduler)
    assert scheduler.kv_cache.num_free_slots == 4


# ---- what is not swapped ----


@pytest.mark.parametrize("kind", ["last", "mean"])
def test_a_mean_needs_every_row_again_and_a_last_state_does_not(kind: str) -> None:
    """The runner drops the sum of the rows together with the branch."""
    scheduler = encoder_scheduler(8, 10, cross=None, policy=PRIORITY, max_prefill_chunk=8, caching=False)
    request = request_of("a", 24, priority=9)
    request.params = PoolingParams(pooling=kind)
    scheduler.add_request(request)
    step(scheduler)
    add(scheduler, "b", 4, max_tokens=4, priority=0)
    plan = preempt(scheduler)
    assert plan.preempted_req_ids == ["a"] and bool(plan.stores) == (kind == "last")
    assert new_of(until_back(scheduler, "a"), "a").num_computed_tokens == (16 if kind == "last" else 0)


def test_readers_of_hidden_states_are_computed_again() -> None:
    scheduler = encoder_scheduler(8, 10, cross=None, max_num_batched_tokens=8, caching=False)
    add(scheduler, "a", 8, max_tokens=14)
    step(scheduler)
    read(scheduler, "x", 24, [23])
    plan, _ = step(scheduler)
    while extractions_of(scheduler).running:  # until there is no memory for both
        plan, outputs = step(scheduler)
        assert "x" not in outputs
    assert plan.stores == [] and scheduler.kv_cache.num_free_slots == 10
    captures = [capture for plan in finish(scheduler) for capture in plan.captures]
    assert captures[0].spans[0][0] == 0


# ---- aborts while swapped out, and steps that fail ----


@pytest.mark.parametrize("end", ["aborted", "stopped", "failed"])
def test_who_ends_on_the_host_gives_its_blocks_there_back(end: str) -> None:
    scheduler = short_of_memory()
    preempt_last(scheduler)
    if end == "failed":
        scheduler.fail_requests(["c"], "it broke")
    else:
        scheduler.stop_requests({"c": None}) if end == "stopped" else scheduler.abort_requests(["c"])
    scheduler.check()
    assert scheduler.kv_cache.num_free_slots == 10
    finish(scheduler)


def test_what_a_failed_step_should_have_brought_to_the_host_is_computed_again() -> None:
    scheduler = short_of_memory(caching=False)
    for name in "abc":
        add(scheduler, name, 7, max_tokens=6)
    step(scheduler)
    step(scheduler)
    plan = scheduler.schedule()
    assert plan.preempted_req_ids == ["c"] and plan.stores
    assert scheduler.step_failed(plan, "no luck") == []
    scheduler.check()
    assert not scheduler.kv_cache.is_swapped(scheduler.state.branches["c"])
    assert scheduler.kv_cache.num_free_slots == 10
    plans = finish(scheduler)
    assert "c" in plans[0].finished_req_ids, "the runner is told again"
    (back,) = [new for plan in plans for new in plan.scheduled_new_reqs if new.req_id == "c"]
    assert back.num_computed_tokens == 0 and len(back.token_ids) == 9


def test_who_came_back_with_a_failed_step_is_computed_again() -> None:
    scheduler = short_of_memory(caching=False)
    preempt_last(scheduler)
    add(scheduler, "d", 3, max_tokens=2)
    while not (plan := scheduler.schedule()).loads:
        scheduler.update_from_output(plan, answer_to(plan))
    assert new_ids(plan) == ["d"] and len(scheduler.state.loads) == 1
    assert scheduler.step_failed(plan, "no luck") == [], "the load may have been the cause, too"
    scheduler.check()
    assert len(scheduler.state.loads) == 0 and list(scheduler.state.quarantined) == ["d"]
    plan = until_back(scheduler)
    assert new_of(plan, "c").num_computed_tokens == 0 and plan.num_scheduled_tokens["c"] == 9
    finish(scheduler)
    assert scheduler.kv_cache.num_free_slots == 10
