"""How long a connector takes for a fetch of so many blocks, from those that were observed.

A fetch takes a time of its own, and one for each block; the first of an engine takes longer than any later one, and any
may be disturbed. So observations are kept by size, the shortest of the last ones counts, and a single one says nothing
yet. A small fetch says of a large one only that this takes at least as long.
"""

from __future__ import annotations

from collections import deque

NUM_RECENT = 4  # observations of each size
LEAST_OBSERVED = 2  # of them, so that an estimate may prevent a fetch
FORGOTTEN = 0.98  # of an estimate that prevented a fetch: it may be outdated


class FetchTimes:
    def __init__(self) -> None:
        self._recent: dict[int, deque[float]] = {}  # class of size, by powers of two → seconds for each block
        self._of_block: dict[int, float] = {}  # the shortest of them, where there are enough

    def note(self, num_blocks: int, seconds: float) -> None:
        """A fetch of so many blocks took so long."""
        size = num_blocks.bit_length()
        recent = self._recent.setdefault(size, deque(maxlen=NUM_RECENT))
        recent.append(seconds / num_blocks)
        if len(recent) >= LEAST_OBSERVED:
            self._of_block[size] = min(recent)

    def estimate(self, num_blocks: int) -> float:
        """Returns the seconds that a fetch of so many blocks takes, 0.0 if too few were observed. A size that was not
        observed is estimated low, so that it is tried."""
        if not num_blocks or not self._of_block:
            return 0.0
        size = num_blocks.bit_length()
        if size in self._of_block:
            return self._of_block[size] * num_blocks
        smaller = max((seconds * 2 ** (one - 1) for one, seconds in self._of_block.items() if one < size), default=0.0)
        of_larger = min(((one, seconds) for one, seconds in self._of_block.items() if one > size), default=(0, 0.0))[1]
        return max(smaller, of_larger * num_blocks)

    def forget_a_little(self) -> None:
        """A fetch was not made because of an estimate."""
        for size in self._of_block:
            self._of_block[size] *= FORGOTTEN
