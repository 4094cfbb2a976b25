"""Inputs that kernels prepare from rows on the device: the same as on the host, by the worked example and by chance.

Without a GPU the kernels run under Triton's interpreter, on tensors of the CPU.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest
import torch

from ratoon.core.errors import ConfigError
from ratoon.core.params import SamplingParams
from ratoon.core.plan import BlockCopy, InputOverrides, NewRequestData
from ratoon.execution.inputs import device_inputs
from ratoon.execution.inputs.device_inputs import DeviceInputs, DeviceRows
from ratoon.execution.inputs.input_batch import InputBatch
from ratoon.execution.inputs.input_kernels import receive
from ratoon.execution.inputs.row_writes import RowWrites
from ratoon.execution.inputs.step_inputs import InputPreparation, StepInputs
from ratoon.layers.sampling import Mode
from tests.unit.execution.test_step_inputs import (
    MAX_MODEL_LEN,
    SCHEDULED,
    add_worked_example,
    concatenated,
    expect_slots_by_block_size,
)

pytest.importorskip("triton")
DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
MAX_REQS, MAX_TOKENS = 8, 256


def make_rows(
    block_sizes: Sequence[int] = (16,),
    max_encoder_len: int = 0,
    cross_block_size: int = 16,
    rope_axes: int = 0,
    has_adapters: bool = False,
) -> InputBatch:
    sizes = (max_encoder_len, cross_block_size, rope_axes, has_adapters)
    return InputBatch(MAX_REQS, MAX_MODEL_LEN, block_sizes, RowWrites(), *sizes)


def make_inputs(rows: InputBatch, max_padded: int = 0) -> DeviceInputs:
    inputs = DeviceInputs(rows, MAX_TOKENS, MAX_REQS, max_padded, max_padded, DEVICE)
    for tensor in inputs.prepared.values():
        tensor.fill_(-7)  # what is not written is seen
    return inputs


def new_branch(name: str, tokens: Sequence[int], blocks: Sequence[Sequence[int]], computed: int = 0) -> NewRequestData:
    block_ids = tuple(list(ids) for ids in blocks)
    return NewRequestData(name, list(tokens), len(tokens), SamplingParams(), 0, block_ids, computed)


def worked_example(block_sizes: Sequence[int] = (16,)) -> tuple[InputBatch, StepInputs]:
    rows = make_rows(block_sizes)
    add_worked_example(rows)
    return rows, make_inputs(rows).prepare(np.arange(5), np.array(SCHEDULED))


def test_the_worked_example_on_the_device() -> None:
    rows, step = worked_example()
    group, m = step.groups[0], MAX_MODEL_LEN
    assert step.positions.tolist() == concatenated(54, 145, range(93), range(75), range(30))
    token_indices = concatenated(54, 145 + m, np.arange(93) + 2 * m, np.arange(75) + 3 * m, np.arange(30) + 4 * m)
    assert step.input_ids.tolist() == rows.token_ids.reshape(-1)[token_indices].tolist()
    assert group.slot_mapping.tolist() == concatenated(70, 225, range(240, 333), range(336, 411), range(416, 446))
    assert group.query_start_loc_device.tolist() == [0, 1, 2, 95, 170, 200]
    assert group.seq_lens_device.tolist() == [55, 146, 93, 75, 30]
    assert group.block_table_device[1, :10].tolist() == list(range(5, 15))


def test_the_worked_example_with_groups_of_other_block_sizes_on_the_device() -> None:
    expect_slots_by_block_size(worked_example((16, 32, 8))[1])


@pytest.mark.parametrize(
    ("num_words", "num_further", "num_cells"),
    [(7, 0, 0), (0, 2, 3), (513, 4, 5), (5, 0, 1025), (512, 512, 512), (4, 700, 1)],
)
def test_words_and_cells_are_read_where_the_host_wrote_them(num_words: int, num_further: int, num_cells: int) -> None:
    generator = np.random.default_rng(0)
    further_start = num_words + 11
    cells_start = further_start + num_further
    values_start = cells_start + num_cells
    host = torch.zeros(values_start + num_cells, dtype=torch.int32, pin_memory=DEVICE.type == "cuda")
    cells = generator.permutation(2000)[:num_cells]
    host.numpy()[:] = generator.integers(1, 1000, len(host))
    host.numpy()[cells_start:values_start] = cells
    device = torch.full((cells_start + 9,), -7, dtype=torch.int32, device=DEVICE)
    memory = torch.full((2000,), -7, dtype=torch.int32, device=DEVICE)
    receive(host, device, num_words, further_start, num_further, memory, cells_start, values_start, num_cells)
    sent = [*host[:num_words].tolist(), *[-7] * 11, *host[further_start:cells_start].tolist(), *[-7] * 9]
    assert device.tolist() == sent
    expected = np.full(2000, -7, np.int32)
    expected[cells] = host[values_start:].numpy()
    assert memory.tolist() == expected.tolist()


def equal_inputs(ours: StepInputs, theirs: StepInputs) -> None:
    """What a backend reads: of a table, the columns of the keys that a request has."""
    assert ours.input_ids.tolist() == theirs.input_ids.tolist()
    assert ours.positions.tolist() == theirs.positions.tolist()
    # On the host, rows that have none of their own are rotated by the positions [T], elsewhere by the same on all axes.
    assert torch.equal(*torch.broadcast_tensors(ours.rope_positions.cpu(), theirs.rope_positions.cpu()))
    assert ours.cu_num_tokens.tolist() == theirs.cu_num_tokens.tolist()
    assert ours.writes_nothing == theirs.writes_nothing
    pairs = list(zip(ours.groups, theirs.groups, strict=True))
    if theirs.cross is not None:
        assert ours.cross is not None
        pairs.append((ours.cross, theirs.cross))
    for mine, other in pairs:
        assert mine.slot_mapping.tolist() == other.slot_mapping.tolist()
        assert (mine.max_query_len, mine.max_seq_len) == (other.max_query_len, other.max_seq_len)
        for seen in (mine.query_start_loc_device, mine.query_start_loc):
            assert seen.tolist() == other.query_start_loc.tolist()
        for seen in (mine.seq_lens_device, mine.seq_lens):
            assert seen.tolist() == other.seq_lens.tolist()
        for request, seq_len in enumerate(other.seq_lens.tolist()):
            columns = -(-seq_len // other.block_size)
            for table in (mine.block_table_device, mine.block_table):
                assert table[request, :columns].tolist() == other.block_table[request, :columns].tolist()


@pytest.mark.slow  # Triton's interpreter
@pytest.mark.parametrize("seed", range(2))
@pytest.mark.parametrize(
    ("block_sizes", "max_encoder_len", "cross_block_size", "rope_axes"),
    [
        ((16,), 0, 16, 0),
        ((16, 16), 0, 16, 1),
        ((16, 16), 40, 16, 0),
        ((16, 32), 40, 8, 3),
        ((12, 16), 0, 16, 0),
        ((16,), 40, 32, 0),
    ],
)
@pytest.mark.one_in(5)
def test_many_steps_are_prepared_as_on_the_host(
    block_sizes: tuple[int, ...], max_encoder_len: int, cross_block_size: int, rope_axes: int, seed: int
) -> None:
    """Branches come and go, get blocks, have them replaced; some rows are not written; some have positions of their own
    for the rotation of heads."""
    generator = np.random.default_rng(seed)
    num_groups = len(block_sizes)
    has_adapters = rope_axes > 0 or max_encoder_len == 0
    rows = make_rows(block_sizes, max_encoder_len, cross_block_size, rope_axes, has_adapters)
    on_device, on_host = make_inputs(rows), InputPreparation(rows, MAX_TOKENS, MAX_REQS, torch.device("cpu"))
    for step in range(6):
        for name in list(rows.row_of):
            if generator.random() < 0.3:
                rows.drop(name)
        while len(rows) < generator.integers(2, MAX_REQS):
            tokens = generator.integers(0, 1000, generator.integers(1, 60)).tolist()
            blocks = [generator.integers(1, 500, 8).tolist() for _ in range(num_groups)]
            new = new_branch(f"{step}-{len(rows)}-{generator.random()}", tokens, blocks)
            new.num_encoder_positions = int(generator.integers(1, 41)) if max_encoder_len else 0
            new.cross_block_ids = generator.integers(1, 500, -(-new.num_encoder_positions // cross_block_size)).tolist()
            if rope_axes and generator.random() < 0.7:
                count = int(generator.integers(1, len(tokens) + 1))
                listed = generator.integers(0, MAX_MODEL_LEN, (rope_axes, count)).astype(np.int32)
                new.overrides = InputOverrides(listed.tobytes(), -int(generator.integers(0, count + 1)))
            new.adapter_slot = int(generator.integers(-1, 4)) if has_adapters else -1
            rows.add(new)
        for name, row in rows.row_of.items():
            rows.num_computed[row] = generator.integers(0, rows.num_tokens[row])
            if generator.random() < 0.3:
                rows.replace_block(BlockCopy(name, num_groups - 1, int(generator.integers(0, 8)), 0, 77))
        batch = generator.permutation(list(rows.row_of.values()))
        left = rows.num_tokens[batch] - rows.num_computed[batch]
        counts = np.minimum(left, generator.integers(1, 20, len(batch)))
        unwritten = None if step % 3 else generator.random(len(batch)) < 0.5
        columns = {} if rows.adapter_slots is None else {"adapter_slots": rows.adapter_slots[batch]}
        found, expected = (inputs.prepare(batch, counts, unwritten, columns) for inputs in (on_device, on_host))
        equal_inputs(found, expected)
        if columns:
            assert found.adapters is not None and expected.adapters is not None
            assert found.adapters.slots.tolist() == expected.adapters.slots.tolist()


def test_a_sampled_token_is_fed_without_the_host() -> None:
    rows = make_rows()
    rows.add(new_branch("a", [5, 6, 7], [[3]]))
    rows.add(new_branch("b", [8], [[4]]))
    inputs = make_inputs(rows)
    inputs.prepare(np.array([0, 1]), np.array([3, 1]))
    inputs.resident.append_tokens(np.array([0, 1]), torch.tensor([901, 902], device=DEVICE))
    rows.append_pending(np.array([0, 1]))
    rows.num_computed[:2] = [3, 1]
    step = inputs.prepare(np.array([1, 0]), np.array([1, 1]))
    assert step.input_ids.tolist() == [902, 901]
    assert rows.token_ids[0, 3] == rows.token_ids[1, 1] == 0, "the host does not know them"


def test_more_cells_than_one_copy_holds_all_arrive(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(device_inputs, "MAX_CELLS", 16)
    rows = make_rows()
    tokens = list(range(100, 190))
    rows.add(new_branch("a", tokens, [range(1, 7)]))
    step = make_inputs(rows).prepare(np.array([0]), np.array([90]))
    assert step.input_ids.tolist() == tokens
    assert step.groups[0].block_table_device[0, :6].tolist() == [1, 2, 3, 4, 5, 6]


def test_a_cell_that_is_written_twice_has_its_last_value() -> None:
    rows = make_rows()
    rows.add(new_branch("a", [5, 6, 7], [[3]]))
    rows.drop("a")
    rows.add(new_branch("b", [8, 9, 10], [[4]]))
    rows.replace_block(BlockCopy("b", 0, 0, 4, 6))
    step = make_inputs(rows).prepare(np.array([0]), np.array([3]))
    assert step.input_ids.tolist() == [8, 9, 10]
    assert step.groups[0].slot_mapping.tolist() == [96, 97, 98]


@pytest.mark.parametrize("size", [4, 8, 16])
def test_padding_has_requests_of_its_own_that_write_to_the_null_block(size: int) -> None:
    rows = make_rows((16, 16))
    rows.add(new_branch("a", [5, 6, 7], [[3], [8]]))
    rows.add(new_branch("b", list(range(20, 40)), [[4, 5], [9, 7]], computed=19))
    inputs = make_inputs(rows, max_padded=16)
    inputs.send(np.array([0, 1]), np.array([3, 1]))
    inputs.compute(size, size, size)
    step = inputs.padded(size, size, size)
    num_padding = size - 4
    assert step.input_ids.tolist() == [5, 6, 7, 39] + [0] * num_padding
    assert step.positions.tolist() == [0, 1, 2, 19] + [0] * num_padding
    assert step.groups[0].slot_mapping.tolist() == [48, 49, 50, 83] + [0] * num_padding
    assert step.groups[1].slot_mapping.tolist() == [128, 129, 130, 115] + [0] * num_padding
    starts = [0, 3, *range(4, size + 1)]
    for group in step.groups:
        assert group.query_start_loc_device.tolist() == starts + [size] * (size + 1 - len(starts))
        assert group.seq_lens_device.tolist() == [3, 20] + [1] * num_padding + [0] * 2
        assert group.block_table_device[2 : 2 + num_padding, 0].tolist() == [0] * num_padding
        assert group.max_seq_len == MAX_MODEL_LEN


@pytest.mark.parametrize("rope_axes", [1, 3])
def test_rope_positions_are_listed_then_shifted_and_those_of_padding_are_0(rope_axes: int) -> None:
    rows = make_rows(rope_axes=rope_axes)
    new = new_branch("a", list(range(6)), [[3]], computed=1)
    listed = np.arange(3 * rope_axes, dtype=np.int32).reshape(rope_axes, 3) + 10
    new.overrides = InputOverrides(listed.tobytes(), -2)
    rows.add(new)
    rows.add(new_branch("b", list(range(20, 40)), [[4, 5]], computed=18))
    inputs = make_inputs(rows, max_padded=16)
    inputs.send(np.array([0, 1]), np.array([5, 2]))
    inputs.compute(16, 8, 16)
    step = inputs.padded(16, 8, 16)
    assert step.positions.tolist() == [1, 2, 3, 4, 5, 18, 19] + [0] * 9
    expected = [[*axis[1:], 1, 2, 3, 18, 19] + [0] * 9 for axis in listed.tolist()]
    assert step.rope_positions.tolist() == (expected if rope_axes > 1 else expected[0])


def test_models_without_rope_positions_of_their_own_have_no_column_of_them() -> None:
    rows = make_rows()
    rows.add(new_branch("a", [5, 6, 7], [[3]]))
    inputs = make_inputs(rows)
    step = inputs.prepare(np.array([0]), np.array([3]))
    assert step.rope_positions.data_ptr() == step.positions.data_ptr() and not inputs.prepared["rope_positions"].numel()
    assert len(rows.memory) == MAX_REQS * (MAX_MODEL_LEN + rows.max_blocks)
    on_host = InputPreparation(rows, MAX_TOKENS, MAX_REQS, torch.device("cpu")).prepare(np.array([0]), np.array([3]))
    assert on_host.rope_positions.data_ptr() == on_host.positions.data_ptr()


def test_on_the_host_a_step_without_images_has_the_positions_of_a_model_of_text() -> None:
    rows = make_rows(rope_axes=3)
    rows.add(new_branch("text", [5, 6, 7], [[3]]))
    picture = new_branch("picture", [5, 6, 7], [[4]])
    picture.overrides = InputOverrides(np.full((3, 3), 1, np.int32).tobytes(), -1)
    rows.add(picture)
    inputs = InputPreparation(rows, MAX_TOKENS, MAX_REQS, torch.device("cpu"))

    def rope_of(batch: list[int], num_tokens: int) -> tuple[bool, list[int]]:
        step = inputs.prepare(np.array(batch), np.full(len(batch), num_tokens))
        return step.rope_positions.data_ptr() == step.positions.data_ptr(), list(step.rope_positions.shape)

    for num_tokens in (3, 1, 1):  # prompts and decodes, whose tensors are kept
        assert rope_of([0], num_tokens) == (True, [num_tokens])
        assert rope_of([1], num_tokens) == (False, [3, num_tokens])
        assert rope_of([0, 1], num_tokens) == (False, [3, 2 * num_tokens])
    rows.num_computed[:2] = 3  # behind what is listed, the positions of the picture's text are shifted
    assert rope_of([1], 1)[0] is False and rope_of([0], 1)[0] is True


def test_padding_is_divided_among_few_requests() -> None:
    rows = make_rows()
    rows.add(new_branch("a", [5, 6, 7], [[3]]))
    inputs = make_inputs(rows, max_padded=16)
    inputs.send(np.array([0]), np.array([3]))
    inputs.compute(16, 4, 16)
    step = inputs.padded(16, 4, 16)
    (group,) = step.groups
    assert group.query_start_loc_device.tolist() == [0, 3, 8, 13, 16] and group.seq_lens_device.tolist() == [3, 5, 5, 3]
    assert step.input_ids.tolist() == [5, 6, 7] + [0] * 13 and step.positions.tolist() == [0, 1, 2] + [0] * 13
    assert group.slot_mapping.tolist() == [48, 49, 50] + [0] * 13
    assert group.block_table_device[1:, 0].tolist() == [0] * 3


def test_padding_reads_one_block_of_a_short_encoder_input() -> None:
    rows = make_rows(max_encoder_len=16)
    new = new_branch("a", [5, 6, 7], [[3]])
    new.num_encoder_positions, new.cross_block_ids = 9, [6]
    rows.add(new)
    inputs = make_inputs(rows, max_padded=64)
    inputs.prepared["cross_table"].fill_(-7)
    inputs.send(np.array([0]), np.array([3]))
    inputs.compute(64, 2, 64)
    cross = inputs.padded(64, 2, 64).cross
    assert cross is not None
    assert cross.seq_lens_device.tolist() == [9, 1] and cross.block_table_device.tolist() == [[6], [0]]
    assert (inputs.prepared["cross_table"][2:] == -7).all(), "nothing is written behind the table of the last request"


def test_tokens_of_padding_are_not_written() -> None:
    rows = make_rows()
    rows.add(new_branch("a", [5, 6], [[3]], computed=1))
    rows.add(new_branch("b", [7], [[4]]))
    inputs = make_inputs(rows, max_padded=4)
    cells = rows.next_cells(np.array([1, 0]))
    inputs.send(np.array([1, 0]), np.array([1, 1]), of_rows=[(slice(0, 4), {"token_cells": cells})])
    inputs.compute(4, 4, 1)
    before = inputs.resident.memory.clone()
    logits = torch.zeros(4, 50, device=DEVICE)
    logits[range(4), [11, 12, 13, 14]] = 1.0
    logits[1] = float("nan")
    found = inputs.columns(slice(0, 4)).choose_tokens(logits, Mode.GREEDY)
    assert found[:2].tolist() == [11, -1]
    changed = (inputs.resident.memory != before).nonzero().squeeze(1).tolist()
    assert set(changed) <= {2, MAX_MODEL_LEN + 1} and inputs.resident.memory[MAX_MODEL_LEN + 1] == 11


def test_rows_that_no_index_reaches_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(device_inputs, "MAX_MEMORY_CELLS", 100)
    with pytest.raises(ConfigError, match="max_num_seqs"):
        DeviceRows(make_rows(), DEVICE)
