"""Server-sent events: an answer that is sent while it is made.

The path of a chunk is as short as it can be: bytes to the HTTP server's own `send`, past every layer in between.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator
from contextlib import aclosing
from typing import Any

import msgspec
from starlette.responses import Response

from ratoon.api.server.errors import as_api_error
from ratoon.api.server.exchange import Receive, Scope, Send, exchange_of
from ratoon.api.server.large_json import Part, encode_parts
from ratoon.observe.logging import get_logger

EVENT_STREAM = "text/event-stream"
DONE = b"data: [DONE]\n\n"
HEADERS = {"Cache-Control": "no-cache", "X-Accel-Buffering": "no"}  # proxies must not hold chunks back

logger = get_logger(__name__)
_encode = msgspec.json.Encoder().encode


def event(content: Any) -> bytes:
    return b"data: %b\n\n" % _encode(content)


def event_parts(content: Any) -> list[Part]:
    """The same for content with Base64 in it."""
    return [b"data: ", *encode_parts(content), b"\n\n"]


class EventStream(Response):
    """Sends encoded events: those that are here already, then what the generator yields.

    An error on the way becomes the last event before [DONE].
    """

    media_type = EVENT_STREAM

    def __init__(self, first: bytes, events: AsyncGenerator[bytes, None], headers: dict[str, str]) -> None:
        super().__init__(headers={**HEADERS, **headers})
        del self.headers["content-length"]
        self._first = first
        self._events = events

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        raw_send = exchange_of(scope).raw_send
        last = DONE
        async with aclosing(self._events) as events:
            await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
            await raw_send({"type": "http.response.body", "body": self._first, "more_body": True})
            try:
                async for body in events:
                    await raw_send({"type": "http.response.body", "body": body, "more_body": True})
            except Exception as error:
                last = _last_words(error) + DONE
        await raw_send({"type": "http.response.body", "body": last, "more_body": False})


def _last_words(error: Exception) -> bytes:
    answer = as_api_error(error)
    if answer.status == 500:
        logger.error("a stream failed: %s", error, exc_info=None if answer is error else error)
    return event(answer.as_dict())
