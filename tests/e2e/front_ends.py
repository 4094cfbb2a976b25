"""Clients of a server with several front ends: each keeps one connection, and so stays with one front end."""

from __future__ import annotations

import http.client
import json
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from tests.e2e.servers import Server
from tests.waiting import PATIENCE

MODEL = "tiny"
KEYS = ("first-key", "second-key")


class FrontEnd:
    """A connection that stays with one front end."""

    def __init__(self, server: Server, key: str | None = KEYS[0]) -> None:
        host, port = server.url.removeprefix("http://").split(":")
        self.connection = http.client.HTTPConnection(host, int(port), timeout=PATIENCE)
        self.headers = {"Content-Type": "application/json"}
        if key is not None:
            self.headers["Authorization"] = f"Bearer {key}"
        self.pid: int = self.get("/health")["pid"]

    def ask(self, method: str, path: str, body: Any = None, key: str | None = None) -> tuple[int, Any]:
        headers = {**self.headers, **({} if key is None else {"Authorization": f"Bearer {key}"})}
        self.connection.request(method, path, None if body is None else json.dumps(body), headers)
        answer = self.connection.getresponse()
        data = answer.read()
        is_json = "json" in (answer.getheader("Content-Type") or "")
        return answer.status, json.loads(data) if is_json else data.decode()

    def get(self, path: str) -> Any:
        status, answer = self.ask("GET", path)
        assert status == 200, answer
        return answer

    def post(self, path: str, **body: Any) -> Any:
        status, answer = self.ask("POST", path, {"model": MODEL, **body})
        assert status == 200, answer
        return answer

    def begin(self, path: str, **body: Any) -> http.client.HTTPResponse:
        """An answer that is read piece by piece."""
        self.connection.request("POST", path, json.dumps({"model": MODEL, **body}), self.headers)
        return self.connection.getresponse()

    def close(self) -> None:
        self.connection.close()


@contextmanager
def each_front_end(server: Server, count: int = 2, key: str | None = KEYS[0]) -> Iterator[list[FrontEnd]]:
    found: dict[int, FrontEnd] = {}
    deadline = time.monotonic() + PATIENCE
    try:
        while len(found) < count:
            assert time.monotonic() < deadline, f"only {list(found)} answer"
            opened = FrontEnd(server, key)
            if found.setdefault(opened.pid, opened) is not opened:
                opened.close()
                time.sleep(0.05)
            for one in found.values():  # a connection is closed that asks nothing while another front end starts
                one.get("/health")
        yield list(found.values())
    finally:
        for one in found.values():
            one.close()
