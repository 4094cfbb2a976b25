"""Requests that are run in advance: they leave nothing behind, and steps like theirs are known afterwards."""

from __future__ import annotations

import pytest

from ratoon.execution.passes.ends import Tokens
from ratoon.execution.passes.rehearsal import NUM_BEAMS, Rehearsal
from ratoon.layers.sampling import Mode
from tests.golden.tiny_models import TinyModel
from tests.unit.execution.test_graphs import ends_of, padded_driver
from tests.unit.execution.test_model_runner import LLAMA, OTHER, PROMPT, TWO_GROUPS, Driver, interpreted, oracle_greedy


def run_all(rehearsal: Rehearsal) -> int:
    count = 0
    while rehearsal.can_go_on:
        assert rehearsal.run_next()
        count += 1
    return count


@pytest.mark.parametrize("tiny", [LLAMA, TWO_GROUPS], ids=["one group", "two groups"])
def test_nothing_is_left_of_requests_that_were_run_in_advance(tiny: TinyModel) -> None:
    driver = Driver(tiny)
    assert run_all(Rehearsal(driver.runner, 64)) > 5
    assert not driver.runner.input_batch.row_of and driver.runner.num_computed_tokens == 0
    output = driver.step(new=[driver.new("a", PROMPT, 1)])
    found = [output.sampled_token_ids[0][0], *driver.decode("a", len(PROMPT), 3)]
    assert found == oracle_greedy(tiny, PROMPT, 4)


@interpreted
def test_each_usual_way_to_choose_tokens_has_run_in_padded_steps() -> None:
    driver, keys = padded_driver()
    run_all(Rehearsal(driver.runner, 64))
    ends = [end for key in keys for end in ends_of(key)]
    assert {end.mode for end in ends if isinstance(end, Tokens)} == set(Mode)
    assert NUM_BEAMS in {key.size for key in keys if key.num_reqs is None}, "a step of beams"


def test_requests_that_have_rows_are_not_disturbed() -> None:
    driver = Driver()
    rehearsal = Rehearsal(driver.runner, 64)
    driver.step(new=[driver.new("a", OTHER, 1)])
    assert not rehearsal.can_go_on
    driver.step(finished_req_ids=["a"])
    assert rehearsal.can_go_on


def test_what_fails_in_advance_ends_it_and_leaves_no_row(monkeypatch: pytest.MonkeyPatch) -> None:
    driver = Driver()
    rehearsal = Rehearsal(driver.runner, 64)
    rehearsal.run_next()
    with monkeypatch.context() as patch:
        patch.setattr(driver.runner, "_run_program", lambda *step: 1 / 0)
        assert not rehearsal.run_next()
    assert not rehearsal.can_go_on and not driver.runner.input_batch.row_of
    assert driver.step(new=[driver.new("a", PROMPT, 1)]).sampled_token_ids == [oracle_greedy(LLAMA, PROMPT, 1)]
