"""Pictures of Qwen2-VL and Qwen2.5-VL: any size, rounded to whole blocks of merged patches.

`features` are uint8 [patches, channels * frames * patch_size * patch_size], the rows in the order of transformers'
`pixel_values`: step in time, then blocks of merge_size × merge_size patches row by row, then the patches of a block row
by row. A row is [channel][frame][y][x]. An image has frames = 1 (transformers repeats it over temporal_patch_size: the
encoder does that here) and the grid (1, patches high, patches wide); a video has frames = temporal_patch_size, and its
last frame is repeated where they are not full. `num_rows` is the number of patches / merge_size².
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any, ClassVar

import msgspec

from ratoon.core.errors import RequestError
from ratoon.core.media import IMAGE, VIDEO, MediaConfig, MediaInput
from ratoon.core.wire import WireTensor
from ratoon.media.families.base import FramesPerSecond, Positive, Preprocessed, VideoFacts, read_options
from ratoon.media.resize import resize

if TYPE_CHECKING:
    import numpy as np

MAX_ASPECT = 200
IMAGE_PIXELS = (56 * 56, 28 * 28 * 1280)  # least and most after resizing, where neither files nor a request say more
VIDEO_PIXELS = (128 * 28 * 28, 28 * 28 * 768)  # of a frame
MAX_RESIZED_PIXELS = 2**25  # whatever is asked for
MAX_VIDEO_PIXELS = 2**27  # of all frames
FILE_FPS = 2.0  # frames that are taken of a second of a file, where nothing else is said
OF_FILES = ("min_pixels", "max_pixels", "size", "fps", "min_frames", "max_frames")


class PixelSize(msgspec.Struct, forbid_unknown_fields=True):
    """Pixels of a picture, in spite of the names."""

    shortest_edge: Positive | None = None
    longest_edge: Positive | None = None
    min_pixels: Positive | None = None  # earlier names in files
    max_pixels: Positive | None = None


class Qwen2VLOptions(msgspec.Struct):
    min_pixels: Positive | None = None
    max_pixels: Positive | None = None
    size: PixelSize | None = None
    fps: FramesPerSecond | None = None  # frames that are taken of a second of a file
    num_frames: Positive | None = None  # in the place of it
    min_frames: Positive = 4
    max_frames: Positive = 768

    def pixels(self, default: tuple[int, int]) -> tuple[int, int]:
        size = self.size or PixelSize()
        least = self.min_pixels or size.shortest_edge or size.min_pixels or default[0]
        most = self.max_pixels or size.longest_edge or size.max_pixels or default[1]
        return least, most


class BothOptions(msgspec.Struct):
    image: Qwen2VLOptions
    video: Qwen2VLOptions


class Qwen2VL:
    modalities: ClassVar[tuple[str, ...]] = (IMAGE, VIDEO)

    def options(self, config: MediaConfig, asked: Mapping[str, Any]) -> BothOptions:
        if asked.get("fps") is not None and asked.get("num_frames") is not None:
            raise RequestError("mm_processor_kwargs.fps", "and num_frames exclude each other", "one of the two")
        of_files = config.processor
        of_video = of_files.get("video_processor") or of_files
        return BothOptions(
            read_options(Qwen2VLOptions, _pixels_alone(of_files, asked), asked),
            read_options(Qwen2VLOptions, _pixels_alone(of_video, asked), asked),
        )

    def read_image(self, picture: np.ndarray, config: MediaConfig, options: BothOptions, field: str) -> Preprocessed:
        least, most = options.image.pixels(IMAGE_PIXELS)
        height, width = _fitting_size(field, picture.shape[0], picture.shape[1], config, least, most)
        frames = resize(picture, height, width, "BICUBIC")[None]
        return Preprocessed([_as_input(IMAGE, frames, 1, config)])

    def sample(
        self, num_frames: int, fps: float | None, config: MediaConfig, options: BothOptions, max_frames: int
    ) -> list[int]:
        """Whole groups of frames at equal distances, as transformers' `sample_frames` chooses them. (Where its last
        place is behind the last frame, by rounding, it is left out here.)"""
        import numpy as np

        asked, group = options.video, config.vision.temporal_patch_size
        if asked.num_frames is not None:  # whatever min_frames and max_frames are
            wanted: float = min(round(asked.num_frames / group) * group, max_frames)
        else:
            wanted = num_frames if fps is None else num_frames / fps * (asked.fps or FILE_FPS)
            wanted = min(max(wanted, asked.min_frames), asked.max_frames, max_frames, num_frames)
        number = min(math.floor(wanted / group) * group, math.floor(num_frames / group) * group)
        if number == 0:
            return [0]
        indices: list[int] = (np.arange(number) * (num_frames / number)).astype(np.float32).astype(int).tolist()
        return indices

    def read_video(
        self,
        frames: Iterable[np.ndarray],
        facts: VideoFacts,
        config: MediaConfig,
        options: BothOptions,
        field: str,
    ) -> Preprocessed:
        import numpy as np

        least, most = options.video.pixels(VIDEO_PIXELS)
        num_frames = len(facts.frame_seconds)
        size: tuple[int, int] | None = None
        resized = []
        for frame in frames:
            if size is None:
                size = _fitting_size(field, frame.shape[0], frame.shape[1], config, least, most)
                if num_frames * size[0] * size[1] > MAX_VIDEO_PIXELS:
                    problem = f"has {num_frames} frames of {size[1]} × {size[0]} pixels after resizing"
                    expected = f"at most {MAX_VIDEO_PIXELS} pixels in all: fewer or smaller frames"
                    raise RequestError(field, problem, expected)
            resized.append(resize(frame, *size, "BICUBIC"))
        group = config.vision.temporal_patch_size
        resized += resized[-1:] * (-len(resized) % group)
        media_input = _as_input(VIDEO, np.stack(resized), group, config)
        return Preprocessed([media_input], seconds_per_step=group / facts.fps)

    def placeholder(self, modality: str, config: MediaConfig) -> int | str | None:
        return config.image_token_id if modality == IMAGE else config.video_token_id

    def replacement(self, modality: str, preprocessed: Preprocessed, image_token: str) -> str | None:
        return None


def _pixels_alone(of_files: Mapping[str, Any], asked: Mapping[str, Any]) -> dict[str, Any]:
    """What files say of sizes. A size that is asked for takes the place of theirs, whatever names they use."""
    kept = {name: value for name, value in of_files.items() if name in OF_FILES}
    if isinstance(asked.get("size"), Mapping):
        kept.pop("min_pixels", None)
        kept.pop("max_pixels", None)
    if asked.get("num_frames") is not None:
        kept.pop("fps", None)
    return kept


def _fitting_size(
    field: str, height: int, width: int, config: MediaConfig, min_pixels: int, max_pixels: int
) -> tuple[int, int]:
    """A size that fits, if it is not too large for any encoder."""
    fitting = _nearest_size(field, height, width, config, min_pixels, max_pixels)
    if fitting[0] * fitting[1] > MAX_RESIZED_PIXELS:
        problem = f"has {fitting[1]} × {fitting[0]} pixels after resizing"
        raise RequestError(field, problem, f"at most {MAX_RESIZED_PIXELS}, by smaller min_pixels or max_pixels")
    return fitting


def _nearest_size(
    field: str, height: int, width: int, config: MediaConfig, min_pixels: int, max_pixels: int
) -> tuple[int, int]:
    """Multiples of a block of merged patches, near the picture's form, with a number of pixels between the two."""
    if max(height, width) > MAX_ASPECT * min(height, width):
        problem = f"has {width} × {height} pixels"
        raise RequestError(field, problem, f"a longer side of at most {MAX_ASPECT} times the shorter one")
    block = config.vision.patch_size * config.vision.merge_size
    fitting = round(height / block) * block, round(width / block) * block
    if fitting[0] * fitting[1] > max_pixels:
        scale = math.sqrt(height * width / max_pixels)
        return (
            max(block, math.floor(height / scale / block) * block),
            max(block, math.floor(width / scale / block) * block),
        )
    if fitting[0] * fitting[1] < min_pixels:
        scale = math.sqrt(min_pixels / (height * width))
        return math.ceil(height * scale / block) * block, math.ceil(width * scale / block) * block
    return fitting


def _as_input(modality: str, frames: np.ndarray, frames_of_patch: int, config: MediaConfig) -> MediaInput:
    """`frames` is [frames, height, width, 3], whose sizes are multiples of all that follows."""
    import numpy as np

    patch, merge = config.vision.patch_size, config.vision.merge_size
    num_frames, height, width, channels = frames.shape
    steps, high, wide = num_frames // frames_of_patch, height // patch, width // patch
    cut = frames.reshape(
        steps, frames_of_patch, high // merge, merge, patch, wide // merge, merge, patch, channels
    )  # step, frame, block row, patch row, y, block column, patch column, x, channel
    rows = np.transpose(cut, (0, 2, 5, 3, 6, 8, 1, 4, 7))
    rows = rows.reshape(steps * high * wide, channels * frames_of_patch * patch * patch)
    features = WireTensor("uint8", rows.shape, rows.data)  # the rows are a copy already
    return MediaInput(modality, len(rows) // merge**2, features, (steps, high, wide))
