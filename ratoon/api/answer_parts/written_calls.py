"""Reads tool calls that are not JSON: XML as Qwen3-Coder writes it, and Python as Llama 4 does.

Their arguments become JSON. In XML a value is text, and the tool's schema says whether it is a string; strings are
passed on while they are written, other values when they are complete.
"""

from __future__ import annotations

import ast
import json
import string
from collections.abc import Collection, Mapping
from typing import Any

from ratoon.api.answer_parts.calls import CallInProgress
from ratoon.api.answer_parts.parts import PartSink
from ratoon.api.answer_parts.reading import END, Emit, MalformedError, Reading, Source, opens_with, skip, until

NAME = frozenset(string.ascii_letters + string.digits + "_-.:/")
PYTHON_NAME = frozenset(string.ascii_letters + string.digits + "_.")
FUNCTION, PARAMETER = "<function=", "<parameter="
CONSTANTS = {"true": True, "false": False, "null": None}  # JSON's names, which some models write in Python
UNREADABLE = (SyntaxError, ValueError, RecursionError, MemoryError, OverflowError)


def read_name(source: Source, allowed: frozenset[str], end: str) -> Reading[str]:
    """A name and the character that ends it. MalformedError where another one does."""
    name, char = "", (yield from source.next())
    while char in allowed and char != END:
        name += char
        char = yield from source.next()
    if char != end or not name:
        source.give_back(char)
        raise MalformedError
    return name


# ---- XML ----


def read_xml_call(source: Source, sink: PartSink, known: Collection[str]) -> Reading[bool]:
    """NAME><parameter=KEY>VALUE</parameter>…</function>, behind its mark. False if it is none: then nothing was read
    since the source was marked. `known`: the names of tools, perhaps with the schemas of their parameters."""
    try:
        name = yield from read_name(source, NAME, ">")
    except MalformedError:
        source.rewind()
        return False
    call = CallInProgress(sink, None)
    call.begin(name)
    properties = _properties_of(known, name)
    separator = "{"
    while (yield from opens_with(source, (PARAMETER,))):
        pieces: list[str] = []
        if (yield from until(source, (">",), pieces.append)) is None:
            return True
        key = "".join(pieces)
        call.add_arguments(f"{separator}{json.dumps(key, ensure_ascii=False)}: ")
        if not (yield from _read_value(source, call.add_arguments, properties.get(key))):
            return True
        separator = ", "
    if not (yield from opens_with(source, ("</function>",))):
        char = yield from skip(source)
        if char == END:  # it breaks off, and so do its arguments
            return True
        source.give_back(char)
    call.add_arguments("}" if call.has_arguments else "{}")
    return True


def _read_value(source: Source, emit: Emit, schema: Any) -> Reading[bool]:
    """One line break at each end is not part of it. False: the text has ended inside of it."""
    is_text = not isinstance(schema, Mapping) or _is_string(schema)
    pieces: list[str] = []
    value = _WithoutBreaks(_escaping(emit) if is_text else pieces.append)
    if is_text:
        emit('"')
    if (yield from until(source, ("</parameter>",), value.add)) is None:
        return False
    emit('"' if is_text else _as_json("".join(pieces)))
    return True


def _escaping(emit: Emit) -> Emit:
    return lambda text: emit(json.dumps(text, ensure_ascii=False)[1:-1])


class _WithoutBreaks:
    """Passes text on without a line break at its start and one at its end."""

    def __init__(self, emit: Emit) -> None:
        self._emit = emit
        self._held = ""
        self._has_begun = False

    def add(self, text: str) -> None:
        if not text:
            return
        if not self._has_begun:
            self._has_begun, text = True, text.removeprefix("\n")
        text = self._held + text
        self._held = "\n" if text.endswith("\n") else ""
        self._emit(text.removesuffix("\n"))


def _properties_of(known: Collection[str], name: str) -> Mapping[str, Any]:
    schema = known.get(name) if isinstance(known, Mapping) else None
    properties = schema.get("properties") if isinstance(schema, Mapping) else None
    return properties if isinstance(properties, Mapping) else {}


def _is_string(schema: Mapping[str, Any]) -> bool:
    if "type" in schema:
        return schema["type"] == "string"
    return "enum" in schema and all(isinstance(value, str) for value in schema["enum"])


def _as_json(text: str) -> str:
    """A value that is not a string: JSON, or Python's True, False and None. What is neither is a string after all."""
    stripped = text.strip()
    try:
        return json.dumps(json.loads(stripped), ensure_ascii=False)
    except UNREADABLE:
        pass
    try:
        return json.dumps(_literal(ast.parse(stripped, mode="eval").body), ensure_ascii=False, allow_nan=False)
    except (*UNREADABLE, MalformedError):
        return json.dumps(text, ensure_ascii=False)


# ---- Python ----


def read_python_calls(source: Source, sink: PartSink, known: Collection[str]) -> Reading[bool]:
    """[name(key=value, …), …]. False if it is none: then nothing was read. A call has the name of a tool."""
    source.mark()
    call = None
    try:
        if (yield from skip(source)) != "[":
            raise MalformedError
        while True:
            char = yield from skip(source)
            source.give_back(char)
            name = yield from read_name(source, PYTHON_NAME, "(")
            if name not in known:
                raise MalformedError
            call = CallInProgress(sink, None)
            call.begin(name)
            yield from _read_keywords(source, call)
            char = yield from skip(source)
            if char == "]":
                return True
            if char != ",":
                source.give_back(char)
                raise MalformedError
    except MalformedError:
        if call is None:
            source.rewind()
    return call is not None


def _read_keywords(source: Source, call: CallInProgress) -> Reading[None]:
    """Reads keywords up to the closing parenthesis."""
    separator, char = "{", (yield from skip(source))
    while char != ")":
        source.give_back(char)
        key = (yield from _text_up_to(source, "=")).strip()
        if not key.isidentifier():
            raise MalformedError
        value = yield from _text_up_to(source, ",)")
        call.add_arguments(f"{separator}{json.dumps(key, ensure_ascii=False)}: {_python_as_json(value)}")
        separator, char = ", ", (yield from source.next())
        if char == ",":
            char = yield from skip(source)
    call.add_arguments("}" if call.has_arguments else "{}")


def _text_up_to(source: Source, ends: str) -> Reading[str]:
    """Python's text up to one of these characters, outside of brackets and strings. An end of a value is not read."""
    text: list[str] = []
    depth, quote, is_escaped = 0, "", False
    while True:
        char = yield from source.next()
        if char == END:
            raise MalformedError
        if quote:
            if char == quote and not is_escaped:
                quote = ""
            is_escaped = char == "\\" and not is_escaped
        elif depth == 0 and char in ends:
            if char != "=":
                source.give_back(char)
            return "".join(text)
        elif char in "\"'":
            quote = char
        elif char in "([{":
            depth += 1
        elif char in ")]}":
            depth -= 1
            if depth < 0:
                source.give_back(char)
                raise MalformedError
        text.append(char)


def _python_as_json(text: str) -> str:
    try:
        value = _literal(ast.parse(text.strip(), mode="eval").body)
        return json.dumps(value, ensure_ascii=False, allow_nan=False)
    except UNREADABLE:
        raise MalformedError from None


def _literal(node: ast.expr) -> Any:
    match node:
        case ast.Constant(value) if value is None or isinstance(value, str | int | float):
            return value
        case ast.Name(id) if id in CONSTANTS:
            return CONSTANTS[id]
        case ast.UnaryOp(ast.USub(), ast.Constant(int() | float() as number)) if not isinstance(number, bool):
            return -number
        case ast.List(elements) | ast.Tuple(elements) | ast.Set(elements):
            return [_literal(element) for element in elements]
        case ast.Dict(keys, values):
            return {_key(key): _literal(value) for key, value in zip(keys, values)}
    raise MalformedError


def _key(node: ast.expr | None) -> str:
    """Returns the key of a dict's entry; `**` has none."""
    if isinstance(node, ast.Constant):
        return str(node.value)
    raise MalformedError
