"""Streams of the load generator, against a server that plays bytes: every end that an answer can have."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest

from ratoon.api.remote.client import RefusedError, RemoteClient, RemoteError
from tests.unit.engine.fakes_async import on_event_loop

EVENTS = [b'data: {"choices": [{"text": "a"}]}\n\n', b'data: {"choices": [{"text": "b", "finish_reason": "stop"}]}\n\n']
OK = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\n"
CHUNKED = OK + b"Transfer-Encoding: chunked\r\n\r\n"
END = b"0\r\n\r\n"


def chunk(data: bytes) -> bytes:
    return b"%x\r\n%b\r\n" % (len(data), data)


class Player:
    """Sends its pieces to each request, some milliseconds apart, and perhaps closes the connection behind them."""

    def __init__(self, *pieces: bytes, closes: bool = False) -> None:
        self.pieces = pieces
        self.closes = closes
        self.num_connections = 0
        self.requests: list[bytes] = []

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.num_connections += 1
        while True:
            try:
                head = await reader.readuntil(b"\r\n\r\n")
            except asyncio.IncompleteReadError:
                return
            length = int(head.lower().partition(b"content-length: ")[2].split(b"\r\n")[0])
            self.requests.append(head + await reader.readexactly(length))
            for piece in self.pieces:
                writer.write(piece)
                await asyncio.sleep(0.005)
            if self.closes:
                writer.close()
                return


@asynccontextmanager
async def playing(player: Player, timeout: float | None = None) -> AsyncIterator[RemoteClient]:
    async with await asyncio.start_server(player.serve, "127.0.0.1", 0) as server:
        port = server.sockets[0].getsockname()[1]
        async with RemoteClient(f"http://127.0.0.1:{port}/base/v1", "key", timeout) as client:
            yield client


async def read(client: RemoteClient) -> tuple[str, list[float], float]:
    times: list[float] = []
    texts: list[str] = []

    def receive(moment: float, chunks: list) -> None:
        times.extend([moment] * len(chunks))
        texts.extend(choice.new_text for one in chunks for choice in one.choices)

    try:
        ended = await client.stream_timed("/v1/completions", {"stream": True}, receive)
    except RemoteError as error:
        error.add_note("".join(texts))
        raise
    return "".join(texts), times, ended


@on_event_loop
async def test_events_have_the_times_at_which_they_came_and_connections_are_used_again():
    whole = b"".join(EVENTS)
    player = Player(CHUNKED, chunk(whole[:20]), chunk(whole[20:-3]), chunk(whole[-3:]) + END)
    async with playing(player) as client:
        for _ in range(3):
            before = time.perf_counter()
            text, times, ended = await read(client)
            assert text == "ab"
            assert before + 0.008 < times[0] < times[1] <= ended <= time.perf_counter()
    assert player.num_connections == 1
    assert player.requests[0].startswith(b"POST /base/v1/completions HTTP/1.1\r\n")
    assert b"\r\nAuthorization: Bearer key\r\n" in player.requests[0]
    assert player.requests[0].endswith(b'\r\n\r\n{"stream":true}')


@on_event_loop
async def test_an_answer_may_end_with_its_connection_and_begin_behind_a_hint():
    player = Player(b"HTTP/1.1 100 Continue\r\n\r\n", OK + b"\r\n", *EVENTS, closes=True)
    async with playing(player) as client:
        assert (await read(client))[0] == (await read(client))[0] == "ab"
    assert player.num_connections == 2


@pytest.mark.parametrize(
    ("pieces", "kind", "text"),
    [
        ((CHUNKED, chunk(EVENTS[0])), "broke off", "a"),
        ((CHUNKED,), "broke off", ""),
        ((CHUNKED, chunk(EVENTS[0]), END), "broke off", "a"),
        ((b"HTTP/1.1 20",), "broke off", ""),
        ((b"what?\r\n\r\n",), "broke off", ""),
        ((), "broke off", ""),
        ((CHUNKED, chunk(b'data: {"error": {"message": "hot"}}\n\n'), END), "error in the stream", ""),
        ((CHUNKED, chunk(b"data: {\n\n"), END), "bad answer", ""),
        ((CHUNKED, chunk(b'data: {"choices": [{"text": "x", "finish_reason": "abort"}]}\n\n'), END), "given up", "x"),
    ],
)
@on_event_loop
async def test_an_answer_without_a_good_end_is_an_error_and_keeps_what_came(pieces, kind, text):
    async with playing(Player(*pieces, closes=True)) as client:
        with pytest.raises(RemoteError) as caught:
            await read(client)
    assert caught.value.kind == kind
    assert caught.value.__notes__ == [text]


@on_event_loop
async def test_a_refusal_has_the_servers_words():
    body = b'{"error": {"message": "too hot"}}'
    head = b"HTTP/1.1 422 Unprocessable Entity\r\nContent-Length: %d\r\n\r\n" % len(body)
    async with playing(Player(head, body)) as client:
        with pytest.raises(RefusedError, match=r"too hot \(HTTP 422\)"):
            await read(client)


@on_event_loop
async def test_a_server_that_is_silent_or_not_there_is_told_from_one_that_breaks_off():
    async with playing(Player(CHUNKED, chunk(EVENTS[0])), timeout=0.1) as client:
        with pytest.raises(RemoteError) as caught:
            await read(client)
        assert caught.value.kind == "timeout"
        url = client.url
    async with RemoteClient(url) as client:
        with pytest.raises(RemoteError) as caught:
            await read(client)
    assert caught.value.kind == "can't connect"
