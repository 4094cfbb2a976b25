"""Encoder-decoder requests in steps that go wrong: only the request at fault fails, the others get their numbers, and
nothing reads what a failed step may have left in a cross table or on the host."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from itertools import count
from typing import Any

import pytest
import torch

from ratoon.core.params import BeamSearchParams, SamplingParams
from ratoon.core.plan import SchedulerOutput
from ratoon.core.request import EngineCoreRequest, Extraction
from tests.depths import both_depths
from tests.golden.encoder_engines import (
    START,
    Driver,
    Source,
    assert_greedy,
    beams,
    core_of,
    decoder_prompt,
    greedy,
    sampled,
    source_of,
)
from tests.golden.marks import exact_on_cpu
from tests.golden.tiny_encoder_models import tiny_t5
from tests.golden.tiny_models import VOCAB_SIZE, TinyModel, random_token_ids

pytestmark = exact_on_cpu

FAMILY = "bart"
BEFORE, BETWEEN, AFTER = "before the encoder", "between encoder and decoder", "after all is computed"
MOMENTS = [BEFORE, BETWEEN, AFTER]
ONE, OTHER = source_of(FAMILY, 40), source_of(FAMILY, 20)
TIGHT: dict[str, Any] = {"num_blocks": 14, "swap_blocks": 40}  # some branch is always on the host

REQUESTS: dict[str, tuple[Source, list[int], SamplingParams | BeamSearchParams]] = {
    "greedy": (ONE, decoder_prompt(18), greedy(14)),
    "choices": (OTHER, decoder_prompt(14), sampled(14, n=2)),
    "beams": (ONE, decoder_prompt(5), beams(3, n=2, max_tokens=9)),
    "same input": (ONE, decoder_prompt(30), greedy(9)),
}
Answers = dict[tuple[str, int], Any]


class Failing:
    """Steps that `fails` names raise at some point. Others run normally."""

    def __init__(self, driver: Driver, moment: str, fails: Callable[[SchedulerOutput], bool]) -> None:
        self.num_failed = 0
        self._fails = fails
        self._driver = driver
        runner, executor = driver.runner, driver.core.executor
        if moment == BEFORE:
            runner._apply_changes = self._failing(runner._apply_changes)
        elif moment == BETWEEN:
            runner._run_program = self._failing(runner._run_program)
        else:
            executor.sample_tokens = self._failing(executor.sample_tokens)

    def _failing(self, function: Callable[..., Any]) -> Callable[..., Any]:
        def wrapped(*arguments: Any) -> Any:
            if self._fails(self._driver.plans[-1]):
                self.num_failed += 1
                raise RuntimeError("no luck")
            return function(*arguments)

        return wrapped


def num_requests(plan: SchedulerOutput) -> int:
    """A request that fails in a step alone is the cause."""
    return len({req_id.partition("#")[0] for req_id in plan.req_ids})


def ask_all(driver: Driver) -> None:
    for request_id, request in REQUESTS.items():
        driver.ask(request_id, *request)


def answers_of(driver: Driver) -> Answers:
    for key, answer in driver.answers.items():
        assert answer.finish_reason is not None, key
    return {
        key: answer.error or (list(answer.token_ids), answer.score) for key, answer in driver.answers.items()
    }  # fmt: skip


@cache
def right() -> Answers:
    with core_of(FAMILY) as driver:
        for request_id, request in REQUESTS.items():
            driver.ask(request_id, *request, cache_salt=request_id)
            driver.run()
        return answers_of(driver)


# ---- steps that fail once ----


@both_depths
@pytest.mark.parametrize("moment", MOMENTS)
@pytest.mark.parametrize("number", [1, 2, 3, 8])
@pytest.mark.one_in(5)
def test_a_step_that_fails_once_changes_no_bit(number: int, moment: str) -> None:
    with core_of(FAMILY, max_num_batched_tokens=32) as driver:
        steps = count(1)
        failing = Failing(driver, moment, lambda plan: next(steps) == number)
        ask_all(driver)
        driver.run()
        assert failing.num_failed == 1
        assert answers_of(driver) == right()


@both_depths
@pytest.mark.parametrize("moment", MOMENTS)
@pytest.mark.parametrize("what", ["stores", "loads", "encoder_steps", "block_copies"])
@pytest.mark.one_in(5)
def test_a_step_with_swaps_that_fails_once_changes_no_bit(what: str, moment: str) -> None:
    """Sequences that were being swapped out or in, or were on the host, are computed again or restored unchanged."""
    with core_of(FAMILY, **TIGHT) as driver:
        least = 0 if what == "loads" else 2  # a request that is alone in a step without loads would be at fault
        failing = Failing(
            driver,
            moment,
            lambda plan: bool(getattr(plan, what)) and num_requests(plan) >= least and not failing.num_failed,
        )
        ask_all(driver)
        driver.run()
        has_decoder = any(getattr(plan, what) and plan.total_num_scheduled_tokens for plan in driver.plans)
        assert failing.num_failed == (moment != BETWEEN or has_decoder), "a step may do nothing but load"
        assert answers_of(driver) == right()


@both_depths
@pytest.mark.parametrize("moment", MOMENTS)
def test_steps_that_fail_again_and_again_under_pressure_change_no_bit(moment: str) -> None:
    with core_of(FAMILY, **TIGHT) as driver:
        steps = count(1)
        failing = Failing(driver, moment, lambda plan: next(steps) % 6 == 0 and num_requests(plan) > 1)
        ask_all(driver)
        driver.run()
        assert failing.num_failed > 2
        assert answers_of(driver) == right()


# ---- requests at fault ----


@both_depths
@pytest.mark.parametrize("moment", MOMENTS)
@pytest.mark.parametrize("settings", [{}, TIGHT], ids=["room", "tight"])
@pytest.mark.one_in(5)
def test_an_encoder_input_whose_steps_always_fail_fails_alone(moment: str, settings: dict[str, Any]) -> None:
    marked = Source((*ONE.token_ids[:20], 5))

    def has_mark(plan: SchedulerOutput) -> bool:
        return any(step.encoder_input.token_ids == list(marked.token_ids) for step in plan.encoder_steps)

    with core_of(FAMILY, **settings) as driver:
        Failing(driver, moment, has_mark)
        driver.ask("bad", marked, [START], sampled(5, n=2))
        ask_all(driver)
        driver.ask("bad too", marked, [START], beams(2, max_tokens=5))
        driver.run()
        expected = {("bad", 0), ("bad", 1), ("bad too", 0)}
        found = answers_of(driver)
        assert {key for key, answer in found.items() if answer == "RuntimeError: no luck"} == expected
        assert {key: answer for key, answer in found.items() if key not in expected} == right()


def test_an_encoder_input_that_the_model_cannot_read_fails_alone() -> None:
    """The front end refuses such a token."""
    with core_of(FAMILY) as driver:
        driver.ask("bad", Source((5, VOCAB_SIZE + 100)), [START], greedy(5))
        ask_all(driver)
        driver.run()
        found = answers_of(driver)
        assert "IndexError" in found.pop(("bad", 0))
        assert found == right()


@both_depths
def test_a_table_of_a_failed_step_is_not_found_again() -> None:
    with core_of(FAMILY) as driver:
        failing = Failing(driver, BETWEEN, lambda plan: failing.num_failed == 0)
        driver.ask("fails", ONE, [START], greedy(5))
        driver.run()
        assert driver["fails"].error == "RuntimeError: no luck"
        driver.ask("again", ONE, [START], greedy(5))
        driver.run()
        assert_greedy(FAMILY, ONE, [START], driver.tokens("again"))
        assert driver.num_encoder_runs == 2


def test_an_input_that_makes_nan_fails_alone_and_poisons_no_memory() -> None:
    """Its keys and values stay in the blocks that it frees, and are beyond the ends of other tables later."""
    tiny = tiny_t5("gated-gelu", own_head=True)  # a token that it can't read is still one that it can write
    sources = [Source(tuple(random_token_ids(length, seed=length))) for length in (33, 5, 18)]
    good = texts(tiny, sources)
    known = {START, *(token for source in sources for token in source.token_ids), *(t for text in good for t in text)}
    poison = next(token for token in range(VOCAB_SIZE) if token not in known)
    with torch.no_grad():
        tiny.oracle.get_input_embeddings().weight[poison] = torch.nan
    with core_of(tiny, num_blocks=12) as driver:
        driver.overwrites_unheld_memory = False
        for _ in range(2):
            driver.ask("bad", Source((4, poison, *range(4, 44))), [START], greedy(9))
            for number, source in enumerate(sources):
                driver.ask(str(number), source, [START], greedy(9))
            driver.run()
            assert "NaN" in (driver["bad"].error or "")
            assert [driver.tokens(str(number)) for number in range(len(sources))] == good


def texts(tiny: TinyModel, sources: list[Source]) -> list[list[int]]:
    with core_of(tiny) as driver:
        for number, source in enumerate(sources):
            driver.ask(str(number), source, [START], greedy(9))
        driver.run()
        return [driver.tokens(str(number)) for number in range(len(sources))]


# ---- extractions ----


def ask_states(driver: Driver, request_id: str, source: Source, of_encoder: bool) -> None:
    prompt = decoder_prompt(30)
    asked = Extraction([0, 7, 19] if of_encoder else [0, 7, 29], [0, 1, 3], of_encoder=of_encoder)
    driver.add(EngineCoreRequest(request_id, prompt, asked, encoder_input=source.for_engine()))


@both_depths
@pytest.mark.parametrize("moment", MOMENTS)
@pytest.mark.parametrize("of_encoder", [True, False], ids=["encoder", "decoder"])
@pytest.mark.one_in(5)
def test_hidden_states_that_a_failed_step_should_have_read_are_read_again(of_encoder: bool, moment: str) -> None:
    with core_of(FAMILY) as driver:
        ask_states(driver, "alone", OTHER, of_encoder)
        driver.run()
        expected = driver["alone"].states.tobytes()
    with core_of(FAMILY) as driver:

        def fails(plan: SchedulerOutput) -> bool:
            reads = plan.captures or any(step.captured for step in plan.encoder_steps)
            return bool(reads) and num_requests(plan) > 1

        failing = Failing(driver, moment, fails)
        ask_all(driver)
        ask_states(driver, "first", OTHER, of_encoder)
        ask_states(driver, "second", OTHER, of_encoder)
        driver.run()
        assert failing.num_failed
        assert [driver[name].states.tobytes() for name in ("first", "second")] == [expected] * 2
        found = answers_of(driver)
        assert {key: found[key] for key in right()} == right()


@both_depths
def test_an_extraction_that_always_fails_fails_alone() -> None:
    with core_of(FAMILY) as driver:
        Failing(driver, BEFORE, lambda plan: any(step.captured for step in plan.encoder_steps))
        ask_all(driver)
        ask_states(driver, "encoder", OTHER, True)
        ask_states(driver, "decoder", OTHER, False)
        driver.run()
        assert driver["encoder"].error == "RuntimeError: no luck"
        assert driver["decoder"].error is None
        found = answers_of(driver)
        assert {key: found[key] for key in right()} == right()
