"""Blocks with contents, on the device, on the host and in a connector, which carries out what a plan moves, in the
plan's order."""

from __future__ import annotations

from collections.abc import Callable

from ratoon.core.kv_connector import BlockIndex
from ratoon.core.outputs import TransferReport
from ratoon.core.plan import BlockTransfer, ConnectorTransfer, SchedulerOutput

GARBAGE = "garbage"
Content = list[object]  # by offset
Transfer = BlockTransfer | ConnectorTransfer


class BlockStore:
    def __init__(self, block_size: int) -> None:
        self.block_size = block_size
        self.device: dict[int, Content] = {}
        self.host: dict[int, Content] = {}
        self.outside: dict[bytes, Content] = {}  # by key

    def move(self, plan: SchedulerOutput, fails: Callable[[Transfer], bool] = lambda _: False) -> TransferReport:
        """Step 2 of the order in core/plan.py. Contents are copied without checks; readers detect errors. Transfers
        that fail leave garbage."""
        report = TransferReport([], [], [], [])
        for fetch in plan.fetches:
            failed = fails(fetch) or fetch.key not in self.outside
            if failed:
                report.failed_stores.append(fetch.slot)
            self.host[fetch.slot] = self._garbage() if failed else list(self.outside[fetch.key])
        for store in plan.stores:
            failed = fails(store)
            (report.failed_stores if failed else report.stored).append(store.slot)
            self.host[store.slot] = self._garbage() if failed else self._read(self.device, store.block)
        for save in plan.saves:
            if save.slot not in report.failed_stores and not fails(save):
                self.outside[save.key] = list(self.host[save.slot])
        copied = [self._read(self.device, copy.src) for copy in plan.block_copies]
        for load in plan.loads:
            failed = fails(load)
            (report.failed_loads if failed else report.loaded).append(load.block)
            self.device[load.block] = self._garbage() if failed else self._read(self.host, load.slot)
        for copy, content in zip(plan.block_copies, copied, strict=True):
            self.device[copy.dst] = content
        return report

    def write(self, block: int, offset: int, content: object) -> None:
        assert block != 0, "the null block is written"
        self.device.setdefault(block, [None] * self.block_size)[offset] = content

    def fill(self, block: int, content: object) -> None:
        self.device[block] = [content] * self.block_size

    def read(self, block: int, offset: int) -> object:
        return self._read(self.device, block)[offset]

    def spoil(self, device_blocks: set[int], stores: list[BlockTransfer]) -> None:
        """What a step that failed may leave behind."""
        self.device.update((block, self._garbage()) for block in device_blocks)
        self.host.update((store.slot, self._garbage()) for store in stores)

    def _garbage(self) -> Content:
        return [GARBAGE] * self.block_size

    def _read(self, where: dict[int, Content], block: int) -> Content:
        return list(where.get(block, [None] * self.block_size))


class OutsideIndex(BlockIndex):
    """The scheduler's half of a connector that keeps every block that it is offered, as far as saving succeeds."""

    keeps_ended_texts = True

    def __init__(self, store: BlockStore) -> None:
        self._store = store

    def find(self, key: bytes) -> bool:
        return key in self._store.outside

    def offer(self, key: bytes) -> bool:
        return key not in self._store.outside
