"""A real sentence encoder behind `ratoon serve`: what clients of OpenAI's get, and what they are told."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import openai
import pytest
import torch
from transformers import AutoModel, AutoTokenizer

from tests.e2e.servers import serving
from tests.real_models import minilm

pytestmark = pytest.mark.slow

MODEL = "minilm"
TEXTS = ["A cat sits on the mat.", "Nothing else matters.", "Stock prices fell on Monday. " * 10]


@pytest.fixture(scope="module")
def client() -> Iterator[openai.OpenAI]:
    options = ("--load-format", "auto", "--dtype", "float32", "--served-model-name", MODEL)
    with (
        serving(minilm(), *options) as server,
        openai.OpenAI(base_url=server.api, api_key="none", max_retries=0) as client,
    ):
        yield client


@torch.inference_mode()
def vectors_of_transformers(texts: list[str]) -> np.ndarray:
    """The mean over the tokens of each, at length 1: how the model's makers use it."""
    tokenizer, model = AutoTokenizer.from_pretrained(minilm()), AutoModel.from_pretrained(minilm()).eval()
    inputs = tokenizer(texts, padding=True, return_tensors="pt")
    states, mask = model(**inputs).last_hidden_state, inputs["attention_mask"][:, :, None]
    means = (states * mask).sum(dim=1) / mask.sum(dim=1)
    return torch.nn.functional.normalize(means).numpy()


@pytest.mark.one_in(2)
@pytest.mark.parametrize("options", [{}, {"encoding_format": "float"}], ids=["as the client likes it", "as numbers"])
def test_vectors_are_those_that_the_model_was_made_for(client: openai.OpenAI, options: dict) -> None:
    answer = client.embeddings.create(model=MODEL, input=TEXTS, **options)
    found = np.array([entry.embedding for entry in answer.data])
    np.testing.assert_allclose(found, vectors_of_transformers(TEXTS), atol=1e-5, rtol=0)
    assert answer.usage.prompt_tokens > 60


def test_a_text_that_is_too_long_is_refused_with_the_numbers(client: openai.OpenAI) -> None:
    with pytest.raises(openai.BadRequestError, match=r"input\[1\]: has 602 tokens.* 512 tokens at most") as caught:
        client.embeddings.create(model=MODEL, input=["x", "x " * 600])
    assert caught.value.code == "context_length_exceeded"


def test_requests_to_generate_are_told_that_there_is_no_decoder(client: openai.OpenAI) -> None:
    with pytest.raises(openai.BadRequestError, match="no decoder"):
        client.completions.create(model=MODEL, prompt="x")
    with pytest.raises(openai.BadRequestError, match="no decoder"):
        client.chat.completions.create(model=MODEL, messages=[{"role": "user", "content": "x"}])
    with pytest.raises(openai.BadRequestError, match="no decoder"):
        list(client.completions.create(model=MODEL, prompt="x", stream=True))
