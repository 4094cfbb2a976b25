"""The rows of beams. The beams of one search are numbered under their trunk's id, and added and removed together. Rows
move as the plan says; the scheduler decides which beams survive.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np

from ratoon.core.plan import BeamStep
from ratoon.execution.inputs.input_batch import InputBatch
from ratoon.execution.rules.base import RowRules
from ratoon.execution.sampling.sampling_rows import SamplingRows


class BeamRows:
    """The row of every beam, by search. The first is the trunk's own row."""

    def __init__(self, rows: InputBatch, sampling_rows: SamplingRows) -> None:
        self._rows = rows
        self._sampling_rows = sampling_rows
        self._of_search: dict[str, np.ndarray] = {}  # [B] rows, by the trunk's id
        self._rules: dict[str, list[RowRules]] = {}  # of the beams of searches with rules

    def __len__(self) -> int:
        return len(self._of_search)

    def rows_of(self, req_id: str) -> np.ndarray:
        """[B]; the trunk's row while the search has no beams yet."""
        beams = self._of_search.get(req_id)
        return np.array([self._rows.row_of[req_id]]) if beams is None else beams

    def rules_of(self, req_id: str) -> list[RowRules]:
        """Returns the rules of every beam, or the trunk's while the search has no beams yet. The list is empty if the
        search has no rules."""
        beams = self._rules.get(req_id)
        if beams is not None:
            return beams
        trunk = self._sampling_rows.rules[self._rows.row_of[req_id]]
        return [trunk] if trunk else []

    def drop(self, req_ids: Iterable[str]) -> None:
        """Free rows. The trunk's own is freed like that of any branch."""
        for req_id in req_ids:
            beams = self._of_search.pop(req_id, None)
            if beams is not None:
                self._rows.give_back(beams[1:])
                self._rules.pop(req_id, None)

    def apply(self, step: BeamStep) -> None:
        """Update a search's rows to the state at the start of the step."""
        if step.parents is not None:
            self._fork(step)
        beams, rows = self.rows_of(step.req_id), self._rows
        if step.block_ids:
            changed = zip(rows.block_tables, step.first_columns, step.block_ids, strict=True)
            for group, (table, first, ids) in enumerate(changed):
                columns = np.array(ids).reshape(len(beams), -1)  # [B, C]
                table[beams, first : first + columns.shape[1]] = columns
                rows.note_blocks(group, beams, first, columns.shape[1])
        end = step.num_computed_tokens + step.num_tokens
        rows.num_computed[beams] = step.num_computed_tokens
        rows.num_blocks[:, beams] = np.maximum(rows.num_blocks[:, beams], -(-end // rows.block_sizes[:, None]))

    def _fork(self, step: BeamStep) -> None:
        assert step.parents is not None
        rows = self._rows
        old = self.rows_of(step.req_id)
        parents = old[step.parents]  # [B]
        beams = self._rows_for(len(parents), old)
        stops = (-(-step.num_computed_tokens // rows.block_sizes)).tolist()  # columns of each group
        # Rows of a search differ only after the prompt; a new row needs the columns before as well.
        firsts = (rows.num_prompt[old[0]] // rows.block_sizes).tolist()
        for group, (table, first, stop) in enumerate(zip(rows.block_tables, firsts, stops, strict=True)):
            table[beams, first:stop] = table[parents, first:stop]  # which is a copy
            rows.note_blocks(group, beams, first, stop - first)
        if len(beams) > len(old):
            self._begin(beams[len(old) :], old[0], firsts)
        # A narrower search may go on from a row that it gives back, which is cleared by that: not before it is copied.
        self._rows.give_back(old[len(beams) :])
        # Only tokens that are not computed yet are read.
        new_tokens = np.array(step.token_ids).reshape(len(beams), -1)  # [B, N]
        start = step.num_computed_tokens - step.num_restored_tokens
        end = start + new_tokens.shape[1]
        rows.token_ids[beams, start:end] = new_tokens
        rows.note_tokens(beams, start, end - start)
        rows.num_tokens[beams] = end
        self._of_search[step.req_id] = beams
        before = self.rules_of(step.req_id)
        if before:
            # A search whose rows were dropped has lost its rules too: the step has all its tokens, computed or not.
            moves = zip(step.parents, new_tokens.tolist(), strict=True)
            self._rules[step.req_id] = [before[parent].after_all(tokens) for parent, tokens in moves]

    def _begin(self, added: np.ndarray, trunk: int, nums_columns: Sequence[int]) -> None:
        """New rows get what all rows of a search have in common: the trunk's prompt, of so many columns in each
        group's table."""
        rows = self._rows
        for group, (table, num_columns) in enumerate(zip(rows.block_tables, nums_columns, strict=True)):
            table[added, :num_columns] = table[trunk, :num_columns]
            rows.note_blocks(group, added, 0, num_columns)
        rows.num_prompt[added] = rows.num_prompt[trunk]
        rows.rope_deltas[added] = rows.rope_deltas[trunk]  # what is listed is of the prompt, which is computed
        if rows.adapter_slots is not None:
            rows.set_adapter(added, int(rows.adapter_slots[trunk]))
        if rows.cross_tables is not None:
            rows.cross_tables[added] = rows.cross_tables[trunk]
            rows.encoder_lens[added] = rows.encoder_lens[trunk]
            rows.note_cross_table(added)

    def _rows_for(self, count: int, old: np.ndarray) -> np.ndarray:
        """Rows for so many beams: those that the search has, and new ones if these are too few."""
        return old[:count] if count <= len(old) else np.concatenate([old, self._rows.take(count - len(old))])
