"""Drafts from the text that a request expects its answer to be."""

from __future__ import annotations

from ratoon.core.params import SamplingParams
from ratoon.core.request import EngineCoreRequest
from ratoon.scheduling.branch import Branch
from ratoon.scheduling.drafters.prediction import PredictionDrafter
from tests.unit.scheduling.steps import scheduler_of, step

EXPECTED = [10, 11, 12, 13, 14, 15, 16, 17]


def branch_with(answer: list[int], prompt: list[int] | None = None, expected: list[int] = EXPECTED) -> Branch:
    scheduler = scheduler_of()
    params = SamplingParams(max_tokens=50, prediction_token_ids=expected)
    scheduler.add_request(EngineCoreRequest("a", prompt or [1, 2, 3], params))
    branch = scheduler.state.branches["a"]
    branch.append_tokens(answer)
    return branch


def drafts(answer: list[int], prompt: list[int] | None = None) -> list[int]:
    return list(PredictionDrafter().propose(branch_with(answer, prompt), 3))


def test_an_answer_that_is_as_expected_goes_on_so() -> None:
    assert drafts([10]) == [11, 12, 13]
    assert drafts([10, 11, 12, 13, 14, 15]) == [16, 17]
    assert drafts(EXPECTED) == []


def test_an_answer_that_left_the_text_finds_back_to_it() -> None:
    assert drafts([10, 11, 99]) == []
    assert drafts([10, 11, 99, 13]) == []  # one token may be there by chance
    assert drafts([10, 11, 99, 13, 14]) == [15, 16, 17]
    assert drafts([99, 98, 10, 11]) == [12, 13, 14]  # something came before it
    assert drafts([10, 14, 15]) == [16, 17]  # a part is left out


def test_the_prompt_is_no_part_of_the_answer() -> None:
    assert drafts([99], prompt=[10, 11]) == []
    assert drafts([12], prompt=[10, 11]) == []


def test_tokens_are_compared_once_as_they_come() -> None:
    branch, drafter = branch_with([10]), PredictionDrafter()
    found = [list(drafter.propose(branch, 1))]
    for tokens in ([11, 12], [77], [14, 15], [16]):
        branch.append_tokens(tokens)
        found.append(list(drafter.propose(branch, 1)))
    assert found == [[11], [13], [], [16], [17]]
    drafter.drop(branch)
    assert not drafter._places


def test_a_request_drafts_from_it_in_an_engine_that_makes_no_drafts() -> None:
    scheduler = scheduler_of(max_steps_in_flight=1)
    params = SamplingParams(max_tokens=50, prediction_token_ids=[7, 7, 7, 7, 7, 7, 7, 7])
    scheduler.add_request(EngineCoreRequest("a", [1, 2, 3], params))
    scheduler.add_request(EngineCoreRequest("b", [1, 2, 3, 4], SamplingParams(max_tokens=50)))
    plan, _ = step(scheduler)
    assert plan.scheduled_new_reqs[0].params.prediction_token_ids is None, "workers do not need it"
    plan = scheduler.schedule()
    assert list(plan.scheduled_spec_decode_tokens) == ["a"]
    assert len(plan.scheduled_spec_decode_tokens["a"]) > 2, "it is trusted from the start"


def test_a_request_that_switches_drafts_off_has_none() -> None:
    scheduler = scheduler_of(max_steps_in_flight=1)
    params = SamplingParams(max_tokens=50, prediction_token_ids=[7, 7, 7, 7], speculate=False)
    scheduler.add_request(EngineCoreRequest("a", [1, 2, 3], params))
    step(scheduler)
    assert not scheduler.schedule().scheduled_spec_decode_tokens
