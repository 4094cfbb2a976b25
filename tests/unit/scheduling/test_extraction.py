"""Requests for hidden states: which rows run and what they cost, how they end, and what is refused."""

from __future__ import annotations

import pytest

from ratoon.core.errors import DeadlineError, QueueFullError, RequestError
from ratoon.core.params import PoolingParams
from ratoon.core.plan import MAX_CAPTURE_SPANS
from ratoon.core.request import EngineCoreRequest, FinishReason, InheritedFrom, ResumedChoice
from ratoon.scheduling import extraction as extraction_module
from tests.unit.scheduling.reading import (
    PROMPT,
    answer_to,
    captures_of,
    extraction_request,
    extractions_of,
    finish,
    lease,
    read,
    step,
)
from tests.unit.scheduling.steps import add, new_ids, request_of, scheduler_of

# ---- which rows run ----


def test_a_prompt_of_its_own_runs_once_and_its_rows_are_read_out_in_passing() -> None:
    scheduler = scheduler_of()
    read(scheduler, "x", PROMPT, [2, 3, 20], layers=[0, 4])
    plan, outputs = step(scheduler)
    (capture,) = plan.captures
    assert (capture.spans, capture.captured, capture.layers) == ([(0, 21, True)], [2, 3, 20], [0, 4])
    assert capture.token_ids == PROMPT and len(capture.block_ids[0]) == 6
    assert plan.num_scheduled_tokens == {} and plan.sampled_req_ids == [] and plan.total_num_scheduled_tokens == 21
    output = outputs["x"]
    assert (output.finish_reason, output.first_row, output.num_rows_run) == (FinishReason.STOP, 0, 21)
    assert output.hidden_states is not None and output.hidden_states.shape == (2, 3, 1)
    assert not scheduler.has_requests() and scheduler.kv_cache.usage == 0.0  # the runner has no row to drop


def test_of_a_leased_parent_only_the_rows_asked_for_run_and_nothing_is_written() -> None:
    scheduler = scheduler_of()
    tokens = lease(scheduler)
    num_free = scheduler.kv_cache.num_free_blocks
    read(scheduler, "x", tokens, [0, 5, 6, 7, 19], parent="g")
    plan, outputs = step(scheduler)
    (capture,) = plan.captures
    assert capture.spans == [(0, 1, False), (5, 3, False), (19, 1, False)]
    assert capture.token_ids == [tokens[position] for position in (0, 5, 6, 7, 19)]
    assert capture.captured == [0, 1, 2, 3, 4]
    assert plan.block_copies == [] and plan.total_num_scheduled_tokens == 5
    assert (outputs["x"].inherited_from, outputs["x"].num_rows_run) == (InheritedFrom.LEASE, 5)
    assert scheduler.kv_cache.num_free_blocks == num_free


def test_the_last_token_of_a_leased_parent_is_one_row_in_a_copy_of_its_last_block() -> None:
    scheduler = scheduler_of()
    tokens = lease(scheduler)  # its last token was sampled and never computed
    read(scheduler, "x", tokens, [23], parent="g")
    plan, _ = step(scheduler)
    (capture,) = plan.captures
    assert capture.spans == [(23, 1, True)] and plan.total_num_scheduled_tokens == 1
    (copy,) = plan.block_copies
    leased = [block.block_id for block in scheduler.leases.find("g").block_tables[0]]
    assert copy.src == leased[5] and copy.dst not in leased
    assert capture.block_ids[0] == [*leased[:5], copy.dst]


def test_what_is_missing_between_two_positions_is_computed_on_the_way() -> None:
    scheduler = scheduler_of()
    add(scheduler, "g", PROMPT[:9], max_tokens=1)
    step(scheduler)
    read(scheduler, "x", PROMPT, [1, 6, 20])
    plan, _ = step(scheduler)
    (capture,) = plan.captures
    assert capture.spans == [(1, 1, False), (6, 1, False), (8, 13, True)]
    assert capture.captured == [0, 1, 14]


def test_a_running_parent_gives_its_full_blocks_and_keeps_the_one_that_it_writes() -> None:
    scheduler = scheduler_of()
    add(scheduler, "g", PROMPT, max_tokens=30)
    for _ in range(3):
        step(scheduler)
    before = [block.block_id for block in scheduler.state.branches["g"].block_tables[0]]
    read(scheduler, "x", [*PROMPT, 7, 7], [3, 22], parent="g")
    plan, outputs = step(scheduler)
    assert captures_of(plan)["x"].spans == [(3, 1, False), (20, 3, True)]
    assert plan.num_scheduled_tokens == {"g": 1} and plan.block_copies == []
    assert outputs["x"].inherited_from == InheritedFrom.LEASE and outputs["x"].finished
    assert [block.block_id for block in scheduler.state.branches["g"].block_tables[0]][:6] == before[:6]


def test_rows_that_a_running_parent_computes_anyway_are_read_from_its_own_and_cost_nothing() -> None:
    scheduler = scheduler_of()
    scheduler.add_request(request_of("g", PROMPT, max_tokens=9))
    step(scheduler)
    tokens = list(scheduler.state.branches["g"].token_ids)  # the last one is computed in the next step
    num_free = scheduler.kv_cache.num_free_blocks
    read(scheduler, "x", tokens, [len(tokens) - 1], layers=[0, 4], parent="g")
    read(scheduler, "y", tokens, [len(tokens) - 1], parent="g")  # one reads the rows of a parent, the other runs a row
    plan, outputs = step(scheduler)
    shared, run = plan.captures
    assert (shared.req_id, shared.branch_id, shared.captured) == ("x", "g", [0])
    assert (shared.token_ids, shared.spans, shared.block_ids) == ([], [], ())
    assert (run.req_id, run.branch_id, run.token_ids) == ("y", "", tokens[-2:])  # behind the parent's full blocks
    assert plan.num_scheduled_tokens == {"g": 1} and plan.total_num_scheduled_tokens == 3
    assert outputs["x"].num_rows_run == 0 and outputs["x"].finish_reason == FinishReason.STOP
    assert outputs["x"].num_cached_tokens == len(tokens) and outputs["x"].inherited_from == InheritedFrom.LEASE
    assert scheduler.kv_cache.num_free_blocks >= num_free - 1
    finish(scheduler)


def test_rows_of_a_prompt_that_runs_in_parts_are_read_with_the_part_that_has_them() -> None:
    scheduler = scheduler_of(max_num_batched_tokens=8)
    scheduler.add_request(request_of("g", PROMPT, max_tokens=2))
    step(scheduler)
    read(scheduler, "x", PROMPT, [9, 14], parent="g")
    plan, outputs = step(scheduler)
    (capture,) = plan.captures
    assert (capture.branch_id, capture.captured, plan.num_scheduled_tokens) == ("g", [1, 6], {"g": 8})
    assert outputs["x"].hidden_states is not None and outputs["x"].hidden_states.shape == (1, 2, 1)
    finish(scheduler)


def test_an_extraction_whose_rows_were_shared_in_a_step_that_failed_is_tried_again() -> None:
    scheduler = scheduler_of()
    scheduler.add_request(request_of("g", PROMPT, max_tokens=4))
    step(scheduler)
    tokens = list(scheduler.state.branches["g"].token_ids)
    read(scheduler, "x", tokens, [len(tokens) - 1], parent="g")
    plan = scheduler.schedule()
    assert plan.captures[0].branch_id == "g"
    assert scheduler.step_failed(plan, "no luck") == []
    outputs = finish(scheduler)
    assert outputs["x"][-1].finish_reason == FinishReason.STOP
    assert outputs["g"][-1].finish_reason == FinishReason.LENGTH


def test_a_parent_that_waits_for_memory_is_found_in_the_prefix_cache() -> None:
    scheduler = scheduler_of(max_num_seqs=1)
    add(scheduler, "g", PROMPT, max_tokens=2)
    finish(scheduler)
    add(scheduler, "running", 4, max_tokens=30)
    add(scheduler, "again", PROMPT, max_tokens=2)
    step(scheduler)
    read(scheduler, "x", PROMPT, [20], parent="again")
    plan, outputs = step(scheduler)
    assert captures_of(plan)["x"].spans == [(20, 1, True)]
    assert outputs["x"].inherited_from == InheritedFrom.PREFIX_CACHE


def test_rows_come_in_parts_where_a_step_has_room_for_fewer() -> None:
    scheduler = scheduler_of(max_num_batched_tokens=4)
    read(scheduler, "x", PROMPT, [1, 6, 7, 8, 20])
    received = finish(scheduler)["x"]
    parts = [(output.first_row, output.hidden_states.shape[1], output.num_rows_run) for output in received]
    assert parts == [(0, 1, 4), (1, 2, 8), (3, 1, 12), (4, 1, 21)]
    assert [output.finished for output in received] == [False, False, False, True]


def test_unwritten_rows_are_cut_by_the_budget_too_and_go_on_where_they_stopped() -> None:
    scheduler = scheduler_of(max_prefill_chunk=3)
    tokens = lease(scheduler)
    read(scheduler, "x", tokens, [0, 1, 2, 3, 9, 23], parent="g")
    plans = []
    while scheduler.has_unfinished_requests():
        plans.append(step(scheduler)[0].captures[0])
    assert [plan.spans for plan in plans] == [[(0, 3, False)], [(3, 1, False), (9, 1, False), (23, 1, True)]]


def test_a_step_has_no_more_spans_than_the_runner_has_rows_for() -> None:
    scheduler = scheduler_of(num_blocks=400, max_model_len=400)
    prompt = list(range(1000, 1300))
    tokens = lease(scheduler, prompt=prompt)
    read(scheduler, "x", tokens, range(0, 280, 2), parent="g")  # 140 runs of one
    read(scheduler, "y", tokens, range(1, 30, 2), parent="g")  # 15
    counts = []
    while scheduler.has_unfinished_requests():
        plan, _ = step(scheduler)
        counts.append({capture.req_id: len(capture.spans) for capture in plan.captures})
    assert counts == [{"x": 64}, {"x": 64}, {"x": 12, "y": 15}]
    assert MAX_CAPTURE_SPANS == 64


def test_extractions_run_in_the_step_of_tokens_vectors_and_beams() -> None:
    scheduler = scheduler_of()
    add(scheduler, "a", 4)
    add(scheduler, "c", 6, n=2)
    pooled = request_of("p", 5)
    pooled.params = PoolingParams()
    scheduler.add_request(pooled)
    read(scheduler, "x", PROMPT, [20])
    read(scheduler, "y", 7)
    plan = scheduler.schedule()
    assert plan.sampled_req_ids == ["a", "c"] and plan.pooled_req_ids == ["p"]
    assert list(captures_of(plan)) == ["x", "y"] and plan.total_num_scheduled_tokens == 4 + 6 + 5 + 21 + 7
    assert plan.req_ids == ["a", "c", "p", "x", "y"]


# ---- deadlines and aborts ----


def test_a_deadline_that_passes_ends_it_with_a_fault_of_its_own_kind() -> None:
    scheduler = scheduler_of(max_num_batched_tokens=4)
    scheduler.tick(100.0)
    add(scheduler, "a", 3, max_tokens=50)
    read(scheduler, "x", 30, range(30), deadline=5.0)
    read(scheduler, "waits", 30, deadline=7.5)
    for _ in range(3):
        step(scheduler)
    assert scheduler.next_expiry() == 105.0 and scheduler.tick(104.9) == []
    (output,) = scheduler.tick(105.0)
    scheduler.check()
    assert output.request_id == "x" and output.finish_reason == FinishReason.ERROR
    assert output.refusal is not None and output.refusal.kind == DeadlineError.__name__
    assert output.refusal.subject == "deadline" and "7 of 30 positions done" in output.refusal.problem
    assert output.error is not None and "5 s" in output.error
    assert [late.request_id for late in scheduler.tick(200.0)] == ["waits"]  # it was never scheduled
    assert list(scheduler.state.requests) == ["a"] and scheduler.next_expiry() is None
    plan, outputs = step(scheduler)
    assert plan.captures == [] and list(outputs) == ["a"]


def test_what_it_computed_before_its_deadline_stays_in_the_prefix_cache() -> None:
    scheduler = scheduler_of(max_prefill_chunk=8)
    read(scheduler, "x", PROMPT, deadline=5.0)
    step(scheduler)
    scheduler.tick(6.0)
    read(scheduler, "again", PROMPT, [20])
    plan, _ = step(scheduler)
    assert captures_of(plan)["again"].spans == [(8, 8, True)]


@pytest.mark.parametrize("begun", [True, False])
def test_an_abort_takes_it_out_of_its_queue_and_gives_its_memory_back(begun: bool) -> None:
    scheduler = scheduler_of(max_prefill_chunk=8)
    read(scheduler, "x", PROMPT)
    if begun:
        step(scheduler)
    (output,) = scheduler.abort_requests(["x"])
    scheduler.check()
    assert output.finish_reason == FinishReason.ABORT and output.hidden_states is None
    assert len(extractions_of(scheduler)) == 0 and scheduler.kv_cache.usage == 0.0
    assert not scheduler.has_requests()


def test_states_for_one_that_was_aborted_in_flight_are_dropped() -> None:
    scheduler = scheduler_of(max_prefill_chunk=8)
    read(scheduler, "x", PROMPT)
    plan = scheduler.schedule()
    scheduler.abort_requests(["x"])
    read(scheduler, "x", [1, 2, 3])  # the id is free again, and the old states are not its own
    assert scheduler.update_from_output(plan, answer_to(plan)) == []
    plan, outputs = step(scheduler)
    assert captures_of(plan)["x"].token_ids == [1, 2, 3]
    assert outputs["x"].first_row == 0 and outputs["x"].hidden_states.shape == (1, 3, 1)


def test_a_lease_waits_for_the_extraction_that_was_asked_for_in_time() -> None:
    scheduler = scheduler_of(max_num_batched_tokens=24)
    tokens = lease(scheduler)
    add(scheduler, "long", 60, max_tokens=1)
    read(scheduler, "x", tokens, [23], parent="g")
    step(scheduler)
    scheduler.tick(2000.0)
    assert scheduler.leases.find("g") is not None
    while "x" in scheduler.state.requests:
        _, outputs = step(scheduler)
    assert outputs["x"].inherited_from == InheritedFrom.LEASE
    scheduler.tick(2001.0)
    assert scheduler.leases.find("g") is None


# ---- failures ----


def test_states_that_did_not_come_fail_their_request_and_no_other() -> None:
    scheduler = scheduler_of()
    read(scheduler, "x", 4)
    read(scheduler, "y", 4)
    plan = scheduler.schedule()
    result = answer_to(plan)
    del result.hidden_states["x"]
    outputs = {output.request_id: output for output in scheduler.update_from_output(plan, result)}
    assert outputs["x"].finish_reason == FinishReason.ERROR and "no hidden states" in outputs["x"].error
    assert outputs["y"].finish_reason == FinishReason.STOP
    assert not scheduler.has_unfinished_requests()
    scheduler.check()


def test_an_error_of_the_runner_fails_the_request_once() -> None:
    scheduler = scheduler_of()
    read(scheduler, "x", 4)
    plan = scheduler.schedule()
    result = answer_to(plan)
    result.errors["x"] = "NaN"
    assert [(o.request_id, o.error) for o in scheduler.update_from_output(plan, result)] == [("x", "NaN")]
    assert not scheduler.has_requests()


def test_the_requests_of_a_step_that_failed_are_tried_apart_and_rows_are_not_read_twice() -> None:
    scheduler = scheduler_of(max_prefill_chunk=8)
    add(scheduler, "a", 4, max_tokens=2)
    read(scheduler, "x", PROMPT)
    read(scheduler, "y", 6)
    _, outputs = step(scheduler)
    assert outputs["x"].first_row == 0 and outputs["y"].finished
    plan = scheduler.schedule()  # fails
    assert scheduler.step_failed(plan, "no luck") == []
    scheduler.check()
    assert set(scheduler.state.quarantined) == {"a", "x"}
    plan, outputs = step(scheduler)
    assert plan.req_ids == ["a"] and outputs["a"].finished
    plan, outputs = step(scheduler)
    assert plan.req_ids == ["x"] and captures_of(plan)["x"].spans == [(0, 8, True)]  # no prefix cache hit
    assert "x" not in outputs and not scheduler.state.quarantined  # it ran
    assert [output.first_row for output in finish(scheduler)["x"]] == [8, 16]


def test_others_give_way_to_an_extraction_on_trial() -> None:
    """An extraction that holds memory and was not in the failed step: a quarantined request would wait for it
    forever."""
    scheduler = scheduler_of(num_blocks=11, caching=False, max_num_batched_tokens=16, max_prefill_chunk=8)
    read(scheduler, "tried", 40, [39])
    read(scheduler, "idle", 40, [39])
    step(scheduler)
    add(scheduler, "a", 8, max_tokens=1)
    plan = scheduler.schedule()
    assert plan.req_ids == ["a", "tried"]
    assert scheduler.step_failed(plan, "no luck") == []
    received = {}
    for _ in range(20):
        plan, outputs = step(scheduler)
        received |= outputs
        assert not plan.is_empty or not scheduler.has_unfinished_requests()
    assert [name for name, output in received.items() if output.finished] == ["a", "tried", "idle"]


# ---- what is refused ----


def test_a_full_queue_refuses_and_keeps_nothing_of_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(extraction_module, "MAX_WAITING", 3)
    scheduler = scheduler_of()
    for name in "abc":
        read(scheduler, name, 5)
    with pytest.raises(QueueFullError, match="3 extractions are waiting") as refused:
        read(scheduler, "d", 5)
    assert isinstance(refused.value, RequestError)
    assert "d" not in scheduler.state.requests
    scheduler.check()
    add(scheduler, "g", 5, max_tokens=1)  # generation has its own queue
    step(scheduler)
    read(scheduler, "d", 5)  # there is room again, and the id is free
    assert finish(scheduler)["d"][-1].finished


@pytest.mark.parametrize(
    ("positions", "field"), [([], "positions"), ([3, 2], "positions"), ([1, 1], "positions"), ([-1, 2], "positions")]
)
def test_positions_must_be_rising_numbers(positions: list[int], field: str) -> None:
    request = extraction_request("x", 5)
    request.params.positions = positions
    request.prompt_token_ids = request.prompt_token_ids[: (positions or [4])[-1] + 1]
    refuse(request, field)


def test_the_prompt_must_end_with_the_last_position() -> None:
    request = extraction_request("x", 5, [2])
    request.prompt_token_ids = [1, 2, 3, 4]
    refuse(request, "positions")


def test_what_has_no_meaning_for_an_extraction_is_refused() -> None:
    refuse(extraction_request("x", 5, layers=[]), "layers")
    resumed = extraction_request("x", 5)
    resumed.resumed = [ResumedChoice([1])]
    refuse(resumed, "resumed")


def refuse(request: EngineCoreRequest, field: str) -> None:
    scheduler = scheduler_of()
    with pytest.raises(RequestError) as refused:
        scheduler.add_request(request)
    assert refused.value.field == field
    assert not scheduler.has_requests()


def test_an_extraction_may_be_as_long_as_the_model_and_fill_the_whole_pool() -> None:
    scheduler = scheduler_of(max_model_len=20, num_blocks=6)
    with pytest.raises(RequestError, match="at most 20 tokens"):
        read(scheduler, "x", 21)
    read(scheduler, "x", 20)
    _, outputs = step(scheduler)
    assert outputs["x"].finished and new_ids(step(scheduler)[0]) == []
