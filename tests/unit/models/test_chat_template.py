"""Chat templates: the helpers they get, and what is said of messages that they can't take."""

from __future__ import annotations

from typing import Any

import pytest

from ratoon.core.errors import RequestError
from ratoon.models import template_sandbox
from ratoon.models.chat_template import render_chat, render_chat_template

MESSAGES = [{"role": "user", "content": "Hi"}]
TOOL = {"type": "function", "function": {"name": "look", "parameters": {}}}
CHATML = "{% for m in messages %}{{ '<' + m['role'] + '>' + m['content'] + '\n' }}{% endfor %}"
TWO_ROLES = """{% for m in messages %}{% if (m.role == 'user') != (loop.index0 % 2 == 0) %}
{{ raise_exception('roles must alternate') }}{% endif %}{{ '<' + m.role + '>' + m.content }}
{% endfor %}"""


def calling(arguments: str, content: str | None = None) -> dict[str, Any]:
    function = {"name": "look", "arguments": arguments}
    return {"role": "assistant", "content": content, "tool_calls": [{"type": "function", "function": function}]}


CALL = calling('{"at": "sea"}')
RESULT = {"role": "tool", "tool_call_id": "1", "content": "blue"}


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

    monkeypatch.setattr(template_sandbox, "datetime", Clock)
    assert render("{{ strftime_now('%d %b %Y') }}") == "26 Jul 2024"


def test_parts_of_text_become_one_string() -> None:
    content = [{"type": "text", "text": "one"}, "two"]
    assert render("{{ messages[0].content }}", [{"role": "user", "content": content}]) == "one\ntwo"


def test_the_arguments_of_a_call_are_an_object_in_the_template() -> None:
    assert render("{{ messages[0].tool_calls[0].function.arguments.at }}", [CALL]) == "sea"
    assert calling('{"at": "sea"}') == CALL  # the caller's own stay as they are


def test_a_template_that_knows_tool_calls_sees_that_there_is_no_content() -> None:
    template = "{% if messages[0].content is none %}{{ messages[0].tool_calls | length }}{% endif %}"
    assert render(template, [CALL]) == "1"
    careless = "{{ messages[0].content + 'x' }}{{ messages[0].tool_calls | length }}"
    assert render(careless, [CALL]) == "x1"


def test_calls_are_text_where_the_template_does_not_know_them() -> None:
    rendered = render_chat(CHATML, [*MESSAGES, CALL, RESULT], {})
    call = '<tool_call>\n{"name": "look", "arguments": {"at": "sea"}}\n</tool_call>'
    assert rendered.text == f"<user>Hi\n<assistant>{call}\n<tool>blue\n"
    assert rendered.notes == ("the chat template does not know tool calls: they are written as text",)
    assert f"<assistant>Wait.\n{call}\n" in render(CHATML, [calling('{"at": "sea"}', "Wait.")])


def test_results_are_the_users_where_the_template_does_not_know_the_role() -> None:
    rendered = render_chat(TWO_ROLES, [*MESSAGES, CALL, RESULT, {**RESULT, "content": "grey"}], {})
    both = "<tool_response>\nblue\n</tool_response>\n<tool_response>\ngrey\n</tool_response>"
    assert rendered.text.endswith(f"<user>{both}\n")
    assert any("the role tool" in note for note in rendered.notes)
    assert (
        render("{% for m in messages %}{% if m.role == 'tool' %}{{ m.content }}{% endif %}{% endfor %}", [RESULT])
        == "blue"
    )


def test_tools_are_in_the_system_message_where_the_template_does_not_know_them() -> None:
    rendered = render_chat(CHATML, MESSAGES, {"tools": [TOOL]})
    assert rendered.text.startswith("<system># Tools") and rendered.text.endswith("\n<user>Hi\n")
    assert '{"type": "function", "function": {"name": "look", "parameters": {}}}' in rendered.text
    assert any("does not know tools" in note for note in rendered.notes)
    behind = render(CHATML, [{"role": "system", "content": "Be brief."}, *MESSAGES], tools=[TOOL])
    assert behind.startswith("<system>Be brief.\n\n# Tools")
    without_system = render(TWO_ROLES, MESSAGES, tools=[TOOL])
    assert without_system.startswith("<user># Tools") and without_system.endswith("</tool_call>\n\nHi\n")
    known = render_chat("{{ tools | length }}", MESSAGES, {"tools": [TOOL]})
    assert (known.text, known.notes) == ("1", ())


def test_tools_that_no_template_can_write_are_refused() -> None:
    with pytest.raises(RequestError, match="tools: the chat template has no place for them"):
        render("always the same", tools=[TOOL])


def test_a_role_that_the_template_names_is_known() -> None:
    template = "{% for m in messages %}{% if m['role'] in ['tool', 'ipython'] %}{{ m.content }}{% endif %}{% endfor %}"
    assert render(template, [{"role": "ipython", "content": "4"}]) == "4"
    with pytest.raises(RequestError, match=r"messages\[0\].role: 'other' is no known role; .*, tool, ipython"):
        render(template, [{"role": "other", "content": "4"}])


def test_the_developer_is_the_system_where_the_template_does_not_name_that_role() -> None:
    message = {"role": "developer", "content": "Be brief."}
    assert render("{{ messages[0].role }}", [message]) == "system"
    assert render("{% if messages[0].role == 'developer' %}named{% endif %}", [message]) == "named"


@pytest.mark.parametrize(
    ("template", "content", "text"),
    [
        (CHATML, "The sea is ", "<user>Hi\n<assistant>The sea is "),
        (CHATML, "", "<user>Hi\n<assistant>"),
        (CHATML.replace("m['content']", "m['content'] | trim"), "The sea is ", "<user>Hi\n<assistant>The sea is"),
        ("{{ messages[1].content }}<end>{% if add_generation_prompt %}<a>{% endif %}", "Yes", "Yes"),
    ],
)
def test_a_final_message_is_continued_right_behind_its_text(template: str, content: str, text: str) -> None:
    messages = [*MESSAGES, {"role": "assistant", "content": content}]
    assert render_chat(template, messages, {}, continue_final_message=True).text == text


@pytest.mark.parametrize(
    ("template", "messages", "message"),
    [
        (CHATML, MESSAGES, r"messages\[0\].role: 'user' is not continued"),
        (CHATML, [*MESSAGES, CALL], r"messages\[1\].tool_calls: is complete"),
        (
            "{{ messages[0].content }}",
            [*MESSAGES, {"role": "assistant", "content": "a"}],
            "continue_final_message: the ch",
        ),
    ],
)
def test_what_can_not_be_continued_is_refused(template: str, messages: Any, message: str) -> None:
    with pytest.raises(RequestError, match=message):
        render_chat(template, messages, {}, continue_final_message=True)


@pytest.mark.parametrize(
    ("messages", "message"),
    [
        ([], "messages: is empty"),
        ("Hi", "messages: str is not a list"),
        ({"role": "user"}, "messages: dict is not a list"),
        (["Hi"], r"messages\[0\]: is of type str"),
        ([{"content": "Hi"}], r"messages\[0\].role: is missing; expected a list of objects such as"),
        ([{"role": 5, "content": "Hi"}], r"messages\[0\].role: is not text"),
        (
            [{"role": "usr", "content": "Hi"}],
            r"\[0\].role: 'usr' is no known role; expected one of system, developer, ",
        ),
        ([*MESSAGES, {"role": "user"}], r"messages\[1\].content: is missing"),
        ([{"role": "assistant", "content": None}], r"messages\[0\].content: is missing"),
        ([{"role": "user", "content": None, "tool_calls": [1]}], r"messages\[0\].content: is missing"),
        ([{"role": "user", "content": 3}], r"messages\[0\].content: is of type int"),
        (
            [{"role": "user", "content": ["a", {"type": "image_url"}]}],
            r"content\[1\]: is an image; this model reads text only",
        ),
        ([{"role": "user", "content": [{"type": "text"}]}], r"messages\[0\].content\[0\].text: is missing"),
        ([{**CALL, "tool_calls": 5}], r"messages\[0\].tool_calls: is not a list"),
        ([{**CALL, "tool_calls": [5]}], r"messages\[0\].tool_calls\[0\]: is no object"),
        ([{**CALL, "tool_calls": [{"id": "1"}]}], r"tool_calls\[0\].function: is no object"),
        ([{**CALL, "tool_calls": [{"function": {}}]}], r"tool_calls\[0\].function.name: is missing"),
        ([calling("{")], r"messages\[0\].tool_calls\[0\].function.arguments: is not JSON"),
        ([calling("[5]")], r"messages\[0\].tool_calls\[0\].function.arguments: is not an object"),
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
        ("{% if %}", "chat_template: is no valid template: line 1: Expected an expression"),
        ("{{ messages[0].content + 3 }}", "fails on them in line 1: it can't work with what they hold"),
        ("\n\n{{ missing.attribute }}", "fails on them in line 3: 'missing' is not there"),
        ("{{ messages[0].other.more }}", "fails on them in line 1: 'other' is not there"),
        ("{{ 1 / 0 }}", "fails on them in line 1: it divides by zero"),
        ("{{ ''.__class__.__mro__ }}", "fails on them in line 1: it does what a template may not do"),
        ("{{ messages.append(1) }}", "fails on them in line 1: "),
        ("{% for n in range(10**9) %}{% endfor %}", "fails on them in line 1: "),
    ],
)
def test_a_template_that_fails_is_the_requests_error(template: str, message: str) -> None:
    with pytest.raises(RequestError, match=message):
        render(template)


def test_the_callers_messages_stay_as_they_are() -> None:
    messages = [{"role": "user", "content": [{"type": "text", "text": "x"}]}]
    render("{{ messages[0].content }}", messages)
    assert messages == [{"role": "user", "content": [{"type": "text", "text": "x"}]}]
