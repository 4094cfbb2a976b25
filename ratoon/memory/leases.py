"""Leases: the blocks of ended sequences, kept so that a continuation computes nothing twice.

A lease holds references like a running sequence does, until its time is over, its budget is needed for a newer one, or
a request needs the memory. Owners (API keys) have equal shares of the budget: leases of the owner that holds most give
way first. One that gives way moves down, if it can: to host memory, where it holds its full blocks, and from there,
when others need that memory, to a connector that has them. There is no clock here: the caller passes the time.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, field

import msgspec

from ratoon.core.kv_connector import block_key
from ratoon.core.request import EndedLease, InheritedFrom
from ratoon.core.stats import LeaseStats
from ratoon.memory.block_pool import Block
from ratoon.memory.hashing import ExtraKeys
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

    @property
    def branch_id(self) -> str:
        return self.sequence.branch_id


@dataclass(slots=True, eq=False)
class MovedLease:
    """A lease that gave its place on the device up."""

    branch_id: str
    expires_at: float
    owner: str | None
    root_id: str
    num_tokens: int
    last_key: bytes  # of its last full block
    slots: list[Block]  # of host memory, each with a reference; empty: the connector has its blocks
    waiting: set[str]

    @property
    def place(self) -> InheritedFrom:
        return InheritedFrom.HOST if self.slots else InheritedFrom.FILES


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


SHARE_OF_HOST_MEMORY = 0.5  # that leases hold at most


class LeaseTable:
    """All leases by the id of the branch that ended, the oldest first. Together they hold `budget` blocks at most."""

    def __init__(self, kv_cache: KVCacheManager, budget: int) -> None:
        self.budget = budget
        self.stats = LeaseStats()
        self._kv_cache = kv_cache
        self._leases: dict[str, Lease] = {}
        self._moved: dict[str, MovedLease] = {}
        self._total = BlockCount()
        if kv_cache.store.make_room is None:  # a table that recounts another one's leases holds no slots
            kv_cache.store.make_room = self._free_slots
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

    def moved(self) -> list[MovedLease]:
        """Returns the leases that are not on the device any more."""
        return list(self._moved.values())

    def moved_slots(self) -> list[Block]:
        return [slot for lease in self._moved.values() for slot in lease.slots]

    def place_of(self, branch_id: str) -> InheritedFrom | None:
        """Where a lease has moved to. None: there is none, or it is on the device."""
        lease = self._moved.get(branch_id)
        return None if lease is None else lease.place

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

    def restore(self, lease: EndedLease, extra_keys: ExtraKeys, now: float) -> bool:
        """A lease of an earlier process goes on, with its blocks in the connector. False: they are not there, or such
        leases hold as many tokens as the budget has room for."""
        budget = self.budget * self._kv_cache.block_size
        num_tokens = sum(one.num_tokens for one in self._moved.values() if not one.slots)
        if lease.branch_id in self._moved or num_tokens + len(lease.token_ids) > budget:
            return False
        key = self._kv_cache.last_key_of(lease.token_ids, extra_keys)
        if key is None or not self._is_in_connector(key):
            return False
        self._moved[lease.branch_id] = MovedLease(
            lease.branch_id, now + lease.seconds, lease.owner, lease.root_id, len(lease.token_ids), key, [], set()
        )
        return True

    def end(self, branch_id: str) -> bool:
        """End a lease and free its memory. False: there is none."""
        moved = self._moved.get(branch_id)
        if moved is not None:
            self._drop(moved)
        lease = self._leases.get(branch_id)
        if lease is not None:
            self._remove(lease)
        return moved is not None or lease is not None

    def end_all(self) -> None:
        for lease in list(self._leases.values()):
            self._remove(lease)
        for moved in list(self._moved.values()):
            self._drop(moved)

    def expire(self, now: float) -> None:
        """End expired leases. A lease with queued continuations is kept until they have it."""
        for lease in [lease for lease in self._leases.values() if lease.expires_at <= now and not lease.waiting]:
            self._remove(lease)
            self.stats.expired += 1
        for moved in [one for one in self._moved.values() if one.expires_at <= now and not one.waiting]:
            self._drop(moved)
            self.stats.expired += 1

    def next_expiry(self) -> float | None:
        every: list[Lease | MovedLease] = [*self._leases.values(), *self._moved.values()]
        return min((lease.expires_at for lease in every if not lease.waiting), default=None)

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
        lease = self._leases.get(branch_id) or self._moved.get(branch_id)
        if lease is not None:
            lease.waiting.add(request_id)

    def continuation_left(self, branch_id: str, request_id: str) -> None:
        """The continuation has inherited the lease's memory, or was cancelled."""
        lease = self._leases.get(branch_id) or self._moved.get(branch_id)
        if lease is not None:
            lease.waiting.discard(request_id)

    def note_superseded(self, branch_ids: Iterable[str]) -> None:
        """Later texts of their sessions have superseded these. Their leases stay what they are, and what only they held
        is the first to go when they end."""
        for branch_id in branch_ids:
            if branch_id in self._leases:
                self._leases[branch_id].is_superseded = True

    def snapshot(self) -> LeaseStats:
        num_in_host_memory = sum(bool(lease.slots) for lease in self._moved.values())
        return msgspec.structs.replace(
            self.stats,
            num_active=len(self),
            num_blocks=self.num_blocks,
            num_in_host_memory=num_in_host_memory,
            num_in_files=len(self._moved) - num_in_host_memory,
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

    # ---- leases that give way ----

    def _evict(self, lease: Lease) -> None:
        moved = self._move_down(lease)
        self._remove(lease)
        if moved is None:
            self.stats.evicted += 1
        else:
            self._moved[moved.branch_id] = moved
            self.stats.moved += 1

    def _move_down(self, lease: Lease) -> MovedLease | None:
        """Let host memory have the full blocks of a lease; those behind are computed again. None: there is no room,
        and no connector has them."""
        kv_cache, store, sequence = self._kv_cache, self._kv_cache.store, lease.sequence
        tier = store.tier
        full = kv_cache.full_blocks(sequence) if tier is not None and kv_cache.enable_caching else []
        if tier is None or not full:
            return None
        last_key = block_key(full[-1][2], full[-1][1])
        every: list[tuple[Block, bytes | None, int]] = [*full]
        if sequence.cross is not None and sequence.cross.is_settled:
            every += kv_cache.cross_tables.named_blocks(sequence.cross)
        most = int(tier.num_usable_blocks * SHARE_OF_HOST_MEMORY)
        slots: list[Block] | None = None
        if len(every) <= most:
            for other in self._in_host_memory():
                if len(self.moved_slots()) + len(every) <= most:
                    break
                self._move_to_files(other)
            slots = store.keep(every)
        if slots is None and not self._is_in_connector(last_key):
            return None
        num_tokens = sequence.num_tokens
        return MovedLease(
            lease.branch_id,
            lease.expires_at,
            lease.owner,
            lease.root_id,
            num_tokens,
            last_key,
            slots or [],
            lease.waiting,
        )

    def _in_host_memory(self) -> list[MovedLease]:
        """Returns the leases in host memory: first those without queued continuations, and the oldest first in each of
        the two groups."""
        return sorted((lease for lease in self._moved.values() if lease.slots), key=lambda lease: bool(lease.waiting))

    def _free_slots(self, num_slots: int) -> None:
        """So many slots of host memory are to be free: leases give theirs up, the oldest first."""
        tier = self._kv_cache.store.tier
        assert tier is not None
        for lease in self._in_host_memory():
            if tier.num_free_blocks >= num_slots:
                return
            self._move_to_files(lease)

    def _move_to_files(self, lease: MovedLease) -> None:
        """A lease gives its slots up. It ends, unless a connector has its blocks."""
        self._kv_cache.store.release(lease.slots)
        lease.slots = []
        if not self._is_in_connector(lease.last_key):
            del self._moved[lease.branch_id]
            self.stats.evicted += 1

    def _is_in_connector(self, key: bytes) -> bool:
        index = self._kv_cache.store.index
        return index is not None and index.find(key)

    def _drop(self, lease: MovedLease) -> None:
        del self._moved[lease.branch_id]
        if lease.slots:
            self._kv_cache.store.release(lease.slots)

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
