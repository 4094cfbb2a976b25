"""When requests were queued, scheduled, preempted and computed, as the engine's outputs tell it."""

from __future__ import annotations

from ratoon.core.request import EngineCoreEvent, EngineCoreEventType, EngineCoreOutput, EngineCoreRequest
from ratoon.scheduling.events import MAX_EVENTS
from ratoon.scheduling.scheduler import Scheduler
from tests.unit.scheduling.steps import answer_of, request_of, scheduler_of

QUEUED, SCHEDULED, PREEMPTED, PREFILL_CHUNK = EngineCoreEventType


def step_at(scheduler: Scheduler, begin: float, end: float) -> dict[str, EngineCoreOutput]:
    scheduler.tick(begin)
    plan = scheduler.schedule()
    outputs = scheduler.update_from_output(plan, answer_of(plan), end)
    scheduler.check()
    return {output.request_id: output for output in outputs}


def told(output: EngineCoreOutput) -> list[tuple]:
    return [(event.type, event.timestamp) for event in output.events or []]


def traced(request: EngineCoreRequest) -> EngineCoreRequest:
    request.trace_headers = {}
    return request


def test_the_first_output_tells_when_a_request_was_queued_and_scheduled_and_the_next_tell_nothing():
    scheduler = scheduler_of(max_num_seqs=1)
    scheduler.add_request(request_of("a", 5, max_tokens=2), now=1.0)
    scheduler.add_request(request_of("b", 5), now=1.5)
    assert told(step_at(scheduler, 2.0, 3.0)["a"]) == [(QUEUED, 1.0), (SCHEDULED, 2.0)]
    assert step_at(scheduler, 3.0, 4.0)["a"].events is None
    assert told(step_at(scheduler, 5.0, 6.0)["b"]) == [(QUEUED, 1.5), (SCHEDULED, 5.0)]
    assert step_at(scheduler, 6.0, 7.0)["b"].events is None


def test_a_preemption_and_the_way_back_are_told():
    scheduler = scheduler_of(num_blocks=6, caching=False)
    scheduler.add_request(request_of("a", 8, max_tokens=9), now=0.0)
    scheduler.add_request(request_of("b", 8, max_tokens=3), now=0.0)
    events = []
    for second in range(1, 20):
        output = step_at(scheduler, second, second + 0.5).get("b")
        events += told(output) if output is not None else []
    kinds = [kind for kind, _ in events]
    assert kinds == [QUEUED, SCHEDULED, PREEMPTED, SCHEDULED]
    assert [time for _, time in events] == sorted(time for _, time in events)
    assert events[2][1] < events[3][1]


def test_parts_of_a_prompt_are_told_of_requests_that_are_traced():
    scheduler = scheduler_of(max_num_batched_tokens=4)
    scheduler.add_request(traced(request_of("a", 10)), now=0.5)
    assert step_at(scheduler, 1.0, 1.25) == step_at(scheduler, 2.0, 2.25) == {}
    output = step_at(scheduler, 3.0, 3.5)["a"]
    chunks = [event for event in output.events or [] if event.type == PREFILL_CHUNK]
    assert chunks == [
        EngineCoreEvent(PREFILL_CHUNK, 1.0, 0.25, 4),
        EngineCoreEvent(PREFILL_CHUNK, 2.0, 0.25, 4),
        EngineCoreEvent(PREFILL_CHUNK, 3.0, 0.5, 2),
    ]
    for second in range(4, 12):  # decoding, beyond the end of a block
        assert step_at(scheduler, second, second + 0.5)["a"].events is None
    scheduler.abort_requests(["a"])
    scheduler.add_request(request_of("b", 10), now=20.0)
    for second in (20, 21):
        step_at(scheduler, second, second)
    assert [kind for kind, _ in told(step_at(scheduler, 22, 22)["b"])] == [QUEUED, SCHEDULED]


def test_a_request_that_ends_without_a_token_tells_what_there_was():
    scheduler = scheduler_of(max_num_batched_tokens=4)
    scheduler.add_request(request_of("a", 10), now=0.5)
    scheduler.add_request(request_of("waits", 10), now=0.5)
    step_at(scheduler, 1.0, 1.5)
    ended, never_began = scheduler.abort_requests(["a", "waits"])
    assert told(ended) == [(QUEUED, 0.5), (SCHEDULED, 1.0)] and never_began.events is None
    scheduler.check()


def test_one_of_several_choices_that_is_aborted_leaves_no_event_behind():
    scheduler = scheduler_of(max_num_seqs=1)
    scheduler.add_request(request_of("a", 5, n=2), now=0.5)
    step_at(scheduler, 1.0, 1.5)
    scheduler.abort_requests(["a#0"])
    step_at(scheduler, 2.0, 2.5)
    scheduler.abort_requests(["a#1"])
    scheduler.check()
    assert not scheduler.state.events


def test_the_events_of_a_request_that_gets_nothing_are_bounded():
    scheduler = scheduler_of(max_num_batched_tokens=1, max_model_len=4000, num_blocks=1000)
    scheduler.add_request(traced(request_of("a", list(range(MAX_EVENTS + 50)))), now=0.0)
    outputs: dict[str, EngineCoreOutput] = {}
    while not outputs:
        scheduler.tick(1.0)
        plan = scheduler.schedule()
        outputs = {output.request_id: output for output in scheduler.update_from_output(plan, answer_of(plan), 1.0)}
    assert len(outputs["a"].events or []) == MAX_EVENTS
