"""Messages of several frames on a stream socket between a worker process and its executor."""

from __future__ import annotations

import socket
import struct
from collections.abc import Sequence

from ratoon.core.wire import Buffer, WireError

MAX_FRAMES = 1 << 16
_COUNT = struct.Struct("<I")


def send_frames(to: socket.socket, frames: Sequence[Buffer]) -> None:
    """Raises OSError if the other side is gone."""
    views = [memoryview(frame).cast("B") for frame in frames]
    head = struct.pack(f"<I{len(views)}Q", len(views), *(view.nbytes for view in views))
    to.sendall(head)
    for view in views:
        to.sendall(view)


def receive_frames(source: socket.socket) -> list[Buffer] | None:
    """None: the other side is gone, whether or not it had begun a message."""
    head = _receive(source, _COUNT.size)
    if head is None:
        return None
    (count,) = _COUNT.unpack(head)
    if count > MAX_FRAMES:
        raise WireError(f"a message of {count} frames; at most {MAX_FRAMES}")
    sizes = _receive(source, 8 * count)
    if sizes is None:
        return None
    frames: list[Buffer] = []
    for size in struct.unpack(f"<{count}Q", sizes):
        frame = _receive(source, size)
        if frame is None:
            return None
        frames.append(frame)
    return frames


def _receive(source: socket.socket, count: int) -> bytearray | None:
    data = bytearray(count)
    view, done = memoryview(data), 0
    while done < count:
        received = source.recv_into(view[done:])
        if not received:
            return None
        done += received
    return data
