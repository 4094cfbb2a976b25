"""The products of adapters in plain torch: any device, any floating dtype. Other forms are tested against it.

Every loaded slot is multiplied with all rows, and rows of other slots are left as they are: nothing waits for the
device.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch.nn import functional

from ratoon.layers.ops import RMSWeights

Tensor = torch.Tensor


class Matrices(NamedTuple):
    """Holds the matrices of one adapter for one part of a product."""

    a: Tensor | None  # [rank, in]; None: b is a weight [out, in]
    b: Tensor  # [out, rank], with the scale multiplied in


class TorchLowRank:
    """Implements LowRankProducts."""

    def __init__(
        self,
        num_outputs: Sequence[int],
        norm: Callable[[Tensor, Tensor, float], Tensor],
        device: torch.device,
        dtype: torch.dtype,
    ) -> None:
        self._num_outputs = list(num_outputs)
        self._norm = norm
        self._device = device
        self._dtype = dtype
        self._loaded: dict[tuple[int, int], Matrices] = {}  # by slot and part

    def load(self, slot: int, part: int, a: Tensor | None, b: Tensor, scale: float) -> None:
        scaled = (b.double() * scale).to(self._device, self._dtype)
        self._loaded[slot, part] = Matrices(None if a is None else a.to(self._device, self._dtype), scaled)

    def clear(self, slot: int) -> None:
        for part in range(len(self._num_outputs)):
            self._loaded.pop((slot, part), None)

    def add(self, y: Tensor, x: Tensor, slots: Tensor, norm: RMSWeights | None = None) -> None:
        if norm is not None:
            x = self._norm(x, *norm)
        columns = y.split(self._num_outputs, dim=1)
        for (slot, part), (a, b) in list(self._loaded.items()):
            own, has_it = columns[part], (slots == slot)[:, None]
            changed = functional.linear(x, b) if a is None else own + functional.linear(functional.linear(x, a), b)
            own.copy_(torch.where(has_it, changed, own))


class TorchTables:
    """Implements SavedTables."""

    def __init__(self, rows: range, device: torch.device, dtype: torch.dtype) -> None:
        self._rows = rows
        self._device = device
        self._dtype = dtype
        self._loaded: dict[int, Tensor] = {}  # by slot

    def load(self, slot: int, table: Tensor) -> None:
        self._loaded[slot] = table.to(self._device, self._dtype)

    def clear(self, slot: int) -> None:
        self._loaded.pop(slot, None)

    def replace(self, found: Tensor, ids: Tensor, slots: Tensor) -> None:
        own = ids - self._rows.start
        elsewhere = (own < 0) | (own >= len(self._rows))
        for slot, table in list(self._loaded.items()):
            rows = functional.embedding(own.masked_fill(elsewhere, 0), table).masked_fill(elsewhere[:, None], 0)
            found.copy_(torch.where((slots == slot)[:, None], rows, found))
