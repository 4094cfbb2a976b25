"""The attention layer as a model sees it: a declaration of what it needs, and a call that the step carries out.

Which backend computes it, where keys and values lie and how they are paged is the runner's business.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch

from ratoon.core.kv import FullAttentionSpec, SlidingWindowSpec


class StepContext(Protocol):
    """What a forward pass of one step offers to the layers."""

    def attend(self, layer: AttentionLayer, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        """Store k and v [T, kv_heads, head_dim], attend with q [T, heads, head_dim]; returns [T, heads · head_dim]."""
        ...


@dataclass(frozen=True, slots=True)
class AttentionLayer:
    """Causal self-attention over one branch's own tokens."""

    index: int  # among the model's attention layers
    num_heads: int
    num_kv_heads: int
    head_dim: int
    scale: float
    window: int | None = None  # attend to the last `window` tokens only, the query's own included

    def kv_spec(self, block_size: int, dtype_bytes: int) -> FullAttentionSpec | SlidingWindowSpec:
        if self.window is None:
            return FullAttentionSpec(block_size, self.num_kv_heads, self.head_dim, dtype_bytes)
        return SlidingWindowSpec(block_size, self.num_kv_heads, self.head_dim, dtype_bytes, self.window)

    def __call__(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, step: StepContext) -> torch.Tensor:
        return step.attend(self, q, k, v)
