"""Reads a text character by character, as generators that wait for the next one.

A parser written this way can't depend on how its text was cut into pieces. `Source.next` is the one place that waits;
what was read for nothing is given back and read again, without waiting. How much is read again is bounded: a text of
beginnings without an end would be read as often as it has any.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Generator, Sequence
from typing import TypeVar

T = TypeVar("T")
Reading = Generator[None, str, T]  # characters are sent into it; it returns what was read
Emit = Callable[[str], None]

END = ""  # sent, and read from then on, when the text has ended
BLANKS = frozenset(" \t\r\n")
SCALAR = frozenset("abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789+-.")  # true, null, -1.5e+3, NaN
OUTSIDE_STRINGS = frozenset("{}[]:,") | SCALAR | BLANKS
MOST_READ_AGAIN = 32 * 1024  # characters; every new one allows one more, up to this


class MalformedError(Exception):
    """The text is not what it seemed to be."""


class Source:
    def __init__(self) -> None:
        self._returned: list[str] = []  # to be read again; the next one is the last
        self._recorded: list[str] = []
        self._has_ended = False
        self._may_read_again = MOST_READ_AGAIN
        # While a text without any of these characters would only be passed on: them, and where to. A shortcut.
        self.passing: tuple[frozenset[str], Emit] | None = None

    def next(self) -> Reading[str]:
        """The next character, or END."""
        if self._returned:
            char = self._returned.pop()
        elif self._has_ended:
            return END
        else:
            char = yield
            if char == END:
                self._has_ended = True
                return END
            if self._may_read_again < MOST_READ_AGAIN:
                self._may_read_again += 1
        self._recorded.append(char)
        return char

    def give_back(self, char: str) -> None:
        """Gives back the last character that was read, and no other. END stays the end anyway."""
        if char != END:
            self._returned.append(char)
            self._recorded.pop()

    def mark(self) -> None:
        """Where `rewind` goes back to."""
        self._recorded.clear()

    def rewind(self) -> None:
        self._may_read_again -= len(self._recorded)
        self._returned.extend(reversed(self._recorded))
        self._recorded.clear()

    @property
    def is_worn_out(self) -> bool:
        """More was read again than any answer needs that was meant to be read."""
        return self._may_read_again < 0

    def take_returned(self) -> str:
        """All that would be read again."""
        text = "".join(reversed(self._returned))
        self._returned.clear()
        return text

    def take_returned_before(self, stops: frozenset[str]) -> str:
        """Takes what would be read again, up to the first of these characters: at once, since it may be a whole answer
        that was held back as the beginning of a call, and is read again on the event loop."""
        returned, start = self._returned, len(self._returned)
        while start and returned[start - 1] not in stops:
            start -= 1
        text = "".join(reversed(returned[start:]))
        del returned[start:]
        return text


def until(source: Source, marks: Sequence[str], emit: Emit) -> Reading[str | None]:
    """Emit the text up to the first of the marks, and return that mark; None: the text has ended. Only what may be the
    beginning of a mark is held back."""
    held, passing = "", (frozenset(mark[0] for mark in marks), emit)
    while True:
        source.mark()  # nothing before is read again
        if not held and (plain := source.take_returned_before(passing[0])):
            emit(plain)
        source.passing = None if held else passing
        char = yield from source.next()
        if char == END or held or char in passing[0]:
            source.passing = None
        if char == END:
            emit(held)
            return None
        held += char
        while held and not any(mark.startswith(held) for mark in marks):
            emit(held[0])
            held = held[1:]
        if held in marks:
            return held


def until_call(source: Source, marks: Sequence[str], emit: Emit) -> Reading[str | None]:
    """Reads up to a mark before a call, of which the text may have any number. In a text that was read again too often
    no more calls are looked for: the rest is content."""
    if source.is_worn_out:
        emit(source.take_returned())
        marks = ()
    return (yield from until(source, marks, emit))


def opens_with(
    source: Source, marks: Sequence[str], behind: frozenset[str] = BLANKS, *, may_be_cut: bool = False
) -> Reading[bool]:
    """Whether one of the marks comes next, behind blanks or the like. If not, nothing was read. `may_be_cut`: where the
    text ends within a mark, that is the mark."""
    source.mark()
    read = yield from skip(source, behind)
    while any(mark.startswith(read) for mark in marks) and read != END:
        if read in marks:
            return True
        char = yield from source.next()
        if char == END:
            if may_be_cut:
                return True
            break
        read += char
    source.rewind()
    return False


def skip(source: Source, chars: frozenset[str] = BLANKS) -> Reading[str]:
    """The first character that is none of these."""
    while True:
        char = yield from source.next()
        if char not in chars:
            return char


def json_string(source: Source) -> Reading[str]:
    """The value of a JSON string whose opening quote was read."""
    pieces = ['"']
    yield from copy_string(source, pieces.append)
    try:
        return str(json.loads("".join(pieces), strict=False))
    except ValueError:
        raise MalformedError from None


def copy_string(source: Source, emit: Emit) -> Reading[None]:
    """The rest of a JSON string, as it is written."""
    is_escaped = False
    while True:
        char = yield from _inside(source)
        emit(char)
        if is_escaped:
            is_escaped = False
        elif char == "\\":
            is_escaped = True
        elif char == '"':
            return


def copy_container(source: Source, first: str, emit: Emit) -> Reading[None]:
    """A JSON object or list as it is written; `first` is its opening bracket. Brackets and strings are followed; what
    is between them is not checked, except that a character which JSON does not have there ends it as malformed."""
    depth, char = 0, first
    while True:
        if char not in OUTSIDE_STRINGS and char != '"':
            source.give_back(char)
            raise MalformedError
        emit(char)
        if char == '"':
            yield from copy_string(source, emit)
        elif char in "{[":
            depth += 1
        elif char in "}]":
            depth -= 1
            if depth == 0:
                return
        char = yield from _inside(source)


def json_scalar(source: Source, first: str) -> Reading[str]:
    """A number, true, false or null, as it is written."""
    text, char = "", first
    while char in SCALAR and char != END:
        text += char
        char = yield from source.next()
    source.give_back(char)
    if not text:
        raise MalformedError
    return text


def _inside(source: Source) -> Reading[str]:
    """The next character where the text can't end."""
    char = yield from source.next()
    if char == END:
        raise MalformedError
    return char
