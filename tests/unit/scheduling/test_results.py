"""The results of a step: stops, log-probabilities, errors, aborts in flight."""

from __future__ import annotations

import pytest

from ratoon.core.outputs import LogprobsLists, ModelRunnerOutput, PromptLogprobsChunk
from ratoon.core.request import FinishReason
from tests.unit.scheduling.steps import add, answer_of, scheduler_of, step


def rows_of(*tokens: int) -> LogprobsLists:
    return LogprobsLists([[token] for token in tokens], [[-1.0] for _ in tokens], [1 for _ in tokens])


# ---- stops ----


def test_eos_ends_a_branch_and_is_not_reported_as_a_stop_token() -> None:
    scheduler = scheduler_of()
    add(scheduler, "a", 4, all_stop_token_ids=[9, 2], stop_token_ids=[9])
    _, outputs = step(scheduler, {"a": 2})
    assert outputs["a", 0].finish_reason == FinishReason.STOP
    assert outputs["a", 0].stop_reason is None
    assert outputs["a", 0].new_token_ids == [2]


def test_a_named_stop_token_is_reported() -> None:
    scheduler = scheduler_of()
    add(scheduler, "a", 4, all_stop_token_ids=[9, 2], stop_token_ids=[9])
    _, outputs = step(scheduler, {"a": 9})
    assert (outputs["a", 0].finish_reason, outputs["a", 0].stop_reason) == (FinishReason.STOP, 9)


def test_a_stop_token_on_the_last_allowed_place_counts_as_a_stop() -> None:
    scheduler = scheduler_of()
    add(scheduler, "a", 4, stop_token_ids=[9], max_tokens=1)
    _, outputs = step(scheduler, {"a": 9})
    assert outputs["a", 0].finish_reason == FinishReason.STOP


def test_stop_tokens_do_not_count_before_min_tokens() -> None:
    scheduler = scheduler_of()
    add(scheduler, "a", 4, stop_token_ids=[9], min_tokens=2)
    reasons = [step(scheduler, {"a": 9})[1]["a", 0].finish_reason for _ in range(3)]
    assert reasons == [None, None, FinishReason.STOP]


@pytest.mark.parametrize(("max_tokens", "max_model_len", "expected"), [(3, 100, 3), (50, 10, 4), (None, 10, 4)])
def test_a_branch_ends_at_its_own_or_the_models_length(
    max_tokens: int | None, max_model_len: int, expected: int
) -> None:
    scheduler = scheduler_of(max_model_len=max_model_len)
    add(scheduler, "a", 6, max_tokens=max_tokens)
    outputs = []
    while scheduler.has_unfinished_requests():
        outputs.append(step(scheduler)[1]["a", 0])
    assert len(outputs) == expected
    assert outputs[-1].finish_reason == FinishReason.LENGTH


def test_what_follows_a_stop_in_a_burst_is_cut_off_with_its_logprobs() -> None:
    scheduler = scheduler_of()
    add(scheduler, "a", 4, stop_token_ids=[9])
    plan = scheduler.schedule()
    result = ModelRunnerOutput(["a"], [[1, 9, 3]], logprobs={"a": rows_of(1, 9, 3)})
    (output,) = scheduler.update_from_output(plan, result)
    assert output.new_token_ids == [1, 9]
    assert output.new_logprobs == rows_of(1, 9)
    assert output.stop_reason == 9


def test_a_burst_ends_at_max_tokens() -> None:
    scheduler = scheduler_of()
    add(scheduler, "a", 4, max_tokens=2)
    plan = scheduler.schedule()
    (output,) = scheduler.update_from_output(plan, ModelRunnerOutput(["a"], [[1, 2, 3]]))
    assert (output.new_token_ids, output.finish_reason) == ([1, 2], FinishReason.LENGTH)


# ---- log-probabilities ----


def test_logprobs_go_to_the_choice_that_they_belong_to() -> None:
    scheduler = scheduler_of()
    add(scheduler, "a", 4, n=2, logprobs=1)
    add(scheduler, "b", 4)
    plan = scheduler.schedule()
    result = answer_of(plan)
    result.logprobs = {"a": rows_of(1), "a#1": rows_of(2)}
    outputs = {(o.request_id, o.choice): o for o in scheduler.update_from_output(plan, result)}
    assert outputs["a", 0].new_logprobs == rows_of(1)
    assert outputs["a", 1].new_logprobs == rows_of(2)
    assert outputs["b", 0].new_logprobs is None


def test_prompt_logprobs_come_with_the_steps_that_compute_them_and_once() -> None:
    scheduler = scheduler_of(max_num_batched_tokens=4)
    add(scheduler, "a", 9, prompt_logprobs=0, n=2)
    chunks = [PromptLogprobsChunk(1, rows_of(1, 2, 3, 4)), PromptLogprobsChunk(5, rows_of(5, 6, 7, 8)), None]
    outputs = []
    for chunk in chunks:
        plan = scheduler.schedule()
        result = answer_of(plan)
        if chunk is not None:
            result.prompt_logprobs["a"] = chunk
        outputs.append(scheduler.update_from_output(plan, result))
    assert [len(some) for some in outputs] == [1, 1, 2]
    for chunk, (part,) in zip(chunks, outputs[:2]):
        assert part.is_part_of_prompt and part.prompt_logprobs == [chunk] and part.choice == 0
    assert all(output.new_token_ids and output.prompt_logprobs is None for output in outputs[2])
    _, later = step(scheduler)
    assert later["a", 0].prompt_logprobs is None


def test_a_part_of_a_prompt_does_not_end_the_trial_of_a_request_that_may_fail_steps() -> None:
    scheduler = scheduler_of(max_num_batched_tokens=4)
    add(scheduler, "a", 9, prompt_logprobs=0)
    add(scheduler, "b", 2)
    scheduler.state.quarantined.update(scheduler.state.requests)  # a step with both has failed
    plan = scheduler.schedule()
    result = answer_of(plan)
    result.prompt_logprobs["a"] = PromptLogprobsChunk(1, rows_of(1, 2, 3, 4))
    (part,) = scheduler.update_from_output(plan, result)
    assert part.is_part_of_prompt
    assert "a" in scheduler.state.quarantined, "the rest of it has not run"
    step(scheduler)
    step(scheduler)
    assert "a" not in scheduler.state.quarantined


def test_a_prompt_whose_logprobs_are_wanted_is_computed_whole() -> None:
    scheduler = scheduler_of()
    add(scheduler, "a", list(range(9)), max_tokens=1)
    step(scheduler)
    add(scheduler, "b", list(range(9)), prompt_logprobs=1)
    plan, outputs = step(scheduler)
    assert plan.num_scheduled_tokens == {"b": 9}
    assert outputs["b", 0].num_cached_tokens == 0
    assert scheduler.stats().prefix_cache.queries == 9, "nothing was looked up"


def test_rows_that_a_preempted_prompt_computes_again_are_not_sent_again() -> None:
    scheduler = scheduler_of()
    add(scheduler, "a", 9, prompt_logprobs=0)
    plan = scheduler.schedule()
    result = answer_of(plan)
    result.prompt_logprobs["a"] = PromptLogprobsChunk(1, rows_of(1, 2, 3))
    task = scheduler.state.requests["a"].task
    task.keep_prompt_logprobs(PromptLogprobsChunk(1, rows_of(1, 2, 3)))
    task.keep_prompt_logprobs(PromptLogprobsChunk(1, rows_of(1, 2)))
    result.prompt_logprobs["a"] = PromptLogprobsChunk(1, rows_of(1, 2, 3, 4, 5, 6, 7, 8))
    (output,) = scheduler.update_from_output(plan, result)
    assert output.prompt_logprobs == [
        PromptLogprobsChunk(1, rows_of(1, 2, 3)),
        PromptLogprobsChunk(4, rows_of(4, 5, 6, 7, 8)),
    ]


def test_the_runner_is_not_asked_again_for_prompt_logprobs_that_are_there() -> None:
    scheduler = scheduler_of()
    add(scheduler, "a", 5, prompt_logprobs=2, n=2)
    plan = scheduler.schedule()
    assert plan.scheduled_new_reqs[0].params.prompt_logprobs == 2
    result = answer_of(plan)
    result.prompt_logprobs["a"] = PromptLogprobsChunk(1, rows_of(1, 2, 3, 4))
    scheduler.update_from_output(plan, result)
    plan, _ = step(scheduler)
    (child,) = plan.scheduled_new_reqs
    assert child.params.prompt_logprobs is None


# ---- failures ----


def test_a_bad_row_fails_its_request_and_nobody_else() -> None:
    scheduler = scheduler_of()
    add(scheduler, "a", 4, n=2)
    add(scheduler, "b", 4)
    step(scheduler)
    plan = scheduler.schedule()
    result = answer_of(plan)
    place = result.req_ids.index("a#1")
    del result.req_ids[place], result.sampled_token_ids[place]
    result.errors["a#1"] = "NaN logits"
    outputs = {(o.request_id, o.choice): o for o in scheduler.update_from_output(plan, result)}
    for choice in (0, 1):
        assert outputs["a", choice].finish_reason == FinishReason.ERROR
        assert outputs["a", choice].error == "NaN logits"
        assert outputs["a", choice].new_token_ids == []
    assert outputs["b", 0].new_token_ids == [7] and not outputs["b", 0].finished
    scheduler.check()
    plan, _ = step(scheduler)
    assert set(plan.finished_req_ids) == {"a", "a#1"}


def test_a_bad_first_row_fails_the_choices_that_were_to_fork_from_it() -> None:
    scheduler = scheduler_of()
    add(scheduler, "a", 4, n=3)
    plan = scheduler.schedule()
    outputs = scheduler.update_from_output(plan, ModelRunnerOutput(errors={"a": "NaN logits"}))
    assert [(output.choice, output.finish_reason) for output in outputs] == [(i, FinishReason.ERROR) for i in range(3)]
    scheduler.check()
    assert scheduler.kv_cache.usage == 0.0


def test_a_failed_step_fails_its_requests_and_leaves_nothing_to_find() -> None:
    scheduler = scheduler_of()
    add(scheduler, "a", list(range(9)))
    plan = scheduler.schedule()
    (output,) = scheduler.fail_requests(plan.num_scheduled_tokens, "out of memory")
    assert (output.finish_reason, output.error) == (FinishReason.ERROR, "out of memory")
    scheduler.check()
    add(scheduler, "b", list(range(9)))
    plan, _ = step(scheduler)
    assert plan.num_scheduled_tokens == {"b": 9}
    assert plan.finished_req_ids == ["a"]


def test_failing_one_branch_by_its_id_fails_its_request_once() -> None:
    scheduler = scheduler_of()
    add(scheduler, "a", 4, n=2)
    step(scheduler)
    assert len(scheduler.fail_requests(["a#1", "a", "unknown"], "no")) == 2
    assert not scheduler.has_unfinished_requests()


@pytest.mark.parametrize("tokens", [None, []])
def test_a_branch_that_got_no_token_fails_instead_of_waiting_forever(tokens: list[int] | None) -> None:
    scheduler = scheduler_of()
    add(scheduler, "a", 4)
    add(scheduler, "b", 4)
    plan = scheduler.schedule()
    result = answer_of(plan)
    if tokens is None:
        result.req_ids, result.sampled_token_ids = ["b"], [[1]]
    else:
        result.sampled_token_ids[0] = []
    outputs = {output.request_id: output for output in scheduler.update_from_output(plan, result)}
    assert outputs["a"].finish_reason == FinishReason.ERROR
    assert outputs["b"].finish_reason is None
    scheduler.check()


# ---- aborts ----


def test_an_aborted_request_frees_its_memory_at_once() -> None:
    scheduler = scheduler_of()
    add(scheduler, "a", 8)
    add(scheduler, "b", 8)
    step(scheduler)
    (output,) = scheduler.abort_requests(["a", "unknown", "a"])
    assert (output.request_id, output.finish_reason, output.error) == ("a", FinishReason.ABORT, None)
    scheduler.check()
    plan, _ = step(scheduler)
    assert plan.finished_req_ids == ["a"] and list(plan.num_scheduled_tokens) == ["b"]


def test_a_waiting_request_can_be_aborted() -> None:
    scheduler = scheduler_of(max_num_seqs=1)
    add(scheduler, "a", 8)
    add(scheduler, "b", 8)
    step(scheduler)
    assert len(scheduler.abort_requests(["b"])) == 1
    scheduler.check()
    assert scheduler.stats().num_waiting == 0


def test_results_for_a_request_that_was_aborted_in_flight_are_dropped() -> None:
    scheduler = scheduler_of()
    add(scheduler, "a", 8)
    plan = scheduler.schedule()
    scheduler.abort_requests(["a"])
    assert scheduler.update_from_output(plan, answer_of(plan)) == []
    scheduler.check()


def test_results_from_before_an_abort_do_not_reach_a_new_request_with_the_same_id() -> None:
    scheduler = scheduler_of()
    add(scheduler, "a", 8)
    plan = scheduler.schedule()
    scheduler.abort_requests(["a"])
    add(scheduler, "a", [1, 2, 3])
    assert scheduler.update_from_output(plan, answer_of(plan)) == []
    plan, outputs = step(scheduler)
    assert plan.finished_req_ids == ["a"] and plan.num_scheduled_tokens == {"a": 3}
    assert outputs["a", 0].new_token_ids == [7]
