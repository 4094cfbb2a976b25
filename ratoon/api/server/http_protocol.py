"""Connections as uvicorn reads them with httptools, and what it leaves open: how large the head of a request may become
and how long it may take, how long a client may leave an answer unread, and that requests which were sent ahead learn of
a client that is gone."""

from __future__ import annotations

import asyncio
from typing import Any

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol, RequestResponseCycle

from ratoon.observe.logging import get_logger

MAX_HEAD_BYTES = 64 * 1024  # beside what came with the first read of it
HEAD_SECONDS = 60.0
WRITE_SECONDS = 60.0  # unless the server's settings say otherwise

logger = get_logger(__name__)


class BoundedHttpProtocol(HttpToolsProtocol):
    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self._num_head_bytes = 0
        self._head_timer: asyncio.TimerHandle | None = None  # runs while a head is incomplete
        self._cycles: list[RequestResponseCycle] = []  # several, where a client does not wait for answers
        self.write_seconds = WRITE_SECONDS
        self._write_timer: asyncio.TimerHandle | None = None  # runs while the client owes us a read

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._begin_head()

    def connection_lost(self, exc: Exception | None) -> None:
        self._end_head()
        self._end_write()
        super().connection_lost(exc)
        for cycle in self._cycles:
            if not cycle.response_complete:
                cycle.disconnected = True
                cycle.message_event.set()

    def data_received(self, data: bytes) -> None:
        self._num_head_bytes += len(data)
        super().data_received(data)
        if self._head_timer is not None and self._num_head_bytes > MAX_HEAD_BYTES:
            self._refuse(b"431 Request Header Fields Too Large")

    def on_message_begin(self) -> None:
        super().on_message_begin()
        self._begin_head()
        if not self.flow.write_paused:
            self._end_write()

    # What does not fit into the system's buffers is kept here, and with it the answer that it is part of. The client
    # has `write_seconds` to take most of it; then the connection is closed, and everything behind it is freed.

    def pause_writing(self) -> None:
        super().pause_writing()
        self._begin_write()

    def resume_writing(self) -> None:
        super().resume_writing()
        self._end_write()

    def on_response_complete(self) -> None:
        super().on_response_complete()
        if not self.flow.write_paused and self.transport.get_write_buffer_size():
            self._begin_write()  # the rest, which nothing waits for

    def _begin_write(self) -> None:
        self._end_write()
        self._write_timer = self.loop.call_later(self.write_seconds, self._give_up_writing)

    def _end_write(self) -> None:
        if self._write_timer is not None:
            self._write_timer.cancel()
            self._write_timer = None

    def _give_up_writing(self) -> None:
        self._write_timer = None
        if self.transport.get_write_buffer_size():
            logger.info("a client has read nothing for %g s; its connection is closed", self.write_seconds)
            self.transport.abort()

    def on_headers_complete(self) -> None:
        self._end_head()
        super().on_headers_complete()
        self._cycles = [cycle for cycle in self._cycles if not cycle.response_complete]
        self._cycles.append(self.cycle)

    def _begin_head(self) -> None:
        self._end_head()
        self._num_head_bytes = 0
        self._head_timer = self.loop.call_later(HEAD_SECONDS, self._refuse, b"408 Request Timeout")

    def _end_head(self) -> None:
        if self._head_timer is not None:
            self._head_timer.cancel()
            self._head_timer = None

    def _refuse(self, status: bytes) -> None:
        self._end_head()
        if not self.transport.is_closing():
            self.transport.write(b"HTTP/1.1 %b\r\nconnection: close\r\ncontent-length: 0\r\n\r\n" % status)
            self.transport.close()
