"""The context of a process's sockets."""

from __future__ import annotations

from typing import Any

import zmq


class SocketContext(zmq.Context[zmq.Socket[bytes]]):
    """Closes its sockets when it is destroyed by Python's garbage collector.

    zmq's own context finds its sockets by weak references, which the collector clears first; it then waits forever for
    sockets that are still open.
    """

    _held: list[zmq.Socket[bytes]]

    def socket(self, *arguments: Any, **options: Any) -> zmq.Socket[bytes]:
        made = super().socket(*arguments, **options)
        held: list[zmq.Socket[bytes]] = self.__dict__.get("_held", [])
        self._held = [*(socket for socket in held if not socket.closed), made]
        return made

    def destroy(self, linger: int | None = None) -> None:
        for socket in self.__dict__.get("_held", []):
            if not socket.closed:
                socket.close(0 if linger is None else linger)
        super().destroy(linger)
