"""Hidden states for the runner: which rows of a step are read out, at which layers, and the resulting arrays.

Rows are selected by index in the ordinary forward pass. A step without captures does not use this module.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

from ratoon.core.outputs import ModelRunnerOutput
from ratoon.core.plan import CaptureStep, EncoderStep, SchedulerOutput
from ratoon.core.wire import WireTensor
from ratoon.execution.buffers import indices_on
from ratoon.execution.input_batch import InputBatch

Tensor = torch.Tensor

_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


# ---- spans as rows of a step ----


@dataclass(slots=True)
class SpanRows:
    """Spans laid out as rows, for one step."""

    rows: np.ndarray  # [N]
    counts: list[int]  # tokens of each
    written: list[bool]  # whether their keys and values are


def lay_out_spans(rows: InputBatch, captures: list[CaptureStep]) -> SpanRows:
    """A row for each span, with its tokens at their positions and the blocks that they read. The caller frees the
    rows."""
    taken = rows.take(sum(len(capture.spans) for capture in captures))
    free = iter(taken.tolist())
    counts: list[int] = []
    written: list[bool] = []
    for capture in captures:
        offset = 0
        for first, count, is_written in capture.spans:
            row = next(free)
            rows.token_ids[row, first : first + count] = capture.token_ids[offset : offset + count]
            rows.num_computed[row] = first
            rows.append_blocks(row, capture.block_ids)
            rows.set_cross_table(row, capture.cross_block_ids, capture.num_encoder_positions)
            offset += count
            counts.append(count)
            written.append(is_written)
    return SpanRows(taken, counts, written)


def only_reads(plan: SchedulerOutput) -> bool:
    """Whether the step only reads out rows whose keys and values are already cached."""
    written = any(is_written for capture in plan.captures for _, _, is_written in capture.spans)
    return not written and not plan.num_scheduled_tokens and not plan.beam_steps


# ---- rows of the residual stream ----


@dataclass(slots=True)
class CapturedRows:
    """One extraction of a step."""

    step: CaptureStep | EncoderStep
    rows: list[int]  # of the step, rising


def captured_rows(captures: list[CaptureStep], first_row: int) -> list[CapturedRows]:
    """The rows of the step that are read out. The first span begins at `first_row`."""
    found = []
    for capture in captures:
        if capture.captured:
            found.append(CapturedRows(capture, [first_row + row for row in capture.captured]))
        first_row += len(capture.token_ids)
    return found


class StepCapture:
    """Copies rows of the residual stream during a forward pass. Layer l is the stream after l layers: 0 is the
    embeddings, `num_layers` the end of the stream, and `num_layers` + 1 the output of the final norm."""

    def __init__(self, captured: list[CapturedRows], num_layers: int, device: torch.device) -> None:
        self._num_layers = num_layers
        self._captured = captured
        self._late = [one for one in captured if max(one.step.layers) >= num_layers]
        self._rows: dict[int, Tensor] = {}  # [R] by layer: the rows of all extractions that read it
        self._taken: dict[int, Tensor] = {}  # [R, H]
        for layer in {layer for one in captured for layer in one.step.layers}:
            wanted = [row for one in captured if layer in one.step.layers for row in one.rows]
            self._rows[layer] = indices_on(device, wanted)

    @property
    def last_rows(self) -> list[int]:
        """The rows that are read at the end of the stream or after the final norm."""
        return [row for one in self._late for row in one.rows]

    @property
    def num_layers_read(self) -> int:
        """The number of layers that must run for all captures."""
        return min(max(self._rows, default=0), self._num_layers)

    def take(self, layer: int, stream: Tensor, update: Tensor | None = None) -> None:
        """The stream [T, H] after `layer` layers; `update` is yet to be added to it."""
        rows = self._rows.get(layer)
        if rows is not None:
            taken = stream[rows]
            self._taken[layer] = taken if update is None else taken.add_(update[rows])

    def take_end(self, stream: Tensor, normed: Tensor) -> None:
        """The end of the stream and the final norm's output, both [L, H], for `last_rows` in their order."""
        for layer, states in ((self._num_layers, stream), (self._num_layers + 1, normed)):
            if layer not in self._rows:
                continue
            parts = states.split([len(one.rows) for one in self._late])
            wanted = [part for one, part in zip(self._late, parts, strict=True) if layer in one.step.layers]
            self._taken[layer] = torch.cat(wanted)

    def give(self, output: ModelRunnerOutput) -> None:
        """Put the captured rows into the step's output: [layers, rows, H] for each extraction."""
        offsets = dict.fromkeys(self._taken, 0)
        for one in self._captured:
            count = len(one.rows)
            taken = [self._taken[layer][offsets[layer] : offsets[layer] + count] for layer in one.step.layers]
            for layer in set(one.step.layers):
                offsets[layer] += count
            states = torch.stack(taken).to(_DTYPES[one.step.dtype])  # [layers, rows, H]
            output.hidden_states[one.step.req_id] = to_wire(states, one.step.dtype)


def to_wire(states: Tensor, dtype: str) -> WireTensor:
    """The bytes of a tensor in host memory, without a further copy."""
    host = states.cpu().contiguous()
    array = host.view(torch.int16).numpy() if dtype == "bfloat16" else host.numpy()
    return WireTensor(dtype, tuple(host.shape), array.data)
