"""Reads tool calls written as JSON objects, {"name": …, "arguments": {…}}: one, several, or a list of them."""

from __future__ import annotations

from collections.abc import Collection

from ratoon.api.answer_parts.parts import PartSink
from ratoon.api.answer_parts.reading import (
    BLANKS,
    END,
    MalformedError,
    Reading,
    Source,
    copy_container,
    json_scalar,
    json_string,
    skip,
)

ARGUMENTS = ("arguments", "parameters")  # keys that models were trained on
SEPARATORS = BLANKS | frozenset("[],;")  # around the calls of a list or sequence


class CallInProgress:
    """A call while it is read. Arguments that come before the name are kept until it is known."""

    def __init__(self, sink: PartSink, known_names: Collection[str] | None) -> None:
        self._sink = sink
        self._known_names = known_names
        self._early: list[str] = []
        self.has_begun = False
        self.has_arguments = False

    def begin(self, name: str) -> None:
        if not name or (self._known_names is not None and name not in self._known_names):
            raise MalformedError
        self.has_begun = True
        self._sink.begin_call(name)
        self._sink.arguments("".join(self._early))

    def add_arguments(self, text: str) -> None:
        self.has_arguments = True
        if self.has_begun:
            self._sink.arguments(text)
        else:
            self._early.append(text)

    def end(self) -> None:
        if not self.has_begun:
            raise MalformedError
        if not self.has_arguments:
            self._sink.arguments("{}")


def read_calls(source: Source, sink: PartSink, known_names: Collection[str] | None) -> Reading[bool]:
    """Calls, one behind the other or in a list. False if there is none: then nothing was read. With `known_names`, an
    object with another name is not a call."""
    num_calls = 0
    while True:
        source.mark()
        char = yield from skip(source, SEPARATORS)
        if char != "{":
            if num_calls:
                source.give_back(char)
            else:
                source.rewind()
            return num_calls > 0
        call = CallInProgress(sink, known_names)
        try:
            yield from read_object(source, call)
        except MalformedError:
            if not call.has_begun:
                source.rewind()
            return num_calls > 0 or call.has_begun
        num_calls += 1


def read_call(source: Source, sink: PartSink) -> Reading[bool]:
    """One call. False if there is none: then nothing was read."""
    source.mark()
    call = CallInProgress(sink, None)
    try:
        if (yield from skip(source)) != "{":
            raise MalformedError
        yield from read_object(source, call)
    except MalformedError:
        if not call.has_begun:
            source.rewind()
    return call.has_begun


def read_object(source: Source, call: CallInProgress) -> Reading[None]:
    """The rest of a call behind its opening brace. MalformedError where it is no call, or breaks off."""
    char = yield from skip(source)
    while char == '"':
        key = yield from json_string(source)
        char = yield from skip(source)
        if char != ":":
            break
        char = yield from skip(source)
        yield from _read_member(source, call, key, char)
        char = yield from skip(source)
        if char == "}":
            call.end()
            return
        if char != ",":
            break
        char = yield from skip(source)
    source.give_back(char)
    raise MalformedError


def _read_member(source: Source, call: CallInProgress, key: str, first: str) -> Reading[None]:
    if key == "name" and not call.has_begun:
        if first != '"':
            raise MalformedError
        call.begin((yield from json_string(source)))
    elif key in ARGUMENTS and not call.has_arguments:
        yield from read_arguments(source, call, first)
    elif first == '"':
        yield from json_string(source)
    elif first in ("{", "["):
        yield from copy_container(source, first, lambda text: None)
    else:
        yield from json_scalar(source, first)


def read_arguments(source: Source, call: CallInProgress, first: str) -> Reading[None]:
    """`first` is the first character of the value."""
    if first in ("{", "["):
        yield from copy_container(source, first, call.add_arguments)
    elif first == '"':  # JSON inside of a string, as OpenAI's protocol has it
        call.add_arguments((yield from json_string(source)))
    elif first == END:
        raise MalformedError
    else:
        text = yield from json_scalar(source, first)
        call.add_arguments("{}" if text == "null" else text)
