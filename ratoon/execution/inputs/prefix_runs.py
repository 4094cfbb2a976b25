"""Finds the requests of a padded step that share a prefix of their blocks, so that attention reads it once for all of
them: the runs of attention/shared_prefix.py as columns.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from ratoon.attention import shared_prefix
from ratoon.attention.interface import AttentionBackend
from ratoon.attention.shared_prefix import PrefixRuns, find_runs, shared_prefixes
from ratoon.execution.inputs.batch_rows import StepBatch
from ratoon.execution.inputs.input_batch import InputBatch


class PrefixRunsOfRows:
    """Remembers the runs of the last batch. They are those of the next step if its batch is the same: no table has
    changed then but for blocks that were appended."""

    def __init__(self, rows: InputBatch, backends: Sequence[AttentionBackend]) -> None:
        """`backends`: of the KV groups. A prefix is shared in all groups whose backends attend to it together."""
        self._rows = rows
        self._backends = backends
        self._batch: StepBatch | None = None
        self._runs: PrefixRuns | None = None

    def find(self, batch: StepBatch) -> PrefixRuns | None:
        """None: too little is shared. Only requests of one token take part."""
        if len(batch.rows) < 2:
            return None
        if batch is not self._batch:
            self._batch, self._runs = batch, self._find(batch.rows, batch.num_scheduled)
        return self._runs

    def _find(self, batch_rows: np.ndarray, num_scheduled: np.ndarray) -> PrefixRuns | None:
        rows = self._rows
        num_computed = rows.num_computed[batch_rows]
        if num_computed.sum() < shared_prefix.MIN_SAVED:
            return None
        longest = int(num_computed.max())
        shared: np.ndarray | None = None
        for backend, whole, block_size in zip(self._backends, rows.block_tables, rows.block_sizes.tolist()):
            if not backend.shares_prefixes:
                continue
            num_blocks = -(-longest // block_size)
            table = whole[:, :num_blocks]
            first = table[batch_rows, 0]
            if not (first[1:] == first[:-1]).any():
                return None
            found = shared_prefixes(table[batch_rows], num_computed, block_size)
            shared = found if shared is None else np.minimum(shared, found)
        if shared is None:
            return None
        starts = np.concatenate([[0], num_scheduled.cumsum()])
        return find_runs(shared, np.where(num_scheduled == 1, num_computed, 0), starts)


def columns_of(runs: PrefixRuns, num_runs: int) -> Mapping[str, np.ndarray]:
    """The columns of these runs, padded to so many: further ones have no token."""
    starts = np.full(num_runs + 1, runs.starts[-1])
    starts[: len(runs.starts)] = runs.starts
    return {
        "run_starts": starts,
        "run_firsts": runs.firsts,
        "run_prefix_lens": runs.prefix_lens,
        "prefix_ends": runs.begins,
    }
