"""Leases: the blocks of ended sequences, kept so that a continuation computes nothing twice.

A lease holds references like a running sequence does, until its time is over, its budget is needed for a newer one, or
a request needs the memory. Owners (API keys) have equal shares of the budget: leases of the owner that holds most are
evicted first. There is no clock here: the caller passes the time.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, field

from ratoon.core.stats import LeaseStats
from ratoon.memory.block_pool import Block
from ratoon.memory.kv_cache_manager import KVCacheManager
from ratoon.memory.sequence import CrossTable, TokenSequence


@dataclass(slots=True, eq=False)
class Lease:
    sequence: TokenSequence  # the ended sequence with its memory; read-only
    expires_at: float
    owner: str | None = None
    root_id: str = ""  # the id by which its owner knows the request that ended; for displays
    is_superseded: bool = False  # a later text of its session contains it
    waiting: set[str] = field(default_factory=set)  # queued continuations: it does not expire before they run


class BlockCount:
    """The blocks that a set of leases holds: a block that several share counts once."""

    __slots__ = ("cross", "holders", "num_cross_blocks", "num_leases")

    def __init__(self) -> None:
        self.holders: dict[int, int] = {}  # block id → leases that hold it
        self.cross: dict[CrossTable, int] = {}  # cross tables likewise: their blocks are held all or none
        self.num_cross_blocks = 0
        self.num_leases = 0

    @property
    def num_blocks(self) -> int:
        return len(self.holders) + self.num_cross_blocks

    def add(self, blocks: list[Block], table: CrossTable | None) -> None:
        self.num_leases += 1
        for block in blocks:
            self.holders[block.block_id] = self.holders.get(block.block_id, 0) + 1
        if table is not None:
            if table not in self.cross:
                self.num_cross_blocks += len(table.blocks)
            self.cross[table] = self.cross.get(table, 0) + 1

    def remove(self, blocks: list[Block], table: CrossTable | None) -> None:
        self.num_leases -= 1
        for block in blocks:
            left = self.holders.pop(block.block_id) - 1
            if left:
                self.holders[block.block_id] = left
        if table is not None:
            left = self.cross.pop(table) - 1
            if left:
                self.cross[table] = left
            else:
                self.num_cross_blocks -= len(table.blocks)


class LeaseTable:
    """All leases by the id of the branch that ended, the oldest first. Together they hold `budget` blocks at most."""

    def __init__(self, kv_cache: KVCacheManager, budget: int) -> None:
        self.budget = budget
        self.stats = LeaseStats()
        self._kv_cache = kv_cache
        self._leases: dict[str, Lease] = {}
        self._total = BlockCount()
        self._by_owner: dict[str | None, BlockCount] = {}  # of those that have leases

    def __len__(self) -> int:
        return len(self._leases)

    @property
    def num_blocks(self) -> int:
        return self._total.num_blocks

    def owners(self) -> AbstractSet[str | None]:
        """Owners that have leases."""
        return self._by_owner.keys()

    def num_blocks_of(self, owner: str | None) -> int:
        count = self._by_owner.get(owner)
        return 0 if count is None else count.num_blocks

    def __iter__(self) -> Iterator[Lease]:
        return iter(self._leases.values())

    def is_leased_only(self, block: Block) -> bool:
        """Whether all references to a block are those of leases. Blocks of cross tables are counted by table:
        `cross_blocks` has these."""
        return block.ref_cnt == self._total.holders.get(block.block_id, 0)

    def cross_blocks(self) -> dict[int, bool]:
        """The blocks of cross tables that leases hold, and of each, whether only leases do."""
        return {
            block.block_id: len(table.holders) == count
            for table, count in self._total.cross.items()
            for block in table.blocks
        }

    def sequences(self) -> list[TokenSequence]:
        return [lease.sequence for lease in self._leases.values()]

    def find(self, branch_id: str) -> TokenSequence | None:
        lease = self._leases.get(branch_id)
        return None if lease is None else lease.sequence

    def grant(
        self, branch: TokenSequence, expires_at: float, owner: str | None = None, root_id: str | None = None
    ) -> bool:
        """Take over the memory of an ended sequence, evicting the oldest leases of the owner that holds most as needed.
        False: it is larger than the whole budget, and it still has its memory."""
        if self._num_blocks_of(branch) > self.budget:
            self.stats.refused += 1
            return False
        self.end(branch.branch_id)  # an earlier lease with the same id
        sequence = self._kv_cache.detach(branch)
        lease = self._leases[sequence.branch_id] = Lease(sequence, expires_at, owner, root_id or sequence.branch_id)
        self._count(lease)
        self.stats.granted += 1
        while self.num_blocks > self.budget:
            chosen = self._next_victim(self._leases.values())
            assert chosen is not None
            self._evict(chosen)
        return True

    def end(self, branch_id: str) -> bool:
        """End a lease and free its memory. False: there is none."""
        lease = self._leases.get(branch_id)
        if lease is None:
            return False
        self._remove(lease)
        return True

    def end_all(self) -> None:
        for lease in list(self._leases.values()):
            self._remove(lease)

    def expire(self, now: float) -> None:
        """End expired leases. A lease with queued continuations is kept until they have it."""
        for lease in [lease for lease in self._leases.values() if lease.expires_at <= now and not lease.waiting]:
            self._remove(lease)
            self.stats.expired += 1

    def next_expiry(self) -> float | None:
        return min((lease.expires_at for lease in self._leases.values() if not lease.waiting), default=None)

    def evict_one(self, sparing: Collection[str | None] = ()) -> bool:
        """Evict a lease because a request needs memory: the oldest of the owner that holds most, those without queued
        continuations first. False: there is none apart from those of owners in `sparing`."""
        candidates: Collection[Lease] = self._leases.values()
        if sparing:
            candidates = [lease for lease in candidates if lease.owner not in sparing]
        free = self._next_victim(lease for lease in candidates if not lease.waiting)
        chosen = self._next_victim(candidates) if free is None else free
        if chosen is None:
            return False
        self._evict(chosen)
        return True

    def owners_within_share(self) -> set[str | None]:
        """Owners that hold no more than an equal share of the budget."""
        share = self.budget // max(1, len(self._by_owner))
        return {owner for owner, count in self._by_owner.items() if count.num_blocks <= share}

    def _next_victim(self, leases: Iterable[Lease]) -> Lease | None:
        """The oldest lease of the owner that holds most. `leases` has the oldest first."""
        if len(self._by_owner) <= 1:
            return next(iter(leases), None)
        return max(leases, key=lambda lease: self._by_owner[lease.owner].num_blocks, default=None)

    def num_reclaimable_blocks(self, sparing: Collection[str | None] = ()) -> int:
        """Blocks that would become free if all leases ended, except those of owners in `sparing`: blocks that no other
        sequence holds."""
        pool_blocks = self._kv_cache.pool.blocks
        total = self._total
        if sparing:
            total = BlockCount()
            for lease in self._leases.values():
                if lease.owner not in sparing:
                    total.add(self._blocks_of(lease.sequence), lease.sequence.cross)
        num_blocks = sum(pool_blocks[block_id].ref_cnt == count for block_id, count in total.holders.items())
        return num_blocks + sum(
            len(table.blocks) for table, count in total.cross.items() if len(table.holders) == count
        )

    def await_continuation(self, branch_id: str, request_id: str) -> None:
        lease = self._leases.get(branch_id)
        if lease is not None:
            lease.waiting.add(request_id)

    def continuation_left(self, branch_id: str, request_id: str) -> None:
        """The continuation has inherited the lease's memory, or was cancelled."""
        lease = self._leases.get(branch_id)
        if lease is not None:
            lease.waiting.discard(request_id)

    def note_superseded(self, branch_ids: Iterable[str]) -> None:
        """Later texts of their sessions have superseded these. Their leases stay what they are, and what only they held
        is the first to go when they end."""
        for branch_id in branch_ids:
            if branch_id in self._leases:
                self._leases[branch_id].is_superseded = True

    def snapshot(self) -> LeaseStats:
        stats = self.stats
        return LeaseStats(
            len(self), self.num_blocks, stats.granted, stats.refused, stats.expired, stats.evicted, stats.continued
        )

    def check(self) -> None:
        """Raise AssertionError unless the count of blocks is that of the leases' tables."""
        recount = LeaseTable(self._kv_cache, self.budget)
        for lease in self._leases.values():
            recount._count(lease)
        counts = [(recount._total, self._total)]
        assert recount._by_owner.keys() == self._by_owner.keys(), "owners without leases, or the reverse"
        counts += [(count, self._by_owner[owner]) for owner, count in recount._by_owner.items()]
        for fresh, kept in counts:
            assert fresh.holders == kept.holders and fresh.cross == kept.cross, "leased blocks are miscounted"
            assert fresh.num_blocks == kept.num_blocks
        assert self.num_blocks <= self.budget, f"{self.num_blocks} blocks are leased, {self.budget} may be"

    def _evict(self, lease: Lease) -> None:
        self._remove(lease)
        self.stats.evicted += 1

    def _remove(self, lease: Lease) -> None:
        sequence = lease.sequence
        del self._leases[sequence.branch_id]
        self._uncount(lease)
        hashes, num_tokens = sequence.block_hashes, sequence.num_computed_tokens
        self._kv_cache.free(sequence)
        if lease.is_superseded:
            self._kv_cache.sessions.let_lease_go(hashes, num_tokens)

    def _count(self, lease: Lease) -> None:
        blocks, table = self._blocks_of(lease.sequence), lease.sequence.cross
        self._kv_cache.pool.note_changed(blocks)
        self._total.add(blocks, table)
        self._by_owner.setdefault(lease.owner, BlockCount()).add(blocks, table)

    def _uncount(self, lease: Lease) -> None:
        blocks, table = self._blocks_of(lease.sequence), lease.sequence.cross
        self._kv_cache.pool.note_changed(blocks)
        self._total.remove(blocks, table)
        own = self._by_owner[lease.owner]
        own.remove(blocks, table)
        if not own.num_leases:
            del self._by_owner[lease.owner]

    def _blocks_of(self, sequence: TokenSequence) -> list[Block]:
        null = self._kv_cache.pool.null_block
        return [block for table in sequence.block_tables for block in table if block is not null]

    def _num_blocks_of(self, sequence: TokenSequence) -> int:
        return len(self._blocks_of(sequence)) + (0 if sequence.cross is None else len(sequence.cross.blocks))
