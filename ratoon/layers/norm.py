"""Normalisation over the hidden size, alone or fused with adding to the residual stream."""

from __future__ import annotations

from collections.abc import Callable

import torch

from ratoon.layers.ops import RMSWeights
from ratoon.layers.stored import TensorSlice
from ratoon.layers.weights import Weights

Tensor = torch.Tensor


class Normed:
    """The norm of a stream, not computed yet: the product that takes it may do so in its own kernel."""

    __slots__ = ("_norm", "rms", "stream")

    def __init__(self, stream: Tensor, rms: RMSWeights, norm: Callable[[Tensor, Tensor, float], Tensor]) -> None:
        self.stream = stream
        self.rms = rms
        self._norm = norm

    def compute(self) -> Tensor:
        return self._norm(self.stream, *self.rms)


LinearInput = Tensor | Normed  # [T, in]


class RMSNorm:
    """`norm(x)` is the norm of x; `norm(x, residual)` first does residual += x in place, and is the norm of the sum.

    `is_offset`: the factors are 1 plus the stored weight, in float32, and the product with them is rounded once, as
    Gemma does it; products leave such a norm to a kernel of its own.
    """

    __slots__ = ("add_norm", "eps", "norm", "rms", "weight")

    def __init__(self, weights: Weights, size: int, eps: float, is_offset: bool = False) -> None:
        self.weight = _take_factors(weights, size, is_offset)
        self.eps = eps
        self.norm = weights.ops.rms_norm
        self.add_norm = weights.ops.add_rms_norm
        self.rms = RMSWeights(self.weight, eps) if weights.ops.defers_norms and not is_offset else None

    def __call__(self, x: Tensor, residual: Tensor | None = None) -> Tensor:
        if residual is None:
            return self.norm(x, self.weight, self.eps)
        return self.add_norm(x, residual, self.weight, self.eps)

    def before_product(self, stream: Tensor, update: Tensor | None) -> LinearInput:
        """The norm of the stream, after `update` was added to it in place, as the input of a linear layer."""
        if update is not None:
            return self(update, stream)
        return self(stream) if self.rms is None else Normed(stream, self.rms, self.norm)


class LayerNorm:
    """Called as RMSNorm is; also subtracts the mean, and has a bias, unless the family has none."""

    __slots__ = ("add_norm", "bias", "eps", "norm", "weight")

    def __init__(self, weights: Weights, size: int, eps: float, has_bias: bool = True) -> None:
        old_names = weights.has("gamma") and not weights.has("weight")  # in the original BERT's files
        self.weight = weights.take("gamma" if old_names else "weight", size)
        self.bias = weights.take("beta" if old_names else "bias", size) if has_bias else None
        self.eps = eps
        self.norm = weights.ops.layer_norm
        self.add_norm = weights.ops.add_layer_norm

    def __call__(self, x: Tensor, residual: Tensor | None = None) -> Tensor:
        if residual is None:
            return self.norm(x, self.weight, self.bias, self.eps)
        return self.add_norm(x, residual, self.weight, self.bias, self.eps)

    def before_product(self, stream: Tensor, update: Tensor | None) -> LinearInput:
        """Returns the input of a product, normalised: no product computes this norm itself."""
        return self(stream) if update is None else self(update, stream)


class HeadRMSNorm:
    """RMS norm of each head, in place, on a view of the fused query-key-value product. `is_offset`: see RMSNorm."""

    __slots__ = ("eps", "norm", "weight")

    def __init__(self, weights: Weights, head_dim: int, eps: float, is_offset: bool = False) -> None:
        self.weight = _take_factors(weights, head_dim, is_offset)
        self.eps = eps
        self.norm = weights.ops.head_rms_norm

    def __call__(self, x: Tensor) -> None:
        self.norm(x, self.weight, self.eps)


class WholeRMSNorm:
    """RMS norm over all heads of a token together, or over those of each of several groups, in place, on a view of a
    fused product. A rank has some of the heads: whole groups, or a part of one, whose squares are summed over the
    ranks."""

    __slots__ = ("eps", "group", "norm", "num_groups", "num_own", "reduce", "size", "weight")

    def __init__(self, weights: Weights, size: int, own: range, eps: float, num_groups: int = 1) -> None:
        """`own`: which of the `size` numbers this rank has."""
        weight = weights.take("weight", size, part=TensorSlice.of_range(0, own, size))
        self.size, self.eps = size // num_groups, eps
        self.num_own = len(own) // self.size  # 0: a part of a group
        self.weight = weight if self.num_own <= 1 else weight.unflatten(0, (self.num_own, self.size))
        self.group, self.num_groups = own.start // self.size, num_groups
        self.norm = weights.ops.head_rms_norm
        self.reduce = weights.shard.all_reduce

    def __call__(self, x: Tensor) -> None:
        flat = x.flatten(1)  # [T, heads, head_dim] → [T, heads · head_dim], a view
        if self.num_own:
            self.norm(flat.unflatten(1, (self.num_own, self.size)), self.weight, self.eps)
            return
        assert self.reduce is not None, "one rank has all"
        wide = flat.float()
        squares = wide.new_zeros(len(wide), self.num_groups)  # other ranks have their parts of other groups
        squares[:, self.group] = wide.square().sum(-1)
        mean = self.reduce(squares)[:, self.group, None] / self.size
        flat.copy_((wide * torch.rsqrt(mean + self.eps)).to(x.dtype) * self.weight)


def _take_factors(weights: Weights, size: int, is_offset: bool) -> Tensor:
    if not is_offset:
        return weights.take("weight", size)
    stored = weights.take("weight", size, dtype=torch.float32)
    return stored if stored.is_meta else stored + 1.0
