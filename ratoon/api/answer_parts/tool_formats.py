"""The forms in which models write tool calls, by name; which one a chat template asks for.

A format reads the text behind the reasoning: content and calls. What looks like a call and is none is content.
"""

from __future__ import annotations

import secrets
import string
from collections.abc import Callable, Collection
from dataclasses import dataclass

from ratoon.api.answer_parts.calls import CallInProgress, read_arguments, read_call, read_calls
from ratoon.api.answer_parts.parts import PartSink
from ratoon.api.answer_parts.reading import (
    BLANKS,
    END,
    MalformedError,
    Reading,
    Source,
    opens_with,
    skip,
    until,
    until_call,
)
from ratoon.api.answer_parts.written_calls import FUNCTION, NAME, PARAMETER, read_python_calls, read_xml_call

CALL_ENDS = ("</tool_call>",)
BEFORE_CALL_END = BLANKS | {"}"}  # small models close too many braces
MISTRAL_ID_LENGTH = 9  # Mistral's templates refuse other ids


def openai_call_id() -> str:
    return f"call_{secrets.token_hex(12)}"


def mistral_call_id() -> str:
    return "".join(secrets.choice(string.ascii_letters + string.digits) for _ in range(MISTRAL_ID_LENGTH))


@dataclass(frozen=True, slots=True)
class CallForm:
    """How a call is written, for a grammar: head, name, middle, arguments, tail."""

    head: str = '{"name": '
    middle: str = ', "arguments": '
    tail: str = "}"
    quotes_name: bool = True
    opening: str = ""  # before the first call
    between: str = "\n"
    closing: str = ""  # behind the last one


@dataclass(frozen=True, slots=True)
class ToolFormat:
    name: str
    # The latter: the names of the request's tools, perhaps a mapping to the schemas of their parameters
    read: Callable[[Source, PartSink, Collection[str]], Reading[None]]
    form: CallForm
    marks: tuple[str, ...] = ()  # which must reach the text, even if they are special tokens
    new_call_id: Callable[[], str] = openai_call_id


def _read_hermes(source: Source, sink: PartSink, known_names: Collection[str]) -> Reading[None]:
    """<tool_call>{"name": …, "arguments": {…}}</tool_call>, anywhere in the text."""
    while (mark := (yield from until_call(source, ("<tool_call>",), sink.content))) is not None:
        if (yield from read_call(source, sink)):
            yield from opens_with(source, CALL_ENDS, BEFORE_CALL_END, may_be_cut=True)
        else:
            sink.content(mark)


def _read_mistral(source: Source, sink: PartSink, known_names: Collection[str]) -> Reading[None]:
    """[TOOL_CALLS][{"name": …, "arguments": {…}}, …], and the later form [TOOL_CALLS]name[ARGS]{…}."""
    while (mark := (yield from until_call(source, ("[TOOL_CALLS]",), sink.content))) is not None:
        is_read = yield from read_calls(source, sink, None)
        is_read = is_read or (yield from _read_named_call(source, sink))
        if not is_read:
            sink.content(mark)


def _read_named_call(source: Source, sink: PartSink) -> Reading[bool]:
    """name{…} or name[ARGS]{…}. False if there is none: then nothing was read."""
    source.mark()
    call = CallInProgress(sink, None)
    try:
        name, char = "", (yield from skip(source))
        while char in NAME and char != END:
            name += char
            char = yield from source.next()
        for expected in "[ARGS]" if char == "[" else "":
            if char != expected:
                raise MalformedError
            char = yield from source.next()
        if char in BLANKS:
            char = yield from skip(source)
        if char != "{":
            raise MalformedError
        call.begin(name)
        yield from read_arguments(source, call, char)
    except MalformedError:
        if not call.has_begun:
            source.rewind()
    return call.has_begun


def _read_llama3_json(source: Source, sink: PartSink, known_names: Collection[str]) -> Reading[None]:
    """{"name": …, "parameters": {…}}, several separated by semicolons: as the whole text, or behind <|python_tag|>."""
    yield from read_calls(source, sink, known_names)
    while (mark := (yield from until_call(source, ("<|python_tag|>",), sink.content))) is not None:
        if not (yield from read_calls(source, sink, None)):
            sink.content(mark)


def _read_qwen3_coder(source: Source, sink: PartSink, known_names: Collection[str]) -> Reading[None]:
    """<tool_call><function=NAME><parameter=KEY>VALUE</parameter>…</function></tool_call>, anywhere in the text, the
    outer mark missing at times; and the form of Hermes."""
    while (mark := (yield from until_call(source, ("<tool_call>", FUNCTION), sink.content))) is not None:
        source.mark()
        if mark == FUNCTION or (yield from opens_with(source, (FUNCTION,))):
            is_read = yield from read_xml_call(source, sink, known_names)
        else:
            is_read = yield from read_call(source, sink)
        if is_read:
            yield from opens_with(source, CALL_ENDS, BEFORE_CALL_END, may_be_cut=True)
        else:
            sink.content(mark)


def _read_pythonic(source: Source, sink: PartSink, known_names: Collection[str]) -> Reading[None]:
    """[name(key=value, …), …] as the whole text, or between marks; and the plain JSON form."""
    has_mark = yield from opens_with(source, (PYTHON_START,))
    is_read = yield from read_calls(source, sink, known_names)
    is_read = is_read or (yield from read_python_calls(source, sink, known_names))
    if is_read:
        yield from opens_with(source, (PYTHON_END,), may_be_cut=True)
    elif has_mark:
        sink.content(PYTHON_START)
    yield from until(source, (), sink.content)


def _read_json(source: Source, sink: PartSink, known_names: Collection[str]) -> Reading[None]:
    """The whole text is a call, {"name": …, "arguments": {…}}, or a list of them."""
    yield from read_calls(source, sink, known_names)
    yield from until(source, (), sink.content)


HERMES_FORM = CallForm(head='<tool_call>\n{"name": ', tail="}\n</tool_call>")
LLAMA3_FORM = CallForm(middle=', "parameters": ', between="; ")
MISTRAL_FORM = CallForm(opening="[TOOL_CALLS][", between=", ", closing="]")
MISTRAL_V11_FORM = CallForm(head="[TOOL_CALLS]", middle="[ARGS]", tail="", quotes_name=False, between="")
MISTRAL_MARKS = ("[TOOL_CALLS]", "[ARGS]")

HERMES = ToolFormat("hermes", _read_hermes, HERMES_FORM, ("<tool_call>", "</tool_call>"))
LLAMA3_JSON = ToolFormat("llama3_json", _read_llama3_json, LLAMA3_FORM, ("<|python_tag|>",))
MISTRAL = ToolFormat("mistral", _read_mistral, MISTRAL_FORM, MISTRAL_MARKS, mistral_call_id)
MISTRAL_V11 = ToolFormat("mistral_v11", _read_mistral, MISTRAL_V11_FORM, MISTRAL_MARKS, mistral_call_id)
PLAIN_JSON = ToolFormat("json", _read_json, CallForm())
# Calls that must be made are written as JSON, for which there are grammars; the parsers read both forms.
QWEN3_CODER = ToolFormat("qwen3_coder", _read_qwen3_coder, HERMES_FORM, ("<tool_call>", "</tool_call>"))
PYTHON_START, PYTHON_END = "<|python_start|>", "<|python_end|>"
PYTHONIC = ToolFormat(
    "pythonic", _read_pythonic, CallForm(between=", ", opening="[", closing="]"), (PYTHON_START, PYTHON_END)
)

TOOL_FORMATS = {
    made.name: made for made in (HERMES, QWEN3_CODER, LLAMA3_JSON, PYTHONIC, MISTRAL, MISTRAL_V11, PLAIN_JSON)
}


def tool_format_of_template(template: str | None) -> ToolFormat:
    """The form that a chat template writes calls in. Where it does not know tools, they are written into the messages
    in the form of Hermes (models/chat_template.py)."""
    text = template or ""
    if FUNCTION in text and PARAMETER in text:
        return QWEN3_CODER
    if PYTHON_START in text or "[func_name1(" in text:
        return PYTHONIC
    if "<tool_call>" in text:
        return HERMES
    if "[TOOL_CALLS]" in text:
        return MISTRAL_V11 if "[ARGS]" in text else MISTRAL
    if "<|python_tag|>" in text or '"parameters": dictionary of argument name' in text:
        return LLAMA3_JSON
    return PLAIN_JSON if "tools" in text else HERMES
