from __future__ import annotations

import pytest

from ratoon.memory.block_pool import Block, BlockPool


def ids(blocks: list[Block]) -> list[int]:
    return [block.block_id for block in blocks]


def cached_pool(num_blocks: int, count: int) -> tuple[BlockPool, list[Block]]:
    """A pool in which `count` blocks are taken and can be found under b"0", b"1", …"""
    pool = BlockPool(num_blocks)
    blocks = pool.get_new_blocks(count)
    for index, block in enumerate(blocks):
        pool.cache_full_block(block, str(index).encode())
    return pool, blocks


def test_the_null_block_is_never_handed_out() -> None:
    pool = BlockPool(5)
    assert ids(pool.get_new_blocks(4)) == [1, 2, 3, 4]
    assert pool.num_free_blocks == 0
    pool.check()


def test_asking_for_more_than_is_free_changes_nothing() -> None:
    pool = BlockPool(4)
    with pytest.raises(ValueError, match="4 blocks asked for, 3 are free"):
        pool.get_new_blocks(4)
    assert pool.num_free_blocks == 3
    pool.check()


def test_usage_is_the_share_of_referenced_blocks() -> None:
    pool = BlockPool(5)
    assert pool.usage == 0.0
    pool.get_new_blocks(1)
    assert pool.usage == 0.25
    pool.get_new_blocks(3)
    assert pool.usage == 1.0


def test_uncached_blocks_are_taken_before_cached_ones() -> None:
    pool, blocks = cached_pool(6, 2)
    uncached = pool.get_new_blocks(3)
    pool.free_blocks(uncached)
    pool.free_blocks(blocks)
    assert set(ids(pool.get_new_blocks(3))) == set(ids(uncached))
    pool.check()


def test_of_cached_blocks_the_one_freed_first_is_evicted_first() -> None:
    pool, blocks = cached_pool(4, 3)
    pool.free_blocks(reversed(blocks))  # a sequence's tail first
    assert ids(pool.get_new_blocks(1)) == [3]
    assert pool.get_cached_block(b"2") is None
    assert pool.get_cached_block(b"0") is blocks[0]
    pool.check()


def test_touching_a_free_block_saves_its_content_from_eviction() -> None:
    pool, blocks = cached_pool(4, 3)
    pool.free_blocks(blocks)
    pool.touch([blocks[0], blocks[1]])
    assert pool.num_free_blocks == 1
    assert ids(pool.get_new_blocks(1)) == [3]
    assert pool.get_cached_block(b"0") is blocks[0]
    pool.check()


def test_a_block_is_free_when_its_last_holder_lets_go() -> None:
    pool = BlockPool(3)
    (block,) = pool.get_new_blocks(1)
    pool.touch([block])
    pool.free_blocks([block])
    assert pool.num_free_blocks == 1
    pool.free_blocks([block])
    assert pool.num_free_blocks == 2
    with pytest.raises(ValueError, match="freed more often"):
        pool.free_blocks([block])
    pool.check()


def test_null_entries_of_a_table_are_neither_touched_nor_freed() -> None:
    pool = BlockPool(3)
    pool.touch([pool.null_block])
    pool.free_blocks([pool.null_block])
    assert pool.num_free_blocks == 2
    pool.check()


def test_groups_do_not_find_each_others_blocks() -> None:
    pool = BlockPool(4, num_groups=2)
    left, right = pool.get_new_blocks(2)
    pool.cache_full_block(left, b"x", group=0)
    assert pool.get_cached_block(b"x", group=1) is None
    pool.cache_full_block(right, b"x", group=1)
    assert pool.get_cached_block(b"x", group=0) is left
    assert pool.get_cached_block(b"x", group=1) is right
    pool.check()


def test_of_two_blocks_with_one_content_the_one_in_use_keeps_the_name() -> None:
    pool = BlockPool(4)
    first, second = pool.get_new_blocks(2)
    pool.cache_full_block(first, b"x")
    pool.cache_full_block(second, b"x")
    assert pool.get_cached_block(b"x") is first
    pool.check()
    pool.free_blocks([second])
    assert pool.get_cached_block(b"x") is first
    pool.check()


def test_a_name_moves_from_a_free_block_to_one_that_is_in_use() -> None:
    pool = BlockPool(4)
    first, second = pool.get_new_blocks(2)
    pool.cache_full_block(first, b"x")
    pool.free_blocks([first])
    pool.cache_full_block(second, b"x")
    assert pool.get_cached_block(b"x") is second
    pool.check()
    assert pool.get_new_blocks(1) == [first], "the old block is ordinary free memory, taken first"


def test_uncached_content_is_not_found_again() -> None:
    pool, blocks = cached_pool(4, 2)
    pool.free_blocks(blocks)
    pool.uncache(blocks[0])
    assert pool.get_cached_block(b"0") is None
    pool.check()


def test_nothing_is_cached_when_caching_is_off() -> None:
    pool = BlockPool(4, enable_caching=False)
    (block,) = pool.get_new_blocks(1)
    pool.cache_full_block(block, b"x")
    assert pool.get_cached_block(b"x") is None


def test_the_prefix_cache_is_reset_only_when_nothing_is_in_use() -> None:
    pool, blocks = cached_pool(4, 2)
    pool.free_blocks(blocks[:1])
    assert not pool.reset_prefix_cache()
    assert pool.get_cached_block(b"1") is blocks[1]
    pool.free_blocks(blocks[1:])
    assert pool.reset_prefix_cache()
    assert pool.get_cached_block(b"0") is None
    pool.check()


@pytest.mark.parametrize("num_blocks", [0, 1])
def test_a_pool_without_usable_blocks_is_refused(num_blocks: int) -> None:
    with pytest.raises(ValueError):
        BlockPool(num_blocks)


def test_the_self_check_sees_a_free_block_with_references() -> None:
    pool = BlockPool(4)
    pool.blocks[2].ref_cnt = 1
    with pytest.raises(AssertionError, match="block 2 has 1 references and is on the free list"):
        pool.check()


def test_the_self_check_sees_a_lost_block() -> None:
    pool = BlockPool(4)
    (block,) = pool.get_new_blocks(1)
    block.ref_cnt = 0
    with pytest.raises(AssertionError, match="not on the free list"):
        pool.check()


def test_the_self_check_sees_a_hash_that_leads_elsewhere() -> None:
    pool, blocks = cached_pool(4, 2)
    blocks[0].block_hash = b"1"
    with pytest.raises(AssertionError, match="hash that maps to another block"):
        pool.check()


def test_the_self_check_sees_a_miscounted_free_list() -> None:
    pool = BlockPool(4)
    pool.num_free_blocks += 1
    with pytest.raises(AssertionError, match="counter says 4"):
        pool.check()
