"""Requests with adapters in the scheduler: they wait outside the queue until theirs is loaded, and all have a turn."""

from __future__ import annotations

import pytest

from ratoon.core.adapters import Adapter, AdapterReport
from ratoon.core.errors import RequestError
from ratoon.core.outputs import ModelRunnerOutput
from ratoon.core.params import BeamSearchParams, PoolingParams
from ratoon.core.plan import SchedulerOutput
from ratoon.core.request import EngineCoreOutput, EngineCoreRequest, Extraction, FinishReason
from ratoon.scheduling.scheduler import Scheduler
from tests.unit.scheduling.steps import add, answer_of, new_ids, request_of, scheduler_of, step

A, B, C = (Adapter(name * 32, f"/adapters/{name}", 8) for name in "abc")


def run(scheduler: Scheduler, loaded: list[int] | None = None) -> tuple[SchedulerOutput, list[EngineCoreOutput]]:
    """A step after which these adapters are there, and no others."""
    plan = scheduler.schedule()
    result = answer_of(plan)
    result.adapters = AdapterReport(loaded) if loaded else None
    outputs = scheduler.update_from_output(plan, result)
    scheduler.check()
    return plan, outputs


def slots_of(plan: SchedulerOutput) -> dict[str, int]:
    return {new.req_id: new.adapter_slot for new in plan.scheduled_new_reqs}


def test_a_request_waits_outside_the_queue_while_its_adapter_is_loaded_and_others_overtake_it() -> None:
    scheduler = scheduler_of(num_adapter_slots=2)
    add(scheduler, "tuned", 4, adapter=A)
    add(scheduler, "base", 4)
    plan, _ = run(scheduler)
    assert slots_of(plan) == {"base": -1}
    assert [(load.slot, load.adapter) for load in plan.adapter_loads] == [(0, A)]
    assert scheduler.stats().adapters.num_waiting == 1
    plan, _ = run(scheduler, loaded=[0])
    assert not plan.adapter_loads and not new_ids(plan)
    plan, _ = run(scheduler)
    assert slots_of(plan) == {"tuned": 0}
    stats = scheduler.stats().adapters
    assert (stats.num_loaded, stats.num_waiting, stats.loads, stats.holders) == (1, 0, 1, {A.digest: 1})


def test_a_step_without_other_work_asks_for_news() -> None:
    scheduler = scheduler_of(num_adapter_slots=1)
    add(scheduler, "tuned", 4, adapter=A)
    plan, _ = run(scheduler)
    assert plan.adapter_loads and not plan.awaits_adapters
    plan, _ = run(scheduler)
    assert plan.awaits_adapters and plan.is_empty and not plan.is_void
    run(scheduler, loaded=[0])
    assert slots_of(run(scheduler)[0]) == {"tuned": 0}


def test_an_adapter_that_cannot_be_loaded_fails_the_requests_that_wait_for_it_alone() -> None:
    scheduler = scheduler_of(num_adapter_slots=2)
    for name, adapter in (("a", A), ("a2", A), ("b", B)):
        add(scheduler, name, 4, adapter=adapter)
    plan = scheduler.schedule()
    report = AdapterReport([1], {0: "adapter_model.safetensors is missing"})
    outputs = scheduler.update_from_output(plan, ModelRunnerOutput(adapters=report))
    assert [(one.request_id, one.finish_reason) for one in outputs] == [
        ("a", FinishReason.ERROR),
        ("a2", FinishReason.ERROR),
    ]
    assert outputs[0].refusal.subject == "adapter"
    assert "/adapters/a can't be loaded: adapter_model.safetensors is missing" in outputs[0].error
    assert slots_of(run(scheduler)[0]) == {"b": 1}
    add(scheduler, "again", 4, adapter=A)  # files may have been repaired
    assert [load.adapter for load in run(scheduler)[0].adapter_loads] == [A]


def test_an_engine_without_slots_refuses_adapters() -> None:
    with pytest.raises(RequestError, match=r"adapter: .*no memory for adapters.*enable_lora"):
        add(scheduler_of(), "a", 4, adapter=A)


def test_blocks_are_not_shared_with_another_adapter() -> None:
    scheduler = scheduler_of(num_adapter_slots=2)
    prompt = list(range(12))
    for name, adapter in (("base", None), ("a", A), ("b", B)):
        add(scheduler, name, prompt, adapter=adapter, max_tokens=1)
    while scheduler.has_unfinished_requests():
        _, outputs = step(scheduler)
        assert all(output.num_cached_tokens == 0 for output in outputs.values())
    same_files = Adapter(A.digest, "/elsewhere", 8)
    for name, adapter, num_cached in (("a again", A, 8), ("a elsewhere", same_files, 8), ("c", C, 0)):
        add(scheduler, name, prompt, adapter=adapter, max_tokens=1)
        while scheduler.has_unfinished_requests():
            _, outputs = step(scheduler)
        assert [output.num_cached_tokens for output in outputs.values()] == [num_cached]


def test_requests_for_a_loaded_adapter_do_not_keep_another_one_waiting_for_ever() -> None:
    scheduler = scheduler_of(num_adapter_slots=1, max_num_seqs=4)
    add(scheduler, "a0", 4, adapter=A, max_tokens=3, arrival=0.0)
    step(scheduler)
    add(scheduler, "b", 4, adapter=B, max_tokens=3, arrival=1.0)
    ended: list[str] = []
    for number in range(1, 40):  # another request for A in every step
        add(scheduler, f"a{number}", 4, adapter=A, max_tokens=3, arrival=1.0 + number)
        _, outputs = step(scheduler)
        ended += [one.request_id for one in outputs.values() if one.finished]
    assert ended[:2] == ["a0", "b"]
    while scheduler.has_unfinished_requests():
        _, outputs = step(scheduler)
        ended += [one.request_id for one in outputs.values() if one.finished]
    assert ended == ["a0", "b", *(f"a{number}" for number in range(1, 40))]


def test_two_adapters_that_wait_free_two_slots() -> None:
    scheduler = scheduler_of(num_adapter_slots=2)
    add(scheduler, "a", 4, adapter=A, max_tokens=4)
    add(scheduler, "b", 4, adapter=B, max_tokens=4)
    step(scheduler)
    add(scheduler, "c", 4, adapter=C, max_tokens=4, arrival=1.0)
    d = Adapter("d" * 32, "/adapters/d", 8)
    add(scheduler, "d", 4, adapter=d, max_tokens=4, arrival=2.0)
    step(scheduler)
    add(scheduler, "a2", 4, adapter=A, max_tokens=4, arrival=3.0)
    add(scheduler, "b2", 4, adapter=B, max_tokens=4, arrival=4.0)
    order: list[str] = []
    while scheduler.has_unfinished_requests():
        order += new_ids(step(scheduler)[0])
    assert order == ["c", "d", "a2", "b2"]


def test_a_slot_is_not_overwritten_while_a_step_in_flight_reads_it() -> None:
    scheduler = scheduler_of(num_adapter_slots=1, max_steps_in_flight=2)
    add(scheduler, "a", 4, adapter=A, max_tokens=9)
    step(scheduler)
    first, second = scheduler.schedule(), scheduler.schedule()
    scheduler.abort_requests(["a"])
    add(scheduler, "b", 4, adapter=B)
    scheduler.update_from_output(first, answer_of(first))
    third = scheduler.schedule()
    assert not third.adapter_loads
    scheduler.update_from_output(second, answer_of(second))
    assert [load.adapter for load in scheduler.schedule().adapter_loads] == [B]


def test_a_preempted_request_keeps_its_slot() -> None:
    scheduler = scheduler_of(num_blocks=7, num_adapter_slots=1)
    add(scheduler, "a", 8, adapter=A, max_tokens=12)
    add(scheduler, "b", 8, max_tokens=12, arrival=-1.0)
    slots = []
    while scheduler.has_unfinished_requests():
        plan, _ = step(scheduler)
        slots += [new.adapter_slot for new in plan.scheduled_new_reqs if new.req_id == "a"]
    assert scheduler.preemption.num_preemptions and slots == [0] * len(slots) and len(slots) > 1


def test_an_abort_while_the_adapter_is_loaded_leaves_nothing_behind() -> None:
    scheduler = scheduler_of(num_adapter_slots=1)
    add(scheduler, "a", 4, adapter=A)
    run(scheduler)
    (output,) = scheduler.abort_requests(["a"])
    assert output.finish_reason == FinishReason.ABORT
    scheduler.check()
    assert not scheduler.has_unfinished_requests()
    add(scheduler, "b", 4, adapter=B)
    assert not run(scheduler)[0].adapter_loads  # the slot is being written
    assert [load.adapter for load in run(scheduler, loaded=[0])[0].adapter_loads] == []
    assert [load.adapter for load in run(scheduler)[0].adapter_loads] == [B]


def test_loads_of_a_failed_step_are_announced_again() -> None:
    scheduler = scheduler_of(num_adapter_slots=1)
    add(scheduler, "base", 4)
    add(scheduler, "a", 4, adapter=A)
    plan = scheduler.schedule()
    assert plan.adapter_loads and not plan.is_empty
    assert scheduler.step_failed(plan, "lost") == []  # not known to be the request's fault
    assert scheduler.schedule().adapter_loads == plan.adapter_loads


def test_a_failed_step_that_did_nothing_but_load_an_adapter_fails_what_waits_for_it() -> None:
    scheduler = scheduler_of(num_adapter_slots=1)
    add(scheduler, "a", 4, adapter=A)
    plan = scheduler.schedule()
    (output,) = scheduler.step_failed(plan, "the device is on fire")
    assert output.request_id == "a" and "the device is on fire" in output.error
    scheduler.check()


@pytest.mark.parametrize(
    "params",
    [
        BeamSearchParams(beam_width=2, max_tokens=2, all_stop_token_ids=[]),
        PoolingParams(pooling="last"),
        Extraction([0, 3], [1]),
    ],
)
def test_every_kind_of_request_has_the_slot_of_its_adapter(params: object) -> None:
    scheduler = scheduler_of(num_adapter_slots=2)
    add(scheduler, "other", 4, adapter=B)
    run(scheduler, loaded=[0])
    request = request_of("one", 4, adapter=A)
    scheduler.add_request(EngineCoreRequest("one", request.prompt_token_ids, params, adapter=A))
    run(scheduler, loaded=[1])
    plan = scheduler.schedule()
    slots = slots_of(plan) | {capture.req_id: capture.adapter_slot for capture in plan.captures}
    assert slots["one"] == 1


def test_a_deadline_passes_while_the_adapter_is_loaded() -> None:
    scheduler = scheduler_of(num_adapter_slots=1)
    request = EngineCoreRequest("x", [1, 2, 3], Extraction([2], [1], deadline=5.0), adapter=A)
    scheduler.add_request(request, now=10.0)
    assert scheduler.next_expiry() == 15.0
    (output,) = scheduler.tick(15.0)
    assert output.error.startswith("deadline")
    scheduler.check()
