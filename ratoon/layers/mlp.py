"""The feed-forward half of a layer, gated and plain."""

from __future__ import annotations

import torch

from ratoon.core.errors import ModelError
from ratoon.layers.linear import Linear, MergedLinear
from ratoon.layers.ops import Ops
from ratoon.layers.weights import Weights

Tensor = torch.Tensor

ACTIVATIONS = ("silu", "relu", "gelu", "gelu_new", "gelu_pytorch_tanh")  # those of Ops.activation
GATED_NAMES = ("gate_proj", "up_proj", "down_proj")


class GatedMLP:
    """down(activation(gate(x)) · up(x)), with gate and up as one product: [T, H] → [T, H]."""

    __slots__ = ("feed_forward",)

    def __init__(
        self,
        weights: Weights,
        hidden_size: int,
        intermediate_size: int,
        bias: bool = False,
        activation: str = "silu",
        names: tuple[str, str, str] = GATED_NAMES,
    ) -> None:
        _check_activation(activation)
        sizes = (intermediate_size, intermediate_size)
        gate_up = MergedLinear(weights, names[:2], hidden_size, sizes, bias)
        down = Linear(weights / names[2], intermediate_size, hidden_size, bias)
        ops = weights.ops
        if activation == "silu":  # what most families have is one call
            self.feed_forward = ops.make_gated_mlp(gate_up.multiply, down.multiply)
            return

        def feed_forward(x: Tensor) -> Tensor:
            gate, up = gate_up(x).chunk(2, dim=-1)  # [T, I] each, views of one product
            return down(ops.activation(gate, activation).mul_(up))

        self.feed_forward = feed_forward

    def __call__(self, x: Tensor) -> Tensor:
        return self.feed_forward(x)


class MLP:
    """down(activation(up(x)))."""

    __slots__ = ("activate", "down", "kind", "up")

    def __init__(self, up: Linear, down: Linear, ops: Ops, activation: str) -> None:
        _check_activation(activation)
        self.up = up
        self.down = down
        self.kind = activation
        self.activate = ops.activation

    def __call__(self, x: Tensor) -> Tensor:
        return self.down(self.activate(self.up(x), self.kind))  # [T, H] → [T, I] → [T, I] → [T, H]


def _check_activation(name: str) -> None:
    if name not in ACTIVATIONS:
        raise ModelError("config", f"activation {name!r} is unknown", f"known: {', '.join(ACTIVATIONS)}")
