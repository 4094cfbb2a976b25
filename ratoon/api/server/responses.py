"""Answers: JSON and errors in one piece, large ones in slices, and server-sent events.

Every answer carries the request's id. JSON is msgspec's: FastAPI's response models describe answers in the OpenAPI
document, and encoding by them would take several times as long. Chunks are written to the HTTP server's
own `send`, bypassing every layer in between, which Starlette's StreamingResponse can't do.
"""

from __future__ import annotations

import asyncio
import binascii
import secrets
from collections.abc import AsyncGenerator, Callable, Iterable, Iterator
from contextlib import aclosing
from typing import Any, TypeAlias

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from ratoon.api.hidden_states import cut
from ratoon.api.server.errors import ApiError, as_api_error
from ratoon.api.server.exchange import Receive, Scope, Send, exchange_of
from ratoon.api.server.threads import LONG_TEXT, WorkLanes
from ratoon.observe.logging import get_logger

JSON = "application/json"

_encode = msgspec.json.Encoder().encode


def json_response(request: Request, content: Any, status: int = 200) -> Response:
    headers = exchange_of(request.scope).headers()
    return Response(_encode(content), status, headers, JSON)


# An answer may be large: thousands of log-probabilities, vectors or tokens. It is then built and encoded in a thread.
# Encoding holds Python's lock, in a thread as well: what is large is built of parts that are `encoded` one by one.

_lanes = WorkLanes("answer", LONG_TEXT)


async def large_response(request: Request, size: int, build: Callable[[], Any]) -> Response:
    """Answers with content that is perhaps large. `size` is that of the text which would take as long to encode, or to
    tokenise."""
    return json_response(request, await _lanes.run(size, lambda: encoded(build())))


async def large_binary_response(request: Request, size: int, build: Callable[[], Any]) -> Response:
    """Answers with content that has Base64 in it, which `size` does not count; it is built off the event loop."""
    parts = await _lanes.run(size, lambda: encode_parts(build()))
    return SlicedResponse(request, slices(parts), total_size(parts), JSON)


def parts_response(request: Request, parts: list[bytes]) -> Response:
    """Answers with JSON that is encoded already. What is large is sent slice by slice, without a copy of the whole."""
    size = total_size(parts)
    if size < SLICE:
        return Response(b"".join(parts), 200, exchange_of(request.scope).headers(), JSON)
    return SlicedResponse(request, slices(parts), size, JSON)


def encoded(content: Any) -> msgspec.Raw:
    """Encodes content as JSON that can be put into other content."""
    return msgspec.Raw(_encode(content))


class SlicedResponse(Response):
    """Sends slices as they are encoded. Other tasks run after each, however fast the client reads."""

    def __init__(self, request: Request, body: Iterable[bytes], size: int, media_type: str) -> None:
        super().__init__(headers=exchange_of(request.scope).headers(), media_type=media_type)
        self.headers["content-length"] = str(size)
        self._slices = body

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        raw_send = exchange_of(scope).raw_send
        await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
        for body in self._slices:
            await raw_send({"type": "http.response.body", "body": body, "more_body": True})
            await asyncio.sleep(0)
        await raw_send({"type": "http.response.body", "body": b"", "more_body": False})


def error_response(scope: Scope, error: ApiError) -> Response:
    """Returns an error in the form of the protocol that the path belongs to."""
    exchange = exchange_of(scope)
    headers = {**error.headers, **exchange.headers()}
    content = error.encode()
    if scope["path"].startswith(MESSAGES_PATH):
        content = msgspec.json.encode(messages_error(error, exchange.request_id))
    elif scope["path"].startswith(OLLAMA_PATH):
        content = msgspec.json.encode({"error": error.message})
    return Response(content, error.status, headers, JSON)


MESSAGES_PATH = "/v1/messages"  # Anthropic's protocol
OLLAMA_PATH = "/api/"
MESSAGES_ERRORS = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    408: "timeout_error",
    413: "request_too_large",
    429: "rate_limit_error",
    500: "api_error",
    503: "overloaded_error",
    504: "timeout_error",
}


def messages_error(error: ApiError, request_id: str) -> dict[str, Any]:
    """Returns an error as Anthropic's clients expect it."""
    detail = {"type": MESSAGES_ERRORS.get(error.status, "invalid_request_error"), "message": error.message}
    return {"type": "error", "error": detail, "request_id": request_id}


async def send_error(scope: Scope, send: Send, error: ApiError) -> None:
    """Sends an error from a layer below the routes."""
    response = error_response(scope, error)
    await send({"type": "http.response.start", "status": error.status, "headers": response.raw_headers})
    await send({"type": "http.response.body", "body": response.body})


# ---- JSON with much base64 in it ----
# Encoded and sent slice by slice, without a second copy. Encoding holds Python's lock, so in a thread it would
# block the event loop as well, and for longer than here, where other tasks run after every slice.

SLICE = 192 * 1024  # bytes before encoding; a multiple of 3, so that slices concatenate; well below a millisecond


class Base64:
    """Bytes that stand in JSON as text."""

    def __init__(self, data: memoryview) -> None:
        self._data = data

    def __len__(self) -> int:
        """Returns the length of the text."""
        return (self._data.nbytes + 2) // 3 * 4

    def slices(self) -> Iterator[bytes]:
        return (binascii.b2a_base64(piece, newline=False) for piece in cut(self._data, SLICE))


Part: TypeAlias = bytes | Base64


def encode_parts(content: Any) -> list[Part]:
    """Returns `content` as JSON, split at its Base64 parts."""
    found: list[Base64] = []
    mark = secrets.token_hex(16)  # random: no text of a client or a model contains it

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
    """Yields the pieces to send: short parts joined, long ones split."""
    gathered: list[bytes | memoryview] = []
    size = 0
    for part in parts:
        for piece in part.slices() if isinstance(part, Base64) else cut(memoryview(part), SLICE):
            gathered.append(piece)
            size += len(piece)
            if size >= SLICE:
                yield b"".join(gathered)
                gathered, size = [], 0
    if gathered:
        yield b"".join(gathered)


# ---- server-sent events ----

EVENT_STREAM = "text/event-stream"
DONE = b"data: [DONE]\n\n"
OBJECT_END = b"}\n\n"
STREAM_HEADERS = {"Cache-Control": "no-cache", "X-Accel-Buffering": "no"}  # proxies must not buffer chunks

logger = get_logger(__name__)


def event(content: Any) -> bytes:
    return b"data: %b\n\n" % _encode(content)


class EventTemplate:
    """Events that differ in one text, and perhaps in the value of their last field. The rest is encoded once."""

    __slots__ = ("_head", "_tail")

    def __init__(self, content: dict[str, Any], mark: str, last_field: str | None = None) -> None:
        """`mark` stands in the place of the text, and occurs nowhere else."""
        if last_field is not None:
            content = {name: value for name, value in content.items() if name != last_field}
        self._head, self._tail = event(content).split(b'"%b"' % mark.encode())
        if last_field is not None:
            self._tail = b'%b,"%b":' % (self._tail.removesuffix(OBJECT_END), last_field.encode())

    def event(self, text: str, last_value: Any = None) -> bytes:
        if last_value is None:
            return b"%b%b%b" % (self._head, _encode(text), self._tail)
        return b"%b%b%b%b%b" % (self._head, _encode(text), self._tail, _encode(last_value), OBJECT_END)


def event_parts(content: Any) -> list[Part]:
    """Returns the parts of an event for content with Base64 in it."""
    return [b"data: ", *encode_parts(content), b"\n\n"]


class EventStream(Response):
    """Sends encoded events: the given ones first, then those of the generator, then `end`.

    An error becomes the last event before the end.
    """

    media_type = EVENT_STREAM

    def __init__(
        self,
        first: bytes,
        events: AsyncGenerator[bytes, None],
        headers: dict[str, str],
        end: bytes = DONE,
        error_event: Callable[[ApiError], bytes] | None = None,
    ) -> None:
        super().__init__(headers={**STREAM_HEADERS, **headers})
        del self.headers["content-length"]
        self._first = first
        self._events = events
        self._end = end
        self._error_event = error_event or _error_event

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        raw_send = exchange_of(scope).raw_send
        last = self._end
        async with aclosing(self._events) as events:
            await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
            await raw_send({"type": "http.response.body", "body": self._first, "more_body": True})
            try:
                async for body in events:
                    await raw_send({"type": "http.response.body", "body": body, "more_body": True})
            except Exception as error:
                last = self._error_event(_logged(error)) + self._end
        await raw_send({"type": "http.response.body", "body": last, "more_body": False})


def _logged(error: Exception) -> ApiError:
    answer = as_api_error(error)
    if answer.status == 500:
        logger.error("a stream failed: %s", error, exc_info=None if answer is error else error)
    return answer


def _error_event(error: ApiError) -> bytes:
    return event(error.as_dict())
