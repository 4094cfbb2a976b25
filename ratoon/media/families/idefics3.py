"""Pictures and videos of Idefics3 and SmolVLM: tiles of a large picture, row by row, then the whole picture as one more
tile; and some frames of a video, each as one tile, with the time at which it is seen in the text before it.

`features` of an input are uint8 [3, side, side], where side is `max_image_size` of the model's files (else the image
size of the encoder); the grid is (1, patches high, patches wide). A picture is resized to a longest edge, then to whole
tiles in both directions, and with `do_image_splitting` off to one tile. So every tile is full: there is nothing to pad,
and the `pixel_attention_mask` of transformers is 1 everywhere. A frame is resized as a picture is whose splitting is
off. Which frames are taken, and the text around them, is what transformers' SmolVLMProcessor does.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from datetime import timedelta
from typing import TYPE_CHECKING, Any, ClassVar

import msgspec

from ratoon.core.errors import ModelError
from ratoon.core.media import IMAGE, VIDEO, MediaConfig
from ratoon.media.families.base import FramesPerSecond, Positive, Preprocessed, VideoFacts, read_options
from ratoon.media.families.gemma3 import square_input
from ratoon.media.resize import resize

if TYPE_CHECKING:
    import numpy as np

MAX_EDGE = 4096  # of the resized picture
TILES_ON_AN_EDGE = 4  # where files do not say how large pictures are made
AROUND_IMAGE, GLOBAL_IMAGE, VIDEO_TEXT = "<fake_token_around_image>", "<global-img>", "<video>"
FILE_FPS, FILE_FRAMES = 1.0, 64  # frames of a second of a file, and of all of it, where nothing else is said
MAX_FRAMES = 2048  # of a file, whatever is asked for
UNKNOWN_FPS = 24.0  # of a file that does not say it
SKIPPED_SECONDS = 1  # at both ends of a long video


class Edge(msgspec.Struct, forbid_unknown_fields=True):
    longest_edge: Positive


class Idefics3Options(msgspec.Struct):
    size: Edge | None = None
    do_image_splitting: bool = True
    fps: FramesPerSecond = FILE_FPS  # frames that are taken of a second of a file
    num_frames: Positive = FILE_FRAMES  # that are taken at most

    def longest_edge(self, side: int) -> int:
        return TILES_ON_AN_EDGE * side if self.size is None else self.size.longest_edge


class BothOptions(msgspec.Struct):
    image: Idefics3Options
    video: Idefics3Options


class Idefics3:
    modalities: ClassVar[tuple[str, ...]] = (IMAGE, VIDEO)

    def options(self, config: MediaConfig, asked: Mapping[str, Any]) -> BothOptions:
        of_images = {name: value for name, value in config.processor.items() if name in ("size", "do_image_splitting")}
        return BothOptions(
            read_options(Idefics3Options, of_images, asked),
            read_options(Idefics3Options, _of_video(config.processor), asked),
        )

    def read_image(self, picture: np.ndarray, config: MediaConfig, options: BothOptions, field: str) -> Preprocessed:
        side = _tile_side(config)
        edge = options.image.longest_edge(side)
        picture = resize(picture, *_with_longest_edge(picture.shape[0], picture.shape[1], edge), "LANCZOS")
        if not options.image.do_image_splitting:
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
        self, num_frames: int, fps: float | None, config: MediaConfig, options: BothOptions, max_frames: int
    ) -> list[int]:
        """Frames at equal distances, as transformers' `sample_frames` chooses them: `fps` in a second, but not more
        than `num_frames`. Of a video that is long for so many, they leave out the first and the last second."""
        import numpy as np

        asked, rate = options.video, fps or UNKNOWN_FPS
        most, duration = min(asked.num_frames, max_frames, MAX_FRAMES), num_frames / rate
        wanted = max(1, min(round(asked.fps * duration), most))
        first, last = 0, num_frames - 1
        if duration - 2 * SKIPPED_SECONDS > most * asked.fps:
            begin, end = int(SKIPPED_SECONDS * rate), min(int(num_frames - SKIPPED_SECONDS * rate), last)
            if begin < end:
                first, last = begin, end
        indices: list[int] = np.unique(np.linspace(first, last, wanted, dtype=int)).tolist()
        return indices

    def read_video(
        self, frames: Iterable[np.ndarray], facts: VideoFacts, config: MediaConfig, options: BothOptions, field: str
    ) -> Preprocessed:
        side = _tile_side(config)
        edge = min(options.video.longest_edge(side), MAX_EDGE)
        tiles = []
        for frame in frames:
            frame = resize(frame, *_with_longest_edge(frame.shape[0], frame.shape[1], edge), "LANCZOS")
            tiles.append(square_input(resize(frame, side, side, "LANCZOS"), config, VIDEO))
        duration = facts.frame_seconds[-1] if facts.duration is None else facts.duration
        return Preprocessed(tiles, frame_seconds=list(facts.frame_seconds), duration=duration)

    def placeholder(self, modality: str, config: MediaConfig) -> int | str | None:
        return config.image_token_id if modality == IMAGE else VIDEO_TEXT

    def replacement(self, modality: str, preprocessed: Preprocessed, image_token: str) -> str | None:
        whole = f"{AROUND_IMAGE}{GLOBAL_IMAGE}{image_token}{AROUND_IMAGE}"
        if modality == VIDEO:
            return _video_text(preprocessed, whole)
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


def _of_video(of_files: Mapping[str, Any]) -> dict[str, Any]:
    """What files say of videos. The numbers of frames are in a field of their own, and the size in that one counts only
    where there is no other."""
    found = of_files.get("video_processor") or of_files
    sampling = found.get("video_sampling") or {}
    if not isinstance(sampling, Mapping):
        raise ModelError("preprocessor_config.json", "video_sampling is no object", "fetch the file again")
    return {
        "size": found.get("size") or sampling.get("video_size"),
        "fps": sampling.get("fps") or found.get("fps"),
        "num_frames": sampling.get("max_frames") or found.get("num_frames"),
    }


def _video_text(video: Preprocessed, frame: str) -> str:
    """The text of a video with `frame` for each of its frames."""
    duration = timedelta(seconds=int(video.duration))
    number = number_in_words(len(video.frame_seconds))
    text = f"You are provided the following series of {number} frames from a {duration} [H:MM:SS] video.\n"
    for seconds in video.frame_seconds:
        text += f"\nFrame from {int(seconds // 60):02d}:{int(seconds % 60):02d}:{frame}"
    return text + "\n\n"


BELOW_TWENTY = (
    "zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine", "ten", "eleven", "twelve",
    "thirteen", "fourteen", "fifteen", "sixteen", "seventeen", "eighteen", "nineteen",
)  # fmt: skip
TENS = ("twenty", "thirty", "forty", "fifty", "sixty", "seventy", "eighty", "ninety")


def number_in_words(number: int) -> str:
    """A number below a million in British English, which models were trained with: "one hundred and four"."""
    if number < 20:
        return BELOW_TWENTY[number]
    if number < 100:
        return TENS[number // 10 - 2] + (f"-{BELOW_TWENTY[number % 10]}" if number % 10 else "")
    unit, name = (100, "hundred") if number < 1000 else (1000, "thousand")
    rest = number % unit
    joint = ", " if rest >= 100 else " and "
    return f"{number_in_words(number // unit)} {name}" + (f"{joint}{number_in_words(rest)}" if rest else "")


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
