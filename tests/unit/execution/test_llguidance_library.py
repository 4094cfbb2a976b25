"""What the grammar library knows of a vocabulary: tokens are bytes, and its own end is no token of the model."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from tokenizers import Tokenizer as Backend

from ratoon.core.errors import RequestError
from ratoon.core.structured import StructuredOutput
from ratoon.execution.grammar import llguidance_c
from ratoon.execution.grammar.forced_text import forced_tokens
from ratoon.execution.grammar.interface import GrammarState, Match, words_of
from ratoon.execution.grammar.llguidance_library import Grammar, Llguidance
from ratoon.layers import native
from ratoon.models.tokenizer import Tokenizer
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


OpenLibrary = Callable[[Tokenizer, int], Llguidance]


@pytest.fixture(params=["python", "c"])
def open_library(request: pytest.FixtureRequest) -> OpenLibrary:
    if request.param == "c" and native.library() is None:
        pytest.skip("the CPU kernels are not built")
    return Llguidance if request.param == "python" else llguidance_c.LlguidanceC


def test_a_library_that_is_prepared_has_made_what_the_first_text_needs() -> None:
    """A text is charged for the time of its masks, and refused beyond a limit."""
    library = Llguidance(json_tokenizer(), json_tokenizer().vocab_size)
    library.prepare()
    assert {"_library_tokenizer", "_special_ids"} <= set(vars(library))


@pytest.mark.parametrize("num_more", [0, 1, 20, 64])  # models have rows behind the tokenizer's last token
def test_the_librarys_own_end_is_never_allowed(num_more: int, open_library: OpenLibrary) -> None:
    vocab_size = json_tokenizer().vocab_size + num_more
    library = open_library(json_tokenizer(), vocab_size)
    digits = StructuredOutput(regex="[0-9]+")
    found = allowed(library, digits, "12")
    assert found == {token for token in range(json_tokenizer().vocab_size) if library.token_bytes(token).isdigit()}
    assert allowed(library, StructuredOutput(choice=["ab"]), "ab") == set()


@pytest.mark.parametrize("num_more", [0, 1, 20, 64])
def test_masks_of_several_states_are_those_of_each(num_more: int, open_library: OpenLibrary) -> None:
    library = open_library(json_tokenizer(), json_tokenizer().vocab_size + num_more)
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


def test_several_states_go_on_together_as_each_alone(open_library: OpenLibrary) -> None:
    library = open_library(json_tokenizer(), json_tokenizer().vocab_size)
    compiled = library.compile(StructuredOutput(regex="[a-c]{2,5}"))
    (letter,), (digit,) = json_tokenizer().encode("a"), json_tokenizer().encode("1")
    states = [compiled.begin() for _ in range(20)]
    rows = list(range(20, 0, -1))
    table = np.full((22, library.num_words), 7, np.int32)
    for moves in ([letter] * 20, [-1] * 20, [digit if place in (3, 17) else letter for place in range(20)]):
        found = library.match(states, np.array(moves), table, np.array(rows))
        open_ones = Match.ACCEPTING if digit in moves else 0  # the second letter
        expected = [Match.REFUSED if token == digit else open_ones for token in moves]
        assert [each & ~Match.ALIKE for each in found.tolist()] == expected
    assert states[3].error is not None and states[0].error is None
    nothing = np.zeros(0, np.int64)
    assert len(library.match([], nothing, table, nothing)) == 0
    alone = compiled.begin()
    assert alone.consume(letter) and alone.consume(letter) and not alone.consume(digit) and alone.error is None
    words = np.zeros(words_of(library.vocab_size), np.int32)
    alone.fill(words)
    np.testing.assert_array_equal(table[rows[0], : len(words)], words)
    np.testing.assert_array_equal(library.masks([alone])[0], words)
    assert (table[[0, 21], : len(words) - 1] == 7).all(), "rows of no state"
    alone.rewind(1)
    assert not alone.is_accepting and alone.copy().consume(letter)


def test_the_c_interface_says_where_tokens_that_may_follow_begin_alike() -> None:
    library = llguidance_c.open_library(json_tokenizer(), json_tokenizer().vocab_size)
    if not isinstance(library, llguidance_c.LlguidanceC):
        pytest.skip("the C interface can't be used here")
    library.prepare()
    table = np.zeros((1, library.num_words), np.int32)
    for choices, alike in ((["true", "trick"], True), (["true", "false"], False), (["true"], True)):
        state = library.compile(StructuredOutput(choice=choices)).begin()
        (found,) = library.match([state], np.array([-1]), table, np.array([0])).tolist()
        assert found == (Match.ALIKE if alike else 0), choices


def test_texts_of_a_grammar_are_divided_among_its_lexers(open_library: OpenLibrary) -> None:
    made: list[GrammarState] = []
    library = open_library(json_tokenizer(), json_tokenizer().vocab_size)

    def compile_again() -> GrammarState:
        made.append(library.new_state('start: "a" | "b"'))
        return made[-1]

    grammar = Grammar(compile_again, 1, max_lexers=3)
    states = [grammar.begin() for _ in range(100)]
    assert len(made) == 3
    (letter,) = json_tokenizer().encode("a")
    assert all(state.consume(letter) and state.is_accepting for state in states)


def test_what_is_wrong_with_a_grammar_is_said_by_both_interfaces(open_library: OpenLibrary) -> None:
    library = open_library(json_tokenizer(), json_tokenizer().vocab_size)
    with pytest.raises(RequestError, match="missing"):
        library.compile(StructuredOutput(grammar="start: missing"))
    assert "missing" in (library.new_state("start: missing").error or "")


@pytest.mark.skipif(native.library() is None, reason="the CPU kernels are not built")
def test_the_c_interface_is_left_where_its_limits_are_not_as_expected(monkeypatch: pytest.MonkeyPatch) -> None:
    assert type(llguidance_c.open_library(json_tokenizer(), 300)) is llguidance_c.LlguidanceC
    monkeypatch.setattr(llguidance_c, "DEFAULT_LIMITS", (1,) * 8)
    assert type(llguidance_c.open_library(json_tokenizer(), 300)) is Llguidance


@pytest.mark.parametrize("is_special", [True, False])
@pytest.mark.parametrize("asked", [{"grammar": 'start: "{<call>" "true"'}, {"choice": ["<call>true"]}], ids=str)
def test_text_that_is_forced_has_no_token_that_the_grammar_does_not_match(
    asked: dict[str, Any], is_special: bool
) -> None:
    """A grammar means its text, and not a special token that is spelled like it."""
    backend = Backend.from_str(json_tokenizer().backend.to_str())
    (backend.add_special_tokens if is_special else backend.add_tokens)(["<call>"])
    tokenizer = Tokenizer(backend, {"eos_token": "<|end|>"}, {})
    library = Llguidance(tokenizer, tokenizer.vocab_size)
    state, words = library.compile(StructuredOutput(**asked)).begin(), np.zeros(library.num_words, np.int32)
    text = b""
    while not state.is_accepting:
        state.fill(words)
        (forced,) = forced_tokens([state], [words], library)
        tokens = forced or [int(np.flatnonzero(np.unpackbits(words.view(np.uint8), bitorder="little"))[0])]
        for token in tokens:
            assert state.consume(token), f"{tokenizer.id_to_token(token)!r} behind {text!r}"
            text += library.token_bytes(token)
    assert text.endswith(b"<call>true")
