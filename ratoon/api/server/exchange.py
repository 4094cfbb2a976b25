"""One request and its answer, shared by the layers of the server. The outermost layer creates it.

Layers store what they find out about a request (its owner, its body) here, and not in the ASGI scope.
"""

from __future__ import annotations

import re
from collections.abc import Awaitable, Callable, MutableMapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, TypeAlias

Scope: TypeAlias = MutableMapping[str, Any]
Message: TypeAlias = MutableMapping[str, Any]
Receive: TypeAlias = Callable[[], Awaitable[Message]]
Send: TypeAlias = Callable[[Message], Awaitable[None]]
AsgiApp: TypeAlias = Callable[[Scope, Receive, Send], Awaitable[None]]

KEY = "ratoon"
BODY_WRITER = "ratoon.body_writer"  # an extension of ASGI, in the scope
REQUEST_ID_HEADER = b"x-request-id"
SESSION_HEADER = b"x-session-id"
TRACE_HEADERS = [("traceparent", b"traceparent"), ("tracestate", b"tracestate")]
NOTE_HEADER = "X-Ratoon-Note"
IGNORED_HEADER = "X-Ratoon-Ignored-Fields"
CLIENTS_REQUEST_ID = re.compile(rb"[A-Za-z0-9._:/+=@-]{1,128}")


class BodyWriter(Protocol):
    """Writes further parts of a streamed body without waiting, where ASGI's `send` is a coroutine."""

    @property
    def is_ready(self) -> bool:
        """Whether the response has begun and the client takes what is written."""
        ...

    def write(self, body: bytes) -> None:
        """Writes a part. It may be called only while the writer is ready."""


@dataclass(slots=True)
class Exchange:
    request_id: str  # the client's X-Request-Id, or a generated one; returned in the answer's header
    raw_send: Send  # the HTTP server's own: the chunks of a stream bypass all layers
    writer: BodyWriter | None = None  # None: the HTTP server has none
    tenant: str | None = None  # derived from the API key; None without keys
    is_admin: bool = False  # an admin key was sent, to a path that takes both kinds
    trace_headers: dict[str, str] | None = None  # the client's trace context
    session: str | None = None  # the header X-Session-Id, as it came
    body: bytes = b""  # until it is parsed
    body_size: int = 0  # in bytes; known once the body has arrived
    status: int = 0  # 0: no response was started
    load_seconds: float = 0.0  # that the request waited for its model
    notes: tuple[str, ...] = ()  # notes for the client about how its request was handled
    ignored_fields: str = ""  # names of fields of the body that are unknown, as the header has them

    def headers(self) -> dict[str, str]:
        headers = {"X-Request-Id": self.request_id}
        if self.notes:
            headers[NOTE_HEADER] = "; ".join(self.notes)
        if self.ignored_fields:
            headers[IGNORED_HEADER] = self.ignored_fields
        return headers


def exchange_of(scope: Scope) -> Exchange:
    exchange: Exchange = scope[KEY]
    return exchange


def header(scope: Scope, name: bytes) -> bytes | None:
    """Returns the first header of this name (in lower case)."""
    return next((value for key, value in scope["headers"] if key == name), None)


def preferred_type(scope: Scope, offered: Sequence[str]) -> str:
    """Returns one of `offered`: the first of them if the client names none, or accepts everything."""
    wishes = (header(scope, b"accept") or b"").decode("latin-1").lower().split(",")
    best, best_weight = offered[0], 0.0
    for wish in wishes:
        name, *parameters = (part.strip() for part in wish.split(";"))
        weight = _weight(parameters)
        if name in offered and weight > best_weight:  # of equal ones the first
            best, best_weight = name, weight
    return best


def _weight(parameters: Sequence[str]) -> float:
    text = next((parameter[2:] for parameter in parameters if parameter.startswith("q=")), "1")
    try:
        return float(text)
    except ValueError:
        return 0.0
