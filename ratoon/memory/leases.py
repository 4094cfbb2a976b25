"""Leases: the blocks of ended sequences, kept so that a continuation computes nothing twice.

A lease holds references like a running sequence does, until its time is over, its budget is needed for a newer one, or
a request needs the memory. Knows no clock: whoever asks says what time it is.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from ratoon.core.stats import LeaseStats
from ratoon.memory.block_pool import Block
from ratoon.memory.cross_tables import CrossTable
from ratoon.memory.kv_cache_manager import KVCacheManager
from ratoon.memory.sequence import TokenSequence


@dataclass(slots=True, eq=False)
class Lease:
    sequence: TokenSequence  # what ended, with its memory; nobody writes to it any more
    expires_at: float
    waiting: set[str] = field(default_factory=set)  # continuations that are on their way: its end waits for them


class LeaseTable:
    """All leases by the id of the branch that ended, the oldest first. Together they hold `budget` blocks at most."""

    def __init__(self, kv_cache: KVCacheManager, budget: int) -> None:
        self.budget = budget
        self.stats = LeaseStats()
        self._kv_cache = kv_cache
        self._leases: dict[str, Lease] = {}
        self._holders: dict[int, int] = {}  # block id → leases that hold it: a shared block counts once
        self._cross: dict[CrossTable, int] = {}  # cross tables in the same way: their blocks are held all or none
        self._num_cross_blocks = 0

    def __len__(self) -> int:
        return len(self._leases)

    @property
    def num_blocks(self) -> int:
        return len(self._holders) + self._num_cross_blocks

    def sequences(self) -> list[TokenSequence]:
        return [lease.sequence for lease in self._leases.values()]

    def find(self, branch_id: str) -> TokenSequence | None:
        lease = self._leases.get(branch_id)
        return None if lease is None else lease.sequence

    def grant(self, branch: TokenSequence, expires_at: float) -> bool:
        """Take the memory of a sequence that has ended over. The oldest leases make room for it. False: it is larger
        than the whole budget, and its memory is still its own."""
        if self._num_blocks_of(branch) > self.budget:
            self.stats.refused += 1
            return False
        self.end(branch.branch_id)  # an id that was used before
        sequence = self._kv_cache.detach(branch)
        self._leases[sequence.branch_id] = Lease(sequence, expires_at)
        self._count(sequence)
        self.stats.granted += 1
        while self.num_blocks > self.budget:
            self._evict(next(iter(self._leases.values())))
        return True

    def end(self, branch_id: str) -> bool:
        """Give a lease's memory back now. False: there is none."""
        lease = self._leases.get(branch_id)
        if lease is None:
            return False
        self._remove(lease)
        return True

    def end_all(self) -> None:
        for lease in list(self._leases.values()):
            self._remove(lease)

    def expire(self, now: float) -> None:
        """End what is over. A lease that a continuation is on its way to goes on until that one has it."""
        for lease in [lease for lease in self._leases.values() if lease.expires_at <= now and not lease.waiting]:
            self._remove(lease)
            self.stats.expired += 1

    def next_expiry(self) -> float | None:
        return min((lease.expires_at for lease in self._leases.values() if not lease.waiting), default=None)

    def evict_one(self) -> bool:
        """A request needs memory: the oldest lease goes, of those that nobody is on his way to if there are any."""
        if not self._leases:
            return False
        free = next((lease for lease in self._leases.values() if not lease.waiting), None)
        self._evict(free if free is not None else next(iter(self._leases.values())))
        return True

    def num_reclaimable_blocks(self) -> int:
        """Blocks that would be free if all leases ended: nobody else holds them."""
        blocks = self._kv_cache.pool.blocks
        num_blocks = sum(blocks[block_id].ref_cnt == count for block_id, count in self._holders.items())
        return num_blocks + sum(
            len(table.blocks) for table, count in self._cross.items() if len(table.holders) == count
        )

    def await_continuation(self, branch_id: str, request_id: str) -> None:
        lease = self._leases.get(branch_id)
        if lease is not None:
            lease.waiting.add(request_id)

    def continuation_left(self, branch_id: str, request_id: str) -> None:
        """It has what it wanted, or it is gone."""
        lease = self._leases.get(branch_id)
        if lease is not None:
            lease.waiting.discard(request_id)

    def snapshot(self) -> LeaseStats:
        stats = self.stats
        return LeaseStats(
            len(self), self.num_blocks, stats.granted, stats.refused, stats.expired, stats.evicted, stats.continued
        )

    def check(self) -> None:
        """Raise AssertionError unless the count of blocks is that of the leases' tables."""
        recount = LeaseTable(self._kv_cache, self.budget)
        for sequence in self.sequences():
            recount._count(sequence)
        assert recount._holders == self._holders and recount._cross == self._cross, "leased blocks are miscounted"
        assert recount.num_blocks == self.num_blocks
        assert self.num_blocks <= self.budget, f"{self.num_blocks} blocks are leased, {self.budget} may be"

    def _evict(self, lease: Lease) -> None:
        self._remove(lease)
        self.stats.evicted += 1

    def _remove(self, lease: Lease) -> None:
        sequence = lease.sequence
        del self._leases[sequence.branch_id]
        self._uncount(sequence)
        self._kv_cache.free(sequence)

    def _count(self, sequence: TokenSequence) -> None:
        for block in self._blocks_of(sequence):
            self._holders[block.block_id] = self._holders.get(block.block_id, 0) + 1
        table = sequence.cross
        if table is not None:
            if table not in self._cross:
                self._num_cross_blocks += len(table.blocks)
            self._cross[table] = self._cross.get(table, 0) + 1

    def _uncount(self, sequence: TokenSequence) -> None:
        for block in self._blocks_of(sequence):
            left = self._holders.pop(block.block_id) - 1
            if left:
                self._holders[block.block_id] = left
        table = sequence.cross
        if table is not None:
            left = self._cross.pop(table) - 1
            if left:
                self._cross[table] = left
            else:
                self._num_cross_blocks -= len(table.blocks)

    def _blocks_of(self, sequence: TokenSequence) -> list[Block]:
        null = self._kv_cache.pool.null_block
        return [block for table in sequence.block_tables for block in table if block is not null]

    def _num_blocks_of(self, sequence: TokenSequence) -> int:
        return len(self._blocks_of(sequence)) + (0 if sequence.cross is None else len(sequence.cross.blocks))
