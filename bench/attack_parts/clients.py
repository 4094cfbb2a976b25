"""The parts of attacks.py share this: clients, the watch over a server, and figures printed beside their limits."""

from __future__ import annotations

import contextlib
import http.client
import json
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

MODEL = "smollm2-135m"
MEBIBYTE = 2**20
HEADERS = {"Content-Type": "application/json"}
COMPLETIONS, RESPONSES, HEALTH = "/v1/completions", "/v1/responses", "/health"
LONGEST_HEALTH = 0.5  # seconds that /health may take at most, while the server is attacked and its engine works
PATIENCE_SECONDS = 300.0


class Server(NamedTuple):
    pid: int
    address: str  # host and port


class Reply(NamedTuple):
    status: int | None  # None: the connection failed, or there was no answer in time
    body: bytes

    def json(self) -> Any:
        return json.loads(self.body)


def headers_of(key: str | None) -> dict[str, str]:
    """Returns the headers of a request with a body, by this API key."""
    return HEADERS if key is None else {**HEADERS, "Authorization": f"Bearer {key}"}


def request(
    server: Server,
    method: str,
    path: str,
    body: bytes | None = None,
    patience: float = PATIENCE_SECONDS,
    key: str | None = None,
) -> Reply:
    connection = http.client.HTTPConnection(server.address, timeout=patience)
    try:
        connection.request(method, path, body, headers_of(key))
        answer = connection.getresponse()
        return Reply(answer.status, answer.read())
    except (OSError, http.client.HTTPException) as error:
        return Reply(None, str(error).encode())
    finally:
        connection.close()


def post(
    server: Server, path: str, body: dict[str, Any], patience: float = PATIENCE_SECONDS, key: str | None = None
) -> Reply:
    return request(server, "POST", path, json.dumps(body).encode(), patience, key)


def post_all(server: Server, path: str, bodies: list[dict[str, Any]]) -> list[Reply]:
    """All at once, each by a client of its own. The replies, in order."""
    replies: dict[int, Reply] = {}

    def send(number: int) -> None:
        replies[number] = post(server, path, bodies[number])

    in_parallel([lambda number=number: send(number) for number in range(len(bodies))])  # type: ignore[misc]
    return [replies[number] for number in range(len(bodies))]


def in_parallel(work: list[Callable[[], None]]) -> None:
    threads = [threading.Thread(target=one) for one in work]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


def statuses(replies: list[Reply]) -> str:
    counted = Counter("no answer" if reply.status is None else str(reply.status) for reply in replies)
    return ", ".join(f"{count} × {status}" for status, count in sorted(counted.items()))


# ---- the watch ----


@dataclass
class Watched:
    """Holds what was seen of the server while an attack lasted."""

    seconds: float = 0.0
    peak: int = 0  # resident bytes beyond what the server had before, at most
    left: int = 0  # at the end
    growth: float = 0.0  # bytes a second, in the later half
    longest_health: float = 0.0  # seconds


@contextlib.contextmanager
def watching(server: Server) -> Iterator[Watched]:
    """Watch the server while the block runs. The watch is a process of its own: threads of an attack would delay it."""
    watched = Watched()
    program = Path(__file__).with_name("server_watch.py")
    command = [sys.executable, str(program), str(server.pid), server.address]
    watch = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert watch.stdin is not None and watch.stdout is not None
    assert watch.stdout.readline().strip() == "watching"
    start = time.monotonic()
    try:
        yield watched
    finally:
        watched.seconds = time.monotonic() - start
        told, _ = watch.communicate(timeout=PATIENCE_SECONDS)  # it ends when its standard input does
        for name, value in json.loads(told).items():
            setattr(watched, name, value)


# ---- figures ----


def judge(what: str, measured: float, most: float, unit: str) -> bool:
    """Print a figure beside the most that it may be."""
    met = measured <= most
    print(f"{what:58}{measured:10.2f} {unit:8} asked: at most {most:8.2f}   {'met' if met else 'NOT MET'}", flush=True)
    return met


def judge_health(watched: Watched) -> bool:
    return judge("longest /health", watched.longest_health, LONGEST_HEALTH, "s")


def judge_memory(what: str, num_bytes: float, most: float) -> bool:
    return judge(what, num_bytes / MEBIBYTE, most / MEBIBYTE, "MiB")
