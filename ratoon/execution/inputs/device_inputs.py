"""Input preparation on the device: the rows of InputBatch lie there, and kernels make a step's inputs from them.

A step brings the cells of the rows that the host has written, its columns (columns.py), and the numbers of blocks to
copy: one kernel reads them from the host's memory. The tokens that were sampled are written to the rows on the device,
so a step is launched before the host knows them.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from ratoon.attention.interface import CommonAttentionMetadata, SharedPrefixes
from ratoon.core.errors import ConfigError
from ratoon.execution.inputs.buffers import indices_on
from ratoon.execution.inputs.cells import all_to_device
from ratoon.execution.inputs.columns import (
    NO_COLUMNS,
    NO_NAMES,
    PREPARED,
    SAMPLING_NUMBERS,
    SENT,
    Per,
    Sizes,
    StepColumns,
    StepTable,
    is_read,
)
from ratoon.execution.inputs.input_batch import InputBatch
from ratoon.execution.inputs.input_kernels import append_tokens, prepare, receive, scatter
from ratoon.execution.inputs.packed import PackedBuffer
from ratoon.execution.inputs.step_inputs import StepInputs
from ratoon.layers.sampling import Masks, Mode, sample_plain

Tensor = torch.Tensor
# Columns that the end of a program reads, and the rows that are read for it
ColumnsOfRows = tuple[slice, Mapping[str, np.ndarray]]

MAX_CELLS = 1 << 16  # of the rows that come with a step's numbers; others are sent before
MAX_COPIES = 1 << 11  # of blocks, whose numbers come with them
MAX_MEMORY_CELLS = 2**31  # cells are numbered by int32


@dataclass(slots=True)
class PackedStep:
    """What the host knows of a step whose inputs are on their way."""

    batch_rows: np.ndarray  # [R]
    num_scheduled: np.ndarray  # [R]
    cu_num_tokens: np.ndarray  # [R]
    writes_nothing: bool

    @property
    def num_tokens(self) -> int:
        return int(self.cu_num_tokens[-1])


def _aligned(num_words: int) -> int:
    """To 16 bytes, for faster loads."""
    return -(-num_words // 4) * 4


class DeviceRows:
    """The memory of an InputBatch on the device."""

    def __init__(self, rows: InputBatch, device: torch.device) -> None:
        if len(rows.memory) >= MAX_MEMORY_CELLS:
            raise ConfigError(
                "max_num_seqs",
                f"{len(rows.token_ids)} rows of {rows.max_model_len} tokens are more than a device table holds",
                "lower max_num_seqs or max_model_len",
            )
        self._rows = rows
        self._device = device
        self.memory = torch.zeros(len(rows.memory), dtype=torch.int32, device=device)

    def write(self, cells: np.ndarray) -> None:
        """Repeat what the host has written to these cells."""
        pairs = torch.from_numpy(np.stack([cells, self._rows.memory[cells]]).astype(np.int32))
        if self._device.type == "cuda":
            pairs = pairs.pin_memory()
        scatter(self.memory, *pairs.to(self._device, non_blocking=True).unbind())

    def append_tokens(self, rows: np.ndarray, token_ids: Tensor) -> None:
        """Write one token behind the last one of each of these rows, which the host has not counted yet."""
        cells = rows * self._rows.max_model_len + self._rows.num_tokens[rows]
        self.memory.index_copy_(0, indices_on(self._device, cells.tolist()), token_ids.to(torch.int32))


class DeviceInputs:
    """`max_padded`, `max_padded_reqs`: the most tokens and requests of a step that is padded."""

    max_copies = MAX_COPIES

    def __init__(
        self,
        rows: InputBatch,
        max_num_tokens: int,
        max_num_reqs: int,
        max_padded: int,
        max_padded_reqs: int,
        device: torch.device,
    ) -> None:
        self.rows = rows
        self.resident = DeviceRows(rows, device)
        self._device = device
        self.max_rows = max(max_padded_reqs, 1)  # that a padded step reads
        sent = Sizes(max_num_reqs, max_num_tokens, self.max_rows)
        prepared = Sizes(max(max_num_reqs, max_padded_reqs), max(max_num_tokens, max_padded), self.max_rows)
        self._sent = [column for column in SENT.values() if is_read(column, rows)]
        layout = {
            column.name: ((sent if column.padding is None else prepared).of(column.per), column.dtype)
            for column in self._sent
        }
        # Which blocks to copy, then which cells of the rows to write, then their values
        layout["last"] = (2 * (MAX_COPIES + MAX_CELLS + 4), torch.int32)
        self._packed = PackedBuffer(layout, device)
        self._order = {column.name: place for place, column in enumerate(self._sent)}
        sizes = [*rows.block_sizes.tolist(), *([] if rows.cross_tables is None else [rows.cross_block_size])]
        self._block_sizes = torch.tensor(sizes, dtype=torch.int32, device=device)
        self._one_block_size = sizes[0] if len(set(sizes)) == 1 else 0  # 0: groups have different ones
        self.prepared: dict[str, Tensor] = {}
        for name, made in PREPARED.items():
            shape = made.shape(rows, prepared.of(made.per) if is_read(made, rows) else 0)
            self.prepared[name] = torch.zeros(shape, dtype=made.dtype, device=device)
        self._of_all_steps = [  # optional columns that are prepared, and read, whether or not a row needs them
            name for name, made in PREPARED.items() if made.is_optional and name not in SENT and is_read(made, rows)
        ]
        self.sampled = torch.zeros(self.max_rows, dtype=torch.int32, device=device)  # tokens of rows that were read
        self._max_padded = max_padded
        self._tables: dict[str, Tensor] = {}  # [max_padded, H] of padded steps
        self._nothing_stored = torch.zeros(0, dtype=torch.int64, device=device)
        self._copies: Sequence[tuple[int, int]] = ()  # of blocks, with the next step
        self._copy_blocks: Callable[[Tensor], None] | None = None

    def prepare(
        self,
        batch_rows: np.ndarray,
        num_scheduled: np.ndarray,
        unwritten: np.ndarray | None = None,
        columns: StepColumns = NO_COLUMNS,
    ) -> StepInputs:
        """Makes the inputs of a step, as InputPreparation.prepare does."""
        step = self.send(batch_rows, num_scheduled, unwritten)
        num_reqs, max_query_len = len(batch_rows), int(num_scheduled.max())
        self.compute(step.num_tokens, num_reqs, max_query_len)
        rows = self.rows
        seq_lens = (rows.num_computed[batch_rows] + num_scheduled).astype(np.int32)
        query_start_loc = np.concatenate([[0], step.cu_num_tokens]).astype(np.int32)
        max_seq_len = int(seq_lens.max())
        nums_blocks = (-(-max_seq_len // rows.block_sizes)).tolist()
        groups = [
            self._metadata(
                group, query_start_loc, seq_lens, table[batch_rows, :num_blocks], step.num_tokens, max_query_len,
                max_seq_len,
            )
            for group, (table, num_blocks) in enumerate(zip(rows.block_tables, nums_blocks, strict=True))
        ]  # fmt: skip
        cross = None
        if rows.cross_tables is not None:
            encoder_lens = rows.encoder_lens[batch_rows]
            longest = int(encoder_lens.max())
            table = rows.cross_tables[batch_rows, : -(-longest // rows.cross_block_size)]
            cross = self._cross_metadata(query_start_loc, encoder_lens, table, max_query_len, longest)
        inputs = StepInputs(
            self.prepared["input_ids"][: step.num_tokens],
            self.prepared["positions"][: step.num_tokens],
            groups,
            step.cu_num_tokens,
            step.writes_nothing,
            cross,
        )
        if columns or self._of_all_steps:
            inputs.set_columns(self._optional(columns, step.num_tokens, num_reqs), columns)
        return inputs

    def _optional(self, columns: StepColumns, num_tokens: int, num_reqs: int) -> dict[str, Tensor]:
        """The optional columns of a step that is not padded: those that the host has travel in one copy."""
        found = self._prepared_optional(columns, num_tokens, num_reqs)
        arrays = {}
        for name, values in columns.items():
            if isinstance(values, StepTable):
                found[name] = values.joined()
            elif name not in PREPARED:
                arrays[name] = values.astype(_NUMPY[SENT[name].dtype], copy=False)
        if arrays:
            found.update(zip(arrays, all_to_device(list(arrays.values()), self._device)))
        return found

    def _prepared_optional(self, names: Iterable[str], num_tokens: int, num_reqs: int) -> dict[str, Tensor]:
        """Returns the optional columns that kernels prepare: those with these names, and those of all steps."""
        sizes, found = Sizes(num_reqs, num_tokens), {}
        for name in (*self._of_all_steps, *(name for name in names if name in PREPARED)):
            made, entries = PREPARED[name], self.prepared[name]
            count = sizes.of(made.per)
            if made.times is None:
                found[name] = entries[:count]
            else:
                found[name] = entries[:, :count] if len(entries) > 1 else entries[0, :count]
        return found

    # ---- from the host ----

    def send(
        self,
        batch_rows: np.ndarray,
        num_scheduled: np.ndarray,
        unwritten: np.ndarray | None = None,
        of_rows: Sequence[ColumnsOfRows] = (),
        cu_num_tokens: np.ndarray | None = None,
    ) -> PackedStep:
        """Bring to the device what the host knows. `of_rows`: the columns of the rows that are read, for each end of
        the program. `cu_num_tokens`: if it is known."""
        rows, num_reqs = self.rows, len(batch_rows)
        if cu_num_tokens is None:
            cu_num_tokens = num_scheduled.cumsum()
        packed, order = self._packed, self._order
        packed.turn()
        host = packed.host
        host["counts"][:] = num_reqs, cu_num_tokens[-1] if num_reqs else 0
        host["rows"][:num_reqs] = batch_rows
        host["query_start_loc"][0] = 0
        host["query_start_loc"][1 : num_reqs + 1] = cu_num_tokens
        host["unwritten"][:num_reqs] = 0 if unwritten is None else unwritten
        last = order["unwritten"]
        for column in self._sent:
            if column.of_rows is not None:
                host[column.name][:num_reqs] = getattr(rows, column.of_rows)[batch_rows]
                last = max(last, order[column.name])
        for part, columns in of_rows:
            for name, values in columns.items():
                column, array = SENT[name], host[name]
                if column.per is Per.ROW:
                    array = array[part]
                array[: len(values)] = values
                if column.padding is not None:
                    array[len(values) :] = column.padding
                last = max(last, order[name])
        self._send_cells(rows.journal.take(), packed.end_of(self._sent[last].name))
        writes_nothing = unwritten is not None and bool(unwritten.all())
        return PackedStep(batch_rows, num_scheduled, cu_num_tokens, writes_nothing)

    def note_launched(self) -> None:
        """All of the step that was sent is launched."""
        self._packed.note_read()

    def note_copies(
        self, copies: Sequence[tuple[int, int]], copy_blocks: Callable[[Tensor], None] | None = None
    ) -> None:
        """Blocks (from, to), MAX_COPIES at most, to be copied before the next step computes anything: their numbers
        travel with it, and `copy_blocks` gets them as [2N] int32."""
        self._copies, self._copy_blocks = copies, copy_blocks

    def send_padding(self) -> None:
        """A step without requests: what is computed of it is padding alone."""
        nothing = np.zeros(0, np.int64)
        rows = {column.name: nothing for column in self._sent if column.padding is not None}
        self.send(nothing, nothing, of_rows=[(slice(None), rows)])

    def _send_cells(self, cells: np.ndarray, num_words: int) -> None:
        """Send so many words of the packed arrays, and write these cells of the rows."""
        while len(cells) > MAX_CELLS:
            self.resident.write(cells[:MAX_CELLS])
            cells = cells[MAX_CELLS:]
        packed, count = self._packed, len(cells)
        last = packed.host["last"]
        copies, self._copies = self._copies, ()
        num_copied = 2 * len(copies)
        if copies:
            last[:num_copied] = np.array(copies, np.int32).reshape(-1)
        cells_start = _aligned(num_copied)
        values_start = cells_start + _aligned(count)
        last[cells_start : cells_start + count] = cells
        last[values_start : values_start + count] = self.rows.memory[cells]
        first = packed.start_of("last")
        receive(
            packed.host_words, packed.device_words, num_words, first, num_copied,
            self.resident.memory, first + cells_start, first + values_start, count,
        )  # fmt: skip
        if copies:
            assert self._copy_blocks is not None
            self._copy_blocks(packed.device["last"][:num_copied])

    # ---- on the device: what a graph may hold ----

    def compute(self, num_tokens: int, num_reqs: int, max_query_len: int) -> None:
        """Make the inputs of the step that was sent, padded to so many tokens and requests."""
        rows, packed, made = self.rows, self._packed.device, self.prepared
        prepare(
            num_reqs,
            max_query_len,
            self.resident.memory,
            rows.tables_start,
            rows.cross_start,
            packed["counts"],
            packed["rows"],
            packed["num_computed"],
            packed["query_start_loc"],
            packed["unwritten"],
            packed.get("encoder_lens", packed["rows"]),
            packed.get("rope_lens", packed["rows"]),
            packed.get("rope_deltas", packed["rows"]),
            packed.get("adapter_slots", packed["rows"]),
            rows.rope_start,
            made["input_ids"],
            made["positions"],
            made["rope_positions"],
            made["rope_positions"].stride(0),
            made["adapter_slots"],
            made["slot_mapping"],
            made["slot_mapping"].stride(0),
            made["query_start_loc"],
            made["seq_lens"],
            made["block_table"],
            made["block_table"].stride(0),
            made["encoder_lens"],
            made["cross_table"],
            num_tokens,
            num_reqs,
            len(rows.token_ids),
            rows.max_model_len,
            rows.max_blocks,
            rows.max_cross_blocks,
            self._block_sizes,
            num_groups=rows.num_groups,
            rope_axes=rows.rope_axes,
            has_cross=rows.cross_tables is not None,
            has_adapters=rows.adapter_slots is not None,
            block_size=self._one_block_size,
        )

    def padded(
        self,
        size: int,
        num_reqs: int,
        max_query_len: int,
        num_runs: int | None = None,
        names: frozenset[str] = NO_NAMES,
    ) -> StepInputs:
        """The inputs of a step padded to `size` tokens and so many requests, with upper bounds for lengths. `num_runs`:
        of requests that attend to a shared prefix together, padded; their columns were sent. `names`: the optional
        columns that the step has, which `bring` was given.

        The host does not know the numbers when a graph is replayed: its arrays are those of the device if they are in
        the same memory, and hold padding alone otherwise.
        """
        rows, made = self.rows, self.prepared
        if self._device.type == "cpu":
            starts, lens = made["query_start_loc"][: num_reqs + 1].numpy(), made["seq_lens"][:num_reqs].numpy()
            tables, encoder_lens = list(made["block_table"].numpy()), made["encoder_lens"][:num_reqs].numpy()
            cross_table = made["cross_table"][:num_reqs].numpy()
        else:
            starts, lens = np.arange(num_reqs + 1, dtype=np.int32), np.ones(num_reqs, np.int32)
            tables, encoder_lens = [np.zeros((num_reqs, rows.max_blocks), np.int32)] * len(rows.block_tables), lens
            cross_table = np.zeros((num_reqs, rows.max_cross_blocks), np.int32)
        shared = None if num_runs is None else self._shared_prefixes(num_runs, num_reqs)
        groups = [
            self._metadata(group, starts, lens, table[:num_reqs], size, max_query_len, rows.max_model_len, True, shared)
            for group, table in enumerate(tables)
        ]
        cross = None
        if rows.cross_tables is not None:
            longest = rows.max_cross_blocks * rows.cross_block_size
            cross = self._cross_metadata(starts, encoder_lens, cross_table, max_query_len, longest, is_padded=True)
        inputs = StepInputs(made["input_ids"][:size], made["positions"][:size], groups, starts[1:], False, cross)
        columns, sizes = self._prepared_optional(names, size, num_reqs), Sizes(num_reqs, size)
        for name in names:
            if name in self._tables:
                columns[name] = self._tables[name]
            elif name not in PREPARED:
                columns[name] = self._packed.device[name][: sizes.of(SENT[name].per)]
        inputs.set_columns(columns)
        return inputs

    def bring(self, columns: StepColumns) -> Mapping[str, np.ndarray]:
        """Has the optional columns of a step that is padded where a graph finds them: tables are copied to memory that
        is taken once, before the first such step is captured. Returns what is to be sent with the step."""
        sent = {}
        for name, values in columns.items():
            if isinstance(values, StepTable):
                if name not in self._tables:
                    first = values.parts[0]
                    shape = self._max_padded, first.shape[1]
                    self._tables[name] = torch.zeros(shape, dtype=first.dtype, device=self._device)
                torch.cat(values.parts, out=self._tables[name][: values.num_rows])
            elif name not in PREPARED:  # the kernel makes it from what is sent of the rows
                sent[name] = values
        return sent

    def columns(self, rows: slice) -> SentColumns:
        """Returns the columns that `send` has brought for the end that these rows are read for."""
        return SentColumns(self.resident.memory, self._packed.device, self.sampled, rows)

    def uploaded(self, columns: Mapping[str, np.ndarray], num_rows: int) -> UploadedColumns:
        """The columns of an end whose step is not padded, which has so many rows."""
        return UploadedColumns(self.resident.memory, columns, num_rows)

    # ---- metadata ----

    def _metadata(
        self,
        group: int,
        query_start_loc: np.ndarray,
        seq_lens: np.ndarray,
        block_table: np.ndarray,
        num_tokens: int,
        max_query_len: int,
        max_seq_len: int,
        is_padded: bool = False,
        shared_prefixes: SharedPrefixes | None = None,
    ) -> CommonAttentionMetadata:
        num_reqs = len(seq_lens)
        return CommonAttentionMetadata(
            query_start_loc=query_start_loc,
            seq_lens=seq_lens,
            block_table=block_table,
            query_start_loc_device=self.prepared["query_start_loc"][: num_reqs + 1],
            seq_lens_device=self.prepared["seq_lens"][:num_reqs],
            block_table_device=self.prepared["block_table"][group, :num_reqs],
            slot_mapping=self.prepared["slot_mapping"][group, :num_tokens],
            block_size=int(self.rows.block_sizes[group]),
            max_query_len=max_query_len,
            max_seq_len=max_seq_len,
            is_padded=is_padded,
            shared_prefixes=shared_prefixes,
        )

    def _shared_prefixes(self, num_runs: int, num_reqs: int) -> SharedPrefixes:
        packed = self._packed.device
        return SharedPrefixes(
            packed["run_starts"][: num_runs + 1],
            packed["run_firsts"][:num_runs],
            packed["run_prefix_lens"][:num_runs],
            packed["prefix_ends"][:num_reqs],
        )

    def _cross_metadata(
        self,
        query_start_loc: np.ndarray,
        encoder_lens: np.ndarray,
        cross_table: np.ndarray,
        max_query_len: int,
        max_seq_len: int,
        is_padded: bool = False,
    ) -> CommonAttentionMetadata:
        num_reqs = len(encoder_lens)
        return CommonAttentionMetadata(
            query_start_loc=query_start_loc,
            seq_lens=encoder_lens,
            block_table=cross_table,
            query_start_loc_device=self.prepared["query_start_loc"][: num_reqs + 1],
            seq_lens_device=self.prepared["encoder_lens"][:num_reqs],
            block_table_device=self.prepared["cross_table"][:num_reqs],
            slot_mapping=self._nothing_stored,
            block_size=self.rows.cross_block_size,
            max_query_len=max_query_len,
            max_seq_len=max_seq_len,
            is_padded=is_padded,
        )


class DeviceColumns(ABC):
    """The columns of the rows that are read for one end of a program, and the choice of their tokens."""

    def __init__(self, memory: Tensor) -> None:
        self._memory = memory  # of the branches

    @abstractmethod
    def __getitem__(self, name: str) -> Tensor: ...

    @abstractmethod
    def _results(self, count: int) -> Tensor:
        """Memory for the tokens of so many rows."""

    def choose_tokens(self, logits: Tensor, mode: Mode, masks: Masks | None = None) -> Tensor:
        """Returns the tokens [N] int32 that were appended to the branches; -1: none could be chosen."""
        numbers = {name: self[name] for name in SAMPLING_NUMBERS}
        chosen = sample_plain(logits, **numbers, mode=mode, masks=masks)
        results = self._results(len(logits))
        append_tokens(self._memory, self["token_cells"], chosen.token_ids, chosen.bad, results)
        return results


class SentColumns(DeviceColumns):
    """In the memory to which `DeviceInputs.send` brings them, where a graph finds them."""

    def __init__(self, memory: Tensor, packed: Mapping[str, Tensor], sampled: Tensor, rows: slice) -> None:
        super().__init__(memory)
        self._packed = packed
        self._sampled = sampled
        self._rows = rows

    def __getitem__(self, name: str) -> Tensor:
        entries = self._packed[name]
        return entries[self._rows] if SENT[name].per is Per.ROW else entries

    def _results(self, count: int) -> Tensor:
        return self._sampled[self._rows]


class UploadedColumns(DeviceColumns):
    """The columns of a step that is not padded: all of them travel in one copy."""

    def __init__(self, memory: Tensor, columns: Mapping[str, np.ndarray], num_rows: int) -> None:
        super().__init__(memory)
        self._num_rows = num_rows
        arrays = [values.astype(_NUMPY[SENT[name].dtype], copy=False) for name, values in columns.items()]
        self._columns = dict(zip(columns, all_to_device(arrays, memory.device))) if arrays else {}

    def __getitem__(self, name: str) -> Tensor:
        if name not in self._columns:  # a number of a draw, for a greedy choice
            dtype = SENT[name].dtype
            self._columns[name] = torch.zeros(self._num_rows, dtype=dtype, device=self._memory.device)
        return self._columns[name]

    def _results(self, count: int) -> Tensor:
        return torch.empty(count, dtype=torch.int32, device=self._memory.device)


_NUMPY = {torch.int32: np.int32, torch.int64: np.int64, torch.float32: np.float32, torch.float64: np.float64}
