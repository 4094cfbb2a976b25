"""Pictures of another size, with the bits that Pillow's `resize` gives: by the CPU kernels where they are built, which
take a fifth of the time, and else by Pillow.

A new row or column is a weighted sum of old ones. The weights come from a filter that is stretched over more of the old
ones where a picture shrinks, as whole numbers with BITS behind the point. One direction follows the other, and each
rounds to bytes.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import cache, lru_cache
from typing import TYPE_CHECKING, NamedTuple

from ratoon.layers.native import Kernels, library

if TYPE_CHECKING:
    import numpy as np

BITS = 22  # of a weight, behind the point
LANES = 16  # bytes for a column while several rows are resized at once
MAX_TABLES = 64  # that are kept: pictures often come in the same sizes


class Weights(NamedTuple):
    """Holds the weights of a resize in one direction. All rows or columns that are named exist; the weights of some of
    them are 0."""

    first: np.ndarray  # int32 [new size]: of the old rows or columns that a new one is a sum of
    weights: np.ndarray  # int32 [new size, taps]


def resize(picture: np.ndarray, height: int, width: int, filter: str) -> np.ndarray:
    """`picture` is uint8 [height, width, 3]; `filter` names a filter of Pillow: BILINEAR, BICUBIC or LANCZOS. A picture
    that has the size already is returned as it is."""
    import numpy as np

    if picture.shape[:2] == (height, width):
        return picture
    kernels = library()
    if kernels is None:
        return resize_with_pillow(picture, height, width, filter)
    picture = np.ascontiguousarray(picture)
    if _is_height_first(picture.shape[0], picture.shape[1], height, width) and _swaps_directions():
        picture = _resize_height(kernels, picture, height, filter)
        return _resize_width(kernels, picture, width, filter)
    picture = _resize_width(kernels, picture, width, filter)
    return _resize_height(kernels, picture, height, filter)


# The functions themselves: while a pass of a model is recorded, the attributes of the kernel set are others.


def _resize_width(kernels: Kernels, picture: np.ndarray, width: int, filter: str) -> np.ndarray:
    import numpy as np

    height, old_width, channels = picture.shape
    if old_width == width:
        return picture
    first, weights = weights_of(old_width, width, filter)
    resized = np.empty((height, width, channels), np.uint8)
    beside = np.empty((old_width, LANES), np.uint8)
    tables = first.ctypes.data, weights.ctypes.data, weights.shape[1]
    to = beside.ctypes.data, resized.ctypes.data
    run = kernels.functions["ratoon_resize_width"]
    run(picture.ctypes.data, height, old_width, width, *tables, *to)
    return resized


def _resize_height(kernels: Kernels, picture: np.ndarray, height: int, filter: str) -> np.ndarray:
    import numpy as np

    old_height, width, channels = picture.shape
    if old_height == height:
        return picture
    first, weights = weights_of(old_height, height, filter)
    resized = np.empty((height, width, channels), np.uint8)
    tables = first.ctypes.data, weights.ctypes.data, weights.shape[1]
    kernels.functions["ratoon_resize_height"](
        picture.ctypes.data, width * channels, height, *tables, resized.ctypes.data
    )
    return resized


def _is_height_first(old_height: int, old_width: int, height: int, width: int) -> bool:
    """Whether Pillow begins with the height, in versions that do not always begin with the width. Sums are rounded in
    between, so that the order shows in the result."""
    return height < old_height and old_height - height > 2 * (old_width - width)


@cache
def _swaps_directions() -> bool:
    """Whether the installed Pillow is such a version, by what it makes of a small picture."""
    import numpy as np

    kernels = library()
    assert kernels is not None
    picture = np.random.default_rng(0).integers(0, 2, (16, 8, 3), dtype=np.uint8) * 255
    lower = _resize_height(kernels, picture, 8, "BICUBIC")
    return np.array_equal(_resize_width(kernels, lower, 16, "BICUBIC"), resize_with_pillow(picture, 8, 16, "BICUBIC"))


def prepare_to_resize() -> None:
    """Loads the kernels, for a process that forks later."""
    if library() is not None:
        _swaps_directions()


def resize_with_pillow(picture: np.ndarray, height: int, width: int, filter: str) -> np.ndarray:
    import numpy as np
    from PIL import Image

    return np.asarray(Image.fromarray(picture).resize((width, height), getattr(Image.Resampling, filter)))


@lru_cache(MAX_TABLES)
def weights_of(old_size: int, new_size: int, filter: str) -> Weights:
    """The sums are taken in the order in which Pillow takes them, since their last bits matter."""
    import numpy as np

    shape, reach = FILTERS[filter]
    scale = old_size / new_size
    stretch = max(scale, 1.0)
    centers = (np.arange(new_size) + 0.5) * scale
    support = reach * stretch
    begins = np.maximum((centers - support + 0.5).astype(np.int64), 0)  # towards 0
    ends = np.minimum((centers + support + 0.5).astype(np.int64), old_size)
    taps = int((ends - begins).max())
    first = np.minimum(begins, old_size - taps)
    found = np.zeros((new_size, taps))
    total = np.zeros(new_size)
    for tap in range(taps):
        index = first + tap
        values = shape((index - centers + 0.5) * (1.0 / stretch))
        found[:, tap] = np.where((index >= begins) & (index < ends), values, 0.0)
        total += found[:, tap]
    found /= np.where(total == 0.0, 1.0, total)[:, None]
    scaled = found * (1 << BITS)
    whole = np.where(scaled < 0, scaled - 0.5, scaled + 0.5).astype(np.int32)  # towards 0
    return Weights(first.astype(np.int32), np.ascontiguousarray(whole))


# ---- filters: the weight of a row or column by its distance, and the distance from which on it is 0 ----


def _bilinear(distances: np.ndarray) -> np.ndarray:
    import numpy as np

    return np.maximum(1.0 - np.abs(distances), 0.0)


def _bicubic(distances: np.ndarray) -> np.ndarray:
    import numpy as np

    a = -0.5
    x = np.abs(distances)
    near = ((a + 2.0) * x - (a + 3.0)) * x * x + 1
    far = (((x - 5) * x + 8) * x - 4) * a
    return np.where(x < 1.0, near, np.where(x < 2.0, far, 0.0))


def _lanczos(distances: np.ndarray) -> np.ndarray:
    import numpy as np

    values = _sinc(distances) * _sinc(distances / 3)
    return np.where((distances >= -3.0) & (distances < 3.0), values, 0.0)


def _sinc(x: np.ndarray) -> np.ndarray:
    import numpy as np

    angles = np.where(x == 0.0, 1.0, x) * math.pi
    return np.where(x == 0.0, 1.0, np.sin(angles) / angles)


FILTERS: dict[str, tuple[Callable[[np.ndarray], np.ndarray], float]] = {
    "BILINEAR": (_bilinear, 1.0),
    "BICUBIC": (_bicubic, 2.0),
    "LANCZOS": (_lanczos, 3.0),
}
