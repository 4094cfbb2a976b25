"""A real sentence encoder: its vectors are those of sentence-transformers, by the model's default pooling."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoModel

from ratoon import LLM, PoolingParams, RequestError, SamplingParams
from ratoon.cli import main
from tests.golden.engines import check_nothing_left
from tests.real_models import minilm

TOLERANCE = 1e-5
LONGEST = 512
TEXTS = [
    "cat",
    "A cat sits on the mat.",
    "The kitten is lying on a rug, and nobody minds.",
    "Die Preise für Äpfel sind gefallen 🍎",
    "Stock prices fell on Monday. " * 8,
    "One sentence follows another, until the model has no place left for it. " * 36,
]
SETTINGS: dict[str, Any] = {"dtype": "float32", "device": "cpu", "num_threads": 1}


@pytest.fixture(scope="module")
def llm() -> Iterator[LLM]:
    with LLM(str(minilm()), num_blocks=300, **SETTINGS) as built:
        yield built
        check_nothing_left(built)


@pytest.fixture(scope="module")
def oracle() -> Any:
    return AutoModel.from_pretrained(minilm(), dtype=torch.float32).eval()


@torch.inference_mode()
def states(oracle: Any, token_ids: list[int]) -> np.ndarray:
    """[T, H], of this text alone."""
    return oracle(torch.tensor([token_ids])).last_hidden_state[0].numpy()


def normalized(vector: np.ndarray) -> np.ndarray:
    return vector / np.linalg.norm(vector)


def embed(llm: LLM, prompts: Any, params: Any = None) -> list[np.ndarray]:
    outputs = llm.embed(prompts, params, progress=False)
    assert [output.error for output in outputs] == [None] * len(outputs)
    return [output.embedding for output in outputs]


def token_ids_of(llm: LLM) -> list[list[int]]:
    """Of the texts, the longest as long as the model can take it."""
    return [ids if len(ids) <= LONGEST else [*ids[: LONGEST - 1], ids[-1]] for ids in map(tokens(llm), TEXTS)]


def tokens(llm: LLM) -> Any:
    return llm.get_tokenizer().encode


def test_vectors_are_the_mean_over_all_tokens_at_length_one(llm: LLM, oracle: Any) -> None:
    prompts = token_ids_of(llm)
    assert [len(prompt) for prompt in prompts][::5] == [3, LONGEST]
    for prompt, vector in zip(prompts, embed(llm, prompts), strict=True):
        expected = normalized(states(oracle, prompt).mean(axis=0))
        np.testing.assert_allclose(vector, expected, atol=TOLERANCE, rtol=0)


def test_texts_are_tokenised_as_the_model_expects(llm: LLM) -> None:
    text = TEXTS[1]
    (output,) = llm.embed(text, progress=False)
    cls, sep = (llm.get_tokenizer().backend.token_to_id(token) for token in ("[CLS]", "[SEP]"))
    assert (output.prompt_token_ids[0], output.prompt_token_ids[-1]) == (cls, sep)
    assert output.prompt_token_ids == tokens(llm)(text)
    np.testing.assert_array_equal(output.embedding, embed(llm, output.prompt_token_ids)[0])


@pytest.mark.parametrize(("pooling", "row"), [("first", 0), ("last", -1)])
def test_another_pooling_can_be_asked_for(llm: LLM, oracle: Any, pooling: str, row: int) -> None:
    prompts = token_ids_of(llm)[:-1]
    params = PoolingParams(pooling=pooling, normalize=False)
    for prompt, vector in zip(prompts, embed(llm, prompts, params), strict=True):
        np.testing.assert_allclose(vector, states(oracle, prompt)[row], atol=TOLERANCE * 10, rtol=0)


def test_a_batch_gives_the_vectors_of_each_text_alone(llm: LLM) -> None:
    prompts = token_ids_of(llm)[:-1]
    alone = [embed(llm, [prompt])[0] for prompt in prompts]
    np.testing.assert_allclose(embed(llm, prompts * 5), alone * 5, atol=1e-6, rtol=0)


def test_what_is_alike_is_close(llm: LLM) -> None:
    cat, kitten, prices = embed(llm, [TEXTS[1], TEXTS[2], TEXTS[4]])
    assert cat @ kitten > 0.4 > 0.2 > cat @ prices


def test_a_text_that_is_too_long_is_refused_and_not_cut(llm: LLM) -> None:
    length = len(tokens(llm)(TEXTS[-1]))
    assert length > LONGEST
    with pytest.raises(RequestError, match=rf"has {length} tokens, and at most {LONGEST} fit"):
        llm.embed(TEXTS[-1], progress=False)


def test_nothing_is_generated(llm: LLM) -> None:
    with pytest.raises(RequestError, match="no decoder"):
        llm.generate(TEXTS[0], SamplingParams(max_tokens=1), progress=False)


def test_the_command_prints_the_same_vectors(llm: LLM, capsys: pytest.CaptureFixture[str]) -> None:
    options = ["--dtype", "float32", "--device", "cpu", "--threads", "1"]
    assert main(["embed", str(minilm()), *TEXTS[:2], *options]) == 0
    printed = [json.loads(line)["embedding"] for line in capsys.readouterr().out.splitlines()]
    np.testing.assert_allclose(printed, embed(llm, TEXTS[:2]), atol=1e-6, rtol=0)
