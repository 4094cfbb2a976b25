"""Runs a `ratoon` command under a sampling profiler: python -m service.sampled OUT.json serve MODEL …

Every few milliseconds of the process's own processor time, it notes which function the main thread is in. That costs
little and favours nothing, unlike a profiler that is told of every call. SIGUSR2 begins and ends the sampling.
"""

from __future__ import annotations

import json
import signal
import sys
from collections import Counter
from pathlib import Path
from types import FrameType

INTERVAL = 0.004  # seconds of processor time
OURS = "ratoon."


class Sampler:
    def __init__(self, out: Path) -> None:
        self._out = out
        self._running = False
        self._innermost: Counter[str] = Counter()  # functions that the time was spent in
        self._ours: Counter[str] = Counter()  # functions of Ratoon that it was spent for

    def install(self) -> None:
        signal.signal(signal.SIGUSR2, self.toggle)
        signal.signal(signal.SIGPROF, self.sample)

    def toggle(self, number: int, frame: FrameType | None) -> None:
        self._running = not self._running
        interval = INTERVAL if self._running else 0.0
        signal.setitimer(signal.ITIMER_PROF, interval, interval)
        if not self._running:
            result = {"samples": self._innermost.total(), "innermost": self._innermost, "ours": self._ours}
            self._out.write_text(json.dumps(result), encoding="utf-8")

    def sample(self, number: int, frame: FrameType | None) -> None:
        if frame is None:
            return
        self._innermost[_name(frame)] += 1
        ours: FrameType | None = frame
        while ours is not None and not str(ours.f_globals.get("__name__", "")).startswith(OURS):
            ours = ours.f_back
        self._ours["(none)" if ours is None else _name(ours)] += 1


def _name(frame: FrameType) -> str:
    return f"{frame.f_globals.get('__name__', '?')}.{frame.f_code.co_qualname}"


def main() -> int:
    out, *arguments = sys.argv[1:]
    Sampler(Path(out)).install()
    sys.argv[1:] = arguments
    from ratoon.cli import main as run_ratoon

    return run_ratoon()


if __name__ == "__main__":
    sys.exit(main())
