"""Images and videos in the messages of a Python program, as `multi_modal_data` of a prompt.

They are pictures, arrays, bytes, paths or data URLs. Nothing is fetched: an address is refused. The HTTP server, whose
clients are not trusted, reads its own messages (api/server/media.py) and takes no paths.
"""

from __future__ import annotations

import os
from collections.abc import Collection
from typing import Any
from urllib.parse import unquote, urlsplit

from ratoon.core.errors import RequestError
from ratoon.media.items import NamedMedia
from ratoon.models.media_parts import MediaPart, check_data_url, decode_data_url, find_media, is_data_url

FILE, ADDRESSES = "file://", ("http://", "https://")


def chat_media(messages: Any, kinds: Collection[str]) -> dict[str, list[NamedMedia]]:
    """Returns the media of messages by kind, in the order of their parts. `kinds`: those that the model reads."""
    media: dict[str, list[NamedMedia]] = {}
    for part in find_media(messages, kinds):
        media.setdefault(part.kind, []).append(NamedMedia(_data_of(part), part.field))
    return media


def _data_of(part: MediaPart) -> Any:
    value = part.value
    if isinstance(value, os.PathLike) or not isinstance(value, str):
        return value
    if is_data_url(value):
        check_data_url(part)
        return decode_data_url(part)
    scheme = value[:8].lower()
    if scheme.startswith(ADDRESSES):
        problem = "is an address, and nothing is fetched here"
        raise RequestError(part.field, problem, "a path, a data URL, or the bytes of the file")
    return unquote(urlsplit(value).path) if scheme.startswith(FILE) else value
