"""Requests for a vector: scheduled like any other, never sampled, and ended by what the runner read out."""

from __future__ import annotations

from array import array

import pytest

from ratoon.core.errors import RequestError
from ratoon.core.outputs import ModelRunnerOutput
from ratoon.core.params import PoolingParams
from ratoon.core.plan import SchedulerOutput
from ratoon.core.request import EngineCoreOutput, EngineCoreRequest, FinishReason, ResumedChoice
from ratoon.core.wire import WireTensor
from ratoon.scheduling.scheduler import Scheduler
from tests.unit.scheduling.steps import PRIORITY, add, answer_of, new_ids, request_of, scheduler_of

KINDS = ["last", "mean"]


def vector_of(*numbers: float) -> WireTensor:
    return WireTensor("float32", (len(numbers),), array("f", numbers).tobytes())


VECTOR = vector_of(1.0, 2.0)


def pooling_request(
    request_id: str, prompt: int | list[int], pooling: str = "last", **rest: object
) -> EngineCoreRequest:
    request = request_of(request_id, prompt, **rest)
    request.params = PoolingParams(pooling=pooling)
    return request


def add_pooling(scheduler: Scheduler, *args: object, **rest: object) -> None:
    scheduler.add_request(pooling_request(*args, **rest))


def pooled_step(scheduler: Scheduler) -> tuple[SchedulerOutput, dict[str, EngineCoreOutput]]:
    """Plan, answer with tokens and vectors, update, check. Outputs by request."""
    plan = scheduler.schedule()
    scheduler.check()
    result = answer_of(plan)
    result.pooled = dict.fromkeys(plan.pooled_req_ids, VECTOR)
    outputs = scheduler.update_from_output(plan, result)
    scheduler.check()
    return plan, {output.request_id: output for output in outputs}


# ---- the ordinary way ----


@pytest.mark.parametrize("kind", KINDS)
def test_a_prompt_ends_with_its_vector_and_is_never_sampled(kind: str) -> None:
    scheduler = scheduler_of()
    add_pooling(scheduler, "a", 9, kind)
    plan, outputs = pooled_step(scheduler)
    assert plan.pooled_req_ids == ["a"] and plan.sampled_req_ids == [] and plan.fanout == {}
    assert plan.scheduled_new_reqs[0].params == PoolingParams(pooling=kind)
    output = outputs["a"]
    assert (output.finish_reason, output.pooled, output.new_token_ids) == (FinishReason.STOP, VECTOR, [])
    assert not scheduler.has_unfinished_requests() and scheduler.kv_cache.usage == 0.0
    plan, _ = pooled_step(scheduler)
    assert plan.finished_req_ids == ["a"] and plan.is_empty


@pytest.mark.parametrize("length", [1, 4, 5, 9])  # a last chunk of one token, with and without room in the last block
def test_only_the_chunk_with_the_last_token_reads_the_vector_out(length: int) -> None:
    scheduler = scheduler_of(max_num_batched_tokens=2)
    add_pooling(scheduler, "a", length)
    plans = []
    while scheduler.has_unfinished_requests():
        plan, outputs = pooled_step(scheduler)
        plans.append(plan)
    assert [plan.pooled_req_ids for plan in plans] == [[]] * (len(plans) - 1) + [["a"]]
    assert sum(plan.total_num_scheduled_tokens for plan in plans) == length
    assert not any(plan.sampled_req_ids for plan in plans)
    assert outputs["a"].pooled == VECTOR


def test_vectors_and_tokens_come_from_the_same_step() -> None:
    scheduler = scheduler_of()
    add(scheduler, "a", 4)
    add_pooling(scheduler, "b", 5)
    add(scheduler, "c", 6, n=2)
    plan, outputs = pooled_step(scheduler)
    assert plan.sampled_req_ids == ["a", "c"] and plan.pooled_req_ids == ["b"]
    assert outputs["b"].finished and not outputs["a"].finished and not outputs["c"].finished
    plan, _ = pooled_step(scheduler)
    assert plan.finished_req_ids == ["b"] and plan.sampled_req_ids == ["a", "c", "c#1"]


# ---- prefixes and preemption ----


def test_the_last_state_is_computed_behind_a_cached_prefix() -> None:
    scheduler = scheduler_of()
    prompt = list(range(100, 117))
    add(scheduler, "a", prompt, max_tokens=1)
    pooled_step(scheduler)
    add_pooling(scheduler, "b", prompt, "last")
    plan, outputs = pooled_step(scheduler)
    assert plan.num_scheduled_tokens == {"b": 1}
    assert outputs["b"].num_cached_tokens == 16


def test_a_mean_computes_every_row_and_leaves_its_blocks_for_others() -> None:
    scheduler = scheduler_of()
    prompt = list(range(100, 117))
    add(scheduler, "a", prompt, max_tokens=1)
    pooled_step(scheduler)
    queries = scheduler.stats().prefix_cache.queries
    add_pooling(scheduler, "b", prompt, "mean", salt="other")
    plan, outputs = pooled_step(scheduler)
    assert plan.num_scheduled_tokens == {"b": 17} and outputs["b"].num_cached_tokens == 0
    assert scheduler.stats().prefix_cache.queries == queries
    add(scheduler, "c", prompt, salt="other")
    plan, _ = pooled_step(scheduler)
    assert plan.num_scheduled_tokens == {"c": 1}


@pytest.mark.parametrize("kind", KINDS)
def test_after_preemption_a_mean_begins_anew_and_a_last_state_goes_on(kind: str) -> None:
    scheduler = scheduler_of(num_blocks=8, policy=PRIORITY, max_prefill_chunk=8)
    add_pooling(scheduler, "a", 24, kind, priority=9)
    pooled_step(scheduler)
    add(scheduler, "b", 4, max_tokens=4, priority=0)
    for _ in range(50):
        plan, outputs = pooled_step(scheduler)
        if "a" in plan.preempted_req_ids:
            break
    assert plan.preempted_req_ids == ["a"] and "a" not in outputs
    while "a" not in new_ids(plan):
        plan, outputs = pooled_step(scheduler)
    num_kept = plan.scheduled_new_reqs[0].num_computed_tokens
    assert num_kept == 0 if kind == "mean" else num_kept > 0
    while scheduler.has_unfinished_requests():
        plan, outputs = pooled_step(scheduler)
    assert outputs["a"].pooled == VECTOR


# ---- failures and aborts ----


def test_a_prompt_whose_vector_did_not_come_fails_and_the_others_end() -> None:
    scheduler = scheduler_of()
    add_pooling(scheduler, "a", 4)
    add_pooling(scheduler, "b", 4)
    plan = scheduler.schedule()
    outputs = {o.request_id: o for o in scheduler.update_from_output(plan, ModelRunnerOutput(pooled={"b": VECTOR}))}
    assert outputs["a"].finish_reason == FinishReason.ERROR and "no vector" in outputs["a"].error
    assert outputs["b"].pooled == VECTOR
    assert not scheduler.has_unfinished_requests()
    scheduler.check()


def test_an_error_of_the_runner_fails_the_request_once() -> None:
    scheduler = scheduler_of()
    add_pooling(scheduler, "a", 4)
    add_pooling(scheduler, "b", 4)
    plan = scheduler.schedule()
    result = ModelRunnerOutput(pooled={"b": VECTOR}, errors={"a": "NaN"})
    outputs = [(o.request_id, o.finish_reason, o.error) for o in scheduler.update_from_output(plan, result)]
    assert outputs == [("a", FinishReason.ERROR, "NaN"), ("b", FinishReason.STOP, None)]
    scheduler.check()


def test_a_vector_for_a_request_that_was_aborted_in_flight_is_dropped() -> None:
    scheduler = scheduler_of()
    add_pooling(scheduler, "a", 8)
    plan = scheduler.schedule()
    (aborted,) = scheduler.abort_requests(["a"])
    assert aborted.finish_reason == FinishReason.ABORT and aborted.pooled is None
    add_pooling(scheduler, "a", [1, 2, 3])  # the id is free again, and the old vector is not its own
    assert scheduler.update_from_output(plan, ModelRunnerOutput(pooled={"a": VECTOR})) == []
    plan, outputs = pooled_step(scheduler)
    assert plan.num_scheduled_tokens == {"a": 3} and outputs["a"].pooled == VECTOR


# ---- what is refused ----


def test_a_pooled_prompt_may_be_as_long_as_the_model_allows() -> None:
    scheduler = scheduler_of(max_model_len=20)
    with pytest.raises(RequestError, match="at most 20 tokens"):
        add_pooling(scheduler, "a", 21)
    add_pooling(scheduler, "a", 20)
    _, outputs = pooled_step(scheduler)
    assert outputs["a"].pooled == VECTOR


def test_a_pooled_prompt_may_fill_the_whole_pool() -> None:
    scheduler = scheduler_of(num_blocks=6)  # 5 of them, of 4 tokens
    with pytest.raises(RequestError, match="at most 20 tokens"):
        add_pooling(scheduler, "a", 21)
    add_pooling(scheduler, "a", 20)
    _, outputs = pooled_step(scheduler)
    assert outputs["a"].pooled == VECTOR


@pytest.mark.parametrize("field", ["resumed", "pooling"])
def test_what_has_no_meaning_for_a_vector_is_refused(field: str) -> None:
    request = pooling_request("a", 4)
    if field == "resumed":
        request.resumed = [ResumedChoice([1])]
    else:
        request.params = PoolingParams(pooling="middle")
    scheduler = scheduler_of()
    with pytest.raises(RequestError) as caught:
        scheduler.add_request(request)
    assert caught.value.field == field
    assert not scheduler.has_requests()
