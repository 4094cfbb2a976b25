"""Pictures of Idefics3 and SmolVLM: tiles of a large picture, row by row, then the whole picture as one more tile.

`features` of an input are uint8 [3, side, side], where side is `max_image_size` of the model's files (else the image
size of the encoder); the grid is (1, patches high, patches wide). A picture is resized to a longest edge, then to whole
tiles in both directions, and with `do_image_splitting` off to one tile. So every tile is full: there is nothing to pad,
and the `pixel_attention_mask` of transformers is 1 everywhere.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Annotated, Any, ClassVar

import msgspec

from ratoon.core.media import IMAGE, MediaConfig
from ratoon.media.families.base import Preprocessed, read_options
from ratoon.media.families.gemma3 import square_input
from ratoon.media.resize import resize

if TYPE_CHECKING:
    import numpy as np

MAX_EDGE = 4096  # of the resized picture
TILES_ON_AN_EDGE = 4  # where files do not say how large pictures are made
AROUND_IMAGE, GLOBAL_IMAGE = "<fake_token_around_image>", "<global-img>"


class Edge(msgspec.Struct, forbid_unknown_fields=True):
    longest_edge: Annotated[int, msgspec.Meta(ge=1)]


class Idefics3Options(msgspec.Struct):
    size: Edge | None = None
    do_image_splitting: bool = True


class Idefics3:
    modalities: ClassVar[tuple[str, ...]] = (IMAGE,)

    def options(self, config: MediaConfig, asked: Mapping[str, Any]) -> Idefics3Options:
        return read_options(Idefics3Options, config.processor, asked)

    def read_image(
        self, picture: np.ndarray, config: MediaConfig, options: Idefics3Options, field: str
    ) -> Preprocessed:
        side = _tile_side(config)
        edge = TILES_ON_AN_EDGE * side if options.size is None else options.size.longest_edge
        picture = resize(picture, *_with_longest_edge(picture.shape[0], picture.shape[1], edge), "LANCZOS")
        if not options.do_image_splitting:
            return Preprocessed([square_input(resize(picture, side, side, "LANCZOS"), config)])
        picture = resize(picture, *_whole_tiles(picture.shape[0], picture.shape[1], side), "LANCZOS")
        rows, columns = picture.shape[0] // side, picture.shape[1] // side
        if rows == columns == 1:
            return Preprocessed([square_input(picture, config)])
        tiles = [
            picture[row * side : (row + 1) * side, column * side : (column + 1) * side]
            for row in range(rows)
            for column in range(columns)
        ]
        tiles.append(resize(picture, side, side, "LANCZOS"))
        return Preprocessed([square_input(tile, config) for tile in tiles], rows, columns)

    def sample(
        self, num_frames: int, fps: float | None, config: MediaConfig, options: Any, max_frames: int
    ) -> list[int]:
        raise AssertionError("it reads no video")

    def read_video(
        self, frames: Iterable[np.ndarray], num_frames: int, fps: float, config: MediaConfig, options: Any, field: str
    ) -> Preprocessed:
        raise AssertionError("it reads no video")

    def placeholder(self, modality: str, config: MediaConfig) -> int | str:
        return config.image_token_id

    def replacement(self, modality: str, preprocessed: Preprocessed, image_token: str) -> str | None:
        whole = f"{AROUND_IMAGE}{GLOBAL_IMAGE}{image_token}{AROUND_IMAGE}"
        if not preprocessed.tile_rows:
            return whole
        rows = (
            "".join(
                f"{AROUND_IMAGE}<row_{row}_col_{column}>{image_token}"
                for column in range(1, preprocessed.tile_columns + 1)
            )
            for row in range(1, preprocessed.tile_rows + 1)
        )
        return "".join(f"{row}\n" for row in rows) + f"\n{whole}"


def _tile_side(config: MediaConfig) -> int:
    asked = config.processor.get("max_image_size")
    if isinstance(asked, Mapping) and isinstance(asked.get("longest_edge"), int):
        return int(asked["longest_edge"])
    return config.vision.image_size


def _with_longest_edge(height: int, width: int, edge: int) -> tuple[int, int]:
    """A size of the same form with this longest edge; the other one is even."""
    aspect = width / height
    if width >= height:
        width, height = edge, int(edge / aspect)
        height += height % 2
    else:
        height, width = edge, int(edge * aspect)
        width += width % 2
    height, width = max(height, 1), max(width, 1)
    if max(height, width) <= MAX_EDGE:
        return height, width
    aspect = width / height
    return (max(int(MAX_EDGE / aspect), 1), MAX_EDGE) if width >= height else (MAX_EDGE, max(int(MAX_EDGE * aspect), 1))


def _whole_tiles(height: int, width: int, side: int) -> tuple[int, int]:
    """The next multiples of a tile; that of the shorter edge follows the picture's form."""
    aspect = width / height
    if width >= height:
        width = math.ceil(width / side) * side
        height = max(1, math.ceil(int(width / aspect) / side)) * side
    else:
        height = math.ceil(height / side) * side
        width = max(1, math.ceil(int(height * aspect) / side)) * side
    return height, width
