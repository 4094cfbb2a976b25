"""Runs encoder inputs: each whole, several concatenated without padding. A GPU runs all of a step in one pass.

Keys and values for cross-attention go to the paged cache; the encoder's states are read out where a request asked for
them, and not kept. The plan decides which inputs run when.
"""

from __future__ import annotations

import numpy as np
import torch

from ratoon.attention.interface import AttentionBackend, CommonAttentionMetadata, LayerCache
from ratoon.core.kv import NULL_BLOCK
from ratoon.core.plan import EncoderStep
from ratoon.execution.inputs.buffers import indices_on
from ratoon.execution.kv.kv_tensors import KVTensors, dtype_name, make_rows, view_pages
from ratoon.execution.passes.ends import LayerRows, ProgramRows
from ratoon.execution.passes.program import HOST_COLUMNS
from ratoon.execution.passes.step_context import EncoderPass
from ratoon.execution.readers.hidden_states import CapturedRows, CaptureReader, capture_readers
from ratoon.execution.readers.interface import ExecutedPass
from ratoon.layers.adapters import AdapterRows
from ratoon.models.encoder_decoder import EncoderBatch, EncoderDecoderLM

Tensor = torch.Tensor

MAX_CPU_POSITIONS = 2048  # of a pass: what its layers compute then stays in a processor's caches


class EncoderRunner:
    def __init__(
        self,
        backend: AttentionBackend,
        kv: KVTensors,
        block_size: int,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        self.num_runs = 0  # encoder inputs that were run, since the start
        self._backend = backend
        self._kv = kv
        self._block_size = block_size
        self._dtype = dtype
        self._device = device
        self._scratch: LayerCache | None = None  # keys and values of one encoder layer, overwritten by the next

    def run(self, model: EncoderDecoderLM, steps: list[EncoderStep]) -> list[ExecutedPass]:
        """Encode, and store what decoders read. Returns the states to read out. Of a pipeline, the first stage encodes,
        and what it has found travels to all others."""
        most = MAX_CPU_POSITIONS if self._device.type == "cpu" else None
        return [self._run_pass(model, together) for together in _passes(steps, most)]

    def _run_pass(self, model: EncoderDecoderLM, steps: list[EncoderStep]) -> ExecutedPass:
        lengths = np.array([step.encoder_input.num_positions for step in steps])
        stage, is_stored = model.stage, any(step.block_ids for step in steps)
        stored = self._kv.cross_backend.build_metadata(self._stored_inputs(steps, lengths))
        adapters = self._adapters(steps, lengths)
        readers = self._readers(steps, lengths, model.encoder_config.num_layers)
        if stage.is_first:
            metadata = self._backend.build_metadata(self._own_inputs(lengths))
            scratch = self._scratch_for(model, lengths)
            context = EncoderPass(self._backend, self._kv, scratch, metadata, stored, adapters)
            states, results = self._encode(model, self._batch(model, steps, lengths), context, readers)
        else:
            context = EncoderPass(self._backend, self._kv, (), None, stored, adapters)
            states, results = self._receive(model, int(lengths.sum()), readers)
        if not stage.is_last:
            model.send_rows(torch.cat([states, *(result.flatten(0, 1) for result in results)]))
        if is_stored:
            model.store_cross(states, context)
        self.num_runs += len(steps)
        return ExecutedPass(readers, results) if stage.is_last else ExecutedPass((), ())

    def _encode(
        self, model: EncoderDecoderLM, batch: EncoderBatch, context: EncoderPass, readers: list[CaptureReader]
    ) -> tuple[Tensor, list[Tensor]]:
        """The final states [E, H], and what each reader reads: [layers, N, H]."""
        rows = [indices_on(self._device, reader.wanted.rows.tolist()) for reader in readers]
        observer = LayerRows([(reader.wanted.end.inner_layers, of_reader) for reader, of_reader in zip(readers, rows)])
        states = model.encode(batch, context, [observer] if readers else [])
        return states.normed, [
            reader.wanted.end.run(ProgramRows(states.select(of_reader), None, found, HOST_COLUMNS))
            for reader, of_reader, found in zip(readers, rows, observer.found)
        ]

    @staticmethod
    def _receive(model: EncoderDecoderLM, num_states: int, readers: list[CaptureReader]) -> tuple[Tensor, list[Tensor]]:
        """Receives from the stage before what `_encode` returns there."""
        shapes = [(reader.end.num_planes, len(reader.wanted.rows)) for reader in readers]
        sizes = [num_states, *(num_layers * num_rows for num_layers, num_rows in shapes)]
        states, *others = model.receive_rows(sum(sizes)).split(sizes)
        return states, [found.unflatten(0, shape) for found, shape in zip(others, shapes, strict=True)]

    def release(self) -> None:
        self._scratch = None

    def _batch(self, model: EncoderDecoderLM, steps: list[EncoderStep], lengths: np.ndarray) -> EncoderBatch:
        positions = torch.from_numpy(_counted(lengths)).to(self._device)
        if steps[0].encoder_input.features is None:
            tokens = [token for step in steps for token in step.encoder_input.token_ids or ()]
            return EncoderBatch(positions, torch.tensor(tokens, dtype=torch.int64, device=self._device), None)
        if model.encoder_config.reads_waveform:  # of any length each
            return EncoderBatch(positions, waveforms=[_features(step).to(self._device) for step in steps])
        stacked = torch.stack([_features(step) for step in steps])  # [N, mel bins, frames]
        return EncoderBatch(positions, None, stacked.to(device=self._device, dtype=self._dtype))

    def _adapters(self, steps: list[EncoderStep], lengths: np.ndarray) -> AdapterRows | None:
        """Returns the adapters of all positions; keys and values for cross-attention are made with them as well."""
        slots = np.array([step.adapter_slot for step in steps], np.int32)
        if (slots < 0).all():
            return None
        return AdapterRows(torch.from_numpy(np.repeat(slots, lengths)).to(self._device))

    # ---- attention's inputs ----

    def _own_inputs(self, lengths: np.ndarray) -> CommonAttentionMetadata:
        """Every input in separate blocks of the scratch cache, in order from 1."""
        num_blocks = -(-lengths // self._block_size)
        first_blocks = 1 + np.cumsum(num_blocks) - num_blocks
        tables = np.zeros((len(lengths), int(num_blocks.max())), np.int32)
        for row, (first, count) in enumerate(zip(first_blocks, num_blocks, strict=True)):
            tables[row, :count] = np.arange(first, first + count)
        slots = np.repeat(first_blocks * self._block_size, lengths) + _counted(lengths)
        return self._group_inputs(lengths, tables, slots)

    def _stored_inputs(self, steps: list[EncoderStep], lengths: np.ndarray) -> CommonAttentionMetadata:
        """The slots of the cross tables. States without a cross table go to the null block."""
        tables = np.full((len(lengths), -(-int(lengths.max()) // self._block_size)), NULL_BLOCK, np.int32)
        for row, step in enumerate(steps):
            tables[row, : len(step.block_ids)] = step.block_ids
        owners, positions = np.repeat(np.arange(len(lengths)), lengths), _counted(lengths)
        blocks = tables[owners, positions // self._block_size].astype(np.int64)
        return self._group_inputs(lengths, tables, blocks * self._block_size + positions % self._block_size)

    def _group_inputs(self, lengths: np.ndarray, tables: np.ndarray, slots: np.ndarray) -> CommonAttentionMetadata:
        query_start = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int32)
        seq_lens = lengths.astype(np.int32)
        longest = int(lengths.max())
        return CommonAttentionMetadata(
            query_start_loc=query_start,
            seq_lens=seq_lens,
            block_table=tables,
            query_start_loc_device=torch.from_numpy(query_start).to(self._device),
            seq_lens_device=torch.from_numpy(seq_lens).to(self._device),
            block_table_device=torch.from_numpy(tables).to(self._device),
            slot_mapping=torch.from_numpy(slots.astype(np.int64)).to(self._device),
            block_size=self._block_size,
            max_query_len=longest,
            max_seq_len=longest,
        )

    def _scratch_for(self, model: EncoderDecoderLM, lengths: np.ndarray) -> LayerCache:
        num_blocks = 1 + int((-(-lengths // self._block_size)).sum())
        if self._scratch is None or len(self._scratch[0]) < num_blocks:
            spec = model.encoder.attention_layers[0].kv_spec(self._block_size, dtype_name(self._dtype))
            rows = make_rows(num_blocks, spec.page_size_bytes, self._device)
            self._scratch = view_pages(rows, 0, spec, self._backend)
        return self._scratch

    # ---- what is read out ----

    def _readers(self, steps: list[EncoderStep], lengths: np.ndarray, num_layers: int) -> list[CaptureReader]:
        first_rows = np.cumsum(lengths) - lengths
        captured = [
            CapturedRows(step, [int(first) + position for position in step.captured])
            for step, first in zip(steps, first_rows, strict=True)
            if step.captured
        ]
        return capture_readers(captured, num_layers)


def _passes(steps: list[EncoderStep], most: int | None) -> list[list[EncoderStep]]:
    """The inputs of each pass, in order: at most so many positions, or one input that is longer."""
    if most is None:
        return [steps]
    passes: list[list[EncoderStep]] = []
    room = 0
    for step in steps:
        length = step.encoder_input.num_positions
        if not passes or length > room:
            passes.append([])
            room = most
        passes[-1].append(step)
        room -= length
    return passes


def _counted(lengths: np.ndarray) -> np.ndarray:
    """0, 1, … length - 1 for each length, concatenated."""
    return np.arange(int(lengths.sum())) - np.repeat(np.cumsum(lengths) - lengths, lengths)


def _features(step: EncoderStep) -> Tensor:
    features = step.encoder_input.features
    assert features is not None, "inputs of one model are all tokens or all features"
    array = np.frombuffer(features.data, np.float32).reshape(features.shape)
    return torch.from_numpy(array.copy() if not array.flags.writeable else array)
