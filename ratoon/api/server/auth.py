"""API keys: who may ask, and who it was. Keys are kept and compared as hashes, and appear in no message.

Every key is compared with every request's, in constant time: how long it takes says nothing about any of them.
"""

from __future__ import annotations

import hashlib
import hmac
from collections.abc import Iterable

from ratoon.api.server.errors import ApiError
from ratoon.api.server.exchange import AsgiApp, Receive, Scope, Send, exchange_of, header
from ratoon.api.server.responses import send_error

OPEN_PATHS = frozenset({"/health", "/version", "/metrics"})
SCHEME = b"bearer "
TENANT_LENGTH = 16  # hex digits


class KeyRing:
    def __init__(self, keys: Iterable[str]) -> None:
        # Hashing first makes all comparisons equally long, whatever was sent.
        self._digests = [_digest(key.encode()) for key in keys]

    def find_tenant(self, key: bytes) -> str | None:
        """A name that stands for the key (it does not give it away); None for a key that is not on the ring."""
        digest = _digest(key)
        found = False
        for known in self._digests:
            found |= hmac.compare_digest(known, digest)
        return hashlib.sha256(b"tenant" + digest).hexdigest()[:TENANT_LENGTH] if found else None


class RequireKey:
    """Lets requests with a key pass, and those to open paths."""

    def __init__(self, app: AsgiApp, ring: KeyRing) -> None:
        self._app = app
        self._ring = ring

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["path"] not in OPEN_PATHS:
            key = _sent_key(scope)
            tenant = None if key is None else self._ring.find_tenant(key)
            if tenant is None:
                return await send_error(scope, send, _unauthorized(key is None))
            exchange_of(scope).tenant = tenant
        await self._app(scope, receive, send)


def _sent_key(scope: Scope) -> bytes | None:
    value = header(scope, b"authorization")
    if value is None or value[: len(SCHEME)].lower() != SCHEME:
        return None
    return value[len(SCHEME) :].strip()


def _unauthorized(missing: bool) -> ApiError:
    message = "No API key was sent" if missing else "The API key is not known here"
    return ApiError(
        401,
        f"{message}; send one as the header 'Authorization: Bearer KEY'",
        code="invalid_api_key",
        headers={"WWW-Authenticate": "Bearer"},
    )


def _digest(key: bytes) -> bytes:
    return hashlib.sha256(key).digest()
