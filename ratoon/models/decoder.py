"""The blocks that families share: self-attention, the pre-norm layer and the layer with norms on both sides, of
decoders and of encoders alike.

They are assembled from parts that the family has built, so they use neither tensor names nor weights directly.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from ratoon.layers.adapters import AdapterRows
from ratoon.layers.attention import AttentionLayer, HeadTransform, StepContext
from ratoon.layers.linear import Linear, QKVLinear
from ratoon.layers.mlp import FeedForward
from ratoon.layers.norm import HeadRMSNorm, LayerNorm, LinearInput, RMSNorm
from ratoon.layers.rotary import Rotary
from ratoon.models.base import StreamLayer

Tensor = torch.Tensor


@dataclass(slots=True, eq=False)
class SelfAttention:
    """Query, key and value; the norms of their heads and the rotation, where a family has them; attention.

    `output`, the product that follows, is called by the layer: rows that are no longer needed are dropped before it.
    """

    layer: AttentionLayer
    qkv: QKVLinear
    output: Linear
    rotary: Rotary | None = None
    q_norm: HeadRMSNorm | None = None
    k_norm: HeadRMSNorm | None = None

    def __call__(self, x: LinearInput, positions: Tensor, step: StepContext) -> Tensor:
        # [T, H] → [T, heads, head_dim], twice [T, kv_heads, head_dim]: views of one product
        q, k, v = self.qkv(x, step.adapters)
        transform = None
        if self.rotary is not None or self.q_norm is not None or self.k_norm is not None:
            transform = HeadTransform(positions, self.rotary, self.q_norm, self.k_norm)
        return self.layer(q, k, v, step, transform)  # [T, heads · head_dim]


@dataclass(slots=True, eq=False)
class PreNormLayer(StreamLayer):
    """Attention and feed-forward, each after a norm, each added to the residual stream."""

    attention_norm: RMSNorm | LayerNorm
    attention: SelfAttention
    mlp_norm: RMSNorm | LayerNorm
    mlp: FeedForward

    def attend(self, stream: Tensor, update: Tensor | None, positions: Tensor, step: StepContext) -> Tensor:
        """The first half, in which rows depend on each other: → [T, heads · head_dim]."""
        return self.attention(self.attention_norm.before_product(stream, update), positions, step)

    def finish(self, attended: Tensor, stream: Tensor, adapters: AdapterRows | None) -> Tensor | None:
        """The second half, in which rows are independent: → [T, H], or None."""
        update = self.attention.output.add_to(stream, attended, adapters)
        return self.mlp.add_to(stream, self.mlp_norm.before_product(stream, update), adapters)


@dataclass(slots=True, eq=False)
class SandwichLayer(StreamLayer):
    """Attention and feed-forward, each between two norms, the second of which is before the addition to the residual
    stream."""

    attention_norm: RMSNorm
    attention: SelfAttention
    attended_norm: RMSNorm
    mlp_norm: RMSNorm
    mlp: FeedForward
    fed_norm: RMSNorm

    def attend(self, stream: Tensor, update: Tensor | None, positions: Tensor, step: StepContext) -> Tensor:
        """The first half, in which rows depend on each other: → [T, heads · head_dim]."""
        return self.attention(self.attention_norm.before_product(stream, update), positions, step)

    def finish(self, attended: Tensor, stream: Tensor, adapters: AdapterRows | None) -> Tensor:
        """The second half, in which rows are independent: → [T, H], for the norm behind it to add."""
        update = self.attended_norm(self.attention.output(attended, adapters))
        return self.fed_norm(self.mlp(self.mlp_norm.before_product(stream, update), adapters))
