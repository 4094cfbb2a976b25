"""Whose roots are forgotten when the table is full, and how large it is."""

from __future__ import annotations

from dataclasses import replace

import pytest

from ratoon.core.encoder import EncoderInput
from ratoon.core.errors import ConfigError, RequestError, UnknownParentError
from ratoon.core.media import EMBEDS, IMAGE, MediaFeature, MediaInput
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


def picture(offset: int, length: int, name: str = "cat", num_bytes: int = 100, modality: str = IMAGE) -> MediaFeature:
    return MediaFeature(
        offset, length, name, MediaInput(modality, length, WireTensor("uint8", (num_bytes,), bytes(num_bytes)))
    )


def test_images_count_among_the_bytes_of_roots_each_once() -> None:
    table = RootTable(100, max_feature_bytes=1000)
    for name in ("a", "b"):
        table.add(replace(root(name), mm_features=[picture(0, 4), picture(4, 4), picture(9, 4, "dog", 300)]))
    assert [one.feature_bytes for one in table.list()] == [400, 400]
    table.add(root("c", feature_bytes=400))
    assert ids(table) == {"b", "c"}


def test_the_images_before_a_place_in_a_root_the_last_of_them_cut() -> None:
    seeing = replace(root("a"), mm_features=[picture(2, 4), picture(8, 5, "dog")])
    assert seeing.media_at(13, whole_images=True) == seeing.mm_features
    assert seeing.media_at(8, whole_images=True) == seeing.mm_features[:1]
    assert seeing.media_at(2, whole_images=True) == []
    cut = seeing.media_at(11, whole_images=False)
    assert [(one.offset, one.length, one.data.num_rows) for one in cut] == [(2, 4, 4), (8, 3, 5)]
    assert seeing.mm_features[1].length == 5, "the root keeps its own"


def test_an_image_whose_rows_see_each_other_in_both_directions_is_not_cut() -> None:
    seeing = replace(root("a"), mm_features=[picture(2, 4)])
    with pytest.raises(RequestError, match=r"at: 3 tokens end within an image.*2, before it, or 6, behind it"):
        seeing.media_at(3, whole_images=True)
    words = replace(root("a"), mm_features=[picture(0, 6, modality=EMBEDS)])
    assert words.media_at(3, whole_images=True)[0].length == 3, "text can be cut"


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
