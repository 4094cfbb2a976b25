"""Adapters of linear layers (LoRA): a low-rank product for each row, of the adapter in the row's slot.

A model has an AdapterTarget for each linear layer of its checkpoint, by name, and one for its table of tokens. Layers
that are one product have one AdaptedProduct: their low-rank products are computed together, beside it. Assigning
adapters to slots and reading them from files are not done here.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from ratoon.core.errors import ModelError
from ratoon.layers.ops import JoinedProducts, LowRankProducts, Ops, Product, RMSWeights, SavedTables

Tensor = torch.Tensor


@dataclass(frozen=True, slots=True, eq=False)
class AdapterRows:
    """The adapters of a pass. None for a pass without adapters, which costs nothing."""

    slots: Tensor  # [T] int32: the slot of each row's adapter; -1: the base model alone

    def select(self, rows: Tensor | slice) -> AdapterRows:
        return AdapterRows(self.slots[rows])


class AdaptedProduct:
    """The adapters beside one product, whose columns are those of one or more layers of the checkpoint."""

    __slots__ = ("_num_inputs", "_ops", "_parts", "_products", "base", "joined", "max_rank", "takes_weights")

    def __init__(self, ops: Ops, num_inputs: int, takes_weights: bool = False) -> None:
        """`takes_weights`: an adapter may have a whole weight in place of the product's own."""
        self._ops = ops
        self.takes_weights = takes_weights
        self._num_inputs = num_inputs  # of this rank
        self._parts: list[int] = []  # columns of each layer
        self._products: LowRankProducts | None = None  # None: no slots are open, or they are joined with the product
        self.base: Product | None = None  # the product, where adapters may be joined with it
        self.joined: JoinedProducts | None = None  # the product and its adapters as one
        self.max_rank = 0

    def add_part(self, num_columns: int) -> int:
        """Adds a layer whose columns follow those of the layers before. Returns its number."""
        self._parts.append(num_columns)
        return len(self._parts) - 1

    def open_slots(self, num_slots: int, max_rank: int, device: torch.device, dtype: torch.dtype) -> None:
        """Makes room for adapters. A slot that was never loaded adds nothing. Does nothing where they are open."""
        if self._products is None and self.joined is None:
            if self.base is not None:
                self.joined = self._ops.join_low_rank(self.base, self._parts, num_slots, max_rank)
            if self.joined is None:
                make, size = self._ops.make_low_rank, self._num_inputs
                self._products = make(size, self._parts, num_slots, max_rank, device, dtype, self.takes_weights)
            self.max_rank = max_rank

    @property
    def products(self) -> LowRankProducts | JoinedProducts:
        found = self.joined or self._products
        assert found is not None, "no slots are open"
        return found

    def add(self, y: Tensor, x: Tensor, adapters: AdapterRows, norm: RMSWeights | None = None) -> None:
        """x [T, in], of which the norm is taken first if there is one; y [T, columns]: adds to it in place."""
        if self._products is not None:
            self._products.add(y, x, adapters.slots, norm)


class AdapterTarget:
    """One layer of the checkpoint, or this rank's part of it, as a target of adapters."""

    __slots__ = ("_inputs", "_name", "_order", "_outputs", "_part", "_shape", "product")

    def __init__(
        self,
        product: AdaptedProduct,
        name: str,
        shape: tuple[int, int],
        inputs: range,
        outputs: Sequence[range],
        order: Sequence[int] | None = None,
    ) -> None:
        """A layer [out, in] of which this rank has `inputs` and `outputs`, the next columns of the product, in this
        order."""
        self._order = None if order is None else list(order)
        self.product = product
        self._name = name
        self._shape = shape
        self._inputs = inputs
        self._outputs = outputs
        self._part = product.add_part(sum(map(len, outputs)))

    @property
    def is_head(self) -> bool:
        """Whether it is the head, whose whole weight an adapter may bring."""
        return self.product.takes_weights

    @property
    def numbers_of_rank(self) -> int:
        """The numbers that an adapter has here for each unit of its rank, in this rank's part, and that have no memory
        yet."""
        return 0 if self.product.joined is not None else len(self._inputs) + sum(map(len, self._outputs))

    def open_slots(self, num_slots: int, max_rank: int, device: torch.device, dtype: torch.dtype) -> None:
        self.product.open_slots(num_slots, max_rank, device, dtype)

    def load(self, slot: int, a: Tensor, b: Tensor, scale: float = 1.0) -> None:
        """The whole matrices of an adapter, of which this rank takes its part: scale · b @ a is added to the layer's
        weight. a [rank, in], b [out, rank]."""
        num_outputs, num_inputs = self._shape
        if a.shape[1:] != (num_inputs,) or b.shape != (num_outputs, len(a)):
            problem = f"has matrices of shapes {tuple(a.shape)} and {tuple(b.shape)}"
            raise ModelError(self._name, problem, f"(rank, {num_inputs}) and ({num_outputs}, rank)")
        if len(a) > self.product.max_rank:
            raise ModelError(self._name, f"has the rank {len(a)}", f"at most {self.product.max_rank}")
        own = a[:, self._inputs.start : self._inputs.stop]
        self.product.products.load(slot, self._part, own, self._take_rows(b), scale)

    def load_weight(self, slot: int, weight: Tensor) -> None:
        """The whole weight [out, in] that an adapter has in place of the layer's own."""
        if tuple(weight.shape) != self._shape or not self.product.takes_weights:
            raise ModelError(self._name, f"has a weight of shape {tuple(weight.shape)} of its own", "low-rank matrices")
        own = self._take_rows(weight)
        self.product.products.load(slot, self._part, None, own[:, self._inputs.start : self._inputs.stop], 1.0)

    def _take_rows(self, whole: Tensor) -> Tensor:
        parts = [whole[part.start : part.stop] for part in self._outputs]
        own = parts[0] if len(parts) == 1 else torch.cat(parts)
        return own if self._order is None else own[self._order]

    def clear(self, slot: int) -> None:
        """Makes the slot empty, for all layers of the product."""
        self.product.products.clear(slot)


class TableTarget:
    """The table of tokens, or this rank's rows of it, in the place of which an adapter may have one of its own."""

    __slots__ = ("_name", "_ops", "_own", "_rows", "_shape", "_tables")

    def __init__(self, ops: Ops, name: str, shape: tuple[int, int], rows: range, own: Callable[[], Tensor]) -> None:
        """`own`: the model's numbers of these rows, as floats."""
        self._ops = ops
        self._own = own
        self._name = name
        self._shape = shape
        self._rows = rows
        self._tables: SavedTables | None = None  # None: no slots are open

    def open_slots(self, num_slots: int, device: torch.device, dtype: torch.dtype) -> None:
        self._tables = self._ops.make_saved_tables(num_slots, self._rows, device, dtype)

    def load_low_rank(self, slot: int, a: Tensor, b: Tensor, scale: float) -> None:
        """The matrices of an adapter: scale · b [vocabulary, rank] @ a [rank, size] is added to the model's table, and
        the sum is kept. An id has one row of it, so that a product for each step would cost more."""
        assert self._tables is not None, "no slots are open"
        if (len(b), a.shape[1]) != self._shape:
            problem = f"has matrices of shapes {tuple(a.shape)} and {tuple(b.shape)}"
            raise ModelError(self._name, problem, f"a table of shape {self._shape}")
        own = self._own().float()
        change = b[self._rows.start : self._rows.stop].to(own.device, torch.float32) @ a.to(own.device, torch.float32)
        self._tables.load(slot, own + scale * change)

    def load(self, slot: int, table: Tensor) -> None:
        """The whole table that an adapter has in place of the model's."""
        assert self._tables is not None, "no slots are open"
        if tuple(table.shape) != self._shape:
            raise ModelError(self._name, f"has a table of shape {tuple(table.shape)}", f"one of shape {self._shape}")
        self._tables.load(slot, table[self._rows.start : self._rows.stop])

    def clear(self, slot: int) -> None:
        assert self._tables is not None, "no slots are open"
        self._tables.clear(slot)

    def replace(self, found: Tensor, ids: Tensor, adapters: AdapterRows) -> None:
        """found [T, H]: rows whose adapter has a table get that of their id [T], in place."""
        if self._tables is not None:
            self._tables.replace(found, ids, adapters.slots)
