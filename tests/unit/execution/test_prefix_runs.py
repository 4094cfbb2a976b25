"""Requests of a padded step that share a prefix: which are found, and when they are looked for again."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from ratoon.attention import shared_prefix
from ratoon.core.params import SamplingParams
from ratoon.core.plan import BlockCopy, NewRequestData
from ratoon.execution.inputs.input_batch import InputBatch
from ratoon.execution.inputs.prefix_runs import PrefixRunsOfRows, columns_of

BLOCK_SIZE = 16
SHARING: Any = [SimpleNamespace(shares_prefixes=True)]  # in place of a backend
ALONE: Any = [SimpleNamespace(shares_prefixes=False)]


@pytest.fixture(autouse=True)
def small_prefixes_count(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shared_prefix, "MIN_SHARED", BLOCK_SIZE)
    monkeypatch.setattr(shared_prefix, "MIN_SAVED", BLOCK_SIZE)


def batch_of(tables: list[list[int]], num_groups: int = 1) -> InputBatch:
    """Branches whose blocks are computed but for the last, in which one token is."""
    batch = InputBatch(8, 10 * BLOCK_SIZE, BLOCK_SIZE, num_groups)
    for index, table in enumerate(tables):
        count = (len(table) - 1) * BLOCK_SIZE + 1
        blocks = tuple([block + 100 * group for block in table] for group in range(num_groups))
        batch.add(NewRequestData(f"r{index}", [0] * (count + 1), count, SamplingParams(), 0, blocks, count))
    return batch


def find(runs: PrefixRunsOfRows, rows: list[int], num_scheduled: list[int] | None = None) -> list[list[int]] | None:
    found = runs.find(np.array(rows), np.array(num_scheduled or [1] * len(rows)))
    return None if found is None else [array.tolist() for array in found]


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


def test_runs_are_looked_for_again_when_a_table_changes(monkeypatch: pytest.MonkeyPatch) -> None:
    batch = batch_of([[1, 2, 3], [1, 2, 5]])
    runs = PrefixRunsOfRows(batch, SHARING)
    searches = []
    search = runs._find
    monkeypatch.setattr(runs, "_find", lambda *args: searches.append(1) or search(*args))
    assert find(runs, [0, 1]) == [[0, 2], [0], [32], [32, 32]]
    batch.append_blocks(0, ([6],))
    batch.num_computed[:2] += 5
    assert find(runs, [0, 1]) == [[0, 2], [0], [32], [32, 32]]
    assert len(searches) == 1, "blocks were only appended"
    batch.replace_block(BlockCopy("r1", 0, 1, 2, 7))
    assert find(runs, [0, 1]) == [[0, 2], [0], [16], [16, 16]]
    batch.drop("r1")
    batch.add(NewRequestData("new", [0] * 34, 33, SamplingParams(), 0, ([1, 2, 8],), 33))
    assert find(runs, [0, 1]) == [[0, 2], [0], [32], [32, 32]]


def test_padding_has_runs_without_tokens() -> None:
    runs = PrefixRunsOfRows(batch_of([[1, 2, 3], [1, 2, 5], [7, 8]]), SHARING)
    found = runs.find(np.array([0, 1, 2]), np.array([1, 1, 1]))
    assert found is not None
    columns = {name: values.tolist() for name, values in columns_of(found, 4).items()}
    assert columns == {
        "run_starts": [0, 2, 2, 2, 2],
        "run_firsts": [0],
        "run_prefix_lens": [32],
        "prefix_ends": [32, 32, 0],
    }
