"""The blocks that families share: self-attention and the pre-norm layer, of decoders and of encoders alike.

They are put together from parts that the family has built, so they know no tensor names and take no weights themselves.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from ratoon.layers.attention import AttentionLayer, StepContext
from ratoon.layers.linear import Linear, QKVLinear
from ratoon.layers.norm import HeadRMSNorm, LayerNorm, RMSNorm
from ratoon.layers.rotary import Rotary

Tensor = torch.Tensor


class SelfAttention:
    """Query, key and value; the norms of their heads and the rotation, where a family has them; attention.

    `output`, the product that follows, is called by the layer: rows that nobody needs any more are dropped before it.
    """

    __slots__ = ("k_norm", "layer", "output", "q_norm", "qkv", "rotary")

    def __init__(
        self,
        layer: AttentionLayer,
        qkv: QKVLinear,
        output: Linear,
        rotary: Rotary | None = None,
        q_norm: HeadRMSNorm | None = None,
        k_norm: HeadRMSNorm | None = None,
    ) -> None:
        self.layer = layer
        self.qkv = qkv
        self.output = output
        self.rotary = rotary
        self.q_norm = q_norm
        self.k_norm = k_norm

    def __call__(self, x: Tensor, positions: Tensor, step: StepContext) -> Tensor:
        q, k, v = self.qkv(x)  # [T, H] → [T, heads, head_dim], twice [T, kv_heads, head_dim]: views of one product
        if self.q_norm is not None:
            self.q_norm(q)
        if self.k_norm is not None:
            self.k_norm(k)
        if self.rotary is not None:
            self.rotary(q, k, positions)
        return self.layer(q, k, v, step)  # [T, heads · head_dim]


class PreNormLayer:
    """Attention and feed-forward, each behind a norm and each adding to the residual stream."""

    __slots__ = ("attention", "attention_norm", "mlp", "mlp_norm")

    def __init__(
        self,
        attention_norm: RMSNorm | LayerNorm,
        attention: SelfAttention,
        mlp_norm: RMSNorm | LayerNorm,
        mlp: Callable[[Tensor], Tensor],
    ) -> None:
        self.attention_norm = attention_norm
        self.attention = attention
        self.mlp_norm = mlp_norm
        self.mlp = mlp

    def __call__(self, stream: Tensor, update: Tensor | None, positions: Tensor, step: StepContext) -> Tensor:
        """All [T, H]. Adds `update` and its own attention to the stream in place; returns what is still to be added."""
        return self.finish(self.attend(stream, update, positions, step), stream)

    def attend(self, stream: Tensor, update: Tensor | None, positions: Tensor, step: StepContext) -> Tensor:
        """The first half, in which rows look at each other: → [T, heads · head_dim]."""
        x = self.attention_norm(stream) if update is None else self.attention_norm(update, stream)
        return self.attention(x, positions, step)

    def finish(self, attended: Tensor, stream: Tensor) -> Tensor:
        """The second half, in which every row is on its own: → [T, H]."""
        return self.mlp(self.mlp_norm(self.attention.output(attended), stream))
