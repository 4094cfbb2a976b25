"""Heads that turn the pooled state of a text into logits of labels: what is behind encoders and decoders that classify.

They are small: every rank has them whole, and in floats.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from ratoon.layers.norm import LayerNorm
from ratoon.layers.weights import Weights

Tensor = torch.Tensor


class Dense:
    """A product with a weight of floats, and a bias if asked for: [R, in] → [R, out]."""

    __slots__ = ("multiply",)

    def __init__(self, weights: Weights, in_features: int, out_features: int, bias: bool = True) -> None:
        weight = weights.take("weight", out_features, in_features)
        self.multiply = weights.ops.make_linear(weight, weights.take("bias", out_features) if bias else None)

    def __call__(self, x: Tensor) -> Tensor:
        return self.multiply(x)


class ClassifierHead:
    """Pooled states [R, H] → logits of the labels [R, labels] in float32: norm(activation(dense(x))), of which a family
    may have nothing, and then the last product."""

    __slots__ = ("activate", "dense", "dtype", "norm", "out")

    def __init__(
        self,
        out: Dense,
        dtype: torch.dtype,
        dense: Dense | None = None,
        activate: Callable[[Tensor], Tensor] | None = None,
        norm: LayerNorm | None = None,
    ) -> None:
        self.out, self.dtype = out, dtype
        self.dense, self.activate, self.norm = dense, activate, norm

    def __call__(self, x: Tensor) -> Tensor:
        x = x.to(self.dtype)
        if self.dense is not None:
            x = self.dense(x)
        if self.activate is not None:
            x = self.activate(x)
        if self.norm is not None:
            x = self.norm(x)
        return self.out(x).float()


def activation_of(weights: Weights, name: str) -> Callable[[Tensor], Tensor]:
    """An elementwise function by the name that configs have for it."""
    if name == "tanh":
        return torch.tanh
    activate = weights.ops.activation
    return lambda x: activate(x, name)
