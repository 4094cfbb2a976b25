"""Encoded images and videos to pictures: Pillow reads images, PyAV reads videos.

What is called here is given data of strangers, and runs in a process with limits (process.py). Sizes are taken from the
header of a file and checked before anything else of it is read.
"""

from __future__ import annotations

import io
from collections.abc import Callable, Iterator
from fractions import Fraction
from typing import TYPE_CHECKING, Any

from ratoon.core.errors import RequestError
from ratoon.media.families.base import MAX_FPS, MAX_VIDEO_FRAMES, MIN_FPS
from ratoon.media.pixels import require_pillow, rgb_of_image, verify_pixels

if TYPE_CHECKING:
    import numpy as np

# Those that are found in the wild. Pillow knows more, some of which run other programs.
IMAGE_FORMATS = ("JPEG", "MPO", "PNG", "GIF", "WEBP", "BMP", "DIB", "TIFF", "PPM", "JPEG2000", "AVIF")
KNOWN_FORMATS = "JPEG, PNG, GIF, WebP, BMP, TIFF, PPM, JPEG 2000 or AVIF"
HOW_TO_INSTALL = "pip install 'ratoon[audio]'"
MAX_DECODED_FRAMES = 100_000  # of a file whose header does not say how many it has


def decode_image(data: bytes, field: str, max_pixels: int) -> np.ndarray:
    """The first picture of a file as uint8 [height, width, 3], turned as its EXIF data says."""
    require_pillow(field)
    from PIL import Image, ImageOps, UnidentifiedImageError

    if not data:
        raise RequestError(field, "is empty", f"a file in the format {KNOWN_FORMATS}")
    Image.MAX_IMAGE_PIXELS = None  # the limit is checked below
    try:
        with Image.open(io.BytesIO(data), formats=_available_formats()) as image:
            verify_pixels(field, image.height, image.width, max_pixels)
            return rgb_of_image(ImageOps.exif_transpose(image))
    except UnidentifiedImageError:
        problem = "is not an image in a known format, or is damaged"
        raise RequestError(field, problem, f"a file in the format {KNOWN_FORMATS}") from None
    except (RequestError, MemoryError):
        raise
    except Exception as error:  # decoders raise whatever they come across
        raise RequestError(field, f"can't be decoded ({error})", "an image that is whole") from None


def _available_formats() -> list[str]:
    """Which formats there are depends on how Pillow was built."""
    from PIL import Image

    Image.init()
    return [name for name in IMAGE_FORMATS if name in Image.OPEN]


class VideoFile:
    """The frames of an encoded video, in order."""

    def __init__(self, data: bytes, field: str, max_pixels: int) -> None:
        try:
            import av
        except ImportError:
            raise RequestError(field, "videos need PyAV, which is not installed", HOW_TO_INSTALL) from None
        self._av: Any = av
        self._data = data
        self._field = field
        self._max_pixels = max_pixels
        with self._reading() as container:
            stream = self._video_of(container)
            self.fps = _rate(stream.average_rate or stream.guessed_rate)
            self.num_frames = int(stream.frames)
        if self.fps is not None and not MIN_FPS <= self.fps <= MAX_FPS:
            problem = f"has {self.fps:g} frames in a second by its header"
            raise RequestError(field, problem, f"from {MIN_FPS:g} to {MAX_FPS:g}")
        if self.num_frames > MAX_VIDEO_FRAMES:
            raise RequestError(field, f"has {self.num_frames} frames by its header", f"at most {MAX_VIDEO_FRAMES}")
        if self.num_frames < 1:  # the header does not say it
            self.num_frames = self._count()

    def frames(self, indices: list[int]) -> Iterator[np.ndarray]:
        """Yields the frames with these indices, which are in rising order. A file may have fewer than its header says:
        then the last one that it has takes the place of the others."""
        wanted, last = iter(indices), None
        number = next(wanted, None)
        with self._reading() as container:
            for index, frame in enumerate(self._decoded(container)):
                if number is None:
                    return
                if index == number:
                    last = frame.to_ndarray(format="rgb24")
                while number is not None and number <= index:
                    yield last  # type: ignore[misc]
                    number = next(wanted, None)
        if last is None:
            raise RequestError(self._field, "has no frame that can be decoded", "a video that is whole")
        while number is not None:
            yield last
            number = next(wanted, None)

    def _count(self) -> int:
        number = 0
        with self._reading() as container:
            for _ in self._decoded(container):
                number += 1
                if number > MAX_DECODED_FRAMES:
                    problem = f"has more than {MAX_DECODED_FRAMES} frames"
                    raise RequestError(self._field, problem, "a shorter video")
        if number == 0:
            raise RequestError(self._field, "has no frames", "a video")
        return number

    def _decoded(self, container: Any) -> Iterator[Any]:
        stream = self._video_of(container)
        stream.codec_context.thread_count = 1  # the process may not start threads
        for frame in container.decode(stream):
            verify_pixels(self._field, frame.height, frame.width, self._max_pixels)
            yield frame

    def _video_of(self, container: Any) -> Any:
        if not container.streams.video:
            raise RequestError(self._field, "has no video stream", "a video file")
        stream = container.streams.video[0]
        if not stream.height or not stream.width:
            raise RequestError(self._field, "has a video stream without a size", "a video file that is whole")
        verify_pixels(self._field, stream.height, stream.width, self._max_pixels)
        return stream

    def _reading(self) -> _Reading:
        return _Reading(lambda: self._av.open(io.BytesIO(self._data)), self._field)


class _Reading:
    """An open container. Errors of FFmpeg become those of the request."""

    def __init__(self, open_container: Callable[[], Any], field: str) -> None:
        self._open = open_container
        self._field = field
        self._container: Any = None

    def __enter__(self) -> Any:
        try:
            self._container = self._open()
        except MemoryError:
            raise
        except Exception as error:
            raise self._explain(error) from None
        return self._container

    def __exit__(self, kind: Any, error: BaseException | None, trace: Any) -> None:
        self._container.close()
        if isinstance(error, Exception) and not isinstance(error, (RequestError, MemoryError)):
            raise self._explain(error) from None

    def _explain(self, error: Exception) -> RequestError:
        return RequestError(self._field, f"can't be read as a video ({error})", "a video file that is whole")


def _rate(rate: Fraction | None) -> float | None:
    return None if not rate else float(rate)
