"""Readers of a step: each kind of result says which rows of the batch it wants, and takes its slice of their states.

The runner lays the rows of all readers one behind another, has the model compute their final states, and hands each
reader its own. A new kind of result is a reader in a file of its own and a line in the runner's `_readers`.
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
    """What reads some rows of one step. It belongs to that step alone."""

    rows: list[int]  # of the step's batch, in the order in which `read` gets them

    def read(self, states: Tensor, output: ModelRunnerOutput) -> None:
        """The final states [len(rows), H] of the rows; what is made of them goes into `output`."""
        ...


class LogitsReader(Protocol):
    """The same of rows whose logits are needed: the product with the vocabulary is made once for all such readers."""

    rows: list[int]

    def read_logits(self, logits: Tensor, output: ModelRunnerOutput) -> None:
        """The logits [len(rows), V] of the rows. They may be changed in place."""
        ...


@dataclass(frozen=True, slots=True)
class StepLayout:
    """Where in a step's batch the rows of its branches and beams are."""

    last_row: dict[str, int]  # of every branch: the row of its last token
    beam_last_rows: list[int]  # the same of every beam, search after search

    @classmethod
    def of(cls, plan: SchedulerOutput, cu_num_tokens: Sequence[int]) -> StepLayout:
        """Branches come first in the batch, in the plan's order, then beams."""
        last_rows = [end - 1 for end in cu_num_tokens]
        num_branches = len(plan.num_scheduled_tokens)
        return cls(dict(zip(plan.num_scheduled_tokens, last_rows)), last_rows[num_branches:])


class NextTokenReader:
    """Readers of logits as one reader of states."""

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
    """`states` are those of `rows_of(readers)`; rows behind them, which no reader has, are passed over."""
    start = 0
    for reader in readers:
        end = start + len(reader.rows)
        reader.read(states[start:end], output)
        start = end
