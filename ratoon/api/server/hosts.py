"""The Host header: which names requests may call this server by.

A web page can point a name of its own at this machine (DNS rebinding), and its requests then count as of the same
origin: CORS does not stop them. But the browser sends that name along. So a server that asks for no key and listens on
this machine only takes requests for names of this machine, and for those that its operator allows.
"""

from __future__ import annotations

import ipaddress
import re
from collections.abc import Iterable

from ratoon.api.server.errors import ApiError
from ratoon.api.server.exchange import AsgiApp, Receive, Scope, Send
from ratoon.api.server.responses import send_error

LOOPBACK_NAMES = frozenset({"localhost", "localhost.localdomain", "ip6-localhost", "ip6-loopback"})
HOST_AND_PORT = re.compile(r"(\[[0-9a-fA-F:.%]+\]|[^:\[\]]+)(?::\d*)?")
NAME = re.compile(r"[\w.-]+")


class AllowedHosts:
    """Names of loopback with any port, and the names that are given."""

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
    """403 for a request that calls the server by another name. One that names no host is not a browser's."""

    def __init__(self, app: AsgiApp, allowed: AllowedHosts) -> None:
        self._app = app
        self._allowed = allowed

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        for key, value in scope["headers"]:
            if key == b"host" and (host := value.decode("latin-1")) not in self._allowed:
                return await send_error(scope, send, _refusal(host))
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


def _refusal(host: str) -> ApiError:
    shown = host if len(host) <= 100 else host[:100] + "…"
    message = (
        f"This server does not answer to the name {shown!r}: without API keys it takes requests for localhost alone; "
        "start it with --allow-host NAME for other names, or with a key"
    )
    return ApiError(403, message, code="host_refused")
