"""A smaller model of the same vocabulary that guesses next tokens. It is run as the engine's own model is."""

from __future__ import annotations

from dataclasses import replace

import torch

from ratoon.execution.drafting.interface import Choose, Inputs, PassOfDrafts
from ratoon.execution.inputs.buffers import indices_on
from ratoon.execution.inputs.columns import NO_COLUMNS
from ratoon.execution.inputs.step_inputs import ReadRows, StepInputs
from ratoon.execution.kv.kv_tensors import LayerCaches
from ratoon.execution.passes.ends import Layers, Logits
from ratoon.execution.passes.program import HOST_COLUMNS, ProgramEnds, StepProgram
from ratoon.execution.passes.recorded_passes import RecordedPasses
from ratoon.layers import sampling
from ratoon.models.base import LanguageModel

Tensor = torch.Tensor
LOGITS = Logits()


class DraftModel:
    """Implements Drafter."""

    lag = 0
    reads: Layers | None = None

    def __init__(
        self, model: LanguageModel, caches: LayerCaches, table: int, inputs: Inputs, record: bool = False
    ) -> None:
        """`caches`: those of its layers, in the blocks of the KV group `table`. `record`: small passes are recorded,
        where the backends allow it."""
        self._program = StepProgram(model, caches)
        self._table = table
        self._inputs = inputs
        self._recorded = RecordedPasses(caches) if record and RecordedPasses.can_serve(caches) else None

    def run(self, one: PassOfDrafts, states: Tensor | None, choose: Choose | None = None) -> tuple[Tensor, None]:
        program = self._program
        inputs = inputs_of_group(self._inputs.prepare(one.rows, one.counts), self._table, len(program.kv.backends))
        ends = ProgramEnds.of([LOGITS] if len(one.read) else [], [len(one.read)] if len(one.read) else [])
        rows = None if len(one.read) == one.num_tokens else one.read
        columns = [HOST_COLUMNS] * len(ends.ends)
        results = None
        if self._recorded is not None:
            results = self._recorded.run(program, inputs, ends, rows, columns)
        if results is None:
            device = inputs.input_ids.device
            on_device = None if rows is None else indices_on(device, rows.tolist())
            read = None if rows is None else ReadRows.of(rows.tolist(), inputs)
            results = program.run(inputs, ends, on_device, columns, read=read)
        if not results:
            return inputs.input_ids[:0], None
        return (choose or greedy_tokens)(results[0]), None

    def clear(self) -> None:
        if self._recorded is not None:
            self._recorded.clear()


def inputs_of_group(inputs: StepInputs, table: int, count: int) -> StepInputs:
    """The inputs of a pass whose layers, in `count` groups of their own, lie in the blocks of one group. Its rows are
    token ids at their positions, without adapters."""
    groups = [inputs.groups[table]] * count
    return replace(inputs, groups=groups, cross=None, columns=NO_COLUMNS)


def greedy_tokens(logits: Tensor) -> Tensor:
    """The token with the largest logit of each row [D, V]; -1: it is no number. In memory of its own."""
    chosen = sampling.greedy(logits if logits.dtype is torch.float32 else logits.float())
    return chosen.token_ids.to(torch.int64).masked_fill(chosen.bad.bool(), -1)
