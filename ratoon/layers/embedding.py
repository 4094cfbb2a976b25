"""Both ends of a model: ids and positions to rows of tables, and hidden states to logits. Sampling is not here."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

import torch
from torch.nn import functional

from ratoon.layers.adapters import AdaptedProduct, AdapterRows
from ratoon.layers.ops import WeightUse
from ratoon.layers.products import make_product
from ratoon.layers.stored import TensorSlice
from ratoon.layers.weights import Weights

Tensor = torch.Tensor


@dataclass(frozen=True, slots=True, eq=False)
class RowEmbeddings:
    """The inputs of rows that are no token ids: images, sounds, embeddings that a request brings."""

    rows: Tensor  # [T]: the row of `table` that is a row's input; -1: its token id is
    table: Tensor  # [N, H], in the dtype of the model


def embed_rows(stream: Tensor, embeddings: RowEmbeddings | None) -> Tensor:
    """The embeddings of token ids [T, H], in which those of rows with other inputs are replaced, in place."""
    if embeddings is None:
        return stream
    found = functional.embedding(embeddings.rows.clamp(min=0), embeddings.table)
    return stream.copy_(torch.where((embeddings.rows >= 0)[:, None], found, stream))


class Embedding:
    """A small table of floats: [T] → [T, size]. The result is always new memory: the model adds to it in place."""

    __slots__ = ("lookup", "table")

    def __init__(self, weights: Weights, count: int, size: int, num_unused: int = 0) -> None:
        """`num_unused` rows precede that of id 0 in the checkpoint."""
        self.table = weights.take("weight", num_unused + count, size)[num_unused:]
        self.lookup = weights.ops.embedding

    def __call__(self, ids: Tensor) -> Tensor:
        return self.lookup(self.table, ids)


class VocabParallelEmbedding:
    """The vocabulary's table, in the format that Ops chose: [T] → [T, size], in new memory. A rank has some of the
    rows."""

    __slots__ = ("lookup", "reduce", "rows", "target", "vocab_size", "weight")

    def __init__(self, weights: Weights, vocab_size: int, size: int) -> None:
        self.vocab_size = vocab_size
        self.rows = weights.shard.cut_vocabulary(vocab_size)
        part = TensorSlice.of_range(0, self.rows, vocab_size)
        self.weight = weights.take_stored("weight", vocab_size, size, part=part, use=WeightUse.VOCABULARY)
        kept = weights.ops.find_format(self.weight)
        table = self.weight.data
        self.lookup = partial(weights.ops.embedding, table) if kept is None else kept.make_embedding(self.weight)
        self.reduce = weights.shard.all_reduce
        if self.reduce is not None:
            self.lookup = weights.ops.cut_embedding(self.lookup, self.weight, self.rows, vocab_size)
        self.target = weights.add_table((vocab_size, size), self.rows, self.weight.floats)

    @property
    def communicates(self) -> bool:
        """Whether a call holds a collective of all ranks."""
        return self.reduce is not None

    def __call__(self, ids: Tensor, adapters: AdapterRows | None = None) -> Tensor:
        found = self.lookup(ids)
        if adapters is not None:
            self.target.replace(found, ids, adapters)
        return found if self.reduce is None else self.reduce(found)


class SinusoidalPositions:
    """Called as Embedding is, with positions. A row holds size/2 sines, then as many cosines, of descending frequency.

    The table is computed, not read: files that have one hold the same values.
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
    """Hidden states [R, hidden] → logits [R, vocab] in the same dtype, with its own weight or the embedding's.

    A rank multiplies by its rows of the weight, and all ranks have all logits: each chooses the tokens itself, and all
    choose the same, because a choice depends on logits, seed and position alone. If one rank chose and told the others,
    they would wait for it once more in every step: with two ranks on two cores, logits and choice together take 1.0 to
    1.3 times as long then for one row of 49,152 or 128,256, and 0.9 to 1.0 times for 32 rows (bench/ranks.py).
    """

    __slots__ = ("adapted", "cap", "multiplier", "multiply", "scale", "shard", "soft_cap", "vocab_size")

    def __init__(
        self,
        weights: Weights,
        embedding: VocabParallelEmbedding,
        tied: bool,
        bias: Tensor | None = None,
        multiplier: float = 1.0,
        soft_cap: float | None = None,
    ) -> None:
        """Logits are multiplied by `multiplier`; with a `soft_cap` they become soft_cap · tanh(logit / soft_cap)."""
        self.multiplier, self.soft_cap = multiplier, soft_cap
        self.scale, self.cap = weights.ops.scale, weights.ops.soft_cap
        self.shard, self.vocab_size, rows = weights.shard, embedding.vocab_size, embedding.rows
        size = embedding.weight.shape[1]
        if tied:
            weights.ignore("weight")  # some files hold a copy of the embedding here
            weight = embedding.weight
        else:
            part = TensorSlice.of_range(0, rows, self.vocab_size)
            weight = weights.take_stored("weight", self.vocab_size, size, part=part, use=WeightUse.VOCABULARY)
        if bias is not None:
            bias = bias[rows.start : rows.stop]
        self.multiply = make_product(weights.ops, [weight], bias)
        self.adapted = AdaptedProduct(weights.ops, size, takes_weights=bias is None)  # which would lose the bias
        weights.add_target(self.adapted, (self.vocab_size, size), range(size), [rows])

    @property
    def communicates(self) -> bool:
        """Whether a call holds a collective of all ranks."""
        return self.shard.collective is not None

    def __call__(self, hidden: Tensor, adapters: AdapterRows | None = None) -> Tensor:
        logits = self.multiply(hidden)
        if adapters is not None:
            self.adapted.add(logits, hidden, adapters)
        if self.multiplier != 1.0:
            self.scale(logits, self.multiplier)
        if self.soft_cap is not None:
            self.cap(logits, self.soft_cap)
        if self.shard.collective is not None:
            logits = self.shard.collective.all_gather(logits, self.vocab_size)
        return logits
