"""Takes connections in: all that are there, at once.

The faster event loop takes one for each turn that it makes. While it serves a thousand streams a turn is long, and
whoever comes last among many would wait for seconds before anybody reads what he asks.
"""

from __future__ import annotations

import asyncio
import errno
import socket
from collections.abc import Callable

from ratoon.observe.logging import get_logger

BACKLOG = 2048
MOST_AT_ONCE = 256  # then others have their turn
OUT_OF_DESCRIPTORS = (errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM)
SECONDS_UNTIL_LATER = 0.5  # connections wait in the system's queue meanwhile

logger = get_logger(__name__)


class Acceptor:
    def __init__(self, listening: socket.socket, make_protocol: Callable[[], asyncio.Protocol]) -> None:
        self._socket = listening
        self._make_protocol = make_protocol
        self._loop = asyncio.get_running_loop()
        self._later: asyncio.TimerHandle | None = None
        self._opening: set[asyncio.Task[None]] = set()

    def start(self) -> None:
        self._socket.setblocking(False)
        self._socket.listen(BACKLOG)
        self._loop.add_reader(self._socket.fileno(), self._accept_all)

    def stop(self) -> None:
        self._loop.remove_reader(self._socket.fileno())
        if self._later is not None:
            self._later.cancel()

    def _accept_all(self) -> None:
        for _ in range(MOST_AT_ONCE):
            try:
                connection, _ = self._socket.accept()
            except (BlockingIOError, InterruptedError, ConnectionAbortedError):
                return
            except OSError as error:
                if error.errno not in OUT_OF_DESCRIPTORS:
                    raise
                logger.warning("connections have to wait: %s", error.strerror)
                self._loop.remove_reader(self._socket.fileno())
                self._later = self._loop.call_later(SECONDS_UNTIL_LATER, self._go_on)
                return
            connection.setblocking(False)
            task = self._loop.create_task(self._open(connection))
            self._opening.add(task)
            task.add_done_callback(self._opening.discard)

    async def _open(self, connection: socket.socket) -> None:
        try:
            await self._loop.connect_accepted_socket(self._make_protocol, connection)
        except OSError:  # gone already
            connection.close()

    def _go_on(self) -> None:
        self._later = None
        self._loop.add_reader(self._socket.fileno(), self._accept_all)
