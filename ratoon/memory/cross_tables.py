"""Cross tables: the blocks of encoder inputs that decoder branches read and never write. Accounting only.

One table per input, found by the input's content hash and shared by all sequences that read it. The scheduler decides
when the encoder runs.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

from ratoon.core.encoder import EncoderInput
from ratoon.memory.block_pool import Block, BlockPool
from ratoon.memory.block_store import BlockStore, Lookup
from ratoon.memory.growth import GrowthRule
from ratoon.memory.hashing import hash_cross_block, hash_encoder_input
from ratoon.memory.sequence import CrossTable, TokenSequence


class CrossTables:
    """All tables that sequences hold. When the last holder releases a table, its blocks go to the free list with their
    hashes; while all of them are still cached, or in the block store, the table can be restored from them."""

    def __init__(self, pool: BlockPool, store: BlockStore, rule: GrowthRule | None, group: int) -> None:
        self._pool = pool
        self._store = store
        self._rule = rule  # None: the model has no encoder
        self._group = group  # in the prefix cache
        self._held: dict[bytes, CrossTable] = {}  # by key, those that new sequences may get
        self._unwritten: list[CrossTable] = []

    def num_blocks(self, num_positions: int) -> int:
        assert self._rule is not None, "the model has no encoder"
        return self._rule.num_blocks(num_positions)

    def is_there(self, sequence: TokenSequence, encoder_input: EncoderInput, may_load: bool = True) -> bool:
        key = hash_encoder_input(sequence.extra_keys.encoded, encoder_input.content_hash)
        return key in self._held or self._find(key, encoder_input.num_positions, may_load) is not None

    def num_missing(self, sequence: TokenSequence, encoder_input: EncoderInput) -> int:
        """0 if a sequence holds the table; otherwise all of its blocks, because cached blocks are free ones too."""
        key = hash_encoder_input(sequence.extra_keys.encoded, encoder_input.content_hash)
        return 0 if key in self._held else self.num_blocks(encoder_input.num_positions)

    def is_settled(self, sequence: TokenSequence, encoder_input: EncoderInput) -> bool:
        """Whether this input's table needs no run of the encoder, not even one in the step being planned."""
        key = hash_encoder_input(sequence.extra_keys.encoded, encoder_input.content_hash)
        table = self._held.get(key)
        return table.is_settled if table is not None else self._find(key, encoder_input.num_positions) is not None

    def named_blocks(self, table: CrossTable) -> list[tuple[Block, bytes | None, int]]:
        """Its blocks, each with its hash and the number of the group."""
        return [(block, hash_cross_block(table.key, index), self._group) for index, block in enumerate(table.blocks)]

    # ---- holders ----

    def attach(self, sequence: TokenSequence, encoder_input: EncoderInput, may_load: bool = True) -> bool:
        """Give a sequence its table: one that is there, one whose blocks begin to arrive from the block store, or a new
        one, to be written in this step. False: not enough memory, and nothing changed."""
        key = hash_encoder_input(sequence.extra_keys.encoded, encoder_input.content_hash)
        if sequence.cross is not None:
            if sequence.cross.key != key:
                raise ValueError(f"{sequence.branch_id} holds the table of another encoder input")
            return True
        if self.num_missing(sequence, encoder_input) > self._pool.num_free_blocks:
            return False
        table = self._held.get(key)
        if table is None:
            table = self._held[key] = self._make(key, encoder_input, may_load)
        table.holders[sequence] = None
        sequence.cross = table
        return True

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
        for block, name, group in self.named_blocks(table):
            self._store.forget(name, group)
            self._pool.uncache(block)

    def _make(self, key: bytes, encoder_input: EncoderInput, may_load: bool) -> CrossTable:
        num_positions = encoder_input.num_positions
        found = self._find(key, num_positions, may_load)
        if found is not None:
            return CrossTable(key, num_positions, self._store.bring(found), None)
        table = CrossTable(key, num_positions, self._pool.get_new_blocks(self.num_blocks(num_positions)), encoder_input)
        self._unwritten.append(table)
        return table

    def _find(self, key: bytes, num_positions: int, may_load: bool = True) -> list[Block] | None:
        """Its blocks on the device and, if they may be loaded, slots of those that are only in the store, or in a
        connector behind it. None: one of them is nowhere."""
        if not may_load:
            return self._look_up(self._pool.cached_blocks(self._group).get, key, num_positions)
        found = self._look_up(self._store.lookup(self._group, with_connector=True), key, num_positions)
        return found if found is None or self._store.has_room_for(found) else None

    def _look_up(self, lookup: Lookup, key: bytes, num_positions: int) -> list[Block] | None:
        blocks: list[Block] = []
        for index in range(self.num_blocks(num_positions)):
            block = lookup(hash_cross_block(key, index))
            if block is None:
                return None
            blocks.append(block)
        return blocks

    def _name_blocks(self, table: CrossTable) -> None:
        if self._pool.enable_caching:
            for index, block in enumerate(table.blocks):
                self._pool.cache_full_block(block, hash_cross_block(table.key, index), self._group)
