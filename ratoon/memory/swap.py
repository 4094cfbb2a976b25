"""Preempted sequences whose blocks are in the block store: which slots hold which table entries. Accounting only.

A sequence is saved whole. Its full blocks are in the store by their hashes, so that other sequences find them there,
too. The partial last block, and the blocks of beams, are slots of its own: with them a sequence goes on with the same
bits where it was, and no row runs twice. Slots of saved sequences are referenced, and so are not evicted. The scheduler
decides when a sequence is saved and loaded.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from ratoon.memory.block_pool import Block, BlockPool
from ratoon.memory.block_store import BlockStore
from ratoon.memory.sequence import TokenSequence

Tables = list[list[Block]]  # one list of table entries for each KV group; the null block where there is none


@dataclass(slots=True, eq=False)
class SavedSequence:
    """What a sequence held when it was preempted. The tables have slots in place of blocks, and every entry is a
    reference to its slot."""

    tables: Tables
    num_computed_tokens: int
    tails: list[Tables]  # of the beams, if it is the trunk of a search
    num_tail_tokens: int  # computed tokens of each beam, the trunk's included
    cross: list[Block]  # slots of the cross table, if no other sequence held it
    loaded_tails: list[Tables] = field(default_factory=list)  # on the device, from the load on

    @property
    def slots(self) -> list[Block]:
        return [*self.cross, *entries_of(self.tables, *self.tails)]


class SavedSequences:
    def __init__(self, pool: BlockPool, store: BlockStore) -> None:
        self._pool = pool
        self._store = store
        self._saved: dict[TokenSequence, SavedSequence] = {}

    def find(self, sequence: TokenSequence) -> SavedSequence | None:
        return self._saved.get(sequence)

    def save(
        self,
        sequence: TokenSequence,
        tables: Tables,
        num_full_blocks: Sequence[int],
        tails: Sequence[Tables] = (),
        num_tail_tokens: int = 0,
        cross: Sequence[tuple[Block, bytes | None, int]] = (),
    ) -> bool:
        """Keep the contents of these tables, of `tails`, the tables of its beams, and of its cross table. Of each table
        so many blocks are full. False: not enough slots, and nothing changed. The sequence still holds its device
        blocks."""
        if sequence in self._saved:
            raise ValueError(f"{sequence.branch_id} is swapped out already")
        wanted = {entry[0].block_id: entry for entry in cross}
        for group, (table, num_full) in enumerate(zip(tables, num_full_blocks)):
            for place, block in enumerate(table):
                wanted[block.block_id] = block, block.block_hash if place < num_full else None, group
        for block in entries_of(*tails):
            wanted.setdefault(block.block_id, (block, None, 0))
        null = self._pool.null_block
        wanted.pop(null.block_id, None)
        slots = self._store.keep(list(wanted.values()))
        if slots is None:
            return False
        slot_of = dict(zip(wanted, slots)) | {null.block_id: self._store.null_slot}
        saved = self._saved[sequence] = SavedSequence(
            _replaced(tables, slot_of),
            sequence.num_computed_tokens,
            [_replaced(tail, slot_of) for tail in tails],
            num_tail_tokens,
            [slot_of[entry[0].block_id] for entry in cross],
        )
        self._store.reference(saved.slots)
        self._store.release(slots)
        return True

    def num_blocks_to_load(self, saved: SavedSequence) -> int:
        """Device blocks that leave the free list when a sequence is loaded, without its cross table and beams."""
        return sum(block is None or block.ref_cnt == 0 for block in self._found(saved.tables).values())

    def load(self, sequence: TokenSequence) -> None:
        """Give a sequence its tables again, and its beams theirs. Blocks that are not on the device are loaded. There
        must be enough free blocks."""
        saved = self._saved[sequence]
        found, null = self._found(saved.tables, *saved.tails), self._pool.null_block
        taken = self._store.bring([block or slot for slot, block in found.items()])
        block_of = {slot.block_id: block for slot, block in zip(found, taken)} | {null.block_id: null}
        sequence.block_tables = _replaced(saved.tables, block_of)
        saved.loaded_tails = [_replaced(tail, block_of) for tail in saved.tails]
        self._pool.touch(entries_of(sequence.block_tables, *saved.loaded_tails))
        self._pool.free_blocks(taken)

    def _found(self, *tables: Tables) -> dict[Block, Block | None]:
        """The slots in these tables, each with the device block that has the same content, or will have."""
        slots = {slot.block_id: slot for slot in entries_of(*tables)}
        slots.pop(self._pool.null_block.block_id, None)
        return {slot: self._store.find_on_device(slot) for slot in slots.values()}

    def unload(self, sequence: TokenSequence) -> None:
        """Free the beams' blocks on the device."""
        saved = self._saved.get(sequence)
        if saved is not None:
            self._pool.free_blocks(entries_of(*saved.loaded_tails))
            saved.loaded_tails = []

    def forget_tails(self, sequence: TokenSequence) -> None:
        """The beams' contents are lost: they are computed again, after the trunk."""
        saved = self._saved.get(sequence)
        if saved is not None:
            self.unload(sequence)
            self._store.release(entries_of(*saved.tails))
            saved.tails, saved.num_tail_tokens = [], 0

    def forget(self, sequence: TokenSequence, keep_tails: bool = False) -> None:
        """A sequence runs again, or ends: its slots are not kept for it any more. `keep_tails`: the caller has taken
        over the beams' blocks on the device."""
        if sequence in self._saved:
            if not keep_tails:
                self.unload(sequence)
            self._store.release(self._saved.pop(sequence).slots)

    def forget_lost(self, lost: set[int]) -> None:
        """The content of these slots is undefined: sequences that need them are computed again."""
        for sequence, saved in list(self._saved.items()):
            if not lost.isdisjoint(slot.block_id for slot in saved.slots):
                self.forget(sequence)

    def check(self, sequences: Iterable[TokenSequence]) -> tuple[list[Block], list[Tables]]:
        """Raise AssertionError unless these are all sequences that have something saved. Returns the referenced slots,
        one entry for each reference, and the tables of beams on the device."""
        known, slots, tables = set(sequences), [], []
        for sequence, saved in self._saved.items():
            assert sequence in known, f"{sequence.branch_id} has ended but has slots"
            slots += [slot for slot in saved.slots if slot is not self._store.null_slot]
            tables += saved.loaded_tails
        return slots, tables


def entries_of(*tables: Iterable[list[Block]]) -> list[Block]:
    return [block for groups in tables for table in groups for block in table]


def _replaced(tables: Tables, by_id: dict[int, Block]) -> Tables:
    return [[by_id[block.block_id] for block in table] for table in tables]
