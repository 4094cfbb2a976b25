"""What the grammar library knows of a vocabulary: tokens are bytes, and its own end is no token of the model."""

from __future__ import annotations

import numpy as np
import pytest

from ratoon.core.structured import StructuredOutput
from ratoon.execution.grammar.interface import words_of
from ratoon.execution.grammar.llguidance_library import Llguidance
from tests.property.json_vocabulary import json_tokenizer


def allowed(library: Llguidance, asked: StructuredOutput, text: str) -> set[int]:
    state = library.compile(asked).begin()
    for token in json_tokenizer().encode(text):
        assert state.consume(token)
    words = np.zeros(words_of(library.vocab_size), np.int32)
    state.fill(words)
    return set(np.flatnonzero(np.unpackbits(words.view(np.uint8), bitorder="little")).tolist())


def test_a_part_of_a_character_is_its_bytes() -> None:
    """As text it would be a replacement character, which may stand where the part may not."""
    library = Llguidance(json_tokenizer(), json_tokenizer().vocab_size)
    first, second = json_tokenizer().encode("ü")
    assert [library.token_bytes(token) for token in (first, second)] == [b"\xc3", b"\xbc"]
    choice = StructuredOutput(choice=["aü", "b"])
    assert allowed(library, choice, "a") == {first}
    state = library.compile(choice).begin()
    assert all(state.consume(token) for token in json_tokenizer().encode("aü"))
    assert state.is_accepting


@pytest.mark.parametrize("num_more", [0, 1, 20, 64])  # models have rows behind the tokenizer's last token
def test_the_librarys_own_end_is_never_allowed(num_more: int) -> None:
    vocab_size = json_tokenizer().vocab_size + num_more
    library = Llguidance(json_tokenizer(), vocab_size)
    digits = StructuredOutput(regex="[0-9]+")
    found = allowed(library, digits, "12")
    assert found == {token for token in range(json_tokenizer().vocab_size) if library.token_bytes(token).isdigit()}
    assert allowed(library, StructuredOutput(choice=["ab"]), "ab") == set()


@pytest.mark.parametrize("num_more", [0, 1, 20, 64])
def test_masks_of_several_states_are_those_of_each(num_more: int) -> None:
    library = Llguidance(json_tokenizer(), json_tokenizer().vocab_size + num_more)
    texts = {"[0-9]+": "1", "[a-c]*": "", "ab": "ab", "x{3}": "z"}  # the last leaves its grammar
    states = [library.compile(StructuredOutput(regex=regex)).begin() for regex in texts]
    for state, text in zip(states, texts.values()):
        for token in json_tokenizer().encode(text):
            state.consume(token)
    found = library.masks(states)
    for state, words in zip(states, found, strict=True):
        alone = np.zeros(words_of(library.vocab_size), np.int32)
        state.fill(alone)
        np.testing.assert_array_equal(words, alone)
