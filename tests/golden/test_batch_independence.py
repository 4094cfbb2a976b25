"""What a request gets does not depend on what it is batched with: the same tokens, and to the bit the same numbers."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from ratoon.api.llm import LLM
from ratoon.core.errors import ModelError
from ratoon.core.outputs import RequestOutput
from ratoon.core.params import SamplingParams
from ratoon.layers.native_ops import native_ops_reasons
from ratoon.models.embedded import find_embedded_model
from tests.depths import both_depths
from tests.golden.engines import check_nothing_left, engine, scheduler_of
from tests.golden.tiny_models import random_token_ids

pytestmark = pytest.mark.skipif(
    bool(native_ops_reasons(torch.device("cpu"), torch.float32)), reason="torch's products depend on the batch"
)

LLAMA = "llama with grouped heads"
WIDE_WINDOW = "mistral with a window wider than a block"
TWO_GROUPS = "qwen2 with windows by layer type"
QWEN3 = "qwen3 untied with heads that the native kernels take"
FAMILIES = [LLAMA, WIDE_WINDOW, TWO_GROUPS, QWEN3, "gpt2"]

Request = tuple[list[int], SamplingParams]
Numbers = list[tuple[Any, ...]]  # everything that a caller can see of an answer, without times and cache figures


def params(seed: int | None, **changes: Any) -> SamplingParams:
    values = {"temperature": 1.2, "max_tokens": 10, "ignore_eos": True, "logprobs": 2, "seed": seed}
    return SamplingParams(**(values | changes))


KINDS: list[SamplingParams] = [
    params(0, temperature=0.0),
    params(1),
    params(2, top_p=0.8),
    params(3, top_k=12, min_p=0.01),
    params(4, repetition_penalty=1.3, presence_penalty=0.4, frequency_penalty=0.3),
    params(5, n=3),
    params(6, temperature=0.0, n=2, frequency_penalty=1.0),
    params(7, temperature=0.0, prompt_logprobs=1),
    params(8, n=2, top_p=0.9, prompt_logprobs=0, logit_bias={5: 3.0}),
    params(9, allowed_token_ids=list(range(0, 90, 3)), max_tokens=3),
]
SHARED = random_token_ids(40, seed=99)
REQUESTS: list[Request] = [
    *((random_token_ids(3 + 7 * index, seed=index), kind) for index, kind in enumerate(KINDS)),
    # Six that share a prefix with each other, one of them with another seed and one with other parameters.
    *(([*SHARED[:length], length], params(seed)) for length, seed in ((40, 20), (33, 21), (16, 22), (39, 20))),
    ([*SHARED[:40], 40], params(23)),
    ([*SHARED[:40], 40], params(20, temperature=0.0)),
]
assert len(REQUESTS) == 16


def numbers_of(output: RequestOutput) -> Numbers:
    rows = [output.prompt_logprobs] + [choice.logprobs for choice in output.outputs]
    values = [
        [sorted((t, e.logprob, e.rank) for t, e in row.items()) if row else None for row in part or ()] for part in rows
    ]
    return [(list(choice.token_ids), choice.finish_reason, choice.cumulative_logprob) for choice in output.outputs] + [
        (values,)
    ]


def answers(llm: LLM, requests: Sequence[Request]) -> list[Numbers]:
    outputs = llm.generate([list(prompt) for prompt, _ in requests], [kind for _, kind in requests], progress=False)
    assert [output.error for output in outputs] == [None] * len(outputs)
    return [numbers_of(output) for output in outputs]


@cache
def alone(family: str) -> list[Numbers]:
    """Each request on its own, in an engine that has nothing else to do and nothing cached."""
    results = []
    with engine(family) as llm:
        for request in REQUESTS:
            assert llm.reset_prefix_cache()
            results += answers(llm, [request])
    return results


def tokens(results: list[Numbers]) -> list[Any]:
    """A short comparison first: when it fails, it can be read."""
    return [[choice[0] for choice in numbers[:-1]] for numbers in results]


def assert_same(results: list[Numbers], expected: list[Numbers]) -> None:
    assert tokens(results) == tokens(expected)
    assert results == expected


@both_depths
@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.one_in(3)
def test_sixteen_at_once_get_what_each_gets_alone_and_again_with_prefix_hits(family: str) -> None:
    with engine(family) as llm:
        assert_same(answers(llm, REQUESTS), alone(family))
        hits = llm.stats().prefix_cache.hits
        assert_same(answers(llm, REQUESTS), alone(family))
        assert llm.stats().prefix_cache.hits > hits + 100


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize(
    "changes",
    [
        {"max_num_batched_tokens": 5},
        {"max_prefill_chunk": 7},
        {"max_num_batched_tokens": 33, "max_num_seqs": 3},
        {"block_size": 32, "max_num_batched_tokens": 50},
    ],
    ids=str,
)
@pytest.mark.one_in(3)
def test_chunks_rows_and_block_sizes_change_no_bit(family: str, changes: dict[str, Any]) -> None:
    with engine(family, **changes) as llm:
        assert_same(answers(llm, REQUESTS[::-1]), alone(family)[::-1])


@pytest.mark.parametrize(
    ("family", "num_blocks"), [(LLAMA, 9), (WIDE_WINDOW, 10), (TWO_GROUPS, 15), (QWEN3, 9), ("gpt2", 9)]
)
@pytest.mark.parametrize("caching", [True, False], ids=["with a prefix cache", "without"])
@pytest.mark.one_in(3)
def test_preemption_changes_no_bit(family: str, num_blocks: int, caching: bool) -> None:
    settings = {"num_blocks": num_blocks, "enable_prefix_caching": caching, "max_num_batched_tokens": 40}
    for depth in (1, 2):  # two in flight give way less often: what a step frees is known before anything has to
        with engine(family, max_steps_in_flight=depth, **settings) as llm:
            assert_same(answers(llm, REQUESTS), alone(family))
            assert llm.stats().num_preemptions > (2 if depth == 1 else 0)


@pytest.mark.parametrize("family", [LLAMA, "gpt2"])
def test_the_number_of_threads_changes_no_bit(family: str) -> None:
    with engine(family, num_threads=3) as llm:
        assert_same(answers(llm, REQUESTS), alone(family))
    with engine(family):  # one thread again, for later tests
        pass


@both_depths
def test_arrival_in_the_middle_of_others_changes_no_bit() -> None:
    """Each request comes one step after the one before it, so that every step mixes prompts and decoding."""
    with engine(LLAMA, max_num_batched_tokens=24) as llm:
        received: dict[str, RequestOutput] = {}
        for turn in range(400):
            if turn < len(REQUESTS):
                llm.engine.add_request(str(turn), *REQUESTS[turn])
            for output in llm.engine.step():
                received[output.request_id] = output  # cumulative: the last one has it all
            if turn >= len(REQUESTS) and not llm.engine.has_unfinished_requests():
                break
        results = [numbers_of(received[str(index)]) for index in range(len(REQUESTS))]
        assert_same(results, alone(LLAMA))


@both_depths
def test_an_aborted_neighbour_changes_no_bit() -> None:
    with engine(LLAMA, num_blocks=40) as llm:
        neighbours = [llm.stream(random_token_ids(30 + index, seed=70 + index), params(index)) for index in range(3)]
        for stream in neighbours:
            next(stream)
        mine = llm.stream(*REQUESTS[4])
        tokens_seen = list(next(mine).outputs[0].token_ids)
        for stream in neighbours:
            stream.close()
        tokens_seen += [token for output in mine for token in output.outputs[0].token_ids]
        assert tokens_seen == alone(LLAMA)[4][0][0]


# ---- choices and seeds ----


def test_a_choice_has_a_stream_of_its_own_whatever_the_number_of_choices() -> None:
    prompt = random_token_ids(21, seed=5)
    with engine(LLAMA) as llm:
        (four,) = answers(llm, [(prompt, params(11, n=4))])
        (two,) = answers(llm, [(prompt, params(11, n=2))])
        (one,) = answers(llm, [(prompt, params(11))])
        (other_seed,) = answers(llm, [(prompt, params(12))])
    assert four[:2] == two[:2] and four[0] == one[0]
    assert len({tuple(choice[0]) for choice in four[:4]}) == 4
    assert len({choice[0][0] for choice in four[:4]}) > 1  # from the very first token on
    assert other_seed[0] != one[0]


@both_depths
def test_choices_are_the_same_when_they_must_take_turns() -> None:
    requests = [(random_token_ids(21, seed=5), params(11, n=5)), (random_token_ids(30, seed=6), params(12, n=4))]
    with engine(LLAMA) as llm:
        expected = answers(llm, requests)
    for changes in ({"max_num_seqs": 2}, {"num_blocks": 7}, {"num_blocks": 5, "max_num_batched_tokens": 9}):
        with engine(LLAMA, **changes) as llm:
            assert_same(answers(llm, requests), expected)


def test_the_same_seed_twice_in_one_batch_gives_the_same_twice() -> None:
    with engine(LLAMA) as llm:
        first, second, _ = answers(llm, [REQUESTS[1], REQUESTS[1], REQUESTS[2]])
    assert first == second


def test_requests_without_a_seed_differ_from_each_other_and_repeat_with_the_engines_seed() -> None:
    prompt = random_token_ids(9)
    unseeded = [(prompt, params(None))] * 3
    rounds = []
    for seed in (0, 0, 1):
        with engine(LLAMA, seed=seed) as llm:
            rounds.append(tokens(answers(llm, unseeded)))
    assert rounds[0] == rounds[1] != rounds[2]
    assert len({str(answer) for answer in rounds[0]}) == 3


def test_the_reference_backend_gives_the_same_tokens_in_any_batch() -> None:
    family = "qwen3 untied with attention bias"  # heads of 24, which the kernels do not take
    expected = tokens(alone(family))
    with engine(family, max_num_batched_tokens=37, num_blocks=30) as llm:
        assert llm.describe()["attention_backend"] == "torch"
        assert tokens(answers(llm, REQUESTS)) == expected


@settings(max_examples=20)
@given(
    chosen=st.lists(st.integers(0, len(REQUESTS) - 1), min_size=1, max_size=10),
    budget=st.integers(1, 120),
    chunk=st.one_of(st.none(), st.integers(1, 60)),
    rows=st.integers(1, 12),
    num_blocks=st.integers(7, 30),
    block_size=st.sampled_from([16, 32]),
    caching=st.booleans(),
    depth=st.integers(1, 3),
)
def test_any_batch_in_any_engine_gives_each_request_its_own_numbers(
    chosen: list[int],
    budget: int,
    chunk: int | None,
    rows: int,
    num_blocks: int,
    block_size: int,
    caching: bool,
    depth: int,
) -> None:
    with engine(
        LLAMA, max_num_batched_tokens=budget, max_prefill_chunk=chunk, max_num_seqs=rows, num_blocks=num_blocks,
        block_size=block_size, enable_prefix_caching=caching, max_steps_in_flight=depth,
    ) as llm:  # fmt: skip
        results = answers(llm, [REQUESTS[index] for index in chosen])
        assert_same(results, [alone(LLAMA)[index] for index in chosen])


# ---- the embedded model ----


@pytest.fixture(scope="module")
def smollm2() -> LLM:
    try:
        find_embedded_model("smollm2-135m")
    except ModelError as error:
        pytest.skip(str(error))
    return LLM("smollm2-135m", num_blocks=200, max_num_batched_tokens=512, num_threads=1)


@pytest.mark.slow
def test_smollm2_answers_the_same_alone_in_a_batch_of_sixteen_with_hits_and_in_chunks(smollm2: LLM) -> None:
    text = "Once upon a time, in a village by the sea, there lived a clockmaker who never slept. "
    prompts = ["Hello", "The capital of Italy is", text, text + "One night", text + "Every morning he", "def f(x):"]
    kinds = [params(seed, temperature=0.8, top_p=0.95, max_tokens=6) for seed in range(5)]
    kinds += [params(0, temperature=0.0, max_tokens=8), params(3, n=2, top_k=20, max_tokens=5)]
    tokenizer = smollm2.get_tokenizer()
    requests = [(tokenizer.encode(prompts[i % 6]), kinds[i % 7]) for i in range(16)]
    scheduler = scheduler_of(smollm2)
    expected = []
    for request in requests[::3]:
        assert smollm2.reset_prefix_cache()
        expected += answers(smollm2, [request])
    assert smollm2.reset_prefix_cache()
    assert_same(answers(smollm2, requests)[::3], expected)
    assert_same(answers(smollm2, requests)[::3], expected)  # with prefix hits
    assert smollm2.stats().prefix_cache.hits > 0
    scheduler.state.max_step_tokens = 7  # prompts in parts
    try:
        assert smollm2.reset_prefix_cache()
        assert_same(answers(smollm2, requests[:4])[::3], expected[:2])
    finally:
        scheduler.state.max_step_tokens = scheduler.config.max_num_batched_tokens
    check_nothing_left(smollm2)
