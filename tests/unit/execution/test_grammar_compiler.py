"""Compiled grammars are kept by content, the least recently used leave first, and errors name the field."""

from __future__ import annotations

from dataclasses import dataclass, field
from threading import Event
from types import SimpleNamespace
from typing import Any, cast

import pytest

from ratoon.core.errors import RequestError
from ratoon.core.heap import HeapTrimmer
from ratoon.core.structured import StructuredOutput
from ratoon.execution.grammar.compiler import MAX_GROWN_BYTES, GrammarCompiler
from ratoon.execution.grammar.interface import GrammarCost
from ratoon.execution.worker import Worker
from tests.waiting import PATIENCE


@dataclass
class Compiled:
    num_bytes: int
    text: str
    cost: GrammarCost = field(default_factory=GrammarCost)

    def begin(self) -> Any: ...


class Library:
    vocab_size = 8

    def __init__(self) -> None:
        self.compiled: list[str] = []
        self.slow: set[str] | None = None  # None: all
        self.may_go_on = Event()
        self.may_go_on.set()

    def compile(self, asked: StructuredOutput) -> Compiled:
        assert asked.regex is not None
        if self.slow is None or asked.regex in self.slow or asked.is_large:
            self.may_go_on.wait(PATIENCE)
        self.compiled.append(asked.regex)
        if asked.regex == "(":
            raise RequestError("regex", "is wrong", "another")
        return Compiled(10, asked.regex)

    def token_bytes(self, token_id: int) -> bytes:
        return b""


def test_equal_contents_are_compiled_once() -> None:
    library = Library()
    grammars = GrammarCompiler(lambda: library)
    library.may_go_on.clear()
    asked = [StructuredOutput(regex="a"), StructuredOutput(regex="a", begins_after="x"), StructuredOutput(regex="b")]
    futures = [grammars.prepare(one) for one in asked]
    library.may_go_on.set()
    results = [future.result(PATIENCE) for future in futures]
    assert results[0] is results[1] is grammars.get(asked[0]) and results[2] is not results[0]
    assert sorted(library.compiled) == ["a", "b"]
    assert grammars.prepare(asked[0]).done()
    grammars.shutdown()


def test_the_least_recently_used_is_dropped_and_compiled_again() -> None:
    library = Library()
    grammars = GrammarCompiler(lambda: library, max_kept_bytes=25)
    for regex in ("a", "b", "a", "c", "a", "b"):
        grammars.get(StructuredOutput(regex=regex))
    assert library.compiled == ["a", "b", "c", "b"]


def test_what_was_measured_and_what_has_grown_counts() -> None:
    library = Library()
    grammars = GrammarCompiler(lambda: library, max_kept_bytes=100)
    measured = StructuredOutput(regex="a", num_bytes=60)
    assert grammars.get(measured).num_bytes == 60 and grammars.num_kept_bytes == 60
    running = grammars.get(StructuredOutput(regex="b"))
    assert grammars.num_kept_bytes == 70
    running.note_growth(50)  # as texts are matched
    assert grammars.num_kept_bytes == 60, "the least recently used is dropped"
    grammars.get(StructuredOutput(regex="b"))
    assert library.compiled == ["a", "b"]
    running.note_growth(1000)
    grammars.get(StructuredOutput(regex="c"))
    assert grammars.num_kept_bytes == 10, "one that has grown too large is dropped as soon as there is another"


def test_one_that_has_grown_much_is_not_kept() -> None:
    library = Library()
    grammars = GrammarCompiler(lambda: library)
    grammars.get(StructuredOutput(regex="a")).note_growth(MAX_GROWN_BYTES + 1)
    assert grammars.num_kept_bytes == 0
    grammars.get(StructuredOutput(regex="a"))
    assert library.compiled == ["a", "a"]


def test_memory_of_a_grammar_that_has_grown_is_given_back_when_its_last_text_has_ended(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    freed: list[int] = []
    monkeypatch.setattr(HeapTrimmer, "note_freed", lambda self, num_bytes: freed.append(num_bytes))
    grammars = GrammarCompiler(lambda: Library())
    of_text = grammars.get(StructuredOutput(regex="a"))
    of_text.note_growth(2 * MAX_GROWN_BYTES)
    assert grammars.num_kept_bytes == 0 and freed == [], "a text still uses it"
    del of_text
    assert freed == [2 * MAX_GROWN_BYTES + 10]
    grammars.get(StructuredOutput(regex="b"))
    assert len(freed) == 1, "it is kept"


def test_large_grammars_do_not_hold_up_others() -> None:
    """They are compiled one at a time, owners in turn."""
    library = Library()
    grammars = GrammarCompiler(lambda: library)
    library.may_go_on.clear()
    library.slow = set()
    large = [
        grammars.prepare(StructuredOutput(regex=name, is_large=True), owner)
        for name, owner in (("a1", "a"), ("a2", "a"), ("a3", "a"), ("b1", "b"))
    ]
    other = grammars.prepare(StructuredOutput(regex="x"), "c")
    assert other.result(PATIENCE) is not None and not any(future.done() for future in large)
    library.may_go_on.set()
    for future in large:
        future.result(PATIENCE)
    assert library.compiled == ["x", "a1", "a2", "b1", "a3"] or library.compiled == ["x", "a1", "b1", "a2", "a3"]
    grammars.shutdown()


def test_what_no_request_waits_for_any_longer_is_not_compiled() -> None:
    library = Library()
    grammars = GrammarCompiler(lambda: library)
    library.may_go_on.clear()
    running = [grammars.prepare(StructuredOutput(regex=name)) for name in ("a", "b")]  # all threads have work
    running.append(grammars.prepare(StructuredOutput(regex="c", is_large=True), "x"))
    left = [grammars.prepare(StructuredOutput(regex=name)) for name in ("d", "e", "e")]
    left += [grammars.prepare(StructuredOutput(regex=name, is_large=True), "x") for name in ("f", "g")]
    for future in (left[0], left[1], left[3]):
        assert future.cancel()
    again = grammars.prepare(StructuredOutput(regex="d"))  # as another work: the first was given up
    library.may_go_on.set()
    for future in (*running, left[2], left[4], again):
        assert future.result(PATIENCE) is not None
    assert sorted(library.compiled) == ["a", "b", "c", "d", "e", "g"]
    grammars.shutdown()


def test_an_owner_does_not_wait_behind_another_s_for_the_same_grammar() -> None:
    library = Library()
    grammars = GrammarCompiler(lambda: library)
    library.may_go_on.clear()
    of_a = [grammars.prepare(StructuredOutput(regex=name, is_large=True), "a") for name in ("1", "2", "3", "same")]
    of_b = grammars.prepare(StructuredOutput(regex="same", is_large=True), "b")
    library.may_go_on.set()
    assert of_b.result(PATIENCE) is of_a[-1].result(PATIENCE), "it is compiled once, in the turn that comes first"
    assert library.compiled.index("same") <= 2 and library.compiled.count("same") == 1
    grammars.shutdown()


def test_the_library_is_opened_with_the_first_grammar() -> None:
    opened: list[Library] = []

    def open_library() -> Library:
        opened.append(Library())
        return opened[-1]

    grammars = GrammarCompiler(open_library)
    assert not opened
    for regex in ("a", "b"):
        grammars.get(StructuredOutput(regex=regex))
    assert len(opened) == 1


def test_an_error_names_the_field_and_is_not_kept() -> None:
    library = Library()
    grammars = GrammarCompiler(lambda: library)
    for _ in range(2):
        with pytest.raises(RequestError, match=r"structured_output\.regex: is wrong"):
            grammars.prepare(StructuredOutput(regex="(")).result(PATIENCE)
    assert len(library.compiled) == 2
    grammars.shutdown()


def test_a_worker_opens_the_library_in_an_idle_moment() -> None:
    """Reading a tokenizer holds Python's lock, so that steps would wait for the first grammar."""
    opened: list[Library] = []

    def open_library() -> Library:
        opened.append(Library())
        return opened[-1]

    worker = Worker.__new__(Worker)
    worker.runner, worker._stream = cast("Any", SimpleNamespace(graphs=None)), None
    worker.grammars = GrammarCompiler(open_library)
    assert worker.has_idle_work and not worker.has_work_of_steps and opened == []
    assert worker.work_when_idle() and len(opened) == 1
    assert not worker.has_idle_work and not worker.work_when_idle()
    assert worker.grammars.get(StructuredOutput(regex="a")).num_bytes == 10 and len(opened) == 1


def test_a_library_that_does_not_open_ahead_is_reported_to_the_first_grammar() -> None:
    def open_library() -> Library:
        raise RequestError("structured_output", "needs a tokenizer", "a model with one")

    grammars = GrammarCompiler(open_library)
    assert grammars.can_open_ahead
    grammars.open_ahead()
    assert not grammars.can_open_ahead, "once is enough"
    with pytest.raises(RequestError, match="needs a tokenizer"):
        grammars.prepare(StructuredOutput(regex="a")).result(PATIENCE)
    grammars.shutdown()
