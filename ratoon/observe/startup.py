"""Where start-up spends its time: named phases, and a table of them. It measures; it decides nothing."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

OTHER = "other"


@dataclass(slots=True)
class Phase:
    name: str
    depth: int  # 0, or how many phases it stands inside
    seconds: float = 0.0


class StartupTimer:
    """Phases may stand inside one another; the ones inside are parts of the outer one's time."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._begin = clock()
        self._end: float | None = None
        self._depth = 0
        self.phases: list[Phase] = []  # in the order in which they began

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        entry = Phase(name, self._depth)
        self.phases.append(entry)
        self._depth += 1
        begin = self._clock()
        try:
            yield
        finally:
            self._depth -= 1
            entry.seconds = self._clock() - begin

    def include(self, phases: Iterable[tuple[str, int, float]]) -> None:
        """Phases that another process measured (name, depth, seconds), as parts of the one that is under way here. What
        none of its phases accounts for is part of that one as well."""
        self.phases += [Phase(name, self._depth + depth, seconds) for name, depth, seconds in phases if name != OTHER]

    def finish(self) -> None:
        """Start-up is over: the total stands still from here on."""
        if self._end is None:
            self._end = self._clock()

    @property
    def total_seconds(self) -> float:
        return (self._clock() if self._end is None else self._end) - self._begin

    def rows(self) -> list[Phase]:
        """The phases, each once, and what no outer phase accounts for."""
        named = sum(phase.seconds for phase in self.phases if phase.depth == 0)
        return [*self._merged(), Phase(OTHER, 0, max(self.total_seconds - named, 0.0))]

    def _merged(self) -> list[Phase]:
        """A phase that was entered several times inside the same outer one is one row, where it began first."""
        rows: dict[tuple[str, ...], Phase] = {}
        path: list[str] = []
        for phase in self.phases:
            path[phase.depth :] = [phase.name]
            row = rows.setdefault(tuple(path), Phase(phase.name, phase.depth))
            row.seconds += phase.seconds
        return _in_tree_order(rows)

    def as_dict(self) -> dict[str, float]:
        """Seconds by phase; a phase inside another is named `outer / inner`."""
        seconds: dict[str, float] = {}
        path: list[str] = []
        for phase in self.rows():
            path[phase.depth :] = [phase.name]
            seconds[" / ".join(path)] = phase.seconds
        seconds["total"] = self.total_seconds
        return seconds

    def table(self) -> str:
        """The phases as lines of text, with their share of the whole."""
        total = self.total_seconds
        width = max([len("total"), *(len(phase.name) + 2 * phase.depth for phase in self.rows())])
        lines = []
        for name, seconds in [*(("  " * p.depth + p.name, p.seconds) for p in self.rows()), ("total", total)]:
            share = seconds / total if total > 0 else 0.0
            lines.append(f"{name:<{width}}  {seconds:8.3f} s  {share:4.0%}")
        return "\n".join(lines)


def _in_tree_order(rows: dict[tuple[str, ...], Phase]) -> list[Phase]:
    """Rows below their outer one, where a phase that came back may have brought new ones inside it."""

    def below(outer: tuple[str, ...]) -> list[Phase]:
        inner = [path for path in rows if path[:-1] == outer]
        return [phase for path in inner for phase in (rows[path], *below(path))]

    return below(())
