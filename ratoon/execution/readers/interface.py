"""Readers of a step: each kind of result names the rows of the batch that it needs and what the program ends with for
them, and gets the result.

A new kind of result is a file here with a `ReaderSource`, and a line in the runner.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import islice
from typing import Any, Protocol

import torch

from ratoon.core.outputs import ModelRunnerOutput
from ratoon.core.plan import SchedulerOutput
from ratoon.execution.inputs.batch_rows import StepBatch
from ratoon.execution.passes.ends import EndRows

Tensor = torch.Tensor
NO_TOKEN = "the model's logits hold no usable number (NaN or all tokens forbidden)"
# Waits for the results of the device, and puts them into the output that it gets. Called in another thread than readers
# are, while that one may run the next step.
Finish = Callable[[ModelRunnerOutput], None]


class RowReader(Protocol):
    """Reads some rows of one step; not reused for another."""

    wanted: EndRows

    def read(self, result: Any, output: ModelRunnerOutput) -> Finish | None:
        """Gets what the end has computed. Results go into `output`, or later into what `Finish` gets: a reader that
        returns one has not waited for the device."""
        ...


class ReaderSource(Protocol):
    """Makes the readers of one kind of result."""

    def readers(self, plan: SchedulerOutput, layout: StepLayout, output: ModelRunnerOutput) -> Sequence[RowReader]:
        """Returns the readers of a step, often none. What is known without the step goes into `output`."""
        ...


class StepLayout:
    """Where in a step's batch the rows of its branches, beams and captures are. Branches come first, then beams in the
    plan's order, then the spans of captures."""

    def __init__(self, plan: SchedulerOutput, batch: StepBatch) -> None:
        self._plan = plan
        self._num_scheduled = batch.num_scheduled
        self.ids = batch.ids  # of the branches, in the order of the batch
        self.batch_rows = batch.rows  # [R] rows of InputBatch
        self.last_rows = batch.cu_num_tokens - 1  # [R] of the batch: the row of each request's last token

    @cached_property
    def place_of(self) -> dict[str, int]:
        """Maps the id of every branch to its place among the requests of the batch."""
        return {req_id: place for place, req_id in enumerate(self.ids)}

    def last_row(self, req_id: str) -> int:
        return int(self.last_rows[self.place_of[req_id]])

    def rows_of(self, req_id: str) -> range:
        place = self.place_of[req_id]
        end = int(self.last_rows[place]) + 1
        return range(end - int(self._num_scheduled[place]), end)

    @cached_property
    def beam_last_rows(self) -> dict[str, list[int]]:
        """Maps the id of every search with beams to the row of each beam's last token."""
        rest = iter(self.last_rows[len(self.ids) :].tolist())
        return {step.req_id: list(islice(rest, step.num_beams)) for step in self._plan.beam_steps if step.num_tokens}

    @property
    def capture_rows(self) -> list[range]:
        """Returns for every capture the rows of its tokens, or of the tokens of the branch that it reads."""
        num_spans = sum(len(capture.spans) for capture in self._plan.captures)
        rest = iter(self.last_rows[len(self.last_rows) - num_spans :].tolist())
        rows = []
        for capture in self._plan.captures:
            if capture.branch_id:
                rows.append(self.rows_of(capture.branch_id))
                continue
            *_, last = islice(rest, len(capture.spans))
            rows.append(range(last + 1 - len(capture.token_ids), last + 1))
        return rows


def join(parts: Sequence[Finish | None]) -> Finish | None:
    """All of them in one. None: nothing is left to do."""
    left = [finish for finish in parts if finish is not None]
    if len(left) <= 1:
        return left[0] if left else None

    def finish_all(output: ModelRunnerOutput) -> None:
        for finish in left:
            finish(output)

    return finish_all


@dataclass(slots=True)
class ExecutedPass:
    """A forward pass that was launched: its readers, and what the program has computed for each. Tensors are on the
    device and may still be being computed."""

    readers: Sequence[RowReader]
    results: Sequence[Any]

    def read(self, output: ModelRunnerOutput) -> Finish | None:
        return join([reader.read(result, output) for reader, result in zip(self.readers, self.results, strict=True)])


class PendingOutput:
    """The output of a step that the device may still be working on. The thread that launched it makes it, another one
    may take it."""

    def __init__(self, output: ModelRunnerOutput, finish: Finish) -> None:
        self._output = output
        self._finish: Finish | None = finish

    def get_output(self) -> ModelRunnerOutput:
        if self._finish is not None:
            self._finish(self._output)
            self._finish = None
        return self._output
