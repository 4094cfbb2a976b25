"""The server as a program, on a real socket, with an engine that plays a script: how it begins and how it ends."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import socket
from collections.abc import AsyncIterator
from pathlib import Path
from unittest import mock

import aiohttp
import pytest

from ratoon.api.server import connections
from ratoon.api.server import runner as runner_module
from ratoon.api.server.connections import address, bind, is_local, release
from ratoon.api.server.runner import ServerRunner
from ratoon.api.server.settings import ServerSettings
from ratoon.core.errors import ConfigError, ModelError
from tests.unit.api.server.harness import MODEL, say, scripted
from tests.unit.engine.fakes_async import FakeAsyncClient, on_event_loop
from tests.waiting import PATIENCE, until

BODY = {"model": MODEL, "prompt": "x", "stream": True}
JSON_HEADERS = b"Host: localhost\r\nContent-Type: application/json\r\n"


class Running:
    """A server on a free port, and a client session to it."""

    def __init__(
        self,
        runner: ServerRunner,
        engine: FakeAsyncClient,
        url: str,
        session: aiohttp.ClientSession,
        drained: list[int],
    ) -> None:
        self.runner = runner
        self.drained = drained
        self.engine = engine
        self.url = url
        self.session = session
        self.exit_code: asyncio.Task[int]

    async def open_stream(self) -> aiohttp.ClientResponse:
        """A stream that has brought two tokens and waits for more."""
        request = asyncio.create_task(self.session.post(f"{self.url}/v1/completions", json=BODY))
        while not self.engine.core.added:
            await asyncio.sleep(0.001)
        self.engine.step(2)
        response = await request
        assert response.status == 200
        return response


@contextlib.asynccontextmanager
async def running(text: str = "abcdef", **settings) -> AsyncIterator[Running]:
    async with scripted(say(text), by_hand=True) as client:
        chosen = ServerSettings(port=0, **settings)
        bound = bind(chosen)
        llm = client.context.llm
        ready = asyncio.Event()
        drained: list[int] = []
        server = ServerRunner(llm, chosen, bound, drained.append)
        async with aiohttp.ClientSession() as session:
            found = Running(server, client.engine, address(bound), session, drained)
            found.exit_code = asyncio.create_task(server.run(ready.set))
            await ready.wait()
            yield found
            await found.exit_code


def send_signal(number: int = signal.SIGTERM) -> None:
    os.kill(os.getpid(), number)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
@on_event_loop
async def test_a_signal_lets_what_is_under_way_finish(number):
    async with running() as server:
        stream = await server.open_stream()
        send_signal(number)
        while (answer := await server.session.get(f"{server.url}/health")).status == 200:
            await asyncio.sleep(0.01)
        assert (await answer.json())["status"] == "shutting down"
        refused = await server.session.post(f"{server.url}/v1/completions", json=BODY)
        assert refused.status == 503
        assert (await refused.json())["error"]["code"] == "shutting_down"
        server.engine.step(20)
        text = (await stream.read()).decode()
        assert '"text":"f"' in text and text.endswith("data: [DONE]\n\n")
        assert await server.exit_code == 0
        assert server.engine.num_shutdowns == 1
        with pytest.raises(aiohttp.ClientConnectionError):
            await server.session.get(f"{server.url}/health")


@on_event_loop
async def test_what_does_not_finish_in_time_is_aborted():
    async with running(drain_seconds=0.1) as server:
        stream = await server.open_stream()
        send_signal()
        text = (await stream.read()).decode()
        assert '"finish_reason":"abort"' in text and text.endswith("data: [DONE]\n\n")
        assert await server.exit_code == 0


@on_event_loop
async def test_a_second_signal_ends_it_at_once():
    async with running(drain_seconds=100) as server:
        stream = await server.open_stream()
        send_signal()
        await until("it waits for what is under way", lambda: server.drained)
        assert server.drained == [1]  # the number of prompts
        send_signal()
        assert await server.exit_code == 128 + signal.SIGTERM
        stream.close()


@on_event_loop
async def test_without_requests_it_ends_at_once():
    async with running(drain_seconds=10_000) as server:
        send_signal()
        assert await server.exit_code == 0


@on_event_loop
async def test_a_dead_engine_ends_the_server_after_clients_were_told(monkeypatch):
    monkeypatch.setattr(runner_module, "WATCH_INTERVAL", 0.01)
    async with running() as server:
        stream = await server.open_stream()
        server.engine.die()
        text = (await stream.read()).decode()
        assert "engine_dead" in text and text.endswith("data: [DONE]\n\n")
        assert await server.exit_code == 1


@on_event_loop
async def test_a_signal_while_the_model_loads_ends_it():
    async with scripted() as client:
        llm = client.context.llm
        bound = bind(ServerSettings(port=0))
        loading = asyncio.Event()

        async def load() -> None:
            loading.set()
            await asyncio.Event().wait()

        with mock.patch.object(llm, "start", load):
            server = asyncio.create_task(ServerRunner(llm, ServerSettings(), bound).run(lambda: None))
            await loading.wait()
            send_signal()
            assert await server == 128 + signal.SIGTERM


@on_event_loop
async def test_a_model_that_does_not_load_is_the_callers_to_report():
    async def fail() -> None:
        raise ModelError("x", "is no model")

    async with scripted() as client:
        with mock.patch.object(client.context.llm, "start", fail), pytest.raises(ModelError):
            await ServerRunner(client.context.llm, ServerSettings(), bind(ServerSettings(port=0))).run(lambda: None)


async def say_over_socket(server: Running, data: bytes) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    reader, writer = await asyncio.open_connection("127.0.0.1", int(server.url.rpartition(":")[2]))
    writer.write(data)
    return reader, writer


@pytest.mark.parametrize("head", [b"GET /" + b"x" * 1_000_000, b"GET / HTTP/1.1\r\n" + b"X-A: b\r\n" * 200_000])
@on_event_loop
async def test_a_head_that_is_too_large_is_refused(head):
    async with running() as server:
        reader, writer = await say_over_socket(server, head)
        assert (await reader.readline()).startswith(b"HTTP/1.1 431 ")
        writer.close()
        send_signal()


@on_event_loop
async def test_a_head_that_never_ends_is_given_up(monkeypatch):
    monkeypatch.setattr("ratoon.api.server.connections.HEAD_SECONDS", 0.05)
    async with running() as server:
        for beginning in (b"", b"GET / HTTP/1.1\r\n", b"GET /version HTTP/1.1\r\nHost: localhost\r\n\r\nGET /ver"):
            reader, writer = await say_over_socket(server, beginning)
            assert b"HTTP/1.1 408 " in await reader.read()
            writer.close()
        send_signal()


@on_event_loop
async def test_a_large_body_is_no_large_head_and_takes_its_time(monkeypatch):
    refusals: list[asyncio.TimerHandle] = []

    def begin_head(connection) -> None:
        begin(connection)
        refusals.append(connection._head_timer)

    begin = connections.BoundedHttpProtocol._begin_head
    monkeypatch.setattr(connections.BoundedHttpProtocol, "_begin_head", begin_head)
    async with running() as server:
        head = b"POST /tokenize HTTP/1.1\r\n" + JSON_HEADERS + b"Content-Length: 200002\r\n\r\n"
        reader, writer = await say_over_socket(server, head + b'"' + b"x" * 200_000)
        await until("the head's time no longer counts", lambda: refusals and all(one.cancelled() for one in refusals))
        writer.write(b'"')
        assert b"HTTP/1.1 400 " in await reader.read(1000)
        writer.close()
        send_signal()


@on_event_loop
async def test_requests_sent_ahead_end_with_their_client():
    async with running() as server:
        body = b'{"model": "tiny", "prompt": "x"}'
        head = b"POST /v1/completions HTTP/1.1\r\n" + JSON_HEADERS + b"Content-Length: %d\r\n\r\n"
        _, writer = await say_over_socket(server, (head % len(body) + body) * 2)
        while not server.engine.core.added:
            await asyncio.sleep(0.001)
        writer.close()
        while not server.engine.core.aborted:
            await asyncio.sleep(0.001)
        assert server.engine.core.aborted == [server.engine.core.added[0].request_id]
        send_signal()


def test_a_port_in_use_is_a_clear_error():
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
        with pytest.raises(ConfigError, match=f"127.0.0.1:{port} is in use"):
            bind(ServerSettings(port=port))


@pytest.mark.parametrize("host", ["no.such.host.invalid", "300.1.1.1", "x" * 300])
def test_a_host_that_is_none_is_a_clear_error(host):
    with pytest.raises(ConfigError, match="host"):
        bind(ServerSettings(host=host, port=0))


def test_which_addresses_other_machines_can_reach():
    for host, local in (("127.0.0.1", True), ("localhost", True), ("0.0.0.0", False)):
        settings = ServerSettings(host=host, port=0)
        bound = bind(settings)
        assert is_local(bound) is local
        release(bound, settings)


def test_a_unix_socket_that_was_left_behind_is_replaced_and_one_in_use_is_not(tmp_path: Path):
    path = str(tmp_path / "socket")
    settings = ServerSettings(uds=path)
    abandoned = bind(settings)
    abandoned.close()
    bound = bind(settings)
    bound.listen()
    assert address(bound) == f"unix:{path}"
    assert is_local(bound)
    with pytest.raises(ConfigError, match="uds"):
        bind(settings)
    release(bound, settings)
    assert not Path(path).exists()
    Path(path).write_text("a file of somebody's")
    with pytest.raises(ConfigError, match="uds"):
        bind(settings)
    assert Path(path).read_text() == "a file of somebody's"


# ---- clients that do not read ----

LONG_NAME = "tiny-" + "x" * 20_000  # in every event: an answer is then larger than what the system's buffers hold


async def open_unread(server: Running) -> socket.socket:
    """A stream of which nothing is read, while its events are larger than what sockets keep."""
    body = json.dumps({"model": LONG_NAME, "prompt": "x", "stream": True, "max_tokens": 490}).encode()
    client = socket.socket()
    client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    client.setblocking(False)
    loop = asyncio.get_running_loop()
    host, port = server.url.removeprefix("http://").split(":")
    await loop.sock_connect(client, (host, int(port)))
    head = f"POST /v1/completions HTTP/1.1\r\nHost: {host}\r\nContent-Type: application/json\r\n"
    await loop.sock_sendall(client, f"{head}Content-Length: {len(body)}\r\n\r\n".encode() + body)
    while not server.engine.core.added:
        await asyncio.sleep(0.001)
    for _ in range(400):
        server.engine.step()
        await asyncio.sleep(0)
    return client


@on_event_loop
async def test_a_client_that_reads_nothing_is_given_up_and_its_request_aborted():
    async with running(write_timeout=0.3, served_names=(LONG_NAME,), text="a" * 480) as server:
        with await open_unread(server):
            llm = server.runner._llm
            await until("it is given up", lambda: llm.num_unfinished_requests() == 0)
            assert server.engine.core.aborted == [server.engine.core.added[0].request_id]
        send_signal()


@on_event_loop
async def test_a_client_that_reads_late_gets_everything():
    async with running(write_timeout=60.0, served_names=(LONG_NAME,), text="a" * 480) as server:
        with await open_unread(server) as client:
            await asyncio.sleep(0.3)
            server.engine.step(200)
            got = bytearray()
            while not got.endswith(b"0\r\n\r\n"):
                got += await asyncio.get_running_loop().sock_recv(client, 2**20)
            assert got.count(b"data: ") == got.count(b'"text":') + 1 and b"[DONE]" in got
        send_signal()


def test_the_time_to_write_must_be_one():
    for seconds in (0.0, -1.0, float("inf"), float("nan")):
        with pytest.raises(ConfigError, match="write_timeout"):
            ServerSettings(write_timeout=seconds).verify()


COMPLETION = b'{"model": "tiny", "prompt": "x", "max_tokens": 4}'
HALF_CLOSED = {
    "HTTP/1.1": b"POST /v1/completions HTTP/1.1\r\n" + JSON_HEADERS,
    "HTTP/1.0": b"POST /v1/completions HTTP/1.0\r\n" + JSON_HEADERS,
    "close": b"POST /v1/completions HTTP/1.1\r\nConnection: close\r\n" + JSON_HEADERS,
}


@pytest.mark.parametrize("form", HALF_CLOSED)
@on_event_loop
async def test_a_client_that_closes_its_own_side_gets_its_answer(form):
    async with running() as server:
        head = HALF_CLOSED[form] + b"Content-Length: %d\r\n\r\n" % len(COMPLETION)
        reader, writer = await say_over_socket(server, head + COMPLETION)
        writer.write_eof()
        while not server.engine.core.added:
            await asyncio.sleep(0.001)
        await asyncio.sleep(0.2)
        server.engine.step(6)
        answer = await asyncio.wait_for(reader.read(), PATIENCE)  # the server closes behind it
        assert answer.count(b" 200 OK") == 1 and b'"abcd"' in answer
        assert (b"100 Continue" in answer) == (form != "HTTP/1.0")
        writer.close()
        send_signal()


@on_event_loop
async def test_a_client_that_closes_its_own_side_gets_all_answers_that_it_asked_for_ahead():
    async with running() as server:
        reader, writer = await say_over_socket(server, (b"GET /version HTTP/1.1\r\nHost: localhost\r\n\r\n") * 3)
        writer.write_eof()
        answer = await asyncio.wait_for(reader.read(), PATIENCE)
        assert answer.count(b" 200 OK") == 3
        writer.close()
        send_signal()


@on_event_loop
async def test_a_client_that_closes_its_side_before_its_request_is_complete_is_let_go():
    async with running() as server:
        head = HALF_CLOSED["HTTP/1.1"] + b"Content-Length: 500\r\n\r\n"
        for beginning in (b"", b"GET /ver", head, head + COMPLETION):
            reader, writer = await say_over_socket(server, beginning)
            writer.write_eof()
            assert await asyncio.wait_for(reader.read(), PATIENCE) == b""
            writer.close()
        assert not server.engine.core.added
        send_signal()


@on_event_loop
async def test_a_client_that_is_gone_for_good_is_noticed_and_its_request_taken_back():
    async with running() as server:
        head = HALF_CLOSED["HTTP/1.1"] + b"Content-Length: %d\r\n\r\n" % len(COMPLETION)
        _, writer = await say_over_socket(server, head + COMPLETION)
        while not server.engine.core.added:
            await asyncio.sleep(0.001)
        writer.close()
        await until("it is noticed", lambda: server.engine.core.aborted)
        send_signal()
