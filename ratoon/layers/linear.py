"""Linear layers: they take their weights by name, fuse what is always multiplied together, and own the result.

Which parts are fused is decided here; how a weight is kept and multiplied, by Ops.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby

import torch

from ratoon.layers.ops import Ops, Product
from ratoon.layers.stored import StoredTensor
from ratoon.layers.weights import Weights

Tensor = torch.Tensor


class Linear:
    """[T, in_features] → [T, out_features], from the tensors `weight` and, if asked for, `bias` below `weights`."""

    __slots__ = ("multiply",)

    def __init__(
        self, weights: Weights, in_features: int, out_features: int, bias: bool = False, transposed: bool = False
    ) -> None:
        weight = _take_weight(weights, in_features, out_features, transposed)
        self.multiply = make_product(weights.ops, [weight], weights.take("bias", out_features) if bias else None)

    def __call__(self, x: Tensor) -> Tensor:
        return self.multiply(x)


class MergedLinear:
    """Several linear layers over the same input as one product: [T, in_features] → [T, sum of out_sizes]."""

    __slots__ = ("multiply",)

    def __init__(
        self,
        weights: Weights,
        names: Sequence[str],
        in_features: int,
        out_sizes: Sequence[int],
        bias: bool | Sequence[bool] = False,
        transposed: bool = False,
    ) -> None:
        """`bias`: do all parts have one, or does each? One that has none gets zeros if another has one."""
        parts = [(weights / name, size) for name, size in zip(names, out_sizes, strict=True)]
        biased = [bias] * len(parts) if isinstance(bias, bool) else bias
        stored = [_take_weight(part, in_features, size, transposed) for part, size in parts]
        joined_bias: Tensor | None = None
        if any(biased):
            taken = zip(parts, biased, strict=True)
            joined_bias = _join([part.take("bias", size) if has else _zeros(part, size) for (part, size), has in taken])
        self.multiply = make_product(weights.ops, stored, joined_bias)

    def __call__(self, x: Tensor) -> Tensor:
        return self.multiply(x)


class QKVLinear:
    """Query, key and value as one product, handed out as views of it.

    `names` are the three layers of a checkpoint that keeps them apart, or the one of a checkpoint that has them fused.
    """

    __slots__ = ("head_counts", "head_dim", "multiply", "num_heads_in_all")

    def __init__(
        self,
        weights: Weights,
        names: Sequence[str],
        hidden_size: int,
        num_heads: int,
        num_kv_heads: int,
        head_dim: int,
        bias: bool | Sequence[bool] = False,
        transposed: bool = False,
    ) -> None:
        self.head_dim = head_dim
        self.head_counts = [num_heads, num_kv_heads, num_kv_heads]
        self.num_heads_in_all = sum(self.head_counts)
        if len(names) == 1:
            out_sizes = [self.num_heads_in_all * head_dim]
        else:
            out_sizes = [count * head_dim for count in self.head_counts]
        self.multiply = MergedLinear(weights, names, hidden_size, out_sizes, bias, transposed).multiply

    def __call__(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """[T, hidden] → q [T, heads, head_dim], k and v [T, kv_heads, head_dim]."""
        heads = self.multiply(x).view(-1, self.num_heads_in_all, self.head_dim)  # [T, heads + 2·kv_heads, head_dim]
        q, k, v = heads.split_with_sizes(self.head_counts, 1)
        return q, k, v


def make_product(ops: Ops, parts: list[StoredTensor], bias: Tensor | None) -> Product:
    """The product with weights [out, in] that stand one below the other, each in the format that it came in."""
    groups = [list(group) for _, group in groupby(parts, key=lambda part: part.format)]
    if len(groups) > 1:
        sizes = [sum(part.shape[0] for part in group) for group in groups]
        biases = [None] * len(groups) if bias is None else bias.split(sizes)
        products = [make_product(ops, group, own) for group, own in zip(groups, biases, strict=True)]
        return lambda x: torch.cat([multiply(x) for multiply in products], dim=-1)
    kept = ops.find_format(parts[0])
    if kept is not None:
        return kept.make_linear(parts, bias)
    return ops.make_linear(_join([part.data for part in parts]), bias)


def _take_weight(weights: Weights, in_features: int, out_features: int, transposed: bool) -> StoredTensor:
    """The weight as [out, in]; `transposed` says that the checkpoint has it as [in, out]."""
    shape = (in_features, out_features) if transposed else (out_features, in_features)
    return weights.take_stored("weight", *shape, transposed=transposed)


def _zeros(weights: Weights, size: int) -> Tensor:
    return torch.zeros(size, dtype=weights.dtype, device=weights.device)


def _join(parts: list[Tensor]) -> Tensor:
    if len(parts) == 1:
        return parts[0].contiguous()
    if parts[0].device.type == "meta":  # torch.cat of meta tensors loads two seconds' worth of torch's compiler
        return torch.empty(sum(map(len, parts)), *parts[0].shape[1:], device="meta")
    return torch.cat(parts)
