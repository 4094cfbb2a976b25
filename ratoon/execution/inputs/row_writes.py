"""Which cells of the rows the host has written since the last step: what a copy of the rows on a device has to be told.

No values are kept: they are read from the rows when the step is prepared, so a cell that was written twice is right.
"""

from __future__ import annotations

import numpy as np

FEW_RUNS = 4  # that are joined one by one in less time
FEW_CELLS = 32  # that are listed in less time
NO_CELLS = np.zeros(0, np.int64)


class RowWrites:
    """Runs of cells, by their place in the flat memory of the rows."""

    def __init__(self) -> None:
        self._starts: list[int] = []
        self._counts: list[int] = []

    def note(self, start: int | np.ndarray, count: int) -> None:
        """A run, or several of equal length."""
        if count <= 0:
            return
        if isinstance(start, np.ndarray):
            self._starts += start.tolist()
            self._counts += [count] * len(start)
        else:
            self._starts.append(start)
            self._counts.append(count)

    def take(self) -> np.ndarray:
        """The cells [N] that were noted, which are forgotten."""
        if not self._starts:  # most decode steps
            return NO_CELLS
        if len(self._starts) <= FEW_RUNS:
            runs = [range(start, start + count) for start, count in zip(self._starts, self._counts)]
            self._starts, self._counts = [], []
            if sum(map(len, runs)) <= FEW_CELLS:
                return np.array([cell for run in runs for cell in run])
            return np.concatenate([np.arange(run.start, run.stop) for run in runs])
        starts, self._starts = np.array(self._starts, np.int64), []
        counts, self._counts = np.array(self._counts, np.int64), []
        ends = counts.cumsum()
        return np.arange(ends[-1]) + (starts - ends + counts).repeat(counts)


class NoRowWrites(RowWrites):
    """For rows that are read where they lie."""

    def note(self, start: int | np.ndarray, count: int) -> None: ...
