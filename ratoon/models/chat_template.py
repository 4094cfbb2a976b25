"""Renders chat templates: the small Jinja programs that model files ship to turn messages into a prompt.

They run in a sandbox with limits (chat_sandbox/), with the helpers that Hugging Face gives them, and nothing else.
Choosing the template and tokenising the result is the tokenizer's business.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import datetime
from functools import lru_cache
from typing import TYPE_CHECKING, Any, NoReturn

from ratoon.core.errors import RequestError

if TYPE_CHECKING:
    from jinja2 import Template

    from ratoon.models.chat_sandbox.environment import GuardedEnvironment

MAX_DATE_FORMAT = 256
MAX_ERROR_CHARACTERS = 500
MESSAGE_FORM = 'expected a list of objects such as {"role": "user", "content": "Hello"}'


def render_chat_template(template: str, messages: Sequence[Mapping[str, Any]], variables: Mapping[str, Any]) -> str:
    """The prompt. A template that is broken or goes over a limit is at fault itself, else the messages that feed it."""
    from ratoon.models.chat_sandbox.limits import LimitReached

    checked = check_messages(messages)
    compiled = _compile(template)
    try:
        return _render(compiled, {**variables, "messages": checked})
    except LimitReached as error:
        raise RequestError("chat_template", str(error)) from error
    except (RecursionError, MemoryError) as error:
        raise RequestError("chat_template", "calls itself too often, or needs too much memory") from error
    except Exception as error:  # a foreign program: it can raise anything, and that is nobody else's business
        raise RequestError("messages", f"the chat template refuses them: {_shorten(error)}") from error


def check_messages(messages: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """The messages as plain dicts with text content; a RequestError names the first that is wrong."""
    if isinstance(messages, (str, bytes, Mapping)) or not isinstance(messages, Sequence):
        raise RequestError("messages", f"{type(messages).__name__} is not a list", MESSAGE_FORM)
    if not messages:
        raise RequestError("messages", "is empty", MESSAGE_FORM)
    return [_check_message(index, message) for index, message in enumerate(messages)]


def _check_message(index: int, message: Mapping[str, Any]) -> dict[str, Any]:
    if not isinstance(message, (dict, Mapping)):  # dict first: to ask for any Mapping is slow
        raise _wrong_message(index, f" is of type {type(message).__name__}")
    role, content = message.get("role"), message.get("content")
    if not isinstance(role, str) or not role:
        raise _wrong_message(index, " has no role")
    if isinstance(content, str) or (content is None and message.get("tool_calls")):
        return {**message, "content": content}
    if content is None:
        raise _wrong_message(index, " has no content")
    if not isinstance(content, Sequence):
        raise _wrong_message(index, f".content is of type {type(content).__name__}", "expected text")
    return {**message, "content": "\n".join(_part_text(index, part) for part in content)}


def _part_text(index: int, part: Any) -> str:
    """OpenAI's form of content in parts; templates of text models expect one string."""
    if isinstance(part, str):
        return part
    if isinstance(part, Mapping) and part.get("type") == "text" and isinstance(part.get("text"), str):
        return str(part["text"])
    kind = part.get("type") if isinstance(part, Mapping) else type(part).__name__
    raise _wrong_message(index, f".content has a part of type {kind!r}", "this model takes text parts only")


def _wrong_message(index: int, problem: str, expected: str = MESSAGE_FORM) -> RequestError:
    part, _, problem = problem.partition(" ")
    return RequestError(f"messages[{index}]{part}", problem, expected)


def _render(template: Template, variables: dict[str, Any]) -> str:
    from ratoon.models.chat_sandbox.limits import MAX_OUTPUT_CHARACTERS, LimitReached, new_budget

    with new_budget():
        pieces = list(template.generate(variables))
    if sum(map(len, pieces)) > MAX_OUTPUT_CHARACTERS:  # they may be one text many times over
        raise LimitReached(f"writes more than {MAX_OUTPUT_CHARACTERS} characters")
    return "".join(pieces)


@lru_cache(maxsize=32)
def _compile(text: str) -> Template:
    import jinja2

    from ratoon.models.chat_sandbox.limits import MAX_TEMPLATE_CHARACTERS, LimitReached

    if len(text) > MAX_TEMPLATE_CHARACTERS:
        limit = f"expected at most {MAX_TEMPLATE_CHARACTERS}"
        raise RequestError("chat_template", f"has {len(text)} characters", limit)
    try:
        return _environment().compile_template(text)
    except (jinja2.TemplateError, SyntaxError, ValueError) as error:  # the latter two from Python, for what Jinja makes
        raise RequestError("chat_template", f"is no valid Jinja: {_shorten(error)}") from error
    except LimitReached as error:
        raise RequestError("chat_template", str(error)) from error
    except (RecursionError, MemoryError) as error:
        raise RequestError("chat_template", "is nested too deep") from error


@lru_cache(maxsize=1)
def _environment() -> GuardedEnvironment:
    from ratoon.models.chat_sandbox.environment import GuardedEnvironment

    environment = GuardedEnvironment()
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = _strftime_now
    return environment


def _raise_exception(message: Any) -> NoReturn:
    import jinja2

    raise jinja2.TemplateError(message if isinstance(message, str) else type(message).__name__)


def _strftime_now(form: str) -> str:
    if len(form) > MAX_DATE_FORMAT:
        raise ValueError(f"a date format of {len(form)} characters is too long")
    return datetime.now().strftime(form)


def _shorten(error: Exception) -> str:
    text = str(error)
    return text if len(text) <= MAX_ERROR_CHARACTERS else text[:MAX_ERROR_CHARACTERS] + "…"
