"""A parent's memory is freed at any point of its continuation: the tokens stay those of the whole text sent anew.

Every kind of parent, every offset in a block, greedy and seeded.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from ratoon import RequestOutput, SamplingParams
from ratoon.engine.output.roots import Root
from tests.depths import both_depths
from tests.golden.driver import Driver, greedy, sampled
from tests.golden.engines import engine
from tests.golden.test_continuation import tokens_of
from tests.golden.tiny_models import random_token_ids

LLAMA = "llama with grouped heads"
WINDOW = "mistral with a window shorter than the sequence"
TWO_GROUPS = "qwen2 with windows by layer type"
NATIVE = "qwen3 untied with heads that the native kernels take"  # they want blocks of 16
BLOCK_SIZE = 4
SUFFIX = [7, 3, 9, 1, 5, 2]
BEFORE_IT_IS_ADDED = -1

Parent = tuple[Root, dict[str, Any], str | None]  # what is continued, where, and the id of what still runs


def leased(driver: Driver, prompt: list[int], params: SamplingParams) -> Parent:
    return driver.find(driver.result(driver.add(prompt, params, retain_kv=60)).request_id), {}, None


def not_leased(driver: Driver, prompt: list[int], params: SamplingParams) -> Parent:
    return driver.find(driver.result(driver.add(prompt, params)).request_id), {}, None


def one_choice_of_three(driver: Driver, prompt: list[int], params: SamplingParams) -> Parent:
    several = sampled(params.max_tokens or 1, n=3)  # greedy choices would all be the same
    return driver.find(driver.result(driver.add(prompt, several, retain_kv=60)).request_id), {"choice": 2}, None


def an_earlier_token(driver: Driver, prompt: list[int], params: SamplingParams) -> Parent:
    root, _, _ = leased(driver, prompt, params)
    return root, {"at": len(prompt) - 4}, None  # a window has moved on from it


def a_continuation(driver: Driver, prompt: list[int], params: SamplingParams) -> Parent:
    root, _, _ = leased(driver, prompt, params)
    child_id = driver.submit(driver.continuation(root, [4, 4], params, retain_kv=60))
    return driver.find(driver.result(child_id).request_id), {}, None


def still_running(driver: Driver, prompt: list[int], params: SamplingParams) -> Parent:
    parent_id = driver.add(prompt, sampled(60, temperature=params.temperature))
    while len(driver.find(parent_id).choices[0]) < (params.max_tokens or 1):
        driver.step()
    return driver.find(parent_id), {}, parent_id


KINDS: list[Callable[[Driver, list[int], SamplingParams], Parent]] = [
    leased, not_leased, one_choice_of_three, an_earlier_token, a_continuation, still_running,
]  # fmt: skip


def continue_while_the_parent_goes(
    driver: Driver, parent: Parent, params: SamplingParams, moment: int
) -> RequestOutput:
    """The output of a continuation whose parent is freed `moment` steps after the continuation was added."""
    root, options, running_id = parent

    def let_it_go() -> None:
        if running_id is not None:
            driver.abort(running_id)
        driver.forget_unheld_memory()

    request = driver.continuation(root, SUFFIX, params, **options)
    if moment == BEFORE_IT_IS_ADDED:
        let_it_go()
    child_id = driver.submit(request)
    for _ in range(moment):
        driver.step()
    if moment != BEFORE_IT_IS_ADDED:
        let_it_go()
    return driver.result(child_id)


@pytest.mark.parametrize("make_parent", KINDS)
@pytest.mark.parametrize(
    ("family", "make_params", "block_size", "prompt_lengths", "depth"),
    [
        (LLAMA, greedy, BLOCK_SIZE, range(9, 9 + BLOCK_SIZE), 2),  # parents that end at each place of a block
        (LLAMA, sampled, BLOCK_SIZE, (9, 11), 1),
        (WINDOW, greedy, BLOCK_SIZE, (9, 11), 2),
        (TWO_GROUPS, sampled, BLOCK_SIZE, (9, 11), 1),
        (NATIVE, greedy, 16, (12, 13), 2),
    ],
)
@pytest.mark.one_in(11)
def test_the_parent_goes_away_at_every_point_in_time(
    family, make_params, block_size, prompt_lengths, depth, make_parent
):
    """Before the continuation is added, before its first step, between the parts of its prefill, while it decodes."""
    params = make_params(4)
    settings = {"block_size": block_size, "num_blocks": 64, "max_prefill_chunk": 3, "max_steps_in_flight": depth}
    with engine(family, **settings) as llm:
        driver = Driver(llm)
        for length in prompt_lengths:
            prompt = random_token_ids(length, seed=length)
            # Three steps of prefill, where nothing is missing, and three more tokens behind the first.
            for moment in range(BEFORE_IT_IS_ADDED, 6):
                parent = make_parent(driver, prompt, params)
                child = continue_while_the_parent_goes(driver, parent, params, moment)
                assert tokens_of(child) == driver.afresh(child.prompt_token_ids, params), (length, moment)
                if moment <= 0:
                    assert (child.continuation.source, child.continuation.inherited_tokens) == ("recomputed", 0)
                elif family == LLAMA:  # a window has moved on from earlier tokens: it may have less to give
                    assert child.continuation.source == ("prefix_cache" if make_parent is not_leased else "lease")


@both_depths
@pytest.mark.parametrize("make_params", [greedy, sampled])
def test_the_parent_goes_away_while_the_continuation_waits(make_params):
    params = make_params(4)
    with engine(LLAMA, block_size=BLOCK_SIZE, num_blocks=64, max_num_seqs=1) as llm:
        driver = Driver(llm)
        for moment in range(5):
            parent = leased(driver, random_token_ids(10, seed=1), params)
            busy_id = driver.add(random_token_ids(5, seed=2), greedy(6))
            driver.step()
            child = continue_while_the_parent_goes(driver, parent, params, moment)
            assert driver.is_finished(busy_id) and child.continuation.source == "recomputed"
            assert tokens_of(child) == driver.afresh(child.prompt_token_ids, params)
