"""The feed-forward half of a decoder layer, gated and plain."""

from __future__ import annotations

import torch

from ratoon.core.errors import ModelError
from ratoon.layers.linear import Linear, MergedLinear
from ratoon.layers.ops import Ops
from ratoon.layers.weights import Weights

Tensor = torch.Tensor

PLAIN_ACTIVATIONS = ("silu", "relu", "gelu", "gelu_new", "gelu_pytorch_tanh")  # those of Ops.activation


class GatedMLP:
    """down(silu(gate(x)) · up(x)), with gate and up as one product: [T, H] → [T, H]."""

    __slots__ = ("feed_forward",)

    def __init__(
        self, weights: Weights, hidden_size: int, intermediate_size: int, bias: bool = False, activation: str = "silu"
    ) -> None:
        if activation != "silu":
            raise ModelError(weights.source.name, f"gated activation {activation!r} is unknown", "known: silu")
        sizes = (intermediate_size, intermediate_size)
        gate_up = MergedLinear(weights, ("gate_proj", "up_proj"), hidden_size, sizes, bias)
        down = Linear(weights / "down_proj", intermediate_size, hidden_size, bias)
        self.feed_forward = weights.ops.make_gated_mlp(gate_up.multiply, down.multiply)

    def __call__(self, x: Tensor) -> Tensor:
        return self.feed_forward(x)


class MLP:
    """down(activation(up(x)))."""

    __slots__ = ("activate", "down", "kind", "up")

    def __init__(self, up: Linear, down: Linear, ops: Ops, activation: str) -> None:
        if activation not in PLAIN_ACTIVATIONS:
            raise ModelError(
                "config", f"activation {activation!r} is unknown", f"known: {', '.join(PLAIN_ACTIVATIONS)}"
            )
        self.up = up
        self.down = down
        self.kind = activation
        self.activate = ops.activation

    def __call__(self, x: Tensor) -> Tensor:
        return self.down(self.activate(self.up(x), self.kind))  # [T, H] → [T, I] → [T, I] → [T, H]
