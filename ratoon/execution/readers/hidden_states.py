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
from ratoon.execution.passes.ends import CrossWeights, EndRows, InnerLayers, Layers
from ratoon.execution.readers.interface import Finish, StepLayout
from ratoon.execution.readers.prompt_logprobs import ROWS_AT_ONCE
from ratoon.layers.adapters import AdapterRows
from ratoon.layers.sampling import token_logprobs
from ratoon.models.base import LanguageModel

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

    def __init__(self, num_layers: int, model: LanguageModel | None = None) -> None:
        """`model` is needed where steps ask for a lens."""
        self._num_layers = num_layers
        self._model = model

    def readers(self, plan: SchedulerOutput, layout: StepLayout, output: ModelRunnerOutput) -> Sequence[CaptureReader]:
        if not plan.captures:
            return ()
        captured = [
            CapturedRows(capture, [rows[index] for index in capture.captured])
            for capture, rows in zip(plan.captures, layout.capture_rows, strict=True)
            if capture.captured
        ]
        return capture_readers(captured, self._num_layers, self._model)


def capture_readers(
    captured: list[CapturedRows], num_layers: int, model: LanguageModel | None = None
) -> list[CaptureReader]:
    """`model` is needed where a step asks for a lens."""
    alike: dict[tuple[tuple[int, ...], str, int, tuple[int, ...]], list[CapturedRows]] = {}
    for one in captured:
        lens, heads = (one.step.lens, tuple(one.step.cross_heads)) if isinstance(one.step, CaptureStep) else (0, ())
        alike.setdefault((tuple(one.step.layers), one.step.dtype, lens, heads), []).append(one)
    readers = []
    for (layers, dtype, lens, heads), same in alike.items():
        if heads:
            readers.append(CaptureReader(same, CrossWeights(tuple(zip(layers, heads, strict=True))), dtype))
            continue
        look = None
        if lens:
            assert model is not None, "an encoder has no lens"
            look = Lens(model, layers, lens, [step.adapter_slot for step, rows in same for _ in rows])
        readers.append(CaptureReader(same, InnerLayers.of(layers, num_layers), dtype, look))
    return readers


class Lens:
    """What the model would say if the states of these layers were the last ones: its final norm and head over them."""

    def __init__(self, model: LanguageModel, layers: Sequence[int], num_tokens: int, slots: list[int]) -> None:
        """`slots` are those of the rows' adapters."""
        self._model = model
        self._layers = layers
        self._num_tokens = num_tokens
        self._slots = slots

    def read(self, states: Tensor) -> Tensor:
        """[layers, rows, H] → [layers, rows, 1 + 2 K] float32: the length of each state, K token ids, and their
        log-probabilities. Ids of tokens are exact in float32 up to 2**24."""
        slots = torch.tensor(self._slots, dtype=torch.int32, device=states.device)
        adapters = AdapterRows(slots) if max(self._slots) >= 0 else None
        found = [self._of_layer(layer, rows, adapters) for layer, rows in zip(self._layers, states, strict=True)]
        return torch.stack(found)

    def _of_layer(self, layer: int, states: Tensor, adapters: AdapterRows | None) -> Tensor:
        model, parts = self._model, []
        is_normed = layer > model.config.num_layers or model.final_norm is None
        for start in range(0, len(states), ROWS_AT_ONCE):
            rows = slice(start, start + ROWS_AT_ONCE)
            part = states[rows].contiguous()
            normed = part if is_normed or model.final_norm is None else model.final_norm(part)
            logits = model.compute_logits(normed, None if adapters is None else adapters.select(rows))
            any_token = torch.zeros(len(part), dtype=torch.int64, device=part.device)
            top = token_logprobs(logits, any_token, self._num_tokens)
            length = part.float().norm(dim=-1, keepdim=True)
            parts.append(torch.cat([length, top.token_ids[:, 1:].float(), top.logprobs[:, 1:].float()], dim=1))
        return torch.cat(parts)


class CaptureReader:
    """Reads extractions of the same layers in the same dtype: they travel to the host together."""

    def __init__(
        self, captured: list[CapturedRows], end: Layers | CrossWeights, dtype: str, lens: Lens | None = None
    ) -> None:
        self.end = end
        self._lens = lens
        self._captured = captured
        self._dtype = dtype
        self.wanted = EndRows(end, np.array([row for one in captured for row in one.rows], np.int64))

    def read(self, states: Tensor, output: ModelRunnerOutput) -> Finish | None:
        """[layers, rows, H], for each extraction its part; or weights, [heads, rows, encoder positions]."""
        if self._lens is not None:
            states = self._lens.read(states)
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
            # Of weights, inputs of encoders may differ in length.
            width = None
            if isinstance(one.step, CaptureStep) and one.step.cross_heads:
                width = one.step.num_encoder_positions
            part = np.ascontiguousarray(array[:, start:stop, :width])  # not a copy where it is the only one
            output.hidden_states[one.step.req_id] = WireTensor(self._dtype, part.shape, part.data)
