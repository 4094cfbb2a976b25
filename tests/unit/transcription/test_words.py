"""Words of tokens: where they begin and end, and which marks belong to them."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from ratoon.transcription.words import Piece, Word, find_words, join_at_spaces, join_punctuation, split_characters
from tests.unit.transcription.speech import vocabulary


def decode(tokens: Sequence[int]) -> str:
    """A token is a byte."""
    return vocabulary().decode_text(tokens)


def words_of(text: str, language: str = "en") -> list[str]:
    tokens = list(text.encode())
    times = [0.1 * place for place in range(len(tokens) + 1)]
    return [word.word for word in find_words(tokens, times, 0.0, 1000.0, language, decode)]


@pytest.mark.parametrize(
    ("text", "words"),
    [
        (" Hello there.", [" Hello", " there."]),
        (' He said: "No!" (Yes?)', [" He", " said:", ' "No!"', " (Yes?)"]),
        (" It's 3.5 km", [" It", "'s", " 3", ".5", " km"]),  # where the mark is a token of its own, as here
        (" ¿Qué? ¡Sí!", [" ¿Qué?", " ¡Sí!"]),
        (" naïve café", [" naïve", " café"]),
        (" well-known", [" well", "-known"]),
        ("Hello", ["Hello"]),
        (" ", []),
    ],
)
def test_words_are_split_at_spaces_and_have_their_marks(text: str, words: list[str]) -> None:
    assert words_of(text) == words


def test_languages_without_spaces_are_split_by_characters() -> None:
    assert words_of("你好，世界。", "zh") == ["你", "好，", "世", "界。"]
    assert words_of("你好，世界。", "en") == ["你好，世界。"]


def test_a_character_of_several_tokens_is_one_piece_and_broken_bytes_are_left_as_they_are() -> None:
    assert [piece.text for piece in split_characters(list("aß€".encode()), decode)] == ["a", "ß", "€"]
    broken = [*b"a", 0xE2, 0x82]
    pieces = split_characters(broken, decode)
    assert (pieces[0].first, pieces[0].last) == (0, 0)
    assert pieces[-1].last == 2
    assert "".join(piece.text for piece in join_punctuation(join_at_spaces(pieces))).startswith("a")


def test_marks_behind_a_space_go_to_the_next_word() -> None:
    pieces = [Piece(" -", 0, 0), Piece(" so", 1, 1), Piece(" (", 2, 3), Piece("he", 4, 4), Piece(")", 5, 5)]
    assert join_punctuation(pieces) == [Piece(" - so", 0, 1), Piece(" (he)", 2, 5)]


def test_times_are_those_of_the_first_and_the_last_token_within_the_segment() -> None:
    tokens = list(b" ab cd")
    times = [0.0, 0.5, 1.0, 1.5, 2.0, 2.5, 9.0]
    found = find_words(tokens, times, 1.0, 3.0, "en", decode)
    assert found == [Word(1.0, 1.5, " ab"), Word(1.5, 3.0, " cd")]


def test_a_first_word_that_is_much_longer_than_others_begins_later() -> None:
    tokens = list(b" a b c d")
    times = [0.0, 4.0, 4.2, 4.3, 4.4, 4.5, 4.6, 4.7, 4.8]
    first, *rest = find_words(tokens, times, 0.0, 10.0, "en", decode)
    assert (first.start, first.end) == (pytest.approx(3.8), 4.2)
    assert [word.end for word in rest] == [4.4, 4.6, 4.8]
    assert find_words([], [0.0], 0.0, 1.0, "en", decode) == []
