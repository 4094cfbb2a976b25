"""The arithmetic of layers in plain torch: any device, any floating dtype. Other Ops are tested against it.

Norms and rotations of 16-bit tensors are computed in float32. Nothing here knows about models, caches or steps.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any

import torch
from torch.nn import functional

from ratoon.layers.ops import (
    ExpertGate,
    ExpertProducts,
    ExpertWeights,
    FusedProduct,
    HeadProduct,
    JoinedProducts,
    Lookup,
    LowRankProducts,
    Ops,
    Product,
    Router,
    Routes,
    RoutingRule,
    SavedTables,
    WeightFormat,
    WeightUse,
)
from ratoon.layers.products import make_product
from ratoon.layers.stored import StoredTensor
from ratoon.layers.torch_adapters import TorchLowRank, TorchTables

Tensor = torch.Tensor


class TorchOps:
    """Implements `Ops`; see there for the shapes."""

    name = "torch"
    defers_norms = False

    def for_encoders(self) -> TorchOps:
        return self

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

    def make_router(self, rule: RoutingRule, bias: Tensor | None, counts: Tensor | None = None) -> Router:
        return partial(route, rule, bias, counts)

    def make_experts(self, experts: Iterable[ExpertWeights], own: range, gate: ExpertGate) -> ExpertProducts:
        products = [
            (
                make_product(self, [one.gate, one.up], one.gate_up_bias),
                make_product(self, [one.down], one.down_bias),
            )
            for one in experts
        ]
        return TorchExperts(self, products, own, gate)

    def make_head_product(self, weight: Tensor, kept: int = 0) -> HeadProduct:
        return TorchHeadProduct(weight.transpose(1, 2).contiguous(), kept)

    def add_gated(self, y: Tensor, x: Tensor, gates: Tensor) -> Tensor:
        return y.addcmul_(x, gates.sigmoid())

    def clamped_swiglu(self, x: Tensor, limit: float) -> Tensor:
        """[T, 2·I] → [T, I], as ExpertGate says."""
        gate, up = x.chunk(2, dim=-1)
        gate = gate.clamp(max=limit)
        return (up.clamp(-limit, limit) + 1).mul_(gate * torch.sigmoid(1.702 * gate))

    def fuse_activation(self, product: Product, kind: str) -> Product | None:
        return None

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
        if weight.dim() == 2:
            for head, own in enumerate(weight):
                self.head_rms_norm(x[:, head], own, eps)
        else:
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


def route(rule: RoutingRule, bias: Tensor | None, counts: Tensor | None, logits: Tensor) -> Routes:
    """The router of `Ops.make_router`, by operations of torch; none of them waits for the device."""
    logits = logits.float()  # [T, E]
    scores = logits.sigmoid() if rule.scoring == "sigmoid" else logits.softmax(-1)
    choice = scores if bias is None else scores + bias
    if rule.num_groups > 1:
        groups = choice.unflatten(-1, (rule.num_groups, -1))  # [T, groups, E / groups]
        count = min(2, groups.shape[-1]) if bias is not None else 1
        best = groups.topk(count, dim=-1).values.sum(-1).topk(rule.top_groups, dim=-1).indices  # [T, top_groups]
        kept = torch.zeros(groups.shape[:2], dtype=torch.bool, device=choice.device).scatter_(1, best, True)
        choice = groups.masked_fill(~kept[..., None], -torch.inf).flatten(1)
    experts = choice.topk(rule.top_k, dim=-1).indices  # [T, k]
    weights = scores.gather(1, experts)
    if rule.renormalise:
        weights = weights / (weights.sum(-1, keepdim=True) + 1e-20)
    if counts is not None:
        counts.scatter_add_(0, experts.flatten(), torch.ones_like(experts).flatten())
    return Routes(experts.int(), weights * rule.scale if rule.scale != 1.0 else weights)


class TorchExperts:
    """Implements ExpertProducts with any products. Rows are sorted by expert, and those without rows are not read. It
    waits
    for the device, to know how many rows each has."""

    def __init__(self, ops: Ops, products: Sequence[tuple[Product, Product]], own: range, gate: ExpertGate) -> None:
        """`products`: gate and up as one, and down, of each expert."""
        self._own, self._products = own, products
        self._gate: Callable[[Tensor], Tensor] = partial(ops.gated_activation, kind=gate.kind)
        if gate.kind == "clamped_swiglu":
            self._gate = partial(ops.clamped_swiglu, limit=gate.limit)

    def __call__(self, x: Tensor, routes: Routes) -> Tensor:
        num_rows, top_k = routes.experts.shape
        places = routes.experts.flatten().long() - self._own.start  # [T · k]
        elsewhere = (places < 0) | (places >= len(self._own))
        places = places.masked_fill(elsewhere, len(self._own))
        order = places.argsort(stable=True)
        counts = torch.bincount(places, minlength=len(self._own) + 1).tolist()
        rows = x[order // top_k]  # sorted by expert
        results = torch.zeros((len(order), x.shape[1]), dtype=x.dtype, device=x.device)
        start = 0
        for (gate_up, down), count in zip(self._products, counts):
            if count:
                results[start : start + count] = down(self._gate(gate_up(rows[start : start + count])))
            start += count
        by_pair = torch.empty_like(results).index_copy_(0, order, results).view(num_rows, top_k, x.shape[1])
        weights = routes.weights.masked_fill(elsewhere.view(num_rows, top_k), 0.0).to(x.dtype)
        return (by_pair * weights[..., None]).sum(1)


class TorchHeadProduct:
    """The product of `Ops.make_head_product`, by operations of torch; weight [heads, in, out]."""

    __slots__ = ("kept", "weight")

    def __init__(self, weight: Tensor, kept: int) -> None:
        self.weight: Tensor | None = weight
        self.kept = kept

    def __call__(self, x: Tensor) -> Tensor:
        kept, weight = self.kept, self.weight
        assert weight is not None
        y = x.new_empty((x.shape[0], weight.shape[0], kept + weight.shape[2]))
        if kept:
            y[..., :kept] = x[..., :kept]
        torch.bmm(x[..., kept:].transpose(0, 1), weight, out=y[..., kept:].transpose(0, 1))
        return y


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
