"""Draft tokens in plans that are written by hand: the tokens are those of sampling one by one, whatever was guessed."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from ratoon.core.params import SamplingParams
from ratoon.core.plan import CaptureStep
from ratoon.execution.passes.ends import Layers, Logits, Tokens
from tests.unit.execution.test_graphs import ends_of, padded_driver
from tests.unit.execution.test_model_runner import (
    BACKENDS,
    LLAMA,
    NAN_TOKEN,
    OTHER,
    PROMPT,
    TWO_GROUPS,
    Driver,
    interpreted,
    oracle_greedy,
    poisoned,
    token_of,
)

PARAMS = {
    "greedy": SamplingParams(temperature=0.0),
    "random": SamplingParams(temperature=1.2),
    "filtered": SamplingParams(temperature=1.1, top_k=20, top_p=0.9),
    "penalised": SamplingParams(temperature=0.7, repetition_penalty=1.5, frequency_penalty=0.4),
    "logprobs": SamplingParams(temperature=0.9, logprobs=2),
    "no repeated pair": SamplingParams(temperature=0.6, no_repeat_ngram_size=2),
    "forbidden at first": SamplingParams(temperature=0.0, min_tokens=4, stop_token_ids=[3]),
    "forbidden words": SamplingParams(temperature=0.9, bad_words_token_ids=[[5], [7, 9]]),
}
WRONG = 11  # a token, wherever another one is drawn


def start(driver: Driver, params: SamplingParams, prompt: list[int] = PROMPT) -> int:
    return token_of(driver.step(new=[driver.new("a", prompt, 1, params=params, seed=5)]), "a")


def one_by_one(driver: Driver, params: SamplingParams, count: int) -> list[int]:
    first = start(driver, params)
    return [first, *driver.decode("a", len(PROMPT), count - 1)]


def guessed(driver: Driver, drafts: list[list[int]], params: SamplingParams) -> tuple[list[list[int]], list[Any]]:
    """The tokens of each step, and their log-probabilities."""
    found, logprobs = [[start(driver, params)]], []
    length = len(PROMPT)
    for tokens in drafts:
        output = driver.step(
            known={"a": length},
            counts={"a": 1 + len(tokens)},
            scheduled_spec_decode_tokens={"a": tokens} if tokens else {},
        )
        assert output.req_ids == ["a"]
        found += output.sampled_token_ids
        logprobs.append(output.logprobs.get("a"))
        length += len(found[-1])
    return found, logprobs


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("params", PARAMS.values(), ids=PARAMS.keys())
@pytest.mark.one_in(3)
def test_the_same_tokens_are_sampled_with_right_and_wrong_guesses(params: SamplingParams, backend: str) -> None:
    expected = one_by_one(Driver(backend=backend), params, 12)
    drafts = [
        expected[1:4],  # all right: one more token comes with them
        [expected[5], WRONG if expected[6] != WRONG else WRONG + 1, expected[7]],
        [],  # an ordinary step behind tokens that were taken back
        [WRONG if expected[8] != WRONG else WRONG + 1],
    ]
    found, _ = guessed(Driver(backend=backend), drafts, params)
    assert [len(tokens) for tokens in found] == [1, 4, 2, 1, 1]
    assert [token for tokens in found for token in tokens] == expected[:9]


def test_log_probabilities_come_for_each_token_that_is_kept() -> None:
    params, alone = PARAMS["logprobs"], Driver()
    expected = [start(alone, params)]
    rows = []
    for place in range(4):
        output = alone.step(known={"a": len(PROMPT) + place})
        expected.append(token_of(output, "a"))
        rows.append(output.logprobs["a"])
    _, ((found,)) = guessed(Driver(), [[expected[1], expected[2], WRONG]], params)
    assert found.token_ids == [row.token_ids[0] for row in rows[:3]]
    np.testing.assert_allclose(found.logprobs, [row.logprobs[0] for row in rows[:3]], atol=1e-5)
    assert found.sampled_ranks == [row.sampled_ranks[0] for row in rows[:3]]


def test_log_probabilities_of_branches_with_and_without_guesses_come_together() -> None:
    params, driver = PARAMS["logprobs"], Driver()
    driver.step(new=[driver.new("a", PROMPT, 1, params=params), driver.new("b", OTHER, 5, params=params)])
    output = driver.step(
        known={"a": len(PROMPT), "b": len(OTHER)}, counts={"a": 2, "b": 1}, scheduled_spec_decode_tokens={"a": [WRONG]}
    )
    assert set(output.logprobs) == {"a", "b"}


@pytest.mark.parametrize("backend", BACKENDS)
def test_branches_with_and_without_guesses_share_a_step(backend: str) -> None:
    driver = Driver(TWO_GROUPS, backend)
    a, b, c = (
        oracle_greedy(TWO_GROUPS, PROMPT, 5),
        oracle_greedy(TWO_GROUPS, OTHER, 3),
        oracle_greedy(TWO_GROUPS, OTHER[:6], 4),
    )
    driver.step(new=[driver.new("a", PROMPT, 1), driver.new("b", OTHER, 5), driver.new("c", OTHER[:6], 8)])
    output = driver.step(
        known={"a": len(PROMPT), "b": len(OTHER), "c": 6},
        counts={"a": 4, "b": 1, "c": 3},
        scheduled_spec_decode_tokens={"a": a[1:4], "c": [c[1], WRONG]},
    )
    found = dict(zip(output.req_ids, output.sampled_token_ids))
    assert found == {"a": a[1:5], "b": b[1:2], "c": c[1:3]}
    output = driver.step(known={"c": 8, "b": len(OTHER) + 1, "a": len(PROMPT) + 4})
    assert token_of(output, "b") == b[2] and token_of(output, "c") == c[3]


def test_a_branch_whose_first_row_has_no_token_fails() -> None:
    driver = Driver(poisoned(LLAMA))
    bad = driver.new("bad", [*OTHER, NAN_TOKEN], 6)
    output = driver.step(new=[bad], counts={"bad": len(OTHER) + 2}, scheduled_spec_decode_tokens={"bad": [1]})
    assert set(output.errors) == {"bad"} and output.req_ids == []


@interpreted
def test_guesses_are_checked_in_a_padded_step() -> None:
    """Beside a branch without guesses, and beside hidden states."""
    driver, keys = padded_driver()
    a, b = oracle_greedy(LLAMA, PROMPT, 4), oracle_greedy(LLAMA, OTHER, 2)
    driver.step(new=[driver.new("a", PROMPT, 1), driver.new("b", OTHER, 5)])
    table = driver.new("x", OTHER, 5).block_ids
    capture = CaptureStep("x", OTHER[:1], [(0, 1, False)], table, [0], [4], "float32")
    output = driver.step(
        known={"a": len(PROMPT), "b": len(OTHER)},
        counts={"a": 3},
        scheduled_spec_decode_tokens={"a": a[1:3]},
        captures=[capture],
        total_num_scheduled_tokens=5,
    )
    assert dict(zip(output.req_ids, output.sampled_token_ids)) == {"a": a[1:4], "b": b[1:2]}
    assert [type(end) for end in ends_of(keys[-1])] == [Tokens, Layers] and "x" in output.hidden_states
    assert token_of(driver.step(known={"a": len(PROMPT) + 3}), "a") == oracle_greedy(LLAMA, PROMPT, 5)[4]


@interpreted
@pytest.mark.parametrize("params", ["greedy", "random", "filtered", "logprobs"])
def test_padded_steps_check_the_guesses_of_several_branches_as_single_steps_do(params: str) -> None:
    """By programs for a few tokens of each request, and by the host where a branch asks for more than these choose."""
    asked = PARAMS[params]
    driver, keys = padded_driver()
    a, b = (one_by_one_of(prompt, asked) for prompt in (PROMPT, OTHER))
    wrong = WRONG if b[3] != WRONG else WRONG + 1
    new = [driver.new("a", PROMPT, 1, params=asked, seed=5), driver.new("b", OTHER, 5, params=asked, seed=5)]
    driver.step(new=new)
    output = driver.step(
        known={"a": len(PROMPT), "b": len(OTHER)},
        counts={"a": 5, "b": 5},
        scheduled_spec_decode_tokens={"a": a[1:5], "b": [*b[1:3], wrong, b[4]]},
    )
    assert dict(zip(output.req_ids, output.sampled_token_ids)) == {"a": a[1:6], "b": b[1:4]}
    assert keys[-1].has_few and keys[-1].size == 16
    assert isinstance(ends_of(keys[-1])[0], Logits if params == "logprobs" else Tokens)
    output = driver.step(
        known={"a": len(PROMPT) + 5, "b": len(OTHER) + 3},
        counts={"a": 1, "b": 3},
        scheduled_spec_decode_tokens={"b": b[4:6]},
    )
    assert dict(zip(output.req_ids, output.sampled_token_ids)) == {"a": a[6:7], "b": b[4:7]}


def one_by_one_of(prompt: list[int], params: SamplingParams) -> list[int]:
    driver = Driver()
    first = token_of(driver.step(new=[driver.new("a", prompt, 1, params=params, seed=5)]), "a")
    return [first, *driver.decode("a", len(prompt), 7)]


@interpreted
def test_a_branch_that_is_dropped_while_its_guesses_are_checked_leaves_nothing_to_the_next() -> None:
    driver, _ = padded_driver()
    a, b = oracle_greedy(LLAMA, PROMPT, 4), oracle_greedy(LLAMA, OTHER, 3)
    driver.step(new=[driver.new("a", PROMPT, 1)])
    driver.step(known={"a": len(PROMPT)}, counts={"a": 3}, scheduled_spec_decode_tokens={"a": a[1:3]})
    output = driver.step(new=[driver.new("b", OTHER, 1)], finished_req_ids=["a"])
    assert token_of(output, "b") == b[0]
    assert [token_of(driver.step(known={"b": len(OTHER) + place}), "b") for place in (0, 1)] == b[1:3]
