"""The arithmetic of layers, as an interface with one implementation for each kind of device.

`TorchOps` (torch_ops.py) runs anywhere and is the reference. `NativeOps` (native/) is for fp32 on a CPU. A layer holds
the Ops that its weights came with and never asks what device it is on.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

import torch

Tensor = torch.Tensor


class Ops(Protocol):
    """T tokens, H hidden size. Nothing here synchronises with the device."""

    name: str

    def make_linear(self, weight: Tensor, bias: Tensor | None) -> Callable[[Tensor], Tensor]:
        """Take a weight [out, in] over, in whatever form is fast here; the result maps [T, in] to [T, out].

        The place for other weight formats: whoever owns the weight decides how it is stored and multiplied.
        """
        ...

    def make_gated_mlp(
        self, gate_up: Callable[[Tensor], Tensor], down: Callable[[Tensor], Tensor]
    ) -> Callable[[Tensor], Tensor]:
        """down(silu_and_mul(gate_up(x))) as one call; both products are this object's own, from `make_linear`."""
        ...

    def embedding(self, table: Tensor, ids: Tensor) -> Tensor:
        """[V, H], [T] → [T, H]."""
        ...

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor: ...

    def add_rms_norm(self, x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> Tensor:
        """residual += x, in place; returns the norm of the sum."""
        ...

    def layer_norm(self, x: Tensor, weight: Tensor, bias: Tensor | None, eps: float) -> Tensor: ...

    def add_layer_norm(self, x: Tensor, residual: Tensor, weight: Tensor, bias: Tensor | None, eps: float) -> Tensor:
        """residual += x, in place; returns the norm of the sum."""
        ...

    def head_rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> None:
        """In place over the last dimension of x [T, heads, head_dim]; x may be a strided view."""
        ...

    def rotary(self, q: Tensor, k: Tensor, positions: Tensor, cos_sin: Tensor) -> None:
        """Turn q [T, heads, head_dim] and k [T, kv_heads, head_dim] in place (strided views are fine).

        cos_sin [max_position, rotary_dim]: row p holds rotary_dim/2 cosines, then as many sines. The first rotary_dim
        of each head turn, as two halves (not interleaved); the rest stays.
        """
        ...

    def silu_and_mul(self, x: Tensor) -> Tensor:
        """[T, 2·I] → [T, I]: silu of the first half times the second."""
        ...

    def activation(self, x: Tensor, kind: str) -> Tensor:
        """Elementwise: "silu", "relu", "gelu" (exact), "gelu_new" / "gelu_pytorch_tanh" (tanh form)."""
        ...
