"""Renders chat templates: the small Jinja programs that model files ship to turn messages into a prompt.

They run in Jinja's sandbox (template_sandbox.py). Tools that a template does not support are written into its messages
(below), and so are placeholders of images. The tokenizer chooses the template and the process that renders it.
"""

from __future__ import annotations

import json
import re
import secrets
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING, Any, NamedTuple

from ratoon.core.errors import RequestError
from ratoon.models.conversation import (
    TEXT,
    Content,
    Message,
    as_parts,
    as_text,
    check_messages,
    with_text_before,
    with_text_behind,
)

if TYPE_CHECKING:
    from ratoon.models.template_sandbox import CompiledTemplate

MAX_ERROR_CHARACTERS = 500
PROBE = "c2f6a1e8-probe"  # a text that occurs in no template
NO_MEDIA: Mapping[str, str] = {}
UNDEFINED = re.compile(r"'([^']*)' is undefined|has no (?:attribute|element) '?([^']*)'?")


class TrustedTemplate(str):
    """A template that the operator chose, explicitly or with the model. Others run in a child process."""


@dataclass(frozen=True, slots=True)
class RenderedChat:
    text: str
    notes: tuple[str, ...] = ()  # what was written in another form, because the template does not support it


def render_chat_template(template: str, messages: Sequence[Mapping[str, Any]], variables: Mapping[str, Any]) -> str:
    """The prompt alone."""
    return render_chat(template, messages, variables).text


def render_chat(
    template: str,
    messages: Sequence[Mapping[str, Any]],
    variables: Mapping[str, Any],
    *,
    continue_final_message: bool = False,
    placeholders: Mapping[str, str] = NO_MEDIA,
) -> RenderedChat:
    """The prompt. RequestError names the template if it is broken or exceeds a limit, otherwise the messages.

    With `continue_final_message` the prompt ends right after the text of the last message, which is the assistant's.
    `placeholders`: by kind of media that the model reads, what stands for it where the template writes nothing itself.
    """
    compiled = _compile(template)
    checked = check_messages(messages, compiled.roles, placeholders)
    mark = ""
    if continue_final_message:
        mark = f"end-{secrets.token_hex(8)}"
        checked[-1] = _with_mark(checked, mark)
    special = tuple((name, value) for name, value in variables.items() if name.endswith("_token"))
    form = _content_form(template, special, tuple(placeholders)) if placeholders else TEXTS
    fitted, notes = _fit_to_template(template, compiled, checked, variables, special, form)
    fitted = [{**one, "content": form.fit(one["content"], placeholders)} for one in fitted]
    text = _render_checked(compiled, fitted, variables)
    if variables.get("tools") and "tools" not in compiled.read and TOOLS_MARK not in text:
        raise RequestError("tools", "the chat template has no place for them", "leave them out")
    return RenderedChat(_cut_behind_message(text, mark) if mark else text, notes)


def _with_mark(messages: list[Message], mark: str) -> Message:
    """The last message with a mark at its end. The space after it shows whether the template trims texts."""
    last, name = messages[-1], f"messages[{len(messages) - 1}]"
    if last["role"] != "assistant":
        expected = "a last message of the role assistant"
        raise RequestError(f"{name}.role", f"{last['role']!r} is not continued by continue_final_message", expected)
    if last.get("tool_calls"):
        raise RequestError(f"{name}.tool_calls", "is complete: there is no text to continue", "content alone")
    return {**last, "content": with_text_behind(last["content"], f"{mark} ")}


def _cut_behind_message(text: str, mark: str) -> str:
    """Cuts the text behind the message that is continued. As in transformers, if the template trims texts, the
    continued one is trimmed too."""
    place = text.rfind(mark)
    if place < 0:
        problem = "the chat template does not write the last message as it is, so it can't be continued"
        raise RequestError("continue_final_message", problem, "leave it out")
    return text[:place] if text.startswith(f"{mark} ", place) else text[:place].rstrip()


class ContentForm(NamedTuple):
    """The form in which a template reads the content of messages."""

    needs_parts: bool  # it writes lists of parts only, and nothing for a plain text
    writes: tuple[str, ...] = ()  # the kinds of media that it writes a placeholder for

    def fit(self, content: Content, placeholders: Mapping[str, str]) -> Content:
        if content is None or (isinstance(content, str) and not self.needs_parts):
            return content
        parts = as_parts(content)
        if not self.needs_parts and not any(part["type"] in self.writes for part in parts):
            return as_text(content, placeholders)
        return [
            part if part["type"] in (TEXT, *self.writes) else {"type": TEXT, "text": placeholders[part["type"]]}
            for part in parts
        ]


TEXTS = ContentForm(needs_parts=False)
WRITTEN_PROBE = re.compile(rf"(?<!['\"]){PROBE}(?!['\"])")  # not as a part of a printed list


@lru_cache(maxsize=64)
def _content_form(template: str, special_tokens: tuple[tuple[str, Any], ...], media: tuple[str, ...]) -> ContentForm:
    """Finds by trial which contents a template writes."""

    def write(content: Any) -> str:
        try:
            messages = [{"role": "user", "content": content}]
            return _compile(template).render({**dict(special_tokens), "messages": messages})
        except Exception:  # it refuses the content, or fails on it
            return ""

    text_part = {"type": TEXT, "text": PROBE}
    of_parts = write([text_part])
    if WRITTEN_PROBE.search(of_parts) is None:
        return TEXTS
    written = tuple(kind for kind in media if write([{"type": kind}, text_part]) not in ("", of_parts))
    return ContentForm(needs_parts=PROBE not in write(PROBE), writes=written)


def _fit_to_template(
    template: str,
    compiled: CompiledTemplate,
    messages: list[Message],
    variables: Mapping[str, Any],
    special: tuple[tuple[str, Any], ...],
    form: ContentForm,
) -> tuple[list[Message], tuple[str, ...]]:
    """The messages in a form that this template supports, and notes on what was rewritten."""
    notes: list[str] = []
    if "developer" not in compiled.roles:
        messages = [{**one, "role": "system"} if one["role"] == "developer" else one for one in messages]
    if "tool_calls" not in compiled.read and any(one.get("tool_calls") for one in messages):
        messages = with_calls_as_text(messages)
        notes.append("the chat template does not know tool calls: they are written as text")
    has_results = any(one["role"] == "tool" for one in messages)
    if has_results and "tool" not in compiled.roles and not _writes_role(template, special, "tool", form):
        messages = with_results_of_user(messages)
        notes.append("the chat template does not know the role tool: its messages are written as the user's")
    tools = variables.get("tools")
    if tools and "tools" not in compiled.read:
        messages = with_tools(messages, tools, has_system=_writes_role(template, special, "system", form))
        notes.append("the chat template does not know tools: they are written into the system message")
    return messages, tuple(notes)


@lru_cache(maxsize=64)
def _writes_role(template: str, special_tokens: tuple[tuple[str, Any], ...], role: str, form: ContentForm) -> bool:
    """Whether a message of this role appears in the prompt; templates drop or refuse unknown roles."""

    def say(role: str, text: str) -> Message:
        return {"role": role, "content": form.fit(text, NO_MEDIA)}

    message, user = say(role, PROBE), say("user", "Hello")
    chat = [message, user] if role == "system" else [user, say("assistant", "Hello"), message]
    try:
        return PROBE in _compile(template).render({**dict(special_tokens), "messages": chat})
    except Exception:  # it refuses the role, or fails on it
        return False


def _render_checked(compiled: CompiledTemplate, messages: list[Message], variables: Mapping[str, Any]) -> str:
    from jinja2 import TemplateError

    from ratoon.models.template_sandbox import LimitReached, check_input_size

    known = {**variables, "messages": messages}
    try:
        check_input_size(known)
    except LimitReached as error:
        raise RequestError("messages", str(error), "a shorter conversation") from error
    try:
        return compiled.render(known)
    except LimitReached as error:
        raise RequestError("chat_template", str(error)) from error
    except RecursionError as error:
        raise RequestError("chat_template", "calls itself too often") from error
    except MemoryError as error:
        raise RequestError("chat_template", "needs too much memory") from error
    except Exception as error:  # a template can raise anything, and only its request may fail
        if any(message["content"] is None for message in messages):  # it supports tool calls, but requires text
            filled = [{**message, "content": message["content"] or ""} for message in messages]
            return _render_checked(compiled, filled, variables)
        if type(error) is TemplateError:  # by raise_exception: the message is the template author's
            raise RequestError("messages", f"the chat template refuses them: {_shorten(str(error))}") from error
        raise RequestError("messages", f"the chat template fails on them{_explain(error)}") from error


def _explain(error: Exception) -> str:
    """Says where and why a template failed, without internals of the renderer."""
    from jinja2.exceptions import SecurityError, UndefinedError

    place, trace = "", error.__traceback__
    while trace is not None:
        if trace.tb_frame.f_code.co_filename == "<template>":
            place = f" in line {trace.tb_lineno}"
        trace = trace.tb_next
    if isinstance(error, UndefinedError):
        found = UNDEFINED.search(str(error))
        name = _shorten(found[1] or found[2]) if found else ""
        return f"{place}: {name!r} is not there" if name else f"{place}: something is not there"
    if isinstance(error, SecurityError):
        return f"{place}: it does what a template may not do"
    if isinstance(error, ZeroDivisionError):
        return f"{place}: it divides by zero"
    return f"{place}: it can't work with what they hold"


def _compile(text: str) -> CompiledTemplate:
    import jinja2

    from ratoon.models.template_sandbox import MAX_TEMPLATE_CHARACTERS, compile_template

    if len(text) > MAX_TEMPLATE_CHARACTERS:
        limit = f"expected at most {MAX_TEMPLATE_CHARACTERS}"
        raise RequestError("chat_template", f"has {len(text)} characters", limit)
    try:
        return compile_template(text)
    except jinja2.TemplateSyntaxError as error:
        problem = f"is no valid template: line {error.lineno}: {_shorten(error.message or '')}"
        raise RequestError("chat_template", problem, "Jinja, as model files have it") from error
    except (jinja2.TemplateError, SyntaxError, ValueError) as error:  # the latter two from Python
        raise RequestError("chat_template", "is no valid template", "Jinja, as model files have it") from error
    except (RecursionError, MemoryError) as error:
        raise RequestError("chat_template", "is nested too deep") from error


def _shorten(text: str) -> str:
    return text if len(text) <= MAX_ERROR_CHARACTERS else text[:MAX_ERROR_CHARACTERS] + "…"


# ---- tools ----

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
        return [{**first, "content": with_text_behind(first["content"], f"\n\n{text}")}, *messages[1:]]
    if has_system:
        return [{"role": "system", "content": text}, *messages]
    return [{**first, "content": with_text_before(f"{text}\n\n", first["content"])}, *messages[1:]]


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
            content = with_text_behind(with_text_before("<tool_response>\n", message["content"]), "\n</tool_response>")
            if previous == "tool":
                made[-1] = {"role": "user", "content": _joined(made[-1]["content"], content)}
            else:
                made.append({"role": "user", "content": content})
        previous = message["role"]
    return made


def _joined(first: Content, second: Content) -> Content:
    if isinstance(first, str) and isinstance(second, str):
        return f"{first}\n{second}"
    return [*as_parts(with_text_behind(first, "\n")), *as_parts(second)]


def _has_calls(message: Message) -> bool:
    return message["role"] == "assistant" and bool(message.get("tool_calls"))


def _call_as_text(message: Message) -> Message:
    functions = [call["function"] for call in message["tool_calls"]]
    calls = [
        f"<tool_call>\n{_json({'name': function['name'], 'arguments': function['arguments']})}\n</tool_call>"
        for function in functions
    ]
    rest = {name: value for name, value in message.items() if name != "tool_calls"}
    content = message["content"]
    return {**rest, "content": with_text_behind(content, ("\n" if content else "") + "\n".join(calls))}


def _json(value: Any) -> str:
    return json.dumps(
        value, ensure_ascii=False, default=lambda other: dict(other) if isinstance(other, Mapping) else str(other)
    )
