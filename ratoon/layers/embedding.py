"""Both ends of a model: token ids to rows of a table, and hidden states to logits. Sampling is not here."""

from __future__ import annotations

import torch

from ratoon.layers.weights import Weights

Tensor = torch.Tensor


class Embedding:
    """[T] → [T, size]. The result is always new memory: the model adds to it in place."""

    __slots__ = ("lookup", "table")

    def __init__(self, weights: Weights, count: int, size: int) -> None:
        self.table = weights.take("weight", count, size)
        self.lookup = weights.ops.embedding

    def __call__(self, ids: Tensor) -> Tensor:
        return self.lookup(self.table, ids)


class LMHead:
    """Hidden states [R, hidden] → logits [R, vocab] in float32, with its own weight or the embedding's."""

    __slots__ = ("multiply",)

    def __init__(self, weights: Weights, embedding: Embedding, tied: bool) -> None:
        if tied:
            weights.ignore("weight")  # some files hold a copy of the embedding here
            weight = embedding.table
        else:
            weight = weights.take("weight", *embedding.table.shape)
        self.multiply = weights.ops.make_linear(weight, None)

    def __call__(self, hidden: Tensor) -> Tensor:
        return self.multiply(hidden).float()
