"""JSON with much base64 in it, made and sent slice by slice: never a second copy of it, and never long at a stretch.

Encoding holds Python's lock. In a thread it would stop the event loop none the less, and for longer than here, where
others have their turn after every slice.
"""

from __future__ import annotations

import binascii
import secrets
from collections.abc import Iterable, Iterator
from typing import Any, TypeAlias

import msgspec

from ratoon.api.hidden_states import cut

SLICE = 192 * 1024  # bytes before they are encoded; a multiple of 3, so that slices add up; well below a millisecond


class Base64:
    """Bytes that stand in JSON as text."""

    def __init__(self, data: memoryview) -> None:
        self._data = data

    def __len__(self) -> int:
        """Of the text."""
        return (self._data.nbytes + 2) // 3 * 4

    def slices(self) -> Iterator[bytes]:
        return (binascii.b2a_base64(piece, newline=False) for piece in cut(self._data, SLICE))


Part: TypeAlias = bytes | Base64


def encode_parts(content: Any) -> list[Part]:
    """`content` as JSON, cut where Base64 stands in it."""
    found: list[Base64] = []
    mark = secrets.token_hex(16)  # made now: no text of a client or a model has it in it

    def set_aside(value: Any) -> str:
        if not isinstance(value, Base64):
            raise NotImplementedError(f"{type(value).__name__} has no form in JSON")
        found.append(value)
        return mark

    first, *others = msgspec.json.encode(content, enc_hook=set_aside).split(mark.encode())
    parts: list[Part] = [first]
    for data, text in zip(found, others):
        parts += (data, text)
    return parts


def total_size(parts: Iterable[Part]) -> int:
    return sum(map(len, parts))


def slices(parts: Iterable[Part]) -> Iterator[bytes]:
    """What to send at once: short parts together, long ones in pieces."""
    gathered: list[bytes] = []
    size = 0
    for part in parts:
        for piece in part.slices() if isinstance(part, Base64) else (part,):
            gathered.append(piece)
            size += len(piece)
            if size >= SLICE:
                yield b"".join(gathered)
                gathered, size = [], 0
    if gathered:
        yield b"".join(gathered)
