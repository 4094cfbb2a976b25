"""Datasets: sessions of one or more turns, the same for the same seed.

A dataset names lengths and structure; the text itself comes from a PromptMaker, which depends on the server: token ids
of a wanted number, or words of about that number, both of common words, so that no prompt holds a special token.
Lengths and words have separate random sources: rounds of a run share the lengths, but no words that could be cached.
"""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any, NamedTuple, Protocol, TypeVar

import msgspec

from ratoon.core.errors import RequestError
from ratoon.core.prepared import prepared

Prompt = str | list[int]

# Common words, which most tokenizers know as one token each. A server is asked what it makes of them.
VOCABULARY = """\
about across after air almost also among another any area art away bank bear bed begin being better big black board
body both box bread brother build busy call capital care case catch cell center change child city clean close coast
color common copy corner could country cover cross current dance day deal death deep design differ distance doctor
door draw dress drop during early east eat effect eight electric end engine enter even event every example exercise
eye fact fall famous farm father feed few fight fill find finger fire fish five floor flower follow foot forest
forward free friend front full game gas general get give glass gold govern grass great ground grow guide half happen
hard have hear heat held here hill hold home horse hour how human hunt imagine include industry instant iron job jump
keep kind knew lake language last laugh lead leave length letter life light line listen live long lost love machine
make map market master material mean meat metal might milk mind miss moment month more most motion mouth much must
nation near need new night noise note notice number ocean office oil once only operate other over oxygen paint paper
part pass path pay perhaps person picture place plan planet play point port possible practice present pretty problem
product protect pull quart quick race rail raise rather read real record region repeat represent result ride ring
river rock room rope round rule safe salt sand say school score search seat seed segment self send sentence serve
several share sheet shine shoe shore should show sight silent similar since sister size skin sleep small smile soft
soldier some song sound space special speed spend spot spring stand start station steam step still stood store
straight stream stretch student subject such sugar suit sun support surface swim table take tall team tell ten test
that there thick think those thought three time together tool total toward track train tree trip truck try turn two
under until usual value very village voice wait wall war wash water way weather weight west when whether while whole
wide wild wind wing wire woman wood work would year young"""
WORDS = tuple(VOCABULARY.split())


class PromptMaker(Protocol):
    def make(self, num_tokens: int, source: random.Random) -> Prompt: ...


class TokenPrompts:
    """Prompts of token ids, drawn from those that the server itself makes of common words."""

    def __init__(self, token_ids: list[int]) -> None:
        self._token_ids = sorted(set(token_ids))

    def make(self, num_tokens: int, source: random.Random) -> list[int]:
        return source.choices(self._token_ids, k=num_tokens)


class TextPrompts:
    """Prompts of words, for servers and endpoints that take text alone."""

    def __init__(self, tokens_per_word: float) -> None:
        self._tokens_per_word = tokens_per_word

    def make(self, num_tokens: int, source: random.Random) -> str:
        return " ".join(source.choices(WORDS, k=max(1, round(num_tokens / self._tokens_per_word))))


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
    decode = msgspec.json.Decoder(prepared(kind)).decode
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
