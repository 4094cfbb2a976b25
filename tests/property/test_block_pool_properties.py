"""The pool under random use, compared with a simple model of it."""

from __future__ import annotations

from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from ratoon.memory.block_pool import Block, BlockPool

NUM_BLOCKS = 9
HASHES = [bytes([value]) for value in range(6)]


class PoolMachine(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.pool = BlockPool(NUM_BLOCKS, num_groups=2)
        self.held: list[Block] = []  # one entry for each reference
        self.content: dict[int, tuple[int, bytes] | None] = {}  # what a block holds, once it was named
        self.needed: list[set[bytes]] = [set(), set()]
        self.pool.needed = self.needed

    @rule(count=st.integers(1, 4))
    def take(self, count: int) -> None:
        if count > self.pool.num_free_blocks:
            return
        for block in self.pool.get_new_blocks(count):
            assert block.block_id != 0 and block not in self.held
            self.content[block.block_id] = None  # it will be overwritten
            self.held.append(block)

    @precondition(lambda self: self.held)
    @rule(data=st.data())
    def give_back(self, data: st.DataObject) -> None:
        block = data.draw(st.sampled_from(self.held))
        self.held.remove(block)
        self.pool.free_blocks([block])

    @precondition(lambda self: self.held)
    @rule(data=st.data(), block_hash=st.sampled_from(HASHES), group=st.integers(0, 1))
    def name(self, data: st.DataObject, block_hash: bytes, group: int) -> None:
        block = data.draw(st.sampled_from(self.held))
        if self.content[block.block_id] is None:
            self.content[block.block_id] = (group, block_hash)
            self.pool.cache_full_block(block, block_hash, group)

    @rule(block_hash=st.sampled_from(HASHES), group=st.integers(0, 1), keep=st.booleans())
    def find(self, block_hash: bytes, group: int, keep: bool) -> None:
        block = self.pool.get_cached_block(block_hash, group)
        if block is None:
            holders = [held for held in self.held if self.content[held.block_id] == (group, block_hash)]
            assert not [held for held in holders if held.block_hash is not None]
            return
        assert self.content[block.block_id] == (group, block_hash), "found under a name that it does not have"
        if keep:
            self.pool.touch([block])
            self.held.append(block)

    @rule(block_hash=st.sampled_from(HASHES), group=st.integers(0, 1))
    def need(self, block_hash: bytes, group: int) -> None:
        """A session begins to need a block, or ends to."""
        self.needed[group] ^= {block_hash}
        self.pool.put_in_order(block_hash, group)

    @rule(block_hash=st.sampled_from(HASHES), group=st.integers(0, 1))
    def supersede(self, block_hash: bytes, group: int) -> None:
        self.needed[group].discard(block_hash)
        self.pool.put_first(block_hash, group)

    @rule()
    def reset(self) -> None:
        assert self.pool.reset_prefix_cache() == (not self.held)

    @invariant()
    def sound(self) -> None:
        self.pool.check()
        for block in self.pool.blocks[1:]:
            assert block.ref_cnt == self.held.count(block)
        assert self.pool.num_free_blocks == NUM_BLOCKS - 1 - len(set(self.held))


TestPool = PoolMachine.TestCase
