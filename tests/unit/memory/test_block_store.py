"""The block store: offer, find and load, by hash and fingerprint."""

from __future__ import annotations

import pytest

from ratoon.core.kv import KVFingerprint, SlidingWindowSpec, SwapCosts
from ratoon.memory.block_copies import BlockCopies
from ratoon.memory.block_pool import Block, BlockPool
from ratoon.memory.block_store import BlockStore, HostTier
from ratoon.memory.kv_cache_manager import KVCacheManager
from ratoon.memory.sequence import TokenSequence
from tests.unit.memory.encoder_memory import BLOCK_SIZE, FULL, finish_step, memory_of, running, sequence_of


def evict_all(memory: KVCacheManager) -> None:
    """Another sequence takes all blocks of the device, and ends."""
    num_tokens = memory.num_usable_blocks // memory.num_groups * BLOCK_SIZE
    memory.free(running(memory, "z", None, num_tokens=num_tokens))


def again(sequence: TokenSequence, name: str = "again") -> TokenSequence:
    """A sequence with the same tokens, and one more."""
    return TokenSequence(name, [*sequence.token_ids, 1], sequence.extra_keys)


def test_the_pool_calls_its_hook_with_a_block_and_its_hash_before_the_block_is_reused() -> None:
    pool = BlockPool(3)
    evicted: list[tuple[int, bytes, bytes | None]] = []
    pool.on_evict = lambda block, block_hash: evicted.append((block.block_id, block_hash, block.block_hash))
    blocks = pool.get_new_blocks(2)
    pool.cache_full_block(blocks[0], b"a")
    pool.free_blocks(blocks)
    assert evicted == []
    pool.get_new_blocks(1)
    assert evicted == [], "a block without a hash has nothing to keep"
    pool.get_new_blocks(1)
    assert evicted == [(blocks[0].block_id, b"a", b"a")]


def test_evicted_blocks_are_offered_and_serve_a_later_sequence() -> None:
    memory = memory_of(8, 20)
    sequence = running(memory, "a", None, num_tokens=12)
    memory.free(sequence)
    evict_all(memory)
    later = again(sequence)
    assert memory.get_computed_blocks(later)[1] == 0
    assert memory.load_prefix(later, 1, None)
    assert memory.is_arriving(later) and later.num_computed_tokens == 0
    memory.check([later])
    _, loads = finish_step(memory)
    assert len(loads) == 3
    memory.settle(later, set())
    assert later.num_computed_tokens == 12 and memory.block_ids(later)[0] == [load.block for load in loads]
    memory.check([later])
    assert memory.get_computed_blocks(again(sequence, "third"))[1] == 12, "the device has them again"


def test_a_block_is_stored_once_however_often_it_is_evicted() -> None:
    memory = memory_of(8, 20)
    sequence = running(memory, "a", None, num_tokens=12)
    memory.free(sequence)
    evict_all(memory)
    later = again(sequence)
    assert memory.load_prefix(later, 1, None)
    finish_step(memory)
    memory.settle(later, set())
    memory.free(later)
    evict_all(memory)
    stores, _ = finish_step(memory)
    assert stores == [] and memory.store.snapshot().stored == 3 + 7


def test_the_least_recently_used_slots_go_first_and_kept_ones_stay() -> None:
    memory = memory_of(8, 4)
    kept = running(memory, "k", None, num_tokens=4)
    assert memory.swap_out(kept)
    memory.free(running(memory, "a", None, num_tokens=12))
    evict_all(memory)
    finish_step(memory)
    assert memory.is_swapped(kept) and memory.num_free_slots == 3
    memory.check([kept])


def test_two_sequences_wait_for_one_load() -> None:
    memory = memory_of(8, 20)
    sequence = running(memory, "a", None, num_tokens=12)
    memory.free(sequence)
    evict_all(memory)
    first, second = again(sequence, "b"), again(sequence, "c")
    assert memory.load_prefix(first, 1, None) and memory.load_prefix(second, 1, None)
    assert memory.block_ids(first) == memory.block_ids(second)
    memory.check([first, second])
    memory.free(first)
    _, loads = finish_step(memory)
    assert len(loads) == 3
    memory.settle(second, set())
    assert second.num_computed_tokens == 12
    memory.check([second])


def test_what_the_device_has_is_not_loaded() -> None:
    memory = memory_of(8, 20)
    sequence = running(memory, "a", None, num_tokens=12)
    assert memory.swap_out(sequence)  # the store has it, too
    finish_step(memory)
    assert not memory.load_prefix(again(sequence), 1, None)
    assert memory.store.take_transfers() == ([], [])


@pytest.mark.parametrize(("block", "is_loaded"), [(4.0, True), (4.1, False)])
def test_what_takes_longer_to_load_than_to_compute_is_computed(block: float, is_loaded: bool) -> None:
    memory = memory_of(8, 20)
    sequence = running(memory, "a", None, num_tokens=12)
    memory.free(sequence)
    evict_all(memory)
    assert memory.load_prefix(again(sequence), 1, SwapCosts(block, 1.0)) == is_loaded


def test_without_memory_for_it_nothing_is_loaded() -> None:
    memory = memory_of(8, 20)
    sequence = running(memory, "a", None, num_tokens=12)
    memory.free(sequence)
    evict_all(memory)
    other = running(memory, "b", None, num_tokens=16)
    assert not memory.load_prefix(again(sequence), 1, None), "three blocks are free, and a fourth is needed to go on"
    memory.check([other])


def test_another_salt_finds_nothing() -> None:
    memory = memory_of(8, 20)
    memory.free(running(memory, "a", None, num_tokens=12, salt="x"))
    evict_all(memory)
    assert not memory.load_prefix(sequence_of("a", 13, salt="y"), 1, None)
    assert memory.load_prefix(sequence_of("a", 13, salt="x"), 1, None)


def test_a_window_needs_its_own_blocks_alone_and_all_groups_must_agree() -> None:
    memory = memory_of(14, 40, FULL, SlidingWindowSpec(BLOCK_SIZE, 2, 8, "float16", window=4))
    sequence = running(memory, "a", None, num_tokens=12)
    memory.free(sequence)
    evict_all(memory)
    later = again(sequence)
    assert memory.load_prefix(later, 1, None)
    full, window = memory.block_ids(later)
    assert len(full) == len(window) == 3 and window[:2] == [0, 0]
    _, loads = finish_step(memory)
    assert len(loads) == 4


def test_blocks_of_a_failed_sequence_are_not_found_in_the_store() -> None:
    memory = memory_of(8, 20)
    sequence = running(memory, "a", None, num_tokens=12)
    assert memory.swap_out(sequence)
    finish_step(memory)
    failing = again(sequence)
    hits = memory.get_computed_blocks(failing)
    assert memory.allocate_slots(failing, 1, *hits) is not None
    memory.free(failing, trusted=False)
    assert not memory.load_prefix(again(sequence, "later"), 1, None)


def test_a_reset_forgets_what_is_stored() -> None:
    memory = memory_of(8, 20)
    sequence = running(memory, "a", None, num_tokens=12)
    memory.free(sequence)
    evict_all(memory)
    finish_step(memory)
    assert memory.reset_prefix_cache()
    assert memory.store.snapshot().num_blocks == 0 and not memory.load_prefix(again(sequence), 1, None)


def test_without_a_prefix_cache_nothing_is_offered() -> None:
    memory = memory_of(8, 20, caching=False)
    sequence = running(memory, "a", None, num_tokens=12)
    memory.free(sequence)
    evict_all(memory)
    assert memory.store.take_transfers() == ([], []) and not memory.load_prefix(again(sequence), 1, None)


def test_a_tier_whose_blocks_mean_something_else_is_not_attached() -> None:
    pool = BlockPool(4)
    store = BlockStore(pool, BlockCopies(), KVFingerprint(weights="a", dtype="float32"))
    with pytest.raises(ValueError, match="weights is 'b', not 'a'"):
        store.attach(HostTier(4, 1, KVFingerprint(weights="b", dtype="float32")))
    with pytest.raises(ValueError, match="version is 0, not 1"):
        store.attach(HostTier(4, 1, KVFingerprint(weights="a", dtype="float32", version=0)))
    assert pool.on_evict is None
    store.attach(HostTier(4, 1, KVFingerprint(weights="a", dtype="float32")))
    assert isinstance(store.tier, HostTier) and isinstance(pool.blocks[0], Block)
