"""Images and videos in the messages of a conversation: where they are, and what stands in their place in a prompt.

A chat template gets parts without data, such as {"type": "image"}. What a part holds (an address, a path, a picture) is
listed apart, in the order of the parts. Nothing is read, fetched or decoded here, but for data URLs.
"""

from __future__ import annotations

import base64
import binascii
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ratoon.core.errors import RequestError
from ratoon.core.media import IMAGE, VIDEO, MediaConfig

TEXT = "text"  # the type of a part
URL_PARTS = {"image_url": IMAGE, "video_url": VIDEO}  # as OpenAI's protocol has them
PYTHON_PARTS = {"image": IMAGE, "video": VIDEO, "image_pil": IMAGE}  # as users of transformers and vLLM write them
KINDS = {**URL_PARTS, **PYTHON_PARTS}
HOLDERS = ("url", "path", "base64")  # keys of such a part that may hold the data in the place of its own name
DATA = "data:"
DATA_FORM = "data:image/png;base64,…"
ANY_BYTES = ("application/octet-stream", "binary/octet-stream")  # content types of files of an unknown kind
MARKS = {"qwen2_vl": ("<|vision_start|>", "<|vision_end|>"), "qwen2_5_vl": ("<|vision_start|>", "<|vision_end|>")}
OWN_PLACEHOLDERS = {"gemma3": {IMAGE: "<start_of_image>"}, "idefics3": {VIDEO: "<video>"}}


@dataclass(frozen=True, slots=True)
class MediaPart:
    """An image or a video of a conversation."""

    kind: str  # IMAGE or VIDEO
    value: Any  # what the field holds
    field: str  # where it stands in the request, for errors


def kind_of(part: Any) -> str | None:
    """Returns IMAGE or VIDEO; None for a part that is neither."""
    kind = part.get("type") if isinstance(part, Mapping) else None
    return KINDS.get(kind) if isinstance(kind, str) else None


def without_data(messages: Any) -> Any:
    """Returns the messages as chat templates get them: parts with media have nothing but their kind."""
    if not isinstance(messages, Sequence) or isinstance(messages, (str, bytes)):
        return messages
    return [_without_data(message) for message in messages]


def _without_data(message: Any) -> Any:
    content = message.get("content") if isinstance(message, Mapping) else None
    if not isinstance(content, (list, tuple)) or not any(map(kind_of, content)):
        return message
    return {**message, "content": [{"type": kind} if (kind := kind_of(part)) else part for part in content]}


def find_media(
    messages: Any, kinds: Collection[str], name: str = "messages", types: Mapping[str, str] = KINDS
) -> list[MediaPart]:
    """Returns the images and videos of messages, in their order. `kinds` are those that the model reads, `types` the
    parts that may hold them, and `name` is the field with the messages. RequestError: a part is of another kind, or
    holds nothing."""
    if not isinstance(messages, Sequence) or isinstance(messages, (str, bytes)):
        return []
    found = []
    for index, message in enumerate(messages):
        content = message.get("content") if isinstance(message, Mapping) else None
        if not isinstance(content, (list, tuple)):
            continue
        for place, part in enumerate(content):
            kind, field = kind_of(part), f"{name}[{index}].content[{place}]"
            if kind is None:
                continue
            check_reads(field, kind, kinds)
            if part["type"] not in types:
                raise RequestError(field, f"is a part of type {part['type']!r}", f"one of {', '.join(types)}")
            found.append(read_part(part, field))
    return found


def check_reads(field: str, kind: str, media: Collection[str]) -> None:
    """RequestError: the model reads no media of this kind. `media` are the kinds that it reads."""
    if kind in media:
        return
    article = "an" if kind[0] in "aeiou" else "a"
    readable = " and ".join([TEXT, *(f"{one}s" for one in media)]) if media else "text only"
    raise RequestError(field, f"is {article} {kind}", f"this model reads {readable}")


def read_part(part: Mapping[str, Any], field: str) -> MediaPart:
    """Returns what a part of one of KINDS holds. `field` is the part's own."""
    name, kind = part["type"], KINDS[part["type"]]
    if name in URL_PARTS:
        return MediaPart(kind, *_read_url(part.get(name), name, f"{field}.{name}"))
    for key in (name, *HOLDERS):
        if part.get(key) is not None:
            value = f"{DATA};base64,{part[key]}" if key == "base64" else part[key]
            return MediaPart(kind, value, f"{field}.{key}")
    raise RequestError(f"{field}.{name}", "is missing", f'expected {{"type": "{name}", "{name}": …}}')


def _read_url(value: Any, name: str, field: str) -> tuple[str, str]:
    """Returns the address and its field: an object has it, or it stands there alone."""
    if isinstance(value, Mapping):
        detail = value.get("detail")
        if detail is not None and not isinstance(detail, str):
            raise RequestError(f"{field}.detail", "is not text", "auto, low or high; it has no effect")
        value, field = value.get("url"), f"{field}.url"
    if not isinstance(value, str) or not value:
        problem = "is missing" if value is None else "is empty, or not text"
        raise RequestError(field, problem, f'expected {{"type": "{name}", "{name}": {{"url": "data:…"}}}}')
    return value, field


def is_data_url(value: Any) -> bool:
    return isinstance(value, str) and value[: len(DATA)].lower() == DATA


def check_data_url(part: MediaPart) -> None:
    """RequestError: the head of a data URL is wrong. What follows is not looked at."""
    head, comma, _ = part.value.partition(",")
    content_type, *options = head[len(DATA) :].lower().split(";")
    if not comma or not options or options[-1].strip() != "base64":
        raise RequestError(part.field, "is a data URL that is not in base64", f"expected {DATA_FORM}")
    check_content_type(part, content_type.strip())


def check_content_type(part: MediaPart, content_type: str) -> None:
    """RequestError: what the part refers to is of another kind, by its content type. None is given: any."""
    if not content_type or content_type in ANY_BYTES or content_type.startswith(f"{part.kind}/"):
        return
    if part.kind == VIDEO and content_type == "image/gif":
        return
    shown = content_type if len(content_type) <= 64 else content_type[:64] + "…"
    raise RequestError(part.field, f"is of the type {shown!r}", f"expected {part.kind}/…")


def decode_data_url(part: MediaPart) -> bytes:
    """Returns the bytes of a data URL whose head was checked."""
    data = part.value[part.value.index(",") + 1 :]
    try:
        decoded = base64.b64decode(data, validate=True)
    except (binascii.Error, ValueError):  # the latter: characters that are not ASCII
        raise RequestError(part.field, "is no valid base64 behind the comma", f"expected {DATA_FORM}") from None
    if not decoded:
        raise RequestError(part.field, "holds no data", f"expected {DATA_FORM}")
    return decoded


def placeholder_texts(media: MediaConfig | None, token_of: Callable[[int], str | None]) -> dict[str, str]:
    """Returns what stands for an image and for a video in the text of a prompt, as the family's own templates write it,
    by kind. Empty for a model that reads text only."""
    if media is None:
        return {}
    token_ids = {IMAGE: media.image_token_id, VIDEO: media.video_token_id}
    begin, end = MARKS.get(media.family, ("", ""))
    texts = {
        kind: f"{begin}{text}{end}"
        for kind, token_id in token_ids.items()
        if token_id is not None and (text := token_of(token_id)) is not None
    }
    return {**texts, **OWN_PLACEHOLDERS.get(media.family, {})}
