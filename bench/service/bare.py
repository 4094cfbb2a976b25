"""The least that event streams cost: a process that writes a ready-made event to each of its connections, again and
again, and a thread here that reads them. The floor of any server that sends an event for each token.
"""

from __future__ import annotations

import asyncio
import os
import selectors
import socket
import subprocess
import sys
import threading

import uvloop

from service.server import BENCH_FOLDER, allow_many_files

NUM_EVENTS = 200  # on each connection
# As long as an event of a completion with its token counts, and framed as a chunk of HTTP
EVENT = b"16d\r\ndata: " + b"x" * 357 + b"\n\n\r\n"


def run_bare(num_streams: int) -> float:
    """Microseconds of processor time for an event."""
    allow_many_files()
    with socket.create_server(("127.0.0.1", 0), backlog=num_streams) as listening:
        command = [sys.executable, "-m", "service.bare", str(num_streams), str(listening.getsockname()[1])]
        process = subprocess.Popen(command, cwd=BENCH_FOLDER, stdout=subprocess.PIPE, text=True)
        connections = [listening.accept()[0] for _ in range(num_streams)]
        reader = threading.Thread(target=_read_all, args=(connections,))
        reader.start()
        seconds = float(process.communicate()[0])
        reader.join()
    return 1e6 * seconds / (num_streams * NUM_EVENTS)


def _read_all(connections: list[socket.socket]) -> None:
    with selectors.DefaultSelector() as selector:
        for connection in connections:
            selector.register(connection, selectors.EVENT_READ)
        left = len(connections)
        while left:
            for key, _ in selector.select():
                connection = key.fileobj
                assert isinstance(connection, socket.socket)
                if not connection.recv(65536):
                    selector.unregister(connection)
                    connection.close()
                    left -= 1


async def write_events(num_streams: int, port: int) -> float:
    loop = asyncio.get_running_loop()
    opened = [await loop.create_connection(asyncio.Protocol, "127.0.0.1", port) for _ in range(num_streams)]
    before = os.times()
    for _ in range(NUM_EVENTS):
        for transport, _ in opened:
            transport.write(EVENT)
        await asyncio.sleep(0.001)
    after = os.times()
    for transport, _ in opened:
        transport.close()
    await asyncio.sleep(0.1)
    return after.user + after.system - before.user - before.system


def main() -> None:
    allow_many_files()
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        print(runner.run(write_events(int(sys.argv[1]), int(sys.argv[2]))))


if __name__ == "__main__":
    main()
