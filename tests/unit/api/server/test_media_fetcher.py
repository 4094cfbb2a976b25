"""Addresses of images in requests: which are fetched, from where, and within which limits."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any

import pytest
from aiohttp import web

from ratoon.api.server.media_fetcher import ByteBudget, MediaFetcher, is_public, read_allowed_host
from ratoon.core.errors import RequestError
from ratoon.core.media import IMAGE, VIDEO
from ratoon.models.media_parts import MediaPart

FIELD = "messages[0].content[1].image_url.url"
PIXELS = b"\x89PNG and more" * 100
LOOPBACK = "127.0.0.1"

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


def part(url: str, kind: str = IMAGE) -> MediaPart:
    return MediaPart(kind, url, FIELD)


def fetcher(*allowed: str, **options: Any) -> MediaFetcher:
    return MediaFetcher(allowed, **{"max_bytes": 10_000, "max_seconds": 5.0, **options})


async def fetch(one: MediaFetcher, url: str, kind: str = IMAGE) -> bytes:
    return await one.fetch(part(url, kind), ByteBudget(one.max_bytes))


def to(address: str) -> Any:
    """A resolver that finds one address for every host, and notes which it was asked for."""

    async def resolve(host: str, port: int) -> list[str]:
        resolve.asked.append(host)  # type: ignore[attr-defined]
        return [address]

    resolve.asked = []  # type: ignore[attr-defined]
    return resolve


@asynccontextmanager
async def serving(handler: Handler) -> AsyncIterator[int]:
    """A server on this machine; its port."""
    app = web.Application()
    app.router.add_get("/{path:.*}", handler)
    runner = web.AppRunner(app)
    await runner.setup()
    site = web.TCPSite(runner, LOOPBACK, 0)
    await site.start()
    try:
        yield site._server.sockets[0].getsockname()[1]  # type: ignore[union-attr]
    finally:
        await runner.cleanup()


def local(port: int, **options: Any) -> MediaFetcher:
    """May fetch from the server on this machine, as images.test."""
    allowed = (f"images.test:{port}", f"other.test:{port}")
    return fetcher(*allowed, **{"resolve": to(LOOPBACK), "is_reachable": lambda address: True, **options})


async def picture(request: web.Request) -> web.StreamResponse:
    return web.Response(body=PIXELS, content_type="image/png")


# ---- which addresses ----


@pytest.mark.parametrize("address", ["8.8.8.8", "1.1.1.1", "2606:4700:4700::1111", "::ffff:8.8.8.8"])
def test_addresses_of_the_internet_are_public(address: str) -> None:
    assert is_public(address)


@pytest.mark.parametrize(
    "address",
    [
        "127.0.0.1", "127.9.9.9", "0.0.0.0", "10.0.0.1", "172.16.0.1", "192.168.1.1", "169.254.169.254", "100.64.0.1",
        "224.0.0.1", "239.1.2.3", "240.0.0.1", "255.255.255.255", "192.0.2.1", "198.18.0.1", "192.0.0.1",
        "::", "::1", "fe80::1", "fe80::1%eth0", "fc00::1", "fd12::1", "ff02::1", "2001:db8::1",
        "::ffff:127.0.0.1", "::ffff:10.0.0.1", "::ffff:169.254.169.254", "64:ff9b::7f00:1", "64:ff9b::a00:1",
        "2002:7f00:1::", "2002:a00:1::", "2001:0:7f00:1::",
    ],
)  # fmt: skip
def test_other_addresses_are_not_public(address: str) -> None:
    assert not is_public(address)


@pytest.mark.parametrize(
    ("allowed", "url"),
    [
        ("images.example.com", "http://images.example.com/a.png"),
        ("images.example.com", "https://IMAGES.example.COM./a.png"),
        ("Images.Example.com", "https://images.example.com:443/a.png"),
        ("*.example.com", "https://a.b.example.com/a.png"),
        ("images.example.com:8080", "http://images.example.com:8080/a.png"),
        ("bücher.example", "https://xn--bcher-kva.example/a.png"),
        ("8.8.8.8", "http://8.8.8.8/a.png"),
    ],
)
def test_an_allowed_host_may_be_named(allowed: str, url: str) -> None:
    assert str(fetcher(allowed).check(part(url)).scheme) in url


@pytest.mark.parametrize(
    ("allowed", "url"),
    [
        ("images.example.com", "https://example.com/a.png"),
        ("images.example.com", "https://images.example.com.evil.test/a.png"),
        ("images.example.com", "https://evil.test/images.example.com"),
        ("images.example.com", "https://images.example.com@evil.test/a.png"),
        ("images.example.com", "https://images.example.com:8080/a.png"),
        ("images.example.com:8080", "https://images.example.com/a.png"),
        ("*.example.com", "https://example.com/a.png"),
        ("*.example.com", "https://notexample.com/a.png"),
    ],
)
def test_another_host_or_port_is_refused(allowed: str, url: str) -> None:
    with pytest.raises(RequestError, match=r"content\[1\].image_url.url: .*(not allowed|name or a password)"):
        fetcher(allowed).check(part(url))


@pytest.mark.parametrize(
    "url",
    [
        "ftp://images.example.com/a.png", "file:///etc/passwd", "/etc/passwd", "a.png", "javascript:alert(1)",
        "http://", "http:///a.png", "http://images.example.com:99999/", "http://images.example.com:x/",
        "http://user:secret@images.example.com/a.png", "http://images.example.com\\@evil.test/",
        "http://images.example.com/" + "a" * 5000, "http://[::1", "http://\udcff.test/",
    ],
)  # fmt: skip
def test_what_is_no_address_is_refused(url: str) -> None:
    with pytest.raises(RequestError) as caught:
        fetcher("images.example.com").check(part(url))
    assert caught.value.field == FIELD


def test_without_allowed_hosts_nothing_is_fetched() -> None:
    with pytest.raises(RequestError, match=r"no address is fetched; .*--allow-media-host"):
        fetcher().check(part("https://example.com/a.png"))


@pytest.mark.parametrize("host", ["127.0.0.1", "[::1]", "[::ffff:127.0.0.1]", "10.1.2.3", "169.254.169.254"])
def test_an_address_that_is_not_public_is_refused_although_it_is_allowed(host: str) -> None:
    with pytest.raises(RequestError, match="not public"):
        fetcher(host).check(part(f"http://{host}/a.png"))


@pytest.mark.parametrize(
    "text", ["", "*", "*.", "http://example.com", "example.com/path", "a b", "user@example.com", "*.1.2.3.4", "x:99999"]
)
def test_a_setting_that_is_no_host_is_refused(text: str) -> None:
    with pytest.raises(ValueError):
        read_allowed_host(text)


# ---- where the connection goes ----


def test_a_file_is_fetched_under_the_name_of_its_host() -> None:
    hosts = []

    async def handler(request: web.Request) -> web.StreamResponse:
        hosts.append((request.headers["Host"], request.headers.get("Cookie"), request.headers.get("Authorization")))
        return await picture(request)

    async def run() -> None:
        async with serving(handler) as port:
            one = local(port)
            assert await fetch(one, f"http://images.test:{port}/a.png") == PIXELS
            assert hosts == [(f"images.test:{port}", None, None)]

    asyncio.run(run())


@pytest.mark.parametrize("address", ["127.0.0.1", "::1", "::ffff:127.0.0.1", "10.0.0.1", "169.254.169.254", "0.0.0.0"])
def test_a_name_with_an_address_that_is_not_public_is_refused(address: str) -> None:
    async def run() -> None:
        with pytest.raises(RequestError, match="not public"):
            await fetch(fetcher("images.test", resolve=to(address)), "http://images.test/a.png")

    asyncio.run(run())


def test_one_of_several_addresses_is_enough_to_refuse_a_name() -> None:
    async def resolve(host: str, port: int) -> list[str]:
        return ["8.8.8.8", "127.0.0.1"]

    async def run() -> None:
        with pytest.raises(RequestError, match="not public"):
            await fetch(fetcher("images.test", resolve=resolve), "http://images.test/a.png")

    asyncio.run(run())


def test_a_name_that_changes_its_address_is_looked_up_once() -> None:
    """The first answer is a public address (for this test, that of the server), later ones are not."""
    answers = [LOOPBACK, "10.0.0.1", "10.0.0.1"]

    async def resolve(host: str, port: int) -> list[str]:
        return [answers.pop(0)]

    async def run() -> None:
        async with serving(picture) as port:
            one = local(port, resolve=resolve, is_reachable=lambda address: address == LOOPBACK)
            assert await fetch(one, f"http://images.test:{port}/a.png") == PIXELS
            assert len(answers) == 2
            with pytest.raises(RequestError, match="not public"):
                await fetch(one, f"http://images.test:{port}/a.png")

    asyncio.run(run())


def test_a_host_that_is_unknown_is_named() -> None:
    async def resolve(host: str, port: int) -> list[str]:
        raise OSError("no such name")

    async def run() -> None:
        with pytest.raises(RequestError, match=r"'images.test' is unknown"):
            await fetch(fetcher("images.test", resolve=resolve), "http://images.test/a.png")

    asyncio.run(run())


def test_proxies_of_the_environment_are_not_used(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("http_proxy", "http://127.0.0.1:1")
    monkeypatch.setenv("HTTP_PROXY", "http://127.0.0.1:1")

    async def run() -> None:
        async with serving(picture) as port:
            assert await fetch(local(port), f"http://images.test:{port}/a.png") == PIXELS

    asyncio.run(run())


# ---- redirects ----


def redirecting(targets: dict[str, str]) -> Handler:
    async def handler(request: web.Request) -> web.StreamResponse:
        target = targets.get(request.path)
        return await picture(request) if target is None else web.Response(status=302, headers={"Location": target})

    return handler


def test_redirects_are_followed_to_allowed_hosts() -> None:
    async def run() -> None:
        targets: dict[str, str] = {"/a": "/b"}
        async with serving(redirecting(targets)) as port:
            targets["/b"] = f"http://other.test:{port}/c"
            one = local(port)
            assert await fetch(one, f"http://images.test:{port}/a") == PIXELS

    asyncio.run(run())


@pytest.mark.parametrize(
    ("target", "problem"),
    [
        ("http://evil.test/c", "'evil.test' is not allowed where it is redirected to"),
        ("http://127.0.0.1/c", "not allowed where it is redirected to"),
        ("file:///etc/passwd", "no address that is fetched where it is redirected to"),
        ("http://user@other.test/c", "name or a password"),
        ("http://[::1", "no valid address"),
    ],
)
def test_a_redirect_is_checked_as_an_address_is(target: str, problem: str) -> None:
    async def run() -> None:
        async with serving(redirecting({"/a": target})) as port:
            with pytest.raises(RequestError, match=problem):
                await fetch(local(port), f"http://images.test:{port}/a")

    asyncio.run(run())


def test_a_redirect_to_a_name_with_a_private_address_is_refused() -> None:
    async def resolve(host: str, port: int) -> list[str]:
        return [LOOPBACK if host == "images.test" else "10.0.0.1"]

    async def run() -> None:
        targets: dict[str, str] = {}
        async with serving(redirecting(targets)) as port:
            targets["/a"] = f"http://other.test:{port}/b"
            one = local(port, resolve=resolve, is_reachable=lambda address: address == LOOPBACK)
            with pytest.raises(RequestError, match="not public"):
                await fetch(one, f"http://images.test:{port}/a")

    asyncio.run(run())


def test_redirects_in_a_circle_end() -> None:
    async def run() -> None:
        async with serving(redirecting({"/a": "/a"})) as port:
            with pytest.raises(RequestError, match="redirected more than 3 times"):
                await fetch(local(port), f"http://images.test:{port}/a")

    asyncio.run(run())


# ---- limits, and answers that are no files ----


def refused(handler: Handler, problem: str, kind: str = IMAGE, **options: Any) -> None:
    async def run() -> None:
        async with serving(handler) as port:
            with pytest.raises(RequestError, match=problem) as caught:
                await fetch(local(port, **options), f"http://images.test:{port}/a", kind)
            assert caught.value.field == FIELD

    asyncio.run(run())


def test_a_file_that_says_that_it_is_too_large_is_not_read() -> None:
    refused(picture, "more than 100 bytes", max_bytes=100)


def test_a_file_that_does_not_say_its_size_is_read_up_to_the_limit() -> None:
    async def handler(request: web.Request) -> web.StreamResponse:
        answer = web.StreamResponse(headers={"Content-Type": "image/png"})
        answer.enable_chunked_encoding()
        await answer.prepare(request)
        for _ in range(100):
            await answer.write(b"x" * 1000)
        return answer

    refused(handler, "more than 5000 bytes", max_bytes=5000)


def test_files_of_a_request_share_the_limit() -> None:
    async def run() -> None:
        async with serving(picture) as port:
            one, budget = local(port, max_bytes=2000), ByteBudget(2000)
            await one.fetch(part(f"http://images.test:{port}/a"), budget)
            with pytest.raises(RequestError, match="together"):
                await one.fetch(part(f"http://images.test:{port}/b"), budget)

    asyncio.run(run())


def test_a_slow_file_is_given_up() -> None:
    async def handler(request: web.Request) -> web.StreamResponse:
        answer = web.StreamResponse(headers={"Content-Type": "image/png"})
        await answer.prepare(request)
        for _ in range(100):
            await answer.write(b"x")
            await asyncio.sleep(0.05)
        return answer

    refused(handler, r"not fetched within 0.3 seconds", max_seconds=0.3)


def test_a_slow_look_up_is_given_up() -> None:
    async def resolve(host: str, port: int) -> list[str]:
        await asyncio.sleep(60)
        return []

    async def run() -> None:
        with pytest.raises(RequestError, match="not fetched within"):
            await fetch(fetcher("images.test", resolve=resolve, max_seconds=0.1), "http://images.test/a.png")

    asyncio.run(run())


@pytest.mark.parametrize(
    ("headers", "status", "kind", "problem"),
    [
        ({"Content-Type": "text/html"}, 200, IMAGE, "is of the type 'text/html'; expected image/"),
        ({"Content-Type": "image/png"}, 200, VIDEO, "expected video/"),
        ({"Content-Type": "video/mp4"}, 200, IMAGE, "expected image/"),
        ({"Content-Type": "image/png", "Content-Encoding": "gzip"}, 200, IMAGE, "compressed"),
        ({"Content-Type": "image/png"}, 404, IMAGE, "HTTP 404"),
        ({"Content-Type": "image/png"}, 500, IMAGE, "HTTP 500"),
        ({"Content-Type": "image/png"}, 206, IMAGE, "HTTP 206"),
    ],
)
def test_an_answer_of_another_kind_is_refused(headers: dict[str, str], status: int, kind: str, problem: str) -> None:
    async def handler(request: web.Request) -> web.StreamResponse:
        return web.Response(body=PIXELS, headers=headers, status=status)

    refused(handler, problem, kind)


def test_an_empty_file_is_refused() -> None:
    async def handler(request: web.Request) -> web.StreamResponse:
        return web.Response(body=b"", content_type="image/png")

    refused(handler, "empty")


@pytest.mark.parametrize("content_type", ["image/jpeg; charset=binary", "application/octet-stream", "IMAGE/PNG"])
def test_content_types_that_are_taken(content_type: str) -> None:
    async def handler(request: web.Request) -> web.StreamResponse:
        return web.Response(body=PIXELS, headers={"Content-Type": content_type})

    async def run() -> None:
        async with serving(handler) as port:
            assert await fetch(local(port), f"http://images.test:{port}/a") == PIXELS

    asyncio.run(run())


def test_a_server_that_is_not_there_is_no_internal_error() -> None:
    async def run() -> None:
        async with serving(picture) as port:
            pass
        with pytest.raises(RequestError, match=r"can't be fetched \(no connection\)"):
            await fetch(local(port), f"http://images.test:{port}/a")

    asyncio.run(run())


def test_an_answer_that_breaks_off_is_no_internal_error() -> None:
    async def handler(request: web.Request) -> web.StreamResponse:
        answer = web.StreamResponse(headers={"Content-Type": "image/png", "Content-Length": "5000"})
        await answer.prepare(request)
        await answer.write(b"x" * 10)
        assert request.transport is not None
        request.transport.abort()
        return answer

    refused(handler, "can't be fetched")
