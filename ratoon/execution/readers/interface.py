"""Readers of a step: each kind of result names the rows of the batch that it needs, and gets their states.

The runner concatenates the rows of all readers, computes their final states, and passes each reader its slice. A new
kind of result is a reader in a new file and a line in the runner's `_readers`. A reader that also needs the stream
between the layers is a `StreamObserver`, and the forward pass shows it the stream.
"""

from __future__ import annotations

import enum
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
# Puts results into the output that it gets, once the device is done. Called in another thread than readers are, while
# that one may run the next step.
Finish = Callable[[ModelRunnerOutput], None]


class PassEnd(enum.IntEnum):
    """What a forward pass computes last, of all rows."""

    STATES = 0
    LOGITS = 1
    TOKENS = 2  # those of the largest logits


class RowReader(Protocol):
    """Reads some rows of one step; not reused for another."""

    rows: list[int]  # of the step's batch, in the order of `read`'s states

    def read(self, states: FinalStates, output: ModelRunnerOutput) -> Finish | None:
        """The final states [len(rows), H] of the rows. Results go into `output`, or later into what `Finish` gets: a
        reader that returns one has not waited for the device."""
        ...


class LogitsReader(Protocol):
    """The same for rows whose logits are needed, which are computed once for all such readers."""

    rows: list[int]

    def read_logits(self, logits: Tensor, output: ModelRunnerOutput) -> Finish | None:
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
        self._readers = [reader for reader in readers if reader.rows]  # tokens of a step may all be known
        self._compute_logits = compute_logits
        self.rows = [row for reader in readers for row in reader.rows]

    def read(self, states: FinalStates, output: ModelRunnerOutput) -> Finish | None:
        return self.read_logits(self._compute_logits(states.normed), output)

    def read_logits(self, logits: Tensor, output: ModelRunnerOutput) -> Finish | None:
        parts = logits.split([len(reader.rows) for reader in self._readers])
        return join([reader.read_logits(part, output) for reader, part in zip(self._readers, parts)])


def join(parts: Sequence[Finish | None]) -> Finish | None:
    """All of them in one. None: nothing is left to do."""
    left = [finish for finish in parts if finish is not None]

    def finish_all(output: ModelRunnerOutput) -> None:
        for finish in left:
            finish(output)

    return finish_all if len(left) > 1 else left[0] if left else None


def rows_of(readers: Sequence[RowReader]) -> list[int]:
    return [row for reader in readers for row in reader.rows]


@dataclass(slots=True)
class ExecutedPass:
    """A forward pass and its readers. Tensors are on the device and may still be being computed."""

    states: FinalStates  # of `rows_of(readers)`
    readers: Sequence[RowReader]

    def read(self, output: ModelRunnerOutput) -> Finish | None:
        start = 0
        parts = []
        for reader in self.readers:
            end = start + len(reader.rows)
            parts.append(reader.read(self.states.select(slice(start, end)), output))
            start = end
        return join(parts)


@dataclass(slots=True)
class LogitsPass:
    """A forward pass that ended with the logits [R, V] of its reader's rows. As ExecutedPass."""

    logits: Tensor
    readers: Sequence[NextTokenReader]  # one, or none if nothing is read

    def read(self, output: ModelRunnerOutput) -> Finish | None:
        return join([reader.read_logits(self.logits, output) for reader in self.readers])


class PendingOutput:
    """The output of a step that the device may still be working on. The thread that launched it makes it, another one
    may take it."""

    def __init__(self, output: ModelRunnerOutput, finish: Finish, done: torch.cuda.Event | None) -> None:
        self._output = output
        self._finish: Finish | None = finish
        self._done = done  # recorded after everything that the results need; None: that was done at once

    def get_output(self) -> ModelRunnerOutput:
        if self._finish is not None:
            if self._done is not None:
                self._done.synchronize()
            self._finish(self._output)
            self._finish = None
        return self._output
