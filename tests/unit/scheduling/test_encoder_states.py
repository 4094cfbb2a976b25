"""Requests for hidden states of an encoder-decoder model: of the encoder, which runs for them, and of the decoder."""

from __future__ import annotations

import pytest

from ratoon.core.errors import DeadlineError, RequestError
from ratoon.core.plan import EncoderStep
from ratoon.core.request import FinishReason, InheritedFrom
from ratoon.scheduling.extraction import PATIENCE
from tests.unit.scheduling.encoding import (
    add_encoded,
    answer_to,
    document,
    encoded,
    encoder_blocks,
    encoder_scheduler,
    finish,
    states_request,
    step,
)
from tests.unit.scheduling.reading import captures_of, extraction_request, extractions_of
from tests.unit.scheduling.steps import new_ids

# ---- of the encoder ----


def test_states_of_the_encoder_are_read_out_in_one_run_that_takes_no_memory() -> None:
    scheduler = encoder_scheduler()
    scheduler.add_request(states_request("x", document(9), [0, 4, 8]))
    plan = scheduler.schedule()
    scheduler.check()
    assert plan.encoder_steps == [EncoderStep("x", document(9), [], [0, 4, 8], [0, 3], "bfloat16")]
    assert plan.req_ids == ["x"] and not plan.is_empty
    assert plan.total_num_scheduled_tokens == 0 and plan.captures == [] and plan.scheduled_new_reqs == []
    assert scheduler.kv_cache.usage == 0.0
    (output,) = scheduler.update_from_output(plan, answer_to(plan))
    assert (output.finish_reason, output.first_row, output.num_rows_run) == (FinishReason.STOP, 0, 9)
    assert output.hidden_states is not None and output.hidden_states.shape == (2, 3, 1)
    assert not scheduler.has_requests() and scheduler.stats().num_encoder_runs == 1


def test_they_are_read_in_the_step_of_tokens_and_of_other_encoder_inputs() -> None:
    scheduler = encoder_scheduler()
    add_encoded(scheduler, "a", 4, document(6))
    scheduler.add_request(states_request("x", document(6), [5]))  # states are kept nowhere, only what becomes of them
    scheduler.add_request(states_request("y", document(3), [0]))
    plan, outputs = step(scheduler)
    assert encoder_blocks(plan) == {"a": [1, 2], "x": [], "y": []}
    assert plan.num_scheduled_tokens == {"a": 4} and plan.req_ids == ["a", "x", "y"]
    assert outputs["x"].finished and outputs["y"].finished and outputs["a"].new_token_ids == [7]


def test_generation_comes_first_in_the_encoder_s_budget_too() -> None:
    scheduler = encoder_scheduler(max_num_encoder_tokens=10)
    add_encoded(scheduler, "a", 4, 6)
    scheduler.add_request(states_request("x", document(5), [4]))
    scheduler.add_request(states_request("y", document(4), [3]))  # it would fit, and is not the first
    assert list(encoder_blocks(step(scheduler)[0])) == ["a"]
    assert list(encoder_blocks(step(scheduler)[0])) == ["x", "y"]


def test_inputs_of_newcomers_can_t_hold_it_back_forever() -> None:
    scheduler = encoder_scheduler(num_blocks=400, max_num_encoder_tokens=6)
    scheduler.add_request(states_request("x", document(6), [5]))
    for number in range(PATIENCE + 3):
        add_encoded(scheduler, f"a{number}", 4, document(4, number), max_tokens=1)
        plan, outputs = step(scheduler)
        if "x" in outputs:
            break
    assert number == PATIENCE and list(encoder_blocks(plan)) == ["x"]
    assert len(encoder_blocks(step(scheduler)[0])) == 1


def test_a_deadline_ends_one_that_was_not_let_in() -> None:
    scheduler = encoder_scheduler(max_num_encoder_tokens=6)
    scheduler.tick(100.0)
    add_encoded(scheduler, "a", 4, 6)
    scheduler.add_request(states_request("x", document(6), [5], deadline=5.0))
    step(scheduler)
    (output,) = scheduler.tick(105.0)
    scheduler.check()
    assert output.request_id == "x" and output.refusal is not None and output.refusal.kind == DeadlineError.__name__
    assert step(scheduler)[0].encoder_steps == []


def test_states_for_one_that_was_aborted_in_flight_are_dropped() -> None:
    scheduler = encoder_scheduler()
    scheduler.add_request(states_request("x", document(6), [5]))
    plan = scheduler.schedule()
    scheduler.abort_requests(["x"])
    scheduler.check()
    scheduler.add_request(states_request("x", document(3), [0, 1]))  # the id is free again
    assert scheduler.update_from_output(plan, answer_to(plan)) == []
    plan, outputs = step(scheduler)
    assert plan.encoder_steps[0].captured == [0, 1] and outputs["x"].num_rows_run == 3


def test_states_that_did_not_come_fail_their_request_and_no_other() -> None:
    scheduler = encoder_scheduler()
    scheduler.add_request(states_request("x", document(6), [5]))
    scheduler.add_request(states_request("y", document(3), [0]))
    plan = scheduler.schedule()
    result = answer_to(plan)
    del result.hidden_states["x"]
    outputs = {output.request_id: output for output in scheduler.update_from_output(plan, result)}
    assert outputs["x"].finish_reason == FinishReason.ERROR and "no hidden states" in outputs["x"].error
    assert outputs["y"].finish_reason == FinishReason.STOP and not scheduler.has_requests()


def test_after_a_step_that_failed_it_runs_again_alone() -> None:
    scheduler = encoder_scheduler()
    add_encoded(scheduler, "a", 4, 6, max_tokens=1)
    scheduler.add_request(states_request("x", document(6), [5]))
    plan = scheduler.schedule()
    assert scheduler.step_failed(plan, "no luck") == []
    scheduler.check()
    plans = finish(scheduler)
    assert [plan.req_ids for plan in plans] == [["a"], ["x"]]


def test_positions_must_be_the_encoder_input_s() -> None:
    scheduler = encoder_scheduler()
    with pytest.raises(RequestError, match="positions of the encoder input"):
        scheduler.add_request(states_request("x", document(6), [6]))
    without = encoder_scheduler(cross=None)
    request = states_request("x", document(6), [5])
    request.encoder_input = None
    with pytest.raises(RequestError) as refused:
        without.add_request(request)
    assert refused.value.field == "positions"


# ---- of the decoder ----


def test_of_a_prompt_of_its_own_the_encoder_runs_first_and_rows_read_its_table() -> None:
    scheduler = encoder_scheduler(max_prefill_chunk=4)
    request = extraction_request("x", 6)
    request.encoder_input = document(6)
    scheduler.add_request(request)
    plan, _ = step(scheduler)
    assert encoder_blocks(plan) == {"x": [1, 2]}
    capture = captures_of(plan)["x"]
    assert (capture.spans, capture.cross_block_ids, capture.num_encoder_positions) == ([(0, 4, True)], [1, 2], 6)
    plan, outputs = step(scheduler)
    assert plan.encoder_steps == [] and captures_of(plan)["x"].cross_block_ids == [1, 2]
    assert outputs["x"].finished and outputs["x"].num_rows_run == 6  # the encoder's are not counted
    assert scheduler.kv_cache.usage == 0.0


def test_of_a_leased_parent_the_table_is_read_and_the_encoder_does_not_run() -> None:
    scheduler = encoder_scheduler()
    parent = encoded("a", 6, document(6), retain_kv=1000.0, max_tokens=2)
    scheduler.add_request(parent)
    finish(scheduler)
    request = extraction_request("x", [*parent.prompt_token_ids, 7], [2, 6], parent="a")
    request.encoder_input = document(6)
    scheduler.add_request(request)
    plan, outputs = step(scheduler)
    assert plan.encoder_steps == [] and captures_of(plan)["x"].spans == [(2, 1, False), (6, 1, False)]
    assert captures_of(plan)["x"].cross_block_ids == [1, 2]
    assert outputs["x"].inherited_from == InheritedFrom.LEASE


def test_one_that_waits_for_memory_holds_no_table_that_only_the_next_step_writes() -> None:
    """It would not be in the step, and if that failed, its table would not be marked as invalid."""
    scheduler = encoder_scheduler(num_blocks=8, max_num_batched_tokens=8)
    add_encoded(scheduler, "a", 8, 4, max_tokens=12)
    request = extraction_request("x", 8)
    request.encoder_input = document(8)
    for _ in range(2):
        step(scheduler)
    assert scheduler.kv_cache.num_free_blocks == 3  # for its table, and not for its first rows too
    scheduler.add_request(request)
    extractions_of(scheduler).first.num_passed_by = PATIENCE
    plan, _ = step(scheduler)
    assert plan.req_ids == ["a"] and plan.encoder_steps == []
    assert scheduler.state.branches["x"].cross is None
    plans = finish(scheduler)
    assert sum(len(plan.encoder_steps) for plan in plans) == 1 and new_ids(plans[0]) == []
