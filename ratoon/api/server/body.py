"""Reads bodies whole, before anything else looks at a request: never more, and never for longer, than is allowed."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from typing import NamedTuple

from ratoon.api.server.errors import ApiError
from ratoon.api.server.exchange import AsgiApp, Receive, Scope, Send, exchange_of, header
from ratoon.api.server.freed_memory import LARGE, return_memory_soon
from ratoon.api.server.responses import send_error

CLOSE = {"Connection": "close"}  # the rest of the body is not read, so the connection can't be used again
LONGEST_LENGTH = 18  # digits
METHODS_WITH_BODY = frozenset({"POST", "PUT", "PATCH"})


class BodyLimit(NamedTuple):
    num_bytes: int
    option: str  # that sets it


class BoundedBody:
    """Puts the body into the exchange. `receive` brings nothing but the client's end to those behind it."""

    def __init__(self, app: AsgiApp, limit: BodyLimit, timeout: float, others: Mapping[str, BodyLimit] = {}) -> None:
        """`others` are limits of single paths."""
        self._app = app
        self._limit = limit
        self._others = others
        self._timeout = timeout

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await self._answer(scope, receive, send)
        finally:
            if _announced_length(scope) >= LARGE or len(exchange_of(scope).body) >= LARGE:
                return_memory_soon(asyncio.get_running_loop())

    async def _answer(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["method"] in METHODS_WITH_BODY:
            limit = self._others.get(scope["path"], self._limit)
            try:
                _check_announced_length(scope, limit)
                async with asyncio.timeout(self._timeout):
                    body = await _read(receive, limit)
            except ApiError as error:
                return await send_error(scope, send, error)
            except TimeoutError:
                message = f"The body was not complete after {self._timeout:g} seconds"
                return await send_error(scope, send, ApiError(408, message, code="body_timeout", headers=CLOSE))
            if body is None:
                return None
            exchange_of(scope).body = body
        await self._app(scope, receive, send)


def _announced_length(scope: Scope) -> int:
    announced = header(scope, b"content-length") or b""
    return int(announced) if announced.isdigit() and len(announced) <= LONGEST_LENGTH else 0


def _check_announced_length(scope: Scope, limit: BodyLimit) -> None:
    announced = header(scope, b"content-length")
    if announced is None:
        return
    if not announced.isdigit():
        raise ApiError(400, "Content-Length is not a number", headers=CLOSE)
    # A number this long is larger than any body, and would take its time to convert.
    if len(announced) > LONGEST_LENGTH or int(announced) > limit.num_bytes:
        raise _too_large(limit)


async def _read(receive: Receive, limit: BodyLimit) -> bytes | None:
    """None: the client went away."""
    pieces: list[bytes] = []
    num_bytes = 0
    while True:
        message = await receive()
        if message["type"] == "http.disconnect":
            return None
        piece = message.get("body", b"")
        num_bytes += len(piece)
        if num_bytes > limit.num_bytes:
            raise _too_large(limit)
        pieces.append(piece)
        if not message.get("more_body", False):
            return pieces[0] if len(pieces) == 1 else b"".join(pieces)


def _too_large(limit: BodyLimit) -> ApiError:
    message = f"The body is larger than {limit.num_bytes} bytes, which is this server's limit ({limit.option})"
    return ApiError(413, message, code="body_too_large", headers=CLOSE)
