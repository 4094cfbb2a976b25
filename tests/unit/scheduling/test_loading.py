"""Branches whose blocks come from the block store: they wait outside the queue, and go on with what has arrived."""

from __future__ import annotations

import pytest

from ratoon.core.kv import SwapCosts
from ratoon.core.kv_transfer import KVTransfer
from ratoon.core.outputs import ModelRunnerOutput, TransferReport
from ratoon.core.plan import SchedulerOutput
from ratoon.core.request import FinishReason
from ratoon.scheduling.scheduler import Scheduler
from tests.unit.scheduling.encoding import add_encoded, answer_to, document, encoder_scheduler, finish, new_of, step
from tests.unit.scheduling.steps import PRIORITY, add, new_ids, request_of

PREFIX = list(range(500, 512))  # three blocks


def with_stored_prefix(num_blocks: int = 11, **config: object) -> Scheduler:
    """The store has the prefix, and the device does not any more."""
    scheduler = encoder_scheduler(num_blocks, 20, cross=None, **config)
    add(scheduler, "first", [*PREFIX, 1], max_tokens=1)
    finish(scheduler)
    add(scheduler, "evicts", 4 * (num_blocks - 1) - 1, max_tokens=1)
    finish(scheduler)
    assert scheduler.stats().store.num_blocks >= 3
    return scheduler


def answer_with_losses(plan: SchedulerOutput, num_lost: int) -> ModelRunnerOutput:
    """The last blocks of the loads are lost."""
    result, blocks = answer_to(plan), [load.block for load in plan.loads]
    arrived = blocks[: len(blocks) - num_lost]
    result.transfers = TransferReport(arrived, blocks[len(arrived) :], [store.slot for store in plan.stores])
    return result


def test_a_request_whose_prefix_is_in_the_store_loads_it_and_computes_the_rest() -> None:
    scheduler = with_stored_prefix()
    add(scheduler, "again", [*PREFIX, 2, 3], max_tokens=1)
    plan, _ = step(scheduler)
    assert len(plan.loads) == 3 and plan.is_empty and not plan.is_void
    plan, outputs = step(scheduler)
    new = new_of(plan, "again")
    assert new.num_computed_tokens == 12 and plan.num_scheduled_tokens == {"again": 2}
    assert outputs["again"].num_cached_tokens == 12 and outputs["again"].finish_reason == FinishReason.LENGTH
    stats = scheduler.stats()
    assert (stats.store.loaded, stats.store.failed) == (3, 0) and stats.prefix_cache.hits == 12
    scheduler.check()


def test_others_overtake_it_and_it_comes_back_to_the_front() -> None:
    scheduler = with_stored_prefix(max_num_seqs=2)
    add(scheduler, "again", [*PREFIX, 2], max_tokens=1)
    add(scheduler, "other", 3, max_tokens=1)
    add(scheduler, "third", 3, max_tokens=1)
    plan = scheduler.schedule()
    assert new_ids(plan) == ["other"] and len(scheduler.state.loads) == 1, "its row is kept for it"
    assert scheduler.stats().num_waiting == 2
    scheduler.check()
    scheduler.update_from_output(plan, answer_to(plan))
    assert [branch.branch_id for branch in scheduler.state.waiting] == ["again", "third"]
    plan, _ = step(scheduler)
    assert new_ids(plan) == ["again", "third"] and new_of(plan, "again").num_computed_tokens == 12


def test_with_steps_in_flight_it_waits_for_the_result_of_its_own_step() -> None:
    scheduler = with_stored_prefix(max_steps_in_flight=2)
    add(scheduler, "again", [*PREFIX, 2], max_tokens=1)
    add(scheduler, "other", 3, max_tokens=5)
    first = scheduler.schedule()
    second = scheduler.schedule()
    assert first.loads and new_ids(second) == [] and second.num_scheduled_tokens == {"other": 1}
    scheduler.update_from_output(first, answer_to(first))
    third = scheduler.schedule()
    assert new_ids(third) == ["again"]
    scheduler.check()


@pytest.mark.parametrize(("num_lost", "num_computed"), [(1, 8), (2, 4), (3, 0)])
def test_from_the_first_block_that_fails_to_arrive_on_it_is_computed(num_lost: int, num_computed: int) -> None:
    scheduler = with_stored_prefix()
    add(scheduler, "again", [*PREFIX, 2], max_tokens=1)
    plan = scheduler.schedule()
    scheduler.update_from_output(plan, answer_with_losses(plan, num_lost))
    scheduler.check()
    plan, outputs = step(scheduler)
    assert new_of(plan, "again").num_computed_tokens == num_computed and plan.loads == []
    assert outputs["again"].num_cached_tokens == num_computed
    assert scheduler.stats().store.failed == num_lost
    scheduler.check()


def test_two_requests_wait_for_the_same_blocks_and_load_them_once() -> None:
    scheduler = with_stored_prefix()
    add(scheduler, "one", [*PREFIX, 2], max_tokens=1)
    add(scheduler, "two", [*PREFIX, 3], max_tokens=1)
    plan = scheduler.schedule()
    assert len(plan.loads) == 3 and len(scheduler.state.loads) == 2
    scheduler.update_from_output(plan, answer_with_losses(plan, 1))
    plan, _ = step(scheduler)
    assert new_of(plan, "one").num_computed_tokens == 8
    finish(scheduler)


@pytest.mark.parametrize("end", ["aborted", "failed"])
def test_one_that_ends_while_it_waits_leaves_nothing_behind(end: str) -> None:
    scheduler = with_stored_prefix()
    add(scheduler, "again", [*PREFIX, 2], max_tokens=1)
    plan = scheduler.schedule()
    if end == "aborted":
        scheduler.abort_requests(["again"])
    else:
        scheduler.fail_requests(["again"], "it broke")
    scheduler.check()
    assert scheduler.kv_cache.num_free_blocks == 7, "until the blocks have arrived"
    scheduler.update_from_output(plan, answer_to(plan))
    scheduler.check()
    assert scheduler.kv_cache.num_free_blocks == 10 and not scheduler.has_requests()
    assert scheduler.reset_prefix_cache()


def test_a_step_that_fails_with_a_load_has_it_computed_instead() -> None:
    scheduler = with_stored_prefix()
    add(scheduler, "again", [*PREFIX, 2], max_tokens=1)
    plan = scheduler.schedule()
    assert scheduler.step_failed(plan, "no luck") == []
    scheduler.check()
    plan, _ = step(scheduler)
    assert new_of(plan, "again").num_computed_tokens == 0 and plan.loads == []


def test_what_it_holds_goes_to_running_branches_that_need_memory() -> None:
    scheduler = with_stored_prefix(policy=PRIORITY)
    add(scheduler, "runs", 20, max_tokens=15, priority=0)  # five blocks, nine at the end
    step(scheduler)
    add(scheduler, "again", [*PREFIX, 2, *range(11)], max_tokens=1, priority=9)  # six blocks: it fits beside no other
    plans = finish(scheduler)
    assert scheduler.stats().num_preemptions == 0
    news = [new for plan in plans for new in plan.scheduled_new_reqs if new.req_id == "again"]
    assert [new.num_computed_tokens for new in news] == [12]


def test_a_loaded_branch_gives_its_blocks_to_a_more_important_one() -> None:
    scheduler = with_stored_prefix(policy=PRIORITY)
    add(scheduler, "again", [*PREFIX, 2], max_tokens=8, priority=5)
    step(scheduler)
    assert scheduler.kv_cache.num_free_blocks == 7
    add(scheduler, "first", 36, max_tokens=1, priority=0)
    plan, _ = step(scheduler)
    assert new_ids(plan) == ["first"], "nothing waits for memory that no running branch holds"
    finish(scheduler)


def test_what_takes_longer_to_load_is_computed() -> None:
    scheduler = with_stored_prefix(swap_costs=SwapCosts(4.1, 1.0))
    add(scheduler, "again", [*PREFIX, 2], max_tokens=1)
    plan, _ = step(scheduler)
    assert plan.loads == [] and plan.num_scheduled_tokens == {"again": 13}


def test_what_another_engine_has_computed_is_loaded_whatever_that_takes() -> None:
    scheduler = with_stored_prefix(swap_costs=SwapCosts(4.1, 1.0))
    request = request_of("again", [*PREFIX, 2], max_tokens=1)
    request.kv_transfer = KVTransfer("a transfer", "ipc:///of/another")
    scheduler.add_request(request)
    plan, _ = step(scheduler)
    assert len(plan.loads) == 3 and not plan.num_scheduled_tokens


def test_log_probabilities_of_a_prompt_need_all_of_it() -> None:
    scheduler = with_stored_prefix()
    add(scheduler, "again", [*PREFIX, 2], max_tokens=1, prompt_logprobs=0)
    plan = scheduler.schedule()
    assert plan.loads == [] and plan.num_scheduled_tokens == {"again": 13}


def test_requests_with_one_encoder_input_wait_together_for_its_table() -> None:
    scheduler = encoder_scheduler(11, 20)
    add_encoded(scheduler, "a", 3, document(9), max_tokens=1)
    finish(scheduler)
    add_encoded(scheduler, "b", 31, 4, max_tokens=1)
    finish(scheduler)
    for name in ("c", "d"):
        add_encoded(scheduler, name, 3, document(9), max_tokens=1)
    plan, _ = step(scheduler)
    assert plan.is_empty and 1 <= len(plan.loads) <= 3, "each block of the table once, if the device has it no more"
    plan, _ = step(scheduler)
    assert new_ids(plan) == ["c", "d"] and plan.encoder_steps == []
    assert scheduler.stats().num_encoder_runs == 2


def test_an_encoder_input_whose_table_is_lost_runs_again() -> None:
    scheduler = encoder_scheduler(11, 20)
    add_encoded(scheduler, "a", 3, document(9), max_tokens=1)
    finish(scheduler)
    add_encoded(scheduler, "b", 31, 4, max_tokens=1)
    finish(scheduler)
    add_encoded(scheduler, "c", 3, document(9), max_tokens=1)
    plan = scheduler.schedule()
    scheduler.update_from_output(plan, answer_with_losses(plan, 1))
    plan, outputs = step(scheduler)
    assert len(plan.encoder_steps) == 1 and "c" in outputs
