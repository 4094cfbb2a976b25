"""Hidden states for the runner: which rows of a step are read out, at which layers, and the resulting arrays.

Rows are selected by index in the ordinary forward pass. A step without captures does not use this module.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch

from ratoon.core.outputs import ModelRunnerOutput
from ratoon.core.plan import CaptureStep, EncoderStep, SchedulerOutput
from ratoon.core.wire import WireTensor
from ratoon.execution.inputs.batch_rows import SpanRows
from ratoon.execution.inputs.buffers import HostCopy
from ratoon.execution.inputs.input_batch import InputBatch
from ratoon.execution.passes.ends import EndRows, InnerLayers, Layers
from ratoon.execution.readers.interface import Finish, StepLayout

Tensor = torch.Tensor

MAX_PINNED_BYTES = 8 << 20
_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


# ---- spans as rows of a step ----


NO_SPANS = SpanRows(np.zeros(0, np.int64), [], [])


def lay_out_spans(rows: InputBatch, captures: list[CaptureStep]) -> SpanRows:
    """A row for each span, with its tokens at their positions and the blocks that they read. The caller frees the
    rows."""
    spans = [(capture, span) for capture in captures for span in capture.spans]
    if not spans:
        return NO_SPANS
    taken = rows.take(len(spans))
    firsts, counts, written = (list(values) for values in zip(*(span for _, span in spans)))
    tokens = [token for capture in captures for token in capture.token_ids]
    if len(tokens) == len(spans):  # one token each, as most
        rows.token_ids[taken, firsts] = tokens
        rows.note_tokens(taken, np.array(firsts), 1)
    else:
        offset = 0
        for row, first, count in zip(taken.tolist(), firsts, counts):
            rows.token_ids[row, first : first + count] = tokens[offset : offset + count]
            rows.note_tokens(row, first, count)
            offset += count
    rows.num_computed[taken] = firsts
    rows.set_tables(taken, [capture.block_ids for capture, _ in spans])
    for row, (capture, _) in zip(taken.tolist(), spans):
        rows.set_cross_table(row, capture.cross_block_ids, capture.num_encoder_positions)
        rows.set_overrides(row, capture.overrides)
        if capture.adapter_slot >= 0:
            rows.set_adapter(row, capture.adapter_slot)
    return SpanRows(taken, counts, written)


# ---- rows of the residual stream ----


class CapturedRows(NamedTuple):
    """One extraction of a step."""

    step: CaptureStep | EncoderStep
    rows: list[int]  # of the pass, rising


class CaptureReaders:
    """Reads out the rows of a step's captures: extractions of the same layers together."""

    def __init__(self, num_layers: int) -> None:
        self._num_layers = num_layers

    def readers(self, plan: SchedulerOutput, layout: StepLayout, output: ModelRunnerOutput) -> Sequence[CaptureReader]:
        if not plan.captures:
            return ()
        captured = [
            CapturedRows(capture, [rows[index] for index in capture.captured])
            for capture, rows in zip(plan.captures, layout.capture_rows, strict=True)
            if capture.captured
        ]
        return capture_readers(captured, self._num_layers)


def capture_readers(captured: list[CapturedRows], num_layers: int) -> list[CaptureReader]:
    alike: dict[tuple[tuple[int, ...], str], list[CapturedRows]] = {}
    for one in captured:
        alike.setdefault((tuple(one.step.layers), one.step.dtype), []).append(one)
    return [CaptureReader(same, InnerLayers.of(layers, num_layers), dtype) for (layers, dtype), same in alike.items()]


class CaptureReader:
    """Reads extractions of the same layers in the same dtype: they travel to the host together."""

    def __init__(self, captured: list[CapturedRows], end: Layers, dtype: str) -> None:
        self.end = end
        self._captured = captured
        self._dtype = dtype
        self.wanted = EndRows(end, np.array([row for one in captured for row in one.rows], np.int64))

    def read(self, states: Tensor, output: ModelRunnerOutput) -> Finish | None:
        """[layers, rows, H], for each extraction its part."""
        states = states.to(_DTYPES[self._dtype])
        if not states.is_cuda:
            self._put(states, output)
            return None
        if states.nbytes > MAX_PINNED_BYTES:  # waited for: pinned memory would cost more
            states = states.cpu()
            return lambda output: self._put(states, output)
        copy = HostCopy(states.contiguous())
        return lambda output: self._put(copy.to_tensor(), output)

    def _put(self, states: Tensor, output: ModelRunnerOutput) -> None:
        array = (states.view(torch.int16) if self._dtype == "bfloat16" else states).numpy()
        stop = 0
        for one in self._captured:
            start, stop = stop, stop + len(one.rows)
            part = np.ascontiguousarray(array[:, start:stop])  # not a copy where it is the only one, or one layer's
            output.hidden_states[one.step.req_id] = WireTensor(self._dtype, part.shape, part.data)
