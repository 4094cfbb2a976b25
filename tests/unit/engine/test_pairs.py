"""Pairs of texts become prompts, and the tokenizer is called for several texts at once."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
from tokenizers import Tokenizer as Backend
from tokenizers import models, pre_tokenizers

from ratoon.core.errors import RequestError
from ratoon.engine.input.pairs import TOGETHER, PairEncoder
from ratoon.models.tokenizer import Tokenizer
from tests.unit.engine.fakes import model_config

NUM_WORDS = 50


class CountingTokenizer(Tokenizer):
    """A tokenizer that counts the calls for several texts."""

    def __init__(self, unknown: str | None = "w0") -> None:
        vocabulary = {f"w{index}": index for index in range(NUM_WORDS)}
        backend = Backend(models.WordLevel(vocabulary, unk_token=unknown or "<none>"))
        backend.pre_tokenizer = pre_tokenizers.Whitespace()
        super().__init__(backend, {})
        self.calls: list[int] = []

    def encodings(self, texts: Sequence[str]) -> list[Any]:
        self.calls.append(len(texts))
        return super().encodings(texts)


def encode(tokenizer: Tokenizer, documents: Sequence[str], **options: Any) -> list[list[int]]:
    encoder = PairEncoder(model_config(vocab_size=NUM_WORDS), tokenizer, max_model_len=40)
    pairs = [("w1 w2", document) for document in documents]
    fields = [f"documents[{index}]" for index in range(len(pairs))]
    return [prompt["prompt_token_ids"] for prompt in encoder.encode(pairs, fields, **options)]


def test_the_documents_of_a_query_are_tokenised_by_few_calls() -> None:
    tokenizer = CountingTokenizer()
    documents = [f"w{index % NUM_WORDS} w3" for index in range(2 * TOGETHER + 5)]
    found = encode(tokenizer, documents)
    assert tokenizer.calls == [TOGETHER, TOGETHER, 5]
    assert found == [[1, 2, index % NUM_WORDS, 3] for index in range(len(documents))]


def test_a_document_that_is_cut_leaves_its_copy_as_it_is() -> None:
    twice = ["w4 w5 w6 w7"] * 2
    assert encode(CountingTokenizer(), twice, max_document_tokens=2) == [[1, 2, 4, 5]] * 2
    assert encode(CountingTokenizer(), twice, truncate=5) == [[1, 2, 4, 5, 6]] * 2


def test_a_document_without_tokens_among_others_is_refused() -> None:
    with pytest.raises(RequestError, match="the model's tokenizer has no tokens for it"):
        encode(CountingTokenizer(unknown=None), ["w4", "an unknown word", "w5"])
