"""Hidden states for the runner: which rows of a step are read out, at which layers, and the resulting arrays.

Rows are selected by index in the ordinary forward pass. A step without captures does not use this module.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

from ratoon.core.outputs import ModelRunnerOutput
from ratoon.core.plan import CaptureStep, EncoderStep
from ratoon.core.wire import WireTensor
from ratoon.execution.inputs.buffers import indices_on
from ratoon.execution.inputs.input_batch import InputBatch
from ratoon.execution.readers.interface import StepLayout
from ratoon.models.base import FinalStates, StreamObserver

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
            rows.note_tokens(row, first, count)
            rows.num_computed[row] = first
            rows.append_blocks(row, capture.block_ids)
            rows.set_cross_table(row, capture.cross_block_ids, capture.num_encoder_positions)
            offset += count
            counts.append(count)
            written.append(is_written)
    return SpanRows(taken, counts, written)


# ---- rows of the residual stream ----


@dataclass(slots=True)
class CapturedRows:
    """One extraction of a step."""

    step: CaptureStep | EncoderStep
    rows: list[int]  # of the pass, rising


def captured_rows(captures: list[CaptureStep], layout: StepLayout) -> list[CapturedRows]:
    return [
        CapturedRows(capture, [rows[index] for index in capture.captured])
        for capture, rows in zip(captures, layout.capture_rows, strict=True)
        if capture.captured
    ]


class CaptureReader(StreamObserver):
    """Reads rows of the residual stream. Layer l is the stream after l layers: 0 is the embeddings, `num_layers` the
    end of the stream, and `num_layers` + 1 the output of the final norm. The last two are final states; rows of the
    other layers are copied while the pass runs."""

    def __init__(self, captured: list[CapturedRows], num_layers: int, device: torch.device) -> None:
        self._captured = captured
        self._final_layers = (num_layers, num_layers + 1)
        layers = {layer for one in captured for layer in one.step.layers}
        self.num_layers_read = min(max(layers, default=0), num_layers)
        final = [one for one in captured if max(one.step.layers) >= num_layers]
        self.rows = _rows_of(final)
        inner = {layer: [one for one in captured if layer in one.step.layers] for layer in layers if layer < num_layers}
        self._indices = {layer: indices_on(device, _rows_of(of_layer)) for layer, of_layer in inner.items()}
        self._of_layer = inner | dict.fromkeys(self._final_layers, final)  # the extractions whose rows are read there
        self._states: dict[int, Tensor] = {}  # by layer [R, H]: the rows of its extractions, concatenated

    def observe(self, layer: int, stream: Tensor, update: Tensor | None) -> None:
        rows = self._indices.get(layer)
        if rows is not None:
            states = stream[rows]
            self._states[layer] = states if update is None else states.add_(update[rows])

    def read(self, states: FinalStates, output: ModelRunnerOutput) -> None:
        """[layers, rows, H] for each extraction."""
        self._states |= zip(self._final_layers, (states.stream, states.normed), strict=True)
        parts: dict[tuple[str, int], Tensor] = {}  # by request and layer
        for layer, of_layer in self._of_layer.items():
            split = self._states[layer].split([len(one.rows) for one in of_layer])
            parts |= {(one.step.req_id, layer): part for one, part in zip(of_layer, split, strict=True)}
        for one in self._captured:
            own = torch.stack([parts[one.step.req_id, layer] for layer in one.step.layers])
            output.hidden_states[one.step.req_id] = to_wire(own.to(_DTYPES[one.step.dtype]), one.step.dtype)


def _rows_of(captured: list[CapturedRows]) -> list[int]:
    return [row for one in captured for row in one.rows]


def to_wire(states: Tensor, dtype: str) -> WireTensor:
    """The bytes of a tensor in host memory, without a further copy."""
    host = states.cpu().contiguous()
    array = host.view(torch.int16).numpy() if dtype == "bfloat16" else host.numpy()
    return WireTensor(dtype, tuple(host.shape), array.data)
