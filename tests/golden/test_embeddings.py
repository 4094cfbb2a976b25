"""The vectors of prompts are those of transformers' hidden states, whatever else the engine does meanwhile."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from typing import Any

import numpy as np
import pytest
import torch

from ratoon.api.llm import LLM
from ratoon.core.errors import RequestError
from ratoon.core.outputs import EmbeddingOutput, RequestOutput
from ratoon.core.params import PoolingParams, SamplingParams
from ratoon.engine.front_end import Prepared
from ratoon.scheduling.branch import Branch
from ratoon.scheduling.preemption import Preemption
from ratoon.scheduling.step_draft import StepDraft
from tests.golden.engines import ENGINE_FAMILIES, engine, greedy, model_folder, scheduler_of, tiny_model
from tests.golden.marks import checked, exact_on_cpu
from tests.golden.tiny_models import MAX_POSITION, random_token_ids

TOLERANCE = 1e-4
LAST = PoolingParams(pooling="last", normalize=False)
MEAN = PoolingParams(pooling="mean", normalize=False)
LLAMA = "llama with grouped heads"
BIT_FAMILIES = [LLAMA, "mistral with a window wider than a block", "qwen2 with windows by layer type", "gpt2"]
SHARED = random_token_ids(60, seed=40)
# Lengths around the borders of blocks, alone and with a common prefix; and the longest that there can be.
PROMPTS = [random_token_ids(length, seed=length) for length in (1, 2, 15, 16, 17, 33, 70)]
PROMPTS += [[*SHARED[:length], 3] for length in (59, 40, 16)]
PROMPTS += [random_token_ids(MAX_POSITION, seed=9)]
KINDS = [LAST, MEAN]


@cache
@torch.inference_mode()
def oracle_vector(family: str, prompt: tuple[int, ...], pooling: str) -> np.ndarray:
    """By transformers' model without its head."""
    model = tiny_model(family).oracle.base_model
    states = model(torch.tensor([list(prompt)]), use_cache=False).last_hidden_state[0].numpy()  # [T, H]
    return states[-1] if pooling == "last" else states.mean(axis=0)


def vectors(llm: LLM, prompts: Sequence[Sequence[int]], params: Any) -> list[np.ndarray]:
    outputs = llm.embed([list(prompt) for prompt in prompts], params, progress=False)
    assert [output.error for output in outputs] == [None] * len(outputs)
    return [output.embedding for output in outputs]


def assert_right(family: str, found: Sequence[np.ndarray], prompts: Sequence[Sequence[int]], pooling: str) -> None:
    for prompt, vector in zip(prompts, found, strict=True):
        assert vector.dtype == np.float32
        np.testing.assert_allclose(vector, oracle_vector(family, tuple(prompt), pooling), atol=TOLERANCE, rtol=0)


@cache
def alone(family: str, pooling: str) -> list[bytes]:
    """Each prompt on its own, in an engine that has nothing else to do and nothing cached."""
    found = []
    with engine(family) as llm:
        for prompt in PROMPTS:
            assert llm.reset_prefix_cache()
            found += vectors(llm, [prompt], PoolingParams(pooling=pooling, normalize=False))
    return [vector.tobytes() for vector in found]


def assert_same_bits(family: str, found: Sequence[np.ndarray], pooling: str) -> None:
    assert [vector.tobytes() for vector in found] == alone(family, pooling)


# ---- against transformers ----


@pytest.mark.one_in(3)
@pytest.mark.parametrize("family", checked(ENGINE_FAMILIES, "llama with grouped heads"))
def test_vectors_are_those_of_transformers(family: str) -> None:
    with engine(family) as llm:
        for params in KINDS:
            assert_right(family, vectors(llm, PROMPTS, params), PROMPTS, params.pooling)


@pytest.mark.parametrize("family", BIT_FAMILIES)
@pytest.mark.parametrize(
    "changes",
    [{"max_num_batched_tokens": 5}, {"max_prefill_chunk": 7}, {"max_num_batched_tokens": 33, "max_num_seqs": 2}],
    ids=str,
)
@pytest.mark.one_in(3)
def test_small_budgets_give_the_same_vectors(family: str, changes: dict[str, Any]) -> None:
    with engine(family, **changes) as llm:
        for params in KINDS:
            assert_right(family, vectors(llm, PROMPTS, params), PROMPTS, params.pooling)


# ---- the same bits ----


@exact_on_cpu
@pytest.mark.parametrize("family", BIT_FAMILIES)
@pytest.mark.parametrize("params", KINDS, ids=lambda params: params.pooling)
@pytest.mark.parametrize(
    "changes",
    [{}, {"max_num_batched_tokens": 5}, {"max_prefill_chunk": 16}, {"max_num_batched_tokens": 50, "max_num_seqs": 3}],
    ids=str,
)
@pytest.mark.one_in(5)
def test_neighbours_chunks_and_hits_change_no_bit(family: str, params: PoolingParams, changes: dict[str, Any]) -> None:
    with engine(family, **changes) as llm:
        assert_same_bits(family, vectors(llm, PROMPTS, params), params.pooling)
        hits = llm.stats().prefix_cache.hits
        assert_same_bits(family, vectors(llm, PROMPTS, params), params.pooling)
        assert (llm.stats().prefix_cache.hits > hits) == (params.pooling == "last")


@exact_on_cpu
@pytest.mark.parametrize(("family", "num_blocks"), [(LLAMA, 10), ("qwen2 with windows by layer type", 14)])
@pytest.mark.parametrize("caching", [True, False], ids=["with a prefix cache", "without"])
@pytest.mark.one_in(3)
def test_preemption_changes_no_bit(
    family: str, num_blocks: int, caching: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    preempted: set[str] = set()
    preempt = Preemption.preempt

    def note_and_preempt(preemption: Preemption, step: StepDraft, branch: Branch) -> None:
        if branch.num_computed_tokens:
            preempted.add(branch.branch_id.split()[0])
        preempt(preemption, step, branch)

    monkeypatch.setattr(Preemption, "preempt", note_and_preempt)
    settings = {"max_prefill_chunk": 16, "policy": "priority", "enable_prefix_caching": caching}
    with engine(family, num_blocks=num_blocks, **settings) as llm:
        found, _ = mixed(llm, PROMPTS, [PROMPTS[4], PROMPTS[5], PROMPTS[2]], greedy(30))
    assert preempted >= {"last", "mean"}  # in the middle of their prompts
    for pooling, part in found.items():
        assert_same_bits(family, part, pooling)


@exact_on_cpu
@pytest.mark.parametrize("family", BIT_FAMILIES)
@pytest.mark.parametrize("budget", [2048, 24])
@pytest.mark.one_in(3)
def test_vectors_and_answers_of_a_mixed_batch_are_those_of_each_alone(family: str, budget: int) -> None:
    params = SamplingParams(temperature=1.0, seed=4, max_tokens=12, ignore_eos=True, n=2, logprobs=1, prompt_logprobs=0)
    generated = PROMPTS[3:8]
    with engine(family) as llm:
        expected = llm.generate([list(prompt) for prompt in generated], params, progress=False)
    with engine(family, max_num_batched_tokens=budget) as llm:
        found, answers = mixed(llm, PROMPTS, generated, params)
    for pooling, part in found.items():
        assert_same_bits(family, part, pooling)
    for answer, alone_answer in zip(answers, expected, strict=True):
        assert answer.prompt_logprobs == alone_answer.prompt_logprobs
        assert [choice.token_ids for choice in answer.outputs] == [choice.token_ids for choice in alone_answer.outputs]
        assert [choice.logprobs for choice in answer.outputs] == [choice.logprobs for choice in alone_answer.outputs]


@exact_on_cpu
def test_an_engine_process_sends_the_same_bits() -> None:
    settings = {"device": "cpu", "num_blocks": 96, "num_threads": 1, "skip_tokenizer": True}
    with LLM(str(model_folder(LLAMA)), process=True, **settings) as llm:
        for params in KINDS:
            assert_same_bits(LLAMA, vectors(llm, PROMPTS, params), params.pooling)


def mixed(
    llm: LLM, prompts: list[list[int]], generated: list[list[int]], params: SamplingParams
) -> tuple[dict[str, list[np.ndarray]], list[RequestOutput]]:
    """Vectors of both kinds and answers, all under way at once; those that come later are more urgent."""
    process = llm.engine.input_processor
    total = 2 * len(prompts) + len(generated)
    requests = [
        process.process_pooling(f"{kind.pooling} {index}", prompt, kind, priority=total - index)
        for index, prompt in enumerate(prompts)
        for kind in KINDS
    ]
    requests += [process.process(f"answer {index}", prompt, params) for index, prompt in enumerate(generated)]
    received: dict[str, Any] = {}
    for request in requests:
        llm.engine.submit(Prepared(request))
        received |= {output.request_id: output for output in llm.engine.step()}
    while llm.engine.has_unfinished_requests():
        received |= {output.request_id: output for output in llm.engine.step()}
    assert [output.error for output in received.values()] == [None] * total
    found = {
        kind.pooling: [received[f"{kind.pooling} {index}"].embedding for index in range(len(prompts))] for kind in KINDS
    }
    return found, [received[f"answer {index}"] for index in range(len(generated))]


# ---- what callers see ----


def test_vectors_have_length_one_and_as_many_dimensions_as_asked_for() -> None:
    prompt = tuple(PROMPTS[4])
    raw = oracle_vector(LLAMA, prompt, "last")
    with engine(LLAMA) as llm:
        whole, cut, plain = vectors(
            llm,
            [prompt] * 3,
            [PoolingParams(), PoolingParams(dimensions=10), PoolingParams(dimensions=10, normalize=False)],
        )
    np.testing.assert_allclose(whole, raw / np.linalg.norm(raw), atol=TOLERANCE)
    np.testing.assert_allclose(cut, raw[:10] / np.linalg.norm(raw[:10]), atol=TOLERANCE)
    np.testing.assert_allclose(plain, raw[:10], atol=TOLERANCE)


def test_a_prompt_may_be_as_long_as_the_model_and_no_longer() -> None:
    with engine(LLAMA) as llm:
        (output,) = llm.embed(list(PROMPTS[-1]), progress=False)
        assert isinstance(output, EmbeddingOutput) and len(output.prompt_token_ids) == MAX_POSITION
        with pytest.raises(RequestError, match=f"at most {MAX_POSITION} fit"):
            llm.embed(random_token_ids(MAX_POSITION + 1), progress=False)


def test_a_repeated_prompt_reads_its_last_state_behind_its_own_prefix() -> None:
    prompt = PROMPTS[6]
    with engine(LLAMA) as llm:
        first, second = (llm.embed(list(prompt), LAST, progress=False)[0] for _ in range(2))
        assert (first.num_cached_tokens, second.num_cached_tokens) == (0, 64)
        assert scheduler_of(llm).stats().num_scheduled_tokens <= len(prompt) - 64


def test_a_prompt_that_can_never_fit_fails_alone_in_a_batch_and_raises_when_it_is_alone() -> None:
    with engine(LLAMA, num_blocks=4) as llm:
        short, long = llm.embed([list(PROMPTS[4]), list(PROMPTS[6])], progress=False)
        assert short.error is None and long.embedding is None and "pool has 3" in long.error
        with pytest.raises(RequestError, match="at most 48 tokens"):
            llm.embed(list(PROMPTS[6]), progress=False)
