"""The bound on open connections: which one is closed for a new one, and what clients notice, on a real socket."""

from __future__ import annotations

import asyncio
import resource
from unittest import mock

import pytest

from ratoon.api.server.connection_limit import OTHER_DESCRIPTORS, ConnectionLimit, allow_descriptors
from ratoon.api.server.settings import ServerSettings
from ratoon.core.errors import ConfigError
from tests.unit.api.server.harness import MODEL
from tests.unit.api.server.test_runner import JSON_HEADERS, Running, running, send_signal
from tests.unit.engine.fakes_async import on_event_loop
from tests.waiting import PATIENCE, until

HEALTH = b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\n"


class Recorded:
    """A connection that notes what becomes of it."""

    def __init__(self) -> None:
        self.fate = "open"

    def close_idle(self) -> None:
        self.fate = "closed"

    def refuse_new(self) -> None:
        self.fate = "refused"


def opened(limit: ConnectionLimit, count: int) -> list[Recorded]:
    connections = [Recorded() for _ in range(count)]
    for connection in connections:
        limit.open(connection)
    return connections


def test_the_one_that_has_been_idle_longest_makes_room():
    limit = ConnectionLimit(3)
    first, second, third = opened(limit, 3)
    limit.begin(first)
    limit.end(first)  # idle again, and for the shortest time
    opened(limit, 1)
    assert [one.fate for one in (first, second, third)] == ["open", "closed", "open"]
    opened(limit, 1)
    assert [one.fate for one in (first, third)] == ["open", "closed"]
    assert len(limit) == 3


def test_one_with_a_request_is_never_closed_for_another():
    limit = ConnectionLimit(2)
    busy = opened(limit, 2)
    for connection in busy:
        limit.begin(connection)
    (new,) = opened(limit, 1)
    assert (new.fate, [one.fate for one in busy]) == ("refused", ["open", "open"])
    limit.end(new)  # what a refused connection still reports changes nothing
    limit.close(new)
    assert len(limit) == 2
    limit.close(busy[0])
    assert opened(limit, 1)[0].fate == "open"


def test_the_own_limit_on_open_files_is_raised_as_far_as_it_is_needed():
    for own, most, asked, then_own, allowed in (
        (1024, 4096, 2000, 2000 + OTHER_DESCRIPTORS, 2000),
        (1024, 2048, 8192, 2048, 2048 - OTHER_DESCRIPTORS),
        (65536, 65536, 100, None, 100),
        (1024, resource.RLIM_INFINITY, 8192, 8192 + OTHER_DESCRIPTORS, 8192),
        (resource.RLIM_INFINITY, resource.RLIM_INFINITY, 8192, None, 8192),
        (64, 64, 8192, 64, 1),
    ):
        with (
            mock.patch("resource.getrlimit", return_value=(own, most)),
            mock.patch("resource.setrlimit") as set_limit,
        ):
            assert allow_descriptors(asked) == allowed
        assert set_limit.call_args_list == ([] if then_own is None else [mock.call(mock.ANY, (then_own, most))])


def test_no_connection_at_all_is_no_setting():
    with pytest.raises(ConfigError, match="max_connections"):
        ServerSettings(max_connections=0).verify()


async def connect(server: Running) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    host, port = server.url.removeprefix("http://").split(":")
    return await asyncio.open_connection(host, int(port))


async def ask(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, request: bytes) -> bytes:
    writer.write(request)
    head = await asyncio.wait_for(reader.readuntil(b"\r\n\r\n"), PATIENCE)
    length = next(line for line in head.lower().split(b"\r\n") if line.startswith(b"content-length"))
    await reader.readexactly(int(length.split(b":")[1]))
    return head.split(b"\r\n")[0]


@on_event_loop
async def test_connections_without_a_request_do_not_keep_others_out():
    """2,000 open connections, on some of which a head comes slowly, took all descriptors that the server has."""
    async with running(max_connections=8) as server:
        used = await connect(server)
        assert await ask(*used, HEALTH) == b"HTTP/1.1 200 OK"
        slow = [await connect(server) for _ in range(7)]
        for _, writer in slow[:4]:
            writer.write(b"GET /health HTTP/1.1\r\nHost: loc")
        others = [await connect(server) for _ in range(20)]  # more than there is room for
        assert await ask(*others[-1], HEALTH) == b"HTTP/1.1 200 OK"
        older = (used, *slow, *others[:12])
        assert [await asyncio.wait_for(reader.read(), PATIENCE) for reader, _ in older] == [b""] * 20
        for connection in others[12:]:
            assert await ask(*connection, HEALTH) == b"HTTP/1.1 200 OK"
        for _, writer in (used, *slow, *others):
            writer.close()
        send_signal()


@on_event_loop
async def test_a_new_connection_is_refused_while_all_have_requests():
    async with running(max_connections=1) as server:
        body = b'{"model": "%b", "prompt": "x", "stream": true}' % MODEL.encode()
        streaming = await connect(server)
        streaming[1].write(
            b"POST /v1/completions HTTP/1.1\r\n%bContent-Length: %d\r\n\r\n%b" % (JSON_HEADERS, len(body), body)
        )
        await until("the request has come", lambda: server.engine.core.added)
        reader, writer = await connect(server)
        refusal = await asyncio.wait_for(reader.read(), PATIENCE)
        assert refusal.startswith(b"HTTP/1.1 503 Service Unavailable\r\nretry-after: 1\r\n")
        writer.close()
        server.engine.step(20)
        told = await asyncio.wait_for(streaming[0].readuntil(b"[DONE]"), PATIENCE)
        assert b"200 OK" in told
        streaming[1].close()
        send_signal()
