"""What the tokens of a step see, in models whose images are attended both ways: up to which position.

A token sees up to its own position; a row of an image up to the image's last one, whose keys are therefore computed in
the same step. Steps without such rows have no such column, and run as those of any other model.
"""

from __future__ import annotations

import numpy as np

from ratoon.execution.inputs.batch_rows import StepBatch
from ratoon.execution.inputs.columns import NO_COLUMNS, StepColumns
from ratoon.execution.inputs.input_batch import InputBatch


def visible_ends(rows: InputBatch, batch: StepBatch) -> StepColumns:
    """The last position that each token of the step sees [T] int32. No column: every token sees up to its own. Raises
    ValueError if an image goes on behind the tokens of its row."""
    if not rows.seen_whole:
        return NO_COLUMNS
    batch_rows, num_scheduled = batch.rows, batch.num_scheduled
    found: np.ndarray | None = None
    offset = 0
    for row, count in zip(batch_rows.tolist(), num_scheduled.tolist()):
        begin = int(rows.num_computed[row])
        for start, last in rows.seen_whole.get(row, ()):
            first = max(begin, start)
            if first >= min(begin + count, last):  # no row of it is here, or nothing behind the last one
                continue
            if last >= begin + count:
                problem = f"positions {begin} to {begin + count - 1} end inside the image at {start} to {last}"
                raise ValueError(f"{problem}, whose rows see each other: it must be computed in one step")
            if found is None:
                found = _positions(rows, batch_rows, num_scheduled)
            found[offset + first - begin : offset + last + 1 - begin] = last
        offset += count
    return NO_COLUMNS if found is None else {"visible_ends": found}


def _positions(rows: InputBatch, batch_rows: np.ndarray, num_scheduled: np.ndarray) -> np.ndarray:
    starts = np.cumsum(num_scheduled) - num_scheduled
    shifts = np.repeat(rows.num_computed[batch_rows] - starts, num_scheduled)
    return (np.arange(len(shifts)) + shifts).astype(np.int32)
