"""A link between two processes of one service, on an event loop: named calls with data, in order, in both directions.

A call has a name in the table of the side that answers it, with the types of its arguments and of its result: nothing
but data travels (core/wire.py), and a name that is not in the table does not exist. A call is answered (`call`) or not
(`tell`). Calls are begun in the order in which they were made; one whose handler is a plain function is done before the
next is begun. An error of a handler travels as a Fault. The link is one of a pair of sockets that only the two
processes have: when one of them ends, however it ends, the other one sees the link end.

On the wire a message is the number of its frames, their sizes, and the frames: a head (kind, number of the call, name),
and a value as core/wire.py encodes it.
"""

from __future__ import annotations

import asyncio
import inspect
import socket
import struct
from collections.abc import Callable, Mapping
from types import GenericAlias
from typing import Any, NamedTuple, cast

import msgspec

from ratoon.core.errors import EngineAwayError
from ratoon.core.faults import error_of, fault_of
from ratoon.core.messages import Fault
from ratoon.core.prepared import prepared
from ratoon.core.wire import Buffer, Decoder, WireError, encode
from ratoon.observe.logging import get_logger

logger = get_logger(__name__)

MAX_FRAMES = 1 << 16
SMALL_MESSAGE = 1 << 16  # bytes that are copied into one write
CALL, RESULT, FAULT = 0, 1, 2
_COUNT = struct.Struct("<I")
_encode_head = msgspec.msgpack.Encoder().encode
_decode_head = msgspec.msgpack.Decoder(prepared(tuple[int, int, str])).decode
_faults: Decoder[Fault] = Decoder(Fault)


class Method(NamedTuple):
    """A call that one side of a link answers."""

    arguments: tuple[Any, ...] = ()  # their types
    result: Any = None  # its type


class Methods:
    """The table of the calls that one side answers, with what decodes them."""

    def __init__(self, table: Mapping[str, Method]) -> None:
        self._arguments: dict[str, Decoder[tuple[Any, ...]]] = {
            name: Decoder(cast(type, GenericAlias(tuple, method.arguments))) for name, method in table.items()
        }
        self._results: dict[str, Decoder[Any]] = {name: Decoder(method.result) for name, method in table.items()}

    def decode_arguments(self, name: str, frames: list[Buffer]) -> tuple[Any, ...]:
        if name not in self._arguments:
            raise WireError(f"there is no call {name!r}")
        return self._arguments[name].decode(frames)

    def decode_result(self, name: str, frames: list[Buffer]) -> Any:
        return self._results[name].decode(frames)


class Link(asyncio.Protocol):
    """One side of a link. All of it belongs to one event loop."""

    def __init__(self, answered: Methods, asked: Methods, handlers: Mapping[str, Callable[..., Any]]) -> None:
        """`answered` are the calls of this side, for which it has `handlers`; `asked` those of the other side."""
        self.lost = asyncio.get_running_loop().create_future()  # done when the link has ended
        self._answered = answered
        self._asked = asked
        self._handlers = handlers
        self._transport: asyncio.Transport | None = None
        self._buffer = bytearray()
        self._needed = 0  # bytes of the message at the beginning of the buffer; 0: not known yet
        self._num_calls = 0
        self._waiting: dict[int, tuple[str, asyncio.Future[Any]]] = {}
        self._working: set[asyncio.Task[None]] = set()

    @classmethod
    async def open(
        cls, end: socket.socket, answered: Methods, asked: Methods, handlers: Mapping[str, Callable[..., Any]]
    ) -> Link:
        link = cls(answered, asked, handlers)
        end.setblocking(False)
        await asyncio.get_running_loop().create_connection(lambda: link, sock=end)
        return link

    @property
    def is_open(self) -> bool:
        return self._transport is not None and not self.lost.done()

    @property
    def num_unsent_bytes(self) -> int:
        return 0 if self._transport is None else self._transport.get_write_buffer_size()

    def tell(self, name: str, *arguments: Any) -> None:
        """Call without an answer. Of a link that has ended nothing arrives."""
        self._send(CALL, 0, name, arguments)

    def call(self, name: str, *arguments: Any) -> asyncio.Future[Any]:
        """The result, or the other side's error. EngineAwayError if the link ends before."""
        future: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        if not self.is_open:
            future.set_exception(EngineAwayError("the other process of the service has ended"))
            return future
        self._num_calls += 1
        number = self._num_calls
        self._waiting[number] = name, future
        self._send(CALL, number, name, arguments)
        return future

    def close(self) -> None:
        if self._transport is not None:
            self._transport.close()

    def abort(self) -> None:
        if self._transport is not None:
            self._transport.abort()

    # ---- asyncio's protocol ----

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)  # uvloop's is no subclass

    def connection_lost(self, exc: Exception | None) -> None:
        if not self.lost.done():
            self.lost.set_result(None)
        waiting, self._waiting = self._waiting, {}
        for _, future in waiting.values():
            if not future.done():
                future.set_exception(EngineAwayError("the other process of the service has ended"))
        for task in self._working:
            task.cancel()

    def data_received(self, data: bytes) -> None:
        self._buffer += data
        while (frames := self._next_message()) is not None:
            try:
                self._take(frames)
            except (WireError, msgspec.MsgspecError):
                logger.exception("a message between processes of the service can't be read")
                self.abort()
                return

    # ---- messages ----

    def _next_message(self) -> list[Buffer] | None:
        buffer = self._buffer
        if len(buffer) < max(self._needed, _COUNT.size):
            return None
        (count,) = _COUNT.unpack_from(buffer)
        if not 1 <= count <= MAX_FRAMES:
            logger.error("a message of %d frames between processes of the service", count)
            self.abort()
            return None
        start = _COUNT.size + 8 * count
        if len(buffer) < start:
            return None
        sizes = struct.unpack_from(f"<{count}Q", buffer, _COUNT.size)
        self._needed = start + sum(sizes)
        if len(buffer) < self._needed:
            return None
        frames: list[Buffer] = []
        with memoryview(buffer) as view:
            for size in sizes:
                frames.append(bytes(view[start : start + size]))
                start += size
        del buffer[: self._needed]
        self._needed = 0
        return frames

    def _send(self, kind: int, number: int, name: str, value: Any) -> None:
        if not self.is_open:
            return
        assert self._transport is not None
        frames: list[Buffer] = [_encode_head((kind, number, name)), *encode(value)]
        sizes = [memoryview(frame).nbytes for frame in frames]
        start = struct.pack(f"<I{len(frames)}Q", len(frames), *sizes)
        if sum(sizes) <= SMALL_MESSAGE:
            self._transport.write(b"".join([start, *frames]))
        else:
            self._transport.writelines([start, *frames])

    def _take(self, frames: list[Buffer]) -> None:
        kind, number, name = _decode_head(frames[0])
        if kind == CALL:
            self._answer(number, name, self._answered.decode_arguments(name, frames[1:]))
            return
        asked, future = self._waiting.pop(number, (None, None))
        if asked is None or future is None or future.done():
            return  # the caller has left
        if kind == FAULT:
            future.set_exception(error_of(_faults.decode(frames[1:])))
        else:
            future.set_result(self._asked.decode_result(asked, frames[1:]))

    def _answer(self, number: int, name: str, arguments: tuple[Any, ...]) -> None:
        try:
            result = self._handlers[name](*arguments)
        except Exception as error:
            self._send_fault(number, name, error)
            return
        if inspect.isawaitable(result):
            task = asyncio.ensure_future(self._await(number, name, result))
            self._working.add(task)
            task.add_done_callback(self._working.discard)
        elif number:
            self._send(RESULT, number, name, result)

    async def _await(self, number: int, name: str, result: Any) -> None:
        try:
            value = await result
        except Exception as error:
            self._send_fault(number, name, error)
            return
        if number:
            self._send(RESULT, number, name, value)

    def _send_fault(self, number: int, name: str, error: Exception) -> None:
        if number:
            self._send(FAULT, number, name, fault_of(error))
        else:
            logger.error("a call %s between processes of the service failed", name, exc_info=error)
