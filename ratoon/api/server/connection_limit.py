"""The bound on open connections. At the bound, the connection that has been idle longest makes room for a new one.

A connection is idle while it has no request: before its first one, between two of them, and while the head of one is
incomplete, so that a client that sends heads slowly gains nothing by it. A connection with a request is never closed
for another one: when all have one, a new connection is refused.
"""

from __future__ import annotations

import resource
from collections import OrderedDict
from typing import Protocol

# What the process opens beside connections: engines' sockets and pipes, files, those that are being accepted.
OTHER_DESCRIPTORS = 512


class Connection(Protocol):
    def close_idle(self) -> None:
        """Closes the connection. Its client has no request, and is told nothing."""

    def refuse_new(self) -> None:
        """Tells the client that there is no room for its connection, and close it."""


class ConnectionLimit:
    def __init__(self, limit: int) -> None:
        self.limit = limit
        self._open: set[Connection] = set()
        self._idle: OrderedDict[Connection, None] = OrderedDict()  # the one that has been idle longest first

    def __len__(self) -> int:
        return len(self._open)

    def open(self, connection: Connection) -> None:
        """Counts a new connection, which is idle. Where there is no room for it, another one is closed, or it is
        refused."""
        if len(self._open) >= self.limit:
            if not self._idle:
                connection.refuse_new()
                return
            oldest = next(iter(self._idle))
            self.close(oldest)
            oldest.close_idle()
        self._open.add(connection)
        self._idle[connection] = None

    def begin(self, connection: Connection) -> None:
        """Notes that the connection has a request."""
        self._idle.pop(connection, None)

    def end(self, connection: Connection) -> None:
        """Notes that all requests of the connection are answered."""
        if connection in self._open:
            self._idle[connection] = None

    def close(self, connection: Connection) -> None:
        """Notes that the connection is closed, or is about to be. More than once is harmless."""
        self._open.discard(connection)
        self._idle.pop(connection, None)


def allow_descriptors(num_connections: int) -> int:
    """Raise this process's own limit on open files as far as so many connections need it. Returns how many connections
    it allows."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    needed = num_connections + OTHER_DESCRIPTORS
    if soft != resource.RLIM_INFINITY and soft < needed:
        soft = needed if hard == resource.RLIM_INFINITY else min(needed, hard)
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    if soft == resource.RLIM_INFINITY:
        return num_connections
    return max(1, min(num_connections, soft - OTHER_DESCRIPTORS))
