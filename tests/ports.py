"""Ports that a test must know before a program listens on them.

They lie below the range from which the system takes ports of outgoing connections, and each worker of pytest has a
range of its own: between the check and the program's start, no connection and no other test takes one.
"""

from __future__ import annotations

import os
import socket

FIRST = 20_000
NUM_PORTS_OF_WORKER = 1_000
NUM_RANGES = 12  # they end below 32,768, where those of connections begin on Linux


class _Ports:
    def __init__(self) -> None:
        worker = int(os.environ.get("PYTEST_XDIST_WORKER", "gw0").removeprefix("gw")) % NUM_RANGES
        self._first = FIRST + worker * NUM_PORTS_OF_WORKER
        self._next = os.getpid() * 31 % NUM_PORTS_OF_WORKER  # another run on this machine begins elsewhere

    def take(self, count: int) -> list[int]:
        for _ in range(NUM_PORTS_OF_WORKER):
            if self._next + count > NUM_PORTS_OF_WORKER:
                self._next = 0
            ports = [self._first + self._next + place for place in range(count)]
            self._next += count
            if all(_can_be_bound(port) for port in ports):
                return ports
        raise RuntimeError(f"{count} free ports in a row are not found from {self._first} on")


def _can_be_bound(port: int) -> bool:
    with socket.socket() as probe:
        try:
            probe.bind(("127.0.0.1", port))
        except OSError:
            return False
    return True


_PORTS = _Ports()


def free_port() -> int:
    return free_ports(1)[0]


def free_ports(count: int) -> list[int]:
    """Returns `count` ports that follow each other: engines of one server listen on those behind the given one."""
    return _PORTS.take(count)
