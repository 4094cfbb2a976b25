"""The layers that keep something of a sequence, as a model sees them: attention, and states in its place. Each is a
declaration of what it needs, and a call that the step executes.

The backend, and how keys, values and states are stored and paged, are the runner's.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch

from ratoon.core.kv import CrossAttentionSpec, FullAttentionSpec, KVCacheSpec, LatentSpec, SlidingWindowSpec, StateSpec
from ratoon.layers.adapters import AdapterRows
from ratoon.layers.norm import HeadRMSNorm
from ratoon.layers.ops import HeadProduct
from ratoon.layers.rotary import Rotary


@dataclass(slots=True, eq=False)
class HeadTransform:
    """What happens to the heads of queries and keys before attention: norms, then the rotation. It travels with them,
    so that a backend can do it in the kernel that stores keys and values."""

    positions: torch.Tensor  # [T], or [axes, T] where the rotation has several axes: of nothing but the rotation
    rotary: Rotary | None
    q_norm: HeadRMSNorm | None
    k_norm: HeadRMSNorm | None

    def apply(self, q: torch.Tensor, k: torch.Tensor) -> None:
        """Transforms q and k in place, one operation after the other."""
        if self.q_norm is not None:
            self.q_norm(q)
        if self.k_norm is not None:
            self.k_norm(k)
        if self.rotary is not None:
            self.rotary(q, k, self.positions)

    def of_rows(self, rows: torch.Tensor) -> HeadTransform:
        """Returns the transform of these rows [R] alone."""
        return HeadTransform(self.positions[..., rows], self.rotary, self.q_norm, self.k_norm)


@dataclass(frozen=True, slots=True, eq=False)
class LatentProducts:
    """The products between heads and the vectors of latent attention. Their weights serve both forms of it: in the
    absorbed form queries and results of heads are multiplied, in the expanded form the vectors are."""

    absorb: HeadProduct  # with W_uk: [T, heads, rope_dim + nope_dim] → [T, heads, rope_dim + kv_rank]
    expand: HeadProduct  # with W_uv: [T, heads, kv_rank] → [T, heads, size of a value]

    def values_of(self, attended: torch.Tensor, num_heads: int) -> torch.Tensor:
        """Makes values [T, heads · size of a value] of what heads read from vectors, [T, heads · kv_rank]."""
        return self.expand(attended.unflatten(1, (num_heads, -1))).flatten(1)


class StepContext(Protocol):
    """The interface of one forward pass, of a decoder or an encoder, for its layers."""

    @property
    def adapters(self) -> AdapterRows | None:
        """Which adapter each row [T] has; None: no row has one."""
        ...

    def attend(
        self,
        layer: AttentionLayer,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        transform: HeadTransform | None,
    ) -> torch.Tensor:
        """Transform q [T, heads, head_dim] and k [T, kv_heads, head_dim], which may change in place; store k and v;
        attend with q; returns [T, heads · value_dim]."""
        ...

    def attend_latent(
        self,
        layer: LatentAttentionLayer,
        queries: torch.Tensor,
        k: torch.Tensor,
        transform: HeadTransform | None,
        products: LatentProducts,
    ) -> torch.Tensor:
        """Transform, store and attend as `attend` does, for heads that read vectors k [T, 1, head_dim]. The queries [T,
        heads, rope_dim + nope_dim] have not been multiplied with W_uk, and the results [T, heads · size of a value] are
        values: which form of the products is computed is left to the step."""
        ...

    def reading(self, rows: torch.Tensor) -> StepContext | None:
        """Returns the pass for a last layer of which only these `rows` [R] are read: its `attend` stores k and v of all
        rows, attends with those of `rows`, and returns [R, heads · value_dim]; so does its `attend_latent`. None: it
        attends with all."""
        ...

    def scan(self, layer: StateSpaceLayer, projected: torch.Tensor) -> torch.Tensor:
        """Go on with the states of the rows' sequences, by the rows' products `projected` [T, inner + channels +
        heads]: gate, inputs of the convolution, time steps. Returns what heads read from their states, times the gate:
        [T, inner]."""
        ...

    def attend_across(self, layer: CrossAttentionLayer, q: torch.Tensor) -> torch.Tensor:
        """Attend with q [T, heads, head_dim] to the keys and values that `store_across` stored for the row's encoder
        input."""
        ...

    def store_across(self, layer: CrossAttentionLayer, k: torch.Tensor, v: torch.Tensor) -> None:
        """Only in an encoder's pass: store k and v [E, heads, head_dim] of its rows for the decoder."""
        ...


@dataclass(frozen=True, slots=True, eq=False)
class AttentionLayer:
    """Self-attention over one sequence."""

    index: int  # among the model's attention layers
    num_heads: int
    num_kv_heads: int
    head_dim: int
    scale: float
    # Attend to the last `window` tokens only, the query's own included; if not causal, to as many behind it too
    window: int | None = None
    causal: bool = True  # False: every row sees its whole sequence, or its window; the sequence runs in one step
    # [heads, 2 · reach + 1] float32: [distance + reach] is added to the score of a key `distance` positions after the
    # query (negative: before). No sequence is longer than reach + 1.
    bias: torch.Tensor | None = None
    soft_cap: float | None = None  # scores become soft_cap · tanh(score / soft_cap), before bias and mask
    sinks: torch.Tensor | None = None  # [heads] float32: a score of each head that is in its softmax and has no value

    @property
    def value_dim(self) -> int:
        """The size of a head's value and of its result."""
        return self.head_dim

    def kv_spec(self, block_size: int, dtype: str) -> KVCacheSpec:
        if self.window is None or not self.causal:  # a sequence that runs in one step has all its blocks
            return FullAttentionSpec(block_size, self.num_kv_heads, self.head_dim, dtype)
        return SlidingWindowSpec(block_size, self.num_kv_heads, self.head_dim, dtype, self.window)

    def __call__(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        step: StepContext,
        transform: HeadTransform | None = None,
    ) -> torch.Tensor:
        return step.attend(self, q, k, v, transform)


@dataclass(frozen=True, slots=True, eq=False)
class LatentAttentionLayer(AttentionLayer):
    """Self-attention whose heads read one vector of each token: all of it is their key, and what is behind its first
    `rope_dim` numbers is their value. `num_kv_heads` is 1, and `head_dim` the size of the vector."""

    rope_dim: int = 0

    @property
    def value_dim(self) -> int:
        """The size of a head's value and of its result."""
        return self.head_dim - self.rope_dim

    def kv_spec(self, block_size: int, dtype: str) -> KVCacheSpec:
        return LatentSpec(block_size, self.head_dim, dtype)


@dataclass(frozen=True, slots=True, eq=False)
class CrossAttentionLayer:
    """A decoder's attention to its encoder's states, whose keys and values are computed once."""

    index: int  # among the model's cross-attention layers
    num_heads: int
    head_dim: int
    scale: float

    # Fields that backends expect of any layer
    window = None
    causal = False
    bias = None
    soft_cap = None
    sinks = None

    @property
    def num_kv_heads(self) -> int:
        return self.num_heads

    @property
    def value_dim(self) -> int:
        return self.head_dim

    def kv_spec(self, block_size: int, dtype: str) -> KVCacheSpec:
        return CrossAttentionSpec(block_size, self.num_heads, self.head_dim, dtype)

    def __call__(self, q: torch.Tensor, step: StepContext) -> torch.Tensor:
        return step.attend_across(self, q)


@dataclass(frozen=True, slots=True, eq=False)
class StateSpaceLayer:
    """The part of a state-space layer in which rows depend on each other. Sizes are those of this rank."""

    index: int  # among the model's layers that have memory
    num_heads: int
    head_dim: int
    state_size: int
    num_groups: int
    time_step_limit: tuple[float, float]
    # [channels, width] float32, in memory column after column; the last column is that of the row's own input
    conv_weight: torch.Tensor
    conv_bias: torch.Tensor | None  # [channels] float32
    decay: torch.Tensor  # [heads] float32, below zero: by which a state decays in a unit of time
    skip: torch.Tensor  # [heads] float32: how much of its input a head gives beside what it reads
    time_step_bias: torch.Tensor  # [heads] float32

    # Fields that backends expect of any layer
    window = None
    causal = True
    bias = None
    soft_cap = None
    sinks = None

    @property
    def num_kv_heads(self) -> int:
        return self.num_groups

    @property
    def value_dim(self) -> int:
        return self.head_dim

    @property
    def inner_size(self) -> int:
        return self.num_heads * self.head_dim

    @property
    def num_channels(self) -> int:
        """The channels of the convolution: the inputs of heads, then for each group what is written (B) and what is
        read (C)."""
        return self.inner_size + 2 * self.num_groups * self.state_size

    @property
    def conv_width(self) -> int:
        return self.conv_weight.shape[1]

    def kv_spec(self, block_size: int, dtype: str) -> KVCacheSpec:
        """States are in float32, whatever keys and values are kept in: errors of rounding add up over a text."""
        return StateSpec(
            block_size, self.num_heads, self.head_dim, self.state_size, self.num_channels, self.conv_width - 1
        )

    def __call__(self, projected: torch.Tensor, step: StepContext) -> torch.Tensor:
        return step.scan(self, projected)
