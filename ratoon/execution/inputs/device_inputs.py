"""Input preparation on the device: the rows of InputBatch lie there, and kernels make a step's inputs from them.

A step brings the cells of the rows that the host has written, a few numbers for each request, and those of blocks to
copy: one kernel reads them from the host's memory. The tokens that were sampled are written to the rows on the device,
so a step is launched before the host knows them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from ratoon.attention.interface import CommonAttentionMetadata
from ratoon.core.errors import ConfigError
from ratoon.core.outputs import LogprobsLists
from ratoon.execution.inputs.buffers import HostCopy, indices_on
from ratoon.execution.inputs.input_batch import InputBatch
from ratoon.execution.inputs.input_kernels import append_tokens, prepare, receive, scatter
from ratoon.execution.inputs.packed import PackedBuffer
from ratoon.execution.inputs.step_inputs import StepInputs
from ratoon.layers.beams import SearchRows

Tensor = torch.Tensor

MAX_CELLS = 1 << 16  # of the rows that come with a step's numbers; others are sent before
MAX_COPIES = 1 << 11  # of blocks, whose numbers come with them
MAX_MEMORY_CELLS = 2**31  # cells are numbered by int32
# Of a request that is sampled in the same graph: the arguments of layers.sampling.sample_plain
SAMPLING_NUMBERS = {
    "temperature": torch.float32,
    "top_k": torch.int64,
    "top_p": torch.float64,
    "min_p": torch.float32,
    "uniforms": torch.float64,
}


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
        max_tokens, max_reqs = max(max_num_tokens, max_padded), max(max_num_reqs, max_padded_reqs)
        # In the order in which steps need them: what comes after the last that one needs stays on the host.
        self._packed = PackedBuffer(
            {
                "counts": (3, torch.int32),
                "rows": (max_num_reqs, torch.int32),
                "num_computed": (max_num_reqs, torch.int32),
                "query_start_loc": (max_num_reqs + 1, torch.int32),
                "unwritten": (max_num_reqs, torch.int32),
                "read_requests": (max_padded_reqs, torch.int32),
                "read_rows": (max_padded_reqs, torch.int64),
                "encoder_lens": (max_num_reqs, torch.int32),
                **{name: (max_padded_reqs, dtype) for name, dtype in SAMPLING_NUMBERS.items()},
                "mask_of": (max_padded_reqs, torch.int32),
                "beam_scores": (max_padded_reqs, torch.float32),
                "search_starts": (max_padded_reqs, torch.int64),
                "search_stops": (max_padded_reqs, torch.int64),
                # Which blocks to copy, then which cells of the rows to write, then their values
                "last": (2 * (MAX_COPIES + MAX_CELLS + 4), torch.int32),
            },
            device,
        )
        num_groups = len(rows.block_tables)

        def zeros(*shape: int, dtype: torch.dtype = torch.int32) -> Tensor:
            return torch.zeros(shape, dtype=dtype, device=device)

        self.input_ids = zeros(max_tokens, dtype=torch.int64)
        self.positions = zeros(max_tokens, dtype=torch.int64)
        self.slot_mappings = zeros(num_groups, max_tokens, dtype=torch.int64)
        self.query_start_loc = zeros(max_reqs + 1)
        self.seq_lens = zeros(max_reqs)
        self.block_tables = zeros(num_groups, max_reqs, rows.max_blocks)
        self._max_cross_blocks = 0 if rows.cross_tables is None else rows.cross_tables.shape[1]
        self.encoder_lens = zeros(max_reqs)
        self.cross_tables = zeros(max_reqs, self._max_cross_blocks)
        self.sampled = zeros(max_padded_reqs)  # the token of each row that is read; -1: none could be chosen
        self._nothing_stored = zeros(0, dtype=torch.int64)
        self._copies: Sequence[tuple[int, int]] = ()  # of blocks, with the next step
        self._copy_blocks: Callable[[Tensor], None] | None = None

    def prepare(
        self, batch_rows: np.ndarray, num_scheduled: np.ndarray, unwritten: np.ndarray | None = None
    ) -> StepInputs:
        """As InputPreparation.prepare."""
        step = self.send(batch_rows, num_scheduled, unwritten)
        num_reqs, max_query_len = len(batch_rows), int(num_scheduled.max())
        self.compute(step.num_tokens, num_reqs, max_query_len)
        rows = self.rows
        seq_lens = (rows.num_computed[batch_rows] + num_scheduled).astype(np.int32)
        query_start_loc = np.concatenate([[0], step.cu_num_tokens]).astype(np.int32)
        max_seq_len = int(seq_lens.max())
        num_blocks = -(-max_seq_len // rows.block_size)
        groups = [
            self._metadata(
                group, query_start_loc, seq_lens, table[batch_rows, :num_blocks], step.num_tokens, max_query_len,
                max_seq_len,
            )
            for group, table in enumerate(rows.block_tables)
        ]  # fmt: skip
        cross = None
        if rows.cross_tables is not None:
            encoder_lens = rows.encoder_lens[batch_rows]
            longest = int(encoder_lens.max())
            table = rows.cross_tables[batch_rows, : -(-longest // rows.block_size)]
            cross = self._cross_metadata(query_start_loc, encoder_lens, table, max_query_len, longest)
        return StepInputs(
            self.input_ids[: step.num_tokens],
            self.positions[: step.num_tokens],
            groups,
            step.cu_num_tokens,
            step.writes_nothing,
            cross,
        )

    # ---- from the host ----

    def send(
        self,
        batch_rows: np.ndarray,
        num_scheduled: np.ndarray,
        unwritten: np.ndarray | None = None,
        read_rows: np.ndarray | None = None,
        read_requests: np.ndarray | None = None,
        numbers: Mapping[str, np.ndarray] | None = None,
        beams: tuple[Sequence[float], Sequence[SearchRows]] | None = None,
    ) -> PackedStep:
        """Bring to the device what the host knows. `read_rows` [N]: rows of the step whose logits are read;
        `read_requests` [N]: which of its requests get the tokens that are sampled from them, by `numbers`, [N] each.
        `beams`: the scores of the rows that are read, and the searches that these belong to."""
        rows, num_reqs = self.rows, len(batch_rows)
        cu_num_tokens = num_scheduled.cumsum()
        packed = self._packed
        packed.turn()
        host = packed.host
        num_sampled = 0 if read_requests is None else len(read_requests)
        host["counts"][:] = num_reqs, cu_num_tokens[-1] if num_reqs else 0, num_sampled
        host["rows"][:num_reqs] = batch_rows
        host["num_computed"][:num_reqs] = rows.num_computed[batch_rows]
        host["query_start_loc"][0] = 0
        host["query_start_loc"][1 : num_reqs + 1] = cu_num_tokens
        host["unwritten"][:num_reqs] = 0 if unwritten is None else unwritten
        behind = "read_requests"  # the first array that is not needed
        if read_requests is not None:
            behind = "read_rows"
        if read_rows is not None:
            behind = "encoder_lens"
        if rows.cross_tables is not None:
            behind = "temperature"
            host["encoder_lens"][:num_reqs] = rows.encoder_lens[batch_rows]
        if numbers:
            behind = "beam_scores"  # and with them comes mask_of
        if read_rows is not None:
            host["read_rows"][: len(read_rows)] = read_rows
            host["read_rows"][len(read_rows) :] = 0
        if read_requests is not None:
            host["read_requests"][:num_sampled] = read_requests
        for name, values in (numbers or {}).items():
            host[name][:num_sampled] = values
        host["mask_of"][num_sampled:] = -1  # padding has no mask
        if beams is not None:
            behind = "last"
            scores, searches = beams
            host["beam_scores"][: len(scores)] = scores
            num_searches = len(searches)
            host["search_starts"][:num_searches] = [search.start for search in searches]
            host["search_stops"][:num_searches] = [search.stop for search in searches]
            host["search_starts"][num_searches:] = host["search_stops"][num_searches:] = 0  # padding has no rows
        self._send_cells(rows.journal.take(), packed.start_of(behind))
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
        self.send(nothing, nothing, read_rows=nothing, read_requests=nothing)

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
        rows, packed = self.rows, self._packed.device
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
            packed["encoder_lens"],
            self.input_ids,
            self.positions,
            self.slot_mappings,
            self.slot_mappings.stride(0),
            self.query_start_loc,
            self.seq_lens,
            self.block_tables,
            self.block_tables.stride(0),
            self.encoder_lens,
            self.cross_tables,
            num_tokens,
            num_reqs,
            len(rows.token_ids),
            rows.max_model_len,
            rows.max_blocks,
            self._max_cross_blocks,
            num_groups=len(rows.block_tables),
            has_cross=rows.cross_tables is not None,
            block_size=rows.block_size,
        )

    def padded(self, size: int, num_reqs: int, max_query_len: int) -> StepInputs:
        """The inputs of a step padded to `size` tokens and so many requests, with upper bounds for lengths.

        The host does not know the numbers when a graph is replayed: its arrays are those of the device if they are in
        the same memory, and hold padding alone otherwise.
        """
        rows = self.rows
        if self._device.type == "cpu":
            starts, lens = self.query_start_loc[: num_reqs + 1].numpy(), self.seq_lens[:num_reqs].numpy()
            tables, encoder_lens = list(self.block_tables.numpy()), self.encoder_lens[:num_reqs].numpy()
            cross_table = self.cross_tables[:num_reqs].numpy()
        else:
            starts, lens = np.arange(num_reqs + 1, dtype=np.int32), np.ones(num_reqs, np.int32)
            tables, encoder_lens = [np.zeros((num_reqs, rows.max_blocks), np.int32)] * len(rows.block_tables), lens
            cross_table = np.zeros((num_reqs, self._max_cross_blocks), np.int32)
        groups = [
            self._metadata(
                group, starts, lens, table[:num_reqs], size, max_query_len, rows.max_model_len, is_padded=True
            )
            for group, table in enumerate(tables)
        ]
        cross = None
        if rows.cross_tables is not None:
            longest = self._max_cross_blocks * rows.block_size
            cross = self._cross_metadata(starts, encoder_lens, cross_table, max_query_len, longest, is_padded=True)
        cu_num_tokens = starts[1:]
        return StepInputs(self.input_ids[:size], self.positions[:size], groups, cu_num_tokens, False, cross)

    def read_rows(self, count: int) -> Tensor:
        """The rows of the step that `send` was told to read, and row 0 behind them."""
        return self._packed.device["read_rows"][:count]

    def sampling_numbers(self, size: int) -> dict[str, Tensor]:
        """What `send` brought for sampling, by name."""
        packed = self._packed.device
        return {name: packed[name][:size] for name in SAMPLING_NUMBERS}

    def mask_of(self, size: int) -> Tensor:
        """The same: which row of the masks is that of a row to sample; -1: it has none."""
        return self._packed.device["mask_of"][:size]

    def beam_numbers(self, num_rows: int, num_searches: int) -> tuple[Tensor, tuple[Tensor, Tensor]]:
        """What `send` brought for beams: scores of rows; the first row of each search, and the row after its last."""
        packed = self._packed.device
        return packed["beam_scores"][:num_rows], (
            packed["search_starts"][:num_searches],
            packed["search_stops"][:num_searches],
        )

    def append_tokens(self, token_ids: Tensor, bad: Tensor) -> None:
        """The tokens that were sampled from the rows that are read: write them to their requests and to `sampled`."""
        packed = self._packed.device
        append_tokens(
            self.resident.memory,
            packed["counts"],
            packed["rows"],
            packed["read_requests"],
            self.seq_lens,
            token_ids,
            bad,
            self.sampled,
            self.rows.max_model_len,
        )

    def tokens(self, count: int) -> DeviceTokens:
        """Those of the step's first rows that were sampled."""
        return DeviceTokens(self.sampled[:count])

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
    ) -> CommonAttentionMetadata:
        num_reqs = len(seq_lens)
        return CommonAttentionMetadata(
            query_start_loc=query_start_loc,
            seq_lens=seq_lens,
            block_table=block_table,
            query_start_loc_device=self.query_start_loc[: num_reqs + 1],
            seq_lens_device=self.seq_lens[:num_reqs],
            block_table_device=self.block_tables[group, :num_reqs],
            slot_mapping=self.slot_mappings[group, :num_tokens],
            block_size=self.rows.block_size,
            max_query_len=max_query_len,
            max_seq_len=max_seq_len,
            is_padded=is_padded,
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
            query_start_loc_device=self.query_start_loc[: num_reqs + 1],
            seq_lens_device=self.encoder_lens[:num_reqs],
            block_table_device=self.cross_tables[:num_reqs],
            slot_mapping=self._nothing_stored,
            block_size=self.rows.block_size,
            max_query_len=max_query_len,
            max_seq_len=max_seq_len,
            is_padded=is_padded,
        )


class DeviceTokens:
    """Tokens that `append_tokens` has written to the rows, on their way to the host. As SampledTokens (sampler.py)."""

    def __init__(self, sampled: Tensor) -> None:
        self._sampled = sampled  # [R] int32; -1: none
        self._copy: HostCopy | None = None
        self._tokens: np.ndarray | None = None  # once they are there

    def start_copy(self) -> None:
        self._copy = HostCopy(self._sampled)  # the next step overwrites it

    def wait(self) -> None:
        assert self._copy is not None
        self._copy.wait()

    @property
    def bad_rows(self) -> list[int]:
        return np.flatnonzero(self.to_numpy() < 0).tolist()

    def to_numpy(self) -> np.ndarray:
        if self._tokens is None:
            assert self._copy is not None
            self._tokens = self._copy.to_numpy()
        return self._tokens

    def logprobs_lists(self) -> dict[int, LogprobsLists]:
        return {}
