"""Layers whose norms come behind what they add, as in BERT and BART: the stream itself is what a norm has made.

They are called as pre-norm layers are, and leave the stream finished: nothing is to be added behind them, and no norm
follows the last one.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from ratoon.layers.adapters import AdapterRows
from ratoon.layers.attention import StepContext
from ratoon.layers.mlp import FeedForward
from ratoon.layers.norm import LayerNorm
from ratoon.models.base import StreamLayer
from ratoon.models.cross import CrossAttention
from ratoon.models.decoder import SelfAttention

Tensor = torch.Tensor


@dataclass(slots=True, eq=False)
class PostNormLayer(StreamLayer):
    """Attention and feed-forward, each added to the residual stream, which is then normed."""

    attention_norm: LayerNorm
    attention: SelfAttention
    mlp_norm: LayerNorm
    mlp: FeedForward

    def attend(self, stream: Tensor, update: Tensor | None, positions: Tensor, step: StepContext) -> Tensor:
        """The first half, in which rows look at each other: → [T, heads · head_dim]."""
        return self.attention(stream, positions, step)

    def finish(self, attended: Tensor, stream: Tensor, adapters: AdapterRows | None) -> None:
        """The second half, in which every row is on its own."""
        x = self.attention_norm(self.attention.output(attended, adapters), stream)
        stream.copy_(self.mlp_norm(self.mlp(x, adapters), x))


@dataclass(slots=True, eq=False)
class PostNormCrossLayer(StreamLayer):
    """The same with cross-attention between the two, its norm behind it too."""

    attention_norm: LayerNorm
    attention: SelfAttention
    cross_norm: LayerNorm
    cross: CrossAttention
    mlp_norm: LayerNorm
    mlp: FeedForward

    def attend(self, stream: Tensor, update: Tensor | None, positions: Tensor, step: StepContext) -> Tensor:
        """All in which a row looks at others: → what cross-attention found [T, heads · head_dim]."""
        attended = self.attention(stream, positions, step)
        stream.copy_(self.attention_norm(self.attention.output(attended, step.adapters), stream))
        return self.cross(stream, step)

    def finish(self, attended: Tensor, stream: Tensor, adapters: AdapterRows | None) -> None:
        """The rest, in which every row is on its own."""
        x = self.cross_norm(self.cross.output(attended, adapters), stream)
        stream.copy_(self.mlp_norm(self.mlp(x, adapters), x))
