"""Which branches draft, and how far: a source is used while its guesses are right and rows are cheap."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import pytest

from ratoon.core.outputs import ModelRunnerOutput
from ratoon.core.params import BeamSearchParams
from ratoon.core.plan import SchedulerOutput
from ratoon.core.request import CheckedDrafts, EngineCoreOutput, EngineCoreRequest
from ratoon.core.speculation import SpeculationConfig
from ratoon.scheduling.branch import Branch
from ratoon.scheduling.draft_costs import RESULTS_OF_LOOK, RESULTS_OF_TOGETHER, DraftCosts, ResultWaits
from ratoon.scheduling.pace import StepPace
from ratoon.scheduling.scheduler import Scheduler
from ratoon.scheduling.speculation import TRIES, Speculation
from tests.unit.scheduling.steps import add, answer_of, scheduler_of, step

TEXT = list(range(10, 60))  # what every branch generates


class Known:
    """Guesses the text, rightly where `right` says so."""

    def __init__(self, name: str = "known", right: bool = True, matched: int = 0) -> None:
        self.name = name
        self.right = right
        self.matched = matched
        self.num_asked = 0
        self.dropped: list[str] = []
        self.only: set[str] | None = None  # branches for which it has guesses; None: all

    def propose(self, branch: Branch, max_tokens: int) -> Sequence[int]:
        self.num_asked += 1
        if self.only is not None and branch.branch_id not in self.only:
            return []
        done = branch.num_output_tokens
        return [token + (not self.right) for token in TEXT[done : done + max_tokens]]

    def num_matched(self, branch: Branch) -> int:
        return self.matched

    def drop(self, branch: Branch) -> None:
        self.dropped.append(branch.branch_id)


@dataclass
class Guess:
    rate: float
    available: int
    length: int
    is_trial: bool = False


def with_sources(*sources: Known, speculation: SpeculationConfig | None = None, **settings: Any) -> Scheduler:
    scheduler = scheduler_of(**{"max_steps_in_flight": 1, **settings})
    state = scheduler.state
    config = speculation or SpeculationConfig(num_tokens=4)
    state.speculation = Speculation(config, sources, state.pace, state.config.max_num_seqs)
    return scheduler


def result_of(scheduler: Scheduler, plan: SchedulerOutput) -> list[EngineCoreOutput]:
    """Every branch gets the tokens of TEXT: one more than there are right drafts."""
    result = ModelRunnerOutput()
    for name in plan.sampled_req_ids:
        drafts = plan.scheduled_spec_decode_tokens.get(name, [])
        known = scheduler.state.branches[name].num_output_tokens
        tokens = []
        for place in range(len(drafts) + 1):
            tokens.append(TEXT[known + place])
            if place < len(drafts) and drafts[place] != tokens[-1]:
                break
        result.req_ids.append(name)
        result.sampled_token_ids.append(tokens)
    outputs = scheduler.update_from_output(plan, result)
    scheduler.check()
    return outputs


def one_step(scheduler: Scheduler) -> tuple[SchedulerOutput, list[EngineCoreOutput]]:
    plan = scheduler.schedule()
    scheduler.check()
    return plan, result_of(scheduler, plan)


def lengths(scheduler: Scheduler, num_steps: int, name: str = "a") -> list[int]:
    """The drafts of a branch in each of so many steps."""
    found = []
    for _ in range(num_steps):
        plan, _ = one_step(scheduler)
        found.append(len(plan.scheduled_spec_decode_tokens.get(name, ())))
    return found


def test_drafts_grow_while_they_are_right() -> None:
    scheduler = with_sources(Known())
    add(scheduler, "a", 3)
    assert lengths(scheduler, 6) == [0, 4, 4, 4, 4, 4]  # the prompt first
    branch = scheduler.state.branches["a"]
    assert branch.token_ids[3:] == TEXT[: branch.num_output_tokens] and branch.num_output_tokens == 26


def test_a_source_that_is_wrong_is_left_out_and_back_when_it_is_right() -> None:
    source = Known(right=False)
    scheduler = with_sources(source)
    add(scheduler, "a", 3)
    tried = lengths(scheduler, 12)
    assert tried[1] == 4 and tried[5:] == [0] * 7, "after few guesses"
    source.right = True
    assert max(lengths(scheduler, 4)) > 0


def test_the_first_source_that_has_a_draft_is_taken() -> None:
    wrong, right = Known("wrong", right=False), Known("right")
    scheduler = with_sources(wrong, right)
    add(scheduler, "a", 3)
    outputs = [output for _ in range(10) for output in one_step(scheduler)[1]]
    names = [output.checked.source for output in outputs if output.checked is not None]
    assert names[0] == "wrong" and names[-4:] == ["right"] * 4
    assert sorted(scheduler.stats().drafts) == ["right", "wrong"]


def test_what_was_checked_is_told_and_counted() -> None:
    scheduler = with_sources(Known())
    add(scheduler, "a", 3)
    one_step(scheduler)
    (output,) = one_step(scheduler)[1]
    assert output.checked == CheckedDrafts("known", 4, 4)
    stats = scheduler.stats().drafts["known"]
    assert (stats.drafts, stats.draft_tokens, stats.accepted_tokens, stats.accepted_per_pos) == (1, 4, 4, [1, 1, 1, 1])
    one_step(scheduler)
    assert stats.drafts == 1, "a snapshot does not change"


def test_a_request_can_switch_it_off() -> None:
    source = Known()
    scheduler = with_sources(source)
    add(scheduler, "a", 3, speculate=False)
    assert lengths(scheduler, 4) == [0] * 4 and source.num_asked == 0


def test_beams_do_not_draft() -> None:
    source = Known()
    scheduler = with_sources(source)
    scheduler.add_request(EngineCoreRequest("s", [1, 2, 3], BeamSearchParams(beam_width=2, n=1, max_tokens=8)))
    plan = scheduler.schedule()
    assert not plan.scheduled_spec_decode_tokens and source.num_asked == 0


def test_every_choice_drafts_behind_its_first_token() -> None:
    source = Known()
    scheduler = with_sources(source)
    add(scheduler, "a", 3, n=3)
    step(scheduler, {"a": TEXT[0], "a#1": TEXT[0], "a#2": TEXT[0]})
    plan, _ = one_step(scheduler)
    assert plan.scheduled_spec_decode_tokens.keys() == {"a", "a#1", "a#2"}


def test_what_has_ended_is_dropped_from_its_sources() -> None:
    source = Known()
    scheduler = with_sources(source)
    add(scheduler, "a", 3, max_tokens=6)
    add(scheduler, "b", 3)
    for _ in range(3):
        one_step(scheduler)
    assert source.dropped == ["a"]
    scheduler.abort_requests(["b"])
    assert source.dropped == ["a", "b"] and not scheduler.state.speculation._drafts


# ---- load ----


def test_a_full_batch_drafts_nothing() -> None:
    source = Known()
    scheduler = with_sources(source, num_blocks=2000)
    for number in range(100):
        add(scheduler, f"r{number}", 3)
    one_step(scheduler)
    plan, _ = one_step(scheduler)
    assert not plan.scheduled_spec_decode_tokens and source.num_asked == 0


def test_more_sequences_draft_less() -> None:
    drafted = []
    for num_branches in (1, 8, 48):
        scheduler = with_sources(Known(), num_blocks=2000)
        for number in range(num_branches):
            add(scheduler, f"r{number}", 3)
        one_step(scheduler)
        plan, _ = one_step(scheduler)
        drafted.append(len(plan.scheduled_spec_decode_tokens.get("r0", ())))
    assert drafted[0] > drafted[1] > drafted[2] == 0


def test_the_limit_on_sequences_that_is_set_holds() -> None:
    scheduler = with_sources(Known(), speculation=SpeculationConfig(max_seqs=1))
    add(scheduler, "a", 3)
    assert lengths(scheduler, 2)[-1] > 0
    add(scheduler, "b", 3)
    one_step(scheduler)
    assert lengths(scheduler, 3) == [0, 0, 0]


def test_a_row_costs_what_steps_have_shown() -> None:
    pace = StepPace()
    assert pace.cost_of_rows(1, 4) is None
    pace.observe(1, 0.010)
    assert pace.cost_of_rows(1, 4) is None  # nothing is known of larger ones
    pace.observe(8, 0.0135)
    assert pace.cost_of_rows(1, 4) == pytest.approx(0.05)
    pace.observe(40, 0.050)
    assert pace.cost_of_rows(8, 4) == pytest.approx(8 * 0.0365 / 32 / 0.0135)
    assert pace.cost_of_rows(400, 4) is None


def test_drafts_are_short_where_rows_are_dear() -> None:
    scheduler = with_sources(Known())
    scheduler.state.pace.observe(1, 0.010)
    scheduler.state.pace.observe(4, 0.022)
    add(scheduler, "a", 3)
    assert lengths(scheduler, 2) == [0, 1]


def test_a_draft_is_as_long_as_the_fastest_step() -> None:
    """Up to eight rows each takes a little more, the ninth as long as eight more, and those behind it nothing."""
    found = {}
    for most in (11, 15):
        scheduler = with_sources(Known(matched=30), speculation=SpeculationConfig(num_tokens=most))
        for size, seconds in ((1, 0.010), (8, 0.020), (12, 0.030), (16, 0.030)):
            scheduler.state.pace.observe(size, seconds)
        add(scheduler, "a", 3)
        found[most] = lengths(scheduler, 2)[-1]
    assert found == {11: 7, 15: 15}


def test_a_draft_has_one_of_few_lengths() -> None:
    """Each size of a step is recorded and observed by itself: where fewer tokens are left, a draft is cut to the next
    length."""
    scheduler = with_sources(Known(matched=30), speculation=SpeculationConfig(max_seqs=8))
    add(scheduler, "a", 3, max_tokens=8)
    assert lengths(scheduler, 4) == [0, 3, 1, 0]  # six, two and none before the last token


def test_a_longer_match_promises_more() -> None:
    drafted = []
    for matched in (3, 6, 12, 24):
        scheduler = with_sources(Known(matched=matched), speculation=SpeculationConfig())
        for size in (1, 2, 4, 8, 16):
            scheduler.state.pace.observe(size, 0.010 + 0.001 * size)
        add(scheduler, "a", 3)
        drafted.append(lengths(scheduler, 2)[-1])
    assert drafted[0] == 0 and drafted == sorted(set(drafted)), "behind three tokens it is compared first"


def test_what_is_wrong_behind_short_matches_tells_nothing_about_long_ones() -> None:
    source = Known(matched=8, right=False)
    scheduler = with_sources(source)
    add(scheduler, "a", 3)
    assert lengths(scheduler, 8)[-3:] == [0, 0, 0]
    source.matched, source.right = 30, True
    assert lengths(scheduler, 2)[-1] == 4


def test_a_short_match_that_was_right_is_drafted_from() -> None:
    scheduler = with_sources(Known(matched=3))
    add(scheduler, "a", 3)
    assert lengths(scheduler, 6)[:2] == [0, 0]
    assert lengths(scheduler, 2)[-1] > 0


def test_a_disturbed_step_does_not_end_the_drafts_of_a_sequence_alone() -> None:
    scheduler = with_sources(Known())
    scheduler.state.pace.observe(1, 0.010)
    scheduler.state.pace.observe(5, 4.0)  # while a kernel was compiled, and never again
    add(scheduler, "a", 3)
    assert lengths(scheduler, 8)[-1] > 1


def where_time_grows_in_stairs(source: Known, num_branches: int = 32) -> Scheduler:
    """A step of 64 rows takes twice as long as one of 32, and one of 256 not much longer."""
    scheduler = with_sources(source, num_blocks=4000, speculation=SpeculationConfig(num_tokens=8))
    for size, seconds in ((32, 1.08e-3), (64, 1.96e-3), (256, 2.85e-3)):
        scheduler.state.pace.observe(size, seconds)
    for number in range(num_branches):
        add(scheduler, f"r{number}", 3)
    return scheduler


def test_all_draft_where_the_rows_of_a_few_are_dear() -> None:
    scheduler = where_time_grows_in_stairs(Known(matched=30))
    one_step(scheduler)
    plan, _ = one_step(scheduler)
    drafts = plan.scheduled_spec_decode_tokens
    assert len(drafts) == 32 and {len(tokens) for tokens in drafts.values()} == {7}, "as many as there is room for"


def test_a_few_do_not_draft_where_their_rows_are_dear() -> None:
    source = Known(matched=30)
    source.only = {"r3", "r8"}
    scheduler = where_time_grows_in_stairs(source)
    for _ in range(RESULTS_OF_LOOK + 1):
        plan, _ = one_step(scheduler)
    assert not plan.scheduled_spec_decode_tokens
    source.only = None
    drafted = [len(one_step(scheduler)[0].scheduled_spec_decode_tokens) for _ in range(RESULTS_OF_LOOK + 2)]
    assert max(drafted) == 32, "it is looked at again"


# ---- steps in flight ----


def test_a_branch_without_a_draft_stays_planned_ahead() -> None:
    scheduler = with_sources(
        Known(right=False), speculation=SpeculationConfig(min_acceptance=1.0), max_steps_in_flight=2
    )
    add(scheduler, "a", 3)
    plans = [scheduler.schedule(), scheduler.schedule()]
    for _ in range(5):
        scheduler.update_from_output(first := plans.pop(0), answer_of(first))
        plans.append(scheduler.schedule())
        assert plans[-1].num_scheduled_tokens == {"a": 1}, "the next step is planned while one is in flight"


def test_a_branch_with_a_draft_waits_until_no_token_is_pending() -> None:
    scheduler = with_sources(Known(), max_steps_in_flight=2)
    add(scheduler, "a", 3)
    add(scheduler, "b", 3, speculate=False)
    first, second = scheduler.schedule(), scheduler.schedule()
    result_of(scheduler, first)
    ahead = scheduler.schedule()
    assert list(ahead.num_scheduled_tokens) == ["b"], "its second token is under way"
    result_of(scheduler, second)
    plan = scheduler.schedule()
    assert plan.scheduled_spec_decode_tokens == {"a": TEXT[2:5]}
    result_of(scheduler, ahead)
    result_of(scheduler, plan)
    assert scheduler.state.branches["a"].token_ids[3:] == TEXT[:6]


def test_a_branch_whose_draft_failed_to_come_is_planned_ahead_again() -> None:
    source = Known()
    scheduler = with_sources(source, max_steps_in_flight=2)
    add(scheduler, "a", 3)
    first, second = scheduler.schedule(), scheduler.schedule()
    result_of(scheduler, first)
    assert scheduler.schedule().is_void
    source.propose = lambda branch, max_tokens: ()  # type: ignore[method-assign]
    result_of(scheduler, second)
    assert not scheduler.schedule().is_void and not scheduler.schedule().is_void


def test_rows_that_seemed_dear_once_are_tried_again() -> None:
    scheduler = with_sources(Known(matched=24))
    pace = scheduler.state.pace
    for num_rows in (8, 12, 16):
        pace.observe(num_rows, 0.1 * num_rows)  # as disturbed as a step is in which a graph is captured
    for name in "abcdefgh":
        add(scheduler, name, 3, max_tokens=40)
    assert lengths(scheduler, 8) == [0] * 8
    speculation = scheduler.state.speculation
    speculation._num_dear = TRIES - 1
    assert lengths(scheduler, 3) == [0, 1, 0], "one token, once"
    pace.observe(12, 0.8)
    pace.observe(16, 0.8)
    assert lengths(scheduler, RESULTS_OF_LOOK + 1)[-1] > 0


@pytest.mark.parametrize("idle_seconds", [0.0, 0.15])
def test_branches_with_drafts_share_a_step_unless_the_host_is_slow(
    idle_seconds: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(StepPace, "idle_seconds", lambda self, num_tokens: idle_seconds)
    scheduler = with_sources(Known(matched=24), max_steps_in_flight=2)
    for num_rows in (1, 2, 4, 8, 16):
        scheduler.state.pace.observe(num_rows, 0.1)
    add(scheduler, "a", 3, max_tokens=48)
    in_flight = [scheduler.schedule()]
    add(scheduler, "b", 3, max_tokens=48)  # its prompt has a step of its own, so that the two take turns
    in_flight.append(scheduler.schedule())
    plans = []
    for _ in range(12):
        result_of(scheduler, in_flight.pop(0))
        while len(in_flight) < 2 and scheduler.can_plan and not (plan := scheduler.schedule()).is_void:
            in_flight.append(plan)
            plans.append(sorted(plan.scheduled_spec_decode_tokens))
    expected = [["a", "b"]] if idle_seconds == 0.0 else [["a"], ["b"]]
    assert sorted(plans[4:8]) == sorted(expected * (4 // len(expected))), plans


def test_a_plan_does_not_wait_for_drafts_while_a_prompt_may_start() -> None:
    scheduler = with_sources(Known(), max_steps_in_flight=2)
    for num_rows in (1, 2, 4, 8, 16):
        scheduler.state.pace.observe(num_rows, 0.1)
    add(scheduler, "a", 3, max_tokens=48)
    one_step(scheduler)
    one_step(scheduler)  # with drafts
    scheduler.schedule()
    assert scheduler.state.branches["a"].num_drafts > 0
    add(scheduler, "b", 3, max_tokens=48)
    assert scheduler.can_plan


def test_a_preempted_branch_forgets_its_draft() -> None:
    scheduler = with_sources(Known(), max_steps_in_flight=2)
    add(scheduler, "a", 3)
    add(scheduler, "b", 3)
    first, second = scheduler.schedule(), scheduler.schedule()
    result_of(scheduler, first)
    branch = scheduler.state.branches["a"]
    assert branch.waits_to_draft
    scheduler.step_failed(second, "the device is gone")
    assert not branch.waits_to_draft and not branch.draft_tokens


def waits(scheduler: Scheduler, seconds_with_drafts: float, num_steps: int = 40) -> list[int]:
    """Drafts in each of so many steps. A result comes after a millisecond, with drafts after `seconds_with_drafts`."""
    pace, found, now = scheduler.state.pace, [], 0.0
    for size in (1, 2, 4, 8):
        pace.observe(size, 0.001)  # by itself a step takes as long with more rows
    for _ in range(num_steps):
        plan = scheduler.schedule()
        num_drafts = len(plan.scheduled_spec_decode_tokens.get("a", ()))
        now += seconds_with_drafts if num_drafts else 0.001
        scheduler.state.now = now
        pace.skipped()
        result_of(scheduler, plan)
        found.append(num_drafts)
    return found


def half_right(branch: Branch, max_tokens: int) -> list[int]:
    """Guesses of which every second one is right."""
    done = branch.num_output_tokens
    return [TEXT[done + place] + (done + place) % 2 for place in range(max_tokens)]


@pytest.mark.parametrize(("seconds", "drafts"), [(0.001, True), (0.004, False)])
def test_the_wait_for_a_result_with_drafts_counts(
    seconds: float, drafts: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tests.unit.scheduling.test_speculation.TEXT", list(range(10, 160)))
    source = Known()
    source.propose = half_right  # type: ignore[method-assign]
    scheduler = with_sources(source)
    add(scheduler, "a", 3, max_tokens=120)
    assert (sum(waits(scheduler, seconds)[20:]) > 0) == drafts


def test_branches_beside_others_that_draft_do_not_tell_how_long_one_waits_without_drafts() -> None:
    waits = ResultWaits()
    for _ in range(50):
        waits.take_result(has_drafts=True)
        waits.observe(2.0, None)
    assert waits.plain == 1.0
    for _ in range(50):
        waits.take_result(has_drafts=False)
        waits.observe(2.0, None)
    assert waits.plain == 2.0
    waits.observe(1.2, None)
    assert waits.plain == 1.2, "others waited for a prompt, or for branches that end"


def test_a_branch_that_drafts_alone_tells_nothing_of_all_that_draft_together() -> None:
    pace = StepPace()
    for num_tokens in (8, 64):
        pace.observe(num_tokens, 0.010)
    costs = DraftCosts(SpeculationConfig(num_tokens=7), pace)
    costs.begin(8)
    for _ in range(50):
        costs.waits.take_result(has_drafts=True)
        costs.observe_wait(0.030, 8, 7, of_most=False)
    assert costs.waits.drafted > 2 and costs.waits.together is None
    costs.find_share([0.9] * 8)
    assert costs.share == 1.0 and costs.length(0.9) == 7
    for _ in range(50):
        costs.observe_wait(0.090, 8, 7, of_most=True)
    assert costs.waits.together is not None and costs.waits.together > 3
    costs.find_share([0.9] * 8)
    assert costs.share < 1.0
    for _ in range(RESULTS_OF_TOGETHER):
        costs.waits.take_result(has_drafts=False)
    costs.find_share([0.9] * 8)
    assert costs.share == 1.0, "tried again"


def test_all_draft_as_many_tokens_as_a_step_takes_at_no_further_cost() -> None:
    pace = StepPace()
    for num_tokens, seconds in {32: 4.8, 64: 6.4, 128: 8.0, 136: 9.6, 256: 9.6}.items():
        pace.observe(num_tokens, seconds / 1e3)
    costs = DraftCosts(SpeculationConfig(num_tokens=7), pace)
    costs.begin(32)
    drafts = [Guess(0.6, 7, length) for length in [3] * 30 + [7] * 2]  # eight rows too many
    costs.level(drafts, is_pending=False)
    assert {draft.length for draft in drafts} == {3}
    drafts = [Guess(0.9, 7, length) for length in [3] * 30 + [7] * 2]
    costs.level(drafts, is_pending=False)
    assert {draft.length for draft in drafts} == {7}
    drafts = [Guess(0.4, 7, 3) for _ in range(32)]
    costs.level(drafts, is_pending=False)
    assert {draft.length for draft in drafts} == {0}
    drafts = [Guess(0.5, 7, 3) for _ in range(32)]
    costs.level(drafts, is_pending=False)
    assert {draft.length for draft in drafts} == {3}
    costs.level(drafts, is_pending=True)
    assert {draft.length for draft in drafts} == {0}, "not enough to wait for steps in flight"


def test_a_branch_that_waited_for_a_prompt_tells_nothing_of_drafts() -> None:
    scheduler = with_sources(Known())
    pace, speculation = scheduler.state.pace, scheduler.state.speculation
    for num_rows in (1, 2, 4, 8, 32):
        pace.observe(num_rows, 0.001)
    add(scheduler, "a", 3, max_tokens=40)
    for now in (0.001, 0.002, 0.003):
        plan = scheduler.schedule()
        scheduler.state.now = now
        result_of(scheduler, plan)
    before = speculation._costs.waits.together
    add(scheduler, "b", 24, max_tokens=40)
    plan = scheduler.schedule()
    assert plan.num_scheduled_tokens["b"] == 24 and "a" in plan.scheduled_spec_decode_tokens
    scheduler.state.now = 0.053
    result_of(scheduler, plan)
    assert speculation._costs.waits.together == before is not None


def test_of_many_drafts_that_cost_too_much_one_is_tried_once_in_a_while() -> None:
    scheduler = with_sources(Known(matched=24), max_num_seqs=64)
    pace = scheduler.state.pace
    for num_rows in (8, 12, 16, 40):
        pace.observe(num_rows, 0.1 * num_rows)
    for name in "abcdefgh":
        add(scheduler, name, 3, max_tokens=40)
    counts = [len(one_step(scheduler)[0].scheduled_spec_decode_tokens) for _ in range(39)]
    assert sum(counts) == 0, "with eight branches each, a draft was tried after every sixteenth step"
