"""The wire codec: msgspec structs to frames and back. Large arrays are sent as separate raw frames, never as lists.

A message is one frame of msgpack, then the frames of its arrays in order of occurrence. This module knows no sockets,
and nothing is ever unpickled.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, Generic, TypeVar

import msgspec

from ratoon.core.errors import RatoonError
from ratoon.core.prepared import prepared

T = TypeVar("T")
Buffer = bytes | bytearray | memoryview

# Bytes per element, and the struct code for memoryview and numpy. Neither has bfloat16: its two bytes are read as
# uint16 and reinterpreted by code that has the type.
_ELEMENTS = {
    "float64": (8, "d"),
    "float32": (4, "f"),
    "float16": (2, "e"),
    "bfloat16": (2, "H"),
    "int64": (8, "q"),
    "int32": (4, "i"),
    "uint8": (1, "B"),
}


class WireError(RatoonError):
    """Frames that are not a message of the expected type."""


class WireTensor:
    """An array on the wire: a dtype's name, a shape, and bytes in row-major order. The bytes are not copied."""

    __slots__ = ("data", "dtype", "shape")

    def __init__(self, dtype: str, shape: tuple[int, ...], data: Buffer) -> None:
        if dtype not in _ELEMENTS:
            raise WireError(f"an array of the unknown type {dtype!r}")
        self.data = memoryview(data).cast("B")
        if any(size < 0 for size in shape) or math.prod(shape) * _ELEMENTS[dtype][0] != self.data.nbytes:
            raise WireError(f"{self.data.nbytes} bytes are no array of shape {shape} and type {dtype}")
        self.dtype = dtype
        self.shape = shape

    def view(self) -> memoryview:
        """The elements, flat and not copied: `numpy.asarray(tensor.view()).reshape(tensor.shape)` is the array."""
        code: Any = _ELEMENTS[self.dtype][1]
        return self.data.cast(code)

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, WireTensor):
            return NotImplemented
        same_form = self.dtype == other.dtype and self.shape == other.shape
        return same_form and bytes(self.data) == bytes(other.data)

    __hash__ = None  # type: ignore[assignment]

    def __repr__(self) -> str:
        return f"WireTensor({self.dtype}, {list(self.shape)})"


def encode(message: Any) -> list[Buffer]:
    """The frames of a message: msgpack first, then its arrays."""
    frames: list[Buffer] = [b""]

    def set_aside(value: Any) -> Any:
        if not isinstance(value, WireTensor):
            raise NotImplementedError(f"{type(value).__name__} does not travel")
        frames.append(value.data)
        return (value.dtype, value.shape, len(frames) - 1)

    frames[0] = msgspec.msgpack.encode(message, enc_hook=set_aside)
    return frames


class Decoder(Generic[T]):
    """Decodes frames to messages of one type. Invalid frames raise WireError."""

    def __init__(self, message_type: type[T]) -> None:
        self._frames: Sequence[Buffer] = ()
        self._decoder = msgspec.msgpack.Decoder(prepared(message_type), dec_hook=self._take_frame)

    def decode(self, frames: Sequence[Buffer]) -> T:
        if not frames:
            raise WireError("a message without frames")
        self._frames = frames
        try:
            return self._decoder.decode(frames[0])
        except (msgspec.MsgspecError, ValueError, RecursionError) as error:
            raise WireError(str(error)) from None
        finally:
            self._frames = ()

    def _take_frame(self, kind: type, value: Any) -> Any:
        if kind is not WireTensor:
            raise ValueError(f"{kind.__name__} does not travel")
        match value:
            case [str(dtype), [*shape], int(index)] if all(type(size) is int for size in shape):
                if not 1 <= index < len(self._frames):
                    raise ValueError(f"no frame {index} in a message of {len(self._frames)}")
                try:
                    return WireTensor(dtype, tuple(shape), self._frames[index])
                except WireError as error:
                    raise ValueError(str(error)) from None
        raise ValueError("an array without type, shape and frame")
