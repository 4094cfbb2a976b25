"""Vectors of a model whose tokens all see each other (tiny BERT): those of transformers, whatever the batch is."""

from __future__ import annotations

import functools
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import pytest
import torch

from ratoon import LLM, HiddenStatesParams, PoolingParams, RequestError
from tests.golden.engines import check_nothing_left
from tests.golden.marks import exact_on_cpu
from tests.golden.tiny_encoder_models import tiny_bert
from tests.golden.tiny_models import MAX_POSITION, TinyModel, random_token_ids

TOLERANCE = 1e-4
KINDS = ["last", "mean", "first"]
# Around the borders of blocks; some that begin alike, and one twice; and the longest that there can be.
PROMPTS = [random_token_ids(length, seed=length) for length in (1, 2, 15, 16, 17, 33, 70)]
PROMPTS += [[*PROMPTS[6][:32], token] for token in (3, 4)] + [PROMPTS[6], random_token_ids(MAX_POSITION, seed=9)]


@functools.cache
def tiny() -> TinyModel:
    return tiny_bert()


@functools.cache
def folder() -> TemporaryDirectory[str]:
    kept = TemporaryDirectory(prefix="ratoon-golden-")  # removed when the process ends
    tiny().oracle.save_pretrained(Path(kept.name))
    return kept


@contextmanager
def engine(**settings: Any) -> Iterator[LLM]:
    defaults = {"device": "cpu", "num_blocks": 96, "num_threads": 1, "skip_tokenizer": True}
    with LLM(folder().name, **(defaults | settings)) as llm:
        yield llm
        check_nothing_left(llm)


@functools.cache
@torch.inference_mode()
def oracle_states(prompt: tuple[int, ...]) -> np.ndarray:
    return tiny().oracle(torch.tensor([prompt])).last_hidden_state[0].numpy()


def oracle_vector(prompt: Sequence[int], kind: str) -> np.ndarray:
    states = oracle_states(tuple(prompt))
    return {"last": states[-1], "first": states[0], "mean": states.mean(axis=0)}[kind]


def vectors(llm: LLM, prompts: Sequence[Sequence[int]], kinds: Sequence[str]) -> list[np.ndarray]:
    params = [PoolingParams(pooling=kind, normalize=False) for kind in kinds]
    outputs = llm.embed([list(prompt) for prompt in prompts], params, progress=False)
    assert [output.error for output in outputs] == [None] * len(outputs)
    assert [output.num_cached_tokens for output in outputs] == [0] * len(outputs)
    return [output.embedding for output in outputs]


def all_kinds(prompts: Sequence[Sequence[int]]) -> tuple[list[Sequence[int]], list[str]]:
    pairs = [(prompt, kind) for prompt in prompts for kind in KINDS]
    return [prompt for prompt, _ in pairs], [kind for _, kind in pairs]


@pytest.mark.parametrize(
    "changes",
    [{}, {"max_num_seqs": 3}, {"max_num_batched_tokens": 5}, {"num_blocks": 10}, {"attention_backend": "torch"}],
    ids=str,
)
def test_vectors_are_those_of_transformers(changes: dict[str, Any]) -> None:
    prompts, kinds = all_kinds(PROMPTS)
    with engine(**changes) as llm:
        for prompt, kind, vector in zip(prompts, kinds, vectors(llm, prompts, kinds), strict=True):
            np.testing.assert_allclose(vector, oracle_vector(prompt, kind), atol=TOLERANCE, rtol=0, err_msg=kind)


@exact_on_cpu
def test_neighbours_change_no_bit() -> None:
    prompts, kinds = all_kinds(PROMPTS)
    with engine() as llm:
        together = vectors(llm, prompts, kinds)
        alone = [vectors(llm, [prompt], [kind])[0] for prompt, kind in zip(prompts, kinds)]
    assert [vector.tobytes() for vector in together] == [vector.tobytes() for vector in alone]


def test_without_params_it_is_the_mean_at_length_one() -> None:
    with engine() as llm:
        (output,) = llm.embed(PROMPTS[5], progress=False)
    expected = oracle_vector(PROMPTS[5], "mean")
    np.testing.assert_allclose(output.embedding, expected / np.linalg.norm(expected), atol=TOLERANCE, rtol=0)


def test_hidden_states_of_every_layer_and_position_are_those_of_transformers() -> None:
    prompt = PROMPTS[5]
    with torch.inference_mode():
        expected = tiny().oracle(torch.tensor([prompt]), output_hidden_states=True).hidden_states
    with engine() as llm:
        found = llm.extract_hidden_states(
            prompt, HiddenStatesParams(positions=[0, 3, -1], layers=[0, 1, 2, 3]), progress=False
        )
    assert found.error is None
    rows = torch.stack([states[0, [0, 3, -1]] for states in expected])
    np.testing.assert_allclose(found.tensor, rows, atol=TOLERANCE, rtol=0)


def test_a_prompt_may_be_as_long_as_the_model_and_no_longer() -> None:
    with engine() as llm, pytest.raises(RequestError, match=f"at most {MAX_POSITION} fit"):
        llm.embed(random_token_ids(MAX_POSITION + 1), progress=False)
