"""Pictures of another size: the bits are those of Pillow, whichever of the two computes them."""

from __future__ import annotations

import numpy as np
import pytest

from ratoon.layers.native import library
from ratoon.media import resize as resizing
from ratoon.media.resize import resize, resize_with_pillow
from tests.seeds import seed_of

FILTERS = ("BILINEAR", "BICUBIC", "LANCZOS")
needs_kernels = pytest.mark.skipif(library() is None, reason="no kernels are built for this machine")


def picture_of(height: int, width: int, seed: int = 0, hard: bool = False) -> np.ndarray:
    """`hard`: of black and white pixels, whose sums leave the range of a byte."""
    picture = np.random.default_rng(seed).integers(0, 256, (height, width, 3), dtype=np.uint8)
    return np.where(picture > 127, 255, 0).astype(np.uint8) if hard else picture


@pytest.mark.parametrize("filter", FILTERS)
def test_a_picture_of_the_right_size_is_what_pillow_makes_of_it(filter: str) -> None:
    picture = picture_of(56, 84)
    assert resize(picture, 56, 84, filter) is picture
    assert np.array_equal(resize_with_pillow(picture, 56, 84, filter), picture)


@needs_kernels
@pytest.mark.drawn
@pytest.mark.parametrize("filter", FILTERS)
def test_kernels_and_pillow_have_the_same_bits_at_any_size(filter: str) -> None:
    """Both directions grow, both shrink, or one of each: the order in which Pillow takes them depends on it."""
    random = np.random.default_rng(seed_of("test_resize"))
    for index in range(60):
        height, width, new_height, new_width = map(int, random.integers(1, 160, 4))
        picture = picture_of(height, width, index, hard=index % 2 == 0)
        found = resize(picture, new_height, new_width, filter)
        sizes = (height, width), (new_height, new_width)
        assert np.array_equal(found, resize_with_pillow(picture, new_height, new_width, filter)), sizes


@needs_kernels
@pytest.mark.parametrize("size", [(1, 1, 1, 9), (1, 1, 9, 1), (3, 200, 90, 2), (300, 1, 7, 1), (2, 2, 301, 299)])
def test_the_smallest_sizes_fit(size: tuple[int, int, int, int]) -> None:
    height, width, new_height, new_width = size
    picture = picture_of(height, width)
    for filter in FILTERS:
        assert np.array_equal(
            resize(picture, new_height, new_width, filter), resize_with_pillow(picture, new_height, new_width, filter)
        )


@needs_kernels
def test_a_picture_in_another_order_of_memory_is_read_right() -> None:
    picture = np.moveaxis(picture_of(40, 50), 0, 1)[:, ::-1]
    assert np.array_equal(resize(picture, 20, 70, "BICUBIC"), resize_with_pillow(picture, 20, 70, "BICUBIC"))


@needs_kernels
def test_pillow_that_always_begins_with_the_width_is_followed_too(monkeypatch: pytest.MonkeyPatch) -> None:
    """Earlier versions do: the order is read off what the installed one makes of a small picture."""
    with_pillow, picture = resize_with_pillow, picture_of(60, 30, hard=True)
    resized = with_pillow(with_pillow(picture, 60, 50, "BICUBIC"), 20, 50, "BICUBIC")

    def width_first(picture: np.ndarray, height: int, width: int, filter: str) -> np.ndarray:
        return with_pillow(with_pillow(picture, picture.shape[0], width, filter), height, width, filter)

    monkeypatch.setattr(resizing, "resize_with_pillow", width_first)
    resizing._swaps_directions.cache_clear()
    try:
        assert np.array_equal(resize(picture, 20, 50, "BICUBIC"), resized)
    finally:
        resizing._swaps_directions.cache_clear()


def test_without_kernels_pillow_resizes(monkeypatch: pytest.MonkeyPatch) -> None:
    picture = picture_of(30, 40)
    expected = resize(picture, 50, 20, "BICUBIC")
    monkeypatch.setattr(resizing, "library", lambda: None)
    assert np.array_equal(resize(picture, 50, 20, "BICUBIC"), expected)
