"""The reference backend: plain torch, one request after another, any device and dtype. Slow. Every other backend is
tested against it.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from ratoon.attention.interface import AttentionBackend, AttentionNeeds, CommonAttentionMetadata, LayerCache
from ratoon.core.kv import AttentionSpec
from ratoon.layers.attention import AttentionLayer, CrossAttentionLayer

FP8 = torch.float8_e4m3fn
_FP8_MAX = torch.finfo(FP8).max
_KEPT_ON_CPU = (torch.float16, torch.int8)


def to_fp8(x: torch.Tensor) -> torch.Tensor:
    """Larger numbers become the largest: the format has no infinity."""
    return x.clamp(-_FP8_MAX, _FP8_MAX).to(FP8)


def to_int8(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """[T, heads, head_dim] → codes of -127…127, and the scale of each head [T, heads] in float32."""
    largest = x.float().abs().amax(-1)
    codes = (x.float() * (127.0 / largest)[..., None]).round()
    return codes.nan_to_num().clamp(-127, 127).to(torch.int8), largest / 127.0


@dataclass(slots=True)
class ReferenceMetadata:
    inputs: CommonAttentionMetadata
    starts: list[int]  # query_start_loc
    seq_lens: list[int]


class TorchReferenceBackend(AttentionBackend):
    name = "torch"
    sees_ahead = True
    caps_scores = True
    has_sinks = True

    @classmethod
    def reasons_against(cls, needs: AttentionNeeds) -> list[str]:
        reasons = [] if needs.is_known_content else [f"reads {AttentionSpec.content}, not {needs.content}"]
        if needs.kv_dtype not in (None, FP8, *(_KEPT_ON_CPU if needs.device_type == "cpu" else ())):
            kept = f"{needs.dtype} or {FP8}, or on a CPU in float16 or int8"
            reasons.append(f"keeps keys and values in {kept}, not in {needs.kv_dtype}")
        if needs.batch_invariant:
            reasons.append("the order of its sums depends on the batch")
        return reasons

    @classmethod
    def create(cls, needs: AttentionNeeds) -> AttentionBackend:
        return LatentReferenceBackend() if needs.is_latent else cls()

    def build_metadata(self, inputs: CommonAttentionMetadata) -> ReferenceMetadata:
        return ReferenceMetadata(inputs, inputs.query_start_loc.tolist(), inputs.seq_lens.tolist())

    def store(
        self,
        layer: AttentionLayer | CrossAttentionLayer,
        k: torch.Tensor,
        v: torch.Tensor,
        kv_cache: LayerCache,
        metadata: ReferenceMetadata,
    ) -> None:
        cache, *scales = kv_cache  # [blocks, 2, block_size, kv_heads, head_dim]
        inputs = metadata.inputs
        blocks, offsets = inputs.slot_mapping // inputs.block_size, inputs.slot_mapping % inputs.block_size
        for part, numbers in enumerate((k, v)):  # [T, kv_heads, head_dim]
            if cache.dtype == torch.int8:
                numbers, scales[0][blocks, part, offsets] = to_int8(numbers)
            cache[blocks, part, offsets] = to_fp8(numbers) if cache.dtype == FP8 else numbers.to(cache.dtype)

    def attend(
        self,
        layer: AttentionLayer | CrossAttentionLayer,
        q: torch.Tensor,
        kv_cache: LayerCache,
        metadata: ReferenceMetadata,
    ) -> torch.Tensor:
        inputs = metadata.inputs
        out = q.new_empty(q.shape[0], layer.num_heads, layer.value_dim)
        for row, seq_len in enumerate(metadata.seq_lens):
            start, end = metadata.starts[row], metadata.starts[row + 1]
            num_blocks = -(-seq_len // inputs.block_size)
            table = inputs.block_table_device[row, :num_blocks].long()
            keys, values = self._read(layer, kv_cache, table, q.dtype)
            # Blocks before the window may be another sequence's by now: a NaN in them times a weight of zero is NaN.
            first = 0 if layer.window is None else max(0, seq_len - (end - start) - layer.window + 1)
            ends = inputs.visible_ends_device
            last_keys = None if ends is None else ends[start:end] - first
            out[start:end] = _attend(layer, q[start:end], keys[first:seq_len], values[first:seq_len], last_keys)
        return out.flatten(1)

    def _read(
        self,
        layer: AttentionLayer | CrossAttentionLayer,
        kv_cache: LayerCache,
        table: torch.Tensor,
        dtype: torch.dtype,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Returns the keys [S, kv_heads, head_dim] and values [S, kv_heads, value_dim] of these blocks."""
        cache, *scales = kv_cache
        cached = cache[table].to(dtype)  # [blocks, 2, block_size, kv_heads, head_dim]
        if scales:
            cached *= scales[0][table][..., None]
        return cached[:, 0].flatten(0, 1), cached[:, 1].flatten(0, 1)


class LatentReferenceBackend(TorchReferenceBackend):
    """The reference backend of latent attention, whose pages are [block_size, width]."""

    def store(
        self,
        layer: AttentionLayer | CrossAttentionLayer,
        k: torch.Tensor,
        v: torch.Tensor,
        kv_cache: LayerCache,
        metadata: ReferenceMetadata,
    ) -> None:
        cache, *scales = kv_cache
        inputs, numbers = metadata.inputs, k
        blocks, offsets = inputs.slot_mapping // inputs.block_size, inputs.slot_mapping % inputs.block_size
        if cache.dtype == torch.int8:
            numbers, of_rows = to_int8(k)
            scales[0][blocks, offsets] = of_rows[:, 0]
        numbers = numbers[:, 0]  # [T, width]
        cache[blocks, offsets] = to_fp8(numbers) if cache.dtype == FP8 else numbers.to(cache.dtype)

    def _read(
        self,
        layer: AttentionLayer | CrossAttentionLayer,
        kv_cache: LayerCache,
        table: torch.Tensor,
        dtype: torch.dtype,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        cache, *scales = kv_cache
        cached = cache[table].to(dtype)  # [blocks, block_size, width]
        if scales:
            cached *= scales[0][table][..., None]
        keys = cached.flatten(0, 1)[:, None]
        return keys, keys[..., -layer.value_dim :]


def _attend(
    layer: AttentionLayer | CrossAttentionLayer,
    q: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    last_keys: torch.Tensor | None,
) -> torch.Tensor:
    """q [Q, heads, head_dim] are the last Q of the S positions of keys and values [S, kv_heads, head_dim], unless they
    belong to another sequence (cross-attention), which sees all keys. `last_keys` [Q]: up to which a causal layer's
    queries see; None: up to their own."""
    num_queries, num_keys, group = q.shape[0], keys.shape[0], layer.num_heads // layer.num_kv_heads
    key_positions = torch.arange(num_keys, device=q.device)
    query_positions = torch.arange(num_keys - num_queries, num_keys, device=q.device)[:, None]
    distances = key_positions - query_positions  # [Q, S]
    visible = torch.ones_like(distances, dtype=torch.bool)
    if layer.causal:
        visible = distances <= 0
        if last_keys is not None:
            visible |= key_positions <= last_keys[:, None]
    if layer.window is not None:
        visible &= distances > -layer.window
        if not layer.causal:
            visible &= distances < layer.window
    keys = keys.repeat_interleave(group, dim=1)
    values = values.repeat_interleave(group, dim=1)
    # Scores and weights in float32, as in transformers.
    scores = torch.einsum("qhd,khd->hqk", q, keys).float() * layer.scale
    if layer.soft_cap is not None:
        scores = torch.tanh(scores / layer.soft_cap) * layer.soft_cap
    if layer.bias is not None:
        scores += layer.bias[:, distances + layer.bias.shape[1] // 2]  # [heads, Q, S]
    scores = scores.masked_fill(~visible, float("-inf"))
    if layer.sinks is not None:
        sinks = layer.sinks.float()[:, None, None].expand(-1, num_queries, 1)
        scores = torch.cat((scores, sinks), -1)
    weights = scores.softmax(-1)[..., :num_keys].to(values.dtype)
    return torch.einsum("hqk,khd->qhd", weights, values)
