"""Attention by torch's scaled_dot_product_attention, one request after another."""

from __future__ import annotations

from typing import Any

import torch
from torch.nn.functional import scaled_dot_product_attention

from ratoon.attention.interface import AttentionBackend, AttentionNeeds, CommonAttentionMetadata, LayerCache
from ratoon.core.kv import AttentionSpec


class SdpaBackend(AttentionBackend):
    name = "example_sdpa"

    @classmethod
    def reasons_against(cls, needs: AttentionNeeds) -> list[str]:
        reasons = []
        if needs.content != AttentionSpec.content:
            reasons.append(f"reads {AttentionSpec.content}, not {needs.content}")
        if needs.window is not None or needs.has_bias or needs.batch_invariant:
            reasons.append("has neither windows nor biases, and sums depend on the batch")
        if needs.kv_dtype is not None:
            reasons.append(f"keeps keys and values in {needs.dtype}, not in {needs.kv_dtype}")
        return reasons

    def build_metadata(self, inputs: CommonAttentionMetadata) -> CommonAttentionMetadata:
        return inputs

    def store(
        self, layer: Any, k: torch.Tensor, v: torch.Tensor, kv_cache: LayerCache, metadata: CommonAttentionMetadata
    ) -> None:
        (cache,) = kv_cache  # [blocks, 2, block_size, kv_heads, head_dim]
        blocks, offsets = metadata.slot_mapping // metadata.block_size, metadata.slot_mapping % metadata.block_size
        cache[blocks, 0, offsets] = k
        cache[blocks, 1, offsets] = v

    def attend(
        self, layer: Any, q: torch.Tensor, kv_cache: LayerCache, metadata: CommonAttentionMetadata
    ) -> torch.Tensor:
        (cache,) = kv_cache
        attended = torch.empty_like(q)  # [T, heads, head_dim]
        starts = metadata.query_start_loc.tolist()
        for row, num_keys in enumerate(metadata.seq_lens.tolist()):
            queries = q[starts[row] : starts[row + 1]].transpose(0, 1)  # [heads, Q, head_dim]
            table = metadata.block_table_device[row, : -(-num_keys // metadata.block_size)].long()
            k, v = cache[table].transpose(0, 1).flatten(1, 2)[:, :num_keys].transpose(1, 2)  # [kv_heads, S, head_dim]
            num_queries = queries.shape[1]
            mask = torch.ones(num_queries, num_keys, dtype=torch.bool, device=q.device)
            if layer.causal:
                mask = mask.tril(num_keys - num_queries)
            found = scaled_dot_product_attention(queries, k, v, mask, scale=layer.scale, enable_gqa=True)
            attended[starts[row] : starts[row + 1]] = found.transpose(0, 1)
        return attended.flatten(1)
