"""The host side of swapping: which host blocks hold which sequence. Accounting only. A swapped sequence also needs its
cross table, which other sequences may hold on the device or need on the host: it is kept by key, once for all of them.
Beams are swapped with their trunk, all or none; a block that several of them share is on the host once. The scheduler
decides when to swap; the device side is the KVCacheManager's.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, field

from ratoon.memory.block_pool import Block, BlockPool
from ratoon.memory.host_pool import HostPool
from ratoon.memory.sequence import TokenSequence
from ratoon.memory.transfers import Transfers

Tables = list[list[Block]]  # one list of table entries for each KV group
HostTables = list[list[int | None]]  # the same in host blocks; None for the null block


@dataclass(slots=True, eq=False)
class HostCopy:
    """What a sequence held when it was swapped out. Every table entry is a reference."""

    tables: HostTables
    num_computed_tokens: int
    cross_key: bytes | None
    tails: list[HostTables]  # tables of the beams, if it is the trunk of a search
    num_tail_tokens: int  # computed tokens of each beam, the trunk's included

    @property
    def own_host_blocks(self) -> list[int]:
        return _host_blocks_of(self.tables)

    @property
    def host_blocks(self) -> list[int]:
        return self.own_host_blocks + [host_block for tail in self.tails for host_block in _host_blocks_of(tail)]


@dataclass(slots=True, eq=False)
class HostCross:
    """A cross table that swapped sequences need."""

    num_positions: int
    host_blocks: list[int] = field(default_factory=list)  # empty: a sequence holds it on the device
    users: dict[TokenSequence, None] = field(default_factory=dict)


class SwapSpace:
    def __init__(self, pool: BlockPool, host: HostPool, transfers: Transfers) -> None:
        self._pool = pool
        self._host = host
        self._transfers = transfers
        self._copies: dict[TokenSequence, HostCopy] = {}
        self._cross: dict[bytes, HostCross] = {}

    def __contains__(self, sequence: TokenSequence) -> bool:
        return sequence in self._copies

    def num_blocks_of(self, sequence: TokenSequence) -> int:
        """Device blocks needed to restore a sequence, without its cross table and beams."""
        return len(self._copies[sequence].own_host_blocks)

    def num_columns_of(self, sequence: TokenSequence) -> int:
        return max(map(len, self._copies[sequence].tables), default=0)

    def num_computed_tokens_of(self, sequence: TokenSequence) -> int:
        return self._copies[sequence].num_computed_tokens

    def num_tail_tokens_of(self, sequence: TokenSequence) -> int:
        """Computed tokens of each beam of a trunk; 0 where no beams are on the host."""
        copy = self._copies.get(sequence)
        return 0 if copy is None else copy.num_tail_tokens

    def find_cross(self, key: bytes) -> HostCross | None:
        return self._cross.get(key)

    def cross_key_of(self, sequence: TokenSequence) -> bytes | None:
        return self._copies[sequence].cross_key

    # ---- out and in ----

    def save(self, sequence: TokenSequence, tails: Sequence[Tables] = (), num_tail_tokens: int = 0) -> bool:
        """Copy what a sequence holds to the host, and `tails`, the tables of its beams. False: not enough host blocks,
        or its cross table is not written or not valid, and nothing changed. The sequence still holds its device blocks.
        Its cross table is copied when its last holder releases it (keep_cross)."""
        if sequence in self._copies:
            raise ValueError(f"{sequence.branch_id} is swapped out already")
        cross = sequence.cross
        if (cross is not None and not cross.is_settled) or not self._has_room_for(sequence, tails):
            return False
        saved: dict[int, int] = {}
        self._copies[sequence] = HostCopy(
            self._save_tables(sequence.block_tables, saved),
            sequence.num_computed_tokens,
            None if cross is None else cross.key,
            [self._save_tables(tail, saved) for tail in tails],
            num_tail_tokens,
        )
        if cross is not None:
            self._cross.setdefault(cross.key, HostCross(cross.num_positions)).users[sequence] = None
        return True

    def restore(self, sequence: TokenSequence) -> list[Tables]:
        """Restore a sequence's tables in new device blocks, and return those of its beams. There must be enough free
        blocks."""
        copy = self._copies[sequence]
        restored: dict[int, Block] = {}
        sequence.block_tables = self._restore_tables(copy.tables, restored)
        tails = [self._restore_tables(tail, restored) for tail in copy.tails]
        sequence.num_computed_tokens = copy.num_computed_tokens
        self.forget(sequence)
        return tails

    def keep_cross(self, key: bytes, blocks: list[Block]) -> None:
        """A cross table is about to leave the device. If swapped sequences need it, copy it to the host; if there is no
        room for it, they are computed again."""
        needed = self._cross.get(key)
        if needed is None or needed.host_blocks:
            return
        if self._transfers.num_to_save(blocks) <= self._host.num_free_blocks:
            needed.host_blocks = [self._transfers.save(block) for block in blocks]
        else:
            self.forget_users(key)

    def forget(self, sequence: TokenSequence) -> None:
        """Free a sequence's host blocks, if any. It has no memory afterwards."""
        if sequence in self._copies:
            self.forget_cross(sequence)
            self._host.free(self._copies.pop(sequence).host_blocks)

    def forget_cross(self, sequence: TokenSequence) -> None:
        copy = self._copies.get(sequence)
        if copy is None or copy.cross_key is None:
            return
        needed = self._cross[copy.cross_key]
        del needed.users[sequence]
        if not needed.users:
            self._host.free(needed.host_blocks)
            del self._cross[copy.cross_key]
        copy.cross_key = None

    def forget_users(self, key: bytes) -> None:
        """A cross table is invalid or lost: sequences that need it are computed again."""
        needed = self._cross.get(key)
        for sequence in [] if needed is None else list(needed.users):
            self.forget(sequence)

    def forget_invalid(self, host_blocks: Collection[int]) -> None:
        """The content of these host blocks, and of those not written yet, is undefined: sequences that would read them
        are computed again."""
        lost = self._transfers.unwritten_host_blocks.union(host_blocks)
        for key, needed in list(self._cross.items()):
            if not set(needed.host_blocks).isdisjoint(lost):
                self.forget_users(key)
        for sequence, copy in list(self._copies.items()):
            if not set(copy.host_blocks).isdisjoint(lost):
                self.forget(sequence)

    def check(self, sequences: Iterable[TokenSequence]) -> None:
        """Raise AssertionError unless host blocks are exactly those of swapped sequences and of pending reads."""
        known = set(sequences)
        entries = self._transfers.host_blocks_read
        for sequence, copy in self._copies.items():
            assert sequence in known, f"{sequence.branch_id} has ended but has host blocks"
            assert not sequence.block_tables and sequence.cross is None, (
                f"{sequence.branch_id} is not swapped out whole"
            )
            assert copy.cross_key is None or sequence in self._cross[copy.cross_key].users
            entries += copy.host_blocks
        for needed in self._cross.values():
            assert needed.users, "a cross table on the host has no users"
            assert needed.users.keys() <= self._copies.keys(), "a user of a cross table on the host is not swapped out"
            entries += needed.host_blocks
        expected: dict[int, int] = {}
        for host_block in entries:
            expected[host_block] = expected.get(host_block, 0) + 1
        self._host.check(expected)

    def _has_room_for(self, sequence: TokenSequence, tails: Sequence[Tables]) -> bool:
        null, cross = self._pool.null_block, sequence.cross
        every = [block for tables in (sequence.block_tables, *tails) for table in tables for block in table]
        blocks = list({block.block_id: block for block in every if block is not null}.values())
        if cross is not None and len(cross.holders) == 1:
            needed = self._cross.get(cross.key)
            if needed is None or not needed.host_blocks:
                blocks += cross.blocks
        return self._transfers.num_to_save(blocks) <= self._host.num_free_blocks

    def _save_tables(self, tables: Tables, saved: dict[int, int]) -> HostTables:
        """`saved`: device block → host block, of blocks already saved."""
        return [[self._save_block(block, saved) for block in table] for table in tables]

    def _save_block(self, block: Block, saved: dict[int, int]) -> int | None:
        if block is self._pool.null_block:
            return None
        if block.block_id in saved:
            self._host.share(saved[block.block_id])
        else:
            saved[block.block_id] = self._transfers.save(block)
        return saved[block.block_id]

    def _restore_tables(self, tables: HostTables, restored: dict[int, Block]) -> Tables:
        """`restored`: host block → device block, of blocks already restored."""
        return [[self._restore_block(host_block, restored) for host_block in table] for table in tables]

    def _restore_block(self, host_block: int | None, restored: dict[int, Block]) -> Block:
        if host_block is None:
            return self._pool.null_block
        if host_block in restored:
            self._pool.touch((restored[host_block],))
        else:
            (restored[host_block],) = self._pool.get_new_blocks(1)
            self._transfers.restore(host_block, restored[host_block])
        return restored[host_block]


def _host_blocks_of(tables: HostTables) -> list[int]:
    return [host_block for table in tables for host_block in table if host_block is not None]
