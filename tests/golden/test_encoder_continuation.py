"""Continuations of encoder-decoder requests compute their suffix and one token, run no encoder, and give what the whole
gives afresh."""

from __future__ import annotations

from typing import Any

import pytest

from ratoon.core.params import BeamSearchParams, SamplingParams
from ratoon.core.request import InheritedFrom, ResumedChoice
from tests.depths import both_depths
from tests.golden.beam_oracle import Text, assert_same_texts
from tests.golden.encoder_engines import (
    FAMILIES,
    Driver,
    Source,
    assert_greedy,
    beams,
    core_of,
    decoder_prompt,
    greedy,
    oracle_beams,
    sampled,
    source_of,
)
from tests.golden.marks import exact_on_cpu

LEASE = {"retain_kv": 60.0}
SUFFIX = [9, 4, 11]


def continue_from(
    driver: Driver,
    request_id: str,
    parent: str,
    source: Source,
    whole: list[int],
    suffix: list[int],
    params: SamplingParams | BeamSearchParams,
    **rest: Any,
) -> int:
    """A continuation of `parent`, whose tokens are `whole`, run to its end. Tokens that were computed before its first
    output."""
    driver.ask(
        request_id, source, [*whole, *suffix], params, continuation_of=parent, continuation_token_ids=suffix, **rest
    )
    before, num_plans = driver.num_computed_tokens, len(driver.plans)
    driver.run()
    first = next(plan for plan in driver.plans[num_plans:] if plan.sampled_req_ids or plan.beam_steps)
    of_rest = sum(plan.total_num_scheduled_tokens for plan in driver.plans[num_plans:])
    assert driver.num_computed_tokens - before == of_rest
    return first.total_num_scheduled_tokens


def answers(driver: Driver, request_id: str, n: int) -> list[tuple[list[int], float | None]]:
    found = [driver.answers[request_id, choice] for choice in range(n)]
    assert all(answer.error is None and answer.finish_reason is not None for answer in found)
    return [(list(answer.token_ids), answer.score) for answer in found]


@pytest.mark.parametrize("family", FAMILIES)
def test_a_continuation_computes_its_suffix_and_one_token_and_runs_no_encoder(family: str) -> None:
    source, prompt = source_of(family, 50), decoder_prompt(20)
    with core_of(family) as driver:
        driver.ask("parent", source, prompt, greedy(9), **LEASE)
        driver.run()
        whole = [*prompt, *driver.tokens("parent")]
        for generation, suffix in enumerate((SUFFIX, [], [7] * 20)):  # each continues the one before
            parent = "parent" if generation == 0 else f"child {generation - 1}"
            name = f"child {generation}"
            num_computed = continue_from(driver, name, parent, source, whole, suffix, greedy(6), **LEASE)
            assert num_computed == len(suffix) + 1
            assert driver[name].inherited_from == InheritedFrom.LEASE
            assert_greedy(family, source, [*whole, *suffix], driver.tokens(name), name)
            whole += [*suffix, *driver.tokens(name)]
        assert driver.num_encoder_runs == 1


@both_depths
@exact_on_cpu
@pytest.mark.parametrize("params", [sampled(9, n=3), beams(4, n=3)], ids=["choices", "beams"])
@pytest.mark.parametrize("parent_params", [sampled(9, n=2), beams(3, n=2)], ids=["of choices", "of beams"])
def test_a_continuation_gives_the_bits_of_the_whole_sent_afresh(parent_params: Any, params: Any) -> None:
    family = "bart"
    source, prompt = source_of(family, 50), decoder_prompt(20)
    with core_of(family) as driver:
        driver.ask("parent", source, prompt, parent_params, **LEASE)
        driver.run()
        for choice, parent in enumerate(("parent", "parent#1")):
            whole = [*prompt, *driver.tokens("parent", choice)]
            name = f"child {choice}"
            assert continue_from(driver, name, parent, source, whole, SUFFIX, params) == 4
            assert driver.num_encoder_runs == 1 + choice
            driver.ask("afresh", source, [*whole, *SUFFIX], params, cache_salt=f"{choice}")
            driver.run()
            assert driver["afresh"].num_cached_tokens == 0 and driver.num_encoder_runs == 2 + choice
            assert answers(driver, name, 3) == answers(driver, "afresh", 3)


@both_depths
@pytest.mark.parametrize("parent_params", [sampled(9, n=2), beams(3, n=2)], ids=["of choices", "of beams"])
def test_a_lease_keeps_the_table_where_no_cache_would(parent_params: Any) -> None:
    family = "bart"
    source, prompt = source_of(family, 50), decoder_prompt(20)
    with core_of(family, enable_prefix_caching=False) as driver:
        driver.ask("parent", source, prompt, parent_params, **LEASE)
        driver.run()
        for choice, parent in enumerate(("parent", "parent#1")):
            whole = [*prompt, *driver.tokens("parent", choice)]
            assert continue_from(driver, f"child {choice}", parent, source, whole, SUFFIX, greedy(5)) == 4
            assert_greedy(family, source, [*whole, *SUFFIX], driver.tokens(f"child {choice}"))
        assert driver.num_encoder_runs == 1


@pytest.mark.parametrize("family", ["mbart", "t5", "whisper"])
def test_beams_behind_a_continuation_are_those_of_transformers(family: str) -> None:
    source, prompt = source_of(family, 33), decoder_prompt(12)
    params = beams(5, n=3, length_penalty=0.5)
    with core_of(family) as driver:
        driver.ask("parent", source, prompt, beams(3, n=1, max_tokens=10), **LEASE)
        driver.run()
        whole = [*prompt, *driver.tokens("parent")]
        assert continue_from(driver, "child", "parent", source, whole, SUFFIX, params) == 4
        assert driver.num_encoder_runs == 1
        ours = [Text(tokens, score) for tokens, score in answers(driver, "child", 3) if score is not None]
        assert_same_texts(ours, oracle_beams(family, source, [*whole, *SUFFIX], params, None), whole)


def test_the_middle_of_a_parent_can_be_continued() -> None:
    family = "bart"
    source, prompt = source_of(family, 50), decoder_prompt(20)
    with core_of(family) as driver:
        driver.ask("parent", source, prompt, greedy(20), **LEASE)
        driver.run()
        whole = [*prompt, *driver.tokens("parent")]
        for at in (1, 16, 25, 39):
            name = f"at {at}"
            num_computed = continue_from(driver, name, "parent", source, whole[:at], SUFFIX, greedy(5))
            assert num_computed == len(SUFFIX)  # all that it continues is computed
            assert_greedy(family, source, [*whole[:at], *SUFFIX], driver.tokens(name), name)
        assert driver.num_encoder_runs == 1


def test_a_parent_that_still_runs_is_continued_beside_it() -> None:
    family = "bart"
    source, prompt = source_of(family, 50), decoder_prompt(20)
    with core_of(family, max_steps_in_flight=1) as driver:  # so that it is known what the parent has computed
        driver.ask("parent", source, prompt, greedy(20))
        for _ in range(8):
            driver.step()
        whole = [*prompt, *driver["parent"].token_ids]
        continue_from(driver, "child", "parent", source, whole, SUFFIX, greedy(6))
        assert driver.num_encoder_runs == 1
        assert driver["child"].inherited_from == InheritedFrom.LEASE
        assert_greedy(family, source, [*whole, *SUFFIX], driver.tokens("child"))
        assert_greedy(family, source, prompt, driver.tokens("parent"))


@pytest.mark.parametrize("kept", ["prefix cache", "nothing"])
def test_a_parent_without_a_lease_is_found_in_the_cache_or_computed_again(kept: str) -> None:
    family = "bart"
    source, prompt = source_of(family, 50), decoder_prompt(20)
    with core_of(family) as driver:
        driver.ask("parent", source, prompt, greedy(20))
        driver.run()
        whole = [*prompt, *driver.tokens("parent")]
        if kept == "nothing":
            assert driver.core.reset_prefix_cache()
        continue_from(driver, "child", "parent", source, whole, SUFFIX, greedy(6))
        expected = InheritedFrom.PREFIX_CACHE if kept == "prefix cache" else InheritedFrom.RECOMPUTED
        assert driver["child"].inherited_from == expected
        assert driver.num_encoder_runs == (1 if kept == "prefix cache" else 2)
        assert_greedy(family, source, [*whole, *SUFFIX], driver.tokens("child"))


@exact_on_cpu
def test_a_request_that_another_process_had_begun_goes_on_the_same() -> None:
    """An engine that died had output some tokens of some choices; the next one gets them with the request."""
    family, source, prompt, params = "bart", source_of("bart", 50), decoder_prompt(20), sampled(12, n=3)
    with core_of(family) as driver:
        driver.ask("whole", source, prompt, params)
        driver.run()
        expected = [driver.tokens("whole", choice) for choice in range(3)]
    with core_of(family) as driver:
        begun = [expected[0][:1], expected[1], expected[2][:7]]
        resumed = [ResumedChoice(tokens, finished=len(tokens) == 12) for tokens in begun]
        driver.ask("whole", source, prompt, params, resumed=resumed)
        driver.run()
        assert driver.num_encoder_runs == 1
        assert [*begun[0], *driver.tokens("whole", 0)] == expected[0]
        assert [*begun[2], *driver.tokens("whole", 2)] == expected[2]


def test_a_continuation_that_names_another_encoder_input_inherits_nothing() -> None:
    """The front end does not send such a thing. What the parent computed is wrong behind another input."""
    family, prompt = "bart", decoder_prompt(20)
    one, other = source_of(family, 50), source_of(family, 50, seed=1)
    with core_of(family) as driver:
        driver.ask("parent", one, prompt, greedy(9), **LEASE)
        driver.run()
        whole = [*prompt, *driver.tokens("parent")]
        continue_from(driver, "child", "parent", other, whole, SUFFIX, greedy(6))
        assert driver["child"].inherited_from == InheritedFrom.RECOMPUTED
        assert driver.num_encoder_runs == 2
        assert_greedy(family, other, [*whole, *SUFFIX], driver.tokens("child"))


@both_depths
def test_leases_hold_the_table_and_give_it_back_when_memory_is_short() -> None:
    """The parents' leases share one table. A request that needs the memory gets it, and continuations report the right
    source."""
    family = "bart"
    source, other = source_of(family, 50), source_of(family, 90)
    with core_of(family, num_blocks=17, lease_fraction=1.0) as driver:
        wholes = []
        for number in range(3):
            prompt = decoder_prompt(17 + number)
            driver.ask(f"parent {number}", source, prompt, greedy(12), **LEASE)
            driver.run()
            wholes.append([*prompt, *driver.tokens(f"parent {number}")])
        kv_cache = driver.core.scheduler.kv_cache
        assert kv_cache.num_usable_blocks - kv_cache.num_free_blocks == 4 + 3 * 2
        driver.ask("large", other, decoder_prompt(60), greedy(20))
        driver.run()
        assert_greedy(family, other, decoder_prompt(60), driver.tokens("large"))
        assert driver.num_preemptions == 0
        for number, whole in enumerate(wholes):
            name = f"child {number}"
            continue_from(driver, name, f"parent {number}", source, whole, SUFFIX, greedy(6))
            assert_greedy(family, source, [*whole, *SUFFIX], driver.tokens(name), name)


@both_depths
@exact_on_cpu
@pytest.mark.parametrize("swap_blocks", [0, 40])
def test_continuations_under_pressure_give_the_same_bits(swap_blocks: int) -> None:
    """Parents and children that lose their memory, with and without a host for it."""
    family = "bart"
    sources = [source_of(family, length) for length in (20, 50)]

    def run(**settings: Any) -> list[Any]:
        with core_of(family, **settings) as driver:
            for number in range(6):
                source = sources[number % 2]
                driver.ask(f"parent {number}", source, decoder_prompt(20), sampled(25, seed=number), **LEASE)
            driver.run()
            wholes = [[*decoder_prompt(20), *driver.tokens(f"parent {number}")] for number in range(6)]
            for number, whole in enumerate(wholes):
                driver.ask(
                    f"child {number}", sources[number % 2], [*whole, *SUFFIX], sampled(25, n=2, seed=number),
                    continuation_of=f"parent {number}", continuation_token_ids=SUFFIX,
                )  # fmt: skip
            driver.run()
            if "swap_blocks" in settings:
                assert driver.num_preemptions > 3 and (driver.num_loaded > 0) == (swap_blocks > 0)
            return [answers(driver, f"child {number}", 2) for number in range(6)]

    assert run(num_blocks=18, swap_blocks=swap_blocks) == run()
