"""Hostile chat templates: each ends soon with an error, whatever it tries to use or to reach, and hurts no other."""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from ratoon.core.errors import RequestError
from ratoon.models import template_process
from ratoon.models.chat_template import render_chat_template
from ratoon.models.template_process import TemplateProcesses, render_in_child
from ratoon.models.tokenizer import Tokenizer
from tests.unit.models.hostile_templates import ENDLESS, HUGE, ORDINARY, OUTSIDE, UNREADABLE
from tests.unit.models.model_files import train_byte_level

MESSAGES = [{"role": "user", "content": "Hi"}]
GOOD = "{{ messages[0].content }}!"
PATIENCE_SECONDS = 60.0  # for a hang, on a machine that may be busy
on_linux = pytest.mark.skipif(sys.platform != "linux", reason="looks into /proc, or needs a limit on memory")


@pytest.fixture
def children(monkeypatch: pytest.MonkeyPatch) -> Iterator[TemplateProcesses]:
    """Processes of the test's own."""
    made = TemplateProcesses(2)
    monkeypatch.setattr(template_process, "_children", made)
    yield made
    made.close()


@pytest.fixture
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(template_process, "MAX_SECONDS", 0.1)  # to have more attacks in less time


def attacks(group: dict[str, str]) -> Any:
    return pytest.mark.parametrize("template", group.values(), ids=group.keys())


def render(template: str) -> str:
    return render_in_child(template, MESSAGES, {}).text


def check_refused(template: str, field: str | None = None) -> str:
    with pytest.raises(RequestError) as raised:
        render(template)
    assert raised.value.field in ("messages", "chat_template") and raised.value.field == (field or raised.value.field)
    assert len(str(raised.value)) < 1000
    return str(raised.value)


@pytest.mark.slow
@attacks(ENDLESS)
@pytest.mark.one_in(3)
def test_a_template_that_takes_forever_is_stopped(template: str, impatient: None) -> None:
    check_refused(template, "chat_template")
    assert render(GOOD) == "Hi!"


@pytest.mark.slow
@on_linux
@attacks(HUGE)
@pytest.mark.one_in(4)
def test_a_template_that_makes_much_out_of_little_is_stopped(template: str, impatient: None) -> None:
    check_refused(template)


@attacks(OUTSIDE)
def test_a_template_reaches_nothing_outside(template: str) -> None:
    check_refused(template)
    with pytest.raises(RequestError):  # nor does one that comes with the model, in this process
        render_chat_template(template, MESSAGES, {})


@attacks(UNREADABLE)
@pytest.mark.one_in(4)
def test_a_template_that_cannot_be_compiled_is_refused_in_time(template: str, impatient: None) -> None:
    check_refused(template, "chat_template")


@on_linux
@pytest.mark.parametrize(
    ("template", "message"),
    [
        (ENDLESS["loops"], "chat_template: takes more than 0.1 seconds"),
        (ENDLESS["a macro that calls itself"], "chat_template: calls itself too often"),
        (HUGE["output"], "chat_template: writes more than 8388608 characters"),
        (HUGE["a text times a number"], "chat_template: needs too much memory"),
        (UNREADABLE["a long template"], "chat_template: has 262145 characters; expected at most 262144"),
        (UNREADABLE["lists"], "chat_template: is nested too deep"),
        (r"{{ '\ud800' }}", "chat_template: makes no valid Unicode"),
    ],
)
def test_the_error_names_the_limit(template: str, message: str, impatient: None) -> None:
    assert check_refused(template) == message


def test_a_model_s_template_has_limits_on_what_it_reads_and_writes() -> None:
    for template in (HUGE["output"], ENDLESS["a macro that calls itself"]):
        with pytest.raises(RequestError, match=r"chat_template: (writes more than|calls itself)"):
            render_chat_template(template, MESSAGES, {})
    for messages, variables in (
        ([{"role": "user", "content": "x" * (8 * 2**20 + 1)}], {}),
        (MESSAGES, {"more": [[0] * 1000] * 1001}),
    ):
        with pytest.raises(RequestError, match="messages: hold more than"):
            render_chat_template("", messages, variables)


def test_a_process_is_used_again_and_replaced_when_it_is_dead(children: TemplateProcesses) -> None:
    assert render(GOOD) == "Hi!"
    first = children._idle[0].process
    assert render(GOOD) == "Hi!"
    assert children._idle[0].process is first
    first.kill()
    first.wait()
    assert render(GOOD) == "Hi!"
    assert children._idle[0].process.pid != first.pid


def test_a_process_that_is_killed_fails_only_what_it_renders(
    children: TemplateProcesses, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(template_process, "MAX_SECONDS", PATIENCE_SECONDS)
    render(GOOD)
    child = children._idle[0].process
    said: list[str] = []
    thread = threading.Thread(target=lambda: said.append(check_refused(ENDLESS["loops"], "chat_template")))
    thread.start()
    while children._idle:  # it is taken
        time.sleep(0.001)
    assert render(GOOD) == "Hi!"  # another one, meanwhile
    os.kill(child.pid, signal.SIGKILL)
    thread.join(PATIENCE_SECONDS)
    assert said == ["chat_template: the process that rendered it was ended (SIGKILL); try another one"]
    assert render(GOOD) == "Hi!"


def test_a_process_that_does_not_answer_is_killed(children: TemplateProcesses, monkeypatch: pytest.MonkeyPatch) -> None:
    render(GOOD)
    os.kill(children._idle[0].process.pid, signal.SIGSTOP)
    monkeypatch.setattr(template_process, "MAX_WAIT_SECONDS", 0.1)
    assert "was not rendered within 0.1 seconds" in check_refused("x" * 200_000, "chat_template")
    monkeypatch.undo()
    assert render(GOOD) == "Hi!"


@on_linux
def test_a_process_has_nothing_of_its_parent(children: TemplateProcesses, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RATOON_API_KEY", "secret")
    with open(os.devnull) as inherited:
        os.set_inheritable(inherited.fileno(), True)
        render(GOOD)
        child = children._idle[0].process
    folder = Path(f"/proc/{child.pid}")
    assert b"secret" not in (folder / "environ").read_bytes()
    files = {os.readlink(file).partition(":")[0] for file in (folder / "fd").iterdir()}
    assert files == {"pipe", os.devnull}
    assert (folder / "cwd").readlink() == Path("/")


def test_a_process_ends_with_its_parent(children: TemplateProcesses) -> None:
    render(GOOD)
    child = children._idle[0].process
    assert child.stdin is not None
    child.stdin.close()
    assert child.wait(PATIENCE_SECONDS) == 0


@on_linux
def test_what_needs_too_much_memory_is_tried_in_a_new_process_and_that_is_replaced(children: TemplateProcesses) -> None:
    render(GOOD)
    check_refused(HUGE["a text times a number"], "chat_template")
    assert not children._idle
    assert render("{% set big = 'x' * 300000000 %}" + GOOD) == "Hi!"


def test_a_long_conversation_is_no_attack() -> None:
    messages = [{"role": "user", "content": "some words " * 100} for _ in range(3000)]
    template = "{% for m in messages %}{{ '<' + m.role + '>' + m.content | trim + '\n' }}{% endfor %}"
    text = render_in_child(template, messages, {}).text
    assert len(text) == 3000 * len("<user>" + "some words " * 100)
    assert text == render_chat_template(template, messages, {})


@pytest.mark.parametrize("value", [object(), 2**70, "\ud800"])
def test_what_is_no_json_cannot_be_given_to_a_process(value: Any) -> None:
    with pytest.raises(RequestError, match="messages: "):
        render_in_child(GOOD, MESSAGES, {"value": value})


def test_a_request_may_bring_a_template() -> None:
    tokenizer = Tokenizer(train_byte_level(), {})
    assert tokenizer.apply_chat_template(MESSAGES, chat_template=GOOD) == "Hi!"
    for wrong in ("{% for %}", ENDLESS["a recursive loop"], UNREADABLE["not"]):
        with pytest.raises(RequestError) as raised:
            tokenizer.apply_chat_template(MESSAGES, chat_template=wrong)
        assert raised.value.field == "chat_template"
    with pytest.raises(RequestError, match="chat_template: int is no text"):
        tokenizer.apply_chat_template(MESSAGES, chat_template=3)  # type: ignore[arg-type]


def test_only_templates_that_come_with_a_request_need_a_process(monkeypatch: pytest.MonkeyPatch) -> None:
    from ratoon.models.chat_template import TrustedTemplate

    monkeypatch.setattr(template_process, "_children", None)
    tokenizer = Tokenizer(train_byte_level(), {}, {"default": GOOD, "other": "other"})
    assert tokenizer.apply_chat_template(MESSAGES) == "Hi!"
    assert tokenizer.apply_chat_template(MESSAGES, chat_template="other") == "other"
    assert tokenizer.apply_chat_template(MESSAGES, chat_template=TrustedTemplate("operator's")) == "operator's"
    with pytest.raises(AttributeError):
        tokenizer.apply_chat_template(MESSAGES, chat_template="{{ 1 }}")


@pytest.mark.parametrize("template", ORDINARY)
def test_ordinary_templates_give_what_plain_jinja_gives(template: str) -> None:
    from jinja2.sandbox import ImmutableSandboxedEnvironment

    messages = [*MESSAGES, {"role": "assistant", "content": "Hello"}]
    plain = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True)
    wanted = plain.from_string(template).render(messages=messages)
    assert render_chat_template(template, messages, {}) == wanted
    assert render_in_child(template, messages, {}).text == wanted
