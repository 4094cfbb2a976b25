"""Cross tables: the blocks of encoder inputs that decoder branches read and never write. Accounting only.

One table per input, found by the input's content hash and shared by all sequences that read it. The scheduler decides
when the encoder runs.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

from ratoon.core.encoder import EncoderInput
from ratoon.memory.block_pool import Block, BlockPool
from ratoon.memory.growth import GrowthRule
from ratoon.memory.hashing import hash_cross_block, hash_encoder_input
from ratoon.memory.sequence import CrossTable, TokenSequence
from ratoon.memory.swap import SwapSpace
from ratoon.memory.transfers import Transfers


class CrossTables:
    """All tables that sequences hold. When the last holder releases a table, its blocks go to the free list with their
    hashes; while all of them are still cached, the table can be restored from them."""

    def __init__(
        self, pool: BlockPool, swap: SwapSpace, transfers: Transfers, rule: GrowthRule | None, group: int
    ) -> None:
        self._pool = pool
        self._swap = swap
        self._transfers = transfers
        self._rule = rule  # None: the model has no encoder
        self._group = group  # in the prefix cache
        self._held: dict[bytes, CrossTable] = {}  # by key, those that new sequences may get
        self._unwritten: list[CrossTable] = []

    def num_blocks(self, num_positions: int) -> int:
        assert self._rule is not None, "the model has no encoder"
        return self._rule.num_blocks(num_positions)

    def num_missing_for(self, sequence: TokenSequence) -> int:
        """Blocks that leave the free list when a swapped sequence gets its table back."""
        key = self._swap.cross_key_of(sequence)
        return 0 if key is None else self._num_missing(key, self._num_positions(key))

    def is_there(self, sequence: TokenSequence, encoder_input: EncoderInput) -> bool:
        key = hash_encoder_input(sequence.extra_keys.encoded, encoder_input.content_hash)
        return (
            key in self._held
            or self._swap.find_cross(key) is not None
            or self._find_cached(key, encoder_input.num_positions) is not None
        )

    # ---- holders ----

    def attach(self, sequence: TokenSequence, encoder_input: EncoderInput) -> bool:
        """Give a sequence its table; a new one is to be written in this step. False: not enough memory, and nothing
        changed."""
        key = hash_encoder_input(sequence.extra_keys.encoded, encoder_input.content_hash)
        if sequence.cross is not None:
            if sequence.cross.key != key:
                raise ValueError(f"{sequence.branch_id} holds the table of another encoder input")
            return True
        if self._num_missing(key, encoder_input.num_positions) > self._pool.num_free_blocks:
            return False
        self._hold(sequence, key, encoder_input.num_positions, encoder_input)
        return True

    def attach_swapped(self, sequence: TokenSequence) -> None:
        """Attaches a sequence that is being swapped in. There must be enough free blocks."""
        key = self._swap.cross_key_of(sequence)
        if key is not None:
            self._hold(sequence, key, self._num_positions(key), None)

    def share(self, parent: TokenSequence, child: TokenSequence) -> None:
        """Let `child` hold the table of `parent`. Raises ValueError if it holds the table of another input."""
        if parent.cross is None:
            return
        if child.cross is None:
            child.cross = parent.cross
            child.cross.holders[child] = None
        elif child.cross.key != parent.cross.key:
            raise ValueError(f"{child.branch_id} reads another encoder input than {parent.branch_id}")

    def hand_over(self, sequence: TokenSequence, heir: TokenSequence) -> None:
        self.share(sequence, heir)
        self.release(sequence)

    def release(self, sequence: TokenSequence, trusted: bool = True) -> None:
        """Release a sequence's table, if it has one. `trusted=False`: its content may be invalid, so no further
        sequence gets it; the other holders keep it."""
        table = sequence.cross
        if table is None:
            return
        sequence.cross = None
        del table.holders[sequence]
        if not trusted and table.is_findable:
            self._invalidate(table)
        if table.holders:
            return
        if table.encoder_input is not None:
            self._unwritten.remove(table)
        if table.is_findable:
            del self._held[table.key]
            self._swap.keep_cross(table.key, table.blocks)
        self._pool.free_blocks(reversed(table.blocks))

    def take_writes(self) -> list[tuple[str, CrossTable]]:
        """The tables that must be written in the step whose plan is being built, each with the id of a holder. Each is
        returned once, and counts as written from then on."""
        if not self._unwritten:
            return []
        tables, self._unwritten = self._unwritten, []
        writes = []
        for table in tables:
            writes.append((next(iter(table.holders)).branch_id, replace(table)))  # a snapshot
            table.encoder_input = None  # large, and no longer needed
            if table.is_findable:
                self._name_blocks(table)
        return writes

    def check(self, sequences: Iterable[TokenSequence]) -> set[CrossTable]:
        """Raise AssertionError unless tables are held by exactly these sequences. Returns the tables."""
        holders: dict[CrossTable, dict[TokenSequence, None]] = {}
        for sequence in sequences:
            if sequence.cross is not None:
                holders.setdefault(sequence.cross, {})[sequence] = None
        for table, found in holders.items():
            assert table.holders.keys() == found.keys(), "a cross table's holders are not those that reference it"
            assert len(table.blocks) == self.num_blocks(table.num_positions)
            assert table.is_findable == (self._held.get(table.key) is table)
        for key, table in self._held.items():
            assert table in holders, "a cross table has no holders"
            assert table.key == key
        unwritten = {table for table in holders if table.encoder_input is not None}
        assert unwritten == set(self._unwritten), "the unwritten cross tables are not those that have an input"
        return set(holders)

    # ---- helpers ----

    def _invalidate(self, table: CrossTable) -> None:
        table.is_findable = False
        del self._held[table.key]
        self._swap.forget_users(table.key)
        for block in table.blocks:
            self._pool.uncache(block)

    def _num_missing(self, key: bytes, num_positions: int) -> int:
        """0 if a sequence holds the table; otherwise all of its blocks, because cached blocks are free ones too."""
        return 0 if key in self._held else self.num_blocks(num_positions)

    def _num_positions(self, key: bytes) -> int:
        needed = self._swap.find_cross(key)
        assert needed is not None, "a swapped sequence needs a cross table that was not kept"
        return needed.num_positions

    def _hold(self, sequence: TokenSequence, key: bytes, num_positions: int, new: EncoderInput | None) -> None:
        table = self._held.get(key)
        if table is None:
            table = self._held[key] = self._make(key, num_positions, new)
        table.holders[sequence] = None
        sequence.cross = table

    def _make(self, key: bytes, num_positions: int, new: EncoderInput | None) -> CrossTable:
        """Makes a table from the prefix cache, from the host, or from new blocks."""
        cached = self._find_cached(key, num_positions)
        if cached is not None:
            self._pool.touch(cached)
            return CrossTable(key, num_positions, cached, None)
        blocks = self._pool.get_new_blocks(self.num_blocks(num_positions))
        on_host = self._swap.find_cross(key)
        if on_host is not None:
            table = CrossTable(key, num_positions, blocks, None)
            for host_block, block in zip(on_host.host_blocks, blocks, strict=True):
                self._transfers.restore(host_block, block)
            self._name_blocks(table)
            return table
        table = CrossTable(key, num_positions, blocks, new)
        self._unwritten.append(table)
        return table

    def _find_cached(self, key: bytes, num_positions: int) -> list[Block] | None:
        if not self._pool.enable_caching:
            return None
        blocks = []
        for index in range(self.num_blocks(num_positions)):
            block = self._pool.get_cached_block(hash_cross_block(key, index), self._group)
            if block is None:
                return None
            blocks.append(block)
        return blocks

    def _name_blocks(self, table: CrossTable) -> None:
        if self._pool.enable_caching:
            for index, block in enumerate(table.blocks):
                self._pool.cache_full_block(block, hash_cross_block(table.key, index), self._group)
