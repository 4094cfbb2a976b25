"""Chat templates: the helpers they get, and what is said of messages that they can't take."""

from __future__ import annotations

from typing import Any

import pytest

from ratoon.core.errors import RequestError
from ratoon.models import chat_template
from ratoon.models.chat_template import render_chat_template

MESSAGES = [{"role": "user", "content": "Hi"}]


def render(template: str, messages: Any = MESSAGES, **variables: Any) -> str:
    return render_chat_template(template, messages, variables)


def test_blocks_leave_no_whitespace_behind() -> None:
    template = (
        "{% for m in messages %}\n    {% if true %}\n[{{ m.role }}] {{ m['content'] }}\n    {% endif %}\n{% endfor %}"
    )
    assert render(template) == "[user] Hi\n"


def test_loops_may_break_and_continue() -> None:
    skip, stop = "{% if n == 2 %}{% continue %}{% endif %}", "{% if n > 4 %}{% break %}{% endif %}"
    template = "{% for n in range(9) %}" + skip + stop + "{{ n }}{% endfor %}"
    assert render(template) == "0134"


def test_json_is_not_escaped_for_html() -> None:
    assert render("{{ x | tojson }}", x={"a": "<b> & 'ü'"}) == '{"a": "<b> & \'ü\'"}'
    assert render("{{ x | tojson(indent=2) }}", x=[1]) == "[\n  1\n]"


def test_generation_blocks_are_let_through() -> None:
    assert render("a{% generation %}b{{ messages[0].content }}{% endgeneration %}c") == "abHic"


def test_today_can_be_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    class Clock:
        @staticmethod
        def now() -> Any:
            import datetime

            return datetime.datetime(2024, 7, 26)

    monkeypatch.setattr(chat_template, "datetime", Clock)
    assert render("{{ strftime_now('%d %b %Y') }}") == "26 Jul 2024"


def test_parts_of_text_become_one_string() -> None:
    content = [{"type": "text", "text": "one"}, "two"]
    assert render("{{ messages[0].content }}", [{"role": "user", "content": content}]) == "one\ntwo"


def test_an_assistant_that_only_calls_tools_needs_no_content() -> None:
    call = {"role": "assistant", "content": None, "tool_calls": [{"function": {"name": "look"}}]}
    assert render("{{ messages[0].tool_calls[0].function.name }}", [call]) == "look"


@pytest.mark.parametrize(
    ("messages", "message"),
    [
        ([], "messages: is empty"),
        ("Hi", "messages: str is not a list"),
        ({"role": "user"}, "messages: dict is not a list"),
        (["Hi"], r"messages\[0\]: is of type str"),
        ([{"content": "Hi"}], r"messages\[0\]: has no role; expected a list of objects such as"),
        ([*MESSAGES, {"role": "user"}], r"messages\[1\]: has no content"),
        ([{"role": "user", "content": 3}], r"messages\[0\].content: is of type int"),
        ([{"role": "user", "content": [{"type": "image_url"}]}], r"part of type 'image_url'; this model takes text"),
    ],
)
def test_wrong_messages_are_named(messages: Any, message: str) -> None:
    with pytest.raises(RequestError, match=message) as raised:
        render("{{ messages }}", messages)
    assert raised.value.field.startswith("messages")


@pytest.mark.parametrize(
    ("template", "message"),
    [
        ("{{ raise_exception('roles must alternate') }}", "the chat template refuses them: roles must alternate"),
        ("{% if %}", "no valid Jinja"),
        ("{{ messages[0].content + 3 }}", "refuses them: can only concatenate"),
        ("{{ missing.attribute }}", "refuses them: 'missing' is undefined"),
        ("{{ 1 / 0 }}", "refuses them: division by zero"),
        ("{{ ''.__class__.__mro__ }}", "refuses them: access to attribute '__class__'"),
        ("{{ messages.append(1) }}", "refuses them: "),
        ("{% for n in range(10**9) %}{% endfor %}", "refuses them: Range too big"),
    ],
)
def test_a_template_that_fails_is_the_requests_error(template: str, message: str) -> None:
    with pytest.raises(RequestError, match=message):
        render(template)


def test_the_callers_messages_stay_as_they_are() -> None:
    messages = [{"role": "user", "content": [{"type": "text", "text": "x"}]}]
    render("{{ messages[0].content }}", messages)
    assert messages == [{"role": "user", "content": [{"type": "text", "text": "x"}]}]
