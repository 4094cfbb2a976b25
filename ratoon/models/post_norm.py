"""Post-norm layers, as in BERT and BART: the residual stream itself is normed after each addition.

They have the interface of pre-norm layers, but leave no update to be added, and no norm follows the last one.
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
        """The first half, in which rows depend on each other: → [T, heads · head_dim]."""
        return self.attention(stream, positions, step)

    def finish(self, attended: Tensor, stream: Tensor, adapters: AdapterRows | None) -> None:
        """The second half, in which rows are independent."""
        x = self.attention_norm(self.attention.output(attended, adapters), stream)
        stream.copy_(self.mlp_norm(self.mlp(x, adapters), x))


@dataclass(slots=True, eq=False)
class PostNormCrossLayer(StreamLayer):
    """A layer of self-attention, cross-attention and feed-forward, each followed by its norm."""

    attention_norm: LayerNorm
    attention: SelfAttention
    cross_norm: LayerNorm
    cross: CrossAttention
    mlp_norm: LayerNorm
    mlp: FeedForward

    def attend(self, stream: Tensor, update: Tensor | None, positions: Tensor, step: StepContext) -> Tensor:
        """The part in which rows depend on others: → cross-attention's output [T, heads · head_dim]."""
        attended = self.attention(stream, positions, step)
        stream.copy_(self.attention_norm(self.attention.output(attended, step.adapters), stream))
        return self.cross(stream, step)

    def finish(self, attended: Tensor, stream: Tensor, adapters: AdapterRows | None) -> None:
        """The rest, in which rows are independent."""
        x = self.cross_norm(self.cross.output(attended, adapters), stream)
        stream.copy_(self.mlp_norm(self.mlp(x, adapters), x))
