"""API keys and admin keys: which requests may pass, and which key sent them. Keys are kept and compared as hashes, and
appear in no message.

Every key is compared with every request's, in constant time: how long it takes says nothing about any of them.
"""

from __future__ import annotations

import hashlib
import hmac
from collections.abc import Iterable

from ratoon.api.server.errors import ApiError
from ratoon.api.server.exchange import AsgiApp, Receive, Scope, Send, exchange_of, header
from ratoon.api.server.responses import send_error

OPEN_PATHS = frozenset({"/", "/docs", "/health", "/version", "/metrics"})
ADMIN_PATH = "/admin"
SCHEME = b"bearer "
TENANT_LENGTH = 16  # hex digits


class KeyRing:
    def __init__(self, keys: Iterable[str]) -> None:
        # Hashing first makes all comparisons equally long, whatever was sent.
        self._digests = [_digest(key.encode()) for key in keys]

    def __bool__(self) -> bool:
        return bool(self._digests)

    def find_tenant(self, key: bytes) -> str | None:
        """A name that stands for the key (it does not give it away); None for a key that is not on the ring."""
        digest = _digest(key)
        found = False
        for known in self._digests:
            found |= hmac.compare_digest(known, digest)
        return hashlib.sha256(b"tenant" + digest).hexdigest()[:TENANT_LENGTH] if found else None


class RequireKey:
    """Lets requests pass that bear a key for their path, and those to open paths.

    The two kinds of keys are apart: an API key does not open /admin/…, and an admin key opens nothing else. Without API
    keys, everything but /admin/… is open.
    """

    def __init__(self, app: AsgiApp, ring: KeyRing, admin_ring: KeyRing) -> None:
        self._app = app
        self._ring = ring
        self._admin_ring = admin_ring  # empty: there is no administration

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["path"] not in OPEN_PATHS:
            refusal = self._check(scope)
            if refusal is not None:
                return await send_error(scope, send, refusal)
        await self._app(scope, receive, send)

    def _check(self, scope: Scope) -> ApiError | None:
        key = _sent_key(scope)
        tenant = None if key is None else self._ring.find_tenant(key)
        is_admin = key is not None and self._admin_ring.find_tenant(key) is not None
        if self._admin_ring and is_admin_path(scope["path"]):
            if is_admin:
                return None
            return _unauthorized(key is None, "admin key") if tenant is None else _needs_admin_key()
        if self._ring and tenant is None:
            return _needs_api_key() if is_admin else _unauthorized(key is None, "API key")
        exchange_of(scope).tenant = tenant
        return None


def is_admin_path(path: str) -> bool:
    return path == ADMIN_PATH or path.startswith(f"{ADMIN_PATH}/")


def _sent_key(scope: Scope) -> bytes | None:
    value = header(scope, b"authorization")
    if value is None or value[: len(SCHEME)].lower() != SCHEME:
        return None
    return value[len(SCHEME) :].strip()


def _unauthorized(missing: bool, kind: str) -> ApiError:
    message = f"No {kind} was sent" if missing else f"The {kind} is not known here"
    return ApiError(
        401,
        f"{message}; send one as the header 'Authorization: Bearer KEY'",
        code="invalid_api_key",
        headers={"WWW-Authenticate": "Bearer"},
    )


def _needs_admin_key() -> ApiError:
    message = "An API key does not open /admin/…; send the server's admin key (--admin-key-file, RATOON_ADMIN_KEY)"
    return ApiError(403, message, code="admin_key_required")


def _needs_api_key() -> ApiError:
    message = "The admin key opens /admin/… alone; send an API key"
    return ApiError(403, message, code="api_key_required")


def _digest(key: bytes) -> bytes:
    return hashlib.sha256(key).digest()
