"""The words of a segment and their times, from its tokens and the times at which these end.

A word is a run of tokens: from one that begins with a space to the next, or, in languages that are written without
spaces, the tokens of one character or of a few. Punctuation belongs to the word that it is written at. The rules are
those of openai-whisper.
"""

from __future__ import annotations

import string
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import median

WITHOUT_SPACES = ("zh", "ja", "th", "lo", "my", "yue")
OPENING = "\"'“¡¿([{-"  # written at the word behind
CLOSING = "\"'.。,，!！?？:：”)]}、"  # written at the word before
BROKEN = "\ufffd"  # stands for bytes that are no whole character
LONGEST_MEDIAN = 0.7  # seconds
LONGEST_FIRST_WORD = 2.0  # in medians

Decode = Callable[[Sequence[int]], str]


@dataclass(slots=True)
class Word:
    start: float  # seconds from the beginning of the recording
    end: float
    word: str  # with the space before it, where the text has one


@dataclass(slots=True)
class Piece:
    """A run of tokens, from the first one's place in the segment to the last one's, and its text."""

    text: str
    first: int
    last: int


def find_words(
    tokens: Sequence[int], times: Sequence[float], start: float, end: float, language: str, decode: Decode
) -> list[Word]:
    """The words of a segment that lasts from `start` to `end`. `times` has one entry more than there are tokens, which
    are text alone: the time at which the first begins, and those at which each ends. Words lie within the segment, in
    their order."""
    if not tokens:
        return []
    pieces = split_characters(tokens, decode)
    if language not in WITHOUT_SPACES:
        pieces = join_at_spaces(pieces)
    words = []
    earliest = start
    for piece in join_punctuation(pieces):
        begin = min(max(times[piece.first], earliest), end)
        stop = min(max(times[piece.last + 1], begin), end)
        words.append(Word(begin, stop, piece.text))
        earliest = stop
    shorten_first(words)
    return words


def shorten_first(words: list[Word]) -> None:
    """Lets the first word begin later if it is much longer than words are: the time before it was found silent by no
    token, and is a pause."""
    durations = [word.end - word.start for word in words if word.end > word.start]
    if len(durations) < 2:
        return
    longest = LONGEST_FIRST_WORD * min(median(durations), LONGEST_MEDIAN)
    words[0].start = max(words[0].start, words[0].end - longest)


def split_characters(tokens: Sequence[int], decode: Decode) -> list[Piece]:
    """The shortest runs of tokens that are whole characters: a character may have several tokens, and each of these
    only some of its bytes. Where the whole text has bytes that are no character, they are a piece as they are."""
    whole = decode(tokens)
    pieces: list[Piece] = []
    first = length = 0
    for place in range(len(tokens)):
        text = decode(tokens[first : place + 1])
        broken = text.find(BROKEN)
        is_in_text = broken >= 0 and whole[length + broken : length + broken + 1] in (BROKEN, "")
        if broken < 0 or is_in_text:
            pieces.append(Piece(text, first, place))
            first, length = place + 1, length + len(text)
    if first < len(tokens):  # the text ends within a character
        pieces.append(Piece(decode(tokens[first:]), first, len(tokens) - 1))
    return pieces


def join_at_spaces(pieces: Sequence[Piece]) -> list[Piece]:
    joined: list[Piece] = []
    for piece in pieces:
        is_punctuation = piece.text.strip() in string.punctuation  # nothing but a space counts, too
        if not joined or piece.text.startswith(" ") or is_punctuation:
            joined.append(Piece(piece.text, piece.first, piece.last))
        else:
            joined[-1] = _join(joined[-1], piece)
    return joined


def join_punctuation(pieces: Sequence[Piece]) -> list[Piece]:
    """Opening marks behind a space go to the next word, closing ones to the word before."""
    opened: list[Piece] = []
    for piece in reversed(pieces):
        if opened and piece.text.startswith(" ") and piece.text.strip() in OPENING:
            opened[-1] = _join(piece, opened[-1])
        else:
            opened.append(piece)
    closed: list[Piece] = []
    for piece in reversed(opened):
        if closed and not closed[-1].text.endswith(" ") and piece.text in CLOSING:
            closed[-1] = _join(closed[-1], piece)
        else:
            closed.append(piece)
    return [piece for piece in closed if piece.text.strip()]


def _join(left: Piece, right: Piece) -> Piece:
    return Piece(left.text + right.text, left.first, right.last)
