"""The driver that runs any step: call by call, from inputs of its own size."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from ratoon.execution.inputs.buffers import indices_on
from ratoon.execution.inputs.step_inputs import InputPreparation, ReadRows
from ratoon.execution.passes.cross_weights import CrossWeightRows
from ratoon.execution.passes.ends import MaskedTokens, RowColumns
from ratoon.execution.passes.program import HOST_COLUMNS, ProgramEnds, ProgramStep, StepProgram

if TYPE_CHECKING:
    from ratoon.execution.inputs.device_inputs import DeviceInputs
    from ratoon.execution.passes.recorded_passes import RecordedPasses
    from ratoon.execution.sampling.mask_column import MaskColumn

Tensor = torch.Tensor
NO_ROWS = np.zeros(0, np.int64)


class Calls:
    """`recorded`: replays the program where it can."""

    has_prepared = False

    def __init__(
        self,
        program: StepProgram,
        inputs: InputPreparation | DeviceInputs,
        device: torch.device,
        recorded: RecordedPasses | None = None,
        masks: MaskColumn | None = None,
    ) -> None:
        self._program = program
        self._inputs = inputs
        self._device = device
        self._recorded = recorded
        self._masks = masks

    def run(self, step: ProgramStep) -> list[Any]:
        wanted = step.wanted
        batch = step.batch
        inputs = self._inputs.prepare(batch.rows, batch.num_scheduled, batch.unwritten, step.columns)
        ends = ProgramEnds.of([each.end for each in wanted], [len(each.rows) for each in wanted])
        columns = self._columns(step)
        rows: np.ndarray | None = None  # all
        if not step.reads_all:
            rows = np.concatenate([each.rows for each in wanted]) if wanted else NO_ROWS
        if self._recorded is not None and step.num_layers is None and not step.only_by_calls:
            results = self._recorded.run(self._program, inputs, ends, rows, columns)
            if results is not None:
                return results
        read = None
        if rows is not None and inputs.cross is None and self._program.model.config.causal:
            read = ReadRows.of(rows[: ends.num_with_states].tolist(), inputs)
        on_device = None if rows is None else indices_on(self._device, rows.tolist())
        model = self._program.model
        weights = CrossWeightRows.of(wanted, inputs.cross, model.config.num_heads, model.shard, model.layer_range.start)
        results = self._program.run(inputs, ends, on_device, columns, step.num_layers, read, weights)
        for index, end in enumerate(ends.ends):
            if isinstance(end, MaskedTokens):
                results[index] = partial(self._choose, end, results[index], columns[index])
        return results

    def _columns(self, step: ProgramStep) -> list[RowColumns]:
        if isinstance(self._inputs, InputPreparation):
            return [HOST_COLUMNS] * len(step.wanted)
        return [self._inputs.uploaded(each.columns, len(each.rows)) for each in step.wanted]

    def _choose(self, end: MaskedTokens, logits: Tensor, columns: RowColumns) -> Any:
        assert self._masks is not None
        return end.choose(logits, columns, self._masks.words)  # whose memory is there once the first masks were begun
