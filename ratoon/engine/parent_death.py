"""A process that is stopped (SIGSTOP) notices nothing, not even that its parent is gone: the system has to wake it."""

from __future__ import annotations

import contextlib
import ctypes
import signal
import sys

PR_SET_PDEATHSIG = 1


def continue_when_parent_dies() -> None:
    """Ask the system for SIGCONT when the parent is gone, however it ends: then the lifeline ends this process.

    Not SIGKILL: it would leave the sockets behind, and the signal also comes when only the parent's thread that started
    us ends, where SIGCONT does no harm. Where there is no such call (macOS), a stopped process waits to be continued.
    """
    if sys.platform == "linux":
        with contextlib.suppress(OSError, AttributeError):
            ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, int(signal.SIGCONT), 0, 0, 0)
