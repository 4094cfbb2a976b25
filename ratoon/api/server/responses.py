"""Answers that are known in full: JSON and errors in one piece, large ones in slices.

Every answer carries the request's id. Answers that are sent while they are made are in sse.py.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable
from typing import Any

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from ratoon.api.server.errors import ApiError
from ratoon.api.server.exchange import Receive, Scope, Send, exchange_of
from ratoon.api.server.large_json import encode_parts, slices, total_size

JSON = "application/json"


def json_response(request: Request, content: Any, status: int = 200) -> Response:
    headers = exchange_of(request.scope).headers()
    return Response(msgspec.json.encode(content), status, headers, JSON)


def large_json_response(request: Request, content: Any) -> Response:
    """For content with Base64 in it."""
    parts = encode_parts(content)
    return SlicedResponse(request, slices(parts), total_size(parts), JSON)


class SlicedResponse(Response):
    """Sends slices as they are made. Others have their turn after each, however fast the client reads."""

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
    headers = {**error.headers, **exchange_of(scope).headers()}
    return Response(error.encode(), error.status, headers, JSON)


async def send_error(scope: Scope, send: Send, error: ApiError) -> None:
    """An error from a layer below the routes."""
    response = error_response(scope, error)
    await send({"type": "http.response.start", "status": error.status, "headers": response.raw_headers})
    await send({"type": "http.response.body", "body": response.body})
