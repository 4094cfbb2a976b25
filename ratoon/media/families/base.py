"""What a family of models does with pictures, as an interface, and the reading of its options.

Options have the names of the arguments of transformers' processors. They come from the model's files, from the setting
`mm_processor_kwargs` and from a request, each over the one before.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Protocol, TypeVar

import msgspec

from ratoon.core.errors import ModelError, RequestError
from ratoon.core.media import MediaConfig, MediaInput
from ratoon.core.prepared import prepared
from ratoon.core.wire import WireTensor

if TYPE_CHECKING:
    import numpy as np

OPTIONS_FIELD = "mm_processor_kwargs"
# Far outside of what cameras and files have. Within these, no arithmetic with times and sizes overflows.
MIN_FPS, MAX_FPS = 1e-6, 1e6
MAX_SIZE = 2**31 - 1  # of sides, areas and numbers of frames
MAX_VIDEO_FRAMES = 10**8  # of which a model is shown some
MAX_VIDEO_SECONDS = 1e9

# Values of options. Larger ones would fit no message to the process that prepares pictures.
Positive = Annotated[int, msgspec.Meta(ge=1, le=MAX_SIZE)]
FramesPerSecond = Annotated[float, msgspec.Meta(ge=MIN_FPS, le=MAX_FPS)]
Options = TypeVar("Options", bound=msgspec.Struct)


class Preprocessed(msgspec.Struct):
    """What becomes of an image or a video: one input of the encoder, or several where it is cut."""

    inputs: list[MediaInput]
    tile_rows: int = 0  # 0: it is not cut into rows of tiles
    tile_columns: int = 0
    seconds_per_step: float = 0.0  # of a video that is one input: between two steps of its grid in time
    frame_seconds: list[float] = []  # of a video whose frames are inputs of their own: when each is seen
    duration: float = 0.0  # of such a video, in seconds
    content_hashes: list[str] = []  # of the inputs, once they are computed (content.py)


class VideoFacts(msgspec.Struct, frozen=True):
    """When the frames of a video are seen."""

    fps: float  # of the frames that are read, on average
    frame_seconds: Sequence[float]  # of each of them, from the video's beginning
    duration: float | None = None  # of the whole video, in seconds; None: it is not known

    def verify(self, field: str) -> None:
        """RequestError: the video is longer than any is, so that its times could not be written as text."""
        seconds = max(*self.frame_seconds, self.duration or 0.0)
        if not seconds <= MAX_VIDEO_SECONDS:
            problem = f"is {seconds:g} seconds long by its number of frames and their rate"
            raise RequestError(field, problem, f"at most {MAX_VIDEO_SECONDS:g} seconds")


class Family(Protocol):
    modalities: ClassVar[tuple[str, ...]]

    def options(self, config: MediaConfig, asked: Mapping[str, Any]) -> Any:
        """The options of a request. RequestError: one is unknown or has a value that does not fit."""

    def read_image(self, picture: np.ndarray, config: MediaConfig, options: Any, field: str) -> Preprocessed:
        """`picture` is uint8 [height, width, 3]."""

    def sample(
        self, num_frames: int, fps: float | None, config: MediaConfig, options: Any, max_frames: int
    ) -> list[int]:
        """Which frames of a video file are read."""

    def read_video(
        self, frames: Iterable[np.ndarray], facts: VideoFacts, config: MediaConfig, options: Any, field: str
    ) -> Preprocessed:
        """`frames` are pictures of one size."""

    def placeholder(self, modality: str, config: MediaConfig) -> int | str | None:
        """The token that stands for an image or a video in a prompt: its id, or its text. None: the model does not read
        this modality."""

    def replacement(self, modality: str, preprocessed: Preprocessed, image_token: str) -> str | None:
        """The text that takes the placeholder's place, with one `image_token` for each input. None: the rows of the
        input alone, without any text."""


def read_options(kind: type[Options], of_files: Mapping[str, Any], asked: Mapping[str, Any]) -> Options:
    """Options in their types. What else the model's files hold is ignored; of a request it is an error. ModelError: the
    files themselves are wrong."""
    known = kind.__struct_fields__
    for name in asked:
        if name not in known:
            expected = f"one of {', '.join(known)}" if known else "no options: the model has none"
            raise RequestError(f"{OPTIONS_FIELD}.{name}", "is not an option of this model's preprocessing", expected)
    usable = {name: value for name, value in of_files.items() if name in known and value is not None}
    asked = {name: value for name, value in asked.items() if value is not None}  # as if they were left out
    try:
        msgspec.convert(usable, prepared(kind))
    except msgspec.ValidationError as error:
        raise ModelError(
            "preprocessor_config.json", f"does not fit: {error}", "values as transformers has them"
        ) from None
    try:
        return msgspec.convert({**usable, **asked}, prepared(kind))
    except msgspec.ValidationError as error:
        raise RequestError(
            OPTIONS_FIELD, f"does not fit: {error}", "values as the model's processor has them"
        ) from None


def wire_pixels(pixels: np.ndarray) -> WireTensor:
    """uint8, in row-major order."""
    return WireTensor("uint8", pixels.shape, pixels.tobytes())
