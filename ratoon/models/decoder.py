"""The blocks that families share, of decoders and of encoders alike: self-attention, and layers by where their norms
are and whether their halves run side by side.

They are assembled from parts that the family has built, so they use neither tensor names nor weights directly.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import torch

from ratoon.layers.adapters import AdapterRows
from ratoon.layers.attention import AttentionLayer, HeadTransform, StepContext
from ratoon.layers.linear import Linear, QKVLinear
from ratoon.layers.mlp import FeedForward
from ratoon.layers.norm import HeadRMSNorm, LayerNorm, LinearInput, RMSNorm, WholeRMSNorm
from ratoon.layers.rotary import Rotary
from ratoon.layers.state_space import StateSpaceMixer
from ratoon.models.base import StreamLayer

Tensor = torch.Tensor


class BeforeProduct(Protocol):
    """A norm, or what stands in the place of one."""

    def __call__(self, x: Tensor, residual: Tensor | None = None) -> Tensor:
        """The norm of x, or of the residual stream, after x was added to it in place."""
        ...

    def before_product(self, stream: Tensor, update: Tensor | None) -> LinearInput:
        """The norm of the stream, after `update` was added to it in place, as the input of a linear layer."""
        ...


class AttentionBlock(Protocol):
    """The attention of a layer, up to the product that follows."""

    output: Linear

    def __call__(self, x: LinearInput, positions: Tensor, step: StepContext) -> Tensor:
        """[T, H] → the input of `output`, of all rows or of those that the step reads."""
        ...


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
    whole_norms: tuple[WholeRMSNorm, WholeRMSNorm] | None = None  # of all query heads, and of all key heads
    query_scale: Tensor | None = None  # [positions, 1, 1]: what queries are multiplied with at each position

    def __call__(self, x: LinearInput, positions: Tensor, step: StepContext) -> Tensor:
        # [T, H] → [T, heads, head_dim], twice [T, kv_heads, head_dim]: views of one product
        q, k, v = self.qkv(x, step.adapters)
        if self.whole_norms is not None:
            self.whole_norms[0](q)
            self.whole_norms[1](k)
        if self.query_scale is not None:
            q.mul_(self.query_scale[positions])
        transform = None
        if self.rotary is not None or self.q_norm is not None or self.k_norm is not None:
            transform = HeadTransform(positions, self.rotary, self.q_norm, self.k_norm)
        return self.layer(q, k, v, step, transform)  # [T, heads · head_dim]


@dataclass(slots=True, eq=False)
class PreNormLayer(StreamLayer):
    """Attention and feed-forward, each after a norm, each added to the residual stream."""

    attention_norm: BeforeProduct
    attention: AttentionBlock
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
    stream. In its place there may be another function of the rows, such as a factor."""

    attention_norm: RMSNorm | LayerNorm
    attention: SelfAttention | StateSpaceMixer
    attended_norm: Callable[[Tensor], Tensor]
    mlp_norm: RMSNorm | LayerNorm
    mlp: FeedForward
    fed_norm: Callable[[Tensor], Tensor]

    def attend(self, stream: Tensor, update: Tensor | None, positions: Tensor, step: StepContext) -> Tensor:
        """The first half, in which rows depend on each other: → [T, heads · head_dim]."""
        return self.attention(self.attention_norm.before_product(stream, update), positions, step)

    def finish(self, attended: Tensor, stream: Tensor, adapters: AdapterRows | None) -> Tensor:
        """The second half, in which rows are independent: → [T, H], for the norm behind it to add."""
        update = self.attended_norm(self.attention.output(attended, adapters))
        return self.fed_norm(self.mlp(self.mlp_norm.before_product(stream, update), adapters))


@dataclass(slots=True, eq=False)
class NormedUpdateLayer(StreamLayer):
    """Attention and feed-forward, which read the residual stream as it is; what they give is normed before it is added
    to the stream."""

    attention: SelfAttention
    attended_norm: RMSNorm
    mlp: FeedForward
    fed_norm: RMSNorm
    add: Callable[[Tensor, Tensor], Tensor]  # Ops.add

    def attend(self, stream: Tensor, update: Tensor | None, positions: Tensor, step: StepContext) -> Tensor:
        """The first half, in which rows depend on each other: → [T, heads · head_dim]."""
        return self.attention(stream if update is None else self.add(stream, update), positions, step)

    def finish(self, attended: Tensor, stream: Tensor, adapters: AdapterRows | None) -> Tensor:
        """The second half, in which rows are independent: → [T, H], for the next layer to add."""
        self.add(stream, self.attended_norm(self.attention.output(attended, adapters)))
        return self.fed_norm(self.mlp(stream, adapters))


@dataclass(slots=True, eq=False)
class ParallelLayer(StreamLayer):
    """Attention and feed-forward side by side: each reads a norm of the same residual stream, and both are added to
    it."""

    attention_norm: LayerNorm
    attention: SelfAttention
    mlp_norm: LayerNorm  # it may be the other norm again
    mlp: FeedForward
    add: Callable[[Tensor, Tensor], Tensor]  # Ops.add

    def attend(self, stream: Tensor, update: Tensor | None, positions: Tensor, step: StepContext) -> Tensor:
        """The first half, in which rows depend on each other: → [T, heads · head_dim]."""
        return self.attention(self.attention_norm.before_product(stream, update), positions, step)

    def finish(self, attended: Tensor, stream: Tensor, adapters: AdapterRows | None) -> Tensor:
        """The second half, in which rows are independent: → [T, H], for the next norm to add."""
        fed = self.mlp(self.mlp_norm(stream), adapters)  # before attention is added to the stream
        update = self.attention.output.add_to(stream, attended, adapters)
        return fed if update is None else self.add(fed, update)
