"""Adapters of linear layers (LoRA): a low-rank product for each row, of the adapter in the row's slot.

A model has an AdapterTarget for each linear layer of its checkpoint, by name. Assigning adapters to slots and reading
them from files are not done here.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from ratoon.core.errors import ModelError
from ratoon.layers.ops import Ops

Tensor = torch.Tensor


@dataclass(frozen=True, slots=True, eq=False)
class AdapterRows:
    """The adapters of a pass. None for a pass without adapters, which costs nothing."""

    slots: Tensor  # [T] int64: the slot of each row's adapter; -1: the base model alone

    def select(self, rows: Tensor) -> AdapterRows:
        return AdapterRows(self.slots[rows])


class AdapterTarget:
    """The matrices of several adapters for one layer of the checkpoint, or this rank's part of it."""

    __slots__ = ("_a", "_b", "_columns", "_inputs", "_name", "_ops", "_outputs", "_shape")

    def __init__(
        self, ops: Ops, name: str, shape: tuple[int, int], inputs: range, outputs: Sequence[range], first_column: int
    ) -> None:
        """A layer [out, in] of which this rank has `inputs` and `outputs`, from `first_column` of the product."""
        self._ops = ops
        self._name = name
        self._shape = shape
        self._inputs = inputs
        self._outputs = outputs
        self._columns = slice(first_column, first_column + sum(map(len, outputs)))
        self._a: Tensor | None = None  # [slots, rank, in]
        self._b: Tensor | None = None  # [slots, rank, out]

    def open_slots(self, num_slots: int, max_rank: int, device: torch.device, dtype: torch.dtype) -> None:
        """Allocate the slots; a slot that was never loaded adds nothing."""
        num_outputs = self._columns.stop - self._columns.start
        self._a = torch.zeros(num_slots, max_rank, len(self._inputs), device=device, dtype=dtype)
        self._b = torch.zeros(num_slots, max_rank, num_outputs, device=device, dtype=dtype)

    def load(self, slot: int, a: Tensor, b: Tensor) -> None:
        """The whole matrices of an adapter, of which this rank takes its part: b @ a is added to the layer's weight.

        a [rank, in], b [out, rank] with the adapter's scaling multiplied in.
        """
        assert self._a is not None and self._b is not None, "no slots are open"
        num_outputs, num_inputs = self._shape
        rank = len(a)
        if a.shape[1:] != (num_inputs,) or b.shape != (num_outputs, rank):
            problem = f"has matrices of shapes {tuple(a.shape)} and {tuple(b.shape)}"
            raise ModelError(self._name, problem, f"(rank, {num_inputs}) and ({num_outputs}, rank)")
        if rank > self._a.shape[1]:
            raise ModelError(self._name, f"has the rank {rank}", f"at most {self._a.shape[1]}")
        self.clear(slot)
        self._a[slot, :rank] = a[:, self._inputs.start : self._inputs.stop]
        self._b[slot, :rank] = torch.cat([b[part.start : part.stop] for part in self._outputs]).t()

    def clear(self, slot: int) -> None:
        assert self._a is not None and self._b is not None, "no slots are open"
        self._a[slot] = 0
        self._b[slot] = 0

    def add(self, x: Tensor, y: Tensor, adapters: AdapterRows) -> None:
        """x [T, in], y [T, out of the product]: adds to this layer's columns of y, in place."""
        if self._a is not None and self._b is not None:
            self._ops.add_low_rank(y[:, self._columns], x, self._a, self._b, adapters.slots)
