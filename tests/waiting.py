"""Waiting for what another process, thread or task does: as long as it takes. Tests wait for the event itself and sleep
for no time that "should be enough": a machine that is busy with other work may be ten times slower than an idle one.
"""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Callable
from pathlib import Path

PATIENCE = 120.0  # seconds; only what never happens takes so long
INTERVAL = 0.005
CLOCK_TICKS = os.sysconf("SC_CLK_TCK")


def wait_until(what: str, condition: Callable[[], object]) -> None:
    """Waits in a thread."""
    end = time.monotonic() + PATIENCE
    while not condition():
        assert time.monotonic() < end, f"not within {PATIENCE:.0f} seconds: {what}"
        time.sleep(INTERVAL)


async def until(what: str, condition: Callable[[], object]) -> None:
    """Waits on an event loop."""
    end = time.monotonic() + PATIENCE
    while not condition():
        assert time.monotonic() < end, f"not within {PATIENCE:.0f} seconds: {what}"
        await asyncio.sleep(INTERVAL)


def cpu_seconds(pid: int) -> float:
    """What a process has used so far, in all its threads. Unlike time on a clock, it hardly depends on other work."""
    user, system = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[11:13]
    return (int(user) + int(system)) / CLOCK_TICKS
