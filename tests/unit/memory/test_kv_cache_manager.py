from __future__ import annotations

import pytest

from ratoon.core.kv import FullAttentionSpec, KVCacheConfig, KVCacheGroup, SlidingWindowSpec
from ratoon.core.plan import BlockCopy
from ratoon.memory.hashing import ExtraKeys, MediaSpan
from ratoon.memory.kv_cache_manager import KVCacheManager
from ratoon.memory.prefix_cache import MANY_BLOCKS
from ratoon.memory.sequence import TokenSequence

FULL = FullAttentionSpec(4, 1, 8, "float16")


def window_of(window: int) -> SlidingWindowSpec:
    return SlidingWindowSpec(4, 1, 8, "float16", window=window)


def manager_of(num_blocks: int, *specs: FullAttentionSpec | SlidingWindowSpec, caching: bool = True) -> KVCacheManager:
    groups = tuple(KVCacheGroup(spec, (layer,)) for layer, spec in enumerate(specs or (FULL,)))
    return KVCacheManager(KVCacheConfig(num_blocks, 4, groups), max_model_len=1000, enable_caching=caching)


def compute(manager: KVCacheManager, branch: TokenSequence, num_new: int, use_cache: bool = False) -> list[list[int]]:
    """Allocate for a step and count it as done. Returns the ids that were appended."""
    hit, num_hit = manager.get_computed_blocks(branch) if use_cache else (None, 0)
    appended = manager.allocate_slots(branch, num_new, hit, num_hit)
    assert appended is not None
    branch.num_computed_tokens += num_hit + num_new
    return list(appended)


def written(manager: KVCacheManager, branch_id: str, tokens: list[int]) -> TokenSequence:
    branch = TokenSequence(branch_id, tokens)
    compute(manager, branch, len(tokens))
    return branch


def append(branch: TokenSequence, *tokens: int) -> None:
    branch.token_ids.extend(tokens)
    branch.num_tokens += len(tokens)


# ---- allocation ----


def test_blocks_are_appended_only_when_the_last_one_is_full() -> None:
    manager = manager_of(10)
    branch = TokenSequence("a", [0] * 6)
    assert compute(manager, branch, 6) == [[1, 2]]
    append(branch, 1, 2, 3)
    assert compute(manager, branch, 2) == [[]]
    assert compute(manager, branch, 1) == [[3]]
    assert manager.block_ids(branch) == ([1, 2, 3],)
    manager.check([branch])


def test_the_write_limit_covers_exactly_the_memory_that_is_there() -> None:
    manager = manager_of(10)
    branch = written(manager, "a", [0] * 6)
    assert branch.write_limit == 8


def test_a_refused_allocation_leaves_everything_as_it_was() -> None:
    manager = manager_of(4, window_of(4), FULL)
    branch = TokenSequence("a", [0] * 20)
    assert manager.allocate_slots(branch, 8) is None
    assert branch.block_tables == [] and manager.num_free_blocks == 3
    compute(manager, branch, 4)
    before = manager.block_ids(branch)
    assert manager.allocate_slots(branch, 8) is None
    assert manager.block_ids(branch) == before and manager.num_free_blocks == 1
    assert manager.take_block_copies() == []
    manager.check([branch])


def test_freeing_gives_everything_back() -> None:
    manager = manager_of(12, FULL, window_of(4))
    branch = written(manager, "a", [0] * 20)
    manager.free(branch)
    assert manager.usage == 0.0 and manager.num_free_blocks == 11
    assert branch.block_tables == [] and branch.write_limit == 0
    manager.check([branch])


# ---- prefix cache ----


def test_a_finished_prompt_is_found_by_whole_blocks_and_one_token_is_left() -> None:
    manager = manager_of(20)
    manager.free(written(manager, "a", list(range(8))))
    for num_tokens, num_hit in [(8, 4), (9, 8), (12, 8), (5, 4), (4, 0)]:
        branch = TokenSequence("b", list(range(num_tokens)))
        assert manager.get_computed_blocks(branch)[1] == num_hit


def test_a_hit_is_shared_by_reference() -> None:
    manager = manager_of(20)
    first = written(manager, "a", list(range(10)))
    second = TokenSequence("b", [*range(8), 50, 51])
    assert compute(manager, second, 2, use_cache=True) == [[4]]
    assert manager.block_ids(second) == ([1, 2, 4],)
    manager.check([first, second])
    manager.free(first)
    manager.check([second])


def test_a_hit_counts_its_own_free_blocks_as_used() -> None:
    manager = manager_of(4)
    manager.free(written(manager, "a", list(range(12))))
    branch = TokenSequence("b", list(range(16)))
    hit, num_hit = manager.get_computed_blocks(branch)
    assert num_hit == 12
    assert manager.allocate_slots(branch, 4, hit, num_hit) is None, "the hit takes the last free blocks itself"
    assert manager.num_free_blocks == 3
    manager.check([])


def test_blocks_filled_by_decoding_are_found_too() -> None:
    manager = manager_of(20)
    branch = written(manager, "a", [0, 1])
    for token in range(2, 9):
        append(branch, token)
        compute(manager, branch, 1)
    manager.free(branch)
    assert manager.get_computed_blocks(TokenSequence("b", list(range(20))))[1] == 8


def test_another_salt_or_adapter_finds_nothing() -> None:
    manager = manager_of(20)
    keys = ExtraKeys([("salt", "x")])
    owner = TokenSequence("a", list(range(9)), keys)
    compute(manager, owner, 9)
    assert manager.get_computed_blocks(TokenSequence("b", list(range(9)), keys))[1] == 8
    for other in ([], [("salt", "y")], [("adapter", "x")]):
        assert manager.get_computed_blocks(TokenSequence("c", list(range(9)), ExtraKeys(other)))[1] == 0


def test_another_image_finds_the_blocks_before_it_and_is_no_continuation_of_what_follows() -> None:
    manager = manager_of(20)
    cat, dog = (ExtraKeys([], [MediaSpan(6, 3, name)]) for name in ("cat", "dog"))
    owner = TokenSequence("a", list(range(17)), cat)
    compute(manager, owner, 17)
    assert manager.get_computed_blocks(TokenSequence("b", list(range(17)), cat))[1] == 16
    assert manager.get_computed_blocks(TokenSequence("c", list(range(17)), dog))[1] == 4
    assert manager.get_computed_blocks(TokenSequence("d", list(range(17))))[1] == 4
    assert manager.inherit_blocks_from_parent(owner, TokenSequence("e", list(range(18)), dog), 17) == 0
    assert manager.inherit_blocks_from_parent(owner, TokenSequence("f", list(range(18)), dog), 6) == 6
    assert manager.inherit_blocks_from_parent(owner, TokenSequence("g", list(range(18)), cat), 17) == 17


def test_the_tail_of_a_sequence_is_evicted_before_its_head() -> None:
    manager = manager_of(6)
    manager.free(written(manager, "a", list(range(20))))
    other = written(manager, "b", [99] * 8)
    assert manager.get_computed_blocks(TokenSequence("c", list(range(20))))[1] == 12
    manager.check([other])


def test_what_was_registered_ahead_of_a_step_that_did_not_happen_is_not_found() -> None:
    manager = manager_of(20)
    branch = TokenSequence("a", list(range(12)))
    compute(manager, branch, 4)
    assert manager.allocate_slots(branch, 8) is not None
    manager.free(branch)  # taken out of the plan: num_computed_tokens is still 4
    assert manager.get_computed_blocks(TokenSequence("b", list(range(20))))[1] == 4


def test_nothing_that_a_failed_sequence_held_is_found() -> None:
    manager = manager_of(20)
    manager.free(written(manager, "a", list(range(8))))
    failed = TokenSequence("b", list(range(12)))
    compute(manager, failed, 4, use_cache=True)
    manager.free(failed, trusted=False)
    assert manager.get_computed_blocks(TokenSequence("c", list(range(20))))[1] == 0
    manager.check([])


def test_a_failed_fork_distrusts_the_named_block_that_it_shares_in_part() -> None:
    manager = manager_of(20)
    parent, child = written(manager, "a", list(range(8))), TokenSequence("a#1", list(range(7)))
    manager.fork(parent, child, 6)
    manager.free(child, trusted=False)
    assert manager.pool.cached_blocks() == {}
    manager.check([parent])


def test_a_reset_waits_until_nothing_is_in_use() -> None:
    manager = manager_of(20)
    branch = written(manager, "a", list(range(8)))
    manager.prefix_cache.count_lookup(8, 4)
    assert not manager.reset_prefix_cache()
    manager.free(branch)
    assert manager.reset_prefix_cache()
    assert manager.get_computed_blocks(TokenSequence("b", list(range(8))))[1] == 0
    assert manager.prefix_cache.stats.queries == 0


def test_without_caching_nothing_is_hashed_or_found() -> None:
    manager = manager_of(20, caching=False)
    branch = written(manager, "a", list(range(8)))
    assert branch.block_hashes == {}
    assert manager.get_computed_blocks(TokenSequence("b", list(range(8)))) == (([],), 0)


# ---- sliding windows and groups ----


def test_blocks_behind_the_window_are_given_back() -> None:
    manager = manager_of(20, window_of(5))
    branch = written(manager, "a", list(range(8)))
    append(branch, 8, 9, 10, 11, 12)
    compute(manager, branch, 1)  # position 8 reads 4…8: the first block is out
    assert manager.block_ids(branch) == ([0, 2, 3],)
    compute(manager, branch, 3)  # positions 9…11: 9 reads from 5 on, so the second block stays
    assert manager.block_ids(branch) == ([0, 2, 3],)
    compute(manager, branch, 1)  # position 12 reads 8…12
    assert manager.block_ids(branch)[0][:2] == [0, 0]
    manager.check([branch])


def test_blocks_behind_the_window_make_room_for_the_step_that_drops_them() -> None:
    manager = manager_of(3, window_of(4))
    branch = written(manager, "a", [0] * 8)
    append(branch, 0)
    assert manager.num_free_blocks == 0
    assert manager.allocate_slots(branch, 1) is not None
    manager.check([branch])


def test_a_shared_block_behind_the_window_makes_no_room() -> None:
    manager = manager_of(3, window_of(4))
    branch, child = written(manager, "a", [0] * 8), TokenSequence("a#1", [0] * 9)
    manager.fork(branch, child, 8)
    append(branch, 0)
    assert manager.allocate_slots(branch, 1) is None
    manager.check([branch, child])


def test_a_window_hit_needs_only_the_blocks_of_the_window() -> None:
    manager = manager_of(20, window_of(8))
    writer = written(manager, "a", list(range(16)))
    manager.pool.uncache(writer.block_tables[0][0])
    manager.free(writer)
    hit, num_hit = manager.get_computed_blocks(TokenSequence("b", list(range(17))))
    assert num_hit == 16
    assert [block.block_id for block in hit[0]] == [0, 0, 3, 4]


def test_a_window_that_begins_inside_a_block_needs_that_block() -> None:
    manager = manager_of(20, window_of(5))
    writer = written(manager, "a", list(range(16)))
    for place in (1, 2):
        manager.pool.uncache(writer.block_tables[0][place])
    manager.free(writer)
    assert manager.get_computed_blocks(TokenSequence("b", list(range(17))))[1] == 4


def test_a_window_hit_falls_back_to_an_earlier_complete_window() -> None:
    manager = manager_of(20, window_of(8))
    writer = written(manager, "a", list(range(20)))
    manager.pool.uncache(writer.block_tables[0][3])
    manager.free(writer)
    hit, num_hit = manager.get_computed_blocks(TokenSequence("b", list(range(21))))
    assert num_hit == 12
    assert [block.block_id for block in hit[0]] == [0, 2, 3]


def test_a_hit_holds_for_all_groups() -> None:
    """The window group has blocks 2, 3 and 5 of six; the full group the first five. Five blocks lack the window's
    fourth, so the hit goes down to where both agree."""
    manager = manager_of(40, FULL, window_of(8))
    writer = written(manager, "a", list(range(24)))
    full, window = writer.block_tables
    manager.pool.uncache(full[5])
    for place in (0, 3, 5):
        manager.pool.uncache(window[place])
    manager.free(writer)
    hit, num_hit = manager.get_computed_blocks(TokenSequence("b", list(range(25))))
    assert num_hit == 12
    assert [len(blocks) for blocks in hit] == [3, 3]
    assert hit[1][0] is manager.pool.null_block


def test_groups_share_the_pool_and_not_the_blocks() -> None:
    manager = manager_of(20, FULL, window_of(4))
    branch = written(manager, "a", list(range(8)))
    left, right = manager.block_ids(branch)
    assert not set(left) & set(right)
    manager.check([branch])


def test_required_blocks_grow_with_full_attention_and_not_with_a_window() -> None:
    assert manager_of(20).required_blocks(100, max_step_tokens=8) == 25
    assert manager_of(20, window_of(8)).required_blocks(100, max_step_tokens=8) <= 5
    assert manager_of(20, FULL, window_of(8)).required_blocks(4, max_step_tokens=8) == 2
    assert manager_of(25).required_blocks(100) > manager_of(25).num_usable_blocks
    assert manager_of(26).required_blocks(100) <= manager_of(26).num_usable_blocks


@pytest.mark.parametrize("window", range(1, 12))
@pytest.mark.parametrize("step", [1, 3, 4, 7])
def test_a_window_sequence_never_holds_more_than_its_required_blocks(window: int, step: int) -> None:
    manager = manager_of(50, window_of(window))
    branch = TokenSequence("a", [0] * 60)
    while branch.num_computed_tokens < 60:
        compute(manager, branch, min(step, 60 - branch.num_computed_tokens))
        assert 49 - manager.num_free_blocks <= manager.required_blocks(60, step)


def test_blocks_that_a_sequence_alone_holds_are_not_missing() -> None:
    """A window of six tokens and one in the step take three blocks at a time."""
    manager = manager_of(20, window_of(6))
    branch = TokenSequence("a", list(range(30)))
    assert manager.missing_blocks(branch, 0, None, 1) == manager.required_blocks(30, 1) == 3
    compute(manager, branch, 8)
    assert manager.missing_blocks(branch, 8, None, 1) == 1
    manager.fork(branch, TokenSequence("b", list(range(30))), 8)
    assert manager.missing_blocks(branch, 8, None, 1) == 3, "others keep them when the window has passed"


# ---- groups with blocks of different sizes ----

LARGE = FullAttentionSpec(6, 1, 8, "float16")


def test_each_group_has_as_many_blocks_as_its_own_size_needs() -> None:
    manager = manager_of(20, FULL, LARGE)
    branch = written(manager, "a", list(range(9)))
    assert manager.block_ids(branch) == ([1, 2, 3], [4, 5])
    assert branch.write_limit == 12
    append(branch, *range(4))
    assert compute(manager, branch, 4) == [[6], [7]]
    assert manager.required_blocks(13) == 4 + 3
    assert manager.num_usable_tokens == 36, "twelve tokens take three and two blocks"
    manager.check([branch])


def test_a_hit_ends_where_all_groups_have_whole_blocks() -> None:
    manager = manager_of(30, FULL, LARGE)
    branch = written(manager, "a", list(range(25)))
    manager.free(branch)
    for num_tokens, num_found in ((25, 24), (24, 12), (13, 12), (12, 0)):
        other = TokenSequence("b", list(range(num_tokens)))
        small, large = manager.get_computed_blocks(other)[0]
        assert manager.get_computed_blocks(other)[1] == num_found
        assert (len(small), len(large)) == (num_found // 4, num_found // 6)
    other = TokenSequence("b", list(range(25)))
    compute(manager, other, 1, use_cache=True)
    manager.check([other])


def test_a_fork_copies_the_partial_block_of_each_group() -> None:
    manager = manager_of(30, FULL, LARGE)
    parent = written(manager, "a", list(range(12)))
    child = TokenSequence("a#1", list(range(10)))
    manager.fork(parent, child, 10)
    append(child, 100)
    compute(manager, child, 1)
    copies = {(copy.group, copy.index) for copy in manager.take_block_copies()}
    assert copies == {(0, 2), (1, 1)}
    manager.check([parent, child])


def test_blocks_are_taken_back_group_by_group() -> None:
    manager = manager_of(30, FULL, LARGE)
    branch = written(manager, "a", list(range(13)))
    manager.roll_back(branch, 5)
    assert [len(table) for table in branch.block_tables] == [2, 2]
    manager.free(branch)
    assert manager.get_computed_blocks(TokenSequence("b", list(range(14))))[1] == 0
    manager.check([])


# ---- forks ----


def forked(manager: KVCacheManager, num_tokens: int) -> tuple[TokenSequence, TokenSequence]:
    parent = written(manager, "a", list(range(num_tokens)))
    child = TokenSequence("a#1", list(range(num_tokens)))
    manager.fork(parent, child, num_tokens)
    append(parent, 100)
    append(child, 200)
    return parent, child


def test_a_fork_shares_every_block_and_takes_no_memory() -> None:
    manager = manager_of(10)
    parent, child = forked(manager, 6)
    assert manager.block_ids(child) == manager.block_ids(parent) == ([1, 2],)
    assert manager.num_free_blocks == 7
    assert child.num_computed_tokens == 6
    assert child.block_hashes[4] == parent.block_hashes[4][:1]
    manager.check([parent, child])


def test_both_sharers_must_ask_before_they_write() -> None:
    manager = manager_of(10)
    parent, child = forked(manager, 6)
    assert parent.write_limit == child.write_limit == 0


def test_the_first_writer_gets_a_copy_and_the_last_holder_writes_in_place() -> None:
    manager = manager_of(10)
    parent, child = forked(manager, 6)
    assert compute(manager, child, 1) == [[]]
    assert manager.take_block_copies() == [BlockCopy("a#1", 0, 1, 2, 3)]
    assert manager.take_block_copies() == []
    assert compute(manager, parent, 1) == [[]]
    assert manager.take_block_copies() == []
    assert manager.block_ids(parent) == ([1, 2],)
    assert manager.block_ids(child) == ([1, 3],)
    assert parent.write_limit == 8
    manager.check([parent, child])


def test_a_copy_of_a_copy_in_one_step_reads_the_block_that_has_the_content() -> None:
    manager = manager_of(12, FULL)
    parent, child = forked(manager, 6)
    append(child, 90)
    compute(manager, child, 1)
    grandchild = TokenSequence("grandchild", [*child.token_ids[:6], 80])
    manager.fork(child, grandchild, 6)
    compute(manager, grandchild, 1)
    first, second = manager.take_block_copies()
    assert (first.src, first.dst) == (parent.block_tables[0][1].block_id, child.block_tables[0][1].block_id)
    assert (second.src, second.dst) == (first.src, grandchild.block_tables[0][1].block_id)
    manager.check([parent, child, grandchild])


def test_a_sharer_that_is_left_alone_needs_no_copy() -> None:
    manager = manager_of(10)
    parent, child = forked(manager, 6)
    manager.free(parent)
    compute(manager, child, 1)
    assert manager.take_block_copies() == []


def test_a_fork_at_the_end_of_a_block_copies_nothing() -> None:
    manager = manager_of(10)
    parent, child = forked(manager, 8)
    assert compute(manager, child, 1) == [[3]]
    assert compute(manager, parent, 1) == [[4]]
    assert manager.take_block_copies() == []


def test_a_copy_that_does_not_fit_is_refused_whole() -> None:
    manager = manager_of(3)
    parent, child = forked(manager, 6)
    assert manager.allocate_slots(child, 1) is None
    assert manager.block_ids(child) == ([1, 2],)
    assert manager.take_block_copies() == []
    manager.check([parent, child])


def test_copies_of_a_freed_sequence_are_forgotten() -> None:
    manager = manager_of(10)
    parent, child = forked(manager, 6)
    assert manager.allocate_slots(child, 1) is not None
    manager.free(child)
    assert manager.take_block_copies() == []
    manager.check([parent])


def test_every_group_copies_its_own_last_block() -> None:
    manager = manager_of(20, FULL, window_of(8))
    parent, child = forked(manager, 6)
    compute(manager, child, 1)
    assert [(copy.group, copy.index) for copy in manager.take_block_copies()] == [(0, 1), (1, 1)]
    manager.check([parent, child])


def test_a_fork_in_the_middle_of_a_named_block_never_writes_into_it() -> None:
    manager = manager_of(10)
    parent, child = written(manager, "a", list(range(8))), TokenSequence("c", [0, 1, 2, 3, 4, 77])
    manager.fork(parent, child, 5)
    manager.free(parent)  # the block has one holder now, but it can still be found by its hash
    compute(manager, child, 1)
    assert manager.take_block_copies() == [BlockCopy("c", 0, 1, 2, 3)]
    assert manager.get_computed_blocks(TokenSequence("d", list(range(9))))[1] == 8


def test_without_memory_for_a_copy_a_named_block_of_one_holder_is_written_in_place_and_not_found_any_more() -> None:
    manager = manager_of(4)  # the null block, and those of 12 tokens
    parent, child = written(manager, "a", list(range(8))), TokenSequence("c", [0, 1, 2, 3, 4, 77, 78, 79, 80])
    manager.fork(parent, child, 5)
    assert manager.allocate_slots(child, 4) is None, "the parent holds the block, too"
    manager.free(parent)
    assert compute(manager, child, 4) == [[3]]
    assert manager.take_block_copies() == [] and manager.block_ids(child) == ([1, 2, 3],)
    assert manager.get_computed_blocks(TokenSequence("d", list(range(9))))[1] == 4
    assert manager.get_computed_blocks(TokenSequence("e", [*child.token_ids, 81]))[1] == 8
    manager.check([child])


def test_a_fork_beyond_what_is_computed_is_refused() -> None:
    manager = manager_of(10)
    parent = written(manager, "a", list(range(6)))
    with pytest.raises(ValueError, match="has computed 6"):
        manager.fork(parent, TokenSequence("b", list(range(7))), 7)


def test_a_fork_into_a_window_that_is_gone_is_refused() -> None:
    manager = manager_of(20, window_of(4))
    parent = TokenSequence("a", list(range(20)))
    for _ in range(20):
        compute(manager, parent, 1)
    with pytest.raises(ValueError, match="were freed"):
        manager.fork(parent, TokenSequence("b", list(range(8))), 7)


def test_the_self_check_counts_references_over_all_tables() -> None:
    manager = manager_of(10)
    parent, child = forked(manager, 6)
    with pytest.raises(AssertionError, match="block 1: 2 references, 1 table entries"):
        manager.check([parent])
    manager.check([parent, child])


# ---- blocks of long prompts, which are added to the prefix cache later ----


LONG = list(range(4 * MANY_BLOCKS + 3))


def planned(manager: KVCacheManager, branch_id: str, tokens: list[int]) -> TokenSequence:
    branch = TokenSequence(branch_id, tokens.copy())
    compute(manager, branch, len(tokens), use_cache=True)
    return branch


def test_the_blocks_of_a_long_prompt_are_hashed_after_its_step_is_planned() -> None:
    manager = manager_of(200)
    branch = planned(manager, "a", LONG)
    assert manager.prefix_cache.has_unregistered_blocks and len(branch.block_hashes[4]) == 1
    manager.register_blocks()
    assert not manager.prefix_cache.has_unregistered_blocks
    assert (branch.num_registered_tokens, len(branch.block_hashes[4])) == (4 * MANY_BLOCKS, MANY_BLOCKS)
    manager.check([branch])


def test_a_request_of_the_same_step_finds_them_all_the_same() -> None:
    manager = manager_of(200)
    first, second = planned(manager, "a", LONG), planned(manager, "b", [*LONG, 7])
    assert manager.block_ids(first)[0][:MANY_BLOCKS] == manager.block_ids(second)[0][:MANY_BLOCKS]
    manager.check([first, second])


@pytest.mark.parametrize("trusted", [True, False])
def test_a_sequence_that_ends_before_is_cached_if_it_was_computed(trusted: bool) -> None:
    manager = manager_of(200)
    branch = planned(manager, "a", LONG)
    manager.free(branch, trusted)
    assert not manager.prefix_cache.has_unregistered_blocks
    hit = manager.get_computed_blocks(TokenSequence("b", LONG))[1]
    assert hit == (4 * MANY_BLOCKS if trusted else 0)


def test_forks_and_the_next_token_take_them_along() -> None:
    manager = manager_of(200)
    branch = planned(manager, "a", LONG)
    append(branch, 7, 8)
    compute(manager, branch, 1)  # planned ahead, before the first step has run
    assert manager.prefix_cache.has_unregistered_blocks
    child = TokenSequence("b", LONG)
    manager.fork(branch, child, len(LONG))
    assert child.num_registered_tokens == 4 * MANY_BLOCKS
    manager.check([branch, child])


def test_what_a_failed_step_should_have_written_is_not_found() -> None:
    manager = manager_of(200)
    branch = planned(manager, "a", LONG)
    manager.uncache(branch.block_tables[0])
    assert manager.get_computed_blocks(TokenSequence("b", LONG))[1] == 0


def test_with_a_window_the_blocks_of_a_prompt_are_cached_at_once() -> None:
    manager = manager_of(200, window_of(8))
    planned(manager, "a", LONG)
    assert not manager.prefix_cache.has_unregistered_blocks
