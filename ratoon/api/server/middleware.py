"""The layers that every request passes before its route, in the order of app.py: request ids, host names, shutdown,
keys, the size of bodies, and clients that disconnect.

Keys are kept and compared as hashes, and appear in no message. Every key is compared with every request's, in
constant time, so the duration reveals nothing about any of them.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import hmac
import ipaddress
import re
import secrets
from collections.abc import Callable, Iterable, Mapping
from typing import NamedTuple

from ratoon.api.server.body_budget import SMALL_BODY, STALL_SECONDS, BodyBudget, BodyPlace
from ratoon.api.server.errors import SERVER_ERROR, ApiError, shutting_down
from ratoon.api.server.exchange import (
    BODY_WRITER,
    CLIENTS_REQUEST_ID,
    KEY,
    REQUEST_ID_HEADER,
    SESSION_HEADER,
    TRACE_HEADERS,
    AsgiApp,
    Exchange,
    Message,
    Receive,
    Scope,
    Send,
    exchange_of,
    header,
)
from ratoon.api.server.responses import send_error
from ratoon.api.server.threads import LARGE, return_memory_soon


class ExchangeLayer:
    """Creates the exchange, and reports its end to the observer."""

    def __init__(self, app: AsgiApp, observe: Callable[[Scope, Exchange], None]) -> None:
        self._app = app
        self._observe = observe

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return await refuse_other_protocols(scope, receive, send)
        writer = scope.get("extensions", {}).get(BODY_WRITER)
        exchange = scope[KEY] = Exchange(_request_id(scope), send, writer, trace_headers=_trace_headers(scope))
        session = header(scope, SESSION_HEADER)
        exchange.session = None if session is None else session.decode("latin-1")

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
    """Web sockets are not supported, and nothing is done at start-up."""
    if scope["type"] == "websocket":
        await receive()
        await send({"type": "websocket.close", "code": 1000})


# ---- the Host header ----
# A web page can resolve its own name to this machine (DNS rebinding), and its requests then count as same-origin:
# CORS does not stop them. But the browser sends that name as Host. So a server on a loopback address only accepts
# requests for loopback names, and for those that its operator allows: with keys as well, because the console at / may
# have one. Starlette's
# TrustedHostMiddleware supports neither loopback addresses nor IPv6.

LOOPBACK_NAMES = frozenset({"localhost", "localhost.localdomain", "ip6-localhost", "ip6-loopback"})
HOST_AND_PORT = re.compile(r"(\[[0-9a-fA-F:.%]+\]|[^:\[\]]+)(?::\d*)?")
NAME = re.compile(r"[\w.-]+")


class AllowedHosts:
    """Loopback names with any port, and the given names."""

    def __init__(self, names: Iterable[str] = ()) -> None:
        self._names = frozenset(map(_plain, names))

    def __contains__(self, host: str) -> bool:
        """`host` as a request's header has it: a name or an address, with or without a port."""
        match = HOST_AND_PORT.fullmatch(host.strip())
        if match is None:
            return False
        name = _plain(match[1])
        return name in self._names or _is_loopback(name)


class CheckHost:
    """403 for a request with another Host. A request without Host is not from a browser."""

    def __init__(self, app: AsgiApp, allowed: AllowedHosts) -> None:
        self._app = app
        self._allowed = allowed

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        for key, value in scope["headers"]:
            if key == b"host" and (host := value.decode("latin-1")) not in self._allowed:
                return await send_error(scope, send, _wrong_host(host))
        await self._app(scope, receive, send)


def is_host_name(text: str) -> bool:
    """A name or an address, without scheme and port."""
    return _address(_plain(text)) is not None or NAME.fullmatch(text) is not None


def _plain(name: str) -> str:
    return name.lower().strip("[]").rstrip(".")


def _is_loopback(name: str) -> bool:
    if name in LOOPBACK_NAMES or name.endswith(".localhost"):  # which resolves to this machine by RFC 6761
        return True
    address = _address(name)
    if isinstance(address, ipaddress.IPv6Address) and address.ipv4_mapped is not None:
        address = address.ipv4_mapped
    return address is not None and address.is_loopback


def _address(name: str) -> ipaddress.IPv4Address | ipaddress.IPv6Address | None:
    try:
        return ipaddress.ip_address(name)
    except ValueError:
        return None


def _wrong_host(host: str) -> ApiError:
    shown = host if len(host) <= 100 else host[:100] + "…"
    message = (
        f"This server does not answer to the name {shown!r}: on a loopback address it accepts requests for localhost "
        "only; start it with --allow-host NAME for other names"
    )
    return ApiError(403, message, code="host_refused")


# ---- keys ----

OPEN_PATHS = frozenset({"/", "/docs", "/health", "/version", "/metrics"})
CONSOLE_PATH = "/console/"  # the files of the page at /
ENGINE_PATH = "/v1/engine/"  # what the engines are doing
ADMIN_PATH = "/admin"
ADMIN_PATHS = frozenset({ADMIN_PATH, "/v1/load_lora_adapter", "/v1/unload_lora_adapter"})  # these are vLLM's
SCHEME = b"bearer "
TENANT_LENGTH = 16  # hex digits


class KeyRing:
    def __init__(self, keys: Iterable[str]) -> None:
        # Hashing first makes all comparisons equally long, whatever was sent.
        self._digests = [_digest(key.encode()) for key in keys]

    def __bool__(self) -> bool:
        return bool(self._digests)

    def labels(self) -> dict[str | None, str]:
        """What the tenants of these keys are called where others may read it: "key 1", in the order of the keys."""
        return {_tenant_of(digest): f"key {number}" for number, digest in enumerate(self._digests, 1)}

    def find_tenant(self, key: bytes) -> str | None:
        """A name derived from the key, which does not reveal it; None for an unknown key."""
        digest = _digest(key)
        found = False
        for known in self._digests:
            found |= hmac.compare_digest(known, digest)
        return _tenant_of(digest) if found else None


class RequireKey:
    """Passes requests with a key for their path, and requests to open paths.

    The two kinds of keys are separate: an API key is not valid for /admin/…, and an admin key is valid only there. Both
    are valid for /v1/engine/…, where an API key is about its own requests, and an admin key about all.
    Without API keys, everything but /admin/… is open.
    """

    def __init__(self, app: AsgiApp, ring: KeyRing, admin_ring: KeyRing) -> None:
        self._app = app
        self._ring = ring
        self._admin_ring = admin_ring  # empty: there is no administration

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if not is_open_path(scope["path"]):
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
        if is_admin and is_engine_path(scope["path"]):
            exchange_of(scope).is_admin = True
            return None
        if self._ring and tenant is None:
            return _needs_api_key() if is_admin else _unauthorized(key is None, "API key")
        exchange_of(scope).tenant = tenant
        return None


def is_open_path(path: str) -> bool:
    """Whether a path needs no key."""
    return path in OPEN_PATHS or path.startswith(CONSOLE_PATH)


def is_engine_path(path: str) -> bool:
    return path.startswith(ENGINE_PATH)


def is_admin_path(path: str) -> bool:
    return path in ADMIN_PATHS or path.startswith(f"{ADMIN_PATH}/")


def _sent_key(scope: Scope) -> bytes | None:
    """Returns the key from the header of OpenAI's clients, or from that of Anthropic's."""
    value = header(scope, b"authorization")
    if value is None:
        return header(scope, b"x-api-key")
    return value[len(SCHEME) :].strip() if value[: len(SCHEME)].lower() == SCHEME else None


def _unauthorized(missing: bool, kind: str) -> ApiError:
    message = f"No {kind} was sent" if missing else f"The {kind} is unknown"
    return ApiError(
        401,
        f"{message}; send one as the header 'Authorization: Bearer KEY'",
        code="invalid_api_key",
        headers={"WWW-Authenticate": "Bearer"},
    )


def _needs_admin_key() -> ApiError:
    message = "An API key is not valid for /admin/…; send the admin key (--admin-key-file, RATOON_ADMIN_KEY)"
    return ApiError(403, message, code="admin_key_required")


def _needs_api_key() -> ApiError:
    message = "The admin key is valid for /admin/… and /v1/engine/… only; send an API key"
    return ApiError(403, message, code="api_key_required")


def _tenant_of(digest: bytes) -> str:
    return hashlib.sha256(b"tenant" + digest).hexdigest()[:TENANT_LENGTH]


def _digest(key: bytes) -> bytes:
    return hashlib.sha256(key).digest()


# ---- shutdown ----


class RefuseWhileDraining:
    """Refuses requests at shutdown: running ones continue, and new ones get a 503."""

    def __init__(self, app: AsgiApp, is_draining: Callable[[], bool]) -> None:
        self._app = app
        self._is_draining = is_draining

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if self._is_draining() and not is_open_path(scope["path"]):
            return await send_error(scope, send, shutting_down())
        await self._app(scope, receive, send)


# ---- the size of bodies, and the time they take ----

CLOSE = {"Connection": "close"}  # the rest of the body is not read, so the connection can't be reused
LONGEST_LENGTH = 18  # digits
METHODS_WITH_BODY = frozenset({"POST", "PUT", "PATCH"})


class BodyLimit(NamedTuple):
    num_bytes: int
    option: str  # that sets it


class BoundedBody:
    """Puts the body into the exchange, once there is a place for it in the server's memory. For inner layers, `receive`
    only reports that the client disconnected."""

    def __init__(
        self,
        app: AsgiApp,
        limit: BodyLimit,
        timeout: float,
        budget: BodyBudget,
        others: Mapping[str, BodyLimit] = {},
    ) -> None:
        """`others` are limits of single paths."""
        self._app = app
        self._limit = limit
        self._others = others
        self._timeout = timeout
        self._budget = budget

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        with contextlib.ExitStack() as places:
            try:
                await self._answer(scope, receive, send, places)
            finally:
                if exchange_of(scope).body_size >= LARGE:
                    return_memory_soon(asyncio.get_running_loop())

    async def _answer(self, scope: Scope, receive: Receive, send: Send, places: contextlib.ExitStack) -> None:
        try:
            _check_expectation(scope)
            if scope["method"] in METHODS_WITH_BODY:
                limit = self._others.get(scope["path"], self._limit)
                body = await self._read(scope, receive, limit, places)
                if body is None:
                    return None
                exchange_of(scope).body = body
        except ApiError as error:
            return await send_error(scope, send, error)
        await self._app(scope, receive, send)

    async def _read(
        self, scope: Scope, receive: Receive, limit: BodyLimit, places: contextlib.ExitStack
    ) -> bytes | None:
        """None: the client disconnected."""
        exchange, announced = exchange_of(scope), _check_announced_length(scope, limit)

        async def take_place(num_bytes: int) -> BodyPlace:
            place = await self._budget.take(exchange.tenant, num_bytes)
            if place is None:
                raise _no_room()
            places.callback(place.give_back)
            return place

        # A body that does not say how long it is counts as small, and as one of the largest when it is not.
        place = await take_place(SMALL_BODY if announced is None else announced)
        pieces: list[bytes] = []
        try:
            async with asyncio.timeout(self._timeout) as timeout:
                place.begin(timeout)
                while True:
                    message = await receive()
                    if message["type"] == "http.disconnect":
                        return None
                    place.note_arrival()
                    pieces.append(message.get("body", b""))
                    exchange.body_size += len(pieces[-1])
                    if exchange.body_size > limit.num_bytes:
                        raise _body_too_large(limit)
                    if not message.get("more_body", False):
                        break
                    if exchange.body_size > place.num_bytes:
                        small, place = place, await take_place(limit.num_bytes)
                        small.give_back()
                        place.begin(timeout)
        except TimeoutError:
            raise _body_stalled() if place.is_lost else _body_too_slow(self._timeout) from None
        place.end()
        place.shrink(exchange.body_size)
        if len(pieces) == 1:
            return pieces[0]
        if exchange.body_size < LARGE:
            return b"".join(pieces)
        return await asyncio.to_thread(b"".join, pieces)  # which releases Python's lock


def _check_expectation(scope: Scope) -> None:
    """The HTTP server answers 100-continue when the body is asked for. HTTP/1.0 has no expectations."""
    expected = header(scope, b"expect")
    if expected is not None and expected.strip().lower() != b"100-continue" and scope["http_version"] != "1.0":
        raise ApiError(417, "Expect: only 100-continue is supported", code="expectation_failed", headers=CLOSE)


def _check_announced_length(scope: Scope, limit: BodyLimit) -> int | None:
    """None: the body comes in chunks, and its length is not known."""
    announced = header(scope, b"content-length")
    if announced is None:
        return None
    if not announced.isdigit():
        raise ApiError(400, "Content-Length is not a number", headers=CLOSE)
    # A number this long is larger than any body, and slow to convert.
    if len(announced) > LONGEST_LENGTH or int(announced) > limit.num_bytes:
        raise _body_too_large(limit)
    return int(announced)


def _no_room() -> ApiError:
    return ApiError(
        503,
        "The bodies of other requests take all the memory that there is for them (--max-total-body); try again later",
        kind=SERVER_ERROR,
        code="server_overloaded",
        headers={**CLOSE, "Retry-After": "5"},
    )


def _body_too_slow(seconds: float) -> ApiError:
    message = f"The body was not complete after {seconds:g} seconds"
    return ApiError(408, message, code="body_timeout", headers=CLOSE)


def _body_stalled() -> ApiError:
    message = f"Nothing of the body has arrived for {STALL_SECONDS:g} seconds, while others wait for its place"
    return ApiError(408, message, code="body_timeout", headers=CLOSE)


def _body_too_large(limit: BodyLimit) -> ApiError:
    message = f"The body is larger than {limit.num_bytes} bytes, which is this server's limit ({limit.option})"
    return ApiError(413, message, code="body_too_large", headers=CLOSE)


# ---- clients that disconnect ----


class CancelOnDisconnect:
    """Waits on `receive`, which no other layer needs once the body is read."""

    def __init__(self, app: AsgiApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async def answer() -> None:
            await self._app(scope, _nothing_to_receive, send)

        work = asyncio.create_task(answer())
        watch = asyncio.create_task(_client_gone(receive))
        try:
            await asyncio.wait((work, watch), return_when=asyncio.FIRST_COMPLETED)
            if work.done():
                work.result()
        finally:
            # Reached in three ways: answered, client disconnected, or this task was cancelled (the server ends).
            watch.cancel()
            if not work.done():
                work.cancel()
                with contextlib.suppress(asyncio.CancelledError):
                    await work


async def _client_gone(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


async def _nothing_to_receive() -> dict[str, object]:
    return {"type": "http.request", "body": b"", "more_body": False}
