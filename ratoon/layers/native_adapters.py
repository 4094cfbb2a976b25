"""The products of adapters by the CPU kernel (native/low_rank.c). A recorded pass reads the table of slots at each run,
so that it stays right when slots are loaded.

Beside weights in few bits matrices are kept in 8 bits, with a scale for each 64 numbers of a column: a step reads them
once for all rows of their slot, and with few rows for each adapter it takes as long as that reading. Their rounding is
below a hundredth of what they add, and that of weights in 4 bits about a tenth of the weights; rows are rounded to 16
bits, whose loss is far below both. Beside other weights they are as they are in their files, bf16 or floats.
"""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Sequence

import torch

from ratoon.layers.native import LowRankPart, SavedTable, library
from ratoon.layers.native.recording import Arena
from ratoon.layers.ops import RMSWeights

Tensor = torch.Tensor

CHUNK_BYTES = 16 << 20  # eight large pages
_memory = Arena(CHUNK_BYTES)  # of all adapters: what one leaves, the next one gets
_memory_lock = threading.Lock()
FORMATS = {torch.float32: 0, torch.bfloat16: 1}
WHOLE = 3  # the format of whole numbers of 8 bits


class NativeLowRank:
    """Implements LowRankProducts."""

    def __init__(self, num_inputs: int, num_outputs: Sequence[int], num_slots: int, has_few_bits: bool) -> None:
        kernels = library()
        assert kernels is not None
        self._kernels = kernels
        self._num_inputs = num_inputs
        self._num_parts = len(num_outputs)
        self._num_slots = num_slots
        self._has_few_bits = has_few_bits
        self._entries = (LowRankPart * (num_slots * self._num_parts))()
        self._pointer = ctypes.addressof(self._entries)
        self._kept: dict[int, Tensor] = {}  # what entries point to; where one was cleared, for the next adapter
        for index, entry in enumerate(self._entries):
            part = index % self._num_parts
            entry.column, entry.out = sum(num_outputs[:part]), num_outputs[part]

    def load(self, slot: int, part: int, a: Tensor | None, b: Tensor, scale: float) -> None:
        index = slot * self._num_parts + part
        entry, matrices = self._entries[index], [b] if a is None else [a, b]
        packed = self._pack(index, matrices, WHOLE) if a is not None and self._has_few_bits else None
        if packed is None:  # no format of few bits, or numbers that are not finite
            dtype = torch.bfloat16 if self._has_few_bits or b.dtype == torch.bfloat16 else torch.float32
            packed = self._pack(index, [matrix.to(dtype) for matrix in matrices], FORMATS[dtype])
        assert packed is not None, "floats can always be packed"
        *low, entry.b = packed
        entry.a = low[0] if low else None
        entry.scale = scale
        entry.rank = self._num_inputs if a is None else len(a)  # last: an entry without rank is not read

    def _pack(self, index: int, matrices: Sequence[Tensor], format: int) -> list[int] | None:
        """Brings matrices [columns, depth] to the memory of an entry, one behind the other, as they are read. Returns
        where each is; None: a number is not finite, which the format has no form for."""
        kernels = self._kernels
        given = [(matrix.to(torch.float32) if format == WHOLE else matrix).contiguous() for matrix in matrices]
        sizes = [kernels.ratoon_low_rank_bytes(*matrix.shape, format) for matrix in given]
        place, places = self._take(index, sum(sizes)), []
        for matrix, size in zip(given, sizes):
            if kernels.ratoon_pack_low_rank(matrix.data_ptr(), *matrix.shape, format, place):
                return None
            places.append(place)
            place += size
        self._entries[index].format = format
        return places

    def _take(self, index: int, num_bytes: int) -> int:
        """Returns memory for an entry in large pages, beside what was loaded before. Most adapters have the same rank:
        an entry then keeps the memory of the adapter before."""
        kept = self._kept.pop(index, None)
        if kept is None or len(kept) != num_bytes:
            kept = None  # the memory goes back first
            with _memory_lock:
                kept = _memory.take(num_bytes)
        self._kept[index] = kept
        return kept.data_ptr()

    def clear(self, slot: int) -> None:
        for index in range(slot * self._num_parts, (slot + 1) * self._num_parts):
            entry = self._entries[index]
            if entry.rank and not entry.a:  # a whole weight, which few adapters have
                self._kept.pop(index, None)
            entry.rank, entry.a, entry.b = 0, None, None

    def add(self, y: Tensor, x: Tensor, slots: Tensor, norm: RMSWeights | None = None) -> None:
        assert norm is None, "norms are not deferred on a CPU"
        failed = self._kernels.ratoon_add_low_rank(
            x.data_ptr(), x.stride(0), x.shape[0], self._num_inputs, self._pointer, self._num_slots, self._num_parts,
            slots.data_ptr(), y.data_ptr(), y.stride(0),
        )  # fmt: skip
        if failed:
            raise MemoryError("the products of adapters ran out of memory")


class NativeTables:
    """Implements SavedTables."""

    def __init__(self, num_slots: int, rows: range) -> None:
        kernels = library()
        assert kernels is not None
        self._kernels = kernels
        self._num_slots = num_slots
        self._rows = rows
        self._entries = (SavedTable * num_slots)()
        self._pointer = ctypes.addressof(self._entries)
        self._kept: dict[int, Tensor] = {}

    def load(self, slot: int, table: Tensor) -> None:
        dtype = torch.bfloat16 if table.dtype == torch.bfloat16 else torch.float32
        self._kept[slot] = own = table.to(dtype).contiguous()
        entry = self._entries[slot]
        entry.rows, entry.format, entry.numbers = len(own), FORMATS[dtype], own.data_ptr()

    def clear(self, slot: int) -> None:
        self._entries[slot].numbers = None
        self._kept.pop(slot, None)

    def replace(self, found: Tensor, ids: Tensor, slots: Tensor) -> None:
        self._kernels.ratoon_replace_rows(
            self._pointer, self._num_slots, slots.data_ptr(), ids.data_ptr(), self._rows.start, len(ids),
            found.shape[1], found.data_ptr(),
        )  # fmt: skip
