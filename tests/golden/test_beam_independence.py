"""What a beam search finds does not depend on what runs beside it: the same texts, and to the bit the same scores."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from ratoon import LLM, BeamSearchParams, RequestOutput, SamplingParams
from ratoon.core.params import GenerationParams
from ratoon.layers.native_ops import native_ops_reasons
from tests.depths import both_depths
from tests.golden.answers import Numbers, numbers_of
from tests.golden.engines import check_nothing_left, engine, scheduler_of
from tests.golden.pressure import step_without_free_memory
from tests.golden.tiny_models import random_token_ids

pytestmark = pytest.mark.skipif(
    bool(native_ops_reasons(torch.device("cpu"), torch.float32)), reason="torch's products depend on the batch"
)

LLAMA = "llama with grouped heads"
WIDE_WINDOW = "mistral with a window wider than a block"
TWO_GROUPS = "qwen2 with windows by layer type"
QWEN3 = "qwen3 untied with heads that the native kernels take"
FAMILIES = [LLAMA, WIDE_WINDOW, TWO_GROUPS, QWEN3, "gpt2"]
BLOCK_SIZE = 16

Request = tuple[list[int], GenerationParams]


def beams(width: int, max_tokens: int = 8, **changes: Any) -> BeamSearchParams:
    return BeamSearchParams(beam_width=width, **({"n": width, "max_tokens": max_tokens} | changes))


def sampled(seed: int, **changes: Any) -> SamplingParams:
    return SamplingParams(seed=seed, ignore_eos=True, **({"temperature": 1.1, "max_tokens": 9} | changes))


SHARED = random_token_ids(40, seed=99)
SEARCHES: list[Request] = [
    (random_token_ids(3, seed=0), beams(4)),
    (random_token_ids(15, seed=1), beams(3, 20, ignore_eos=True)),
    (random_token_ids(16, seed=2), beams(5, stop_token_ids=list(range(0, 97, 9)), early_stopping="never")),
    (random_token_ids(33, seed=3), beams(2, 12, n=1, length_penalty=-1.0, ignore_eos=True)),
    (random_token_ids(44, seed=4), beams(6, 6, stop_token_ids=list(range(1, 97, 8)), length_penalty=0.0, min_tokens=2)),
    # Three that share a prefix.
    ([*SHARED[:40], 1], beams(4, 10, ignore_eos=True)),
    ([*SHARED[:33], 2], beams(4, 10, ignore_eos=True)),
    ([*SHARED[:40], 1], beams(3, 10, early_stopping=True, stop_token_ids=list(range(2, 97, 8)))),
]
OTHERS: list[Request] = [
    (random_token_ids(20, seed=10), sampled(0)),
    (random_token_ids(60, seed=11), sampled(1, n=3)),
    ([*SHARED[:40], 5], sampled(2, temperature=0.0)),
    (random_token_ids(5, seed=12), sampled(3, max_tokens=25)),
]


def answers(llm: LLM, requests: Sequence[Request]) -> list[Numbers]:
    outputs = llm.generate([prompt for prompt, _ in requests], [params for _, params in requests], progress=False)
    return [numbers_of(output) for output in outputs]


def answers_apart(llm: LLM, requests: Sequence[Request]) -> list[Numbers]:
    """Each on its own, with nothing cached."""
    results = []
    for request in requests:
        assert llm.reset_prefix_cache()
        results += answers(llm, [request])
    return results


@cache
def alone(family: str) -> list[Numbers]:
    with engine(family) as llm:
        return answers_apart(llm, SEARCHES)


@cache
def others_alone() -> list[Numbers]:
    with engine(LLAMA) as llm:
        return answers_apart(llm, OTHERS)


@both_depths
@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.one_in(3)
def test_searches_at_once_get_what_each_gets_alone_and_again_with_prefix_hits(family: str) -> None:
    with engine(family) as llm:
        assert answers(llm, SEARCHES) == alone(family)
        hits = llm.stats().prefix_cache.hits
        assert answers(llm, SEARCHES) == alone(family)
        assert llm.stats().prefix_cache.hits > hits + 100


@both_depths
def test_searches_and_samples_beside_each_other_change_no_bit() -> None:
    with engine(LLAMA) as llm:
        results = answers(llm, [*OTHERS, *SEARCHES, *OTHERS])
        assert results[: len(OTHERS)] == results[-len(OTHERS) :] == others_alone()
        assert results[len(OTHERS) : -len(OTHERS)] == alone(LLAMA)


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize(
    "changes",
    [
        {"max_num_batched_tokens": 7},
        {"max_prefill_chunk": 7},
        {"max_num_batched_tokens": 33, "max_num_seqs": 6},
        {"block_size": 32, "max_num_batched_tokens": 50},
    ],
    ids=str,
)
@pytest.mark.one_in(3)
def test_chunks_rows_and_block_sizes_change_no_bit(family: str, changes: dict[str, Any]) -> None:
    with engine(family, **changes) as llm:
        assert answers(llm, SEARCHES[::-1]) == alone(family)[::-1]


@both_depths
@pytest.mark.parametrize(
    ("family", "num_blocks"), [(LLAMA, 17), (WIDE_WINDOW, 17), (TWO_GROUPS, 34), (QWEN3, 17), ("gpt2", 17)]
)
@pytest.mark.parametrize("caching", [True, False], ids=["with a prefix cache", "without"])
@pytest.mark.one_in(3)
def test_preemption_changes_no_bit(family: str, num_blocks: int, caching: bool) -> None:
    with engine(family, num_blocks=num_blocks, enable_prefix_caching=caching, max_num_batched_tokens=40) as llm:
        assert answers(llm, SEARCHES) == alone(family)
        assert llm.stats().num_preemptions > 2


@both_depths
def test_preemption_beside_samples_changes_no_bit() -> None:
    with engine(LLAMA, num_blocks=19, max_num_batched_tokens=40) as llm:
        results = answers(llm, [*OTHERS, *SEARCHES, *OTHERS])
        assert results == [*others_alone(), *alone(LLAMA), *others_alone()]
        assert llm.stats().num_preemptions > 2


@pytest.mark.parametrize("family", [LLAMA, QWEN3])
def test_prompts_that_end_at_every_place_in_a_block(family: str) -> None:
    """Alone, then together in an engine whose memory is short, so that beams are preempted at every position too."""
    text = random_token_ids(2 * BLOCK_SIZE + 2, seed=7)
    requests: list[Request] = [(text[:length], beams(3, 6, ignore_eos=True)) for length in range(1, len(text) + 1)]
    with engine(family) as llm:
        expected = answers_apart(llm, requests)
    with engine(family, num_blocks=24) as llm:
        assert answers(llm, requests) == expected
        assert llm.stats().num_preemptions > len(requests) // 2


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("budget", [64, 4], ids=["recomputed at once", "recomputed token by token"])
@pytest.mark.one_in(3)
def test_beams_that_lose_their_memory_at_any_step_go_on_where_they_were(family: str, budget: int) -> None:
    """Behind prompts that end before, at and behind the end of a block."""
    num_lost = 0
    with engine(family, max_num_batched_tokens=budget) as llm:
        for length in (BLOCK_SIZE - 3, BLOCK_SIZE, 2 * BLOCK_SIZE + 1):
            request: Request = (random_token_ids(length, seed=8), beams(4, 8, ignore_eos=True))
            [expected] = answers(llm, [request])
            for num_tokens in range(1, 8):
                stream = llm.stream(*request)
                for _ in range(num_tokens):
                    next(stream)
                num_lost += step_without_free_memory(llm)
                assert numbers_of([*stream][-1]) == expected, (length, num_tokens)
    assert num_lost > 10  # of 21: a step that forks no beam needs no memory


@pytest.mark.parametrize("family", [LLAMA, "gpt2"])
def test_the_number_of_threads_changes_no_bit(family: str) -> None:
    with engine(family, num_threads=3) as llm:
        assert answers(llm, SEARCHES) == alone(family)
    with engine(family):  # one thread again, for later tests
        pass


@both_depths
def test_arrival_in_the_middle_of_others_changes_no_bit() -> None:
    """Each request comes one step after the one before it, so that every step mixes prompts, beams and decoding."""
    requests = [request for pair in zip(SEARCHES, OTHERS * 2) for request in pair]
    expected = [numbers for pair in zip(alone(LLAMA), others_alone() * 2) for numbers in pair]
    with engine(LLAMA, max_num_batched_tokens=24, num_blocks=30) as llm:
        received: dict[str, RequestOutput] = {}
        for turn in range(400):
            if turn < len(requests):
                llm.engine.add_request(str(turn), *requests[turn])
            for output in llm.engine.step():
                received[output.request_id] = output  # cumulative: the last one has it all
            scheduler_of(llm).check()
            if turn >= len(requests) and not llm.engine.has_unfinished_requests():
                break
        assert [numbers_of(received[str(index)]) for index in range(len(requests))] == expected


@both_depths
@pytest.mark.parametrize("num_steps", range(1, 8))
@pytest.mark.one_in(3)
def test_an_aborted_neighbour_changes_no_bit_and_leaves_nothing_behind(num_steps: int) -> None:
    with engine(LLAMA, num_blocks=60, max_num_batched_tokens=40) as llm:
        neighbour = llm.stream(random_token_ids(30, seed=70), beams(8, 20, ignore_eos=True))
        for _ in range(num_steps):
            next(neighbour)
        mine = llm.stream(*SEARCHES[5])
        next(mine)
        neighbour.close()
        scheduler_of(llm).check()
        assert numbers_of([*mine][-1]) == alone(LLAMA)[5]
        check_nothing_left(llm)


@settings(max_examples=20)
@given(
    chosen=st.lists(st.integers(0, len(SEARCHES) + len(OTHERS) - 1), min_size=1, max_size=10),
    budget=st.integers(6, 120),
    chunk=st.one_of(st.none(), st.integers(1, 60)),
    rows=st.integers(6, 20),
    num_blocks=st.integers(16, 40),
    caching=st.booleans(),
    depth=st.integers(1, 3),
)
def test_any_batch_in_any_engine_gives_each_search_its_own_numbers(
    chosen: list[int], budget: int, chunk: int | None, rows: int, num_blocks: int, caching: bool, depth: int
) -> None:
    requests, expected = [*SEARCHES, *OTHERS], [*alone(LLAMA), *others_alone()]
    with engine(
        LLAMA, max_num_batched_tokens=budget, max_prefill_chunk=chunk, max_num_seqs=rows, num_blocks=num_blocks,
        enable_prefix_caching=caching, max_steps_in_flight=depth,
    ) as llm:  # fmt: skip
        assert answers(llm, [requests[index] for index in chosen]) == [expected[index] for index in chosen]
