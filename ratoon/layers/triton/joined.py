"""Adapters whose first matrices are further rows of the weight that they are beside: one product computes its own
outputs and the low-rank ones of all slots, and one kernel adds the second matrices' part for each row's slot.

Both matrices of all slots have their places from the start, so this is for few slots of small rank; low_rank.py has the
others. A row's result does not depend on the adapters of other rows: what they would add is multiplied by zero, and all
matrices are finite.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache

import torch
import triton
import triton.language as tl

from ratoon.core.errors import ModelError
from ratoon.layers.ops import FusedProduct, RMSWeights
from ratoon.layers.triton import elementwise
from ratoon.layers.triton.dependent import launch_options, wait_for_kernel_before
from ratoon.layers.triton.launch import Launcher

Tensor = torch.Tensor

RANK_STEP = 16
MAX_DEPTH = 256  # slots times ranks
MAX_PARTS = 3
BLOCK_DEPTH = 128  # of the second product at a time
FEW_OUTPUTS, FEW_UP_TO, MANY_OUTPUTS = 32, 2048, 64  # of a program; few where all outputs together are no more
FEW_ROWS, SOME_ROWS, MANY_ROWS = 16, 32, 64  # of a program
MANY_FROM = 129  # rows of a step


def block_of_outputs(num_outputs: Sequence[int]) -> int:
    """Returns how many outputs a program has: fewer than a part, so that programs belong to one part each."""
    return FEW_OUTPUTS if sum(num_outputs) <= FEW_UP_TO else MANY_OUTPUTS


def can_join(num_outputs: Sequence[int], num_slots: int, max_rank: int) -> bool:
    depth = num_slots * padded_rank(max_rank)
    block = block_of_outputs(num_outputs)
    return depth <= MAX_DEPTH and len(num_outputs) <= MAX_PARTS and all(size % block == 0 for size in num_outputs)


def padded_rank(max_rank: int) -> int:
    return -(-max_rank // RANK_STEP) * RANK_STEP


class TritonJoined:
    """Implements JoinedProducts."""

    def __init__(
        self,
        weight: Tensor,
        num_outputs: Sequence[int],
        num_slots: int,
        max_rank: int,
        make_product: Callable[[Tensor], FusedProduct],
        dependent: bool = False,
    ) -> None:
        """`weight` [out, in]: of the product, which is copied; its new place is `weight`. `make_product`: the product
        of a weight with more rows."""
        outputs, inputs = weight.shape
        self._rank = padded_rank(max_rank)
        self._num_slots, self._num_parts, self._num_outputs = num_slots, len(num_outputs), outputs
        self._depth = num_slots * self._rank
        rows = weight.new_zeros(outputs + self._num_parts * self._depth, inputs)
        rows[:outputs].copy_(weight)
        self.weight = rows[:outputs]
        self._low = rows[outputs:].view(self._num_parts, num_slots, self._rank, inputs)
        self._columns = weight.new_zeros(num_slots, self._rank, outputs)
        self._scales = torch.zeros(self._num_parts, num_slots, dtype=torch.float32, device=weight.device)
        self._bounds = [sum(num_outputs[:part]) for part in range(self._num_parts + 1)]
        self._bounds += [outputs] * (MAX_PARTS + 1 - len(self._bounds))
        self._multiply = make_product(rows)
        self._block = block_of_outputs(num_outputs)
        self._dependent = dependent

    def load(self, slot: int, part: int, a: Tensor | None, b: Tensor, scale: float) -> None:
        assert a is not None, "whole weights are not joined"
        a, b = a.to(self._low.dtype), b.to(self._low.dtype)
        if not (a.isfinite().all() and b.isfinite().all()):  # zero times infinity would reach the rows of others
            raise ModelError("an adapter", f"has numbers that are not finite in {a.dtype}", "finite matrices")
        rank = len(a)
        self._low[part, slot, :rank].copy_(a)
        columns = self._columns[slot, :rank, self._bounds[part] : self._bounds[part + 1]]
        columns.copy_(b.t())
        self._scales[part, slot] = scale

    def clear(self, slot: int) -> None:
        self._scales[:, slot] = 0
        self._low[:, slot] = 0
        self._columns[slot] = 0

    def multiply(self, x: Tensor, norm: RMSWeights | None, residual: Tensor | None, slots: Tensor) -> Tensor:
        return self._add(self._multiply(x, norm, None), residual, slots, False)

    def multiply_gate(self, x: Tensor, norm: RMSWeights | None, slots: Tensor) -> Tensor:
        if self._num_outputs // 2 % self._block:  # halves of one part
            return elementwise.gated_activation(self.multiply(x, norm, None, slots), "silu", self._dependent)
        return self._add(self._multiply(x, norm, None), None, slots, True)

    def _add(self, found: Tensor, residual: Tensor | None, slots: Tensor, is_gate: bool) -> Tensor:
        """`found` [T, outputs + parts · slots · rank]: what the product gave."""
        num_rows, outputs = found.shape[0], self._num_outputs
        width = outputs // 2 if is_gate else outputs
        y = found.new_empty(num_rows, width) if residual is None else residual
        tile = FEW_ROWS if num_rows <= FEW_ROWS else SOME_ROWS if num_rows < MANY_FROM else MANY_ROWS
        is_one_block = self._depth <= BLOCK_DEPTH
        launcher = _launcher(
            tile, self._block, self._rank, is_one_block, residual is not None, is_gate, self._dependent
        )  # fmt: skip
        launcher(
            (width // self._block, -(-num_rows // tile)),
            found, slots, self._columns, self._scales, y, num_rows, found.stride(0), y.stride(0), outputs, self._depth,
            self._num_slots, self._bounds[1], self._bounds[2],
        )  # fmt: skip
        return y


@cache
def _launcher(
    tile: int, block: int, rank: int, is_one_block: bool, has_residual: bool, is_gate: bool, dependent: bool
) -> Launcher:
    return Launcher(
        _add_kernel, ROWS=tile, OUTPUTS=block, DEPTH=BLOCK_DEPTH, RANK=rank, IS_ONE_BLOCK=is_one_block,
        HAS_RESIDUAL=has_residual, IS_GATE=is_gate, num_warps=4, **launch_options(dependent),
    )  # fmt: skip


@triton.jit(do_not_specialize=["num_rows"])
def _add_kernel(
    found, slots, columns, scales, y, num_rows, found_stride, y_stride, num_outputs, depth, num_slots, second, third,
    ROWS: tl.constexpr, OUTPUTS: tl.constexpr, DEPTH: tl.constexpr, RANK: tl.constexpr, IS_ONE_BLOCK: tl.constexpr,
    HAS_RESIDUAL: tl.constexpr, IS_GATE: tl.constexpr, DEPENDENT: tl.constexpr,
):  # fmt: skip
    """y [T, outputs] = found [T, outputs], + y itself if that is the residual stream, + what the slot of a row adds.
    IS_GATE: y [T, outputs / 2] is silu of the first half of that times the second. Behind the outputs, a row of `found`
    has the low-rank numbers [parts, depth]; `columns` [depth, outputs] are the second matrices. `second` and `third`:
    the first outputs of the parts behind the first."""
    kind = found.dtype.element_ty
    first = tl.program_id(0) * OUTPUTS
    # A slot is loaded between steps, so its matrices are there before any kernel of the step
    matrix, factors = _load_block(
        columns, scales, first, 0, num_outputs, depth, num_slots, second, third, OUTPUTS, DEPTH, RANK
    )
    if IS_GATE:
        behind = first + num_outputs // 2
        up_matrix, up_factors = _load_block(
            columns, scales, behind, 0, num_outputs, depth, num_slots, second, third, OUTPUTS, DEPTH, RANK
        )
    if DEPENDENT:
        wait_for_kernel_before()
    rows = tl.program_id(1) * ROWS + tl.arange(0, ROWS)
    is_row = (rows < num_rows)[:, None]
    own = tl.load(slots + rows, mask=rows < num_rows, other=-1)
    starts = found + rows.to(tl.int64)[:, None] * found_stride
    sums = _sum_up(
        starts, own, is_row, matrix, factors, columns, scales, first, num_outputs, depth, num_slots, second, third,
        OUTPUTS, DEPTH, RANK, IS_ONE_BLOCK, kind,
    )  # fmt: skip
    if IS_GATE:
        up = _sum_up(
            starts, own, is_row, up_matrix, up_factors, columns, scales, behind, num_outputs, depth, num_slots, second,
            third, OUTPUTS, DEPTH, RANK, IS_ONE_BLOCK, kind,
        )  # fmt: skip
        sums = sums.to(kind).to(tl.float32)  # as if both were kept between
        sums = sums * tl.sigmoid(sums) * up.to(kind).to(tl.float32)
    out = y + rows.to(tl.int64)[:, None] * y_stride + (first + tl.arange(0, OUTPUTS))[None, :]
    if HAS_RESIDUAL:
        sums += tl.load(out, mask=is_row, other=0).to(tl.float32)
    tl.store(out, sums.to(kind), mask=is_row)


@triton.jit
def _part_of(first, second, third):
    return (first >= second).to(tl.int32) + (first >= third).to(tl.int32)


@triton.jit
def _load_block(
    columns, scales, first, begin, num_outputs, depth, num_slots, second, third, OUTPUTS: tl.constexpr,
    DEPTH: tl.constexpr, RANK: tl.constexpr,
):  # fmt: skip
    """The second matrices of some slots, from place `begin` of the depth on, and their scales."""
    places = begin + tl.arange(0, DEPTH)
    outputs = first + tl.arange(0, OUTPUTS)
    is_inside = places < depth
    starts = columns + places[:, None].to(tl.int64) * num_outputs
    matrix = tl.load(starts + outputs[None, :], mask=is_inside[:, None], other=0)
    of_part = scales + _part_of(first, second, third) * num_slots
    return matrix, tl.load(of_part + places // RANK, mask=is_inside, other=0)


@triton.jit
def _sum_up(
    starts, own, is_row, matrix, factors, columns, scales, first, num_outputs, depth, num_slots, second, third,
    OUTPUTS: tl.constexpr, DEPTH: tl.constexpr, RANK: tl.constexpr, IS_ONE_BLOCK: tl.constexpr, kind: tl.constexpr,
):  # fmt: skip
    """The product's own outputs, and what the slots of the rows add to them. `matrix`: the first block."""
    outputs = first + tl.arange(0, OUTPUTS)
    low = starts + num_outputs + _part_of(first, second, third) * depth
    sums = tl.load(starts + outputs[None, :], mask=is_row, other=0).to(tl.float32)
    sums = _add_block(sums, low, own, factors, matrix, 0, depth, DEPTH, RANK, kind)
    if not IS_ONE_BLOCK:
        for begin in range(DEPTH, depth, DEPTH):
            matrix, factors = _load_block(
                columns, scales, first, begin, num_outputs, depth, num_slots, second, third, OUTPUTS, DEPTH, RANK
            )
            sums = _add_block(sums, low, own, factors, matrix, begin, depth, DEPTH, RANK, kind)
    return sums


@triton.jit
def _add_block(
    sums, low, own, factors, matrix, begin, depth, DEPTH: tl.constexpr, RANK: tl.constexpr, kind: tl.constexpr
):  # fmt: skip
    """What the slots of one block add: for each row, that of its own."""
    places = begin + tl.arange(0, DEPTH)
    is_own = (own[:, None] == (places // RANK)[None, :]) & (places < depth)[None, :]
    numbers = tl.load(low + places[None, :], mask=is_own, other=0).to(tl.float32) * factors[None, :]
    return tl.dot(numbers.to(kind), matrix, sums, input_precision="ieee")
