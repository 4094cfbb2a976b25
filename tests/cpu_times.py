"""`pytest --cpu-times=40` prints the time of the processor that test files and tests took, with the processes that they
started, the longest first. Unlike time on the clock, it hardly depends on what else the machine does.

A process whose parent ended before it is not counted, nor is one whose parent ignores the signal of its end.
"""

from __future__ import annotations

import os
from collections import Counter
from pathlib import Path

import pytest

from tests.waiting import CLOCK_TICKS


def tree_seconds(pid: int) -> float:
    """Returns what a process, those below it, and those that have ended and were waited for have used so far."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        lists = [file.read_text() for file in Path(f"/proc/{pid}/task").glob("*/children")]
    except (FileNotFoundError, ProcessLookupError):
        return 0.0  # it has just ended: its parent has the time
    own = sum(map(int, fields[11:15])) / CLOCK_TICKS  # utime, stime, cutime, cstime
    return own + sum(tree_seconds(int(child)) for children in lists for child in children.split())


class CpuTimes:
    """Counts in the processes that run tests, and sums up in the one that prints."""

    def __init__(self, num_lines: int) -> None:
        self._num_lines = num_lines
        self._counted = tree_seconds(os.getpid())
        self._files: Counter[str] = Counter()
        self._tests: Counter[str] = Counter()  # all cases of a test together

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_makereport(self, item: pytest.Item) -> object:
        report = yield
        seconds = tree_seconds(os.getpid())
        report.cpu_seconds = seconds - self._counted
        self._counted = seconds
        return report

    def pytest_collection_finish(self) -> None:
        self._counted = tree_seconds(os.getpid())

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        self._files[report.nodeid.partition("::")[0]] += report.cpu_seconds  # type: ignore[attr-defined]
        self._tests[report.nodeid.partition("[")[0]] += report.cpu_seconds  # type: ignore[attr-defined]

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        for title, times in (("files", self._files), ("tests", self._tests)):
            terminalreporter.section(f"time of the processor, {title}: {times.total():.0f} s")
            for name, seconds in times.most_common(self._num_lines):
                terminalreporter.write_line(f"{seconds:8.2f} s  {name}")
