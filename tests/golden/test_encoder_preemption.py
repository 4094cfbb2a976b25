"""Encoder-decoder requests that lose their memory again and again, to the host or for good, get the texts that they get
alone; nothing is left behind, and what is aborted gives everything back."""

from __future__ import annotations

import random
from functools import cache
from typing import Any

import pytest

from ratoon.core.params import BeamSearchParams, SamplingParams
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
from tests.golden.test_encoder_decoder import assert_same_numbers
from tests.golden.tiny_models import VOCAB_SIZE

TIGHT = 16  # blocks: the longest input takes six, and a branch four beside it
SWAP = {"no host memory": 0, "a little host memory": 7, "much host memory": 80}

Asked = dict[str, tuple[Source, list[int], SamplingParams | BeamSearchParams]]


@cache
def asked(family: str) -> Asked:
    """Requests of many kinds, some of which read the same."""
    one, other = source_of(family, 50), source_of(family, 20)
    return {
        "greedy": (one, decoder_prompt(10), greedy(40)),
        "greedy, same input": (one, decoder_prompt(30), greedy(40)),
        "choices": (other, decoder_prompt(17), sampled(30, n=3)),
        "beams": (one, decoder_prompt(5), beams(3, n=2, max_tokens=20)),
        "greedy, other input": (other, [START], greedy(60)),
        "long input": (source_of(family, 90), decoder_prompt(3), greedy(30)),
        "choices, same input": (one, decoder_prompt(12), sampled(30, n=2, seed=9)),
    }


Answers = dict[tuple[str, int], tuple[list[int], float | None]]


def answers_of(driver: Driver) -> Answers:
    for key, answer in driver.answers.items():
        assert answer.error is None and answer.finish_reason is not None, (key, answer.error)
    return {key: (list(answer.token_ids), answer.score) for key, answer in driver.answers.items()}


@cache
def alone(family: str) -> Answers:
    with core_of(family) as driver:
        for request_id, request in asked(family).items():
            driver.ask(request_id, *request, cache_salt=request_id)
            driver.run()
        for request_id, (source, prompt, params) in asked(family).items():
            if isinstance(params, SamplingParams) and params.is_greedy:
                assert_greedy(family, source, prompt, driver.tokens(request_id))
        return answers_of(driver)


def ask_all(driver: Driver, family: str) -> None:
    """Those that come later are the more urgent, where that counts."""
    for number, (request_id, request) in enumerate(asked(family).items()):
        driver.ask(request_id, *request, priority=-number)


# ---- preemption ----


@both_depths
@exact_on_cpu
@pytest.mark.parametrize("swap", SWAP)
@pytest.mark.parametrize("family", ["bart", "t5", "whisper"])
@pytest.mark.one_in(5)
def test_preempted_requests_get_the_texts_that_they_get_alone(family: str, swap: str) -> None:
    with core_of(family, num_blocks=TIGHT, swap_blocks=SWAP[swap]) as driver:
        ask_all(driver, family)
        driver.run()
        assert answers_of(driver) == alone(family)
        assert driver.num_preemptions > 4
        assert (driver.num_stored > 0) == (driver.num_loaded > 0) == (SWAP[swap] > 0)
        assert driver.num_encoder_runs == driver.core.stats().num_encoder_runs >= 3


@exact_on_cpu
@pytest.mark.parametrize("swap_blocks", [0, 80])
@pytest.mark.parametrize(
    "settings",
    [
        {"max_num_batched_tokens": 5},
        {"enable_prefix_caching": False},
        {"policy": "priority"},
        {"max_num_encoder_tokens": 60, "max_num_seqs": 5},
        {"block_size": 32, "num_blocks": 10},
    ],
    ids=str,
)
@pytest.mark.one_in(3)
def test_they_get_them_whatever_the_settings(settings: dict[str, Any], swap_blocks: int) -> None:
    family = "bart"
    with core_of(family, swap_blocks=swap_blocks, **({"num_blocks": TIGHT} | settings)) as driver:
        ask_all(driver, family)
        driver.run()
        assert answers_of(driver) == alone(family)
        assert driver.num_preemptions > 1


@exact_on_cpu
def test_who_comes_back_from_the_host_computes_nothing_again() -> None:
    family = "bart"
    kinds = {name: request for name, request in asked(family).items() if not isinstance(request[2], BeamSearchParams)}
    with core_of(family, num_blocks=TIGHT, swap_blocks=80, enable_prefix_caching=False) as driver:
        for request_id, request in kinds.items():
            driver.ask(request_id, *request)
        driver.run()
        assert driver.num_preemptions > 2 and driver.num_loaded > 0
        num_tokens = sum(len(prompt) + params.n * (params.max_tokens - 1) for _, prompt, params in kinds.values())
        assert driver.num_computed_tokens == num_tokens
        for plan in driver.plans:
            beginning = {new.req_id for new in plan.scheduled_new_reqs if new.num_computed_tokens == 0}
            assert {step.req_id for step in plan.encoder_steps} <= beginning


def test_without_host_memory_a_table_that_another_holds_is_not_run_again() -> None:
    """The last of three with the same input is preempted, and resumes when the second ends, next to the first."""
    family, source = "bart", source_of("bart", 50)
    asked = {"first": (decoder_prompt(5), 60), "second": (decoder_prompt(17), 20), "third": (decoder_prompt(18), 20)}
    with core_of(family, num_blocks=12, enable_prefix_caching=False) as driver:
        for request_id, (prompt, count) in asked.items():
            driver.ask(request_id, source, prompt, greedy(count))
        driver.run()
        assert [plan.preempted_req_ids for plan in driver.plans if plan.preempted_req_ids] == [["third"]]
        assert driver.num_encoder_runs == 1
        for request_id, (prompt, _) in asked.items():
            assert_greedy(family, source, prompt, driver.tokens(request_id))


@both_depths
def test_the_last_reader_of_an_input_takes_its_table_to_the_host_and_back() -> None:
    """Swapped out once, when preempted, and in once, when there is room again, without running the encoder."""
    family, one, other = "bart", source_of("bart", 50), source_of("bart", 33)
    with core_of(family, num_blocks=13, swap_blocks=50) as driver:
        driver.ask("first", one, decoder_prompt(17), greedy(80))
        driver.ask("second", other, decoder_prompt(17), greedy(40))
        driver.run()
        (out,) = [plan for plan in driver.plans if plan.preempted_req_ids]
        (loading,) = [plan for plan in driver.plans if plan.loads]
        (back,) = [plan for plan in driver.plans if plan.step > out.step and plan.scheduled_new_reqs]
        assert out.preempted_req_ids == ["second"]
        assert {store.slot for store in out.stores} >= {load.slot for load in loading.loads}
        (new,) = back.scheduled_new_reqs
        restored = {load.block for load in loading.loads}
        assert restored >= set(new.cross_block_ids) and len(new.cross_block_ids) == 3
        assert restored <= {*new.cross_block_ids, *new.block_ids[0]}
        assert driver.num_encoder_runs == 2 and not back.encoder_steps
        assert_greedy(family, one, decoder_prompt(17), driver.tokens("first"))
        assert_greedy(family, other, decoder_prompt(17), driver.tokens("second"))


@both_depths
@pytest.mark.parametrize("swap_blocks", [0, 80])
def test_prompts_that_are_preempted_on_their_way_tell_every_number_once(swap_blocks: int) -> None:
    family, source = "bart", source_of("bart", 33)
    first, last = decoder_prompt(33), decoder_prompt(90)
    with core_of(family, num_blocks=12, swap_blocks=swap_blocks, max_num_batched_tokens=8) as driver:
        driver.ask("first", source, first, greedy(40))
        driver.ask("last", source, last, greedy(4, logprobs=VOCAB_SIZE, prompt_logprobs=VOCAB_SIZE))
        driver.run()
        assert any("last" in plan.preempted_req_ids for plan in driver.plans)
        assert_greedy(family, source, first, driver.tokens("first"))
        assert_same_numbers(driver, "last", family, source, last)


@exact_on_cpu
def test_tables_come_from_the_device_from_the_cache_from_the_host_and_anew() -> None:
    """Requests come and end in between."""
    family, chance = "bart", random.Random(4)
    sources = [source_of(family, length) for length in (17, 40, 60)]
    requests = [
        (chance.choice(sources), decoder_prompt(chance.randint(1, 30), number), chance.randint(1, 50))
        for number in range(14)
    ]
    with core_of(family, num_blocks=16, swap_blocks=25, max_num_batched_tokens=32) as driver:
        for number, (source, prompt, count) in enumerate(requests):
            driver.ask(str(number), source, prompt, greedy(count))
            for _ in range(chance.randint(0, 6)):
                if driver.core.has_work():
                    driver.step()
        driver.run()
        assert driver.num_loaded > 0
        for number, (source, prompt, _) in enumerate(requests):
            assert_greedy(family, source, prompt, driver.tokens(str(number)), number)


# ---- aborts ----


@both_depths
@exact_on_cpu
@pytest.mark.parametrize("swap_blocks", [0, 7, 80])
@pytest.mark.parametrize("seed", range(3))
@pytest.mark.one_in(5)
def test_aborts_at_any_moment_give_everything_back(seed: int, swap_blocks: int) -> None:
    """Waiting, running, preempted or swapped out, one choice or all of them. The others get their texts."""
    family, chance = "bart", random.Random(seed)
    names, aborted = list(asked(family)), set()
    with core_of(family, num_blocks=TIGHT, swap_blocks=swap_blocks, max_num_batched_tokens=32) as driver:
        ask_all(driver, family)
        while driver.core.has_work():
            driver.step()
            if chance.random() < 0.06:
                name = chance.choice(names)
                driver.core.abort_requests([name if chance.random() < 0.7 else f"{name}#1"])
                aborted.add(name)
                driver.core.scheduler.check()
        assert aborted
        for key, (tokens, score) in answers_of(driver).items():
            expected, expected_score = alone(family)[key]
            assert tokens == expected[: len(tokens)]
            assert key[0] in aborted or (tokens, score) == (expected, expected_score)


@both_depths
def test_an_abort_of_all_leaves_an_engine_that_answers() -> None:
    family = "bart"
    with core_of(family, num_blocks=TIGHT, swap_blocks=40) as driver:
        for _ in range(3):
            ask_all(driver, family)
            for _ in range(30):
                driver.step()
            driver.core.abort_requests(list(asked(family)))
            driver.check_nothing_left()
        source = source_of(family, 50)
        driver.ask("afterwards", source, [START], greedy(10))
        driver.run()
        assert_greedy(family, source, [START], driver.tokens("afterwards"))
