"""Blocks with contents, on the device and on the host, which carries out what a plan moves, in the plan's order."""

from __future__ import annotations

from ratoon.core.plan import BlockSwap, SchedulerOutput

GARBAGE = "garbage"
Content = list[object]  # by offset


class BlockStore:
    def __init__(self, block_size: int) -> None:
        self.block_size = block_size
        self.device: dict[int, Content] = {}
        self.host: dict[int, Content] = {}

    def move(self, plan: SchedulerOutput) -> None:
        """Step 2 of the order in core/plan.py. Contents are copied without checks; readers detect errors."""
        for device_block, host_block in plan.swapped_out:
            self.host[host_block] = self._read(self.device, device_block)
        copied = [self._read(self.device, copy.src) for copy in plan.block_copies]
        for host_block, device_block in plan.swapped_in:
            self.device[device_block] = self._read(self.host, host_block)
        for copy, content in zip(plan.block_copies, copied, strict=True):
            self.device[copy.dst] = content

    def write(self, block: int, offset: int, content: object) -> None:
        assert block != 0, "the null block is written"
        self.device.setdefault(block, [None] * self.block_size)[offset] = content

    def fill(self, block: int, content: object) -> None:
        self.device[block] = [content] * self.block_size

    def read(self, block: int, offset: int) -> object:
        return self._read(self.device, block)[offset]

    def spoil(self, device_blocks: set[int], swapped_out: list[BlockSwap]) -> None:
        """What a step that failed may leave behind."""
        self.device.update((block, [GARBAGE] * self.block_size) for block in device_blocks)
        self.host.update((host_block, [GARBAGE] * self.block_size) for _, host_block in swapped_out)

    def _read(self, where: dict[int, Content], block: int) -> Content:
        return list(where.get(block, [None] * self.block_size))
