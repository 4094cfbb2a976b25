"""Models without causal attention: a prompt runs in one step, or waits."""

from __future__ import annotations

from ratoon.core.params import PoolingParams
from ratoon.core.request import EngineCoreRequest
from ratoon.scheduling.scheduler import Scheduler
from tests.unit.scheduling.encoding import finish, step
from tests.unit.scheduling.reading import captures_of, extraction_request
from tests.unit.scheduling.steps import new_ids, request_of, scheduler_of


def whole(num_blocks: int = 100, max_num_batched_tokens: int = 20) -> Scheduler:
    return scheduler_of(
        num_blocks,
        caching=False,
        max_model_len=20,
        max_num_batched_tokens=max_num_batched_tokens,
        enable_chunked_prefill=False,
        whole_prompts=True,
    )


def vector_request(request_id: str, length: int) -> EngineCoreRequest:
    request = request_of(request_id, length)
    request.params = PoolingParams(pooling="mean")
    return request


def reader(request_id: str, length: int, positions: list[int]) -> EngineCoreRequest:
    """The prompt goes on behind the last position that is asked for: what lies there counts."""
    request = extraction_request(request_id, length)
    request.params.positions = positions
    return request


def test_vectors_share_a_step_as_far_as_whole_prompts_fit() -> None:
    scheduler = whole()
    for name, length in {"a": 9, "b": 9, "c": 9, "d": 2}.items():
        scheduler.add_request(vector_request(name, length))
    plan, outputs = step(scheduler)
    assert plan.num_scheduled_tokens == {"a": 9, "b": 9} and set(outputs) == {"a", "b"}
    plan, outputs = step(scheduler)
    assert plan.num_scheduled_tokens == {"c": 9, "d": 2} and set(outputs) == {"c", "d"}


def test_rows_are_read_out_of_a_prompt_that_runs_whole() -> None:
    scheduler = whole()
    scheduler.add_request(reader("x", 9, [0, 5]))
    plan, outputs = step(scheduler)
    capture = captures_of(plan)["x"]
    assert (capture.spans, capture.captured) == ([(0, 9, True)], [0, 5])
    assert outputs["x"].finished and outputs["x"].num_rows_run == 9
    assert scheduler.kv_cache.usage == 0.0


def test_a_reader_that_does_not_fit_into_the_rest_of_a_step_waits_and_holds_nothing() -> None:
    scheduler = whole()
    scheduler.add_request(vector_request("a", 15))
    scheduler.add_request(reader("x", 9, [0]))
    plan, outputs = step(scheduler)
    assert plan.captures == [] and "x" not in outputs and scheduler.kv_cache.usage == 0.0
    plan, outputs = step(scheduler)
    assert captures_of(plan)["x"].spans == [(0, 9, True)] and outputs["x"].finished


def test_a_reader_that_has_waited_for_long_gets_a_whole_step_before_newcomers() -> None:
    scheduler = whole()
    scheduler.add_request(reader("x", 20, [0]))
    for number in range(40):
        scheduler.add_request(vector_request(f"a{number}", 15))
        plan, outputs = step(scheduler)
        if "x" in outputs:
            break
    assert outputs["x"].finished and new_ids(plan) == []
    assert 8 <= number <= 17


def test_without_memory_for_all_of_it_nothing_of_it_runs() -> None:
    scheduler = whole(num_blocks=6)  # for 20 tokens
    scheduler.add_request(vector_request("a", 12))
    scheduler.add_request(vector_request("b", 12))
    plans = finish(scheduler)
    assert [plan.num_scheduled_tokens for plan in plans if plan.num_scheduled_tokens] == [{"a": 12}, {"b": 12}]
