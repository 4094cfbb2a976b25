"""Connections of the load generator: a POST, and its answer as bytes with the times at which they came.

A client that measures thousands of tokens a second must do little for each: bytes are kept as they come, and taken
apart when the answer has ended. aiohttp, which the other calls use, wakes a task for each part of an answer: with it a
token costs the generator 34 µs in the place of 26 (128 streams, two Neoverse-N1 cores). No redirects, no cookies, no
proxies; the parser is httptools', as in the server.
"""

from __future__ import annotations

import asyncio
import ssl
import time
import urllib.parse
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

import httptools

CONTINUE = 100  # the status of a message before the answer
LENGTH_HEADERS = (b"content-length", b"transfer-encoding")


class BrokenAnswerError(Exception):
    """The connection ended, or what came is not HTTP."""


@dataclass(slots=True)
class TimedAnswer:
    """An answer, complete or as far as it has come. Times are of time.perf_counter."""

    status: int = 0  # 0: there is none yet
    reason: str = ""
    parts: list[tuple[float, bytes]] = field(default_factory=list)  # of the body, as they came
    ended: float = 0.0

    @property
    def body(self) -> bytes:
        return b"".join(part for _, part in self.parts)


class Connection(asyncio.Protocol):
    """One request at a time."""

    def __init__(self) -> None:
        self._transport: asyncio.Transport | None = None
        self._parser = httptools.HttpResponseParser(self)
        self._answer = TimedAnswer()
        self._complete: asyncio.Future[None] | None = None
        self._now = 0.0
        self._reason = b""
        self._has_length = False  # of the body: else it ends with the connection
        self.idle_since = 0.0

    @property
    def is_open(self) -> bool:
        return self._transport is not None and not self._transport.is_closing()

    async def send(self, request: bytes, answer: TimedAnswer) -> None:
        """Send it and wait for the end of its answer, which grows meanwhile. BrokenAnswerError: there is no end."""
        assert self._transport is not None and self._complete is None
        self._answer = answer
        self._complete = asyncio.get_running_loop().create_future()
        self._transport.write(request)
        try:
            await self._complete
        finally:
            self._complete = None

    def close(self) -> None:
        if self._transport is not None:
            self._transport.abort()

    # ---- the transport's calls ----

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        self._transport = transport

    def data_received(self, data: bytes) -> None:
        self._now = time.perf_counter()
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserError as error:
            self._fail(str(error))
            self.close()

    def connection_lost(self, error: Exception | None) -> None:
        self._now = time.perf_counter()
        if error is None and self._answer.status and not self._has_length:
            self._end()
        self._fail("the server closed the connection" if error is None else f"{type(error).__name__}: {error}")

    def _fail(self, reason: str) -> None:
        if self._complete is not None and not self._complete.done():
            self._answer.ended = self._now
            self._complete.set_exception(BrokenAnswerError(reason))

    # ---- the parser's ----

    def on_message_begin(self) -> None:
        self._reason, self._has_length = b"", False

    def on_status(self, reason: bytes) -> None:
        self._reason += reason

    def on_header(self, name: bytes, value: bytes) -> None:
        self._has_length |= name.lower() in LENGTH_HEADERS

    def on_headers_complete(self) -> None:
        if self._parser.get_status_code() != CONTINUE:
            self._answer.status, self._answer.reason = self._parser.get_status_code(), self._reason.decode("latin-1")

    def on_body(self, body: bytes) -> None:
        self._answer.parts.append((self._now, body))

    def on_message_complete(self) -> None:
        if self._parser.get_status_code() == CONTINUE:
            return
        if not self._parser.should_keep_alive():
            self.close()
        self._end()

    def _end(self) -> None:
        if self._complete is not None and not self._complete.done():
            self._answer.ended = self.idle_since = self._now
            self._complete.set_result(None)


class ConnectionPool:
    """The connections to one server. A connection that became idle a moment ago is used again."""

    def __init__(self, url: str, headers: dict[str, str], connect_seconds: float, keep_alive_seconds: float) -> None:
        parts = urllib.parse.urlsplit(url)
        self._host, self._path = parts.hostname or "", parts.path
        self._ssl = ssl.create_default_context() if parts.scheme == "https" else None
        self._port = parts.port or (80 if self._ssl is None else 443)
        lines = {"Host": parts.netloc.rpartition("@")[2], "Accept": "*/*", "User-Agent": "ratoon", **headers}
        self._head = "".join(f"{name}: {value}\r\n" for name, value in lines.items())
        self._connect_seconds = connect_seconds
        self._keep_alive_seconds = keep_alive_seconds
        self._address: str | None = None  # found with the first connection
        self._idle: list[Connection] = []

    async def post(self, path: str, body: bytes, answer: TimedAnswer) -> None:
        """Send a body, and fill `answer` until it has ended. BrokenAnswerError; OSError: no connection."""
        head = f"POST {self._path}{path} HTTP/1.1\r\n{self._head}Content-Length: {len(body)}\r\n\r\n"
        connection = self._find_idle() or await self._connect()
        with self._lent(connection):
            await connection.send(head.encode("latin-1") + body, answer)

    @contextmanager
    def _lent(self, connection: Connection) -> Iterator[None]:
        try:
            yield
        except BaseException:
            connection.close()  # its answer goes on
            raise
        if connection.is_open:
            self._idle.append(connection)

    def _find_idle(self) -> Connection | None:
        oldest = time.perf_counter() - self._keep_alive_seconds
        while self._idle:
            connection = self._idle.pop()
            if connection.is_open and connection.idle_since >= oldest:
                return connection
            connection.close()
        return None

    async def _connect(self) -> Connection:
        loop = asyncio.get_running_loop()
        name = self._host if self._ssl is not None else None
        async with asyncio.timeout(self._connect_seconds):
            transport, connection = await loop.create_connection(
                Connection, self._address or self._host, self._port, ssl=self._ssl, server_hostname=name
            )
        self._address = transport.get_extra_info("peername")[0]
        return connection

    def close(self) -> None:
        for connection in self._idle:
            connection.close()
        self._idle.clear()
