from __future__ import annotations

import pytest

from ratoon.core.kv import SlidingWindowSpec
from ratoon.core.plan import BlockCopy
from ratoon.memory.leases import LeaseTable
from ratoon.memory.sequence import TokenSequence
from ratoon.memory.tails import BeamTails
from tests.unit.memory.encoder_memory import (
    append,
    compute,
    document,
    finish_step,
    forked,
    memory_of,
    running,
    sequence_of,
)

# ---- out and in ----


def test_a_sequence_goes_to_the_host_and_comes_back_as_it_was() -> None:
    memory = memory_of(20, 10)
    sequence = running(memory, "a", None)
    hashes = sequence.block_hashes.copy()
    assert memory.swap_out(sequence)
    assert memory.is_swapped(sequence)
    assert sequence.block_tables == [] and sequence.num_computed_tokens == sequence.write_limit == 0
    assert memory.num_free_blocks == 19 and memory.num_free_host_blocks == 8
    assert memory.take_swaps() == ([(1, 1), (2, 2)], [])
    other = running(memory, "b", None)
    assert memory.num_blocks_to_swap_in(sequence) == 2
    assert memory.swap_in(sequence)
    assert not memory.is_swapped(sequence)
    assert sequence.num_computed_tokens == 6 and sequence.block_hashes == hashes
    assert memory.take_swaps() == ([], list(zip([1, 2], memory.block_ids(sequence)[0], strict=True)))
    assert memory.num_free_host_blocks == 10
    memory.check([sequence, other])


def test_blocks_that_a_window_has_passed_stay_away() -> None:
    memory = memory_of(20, 10, SlidingWindowSpec(4, 1, 8, "float16", window=4))
    sequence = running(memory, "a", None, num_tokens=12)
    append(sequence, 1)
    compute(memory, sequence, 1)
    num_blocks = 19 - memory.num_free_blocks
    assert memory.swap_out(sequence)
    assert memory.num_free_host_blocks == 10 - num_blocks
    assert memory.swap_in(sequence)
    assert memory.block_ids(sequence)[0][:2] == [0, 0]
    memory.check([sequence])


def test_without_room_on_the_host_nothing_changes() -> None:
    memory = memory_of(20, 4)
    sequence = running(memory, "a", document(9))
    before = memory.block_ids(sequence)
    assert not memory.swap_out(sequence), "two blocks and a table of three"
    assert not memory.is_swapped(sequence) and memory.block_ids(sequence) == before
    assert memory.num_free_host_blocks == 4 and memory.take_swaps() == ([], [])
    memory.check([sequence])


def test_without_room_on_the_device_a_sequence_stays_on_the_host() -> None:
    memory = memory_of(6, 10)
    sequence = running(memory, "a", document(9))
    assert memory.swap_out(sequence)
    finish_step(memory)
    other = running(memory, "b", None, num_tokens=1)
    assert not memory.swap_in(sequence)
    assert memory.is_swapped(sequence) and memory.num_free_blocks == 4
    memory.check([sequence, other])


def test_without_a_host_pool_nobody_is_swapped_out() -> None:
    memory = memory_of(20)
    sequence = running(memory, "a", None)
    assert not memory.swap_out(sequence)
    memory.check([sequence])


def test_what_a_swapped_sequence_has_registered_can_still_be_found() -> None:
    memory = memory_of(20, 10)
    sequence = running(memory, "a", None, num_tokens=9)
    assert memory.swap_out(sequence)
    other = TokenSequence("b", sequence.token_ids.copy(), sequence.extra_keys)
    assert memory.get_computed_blocks(other)[1] == 8


def test_a_sequence_that_has_come_back_can_be_found_again() -> None:
    memory = memory_of(6, 10)
    sequence = running(memory, "a", None, num_tokens=9)
    assert memory.swap_out(sequence)
    memory.free(running(memory, "b", None, num_tokens=20))  # takes all blocks
    finish_step(memory)
    assert memory.swap_in(sequence)
    append(sequence, 1)
    compute(memory, sequence, 1)
    other = TokenSequence("c", sequence.token_ids.copy(), sequence.extra_keys)
    assert memory.get_computed_blocks(other)[1] == 8
    memory.check([sequence])


def test_what_was_registered_ahead_of_a_step_that_did_not_happen_is_not_found() -> None:
    memory = memory_of(20, 10)
    sequence = running(memory, "a", None, num_tokens=4)
    append(sequence, 1, 2, 3, 4)
    assert memory.allocate_slots(sequence, 4) is not None
    assert memory.swap_out(sequence)
    other = TokenSequence("b", [*sequence.token_ids, 9], sequence.extra_keys)
    assert memory.get_computed_blocks(other)[1] == 4


def test_a_sequence_that_is_on_the_host_can_not_go_there() -> None:
    memory = memory_of(20, 10)
    sequence = running(memory, "a", None)
    assert memory.swap_out(sequence)
    with pytest.raises(ValueError, match="already"):
        memory.swap_out(sequence)


def test_shared_blocks_are_copied_and_stay_with_those_who_share_them() -> None:
    memory = memory_of(20, 10)
    parent = running(memory, "a", None)
    child = forked(memory, parent)
    assert memory.swap_out(parent)
    assert memory.num_free_blocks == 17 and memory.num_free_host_blocks == 8
    assert memory.swap_out(child)
    assert memory.num_free_blocks == 19 and memory.num_free_host_blocks == 6
    memory.check([parent, child])


def test_ended_sequences_give_their_host_blocks_back() -> None:
    memory = memory_of(20, 20)
    first, second = running(memory, "a", document(9)), running(memory, "b", document(9))
    leases = LeaseTable(memory, budget=10)
    assert memory.swap_out(first) and memory.swap_out(second)
    memory.free(first)
    assert memory.num_free_host_blocks == 20 - 2 - 3
    assert leases.grant(second, 10.0), "which holds nothing"
    assert not memory.is_swapped(second) and leases.num_blocks == 0
    assert memory.num_free_host_blocks == 20
    memory.check(leases.sequences())


# ---- within one step ----


def test_a_sequence_that_ends_before_the_plan_is_built_moves_nothing() -> None:
    memory = memory_of(20, 10)
    leaving, arriving = running(memory, "a", None), running(memory, "b", None)
    assert memory.swap_out(arriving)
    finish_step(memory)
    assert memory.swap_out(leaving)
    memory.free(leaving)
    assert memory.swap_in(arriving)
    memory.free(arriving)
    assert memory.take_swaps() == ([], [])
    assert memory.num_free_blocks == 19 and memory.num_free_host_blocks == 10
    assert memory.get_computed_blocks(TokenSequence("c", arriving.token_ids, arriving.extra_keys))[1] == 0, "not there"


def test_a_host_block_that_a_swap_in_reads_is_free_only_afterwards() -> None:
    memory = memory_of(20, 2)
    arriving, leaving = running(memory, "a", None), running(memory, "b", None)
    assert memory.swap_out(arriving)
    finish_step(memory)
    assert memory.swap_in(arriving)
    assert not memory.swap_out(leaving)
    finish_step(memory)
    assert memory.swap_out(leaving)


def test_a_sequence_that_comes_and_goes_in_one_step_moves_nothing() -> None:
    memory = memory_of(20, 2)
    sequence = running(memory, "a", None)
    assert memory.swap_out(sequence)
    finish_step(memory)
    assert memory.swap_in(sequence) and memory.swap_out(sequence)
    assert memory.take_swaps() == ([], [])
    assert memory.is_swapped(sequence) and memory.num_free_host_blocks == 0
    memory.check([sequence])


def test_a_block_that_is_swapped_in_and_copied_comes_from_the_host_twice() -> None:
    memory = memory_of(20, 10)
    parent = running(memory, "a", None)
    assert memory.swap_out(parent)
    finish_step(memory)
    assert memory.swap_in(parent)
    child = TokenSequence("b", [*parent.token_ids, 1], parent.extra_keys)
    assert memory.inherit_blocks_from_parent(parent, child, 6) == 6
    compute(memory, child, 1)
    assert memory.take_block_copies() == []
    first, second = memory.block_ids(parent)[0]
    assert memory.take_swaps()[1] == [(1, first), (2, second), (2, memory.block_ids(child)[0][1])]
    memory.check([parent, child])


def test_beams_of_a_trunk_that_is_swapped_in_get_their_copies_from_the_host() -> None:
    memory = memory_of(20, 10)
    trunk = running(memory, "a", None)
    assert memory.swap_out(trunk)
    finish_step(memory)
    assert memory.swap_in(trunk)
    tails = BeamTails(memory, trunk)
    tails.fork([0, 0])
    assert tails.allocate(1) is not None
    own = [beam[0][0].block_id for beam in tails.tables()]
    assert memory.take_block_copies() == []
    assert memory.take_swaps()[1][2:] == [(2, own[0]), (2, own[1])]


def test_beams_go_to_the_host_with_their_trunk_and_share_the_same_blocks_when_they_are_back() -> None:
    memory = memory_of(20, 10)
    trunk = running(memory, "a", None)  # six tokens in blocks of four
    tails = BeamTails(memory, trunk)
    tails.fork([0, 0])
    assert tails.allocate(3) is not None
    finish_step(memory)
    tails.fork([0, 0, 1])
    num_free = memory.num_free_blocks
    assert tails.allocate(1) is not None, "the step that it was for does not come"
    assert tails.swap_out(num_unwritten_tokens=1)
    tails.release()
    assert memory.num_free_blocks == 19 and memory.num_tail_tokens_on_host(trunk) == 9
    # Of the trunk two, of the first two beams a shared one and, because of the step, one each, of the last two
    swapped_out, _ = memory.take_swaps()
    assert len(swapped_out) == 2 + 1 + 2 + 2 and memory.num_free_host_blocks == 3
    memory.take_block_copies()
    memory.check([trunk])
    tails = BeamTails.from_host(memory, trunk)
    assert trunk.num_computed_tokens == 6 and tails.num_computed_tokens == 9
    assert memory.num_free_blocks == num_free - 1 and len(memory.take_swaps()[1]) == 7
    assert memory.num_free_host_blocks == 10
    (first,), (second,), (third,) = tails.tables()
    assert [len(blocks) for blocks in (first, second, third)] == [2, 2, 2]
    assert first[0] is second[0] and third[0] is not first[0] and first[0].ref_cnt == 2
    changed = tails.allocate(1)
    assert changed is not None and changed[0] == 1 and len(changed[1][0]) == 6, "tables travel in full"
    tails.release()
    memory.free(trunk)
    memory.check([])
    assert memory.num_free_blocks == 19


def test_without_room_for_beams_on_the_host_nothing_changes() -> None:
    memory = memory_of(20, 4)
    trunk = running(memory, "a", None)
    tails = BeamTails(memory, trunk)
    tails.fork([0, 0])
    assert not tails.swap_out(0), "nothing is computed behind the trunk"
    assert tails.allocate(3) is not None
    assert not tails.swap_out(0) and not memory.is_swapped(trunk)
    assert memory.num_free_host_blocks == 4 and len(memory.block_ids(trunk)[0]) == 2
    assert memory.swap_out(trunk), "there is for the trunk"
    tails.release()
    assert memory.num_tail_tokens_on_host(trunk) == 0
    memory.check([trunk])


def test_a_sequence_whose_copy_is_not_made_yet_is_saved_from_the_copys_source() -> None:
    memory = memory_of(20, 10)
    parent = running(memory, "a", None)
    child = forked(memory, parent)
    assert memory.allocate_slots(child, 1) is not None
    source = memory.block_ids(parent)[0][1]
    assert memory.block_ids(child)[0][1] != source
    assert memory.swap_out(child)
    assert memory.take_swaps()[0] == [(memory.block_ids(parent)[0][0], 1), (source, 2)]
    assert memory.take_block_copies() == []
    memory.check([parent, child])


def test_a_block_that_was_to_come_back_and_is_taken_for_a_copy_gets_the_copy_alone() -> None:
    memory = memory_of(6, 10)
    gone = running(memory, "a", None)
    assert memory.swap_out(gone)
    finish_step(memory)
    parent = running(memory, "b", None)
    child = forked(memory, parent)
    assert memory.swap_in(gone)
    (_, block_id) = memory.block_ids(gone)[0]
    memory.free(gone)
    compute(memory, child, 1)
    assert memory.block_ids(child)[0][1] == block_id
    assert [copy.dst for copy in memory.take_block_copies()] == [block_id]
    assert memory.take_swaps() == ([], [])
    memory.check([parent, child])


def test_a_freed_block_can_be_swapped_out_and_in_and_copied_in_one_step() -> None:
    """Device blocks: `a` leaves 1 and 2, `b` comes to them, and the copy that a fork of `c` needs goes elsewhere."""
    memory = memory_of(6, 10)
    b = running(memory, "b", None)
    assert memory.swap_out(b)
    finish_step(memory)
    a, c = running(memory, "a", None), running(memory, "c", None)
    child = forked(memory, c)
    left = memory.block_ids(a)[0]
    assert memory.swap_out(a)
    compute(memory, child, 1)
    assert memory.swap_in(b)
    (copy,) = memory.take_block_copies()
    swapped_out, swapped_in = memory.take_swaps()
    assert [device for device, _ in swapped_out] == left
    assert isinstance(copy, BlockCopy) and copy.src == memory.block_ids(c)[0][1]
    targets = [copy.dst, *(device for _, device in swapped_in)]
    assert len(set(targets)) == 3 and set(left) <= set(targets)
    assert not {host for _, host in swapped_out} & {host for host, _ in swapped_in}
    memory.check([a, b, c, child])


# ---- steps that fail ----


def test_a_copy_that_a_failed_step_was_to_make_is_not_used() -> None:
    memory = memory_of(20, 20)
    lost, kept = running(memory, "a", document(9)), running(memory, "b", document(5))
    assert memory.swap_out(kept)
    finish_step(memory)
    assert memory.swap_out(lost)
    swapped_out, _ = memory.take_swaps()
    memory.invalidate_swaps(swapped_out)
    assert memory.is_swapped(kept) and not memory.is_swapped(lost)
    assert memory.num_free_host_blocks == 20 - 2 - 2
    memory.check([lost, kept])


def test_what_was_to_be_saved_since_a_failed_step_is_not_trusted() -> None:
    memory = memory_of(20, 20)
    sequence = running(memory, "a", None)
    assert memory.swap_out(sequence)
    memory.invalidate_swaps([])
    assert not memory.is_swapped(sequence) and memory.take_swaps() == ([], [])
    memory.check([sequence])


# ---- cross tables ----


def test_a_table_goes_to_the_host_with_its_last_holder_and_once_for_all() -> None:
    memory = memory_of(20, 20)
    first, second = running(memory, "a", document(9)), running(memory, "b", document(9))
    assert memory.swap_out(first)
    assert memory.num_free_blocks == 19 - 2 - 3 and memory.num_free_host_blocks == 20 - 2
    assert memory.swap_out(second)
    assert memory.num_free_blocks == 19 and memory.num_free_host_blocks == 20 - 4 - 3
    finish_step(memory)
    assert memory.num_blocks_to_swap_in(first) == 2 + 3
    assert memory.swap_in(first)
    assert memory.num_blocks_to_swap_in(second) == 2
    assert memory.swap_in(second)
    finish_step(memory)
    assert first.cross is second.cross and memory.num_free_host_blocks == 20
    memory.check([first, second])


def test_a_table_follows_to_the_host_when_the_last_holder_ends() -> None:
    memory = memory_of(20, 20)
    waiting, ending = running(memory, "a", document(9)), running(memory, "b", document(9))
    assert memory.swap_out(waiting)
    memory.take_swaps()
    block_ids = ending.cross.block_ids
    memory.free(ending)
    assert [device for device, _ in memory.take_swaps()[0]] == block_ids
    assert memory.num_free_blocks == 19 and memory.num_free_host_blocks == 20 - 2 - 3
    memory.check([waiting])


def test_who_needs_a_table_that_finds_no_room_on_the_host_is_computed_again() -> None:
    memory = memory_of(20, 4)
    waiting, ending = running(memory, "a", document(9)), running(memory, "b", document(9))
    assert memory.swap_out(waiting)
    memory.free(ending)
    assert not memory.is_swapped(waiting)
    assert memory.num_free_host_blocks == 4 and memory.num_free_blocks == 19
    memory.check([waiting])


def test_a_newcomer_brings_the_table_back_from_the_host() -> None:
    memory = memory_of(8, 20, caching=False)
    waiting = running(memory, "a", document(9))
    assert memory.swap_out(waiting)
    finish_step(memory)
    newcomer = sequence_of("b")
    assert memory.has_cross(newcomer, document(9)) and memory.attach_cross(newcomer, document(9))
    assert memory.take_encoder_writes() == []
    assert [device for _, device in memory.take_swaps()[1]] == newcomer.cross.block_ids
    memory.check([waiting, newcomer])
    memory.free(newcomer)
    assert memory.is_swapped(waiting) and memory.take_swaps() == ([], []), "the host's copy is there still"
    assert memory.swap_in(waiting)
    assert len(memory.take_swaps()[1]) == 2 + 3
    memory.check([waiting])


def test_a_table_that_is_cached_on_the_device_is_not_brought_back() -> None:
    memory = memory_of(20, 20)
    sequence = running(memory, "a", document(9))
    block_ids = sequence.cross.block_ids
    assert memory.swap_out(sequence)
    finish_step(memory)
    assert memory.swap_in(sequence)
    assert sequence.cross.block_ids == block_ids
    assert len(memory.take_swaps()[1]) == 2


def test_a_table_that_is_not_written_yet_keeps_its_holder_here() -> None:
    memory = memory_of(20, 20)
    sequence = sequence_of("a")
    memory.attach_cross(sequence, document(9))
    assert memory.allocate_slots(sequence, 6) is not None
    assert not memory.swap_out(sequence)
    memory.check([sequence])


def test_who_needs_a_table_of_a_failed_step_is_computed_again() -> None:
    memory = memory_of(20, 20)
    waiting, failed, other = (running(memory, name, document(9)) for name in "abc")
    assert memory.swap_out(waiting)
    memory.free(failed, trusted=False)
    assert not memory.is_swapped(waiting)
    assert not memory.swap_out(other), "its table is nothing to keep"
    memory.check([waiting, other])


def test_the_table_of_a_swapped_sequence_can_be_freed_alone() -> None:
    memory = memory_of(20, 20)
    sequence = running(memory, "a", document(9))
    assert memory.swap_out(sequence)
    memory.free_cross(sequence)
    assert memory.num_free_host_blocks == 20 - 2
    assert memory.swap_in(sequence)
    assert sequence.cross is None
    memory.check([sequence])
