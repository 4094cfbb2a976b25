"""The rows of beams: beams of one search are consecutive numbers under their trunk's id, and come and go together.

It moves rows as a plan says. Which beams live on is not known here, nor what their tokens mean.
"""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np

from ratoon.core.plan import BeamStep
from ratoon.execution.input_batch import InputBatch
from ratoon.execution.rules.base import RowRules
from ratoon.execution.sampling_rows import SamplingRows


class BeamRows:
    """The row of every beam, by search. The first is the trunk's own, which it has from the prompt on."""

    def __init__(self, rows: InputBatch, sampling_rows: SamplingRows) -> None:
        self._rows = rows
        self._sampling_rows = sampling_rows
        self._of_search: dict[str, np.ndarray] = {}  # [B] rows, by the trunk's id
        self._rules: dict[str, list[RowRules]] = {}  # of the beams of searches with rules

    def __len__(self) -> int:
        return len(self._of_search)

    def rows_of(self, req_id: str) -> np.ndarray:
        """[B]: of a search whose beams do not exist yet, the trunk's row."""
        beams = self._of_search.get(req_id)
        return np.array([self._rows.row_of[req_id]]) if beams is None else beams

    def rules_of(self, req_id: str) -> list[RowRules]:
        """Of every beam; of a search whose beams do not exist yet, the trunk's. None where the search has no rules."""
        beams = self._rules.get(req_id)
        if beams is not None:
            return beams
        trunk = self._sampling_rows.rules[self._rows.row_of[req_id]]
        return [trunk] if trunk else []

    def drop(self, req_ids: Iterable[str]) -> None:
        """Give rows back. The trunk's own goes the way of all branches."""
        for req_id in req_ids:
            beams = self._of_search.pop(req_id, None)
            if beams is not None:
                self._rows.give_back(beams[1:])
                self._rules.pop(req_id, None)

    def apply(self, step: BeamStep) -> None:
        """Bring a search's rows to where the step begins."""
        if step.parents is not None:
            self._fork(step)
        beams, rows = self.rows_of(step.req_id), self._rows
        if step.block_ids:
            for table, ids in zip(rows.block_tables, step.block_ids, strict=True):
                columns = np.array(ids).reshape(len(beams), -1)  # [B, C]
                table[beams, step.first_column : step.first_column + columns.shape[1]] = columns
        end = step.num_computed_tokens + step.num_tokens
        rows.num_computed[beams] = step.num_computed_tokens
        rows.num_blocks[:, beams] = np.maximum(rows.num_blocks[:, beams], -(-end // rows.block_size))

    def _fork(self, step: BeamStep) -> None:
        assert step.parents is not None
        rows = self._rows
        old = self.rows_of(step.req_id)
        parents = old[step.parents]  # [B]
        beams = self._resize(old, len(parents))
        num_columns = -(-step.num_computed_tokens // rows.block_size)
        # Rows of a search differ only behind the prompt; a row that is new to it needs all that comes before as well.
        first = int(rows.num_prompt[old[0]]) // rows.block_size
        for table in rows.block_tables:
            behind = table[parents, first:num_columns]  # a copy
            table[beams[len(old) :], :first] = table[old[0], :first]
            table[beams, first:num_columns] = behind
        if rows.cross_tables is not None:
            rows.cross_tables[beams[len(old) :]] = rows.cross_tables[old[0]]
            rows.encoder_lens[beams] = rows.encoder_lens[old[0]]
        # Of the tokens only those are read that are not computed yet.
        new_tokens = np.array(step.token_ids).reshape(len(beams), -1)  # [B, N]
        start = step.num_computed_tokens - step.num_restored_tokens
        end = start + new_tokens.shape[1]
        rows.token_ids[beams, start:end] = new_tokens
        rows.num_tokens[beams] = end
        rows.num_prompt[beams] = rows.num_prompt[old[0]]
        self._of_search[step.req_id] = beams
        before = self.rules_of(step.req_id)
        if before:
            # A search that lost its rows has lost its rules with them: it brings all its tokens, computed or not.
            moves = zip(step.parents, new_tokens.tolist(), strict=True)
            self._rules[step.req_id] = [before[parent].after_all(tokens) for parent, tokens in moves]

    def _resize(self, old: np.ndarray, count: int) -> np.ndarray:
        if count <= len(old):
            self._rows.give_back(old[count:])
            return old[:count]
        return np.concatenate([old, self._rows.take(count - len(old))])
