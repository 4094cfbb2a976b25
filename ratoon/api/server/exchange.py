"""One request and its answer, as the layers of the server share it. The outermost layer makes it.

What a layer learns about a request (who sent it, its body) it notes here; nothing else travels in the ASGI scope.
"""

from __future__ import annotations

import re
import secrets
from collections.abc import Awaitable, Callable, MutableMapping
from dataclasses import dataclass
from typing import Any, TypeAlias

Scope: TypeAlias = MutableMapping[str, Any]
Message: TypeAlias = MutableMapping[str, Any]
Receive: TypeAlias = Callable[[], Awaitable[Message]]
Send: TypeAlias = Callable[[Message], Awaitable[None]]
AsgiApp: TypeAlias = Callable[[Scope, Receive, Send], Awaitable[None]]

KEY = "ratoon"
REQUEST_ID_HEADER = b"x-request-id"
TRACE_HEADERS = [("traceparent", b"traceparent"), ("tracestate", b"tracestate")]
NOTE_HEADER = "X-Ratoon-Note"
CLIENTS_REQUEST_ID = re.compile(rb"[A-Za-z0-9._:/+=@-]{1,128}")


@dataclass(slots=True)
class Exchange:
    request_id: str  # the client's X-Request-Id, or one of ours; goes back in the answer's header
    raw_send: Send  # the HTTP server's own: the chunks of a stream go past all layers
    tenant: str | None = None  # stands for the API key; None where no keys are asked for
    trace_headers: dict[str, str] | None = None  # the client's trace context
    body: bytes = b""
    status: int = 0  # 0: no answer was begun
    notes: tuple[str, ...] = ()  # what the client should know about how its request was carried out

    def headers(self) -> dict[str, str]:
        headers = {"X-Request-Id": self.request_id}
        return {**headers, NOTE_HEADER: "; ".join(self.notes)} if self.notes else headers


def exchange_of(scope: Scope) -> Exchange:
    exchange: Exchange = scope[KEY]
    return exchange


def header(scope: Scope, name: bytes) -> bytes | None:
    """The first header of this name (in lower case)."""
    return next((value for key, value in scope["headers"] if key == name), None)


class ExchangeLayer:
    """Makes the exchange, and tells the observer how it ended."""

    def __init__(self, app: AsgiApp, observe: Callable[[Scope, Exchange], None]) -> None:
        self._app = app
        self._observe = observe

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return await refuse_other_protocols(scope, receive, send)
        exchange = scope[KEY] = Exchange(_request_id(scope), send, trace_headers=_trace_headers(scope))

        async def note_status(message: Message) -> None:
            if message["type"] == "http.response.start":
                exchange.status = message["status"]
            await send(message)

        try:
            await self._app(scope, receive, note_status)
        finally:
            self._observe(scope, exchange)


def _request_id(scope: Scope) -> str:
    given = header(scope, REQUEST_ID_HEADER)
    if given is not None and CLIENTS_REQUEST_ID.fullmatch(given):
        return given.decode("ascii")
    return secrets.token_hex(16)


def _trace_headers(scope: Scope) -> dict[str, str] | None:
    found = {name: value.decode("latin-1") for name, key in TRACE_HEADERS if (value := header(scope, key)) is not None}
    return found or None


async def refuse_other_protocols(scope: Scope, receive: Receive, send: Send) -> None:
    """There are no web sockets here, and nothing to do at start-up."""
    if scope["type"] == "websocket":
        await receive()
        await send({"type": "websocket.close", "code": 1000})
