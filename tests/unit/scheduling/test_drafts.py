"""Draft tokens in the scheduler: which steps check them, and what is left of a branch when some are not kept."""

from __future__ import annotations

from typing import Any

from ratoon.core.outputs import ModelRunnerOutput
from ratoon.core.params import BeamSearchParams
from ratoon.core.plan import SchedulerOutput
from ratoon.core.request import EngineCoreRequest, FinishReason
from ratoon.core.speculation import SpeculationConfig
from ratoon.scheduling.branch import Branch
from ratoon.scheduling.scheduler import Scheduler
from tests.unit.scheduling.steps import BLOCK_SIZE, add, answer_of, request_of, scheduler_of, step
from tests.unit.scheduling.test_beam_scheduling import step as step_of_search


def one_that_runs(prompt: int = 3, **settings: Any) -> tuple[Scheduler, Branch]:
    """A scheduler with a branch that has its first token."""
    params = {name: settings.pop(name) for name in ("max_tokens", "stop_token_ids", "n") if name in settings}
    scheduler = scheduler_of(**{"max_steps_in_flight": 1, **settings})
    add(scheduler, "a", prompt, **params)
    step(scheduler)
    return scheduler, scheduler.state.branches["a"]


def answer(scheduler: Scheduler, plan: SchedulerOutput, tokens: list[int]) -> list[Any]:
    outputs = scheduler.update_from_output(plan, ModelRunnerOutput(["a"], [tokens]))
    scheduler.check()
    return outputs


def plan_with(scheduler: Scheduler, branch: Branch, drafts: list[int]) -> SchedulerOutput:
    branch.propose(drafts)
    plan = scheduler.schedule()
    scheduler.check()
    return plan


def test_a_step_computes_the_drafts_and_the_result_goes_on_behind_those_that_were_kept() -> None:
    scheduler, branch = one_that_runs()
    plan = plan_with(scheduler, branch, [5, 6, 8])
    assert plan.num_scheduled_tokens == {"a": 4} and plan.scheduled_spec_decode_tokens == {"a": [5, 6, 8]}
    assert plan.sampled_req_ids == ["a"]
    (output,) = answer(scheduler, plan, [5, 9])  # the second guess was wrong
    assert output.new_token_ids == [5, 9] and branch.token_ids[-3:] == [7, 5, 9]
    assert branch.num_computed_tokens == branch.num_tokens - 1
    plan, _ = step(scheduler)
    assert plan.num_scheduled_tokens == {"a": 1} and not plan.scheduled_spec_decode_tokens
    assert plan.scheduled_cached_reqs.num_computed_tokens == [branch.num_tokens - 2]


def test_blocks_of_drafts_stay_with_the_branch() -> None:
    scheduler, branch = one_that_runs()
    plan = plan_with(scheduler, branch, list(range(5, 5 + 2 * BLOCK_SIZE)))
    num_held = len(branch.block_tables[0])
    answer(scheduler, plan, [1])
    assert len(branch.block_tables[0]) == num_held > -(-branch.num_tokens // BLOCK_SIZE)
    for _ in range(BLOCK_SIZE):
        plan, _ = step(scheduler)
        assert plan.scheduled_cached_reqs.new_block_ids == [None]


def test_only_tokens_that_were_kept_are_found_in_the_prefix_cache() -> None:
    scheduler, branch = one_that_runs(prompt=BLOCK_SIZE - 1)
    answer(scheduler, plan_with(scheduler, branch, [5, 6, 8, 9]), [5, 6, 1])
    known = branch.token_ids.copy()
    scheduler.abort_requests(["a"])
    add(scheduler, "b", [*known[: BLOCK_SIZE + 2], 8, 9, 2, 3])  # as it would go on if all guesses had been right
    step(scheduler)
    assert scheduler.state.branches["b"].num_cached_tokens == BLOCK_SIZE


def test_a_stop_token_among_the_drafts_ends_the_branch_there() -> None:
    scheduler, branch = one_that_runs(stop_token_ids=[6])
    plan = plan_with(scheduler, branch, [5, 6, 8])
    (output,) = answer(scheduler, plan, [5, 6, 8, 1])
    assert output.new_token_ids == [5, 6] and output.finish_reason == FinishReason.STOP
    assert scheduler.kv_cache.num_free_blocks == scheduler.kv_cache.num_usable_blocks


def test_drafts_end_where_the_text_may() -> None:
    scheduler, branch = one_that_runs(max_tokens=4)
    plan = plan_with(scheduler, branch, [5, 6, 8, 9, 10])
    assert plan.scheduled_spec_decode_tokens == {"a": [5, 6]}  # and a token of its own
    (output,) = answer(scheduler, plan, [5, 6, 8])
    assert output.finish_reason == FinishReason.LENGTH


def test_drafts_leave_other_branches_and_beams_their_tokens() -> None:
    scheduler, branch = one_that_runs(max_num_batched_tokens=6, max_num_seqs=6)
    beams = BeamSearchParams(beam_width=3, n=1, max_tokens=8)
    scheduler.add_request(EngineCoreRequest("s", [1, 2, 3], beams))
    add(scheduler, "b", 2)
    for _ in range(3):
        step_of_search(scheduler)
    branch.propose([5, 6, 8, 9, 10])
    plan, _ = step_of_search(scheduler)
    assert plan.total_num_scheduled_tokens == 6 and [each.num_beams for each in plan.beam_steps] == [3]
    assert plan.scheduled_spec_decode_tokens == {"a": [5]} and plan.num_scheduled_tokens["b"] == 1


def test_nothing_is_preempted_for_drafts() -> None:
    scheduler, branch = one_that_runs(num_blocks=5, max_model_len=12)
    add(scheduler, "b", BLOCK_SIZE)
    step(scheduler)  # each of them needs one of the two blocks that are left
    plan = plan_with(scheduler, branch, [5, 6, 8, 9, 10])
    assert not plan.preempted_req_ids and plan.num_scheduled_tokens == {"a": 1, "b": 1}
    assert not plan.scheduled_spec_decode_tokens and not branch.draft_tokens


def test_a_branch_whose_token_is_not_known_checks_no_drafts() -> None:
    scheduler, branch = one_that_runs(max_steps_in_flight=2)
    first = scheduler.schedule()
    plan = plan_with(scheduler, branch, [5, 6])
    assert plan.num_scheduled_tokens == {"a": 1} and not plan.scheduled_spec_decode_tokens
    for each in (first, plan):
        scheduler.update_from_output(each, answer_of(each))
    scheduler.check()


def test_it_waits_for_the_result_while_drafts_are_checked() -> None:
    scheduler, branch = one_that_runs(max_steps_in_flight=2)
    add(scheduler, "b", 3)
    plan = plan_with(scheduler, branch, [5, 6])
    ahead = scheduler.schedule()
    assert "a" in plan.num_scheduled_tokens and "a" not in ahead.num_scheduled_tokens
    scheduler.update_from_output(plan, ModelRunnerOutput(["a", "b"], [[5, 6, 8], [7]]))
    scheduler.check()
    assert scheduler.schedule().num_scheduled_tokens["a"] == 1


def test_a_step_that_captured_a_graph_is_no_evidence_of_what_rows_for_drafts_cost() -> None:
    scheduler, branch = one_that_runs()
    pace = scheduler.state.pace
    for now, has_prepared in ((10.0, True), (20.0, False)):
        scheduler.state.now = now
        plan = plan_with(scheduler, branch, [5, 6, 8])
        scheduler.step_done(plan, now + 1.0, has_prepared)
        answer(scheduler, plan, [5])
        assert pace.has_observed(4) is not has_prepared


def test_one_that_ends_before_the_result_leaves_no_block_of_unknown_tokens() -> None:
    scheduler, branch = one_that_runs(prompt=BLOCK_SIZE - 1)
    plan = plan_with(scheduler, branch, list(range(5, 5 + 2 * BLOCK_SIZE)))
    known = branch.token_ids.copy()
    scheduler.step_done(plan)
    scheduler.abort_requests(["a"])
    scheduler.check()
    answer(scheduler, plan, [5])
    add(scheduler, "b", [*known, *range(5, 5 + 3 * BLOCK_SIZE)])
    step(scheduler)
    assert scheduler.state.branches["b"].num_cached_tokens == BLOCK_SIZE


def test_a_failed_step_leaves_nothing_of_its_drafts() -> None:
    scheduler, branch = one_that_runs()
    add(scheduler, "b", 3)
    step(scheduler)
    plan = plan_with(scheduler, branch, [5, 6, 8])
    scheduler.step_failed(plan, "the device is gone")
    scheduler.check()
    assert not branch.num_drafts and not branch.draft_tokens
    outputs = {name: output for _ in range(2) for name, output in step(scheduler)[1].items()}  # each runs alone
    assert outputs["a", 0].new_token_ids == outputs["b", 0].new_token_ids == [7]


def test_forced_tokens_in_the_place_of_drafts_are_computed_later() -> None:
    scheduler, branch = one_that_runs()
    plan = plan_with(scheduler, branch, [5, 6, 8])
    answer(scheduler, plan, [5, 1, 2, 3, 4])  # more than the step had rows for: only the 5 is computed
    assert branch.num_computed_tokens == 3 + 1 + 1 and branch.num_tokens == 3 + 1 + 5
    plan, _ = step(scheduler)
    assert plan.num_scheduled_tokens == {"a": 4}


def test_blocks_of_drafts_are_no_part_of_a_lease() -> None:
    scheduler = scheduler_of(max_steps_in_flight=1, speculation=SpeculationConfig(speculate="ngram", num_tokens=8))
    request = request_of("a", [7] * (BLOCK_SIZE - 1), max_tokens=3)
    request.retain_kv = 60.0
    scheduler.add_request(request)
    step(scheduler)
    branch = scheduler.state.branches["a"]
    branch.request.max_total_tokens = branch.max_total_tokens = 100  # room for drafts in blocks of their own
    plan = plan_with(scheduler, branch, [7] * (3 * BLOCK_SIZE))
    branch.max_total_tokens = BLOCK_SIZE + 2
    answer(scheduler, plan, [7, 7])
    (lease,) = scheduler.leases.sequences()
    assert len(lease.block_tables[0]) == -(-lease.num_computed_tokens // BLOCK_SIZE)


def test_drafts_are_among_the_tokens_that_an_owner_wants_of_a_shared_step() -> None:
    scheduler = scheduler_of(max_steps_in_flight=1)
    for owner in ("ada", "bob"):
        add(scheduler, owner, 3, owner=owner)
    step(scheduler)
    scheduler.state.branches["ada"].propose([5, 6])
    assert scheduler.planner._wanted_tokens() == {"ada": 3, "bob": 1}


# ---- drafts of a model or head on the device ----


ON_DEVICE = SpeculationConfig(speculate="draft:model", num_tokens=3, max_seqs=64, min_acceptance=0)


def drafting_scheduler(**settings: Any) -> tuple[Scheduler, SchedulerOutput]:
    """A scheduler, and the plan of a prompt behind which the device drafts."""
    settings = {"max_steps_in_flight": 2, "speculation": ON_DEVICE, "prompt": 3, **settings}
    prompt = settings.pop("prompt")
    params = {"max_tokens": settings.pop("max_tokens", 40)}
    scheduler = scheduler_of(**settings)
    add(scheduler, "a", prompt, **params)
    return scheduler, scheduler.schedule()


def draft(scheduler: Scheduler, plan: SchedulerOutput, tokens: list[int], drafts: list[int]) -> None:
    output = ModelRunnerOutput(["a"], [tokens], draft_token_ids={"a": drafts} if drafts else {})
    scheduler.update_from_output(plan, output)
    scheduler.check()


def test_drafts_of_the_device_are_checked_by_the_next_step() -> None:
    scheduler, plan = drafting_scheduler()
    assert plan.draft_lengths == {"a": 3}
    assert scheduler.schedule().is_void, "the drafts are not known yet"
    draft(scheduler, plan, [7], [5, 6, 8])
    plan = scheduler.schedule()
    assert plan.scheduled_spec_decode_tokens == {"a": [5, 6, 8]} and plan.draft_lengths == {"a": 3}
    draft(scheduler, plan, [5, 6, 1], [9])
    plan = scheduler.schedule()
    assert plan.scheduled_spec_decode_tokens == {"a": [9]} and plan.num_scheduled_tokens == {"a": 2}
    draft(scheduler, plan, [9, 2], [])
    assert not scheduler.schedule().scheduled_spec_decode_tokens
    assert scheduler.stats().drafts["draft"].accepted_per_pos == [2, 1, 0]


def test_a_branch_has_slots_behind_its_end_for_drafts() -> None:
    scheduler, plan = drafting_scheduler(prompt=BLOCK_SIZE - 1)
    draft(scheduler, plan, [7], [5, 6, 8])
    branch = scheduler.state.branches["a"]
    plan = scheduler.schedule()
    # It computes 1 + 3 tokens from BLOCK_SIZE - 1 on, and the device drafts in three slots behind them.
    assert len(branch.block_tables[0]) * BLOCK_SIZE >= BLOCK_SIZE - 1 + 4 + 3
    draft(scheduler, plan, [5, 1], [])
    known = branch.token_ids.copy()
    scheduler.abort_requests(["a"])
    add(scheduler, "b", [*known, 6, 8, 9, 2])
    step(scheduler)
    assert scheduler.state.branches["b"].num_cached_tokens == BLOCK_SIZE, "slots behind the end are no tokens"


def test_no_branch_waits_or_is_preempted_for_slots_of_drafts() -> None:
    scheduler, plan = drafting_scheduler(num_blocks=4, max_model_len=12, prompt=BLOCK_SIZE, max_steps_in_flight=1)
    for token in range(7):
        draft(scheduler, plan, [token], [5, 6, 8])
        plan = scheduler.schedule()
        assert plan.num_scheduled_tokens["a"] >= 1 and not plan.preempted_req_ids
        for req_id in plan.scheduled_spec_decode_tokens:
            assert req_id == "a"


def test_nothing_is_drafted_behind_the_end_of_a_text() -> None:
    scheduler, plan = drafting_scheduler(max_tokens=4)
    assert plan.draft_lengths == {"a": 2}  # its own tokens are the first and the last
    draft(scheduler, plan, [7], [])
    plan = scheduler.schedule()
    assert plan.draft_lengths == {"a": 1}
    draft(scheduler, plan, [7], [])
    plan = scheduler.schedule()
    assert not plan.draft_lengths


def test_a_request_may_go_without_drafts() -> None:
    scheduler = scheduler_of(max_steps_in_flight=2, speculation=ON_DEVICE)
    add(scheduler, "a", 3, speculate=False)
    plan = scheduler.schedule()
    assert not plan.draft_lengths and not scheduler.schedule().is_void


def test_a_source_on_the_device_that_is_wrong_is_asked_rarely() -> None:
    config = SpeculationConfig(speculate="head:path", num_tokens=3, max_seqs=64)
    scheduler, plan = drafting_scheduler(speculation=config, max_tokens=150)
    asked = []
    for _ in range(140):
        asked.append(plan.draft_lengths.get("a", 0))
        draft(scheduler, plan, [7], [1, 2, 3][: asked[-1]])
        plan = scheduler.schedule()
    assert asked[0] == 3 and 1 <= sum(asked[40:]) <= 4
