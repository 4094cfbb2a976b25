"""How long a connector takes for a fetch of so many blocks, from those that were observed.

A fetch takes a time of its own, and one for each block; the first of an engine takes longer than any later one. So
observations are kept by size, and a small fetch says nothing about a large one, except that this takes at least as
long.
"""

from __future__ import annotations

WEIGHT_OF_NEWEST = 1 / 4  # of the newest observation among those of its size
FORGOTTEN = 0.98  # of an estimate that prevented a fetch: it may be outdated


class FetchTimes:
    def __init__(self) -> None:
        self._of_block: dict[int, float] = {}  # class of size, by powers of two → seconds for each block

    def note(self, num_blocks: int, seconds: float) -> None:
        """A fetch of so many blocks took so long."""
        size, of_block = num_blocks.bit_length(), seconds / num_blocks
        before = self._of_block.get(size, of_block)
        self._of_block[size] = before + (of_block - before) * WEIGHT_OF_NEWEST

    def estimate(self, num_blocks: int) -> float:
        """Returns the seconds that a fetch of so many blocks takes, 0.0 if none was observed. A size that was not
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
