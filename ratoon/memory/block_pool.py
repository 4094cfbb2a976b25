"""The pool of physical blocks: the free list, reference counts, and the prefix cache's map from hash to block.
Sequences are unknown here: tables, windows and copy-on-write are the KVCacheManager's.
"""

from __future__ import annotations

import enum
from collections.abc import Callable, Container, Iterable, Sequence

import msgspec

from ratoon.core.kv import NULL_BLOCK


class Zone(enum.IntEnum):
    """The part of the free list in which a block with a hash is."""

    RECENT = 0  # by least recent use
    FIRST = 1  # taken before others with a hash: only superseded roots of sessions need it
    KEPT = 2  # taken after all others: the newest root of a session needs it


RECENT, FIRST, KEPT = Zone
ORDER_OF_ZONES = (2, 1, 3)  # by their numbers; 0 is that of blocks without a hash
SHARE_KEPT = 0.5  # of a pool's blocks, at most, that are in the zone KEPT


class Block(msgspec.Struct, eq=False, gc=False):
    """A physical block. `prev` and `next` are block ids on the free list, and 0 for a block that is in use.

    Ids instead of references: a pool of a million blocks then has no cycles and nothing for Python's garbage collector
    to traverse, so the pool's size does not slow down steps.
    """

    block_id: int
    ref_cnt: int = 0
    block_hash: bytes | None = None  # set exactly while the prefix cache maps that hash to this block
    group: int = 0  # the KV group of `block_hash`
    prev: int = 0
    next: int = 0
    zone: Zone = RECENT  # where it is, or was last, on the free list
    in_memory: bool = False  # its content is not to be written to files


class BlockPool:
    """All blocks of one engine.

    Free blocks form a circular doubly linked list through the null block, which is both of its ends:

        null → uncached … → first to go … → cached, least recently used … most recently used → kept … → null
                                        ^ _last_to_go                                          ^ _first_kept

    Blocks are taken from the front. Uncached ones go first, so cached content is evicted only when no other block is
    left. Eviction is nothing more than taking the block. Behind the uncached ones are those that only superseded roots
    of sessions need (`put_first`); at the end are those that sessions' newest roots need (`needed`), up to a share of
    the pool: beyond it, the least recently used of them count among the others.
    """

    def __init__(self, num_blocks: int, enable_caching: bool = True, num_groups: int = 1) -> None:
        if num_blocks < 2:
            raise ValueError(f"a pool needs the null block and at least one more; got {num_blocks}")
        self.num_blocks = num_blocks
        self.enable_caching = enable_caching
        last = num_blocks - 1
        self.blocks = [Block(i, 0, None, 0, i - 1, i + 1) for i in range(num_blocks)]
        self.null_block = self.blocks[NULL_BLOCK]
        self.null_block.prev = last
        self.blocks[last].next = NULL_BLOCK
        self.num_free_blocks = last
        self._last_to_go = last  # the last block before those in the order of use; the null block: there is none
        self._first_kept = NULL_BLOCK  # likewise, the first behind them
        self._num_kept = 0
        self._max_kept = int(last * SHARE_KEPT)
        self.needed: Sequence[Container[bytes]] = ()  # hashes of sessions' newest roots, by group
        self._cached: list[dict[bytes, Block]] = [{} for _ in range(num_groups)]
        # Called with a cached block and its hash before the block is taken for other content
        self.on_evict: Callable[[Block, bytes], None] | None = None
        # Called with a hash and its group when no block has it any more, and when none has any
        self.on_forget: Callable[[bytes, int], None] | None = None
        self.on_reset: Callable[[], None] | None = None
        # Ids of blocks whose state may have changed since they were taken from here; None: no map is drawn of the pool
        self.changed: set[int] | None = None

    @property
    def num_usable_blocks(self) -> int:
        return self.num_blocks - 1

    @property
    def usage(self) -> float:
        """Fraction of blocks with references, 0 to 1."""
        return 1.0 - self.num_free_blocks / (self.num_blocks - 1)

    def get_new_blocks(self, count: int) -> list[Block]:
        """Take `count` free blocks, each with one reference. Evicts cached content if necessary."""
        if count > self.num_free_blocks:
            raise ValueError(f"{count} blocks asked for, {self.num_free_blocks} are free")
        blocks, null = self.blocks, self.null_block
        taken = []
        next_id = null.next
        for _ in range(count):
            block = blocks[next_id]
            next_id = block.next
            if block.block_hash is not None:
                if self.on_evict is not None:
                    self.on_evict(block, block.block_hash)
                self._forget_hash(block)
            self._num_kept -= block.zone == KEPT
            block.zone = RECENT
            block.ref_cnt = 1
            block.prev = block.next = 0
            taken.append(block)
        null.next = next_id
        blocks[next_id].prev = NULL_BLOCK
        self.num_free_blocks -= count
        if blocks[self._last_to_go].ref_cnt:  # it was taken, and all before it
            self._last_to_go = NULL_BLOCK
        if blocks[self._first_kept].ref_cnt:
            self._first_kept = next_id
        if self.changed is not None:
            self.changed.update(block.block_id for block in taken)
        return taken

    def touch(self, blocks: Iterable[Block]) -> None:
        """Add a reference to each block; free ones leave the free list with their content. The null block is
        ignored."""
        null = self.null_block
        if self.changed is not None:
            blocks = self.note_changed(blocks)
        for block in blocks:
            if block.ref_cnt == 0:  # checked first: only free blocks and the null block get here
                if block is null:
                    continue
                self._unlink(block)
            block.ref_cnt += 1

    def free_blocks(self, blocks: Iterable[Block]) -> None:
        """Drop a reference to each block. Of those that become free, the ones listed first are evicted first: listing a
        sequence's last blocks first keeps its head, which more requests can share, longer.
        """
        null = self.null_block
        if self.changed is not None:
            blocks = self.note_changed(blocks)
        for block in blocks:
            num_left = block.ref_cnt - 1
            if num_left > 0:  # most blocks of a fork
                block.ref_cnt = num_left
                continue
            if block is null:
                continue
            if num_left < 0:
                raise ValueError(f"block {block.block_id} is freed more often than it was taken")
            block.ref_cnt = 0
            self._link(block)

    def cache_full_block(self, block: Block, block_hash: bytes, group: int = 0, in_memory: bool = False) -> None:
        """Register `block` under `block_hash`. If another block is registered there, it stays if it is in use; if it is
        free, `block`, which lives longer, replaces it, and the old one becomes an uncached free block.
        `in_memory`: its content is not to be written to files.
        """
        if not self.enable_caching or block.block_hash is not None:
            return
        cached = self._cached[group]
        twin = cached.get(block_hash)
        if twin is not None:
            if twin.ref_cnt > 0:
                return
            self.uncache(twin)
        cached[block_hash] = block
        block.block_hash = block_hash
        block.group = group
        block.in_memory = in_memory

    def get_cached_block(self, block_hash: bytes, group: int = 0) -> Block | None:
        return self._cached[group].get(block_hash)

    def cached_blocks(self, group: int = 0) -> dict[bytes, Block]:
        """The whole map of a group, for loops that look up thousands of hashes. Read-only."""
        return self._cached[group]

    @property
    def num_cached_blocks(self) -> int:
        """Blocks that can be found by their hash, free or in use."""
        return sum(map(len, self._cached))

    def uncache(self, block: Block) -> None:
        """Remove a block from the prefix cache, because its content is not valid or is kept elsewhere."""
        if block.block_hash is None:
            return
        self._forget_hash(block)
        if block.ref_cnt == 0:  # move it to the uncached ones, at the front
            self._unlink(block)
            self._link(block)
            if self.changed is not None:
                self.changed.add(block.block_id)

    def reset_prefix_cache(self) -> bool:
        """Drop all cached content. Refused (False) while any block is in use."""
        if self.num_free_blocks != self.num_blocks - 1:
            return False
        for cached in self._cached:
            if self.changed is not None:
                self.note_changed(cached.values())
            for block in cached.values():
                block.block_hash, block.zone, block.in_memory = None, RECENT, False
            cached.clear()
        self._last_to_go, self._first_kept, self._num_kept = self.null_block.prev, NULL_BLOCK, 0
        if self.on_reset is not None:
            self.on_reset()
        return True

    def note_changed(self, blocks: Iterable[Block]) -> list[Block]:
        """The state of these blocks may change. Returns them: what was given may be read only once."""
        listed = list(blocks)
        if self.changed is not None:
            self.changed.update(block.block_id for block in listed)
        return listed

    def _forget_hash(self, block: Block) -> None:
        assert block.block_hash is not None
        del self._cached[block.group][block.block_hash]
        if self.on_forget is not None:
            self.on_forget(block.block_hash, block.group)
        block.block_hash = None
        block.in_memory = False

    def _unlink(self, block: Block) -> None:
        blocks, block_id = self.blocks, block.block_id
        if block_id == self._last_to_go:
            self._last_to_go = block.prev
        if block_id == self._first_kept:
            self._first_kept = block.next
        self._num_kept -= block.zone == KEPT
        block.zone = RECENT
        blocks[block.prev].next = block.next
        blocks[block.next].prev = block.prev
        block.prev = block.next = 0
        self.num_free_blocks -= 1

    def _link(self, block: Block, goes_first: bool = False) -> None:
        """Put a block on the free list: at the front if it is uncached, behind the others of its zone if it is
        cached."""
        blocks, null = self.blocks, self.null_block
        if block.block_hash is None:
            before, after = null, blocks[null.next]
            if self._last_to_go == NULL_BLOCK:
                self._last_to_go = block.block_id
        elif goes_first:
            block.zone = FIRST
            before = blocks[self._last_to_go]
            after = blocks[before.next]
            self._last_to_go = block.block_id
        elif self.needed and block.block_hash in self.needed[block.group]:
            block.zone = KEPT
            before, after = blocks[null.prev], null
            self._num_kept += 1
            if self._first_kept == NULL_BLOCK:
                self._first_kept = block.block_id
        else:
            after = blocks[self._first_kept]
            before = blocks[after.prev]
        block.prev, block.next = before.block_id, after.block_id
        before.next = after.prev = block.block_id
        self.num_free_blocks += 1
        if self._num_kept > self._max_kept:  # the least recently used one is the most recently used of the others
            least = blocks[self._first_kept]
            least.zone = RECENT
            self._num_kept -= 1
            self._first_kept = least.next

    def put_first(self, block_hash: bytes, group: int) -> None:
        """The block of this hash, if it is free, is taken before others that have one."""
        block = self._cached[group].get(block_hash)
        if block is not None and block.ref_cnt == 0:
            self._unlink(block)
            self._link(block, goes_first=True)

    def put_in_order(self, block_hash: bytes, group: int) -> None:
        """Whether a session needs this hash has changed: its block, if it is free, counts as used now."""
        block = self._cached[group].get(block_hash)
        if block is not None and block.ref_cnt == 0:
            self._unlink(block)
            self._link(block)

    @property
    def has_empty_block(self) -> bool:
        """Whether a free block has no content."""
        first = self.null_block.next
        return first != NULL_BLOCK and self.blocks[first].block_hash is None

    def check(self) -> None:
        """Raise AssertionError unless every block is either free or referenced, and lists, counts and cache agree."""
        on_free_list = self._walk_free_list()
        assert len(on_free_list) == self.num_free_blocks, (
            f"the free list holds {len(on_free_list)} blocks, the counter says {self.num_free_blocks}"
        )
        assert self.null_block.ref_cnt == 0, f"the null block has {self.null_block.ref_cnt} references"
        assert self.null_block.block_hash is None, "the null block has a hash"
        for block in self.blocks[1:]:
            free = block.block_id in on_free_list
            assert block.ref_cnt >= 0, f"block {block.block_id} has {block.ref_cnt} references"
            assert free or block.zone is RECENT, f"block {block.block_id} is in use and in a zone"
            assert free == (block.ref_cnt == 0), (
                f"block {block.block_id} has {block.ref_cnt} references and is {'' if free else 'not '}on the free list"
            )
            if block.block_hash is not None:
                found = self._cached[block.group].get(block.block_hash)
                assert found is block, f"block {block.block_id} has a hash that maps to another block or none"
        num_hashed = sum(block.block_hash is not None for block in self.blocks)
        num_cached = self.num_cached_blocks
        assert num_hashed == num_cached, f"{num_hashed} blocks have a hash, {num_cached} are in the map"

    def _walk_free_list(self) -> set[int]:
        seen: set[int] = set()
        previous, current = NULL_BLOCK, self.null_block.next
        last_place = 0  # of the block before: 0 uncached, 1 first to go, 2 by use, 3 kept
        last_to_go, num_kept = NULL_BLOCK, 0
        while current != NULL_BLOCK:
            block = self.blocks[current]
            assert current not in seen, f"block {current} is on the free list twice"
            assert block.prev == previous, f"block {current} is linked back to {block.prev}, it follows {previous}"
            place = 0 if block.block_hash is None else ORDER_OF_ZONES[block.zone]
            assert last_place <= place, f"block {current} of zone {place} follows one of {last_place}"
            assert block.block_hash is not None or block.zone == RECENT, f"block {current} is empty and in a zone"
            if place <= 1:
                last_to_go = current
            if place == 3:
                assert num_kept or self._first_kept == current, f"{current} is the first that is kept"
                num_kept += 1
            last_place = place
            seen.add(current)
            previous, current = current, block.next
        assert self.null_block.prev == previous, f"the free list ends at {previous}, not at {self.null_block.prev}"
        assert self._last_to_go == last_to_go, f"{last_to_go} goes before those in order, not {self._last_to_go}"
        assert num_kept or self._first_kept == NULL_BLOCK, f"{self._first_kept} is not kept"
        assert num_kept == self._num_kept <= self._max_kept, f"{num_kept} blocks are kept, {self._num_kept} counted"
        return seen
