"""What is sent in both stages: random tokens, or the lines of a file. The same for the same seed."""

from __future__ import annotations

import msgspec

from ratoon.benchmarks.loadgen.datasets import JsonLine, Turn, read_lines, turn_of_line
from ratoon.core.errors import RequestError

EXAMPLE = '{"prompt": "…", "suffix": "…", "reference": "…"}'


class FileConversation(msgspec.Struct, frozen=True):
    """A line of a file, as it is written there."""

    turn: Turn  # stage 1
    suffix: str | list[int]
    references: list[str]


class Conversation(msgspec.Struct, frozen=True):
    turn: Turn  # stage 1
    suffix: list[int]
    seed: int
    references: list[str] = []  # right answers, one of which stage 2 should find


class Line(JsonLine):
    """Other fields are ignored."""

    suffix: str | list[int] = ""
    reference: str | list[str] | None = None


def read_conversations(path: str, default_output_len: int) -> list[FileConversation]:
    """RequestError with the line's number for what has another form."""
    found = []
    for where, line in read_lines(path, Line, EXAMPLE):
        references = [line.reference] if isinstance(line.reference, str) else line.reference or []
        if not all(text.strip() for text in references):
            raise RequestError(where, "has an empty reference", "a text, or several in a list")
        found.append(FileConversation(turn_of_line(line, where, default_output_len), line.suffix, references))
    return found
