"""One image or video to the inputs of an encoder: decoded if it is a file, then prepared as the model's family does it.

Files are given to `preprocess_file` in a child process (process.py); what a caller has decoded itself is read by
`preprocess_decoded` where the caller is.
"""

from __future__ import annotations

import math
import operator
import reprlib
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import msgspec

from ratoon.core.errors import RequestError
from ratoon.core.media import IMAGE, MediaConfig
from ratoon.core.wire import Buffer
from ratoon.media.decode import VideoFile, decode_image
from ratoon.media.families import family_of
from ratoon.media.families.base import (
    MAX_FPS,
    MAX_VIDEO_FRAMES,
    MAX_VIDEO_SECONDS,
    MIN_FPS,
    Preprocessed,
    VideoFacts,
)
from ratoon.media.items import VIDEO_FORMS, MediaItem, is_array, is_with_facts
from ratoon.media.pixels import is_picture, require_pillow, rgb_of_array, rgb_of_image, to_numpy, verify_pixels

if TYPE_CHECKING:
    import numpy as np

UNKNOWN_FPS = 24.0  # of frames that are given without it, as transformers takes it


class MediaLimits(msgspec.Struct, frozen=True):
    max_pixels: int  # of a picture before it is resized
    max_frames: int  # of a video that are given to a model


def preprocess_file(
    modality: str, data: Buffer, config: MediaConfig, asked: Mapping[str, Any], limits: MediaLimits, field: str
) -> Preprocessed:
    family = family_of(config.family)
    options = family.options(config, asked)
    if modality == IMAGE:
        return family.read_image(decode_image(bytes(data), field, limits.max_pixels), config, options, field)
    video = VideoFile(bytes(data), field, limits.max_pixels)
    indices = family.sample(video.num_frames, video.fps, config, options, limits.max_frames)
    fps = video.fps or UNKNOWN_FPS
    seconds = [index / fps for index in indices]
    facts = VideoFacts(len(indices) / video.num_frames * fps, seconds, video.num_frames / fps)
    facts.verify(field)
    return family.read_video(video.frames(indices), facts, config, options, field)


class Decoded(NamedTuple):
    """What a caller decoded itself: one picture, or the frames of a video."""

    modality: str
    field: str
    pictures: list[np.ndarray]  # uint8 [height, width, 3], dense. None is the caller's own
    facts: VideoFacts | None = None  # of a video


def read_decoded(item: MediaItem, asked: Mapping[str, Any], limits: MediaLimits) -> Decoded:
    """An image of Pillow is taken as it is, without a look at its EXIF data, as transformers' processors do."""
    require_pillow(item.field)
    if item.modality == IMAGE:
        return Decoded(item.modality, item.field, [_picture(item.field, item.data, limits)])
    frames, facts = item.data if is_with_facts(item.data) else (item.data, {})
    pictures = _pictures(item.field, frames, limits)
    read = _read_facts(item.field, facts, len(pictures), asked)
    read.verify(item.field)
    return Decoded(item.modality, item.field, pictures, read)


def preprocess_decoded(decoded: Decoded, config: MediaConfig, asked: Mapping[str, Any]) -> Preprocessed:
    family = family_of(config.family)
    options, pictures = family.options(config, asked), decoded.pictures
    if decoded.modality == IMAGE:
        return family.read_image(pictures[0], config, options, decoded.field)
    assert decoded.facts is not None, "a video has them"
    return family.read_video(pictures, decoded.facts, config, options, decoded.field)


def is_decoded(item: MediaItem) -> bool:
    data = item.data[0] if is_with_facts(item.data) else item.data
    if item.modality == IMAGE:
        return is_picture(data)
    return is_array(data) or (isinstance(data, Sequence) and not isinstance(data, (str, bytes, bytearray, memoryview)))


def _picture(field: str, picture: Any, limits: MediaLimits) -> np.ndarray:
    if not hasattr(picture, "getbands"):
        return rgb_of_array(field, picture, limits.max_pixels)
    verify_pixels(field, picture.height, picture.width, limits.max_pixels)
    try:
        return rgb_of_image(picture)
    except Exception as error:  # an image of Pillow may be a file that is read only now
        raise RequestError(field, f"can't be read ({error})", "an image that is whole") from None


def _pictures(field: str, frames: Any, limits: MediaLimits) -> list[np.ndarray]:
    """The frames of a video, all of one size."""
    if is_array(frames):
        frames = to_numpy(field, frames)
        if frames.ndim != 4:
            raise RequestError(field, f"has the shape {list(frames.shape)}", VIDEO_FORMS)
    if len(frames) == 0:
        raise RequestError(field, "has no frames", "at least one")
    if len(frames) > limits.max_frames:
        raise RequestError(field, f"has {len(frames)} frames", f"at most {limits.max_frames} (max_video_frames)")
    for index, frame in enumerate(frames):
        if not is_picture(frame):
            raise RequestError(f"{field}[{index}]", f"{type(frame).__name__} is not a frame", VIDEO_FORMS)
    pictures = [_picture(f"{field}[{index}]", frame, limits) for index, frame in enumerate(frames)]
    for index, picture in enumerate(pictures):
        if picture.shape != pictures[0].shape:
            (height, width), (first_height, first_width) = picture.shape[:2], pictures[0].shape[:2]
            problem = f"has {width} × {height} pixels, and the first frame {first_width} × {first_height}"
            raise RequestError(f"{field}[{index}]", problem, "frames of one size")
    return pictures


def _read_facts(field: str, facts: Mapping[str, Any], num_frames: int, asked: Mapping[str, Any]) -> VideoFacts:
    """When the given frames are seen. How many there are in a second is known by the facts beside them, by the option
    `fps`, or else assumed as transformers does it. The names are those of transformers' `VideoMetadata`."""
    if facts.get("fps") is None:
        fps = float(asked.get("fps") or UNKNOWN_FPS)
        return VideoFacts(fps, [index / fps for index in range(num_frames)])
    fps = _number(f"{field}[1].fps", facts["fps"], "a number of frames in a second", MIN_FPS, MAX_FPS)
    duration, total = facts.get("duration"), facts.get("total_num_frames")
    indices = _frames_indices(f"{field}[1].frames_indices", facts.get("frames_indices"), num_frames)
    if duration is not None:
        duration = _number(f"{field}[1].duration", duration, "a number of seconds", 1 / MAX_FPS, MAX_VIDEO_SECONDS)
    seconds = [index / fps for index in (range(num_frames) if indices is None else indices)]
    if total is None or indices is None:
        return VideoFacts(fps, seconds, duration)
    total = _number(f"{field}[1].total_num_frames", total, "a number of frames", 1, MAX_VIDEO_FRAMES)
    return VideoFacts(num_frames / total * fps, seconds, duration)


def _number(field: str, value: Any, what: str, least: float, most: float) -> float:
    """RequestError: it is not a number from `least` to `most`."""
    try:
        number = float(value)
    except (TypeError, ValueError, OverflowError):
        number = math.nan
    if not least <= number <= most:
        raise RequestError(field, f"{reprlib.repr(value)} is not {what}", f"a number from {least:g} to {most:g}")
    return number


def _frames_indices(field: str, indices: Any, num_frames: int) -> list[int] | None:
    if indices is None:
        return None
    try:
        listed = [operator.index(index) for index in indices]
    except TypeError:
        listed = [-1]
    if len(listed) != num_frames or min(listed) < 0 or max(listed) >= MAX_VIDEO_FRAMES:
        raise RequestError(field, "does not fit the frames", f"a list of {num_frames} places, one for each frame")
    return listed
