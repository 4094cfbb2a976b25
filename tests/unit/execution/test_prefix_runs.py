"""Requests of a padded step that share a prefix: which are found, and when they are looked for again."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from ratoon.attention import shared_prefix
from ratoon.core.params import SamplingParams
from ratoon.core.plan import BlockCopy, NewRequestData, SchedulerOutput
from ratoon.execution.inputs.batch_rows import BatchRows, StepBatch
from ratoon.execution.inputs.input_batch import InputBatch
from ratoon.execution.inputs.prefix_runs import PrefixRunsOfRows, columns_of
from ratoon.execution.readers.hidden_states import NO_SPANS

BLOCK_SIZE = 16
SHARING: Any = [SimpleNamespace(shares_prefixes=True)]  # in place of a backend
ALONE: Any = [SimpleNamespace(shares_prefixes=False)]


@pytest.fixture(autouse=True)
def small_prefixes_count(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shared_prefix, "MIN_SHARED", BLOCK_SIZE)
    monkeypatch.setattr(shared_prefix, "MIN_SAVED", BLOCK_SIZE)


def batch_of(tables: list[list[int]], num_groups: int = 1) -> InputBatch:
    """Branches whose blocks are computed but for the last, in which one token is."""
    batch = InputBatch(8, 10 * BLOCK_SIZE, [BLOCK_SIZE] * num_groups)
    for index, table in enumerate(tables):
        count = (len(table) - 1) * BLOCK_SIZE + 1
        blocks = tuple([block + 100 * group for block in table] for group in range(num_groups))
        batch.add(NewRequestData(f"r{index}", [0] * (count + 1), count, SamplingParams(), 0, blocks, count))
    return batch


def find(runs: PrefixRunsOfRows, rows: list[int], num_scheduled: list[int] | None = None) -> list[list[int]] | None:
    found = runs.find(step_of(rows, num_scheduled or [1] * len(rows)))
    return None if found is None else [array.tolist() for array in found]


def step_of(rows: list[int], num_scheduled: list[int]) -> StepBatch:
    return StepBatch([], np.array(rows), np.array(num_scheduled), np.cumsum(num_scheduled), None)


def test_runs_end_with_the_last_that_has_a_prefix() -> None:
    runs = PrefixRunsOfRows(batch_of([[1, 2, 3], [9, 4], [1, 2, 5], [1, 2, 6], [7, 8]]), SHARING)
    assert find(runs, [1, 0, 2, 3, 4]) == [[0, 1, 4], [0, 1], [0, 32], [0, 32, 32, 32, 0]]
    assert find(runs, [0, 1, 4]) is None


def test_requests_of_several_tokens_take_no_part() -> None:
    runs = PrefixRunsOfRows(batch_of([[1, 2, 3], [1, 2, 5], [1, 2, 6]]), SHARING)
    assert find(runs, [0, 1, 2], [1, 1, 4]) == [[0, 2], [0], [32], [32, 32, 0]]
    assert find(runs, [0, 1, 2], [1, 1, 1]) == [[0, 3], [0], [32], [32, 32, 32]]


def test_a_prefix_is_shared_in_all_groups_that_take_part() -> None:
    batch = batch_of([[1, 2, 3], [1, 2, 5]], num_groups=2)
    batch.block_tables[1][1, 1] = 107
    assert find(PrefixRunsOfRows(batch, SHARING), [0, 1]) == [[0, 2], [0], [32], [32, 32]]
    assert find(PrefixRunsOfRows(batch, SHARING * 2), [0, 1]) == [[0, 2], [0], [16], [16, 16]]
    assert find(PrefixRunsOfRows(batch, ALONE), [0, 1]) is None


def test_a_batch_is_that_of_the_step_before_until_a_table_changes() -> None:
    """But for blocks that are appended, which no other request has."""
    branches = batch_of([[1, 2, 3], [1, 2, 5]])
    batches, runs = BatchRows(branches), PrefixRunsOfRows(branches, SHARING)

    def lay_out(**counts: int) -> StepBatch:
        return batches.lay_out(SchedulerOutput(num_scheduled_tokens=counts), [], NO_SPANS)

    def found(batch: StepBatch) -> list[list[int]] | None:
        result = runs.find(batch)
        return None if result is None else [array.tolist() for array in result]

    first = lay_out(r0=1, r1=1)
    assert found(first) == [[0, 2], [0], [32], [32, 32]]
    branches.append_blocks(0, ([6],))
    branches.num_computed[:2] += 5
    assert lay_out(r0=1, r1=1) is first
    branches.replace_block(BlockCopy("r1", 0, 1, 2, 7))
    assert found(lay_out(r0=1, r1=1)) == [[0, 2], [0], [16], [16, 16]]
    branches.drop("r1")
    branches.add(NewRequestData("new", [0] * 34, 33, SamplingParams(), 0, ([1, 2, 8],), 33))
    replaced = lay_out(r0=1, new=1)
    assert found(replaced) == [[0, 2], [0], [32], [32, 32]]
    longer = lay_out(r0=1, new=2)
    assert longer.cu_num_tokens.tolist() == [1, 3]
    beams = batches.lay_out(SchedulerOutput(num_scheduled_tokens={"r0": 1}), [(np.array([4, 5]), 2)], NO_SPANS)
    assert beams.rows.tolist() == [0, 4, 5] and beams.cu_num_tokens.tolist() == [1, 3, 5]
    assert lay_out(r0=1, new=2) is longer


def test_padding_has_runs_without_tokens() -> None:
    runs = PrefixRunsOfRows(batch_of([[1, 2, 3], [1, 2, 5], [7, 8]]), SHARING)
    found = runs.find(step_of([0, 1, 2], [1, 1, 1]))
    assert found is not None
    columns = {name: values.tolist() for name, values in columns_of(found, 4).items()}
    assert columns == {
        "run_starts": [0, 2, 2, 2, 2],
        "run_firsts": [0],
        "run_prefix_lens": [32],
        "prefix_ends": [32, 32, 0],
    }


def test_rows_are_ordered_by_all_that_they_share_and_not_by_the_first_block_alone() -> None:
    """Two documents behind the same instructions, asked about in turn, and a request that shares nothing."""
    document, other = [2, 3, 4], [5, 6, 7]
    tables = [[1, *(document if row % 2 else other), 20 + row] for row in range(4)]
    branches = batch_of([*tables, [30, 31]])
    runs = PrefixRunsOfRows(branches, SHARING)
    order = branches.order_by_prefix([0, 1, 2, 3, 4])
    assert order == [1, 3, 0, 2, 4]
    assert find(runs, order) == [[0, 2, 4], [0, 2], [64, 64], [64, 64, 64, 64, 0]]
    assert branches.order_by_prefix(order) is None, "no order is better than a sorted one"
    assert branches.order_by_prefix([3, 1, 0, 2]) is None, "the documents are apart already"
    assert branches.order_by_prefix([0, 1, 4]) is None, "two rows share the first block, and are neighbours"


def test_an_order_is_kept_until_rows_or_tables_change(monkeypatch: pytest.MonkeyPatch) -> None:
    branches = batch_of([[1, 2, 3], [9, 4], [1, 2, 5]])
    assert branches.order_by_prefix([0, 1, 2]) == [0, 2, 1]
    searches: list[list[int]] = []
    find_order = branches._find_order
    monkeypatch.setattr(branches, "_find_order", lambda rows: searches.append(rows) or find_order(rows))
    branches.append_blocks(0, ([6],))
    assert branches.order_by_prefix([0, 1, 2]) == [0, 2, 1] and not searches
    assert branches.order_by_prefix([1, 0, 2]) is None and len(searches) == 1
    branches.replace_block(BlockCopy("r2", 0, 0, 1, 8))
    assert branches.order_by_prefix([0, 1, 2]) is None and len(searches) == 2
