"""Hostile chat templates: each ends soon with an error that names the limit, whatever it tries to use or to reach."""

from __future__ import annotations

import re
import threading
import time
import tracemalloc
from typing import Any

import pytest

from ratoon.core.errors import RequestError
from ratoon.models.chat_sandbox import limits
from ratoon.models.chat_template import render_chat_template
from ratoon.models.tokenizer import Tokenizer
from tests.unit.models.hostile_templates import ENDLESS, HUGE, ORDINARY, OUTSIDE, UNREADABLE
from tests.unit.models.model_files import train_byte_level

MESSAGES = [{"role": "user", "content": "Hi"}]
PATIENCE_SECONDS = 60.0  # for a hang, on a machine that may be busy
PROCESSOR_SECONDS = 6.0  # to compile and to render
MEMORY_BYTES = 512 * 2**20


def attacks(group: dict[str, str]) -> Any:
    return pytest.mark.parametrize("template", group.values(), ids=group.keys())


def render_in_time(template: str) -> tuple[BaseException | str, float]:
    """What came of it, and the processor time that it took. In a thread: a hang fails the test, not the suite."""
    result: list[Any] = []

    def render() -> None:
        start = time.thread_time()
        try:
            outcome: BaseException | str = render_chat_template(template, MESSAGES, {})
        except BaseException as error:
            outcome = error
        result.extend((outcome, time.thread_time() - start))

    thread = threading.Thread(target=render, daemon=True)
    thread.start()
    thread.join(PATIENCE_SECONDS)
    assert not thread.is_alive(), "the template hangs"
    return result[0], result[1]


def check_refused(template: str, field: str | None = None) -> None:
    outcome, seconds = render_in_time(template)
    assert isinstance(outcome, RequestError), repr(outcome)[:200]
    assert outcome.field in ("messages", "chat_template") and outcome.field == (field or outcome.field)
    assert len(str(outcome)) < 1000
    assert seconds < PROCESSOR_SECONDS


@attacks(ENDLESS)
def test_a_template_that_takes_forever_is_stopped(template: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "MAX_SECONDS", 0.3)  # to have more attacks in less time
    monkeypatch.setattr(limits, "MAX_STEPS", 300_000)
    check_refused(template, "chat_template")


@attacks(HUGE)
def test_a_template_that_makes_much_out_of_little_is_stopped(template: str) -> None:
    check_refused(template)


@attacks(OUTSIDE)
def test_a_template_reaches_nothing_outside(template: str) -> None:
    check_refused(template)


@attacks(UNREADABLE)
def test_a_template_that_cannot_be_compiled_is_refused_in_time(template: str) -> None:
    check_refused(template, "chat_template")


@pytest.mark.parametrize("name", ["slices", "output of a macro", "format with many fields"])
def test_what_a_template_makes_stays_small_in_memory(name: str) -> None:
    tracemalloc.start()
    try:
        check_refused(HUGE[name])
        assert tracemalloc.get_traced_memory()[1] < MEMORY_BYTES
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize(
    ("template", "message"),
    [
        (ENDLESS["loops"], "chat_template: takes more than 2000000 steps"),
        # Whichever of the two a machine comes to first.
        (ENDLESS["maps of maps"], "chat_template: takes more than (2 seconds|2000000 steps)"),
        (HUGE["output"], "chat_template: writes more than 8388608 characters"),
        (HUGE["join"], "chat_template: makes a text of more than 8388608 characters"),
        (HUGE["batch"], "chat_template: makes a list of more than 1000000 entries"),
        (HUGE["slices"], "chat_template: makes texts and lists of more than 67108864 characters in all"),
        (UNREADABLE["a long template"], "chat_template: has 262145 characters; expected at most 262144"),
        (UNREADABLE["lists"], "chat_template: is nested too deep"),
    ],
)
def test_the_error_names_the_limit(template: str, message: str) -> None:
    outcome, _ = render_in_time(template)
    assert re.fullmatch(message, str(outcome))


def test_renders_at_the_same_time_have_limits_of_their_own() -> None:
    busy = "{% for i in range(90000) %}{% for j in range(9) %}{% endfor %}{% endfor %}{{ word }}"
    results: dict[str, Any] = {}

    def render(word: str, template: str) -> None:
        try:
            results[word] = render_chat_template(template, MESSAGES, {"word": word})
        except RequestError as error:
            results[word] = str(error)

    cases = {"one": busy, "two": busy, "three": ENDLESS["loops"]}
    threads = [threading.Thread(target=render, args=case, daemon=True) for case in cases.items()]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(PATIENCE_SECONDS)
    assert results == {"one": "one", "two": "two", "three": "chat_template: takes more than 2000000 steps"}


def test_a_refused_template_leaves_the_next_render_alone() -> None:
    check_refused(HUGE["output"])
    assert render_chat_template("{{ messages[0].content }}", MESSAGES, {}) == "Hi"


def test_a_long_conversation_is_no_attack() -> None:
    messages = [{"role": "user", "content": "some words " * 100} for _ in range(3000)]
    template = "{% for m in messages %}{{ '<' + m.role + '>' + m.content | trim + '\n' }}{% endfor %}"
    assert len(render_chat_template(template, messages, {})) == 3000 * len("<user>" + "some words " * 100)


def test_a_request_may_bring_a_template_that_is_checked_like_the_models() -> None:
    tokenizer = Tokenizer(train_byte_level(), {})
    assert tokenizer.apply_chat_template(MESSAGES, chat_template="{{ messages[0].content }}!") == "Hi!"
    assert tokenizer.encode_chat(MESSAGES, chat_template="{{ messages[0].content }}!") == tokenizer.encode("Hi!")
    for wrong in ("{% for %}", ENDLESS["a recursive loop"], UNREADABLE["not"]):
        with pytest.raises(RequestError) as raised:
            tokenizer.encode_chat(MESSAGES, chat_template=wrong)
        assert raised.value.field == "chat_template"
    with pytest.raises(RequestError, match="chat_template: int is no text"):
        tokenizer.apply_chat_template(MESSAGES, chat_template=3)  # type: ignore[arg-type]


@pytest.mark.parametrize("template", ORDINARY)
def test_ordinary_templates_give_what_plain_jinja_gives(template: str) -> None:
    from jinja2.sandbox import ImmutableSandboxedEnvironment

    messages = [*MESSAGES, {"role": "assistant", "content": "Hello"}]
    plain = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True)
    assert render_chat_template(template, messages, {}) == plain.from_string(template).render(messages=messages)
