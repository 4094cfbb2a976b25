from __future__ import annotations

import pytest

from ratoon.core.kv import CrossAttentionSpec, KVCacheConfig, KVCacheGroup
from ratoon.memory.kv_cache_manager import KVCacheManager
from ratoon.memory.leases import LeaseTable
from ratoon.memory.sequence import TokenSequence
from ratoon.memory.tails import BeamTails
from tests.unit.memory.encoder_memory import FULL, compute, document, forked, memory_of, running, sequence_of

# ---- whose table it is ----


def test_a_table_is_as_long_as_its_encoder_input() -> None:
    memory = memory_of(20)
    assert [memory.num_cross_blocks(length) for length in (1, 4, 5, 1500)] == [1, 1, 2, 375]
    sequence = sequence_of("a")
    assert memory.attach_cross(sequence, document(9))
    assert len(sequence.cross.block_ids) == 3 and sequence.cross.num_positions == 9
    assert memory.num_free_blocks == 19 - 3
    memory.check([sequence])


def test_sequences_with_the_same_input_hold_one_table() -> None:
    memory = memory_of(20)
    first, second = sequence_of("a"), sequence_of("b")
    assert not memory.has_cross(second, document(9))
    assert memory.attach_cross(first, document(9))
    assert memory.has_cross(second, document(9)), "it is about to be written"
    assert memory.attach_cross(second, document(9))
    assert second.cross is first.cross
    assert memory.num_free_blocks == 19 - 3
    assert {block.ref_cnt for block in first.cross.blocks} == {1}
    memory.check([first, second])


@pytest.mark.parametrize("caching", [True, False])
def test_another_salt_is_another_input(caching: bool) -> None:
    memory = memory_of(20, caching=caching)
    own = running(memory, "a", document(9), salt="x")
    other = sequence_of("b", salt="y")
    assert not memory.has_cross(other, document(9))
    assert memory.attach_cross(other, document(9))
    assert not set(other.cross.block_ids) & set(own.cross.block_ids)


def test_without_memory_nothing_is_attached() -> None:
    memory = memory_of(4)
    sequence = sequence_of("a")
    assert not memory.attach_cross(sequence, document(13))
    assert sequence.cross is None and memory.num_free_blocks == 3
    assert memory.take_encoder_writes() == []
    assert not memory.has_cross(sequence, document(13))
    memory.check([])


def test_attaching_again_changes_nothing_and_another_input_is_an_error() -> None:
    memory = memory_of(20)
    sequence = running(memory, "a", document(9))
    table = sequence.cross
    assert memory.attach_cross(sequence, document(9)) and sequence.cross is table
    with pytest.raises(ValueError, match="another encoder input"):
        memory.attach_cross(sequence, document(5))


# ---- what must be written ----


def test_a_table_is_written_once_in_the_step_of_its_first_holder() -> None:
    memory = memory_of(20)
    first, second = sequence_of("a"), sequence_of("b")
    memory.attach_cross(first, document(9))
    memory.attach_cross(second, document(9))
    ((holder_id, table),) = memory.take_encoder_writes()
    assert holder_id == "a"
    assert table.encoder_input == document(9) and table.block_ids == first.cross.block_ids
    assert first.cross.encoder_input is None, "it is large and no longer needed"
    assert memory.take_encoder_writes() == []
    memory.attach_cross(sequence_of("c"), document(9))
    assert memory.take_encoder_writes() == []


def test_a_table_that_lost_its_holders_is_neither_written_nor_found() -> None:
    memory = memory_of(20)
    sequence = sequence_of("a")
    memory.attach_cross(sequence, document(9))
    memory.free(sequence)
    assert memory.take_encoder_writes() == []
    assert not memory.has_cross(sequence, document(9))
    assert memory.num_free_blocks == 19
    memory.check([])


def test_a_table_is_written_on_account_of_somebody_who_still_holds_it() -> None:
    memory = memory_of(20)
    first, second = sequence_of("a"), sequence_of("b")
    memory.attach_cross(first, document(9))
    memory.attach_cross(second, document(9))
    memory.free(first)
    ((holder_id, _),) = memory.take_encoder_writes()
    assert holder_id == "b"
    memory.check([second])


# ---- the cache ----


def test_a_table_that_nobody_holds_is_found_while_its_blocks_are_there() -> None:
    memory = memory_of(20)
    sequence = running(memory, "a", document(9))
    block_ids = sequence.cross.block_ids
    memory.free(sequence)
    assert memory.num_free_blocks == 19
    again = sequence_of("b")
    assert memory.has_cross(again, document(9)) and memory.attach_cross(again, document(9))
    assert again.cross.block_ids == block_ids
    assert memory.take_encoder_writes() == []
    memory.check([again])


def test_a_table_that_has_lost_one_block_is_not_found() -> None:
    memory = memory_of(7)
    memory.free(running(memory, "a", document(9), num_tokens=1))
    running(memory, "b", None, num_tokens=16)  # takes four of six: one of the table's
    assert not memory.has_cross(sequence_of("c"), document(9))


def test_without_caching_a_table_is_shared_and_not_found_later() -> None:
    memory = memory_of(20, caching=False)
    first, second = running(memory, "a", document(9)), sequence_of("b")
    assert memory.has_cross(second, document(9)) and memory.attach_cross(second, document(9))
    assert second.cross is first.cross
    memory.free(first)
    memory.free(second)
    assert not memory.has_cross(second, document(9))
    memory.check([])


def test_a_table_of_a_failed_step_is_kept_by_its_holders_and_given_to_nobody_else() -> None:
    memory = memory_of(20)
    failed, other = running(memory, "a", document(9)), running(memory, "b", document(9))
    memory.free(failed, trusted=False)
    newcomer = sequence_of("c")
    assert not memory.has_cross(newcomer, document(9))
    assert memory.attach_cross(newcomer, document(9))
    assert newcomer.cross is not other.cross
    assert len(memory.take_encoder_writes()) == 1
    memory.check([other, newcomer])
    memory.free(other)
    assert memory.has_cross(sequence_of("d"), document(9)), "the good one"
    memory.free(newcomer, trusted=False)
    assert not memory.has_cross(sequence_of("d"), document(9))


def test_a_reset_frees_and_forgets_everything() -> None:
    memory = memory_of(20, 20)
    sequences = [running(memory, name, document(9)) for name in "abc"]
    assert memory.swap_out(sequences[0])
    sequences.append(sequence_of("d"))
    memory.attach_cross(sequences[3], document(5))
    assert not memory.reset(sequences[:2]), "others are here"
    assert memory.reset(sequences)
    assert memory.num_free_blocks == 19 and memory.num_free_slots == 20
    assert not memory.has_cross(sequence_of("e"), document(9))
    assert memory.store.take_transfers() == ([], []) and memory.take_encoder_writes() == []
    memory.check([])


# ---- sharing ----


def test_a_fork_holds_its_parents_table() -> None:
    memory = memory_of(20)
    parent = running(memory, "a", document(9))
    child = forked(memory, parent)
    assert child.cross is parent.cross and memory.num_free_blocks == 19 - 3 - 2
    memory.check([parent, child])
    memory.free(parent)
    memory.check([child])
    assert len(child.cross.blocks) == 3


def test_a_continuation_inherits_the_table_with_the_blocks() -> None:
    memory = memory_of(20)
    parent = running(memory, "a", document(9))
    child = TokenSequence("b", [*parent.token_ids, 1], parent.extra_keys)
    assert memory.inherit_blocks_from_parent(parent, child, 6) == 6
    assert child.cross is parent.cross


def test_nothing_is_inherited_from_a_parent_that_read_another_input() -> None:
    memory = memory_of(20)
    parent = running(memory, "a", document(9))
    child = TokenSequence("b", [*parent.token_ids, 1], parent.extra_keys)
    memory.attach_cross(child, document(5))
    assert memory.inherit_blocks_from_parent(parent, child, 6) == 0
    assert child.block_tables == []
    memory.check([parent, child])


def test_what_is_kept_of_a_beam_holds_the_table_without_the_trunk() -> None:
    memory = memory_of(20)
    trunk = running(memory, "a", document(9))
    tails = BeamTails(memory, trunk)
    tails.fork([0, 0])
    assert tails.allocate(1) is not None
    kept = tails.as_sequence(tails.keep(0), "a", [*trunk.token_ids, 1])
    assert kept.cross is trunk.cross
    tails.release()
    memory.free(trunk)
    memory.check([kept])
    assert len(kept.cross.blocks) == 3


def test_a_lease_counts_the_blocks_of_a_table_once() -> None:
    memory = memory_of(40)
    leases = LeaseTable(memory, budget=8)
    first, second, runner = (running(memory, name, document(9)) for name in "abc")
    assert leases.grant(first, 10.0) and leases.num_blocks == 2 + 3
    assert leases.grant(second, 20.0) and leases.num_blocks == 2 + 2 + 3
    leases.check()
    memory.check([*leases.sequences(), runner])
    assert leases.num_reclaimable_blocks() == 4, "another sequence holds the table"
    memory.free(runner)
    assert leases.num_reclaimable_blocks() == 7
    leases.expire(15.0)
    assert leases.num_blocks == leases.num_reclaimable_blocks() == 5
    leases.end_all()
    assert leases.num_blocks == 0 and memory.num_free_blocks == 39
    leases.check()


def test_a_lease_that_its_table_makes_too_large_is_refused() -> None:
    memory = memory_of(40)
    leases = LeaseTable(memory, budget=4)
    sequence = running(memory, "a", document(9))
    assert not leases.grant(sequence, 10.0)
    assert sequence.cross is not None, "its memory is still its own"
    memory.check([sequence])


def test_the_table_can_be_freed_alone() -> None:
    memory = memory_of(20)
    sequence = running(memory, "a", document(9))
    memory.free_cross(sequence)
    assert sequence.cross is None and memory.num_free_blocks == 19 - 2
    memory.check([sequence])


def test_a_cross_group_may_have_blocks_of_another_size() -> None:
    cross = KVCacheGroup(CrossAttentionSpec(8, 1, 8, "float16"), (0,))
    memory = KVCacheManager(KVCacheConfig(10, 4, (KVCacheGroup(FULL, (0,)),), cross), 100)
    sequence = running(memory, "a", document(9))
    assert len(sequence.cross.block_ids) == 2 and len(memory.block_ids(sequence)[0]) == 2
    memory.check([sequence])


def test_the_self_check_notices_a_holder_that_is_not_named() -> None:
    memory = memory_of(20)
    first, second = running(memory, "a", document(9)), running(memory, "b", document(9))
    with pytest.raises(AssertionError, match="not those that reference it"):
        memory.check([first])
    memory.check([first, second])


def test_a_table_and_a_prefix_of_the_same_tokens_do_not_meet() -> None:
    """Their names are in different groups."""
    memory = memory_of(20)
    sequence = running(memory, "a", document(8), num_tokens=8)
    assert not set(memory.block_ids(sequence)[0]) & set(sequence.cross.block_ids)
    assert len(memory.pool.cached_blocks(0)) == 2 and len(memory.pool.cached_blocks(1)) == 2
    compute(memory, sequence, 0)
    memory.check([sequence])
