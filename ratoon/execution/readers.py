"""Readers of a step: each kind of result names the rows of the batch that it needs, and gets their states.

The runner concatenates the rows of all readers, computes their final states, and passes each reader its slice. A new
kind of result is a reader in a new file and a line in the runner's `_readers`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch

from ratoon.core.outputs import ModelRunnerOutput
from ratoon.core.plan import SchedulerOutput

Tensor = torch.Tensor
ComputeLogits = Callable[[Tensor], Tensor]  # [R, H] → [R, V]


class RowReader(Protocol):
    """Reads some rows of one step; not reused for another."""

    rows: list[int]  # of the step's batch, in the order of `read`'s states

    def read(self, states: Tensor, output: ModelRunnerOutput) -> None:
        """The final states [len(rows), H] of the rows; results go into `output`."""
        ...


class LogitsReader(Protocol):
    """The same for rows whose logits are needed, which are computed once for all such readers."""

    rows: list[int]

    def read_logits(self, logits: Tensor, output: ModelRunnerOutput) -> None:
        """The logits [len(rows), V] of the rows. They may be changed in place."""
        ...


@dataclass(frozen=True, slots=True)
class StepLayout:
    """Where in a step's batch the rows of its branches and beams are."""

    last_row: dict[str, int]  # of every branch: the row of its last token
    beam_last_rows: list[int]  # the same of every beam, search by search

    @classmethod
    def of(cls, plan: SchedulerOutput, cu_num_tokens: Sequence[int]) -> StepLayout:
        """Branches come first in the batch, in the plan's order, then beams."""
        last_rows = [end - 1 for end in cu_num_tokens]
        num_branches = len(plan.num_scheduled_tokens)
        return cls(dict(zip(plan.num_scheduled_tokens, last_rows)), last_rows[num_branches:])


class NextTokenReader:
    """Combines readers of logits into one reader of states."""

    def __init__(self, readers: Sequence[LogitsReader], compute_logits: ComputeLogits) -> None:
        self._readers = readers
        self._compute_logits = compute_logits
        self.rows = [row for reader in readers for row in reader.rows]

    def read(self, states: Tensor, output: ModelRunnerOutput) -> None:
        logits = self._compute_logits(states)
        for reader, part in zip(self._readers, logits.split([len(reader.rows) for reader in self._readers])):
            reader.read_logits(part, output)


def rows_of(readers: Sequence[RowReader]) -> list[int]:
    return [row for reader in readers for row in reader.rows]


def read_all(readers: Sequence[RowReader], states: Tensor, output: ModelRunnerOutput) -> None:
    """`states` are those of `rows_of(readers)`; further rows are ignored."""
    start = 0
    for reader in readers:
        end = start + len(reader.rows)
        reader.read(states[start:end], output)
        start = end
