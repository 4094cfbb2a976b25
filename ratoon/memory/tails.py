"""Block tables of the beams of one search, after the blocks of their common prompt. Accounting only.

The trunk, the sequence that computed the prompt, holds the prompt's blocks once for all beams. A beam's own table
begins with the last block of the prompt, so that the cost of a fork does not depend on the length of the prompt.
"""

from __future__ import annotations

from dataclasses import dataclass

from ratoon.core.plan import BlockIds
from ratoon.memory.block_pool import Block
from ratoon.memory.kv_cache_manager import KVCacheManager
from ratoon.memory.prefix_cache import hashes_up_to
from ratoon.memory.sequence import TokenSequence

Tail = list[list[Block]]  # one list of table entries for each KV group, from the first column after the trunk on


@dataclass(slots=True, eq=False)
class KeptTail:
    """What a beam held at some time. Later beams that share its blocks write to copies."""

    tail: Tail
    num_computed_tokens: int


class BeamTails:
    """All beams have the same length. They start as one, the trunk itself."""

    def __init__(self, kv_cache: KVCacheManager, trunk: TokenSequence) -> None:
        self.num_computed_tokens = trunk.num_computed_tokens  # of each beam, the prompt included
        self._kv_cache = kv_cache
        self._pool = kv_cache.pool
        self._trunk = trunk
        self._sizes = [rule.block_size for rule in kv_cache.rules]
        self._first_columns = [trunk.num_computed_tokens // size for size in self._sizes]  # by group
        self._tails: list[Tail] = [[table[first:] for table, first in zip(trunk.block_tables, self._first_columns)]]
        self._touch(self._tails[0])
        self._are_unknown = False  # whether the runner has yet to be sent their tables

    @classmethod
    def loaded(cls, kv_cache: KVCacheManager, trunk: TokenSequence) -> BeamTails:
        """The beams that were loaded with their trunk. Their blocks belong to the block store until the caller has
        called `resumed` of the manager; until then these must not be released."""
        tails = cls(kv_cache, trunk)
        tails.release()  # the initial one
        tails._tails = kv_cache.loaded_tails(trunk)
        tails.num_computed_tokens = kv_cache.num_tail_tokens(trunk)
        tails._are_unknown = True
        return tails

    def swap_out(self, num_unwritten_tokens: int) -> bool:
        """Move the trunk to the block store, and copies of the beams' blocks, without the last `num_unwritten_tokens`,
        which were counted as computed but do not run. False: not enough room, or the beams have computed nothing;
        nothing changed."""
        num_tokens = self.num_computed_tokens - num_unwritten_tokens
        if num_tokens <= self._trunk.num_tokens:
            return False
        num_columns = self._num_columns(num_tokens)
        tails = [[blocks[:count] for blocks, count in zip(tail, num_columns)] for tail in self._tails]
        return self._kv_cache.swap_out(self._trunk, tails, num_tokens)

    def __len__(self) -> int:
        return len(self._tails)

    def fork(self, parents: list[int]) -> None:
        """Beam i goes on from what beam `parents[i]` holds. Takes no memory, so it can't fail."""
        old, tails = self._tails, []
        taken: set[int] = set()
        for parent in parents:
            tail = old[parent]
            if parent in taken:
                tail = [blocks.copy() for blocks in tail]
                self._touch(tail)
            taken.add(parent)
            tails.append(tail)
        for parent, tail in enumerate(old):
            if parent not in taken:
                self._free(tail)
        self._tails = tails

    def allocate(self, num_tokens: int) -> tuple[list[int], BlockIds] | None:
        """Allocate `num_tokens` for every beam, and count them as computed. None: not enough memory, and nothing
        changed. Otherwise, for each group, the first table column that changed, and the entries from there on, beam by
        beam. The first block written may be shared with other beams and the trunk: every beam but the last holder gets
        a copy of it.
        """
        # The first columns that are written
        columns = [self.num_computed_tokens // size - first for size, first in zip(self._sizes, self._first_columns)]
        num_columns = self._num_columns(self.num_computed_tokens + num_tokens)
        num_missing = [count - len(blocks) for count, blocks in zip(num_columns, self._tails[0])]
        to_copy = self._shared_at(columns)
        num_wanted = len(to_copy) + sum(num_missing) * len(self._tails)
        if num_wanted > self._pool.num_free_blocks:
            return None
        self.num_computed_tokens += num_tokens
        for beam, group in to_copy:
            blocks, column = self._tails[beam][group], columns[group]
            blocks[column] = self._kv_cache.copy_block(
                self._trunk.branch_id, group, self._first_columns[group] + column, blocks[column]
            )
        for tail in self._tails:
            for blocks, missing in zip(tail, num_missing):
                if missing:
                    blocks += self._pool.get_new_blocks(missing)
        if self._are_unknown:
            columns, self._are_unknown = [0] * len(columns), False
        elif not num_wanted:
            return [], ()
        return [first + column for first, column in zip(self._first_columns, columns)], tuple(
            [block.block_id for tail in self._tails for block in tail[group][column:]]
            for group, column in enumerate(columns)
        )

    def _num_columns(self, num_tokens: int) -> list[int]:
        """The columns of each group's tails that hold a beam of so many tokens."""
        return [-(-num_tokens // size) - first for size, first in zip(self._sizes, self._first_columns)]

    def _shared_at(self, columns: list[int]) -> list[tuple[int, int]]:
        """The beams, and the groups, whose block in this column must be copied before it is written."""
        left: dict[int, int] = {}  # block → holders without a copy
        to_copy = []
        for beam, tail in enumerate(self._tails):
            for group, (blocks, column) in enumerate(zip(tail, columns)):
                if column >= len(blocks):
                    continue
                block = blocks[column]
                holders = left.get(block.block_id, block.ref_cnt)
                if holders > 1:
                    to_copy.append((beam, group))
                    left[block.block_id] = holders - 1
        return to_copy

    def keep(self, beam: int) -> KeptTail:
        """Take references to what a beam holds now, independent of the beam."""
        tail = [blocks.copy() for blocks in self._tails[beam]]
        self._touch(tail)
        return KeptTail(tail, self.num_computed_tokens)

    def drop(self, kept: KeptTail) -> None:
        self._free(kept.tail)

    def as_sequence(self, kept: KeptTail, branch_id: str, token_ids: list[int]) -> TokenSequence:
        """A kept tail and the trunk before it as a sequence of its own, which takes over what was kept."""
        trunk = self._trunk
        self._kv_cache.register_blocks()
        sequence = TokenSequence(branch_id, token_ids, trunk.extra_keys)
        heads = [table[:first] for table, first in zip(trunk.block_tables, self._first_columns)]
        self._touch(heads)
        sequence.block_tables = [head + tail for head, tail in zip(heads, kept.tail, strict=True)]
        num_full = min(first * size for first, size in zip(self._first_columns, self._sizes))
        sequence.block_hashes = hashes_up_to(trunk, num_full)
        sequence.num_registered_tokens = min(trunk.num_registered_tokens, num_full)
        sequence.num_computed_tokens = kept.num_computed_tokens
        self._kv_cache.cross_tables.share(trunk, sequence)
        return sequence

    def release(self) -> None:
        """Free all that the beams hold. Kept tails are not affected."""
        for tail in self._tails:
            self._free(tail)
        self._tails = []

    def tables(self) -> list[Tail]:
        """The tables, for checks: every entry is a reference."""
        return self._tails

    def _touch(self, tail: Tail) -> None:
        for blocks in tail:
            self._pool.touch(blocks)

    def _free(self, tail: Tail) -> None:
        for blocks in tail:
            self._pool.free_blocks(reversed(blocks))


def tail_blocks(kv_cache: KVCacheManager, num_prompt_tokens: int, num_new_tokens: int) -> int:
    """The most blocks that one beam holds after the trunk for `num_new_tokens`, the last of which is never computed."""
    if num_new_tokens <= 1:
        return 0
    sizes = [rule.block_size for rule in kv_cache.rules]
    return sum(-(-(num_prompt_tokens + num_new_tokens - 1) // size) - num_prompt_tokens // size for size in sizes)
