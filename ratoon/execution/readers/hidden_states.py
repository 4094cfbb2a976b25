"""Hidden states for the runner: which rows of a step are read out, at which layers, and the resulting arrays.

Rows are selected by index in the ordinary forward pass. A step without captures does not use this module.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch

from ratoon.core.outputs import ModelRunnerOutput
from ratoon.core.plan import CaptureStep, EncoderStep, SchedulerOutput
from ratoon.core.wire import WireTensor
from ratoon.execution.inputs.buffers import HostCopy
from ratoon.execution.inputs.input_batch import InputBatch
from ratoon.execution.passes.ends import EndRows, InnerLayers, Layers
from ratoon.execution.readers.interface import Finish, StepLayout

Tensor = torch.Tensor

MAX_PINNED_BYTES = 8 << 20
_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


# ---- spans as rows of a step ----


@dataclass(slots=True)
class SpanRows:
    """Spans laid out as rows, for one step."""

    rows: np.ndarray  # [N]
    counts: list[int]  # tokens of each
    written: list[bool]  # whether their keys and values are


NO_SPANS = SpanRows(np.zeros(0, np.int64), [], [])


def lay_out_spans(rows: InputBatch, captures: list[CaptureStep]) -> SpanRows:
    """A row for each span, with its tokens at their positions and the blocks that they read. The caller frees the
    rows."""
    if not captures:
        return NO_SPANS
    taken = rows.take(sum(len(capture.spans) for capture in captures))
    free = iter(taken.tolist())
    counts: list[int] = []
    written: list[bool] = []
    for capture in captures:
        offset = 0
        for first, count, is_written in capture.spans:
            row = next(free)
            rows.token_ids[row, first : first + count] = capture.token_ids[offset : offset + count]
            rows.note_tokens(row, first, count)
            rows.num_computed[row] = first
            rows.append_blocks(row, capture.block_ids)
            rows.set_cross_table(row, capture.cross_block_ids, capture.num_encoder_positions)
            offset += count
            counts.append(count)
            written.append(is_written)
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
    by_layers: dict[tuple[int, ...], list[CapturedRows]] = {}
    for one in captured:
        by_layers.setdefault(tuple(one.step.layers), []).append(one)
    return [CaptureReader(of_layers, InnerLayers.of(layers, num_layers)) for layers, of_layers in by_layers.items()]


class CaptureReader:
    def __init__(self, captured: list[CapturedRows], end: Layers) -> None:
        self._captured = captured
        self.wanted = EndRows(end, np.array([row for one in captured for row in one.rows], np.int64))

    def read(self, states: Tensor, output: ModelRunnerOutput) -> Finish | None:
        """[layers, rows, H], for each extraction its part."""
        parts = states.split([len(one.rows) for one in self._captured], dim=1)
        copies = [(one.step, _start_copy(part.to(_DTYPES[one.step.dtype]))) for one, part in zip(self._captured, parts)]

        def put(output: ModelRunnerOutput) -> None:
            for step, copy in copies:
                states = copy.to_tensor() if isinstance(copy, HostCopy) else copy
                output.hidden_states[step.req_id] = to_wire(states, step.dtype)

        if states.device.type == "cuda":
            return put
        put(output)
        return None


def _start_copy(states: Tensor) -> Tensor | HostCopy:
    """To the host. Large ones are waited for: pinned memory for them would cost more."""
    return HostCopy(states.contiguous()) if states.is_cuda and states.nbytes <= MAX_PINNED_BYTES else states.cpu()


def to_wire(states: Tensor, dtype: str) -> WireTensor:
    """The bytes of a tensor in host memory, without a further copy."""
    host = states.cpu().contiguous()
    array = host.view(torch.int16).numpy() if dtype == "bfloat16" else host.numpy()
    return WireTensor(dtype, tuple(host.shape), array.data)
