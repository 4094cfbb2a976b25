"""Texts that have ended and whose hidden states were asked for: each turns into an extraction over its own blocks."""

from __future__ import annotations

import random
from typing import Any

import pytest

from ratoon.core.config import CacheConfig, SchedulerConfig
from ratoon.core.errors import RequestError
from ratoon.core.kv import KVCacheConfig, KVCacheGroup, SlidingWindowSpec
from ratoon.core.params import HiddenStatesParams
from ratoon.core.request import EngineCoreOutput, EngineCoreRequest, FinishReason
from ratoon.scheduling.extraction import PATIENCE
from ratoon.scheduling.scheduler import Scheduler
from tests.unit.scheduling import test_beam_scheduling as beams
from tests.unit.scheduling.reading import PROMPT, answer_to, captures_of, extractions_of
from tests.unit.scheduling.steps import BLOCK_SIZE, request_of, scheduler_of

LAST: list = [-1]
ALL: list = [[0, None]]
DEPTHS = pytest.mark.parametrize("depth", [1, 2])


def states(pieces: list = LAST, **rest: Any) -> HiddenStatesParams:
    return HiddenStatesParams(positions=pieces, layers_passed=[2], **rest)


def asking(
    request_id: str = "g",
    pieces: list = LAST,
    prompt: int | list[int] = PROMPT,
    retain_kv: float | None = None,
    deadline: float | None = None,
    **params: Any,
) -> EngineCoreRequest:
    params.setdefault("max_tokens", 3)
    request = request_of(request_id, prompt, return_hidden_states=states(pieces, deadline=deadline), **params)
    request.retain_kv = retain_kv
    return request


def step(scheduler: Scheduler) -> list[EngineCoreOutput]:
    plan = scheduler.schedule()
    scheduler.check()
    outputs = scheduler.update_from_output(plan, answer_to(plan))
    scheduler.check()
    return outputs


def generate(scheduler: Scheduler, *request_ids: str) -> None:
    """Until the texts have ended."""
    while any(request_id in scheduler.state.requests for request_id in request_ids or ("g",)):
        step(scheduler)


def finish(scheduler: Scheduler) -> dict[str, list[EngineCoreOutput]]:
    received: dict[str, list[EngineCoreOutput]] = {}
    for _ in range(500):
        if not scheduler.has_requests():
            return received
        for output in step(scheduler):
            received.setdefault(output.request_id, []).append(output)
    raise AssertionError("it does not end")


def num_rows(outputs: list[EngineCoreOutput]) -> int:
    return sum(output.hidden_states.shape[1] for output in outputs if output.hidden_states is not None)


def windowed(window: int, num_blocks: int = 100, caching: bool = False) -> Scheduler:
    groups = (KVCacheGroup(SlidingWindowSpec(BLOCK_SIZE, 1, 8, "float16", window=window), (0,)),)
    cache = CacheConfig(block_size=BLOCK_SIZE, enable_prefix_caching=caching)
    return Scheduler(SchedulerConfig(), cache, KVCacheConfig(num_blocks, BLOCK_SIZE, groups), 200)


def test_the_last_token_is_one_row_in_its_own_blocks_and_the_runner_drops_its_row() -> None:
    scheduler = scheduler_of()
    scheduler.add_request(asking())
    step(scheduler)
    blocks = [block.block_id for block in scheduler.state.branches["g"].block_tables[0]]
    generate(scheduler)
    assert len(scheduler.leases) == 0 and scheduler.leases.stats.granted == 0
    plan = scheduler.schedule()
    capture = captures_of(plan)["g.states"]
    assert (capture.spans, capture.token_ids, capture.block_ids[0]) == ([(23, 1, True)], [7], blocks)
    assert plan.block_copies == [] and plan.finished_req_ids == ["g"] and plan.num_scheduled_tokens == {}
    (last,) = scheduler.update_from_output(plan, answer_to(plan))
    assert (last.finish_reason, last.num_rows_run, str(last.inherited_from)) == (FinishReason.STOP, 1, "lease")
    assert last.num_cached_tokens == 23
    assert not scheduler.has_requests() and scheduler.kv_cache.usage == 0.0


def test_a_lease_that_was_asked_for_is_granted_beside_the_reading() -> None:
    scheduler = scheduler_of()
    scheduler.add_request(asking(pieces=ALL, retain_kv=60.0))
    generate(scheduler)
    lease = scheduler.leases.find("g")
    assert lease is not None and lease.num_computed_tokens == 23
    (outputs,) = finish(scheduler).values()
    assert num_rows(outputs) == 24 and outputs[-1].num_rows_run == 24
    assert scheduler.leases.find("g") is lease and lease.num_computed_tokens == 23
    scheduler.leases.end_all()
    assert scheduler.kv_cache.usage == 0.0


def test_positions_that_the_text_does_not_have_are_not_read() -> None:
    scheduler = scheduler_of()
    scheduler.add_request(asking(pieces=[24]))
    assert list(finish(scheduler)) == ["g"]
    scheduler.add_request(asking("h", pieces=[24], max_tokens=4))
    assert num_rows(finish(scheduler)["h.states"]) == 1
    assert scheduler.kv_cache.usage == 0.0


def test_each_choice_is_read_while_others_go_on() -> None:
    scheduler = scheduler_of(max_num_seqs=4)
    scheduler.add_request(asking(n=2, max_tokens=9))
    step(scheduler)
    scheduler.stop_requests({"g#1": 1})
    scheduler.check()
    received = finish(scheduler)
    assert num_rows(received["g#1.states"]) == num_rows(received["g.states"]) == 1
    assert len(received["g"]) == 8 and scheduler.kv_cache.usage == 0.0


@DEPTHS
@pytest.mark.parametrize("end", ["failed", "overdue", "aborted", "wrong"])
def test_a_reading_ends_alone_and_the_text_is_as_it_was(end: str, depth: int) -> None:
    scheduler = scheduler_of(max_steps_in_flight=depth)
    scheduler.add_request(asking(deadline=5.0, retain_kv=60.0))
    generate(scheduler)
    if end == "failed":
        (output,) = scheduler.fail_requests(["g.states"], "it broke")
    elif end == "overdue":
        (output,) = scheduler.tick(6.0)
        assert output.refusal is not None
    elif end == "aborted":
        (output,) = scheduler.abort_requests(["g.states", "g"])
    else:
        plan = scheduler.schedule()
        result = answer_to(plan)
        result.errors["g.states"] = "not finite"
        result.hidden_states.clear()
        (output,) = scheduler.update_from_output(plan, result)
    assert output.request_id == "g.states" and output.finished
    scheduler.check()
    assert scheduler.leases.find("g") is not None
    scheduler.leases.end_all()
    finish(scheduler)
    assert scheduler.kv_cache.usage == 0.0


@DEPTHS
def test_a_stop_string_cuts_the_text_and_what_was_computed_behind_it_is_not_read(depth: int) -> None:
    scheduler = scheduler_of(max_steps_in_flight=depth)
    scheduler.add_request(asking(pieces=ALL, max_tokens=20, stop=["."]))
    for _ in range(6):
        step(scheduler)
    flying = scheduler.schedule() if depth == 2 else None
    (output,) = scheduler.stop_requests({"g": 2, "unknown": None})
    assert (output.request_id, output.finish_reason) == ("g", FinishReason.ABORT)
    scheduler.check()
    assert scheduler.stop_requests({"g": 2}) == [], "it came twice"
    branch = scheduler.state.branches["g.states"]
    assert branch.token_ids == [*PROMPT, 7, 7] and branch.num_computed_tokens == 23
    if flying is not None:
        assert scheduler.update_from_output(flying, answer_to(flying)) == []
    assert num_rows(finish(scheduler)["g.states"]) == 23
    assert scheduler.kv_cache.usage == 0.0


def test_a_text_that_may_hold_a_stop_string_is_read_when_its_length_is_told_and_costs_no_step_until_then() -> None:
    scheduler = scheduler_of()
    scheduler.add_request(asking(pieces=[[-3, 24]], stop=["."]))  # one that only the shorter text has
    assert list(finish(scheduler)) == ["g"]
    assert not scheduler.has_requests() and scheduler.kv_cache.usage > 0.0
    assert scheduler.stop_requests({"g": 3}) == []
    scheduler.check()
    received = finish(scheduler)["g.states"]
    assert num_rows(received) == 3 and received[-1].num_rows_run == 3
    assert scheduler.kv_cache.usage == 0.0


@pytest.mark.parametrize("end", ["aborted", "request aborted", "no such position", "memory", "alone"])
def test_what_waits_for_its_length_gives_its_memory_back(end: str) -> None:
    scheduler = scheduler_of(num_blocks=10 if end == "memory" else 100, caching=False)
    scheduler.add_request(asking(pieces=[23], stop=["."]))
    finish(scheduler)
    if end.endswith("aborted"):
        assert scheduler.abort_requests(["g.states" if end == "aborted" else "g"]) == []
    elif end == "no such position":
        assert scheduler.stop_requests({"g": 2}) == []
    else:
        scheduler.add_request(request_of("h", 30, max_tokens=1))
        if end == "alone":
            scheduler.state.quarantined["h"] = scheduler.state.requests["h"]
        assert finish(scheduler)["h"][-1].finished
    scheduler.check()
    assert scheduler.kv_cache.usage == 0.0
    if end in ("memory", "alone"):
        scheduler.stop_requests({"g": 3})
        assert finish(scheduler)["g.states"][-1].num_rows_run == 24


def test_a_request_that_failed_before_its_stop_string_was_found_has_no_states() -> None:
    scheduler = scheduler_of()
    scheduler.add_request(asking(stop=["."], max_tokens=9))
    step(scheduler)
    scheduler.fail_requests(["g"], "it broke")
    (output,) = scheduler.stop_requests({"g": 1})
    assert (output.request_id, output.finish_reason) == ("g.states", FinishReason.ERROR) and output.error
    assert scheduler.stop_requests({"g": None}) == []


def test_a_reading_that_lost_its_memory_begins_again_and_computes_no_more_than_it_reads() -> None:
    scheduler = scheduler_of(caching=False)
    for pieces, span in (([2, -1], (0, 24, True)), ([2], (0, 3, True))):
        scheduler.add_request(asking(pieces=pieces))
        generate(scheduler)
        scheduler.state.reclaim(scheduler.state.branches["g.states"])
        scheduler.check()
        plan = scheduler.schedule()
        assert captures_of(plan)["g.states"].spans == [span]
        (last,) = scheduler.update_from_output(plan, answer_to(plan))
        assert last.finish_reason == FinishReason.STOP and last.num_rows_run == span[1]


@pytest.mark.parametrize(("pieces", "num_run"), [(LAST, 1), ([28, -1], 3), ([26, -1], 31), ([2], 3), (ALL, 31)])
def test_what_a_sliding_window_has_freed_is_computed_again(pieces: list, num_run: int) -> None:
    """Of 31 tokens the first 20 are freed. With a window of 8, position 28 reads what is left, and 26 does not."""
    scheduler = windowed(8)
    scheduler.add_request(asking(pieces=pieces, max_tokens=10))
    received = finish(scheduler)["g.states"]
    assert received[-1].num_rows_run == num_run and received[-1].finish_reason == FinishReason.STOP
    assert scheduler.kv_cache.usage == 0.0


@pytest.mark.parametrize("num_passed_by", [0, PATIENCE])
def test_a_reading_from_the_middle_of_a_full_block_fits_into_a_pool_of_its_own_size(num_passed_by: int) -> None:
    scheduler = windowed(16, num_blocks=6, caching=True)  # the null block, and five for the 17 tokens
    scheduler.add_request(asking(pieces=[[13, None]], prompt=5, max_tokens=12))
    generate(scheduler)
    (task,) = extractions_of(scheduler).running
    task.num_passed_by = num_passed_by
    assert task.branch.num_computed_tokens == 13 and scheduler.kv_cache.num_free_blocks == 1
    plan = scheduler.schedule()  # it writes the end of its fourth block, which is in the prefix cache, and a fifth
    assert captures_of(plan)["g.states"].spans == [(13, 4, True)]
    scheduler.check()
    outputs = scheduler.update_from_output(plan, answer_to(plan))
    assert num_rows(outputs) == 4 and outputs[-1].finish_reason == FinishReason.STOP


@pytest.mark.parametrize("retain_kv", [None, 60.0])
def test_every_text_of_a_search_is_read_in_the_blocks_of_its_beam(retain_kv: float | None) -> None:
    scheduler = scheduler_of(caching=False)
    search = beams.search_of("s", 9, width=3, n=2, retain_kv=retain_kv, return_hidden_states=states())
    scheduler.add_request(search)
    while "s" in scheduler.state.requests:
        beams.step(scheduler)
    assert set(scheduler.state.requests) == {"s.states", "s#1.states"}
    received = finish(scheduler)
    assert [outputs[-1].num_rows_run for outputs in received.values()] == [1, 1]
    assert len(scheduler.leases) == (0 if retain_kv is None else 2)
    scheduler.leases.end_all()
    assert scheduler.kv_cache.usage == 0.0


def test_texts_of_a_search_whose_blocks_were_needed_are_computed_again() -> None:
    scheduler = scheduler_of(caching=False)
    scheduler.add_request(beams.search_of("s", 9, n=2, max_tokens=6, return_hidden_states=states()))
    found = [(-0.1, 0, beams.EOS), (-0.2, 0, 10), (-0.3, 0, 11), (-9.0, 0, 12)]
    beams.step(scheduler, s=found)  # a text has ended, and is kept
    scheduler.state.requests["s"].task.forget_kept()
    while "s" in scheduler.state.requests:
        beams.step(scheduler)
    received = finish(scheduler)
    assert len(received) == 2 and all(outputs[-1].finish_reason == FinishReason.STOP for outputs in received.values())
    assert scheduler.kv_cache.usage == 0.0


def test_a_stop_that_is_found_one_step_late_leaves_no_trace_in_what_is_read() -> None:
    scheduler = scheduler_of(max_steps_in_flight=2)
    scheduler.add_request(asking(pieces=ALL, max_tokens=20, stop_token_ids=[7]))
    first, second = scheduler.schedule(), scheduler.schedule()
    assert second.num_scheduled_tokens == {"g": 1}
    scheduler.update_from_output(first, answer_to(first))
    scheduler.check()
    third = scheduler.schedule()
    assert third.num_scheduled_tokens == {} and "g.states" in captures_of(third)
    assert scheduler.update_from_output(second, answer_to(second)) == []
    (last,) = scheduler.update_from_output(third, answer_to(third))
    assert last.finished and last.hidden_states.shape[1] == 22
    scheduler.check()


def test_a_step_that_fails_is_tried_again_and_then_ends_the_reading_alone() -> None:
    scheduler = scheduler_of()
    scheduler.add_request(asking("g"))
    scheduler.add_request(asking("h", max_tokens=9, prompt=9))
    generate(scheduler)
    plan = scheduler.schedule()
    assert set(plan.req_ids) == {"g.states", "h"}
    assert scheduler.step_failed(plan, "it broke") == []
    scheduler.check()
    alone = scheduler.schedule()
    while set(alone.req_ids) != {"g.states"}:
        scheduler.update_from_output(alone, answer_to(alone))
        alone = scheduler.schedule()
    (output,) = scheduler.step_failed(alone, "it broke")
    assert (output.request_id, output.finish_reason, output.error) == ("g.states", FinishReason.ERROR, "it broke")
    scheduler.check()
    assert num_rows(finish(scheduler)["h.states"]) == 1


def test_ids_of_readings_are_reserved() -> None:
    scheduler = scheduler_of()
    scheduler.add_request(asking())
    generate(scheduler)
    with pytest.raises(RequestError, match=r"'g\.states' is in use"):
        scheduler.add_request(asking())
    finish(scheduler)
    scheduler.add_request(asking())


@DEPTHS
def test_generation_goes_first_and_takes_the_memory_of_readings(depth: int) -> None:
    random_numbers = random.Random(3)
    scheduler = scheduler_of(num_blocks=30, max_num_batched_tokens=16, max_num_seqs=4, max_steps_in_flight=depth)
    num_choices = 0
    for number in range(30):
        n = random_numbers.choice([1, 1, 3])
        num_choices += n
        scheduler.add_request(
            asking(
                f"r{number}",
                random_numbers.choice([LAST, ALL, [3], [0, -2]]),
                prompt=random_numbers.randint(4, 20),
                retain_kv=random_numbers.choice([None, 60.0]),
                max_tokens=random_numbers.randint(1, 12),
                n=n,
            )
        )
    received = finish(scheduler)
    read = {name: outputs for name, outputs in received.items() if name.endswith(".states")}
    assert len(read) == num_choices
    assert all(outputs[-1].finish_reason == FinishReason.STOP for outputs in read.values())
    assert not extractions_of(scheduler)
    scheduler.leases.end_all()
    assert scheduler.kv_cache.usage == 0.0
