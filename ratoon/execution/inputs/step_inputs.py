"""Input preparation on the host: from rows and scheduled counts to the arrays of a step, with vectorised index
arithmetic. device_inputs.py is the same on a device; without it, arrays are copied there one by one.

A test checks it against the worked example of the design. No state of branches is kept here: the buffers are only
reused memory.
"""

from __future__ import annotations

import ctypes
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

from ratoon.attention.interface import CommonAttentionMetadata
from ratoon.core.kv import NULL_BLOCK
from ratoon.execution.inputs.buffers import StepBuffer
from ratoon.execution.inputs.cells import all_to_device
from ratoon.execution.inputs.columns import (
    NO_COLUMNS,
    PREPARED,
    SENT,
    TABLES,
    Per,
    Sizes,
    StepColumns,
    StepTable,
    is_read,
    names_of,
    no_columns,
)
from ratoon.execution.inputs.input_batch import InputBatch
from ratoon.layers.adapters import AdapterRows
from ratoon.layers.embedding import RowEmbeddings
from ratoon.layers.native import DecodeInputs, DecodeTables, library

MAX_DECODES = 64  # requests with one token each whose inputs a kernel prepares; with more, numpy is as fast


@dataclass(slots=True)
class StepInputs:
    """What a forward pass reads."""

    input_ids: torch.Tensor  # [T]
    positions: torch.Tensor  # [T] in the sequence
    groups: list[CommonAttentionMetadata]
    cu_num_tokens: np.ndarray  # [R]: the last token of request r is at cu_num_tokens[r] - 1
    writes_nothing: bool  # no token's keys and values are kept
    cross: CommonAttentionMetadata | None = None  # for cross-attention, whose sequences are encoder inputs
    # The optional ones that the step has, on the device
    columns: Mapping[str, torch.Tensor] = field(default_factory=no_columns)

    def set_columns(self, columns: Mapping[str, torch.Tensor], on_host: Mapping[str, Any] = NO_COLUMNS) -> None:
        """Gives the step its optional columns. `on_host`: those that the host knows, where it does."""
        self.columns = columns
        if "visible_ends" in columns:
            for group in self.groups:
                group.visible_ends_device, group.visible_ends = columns["visible_ends"], on_host.get("visible_ends")

    # ---- optional columns, as models and layers read them ----

    @property
    def rope_positions(self) -> torch.Tensor:
        """[T] or [axes, T], by which heads are rotated: `positions`, if no row has its own."""
        return self.columns.get("rope_positions", self.positions)

    @property
    def embeddings(self) -> RowEmbeddings | None:
        """The inputs of rows that are no token ids."""
        table = self.columns.get("embedding_table")
        return None if table is None else RowEmbeddings(self.columns["embedding_rows"], table)

    @property
    def adapters(self) -> AdapterRows | None:
        """The adapter of each token's row. None: no row has one."""
        slots = self.columns.get("adapter_slots")
        return None if slots is None else AdapterRows(slots)


@dataclass(frozen=True, slots=True)
class ReadRows:
    """The rows of a step that are read: a few, in any order."""

    rows: list[int]
    groups: list[CommonAttentionMetadata]  # of the whole step

    @classmethod
    def of(cls, rows: list[int], inputs: StepInputs) -> ReadRows | None:
        """None: it costs no more to attend with all rows. With one row of each prompt or less, it does; more rows would
        read the keys of their request once for each. None also where such a row sees tokens behind it."""
        num_reqs = len(inputs.cu_num_tokens)
        ends = inputs.groups[0].visible_ends if inputs.groups else None
        if ends is not None and not cls._are_last(rows, ends, inputs):
            return None
        return cls(rows, inputs.groups) if len(rows) <= num_reqs < inputs.cu_num_tokens[-1] else None

    @staticmethod
    def _are_last(rows: list[int], ends: np.ndarray, inputs: StepInputs) -> bool:
        """Whether these rows see nothing behind them."""
        step = inputs.groups[0]
        places = np.array(rows, np.int64)
        requests = np.searchsorted(step.query_start_loc, places, side="right") - 1
        positions = step.seq_lens[requests] - (step.query_start_loc[requests + 1] - places)
        return bool((ends[places] == positions).all())

    def as_requests(self, group: int, rows: torch.Tensor) -> CommonAttentionMetadata:
        """A step in which each row is a request of one token, behind all tokens before it. `rows`: on the device."""
        step = self.groups[group]
        places = np.array(self.rows, np.int64)
        requests = np.searchsorted(step.query_start_loc, places, side="right") - 1
        seq_lens = (step.seq_lens[requests] - (step.query_start_loc[requests + 1] - 1 - places)).astype(np.int32)
        starts = np.arange(len(places) + 1, dtype=np.int32)
        device = step.seq_lens_device.device
        starts_device, seq_lens_device, requests_device = all_to_device([starts, seq_lens, requests], device)
        return CommonAttentionMetadata(
            query_start_loc=starts,
            seq_lens=seq_lens,
            block_table=step.block_table[requests],
            query_start_loc_device=starts_device,
            seq_lens_device=seq_lens_device,
            block_table_device=step.block_table_device[requests_device],
            slot_mapping=step.slot_mapping[rows],
            block_size=step.block_size,
            max_query_len=1,
            max_seq_len=int(seq_lens.max()),
        )


def _make_buffers(rows: InputBatch, sizes: Sizes, device: torch.device) -> dict[str, StepBuffer]:
    """One for each column that the program reads."""
    read: dict[str, tuple[list[int], torch.dtype]] = {
        name: ([sizes.of(column.per)], column.dtype)
        for name, column in SENT.items()
        if column.is_optional and is_read(column, rows)
    }
    for name, column in PREPARED.items():
        if is_read(column, rows):
            read[name] = column.shape(rows, sizes.of(column.per)), column.dtype
    return {name: StepBuffer(torch.zeros(shape, dtype=dtype), device) for name, (shape, dtype) in read.items()}


class InputPreparation:
    def __init__(self, rows: InputBatch, max_num_tokens: int, max_num_reqs: int, device: torch.device) -> None:
        self.rows = rows
        self._buffers = buffers = _make_buffers(rows, Sizes(max_num_reqs, max_num_tokens), device)
        self.input_ids, self.positions = buffers["input_ids"], buffers["positions"]
        self.query_start_loc, self.seq_lens = buffers["query_start_loc"], buffers["seq_lens"]
        self.slot_mappings, self.block_tables = buffers["slot_mapping"].parts(), buffers["block_table"].parts()
        # Steps with one token of each request: their tensors are always the same, by the number of requests, by whether
        # one has rope positions of its own, and by the names of the optional columns that the step brings
        self._decodes: dict[tuple[int, bool, frozenset[str]], StepInputs] = {}
        self._decode_kernel: DecodeKernel | None = None
        if device.type == "cpu" and rows.cross_tables is None and library() is not None:
            self._decode_kernel = DecodeKernel(self)
        self._nothing_stored = torch.zeros(0, dtype=torch.int64, device=device)

    def prepare(
        self,
        batch_rows: np.ndarray,
        num_scheduled: np.ndarray,
        unwritten: np.ndarray | None = None,
        columns: StepColumns = NO_COLUMNS,
    ) -> StepInputs:
        """`batch_rows` [R]: the row of each scheduled branch; `num_scheduled` [R]: its tokens in this step (≥ 1);
        `unwritten` [R] bool: rows whose keys and values are not kept: they go to the null block. `columns`: the
        optional ones that the step has."""
        num_reqs = len(batch_rows)
        kernel = self._decode_kernel
        if kernel is None or unwritten is not None or num_reqs > MAX_DECODES or (num_scheduled != 1).any():
            return self._prepare_any(batch_rows, num_scheduled, unwritten, columns)
        # The table of a step lies where it lies, and is not kept longer than the step.
        if columns and not TABLES.keys().isdisjoint(columns):
            return self._prepare_any(batch_rows, num_scheduled, unwritten, columns)
        has_rope = self.rows.has_rope_positions(batch_rows)
        key = num_reqs, has_rope, names_of(columns)
        inputs = self._decodes.get(key)
        if inputs is None:
            inputs = self._decodes[key] = self._prepare_any(batch_rows, num_scheduled, None, columns)
        longest = kernel.fill(batch_rows)
        for name, values in columns.items():  # one entry for each token is one for each request
            self._buffers[name].array[:num_reqs] = values
        if has_rope:
            self._rope_positions(batch_rows, num_reqs)
        for group in inputs.groups:
            group.max_seq_len = longest
        return inputs

    def _prepare_any(
        self,
        batch_rows: np.ndarray,
        num_scheduled: np.ndarray,
        unwritten: np.ndarray | None,
        columns: StepColumns = NO_COLUMNS,
    ) -> StepInputs:
        rows = self.rows
        num_reqs = len(batch_rows)
        cu_num_tokens = np.cumsum(num_scheduled)
        total = int(cu_num_tokens[-1])
        req_indices = np.repeat(batch_rows, num_scheduled)  # [T] the row that each token belongs to
        arange = np.arange(total) - np.repeat(cu_num_tokens - num_scheduled, num_scheduled)  # [T] 0, 1, … in each
        positions = self.positions.array[:total]
        np.add(rows.num_computed[req_indices], arange, out=positions)
        token_indices = positions + req_indices * rows.max_model_len
        self.input_ids.array[:total] = rows.token_ids.reshape(-1)[token_indices]

        seq_lens = self.seq_lens.array[:num_reqs]
        np.add(rows.num_computed[batch_rows], num_scheduled, out=seq_lens, casting="unsafe")
        self.query_start_loc.array[0] = 0
        self.query_start_loc.array[1 : num_reqs + 1] = cu_num_tokens
        max_seq_len, max_query_len = int(seq_lens.max()), int(num_scheduled.max())
        groups = []
        for group in range(len(rows.block_tables)):
            self._map_slots(group, req_indices, positions, total)
            if unwritten is not None:
                self.slot_mappings[group].array[:total][np.repeat(unwritten, num_scheduled)] = NULL_BLOCK
            groups.append(self._group_inputs(group, batch_rows, total, max_query_len, max_seq_len))
        cross = None if rows.cross_tables is None else self._cross_inputs(batch_rows, max_query_len)
        writes_nothing = unwritten is not None and bool(unwritten.all())
        inputs = StepInputs(
            self.input_ids.tensor(total), self.positions.tensor(total), groups, cu_num_tokens, writes_nothing, cross
        )
        self._set_columns(inputs, columns, req_indices, num_scheduled, rows.has_rope_positions(batch_rows))
        return inputs

    def _set_columns(
        self,
        inputs: StepInputs,
        columns: StepColumns,
        req_indices: np.ndarray,
        num_scheduled: np.ndarray,
        has_rope: bool,
    ) -> None:
        """Gives a step its optional columns, those that it brings and those that are prepared here, always in the same
        memory but for tables. `req_indices` [T]: the row of each token."""
        found: dict[str, torch.Tensor] = {}
        on_host: dict[str, np.ndarray] = {}
        for name, values in columns.items():
            if isinstance(values, StepTable):
                found[name] = values.joined()
                continue
            if name in PREPARED and SENT[name].per is Per.REQUEST:
                values = np.repeat(values, num_scheduled)
            buffer, count = self._buffers[name], len(values)
            on_host[name] = buffer.array[:count]
            on_host[name][:] = values
            found[name] = buffer.tensor(count)
        if has_rope:
            found["rope_positions"] = self._rope_positions(req_indices, len(req_indices))
        if found:
            inputs.set_columns(found, on_host)

    def _rope_positions(self, req_indices: np.ndarray, total: int) -> torch.Tensor:
        """[T] or [axes, T], for tokens of these rows, of which one has rope positions of its own. In other steps they
        are the positions in the sequence [T], and nothing is done for them."""
        buffer = self._buffers["rope_positions"]
        buffer.array[:, :total] = self.rows.rope_positions(req_indices, self.positions.array[:total])
        found = buffer.columns(total)
        return found if self.rows.rope_axes > 1 else found[0]

    def _map_slots(self, group: int, req_indices: np.ndarray, positions: np.ndarray, total: int) -> None:
        """Where each token's keys and values go: block · block_size + offset."""
        block_size = int(self.rows.block_sizes[group])
        block_table_indices = req_indices * self.rows.max_blocks + positions // block_size
        block_numbers = self.rows.block_tables[group].reshape(-1)[block_table_indices]
        block_offsets = positions % block_size
        slot_mapping = self.slot_mappings[group].array[:total]
        np.multiply(block_numbers, block_size, out=slot_mapping)
        slot_mapping += block_offsets

    def _group_inputs(
        self,
        group: int,
        batch_rows: np.ndarray,
        total: int,
        max_query_len: int,
        max_seq_len: int,
    ) -> CommonAttentionMetadata:
        num_reqs, block_size = len(batch_rows), int(self.rows.block_sizes[group])
        num_blocks = -(-max_seq_len // block_size)  # only the columns that are read are copied
        table = self.block_tables[group].array
        table[:num_reqs, :num_blocks] = self.rows.block_tables[group][batch_rows, :num_blocks]
        return CommonAttentionMetadata(
            query_start_loc=self.query_start_loc.array[: num_reqs + 1],
            seq_lens=self.seq_lens.array[:num_reqs],
            block_table=table[:num_reqs],
            query_start_loc_device=self.query_start_loc.tensor(num_reqs + 1),
            seq_lens_device=self.seq_lens.tensor(num_reqs),
            block_table_device=self.block_tables[group].tensor(num_reqs),
            slot_mapping=self.slot_mappings[group].tensor(total),
            block_size=block_size,
            max_query_len=max_query_len,
            max_seq_len=max_seq_len,
        )

    def _cross_inputs(self, batch_rows: np.ndarray, max_query_len: int) -> CommonAttentionMetadata:
        """Returns the attention inputs of the step's queries over the encoder's keys and values. Nothing is stored:
        that happened when the encoder ran."""
        assert self.rows.cross_tables is not None
        encoder_lens, cross_table = self._buffers["encoder_lens"], self._buffers["cross_table"]
        num_reqs = len(batch_rows)
        lens = encoder_lens.array[:num_reqs]
        lens[:] = self.rows.encoder_lens[batch_rows]
        max_seq_len = int(lens.max())
        num_blocks = -(-max_seq_len // self.rows.cross_block_size)
        table = cross_table.array
        table[:num_reqs, :num_blocks] = self.rows.cross_tables[batch_rows, :num_blocks]
        return CommonAttentionMetadata(
            query_start_loc=self.query_start_loc.array[: num_reqs + 1],
            seq_lens=lens,
            block_table=table[:num_reqs],
            query_start_loc_device=self.query_start_loc.tensor(num_reqs + 1),
            seq_lens_device=encoder_lens.tensor(num_reqs),
            block_table_device=cross_table.tensor(num_reqs),
            slot_mapping=self._nothing_stored,
            block_size=self.rows.cross_block_size,
            max_query_len=max_query_len,
            max_seq_len=max_seq_len,
        )


class DecodeKernel:
    """The arrays of an InputPreparation on a CPU, for the kernel that fills them for a step with one token of each
    request: numpy's calls take longer than what they do."""

    def __init__(self, inputs: InputPreparation) -> None:
        kernels = library()
        assert kernels is not None
        self._kernels = kernels
        rows = inputs.rows
        self._step = DecodeInputs(
            token_ids=_address(rows.token_ids), num_computed=_address(rows.num_computed),
            max_model_len=rows.max_model_len, max_blocks=rows.max_blocks,
            input_ids=_address(inputs.input_ids.array), positions=_address(inputs.positions.array),
            seq_lens=_address(inputs.seq_lens.array), query_start=_address(inputs.query_start_loc.array),
        )  # fmt: skip
        self._step_pointer = ctypes.addressof(self._step)
        arrays = zip(rows.block_tables, inputs.block_tables, inputs.slot_mappings, rows.block_sizes, strict=True)
        self._groups = [
            DecodeTables(_address(tables), _address(copied.array), _address(slots.array), int(block_size))
            for tables, copied, slots, block_size in arrays
        ]
        self._group_pointers = [ctypes.addressof(group) for group in self._groups]

    def fill(self, batch_rows: np.ndarray) -> int:
        """Returns the length of the longest sequence."""
        batch_rows = np.ascontiguousarray(batch_rows, np.int64)
        pointer, count, kernels = _address(batch_rows), len(batch_rows), self._kernels
        longest: int = kernels.ratoon_prepare_decodes(self._step_pointer, pointer, count)
        for group in self._group_pointers:
            kernels.ratoon_prepare_tables(self._step_pointer, group, pointer, count, longest)
        return longest


def _address(array: np.ndarray) -> int:
    return array.__array_interface__["data"][0]
