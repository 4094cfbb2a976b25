"""The client's side of many event streams: bare sockets, so that what is measured is the server.

While streams run, bytes are kept with the times they came at; they are taken apart when all is over.
"""

from __future__ import annotations

import asyncio
import json
import socket
import time
from bisect import bisect_left
from dataclasses import dataclass, field
from itertools import accumulate
from typing import Any

from peers.process import EngineFailedError

PATIENCE_SECONDS = 300
SMALL_BUFFER = 4096  # bytes a slow reader's system takes for it


class StreamFailedError(EngineFailedError):
    """An answer is not what it should be."""


@dataclass
class Answer:
    """One answer. Times are of time.monotonic(), which all processes of a machine share."""

    sent: float
    event_times: list[float]  # of events that brought text
    ended: float
    text: str
    num_tokens: int
    finish_reason: str | None
    num_cached_tokens: int = 0


@dataclass
class Exchange(asyncio.Protocol):
    """One request on a connection of its own. `pause_seconds`: read nothing for so long."""

    body: bytes
    pause_seconds: float = 0.0
    path: str = "/v1/completions"
    sent: float = 0.0
    segments: list[tuple[float, bytes]] = field(default_factory=list)
    ended: asyncio.Future[float] = field(default_factory=lambda: asyncio.get_running_loop().create_future())

    def request(self) -> bytes:
        """All that is sent. The time counts from here."""
        head = f"POST {self.path} HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
        head += f"Content-Length: {len(self.body)}\r\nConnection: close\r\n\r\n"
        self.sent = time.monotonic()
        return head.encode() + self.body

    def data_received(self, data: bytes) -> None:
        self.segments.append((time.monotonic(), data))

    def connection_lost(self, error: Exception | None) -> None:
        if not self.ended.done():
            self.ended.set_result(time.monotonic())


async def run_exchanges(host: str, port: int, exchanges: list[Exchange]) -> None:
    """All at once; done when the last has ended."""
    await asyncio.gather(*(_run_exchange(host, port, exchange) for exchange in exchanges))


async def _run_exchange(host: str, port: int, exchange: Exchange) -> None:
    connection = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
    connection.setblocking(False)
    if exchange.pause_seconds:
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, SMALL_BUFFER)
    loop = asyncio.get_running_loop()
    await loop.sock_connect(connection, (host, port))
    await loop.sock_sendall(connection, exchange.request())
    await asyncio.sleep(exchange.pause_seconds)
    await loop.create_connection(lambda: exchange, sock=connection)
    try:
        await asyncio.wait_for(exchange.ended, PATIENCE_SECONDS)
    except TimeoutError:
        raise StreamFailedError(f"a stream did not end within {PATIENCE_SECONDS} seconds") from None


def completion_body(model: str, prompt: list[int], num_tokens: int, seed: int, stream: bool = True) -> bytes:
    body: dict[str, Any] = {
        "model": model,
        "prompt": prompt,
        "max_tokens": num_tokens,
        "temperature": 0,
        "ignore_eos": True,
        "seed": seed,
    }
    if stream:
        body |= {"stream": True, "stream_options": {"include_usage": True}}
    return json.dumps(body).encode()


def read_answer(exchange: Exchange) -> Answer:
    """StreamFailedError for another status than 200, an error among the events, or a stream that was cut off."""
    head, body, times = _take_apart(exchange.segments)
    status = head.split(b"\r\n", 1)[0].decode()
    if " 200 " not in f"{status} ":
        raise StreamFailedError(f"{status or 'no answer'}: {body[:300].decode(errors='replace')}")
    ended = exchange.ended.result()
    if b"text/event-stream" not in head.lower():
        return _whole_answer(json.loads(body), exchange.sent, ended)
    answer = Answer(exchange.sent, [], ended, "", 0, None)
    texts: list[str] = []
    position = 0
    for event in body.split(b"\n\n"):
        position += len(event) + 2
        if event.startswith(b"data: {"):
            text = _take_event(answer, json.loads(event[6:]))
            if text:
                texts.append(text)
                answer.event_times.append(times.at(position))
    if not body.endswith(b"data: [DONE]\n\n"):
        raise StreamFailedError(f"a stream was cut off after {len(body)} bytes")
    answer.text = "".join(texts)
    return answer


def _take_event(answer: Answer, event: dict[str, Any]) -> str:
    if "error" in event:
        raise StreamFailedError(str(event["error"]))
    if event.get("usage"):
        _take_usage(answer, event["usage"])
    text = ""
    for choice in event["choices"]:
        text += choice["text"]
        answer.finish_reason = choice["finish_reason"] or answer.finish_reason
    return text


def _whole_answer(body: dict[str, Any], sent: float, ended: float) -> Answer:
    choice = body["choices"][0]
    answer = Answer(sent, [ended], ended, choice["text"], 0, choice["finish_reason"])
    _take_usage(answer, body["usage"])
    return answer


def _take_usage(answer: Answer, usage: dict[str, Any]) -> None:
    answer.num_tokens = usage["completion_tokens"]
    answer.num_cached_tokens = (usage.get("prompt_tokens_details") or {}).get("cached_tokens", 0)


class ArrivalTimes:
    """When the byte at a position of a body was there."""

    def __init__(self) -> None:
        self._ends: list[int] = []
        self._times: list[float] = []

    def add(self, end: int, time: float) -> None:
        self._ends.append(end)
        self._times.append(time)

    def at(self, position: int) -> float:
        return self._times[min(bisect_left(self._ends, position), len(self._times) - 1)]


def _take_apart(segments: list[tuple[float, bytes]]) -> tuple[bytes, bytes, ArrivalTimes]:
    """Head and body of a response; the body without the framing of its chunks."""
    raw = b"".join(data for _, data in segments)
    head, _, rest = raw.partition(b"\r\n\r\n")
    times = ArrivalTimes()
    if b"transfer-encoding: chunked" not in head.lower():
        return head, rest, times
    ends = list(accumulate(len(data) for _, data in segments))
    parts: list[bytes] = []
    offset, length = len(head) + 4, 0
    while True:
        line_end = raw.find(b"\r\n", offset)
        size = int(raw[offset:line_end], 16) if line_end > offset else 0
        if not size:
            return head, b"".join(parts), times
        start = line_end + 2
        parts.append(raw[start : start + size])
        length += size
        offset = start + size + 2
        times.add(length, segments[min(bisect_left(ends, start + size), len(ends) - 1)][0])
