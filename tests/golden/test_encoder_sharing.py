"""Equal encoder inputs run once for all requests, and no request reads the states of another input."""

from __future__ import annotations

import pytest

from ratoon.core.params import BeamSearchParams, SamplingParams
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

FAMILY = "bart"
PROMPT = decoder_prompt(40)  # two full blocks, and a part of a third
ONE, OTHER, THIRD = (source_of(FAMILY, 50, seed) for seed in range(3))


def ask_and_check(driver: Driver, request_id: str, source: Source, prompt: list[int], **rest: str) -> int:
    """One request alone, whose answer is right. How many of its prompt's tokens were found in the cache."""
    driver.ask(request_id, source, prompt, greedy(6), **rest)
    driver.run()
    assert_greedy(FAMILY, source, prompt, driver.tokens(request_id), request_id)
    return driver[request_id].num_cached_tokens


# ---- shared ----


@pytest.mark.parametrize("family", ["bart", "t5", "whisper"])
def test_requests_at_the_same_time_share_one_run_and_one_table(family: str) -> None:
    one, other = source_of(family, 50, 0), source_of(family, 50, 1)
    asked = [(source, decoder_prompt(length)) for length in (1, 7, 30) for source in (one, other)]
    with core_of(family, max_num_batched_tokens=128) as driver:
        for number, (source, prompt) in enumerate(asked):
            driver.ask(str(number), source, prompt, greedy(6))
        driver.step()
        assert driver.num_encoder_runs == 2
        tables = [tuple(new.cross_block_ids) for new in driver.plans[0].scheduled_new_reqs]
        assert len(tables) == 6 and len(set(tables)) == 2
        driver.run()
        assert driver.num_encoder_runs == 2
        for number, (source, prompt) in enumerate(asked):
            assert_greedy(family, source, prompt, driver.tokens(str(number)))


@pytest.mark.parametrize("prefix_caching", [True, False])
def test_requests_one_after_the_other_share_while_the_cache_remembers(prefix_caching: bool) -> None:
    with core_of(FAMILY, enable_prefix_caching=prefix_caching) as driver:
        for number, source in enumerate((ONE, OTHER, ONE, ONE, OTHER)):
            ask_and_check(driver, str(number), source, decoder_prompt(3 + number))
        assert driver.num_encoder_runs == (2 if prefix_caching else 5)


def test_one_that_comes_while_another_runs_shares_without_the_cache_too() -> None:
    with core_of(FAMILY, enable_prefix_caching=False) as driver:
        for number in range(3):
            driver.ask(str(number), ONE, decoder_prompt(3 + number), greedy(6))
            driver.step()
        driver.run()
        assert driver.num_encoder_runs == 1
        for number in range(3):
            assert_greedy(FAMILY, ONE, decoder_prompt(3 + number), driver.tokens(str(number)))


@pytest.mark.parametrize("params", [sampled(9, n=5), beams(5, n=3)], ids=["choices", "beams"])
def test_choices_and_beams_share_the_table_of_their_request(params: SamplingParams | BeamSearchParams) -> None:
    with core_of(FAMILY, max_num_batched_tokens=16) as driver:
        driver.ask("several", ONE, PROMPT, params)
        kv_cache = driver.core.scheduler.kv_cache
        driver.step()
        while driver.core.scheduler.has_unfinished_requests():
            (table,) = kv_cache.cross_tables._held.values()
            assert len(table.blocks) == kv_cache.num_cross_blocks(ONE.num_positions)
            driver.step()
        assert driver.num_encoder_runs == 1


@exact_on_cpu
def test_a_table_from_the_cache_gives_the_bits_of_a_fresh_one() -> None:
    with core_of(FAMILY) as driver:
        for request_id in ("fresh", "cached"):
            driver.ask(request_id, ONE, decoder_prompt(9), sampled(9, logprobs=5))
            driver.run()
        assert driver.num_encoder_runs == 1
        assert driver["fresh"].token_ids == driver["cached"].token_ids
        assert [rows.logprobs for rows in driver["fresh"].logprobs] == [
            rows.logprobs for rows in driver["cached"].logprobs
        ]


# ---- not shared ----


def test_salts_never_share() -> None:
    tags = [{}, {"cache_salt": "a"}, {"cache_salt": "b"}]
    with core_of(FAMILY, max_num_batched_tokens=256) as driver:
        for number, tag in enumerate(tags * 2):  # twice: those with the same tag do
            driver.ask(f"together {number}", ONE, PROMPT, greedy(4), **tag)
        driver.run()
        assert driver.num_encoder_runs == len(tags)
        for number, tag in enumerate(tags):
            assert ask_and_check(driver, f"later {number}", ONE, PROMPT, **tag) == 32
        assert ask_and_check(driver, "stranger", ONE, PROMPT, cache_salt="c") == 0
        assert driver.num_encoder_runs == len(tags) + 1


def test_after_a_reset_the_encoder_runs_again() -> None:
    with core_of(FAMILY) as driver:
        ask_and_check(driver, "first", ONE, PROMPT)
        driver.ask("under way", ONE, PROMPT, greedy(3))
        driver.step()
        assert not driver.core.reset_prefix_cache()
        driver.run()
        assert driver.num_encoder_runs == 1
        assert driver.core.reset_prefix_cache()
        assert ask_and_check(driver, "again", ONE, PROMPT) == 0
        assert driver.num_encoder_runs == 2


def test_an_engine_that_slept_has_forgotten_all_tables() -> None:
    with core_of(FAMILY, swap_blocks=4) as driver:
        for number, level in enumerate((1, 2)):
            ask_and_check(driver, str(number), ONE, PROMPT)
            driver.core.sleep(level)
            driver.core.wake_up()
        assert ask_and_check(driver, "awake", ONE, PROMPT) == 0
        assert driver.num_encoder_runs == 3


def test_inputs_that_begin_alike_share_nothing() -> None:
    shorter = Source(ONE.token_ids[:32])
    longer = Source((*ONE.token_ids, 5))
    with core_of(FAMILY) as driver:
        for number, source in enumerate((ONE, shorter, longer)):
            ask_and_check(driver, str(number), source, PROMPT)
        assert driver.num_encoder_runs == 3


def test_a_token_and_a_feature_that_look_alike_are_two_inputs() -> None:
    """What the decoder's prompt and the encoder's input hold in common makes no common block."""
    tokens = tuple(decoder_prompt(48))
    with core_of(FAMILY) as driver:
        assert ask_and_check(driver, "both", Source(tokens), list(tokens)) == 0
        assert ask_and_check(driver, "decoder only", ONE, list(tokens)) == 0
        assert ask_and_check(driver, "encoder only", Source(tokens), PROMPT) == 0
        assert driver.num_encoder_runs == 2


# ---- the decoder's prefix ----


def test_a_decoder_prefix_is_found_only_behind_the_same_encoder_input() -> None:
    with core_of(FAMILY) as driver:
        assert ask_and_check(driver, "one", ONE, PROMPT) == 0
        assert ask_and_check(driver, "same prompt, other input", OTHER, PROMPT) == 0
        assert ask_and_check(driver, "one again", ONE, PROMPT) == 32
        assert ask_and_check(driver, "other again", OTHER, [*PROMPT, 9]) == 32
        assert driver.num_encoder_runs == 2
        answers = [tuple(driver.tokens(name)) for name in ("one", "same prompt, other input")]
        assert len(set(answers)) == 2, "the two inputs must be told apart"


def test_same_prompts_behind_other_inputs_in_one_step_get_their_own_answers() -> None:
    with core_of(FAMILY, max_num_batched_tokens=256) as driver:
        for _ in range(2):  # cold, then with a cache that has all three
            for number, source in enumerate((ONE, OTHER, THIRD)):
                driver.ask(str(number), source, PROMPT, greedy(6))
            driver.run()
            for number, source in enumerate((ONE, OTHER, THIRD)):
                assert_greedy(FAMILY, source, PROMPT, driver.tokens(str(number)))
        assert driver.num_encoder_runs == 3


# ---- memory ----


def test_a_table_of_which_a_block_was_taken_is_written_anew() -> None:
    """8 usable blocks: four of each table, and what prompts need beside them."""
    with core_of(FAMILY, num_blocks=9) as driver:
        for number, source in enumerate((ONE, OTHER, ONE, THIRD, ONE, ONE)):
            ask_and_check(driver, str(number), source, decoder_prompt(20 + number))
        assert driver.num_encoder_runs == driver.core.stats().num_encoder_runs == 5  # only the last was still there


def test_a_request_that_shares_a_table_needs_no_memory_for_it() -> None:
    """Two requests of four blocks each with a table of four fit into ten blocks together, and two tables would not."""
    with core_of(FAMILY, num_blocks=11) as driver:
        for number in range(2):
            driver.ask(str(number), ONE, decoder_prompt(33 + number), greedy(10))
        driver.run()
        assert driver.num_preemptions == 0 and driver.num_encoder_runs == 1
        assert max(len(plan.num_scheduled_tokens) for plan in driver.plans) == 2
        for number in range(2):
            assert_greedy(FAMILY, ONE, decoder_prompt(33 + number), driver.tokens(str(number)))


def test_who_leaves_does_not_take_the_table_from_those_who_stay() -> None:
    with core_of(FAMILY) as driver:
        for number in range(4):
            driver.ask(str(number), ONE, [START, 5 + number], greedy(12 if number % 2 else 3))
        for _ in range(2):
            driver.step()
        driver.core.abort_requests(["0"])
        driver.run()
        assert driver.num_encoder_runs == 1
        for number in (1, 2, 3):
            assert_greedy(FAMILY, ONE, [START, 5 + number], driver.tokens(str(number)))
