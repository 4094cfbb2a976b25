"""Grammars are checked in another process: what it finds, its limits, and whose grammars wait for whose."""

from __future__ import annotations

import json
import math
import os
import signal
import time
from collections.abc import Iterator
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import pytest

from bench.attack_parts.grammar_bombs import bombs
from ratoon.core.errors import QueueFullError, RequestError
from ratoon.core.structured import StructuredOutput
from ratoon.engine.grammars import checks as grammar_checks
from ratoon.engine.grammars.check_process import MAX_CHECKS_OF_FORK, _processor_seconds
from ratoon.engine.grammars.checks import NUM_PLACES, GrammarChecks, Limits
from tests.unit.engine.fakes import byte_tokenizer
from tests.waiting import wait_until

PATIENCE_SECONDS = 120.0  # on a machine that may be busy
TOKENIZER = byte_tokenizer()
END = "<|end|>"
VOCAB_SIZE = TOKENIZER.vocab_size
ENDLESS = StructuredOutput(**bombs()["lark, intersected lengths"])  # takes minutes, and all memory


def make_checks(**limits: Any) -> GrammarChecks:
    """Without `quiet_seconds`, no process is made ahead."""
    ends = [TOKENIZER.backend.token_to_id(END)]
    return GrammarChecks(TOKENIZER, VOCAB_SIZE, ends, Limits(**({"quiet_seconds": math.inf} | limits)))


@pytest.fixture(scope="module")
def checks() -> Iterator[GrammarChecks]:
    made = make_checks()
    yield made
    made.close()


def refusal(checks: GrammarChecks, asked: StructuredOutput, owner: str | None = None) -> RequestError:
    def verify() -> None:
        asked.verify()
        checks.verify(asked, owner)

    with pytest.raises(RequestError) as refused:
        verify()
    return refused.value


def process_of(checks: GrammarChecks) -> int:
    assert checks._process is not None
    return checks._process._child.process.pid


def forks_of(pid: int) -> set[int]:
    return {int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()}


def many_endless() -> list[StructuredOutput]:
    return [StructuredOutput(**bombs(number)["lark, intersected lengths"]) for number in range(12)]


@pytest.mark.parametrize(
    "asked",
    [
        StructuredOutput(json_object=True),
        StructuredOutput(regex="a+"),
        StructuredOutput(choice=[f"word {index}" for index in range(100_000)]),
        StructuredOutput(choice=["<|other|>user", "", 'x"/\n']),
        StructuredOutput(grammar="start: " + " | ".join(f'"word {index}"' for index in range(5000))),
        StructuredOutput(grammar="start: " + " | ".join(f'"a{index}" x' for index in range(5000)) + '\nx: "y"'),
        StructuredOutput(grammar='?start: "a" b\n?b: "c"'),
        StructuredOutput(grammar=r'root ::= "\u00e9\U0001F600\x41" [\u00e0-\u00ff]'),
        StructuredOutput(grammar="start: <|other|>"),
        StructuredOutput(grammar='start: "a"~100000'),
        StructuredOutput(regex="(a{1000}){1000}"),
    ],
    ids=lambda asked: f"{asked.kind} {str(getattr(asked, asked.kind))[:20]}",
)
def test_what_can_be_matched_is_accepted(checks: GrammarChecks, asked: StructuredOutput) -> None:
    asked.verify()
    checks.verify(asked)
    assert checks.check(asked).done(), "it is kept"


@pytest.mark.parametrize(
    ("asked", "told"),
    [
        (StructuredOutput(regex="(a"), "regex: at "),
        (StructuredOutput(grammar="start: start"), "grammar: allows no text: each text of the rule 'start'"),
        (StructuredOutput(grammar="root ::= root"), "grammar: allows no text: each text of the rule 'root'"),
        (StructuredOutput(grammar='start: "a" start'), "grammar: allows no text"),
        (StructuredOutput(grammar=f"start: {END}"), f"grammar: has the token {END}, which ends the text"),
        (StructuredOutput(grammar=f'start: "a" | "b" {END}'), f"grammar: has the token {END}"),
        (StructuredOutput(regex=r"[^\x00-\x{10FFFF}]"), "regex: allows no token of the model at its beginning"),
        (StructuredOutput(grammar=r'start: "ab" /[^\x00-\x{10FFFF}]/'), "grammar: allows no token of the model after"),
        (StructuredOutput(**bombs()["lark, doubled terminals"]), "grammar: exceeds the limit initial_lexer_fuel"),
        (StructuredOutput(json_schema='{"type": "strin"}'), "json_schema: 'type' at # is"),
        (StructuredOutput(grammar="root ::= " + "(" * 5000 + '"a"' + ")" * 5000), "grammar: is nested too deeply"),
        (
            StructuredOutput(json_schema='{"items": ' * 400 + "{}" + "}" * 400),
            "json_schema: is nested 401 levels deep; objects and lists within each other, up to 120 levels deep",
        ),
        (
            StructuredOutput(json_schema='{"items": ' * 20_000 + "{}" + "}" * 20_000),
            "json_schema: ",
        ),
    ],
    ids=lambda value: None if isinstance(value, str) else value.kind,
)
def test_what_can_t_be_matched_is_refused_with_the_reason(
    checks: GrammarChecks, asked: StructuredOutput, told: str
) -> None:
    error = refusal(checks, asked)
    assert told in str(error)
    assert "\n" not in str(error) and len(str(error)) < 1000


@pytest.mark.slow
def test_limits_end_a_check_and_are_named() -> None:
    large = StructuredOutput(choice=[f"{index} is another text" for index in range(40_000)])
    checks = make_checks(seconds=0.3)
    try:
        checks.start()
        error = refusal(checks, ENDLESS)
        assert error.field == "structured_output.grammar"
        assert "takes more than 0.3 seconds of processor time" in error.problem
        assert checks.check(ENDLESS).done(), "it is not tried again"
        checks.verify(StructuredOutput(regex="a"))  # the next one finds a process
    finally:
        checks.close()
    checks = make_checks(memory_bytes=2**21)
    try:
        assert "takes more than 2 MiB of memory" in refusal(checks, large).problem
        checks.verify(StructuredOutput(regex="a"))
    finally:
        checks.close()
    checks = make_checks(wait_seconds=0.2)
    try:
        checks.verify(StructuredOutput(regex="a"))
        assert "within 0.2 seconds" in refusal(checks, ENDLESS).problem
        assert not checks.check(ENDLESS).done(), "another time it may be quicker"
    finally:
        checks.close()


def test_the_checks_of_one_owner_do_not_hold_up_another_s() -> None:
    checks = make_checks(seconds=60.0, wait_seconds=PATIENCE_SECONDS)
    try:
        checks.start()
        endless = [checks.check(one, "a") for one in many_endless()]
        for index in range(3):
            finding = checks.check(StructuredOutput(regex=f"a{index}"), "b").result(PATIENCE_SECONDS)
            assert finding.error is None
        assert not any(future.done() for future in endless)
    finally:
        checks.close()
    for future in endless:
        assert isinstance(future.exception(PATIENCE_SECONDS), RequestError), "what waits is told of the end"


def test_too_many_of_one_owner_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(grammar_checks, "MAX_WAITING", 2)
    checks = make_checks(seconds=60.0)
    try:
        for number in range(2):
            checks.check(StructuredOutput(**bombs(number)["lark, intersected lengths"]), "a")
        with pytest.raises(QueueFullError, match="2 grammars wait"):
            checks.check(StructuredOutput(regex="a"), "a")
        checks.verify(StructuredOutput(regex="a"), "b")
    finally:
        checks.close()


def test_a_process_that_is_killed_fails_what_it_had_and_is_replaced() -> None:
    checks = make_checks(seconds=60.0)
    try:
        checks.verify(StructuredOutput(regex="a"))
        first = process_of(checks)
        waiting = checks.check(ENDLESS)
        os.kill(first, signal.SIGKILL)
        error = waiting.exception(PATIENCE_SECONDS)
        assert isinstance(error, RequestError) and "has ended" in error.problem
        checks.verify(StructuredOutput(regex="b"))
        assert process_of(checks) != first
    finally:
        checks.close()


def test_equal_grammars_are_checked_once(checks: GrammarChecks) -> None:
    first, second = (checks.check(StructuredOutput(regex="once", begins_after=marker)) for marker in (None, "</think>"))
    assert first.result(PATIENCE_SECONDS) is second.result(PATIENCE_SECONDS)


def test_an_owner_does_not_wait_behind_another_s_for_the_same_grammar() -> None:
    same = StructuredOutput(regex="the same")
    checks = make_checks(seconds=60.0, wait_seconds=PATIENCE_SECONDS)
    try:
        endless = [checks.check(one, "a") for one in many_endless()]
        of_a, of_b = (checks.check(same, owner) for owner in "ab")
        assert of_b.result(PATIENCE_SECONDS).error is None
        assert not of_a.done() and not any(future.done() for future in endless)
    finally:
        checks.close()


# ---- forks ----


def test_the_checks_of_an_owner_share_a_process_and_those_of_others_do_not() -> None:
    checks = make_checks(idle_seconds=PATIENCE_SECONDS)
    try:
        checks.verify(StructuredOutput(regex="first of a"), "a")
        of_a = forks_of(process_of(checks))
        checks.verify(StructuredOutput(regex="first of b"), "b")
        of_both = forks_of(process_of(checks))
        assert len(of_a) == 1 and len(of_both) == 2
        for number in range(10):
            checks.verify(StructuredOutput(regex=f"a{number}"), "a")
        assert forks_of(process_of(checks)) == of_both
        for number, owner in enumerate("cdefgh"):
            checks.verify(StructuredOutput(regex=f"b{number}"), owner)
            wait_until("an idle one has ended for it", lambda: len(forks_of(process_of(checks))) <= NUM_PLACES)
    finally:
        checks.close()


def test_a_process_is_ended_when_its_owner_has_no_more_checks() -> None:
    checks = make_checks(idle_seconds=0.01)
    try:
        for owner in "ab":
            checks.verify(StructuredOutput(regex=f"one of {owner}"), owner)
        wait_until("idle processes end", lambda: not forks_of(process_of(checks)))
        checks.verify(StructuredOutput(regex="another of a"), "a")
    finally:
        checks.close()


def test_a_process_is_ready_for_the_first_check_of_any_owner() -> None:
    checks = make_checks(quiet_seconds=0.01, idle_seconds=PATIENCE_SECONDS, memory_bytes=2**22)
    try:
        checks.start()
        of_all: set[int] = set()
        for owner in "abc":
            wait_until("another one is ready", lambda: len(forks_of(process_of(checks)) - of_all) == 1)
            (ready,) = forks_of(process_of(checks)) - of_all
            of_all.add(ready)
            used_before = _processor_seconds(ready)
            checks.verify(StructuredOutput(regex=f"one of {owner}"), owner)
            assert _processor_seconds(ready) > used_before
        assert "takes more than 4 MiB of memory" in refusal(checks, ENDLESS, "d").problem
        wait_until("another one is ready", lambda: len(forks_of(process_of(checks)) - of_all) == 1)
        (ready,) = forks_of(process_of(checks)) - of_all
        os.kill(ready, signal.SIGKILL)
        wait_until("it has ended", lambda: "Z" in Path(f"/proc/{ready}/stat").read_text().split())
        checks.verify(StructuredOutput(regex="whose process was killed before"), "e")
    finally:
        checks.close()


@pytest.mark.slow
def test_a_process_that_many_checks_have_used_is_replaced() -> None:
    checks = make_checks(idle_seconds=PATIENCE_SECONDS)
    try:
        for number in range(MAX_CHECKS_OF_FORK):
            checks.verify(StructuredOutput(regex=f"a{number}"), "a")
        wait_until("it has ended", lambda: not forks_of(process_of(checks)))
        checks.verify(StructuredOutput(regex="another"), "a")
    finally:
        checks.close()


def test_callers_that_leave_while_results_come_are_counted_once() -> None:
    checks = make_checks()
    try:
        checks.verify(StructuredOutput(regex="a"))
        for number in range(100):
            future = checks.check(StructuredOutput(regex=f"a{number}"), "a")
            time.sleep(0.0001 * (number % 40))
            future.cancel()
        wait_until("none is under way", lambda: not checks._under_way and not checks._counted)
        assert not checks._num_waiting
    finally:
        checks.close()


@pytest.mark.slow
def test_a_limit_that_is_exceeded_behind_other_checks_ends_one_alone() -> None:
    """It has the whole of its limits, whatever was checked before it in the same process."""
    checks = make_checks(seconds=60.0, memory_bytes=2**22)
    try:
        asked = [StructuredOutput(regex=f"a{number}") for number in range(20)]
        asked.insert(10, ENDLESS)
        futures = [checks.check(one, "a") for one in asked]
        problems = [future.result(PATIENCE_SECONDS).error for future in futures]
        assert [index for index, problem in enumerate(problems) if problem is not None] == [10]
        assert problems[10] is not None and "takes more than 4 MiB of memory" in problems[10][1]
    finally:
        checks.close()
    checks = make_checks(seconds=0.3)
    try:
        checks.verify(StructuredOutput(regex="a"))
        assert "takes more than 0.3 seconds of processor time" in refusal(checks, ENDLESS).problem
        checks.verify(StructuredOutput(regex="b"))
    finally:
        checks.close()


# ---- callers that leave ----


def test_a_check_ends_with_the_last_caller_that_waits_for_it() -> None:
    checks = make_checks(seconds=60.0, wait_seconds=PATIENCE_SECONDS)
    try:
        checks.start()
        waiting = [checks.check(one, "a") for one in many_endless()]
        second = checks.check(many_endless()[0], "a")
        wait_until("all places of the owner are taken", lambda: len(forks_of(process_of(checks))) == NUM_PLACES - 1)
        first_forks = forks_of(process_of(checks))
        for future in waiting:
            assert future.cancel()
        wait_until("all others have ended", lambda: len(forks_of(process_of(checks)) & first_forks) == 1)
        assert not second.done(), "another caller waits for this one"
        checks.verify(StructuredOutput(regex="a"), "a")  # in a place that became free
        assert second.cancel()
        wait_until("none is left", lambda: not forks_of(process_of(checks)))
        assert not checks._under_way and not checks._num_waiting
    finally:
        checks.close()


def test_a_thread_that_is_interrupted_ends_its_check(monkeypatch: pytest.MonkeyPatch) -> None:
    checks = make_checks(seconds=60.0, wait_seconds=PATIENCE_SECONDS)

    def interrupt(future: Future[Any], timeout: float | None = None) -> None:
        wait_until("the check runs", lambda: forks_of(process_of(checks)))
        raise KeyboardInterrupt

    try:
        monkeypatch.setattr(Future, "result", interrupt)
        with pytest.raises(KeyboardInterrupt):
            checks.verify(ENDLESS)
        wait_until("it has ended", lambda: not forks_of(process_of(checks)))
    finally:
        checks.close()


def test_a_checked_request_has_what_the_engine_needs(checks: GrammarChecks) -> None:
    long = StructuredOutput(grammar="root ::= " + "[a-z] " * 4000, begins_after="x")
    checks.verify(long)
    completed = checks.complete(long)
    assert completed.translation is not None and "start:" in completed.translation
    assert completed.begins_after == "x" and completed.num_bytes is not None and completed.num_bytes > 0
    short = StructuredOutput(json_schema=json.dumps({"type": "integer"}))
    checks.verify(short)
    assert checks.complete(short).translation is None and not checks.complete(short).is_large
