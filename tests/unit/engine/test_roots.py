"""Whose roots are forgotten when the table is full, and how large it is."""

from __future__ import annotations

import pytest

from ratoon.core.encoder import EncoderInput
from ratoon.core.errors import ConfigError, UnknownParentError
from ratoon.core.settings import engine_config
from ratoon.core.wire import WireTensor
from ratoon.engine.output.roots import Root, RootTable


def root(request_id: str, owner: str | None = None, feature_bytes: int = 0) -> Root:
    encoder_input = None
    if feature_bytes:
        features = WireTensor("float32", (feature_bytes // 4,), bytes(feature_bytes))
        encoder_input = EncoderInput(1, b"hash", features=features)
    return Root(request_id, f"{request_id}-x", [1], [[2]], owner=owner, encoder_input=encoder_input)


def ids(table: RootTable, owner: str | None = None) -> set[str]:
    return {one.request_id for one in table.list(owner)}


def test_one_owners_many_requests_leave_anothers_roots_alone() -> None:
    table = RootTable(1024)
    for number in range(10):
        table.add(root(f"b{number}", "bob"))
    for number in range(1100):
        table.add(root(f"a{number}", "ada"))
    assert len(ids(table, "bob")) == 10
    assert ids(table, "ada") == {f"a{number}" for number in range(1100 - 1014, 1100)}


def test_an_owner_alone_may_fill_the_table_and_gives_way_to_others() -> None:
    table = RootTable(10)
    for number in range(10):
        table.add(root(f"a{number}", "ada"))
    assert len(ids(table, "ada")) == 10
    for number in range(20):
        table.add(root(f"b{number}", "bob"))
    assert (len(ids(table, "ada")), len(ids(table, "bob"))) == (5, 5)


def test_audio_of_one_owner_does_not_push_out_anothers() -> None:
    table = RootTable(100, max_feature_bytes=1000)
    table.add(root("b", "bob", 400))
    for number in range(5):
        table.add(root(f"a{number}", "ada", 200))
    assert ids(table, "bob") == {"b"} and ids(table, "ada") == {"a2", "a3", "a4"}


def test_a_table_of_no_size_remembers_nothing() -> None:
    table = RootTable(0)
    table.add(root("a"))
    with pytest.raises(UnknownParentError):
        table.find("a")


def test_the_size_is_a_setting() -> None:
    assert engine_config("m").max_roots == 1024
    assert engine_config("m", max_roots=7).max_roots == 7
    with pytest.raises(ConfigError, match="max_roots"):
        engine_config("m", max_roots=-1)


def test_engines_are_told_of_roots_that_are_gone() -> None:
    table = RootTable(2, notes_dropped=True)
    for name in "ab":
        table.add(root(name))
    assert table.take_dropped() == []
    table.add(root("c"))  # there is room for two
    assert table.take_dropped() == ["a-x"] and table.take_dropped() == []
    table.add(Root("b", "b-y", [1], [[2], [3]]))  # the same id again
    table.remove("b")
    assert table.take_dropped() == ["b-x", "b-y", "b-y#1"]
    table.note_dropped(["d-x"])
    assert table.take_dropped() == ["d-x"]


def test_without_engines_that_keep_texts_nothing_is_noted() -> None:
    table = RootTable(1)
    for name in "abc":
        table.add(root(name))
    table.note_dropped(["d-x"])
    assert table.take_dropped() == []
