"""Processes of our own: how one is started, what it inherits, and how it learns that its parent is gone."""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import sys
import sysconfig
import threading
from collections.abc import Sequence
from pathlib import Path
from subprocess import DEVNULL, PIPE, Popen
from typing import Any, BinaryIO, TypeVar

import msgspec

from ratoon.core.prepared import prepared

Message = TypeVar("Message")

PR_SET_PDEATHSIG, PR_SET_NAME = 1, 15  # of Linux's prctl


def start_process(module: str, arguments: Sequence[str], descriptors: Sequence[int], launch: Any) -> Popen[bytes]:
    """Run a module of this package in a process that inherits these descriptors and gets a message, which it reads with
    `read_launch`. Its standard input stays open, and closes when this process ends, however it ends."""
    process = Popen(
        [sys.executable, "-P", "-m", module, *arguments],
        stdin=PIPE,
        stdout=sys.stderr.fileno() if _has_descriptor(sys.stderr) else DEVNULL,
        pass_fds=descriptors,
        env=_environment(),
    )
    message = msgspec.msgpack.encode(launch)
    assert process.stdin is not None
    with contextlib.suppress(BrokenPipeError):  # it is dead already, which is noticed elsewhere
        process.stdin.write(len(message).to_bytes(4, "little") + message)
        process.stdin.flush()
    return process


def read_launch(stream: BinaryIO, message_type: type[Message]) -> Message:
    """Four bytes of length, then the message. The stream stays open: its end is the parent's end."""
    size = int.from_bytes(stream.read(4), "little")
    return msgspec.msgpack.decode(stream.read(size), type=prepared(message_type))


def ignore_signals_of_the_group() -> None:
    """Ctrl-C reaches the whole group, and a service manager's SIGTERM all of the service. The parent decides what they
    mean: requests under way may need this process for a while yet. SIGHUP comes to stopped processes when the parent is
    gone, before the process could clean up."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)


def continue_when_parent_dies() -> None:
    """Ask the system for SIGCONT when the parent is gone, however it ends: then the lifeline ends this process.

    Not SIGKILL: it would leave the sockets behind, and the signal also comes when only the parent's thread that started
    us ends, where SIGCONT does no harm. Where there is no such call (macOS), a stopped process waits to be continued.
    """
    if sys.platform == "linux":
        with contextlib.suppress(OSError, AttributeError):
            ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, int(signal.SIGCONT), 0, 0, 0)


def hold_lifeline() -> None:
    """Ends this process when its parent is gone, by a thread that waits for it: the standard input that `start_process`
    has given to the process closes then."""

    def wait_for_end() -> None:
        while os.read(sys.stdin.fileno(), 4096):
            pass
        os._exit(1)

    threading.Thread(target=wait_for_end, name="lifeline", daemon=True).start()


def name_process(name: str) -> None:
    """The name that `top` and /proc/PID/comm show, of which Linux keeps 15 bytes. Elsewhere nothing happens."""
    if sys.platform == "linux":
        with contextlib.suppress(OSError, AttributeError):
            ctypes.CDLL(None).prctl(PR_SET_NAME, ctypes.c_char_p(name.encode()), 0, 0, 0)


def _environment() -> dict[str, str]:
    """The child must import the same package, even if it is only on sys.path and not installed."""
    environment = dict(os.environ)
    root = str(Path(__file__).parents[2])
    if root not in (sysconfig.get_path("purelib"), sysconfig.get_path("platlib")):
        environment["PYTHONPATH"] = os.pathsep.join(filter(None, [environment.get("PYTHONPATH"), root]))
    return environment


def _has_descriptor(stream: Any) -> bool:
    try:
        stream.fileno()
    except (AttributeError, OSError, ValueError):
        return False
    return True
