"""What can go wrong between a client and a server, and how the server's own words are read out of its answer."""

from __future__ import annotations

from typing import Any

import msgspec

from ratoon.core.errors import ExplainedError, RequestError

LONGEST_MESSAGE = 300  # characters of an answer that is no error object: a proxy's page, say


class RemoteError(ExplainedError):
    """The server can't be reached, failed, or broke off. `kind` is a short name to count by."""

    def __init__(self, subject: str, problem: str, expected: str = "", *, kind: str, status: int | None = None) -> None:
        super().__init__(subject, problem, expected)
        self.kind = kind
        self.status = status  # of HTTP, where there was an answer


class RefusedError(RemoteError, RequestError):
    """The server says that the request is wrong: sending it again would not help."""


def error_for_status(status: int, reason: str, body: bytes) -> RemoteError:
    """What an answer with an HTTP error says."""
    message = read_message(body) or reason or "no explanation"
    # 408 and 429 are the client's in name only: the same request may be answered later.
    refused = 400 <= status < 500 and status not in (408, 429)
    return (RefusedError if refused else RemoteError)(
        "server", f"{message} (HTTP {status})", kind=f"HTTP {status}", status=status
    )


def read_message(body: bytes) -> str:
    """The message in an error's body: OpenAI's shape, the shapes that other servers use, else the text itself."""
    try:
        value = msgspec.json.decode(body)
    except msgspec.DecodeError:
        return _shorten(body.decode(errors="replace"))
    return message_of(value)


def message_of(value: Any) -> str:
    while isinstance(value, dict):
        inner = next((value[key] for key in ("error", "message", "detail") if value.get(key)), None)
        if inner is None:
            return _shorten(msgspec.json.encode(value).decode())
        value = inner
    return _shorten(value if isinstance(value, str) else msgspec.json.encode(value).decode())


def _shorten(text: str) -> str:
    line = " ".join(text.split())
    return line if len(line) <= LONGEST_MESSAGE else line[: LONGEST_MESSAGE - 1] + "…"
