"""Requests that another engine had begun: they resume after the tokens that it output, and output none of them
again."""

from __future__ import annotations

import pytest

from ratoon.core.errors import RequestError
from ratoon.core.request import EngineCoreRequest, FinishReason, ResumedChoice
from ratoon.scheduling.branch import branch_seed
from ratoon.scheduling.scheduler import Scheduler
from tests.unit.scheduling.steps import add, new_ids, request_of, scheduler_of, step

PROMPT = list(range(100, 109))


def resumed_request(*choices: list[int] | ResumedChoice, **rest: object) -> EngineCoreRequest:
    """A request `a` whose choices have output these tokens."""
    request = request_of("a", PROMPT, n=len(choices), **rest)
    request.resumed = [choice if isinstance(choice, ResumedChoice) else ResumedChoice(choice) for choice in choices]
    return request


def finished(*tokens: int) -> ResumedChoice:
    return ResumedChoice(list(tokens), finished=True)


def resume(scheduler: Scheduler, *choices: list[int] | ResumedChoice, **rest: object) -> None:
    scheduler.add_request(resumed_request(*choices, **rest))
    scheduler.check()


# ---- going on ----


def test_prompt_and_given_tokens_are_computed_and_the_next_token_is_new() -> None:
    scheduler = scheduler_of()
    resume(scheduler, [7, 8, 9])
    plan, outputs = step(scheduler, {"a": 5})
    (new,) = plan.scheduled_new_reqs
    assert new.token_ids == [*PROMPT, 7, 8, 9] and new.num_prompt_tokens == len(PROMPT)
    assert plan.num_scheduled_tokens == {"a": 12} and plan.sampled_req_ids == ["a"]
    assert outputs["a", 0].new_token_ids == [5]


def test_given_tokens_count_towards_max_tokens() -> None:
    scheduler = scheduler_of()
    resume(scheduler, [7, 8], max_tokens=4)
    reasons = [step(scheduler)[1]["a", 0].finish_reason for _ in range(2)]
    assert reasons == [None, FinishReason.LENGTH]
    assert not scheduler.has_unfinished_requests()


def test_given_tokens_count_towards_min_tokens() -> None:
    scheduler = scheduler_of()
    resume(scheduler, [7, 8], min_tokens=3, stop_token_ids=[9])
    reasons = [step(scheduler, {"a": 9})[1]["a", 0].finish_reason for _ in range(2)]
    assert reasons == [None, FinishReason.STOP]


def test_a_long_answer_comes_back_in_chunks() -> None:
    scheduler = scheduler_of(max_num_batched_tokens=8)
    resume(scheduler, list(range(20)))
    sampled = [step(scheduler)[0].sampled_req_ids for _ in range(4)]
    assert sampled == [[], [], [], ["a"]]


def test_an_answer_beyond_the_budget_comes_back_in_parts_even_if_prompts_may_not_be_split() -> None:
    scheduler = scheduler_of(enable_chunked_prefill=False, max_num_batched_tokens=10)
    resume(scheduler, list(range(20)))
    _, outputs = step(scheduler)
    assert not outputs
    while scheduler.has_unfinished_requests():
        step(scheduler)


def test_a_prefix_that_others_left_is_used_and_not_counted_as_a_hit_of_the_prompt() -> None:
    scheduler = scheduler_of()
    add(scheduler, "b", PROMPT, max_tokens=1)
    step(scheduler)
    resume(scheduler, [7])
    plan, outputs = step(scheduler)
    assert plan.num_scheduled_tokens == {"a": 2}
    assert outputs["a", 0].num_cached_tokens == 0


# ---- several choices ----


def test_choices_go_on_each_behind_its_own_tokens_with_its_own_seed() -> None:
    scheduler = scheduler_of()
    resume(scheduler, [1], [2, 2], [3, 3, 3], seed=11)
    plan, outputs = step(scheduler)
    assert plan.fanout == {} and new_ids(plan) == ["a", "a#1", "a#2"]
    assert [new.token_ids[len(PROMPT) :] for new in plan.scheduled_new_reqs] == [[1], [2, 2], [3, 3, 3]]
    assert [new.seed for new in plan.scheduled_new_reqs] == [branch_seed(11, "a", choice) for choice in range(3)]
    assert set(outputs) == {("a", 0), ("a", 1), ("a", 2)}


def test_the_prompt_is_computed_once_for_all_choices() -> None:
    scheduler = scheduler_of()
    resume(scheduler, [1], [2], [3])
    plan, _ = step(scheduler)
    assert list(plan.num_scheduled_tokens.values()) == [10, 2, 2]  # the prompt has two full blocks of four tokens


@pytest.mark.parametrize(
    "choices",
    [([1], finished(2)), (finished(1), [2]), ([1], finished())],
    ids=["second", "first", "one that was aborted before its first token"],
)
def test_a_finished_choice_does_not_run_and_the_request_ends_with_the_others(
    choices: tuple[list[int] | ResumedChoice, ...],
) -> None:
    scheduler = scheduler_of()
    resume(scheduler, *choices, max_tokens=3)
    going_on = 0 if isinstance(choices[0], list) else 1
    for _ in range(2):
        _, outputs = step(scheduler)
        assert set(outputs) == {("a", going_on)}
    assert outputs["a", going_on].finish_reason == FinishReason.LENGTH
    assert not scheduler.has_unfinished_requests() and scheduler.kv_cache.usage == 0.0


def test_more_choices_than_rows_take_turns() -> None:
    scheduler = scheduler_of(max_num_seqs=1)
    resume(scheduler, [1], [2], [3], max_tokens=3)
    finished_choices = []
    while scheduler.has_unfinished_requests():
        _, outputs = step(scheduler)
        finished_choices += [choice for (_, choice), output in outputs.items() if output.finished]
    assert finished_choices == [0, 1, 2]


# ---- what belongs to the prompt ----


def test_prompt_logprobs_are_not_computed_again() -> None:
    scheduler = scheduler_of()
    add(scheduler, "b", PROMPT, max_tokens=1)
    step(scheduler)
    resume(scheduler, [1], [2], prompt_logprobs=0)
    plan, _ = step(scheduler)
    assert [new.params.prompt_logprobs for new in plan.scheduled_new_reqs] == [None, None]
    assert plan.num_scheduled_tokens == {"a": 2, "a#1": 2}


# ---- taken back ----


def test_an_abort_ends_the_choices_that_go_on() -> None:
    scheduler = scheduler_of()
    resume(scheduler, [1], finished(2), [3])
    assert [output.choice for output in scheduler.abort_requests(["a"])] == [0, 2]
    scheduler.check()
    assert not scheduler.has_unfinished_requests()


def test_one_choice_can_be_aborted_before_it_runs_here() -> None:
    scheduler = scheduler_of()
    resume(scheduler, [1], [2], max_tokens=2)
    assert [output.choice for output in scheduler.abort_requests(["a#1"])] == [1]
    scheduler.check()
    _, outputs = step(scheduler)
    assert outputs["a", 0].finish_reason == FinishReason.LENGTH
    assert not scheduler.has_unfinished_requests()


def test_the_ids_of_all_choices_are_in_use_until_the_end() -> None:
    scheduler = scheduler_of()
    resume(scheduler, [1], finished(2), max_tokens=2)
    with pytest.raises(RequestError, match="in use"):
        add(scheduler, "a#1", 4)
    step(scheduler)
    add(scheduler, "a#1", 4)


# ---- what is refused ----


@pytest.mark.parametrize(
    ("choices", "field"),
    [
        ([[1]], "resumed"),  # two are wanted
        ([finished(1), finished(2)], "resumed"),
        ([[1], []], "resumed[1]"),
        ([[1, 2, 3, 4], [1]], "resumed[0]"),  # as long as it may be, so it must have ended
    ],
)
def test_what_no_engine_can_have_given_is_refused(choices: list[list[int] | ResumedChoice], field: str) -> None:
    request = resumed_request(*choices, max_tokens=4)
    request.params.n = 2
    scheduler = scheduler_of()
    with pytest.raises(RequestError) as caught:
        scheduler.add_request(request)
    assert caught.value.field == field
    assert not scheduler.has_requests()
    scheduler.check()
