"""The batch of a step: the rows of its branches, beams and spans, and the tokens of each, in the order of the program.

Branches come first, in the plan's order but for those that share a prefix, then beams, then spans.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from ratoon.core.plan import SchedulerOutput
from ratoon.execution.inputs.columns import SENT, StepColumns, is_read, no_columns
from ratoon.execution.inputs.input_batch import InputBatch


@dataclass(slots=True)
class SpanRows:
    """Spans laid out as rows, for one step."""

    rows: np.ndarray  # [N]
    counts: list[int]  # tokens of each
    written: list[bool]  # whether their keys and values are


@dataclass(slots=True)
class StepBatch:
    """Nothing here is written to: the batch of a step may be that of the next one as well."""

    ids: list[str]  # of the branches
    rows: np.ndarray  # [R]
    num_scheduled: np.ndarray  # [R]
    cu_num_tokens: np.ndarray  # [R]
    unwritten: np.ndarray | None  # [R] bool: those whose keys and values are not kept
    # The optional ones that the rows have, which a branch keeps between steps
    columns: Mapping[str, np.ndarray] = field(default_factory=no_columns)


# Finds optional columns that differ from step to step
ColumnSource = Callable[[InputBatch, StepBatch], StepColumns]


class BatchRows:
    """Lays batches out. Most steps have the batch of the step before, which is kept until a row changes."""

    def __init__(self, branches: InputBatch) -> None:
        self._branches = branches
        self._optional = [
            column for column in SENT.values() if column.is_optional and column.of_rows and is_read(column, branches)
        ]
        self._last: StepBatch | None = None  # of branches alone
        self._of: tuple[dict[str, int], int] = {}, 0  # the plan and the rows that it was made for

    def lay_out(self, plan: SchedulerOutput, beams: Sequence[tuple[np.ndarray, int]], spans: SpanRows) -> StepBatch:
        """`beams`: the rows of each search, and how many tokens each row has."""
        branches, counts = self._branches, plan.num_scheduled_tokens
        is_plain = not beams and not spans.counts
        if is_plain and self._last is not None and self._of == (counts, branches.num_table_changes):
            return self._last
        ids = list(counts)
        rows = [branches.row_of[req_id] for req_id in ids]
        num_scheduled = list(counts.values())
        order = branches.order_by_prefix(rows)
        if order is not None:
            ids, rows = [ids[place] for place in order], [rows[place] for place in order]
            num_scheduled = [num_scheduled[place] for place in order]
        for of_search, num_tokens in beams:
            rows += of_search.tolist()
            num_scheduled += [num_tokens] * len(of_search)
        unwritten = None
        if spans.counts:
            unwritten = np.array([False] * len(rows) + [not written for written in spans.written])
            rows += spans.rows.tolist()
            num_scheduled += spans.counts
        scheduled = np.array(num_scheduled, np.int64)
        batch = StepBatch(ids, np.array(rows, np.int64), scheduled, scheduled.cumsum(), unwritten)
        for column in self._optional:
            assert column.of_rows is not None
            values = getattr(branches, column.of_rows)[batch.rows]
            if (values != column.padding).any():
                batch.columns = {**batch.columns, column.name: values}
        if is_plain:
            self._last, self._of = batch, (counts, branches.num_table_changes)
        return batch
