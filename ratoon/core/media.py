"""Images, video and embeddings beside text: what travels from the front end to the device, and what a model's config
says of them.

A picture is decoded, resized and cut into patches by the front end (`ratoon.media`), without torch. The device gets
pixels as bytes, in the order of patches, and its encoder makes rows of embeddings of them, which stand in the place of
placeholder tokens of the prompt.
"""

from __future__ import annotations

from array import array
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import msgspec

from ratoon.core.wire import WireTensor

IMAGE, VIDEO, EMBEDS = "image", "video", "embeds"


class MediaInput(msgspec.Struct, array_like=True, omit_defaults=True, gc=False):
    """What an encoder reads at once, whole: an image, one tile of it, or the frames of a video. It runs once for all
    requests with equal content."""

    modality: str  # IMAGE or VIDEO; EMBEDS: `features` are the rows of embeddings themselves, and nothing is run
    num_rows: int  # rows of embeddings that come out
    # uint8 pixels before they are rescaled and normalised, in the layout that the family's preprocessing makes; of
    # EMBEDS, floats [rows, hidden size]
    features: WireTensor
    grid: tuple[int, int, int] = (1, 1, 1)  # patches in time, height and width


class MediaFeature(msgspec.Struct, array_like=True, omit_defaults=True, gc=False):
    """A run of placeholder tokens in a prompt, in whose place a model reads rows of embeddings. An image that is cut
    into tiles has one for each tile."""

    offset: int  # of the first placeholder, in the prompt
    length: int
    content_hash: str  # of the input with all options of its preprocessing: equal inputs have equal hashes
    data: MediaInput
    is_first: bool = True  # of its image or video; False for further tiles of an image that is cut into several


class RopePositions(msgspec.Struct, array_like=True, omit_defaults=True, gc=False):
    """Positions by which heads are rotated, of the first tokens of a prompt: 32-bit integers, axis after axis. Tokens
    behind them have their position in the sequence plus `delta`, on all axes."""

    packed: bytes
    delta: int = 0


def cut_features(features: Sequence[MediaFeature], num_tokens: int) -> list[MediaFeature]:
    """The features of the first `num_tokens` of a prompt. One that goes on behind them is shorter: its input is still
    read whole, and fewer of its rows are used."""
    return [
        msgspec.structs.replace(feature, length=min(feature.length, num_tokens - feature.offset))
        for feature in features
        if feature.offset < num_tokens
    ]


def feature_around(features: Sequence[MediaFeature], num_tokens: int) -> MediaFeature | None:
    """The image that the first `num_tokens` of a prompt end in. Embeddings that a caller brought can be cut anywhere,
    as text can."""
    for feature in features:
        if feature.offset < num_tokens < feature.offset + feature.length and feature.data.modality != EMBEDS:
            return feature
    return None


def end_of_image(features: Sequence[MediaFeature], num_tokens: int) -> int:
    """The fewest tokens of a prompt, `num_tokens` or more, that end in no image."""
    feature = feature_around(features, num_tokens)
    return num_tokens if feature is None else feature.offset + feature.length


def moved_features(features: Sequence[MediaFeature], num_tokens: int) -> list[MediaFeature]:
    """The features of a text that stands behind `num_tokens` others."""
    return [msgspec.structs.replace(feature, offset=feature.offset + num_tokens) for feature in features]


def count_media(features: Sequence[MediaFeature]) -> Counter[str]:
    """The number of images and videos by modality. Embeddings that a caller brought are neither."""
    return Counter(one.data.modality for one in features if one.is_first and one.data.modality != EMBEDS)


def cut_rope(rope: RopePositions | None, num_axes: int, num_tokens: int) -> RopePositions | None:
    """The positions of the first `num_tokens` of a prompt. Tokens behind them count on from the last one or, where that
    is a row of an image, begin after the greatest."""
    if rope is None or not rope.packed:
        return rope
    listed = array("i", rope.packed)
    count = len(listed) // num_axes
    if num_tokens >= count:
        return rope
    kept = array("i")
    for axis in range(num_axes):
        kept += listed[axis * count : axis * count + num_tokens]
    return RopePositions(kept.tobytes(), _last_position(kept, num_axes) + 1 - num_tokens)


def _last_position(listed: array[int], num_axes: int) -> int:
    """The position that further tokens count on from; -1: there is none."""
    if not listed:
        return -1
    last = listed[len(listed) // num_axes - 1 :: len(listed) // num_axes]
    return last[0] if len(set(last)) == 1 else max(listed)


def joined_rope(
    rope: RopePositions | None, num_axes: int, num_tokens: int, behind: RopePositions | None
) -> RopePositions | None:
    """The positions of `num_tokens` tokens and of a text behind them. `rope` is that of the first ones, of which it may
    list fewer; `behind` lists the positions of the text as if it stood alone. None: the text has no media, so that its
    tokens count on."""
    if behind is None:
        return rope
    delta = 0 if rope is None else rope.delta
    listed, added = array("i", b"" if rope is None else rope.packed), array("i", behind.packed)
    num_listed, num_added = len(listed) // num_axes, len(added) // num_axes
    begin = num_tokens + delta  # where the text begins
    joined = array("i")
    for axis in range(num_axes):
        joined += listed[axis * num_listed : (axis + 1) * num_listed]
        joined.extend(range(num_listed + delta, begin))
        joined.extend(begin + position for position in added[axis * num_added : (axis + 1) * num_added])
    return RopePositions(joined.tobytes(), _last_position(joined, num_axes) + 1 - num_tokens - num_added)


@dataclass(frozen=True, slots=True)
class VisionConfig:
    """Hyperparameters of an encoder of pictures, under one set of names for all families. A family leaves what it does
    not have at its default."""

    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    patch_size: int
    image_size: int = 0  # of the side of the only size that it reads; 0: it reads any
    num_channels: int = 3
    activation: str = "gelu"
    norm_eps: float = 1e-6
    temporal_patch_size: int = 1  # frames in a patch
    merge_size: int = 1  # patches on a side that become one row of embeddings
    window_size: int = 0  # pixels on a side of the windows that attention stays in; 0: there are none
    full_attention_layers: tuple[int, ...] = ()  # layers without windows
    tokens_per_second: float = 0.0  # steps of the time axis of rope positions


@dataclass(frozen=True, slots=True)
class MediaConfig:
    """What a model reads besides text."""

    family: str  # a key of ratoon.media and of the encoders: qwen2_vl, qwen2_5_vl, gemma3, idefics3
    vision: VisionConfig
    image_token_id: int  # the placeholder of a row of embeddings
    video_token_id: int | None = None
    num_rows: int = 0  # rows of embeddings for an image, or for a tile; 0: it depends on the size
    attends_both_ways: bool = False  # the rows of an image see each other in both directions, so they run in one step
    mean: tuple[float, ...] = (0.5, 0.5, 0.5)  # by channel, of pixels from 0 to 1
    std: tuple[float, ...] = (0.5, 0.5, 0.5)
    # Fields of preprocessor_config.json as they are; `video_processor` are those of video, where a file has them
    processor: dict[str, Any] = field(default_factory=dict, hash=False)
