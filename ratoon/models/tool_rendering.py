"""Tools for chat templates that do not support them: written into messages, in the form of Hermes.

Signatures are in the system message, a call in the assistant's text, a result in a user's message. Models not trained
on tools may still follow that, and no part of a request is dropped silently.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from ratoon.models.conversation import Message

TOOLS_MARK = "<tools>"
INSTRUCTIONS = """# Tools

You may call one or more functions to assist with the user query.

You are provided with function signatures within <tools></tools> XML tags:
<tools>
{signatures}
</tools>

For each function call, return a JSON object with the function name and its arguments within <tool_call></tool_call> XML tags:
<tool_call>
{{"name": <function-name>, "arguments": <arguments-object>}}
</tool_call>"""  # noqa: E501


def with_tools(messages: Sequence[Message], tools: Sequence[Mapping[str, Any]], has_system: bool) -> list[Message]:
    """The signatures in the system message; where a template has none, in front of the first message."""
    text = INSTRUCTIONS.format(signatures="\n".join(_json(tool) for tool in tools))
    first = messages[0]
    if first["role"] == "system":
        return [{**first, "content": f"{first['content']}\n\n{text}"}, *messages[1:]]
    if has_system:
        return [{"role": "system", "content": text}, *messages]
    return [{**first, "content": f"{text}\n\n{first['content'] or ''}"}, *messages[1:]]


def with_calls_as_text(messages: Sequence[Message]) -> list[Message]:
    return [_call_as_text(message) if _has_calls(message) else message for message in messages]


def with_results_of_user(messages: Sequence[Message]) -> list[Message]:
    """Consecutive results become one message, for templates in which turns alternate."""
    made: list[Message] = []
    previous = None
    for message in messages:
        if message["role"] != "tool":
            made.append(message)
        else:
            text = f"<tool_response>\n{message['content']}\n</tool_response>"
            if previous == "tool":
                made[-1] = {"role": "user", "content": f"{made[-1]['content']}\n{text}"}
            else:
                made.append({"role": "user", "content": text})
        previous = message["role"]
    return made


def _has_calls(message: Message) -> bool:
    return message["role"] == "assistant" and bool(message.get("tool_calls"))


def _call_as_text(message: Message) -> Message:
    functions = [call["function"] for call in message["tool_calls"]]
    calls = [
        f"<tool_call>\n{_json({'name': function['name'], 'arguments': function['arguments']})}\n</tool_call>"
        for function in functions
    ]
    rest = {name: value for name, value in message.items() if name != "tool_calls"}
    return {**rest, "content": "\n".join([*([message["content"]] if message["content"] else []), *calls])}


def _json(value: Any) -> str:
    return json.dumps(
        value, ensure_ascii=False, default=lambda other: dict(other) if isinstance(other, Mapping) else str(other)
    )
