"""The feed-forward half of a layer, gated and plain."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Protocol

import torch

from ratoon.core.errors import ModelError
from ratoon.layers.adapters import AdapterRows
from ratoon.layers.linear import Linear, MergedLinear, RowParallelLinear, SplitLinear
from ratoon.layers.norm import LinearInput, Normed
from ratoon.layers.ops import Ops, Product
from ratoon.layers.weights import Weights

Tensor = torch.Tensor

ACTIVATIONS = ("silu", "relu", "gelu", "gelu_new", "gelu_pytorch_tanh", "quick_gelu")  # those of Ops.activation
GATED_NAMES = ("gate_proj", "up_proj", "down_proj")
FUSED_GATED_NAMES = ("gate_up_proj", "down_proj")  # of checkpoints that have gate and up as one layer


class FeedForward(Protocol):
    def __call__(self, x: LinearInput, adapters: AdapterRows | None = None) -> Tensor:
        """[T, H] → [T, H]."""
        ...

    def add_to(self, stream: Tensor, x: LinearInput, adapters: AdapterRows | None = None) -> Tensor | None:
        """Adds the result to `stream` in place, or returns it, as `Linear.add_to` does."""
        ...


class GatedMLP:
    """down(activation(gate(x)) · up(x)), with gate and up as one product: [T, H] → [T, H]."""

    __slots__ = ("activate", "down", "fused", "gate_up", "multiply")

    def __init__(
        self,
        weights: Weights,
        hidden_size: int,
        intermediate_size: int,
        bias: bool = False,
        activation: str = "silu",
        names: Sequence[str] = GATED_NAMES,
        reduces: bool = True,
        gate_last: bool = False,
    ) -> None:
        """`names`: of gate, up and down, or of gate and up as one layer, and down; with `gate_last`, that layer has up
        before gate. Without `reduces`, a rank's result is its part of the sum over ranks."""
        _check_activation(activation)
        sizes = (intermediate_size, intermediate_size)
        self.gate_up: Linear
        if len(names) == 2:
            self.gate_up = SplitLinear(weights / names[0], hidden_size, sizes, bias, reverse=gate_last)
        else:
            self.gate_up = MergedLinear(weights, names[:2], hidden_size, sizes, bias)
        self.down = RowParallelLinear(weights / names[-1], intermediate_size, hidden_size, bias)
        if not reduces:
            self.down.reduce = None
        ops = weights.ops
        self.multiply: Product | None = None
        self.activate: Callable[[Tensor], Tensor] = partial(ops.gated_activation, kind=activation)
        if activation == "silu":  # the usual case is one fused call; adapters add to what is between its products
            self.activate = ops.silu_and_mul
            self.multiply = ops.make_gated_mlp(self.gate_up.multiply, self.down.multiply)
        self.fused = None if self.multiply is None or self.down.reduce else ops.fuse(self.multiply)

    def __call__(self, x: LinearInput, adapters: AdapterRows | None = None) -> Tensor:
        if adapters is not None or self.multiply is None:
            return self.down(self._gate(x, adapters), adapters)
        if isinstance(x, Normed):
            if self.fused is not None:
                return self.fused(x.stream, x.rms, None)
            x = x.compute()
        y = self.multiply(x)
        return y if self.down.reduce is None else self.down.reduce(y)

    def add_to(self, stream: Tensor, x: LinearInput, adapters: AdapterRows | None = None) -> Tensor | None:
        if adapters is not None or self.multiply is None:
            return self.down.add_to(stream, self._gate(x, adapters), adapters)
        if self.fused is None:
            return self(x)
        if isinstance(x, Normed):
            self.fused(x.stream, x.rms, stream)
        else:
            self.fused(x, None, stream)
        return None

    def _gate(self, x: LinearInput, adapters: AdapterRows | None) -> Tensor:
        """[T, H] → [T, I]: the first product and the activation."""
        joined = self.gate_up.adapted.joined
        if adapters is None or joined is None or self.multiply is None:
            return self.activate(self.gate_up(x, adapters))
        stream, norm = (x.stream, x.rms) if isinstance(x, Normed) else (x, None)
        return joined.multiply_gate(stream, norm, adapters.slots)


class MLP:
    """down(activation(up(x)))."""

    __slots__ = ("activate", "down", "fused", "kind", "up")

    def __init__(self, up: Linear, down: Linear, ops: Ops, activation: str) -> None:
        _check_activation(activation)
        self.up = up
        self.down = down
        self.kind = activation
        self.activate = ops.activation
        self.fused = None if up.communicates else ops.fuse_activation(up.multiply, activation)

    def __call__(self, x: LinearInput, adapters: AdapterRows | None = None) -> Tensor:
        # [T, H] → [T, I] → [T, H]
        return self.down(self._activate(x, adapters), adapters)

    def add_to(self, stream: Tensor, x: LinearInput, adapters: AdapterRows | None = None) -> Tensor | None:
        return self.down.add_to(stream, self._activate(x, adapters), adapters)

    def _activate(self, x: LinearInput, adapters: AdapterRows | None) -> Tensor:
        """[T, H] → [T, I]: the first product and the activation, as one call where that is possible. Adapters add to
        what is between them."""
        if self.fused is None or adapters is not None:
            return self.activate(self.up(x, adapters), self.kind)
        return self.fused(x.compute() if isinstance(x, Normed) else x)


def _check_activation(name: str) -> None:
    if name not in ACTIVATIONS:
        raise ModelError("config", f"activation {name!r} is unknown", f"known: {', '.join(ACTIVATIONS)}")
