"""Pictures of Gemma 3: one square of a fixed size, and with pan-and-scan further squares of parts of a long picture.

`features` of an input are uint8 [3, side, side] with side = `VisionConfig.image_size`, resized without regard to the
picture's form (bilinear); the grid is (1, patches high, patches wide). Pan-and-scan is off unless `do_pan_and_scan` is
set; the first input then is the whole picture, and each crop is an input of its own.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Annotated, Any, ClassVar

import msgspec

from ratoon.core.media import IMAGE, MediaConfig, MediaInput
from ratoon.media.families.base import Positive, Preprocessed, VideoFacts, read_options, wire_pixels
from ratoon.media.resize import resize

if TYPE_CHECKING:
    import numpy as np

START_OF_IMAGE, END_OF_IMAGE = "<start_of_image>", "<end_of_image>"
MAX_CROPS = 16  # that a request may ask for


class Gemma3Options(msgspec.Struct):
    do_pan_and_scan: bool = False
    pan_and_scan_min_crop_size: Positive = 256
    pan_and_scan_max_num_crops: Annotated[int, msgspec.Meta(ge=1, le=MAX_CROPS)] = 4
    pan_and_scan_min_ratio_to_activate: Annotated[float, msgspec.Meta(gt=0)] = 1.2


class Gemma3:
    modalities: ClassVar[tuple[str, ...]] = (IMAGE,)

    def options(self, config: MediaConfig, asked: Mapping[str, Any]) -> Gemma3Options:
        return read_options(Gemma3Options, {}, asked)  # files name none; transformers' processor has its own defaults

    def read_image(self, picture: np.ndarray, config: MediaConfig, options: Gemma3Options, field: str) -> Preprocessed:
        crops = _crops(picture, options) if options.do_pan_and_scan else []
        side = config.vision.image_size
        squares = [resize(one, side, side, "BILINEAR") for one in (picture, *crops)]
        return Preprocessed([square_input(square, config) for square in squares], tile_columns=len(crops))

    def sample(
        self, num_frames: int, fps: float | None, config: MediaConfig, options: Any, max_frames: int
    ) -> list[int]:
        raise AssertionError("it reads no video")

    def read_video(
        self, frames: Iterable[np.ndarray], facts: VideoFacts, config: MediaConfig, options: Any, field: str
    ) -> Preprocessed:
        raise AssertionError("it reads no video")

    def placeholder(self, modality: str, config: MediaConfig) -> int | str | None:
        return START_OF_IMAGE

    def replacement(self, modality: str, preprocessed: Preprocessed, image_token: str) -> str | None:
        one = f"\n\n{START_OF_IMAGE}{image_token}{END_OF_IMAGE}\n\n"
        if not preprocessed.tile_columns:
            return one
        crops = " ".join([one] * preprocessed.tile_columns)
        return f"Here is the original image {one} and here are some crops to help you see better {crops}"


def square_input(square: np.ndarray, config: MediaConfig, modality: str = IMAGE) -> MediaInput:
    """The input of an encoder of squares, [side, side, 3]. `modality`: of what it is a part of."""
    import numpy as np

    patches = square.shape[0] // config.vision.patch_size
    pixels = np.moveaxis(square, -1, 0)
    return MediaInput(modality, config.num_rows, wire_pixels(pixels), (1, patches, patches))


def _crops(picture: np.ndarray, options: Gemma3Options) -> list[np.ndarray]:
    """Parts of a long picture, side by side along its longer side. None: it is not long enough, or too small."""
    height, width = picture.shape[:2]
    longer, shorter = max(height, width), min(height, width)
    if longer / shorter < options.pan_and_scan_min_ratio_to_activate:
        return []
    number = min(math.floor(longer / shorter + 0.5), longer // options.pan_and_scan_min_crop_size)
    number = min(max(2, number), options.pan_and_scan_max_num_crops)
    length = math.ceil(longer / number)
    if min(length, shorter) < options.pan_and_scan_min_crop_size:
        return []
    starts = range(0, length * number, length)
    if width >= height:
        return [picture[:, start : start + length] for start in starts]
    return [picture[start : start + length] for start in starts]
