"""Sockets and connections, below HTTP: where the server listens, how connections are accepted, and their limits.

The socket is bound before the model is loaded, so that a conflict is reported immediately. Connections are uvicorn's
with httptools, extended by limits: on their number (connection_limit.py), on the size of a request's head and the time
it takes, on how long a client may leave an answer unread, and on what is read of pipelined requests before their turn.
Pipelined requests are cancelled when the client disconnects, and a client that has closed its own side of the
connection still gets its answers. uvicorn has no hooks for these: BoundedHttpProtocol and HttpServer override methods
that its next versions may change, so pyproject.toml bounds it.
"""

from __future__ import annotations

import asyncio
import errno
import ipaddress
import os
import socket
import stat
from collections.abc import Callable, Generator
from contextlib import closing, contextmanager, suppress
from typing import Any

import uvicorn
from uvicorn.protocols.http.flow_control import FlowControl
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol, RequestResponseCycle

from ratoon.api.server.connection_limit import ConnectionLimit
from ratoon.api.server.exchange import BODY_WRITER
from ratoon.api.server.settings import ServerSettings
from ratoon.core.errors import ConfigError
from ratoon.observe.logging import get_logger

# ---- where it listens ----


def bind(settings: ServerSettings) -> socket.socket:
    """Returns a bound socket that does not listen yet. ConfigError if the address is in use or invalid."""
    return _bind_port(settings.host, settings.port) if settings.uds is None else _bind_path(settings.uds)


def address(bound: socket.socket) -> str:
    """Returns the URL for clients."""
    if bound.family == socket.AF_UNIX:
        return f"unix:{bound.getsockname()}"
    host, port = bound.getsockname()[:2]
    return f"http://[{host}]:{port}" if bound.family == socket.AF_INET6 else f"http://{host}:{port}"


def release(bound: socket.socket, settings: ServerSettings) -> None:
    """Closes the socket; a Unix socket's file is removed."""
    bound.close()
    if settings.uds is not None:
        with suppress(FileNotFoundError):
            os.unlink(settings.uds)


def is_local(bound: socket.socket) -> bool:
    """Returns whether only this machine can reach the socket."""
    return bound.family == socket.AF_UNIX or ipaddress.ip_address(bound.getsockname()[0]).is_loopback


def _bind_port(host: str, port: int) -> socket.socket:
    try:
        family, kind, protocol, _, target = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
    except (OSError, UnicodeError) as error:
        raise ConfigError("host", f"{host!r} is no address here: {error}", "127.0.0.1, 0.0.0.0 or ::") from None
    bound = socket.socket(family, kind, protocol)
    try:
        bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        bound.bind(target)
    except OSError as error:
        bound.close()
        if error.errno == errno.EADDRINUSE:
            raise ConfigError("port", f"{host}:{port} is in use", "another --port, or 0 for any free one") from None
        raise ConfigError("host", f"can't listen on {host}:{port}: {error.strerror}") from None
    return bound


def _bind_path(path: str) -> socket.socket:
    _remove_stale_socket(path)
    bound = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        bound.bind(path)
    except OSError as error:
        bound.close()
        raise ConfigError("uds", f"can't listen on {path}: {error.strerror or error}", "a path that is free") from None
    return bound


def _remove_stale_socket(path: str) -> None:
    """Removes the socket of a server that was killed. A socket that answers, or any other file, is kept."""
    if not os.path.exists(path) or not stat.S_ISSOCK(os.stat(path).st_mode):
        return
    with closing(socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)) as probe:
        try:
            probe.connect(path)
        except ConnectionRefusedError:
            os.unlink(path)


# ---- how connections are accepted: all pending ones at once ----
# uvloop accepts one connection per iteration. With a thousand streams an iteration is long, and
# the last of many connections would wait for seconds before its request is read: of 800 streams at once the last has
# its first event after 2.6 s, and had it after 3.3 to 5.0 with uvicorn's own (two Neoverse-N1 cores).

BACKLOG = 2048
MOST_AT_ONCE = 256  # then other tasks run
FEW_AT_ONCE = 4  # where several processes accept from one socket: else the first would take all that are pending
OUT_OF_DESCRIPTORS = (errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM)
SECONDS_UNTIL_LATER = 0.5  # until then connections wait in the system's queue

logger = get_logger(__name__)


class Acceptor:
    def __init__(
        self, listening: socket.socket, make_protocol: Callable[[], asyncio.Protocol], at_once: int = MOST_AT_ONCE
    ) -> None:
        self._at_once = at_once
        self._socket = listening
        self._make_protocol = make_protocol
        self._loop = asyncio.get_running_loop()
        self._later: asyncio.TimerHandle | None = None
        self._opening: set[asyncio.Task[None]] = set()

    def start(self) -> None:
        self._socket.setblocking(False)
        self._socket.listen(BACKLOG)
        self._loop.add_reader(self._socket.fileno(), self._accept_all)

    def stop(self) -> None:
        self._loop.remove_reader(self._socket.fileno())
        if self._later is not None:
            self._later.cancel()

    def _accept_all(self) -> None:
        for _ in range(self._at_once):
            try:
                connection, _ = self._socket.accept()
            except (BlockingIOError, InterruptedError, ConnectionAbortedError):
                return
            except OSError as error:
                if error.errno not in OUT_OF_DESCRIPTORS:
                    raise
                logger.warning("connections have to wait: %s", error.strerror)
                self._loop.remove_reader(self._socket.fileno())
                self._later = self._loop.call_later(SECONDS_UNTIL_LATER, self._go_on)
                return
            connection.setblocking(False)
            task = self._loop.create_task(self._open(connection))
            self._opening.add(task)
            task.add_done_callback(self._opening.discard)

    async def _open(self, connection: socket.socket) -> None:
        try:
            await self._loop.connect_accepted_socket(self._make_protocol, connection)
        except OSError:  # already disconnected
            connection.close()

    def _go_on(self) -> None:
        self._later = None
        self._loop.add_reader(self._socket.fileno(), self._accept_all)


# ---- what a connection may do ----

MAX_HEAD_BYTES = 64 * 1024  # beside the first read of it
HEAD_SECONDS = 60.0
WRITE_SECONDS = 60.0  # default; the server's settings override it
FIRST_PROBE_SECONDS = 0.02  # between probes whether a client that has closed its side still waits; they double
LONGEST_PROBE_SECONDS = 2.0
PROBE = b"HTTP/1.1 100 Continue\r\n\r\n"  # every client must skip it, even if it did not ask for it
HEAD_SLICE = 1024  # bytes that are parsed at once where a request's head may be in them: some tens of requests at most
BODY_SLICE = 64 * 1024  # the same within a body
MAX_LENGTH_DIGITS = 18  # more is refused by the layer that reads bodies
MAX_HELD_BYTES = 64 * 1024  # of requests that are not parsed yet; then the connection is not read further


class ChunkWriter:
    """The BodyWriter of a response: what uvicorn's `send` does for a part of a body in chunks, without its coroutine.
    One that is not ready leaves the part to `send`, which waits for the client or drops it."""

    __slots__ = ("_cycle",)

    def __init__(self, cycle: RequestResponseCycle) -> None:
        self._cycle = cycle

    @property
    def is_ready(self) -> bool:
        cycle = self._cycle
        return bool(
            cycle.chunked_encoding  # known once the response has begun
            and not cycle.response_complete
            and not cycle.flow.write_paused
            and not cycle.disconnected
        )

    def write(self, body: bytes) -> None:
        self._cycle.transport.write(b"%x\r\n%b\r\n" % (len(body), body))


class HeldFlow(FlowControl):
    """Does not resume reading while the connection holds enough that was read and is not parsed."""

    is_full = False

    def resume_reading(self) -> None:
        if not self.is_full:
            super().resume_reading()


class BoundedHttpProtocol(HttpToolsProtocol):
    flow: HeldFlow

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self._held = bytearray()  # read, and not parsed: earlier requests of the connection are answered first
        self._num_body_bytes = 0  # that the current request's body still has, if it announced its length
        self._num_head_bytes = 0
        self._head_timer: asyncio.TimerHandle | None = None  # runs while a head is incomplete
        self._cycles: list[RequestResponseCycle] = []  # several, if the client pipelines requests
        self.limit: ConnectionLimit | None = None
        self.write_seconds = WRITE_SECONDS
        self._write_timer: asyncio.TimerHandle | None = None  # runs while the client has unread data
        self._half_closed = False  # the client sends no more
        self._probe_timer: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self.flow = HeldFlow(transport)
        self._begin_head()
        if self.limit is not None:
            self.limit.open(self)

    def connection_lost(self, exc: Exception | None) -> None:
        if self.limit is not None:
            self.limit.close(self)
        self._end_head()
        self._end_write()
        if self._probe_timer is not None:
            self._probe_timer.cancel()
        self._held.clear()
        super().connection_lost(exc)
        for cycle in self._cycles:
            if not cycle.response_complete:
                cycle.disconnected = True
                cycle.message_event.set()

    # A client may send requests without waiting for answers. They are parsed when their turn comes, one ahead: parsing
    # all that has arrived would take the event loop for as long as the client likes.

    def data_received(self, data: bytes) -> None:
        self._held += data
        self._parse_held()

    def _parse_held(self) -> None:
        while self._held and not self.pipeline and not self.transport.is_closing():
            size = min(self._num_body_bytes, BODY_SLICE) or HEAD_SLICE
            piece = bytes(self._held[:size])
            del self._held[:size]
            self._parse(piece)
        self.flow.is_full = len(self._held) > MAX_HELD_BYTES
        if self.flow.is_full:
            self.flow.pause_reading()
        if self._half_closed:
            self._end_incomplete()

    def _parse(self, data: bytes) -> None:
        self._num_head_bytes += len(data)
        super().data_received(data)
        if self._head_timer is not None and self._num_head_bytes > MAX_HEAD_BYTES:
            self._refuse(b"431 Request Header Fields Too Large")

    def on_body(self, body: bytes) -> None:
        self._num_body_bytes = max(0, self._num_body_bytes - len(body))
        super().on_body(body)

    def on_message_begin(self) -> None:
        super().on_message_begin()
        self._begin_head()
        if not self.flow.write_paused:
            self._end_write()

    # What does not fit into the system's buffers is kept here, and with it the answer that it is part of. The client
    # has `write_seconds` to take most of it; then the connection is closed, and its requests are freed.

    def pause_writing(self) -> None:
        super().pause_writing()
        self._begin_write()

    def resume_writing(self) -> None:
        super().resume_writing()
        self._end_write()

    def on_response_complete(self) -> None:
        super().on_response_complete()
        if not self.flow.write_paused and self.transport.get_write_buffer_size():
            self._begin_write()  # the rest, for which no task waits
        if self._held and not self.transport.is_closing():
            self._parse_held()
            self.flow.resume_reading()
        if self.limit is not None and not self._unanswered():
            self.limit.end(self)
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
        if self.limit is not None:
            self.limit.begin(self)
        super().on_headers_complete()
        self._cycles = [cycle for cycle in self._cycles if not cycle.response_complete]
        self._cycles.append(self.cycle)
        length = next((value for name, value in self.headers if name == b"content-length"), b"")
        self._num_body_bytes = int(length) if length.isdigit() and len(length) <= MAX_LENGTH_DIGITS else 0
        if self.scope["http_version"] == "1.0":  # whose clients know no interim answers
            self.cycle.waiting_for_100_continue = False
        self.scope["extensions"] = {BODY_WRITER: ChunkWriter(self.cycle)}  # type: ignore[dict-item]

    def eof_received(self) -> bool:  # type: ignore[override]
        """The client has closed its side. True, and the connection stays open, while there are answers to send."""
        self._half_closed = True
        self._end_head()
        self._end_incomplete()
        if not self._unanswered():
            return False
        self._probe(FIRST_PROBE_SECONDS)
        return True

    def _end_incomplete(self) -> None:
        """The client has closed its side: what is missing of a body will not arrive."""
        for cycle in self._unanswered() if not self._held else ():
            if cycle.more_body:
                cycle.disconnected = True
                cycle.message_event.set()

    def _close_behind_last_answer(self) -> None:
        if self._half_closed and not self._held and not self._unanswered() and not self.transport.is_closing():
            self.transport.close()

    def _unanswered(self) -> list[RequestResponseCycle]:
        return [cycle for cycle in self._cycles if not cycle.response_complete and not cycle.disconnected]

    def _probe(self, seconds: float) -> None:
        """A disconnected client looks the same as one that only closed its side, until something is sent to it: then
        its system resets the connection, the next write fails, and its requests are aborted. The probe must be harmless
        for a client that waits. A stream needs no probes, and HTTP/1.0 has no message for it."""
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

    # What the limit on connections asks for

    def close_idle(self) -> None:
        self._end_head()
        self.transport.close()

    def refuse_new(self) -> None:
        self._refuse(b"503 Service Unavailable\r\nretry-after: 1")

    def _refuse(self, status: bytes) -> None:
        self._end_head()
        if not self.transport.is_closing():
            self.transport.write(b"HTTP/1.1 %b\r\nconnection: close\r\ncontent-length: 0\r\n\r\n" % status)
            self.transport.close()


class HttpServer(uvicorn.Server):
    """Leaves signals to the runner: uvicorn would stop listening first, and clients would get no 503. Accepts
    connections as above."""

    _acceptor: Acceptor | None = None
    write_timeout: float | None = None  # seconds
    shares_socket = False  # with other processes
    connection_limit: ConnectionLimit | None = None

    @contextmanager
    def capture_signals(self) -> Generator[None, None, None]:
        yield

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets=[])
        assert sockets is not None
        at_once = FEW_AT_ONCE if self.shares_socket else MOST_AT_ONCE
        self._acceptor = Acceptor(sockets[0], self._make_protocol, at_once)
        self._acceptor.start()

    def _make_protocol(self) -> asyncio.Protocol:
        make: Any = self.config.http_protocol_class
        protocol: BoundedHttpProtocol = make(
            config=self.config, server_state=self.server_state, app_state=self.lifespan.state
        )
        protocol.limit = self.connection_limit
        if self.write_timeout is not None:
            protocol.write_seconds = self.write_timeout
        return protocol

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        if self._acceptor is not None:
            self._acceptor.stop()
        await super().shutdown(sockets=sockets)
