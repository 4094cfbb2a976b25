"""The products of adapters by the CPU kernel (native/low_rank.c). A recorded pass reads the table of slots at each run,
so that it stays right when slots are loaded.

Beside weights in few bits matrices are kept in 8 bits, with a scale for each 64 numbers of a column: a step reads them
once for all rows of their slot, and with few rows for each adapter it takes as long as that reading. Their rounding is
below a hundredth of what they add, and that of weights in 4 bits about a tenth of the weights. Beside other weights
they are as they are in their files, bf16 or floats.
"""

from __future__ import annotations

import ctypes
import math
import threading
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch.nn import functional

from ratoon.layers.native import LowRankPart, SavedTable, library
from ratoon.layers.native.recording import Arena
from ratoon.layers.ops import RMSWeights

Tensor = torch.Tensor

PANEL = 16  # columns
CHUNK_BYTES = 16 << 20  # eight large pages
_memory = Arena(CHUNK_BYTES)  # of all adapters: what one leaves, the next one gets
_memory_lock = threading.Lock()
STRETCH = 64  # numbers of a column that have a scale together, where they are in 8 bits
FORMATS = {torch.float32: 0, torch.bfloat16: 1, torch.int8: 3}


class Packed(NamedTuple):
    """The matrices of one part, in panels; and their scales, where they are in 8 bits."""

    columns: Tensor  # [panels, rank, 16]
    low: Tensor | None  # [panels, in, 16]
    column_scales: Tensor | None = None  # [panels, stretches of the rank, 16]
    low_scales: Tensor | None = None  # [panels, stretches of the inputs, 16]


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
        self._kept: dict[int, list[Packed]] = {}  # what entries point to, by slot
        for index, entry in enumerate(self._entries):
            part = index % self._num_parts
            entry.column, entry.out = sum(num_outputs[:part]), num_outputs[part]

    def load(self, slot: int, part: int, a: Tensor | None, b: Tensor, scale: float) -> None:
        packed = self._round(a, b) if a is not None and self._has_few_bits else None
        if packed is None:
            dtype = torch.bfloat16 if self._has_few_bits or b.dtype == torch.bfloat16 else torch.float32
            low = None if a is None else _keep(pack_panels(a.to(dtype)))  # [panels, in, 16]
            packed = Packed(_keep(pack_panels(b.to(dtype))), low)
        entry = self._entries[slot * self._num_parts + part]
        entry.a, entry.b = _place(packed.low), _place(packed.columns)
        entry.a_scales, entry.b_scales = _place(packed.low_scales), _place(packed.column_scales)
        entry.scale, entry.format = scale, FORMATS[packed.columns.dtype]
        entry.rank = self._num_inputs if a is None else len(a)  # last: an entry without rank is not read
        self._kept.setdefault(slot, []).append(packed)

    def _round(self, a: Tensor, b: Tensor) -> Packed | None:
        """Both matrices in 8 bits. None: one of them has a number that is not finite."""
        parts: list[Tensor] = []
        for matrix in (b, a):
            given = matrix.to(torch.float32).contiguous()
            width, depth = given.shape
            panels = -(-width // PANEL)
            codes = _new(panels, depth, PANEL, dtype=torch.int8)
            scales = _new(panels, -(-depth // STRETCH), PANEL, dtype=torch.float32)
            pack = self._kernels.ratoon_pack_low_rank
            if pack(given.data_ptr(), width, depth, codes.data_ptr(), scales.data_ptr()):
                return None
            parts += [codes, scales]
        columns, column_scales, low, low_scales = parts
        return Packed(columns, low, column_scales, low_scales)

    def clear(self, slot: int) -> None:
        for part in range(self._num_parts):
            entry = self._entries[slot * self._num_parts + part]
            entry.rank, entry.a, entry.b, entry.a_scales, entry.b_scales = 0, None, None, None, None
        self._kept.pop(slot, None)

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


def _new(*shape: int, dtype: torch.dtype) -> Tensor:
    """Memory in large pages, beside what was loaded before."""
    with _memory_lock:
        return _memory.take(math.prod(shape) * dtype.itemsize).view(dtype).view(shape)


def _keep(packed: Tensor) -> Tensor:
    return _new(*packed.shape, dtype=packed.dtype).copy_(packed)


def _place(numbers: Tensor | None) -> int | None:
    return None if numbers is None else numbers.data_ptr()


def pack_panels(matrix: Tensor) -> Tensor:
    """[columns, depth] → [panels, depth, 16], with zeros behind the last column."""
    columns, depth = matrix.shape
    if columns % PANEL:
        matrix = functional.pad(matrix, (0, 0, 0, -columns % PANEL))
    return matrix.reshape(-1, PANEL, depth).transpose(1, 2).contiguous()
