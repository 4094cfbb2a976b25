"""Latent attention (MLA), the block of DeepSeek's families.

One vector of a token is kept, from which keys and values of all heads would be products: key = W_uk · vector, value =
W_uv · vector (the expanded form). These products can also be on the other side (the absorbed form): queries are
multiplied with W_uk, so that heads attend to the vectors themselves, and what they give is multiplied with W_uv. Which
of the two is computed is the attention backend's choice. Beside the vector there are some numbers that are rotated, as
a part of every head's key; they stand in front of it, and in front of a head's query.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from ratoon.core.config import LatentConfig, ModelConfig
from ratoon.layers.attention import (
    AttentionLayer,
    HeadTransform,
    LatentAttentionLayer,
    LatentProducts,
    StepContext,
)
from ratoon.layers.linear import Linear, Piece, RowParallelLinear, halves_of_heads
from ratoon.layers.norm import HeadRMSNorm, LinearInput, RMSNorm
from ratoon.layers.rotary import Rotary
from ratoon.layers.stored import TensorSlice
from ratoon.layers.weights import Weights

Tensor = torch.Tensor

LATENT_NORM_EPS = 1e-6  # whatever the config has for the others


@dataclass(slots=True, eq=False)
class LatentAttention:
    """Queries and vectors, the norms of the latter, the rotation, and attention."""

    layer: LatentAttentionLayer
    output: Linear
    rotary: Rotary
    sizes: LatentConfig
    input: Linear  # queries, or what they are products of, and behind them the rotated numbers and the vector
    query_norm: RMSNorm | None  # of what queries are products of
    query: Linear | None  # None: `input` has queries
    vector_norm: HeadRMSNorm
    products: LatentProducts

    def __call__(self, x: LinearInput, positions: Tensor, step: StepContext) -> Tensor:
        rope_dim, kept = self.sizes.rope_dim, self.layer.head_dim
        joined = self.input(x, step.adapters)
        queries, k = joined[:, :-kept], joined[:, -kept:].unsqueeze(1)  # k [T, 1, rope_dim + kv_rank]
        self.vector_norm(k[..., rope_dim:])
        if self.query is not None and self.query_norm is not None:
            queries = self.query(self.query_norm(queries), step.adapters)
        q = queries.unflatten(1, (self.layer.num_heads, -1))  # [T, heads, rope_dim + nope_dim]
        transform = HeadTransform(positions, self.rotary, None, None)
        return step.attend_latent(self.layer, q, k, transform, self.products)  # [T, heads · value_dim]


def build_latent(weights: Weights, config: ModelConfig, layer: AttentionLayer, rotary: Rotary) -> LatentAttention:
    """The attention of a layer, from the tensors below `weights`, of which a rank takes those of its heads."""
    sizes = config.latent
    assert sizes is not None and isinstance(layer, LatentAttentionLayer)
    weights.ignore("rotary_emb.inv_freq")
    hidden, has_bias = config.hidden_size, config.attention_bias
    heads, _ = weights.shard.cut_heads(config.num_heads, 1)
    pieces = [_vector_piece(weights, sizes, has_bias, config.interleaved_rotary)]
    own = _query_piece(weights / _query_name(sizes), sizes, config.num_heads, heads, config.interleaved_rotary)
    query, query_norm = None, None
    if sizes.q_rank is None:
        pieces.insert(0, own)
    else:
        name, whole = weights / "q_a_proj", range(sizes.q_rank)
        pieces.insert(0, Piece(name, sizes.q_rank, has_bias, [whole]))
        query_norm = RMSNorm(weights / "q_a_layernorm", sizes.q_rank, LATENT_NORM_EPS)
        query = Linear([own], sizes.q_rank)
    width = config.num_heads * sizes.value_dim
    return LatentAttention(
        layer,
        RowParallelLinear(weights / "o_proj", width, hidden, config.attention_output_bias),
        rotary,
        sizes,
        Linear(pieces, hidden),
        query_norm,
        query,
        HeadRMSNorm(weights / "kv_a_layernorm", sizes.kv_rank, LATENT_NORM_EPS),
        _head_products(weights / "kv_b_proj", sizes, config.num_heads, heads),
    )


def _query_name(sizes: LatentConfig) -> str:
    return "q_proj" if sizes.q_rank is None else "q_b_proj"


def _query_piece(weights: Weights, sizes: LatentConfig, num_heads: int, heads: range, interleaved: bool) -> Piece:
    """The queries of a rank's heads. In the checkpoint the numbers of a head that are rotated are its last."""
    size = sizes.nope_dim + sizes.rope_dim
    rotated = [sizes.nope_dim + row for row in _rotated_rows(sizes.rope_dim, interleaved)]
    within = [*rotated, *range(sizes.nope_dim)]
    order = [place * size + row for place in range(len(heads)) for row in within]
    outputs = range(heads.start * size, heads.stop * size)
    return Piece(weights, num_heads * size, False, [outputs], order)


def _vector_piece(weights: Weights, sizes: LatentConfig, has_bias: bool, interleaved: bool) -> Piece:
    """The vector, which every rank has, with the rotated numbers in front of it."""
    width = sizes.kv_rank + sizes.rope_dim
    rotated = [sizes.kv_rank + row for row in _rotated_rows(sizes.rope_dim, interleaved)]
    order = [*rotated, *range(sizes.kv_rank)]
    return Piece(weights / "kv_a_proj_with_mqa", width, has_bias, [range(width)], order)


def _rotated_rows(rope_dim: int, interleaved: bool) -> list[int]:
    """The order that puts pairs, which may be neighbours in the checkpoint, in two halves."""
    return halves_of_heads(1, rope_dim, rope_dim if interleaved else 0)


def _head_products(weights: Weights, sizes: LatentConfig, num_heads: int, heads: range) -> LatentProducts:
    """The products with W_uk and W_uv of a rank's heads. The checkpoint has both as one layer, head by head."""
    size = sizes.nope_dim + sizes.value_dim
    rows = TensorSlice.of_range(0, range(heads.start * size, heads.stop * size), num_heads * size)
    stored = weights.take("weight", num_heads * size, sizes.kv_rank, part=rows)
    keys, values = stored.unflatten(0, (len(heads), size)).split([sizes.nope_dim, sizes.value_dim], 1)
    ops = weights.ops
    return LatentProducts(ops.make_head_product(keys.transpose(1, 2), sizes.rope_dim), ops.make_head_product(values))
