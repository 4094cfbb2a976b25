"""Publishes events of the KV cache on a socket (ZMQ), and repeats those that a subscriber has missed.

A thread has the sockets, so that a step waits for no subscriber. What a slow subscriber can't take is dropped for it.
It sees a gap in the numbers of messages, and asks for them on the second socket, by the first number that it lacks. It
is answered with each message that is still kept, and then with a number of -1 and nothing.
"""

from __future__ import annotations

import queue
import threading
import time
from collections import deque

import msgspec
import zmq

from ratoon.core.errors import ConfigError
from ratoon.core.kv_events import Event, EventBatch

NUM_KEPT = 10_000  # messages, for subscribers that missed some
SECONDS_TO_LOOK = 0.05  # between looks at what subscribers ask for, while nothing happens
END = (-1).to_bytes(8, "big", signed=True)


class KVEventPublisher:
    def __init__(self, endpoint: str, replay: str | None = None, topic: str = "", rank: int | None = None) -> None:
        """Binds the sockets. ConfigError: an address can't be used."""
        self._topic = topic.encode()
        self._rank = rank
        self._context = zmq.Context()
        self._publisher = self._bind(zmq.PUB, "kv_events", endpoint)
        self._replay = None if replay is None else self._bind(zmq.ROUTER, "kv_events_replay", replay)
        self._kept: deque[tuple[int, bytes]] = deque(maxlen=NUM_KEPT)
        self._number = 0
        self._queue: queue.SimpleQueue[list[Event] | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name="kv-events", daemon=True)
        self._thread.start()

    def _bind(self, kind: int, setting: str, address: str) -> zmq.Socket[bytes]:
        socket = self._context.socket(kind)
        socket.linger = 0
        try:
            socket.bind(address)
        except zmq.ZMQError as error:
            self._context.destroy()
            raise ConfigError(setting, f"{address!r} can't be bound: {error}", "such as tcp://127.0.0.1:5557") from None
        return socket

    def publish(self, events: list[Event]) -> None:
        self._queue.put(events)

    def close(self) -> None:
        """Sends what was published, and ends."""
        self._queue.put(None)
        self._thread.join()
        self._context.destroy(linger=200)

    def _run(self) -> None:
        while True:
            try:
                events = self._queue.get(timeout=SECONDS_TO_LOOK)
                if events is None:
                    return
                self._send(events)
            except queue.Empty:
                pass
            self._repeat()

    def _send(self, events: list[Event]) -> None:
        payload = msgspec.msgpack.encode(EventBatch(time.time(), events, self._rank))
        self._kept.append((self._number, payload))
        self._publisher.send_multipart([self._topic, self._number.to_bytes(8, "big"), payload])
        self._number += 1

    def _repeat(self) -> None:
        socket = self._replay
        while socket is not None and socket.poll(0):
            client, *_, asked = socket.recv_multipart()
            if len(asked) != 8:
                continue
            first = int.from_bytes(asked, "big")
            for number, payload in list(self._kept):
                if number >= first:
                    socket.send_multipart([client, b"", number.to_bytes(8, "big"), payload])
            socket.send_multipart([client, b"", END, b""])


def with_port_of(endpoint: str, index: int) -> str:
    """The address of another engine of the same service: a port that is higher by its index."""
    head, colon, port = endpoint.rpartition(":")
    return f"{head}:{int(port) + index}" if index and colon and port.isdigit() else endpoint
