"""The programs and commands of a page of the documentation, in the order of the page, with the output shown below each.

A block of Python belongs to the block marked `text` right behind it. A block of a shell has commands that begin with
`$ `, each with its output. In outputs `…` stands for anything, and white space for any or none: long lines are wrapped.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

BLOCK = re.compile(r"^```(\w*)\n(.*?)^```$", re.DOTALL | re.MULTILINE)
HEADING = re.compile(r"^#+ ", re.MULTILINE)
DECIMAL = re.compile(r"-?\d+\.\d+(?:e-?\d+)?")
TOLERANCE = 2  # units in the last place shown: processors add floats in different orders


@dataclass(frozen=True)
class Step:
    """A program or a command of a page."""

    line: int
    section: int  # steps with the same number stand below the same heading
    block: int  # steps of a shell with the same number stand in one block
    language: str  # "python" or "shell"
    source: str
    shown: str | None  # None: the page shows no output


def steps_of(page: Path) -> list[Step]:
    text = page.read_text()
    blocks = list(BLOCK.finditer(text))
    steps: list[Step] = []
    for index, block in enumerate(blocks):
        line = text.count("\n", 0, block.start()) + 2
        section = len(HEADING.findall(BLOCK.sub("", text[: block.start()])))
        language, content = block.groups()
        if language == "python":
            following = blocks[index + 1] if index + 1 < len(blocks) else None
            has_output = following is not None and following[1] == "text" and following.start() == block.end() + 1
            steps.append(
                Step(line, section, index, "python", content, following[2] if has_output and following else None)
            )
        elif language in ("", "console") and content.startswith("$ "):
            steps += _commands(content, line, section, index)
    return steps


def _commands(content: str, line: int, section: int, block: int) -> Iterator[Step]:
    lines = content.splitlines()
    index = 0
    while index < len(lines):
        begin, command = index, lines[index].removeprefix("$ ")
        while _is_incomplete(command):
            index += 1
            command += "\n" + lines[index]
        index += 1
        output = []
        while index < len(lines) and not lines[index].startswith("$ "):
            output.append(lines[index])
            index += 1
        yield Step(line + begin, section, block, "shell", command, "\n".join(output) if output else None)


def _is_incomplete(command: str) -> bool:
    if command.endswith("\\"):
        return True
    try:
        shlex.split(command)
    except ValueError:  # a quote that is not closed
        return True
    return False


def difference(shown: str, printed: str, *, is_measured: bool = False) -> str:
    """Where the printed text is not what the page shows; empty if it is. Decimals may differ in their last place; with
    `is_measured` all numbers may differ."""
    shown, printed = shown.strip(), printed.strip()
    if is_measured:
        shown, printed = (re.sub(r"\d([\d.,]*\d)?", "…", text) for text in (shown, printed))
    end = 0
    segments = shown.split("…")
    for index, segment in enumerate(segments):  # each where it is found first, which leaves the most for the rest
        pattern = re.compile(_pattern(segment) + (r"\Z" if index == len(segments) - 1 else ""))
        match = pattern.match(printed) if index == 0 else pattern.search(printed, end)
        if match is None:
            return f"shown:   {segment}\nprinted: {printed[end:]}"
        end = match.end()
        for value, actual in zip(DECIMAL.findall(segment), match.groups(), strict=True):
            if abs(float(value) - float(actual)) > TOLERANCE * _last_place(value) * (1 + 1e-9):
                return f"{actual} was printed, {value} is shown"
    return ""


def _pattern(segment: str) -> str:
    """Decimals are groups, and white space is any or none."""
    parts = re.split(rf"({DECIMAL.pattern}|\s+)", segment)
    return "".join(
        r"\s*" if part.isspace() else f"({DECIMAL.pattern})" if DECIMAL.fullmatch(part) else re.escape(part)
        for part in parts
    )


def _last_place(number: str) -> float:
    digits, _, exponent = number.partition("e")
    return 10.0 ** (int(exponent or 0) - len(digits.partition(".")[2]))
