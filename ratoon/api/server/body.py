"""Reads bodies whole, before anything else looks at a request: never more, and never for longer, than is allowed."""

from __future__ import annotations

import asyncio

from ratoon.api.server.errors import ApiError
from ratoon.api.server.exchange import AsgiApp, Receive, Scope, Send, exchange_of, header
from ratoon.api.server.responses import send_error

CLOSE = {"Connection": "close"}  # the rest of the body is not read, so the connection can't be used again
METHODS_WITH_BODY = frozenset({"POST", "PUT", "PATCH"})


class BoundedBody:
    """Puts the body into the exchange. `receive` brings nothing but the client's end to those behind it."""

    def __init__(self, app: AsgiApp, max_bytes: int, timeout: float) -> None:
        self._app = app
        self._max_bytes = max_bytes
        self._timeout = timeout

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["method"] in METHODS_WITH_BODY:
            try:
                self._check_announced_length(scope)
                async with asyncio.timeout(self._timeout):
                    body = await self._read(receive)
            except ApiError as error:
                return await send_error(scope, send, error)
            except TimeoutError:
                message = f"The body was not complete after {self._timeout:g} seconds"
                return await send_error(scope, send, ApiError(408, message, code="body_timeout", headers=CLOSE))
            if body is None:
                return None
            exchange_of(scope).body = body
        await self._app(scope, receive, send)

    def _check_announced_length(self, scope: Scope) -> None:
        announced = header(scope, b"content-length")
        if announced is None:
            return
        if not announced.isdigit():
            raise ApiError(400, "Content-Length is not a number", headers=CLOSE)
        # A number this long is larger than any body, and would take its time to convert.
        if len(announced) > 18 or int(announced) > self._max_bytes:
            raise self._too_large()

    async def _read(self, receive: Receive) -> bytes | None:
        """None: the client went away."""
        pieces: list[bytes] = []
        num_bytes = 0
        while True:
            message = await receive()
            if message["type"] == "http.disconnect":
                return None
            piece = message.get("body", b"")
            num_bytes += len(piece)
            if num_bytes > self._max_bytes:
                raise self._too_large()
            pieces.append(piece)
            if not message.get("more_body", False):
                return pieces[0] if len(pieces) == 1 else b"".join(pieces)

    def _too_large(self) -> ApiError:
        message = f"The body is larger than {self._max_bytes} bytes, which is this server's limit (--max-body)"
        return ApiError(413, message, code="body_too_large", headers=CLOSE)
