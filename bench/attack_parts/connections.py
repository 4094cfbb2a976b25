"""Clients that hold connections: bodies whose last bytes do not come, pipelined requests, and connections that idle."""

from __future__ import annotations

import contextlib
import json
import re
import resource
import selectors
import socket
import time
from collections import Counter

from attack_parts.clients import (
    COMPLETIONS,
    MEBIBYTE,
    Server,
    judge,
    judge_health,
    judge_memory,
    request,
    watching,
)

NUM_BODIES, BODY_BYTES = 300, 16 * MEBIBYTE
BODY_LIMIT = 512 * MEBIBYTE  # the default of --max-total-body
MISSING_BYTES = 16
BODY_SECONDS = 20.0
NUM_PIPELINES, NUM_PIPELINED = 20, 100  # connections, and requests on each
PIPELINE_SECONDS = 30.0
NUM_IDLE = 2000
IDLE_SECONDS = 10.0
SLICE = 256 * 1024
STATUS = re.compile(rb"HTTP/1\.1 (\d+) ")


def head(path: str, num_bytes: int) -> bytes:
    lines = (f"POST {path} HTTP/1.1", "Host: 127.0.0.1", "Content-Type: application/json")
    return "\r\n".join((*lines, f"Content-Length: {num_bytes}", "", "")).encode()


class Connections:
    """Connections that send and read as fast as the server lets them, all on one thread."""

    def __init__(self, server: Server, data: list[bytes]) -> None:
        host, port = server.address.rsplit(":", 1)
        self._selector = selectors.DefaultSelector()
        self.received = [bytearray() for _ in data]
        self.num_failed = 0  # connections that the server refused or closed
        self._sockets: list[socket.socket] = []
        for number, given in enumerate(data):
            connection = socket.socket()
            connection.settimeout(5)
            self._sockets.append(connection)
            try:
                connection.connect((host, int(port)))
            except OSError:
                self.num_failed += 1
                continue
            connection.setblocking(False)
            events = selectors.EVENT_READ | (selectors.EVENT_WRITE if given else 0)
            self._selector.register(connection, events, [number, memoryview(given)])

    def run(self, seconds: float) -> None:
        """Until all connections have ended, or so many seconds have passed."""
        ends = time.monotonic() + seconds
        while self._selector.get_map() and time.monotonic() < ends:
            for key, events in self._selector.select(0.1):
                try:
                    self._go_on(key, events)
                except BlockingIOError:
                    continue
                except OSError:
                    self._end(key)

    def _go_on(self, key: selectors.SelectorKey, events: int) -> None:
        connection, (number, left) = key.fileobj, key.data
        assert isinstance(connection, socket.socket)
        if events & selectors.EVENT_WRITE:
            key.data[1] = left = left[connection.send(left[:SLICE]) :]
            if not left:
                self._selector.modify(connection, selectors.EVENT_READ, key.data)
        if events & selectors.EVENT_READ:
            data = connection.recv(SLICE)
            self.received[number] += data
            if not data:
                self._end(key)

    def _end(self, key: selectors.SelectorKey) -> None:
        self.num_failed += 1
        self._selector.unregister(key.fileobj)

    def close(self) -> None:
        self._selector.close()
        for connection in self._sockets:
            with contextlib.suppress(OSError):
                connection.close()

    def statuses(self) -> str:
        counted = Counter(status.decode() for received in self.received for status in STATUS.findall(received))
        return ", ".join(f"{count} × {status}" for status, count in sorted(counted.items())) or "none"


def run_bodies(server: Server) -> None:
    """Bodies whose last bytes do not come."""
    print(f"{NUM_BODIES} bodies of {BODY_BYTES // MEBIBYTE} MiB whose last bytes do not come, {BODY_SECONDS:g} s\n")
    data = head(COMPLETIONS, BODY_BYTES) + b" " * (BODY_BYTES - MISSING_BYTES)
    with watching(server) as watched:
        connections = Connections(server, [data] * NUM_BODIES)
        connections.run(BODY_SECONDS)
        connections.close()
    print(f"answers: {connections.statuses()}")
    judge_memory("the server's memory, beyond what it had", watched.peak, BODY_LIMIT)
    judge_health(watched)


def run_pipelining(server: Server) -> None:
    """Requests that are sent without waiting for the answers to earlier ones."""
    print(f"{NUM_PIPELINES * NUM_PIPELINED:,} pipelined requests on {NUM_PIPELINES} connections\n")
    body = json.dumps({"prompt": "The capital of France is"}).encode()
    one = head("/tokenize", len(body)) + body  # the engine has no part in it, so that they come as fast as possible
    data = one * (NUM_PIPELINED - 1)
    last = one.replace(b"Host:", b"Connection: close\r\nHost:")
    with watching(server) as watched:
        connections = Connections(server, [data + last] * NUM_PIPELINES)
        connections.run(PIPELINE_SECONDS)
        connections.close()
    print(f"answers in {watched.seconds:.1f} s: {connections.statuses()}")
    judge_health(watched)


def run_idle(server: Server) -> None:
    """Connections on which nothing is sent, and some on which heads come slowly."""
    print(f"{NUM_IDLE:,} connections without a request, {IDLE_SECONDS:g} s\n")
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(most, NUM_IDLE + 256), most))
    beginnings = (b"", b"GET /health HTTP/1.1\r\nHost: 127")
    with watching(server) as watched:
        connections = Connections(server, [beginnings[number % 2] for number in range(NUM_IDLE)])
        connections.run(IDLE_SECONDS)
        reply = request(server, "GET", "/v1/models")
        connections.close()
    print(f"connections that the server closed: {connections.num_failed:,} of {NUM_IDLE:,}")
    judge("other requests without an answer", float(reply.status != 200), 0, "")
    judge_health(watched)
