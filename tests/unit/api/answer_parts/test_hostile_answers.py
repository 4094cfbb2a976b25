"""Answers that were made to be slow to read: beginnings of calls without an end, in every form. The work grows as the
text does, and the text comes out whole."""

from __future__ import annotations

import time
from itertools import product
from math import inf

import pytest

from ratoon.api.answer_parts.parser import AnswerParser, parse_whole
from ratoon.api.answer_parts.parts import WholeAnswer
from ratoon.api.answer_parts.reading import MOST_READ_AGAIN, Reading, Source
from ratoon.api.answer_parts.reasoning_formats import REASONING_FORMATS
from ratoon.api.answer_parts.tool_formats import TOOL_FORMATS

TOOLS = {"f": {"properties": {"n": {"type": "integer"}}}}
MARKS = {
    "hermes": ["<tool_call>"],
    "qwen3_coder": ["<tool_call>", "<function=", "<tool_call><function=f>", "<tool_call><function=f><parameter=n>"],
    "llama3_json": ["", "<|python_tag|>"],
    "pythonic": ["", "<|python_start|>", "[", "[f(a="],
    "mistral": ["[TOOL_CALLS]"],
    "mistral_v11": ["[TOOL_CALLS]"],
    "json": [""],
}
# What follows the mark of a call, again and again
UNITS = [
    "{", '{"', '{"a":"', '{"a":[', '{"a":1,', '{"arguments":{', '{"arguments":"', '{"name":"f",',
    '{"name":"f","arguments":{', "[", " ", "\n", "}", "]", '"', "\\", "a", "f[ARGS]", "f[", "f{", "f(", "f(a=",
    "f(a=[", "f(a='", "f(a=1),", "1,", "<", "-", "</parameter>", "<parameter=a>", "</function>", "</tool_call>", "é",
]  # fmt: skip
CASES = [
    (name, before, unit)
    for name, marks in MARKS.items()
    for mark, tail in product(dict.fromkeys(["", *marks]), UNITS)
    for unit in [mark + tail]
    for before in (["", marks[-1] + '{"'] if not mark else [""])
]


def parser(name: str) -> AnswerParser:
    return AnswerParser(REASONING_FORMATS["qwen3"], TOOL_FORMATS[name], TOOLS)


def hostile(before: str, unit: str, length: int) -> str:
    return (before + unit * (length // len(unit) + 1))[:length]


def seconds_to_read(name: str, text: str) -> float:
    start = time.thread_time()
    parse_whole(parser(name), text)
    return time.thread_time() - start


def test_every_form_is_among_the_cases() -> None:
    assert MARKS.keys() == TOOL_FORMATS.keys()


@pytest.mark.slow
@pytest.mark.parametrize("name", MARKS)
def test_no_text_is_read_again_more_than_a_few_times(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    returned = 0
    rewind = Source.rewind

    def count(source: Source) -> None:
        nonlocal returned
        returned += len(source._recorded)
        rewind(source)

    monkeypatch.setattr(Source, "rewind", count)
    length = 1000
    monkeypatch.setattr("ratoon.api.answer_parts.reading.MOST_READ_AGAIN", 500)
    for form, before, unit in CASES:
        if form == name:
            returned = 0
            parse_whole(parser(name), hostile(before, unit, length))
            # The last rewind may go below what is left. A text of blanks is read by each of the attempts at its start.
            assert returned <= 500 + 5 * length, (before, unit)


LONG = [
    ("hermes", "", '<tool_call>{"a":"'),
    ("hermes", "", '<tool_call>{"arguments":{'),
    ("mistral", "", '[TOOL_CALLS]{"a":['),
    ("mistral", "", "[TOOL_CALLS]" + "f" * 20),
    ("llama3_json", "", '<|python_tag|>{"a":"'),
    ("qwen3_coder", "", '<tool_call>{"a":"'),
    ("qwen3_coder", "", "<function=f>"),
    ("qwen3_coder", "<tool_call><function=f><parameter=n>", "[1, "),
    ("pythonic", "[f(a=", "[1, "),
    ("pythonic", "", "[f(a=1), "),
    ("json", '{"arguments": [', "1, "),
    ("hermes", "x", " "),
    ("hermes", "", '<tool_call>{"name":"f","arguments":{}}</tool_call>'),
]


@pytest.mark.slow  # texts that are long enough to measure
@pytest.mark.parametrize(("name", "before", "unit"), LONG)
@pytest.mark.one_in(5)
def test_twice_the_text_takes_about_twice_the_time(name: str, before: str, unit: str) -> None:
    """A ratio of 4 is that of reading all of the text again for every part of it."""
    length = 40_000 + MOST_READ_AGAIN
    short = long = inf
    for _ in range(6):  # the shortest times count: a machine that is slow for a moment may spoil some
        short = min(short, seconds_to_read(name, hostile(before, unit, length)))
        long = min(long, seconds_to_read(name, hostile(before, unit, 2 * length)))
        if long < 3.2 * short + 0.02:
            return
    raise AssertionError(f"{short:.3f} s, and {long:.3f} s for twice the text")


def test_what_was_held_back_comes_at_once_when_the_text_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    """The end of a streamed answer is read on the event loop: what was held back is not read character by character."""
    reader, text = parser("hermes"), '<tool_call>{"arguments": {"a": "' + "x" * 20_000
    assert reader.push(text) == []
    num_read, read_next = 0, Source.next

    def count(source: Source) -> Reading[str]:
        nonlocal num_read
        num_read += 1
        return read_next(source)

    monkeypatch.setattr(Source, "next", count)
    answer = WholeAnswer()
    answer.add(reader.finish())
    assert (answer.content, answer.tool_calls) == (text, [])
    assert num_read < 100


@pytest.mark.parametrize("size", [1, 1000, 10**6])
def test_what_is_no_call_is_content_whole_and_in_order(size: int) -> None:
    text = hostile("Look: ", '<tool_call>{"a":"', 3 * MOST_READ_AGAIN)
    reader, answer = parser("hermes"), WholeAnswer()
    for start in range(0, len(text), size):
        answer.add(reader.push(text[start : start + size]))
    answer.add(reader.finish())
    assert (answer.content, answer.tool_calls) == (text, [])


def test_a_call_is_found_behind_much_that_is_none() -> None:
    text = '<tool_call>{"a": "' * 100 + '"}' + "x" * MOST_READ_AGAIN
    text += '<tool_call>{"name": "f", "arguments": {"n": 1}}</tool_call>'
    answer = parse_whole(parser("hermes"), text)
    assert [(call.name, call.arguments) for call in answer.tool_calls] == [("f", '{"n": 1}')]
