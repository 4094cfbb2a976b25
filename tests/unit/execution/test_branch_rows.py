"""Rows persist between steps; a dropped row leaves no state."""

import numpy as np
import pytest

from ratoon.core.params import SamplingParams
from ratoon.core.plan import BlockCopy, NewRequestData
from ratoon.execution.inputs.input_batch import InputBatch
from ratoon.memory.hashing import pack_tokens


def branch(name, tokens, blocks, computed=0):
    return NewRequestData(name, tokens, len(tokens), SamplingParams(), 7, (blocks, [b + 100 for b in blocks]), computed)


def make_rows(max_rows=3):
    return InputBatch(max_rows, max_model_len=64, block_sizes=[16, 16])


def test_a_dropped_row_is_handed_out_again_and_holds_nothing_of_the_old_branch():
    rows = make_rows()
    rows.add(branch("a", list(range(20)), [1, 2]))
    assert rows.drop("a") == 0
    row = rows.add(branch("b", [9], [5]))
    assert row == 0
    assert rows.block_tables[0][row].tolist() == [5, 0, 0, 0]
    assert rows.block_tables[1][row].tolist() == [105, 0, 0, 0]
    assert rows.num_tokens[row] == 1


@pytest.mark.parametrize("computed", [0, 3, 5, 7])
def test_a_prompt_that_came_packed_is_not_read_from_the_list(computed):
    """The list is that of another prompt, so that it shows."""
    rows = make_rows()
    new = branch("a", [90, 91, 92, 93, 94, 6, 7, 8], [1], computed)
    new.packed_prompt = pack_tokens([1, 2, 3, 4, 5])
    row = rows.add(new)
    assert rows.token_ids[row, computed:8].tolist() == [1, 2, 3, 4, 5, 6, 7, 8][computed:]
    assert rows.num_tokens[row] == 8


def test_dropping_an_unknown_branch_is_no_error():
    assert make_rows().drop("never there") is None


def test_blocks_are_appended_to_each_group_on_its_own():
    rows = make_rows()
    row = rows.add(branch("a", [1, 2], [1]))
    rows.append_blocks(row, ([2, 3], []))
    rows.append_blocks(row, ([], [8]))
    assert rows.block_tables[0][row].tolist() == [1, 2, 3, 0]
    assert rows.block_tables[1][row].tolist() == [101, 8, 0, 0]


def test_copy_on_write_replaces_one_entry_of_one_group():
    rows = make_rows()
    row = rows.add(branch("a", list(range(40)), [1, 2, 3]))
    rows.replace_block(BlockCopy("a", 1, 2, src=103, dst=50))
    assert rows.block_tables[0][row].tolist() == [1, 2, 3, 0]
    assert rows.block_tables[1][row].tolist() == [101, 102, 50, 0]


def test_sampled_tokens_land_behind_each_rows_last_token():
    rows = make_rows()
    first, second = rows.add(branch("a", [1, 2, 3], [1])), rows.add(branch("b", [4], [2]))
    rows.append_tokens(np.array([second, first]), np.array([40, 30]))
    assert rows.token_ids[first, :4].tolist() == [1, 2, 3, 30]
    assert rows.token_ids[second, :2].tolist() == [4, 40]


def test_one_branch_too_many_and_the_same_branch_twice_are_refused():
    rows = make_rows(max_rows=1)
    rows.add(branch("a", [1], [1]))
    with pytest.raises(ValueError, match="'a' has a row already"):
        rows.add(branch("a", [1], [1]))
    with pytest.raises(ValueError, match="no row left"):
        rows.add(branch("b", [1], [1]))
