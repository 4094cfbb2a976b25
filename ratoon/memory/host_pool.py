"""The blocks in host memory: free list and reference counts. Their ids begin with 1, as on the device. Accounting only;
the copies of a step are in transfers.py.
"""

from __future__ import annotations

from collections.abc import Iterable


class HostPool:
    """Host blocks are not in the prefix cache; they are used only through references."""

    def __init__(self, num_blocks: int) -> None:
        self.num_blocks = num_blocks
        self._free = list(range(num_blocks, 0, -1))
        self._references: dict[int, int] = {}  # of blocks in use

    @property
    def num_free_blocks(self) -> int:
        return len(self._free)

    def take(self) -> int:
        """A free block, with one reference. There must be one."""
        host_block = self._free.pop()
        self._references[host_block] = 1
        return host_block

    def share(self, host_block: int) -> None:
        """Add a reference to a block that is in use."""
        self._references[host_block] += 1

    def free(self, host_blocks: Iterable[int]) -> None:
        """Drop a reference to each block."""
        for host_block in host_blocks:
            num_left = self._references.pop(host_block) - 1
            if num_left:
                self._references[host_block] = num_left
            else:
                self._free.append(host_block)

    def is_used(self, host_block: int) -> bool:
        return host_block in self._references

    def check(self, expected: dict[int, int]) -> None:
        """Raise AssertionError unless the references are exactly these, and every block is either free or in use."""
        assert self._references == expected, f"host blocks: {self._references} references, {expected} entries"
        every = sorted([*self._free, *self._references])
        assert every == list(range(1, self.num_blocks + 1)), "a host block is both free and in use, or neither"
