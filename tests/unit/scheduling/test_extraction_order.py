"""Extractions next to generation and each other: which goes first, which is preempted, and that none starves."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from ratoon.core.errors import QueueFullError
from ratoon.core.plan import CaptureStep, SchedulerOutput
from ratoon.core.request import FinishReason
from ratoon.scheduling.extraction import AGED_SHARE, PATIENCE
from ratoon.scheduling.scheduler import Scheduler
from tests.unit.scheduling.reading import PROMPT, captures_of, extractions_of, finish, lease, read, step
from tests.unit.scheduling.steps import add, scheduler_of

# ---- generation goes first ----


def test_generation_goes_first_and_an_extraction_takes_what_is_left() -> None:
    scheduler = scheduler_of(max_num_batched_tokens=10)
    read(scheduler, "x", 30, [29])
    add(scheduler, "a", 6, max_tokens=9)
    plan, _ = step(scheduler)
    assert plan.num_scheduled_tokens == {"a": 6} and len(captures_of(plan)["x"].token_ids) == 4
    plan, _ = step(scheduler)
    assert plan.num_scheduled_tokens == {"a": 1} and len(captures_of(plan)["x"].token_ids) == 9


def test_those_that_have_begun_go_on_before_others_begin() -> None:
    scheduler = scheduler_of(max_num_batched_tokens=8)
    for name in "xyz":
        read(scheduler, name, 12, [11])
    rows = []
    while scheduler.has_unfinished_requests():
        plan, _ = step(scheduler)
        rows.append({capture.req_id: len(capture.token_ids) for capture in plan.captures})
    assert rows == [{"x": 8}, {"x": 4, "y": 4}, {"y": 8}, {"z": 8}, {"z": 4}]


def test_one_that_long_prompts_passed_by_gets_a_share_of_its_own() -> None:
    budget = 16
    scheduler = scheduler_of(max_num_batched_tokens=budget, max_model_len=2000, num_blocks=1000)
    add(scheduler, "long", 1500, max_tokens=1)
    read(scheduler, "x", 6, [5])
    rows = []
    while "x" in scheduler.state.requests:
        plan, _ = step(scheduler)
        rows.append(sum(len(capture.token_ids) for capture in plan.captures))
        assert plan.num_scheduled_tokens["long"] == budget - rows[-1]
    assert rows == [0] * PATIENCE + [budget // AGED_SHARE] * 3


def fresh(number: int, length: int) -> list[int]:
    """A prompt that no other has."""
    return list(range(100_000 + 1000 * number, 100_000 + 1000 * number + length))


def endless(
    scheduler: Scheduler, arrive: Callable[[int], None], wanted: str, most_steps: int = 400
) -> list[SchedulerOutput]:
    """New requests before every step, until the watched one has ended. Returns all plans."""
    plans = []
    for number in range(most_steps):
        arrive(number)
        plan, outputs = step(scheduler)
        plans.append(plan)
        if wanted in outputs and outputs[wanted].finished:
            return plans
    raise AssertionError(f"{wanted} starves")


@pytest.mark.slow
@pytest.mark.parametrize("caching", [True, False], ids=["with a prefix cache", "without"])
@pytest.mark.parametrize("num_blocks", [17, 20, 40, 400])
@pytest.mark.parametrize("chunk", [4, 16, None])
@pytest.mark.parametrize("budget", [8, 64])
@pytest.mark.one_in(5)
def test_nothing_starves_under_endless_generation(
    caching: bool, num_blocks: int, chunk: int | None, budget: int
) -> None:
    """Prompts wait all the time and take all memory that they find; the extraction needs nearly the whole pool."""
    scheduler = scheduler_of(
        num_blocks, caching, max_num_batched_tokens=budget, max_prefill_chunk=chunk, max_num_seqs=8
    )
    read(scheduler, "x", 60, [59])

    def arrive(_: int) -> None:
        while len(scheduler.state.waiting) < 3:
            number = scheduler._num_added
            add(scheduler, f"g{number}", fresh(number, 20), max_tokens=30)

    plans = endless(scheduler, arrive, "x")
    later = endless(scheduler, arrive, f"g{scheduler._num_added - 1}")  # and generation goes on as well
    assert plans and later


def test_generation_does_not_starve_under_endless_extractions() -> None:
    scheduler = scheduler_of(num_blocks=200, max_num_batched_tokens=64)

    def arrive(number: int) -> None:
        while len(extractions_of(scheduler)) < 40:
            read(scheduler, f"x{scheduler._num_added}", fresh(scheduler._num_added, 64), [63])
        if number == 60:
            add(scheduler, "g", 10, max_tokens=3)

    plans = endless(scheduler, arrive, "g")
    assert len(plans) <= 60 + 3 + 2
    assert all(plan.total_num_scheduled_tokens == 64 for plan in plans)  # and extractions take all that is left


def test_rows_that_are_run_and_lost_again_count_as_passing_by() -> None:
    """Otherwise one that is served and then preempted in every step would never end."""
    scheduler = scheduler_of(num_blocks=12, caching=False, max_prefill_chunk=4)
    read(scheduler, "x", 40, [39])
    state = extractions_of(scheduler).first
    step(scheduler)
    assert state.num_passed_by == 0
    scheduler.state.reclaim(state.branch)
    step(scheduler)
    assert state.num_passed_by == 1
    finish(scheduler)


# ---- memory ----


def test_one_that_finds_no_memory_is_preempted_and_holds_nothing() -> None:
    scheduler = scheduler_of(num_blocks=9)  # 8 of them
    add(scheduler, "a", 22, max_tokens=8)
    step(scheduler)
    read(scheduler, "x", 12)
    plan, _ = step(scheduler)
    assert plan.captures == [] and plan.num_scheduled_tokens == {"a": 1}
    assert not extractions_of(scheduler).running and len(extractions_of(scheduler).waiting) == 1
    assert scheduler.kv_cache.num_free_blocks == 2
    received = finish(scheduler)
    assert received["x"][-1].finish_reason == FinishReason.STOP


def test_rows_that_were_read_out_before_memory_was_lost_are_not_read_again() -> None:
    scheduler = scheduler_of(num_blocks=9, caching=False, max_prefill_chunk=8)
    add(scheduler, "a", 8, max_tokens=21)
    step(scheduler)
    read(scheduler, "x", 24)
    for _ in range(3):
        step(scheduler)
    # 3 blocks of a's and 4 of x's; the last chunk of x would need two more, and finds one.
    state = extractions_of(scheduler).first
    assert (state.num_captured, state.branch.block_tables) == (16, [])
    captures: list[CaptureStep] = []
    received = []
    while scheduler.has_unfinished_requests():
        plan, outputs = step(scheduler)
        captures += plan.captures
        received += [outputs["x"]] if "x" in outputs else []
    assert [(output.first_row, output.finished) for output in received] == [(16, True)]
    assert [capture.captured for capture in captures if capture.captured] == [list(range(8))]
    assert [capture.spans for capture in captures][-3:] == [[(0, 8, True)], [(8, 8, True)], [(16, 8, True)]]
    assert scheduler.stats().num_preemptions == 0


def test_a_decoding_branch_that_needs_a_block_takes_it_from_an_extraction_before_anyone_is_preempted() -> None:
    scheduler = scheduler_of(num_blocks=9, caching=False, max_prefill_chunk=8)
    add(scheduler, "a", 8, max_tokens=20)
    step(scheduler)
    read(scheduler, "x", 24, [23])
    read(scheduler, "y", 24, [23])
    plan, _ = step(scheduler)
    assert list(captures_of(plan)) == ["x", "y"]
    assert scheduler.kv_cache.num_free_blocks == 1
    while plan.captures and "y" in captures_of(plan):
        plan, _ = step(scheduler)
    assert [state.branch.branch_id for state in extractions_of(scheduler)] == ["x", "y"]  # the last gave way
    assert scheduler.stats().num_preemptions == 0 and plan.num_scheduled_tokens == {"a": 1}
    finish(scheduler)


def test_the_first_of_several_always_gets_on() -> None:
    """Those that began later are preempted, and resume in their old order."""
    scheduler = scheduler_of(num_blocks=11, caching=False, max_prefill_chunk=8)
    for name in "xyz":
        read(scheduler, name, 40, [39])
    ended = []
    for _ in range(100):
        plan, outputs = step(scheduler)
        ended += list(outputs)
        if len(ended) == 3:
            break
        assert plan.captures, "a step in which nothing runs"
    assert ended == ["x", "y", "z"]


def test_leases_give_way_to_one_that_is_alone_and_not_to_one_beside_others() -> None:
    scheduler = scheduler_of(num_blocks=10)
    lease(scheduler, prompt=PROMPT[:10])
    add(scheduler, "a", 8, max_tokens=3)
    read(scheduler, "x", 28, [27])
    plan, _ = step(scheduler)
    assert plan.captures == [] and scheduler.leases.find("g") is not None
    while "a" in scheduler.state.requests:
        step(scheduler)
    plan, outputs = step(scheduler)
    assert outputs["x"].finished and scheduler.leases.find("g") is None


def test_one_that_has_aged_keeps_its_memory_and_the_last_generation_gives_way() -> None:
    scheduler = scheduler_of(num_blocks=12, caching=False, max_prefill_chunk=4)
    read(scheduler, "x", 36, [35])
    for _ in range(5):
        step(scheduler)
    state = extractions_of(scheduler).first
    state.num_passed_by = PATIENCE
    add(scheduler, "a", 10, max_tokens=20)
    add(scheduler, "b", 10, max_tokens=20)
    preempted = []
    while "x" in scheduler.state.requests:
        plan, _ = step(scheduler)
        preempted += plan.preempted_req_ids
    assert state.num_rows_run == 36  # none of them twice
    assert preempted != [] or scheduler.state.waiting
    finish(scheduler)


def test_in_steps_of_one_token_the_aged_one_does_not_wait_for_a_prompt_that_waits_for_it() -> None:
    """Its share is all of a step, and the memory that it needs is the prompt's."""
    scheduler = scheduler_of(num_blocks=6, caching=False, max_num_batched_tokens=1)
    read(scheduler, "x", 16, [15])
    for _ in range(4):
        step(scheduler)
    add(scheduler, "a", 18, max_tokens=1)
    for _ in range(PATIENCE):
        plan, _ = step(scheduler)
        assert plan.req_ids == ["a"]
    received = finish(scheduler)
    assert received["x"][-1].finished and received["a"][-1].finished


# ---- several owners ----


def test_owners_that_wait_take_turns() -> None:
    scheduler = scheduler_of(max_num_batched_tokens=4)
    for number in range(4):
        read(scheduler, f"a{number}", 4, [3], owner="ada")
    for number in range(2):
        read(scheduler, f"b{number}", 4, [3], owner="bob")
    order = []
    while scheduler.has_unfinished_requests():
        plan, _ = step(scheduler)
        order += captures_of(plan)
    assert order[:2] == ["a0", "b0"], "both have a part of the first step"
    assert list(dict.fromkeys(order)) == ["a0", "b0", "a1", "b1", "a2", "a3"]


def test_a_queue_that_one_owner_has_filled_has_room_for_another(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ratoon.scheduling.extraction.MAX_WAITING", 6)
    scheduler = scheduler_of()
    for number in range(6):
        read(scheduler, f"a{number}", 4, [3], owner="ada")
    with pytest.raises(QueueFullError):
        read(scheduler, "a6", 4, [3], owner="ada")
    for number in range(3):
        read(scheduler, f"b{number}", 4, [3], owner="bob")
    with pytest.raises(QueueFullError):
        read(scheduler, "b3", 4, [3], owner="bob")
    finish(scheduler)
