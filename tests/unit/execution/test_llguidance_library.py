"""What the grammar library knows of a vocabulary: tokens are bytes, and its own end is no token of the model."""

from __future__ import annotations

import numpy as np
import pytest
from llguidance import LLMatcher

from ratoon.core.structured import StructuredOutput
from ratoon.execution.grammar.interface import words_of
from ratoon.execution.grammar.llguidance_library import Grammar, Llguidance
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


def test_several_states_go_on_together_as_each_alone() -> None:
    library = Llguidance(json_tokenizer(), json_tokenizer().vocab_size)
    compiled = library.compile(StructuredOutput(regex="[a-c]{2,5}"))
    (letter,), (digit,) = json_tokenizer().encode("a"), json_tokenizer().encode("1")
    states = [compiled.begin() for _ in range(20)]
    moves = [digit if place in (3, 17) else letter for place in range(20)]
    assert library.consume_all(states, moves) == [token == letter for token in moves]
    assert states[3].error is not None and states[0].error is None
    assert library.consume_all([], []) == []
    alone = compiled.begin()
    assert alone.consume(letter)
    np.testing.assert_array_equal(library.masks([alone])[0], library.masks([states[19]])[0])


def test_a_table_of_masks_has_rows_for_some_states() -> None:
    library = Llguidance(json_tokenizer(), json_tokenizer().vocab_size)
    states = [library.compile(StructuredOutput(regex=regex)).begin() for regex in ("[0-9]+", "[a-c]*", "x{3}")]
    table = np.full((5, library.num_words), 7, np.int32)
    library.fill_table(states, table, [4, 0, 2])
    np.testing.assert_array_equal(table[[4, 0, 2], : words_of(library.vocab_size)], library.masks(states))
    assert (table[[1, 3]] == 7).all()


def test_texts_of_a_grammar_are_divided_among_its_lexers() -> None:
    made: list[LLMatcher] = []
    library = Llguidance(json_tokenizer(), json_tokenizer().vocab_size)

    def compile_again() -> LLMatcher:
        made.append(LLMatcher(library._library_tokenizer, 'start: "a" | "b"', log_level=0))
        return made[-1]

    grammar = Grammar(compile_again, library._library_tokenizer.eos_token, 1, max_lexers=3)
    states = [grammar.begin() for _ in range(100)]
    assert len(made) == 3
    (letter,) = json_tokenizer().encode("a")
    assert all(state.consume(letter) and state.is_accepting for state in states)
