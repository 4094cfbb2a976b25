"""A context whose sockets were left open is collected without waiting."""

from __future__ import annotations

import subprocess
import sys

DROP = """
import gc, zmq
from ratoon.engine.processes.zmq_context import SocketContext

class Owner:
    def __init__(self):
        self.context = SocketContext()
        self.socket = self.context.socket(zmq.PUSH)
        self.socket.connect("ipc:///nowhere/at/all")
        self.socket.send(b"never taken")
        self.itself = self  # found by the garbage collector alone

Owner()
gc.collect()
print("collected")
"""


def test_a_context_with_open_sockets_is_collected_at_once() -> None:
    done = subprocess.run([sys.executable, "-c", DROP], capture_output=True, text=True, timeout=60)
    assert done.stdout.strip() == "collected", done.stderr
