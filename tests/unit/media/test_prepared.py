"""Prepared images and videos that are kept: what comes again costs a hash, within a number of bytes."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest
from PIL import Image

from ratoon.core.config import MediaSettings
from ratoon.core.errors import RequestError
from ratoon.core.media import IMAGE, VIDEO, MediaFeature, MediaInput
from ratoon.core.wire import WireTensor
from ratoon.media import processor as processing
from ratoon.media.families.base import Preprocessed
from ratoon.media.items import MediaItem
from ratoon.media.prepared import PreparedMedia, key_of
from ratoon.media.preprocess import preprocess_decoded
from ratoon.media.processor import MediaProcessor
from tests.golden.media_oracle import QWEN, drawn
from tests.waiting import PATIENCE, wait_until

SIDE = 56
PICTURE = drawn(SIDE, SIDE)


def made(num_bytes: int = 100) -> Preprocessed:
    return Preprocessed([MediaInput(IMAGE, 1, WireTensor("uint8", (num_bytes,), bytes(num_bytes)))])


def never() -> Preprocessed:
    raise AssertionError("it is there already")


class Reader:
    """A model's processor that counts what it prepares."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, **settings: Any) -> None:
        self.prepared: list[str] = []
        self._processor = MediaProcessor(QWEN, None, MediaSettings(**settings))

        def count(decoded: Any, *arguments: Any) -> Preprocessed:
            self.prepared.append(decoded.modality)
            return preprocess_decoded(decoded, *arguments)

        monkeypatch.setattr(processing, "preprocess_decoded", count)

    def read(self, *pictures: Any, modality: str = IMAGE, **asked: Any) -> list[MediaFeature]:
        items = [MediaItem(modality, picture, f"image[{index}]") for index, picture in enumerate(pictures)]
        token = QWEN.image_token_id if modality == IMAGE else QWEN.video_token_id
        assert token is not None
        return self._processor.process("prompt", [token] * len(items), items, asked).features


# ---- what is kept ----


def test_the_one_that_was_used_longest_ago_is_forgotten_first() -> None:
    kept = PreparedMedia(300)
    for index in range(6):
        kept.get(bytes([index]), made)
        kept.get(b"\0", never)
    for index in (0, 4, 5):
        kept.get(bytes([index]), never)
    again: list[int] = []
    for index in (1, 2, 3):
        kept.get(bytes([index]), lambda: again.append(1) or made())
    assert len(again) == 3


def test_what_is_larger_than_all_that_may_be_kept_is_made_each_time() -> None:
    kept, times = PreparedMedia(99), []
    for _ in range(2):
        kept.get(b"a", lambda: times.append(1) or made())
    assert len(times) == 2


def test_a_failure_is_not_kept_and_names_the_field_of_its_own_request() -> None:
    kept = PreparedMedia()

    def fail() -> Preprocessed:
        raise RequestError("image[0]", "is broken", "another one")

    with pytest.raises(RequestError, match=r"image\[0\]"):
        kept.get(b"a", fail)
    assert kept.get(b"a", made) == made()


def test_what_several_threads_ask_for_at_once_is_prepared_by_one() -> None:
    kept, may_end, times = PreparedMedia(), threading.Event(), []

    def prepare() -> Preprocessed:
        times.append(threading.get_ident())
        assert may_end.wait(PATIENCE)
        return made()

    with ThreadPoolExecutor(4) as pool:
        found = [pool.submit(kept.get, b"a", prepare) for _ in range(4)]
        wait_until("the first thread prepares it", lambda: times)
        assert kept.get(b"b", made) == made()  # another one waits for none of them
        may_end.set()
        results = [future.result(PATIENCE) for future in found]
    assert len(times) == 1 and all(one is results[0] for one in results)


def test_those_that_wait_for_one_that_fails_prepare_it_themselves() -> None:
    kept, may_end, times = PreparedMedia(), threading.Event(), []

    def prepare() -> Preprocessed:
        times.append(1)
        if len(times) == 1:
            assert may_end.wait(PATIENCE)
            raise RequestError("image[0]", "took too long", "a smaller one")
        return made()

    with ThreadPoolExecutor(2) as pool:
        first = pool.submit(kept.get, b"a", prepare)
        wait_until("the first thread prepares it", lambda: times)
        second = pool.submit(kept.get, b"a", prepare)
        may_end.set()
        assert second.result(PATIENCE) == made()
        with pytest.raises(RequestError):
            first.result(PATIENCE)


@pytest.mark.parametrize(
    "other",
    [
        key_of(VIDEO, {"a": 1}, ((2, 3),), [b"abcdef"]), key_of(IMAGE, {"a": 2}, ((2, 3),), [b"abcdef"]),
        key_of(IMAGE, {"a": 1}, ((3, 2),), [b"abcdef"]), key_of(IMAGE, {"a": 1}, ((2, 3),), [b"abcdeg"]),
        key_of(IMAGE, {"a": 1}, ((2, 3),), [b"abc", b"def"]),
    ],
)  # fmt: skip
def test_a_key_is_of_all_that_decides_the_result(other: bytes) -> None:
    assert key_of(IMAGE, {"a": 1}, ((2, 3),), [b"abcdef"]) != other


def test_the_order_of_options_does_not_matter() -> None:
    assert key_of(IMAGE, {"a": 1, "b": 2}, (), [b""]) == key_of(IMAGE, {"b": 2, "a": 1}, (), [b""])


# ---- what a model's processor does with it ----


def test_the_same_pixels_are_prepared_once_whatever_holds_them(monkeypatch: pytest.MonkeyPatch) -> None:
    reader = Reader(monkeypatch)
    features = [
        *reader.read(PICTURE), *reader.read(PICTURE.copy()), *reader.read(Image.fromarray(PICTURE)),
        *reader.read(np.moveaxis(PICTURE, -1, 0)),
    ]  # fmt: skip
    assert len(reader.prepared) == 1
    assert all(one.data is features[0].data for one in features), "requests share the pixels"
    assert len({one.content_hash for one in features}) == 1


def test_other_pixels_and_other_options_are_prepared_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    reader, changed = Reader(monkeypatch), PICTURE.copy()
    (first,) = reader.read(PICTURE)
    changed[-1, -1, -1] ^= 1
    (second,) = reader.read(changed)
    (larger,) = reader.read(PICTURE, min_pixels=4 * SIDE * SIDE)
    assert len(reader.prepared) == 3
    assert len({first.content_hash, second.content_hash, larger.content_hash}) == 3


def test_a_picture_that_its_caller_changes_is_another_one(monkeypatch: pytest.MonkeyPatch) -> None:
    reader, picture = Reader(monkeypatch), PICTURE.copy()
    (before,) = reader.read(picture)
    pixels = bytes(before.data.features.data)
    picture[:] = 0
    (after,) = reader.read(picture)
    assert after.content_hash != before.content_hash and bytes(before.data.features.data) == pixels


def test_frames_at_another_rate_are_another_video(monkeypatch: pytest.MonkeyPatch) -> None:
    reader, frames = Reader(monkeypatch), np.stack([PICTURE] * 4)
    for fps in (1.0, 2.0, 1.0):
        reader.read((frames, {"fps": fps}), modality=VIDEO)
    assert len(reader.prepared) == 2


def test_several_pictures_of_a_prompt_stay_in_order_and_the_first_broken_one_is_named(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(processing, "usable_cores", lambda: 4)
    reader, pictures = Reader(monkeypatch), [drawn(SIDE, SIDE + 28 * index) for index in range(6)]
    together = [one.content_hash for one in reader.read(*pictures)]
    assert together == [one.content_hash for picture in pictures for one in reader.read(picture)]
    broken = np.zeros((4, 4, 7, 7))
    with pytest.raises(RequestError) as error:
        reader.read(PICTURE, PICTURE, broken, PICTURE, broken)
    assert error.value.field == "image[2]"
