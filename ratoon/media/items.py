"""What `multi_modal_data` of a prompt holds, as a list of items with a name for errors. Nothing is decoded here.

An item is an image or a video in one of the forms that decode.py reads. Whether a model reads it is checked elsewhere.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ratoon.core.config import MediaSettings
from ratoon.core.errors import RequestError
from ratoon.core.media import IMAGE, VIDEO

AUDIO = "audio"
DATA_FORM = '{"image": …, "video": …}: one of each, or a list'
IMAGE_FORMS = "a PIL image, an array [height, width, 3], a path, or the bytes of a file"
VIDEO_FORMS = "a list of frames, an array [frames, height, width, 3], a path, or the bytes of a file"


@dataclass(frozen=True, slots=True)
class NamedMedia:
    """An image or a video with the name that errors use for it, such as `messages[0].content[1].image_url`."""

    data: Any
    field: str


@dataclass(frozen=True, slots=True)
class MediaItem:
    modality: str  # IMAGE or VIDEO
    data: Any
    field: str


def parse_media(field: str, given: Any) -> list[MediaItem]:
    """The items in the order of the modalities and, within one, in the caller's. RequestError for what has none of the
    forms, before any of it is read."""
    if not isinstance(given, Mapping):
        raise RequestError(field, f"{type(given).__name__} is not a mapping", DATA_FORM)
    items: list[MediaItem] = []
    for modality, value in given.items():
        if modality not in (IMAGE, VIDEO):
            raise RequestError(f"{field}.{modality}", "is not a known kind of media here", DATA_FORM)
        if value is None:
            continue
        of_modality = _images(value) if modality == IMAGE else _videos(value)
        if of_modality is None:
            items.append(_item(modality, value, f"{field}.{modality}"))
        else:
            items += [_item(modality, one, f"{field}.{modality}[{index}]") for index, one in enumerate(of_modality)]
    return items


def verify_number(items: Sequence[MediaItem], settings: MediaSettings, earlier: Mapping[str, int]) -> None:
    """RequestError for the first item above the limit of its modality. `earlier`: how many of each modality are in the
    text that the items' text continues."""
    for modality in (IMAGE, VIDEO):
        limit, found = settings.limit_of(modality), [item for item in items if item.modality == modality]
        num_earlier = earlier.get(modality, 0)
        number = num_earlier + len(found)
        if found and number > limit:
            problem = f"the prompt has {number} of the kind {modality}, and at most {limit} are allowed"
            if num_earlier:
                problem += f"; {num_earlier} of them are in the text that is continued"
            first = found[max(0, limit - num_earlier)]
            raise RequestError(first.field, problem, "fewer, or a greater limit_mm_per_prompt")


def is_array(value: Any) -> bool:
    """Whether it is an array of numpy or a tensor, by what it has rather than by its class."""
    return hasattr(value, "shape") and hasattr(value, "ndim") and hasattr(value, "dtype")


def _item(modality: str, value: Any, field: str) -> MediaItem:
    return (
        MediaItem(modality, value.data, value.field)
        if isinstance(value, NamedMedia)
        else MediaItem(modality, value, field)
    )


def _is_list(value: Any) -> bool:
    return isinstance(value, Sequence) and not isinstance(value, (str, bytes, bytearray, memoryview))


def _images(value: Any) -> Sequence[Any] | None:
    """None: it is one image."""
    return value if _is_list(value) or (is_array(value) and value.ndim == 4) else None


def _videos(value: Any) -> Sequence[Any] | None:
    """None: it is one video: a list whose first entry is a picture, or a pair of frames and facts of them."""
    if not _is_list(value):
        return value if is_array(value) and value.ndim == 5 else None
    if is_with_facts(value):
        return None
    first: Any = value[0] if len(value) else None
    is_frame = hasattr(first, "getbands") or (is_array(first) and first.ndim <= 3)
    return None if is_frame else value


def is_with_facts(video: Any) -> bool:
    """Whether a video is given as (frames, {"fps": …})."""
    return isinstance(video, tuple) and len(video) == 2 and isinstance(video[1], Mapping)
