"""Connections over a real socket, with an application of a few lines: pipelined requests, expectations, half-closed
connections."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest
import uvicorn
from uvicorn.server import ServerState

from ratoon.api.server.connections import HEAD_SLICE, MAX_HELD_BYTES, BoundedHttpProtocol
from tests.unit.engine.fakes_async import on_event_loop

SECONDS = 120.0  # a test that hangs should say so


def get(path: str, *headers: str, version: str = "1.1") -> bytes:
    return "\r\n".join([f"GET {path} HTTP/{version}", "Host: here", *headers, "", ""]).encode()


def post(path: str, body: bytes, *headers: str, version: str = "1.1") -> bytes:
    lines = [f"POST {path} HTTP/{version}", "Host: here", f"Content-Length: {len(body)}", *headers, "", ""]
    return "\r\n".join(lines).encode() + body


class Place:
    """An application that answers with the path and the length of the body, and what it has seen."""

    def __init__(self) -> None:
        self.protocols: list[BoundedHttpProtocol] = []
        self.paths: list[str] = []
        self.num_running = 0
        self.most_ahead = 0  # requests that a connection has parsed and not begun to answer
        self.most_held = 0  # bytes that it has read and not parsed
        self.gate = asyncio.Event()
        self.gate.set()
        self.port = 0

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        self.paths.append(scope["path"])
        self.num_running += 1
        try:
            for protocol in self.protocols:
                self.most_ahead = max(self.most_ahead, len(protocol.pipeline))
                self.most_held = max(self.most_held, len(protocol._held))
            num_bytes = 0
            while True:
                message = await receive()
                if message["type"] == "http.disconnect":
                    return
                num_bytes += len(message["body"])
                if not message["more_body"]:
                    break
            await self.gate.wait()
            body = f"{scope['path']} {num_bytes};".encode()
            head = {"status": 200, "headers": [(b"content-length", str(len(body)).encode())]}
            await send({"type": "http.response.start", **head})
            await send({"type": "http.response.body", "body": body})
        finally:
            self.num_running -= 1

    async def connect(self) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        return await asyncio.open_connection("127.0.0.1", self.port)


@asynccontextmanager
async def listening() -> AsyncIterator[Place]:
    place, state = Place(), ServerState()
    config = uvicorn.Config(place, lifespan="off", ws="none", log_config=None)

    def make() -> BoundedHttpProtocol:
        protocol = BoundedHttpProtocol(config=config, server_state=state, app_state={})
        place.protocols.append(protocol)
        return protocol

    server = await asyncio.get_running_loop().create_server(make, "127.0.0.1", 0)
    place.port = server.sockets[0].getsockname()[1]
    try:
        async with asyncio.timeout(SECONDS):
            yield place
    finally:
        server.close()
        for protocol in place.protocols:
            protocol.transport.abort()
        while state.connections:
            await asyncio.sleep(0.001)


async def answers(reader: asyncio.StreamReader, count: int) -> list[str]:
    return [(await reader.readuntil(b";")).decode().rpartition("\r\n\r\n")[2] for _ in range(count)]


@on_event_loop
async def test_pipelined_requests_are_parsed_when_their_turn_comes() -> None:
    async with listening() as place:
        reader, writer = await place.connect()
        count = 5000
        writer.write(b"".join(get(f"/{number}") for number in range(count)))
        assert await answers(reader, count) == [f"/{number} 0;" for number in range(count)]
        assert place.most_ahead <= HEAD_SLICE // len(get("/0")) + 1
        assert place.most_held < MAX_HELD_BYTES + 2 * 256 * 1024, "what one read brings is held, and no more is read"
        writer.close()


@on_event_loop
async def test_bodies_among_pipelined_requests_arrive_whole() -> None:
    async with listening() as place:
        reader, writer = await place.connect()
        sizes = [0, 1, HEAD_SLICE, 70_000, 3, 300_000, 5]
        writer.write(b"".join(post(f"/{size}", b"x" * size) + get(f"/after-{size}") for size in sizes))
        expected = [text for size in sizes for text in (f"/{size} {size};", f"/after-{size} 0;")]
        assert await answers(reader, 2 * len(sizes)) == expected
        chunked = b"POST /chunked HTTP/1.1\r\nHost: here\r\nTransfer-Encoding: chunked\r\n\r\n"
        chunked += b"".join(b"%x\r\n%b\r\n" % (size, b"y" * size) for size in (1, 5000, 60_000)) + b"0\r\n\r\n"
        writer.write(chunked + get("/last"))
        assert await answers(reader, 2) == ["/chunked 65001;", "/last 0;"]
        writer.close()


@on_event_loop
async def test_a_client_that_closes_its_side_gets_the_answers_to_all_that_it_has_sent() -> None:
    async with listening() as place:
        reader, writer = await place.connect()
        place.gate.clear()
        sent = [get("/a"), post("/b", b"x" * 5000), *(get(f"/{number}") for number in range(500))]
        writer.write(b"".join(sent) + b"POST /cut HTTP/1.1\r\nContent-Length: 9\r\n\r\nxyz")
        writer.write_eof()
        await asyncio.sleep(0.05)
        place.gate.set()
        data = await reader.read()
        assert data.count(b"HTTP/1.1 200") == len(sent)
        assert b"/b 5000;" in data and b"/499 0;" in data and b"/cut" not in data


@on_event_loop
async def test_a_client_that_disconnects_ends_its_requests() -> None:
    async with listening() as place:
        _, writer = await place.connect()
        place.gate.clear()
        writer.write(get("/first") + get("/second") * 100)
        while not place.num_running:
            await asyncio.sleep(0.001)
        writer.transport.abort()
        while place.protocols[0] in place.protocols[0].connections:
            await asyncio.sleep(0.001)
        assert not place.protocols[0]._held


@pytest.mark.parametrize(("version", "interim"), [("1.1", True), ("1.0", False)])
@on_event_loop
async def test_a_client_is_told_to_go_on_if_its_version_knows_that(version: str, interim: bool) -> None:
    async with listening() as place:
        reader, writer = await place.connect()
        request = post("/x", b"12345", "Expect: 100-continue", version=version)
        writer.write(request[:-5])
        if interim:
            assert await reader.readuntil(b"\r\n\r\n") == b"HTTP/1.1 100 Continue\r\n\r\n"
        else:
            while not place.num_running:
                await asyncio.sleep(0.001)
        writer.write(request[-5:])
        assert (await reader.readuntil(b";")).startswith(b"HTTP/1.1 200")
        writer.close()
