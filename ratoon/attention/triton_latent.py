"""Latent attention by the "triton" backend: what it supports, and the launches of a step (triton_latent_kernels.py).

Requests with many new tokens have the expanded form (triton_expanded.py). The others have the absorbed one: any mixture
of prefill, decode and continuations is one launch, in which a program finds its request by itself, and with few rows a
second one, which puts splits of keys together. Grids depend on numbers of tokens and requests alone, so that a step can
be captured in a CUDA graph.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple

import torch

from ratoon.attention.interface import AttentionBackend, AttentionNeeds, CommonAttentionMetadata, LayerCache
from ratoon.attention.triton_expanded import ExpandedSizes, Expansion, attend_expanded, find_expansion
from ratoon.attention.triton_plan import choose_store_tile, power_of_two
from ratoon.layers.attention import (
    AttentionLayer,
    CrossAttentionLayer,
    HeadTransform,
    LatentAttentionLayer,
    LatentProducts,
)
from ratoon.layers.gpu import num_multiprocessors

Tensor = torch.Tensor

LOG2_E = 1.4426950408889634
MAX_VALUE_DIM = 512  # with 64 rows, sums take half of the registers of a program
MAX_ROPE_DIM = 128
MERGED_PART = 64  # numbers of a value that a program puts together
_PROGRAMS_PER_SM = 2
_MAX_SPLITS = 64
_MAX_PARTS = 2**18  # rows × splits; half a GiB of scratch with values of 512


class LatentTiles(NamedTuple):
    """How latent_kernel is compiled: rows of a tile are `tokens` · `heads`."""

    tokens: int
    heads: int
    block_n: int  # keys
    num_warps: int
    num_stages: int


def choose_latent_tiles(num_heads: int, max_query_len: int, dtype: torch.dtype, batch_invariant: bool) -> LatentTiles:
    """Many rows read vectors fewer times; requests with few tokens would leave most of them empty. Results with the
    same bits in any batch need the same tiles for all requests."""
    heads = 1 << (num_heads - 1).bit_length()
    wanted = heads * (1 if batch_invariant else max_query_len)
    if dtype == torch.float32:
        rows, block_n, num_warps, num_stages = 16, 16, 8, 1
    elif wanted <= 16 or batch_invariant:
        rows, block_n, num_warps, num_stages = 16, 64, 8, 2
    elif wanted <= 32:
        rows, block_n, num_warps, num_stages = 32, 32, 8, 2
    else:
        rows, block_n, num_warps, num_stages = 64, 32, 8, 2
    heads = min(heads, rows)
    return LatentTiles(rows // heads, heads, block_n, num_warps, num_stages)


def choose_latent_splits(num_programs: int, num_rows: int, max_seq_len: int, block_n: int, num_sms: int) -> int:
    """So many that there is work for every multiprocessor."""
    wanted = min(_PROGRAMS_PER_SM * num_sms // num_programs, -(-max_seq_len // (2 * block_n)), _MAX_SPLITS)
    return max(1, min(wanted, _MAX_PARTS // max(num_rows, 1)))


@dataclass(slots=True)
class LatentMetadata:
    inputs: CommonAttentionMetadata
    num_requests: int
    expansions: dict[ExpandedSizes, Expansion | None] = field(default_factory=dict)

    def expansion(self, sizes: ExpandedSizes) -> Expansion | None:
        """The requests that have the expanded form, for layers of these sizes: all layers of a model."""
        if sizes not in self.expansions:
            self.expansions[sizes] = find_expansion(self.inputs, sizes)
        return self.expansions[sizes]


class TritonLatentBackend(AttentionBackend):
    """`batch_invariant`: a row's result is the same to the bit in any batch and any chunk. `num_splits` is for tests,
    instead of what is chosen here."""

    name = "triton"
    has_sinks = True
    supports_graphs = True

    def __init__(self, batch_invariant: bool = False, num_splits: int | None = None) -> None:
        from ratoon.attention.triton_launch import Scratch  # triton may be absent, see `reasons_against`

        self._batch_invariant = batch_invariant
        self._num_splits = 1 if batch_invariant else num_splits
        self._scratch = Scratch()

    @classmethod
    def reasons_against(cls, needs: AttentionNeeds) -> list[str]:
        """Returns the reasons that latent attention adds; what holds for all layers is checked by the other backend of
        this name."""
        reasons, value_dim = [], needs.value_dim or needs.head_dim
        if value_dim > MAX_VALUE_DIM:
            reasons.append(f"values of latent vectors must have at most {MAX_VALUE_DIM} numbers, not {value_dim}")
        if not 0 < needs.head_dim - value_dim <= MAX_ROPE_DIM:
            found = f"not {needs.head_dim - value_dim}"
            reasons.append(f"latent vectors must have 1 to {MAX_ROPE_DIM} numbers in front of values, {found}")
        if not needs.causal or needs.window is not None or needs.has_bias or needs.has_soft_cap:
            reasons.append("latent attention can't have a window, a bias or a soft cap")
        if needs.sees_ahead:
            reasons.append("rows of latent attention can't see those behind them")
        return reasons

    def build_metadata(self, inputs: CommonAttentionMetadata) -> LatentMetadata:
        return LatentMetadata(inputs, inputs.seq_lens_device.shape[0])

    def store(
        self,
        layer: AttentionLayer | CrossAttentionLayer,
        k: Tensor,
        v: Tensor,
        kv_cache: LayerCache,
        metadata: LatentMetadata,
    ) -> None:
        self._store(layer, k, k, kv_cache, metadata, None)

    def forward(
        self,
        layer: AttentionLayer,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        kv_cache: LayerCache,
        metadata: LatentMetadata,
        transform: HeadTransform | None = None,
    ) -> Tensor:
        self._store(layer, q, k, kv_cache, metadata, transform)
        return self.attend(layer, q, kv_cache, metadata)

    def forward_rows(
        self,
        layer: AttentionLayer,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        kv_cache: LayerCache,
        metadata: LatentMetadata,
        transform: HeadTransform | None,
        rows: Tensor,
        metadata_of_rows: LatentMetadata,
    ) -> Tensor:
        self._store(layer, q, k, kv_cache, metadata, transform)
        if not rows.shape[0]:
            return q.new_empty(0, layer.num_heads * layer.value_dim)
        return self.attend(layer, q[rows], kv_cache, metadata_of_rows)

    def attend(
        self,
        layer: AttentionLayer | CrossAttentionLayer,
        q: Tensor,
        kv_cache: LayerCache,
        metadata: LatentMetadata,
    ) -> Tensor:
        rope = layer.head_dim - layer.value_dim
        return self._attend_in_parts(layer, q[..., :rope], q[..., rope:], kv_cache, metadata)

    def forward_latent(
        self,
        layer: LatentAttentionLayer,
        queries: Tensor,
        k: Tensor,
        kv_cache: LayerCache,
        metadata: LatentMetadata,
        transform: HeadTransform | None,
        products: LatentProducts,
    ) -> Tensor:
        self._store(layer, queries, k, kv_cache, metadata, transform)
        sizes = None if self._batch_invariant else ExpandedSizes.of(layer, products)
        expansion = None if sizes is None else metadata.expansion(sizes)
        if sizes is None or expansion is None:
            return self._attend_absorbed(layer, queries, kv_cache, metadata, products)
        out, others = queries.new_empty(queries.shape[0], sizes.heads * sizes.value), expansion.others
        if others is not None:
            alone = self.build_metadata(others.inputs)
            found = self._attend_absorbed(layer, queries[others.rows], kv_cache, alone, products)
            out.index_copy_(0, others.rows, found)
        (pages,), block_size = kv_cache, metadata.inputs.block_size
        attend_expanded(layer, queries, pages, block_size, expansion, sizes, products, out)
        return out

    def forward_latent_rows(
        self,
        layer: LatentAttentionLayer,
        queries: Tensor,
        k: Tensor,
        kv_cache: LayerCache,
        metadata: LatentMetadata,
        transform: HeadTransform | None,
        products: LatentProducts,
        rows: Tensor,
        metadata_of_rows: LatentMetadata,
    ) -> Tensor:
        self._store(layer, queries, k, kv_cache, metadata, transform)
        if not rows.shape[0]:
            return products.values_of(queries.new_empty(0, layer.num_heads * layer.value_dim), layer.num_heads)
        return self._attend_absorbed(layer, queries[rows], kv_cache, metadata_of_rows, products)

    def _attend_absorbed(
        self,
        layer: LatentAttentionLayer,
        queries: Tensor,
        kv_cache: LayerCache,
        metadata: LatentMetadata,
        products: LatentProducts,
    ) -> Tensor:
        """Rotated queries [T, heads, rope + nope] → [T, heads · size of a value]. Their rotated numbers stay where they
        are, and the kernel reads the product with the others from another place."""
        weight, rope = products.absorb.weight, layer.rope_dim
        if weight is None:
            q_value = products.absorb(queries)[..., rope:]
        else:
            q_value = queries.new_empty(queries.shape[0], layer.num_heads, layer.value_dim)
            torch.bmm(queries[..., rope:].transpose(0, 1), weight, out=q_value.transpose(0, 1))
        found = self._attend_in_parts(layer, queries[..., :rope], q_value, kv_cache, metadata)
        return products.values_of(found, layer.num_heads)

    def _attend_in_parts(
        self,
        layer: AttentionLayer | CrossAttentionLayer,
        q_rope: Tensor,
        q_value: Tensor,
        kv_cache: LayerCache,
        metadata: LatentMetadata,
    ) -> Tensor:
        """Attends with queries in two parts, [T, heads, rope] and [T, heads, value]: → [T, heads · value]."""
        from ratoon.attention.triton_latent_kernels import latent_kernel, merge_kernel
        from ratoon.layers.triton.launch import launch

        (pages,), inputs, num_tokens = kv_cache, metadata.inputs, q_value.shape[0]
        value, table = layer.value_dim, inputs.block_table_device
        out = torch.empty(num_tokens, layer.num_heads * value, dtype=q_value.dtype, device=q_value.device)
        tiles = choose_latent_tiles(layer.num_heads, inputs.max_query_len, q_value.dtype, self._batch_invariant)
        grid = num_tokens // tiles.tokens + metadata.num_requests, -(-layer.num_heads // tiles.heads)
        num_rows, num_splits = num_tokens * layer.num_heads, self._num_splits
        if num_splits is None:
            num_sms = num_multiprocessors(q_value.device)
            num_splits = choose_latent_splits(grid[0] * grid[1], num_rows, inputs.max_seq_len, tiles.block_n, num_sms)
        acc, peaks, totals = out, out, out  # not used
        sinks, has_sinks = (out, False) if layer.sinks is None else (layer.sinks, True)
        if num_splits > 1:
            acc, peaks, totals, _ = self._scratch.take(num_rows * num_splits, value, q_value.device)
        launch(
            latent_kernel, (*grid, num_splits),
            q_rope, q_value, pages, table, inputs.query_start_loc_device, inputs.seq_lens_device, out, acc, peaks,
            totals, sinks, layer.scale * LOG2_E, metadata.num_requests, num_splits, q_rope.stride(0), q_rope.stride(1),
            q_value.stride(0), q_value.stride(1), pages.stride(0), table.stride(0), HEADS=layer.num_heads,
            ROPE=layer.head_dim - value, VALUE=value, ROPE_PAD=power_of_two(layer.head_dim - value),
            VALUE_PAD=power_of_two(value), BLOCK_SIZE=inputs.block_size, TILE_HEADS=tiles.heads, TOKENS=tiles.tokens,
            BLOCK_N=tiles.block_n, SPLIT=num_splits > 1, PRECISION="ieee" if q_value.dtype == torch.float32 else "tf32",
            HAS_SINKS=has_sinks, num_warps=tiles.num_warps, num_stages=tiles.num_stages,
        )  # fmt: skip
        if num_splits > 1:
            launch(
                merge_kernel, (num_rows, -(-value // MERGED_PART)), acc, peaks, totals, out, sinks, num_splits,
                HEADS=layer.num_heads, VALUE=value, PART=MERGED_PART, SPLITS_PAD=power_of_two(num_splits),
                HAS_SINKS=has_sinks, num_warps=4,
            )  # fmt: skip
        return out

    def _store(
        self,
        layer: AttentionLayer | CrossAttentionLayer,
        q: Tensor,
        k: Tensor,
        kv_cache: LayerCache,
        metadata: LatentMetadata,
        transform: HeadTransform | None,
    ) -> None:
        """Rotates the first numbers of the heads of q in place, and of vectors on their way to the pages."""
        from ratoon.attention.triton_launch import HeadArguments
        from ratoon.attention.triton_store import store_kernel
        from ratoon.layers.triton.launch import launch

        (pages,), inputs, num_tokens = kv_cache, metadata.inputs, k.shape[0]
        if not num_tokens:
            return
        head = HeadArguments.of(transform, layer.head_dim, q, inputs.slot_mapping)
        half = head.constants["HALF"]
        q_heads = layer.num_heads if head.constants["HAS_ROTARY"] else 0
        tokens, heads = choose_store_tile(num_tokens)
        num_blocks = -(-q_heads // heads) + 1  # vectors, and no values behind them
        launch(
            store_kernel, (-(-num_tokens // tokens), num_blocks),
            q, k, k, pages, inputs.slot_mapping, *head.tensors, *head.numbers, num_tokens, q.stride(0), k.stride(0),
            k.stride(0), q.stride(1), k.stride(1), k.stride(1), pages.stride(0), Q_HEADS=q_heads, KV_HEADS=1,
            Q_DIM=layer.head_dim - layer.value_dim, HEAD_DIM=layer.head_dim, BLOCK_SIZE=inputs.block_size,
            HALF_PAD=power_of_two(half), REST_PAD=power_of_two(max(1, layer.head_dim - 2 * half)), TOKENS=tokens,
            HEADS=heads, EXACT=False, num_warps=4, DEPENDENT=False, **head.constants,
        )  # fmt: skip
