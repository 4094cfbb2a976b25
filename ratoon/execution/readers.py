"""Readers of a step: each kind of result names the rows of the batch that it needs, and gets their states.

The runner concatenates the rows of all readers, computes their final states, and passes each reader its slice. A new
kind of result is a reader in a new file and a line in the runner's `_readers`. A reader that also needs the stream
between the layers is a `StreamObserver`, and the forward pass shows it the stream.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Protocol

import numpy as np
import torch

from ratoon.core.outputs import ModelRunnerOutput
from ratoon.core.plan import SchedulerOutput
from ratoon.models.base import FinalStates

Tensor = torch.Tensor
ComputeLogits = Callable[[Tensor], Tensor]  # [R, H] → [R, V]


class RowReader(Protocol):
    """Reads some rows of one step; not reused for another."""

    rows: list[int]  # of the step's batch, in the order of `read`'s states

    def read(self, states: FinalStates, output: ModelRunnerOutput) -> None:
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
    """Where in a step's batch the rows of its branches, beams and captures are."""

    last_row: dict[str, int]  # of every branch: the row of its last token
    beam_last_rows: dict[str, list[int]]  # of every search with beams: the same for each beam
    capture_rows: list[range]  # of every capture: the rows of its tokens

    @classmethod
    def of(cls, plan: SchedulerOutput, cu_num_tokens: np.ndarray) -> StepLayout:
        """Branches come first in the batch, in the plan's order, then beams, then the spans of captures."""
        last_rows = iter((cu_num_tokens - 1).tolist())
        last_row = dict(zip(plan.num_scheduled_tokens, last_rows))
        beams = {step.req_id: list(islice(last_rows, step.num_beams)) for step in plan.beam_steps if step.num_tokens}
        captures = []
        for capture in plan.captures:
            *_, last = islice(last_rows, len(capture.spans))
            captures.append(range(last + 1 - len(capture.token_ids), last + 1))
        return cls(last_row, beams, captures)


class NextTokenReader:
    """Combines readers of logits into one reader of states."""

    def __init__(self, readers: Sequence[LogitsReader], compute_logits: ComputeLogits) -> None:
        self._readers = readers
        self._compute_logits = compute_logits
        self.rows = [row for reader in readers for row in reader.rows]

    def read(self, states: FinalStates, output: ModelRunnerOutput) -> None:
        logits = self._compute_logits(states.normed)
        for reader, part in zip(self._readers, logits.split([len(reader.rows) for reader in self._readers])):
            reader.read_logits(part, output)


def rows_of(readers: Sequence[RowReader]) -> list[int]:
    return [row for reader in readers for row in reader.rows]


@dataclass(slots=True)
class ExecutedPass:
    """A forward pass and its readers. Tensors are on the device and may still be being computed."""

    states: FinalStates  # of `rows_of(readers)`
    readers: Sequence[RowReader]

    def read(self, output: ModelRunnerOutput) -> None:
        start = 0
        for reader in self.readers:
            end = start + len(reader.rows)
            reader.read(self.states.select(slice(start, end)), output)
            start = end
