"""The products of adapters: y += (x · aᵀ) · b for each row, with the matrices of the adapter in the row's slot.

The grid is that of all slots, whatever the step has, so that a graph stays right: a program looks whether one of its
rows has its slot, and ends if none has. Matrices lie behind a table of addresses, so that each takes the memory of its
own rank and a slot can be loaded after a graph was captured. The inputs of the low products are cut into a few parts by
their number alone, whose sums are added up in order: a row's numbers do not depend on others. Where a norm comes first,
its factor is found in the same pass over a row, and multiplies the sums: the inputs are read once.

These kernels are short, so what they take is mostly waiting: the first matrices are loaded before the kernel waits for
the one before it, and the next ones while products are computed.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache

import torch
import triton
import triton.language as tl

from ratoon.layers.ops import RMSWeights
from ratoon.layers.triton.dependent import launch_options, wait_for_kernel_before
from ratoon.layers.triton.launch import Launcher

Tensor = torch.Tensor

BLOCK_RANK = 16
BLOCK_INPUTS = 128
INPUTS_OF_WEIGHT = 64  # of an adapter's whole weight at a time
BLOCK_OUTPUTS = 128
FEW_ROWS = 16  # of a program
SOME_ROWS = 32
MANY_ROWS = 64
MANY_FROM = 129  # rows of a step
INPUTS_OF_SPLIT, MAX_SPLITS = 512, 8
COLUMNS_OF_TABLE = 1024


class TritonLowRank:
    """Implements LowRankProducts."""

    def __init__(
        self,
        num_inputs: int,
        num_outputs: Sequence[int],
        num_slots: int,
        max_rank: int,
        device: torch.device,
        dtype: torch.dtype,
        dependent: bool = False,
        one_tile: bool = False,
        takes_weights: bool = False,
    ) -> None:
        """`one_tile`: tiles have the same number of rows in any step, for the same bits. `dependent`: see launch.py."""
        self._takes_weights = takes_weights
        self._num_inputs = num_inputs
        self._num_parts = num_parts = len(num_outputs)
        self._num_slots = num_slots
        self._max_rank = -(-max_rank // BLOCK_RANK) * BLOCK_RANK
        self._dtype = dtype
        self._one_tile = one_tile
        self._dependent = dependent
        self._widest = max(num_outputs)
        self._splits = max(1, min(MAX_SPLITS, -(-num_inputs // INPUTS_OF_SPLIT)))
        bounds = [sum(num_outputs[:part]) for part in range(num_parts + 1)]
        self._bounds = torch.tensor(bounds, dtype=torch.int32, device=device)
        self._addresses = torch.zeros(num_slots, num_parts, 2, dtype=torch.int64, device=device)  # of a and b
        self._ranks = torch.zeros(num_slots, num_parts, dtype=torch.int32, device=device)  # 0: the slot has nothing
        self._scales = torch.zeros(num_slots, num_parts, dtype=torch.float32, device=device)
        self._kept: dict[int, list[Tensor]] = {}  # what addresses are of, by slot

    def load(self, slot: int, part: int, a: Tensor | None, b: Tensor, scale: float) -> None:
        device = self._ranks.device
        columns = b.to(device, self._dtype).t().contiguous()  # [rank, out], or [in, out]
        low = None if a is None else a.to(device, self._dtype).contiguous()  # [rank, in]
        self._ranks[slot, part] = 0  # kernels of steps under way look at the matrices of all slots
        self._addresses[slot, part, 0] = 0 if low is None else low.data_ptr()
        self._addresses[slot, part, 1] = columns.data_ptr()
        self._scales[slot, part] = scale
        self._ranks[slot, part] = len(columns)
        self._kept.setdefault(slot, []).extend([columns] if low is None else [low, columns])

    def clear(self, slot: int) -> None:
        self._ranks[slot] = 0
        self._kept.pop(slot, None)

    def add(self, y: Tensor, x: Tensor, slots: Tensor, norm: RMSWeights | None = None) -> None:
        rows = x.shape[0]
        low = torch.empty((self._splits, rows, self._num_parts, self._max_rank), dtype=torch.float32, device=x.device)
        squares = low if norm is None else torch.empty((self._splits, rows), dtype=torch.float32, device=x.device)
        tile = self._rows_of_program(rows)
        low_launcher, column_launcher = _launchers(
            tile, self._splits, norm is not None, self._takes_weights, self._dependent
        )
        row_blocks, entries = -(-rows // tile), self._num_slots * self._num_parts
        weight, eps = (x, 0.0) if norm is None else norm
        low_launcher(
            (row_blocks, entries, self._max_rank // BLOCK_RANK * self._splits),
            x, slots, self._addresses, self._ranks, self._scales, weight, low, squares, rows, x.stride(0),
            self._num_inputs, self._num_parts, self._max_rank,
        )  # fmt: skip
        column_launcher(
            (row_blocks, entries, -(-self._widest // BLOCK_OUTPUTS)),
            x, low, squares, slots, self._addresses, self._ranks, self._bounds, y, rows, x.stride(0), y.stride(0),
            self._num_inputs, self._num_parts, self._max_rank, eps,
        )  # fmt: skip

    def _rows_of_program(self, num_rows: int) -> int:
        if self._one_tile or num_rows <= FEW_ROWS:
            return FEW_ROWS
        return SOME_ROWS if num_rows < MANY_FROM else MANY_ROWS


class TritonTables:
    """Implements SavedTables."""

    def __init__(self, num_slots: int, rows: range, device: torch.device, dtype: torch.dtype) -> None:
        self._rows = rows
        self._dtype = dtype
        self._addresses = torch.zeros(num_slots, dtype=torch.int64, device=device)  # 0: the slot has none
        self._kept: dict[int, Tensor] = {}

    def load(self, slot: int, table: Tensor) -> None:
        self._kept[slot] = own = table.to(self._addresses.device, self._dtype).contiguous()
        self._addresses[slot] = own.data_ptr()

    def clear(self, slot: int) -> None:
        self._addresses[slot] = 0
        self._kept.pop(slot, None)

    def replace(self, found: Tensor, ids: Tensor, slots: Tensor) -> None:
        rows, width = found.shape
        grid = (rows, -(-width // COLUMNS_OF_TABLE))
        _replace_launcher()(
            grid, found, ids, slots, self._addresses, found.stride(0), width, self._rows.start, len(self._rows)
        )


@cache
def _launchers(
    tile: int, splits: int, has_norm: bool, takes_weights: bool, dependent: bool
) -> tuple[Launcher, Launcher]:
    options = launch_options(dependent)
    low = Launcher(
        _low_kernel, NORM=has_norm, ROWS=tile, RANKS=BLOCK_RANK, INPUTS=BLOCK_INPUTS, SPLITS=splits,
        num_warps=8 if tile == MANY_ROWS else 4, **options,
    )  # fmt: skip
    columns = Launcher(
        _column_kernel, ROWS=tile, RANKS=BLOCK_RANK, INPUTS=INPUTS_OF_WEIGHT, OUTPUTS=BLOCK_OUTPUTS, SPLITS=splits,
        NORM=has_norm, WHOLE=takes_weights, num_warps=8 if tile == MANY_ROWS else 4, **options,
    )  # fmt: skip
    return low, columns


@cache
def _replace_launcher() -> Launcher:
    return Launcher(_replace_kernel, COLUMNS=COLUMNS_OF_TABLE, num_warps=4)


@triton.jit(do_not_specialize=["num_rows"])
def _low_kernel(
    x, slots, addresses, ranks, scales, weight, low, squares, num_rows, x_stride, num_inputs, num_parts, low_width,
    NORM: tl.constexpr, ROWS: tl.constexpr, RANKS: tl.constexpr, INPUTS: tl.constexpr, SPLITS: tl.constexpr,
    DEPENDENT: tl.constexpr,
):  # fmt: skip
    """low [SPLITS, T, parts, low_width]: of so many rows, one slot and part, RANKS columns and a part of the inputs.
    With a norm, also the sums of squares of that part of the inputs [SPLITS, T]: all programs of a row write the same.
    """
    kind = x.dtype.element_ty
    entry = tl.program_id(1)
    slot, part = entry // num_parts, entry % num_parts
    first_rank = (tl.program_id(2) // SPLITS) * RANKS
    split = tl.program_id(2) % SPLITS
    share = tl.cdiv(tl.cdiv(num_inputs, INPUTS), SPLITS) * INPUTS
    begin, end = split * share, tl.minimum((split + 1) * share, num_inputs)
    places, columns = tl.arange(0, INPUTS), first_rank + tl.arange(0, RANKS)
    # A slot is loaded between steps, so its matrices are there before any kernel of the step
    rank, address = tl.load(ranks + entry), tl.load(addresses + 2 * entry)
    has_work = (first_rank < rank) & (address != 0)
    a = address.to(tl.pointer_type(kind)) + columns[None, :].to(tl.int64) * num_inputs
    is_column = (columns < rank)[None, :] & has_work
    inputs = begin + places
    matrix = tl.load(a + inputs[:, None], mask=is_column & (inputs < end)[:, None], other=0)
    if DEPENDENT:
        wait_for_kernel_before()
    rows = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    own = tl.load(slots + rows, mask=rows < num_rows, other=-1) == slot
    if has_work & (tl.max(own.to(tl.int32), axis=0) > 0):
        row_starts = x + rows.to(tl.int64)[:, None] * x_stride
        sums = tl.zeros((ROWS, RANKS), tl.float32)
        of_squares = tl.zeros((ROWS,), tl.float32)
        for k in range(begin, end, INPUTS):
            inputs = k + places
            numbers = tl.load(row_starts + inputs[None, :], mask=own[:, None] & (inputs < end)[None, :], other=0)
            following = inputs + INPUTS
            next_matrix = tl.load(a + following[:, None], mask=is_column & (following < end)[:, None], other=0)
            if NORM:
                of_squares += tl.sum(numbers.to(tl.float32) * numbers.to(tl.float32), axis=1)
                numbers = numbers * tl.load(weight + inputs, mask=inputs < end, other=0)[None, :]
            sums = tl.dot(numbers.to(kind), matrix, sums, input_precision="ieee")
            matrix = next_matrix
        sums = sums * tl.load(scales + entry)
        place = split * num_rows + rows.to(tl.int64)
        out = low + (place[:, None] * num_parts + part) * low_width + columns[None, :]
        tl.store(out, sums, mask=own[:, None] & (columns < low_width)[None, :])
        if NORM:
            tl.store(squares + place, of_squares, mask=own)


@triton.jit(do_not_specialize=["num_rows"])
def _column_kernel(
    x, low, squares, slots, addresses, ranks, bounds, y, num_rows, x_stride, y_stride, num_inputs, num_parts,
    low_width, eps, ROWS: tl.constexpr, RANKS: tl.constexpr, INPUTS: tl.constexpr, OUTPUTS: tl.constexpr,
    SPLITS: tl.constexpr, NORM: tl.constexpr, WHOLE: tl.constexpr, DEPENDENT: tl.constexpr,
):  # fmt: skip
    """y [T, columns] of so many rows, one slot, and OUTPUTS columns of one part. Where the adapter has a whole weight,
    y is the product of x with it."""
    kind = x.dtype.element_ty
    entry = tl.program_id(1)
    slot, part = entry // num_parts, entry % num_parts
    rank, address = tl.load(ranks + entry), tl.load(addresses + 2 * entry)
    start = tl.load(bounds + part)
    num_outputs = tl.load(bounds + part + 1) - start
    columns = tl.program_id(2) * OUTPUTS + tl.arange(0, OUTPUTS)
    is_column = columns < num_outputs
    has_work = (rank > 0) & (tl.program_id(2) * OUTPUTS < num_outputs)
    is_low = address != 0
    b = tl.load(addresses + 2 * entry + 1).to(tl.pointer_type(kind)) + columns[None, :]
    depth = tl.arange(0, RANKS)
    is_inside = is_column[None, :] & has_work & is_low
    matrix = tl.load(b + depth[:, None].to(tl.int64) * num_outputs, mask=is_inside & (depth < rank)[:, None], other=0)
    if DEPENDENT:
        wait_for_kernel_before()
    rows = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    own = tl.load(slots + rows, mask=rows < num_rows, other=-1) == slot
    if has_work & (tl.max(own.to(tl.int32), axis=0) > 0):
        factors = tl.full((ROWS,), 1.0, tl.float32)
        if NORM:
            of_squares = tl.zeros((ROWS,), tl.float32)
            for split in tl.static_range(SPLITS):
                of_squares += tl.load(squares + split * num_rows + rows, mask=own & is_low, other=0)
            factors = tl.rsqrt(of_squares / num_inputs + eps)
        sums = tl.zeros((ROWS, OUTPUTS), tl.float32)
        depth_of_low = rank
        if WHOLE:
            depth_of_low = tl.where(is_low, rank, 0)
        for r in range(0, depth_of_low, RANKS):
            depth = r + tl.arange(0, RANKS)
            inside = own[:, None] & (depth < rank)[None, :]
            numbers = tl.zeros((ROWS, RANKS), tl.float32)
            for split in tl.static_range(SPLITS):
                place = ((split * num_rows + rows.to(tl.int64)[:, None]) * num_parts + part) * low_width
                numbers += tl.load(low + place + depth[None, :], mask=inside, other=0)
            following = depth + RANKS
            next_matrix = tl.load(
                b + following[:, None].to(tl.int64) * num_outputs,
                mask=is_inside & (following < rank)[:, None],
                other=0,
            )
            sums = tl.dot((numbers * factors[:, None]).to(kind), matrix, sums, input_precision="ieee")
            matrix = next_matrix
        if WHOLE:
            depth_of_x = tl.where(is_low, 0, num_inputs)
            for k in range(0, depth_of_x, INPUTS):
                inputs = k + tl.arange(0, INPUTS)
                is_input = own[:, None] & (inputs < num_inputs)[None, :]
                of_x = tl.load(x + rows.to(tl.int64)[:, None] * x_stride + inputs[None, :], mask=is_input, other=0)
                whole = tl.load(
                    b + inputs[:, None].to(tl.int64) * num_outputs,
                    mask=(inputs < num_inputs)[:, None] & is_column[None, :],
                    other=0,
                )
                sums = tl.dot(of_x, whole, sums, input_precision="ieee")
        out = y + rows.to(tl.int64)[:, None] * y_stride + start + columns[None, :]
        is_own = own[:, None] & is_column[None, :]
        before = tl.load(out, mask=is_own & is_low, other=0).to(tl.float32)
        tl.store(out, (before + sums).to(kind), mask=is_own)


@triton.jit
def _replace_kernel(found, ids, slots, addresses, stride, width, first, count, COLUMNS: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    slot = tl.load(slots + row)
    address = tl.load(addresses + tl.maximum(slot, 0))
    if (slot >= 0) & (address != 0):
        table = address.to(tl.pointer_type(found.dtype.element_ty))
        place = tl.load(ids + row) - first
        columns = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
        is_here = (place >= 0) & (place < count)
        numbers = tl.load(table + place * width + columns, mask=(columns < width) & is_here, other=0)
        tl.store(found + row * stride + columns, numbers, mask=columns < width)
