"""Beam searches in the scheduler, driven by hand-written candidates: what runs, the plan, and what is kept."""

from __future__ import annotations

from typing import Any

import pytest

from ratoon.core.errors import RequestError
from ratoon.core.outputs import BeamCandidates, ModelRunnerOutput
from ratoon.core.params import BeamSearchParams, HiddenStatesParams, RequestOutputKind, SamplingParams
from ratoon.core.plan import BeamStep, SchedulerOutput
from ratoon.core.request import EngineCoreOutput, EngineCoreRequest, FinishReason, InheritedFrom, ResumedChoice
from ratoon.scheduling.scheduler import Scheduler
from tests.unit.scheduling.steps import BLOCK_SIZE, add, answer_of, scheduler_of

EOS = 99


def search_of(request_id: str, prompt: int, *, width: int = 2, retain_kv: float | None = None, **params: Any):
    params.setdefault("n", 1)
    params.setdefault("max_tokens", 3)
    params.setdefault("all_stop_token_ids", [EOS])
    beams = BeamSearchParams(beam_width=width, **params)
    return EngineCoreRequest(
        request_id,
        [1000 + number for number in range(prompt)],
        beams,
        retain_kv=retain_kv,
    )


def candidates_of(step: BeamStep, found: list[tuple[float, int, int]] | None = None) -> BeamCandidates:
    """As given, or for every beam the tokens 10, 11, … in turn, each a little worse than the one before."""
    if found is None:
        places = range(step.num_candidates)
        found = [(-0.1 * (i + 1), i % step.num_beams, 10 + i // step.num_beams) for i in places]
    return BeamCandidates([c[0] for c in found], [c[1] for c in found], [c[2] for c in found])


def step(scheduler: Scheduler, **found: list[tuple[float, int, int]]) -> tuple[SchedulerOutput, list[EngineCoreOutput]]:
    """Plan, answer, update, check. `found`: the candidates of a search by its id."""
    plan = scheduler.schedule()
    scheduler.check()
    answer = answer_of(plan)
    for beam_step in plan.beam_steps:
        if beam_step.num_candidates:
            answer.candidates[beam_step.req_id] = candidates_of(beam_step, found.get(beam_step.req_id))
    outputs = scheduler.update_from_output(plan, answer)
    scheduler.check()
    return plan, outputs


def finish(scheduler: Scheduler) -> list[EngineCoreOutput]:
    outputs: list[EngineCoreOutput] = []
    for _ in range(100):
        if not scheduler.has_requests():
            return outputs
        outputs += step(scheduler)[1]
    raise AssertionError("it does not end")


def test_a_prompt_is_computed_once_and_beams_fork_from_it_by_reference() -> None:
    scheduler = scheduler_of()
    scheduler.add_request(search_of("s", 9, width=3))
    plan, outputs = step(scheduler)
    (first,) = plan.beam_steps
    assert plan.num_scheduled_tokens == {"s": 9} and plan.sampled_req_ids == [] and outputs == []
    assert (first.num_tokens, first.scores, first.num_candidates) == (0, [0.0], 6)  # 3 beams, and an eos for each
    plan, outputs = step(scheduler, s=[(-1.0, 0, 20), (-2.0, 0, 21), (-3.0, 0, 22)])
    (second,) = plan.beam_steps
    assert plan.num_scheduled_tokens == {} and plan.total_num_scheduled_tokens == 3
    assert (second.parents, second.token_ids, second.num_computed_tokens) == ([0, 0, 0], [10, 11, 12], 9)
    # The prompt's two full blocks are not mentioned again. The third is the trunk's too, so every beam has a copy.
    assert second.first_columns == [2] and len(second.block_ids[0]) == len(set(second.block_ids[0])) == 3
    trunk = scheduler.state.requests["s"].branches[0]
    assert {copy.src for copy in plan.block_copies} == {trunk.block_tables[0][2].block_id}


def test_a_beam_that_nobody_continues_gives_its_memory_back_and_the_last_holder_writes_in_place() -> None:
    scheduler = scheduler_of()
    scheduler.add_request(search_of("s", 9, width=3, max_tokens=9))
    step(scheduler)
    plan, _ = step(scheduler, s=[(-1.0, 2, 20), (-2.0, 2, 21), (-3.0, 0, 22)])
    blocks = plan.beam_steps[0].block_ids[0]
    num_used = scheduler.kv_cache.pool.num_usable_blocks - scheduler.kv_cache.num_free_blocks
    plan, _ = step(scheduler)
    (moved,) = plan.beam_steps
    assert (moved.parents, moved.token_ids) == ([2, 2, 0], [20, 21, 22])
    (copy,) = plan.block_copies  # of two beams that share a block, one writes in place
    assert copy.src == blocks[2]
    assert sorted(moved.block_ids[0]) == sorted([blocks[2], copy.dst, blocks[0]])
    assert scheduler.kv_cache.pool.num_usable_blocks - scheduler.kv_cache.num_free_blocks == num_used + 1


def test_the_choices_are_the_best_texts_with_their_scores_and_reasons() -> None:
    scheduler = scheduler_of()
    scheduler.add_request(search_of("s", 5, n=2, max_tokens=2, length_penalty=1.0))
    step(scheduler, s=[(-1.0, 0, EOS), (-2.0, 0, 20), (-3.0, 0, 21)])
    plan, outputs = step(scheduler, s=[(-2.2, 0, 30), (-9.0, 1, 31)])
    assert [(o.choice, o.new_token_ids, o.finish_reason, o.stop_reason) for o in outputs] == [
        (0, [EOS], FinishReason.STOP, None),  # the model's own end
        (1, [20, 30], FinishReason.LENGTH, None),
    ]
    assert [(o.score, o.cumulative_logprob, o.replaces) for o in outputs] == [(-1.0, -1.0, True), (-1.1, -2.2, True)]
    assert not scheduler.has_unfinished_requests() and scheduler.kv_cache.usage == 0.0
    plan, _ = step(scheduler)
    assert plan.finished_req_ids == ["s"]


def test_a_stop_token_that_the_caller_named_is_the_reason() -> None:
    scheduler = scheduler_of()
    scheduler.add_request(search_of("s", 5, max_tokens=2, early_stopping=True, width=1, stop_token_ids=[EOS]))
    _, (output,) = step(scheduler, s=[(-1.0, 0, EOS), (-2.0, 0, 20)])
    assert (output.finish_reason, output.stop_reason) == (FinishReason.STOP, EOS)


def test_snapshots_of_the_best_text_so_far_come_only_where_they_are_wanted() -> None:
    scheduler = scheduler_of()
    kind = RequestOutputKind.CUMULATIVE
    scheduler.add_request(search_of("s", 5, max_tokens=3, output_kind=kind, length_penalty=0.0))
    _, outputs = step(scheduler, s=[(-1.0, 0, 20), (-2.0, 0, 21)])
    assert [(o.new_token_ids, o.finish_reason, o.replaces) for o in outputs] == [([20], None, True)]
    _, outputs = step(scheduler, s=[(-2.5, 1, 30), (-3.0, 0, 31)])  # the other beam is the better one now
    assert [(o.new_token_ids, o.score) for o in outputs] == [([21, 30], -2.5)]
    scheduler.add_request(search_of("quiet", 5, max_tokens=2))
    assert {o.request_id for o in step(scheduler)[1]} == {"s"}


def test_beams_need_a_row_each_from_the_start_and_wait_until_there_are_so_many() -> None:
    scheduler = scheduler_of(max_num_seqs=4)
    add(scheduler, "a", 3, max_tokens=2)
    add(scheduler, "b", 3, max_tokens=9)
    scheduler.add_request(search_of("s", 5, width=3))
    add(scheduler, "late", 3)
    plan, _ = step(scheduler)
    assert set(plan.num_scheduled_tokens) == {"a", "b"}
    step(scheduler)  # a ends
    plan, _ = step(scheduler)
    assert plan.num_scheduled_tokens == {"b": 1, "s": 5}  # no overtaking, and late finds no row
    plan, _ = step(scheduler)
    assert plan.num_scheduled_tokens == {"b": 1} and plan.beam_steps[0].num_beams == 3


def test_a_small_token_budget_never_cuts_a_search_apart() -> None:
    scheduler = scheduler_of(max_num_batched_tokens=4, max_num_seqs=8)
    scheduler.add_request(search_of("s", 6, width=3, max_tokens=5))
    for name in "abc":
        add(scheduler, name, 3, max_tokens=9)
    for _ in range(6):
        plan, _ = step(scheduler)
        for beam_step in plan.beam_steps:
            assert beam_step.num_tokens * beam_step.num_beams in (0, 3)
    assert "s" not in scheduler.state.requests, "others kept it from its steps"


def test_two_searches_and_other_requests_share_a_step() -> None:
    scheduler = scheduler_of()
    scheduler.add_request(search_of("s", 5, width=3))
    scheduler.add_request(search_of("t", 6, width=2))
    add(scheduler, "a", 3)
    step(scheduler)
    plan, _ = step(scheduler)
    assert [(beam_step.req_id, beam_step.num_beams) for beam_step in plan.beam_steps] == [("s", 3), ("t", 2)]
    assert plan.num_scheduled_tokens == {"a": 1} and plan.total_num_scheduled_tokens == 6
    assert plan.req_ids == ["a", "s", "t"]


def test_a_preempted_search_comes_back_behind_its_prompt_and_catches_up_in_one_step() -> None:
    scheduler = scheduler_of(num_blocks=9)
    add(scheduler, "first", 7, max_tokens=20)
    scheduler.add_request(search_of("s", 6, width=2, max_tokens=9))
    preempted_at = None
    for number in range(60):
        plan, _ = step(scheduler)
        if "s" in plan.preempted_req_ids:
            assert plan.beam_steps == [] and preempted_at is None
            preempted_at = number
            tokens = [scheduler.state.requests["s"].task.search.running_token_ids(beam) for beam in range(2)]
        if preempted_at is not None and plan.num_scheduled_tokens.get("s"):
            assert plan.beam_steps == []  # the prompt again, and no candidates: it has them
            plan, _ = step(scheduler)
            (caught_up,) = plan.beam_steps
            assert caught_up.parents == [0, 0] and caught_up.num_computed_tokens == 6
            assert caught_up.token_ids == tokens[0] + tokens[1] and caught_up.num_tokens == len(tokens[0]) > 1
            assert caught_up.num_candidates
            break
    else:
        raise AssertionError("it was not preempted, or did not come back")
    finish(scheduler)
    assert scheduler.kv_cache.usage == 0.0


def test_catching_up_takes_several_steps_where_the_budget_is_small() -> None:
    scheduler = scheduler_of(num_blocks=9, max_num_batched_tokens=4)
    add(scheduler, "first", 7, max_tokens=20)
    scheduler.add_request(search_of("s", 6, width=2, max_tokens=9))
    sizes = []
    for _ in range(80):
        if not scheduler.has_requests():
            break
        plan, _ = step(scheduler)
        sizes += [(s.num_tokens, bool(s.num_candidates)) for s in plan.beam_steps if s.num_tokens]
    assert (2, False) in sizes, sizes


def test_an_abort_between_plan_and_results_frees_all_beams() -> None:
    scheduler = scheduler_of()
    scheduler.add_request(search_of("s", 9, width=3, n=3))
    step(scheduler)
    plan = scheduler.schedule()
    outputs = scheduler.abort_requests(["s"])
    assert [(o.choice, o.finish_reason) for o in outputs] == [(choice, FinishReason.ABORT) for choice in range(3)]
    answer = ModelRunnerOutput(candidates={"s": candidates_of(plan.beam_steps[0])})
    assert scheduler.update_from_output(plan, answer) == []
    assert scheduler.kv_cache.usage == 0.0


def test_results_of_an_aborted_search_do_not_reach_a_new_one_with_its_id() -> None:
    scheduler = scheduler_of()
    scheduler.add_request(search_of("s", 9))
    step(scheduler)
    plan = scheduler.schedule()
    scheduler.abort_requests(["s"])
    scheduler.add_request(search_of("s", 9))
    answer = ModelRunnerOutput(candidates={"s": candidates_of(plan.beam_steps[0])})
    assert scheduler.update_from_output(plan, answer) == []
    assert scheduler.state.requests["s"].task.search.num_tokens == 0


def test_a_search_without_candidates_fails_and_the_others_go_on() -> None:
    scheduler = scheduler_of()
    scheduler.add_request(search_of("s", 9))
    scheduler.add_request(search_of("t", 9))
    plan = scheduler.schedule()
    answer = ModelRunnerOutput(candidates={"t": candidates_of(plan.beam_steps[1])})
    (output,) = scheduler.update_from_output(plan, answer)
    assert (output.request_id, output.finish_reason) == ("s", FinishReason.ERROR) and "candidates" in output.error
    assert {o.request_id for o in finish(scheduler)} == {"t"}


def test_a_search_ends_with_the_texts_that_there_are() -> None:
    scheduler = scheduler_of()
    scheduler.add_request(search_of("s", 5, n=2, max_tokens=1))
    _, outputs = step(scheduler, s=[(-1.0, 0, 20), (float("-inf"), 0, 21)])
    assert [(o.new_token_ids, o.finish_reason, o.num_texts) for o in outputs] == [([20], FinishReason.LENGTH, 1)]
    assert scheduler.kv_cache.usage == 0.0
    scheduler.add_request(search_of("t", 5, n=2, max_tokens=1))
    _, outputs = step(scheduler, t=[(float("-inf"), 0, 20)])
    assert {o.finish_reason for o in outputs} == {FinishReason.ERROR} and "no text" in outputs[0].error
    assert scheduler.kv_cache.usage == 0.0


def test_a_failed_step_is_tried_apart_and_a_search_is_cleared_by_its_next_candidates() -> None:
    scheduler = scheduler_of()
    scheduler.add_request(search_of("s", 9, max_tokens=9))
    add(scheduler, "a", 3)
    step(scheduler)
    plan = scheduler.schedule()
    assert scheduler.step_failed(plan, "no luck") == []
    scheduler.check()
    names = []
    for _ in range(6):
        plan, _ = step(scheduler)
        names.append(plan.req_ids)
    assert ["s"] in names and ["a"] in names and names[-1] == ["a", "s"]


def test_every_choice_of_a_leased_search_can_be_continued_from_its_memory() -> None:
    scheduler = scheduler_of()
    scheduler.add_request(search_of("s", 9, n=2, retain_kv=60.0, max_tokens=3))
    step(scheduler, s=[(-1.0, 0, 20), (-2.0, 0, EOS), (-2.5, 0, 21)])
    step(scheduler, s=[(-2.0, 0, 30), (-3.0, 1, 31)])
    _, outputs = step(scheduler, s=[(-4.0, 0, 40), (-8.0, 1, 41)])
    texts = {o.choice: o.new_token_ids for o in outputs}
    assert texts == {0: [20, 30, 40], 1: [EOS]}
    assert len(scheduler.leases) == 2 and scheduler.leases.check() is None
    prompt = [1000 + number for number in range(9)]
    for choice, parent in ((0, "s"), (1, "s#1")):
        whole = prompt + texts[choice] + [5, 6]
        child = EngineCoreRequest(
            f"child{choice}",
            whole,
            SamplingParams(max_tokens=1),
            continuation_of=parent,
            continuation_token_ids=[5, 6],
        )
        scheduler.add_request(child)
        plan, outputs = step(scheduler)
        assert plan.num_scheduled_tokens == {f"child{choice}": 3}  # the suffix, and the parent's last token
        assert outputs[0].inherited_from == InheritedFrom.LEASE


def test_what_is_kept_for_a_lease_gives_way_before_anybody_who_runs() -> None:
    scheduler = scheduler_of(num_blocks=1 + 3 + 2 * 2)  # the prompt and two beams, and nothing else
    scheduler.add_request(search_of("s", 9, n=1, retain_kv=60.0, max_tokens=8))
    step(scheduler, s=[(-1.0, 0, 20), (-2.0, 0, 21), (-3.0, 0, 22)])
    step(scheduler, s=[(-1.5, 0, EOS), (-3.0, 0, 30), (-4.0, 1, 31)])
    step(scheduler, s=[(-30.0, 0, 40), (-40.0, 1, 41)])  # the beam goes on in a copy of what is kept
    assert scheduler.kv_cache.num_free_blocks == 1
    outputs = []
    while scheduler.has_requests():
        plan = scheduler.schedule()
        answer = ModelRunnerOutput()
        for beam_step in plan.beam_steps:
            answer.candidates["s"] = candidates_of(beam_step, [(-60.0, 0, 50), (-70.0, 1, 51)])
        outputs += scheduler.update_from_output(plan, answer)
        scheduler.check()
    assert scheduler.stats().num_preemptions == 0
    assert [output.new_token_ids for output in outputs] == [[20, EOS]] and len(scheduler.leases) == 0


@pytest.mark.parametrize(
    ("changes", "config", "field"),
    [
        ({"width": 5}, {"max_num_seqs": 4}, "beam_width"),
        ({"width": 5}, {"max_num_batched_tokens": 4}, "beam_width"),
        ({"width": 40}, {"num_blocks": 20}, "beam_width"),
        ({"width": 2, "n": 3}, {}, "n"),
        ({"length_penalty": float("nan")}, {}, "length_penalty"),
        ({"output_kind": RequestOutputKind.DELTA}, {}, "output_kind"),
    ],
)
def test_what_can_never_run_is_refused_with_the_field(
    changes: dict[str, Any], config: dict[str, Any], field: str
) -> None:
    scheduler = scheduler_of(**config)
    with pytest.raises(RequestError) as refused:
        scheduler.add_request(search_of("s", 4, **changes))
    assert refused.value.field == field
    assert not scheduler.has_requests()


def test_a_search_starts_again_and_is_not_resumed() -> None:
    request = search_of("s", 4)
    request.resumed = [ResumedChoice([1])]
    with pytest.raises(RequestError, match="resumed"):
        scheduler_of().add_request(request)


def test_the_memory_that_a_search_asks_for_is_enough_for_its_widest_moment() -> None:
    """The prompt and every beam at full length, alone in the smallest pool that takes it."""
    width, prompt, max_tokens = 3, 2 * BLOCK_SIZE + 1, 9
    for num_blocks in range(2, 40):
        scheduler = scheduler_of(num_blocks=num_blocks)
        try:
            scheduler.add_request(search_of("s", prompt, width=width, max_tokens=max_tokens, n=width))
        except RequestError:
            continue
        outputs = finish(scheduler)
        assert len(outputs) == width and scheduler.stats().num_preemptions == 0
        assert num_blocks == 1 + 3 + width * 3
        return
    raise AssertionError("never accepted")


def test_a_search_whose_text_could_not_be_read_to_its_end_is_refused() -> None:
    """Its last token is not computed by the search itself, and there is no block for it."""
    scheduler = scheduler_of(num_blocks=11)
    prompt = 10 * BLOCK_SIZE
    states = HiddenStatesParams(positions=[-1], layers_passed=[0])
    with pytest.raises(RequestError) as refused:
        scheduler.add_request(search_of("a", prompt, width=1, max_tokens=1, return_hidden_states=states))
    assert refused.value.field == "prompt"
    scheduler.add_request(search_of("a", prompt, width=1, max_tokens=1))
