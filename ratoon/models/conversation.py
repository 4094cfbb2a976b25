"""Messages as chat templates expect them: checked, with known roles, text as content, and tool calls as objects.

Content with images or videos is a list of parts, without their data (media_parts.py). OpenAI's protocol differs in
places (`content: null`, arguments as JSON text, the role "developer"). HTTP and Python share this code. Rendering is in
chat_template.py.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping, Sequence
from typing import Any

from ratoon.core.errors import RequestError
from ratoon.core.json_extent import MAX_OTHER_VALUES, MAX_PARTS, ExtentLimit, find_excess
from ratoon.models.media_parts import TEXT, check_reads, kind_of

ARGUMENTS_LIMIT = ExtentLimit(MAX_PARTS, MAX_OTHER_VALUES)  # of one tool call
ROLES = ("system", "developer", "user", "assistant", "tool")
MESSAGE_FORM = 'expected a list of objects such as {"role": "user", "content": "Hello"}'
TOOL_CALL_FORM = 'expected {"type": "function", "function": {"name": "…", "arguments": "{…}"}}'
TOOL_FORM = 'expected a list of objects such as {"type": "function", "function": {"name": "…", "parameters": {…}}}'
MAX_SHOWN_ROLE = 64

Message = dict[str, Any]
Content = str | list[dict[str, str]] | None  # a list has parts {"type": "text", "text": …} and {"type": "image"}


def check_messages(
    messages: Sequence[Mapping[str, Any]], further_roles: Collection[str] = (), media: Collection[str] = ()
) -> list[Message]:
    """The messages as new, plain dicts; a RequestError names the first that is wrong. `further_roles` are those that
    the template names in addition to the usual ones, `media` the kinds of media that the model reads."""
    if isinstance(messages, (str, bytes, Mapping)) or not isinstance(messages, Sequence):
        raise RequestError("messages", f"{type(messages).__name__} is not a list", MESSAGE_FORM)
    if not messages:
        raise RequestError("messages", "is empty", MESSAGE_FORM)
    return [
        _check_message(f"messages[{index}]", message, further_roles, media) for index, message in enumerate(messages)
    ]


def check_tools(tools: Any) -> list[dict[str, Any]]:
    """The tools as plain dicts; a RequestError names the first that is wrong."""
    if isinstance(tools, (str, bytes, Mapping)) or not isinstance(tools, Sequence):
        raise RequestError("tools", f"{type(tools).__name__} is not a list", TOOL_FORM)
    for index, tool in enumerate(tools):
        if not isinstance(tool, Mapping):
            raise RequestError(f"tools[{index}]", f"is of type {type(tool).__name__}", TOOL_FORM)
    return [dict(tool) for tool in tools]


def _check_message(
    name: str, message: Mapping[str, Any], further_roles: Collection[str], media: Collection[str]
) -> Message:
    if not isinstance(message, (dict, Mapping)):  # dict first: the check for Mapping is slow
        raise RequestError(name, f"is of type {type(message).__name__}", MESSAGE_FORM)
    role = message.get("role")
    if not isinstance(role, str) or not role:
        raise RequestError(f"{name}.role", "is missing" if role is None else "is not text", MESSAGE_FORM)
    if role not in ROLES and role not in further_roles:
        shown = role if len(role) <= MAX_SHOWN_ROLE else role[:MAX_SHOWN_ROLE] + "…"
        expected = ", ".join([*ROLES, *sorted(set(further_roles).difference(ROLES))])
        raise RequestError(f"{name}.role", f"{shown!r} is no known role", f"expected one of {expected}")
    checked = {**message, "content": _check_content(name, message, media)}
    if role == "assistant" and message.get("tool_calls"):
        checked["tool_calls"] = _check_tool_calls(f"{name}.tool_calls", message["tool_calls"])
    return checked


def _check_content(name: str, message: Mapping[str, Any], media: Collection[str]) -> Content:
    content = message.get("content")
    if isinstance(content, str) or (content is None and message["role"] == "assistant" and message.get("tool_calls")):
        return content
    if content is None:
        raise RequestError(f"{name}.content", "is missing", MESSAGE_FORM)
    if not isinstance(content, Sequence) or isinstance(content, (bytes, bytearray)):
        raise RequestError(f"{name}.content", f"is of type {type(content).__name__}", "expected text")
    parts = [_check_part(f"{name}.content[{place}]", part, media) for place, part in enumerate(content)]
    if any(part["type"] != TEXT for part in parts):
        return parts
    return "\n".join(part["text"] for part in parts)


def _check_part(name: str, part: Any, media: Collection[str]) -> dict[str, str]:
    """OpenAI's form of content in parts."""
    if isinstance(part, str):
        return {"type": TEXT, "text": part}
    if isinstance(part, Mapping) and part.get("type") == TEXT:
        if isinstance(part.get("text"), str):
            return {"type": TEXT, "text": str(part["text"])}
        raise RequestError(f"{name}.text", "is missing, or not text", 'expected {"type": "text", "text": "…"}')
    found = kind_of(part)
    if found is not None:
        check_reads(name, found, media)
        return {"type": found}
    kind = part.get("type") if isinstance(part, Mapping) else type(part).__name__
    readable = ", ".join([TEXT, *media]) if media else "text"
    raise RequestError(name, f"is a part of type {kind!r}", f"this model takes {readable} parts only")


# ---- content that may be a list of parts ----


def with_text_before(text: str, content: Content) -> Content:
    return [{"type": TEXT, "text": text}, *content] if isinstance(content, list) else f"{text}{content or ''}"


def with_text_behind(content: Content, text: str) -> Content:
    return [*content, {"type": TEXT, "text": text}] if isinstance(content, list) else f"{content or ''}{text}"


def as_parts(content: Content) -> list[dict[str, str]]:
    if isinstance(content, list):
        return content
    return [{"type": TEXT, "text": content}] if content else []


def as_text(content: Content, placeholders: Mapping[str, str]) -> str | None:
    """The content as one string, with a placeholder for each image or video. Neighbouring texts have lines of their
    own."""
    if not isinstance(content, list):
        return content
    text, previous = "", ""
    for part in content:
        if part["type"] == TEXT:
            text += ("\n" if previous == TEXT else "") + part["text"]
        else:
            text += placeholders[part["type"]]
        previous = part["type"]
    return text


def _check_tool_calls(name: str, calls: Any) -> list[dict[str, Any]]:
    if not isinstance(calls, (list, tuple)):
        raise RequestError(name, "is not a list", f"a list; {TOOL_CALL_FORM}")
    return [_check_tool_call(f"{name}[{place}]", call) for place, call in enumerate(calls)]


def _check_tool_call(name: str, call: Any) -> dict[str, Any]:
    """Arguments are an object in templates, and JSON text in the protocol."""
    function = call.get("function") if isinstance(call, Mapping) else None
    if not isinstance(function, Mapping):
        raise RequestError(
            name if not isinstance(call, Mapping) else f"{name}.function", "is no object", TOOL_CALL_FORM
        )
    if not isinstance(function.get("name"), str) or not function["name"]:
        raise RequestError(f"{name}.function.name", "is missing, or not text", TOOL_CALL_FORM)
    arguments = function.get("arguments")
    if isinstance(arguments, str):
        excess = find_excess(arguments.encode("utf-8", "surrogatepass"), ARGUMENTS_LIMIT)
        if excess is not None:
            raise RequestError(f"{name}.function.arguments", f"holds more than {excess}", "shorter arguments")
        try:
            arguments = json.loads(arguments or "{}")
        except (ValueError, RecursionError):
            raise RequestError(f"{name}.function.arguments", "is not JSON", "an object as JSON text") from None
    if arguments is not None and not isinstance(arguments, Mapping):
        raise RequestError(f"{name}.function.arguments", "is not an object", "an object as JSON text")
    return {**call, "function": {**function, "arguments": dict(arguments or {})}}
