"""Grammars are checked in another process: what it finds, its limits, and whose grammars wait for whose."""

from __future__ import annotations

import json
import os
import signal
import time
from collections.abc import Iterator
from typing import Any

import pytest

from bench.attack_parts.grammar_bombs import bombs
from ratoon.core.errors import QueueFullError, RequestError
from ratoon.core.structured import StructuredOutput
from ratoon.engine import grammar_checks
from ratoon.engine.grammar_checks import GrammarChecks, Limits
from tests.unit.engine.fakes import byte_tokenizer

PATIENCE_SECONDS = 120.0  # on a machine that may be busy
TOKENIZER = byte_tokenizer()
END = "<|end|>"
VOCAB_SIZE = TOKENIZER.vocab_size
ENDLESS = StructuredOutput(**bombs()["lark, intersected lengths"])  # takes minutes, and all memory


def make_checks(**limits: Any) -> GrammarChecks:
    return GrammarChecks(TOKENIZER, VOCAB_SIZE, [TOKENIZER.backend.token_to_id(END)], Limits(**limits))


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


def test_limits_end_a_check_and_are_named() -> None:
    large = StructuredOutput(choice=[f"{index} is another text" for index in range(40_000)])
    checks = make_checks(seconds=0.3)
    try:
        checks.start()
        error = refusal(checks, ENDLESS)
        assert error.field == "structured_output.grammar"
        assert "takes more than 0.3 seconds of processor time" in error.problem
        start = time.monotonic()
        refusal(checks, ENDLESS)
        assert time.monotonic() - start < 0.3, "it is not tried again"
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
        endless = [
            checks.check(StructuredOutput(**bombs(number)["lark, intersected lengths"]), "a") for number in range(12)
        ]
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
    assert first is second or second.done()


def test_a_checked_request_has_what_the_engine_needs(checks: GrammarChecks) -> None:
    long = StructuredOutput(grammar="root ::= " + "[a-z] " * 4000, begins_after="x")
    checks.verify(long)
    completed = checks.complete(long)
    assert completed.translation is not None and "start:" in completed.translation
    assert completed.begins_after == "x" and completed.num_bytes is not None and completed.num_bytes > 0
    short = StructuredOutput(json_schema=json.dumps({"type": "integer"}))
    checks.verify(short)
    assert checks.complete(short).translation is None and not checks.complete(short).is_large
