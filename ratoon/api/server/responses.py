"""Answers in one piece: JSON and errors. Every answer carries the request's id."""

from __future__ import annotations

from typing import Any

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from ratoon.api.server.errors import ApiError
from ratoon.api.server.exchange import Scope, Send, exchange_of

JSON = "application/json"


def json_response(request: Request, content: Any, status: int = 200) -> Response:
    headers = exchange_of(request.scope).headers()
    return Response(msgspec.json.encode(content), status, headers, JSON)


def error_response(scope: Scope, error: ApiError) -> Response:
    headers = {**error.headers, **exchange_of(scope).headers()}
    return Response(error.encode(), error.status, headers, JSON)


async def send_error(scope: Scope, send: Send, error: ApiError) -> None:
    """An error from a layer below the routes."""
    response = error_response(scope, error)
    await send({"type": "http.response.start", "status": error.status, "headers": response.raw_headers})
    await send({"type": "http.response.body", "body": response.body})
