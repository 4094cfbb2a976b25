"""The arithmetic of layers in plain torch: any device, any floating dtype. Other Ops are tested against it.

Norms and rotations of 16-bit tensors are computed in float32. Nothing here knows about models, caches or steps.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.nn import functional

from ratoon.layers.ops import (
    FusedProduct,
    JoinedProducts,
    Lookup,
    LowRankProducts,
    Product,
    SavedTables,
    WeightFormat,
    WeightUse,
)
from ratoon.layers.stored import StoredTensor
from ratoon.layers.torch_adapters import TorchLowRank, TorchTables

Tensor = torch.Tensor


class TorchOps:
    """Implements `Ops`; see there for the shapes."""

    name = "torch"
    defers_norms = False

    def find_format(self, stored: StoredTensor) -> WeightFormat | None:
        return None

    def quantize(self, stored: StoredTensor, use: WeightUse) -> StoredTensor:
        return stored

    def note_on(self, stored: StoredTensor, use: WeightUse) -> str | None:
        return None

    def kept_formats(self) -> list[dict[str, Any]]:
        return []

    def make_linear(self, weight: Tensor, bias: Tensor | None) -> Product:
        linear = functional.linear

        def multiply(x: Tensor) -> Tensor:
            return linear(x, weight, bias)

        return multiply

    def join(self, products: Sequence[Product]) -> Product:
        return lambda x: torch.cat([multiply(x) for multiply in products], dim=-1)

    def make_low_rank(
        self,
        num_inputs: int,
        num_outputs: Sequence[int],
        num_slots: int,
        max_rank: int,
        device: torch.device,
        dtype: torch.dtype,
        takes_weights: bool = False,
    ) -> LowRankProducts:
        return TorchLowRank(num_outputs, self.rms_norm, device, dtype)

    def join_low_rank(
        self, product: Product, num_outputs: Sequence[int], num_slots: int, max_rank: int
    ) -> JoinedProducts | None:
        return None

    def make_saved_tables(self, num_slots: int, rows: range, device: torch.device, dtype: torch.dtype) -> SavedTables:
        return TorchTables(rows, device, dtype)

    def make_gated_mlp(self, gate_up: Product, down: Product) -> Product:
        def feed_forward(x: Tensor) -> Tensor:
            return down(self.silu_and_mul(gate_up(x)))  # [T, H] → [T, 2·I] → [T, I] → [T, H]

        return feed_forward

    def fuse(self, product: Product) -> FusedProduct | None:
        return None

    def embedding(self, table: Tensor, ids: Tensor) -> Tensor:
        return functional.embedding(ids, table)

    def cut_embedding(self, lookup: Lookup, table: StoredTensor, rows: range, vocab_size: int) -> Lookup:
        return mask_lookup(lookup, rows)

    def scale(self, x: Tensor, factor: float) -> Tensor:
        return x.mul_(factor)

    def add(self, x: Tensor, y: Tensor) -> Tensor:
        return x.add_(y)

    def soft_cap(self, x: Tensor, cap: float) -> Tensor:
        return x.div_(cap).tanh_().mul_(cap)  # each rounded to the dtype of x, as transformers does

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        if x.dtype == torch.float32:
            return torch.rms_norm(x, weight.shape, weight, eps)
        if weight.dtype == torch.float32:
            return torch.rms_norm(x.float(), weight.shape, weight, eps).to(x.dtype)
        # torch sums in float32 and rounds its result; models were trained with that rounding before the weight.
        return weight * torch.rms_norm(x, weight.shape, None, eps)

    def add_rms_norm(self, x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> Tensor:
        return self.rms_norm(residual.add_(x), weight, eps)

    def layer_norm(self, x: Tensor, weight: Tensor, bias: Tensor | None, eps: float) -> Tensor:
        # torch accumulates mean and variance in float32 whatever the dtype of x.
        return functional.layer_norm(x, weight.shape, weight, bias, eps)

    def add_layer_norm(self, x: Tensor, residual: Tensor, weight: Tensor, bias: Tensor | None, eps: float) -> Tensor:
        return self.layer_norm(residual.add_(x), weight, bias, eps)

    def head_rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> None:
        x.copy_(self.rms_norm(x, weight, eps))

    def rotary(self, q: Tensor, k: Tensor, positions: Tensor, cos_sin: Tensor, axes: Tensor | None = None) -> None:
        half = cos_sin.shape[-1] // 2
        if axes is None:
            angles = functional.embedding(positions, cos_sin)  # [T, rotary_dim]
        else:
            of_columns = positions[axes.long().repeat(2)]  # [rotary_dim, T]
            angles = cos_sin.gather(0, of_columns.T)
        cos, sin = angles.unsqueeze(1).split(half, dim=-1)  # [T, 1, half] each
        _rotate(q, cos, sin, half)
        _rotate(k, cos, sin, half)

    def silu_and_mul(self, x: Tensor) -> Tensor:
        gate, up = x.chunk(2, dim=-1)  # [T, I] each
        return functional.silu(gate).mul_(up)

    def gated_activation(self, x: Tensor, kind: str) -> Tensor:
        gate, up = x.chunk(2, dim=-1)  # [T, I] each
        return self.activation(gate, kind).mul_(up)

    def activation(self, x: Tensor, kind: str) -> Tensor:
        return _ACTIVATIONS[kind](x)


def mask_lookup(lookup: Lookup, rows: range) -> Lookup:
    """The lookup of `Ops.cut_embedding`, by operations of torch."""

    def look_up(ids: Tensor) -> Tensor:
        own = ids - rows.start
        elsewhere = (own < 0) | (own >= len(rows))  # other ranks have these rows
        return lookup(own.masked_fill(elsewhere, 0)).masked_fill_(elsewhere[:, None], 0)

    return look_up


def _rotate(x: Tensor, cos: Tensor, sin: Tensor, half: int) -> None:
    """x [T, heads, head_dim] in place. The table is float32, so 16-bit x is promoted and rounded once, at the end."""
    first, second = x[..., :half], x[..., half : 2 * half]  # [T, heads, half]
    turned = first * cos - second * sin
    second.copy_(second * cos + first * sin)
    first.copy_(turned)


def _gelu_tanh(x: Tensor) -> Tensor:
    return functional.gelu(x, approximate="tanh")


def _quick_gelu(x: Tensor) -> Tensor:
    return x * torch.sigmoid(1.702 * x)


_ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "silu": functional.silu,
    "relu": functional.relu,
    "gelu": functional.gelu,
    "gelu_new": _gelu_tanh,
    "gelu_pytorch_tanh": _gelu_tanh,
    "quick_gelu": _quick_gelu,
}
