"""Connections as uvicorn reads them with httptools, and what it leaves open: how large the head of a request may become
and how long it may take, how long a client may leave an answer unread, that requests which were sent ahead learn of a
client that is gone, and that a client which has closed its own side of the connection still gets its answers."""

from __future__ import annotations

import asyncio
from typing import Any

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol, RequestResponseCycle

from ratoon.observe.logging import get_logger

MAX_HEAD_BYTES = 64 * 1024  # beside what came with the first read of it
HEAD_SECONDS = 60.0
WRITE_SECONDS = 60.0  # unless the server's settings say otherwise
FIRST_PROBE_SECONDS = 0.02  # between looks whether a client that sends no more still waits; they double
LONGEST_PROBE_SECONDS = 2.0
PROBE = b"HTTP/1.1 100 Continue\r\n\r\n"  # every client has to skip it, also where it did not ask for it

logger = get_logger(__name__)


class BoundedHttpProtocol(HttpToolsProtocol):
    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self._num_head_bytes = 0
        self._head_timer: asyncio.TimerHandle | None = None  # runs while a head is incomplete
        self._cycles: list[RequestResponseCycle] = []  # several, where a client does not wait for answers
        self.write_seconds = WRITE_SECONDS
        self._write_timer: asyncio.TimerHandle | None = None  # runs while the client owes us a read
        self._half_closed = False  # the client sends no more
        self._probe_timer: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._begin_head()

    def connection_lost(self, exc: Exception | None) -> None:
        self._end_head()
        self._end_write()
        if self._probe_timer is not None:
            self._probe_timer.cancel()
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
        self._close_behind_last_answer()

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

    def eof_received(self) -> bool:  # type: ignore[override]
        """The client sends no more. True, and the connection stays open, while there are answers to send: it may have
        closed its own side only."""
        self._half_closed = True
        self._end_head()
        for cycle in self._unanswered():
            if cycle.more_body:  # the rest of its body will never come
                cycle.disconnected = True
                cycle.message_event.set()
        if all(cycle.more_body for cycle in self._unanswered()):
            return False
        self._probe(FIRST_PROBE_SECONDS)
        return True

    def _close_behind_last_answer(self) -> None:
        if self._half_closed and not self._unanswered() and not self.transport.is_closing():
            self.transport.close()

    def _unanswered(self) -> list[RequestResponseCycle]:
        return [cycle for cycle in self._cycles if not cycle.response_complete]

    def _probe(self, seconds: float) -> None:
        """A client that is gone looks the same as one that only sends no more, until something is sent to it: then its
        system says so, and the next write fails, which ends the connection and takes its requests back. What is sent
        must not disturb one that waits. A stream needs no probes, and HTTP/1.0 has nothing that could be sent."""
        waiting = self._unanswered()
        if self.transport.is_closing() or not waiting:
            return
        if not waiting[0].response_started and waiting[0].scope["http_version"] != "1.0":
            self.transport.write(PROBE)
        longer = min(2 * seconds, LONGEST_PROBE_SECONDS)
        self._probe_timer = self.loop.call_later(seconds, self._probe, longer)

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
