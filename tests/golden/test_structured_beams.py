"""Beam searches within grammars, which become narrower and wider as their grammar leaves fewer texts and more: scores
are those of the model, and neither other requests nor preemption change a bit."""

from __future__ import annotations

import functools
import logging
from collections.abc import Iterator, Sequence
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from ratoon import LLM, BeamSearchParams, SamplingParams
from ratoon.core.params import GenerationParams
from ratoon.execution.grammar import interface
from ratoon.layers.native_ops import native_ops_reasons
from tests.depths import both_depths
from tests.golden.answers import Numbers, numbers_of
from tests.golden.beam_oracle import TOLERANCE
from tests.golden.engines import tiny_model
from tests.golden.grammar_engines import FAMILY, grammar_engine
from tests.golden.tiny_models import random_token_ids

Request = tuple[list[int], GenerationParams]


@pytest.fixture(scope="module", autouse=True)
def no_grammar_is_slow() -> Iterator[None]:
    """A machine that does much else must not make a search fail: what is slow is tested elsewhere."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(interface, "SLOW_SECONDS", 60.0)
        yield


WORDS = {"regex": "(true|false|null){2,6}"}
PAIR = {
    "json_schema": {
        "type": "object",
        "properties": {"abc": {"type": "boolean"}, "x": {"enum": ["tr", "tru", "true", 12, None]}},
        "required": ["abc", "x"],
        "additionalProperties": False,
    },
    "disable_any_whitespace": True,
}
FLAGS = {"json_schema": {"type": "array", "items": {"type": "boolean"}, "minItems": 2, "maxItems": 4}}
FEW = {"choice": ["abc true", "abc false", "12", "abcabcabc12", "zzz"]}
ENUM = {"json_schema": {"enum": ["abc", "abba", "null", 12, True, None]}}
GRAMMARS: list[dict[str, Any]] = [WORDS, PAIR, FLAGS, FEW, ENUM]

same_in_any_batch = pytest.mark.skipif(
    bool(native_ops_reasons(torch.device("cpu"), torch.float32)), reason="torch's products depend on the batch"
)


def within(asked: dict[str, Any], width: int, max_tokens: int, **changes: Any) -> BeamSearchParams:
    return BeamSearchParams(beam_width=width, n=width, max_tokens=max_tokens, structured_output=asked, **changes)


def sampled(seed: int, asked: dict[str, Any] | None = None) -> SamplingParams:
    return SamplingParams(seed=seed, temperature=1.0, max_tokens=30, structured_output=asked)


SEARCHES: list[Request] = [
    (random_token_ids(length, seed=length), within(asked, width, max_tokens, early_stopping=early))
    for asked, width, max_tokens, early in [
        (WORDS, 3, 20, False), (PAIR, 4, 30, "never"), (FLAGS, 2, 25, True), (FEW, 6, 12, False), (ENUM, 3, 12, False),
        (WORDS, 2, 14, "never"), (PAIR, 2, 30, False), (FEW, 3, 12, True), (WORDS, 6, 18, False), (ENUM, 6, 9, "never"),
    ]
    for length in (13, 28)
]  # fmt: skip
OTHERS: list[Request] = [
    (random_token_ids(20, seed=10), sampled(0, FEW)),
    (random_token_ids(37, seed=11), sampled(1, PAIR)),
    (random_token_ids(5, seed=12), sampled(2)),
    (random_token_ids(16, seed=13), BeamSearchParams(beam_width=4, n=2, max_tokens=12, ignore_eos=True)),
]
REQUESTS = [*SEARCHES, *OTHERS]


@pytest.fixture(autouse=True)
def no_step_fails(caplog: pytest.LogCaptureFixture) -> Iterator[None]:
    """One that fails is repeated without the request that is to blame, so that answers do not show it."""
    yield
    assert not [record for record in caplog.get_records("call") if record.levelno >= logging.ERROR]


def answers(llm: LLM, requests: Sequence[Request]) -> list[Numbers]:
    outputs = llm.generate([prompt for prompt, _ in requests], [params for _, params in requests], progress=False)
    return [numbers_of(output) for output in outputs]


@functools.cache
def alone() -> list[Numbers]:
    with grammar_engine() as llm:
        results = []
        for request in REQUESTS:
            assert llm.reset_prefix_cache()
            results += answers(llm, [request])
        return results


@pytest.mark.check
@pytest.mark.parametrize("asked", GRAMMARS, ids=["words", "object", "array", "choice", "enum"])
@pytest.mark.one_in(2)
def test_scores_are_the_sums_of_the_model_s_log_probabilities(asked: dict[str, Any]) -> None:
    oracle = tiny_model(FAMILY).oracle_logits
    with grammar_engine() as llm:
        for seed in range(8):
            prompt = random_token_ids(9 + 5 * seed, seed)
            (output,) = llm.generate([prompt], [within(asked, 2 + seed % 4, 30)], progress=False)
            assert output.error is None
            for text in output.outputs:
                token_ids = list(text.token_ids)
                logprobs = torch.log_softmax(oracle([*prompt, *token_ids])[len(prompt) - 1 : -1].double(), dim=-1)
                expected = logprobs[torch.arange(len(token_ids)), torch.tensor(token_ids)].sum().item()
                assert text.cumulative_logprob == pytest.approx(expected, abs=TOLERANCE), (prompt, text)


@same_in_any_batch
@both_depths
@pytest.mark.one_in(2)
def test_searches_within_grammars_get_what_each_gets_alone() -> None:
    with grammar_engine(num_blocks=300, max_num_seqs=120) as llm:
        assert answers(llm, REQUESTS) == alone()
        assert answers(llm, REQUESTS[::-1]) == alone()[::-1]  # with prefix hits


@same_in_any_batch
@both_depths
@pytest.mark.parametrize("swap_memory", [0, "24KiB", "1MiB"], ids=["computed again", "swapped in part", "swapped"])
@pytest.mark.one_in(5)
def test_preemption_changes_no_bit(swap_memory: int | str) -> None:
    with grammar_engine(num_blocks=26, max_num_batched_tokens=48, swap_memory=swap_memory) as llm:
        assert answers(llm, REQUESTS) == alone()
        assert llm.stats().num_preemptions > 5


@same_in_any_batch
@settings(max_examples=8, deadline=None, derandomize=True, database=None, suppress_health_check=list(HealthCheck))
@given(
    chosen=st.lists(st.integers(0, len(REQUESTS) - 1), min_size=4, max_size=14),
    budget=st.integers(8, 100),
    rows=st.integers(8, 30),
    num_blocks=st.integers(25, 40),
    swap_memory=st.sampled_from([0, "16KiB", "1MiB"]),
    caching=st.booleans(),
    depth=st.integers(1, 3),
)
def test_any_batch_in_any_engine_gives_each_search_its_own_numbers(
    chosen: list[int], budget: int, rows: int, num_blocks: int, swap_memory: int | str, caching: bool, depth: int
) -> None:
    with grammar_engine(
        max_num_batched_tokens=budget, max_num_seqs=rows, num_blocks=num_blocks, swap_memory=swap_memory,
        enable_prefix_caching=caching, max_steps_in_flight=depth,
    ) as llm:  # fmt: skip
        assert answers(llm, [REQUESTS[index] for index in chosen]) == [alone()[index] for index in chosen]
