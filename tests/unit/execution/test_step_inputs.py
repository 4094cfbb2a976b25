"""Input preparation by number: the worked example of the design."""

import numpy as np
import pytest
import torch

from ratoon.core.params import SamplingParams
from ratoon.core.plan import NewRequestData
from ratoon.execution.inputs.input_batch import InputBatch
from ratoon.execution.inputs.step_inputs import InputPreparation, ReadRows

SCHEDULED = [1, 1, 93, 75, 30]
COMPUTED = [54, 145, 0, 0, 0]
BLOCKS = [range(1, 5), range(5, 15), range(15, 21), range(21, 26), range(26, 28)]
MAX_MODEL_LEN = 240


def add_worked_example(rows):
    """The blocks of groups of other sizes are numbered from 1 as well."""
    generator = np.random.default_rng(0)
    next_blocks = [1] * len(rows.block_sizes)
    for index, (computed, scheduled, blocks) in enumerate(zip(COMPUTED, SCHEDULED, BLOCKS, strict=True)):
        tokens = generator.integers(0, 1000, computed + scheduled).tolist()
        tables = []
        for group, size in enumerate(rows.block_sizes.tolist()):
            first = next_blocks[group]
            next_blocks[group] += -(-len(tokens) // size)
            tables.append(list(range(first, next_blocks[group])))
            assert size != 16 or tables[-1] == list(blocks)
        rows.add(NewRequestData(str(index), tokens, len(tokens), SamplingParams(), 0, tuple(tables), computed))


def expect_slots_by_block_size(step):
    """Groups of blocks of 16, 32 and 8 tokens: each token's block is the one of its own group."""
    by_sixteen, by_thirty_two, by_eight = step.groups
    assert [group.block_size for group in step.groups] == [16, 32, 8]
    slots = concatenated(70, 225, range(240, 333), range(336, 411), range(416, 446))
    assert by_sixteen.slot_mapping.tolist() == slots
    # Blocks 1-2, 3-7, 8-10, 11-13, 14
    slots = concatenated(32 + 54, 96 + 145, range(256, 349), range(352, 427), range(448, 478))
    assert by_thirty_two.slot_mapping.tolist() == slots
    assert by_thirty_two.block_table_device[1, :5].tolist() == [3, 4, 5, 6, 7]
    # Blocks 1-7, 8-26, 27-38, 39-48, 49-52
    slots = concatenated(8 + 54, 64 + 145, range(216, 309), range(312, 387), range(392, 422))
    assert by_eight.slot_mapping.tolist() == slots
    assert by_eight.block_table_device[0, :7].tolist() == [1, 2, 3, 4, 5, 6, 7]


def prepared(block_sizes=(16,)):
    rows = InputBatch(max_rows=8, max_model_len=MAX_MODEL_LEN, block_sizes=block_sizes)
    add_worked_example(rows)
    inputs = InputPreparation(rows, max_num_tokens=256, max_num_reqs=8, device=torch.device("cpu"))
    return rows, inputs.prepare(np.arange(5), np.array(SCHEDULED))


def concatenated(*runs):
    return np.concatenate([np.atleast_1d(run) for run in runs]).tolist()


def test_cumulative_tokens_and_query_starts_follow_the_worked_example():
    _, step = prepared()
    assert step.cu_num_tokens.tolist() == [1, 2, 95, 170, 200]
    assert step.groups[0].query_start_loc.tolist() == [0, 1, 2, 95, 170, 200]
    assert step.groups[0].query_start_loc_device.tolist() == [0, 1, 2, 95, 170, 200]


def test_positions_go_on_where_each_request_stands():
    _, step = prepared()
    assert step.positions.tolist() == concatenated(54, 145, range(93), range(75), range(30))


def test_input_ids_are_gathered_at_the_token_indices_of_the_worked_example():
    rows, step = prepared()
    m = MAX_MODEL_LEN
    token_indices = concatenated(54, 145 + m, np.arange(93) + 2 * m, np.arange(75) + 3 * m, np.arange(30) + 4 * m)
    assert step.input_ids.tolist() == rows.token_ids.reshape(-1)[token_indices].tolist()


def test_slots_are_block_times_size_plus_offset():
    _, step = prepared()
    slots = concatenated(70, 225, range(240, 333), range(336, 411), range(416, 446))
    assert step.groups[0].slot_mapping.tolist() == slots
    block_numbers = step.groups[0].slot_mapping // 16
    assert block_numbers.unique().tolist() == [4, 14, *range(15, 28)]
    block_offsets = step.groups[0].slot_mapping % 16
    assert [block_offsets[last - 1].item() for last in (1, 2, 95, 170, 200)] == [6, 1, 12, 10, 13]


def test_groups_of_other_block_sizes_have_slots_of_their_own():
    expect_slots_by_block_size(prepared((16, 32, 8))[1])


def test_sequence_lengths_are_those_after_the_step():
    _, step = prepared()
    group = step.groups[0]
    assert group.seq_lens.tolist() == [55, 146, 93, 75, 30]
    assert (group.max_seq_len, group.max_query_len) == (146, 93)


def test_rows_in_another_order_than_the_batch_are_gathered_by_index():
    rows, _ = prepared()
    inputs = InputPreparation(rows, max_num_tokens=256, max_num_reqs=8, device=torch.device("cpu"))
    step = inputs.prepare(np.array([4, 0]), np.array([30, 1]))
    assert step.positions.tolist() == concatenated(range(30), 54)
    assert step.groups[0].slot_mapping.tolist() == concatenated(range(416, 446), 70)
    assert step.groups[0].block_table[:, :4].tolist() == [[26, 27, 0, 0], [1, 2, 3, 4]]


@pytest.mark.parametrize("block_sizes", [(16,), (16, 32, 8)])
def test_steps_of_one_token_each_are_prepared_alike_with_and_without_the_kernel(block_sizes):
    """In one preparation with other steps between them, for several numbers of requests."""
    rows, _ = prepared(block_sizes)
    inputs = InputPreparation(rows, max_num_tokens=256, max_num_reqs=8, device=torch.device("cpu"))
    for order in ([3], [1, 4], [0, 1, 2], [2], [4, 1]):
        batch, ones = np.array(order), np.ones(len(order), np.int64)
        by_numpy = inputs._prepare_any(batch, ones, None)
        expected = [array.copy() for array in arrays_of(by_numpy)]
        inputs.prepare(np.array([4, 0]), np.array([30, 1]))
        by_kernel = inputs.prepare(batch, ones)
        for one, other in zip(arrays_of(by_kernel), expected, strict=True):
            assert one.tolist() == other.tolist()
        assert by_kernel.groups[0].max_seq_len == by_numpy.groups[0].max_seq_len
        rows.num_computed += [0, 1, 2, 3, 4, 0, 0, 0]


def arrays_of(step):
    yield from (step.input_ids.numpy(), step.positions.numpy(), step.cu_num_tokens)
    for group in step.groups:
        num_blocks = -(-group.max_seq_len // group.block_size)
        yield from (
            group.query_start_loc,
            group.seq_lens,
            group.slot_mapping.numpy(),
            group.block_table[:, :num_blocks],
        )


def test_rows_that_are_read_are_requests_of_one_token_behind_all_tokens_before_them():
    _, step = prepared()
    rows = [199, 0, 94, 50, 1, 94]  # in any order; the fourth is inside a prompt, the last one is read twice
    alone = ReadRows(rows, step.groups).as_requests(0, torch.tensor(rows))
    assert alone.seq_lens.tolist() == alone.seq_lens_device.tolist() == [30, 55, 93, 49, 146, 93]
    assert alone.query_start_loc.tolist() == alone.query_start_loc_device.tolist() == list(range(7))
    assert alone.slot_mapping.tolist() == [445, 70, 332, 288, 225, 332]
    assert alone.block_table[:, 0].tolist() == alone.block_table_device[:, 0].tolist() == [26, 1, 15, 15, 5, 15]
    assert (alone.max_query_len, alone.max_seq_len) == (1, 146)


def test_rows_are_read_alone_while_they_are_no_more_than_requests():
    _, step = prepared()
    assert ReadRows.of([199, 94], step) is not None
    assert ReadRows.of([], step) is not None  # their keys and values are stored, and that is all
    assert ReadRows.of(list(range(2, 8)), step) is None
    rows, _ = prepared()
    inputs = InputPreparation(rows, max_num_tokens=256, max_num_reqs=8, device=torch.device("cpu"))
    assert ReadRows.of([1], inputs.prepare(np.array([0, 1]), np.array([1, 1]))) is None  # no prompt
