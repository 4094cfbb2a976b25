"""The block transfers of the next plan: copy-on-write, swap-out and swap-in. Ensures that each transfer reads a block
that has the content by then. What is moved where is decided by the callers.
"""

from __future__ import annotations

from collections.abc import Iterable

from ratoon.core.plan import BlockCopy, BlockSwap
from ratoon.memory.block_pool import Block, BlockPool
from ratoon.memory.host_pool import HostPool


class Transfers:
    """A step moves blocks in this order (core/plan.py), before anything else is written:

        device → host     saved blocks                 } both read the device as the last step left it
        device            sources of copies are read   }
        host → device     restored blocks
        device            targets of copies are written

    The target of a transfer has its content only afterwards, so a copy or save of the target in the same step reads the
    transfer's source instead. Each block is the target of at most one transfer: if it was freed and allocated for
    another one, the later one replaces the earlier. A block that was freed and then allocated for new tokens may still
    be written by the earlier transfer: the step writes the tokens after it.
    """

    def __init__(self, pool: BlockPool, host: HostPool) -> None:
        self._pool = pool
        self._host = host
        self._copies: dict[int, BlockCopy] = {}  # by the block that is written to
        self._saved: dict[int, int] = {}  # host block → device block that is read
        self._restored: dict[int, int] = {}  # device block → host block to read, which is referenced until then

    def copy(self, branch_id: str, group: int, place: int, source: int, target: int) -> None:
        """Copy-on-write for a table entry. If the source is swapped in during this step, the copy reads the host block
        too: a branch that holds such a block is new to the runner, and its tables are sent in full."""
        self._forget_target(target)
        earlier = self._copies.get(source)
        if earlier is None and source in self._restored:
            self._restore(self._restored[source], target)
            return
        source = source if earlier is None else earlier.src
        self._copies[target] = BlockCopy(branch_id, group, place, source, target)

    def forget_copies(self, branch_id: str) -> None:
        for copy in [copy for copy in self._copies.values() if copy.req_id == branch_id]:
            del self._copies[copy.dst]

    def num_to_save(self, blocks: Iterable[Block]) -> int:
        """Free host blocks needed to save all these."""
        return sum(block.block_id not in self._restored for block in blocks)

    def save(self, block: Block) -> int:
        """A host block with the content of this one, and a reference to it."""
        if block.block_id in self._restored:  # it is still on the host
            host_block = self._restored[block.block_id]
            self._host.share(host_block)
            return host_block
        host_block = self._host.take()
        copy = self._copies.get(block.block_id)
        self._saved[host_block] = block.block_id if copy is None else copy.src
        return host_block

    def restore(self, host_block: int, block: Block) -> None:
        """Bring the content of a host block to a device block that was just taken."""
        self._forget_target(block.block_id)
        self._restore(host_block, block.block_id)

    def take_copies(self) -> list[BlockCopy]:
        """The copy-on-write transfers, in order. Each is returned once."""
        copies, self._copies = self._copies, {}
        return list(copies.values())

    def take_swaps(self) -> tuple[list[BlockSwap], list[BlockSwap]]:
        """The swaps out and in. Each is returned once; then the references of the reads are dropped, and host blocks
        without others are free."""
        if not self._saved and not self._restored:
            return [], []
        restored, self._restored = self._restored, {}
        saved, self._saved = self._saved, {}
        swapped_in = []
        for device_block, host_block in restored.items():
            block = self._pool.blocks[device_block]
            if block.ref_cnt:
                swapped_in.append((host_block, device_block))
            else:  # freed before it was written: a hash that it got meanwhile is not valid
                self._pool.uncache(block)
                self._host.free((host_block,))
        # Computed here, after the references of the reads were dropped
        swapped_out = [(device, host_block) for host_block, device in saved.items() if self._host.is_used(host_block)]
        self._host.free(host_block for host_block, _ in swapped_in)
        return swapped_out, swapped_in

    @property
    def unwritten_host_blocks(self) -> set[int]:
        """Host blocks that the next plan writes."""
        return set(self._saved)

    @property
    def host_blocks_read(self) -> list[int]:
        """The blocks on the host that are being read, for checks: every entry is a reference."""
        return list(self._restored.values())

    def _restore(self, host_block: int, target: int) -> None:
        self._host.share(host_block)
        self._restored[target] = host_block

    def _forget_target(self, block_id: int) -> None:
        """A block becomes the target of a transfer: drop an earlier one, whose target was freed since."""
        self._copies.pop(block_id, None)
        host_block = self._restored.pop(block_id, None)
        if host_block is not None:
            self._host.free((host_block,))
