"""The accounting of encoder-decoder requests by its formulas: what each operation does to the number of free blocks."""

from __future__ import annotations

from dataclasses import dataclass

from hypothesis import given
from hypothesis import strategies as st

from ratoon.core.encoder import EncoderInput, tokens_for_encoder
from ratoon.core.kv import CrossAttentionSpec, FullAttentionSpec, KVCacheConfig, KVCacheGroup
from ratoon.core.outputs import TransferReport
from ratoon.memory.hashing import ExtraKeys
from ratoon.memory.kv_cache_manager import KVCacheManager
from ratoon.memory.sequence import TokenSequence

NUM_BLOCKS, NUM_HOST_BLOCKS = 400, 300


@dataclass
class SequenceGroup:
    """The sequences of one request: each with a table of its own, and one cross table for all."""

    encoder_input: EncoderInput
    sequences: list[TokenSequence]
    num_blocks_of_each: list[int]
    num_cross_blocks: int

    @property
    def num_blocks(self) -> int:
        return self.num_cross_blocks + sum(self.num_blocks_of_each)


class Requests:
    """Some groups that are here already, and one that things happen to. They share nothing with each other."""

    def __init__(self, block_size: int, num_groups: int, caching: bool) -> None:
        layers = tuple(KVCacheGroup(FullAttentionSpec(block_size, 1, 8, "float16"), (n,)) for n in range(num_groups))
        cross = KVCacheGroup(CrossAttentionSpec(block_size, 1, 8, "float16"), (0,))
        config = KVCacheConfig(NUM_BLOCKS + 1, block_size, layers, cross, NUM_HOST_BLOCKS)
        self.memory = KVCacheManager(config, max_model_len=1000, enable_caching=caching)
        self.num_groups = num_groups
        self.groups: list[SequenceGroup] = []

    def blocks_of(self, num_tokens: int) -> int:
        return -(-num_tokens // self.memory.block_size)

    def allocate(self, encoder_length: int, lengths: list[int]) -> SequenceGroup:
        number = len(self.groups)
        encoder_input = tokens_for_encoder([number] * encoder_length)
        keys = ExtraKeys([("encoder input", encoder_input.content_hash.hex())])
        sequences = [
            TokenSequence(f"{number}#{choice}", [choice] * length, keys) for choice, length in enumerate(lengths)
        ]
        for sequence in sequences:
            assert self.memory.attach_cross(sequence, encoder_input)
            assert self.memory.allocate_slots(sequence, sequence.num_tokens) is not None
            sequence.num_computed_tokens = sequence.num_tokens
        num_blocks_of_each = [self.num_groups * self.blocks_of(length) for length in lengths]
        self.groups.append(SequenceGroup(encoder_input, sequences, num_blocks_of_each, self.blocks_of(encoder_length)))
        return self.groups[-1]

    def step(self) -> None:
        self.memory.take_encoder_writes()
        stores, loads = self.memory.store.take_transfers()
        arrived = [load.block for load in loads]
        assert not self.memory.take_report(TransferReport(arrived, stored=[store.slot for store in stores]))
        self.memory.check([sequence for group in self.groups for sequence in group.sequences])

    @property
    def free(self) -> tuple[int, int]:
        """Blocks on the device, and on the host."""
        return self.memory.num_free_blocks, self.memory.num_free_slots


@st.composite
def requests(draw: st.DrawFn) -> tuple[Requests, SequenceGroup]:
    world = Requests(draw(st.integers(1, 16)), draw(st.integers(1, 2)), draw(st.booleans()))
    sizes = st.tuples(st.integers(1, 30), st.lists(st.integers(1, 12), min_size=1, max_size=4))
    for encoder_length, lengths in draw(st.lists(sizes, max_size=2)):
        world.allocate(encoder_length, lengths)
    before = world.free
    group = world.allocate(*draw(sizes))
    assert world.free == (before[0] - group.num_blocks, before[1])
    world.step()
    return world, group


@given(requests())
def test_allocating_takes_the_table_of_each_sequence_and_one_cross_table(made: tuple[Requests, SequenceGroup]) -> None:
    world, group = made
    assert world.memory.num_cross_blocks(group.encoder_input.num_positions) == group.num_cross_blocks
    assert sum(one.num_blocks for one in world.groups) == NUM_BLOCKS - world.free[0]


@given(requests(), st.booleans())
def test_freeing_gives_back_each_table_and_then_the_cross_table(
    made: tuple[Requests, SequenceGroup], swapped: bool
) -> None:
    """On device or host. The cross table is freed with its last holder."""
    world, group = made
    if swapped:  # the last one takes the cross table along
        assert all(world.memory.swap_out(sequence) for sequence in group.sequences)
        world.step()
    side, last = (1, len(group.sequences) - 1) if swapped else (0, 0)
    for left, sequence in reversed(list(enumerate(group.sequences))):
        before = world.free
        world.memory.free(sequence)
        num_cross_blocks = group.num_cross_blocks if left == last else 0
        assert world.free[side] == before[side] + num_cross_blocks + group.num_blocks_of_each[left]
        assert world.free[1 - side] == before[1 - side]
        world.step()


@given(requests())
def test_freeing_a_sequence_frees_the_cross_table_with_the_last(made: tuple[Requests, SequenceGroup]) -> None:
    world, group = made
    before = world.free
    for sequence in group.sequences:
        world.memory.free(sequence)
        world.step()
    assert world.free == (before[0] + group.num_blocks, before[1])


@given(requests())
def test_swapping_moves_the_blocks_of_a_group_from_one_side_to_the_other(made: tuple[Requests, SequenceGroup]) -> None:
    world, group = made
    here = world.free
    for sequence in group.sequences:
        assert world.memory.swap_out(sequence)
    assert world.free == (here[0] + group.num_blocks, here[1] - group.num_blocks)
    world.step()
    assert world.free == (here[0] + group.num_blocks, here[1] - group.num_blocks)
    for sequence in group.sequences:
        assert world.memory.load(sequence)
        world.memory.load_cross(sequence, group.encoder_input)
    assert world.free[0] == here[0]
    world.step()
    for sequence in group.sequences:
        sequence.num_tokens += 1  # there is one to run
        world.memory.settle(sequence, set())
        world.memory.resumed(sequence)
        sequence.num_tokens -= 1
    assert world.free == here
    assert [sequence.num_computed_tokens for sequence in group.sequences] == [
        sequence.num_tokens for sequence in group.sequences
    ]


@given(requests(), st.lists(st.booleans(), min_size=12, max_size=12))
def test_a_reset_frees_everything_on_both_sides(made: tuple[Requests, SequenceGroup], swapped: list[bool]) -> None:
    world, _ = made
    sequences = [sequence for group in world.groups for sequence in group.sequences]
    for sequence, goes in zip(sequences, swapped):
        assert not goes or world.memory.swap_out(sequence)
    assert world.memory.reset(sequences)
    assert world.free == (NUM_BLOCKS, NUM_HOST_BLOCKS)
    world.groups = []
    world.step()
