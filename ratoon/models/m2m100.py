"""M2M-100 and NLLB: mBART without a norm behind the embeddings, and with sinusoidal positions that begin behind that of
padding."""

from __future__ import annotations

import math

import torch

from ratoon.layers.weights import Weights
from ratoon.models.mbart import MBartForConditionalGeneration
from ratoon.models.text_input import TextInput

Tensor = torch.Tensor


class M2M100Positions:
    """Called as Embedding is, with positions. A row holds size/2 sines, then as many cosines; the last frequency is
    exactly 1/10000, and rows follow transformers' arithmetic in float32. The table is computed, not read."""

    __slots__ = ("lookup", "table")

    def __init__(self, weights: Weights, count: int, size: int, num_unused: int) -> None:
        """`num_unused` rows precede that of the first position."""
        weights.ignore("weights", "weight")
        self.lookup = weights.ops.embedding
        if weights.device.type == "meta":
            self.table = torch.empty(count, size, dtype=weights.dtype, device=weights.device)
            return
        half = size // 2
        frequencies = torch.exp(torch.arange(half).float() * -(math.log(10000) / (half - 1)))
        angles = torch.arange(num_unused, num_unused + count).float()[:, None] * frequencies  # [count, size / 2]
        self.table = torch.cat([angles.sin(), angles.cos()], dim=1).to(weights.device, weights.dtype)

    def __call__(self, positions: Tensor) -> Tensor:
        return self.lookup(self.table, positions)


class M2M100ForConditionalGeneration(MBartForConditionalGeneration):
    def build_input(self, weights: Weights, max_position: int) -> TextInput:
        config = self.config
        below = weights / "embed_positions"
        positions = M2M100Positions(below, max_position, config.hidden_size, config.num_unused_positions)
        return TextInput(self.embed, positions, scale=self.embedding_scale)
