"""Cross-attention of a decoder, and the pre-norm layer that has it between its two halves.

As in decoder.py, blocks are assembled from parts that the family has built. The step stores the encoder's keys and
values.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from ratoon.layers.adapters import AdapterRows
from ratoon.layers.attention import CrossAttentionLayer, StepContext
from ratoon.layers.linear import Linear, MergedLinear
from ratoon.layers.mlp import FeedForward
from ratoon.layers.norm import LayerNorm, LinearInput, RMSNorm
from ratoon.models.base import StreamLayer
from ratoon.models.decoder import SelfAttention

Tensor = torch.Tensor


@dataclass(slots=True, eq=False)
class CrossAttention:
    """Queries of decoder rows over keys and values of encoder states, which are computed once per encoder input.

    `output`, the product that follows, is called by the layer: rows that are no longer needed are dropped before it.
    """

    layer: CrossAttentionLayer
    query: Linear
    key_value: MergedLinear
    output: Linear

    def __call__(self, x: LinearInput, step: StepContext) -> Tensor:
        q = self.query(x, step.adapters)  # [T, H] → [T, heads · head_dim]
        return self.layer(q.view(-1, self.layer.num_heads, self.layer.head_dim), step)  # [T, heads · head_dim]

    def store(self, states: Tensor, step: StepContext) -> None:
        """[E, H], the encoder's states: store their keys and values for the decoder's steps."""
        heads = self.layer.num_heads
        both = self.key_value(states, step.adapters)  # [E, 2 · heads · head_dim]
        k, v = both.view(-1, 2 * heads, self.layer.head_dim).split_with_sizes([heads, heads], 1)
        step.store_across(self.layer, k, v)


@dataclass(slots=True, eq=False)
class PreNormCrossLayer(StreamLayer):
    """Self-attention, cross-attention and feed-forward, each after a norm, each added to the residual stream."""

    attention_norm: RMSNorm | LayerNorm
    attention: SelfAttention
    cross_norm: RMSNorm | LayerNorm
    cross: CrossAttention
    mlp_norm: RMSNorm | LayerNorm
    mlp: FeedForward

    def attend(self, stream: Tensor, update: Tensor | None, positions: Tensor, step: StepContext) -> Tensor:
        """The part in which rows depend on others: → cross-attention's output [T, heads · head_dim]."""
        attended = self.attention(self.attention_norm.before_product(stream, update), positions, step)
        update = self.attention.output.add_to(stream, attended, step.adapters)
        return self.cross(self.cross_norm.before_product(stream, update), step)

    def finish(self, attended: Tensor, stream: Tensor, adapters: AdapterRows | None) -> Tensor | None:
        """The rest, in which rows are independent: → [T, H], or None."""
        update = self.cross.output.add_to(stream, attended, adapters)
        return self.mlp.add_to(stream, self.mlp_norm.before_product(stream, update), adapters)
