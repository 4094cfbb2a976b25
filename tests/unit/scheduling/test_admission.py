from __future__ import annotations

import pytest

from ratoon.core.config import CacheConfig, SchedulerConfig
from ratoon.core.errors import RequestError
from ratoon.core.kv import KVCacheConfig, KVCacheGroup, SlidingWindowSpec
from ratoon.memory.hashing import pack_tokens
from ratoon.scheduling.scheduler import Scheduler
from tests.unit.scheduling.steps import add, scheduler_of, step


def refusal(scheduler: Scheduler, *args: object, **kwargs: object) -> RequestError:
    with pytest.raises(RequestError) as caught:
        add(scheduler, *args, **kwargs)
    assert not scheduler.has_requests()
    scheduler.check()
    return caught.value


def test_an_empty_prompt_is_refused() -> None:
    assert refusal(scheduler_of(), "a", 0).field == "prompt"


@pytest.mark.parametrize("bad", [[2**31], [-(2**31) - 1], ["x"], [1.5], [None]])
def test_what_is_no_token_id_is_refused(bad: list[object]) -> None:
    assert refusal(scheduler_of(), "a", bad).field == "prompt"


def test_a_prompt_is_packed_once_for_the_runner() -> None:
    scheduler = scheduler_of()
    add(scheduler, "a", [5, 6, 2**31 - 1])
    (new,) = scheduler.schedule().scheduled_new_reqs
    assert new.packed_prompt == pack_tokens([5, 6, 2**31 - 1])


def test_a_prompt_that_leaves_no_token_to_generate_is_refused_with_the_limit() -> None:
    error = refusal(scheduler_of(max_model_len=20), "a", 20)
    assert error.field == "prompt" and "20 tokens" in str(error) and "at most 19" in str(error)
    add(scheduler_of(max_model_len=20), "a", 19)


def test_a_request_that_can_never_fit_is_refused_with_what_would() -> None:
    error = refusal(scheduler_of(num_blocks=6), "a", 10, max_tokens=11)  # 5 blocks of 4 tokens
    assert error.field == "max_tokens"
    assert "needs 6 blocks" in str(error) and "the pool has 5" in str(error) and "at most 10" in str(error)
    add(scheduler_of(num_blocks=6), "a", 10, max_tokens=10)


def test_a_prompt_that_can_never_fit_is_refused_as_such() -> None:
    error = refusal(scheduler_of(num_blocks=6), "a", 30, max_tokens=1)
    assert error.field == "prompt" and "at most 19 tokens" in str(error)


def test_without_max_tokens_the_longest_sequence_must_fit() -> None:
    error = refusal(scheduler_of(num_blocks=6, max_model_len=100), "a", 10, max_tokens=None)
    assert "needs 25 blocks" in str(error)


def test_choices_that_do_not_fit_together_are_no_reason_to_refuse() -> None:
    scheduler = scheduler_of(num_blocks=6)
    add(scheduler, "a", 10, max_tokens=10, n=8)
    for _ in range(300):
        if not scheduler.has_requests():
            break
        step(scheduler)
    assert not scheduler.has_requests()


def test_a_window_needs_room_for_itself_and_a_step_only() -> None:
    groups = (KVCacheGroup(SlidingWindowSpec(4, 1, 8, "float16", window=8), (0,)),)
    scheduler = Scheduler(SchedulerConfig(max_prefill_chunk=4), CacheConfig(), KVCacheConfig(6, 4, groups), 200)
    add(scheduler, "a", 100, max_tokens=20)
    while scheduler.has_requests():
        step(scheduler)


def test_an_unsplittable_prompt_beyond_the_budget_is_refused() -> None:
    scheduler = scheduler_of(enable_chunked_prefill=False, max_num_batched_tokens=8)
    error = refusal(scheduler, "a", 9)
    assert error.field == "prompt" and "at most 8 tokens" in str(error)
    add(scheduler, "a", 8)


def test_an_id_in_use_is_refused_and_a_finished_one_is_free_again() -> None:
    scheduler = scheduler_of()
    add(scheduler, "a", 4, max_tokens=1)
    with pytest.raises(RequestError, match="request_id"):
        add(scheduler, "a", 4)
    step(scheduler)
    add(scheduler, "a", 4)


def test_an_id_that_a_choice_of_another_request_will_have_is_refused() -> None:
    scheduler = scheduler_of()
    add(scheduler, "a", 4, n=3)
    with pytest.raises(RequestError, match="a#2"):
        add(scheduler, "a#2", 4)
