"""Linear layers: they take their weights by name, fuse weights of the same input, and own the result.

A layer combines format, shard and adapter. Ops decides how a weight is stored and multiplied, and whether the norm
before the product and the addition behind it are part of it. The class of the layer decides which part of the weight a
rank takes, and adapters add their low-rank products by row.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch

from ratoon.layers.adapters import AdaptedProduct, AdapterRows
from ratoon.layers.norm import LinearInput, Normed
from ratoon.layers.ops import WeightUse
from ratoon.layers.products import join_rows, make_product
from ratoon.layers.stored import StoredTensor, TensorSlice
from ratoon.layers.weights import Weights

Tensor = torch.Tensor


class Piece(NamedTuple):
    """One layer of the checkpoint, below `weights`, and which of its outputs are used."""

    weights: Weights
    out_features: int
    has_bias: bool
    outputs: Sequence[range]
    order: Sequence[int] | None = None  # in which the outputs, of one range then, are used; None: as they are


class Linear:
    """[T, in] → [T, out]: one or more layers of the checkpoint over the same input, as one product.

    Subclasses say which part a rank takes. `inputs`: some of the input features; results are then summed over the
    ranks.
    """

    __slots__ = ("adapted", "fused", "multiply", "reduce")

    def __init__(
        self, pieces: Sequence[Piece], in_features: int, transposed: bool = False, inputs: range | None = None
    ) -> None:
        """`transposed`: the checkpoint has the weight as [in, out]."""
        weights = pieces[0].weights
        inputs = range(in_features) if inputs is None else inputs
        parts: list[StoredTensor] = []
        self.adapted = AdaptedProduct(weights.ops, len(inputs))
        for piece in pieces:
            parts += [_take_weight(piece, outputs, in_features, inputs, transposed) for outputs in piece.outputs]
            shape = (piece.out_features, in_features)
            piece.weights.add_target(self.adapted, shape, inputs, piece.outputs, piece.order)
        self.multiply = self.adapted.base = make_product(weights.ops, parts, _take_bias(pieces))
        self.fused = weights.ops.fuse(self.multiply)
        self.reduce = None if len(inputs) == in_features else weights.shard.all_reduce

    @property
    def communicates(self) -> bool:
        """Whether a call holds a collective of all ranks."""
        return self.reduce is not None

    def __call__(self, x: LinearInput, adapters: AdapterRows | None = None) -> Tensor:
        if adapters is not None and self.adapted.joined is not None:
            stream, norm = (x.stream, x.rms) if isinstance(x, Normed) else (x, None)
            y = self.adapted.joined.multiply(stream, norm, None, adapters.slots)
            return y if self.reduce is None else self.reduce(y)
        if isinstance(x, Normed):
            if self.fused is not None and self.reduce is None:
                y = self.fused(x.stream, x.rms, None)
                if adapters is not None:
                    self.adapted.add(y, x.stream, adapters, x.rms)
                return y
            x = x.compute()
        y = self.multiply(x)
        if adapters is not None:
            self.adapted.add(y, x, adapters)
        return y if self.reduce is None else self.reduce(y)

    def add_to(self, stream: Tensor, x: Tensor, adapters: AdapterRows | None = None) -> Tensor | None:
        """Add to the residual stream [T, out] in place. What is yet to be added is returned: all of it, where the
        product and the addition are not one operation."""
        if self.fused is None or self.reduce is not None:
            return self(x, adapters)
        if adapters is not None and self.adapted.joined is not None:
            self.adapted.joined.multiply(x, None, stream, adapters.slots)
            return None
        self.fused(x, None, stream)
        if adapters is not None:
            self.adapted.add(stream, x, adapters)
        return None


class ColumnParallelLinear(Linear):
    """A linear layer from `weight` and, if asked for, `bias` below `weights`, of which a rank has some of the
    outputs."""

    __slots__ = ()

    def __init__(
        self, weights: Weights, in_features: int, out_features: int, bias: bool = False, transposed: bool = False
    ) -> None:
        outputs = weights.shard.cut("outputs", out_features)
        super().__init__([Piece(weights, out_features, bias, [outputs])], in_features, transposed)


class RowParallelLinear(Linear):
    """A linear layer of which a rank has some of the inputs. The ranks' results are summed, and the first rank adds the
    bias."""

    __slots__ = ()

    def __init__(
        self, weights: Weights, in_features: int, out_features: int, bias: bool = False, transposed: bool = False
    ) -> None:
        inputs = weights.shard.cut("inputs", in_features)
        if bias and weights.shard.rank > 0:
            weights.ignore("bias")
            bias = False
        super().__init__([Piece(weights, out_features, bias, [range(out_features)])], in_features, transposed, inputs)


class MergedLinear(Linear):
    """Several column-parallel layers as one product. A rank has an equal part of each."""

    __slots__ = ()

    def __init__(
        self,
        weights: Weights,
        names: Sequence[str],
        in_features: int,
        out_sizes: Sequence[int],
        bias: bool | Sequence[bool] = False,
    ) -> None:
        """`bias`: whether the parts have one, for all or by part. A part without one gets zeros if another has one."""
        biased = [bias] * len(names) if isinstance(bias, bool) else bias
        super().__init__(
            [
                Piece(weights / name, size, has_bias, [weights.shard.cut("outputs", size)])
                for name, size, has_bias in zip(names, out_sizes, biased, strict=True)
            ],
            in_features,
        )


class SplitLinear(Linear):
    """One layer of the checkpoint that holds several column-parallel ones. A rank has an equal part of each."""

    __slots__ = ()

    def __init__(
        self, weights: Weights, in_features: int, out_sizes: Sequence[int], bias: bool = False, reverse: bool = False
    ) -> None:
        """`reverse`: the checkpoint has them in the opposite order."""
        total, outputs, start = sum(out_sizes), [], 0
        for size in out_sizes:
            part = weights.shard.cut("outputs", size)
            outputs.append(range(start + part.start, start + part.stop))
            start += size
        if reverse:
            outputs.reverse()
        piece = Piece(weights, total, bias, outputs)
        if weights.shard.world_size == 1:  # the weight is read once
            order = [row for part in outputs for row in part] if reverse else None
            piece = piece._replace(outputs=[range(total)], order=order)
        super().__init__([piece], in_features)


class QKVLinear:
    """Query, key and value as one product, returned as views of it. A rank has some of the heads.

    `names` are the three layers of a checkpoint that keeps them apart, or the one of a checkpoint that has them fused:
    all queries, all keys, all values; or, `by_kv_head`, for each KV head its queries, its key and its value.
    `interleaved_dim`: in the checkpoint, apart, neighbours of so many numbers of a head are rotated together; here they
    are put in two halves.
    """

    __slots__ = ("head_counts", "head_dim", "linear", "num_heads_in_all")

    def __init__(
        self,
        weights: Weights,
        names: Sequence[str],
        hidden_size: int,
        num_heads: int,
        num_kv_heads: int,
        head_dim: int,
        bias: bool | Sequence[bool] = False,
        transposed: bool = False,
        by_kv_head: bool = False,
        interleaved_dim: int = 0,
    ) -> None:
        """The numbers of heads are those of the whole model."""
        heads, kv_heads = weights.shard.cut_heads(num_heads, num_kv_heads)
        self.head_dim = head_dim
        self.head_counts = [len(heads), len(kv_heads), len(kv_heads)]
        self.num_heads_in_all = sum(self.head_counts)
        sizes = [count * head_dim for count in (num_heads, num_kv_heads, num_kv_heads)]
        outputs = [range(part.start * head_dim, part.stop * head_dim) for part in (heads, kv_heads, kv_heads)]
        if by_kv_head:
            own = _ranges_by_kv_head(heads, kv_heads, num_heads // num_kv_heads, head_dim)
            pieces = [Piece(weights / names[0], sum(sizes), bool(bias), own)]
        elif len(names) == 1:
            starts = (0, sizes[0], sizes[0] + sizes[1])
            own = [range(start + part.start, start + part.stop) for start, part in zip(starts, outputs, strict=True)]
            own = [range(sum(sizes))] if weights.shard.world_size == 1 else own
            pieces = [Piece(weights / names[0], sum(sizes), bool(bias), own)]
        else:
            biased = [bias] * 3 if isinstance(bias, bool) else bias
            parts = zip(names, sizes, biased, outputs, strict=True)
            pieces = [Piece(weights / name, size, has_bias, [own]) for name, size, has_bias, own in parts]
            if interleaved_dim:
                orders = [halves_of_heads(len(part), head_dim, interleaved_dim) for part in (heads, kv_heads)]
                pieces[:2] = [piece._replace(order=order) for piece, order in zip(pieces, orders)]
        self.linear = Linear(pieces, hidden_size, transposed)

    def __call__(self, x: LinearInput, adapters: AdapterRows | None = None) -> tuple[Tensor, Tensor, Tensor]:
        """[T, hidden] → q [T, heads, head_dim], k and v [T, kv_heads, head_dim]."""
        fused = self.linear(x, adapters)
        heads = fused.view(-1, self.num_heads_in_all, self.head_dim)  # [T, heads + 2·kv_heads, head_dim]
        q, k, v = heads.split_with_sizes(self.head_counts, 1)
        return q, k, v


def _ranges_by_kv_head(heads: range, kv_heads: range, group: int, head_dim: int) -> list[range]:
    """Where the rows of these query heads, and then of these keys and values, are in a weight that has for each KV head
    its queries, its key and its value. Neighbours are one range."""
    places = [head // group * (group + 2) + head % group for head in heads]
    places += [head * (group + 2) + group + part for part in (0, 1) for head in kv_heads]
    ranges: list[range] = []
    for place in places:
        start = ranges.pop().start if ranges and ranges[-1].stop == place * head_dim else place * head_dim
        ranges.append(range(start, (place + 1) * head_dim))
    return ranges


def halves_of_heads(num_heads: int, head_dim: int, rotary_dim: int) -> list[int]:
    """The order of rows that puts the even ones of the first `rotary_dim` of each head before the odd ones."""
    within = [*range(0, rotary_dim, 2), *range(1, rotary_dim, 2), *range(rotary_dim, head_dim)]
    return [head * head_dim + row for head in range(num_heads) for row in within]


def _take_weight(piece: Piece, outputs: range, in_features: int, inputs: range, transposed: bool) -> StoredTensor:
    """[outputs, inputs] of the weight; `transposed` says that the checkpoint has it as [in, out]."""
    shape = (piece.out_features, in_features)
    part = TensorSlice.of_range(0, outputs, piece.out_features) or TensorSlice.of_range(1, inputs, in_features)
    if not transposed:
        stored = piece.weights.take_stored("weight", *shape, part=part, use=WeightUse.LINEAR)
        return stored if piece.order is None else stored.with_rows(piece.order)
    part = None if part is None else part._replace(dim=1 - part.dim)
    return piece.weights.take_stored("weight", *shape[::-1], part=part, transposed=True, use=WeightUse.LINEAR)


def _take_bias(pieces: Sequence[Piece]) -> Tensor | None:
    if not any(piece.has_bias for piece in pieces):
        return None
    return join_rows([_bias_part(piece, outputs) for piece in pieces for outputs in piece.outputs])


def _bias_part(piece: Piece, outputs: range) -> Tensor:
    weights = piece.weights
    if not piece.has_bias:
        return torch.zeros(len(outputs), dtype=weights.dtype, device=weights.device)
    part = TensorSlice.of_range(0, outputs, piece.out_features)
    bias = weights.take("bias", piece.out_features, part=part)
    return bias if piece.order is None else bias[list(piece.order)]
