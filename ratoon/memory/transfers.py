"""What the next plan moves: copies on write, blocks that go to the host, and blocks that come back from it.

Sees to it that each transfer reads a place that has the content by then. Who moves, and where to, is decided elsewhere.
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

    The target of a transfer has its content only afterwards. So whoever copies or saves it in the same step is pointed
    to the place that the content comes from. Each block is the target of one transfer at most: where it was given back
    and taken for another one, the later counts. A block that was given back and then taken for new tokens may be
    written by the earlier transfer all the same: the step writes its tokens behind that.
    """

    def __init__(self, pool: BlockPool, host: HostPool) -> None:
        self._pool = pool
        self._host = host
        self._copies: dict[int, BlockCopy] = {}  # by the block that is written to
        self._saved: dict[int, int] = {}  # host block → device block that is read
        self._restored: dict[int, int] = {}  # device block → host block that is read; it has a reference until then

    def copy(self, branch_id: str, group: int, place: int, source: int, target: int) -> None:
        """Give a table entry a block of its own. Where the content comes from the host in this step, so does the
        copy: a branch that holds such a block is new to the runner, and sends its tables in full."""
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
        """Free host blocks that it takes to save all these."""
        return sum(block.block_id not in self._restored for block in blocks)

    def save(self, block: Block) -> int:
        """A host block with the content of this one, and a reference to it."""
        if block.block_id in self._restored:  # it is on the host still
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
        """The copies on write, in order. They are handed over once."""
        copies, self._copies = self._copies, {}
        return list(copies.values())

    def take_swaps(self) -> tuple[list[BlockSwap], list[BlockSwap]]:
        """What goes to the host, and what comes back. They are handed over once; from then on the host blocks that are
        read are free, unless somebody else holds them."""
        if not self._saved and not self._restored:
            return [], []
        restored, self._restored = self._restored, {}
        saved, self._saved = self._saved, {}
        swapped_in = []
        for device_block, host_block in restored.items():
            block = self._pool.blocks[device_block]
            if block.ref_cnt:
                swapped_in.append((host_block, device_block))
            else:  # given back before it was written: whatever name it has got, it does not deserve it
                self._pool.uncache(block)
                self._host.free((host_block,))
        # Here, where host blocks that only those had read are free, and those that are read are not
        swapped_out = [(device, host_block) for host_block, device in saved.items() if self._host.is_used(host_block)]
        self._host.free(host_block for host_block, _ in swapped_in)
        return swapped_out, swapped_in

    @property
    def unwritten_host_blocks(self) -> set[int]:
        """Those that only the next plan writes to."""
        return set(self._saved)

    @property
    def host_blocks_read(self) -> list[int]:
        """For checks: every entry is a reference."""
        return list(self._restored.values())

    def _restore(self, host_block: int, target: int) -> None:
        self._host.share(host_block)
        self._restored[target] = host_block

    def _forget_target(self, block_id: int) -> None:
        """A block is taken for a transfer: an earlier one to it was for somebody who has given it back."""
        self._copies.pop(block_id, None)
        host_block = self._restored.pop(block_id, None)
        if host_block is not None:
            self._host.free((host_block,))
