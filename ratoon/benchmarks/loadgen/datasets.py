"""Datasets: sessions of one or more turns, the same for the same seed.

A dataset names lengths and structure; the text itself comes from a PromptMaker, which depends on the server.
Lengths and words have separate random sources: rounds of a run share the lengths, but no words that could be cached.
"""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import msgspec

from ratoon.benchmarks.loadgen.prompts import Prompt, PromptMaker
from ratoon.core.errors import RequestError


class LengthRange(msgspec.Struct, frozen=True):
    """A number of tokens, drawn evenly from `low` to `high`."""

    low: int
    high: int

    def draw(self, source: random.Random) -> int:
        return source.randint(self.low, self.high)


class Sources(NamedTuple):
    """The random sources."""

    lengths: random.Random
    words: random.Random

    @classmethod
    def of(cls, seed: int, purpose: str) -> Sources:
        """Returns sources with the same lengths for the same seed, and words for one purpose only."""
        return cls(random.Random(f"{seed}, lengths"), random.Random(f"{seed}, words, {purpose}"))


class Turn(msgspec.Struct):
    """One request: a prompt, or whole messages. In a chat a prompt is the next message of the user."""

    output_len: int
    prompt: Prompt | None = None
    messages: list[dict[str, Any]] | None = None


Session = list[Turn]  # its turns follow each other; most have one


class Shape(msgspec.Struct, kw_only=True, frozen=True):
    """The shape of a round's sessions."""

    num_requests: int
    input_len: LengthRange
    output_len: LengthRange
    prefix_len: int = 0  # of shared-prefix
    num_groups: int = 1
    num_turns: int = 1  # of multi-turn


def random_sessions(shape: Shape, maker: PromptMaker, sources: Sources) -> list[Session]:
    """Independent prompts that share nothing."""
    return [[_random_turn(shape, maker, sources)] for _ in range(shape.num_requests)]


def shared_prefix_sessions(shape: Shape, maker: PromptMaker, sources: Sources) -> list[Session]:
    """Prompts that begin with the prefix of their group; groups take turns."""
    prefixes = [maker.make(shape.prefix_len, sources.words) for _ in range(shape.num_groups)]
    sessions = random_sessions(shape, maker, sources)
    for index, (turn,) in enumerate(sessions):
        assert turn.prompt is not None
        turn.prompt = _join(prefixes[index % shape.num_groups], turn.prompt)
    return sessions


def multi_turn_sessions(shape: Shape, maker: PromptMaker, sources: Sources) -> list[Session]:
    """Conversations: every turn is sent with the whole conversation so far. The last one may be shorter than the
    others."""
    turns = [_random_turn(shape, maker, sources) for _ in range(shape.num_requests)]
    return [turns[begin : begin + shape.num_turns] for begin in range(0, len(turns), shape.num_turns)]


def _random_turn(shape: Shape, maker: PromptMaker, sources: Sources) -> Turn:
    input_len, output_len = shape.input_len.draw(sources.lengths), shape.output_len.draw(sources.lengths)
    return Turn(output_len=output_len, prompt=maker.make(input_len, sources.words))


def _join(prefix: Prompt, rest: Prompt) -> Prompt:
    if isinstance(prefix, str):
        assert isinstance(rest, str)
        return f"{prefix} {rest}"
    assert isinstance(rest, list)
    return prefix + rest


Line = TypeVar("Line", bound=msgspec.Struct)


class JsonLine(msgspec.Struct):
    """A line of a JSONL file; other fields are ignored."""

    prompt: str | list[int] | None = None
    messages: list[dict[str, Any]] | None = None
    output_len: int | None = None
    max_tokens: int | None = None  # another name for output_len


LINE_EXAMPLE = '{"prompt": "Hi", "output_len": 32}'


def read_jsonl(path: str, default_output_len: int) -> list[Session]:
    """A session for each line. RequestError with the line's number for an invalid line."""
    return [
        [turn_of_line(entry, where, default_output_len)] for where, entry in read_lines(path, JsonLine, LINE_EXAMPLE)
    ]


def read_lines(path: str, kind: type[Line], example: str) -> list[tuple[str, Line]]:
    """The lines of a JSONL file, each with words that say where it stands."""
    try:
        lines = Path(path).read_bytes().splitlines()
    except OSError as error:
        raise RequestError(path, f"can't be read ({error.strerror})") from None
    decode = msgspec.json.Decoder(kind).decode
    entries = []
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        try:
            entries.append((f"{path}, line {number}", decode(line)))
        except (msgspec.DecodeError, UnicodeDecodeError) as error:
            raise RequestError(f"{path}, line {number}", str(error)) from None
    if not entries:
        raise RequestError(path, "holds no requests", f"lines such as {example}")
    return entries


def turn_of_line(entry: JsonLine, where: str, default_output_len: int) -> Turn:
    if bool(entry.prompt) == bool(entry.messages):
        raise RequestError(where, "needs either a prompt or messages", f"such as {LINE_EXAMPLE}")
    output_len = entry.output_len if entry.output_len is not None else entry.max_tokens
    if output_len is not None and output_len < 1:
        raise RequestError(where, f"output_len {output_len} is out of range", "at least 1")
    return Turn(output_len=output_len or default_output_len, prompt=entry.prompt, messages=entry.messages)
