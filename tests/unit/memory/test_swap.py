"""Preempted sequences in the block store: saved whole, loaded as they were, or computed again where something is
lost."""

from __future__ import annotations

import pytest

from ratoon.core.kv import SlidingWindowSpec
from ratoon.core.outputs import TransferReport
from ratoon.core.plan import BlockCopy, BlockTransfer, SchedulerOutput
from ratoon.memory.leases import LeaseTable
from ratoon.memory.sequence import TokenSequence
from ratoon.memory.tails import BeamTails
from tests.unit.memory.encoder_memory import (
    append,
    bring_back,
    compute,
    document,
    finish_step,
    forked,
    memory_of,
    running,
    sequence_of,
)

# ---- out and in ----


def test_a_sequence_goes_to_the_store_and_comes_back_as_it_was() -> None:
    memory = memory_of(20, 10, caching=False)
    sequence = running(memory, "a", None)
    append(sequence, 1)
    hashes = {size: list(hashes) for size, hashes in sequence.block_hashes.items()}
    assert memory.swap_out(sequence)
    assert memory.is_swapped(sequence)
    assert sequence.block_tables == [] and sequence.num_computed_tokens == sequence.write_limit == 0
    assert memory.num_free_blocks == 19 and memory.num_free_slots == 8
    stores, _ = finish_step(memory)
    assert [(store.block, store.slot) for store in stores] == [(1, 1), (2, 2)]
    other = running(memory, "b", None)
    assert memory.num_blocks_to_swap_in(sequence) == 2
    assert memory.load(sequence)
    assert memory.is_arriving(sequence) and sequence.num_computed_tokens == 0
    memory.check([sequence, other])
    _, loads = finish_step(memory)
    assert not memory.is_arriving(sequence)
    memory.settle(sequence, set())
    memory.check([sequence, other])
    assert sequence.num_computed_tokens == 6 and sequence.block_hashes == hashes
    assert [(load.slot, load.block) for load in loads] == list(zip([1, 2], memory.block_ids(sequence)[0], strict=True))
    assert memory.is_swapped(sequence) and memory.num_free_slots == 8, "until it runs"
    memory.resumed(sequence)
    assert not memory.is_swapped(sequence) and memory.num_free_slots == 10
    memory.check([sequence, other])


def test_blocks_that_a_window_has_passed_stay_away() -> None:
    memory = memory_of(20, 10, SlidingWindowSpec(4, 1, 8, "float16", window=4))
    sequence = running(memory, "a", None, num_tokens=12)
    append(sequence, 1)
    compute(memory, sequence, 1)
    num_blocks = 19 - memory.num_free_blocks
    assert memory.swap_out(sequence)
    assert memory.num_free_slots == 10 - num_blocks
    bring_back(memory, sequence)
    assert memory.block_ids(sequence)[0][:2] == [0, 0]
    memory.check([sequence])


def test_without_room_in_the_store_nothing_changes() -> None:
    memory = memory_of(20, 4)
    sequence = running(memory, "a", document(9))
    before = memory.block_ids(sequence)
    assert not memory.swap_out(sequence), "two blocks and a table of three"
    assert not memory.is_swapped(sequence) and memory.block_ids(sequence) == before
    assert memory.num_free_slots == 4 and memory.store.take_transfers() == ([], [])
    memory.check([sequence])


def test_without_room_on_the_device_a_sequence_stays_in_the_store() -> None:
    memory = memory_of(6, 10)
    sequence = running(memory, "a", None, num_tokens=14)
    assert memory.swap_out(sequence)
    finish_step(memory)
    other = running(memory, "b", None, num_tokens=7)
    assert not memory.load(sequence)
    assert memory.is_swapped(sequence) and memory.num_free_blocks == 3
    memory.check([sequence, other])


def test_it_is_loaded_only_with_room_for_what_it_runs_next() -> None:
    memory = memory_of(4, 10)
    sequence = running(memory, "a", None, num_tokens=8)
    append(sequence, *range(8))
    assert memory.swap_out(sequence)
    finish_step(memory)
    assert not memory.load(sequence, max_new_tokens=5) and not memory.load(sequence, num_to_come=2)
    assert memory.load(sequence, max_new_tokens=4)


def test_without_a_tier_nothing_is_swapped_out() -> None:
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


def test_blocks_that_are_still_on_the_device_are_not_loaded() -> None:
    memory = memory_of(20, 10)
    sequence = running(memory, "a", None, num_tokens=9)
    block_ids = memory.block_ids(sequence)[0]
    assert memory.swap_out(sequence)
    finish_step(memory)
    assert memory.num_blocks_to_swap_in(sequence) == 3
    assert len(bring_back(memory, sequence)) == 1, "the partial one alone"
    assert memory.block_ids(sequence)[0][:2] == block_ids[:2]
    memory.check([sequence])


def test_a_sequence_that_has_come_back_can_be_found_again() -> None:
    memory = memory_of(6, 10)
    sequence = running(memory, "a", None, num_tokens=9)
    assert memory.swap_out(sequence)
    memory.free(running(memory, "b", None, num_tokens=20))  # takes all blocks
    finish_step(memory)
    assert len(bring_back(memory, sequence)) == 3
    other = TokenSequence("c", sequence.token_ids.copy(), sequence.extra_keys)
    assert memory.get_computed_blocks(other)[1] == 8
    memory.check([sequence])


def test_what_was_registered_ahead_of_a_step_that_did_not_happen_is_not_found() -> None:
    memory = memory_of(3, 10)
    sequence = running(memory, "a", None, num_tokens=4)
    append(sequence, 1, 2, 3, 4)
    assert memory.allocate_slots(sequence, 4) is not None
    assert memory.swap_out(sequence)
    finish_step(memory)
    other = TokenSequence("b", [*sequence.token_ids, 9], sequence.extra_keys)
    assert memory.get_computed_blocks(other)[1] == 4
    memory.free(running(memory, "c", None, num_tokens=8))  # takes all blocks
    assert memory.load_prefix(other, 0, None)
    assert len(other.block_tables[0]) == 1, "nor in the store"


def test_a_sequence_that_is_in_the_store_can_not_go_there() -> None:
    memory = memory_of(20, 10)
    sequence = running(memory, "a", None)
    assert memory.swap_out(sequence)
    with pytest.raises(ValueError, match="already"):
        memory.swap_out(sequence)


@pytest.mark.parametrize(("caching", "num_slots"), [(True, 3), (False, 4)])
def test_shared_blocks_stay_with_those_who_share_them_and_are_stored_once_by_hash(
    caching: bool, num_slots: int
) -> None:
    memory = memory_of(20, 10, caching=caching)
    parent = running(memory, "a", None)
    child = forked(memory, parent)
    assert memory.swap_out(parent)
    assert memory.num_free_blocks == 17 and memory.num_free_slots == 8
    assert memory.swap_out(child)
    assert memory.num_free_blocks == 19 and memory.num_free_slots == 10 - num_slots
    memory.check([parent, child])


def test_ended_sequences_give_their_slots_back() -> None:
    memory = memory_of(20, 20)
    first, second = running(memory, "a", document(9)), running(memory, "b", document(9))
    leases = LeaseTable(memory, budget=10)
    assert memory.swap_out(first) and memory.swap_out(second)
    memory.free(first)
    assert memory.num_free_slots == 20 - 2 - 3
    assert leases.grant(second, 10.0), "which holds nothing"
    assert not memory.is_swapped(second) and leases.num_blocks == 0
    assert memory.num_free_slots == 20
    memory.check(leases.sequences())


def test_one_that_gives_its_blocks_up_before_it_runs_is_loaded_again() -> None:
    memory = memory_of(6, 10, caching=False)
    sequence = running(memory, "a", None)
    append(sequence, 1)
    assert memory.swap_out(sequence)
    finish_step(memory)
    assert memory.load(sequence)
    finish_step(memory)
    memory.settle(sequence, set())
    memory.unload(sequence)
    assert memory.num_free_blocks == 5 and sequence.num_computed_tokens == 0 and memory.is_swapped(sequence)
    memory.check([sequence])
    assert len(bring_back(memory, sequence)) == 2 and sequence.num_computed_tokens == 6
    memory.check([sequence])


# ---- beams ----


def test_beams_go_to_the_store_with_their_trunk_and_share_the_same_blocks_when_they_are_back() -> None:
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
    assert memory.num_free_blocks == 19 and memory.num_tail_tokens(trunk) == 9
    # Of the trunk two, of the first two beams a shared one and, because of the step, one each, of the last two
    stores, _ = finish_step(memory)
    assert len(stores) == 2 + 1 + 2 + 2 and memory.num_free_slots == 3
    memory.check([trunk])
    assert memory.load(trunk)
    memory.check([trunk])
    _, loads = finish_step(memory)
    memory.settle(trunk, set())
    tails = BeamTails.loaded(memory, trunk)
    assert trunk.num_computed_tokens == 6 and tails.num_computed_tokens == 9
    assert memory.num_free_blocks == num_free - 1 and len(loads) == 6, "the trunk's full block was on the device"
    memory.check([trunk])
    memory.resumed(trunk)
    assert memory.num_free_slots == 10
    (first,), (second,), (third,) = tails.tables()
    assert [len(blocks) for blocks in (first, second, third)] == [2, 2, 2]
    assert first[0] is second[0] and third[0] is not first[0] and first[0].ref_cnt == 2
    changed = tails.allocate(1)
    assert changed is not None and changed[0] == [1] and len(changed[1][0]) == 6, "tables travel in full"
    tails.release()
    memory.free(trunk)
    memory.check([])
    assert memory.num_free_blocks == 19


def test_without_room_for_beams_in_the_store_nothing_changes() -> None:
    memory = memory_of(20, 4)
    trunk = running(memory, "a", None)
    tails = BeamTails(memory, trunk)
    tails.fork([0, 0])
    assert not tails.swap_out(0), "nothing is computed behind the trunk"
    assert tails.allocate(3) is not None
    assert not tails.swap_out(0) and not memory.is_swapped(trunk)
    assert memory.num_free_slots == 4 and len(memory.block_ids(trunk)[0]) == 2
    assert memory.swap_out(trunk), "there is for the trunk"
    tails.release()
    assert memory.num_tail_tokens(trunk) == 0
    memory.check([trunk])


# ---- within one step ----


def test_a_slot_that_is_loaded_from_is_not_taken_for_other_content() -> None:
    memory = memory_of(20, 2, caching=False)
    arriving, leaving = running(memory, "a", None), running(memory, "b", None)
    assert memory.swap_out(arriving)
    finish_step(memory)
    assert memory.load(arriving)
    memory.free(arriving)  # it ends before its blocks arrive
    assert not memory.swap_out(leaving)
    memory.check([leaving])
    finish_step(memory)
    assert memory.swap_out(leaving)
    memory.check([leaving])


def test_a_block_that_is_arriving_is_not_given_to_others_when_its_sequence_ends() -> None:
    memory = memory_of(6, 10, caching=False)
    sequence = running(memory, "a", None)
    assert memory.swap_out(sequence)
    finish_step(memory)
    assert memory.load(sequence)
    memory.free(sequence)
    assert memory.num_free_blocks == 3, "until the step is done"
    memory.check([])
    finish_step(memory)
    assert memory.num_free_blocks == 5
    memory.check([])


def test_a_sequence_whose_copy_is_not_made_yet_is_saved_from_the_copys_source() -> None:
    memory = memory_of(20, 10)
    parent = running(memory, "a", None)
    child = forked(memory, parent)
    assert memory.allocate_slots(child, 1) is not None
    source = memory.block_ids(parent)[0][1]
    assert memory.block_ids(child)[0][1] != source
    assert memory.swap_out(child)
    assert memory.take_block_copies() == []
    stores, _ = finish_step(memory)
    assert [store.block for store in stores] == [memory.block_ids(parent)[0][0], source]
    memory.check([parent, child])


def test_a_block_that_was_to_be_copied_to_and_is_loaded_to_is_not_copied_to() -> None:
    memory = memory_of(5, 10, caching=False)
    gone = running(memory, "a", None)
    assert memory.swap_out(gone)
    finish_step(memory)
    trunk = running(memory, "b", None)
    tails = BeamTails(memory, trunk)
    tails.fork([0, 0])
    assert tails.allocate(1) is not None  # both beams get copies, in the two blocks that are free
    tails.release()
    assert memory.load(gone)
    assert memory.take_block_copies() == []
    memory.check([gone, trunk])


def test_a_freed_block_can_be_stored_loaded_to_and_copied_in_one_step() -> None:
    """Device blocks: `a` leaves 1 and 2, `b` comes to them, and the copy that a fork of `c` needs goes elsewhere."""
    memory = memory_of(6, 10, caching=False)
    b = running(memory, "b", None)
    assert memory.swap_out(b)
    finish_step(memory)
    a, c = running(memory, "a", None), running(memory, "c", None)
    child = forked(memory, c)
    left = memory.block_ids(a)[0]
    assert memory.swap_out(a)
    compute(memory, child, 1)
    assert memory.load(b)
    (copy,) = memory.take_block_copies()
    stores, loads = finish_step(memory)
    assert [store.block for store in stores] == left
    assert isinstance(copy, BlockCopy) and copy.src == memory.block_ids(c)[0][1]
    targets = [copy.dst, *(load.block for load in loads)]
    assert len(set(targets)) == 3 and set(left) <= set(targets)
    assert not {store.slot for store in stores} & {load.slot for load in loads}
    memory.settle(b, set())
    memory.check([a, b, c, child])


# ---- transfers and steps that fail ----


def test_a_store_that_failed_is_not_used() -> None:
    memory = memory_of(20, 20)
    lost, kept = running(memory, "a", document(9)), running(memory, "b", document(5))
    assert memory.swap_out(kept)
    finish_step(memory)
    assert memory.swap_out(lost)
    finish_step(memory, lost=[6])
    assert memory.is_swapped(kept) and not memory.is_swapped(lost)
    memory.check([lost, kept])


def test_stores_of_a_failed_step_and_those_planned_since_are_not_used() -> None:
    memory = memory_of(20, 20)
    first, second = running(memory, "a", None), running(memory, "b", None)
    assert memory.swap_out(first)
    stores, _ = memory.store.take_transfers()
    assert memory.swap_out(second)
    assert memory.invalidate_writes(SchedulerOutput(stores=stores)) == set()
    assert not memory.is_swapped(first) and not memory.is_swapped(second)
    assert memory.store.take_transfers() == ([], []) and memory.store.snapshot().num_blocks == 0
    memory.check([first, second])


@pytest.mark.parametrize("caching", [False, True])
def test_from_a_block_that_could_not_be_loaded_on_a_sequence_is_computed_again(caching: bool) -> None:
    memory = memory_of(6, 10, caching=caching)
    sequence = running(memory, "a", None, num_tokens=14)
    assert memory.swap_out(sequence)
    finish_step(memory)
    memory.free(running(memory, "b", None, num_tokens=20))  # takes all blocks
    assert memory.load(sequence)
    _, loads = memory.store.take_transfers()
    lost = loads[1].block
    failed = memory.take_report(_report(loads, {lost}))
    assert failed == {lost}
    memory.settle(sequence, failed)
    assert sequence.num_computed_tokens == 4 and len(sequence.block_tables[0]) == 1
    assert not memory.is_swapped(sequence), "its slots are not all good"
    memory.check([sequence])


def test_without_its_window_a_sequence_is_computed_from_the_beginning() -> None:
    memory = memory_of(20, 20, SlidingWindowSpec(4, 1, 8, "float16", window=6), caching=False)
    sequence = running(memory, "a", None, num_tokens=16)
    append(sequence, 1)
    compute(memory, sequence, 1)
    assert memory.swap_out(sequence)
    finish_step(memory)
    assert memory.load(sequence)
    _, loads = memory.store.take_transfers()
    failed = memory.take_report(_report(loads, {loads[0].block}))
    memory.settle(sequence, failed)
    assert sequence.num_computed_tokens == 0 and sequence.block_tables == [] and memory.num_free_blocks == 19
    memory.check([sequence])


def test_a_lost_block_of_a_beam_leaves_the_trunk() -> None:
    memory = memory_of(20, 20, caching=False)
    trunk = running(memory, "a", None)
    tails = BeamTails(memory, trunk)
    tails.fork([0, 0])
    assert tails.allocate(3) is not None
    finish_step(memory)
    assert tails.swap_out(0)
    tails.release()
    finish_step(memory)
    assert memory.load(trunk)
    _, loads = memory.store.take_transfers()
    failed = memory.take_report(_report(loads, {loads[-1].block}))
    memory.settle(trunk, failed)
    assert memory.loaded_tails(trunk) == [] and memory.num_tail_tokens(trunk) == 0
    assert trunk.num_computed_tokens == 5, "its last token runs again"
    memory.check([trunk])


def _report(loads: list[BlockTransfer], lost: set[int]) -> TransferReport:
    blocks = [load.block for load in loads]
    return TransferReport([block for block in blocks if block not in lost], [one for one in blocks if one in lost])


# ---- cross tables ----


def test_a_table_goes_to_the_store_with_its_last_holder() -> None:
    memory = memory_of(20, 20, caching=False)
    first, second = running(memory, "a", document(9)), running(memory, "b", document(9))
    assert memory.swap_out(first)
    assert memory.num_free_blocks == 19 - 2 - 3 and memory.num_free_slots == 20 - 2
    assert memory.swap_out(second)
    assert memory.num_free_blocks == 19 and memory.num_free_slots == 20 - 4 - 3
    finish_step(memory)
    assert memory.load(first)
    memory.load_cross(first, document(9))
    assert memory.load(second)
    memory.load_cross(second, document(9))
    assert memory.is_arriving(first) and memory.is_arriving(second) and first.cross is second.cross
    memory.check([first, second])
    _, loads = finish_step(memory)
    assert len(loads) == 2 + 3 + 2
    memory.settle(first, set()), memory.settle(second, set())
    memory.resumed(first), memory.resumed(second)
    assert memory.num_free_slots == 20
    memory.check([first, second])


def test_a_table_that_left_the_device_is_found_in_the_store() -> None:
    memory = memory_of(8, 20)
    sequence = running(memory, "a", document(9))
    memory.free(sequence)
    memory.free(running(memory, "b", None, num_tokens=28))  # takes all blocks
    finish_step(memory)
    newcomer = sequence_of("c")
    assert memory.has_cross(newcomer, document(9)) and not memory.has_cross(newcomer, document(9), may_load=False)
    assert memory.attach_cross(newcomer, document(9))
    assert memory.take_encoder_writes() == [] and memory.is_arriving(newcomer)
    _, loads = finish_step(memory)
    assert [load.block for load in loads] == newcomer.cross.block_ids and not memory.is_arriving(newcomer)
    memory.check([newcomer])


def test_a_table_that_could_not_be_loaded_is_made_by_the_encoder() -> None:
    memory = memory_of(8, 20)
    memory.free(running(memory, "a", document(9)))
    memory.free(running(memory, "b", None, num_tokens=28))  # takes all blocks
    finish_step(memory)
    newcomer = sequence_of("c")
    assert memory.attach_cross(newcomer, document(9))
    _, loads = memory.store.take_transfers()
    failed = memory.take_report(_report(loads, {loads[1].block}))
    memory.settle(newcomer, failed)
    assert newcomer.cross is None and not memory.has_cross(newcomer, document(9))
    memory.check([newcomer])


def test_a_newcomer_brings_the_table_back_that_a_swapped_sequence_keeps() -> None:
    memory = memory_of(8, 20, caching=False)
    waiting = running(memory, "a", document(9))
    assert memory.swap_out(waiting)
    finish_step(memory)
    newcomer = sequence_of("b")
    assert memory.has_cross(newcomer, document(9)) and memory.attach_cross(newcomer, document(9))
    assert memory.take_encoder_writes() == []
    _, loads = finish_step(memory)
    assert [load.block for load in loads] == newcomer.cross.block_ids
    memory.check([waiting, newcomer])
    memory.free(newcomer)
    assert memory.is_swapped(waiting), "the store has it still"
    memory.free(waiting)
    assert not memory.has_cross(newcomer, document(9)), "without a prefix cache, nothing outlives its sequences"


def test_a_table_that_is_cached_on_the_device_is_not_loaded() -> None:
    memory = memory_of(20, 20)
    sequence = running(memory, "a", document(9))
    block_ids = sequence.cross.block_ids
    assert memory.swap_out(sequence)
    finish_step(memory)
    assert memory.load(sequence)
    memory.load_cross(sequence, document(9))
    assert sequence.cross.block_ids == block_ids
    _, loads = finish_step(memory)
    assert len(loads) == 1


def test_a_table_that_is_not_written_yet_keeps_its_holder_here() -> None:
    memory = memory_of(20, 20)
    sequence = sequence_of("a")
    memory.attach_cross(sequence, document(9))
    assert memory.allocate_slots(sequence, 6) is not None
    assert not memory.swap_out(sequence)
    memory.check([sequence])


def test_a_table_of_a_failed_step_is_not_found_in_the_store() -> None:
    memory = memory_of(20, 20)
    waiting, failed, other = running(memory, "a", document(9)), sequence_of("b"), sequence_of("c")
    assert memory.swap_out(waiting)
    finish_step(memory)
    assert memory.attach_cross(failed, document(9)) and memory.attach_cross(other, document(9))
    memory.free(failed, trusted=False)
    assert not memory.has_cross(waiting, document(9))
    assert not memory.swap_out(other), "its table is nothing to keep"
    memory.check([waiting, other])
