"""Renders chat templates: the small Jinja programs that model files ship to turn messages into a prompt.

They run in Jinja's sandbox with the helpers that Hugging Face gives them, and nothing else. Choosing the template and
tokenising the result is the tokenizer's business.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from datetime import datetime
from functools import lru_cache
from typing import TYPE_CHECKING, Any, NoReturn

from ratoon.core.errors import RequestError

if TYPE_CHECKING:
    from jinja2 import Template
    from jinja2.sandbox import ImmutableSandboxedEnvironment

MESSAGE_FORM = 'expected a list of objects such as {"role": "user", "content": "Hello"}'


def render_chat_template(template: str, messages: Sequence[Mapping[str, Any]], variables: Mapping[str, Any]) -> str:
    """The prompt. Whatever goes wrong in the template is reported as a problem of the messages, which feed it."""
    import jinja2

    checked = check_messages(messages)
    try:
        return _compile(template).render(messages=checked, **variables)
    except jinja2.TemplateSyntaxError as error:
        raise RequestError("messages", f"the chat template is no valid Jinja: {error.message}") from error
    except (jinja2.TemplateError, TypeError, ValueError, LookupError, AttributeError, ArithmeticError) as error:
        raise RequestError("messages", f"the chat template refuses them: {error}") from error


def check_messages(messages: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """The messages as plain dicts with text content; a RequestError names the first that is wrong."""
    if isinstance(messages, (str, bytes, Mapping)) or not isinstance(messages, Sequence):
        raise RequestError("messages", f"{type(messages).__name__} is not a list", MESSAGE_FORM)
    if not messages:
        raise RequestError("messages", "is empty", MESSAGE_FORM)
    return [_check_message(f"messages[{index}]", message) for index, message in enumerate(messages)]


def _check_message(field: str, message: Mapping[str, Any]) -> dict[str, Any]:
    if not isinstance(message, Mapping):
        raise RequestError("messages", f"{field} is of type {type(message).__name__}", MESSAGE_FORM)
    if not isinstance(message.get("role"), str) or not message["role"]:
        raise RequestError("messages", f"{field} has no role", MESSAGE_FORM)
    content = message.get("content")
    if content is None and not message.get("tool_calls"):
        raise RequestError("messages", f"{field} has no content", MESSAGE_FORM)
    if isinstance(content, Sequence) and not isinstance(content, str):
        content = "\n".join(_part_text(field, part) for part in content)
    if content is not None and not isinstance(content, str):
        raise RequestError("messages", f"{field}.content is of type {type(content).__name__}", "expected text")
    return {**message, "content": content}


def _part_text(field: str, part: Any) -> str:
    """OpenAI's form of content in parts; templates of text models expect one string."""
    if isinstance(part, str):
        return part
    if isinstance(part, Mapping) and part.get("type") == "text" and isinstance(part.get("text"), str):
        return str(part["text"])
    kind = part.get("type") if isinstance(part, Mapping) else type(part).__name__
    raise RequestError("messages", f"{field}.content has a part of type {kind!r}", "this model takes text parts only")


@lru_cache(maxsize=32)
def _compile(template: str) -> Template:
    return _environment().from_string(template)


@lru_cache(maxsize=1)
def _environment() -> ImmutableSandboxedEnvironment:
    import jinja2
    from jinja2 import nodes
    from jinja2.ext import Extension, loopcontrols
    from jinja2.parser import Parser
    from jinja2.sandbox import ImmutableSandboxedEnvironment

    class GenerationBlock(Extension):
        """`{% generation %}` marks the assistant's words for training; here it only has to be let through."""

        tags = {"generation"}  # noqa: RUF012  (Jinja's own convention)

        def parse(self, parser: Parser) -> nodes.Node:
            line = next(parser.stream).lineno
            body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
            return nodes.Scope(body, lineno=line)

    def raise_exception(message: str) -> NoReturn:
        raise jinja2.TemplateError(message)

    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[GenerationBlock, loopcontrols]
    )
    environment.filters["tojson"] = _to_json
    environment.globals["raise_exception"] = raise_exception
    environment.globals["strftime_now"] = _strftime_now
    return environment


def _to_json(
    value: Any, ensure_ascii: bool = False, indent: int | None = None, separators: Any = None, sort_keys: bool = False
) -> str:
    """Jinja's own filter escapes HTML, which models have never seen."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _strftime_now(form: str) -> str:
    return datetime.now().strftime(form)
