"""Fetches images and videos that requests name by an address, from the hosts that the operator allows.

A host name is looked up once, and the connection goes to the address that was found and checked: only public ones are
connected to, whatever the name. Redirects are followed by the same rules. Time, bytes and the number of transfers at
once are limited. No cookies, credentials or proxies are used. What was fetched is not decoded here.
"""

from __future__ import annotations

import asyncio
import ipaddress
import re
import socket
from collections.abc import Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from ratoon.core.errors import RequestError
from ratoon.models.media_parts import MediaPart, check_content_type

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    import aiohttp
    from yarl import URL

Resolve = Callable[[str, int], Awaitable[Sequence[str]]]

PORTS = {"http": 80, "https": 443}
MAX_REDIRECTS = 3
MAX_TRANSFERS = 16  # of all requests; others wait for their turn
MAX_ADDRESS = 4096  # characters
READ_BYTES = 64 * 1024
REDIRECTS = (301, 302, 303, 307, 308)
HEADERS = {"Accept": "image/*, video/*", "Accept-Encoding": "identity", "User-Agent": "ratoon"}
NAT64 = ipaddress.ip_network("64:ff9b::/96")
HOST_NAME = re.compile(r"[a-z0-9_-]+(\.[a-z0-9_-]+)*")
ALLOWS = "ratoon serve --allow-media-host HOST allows a host"


@dataclass(frozen=True, slots=True)
class AllowedHost:
    """An entry of --allow-media-host: HOST, HOST:PORT, or *.HOST for all names below it."""

    name: str
    port: int | None  # None: the usual port of the scheme
    is_parent: bool = False

    def allows(self, host: str, port: int, usual_port: int) -> bool:
        if port != (usual_port if self.port is None else self.port):
            return False
        return host.endswith(f".{self.name}") if self.is_parent else host == self.name


def read_allowed_host(text: str) -> AllowedHost:
    """ValueError: it is neither of the forms."""
    from yarl import URL

    is_parent = text.startswith("*.")
    url = URL(f"http://{text.removeprefix('*.')}")
    host = _host_of(url)
    is_plain = url.raw_path == "/" and not url.raw_query_string and not url.raw_fragment and url.raw_user is None
    is_address = _literal(host) is not None
    is_name = not is_address and HOST_NAME.fullmatch(host) is not None
    if not is_plain or not (is_name or (is_address and not is_parent)):
        raise ValueError(text)
    return AllowedHost(host, url.explicit_port, is_parent)


def is_public(address: str) -> bool:
    """Whether an IP address is one of the internet: neither of this machine nor of a local network, nor one that stands
    for such an address."""
    ip = ipaddress.ip_address(address.partition("%")[0])
    if isinstance(ip, ipaddress.IPv6Address):
        inner = [ip.ipv4_mapped, ip.sixtofour, *(ip.teredo or ())]
        if ip in NAT64:
            inner.append(ipaddress.IPv4Address(int(ip) & 0xFFFFFFFF))
        if any(one is not None and not is_public(str(one)) for one in inner):
            return False
        if ip.ipv4_mapped is not None:
            return True  # its IPv4 address was looked at
    return ip.is_global and not (ip.is_multicast or ip.is_reserved or ip.is_unspecified or ip.is_link_local)


async def look_up(host: str, port: int) -> list[str]:
    """Returns the addresses of a host, in the system's order. OSError: it has none."""
    found = await asyncio.get_running_loop().getaddrinfo(host, port, type=socket.SOCK_STREAM)
    return list(dict.fromkeys(str(entry[4][0]) for entry in found))


class MediaFetcher:
    def __init__(
        self,
        allowed: Sequence[str],
        max_bytes: int,
        max_seconds: float,
        *,
        resolve: Resolve = look_up,
        is_reachable: Callable[[str], bool] = is_public,  # tests have a server on this machine
    ) -> None:
        """`allowed` are entries of --allow-media-host, `max_bytes` and `max_seconds` limits for all files of a request
        together, and for each of them."""
        self._allowed = [read_allowed_host(one) for one in allowed]
        self.max_bytes = max_bytes
        self._max_seconds = max_seconds
        self._resolve = resolve
        self._is_reachable = is_reachable
        self._transfers = asyncio.Semaphore(MAX_TRANSFERS)

    def check(self, part: MediaPart) -> URL:
        """Returns the address of a part. RequestError: it is not one that may be fetched. Nothing is looked up yet."""
        from yarl import URL

        if len(part.value) > MAX_ADDRESS:
            raise RequestError(part.field, f"has {len(part.value)} characters", f"at most {MAX_ADDRESS}, or a data URL")
        try:
            url = URL(part.value)
            port = url.port
        except ValueError:  # a port that is no number, a host that is no name
            raise RequestError(
                part.field, "is no valid address", "a data URL, or one of a host that is allowed"
            ) from None
        return self._check_url(part, url, port, "")

    def _check_url(self, part: MediaPart, url: URL, port: int | None, where: str) -> URL:
        host = _host_of(url)
        if url.scheme not in PORTS or not host or port is None:
            raise RequestError(part.field, f"is no address that is fetched{where}", "a data URL, or http(s)://HOST/…")
        if url.raw_user is not None or url.raw_password is not None:
            raise RequestError(part.field, f"has a name or a password in its address{where}", "an address without them")
        if not any(one.allows(host, port, PORTS[url.scheme]) for one in self._allowed):
            shown = host if port == PORTS[url.scheme] else f"{host}:{port}"
            problem = f"the host {_shorten(shown)} is not allowed{where}" if self._allowed else "no address is fetched"
            raise RequestError(part.field, problem, f"a data URL; {ALLOWS}")
        if _literal(host) is not None and not self._is_reachable(host):
            raise self._not_public(part, where)
        return url

    async def fetch(self, part: MediaPart, budget: ByteBudget) -> bytes:
        """Returns the file that a part names. RequestError: it is not allowed, not there, too large or too slow."""
        url = self.check(part)
        try:
            async with self._transfers, asyncio.timeout(self._max_seconds):
                return await self._follow(part, url, budget)
        except TimeoutError:
            problem = f"was not fetched within {self._max_seconds:g} seconds"
            raise RequestError(part.field, problem, "a data URL, or a faster host") from None

    async def _follow(self, part: MediaPart, url: URL, budget: ByteBudget) -> bytes:
        for _ in range(MAX_REDIRECTS + 1):
            async with self._answer(part, url) as answer:
                if answer.status not in REDIRECTS:
                    return await self._read(part, answer, budget)
                target = answer.headers.get("Location", "")
            if not target or len(target) > MAX_ADDRESS:
                raise RequestError(part.field, "is redirected to nowhere", "the address of a file")
            url = self._redirected(part, url, target)
        raise RequestError(part.field, f"is redirected more than {MAX_REDIRECTS} times", "the address of a file")

    def _redirected(self, part: MediaPart, url: URL, target: str) -> URL:
        from yarl import URL

        where = " where it is redirected to"
        try:
            new = url.join(URL(target))
            port = new.port
        except ValueError:
            raise RequestError(part.field, "is redirected to no valid address", "the address of a file") from None
        if url.scheme == "https" and new.scheme == "http":
            raise RequestError(part.field, "is redirected from https to http", "the address of a file")
        return self._check_url(part, new, port, where)

    @asynccontextmanager
    async def _answer(self, part: MediaPart, url: URL) -> AsyncIterator[aiohttp.ClientResponse]:
        """Sends a request over a connection of its own."""
        import aiohttp

        connector = aiohttp.TCPConnector(
            resolver=_checked_resolver(self, part), use_dns_cache=False, force_close=True, limit=1
        )
        session = aiohttp.ClientSession(
            connector=connector,
            cookie_jar=aiohttp.DummyCookieJar(),
            auto_decompress=False,  # a small file may be a very large one in disguise
            trust_env=False,
            timeout=aiohttp.ClientTimeout(total=None),
        )
        async with session:
            try:
                async with session.get(url, headers=HEADERS, allow_redirects=False) as answer:
                    yield answer
            except (aiohttp.ClientError, OSError) as error:
                if isinstance(error, TimeoutError):
                    raise
                raise RequestError(part.field, f"can't be fetched ({_reason(error)})", "a data URL") from None

    async def _read(self, part: MediaPart, answer: aiohttp.ClientResponse, budget: ByteBudget) -> bytes:
        if answer.status != 200:
            raise RequestError(part.field, f"can't be fetched (HTTP {answer.status})", "the address of a file")
        if answer.headers.get("Content-Encoding", "identity").lower() != "identity":
            raise RequestError(part.field, "is compressed by its server", "a file as it is")
        check_content_type(part, answer.headers.get("Content-Type", "").partition(";")[0].strip().lower())
        budget.verify(part, answer.content_length or 0)
        pieces = []
        async for piece in answer.content.iter_chunked(READ_BYTES):
            budget.take(part, len(piece))
            pieces.append(piece)
        if not pieces:
            raise RequestError(part.field, "is an empty file", "an image or a video")
        return b"".join(pieces)

    async def addresses(self, part: MediaPart, host: str, port: int) -> list[str]:
        """Returns the addresses of a host, all of which may be connected to."""
        try:
            found = list(await self._resolve(host, port))
        except OSError:
            found = []
        if not found:
            raise RequestError(part.field, f"the host {_shorten(host)} is unknown", "a host that exists")
        if not all(map(self._is_reachable, found)):
            raise self._not_public(part, "")
        return found

    @staticmethod
    def _not_public(part: MediaPart, where: str) -> RequestError:
        return RequestError(part.field, f"its host has an address that is not public{where}", "a data URL")


class ByteBudget:
    """The bytes that the files of a request may have together."""

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._used = 0

    def take(self, part: MediaPart, num_bytes: int) -> None:
        self.verify(part, num_bytes)
        self._used += num_bytes

    def verify(self, part: MediaPart, num_bytes: int) -> None:
        if self._used + num_bytes > self._limit:
            problem = f"the files of the request have more than {self._limit} bytes together"
            raise RequestError(part.field, problem, "smaller ones; ratoon serve --max-media sets the limit")


def _checked_resolver(fetcher: MediaFetcher, part: MediaPart) -> Any:
    """Returns a resolver for one connection. aiohttp connects to what it returns, and asks once; a host that is an
    address itself was looked at before."""
    from aiohttp.abc import AbstractResolver, ResolveResult

    class Resolver(AbstractResolver):
        async def resolve(
            self, host: str, port: int = 0, family: socket.AddressFamily = socket.AF_UNSPEC
        ) -> list[ResolveResult]:
            return [
                ResolveResult(
                    hostname=host,
                    host=address,
                    port=port,
                    family=socket.AF_INET6 if ":" in address else socket.AF_INET,
                    proto=0,
                    flags=socket.AI_NUMERICHOST,
                )
                for address in await fetcher.addresses(part, host, port)
            ]

        async def close(self) -> None:
            pass

    return Resolver()


def _host_of(url: URL) -> str:
    """Returns the host as it is compared: in lower case, in ASCII, without a final dot."""
    return (url.raw_host or "").lower().removesuffix(".")


def _literal(host: str) -> str | None:
    """Returns the host if it is an IP address itself."""
    try:
        ipaddress.ip_address(host.partition("%")[0])
    except ValueError:
        return None
    return host


def _reason(error: Exception) -> str:
    """Says why a connection failed, without what the system tells of addresses."""
    import aiohttp

    if isinstance(error, aiohttp.ClientConnectorCertificateError | aiohttp.ClientSSLError):
        return "its certificate is not valid"
    if isinstance(error, aiohttp.ClientConnectionError | OSError):
        return "no connection"
    return "its server's answer is not HTTP"


def _shorten(text: str) -> str:
    return repr(text if len(text) <= 100 else text[:100] + "…")
