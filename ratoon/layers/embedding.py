"""Both ends of a model: ids and positions to rows of tables, and hidden states to logits. Sampling is not here."""

from __future__ import annotations

from functools import partial

import torch

from ratoon.layers.linear import make_product
from ratoon.layers.weights import Weights

Tensor = torch.Tensor


class Embedding:
    """A small table of floats: [T] → [T, size]. The result is always new memory: the model adds to it in place."""

    __slots__ = ("lookup", "table")

    def __init__(self, weights: Weights, count: int, size: int, num_unused: int = 0) -> None:
        """`num_unused` rows stand in the checkpoint before the one of id 0."""
        self.table = weights.take("weight", num_unused + count, size)[num_unused:]
        self.lookup = weights.ops.embedding

    def __call__(self, ids: Tensor) -> Tensor:
        return self.lookup(self.table, ids)


class VocabParallelEmbedding:
    """The table of the vocabulary, kept as Ops wants it: [T] → [T, size], in new memory."""

    __slots__ = ("lookup", "weight")

    def __init__(self, weights: Weights, count: int, size: int) -> None:
        self.weight = weights.take_stored("weight", count, size)
        kept = weights.ops.find_format(self.weight)
        self.lookup = (
            partial(weights.ops.embedding, self.weight.data) if kept is None else kept.make_embedding(self.weight)
        )

    def __call__(self, ids: Tensor) -> Tensor:
        return self.lookup(ids)


class SinusoidalPositions:
    """Called as Embedding is, with positions. A row holds size/2 sines, then as many cosines, of falling frequency.

    The table is made and not read: files that hold one hold the same.
    """

    __slots__ = ("lookup", "table")

    def __init__(self, weights: Weights, count: int, size: int) -> None:
        weights.ignore("weight")
        self.lookup = weights.ops.embedding
        if weights.device.type == "meta":
            self.table = torch.empty(count, size, dtype=weights.dtype, device=weights.device)
            return
        frequencies = 10000.0 ** (-torch.arange(0, size, 2, dtype=torch.float64) / size)  # [size / 2]
        angles = torch.arange(count, dtype=torch.float64)[:, None] * frequencies  # [count, size / 2]
        self.table = torch.cat([angles.sin(), angles.cos()], dim=1).to(weights.device, weights.dtype)

    def __call__(self, positions: Tensor) -> Tensor:
        return self.lookup(self.table, positions)


class LMHead:
    """Hidden states [R, hidden] → logits [R, vocab] in float32, with its own weight or the embedding's."""

    __slots__ = ("multiply",)

    def __init__(
        self, weights: Weights, embedding: VocabParallelEmbedding, tied: bool, bias: Tensor | None = None
    ) -> None:
        if tied:
            weights.ignore("weight")  # some files hold a copy of the embedding here
            weight = embedding.weight
        else:
            weight = weights.take_stored("weight", *embedding.weight.shape)
        self.multiply = make_product(weights.ops, [weight], bias)

    def __call__(self, hidden: Tensor) -> Tensor:
        return self.multiply(hidden).float()
