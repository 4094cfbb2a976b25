"""The CPU backend: float32, by the kernel in layers/native/attention.c, on all threads of the pool. Keys and values may
be kept in fewer bits.

A block holds the keys of each head transposed, [head_dim][block_size], and the values as they are: both can be
multiplied without packing. Requests whose tables share a prefix are found once a step.
"""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass

import numpy as np
import torch

from ratoon.attention.interface import AttentionBackend, AttentionNeeds, CommonAttentionMetadata, LayerCache
from ratoon.attention.shared_prefix import shared_prefixes
from ratoon.core.kv import AttentionSpec, KVCacheSpec
from ratoon.layers.attention import AttentionLayer, CrossAttentionLayer, HeadTransform
from ratoon.layers.native import has_bf16_matrices, library, reason_for_none
from ratoon.layers.native.recording import new_bytes, new_floats

_KINDS = {torch.float32: 0, torch.float16: 1, torch.int8: 2}  # of keys and values, as the kernels number them
_TILE = 16  # columns that the kernel computes together
_MAX_HEAD_DIM = 256
_MAX_GROUP = 32  # query heads for one KV head
_MAX_LATENT = 640  # numbers of a vector (kv_cache.h)
_MOST_LATENT_ROWS = 64  # heads that are computed together (kernels.h)


@dataclass(slots=True)
class CpuMetadata:
    """Pointers into the step's arrays, and the arrays themselves so that they stay alive."""

    slots: int
    num_tokens: int
    block_table: int
    table_width: int
    query_start: int
    seq_lens: int
    shared: int
    num_requests: int
    block_size: int
    visible_ends: int | None
    alive: tuple[torch.Tensor | np.ndarray | None, ...]
    shared_array: np.ndarray
    inputs: CommonAttentionMetadata

    @property
    def places(self) -> tuple[int, ...]:
        """The addresses and sizes of the arrays that belong to the step's inputs."""
        return self.slots, self.num_tokens, self.block_table, self.table_width, self.query_start, self.seq_lens


class CpuAttentionBackend(AttentionBackend):
    name = "cpu"
    sees_ahead = True
    caps_scores = True
    has_sinks = True
    supports_recording = True

    def __init__(self) -> None:
        kernels = library()
        assert kernels is not None, "check `reasons_against` first"
        self._kernels = kernels

    @classmethod
    def reasons_against(cls, needs: AttentionNeeds) -> list[str]:
        reasons = []
        if needs.device_type != "cpu":
            reasons.append(f"runs on the CPU, not on {needs.device_type}")
        if needs.dtype != torch.float32:
            reasons.append(f"computes in float32, not in {needs.dtype}")
        if needs.kv_dtype not in (None, *_KINDS):
            reasons.append(f"keeps keys and values in float32, float16 or int8, not in {needs.kv_dtype}")
        if needs.block_size % _TILE:
            reasons.append(f"block_size must be a multiple of {_TILE}, not {needs.block_size}")
        if needs.is_latent:
            reasons += LatentCpuBackend.reasons_against_latent(needs)
        elif needs.head_dim % _TILE or needs.head_dim > _MAX_HEAD_DIM:
            reasons.append(f"head_dim must be a multiple of {_TILE} up to {_MAX_HEAD_DIM}, not {needs.head_dim}")
        if not needs.is_latent and needs.num_heads // needs.num_kv_heads > _MAX_GROUP:
            reasons.append(f"at most {_MAX_GROUP} query heads may share a KV head")
        if not needs.is_known_content:
            reasons.append(f"reads {AttentionSpec.content}, not {needs.content}")
        if library() is None:
            reasons.append(reason_for_none())
        return reasons

    @classmethod
    def create(cls, needs: AttentionNeeds) -> AttentionBackend:
        if needs.is_latent:
            return LatentCpuBackend()
        return RoundedCpuBackend() if RoundedCpuBackend.can_serve(needs) else cls()

    def page_shapes(self, spec: KVCacheSpec) -> list[tuple[int, ...]]:
        (parts, block_size, num_kv_heads, head_dim), *scales = super().page_shapes(spec)
        return [(parts, num_kv_heads, block_size * head_dim), *[(parts, num_kv_heads, block_size)] * len(scales)]

    def read_keys(
        self, layer: AttentionLayer | CrossAttentionLayer, kv_cache: LayerCache, blocks: torch.Tensor
    ) -> torch.Tensor:
        cache, *scales = kv_cache
        blocks = blocks.long()
        keys = cache[blocks, 0].float().unflatten(-1, (layer.head_dim, -1))  # [B, kv_heads, head_dim, block_size]
        if scales:
            keys *= scales[0][blocks, 0][:, :, None]  # [B, kv_heads, 1, block_size]
        return keys.permute(1, 0, 3, 2).flatten(1, 2)

    def build_metadata(self, inputs: CommonAttentionMetadata) -> CpuMetadata:
        table = inputs.block_table
        assert table.dtype == inputs.query_start_loc.dtype == inputs.seq_lens.dtype == np.int32
        shared, ends = shared_prefixes(table, inputs.seq_lens, inputs.block_size), inputs.visible_ends_device
        return CpuMetadata(
            slots=inputs.slot_mapping.data_ptr(),
            num_tokens=inputs.slot_mapping.shape[0],
            block_table=table.ctypes.data,
            table_width=table.strides[0] // table.itemsize,
            query_start=inputs.query_start_loc.ctypes.data,
            seq_lens=inputs.seq_lens.ctypes.data,
            shared=shared.ctypes.data,
            num_requests=len(inputs.seq_lens),
            block_size=inputs.block_size,
            visible_ends=None if ends is None else ends.data_ptr(),
            alive=(inputs.slot_mapping, table, inputs.query_start_loc, inputs.seq_lens, ends),
            shared_array=shared,
            inputs=inputs,
        )

    def update_metadata(self, metadata: CpuMetadata, inputs: CommonAttentionMetadata) -> bool:
        if inputs is metadata.inputs:  # the same arrays with other numbers
            if metadata.num_requests > 1:
                metadata.shared_array[:] = shared_prefixes(inputs.block_table, inputs.seq_lens, inputs.block_size)
            return True
        new = self.build_metadata(inputs)
        metadata.shared_array[:] = new.shared_array  # what is shared is the one array that is made for a step
        return new.places == metadata.places

    def store(
        self,
        layer: AttentionLayer | CrossAttentionLayer,
        k: torch.Tensor,
        v: torch.Tensor,
        kv_cache: LayerCache,
        metadata: CpuMetadata,
    ) -> None:
        self._kernels.ratoon_store_kv(
            k.data_ptr(), k.stride(0), v.data_ptr(), v.stride(0), *_memory(kv_cache), metadata.slots,
            metadata.num_tokens, layer.num_kv_heads, layer.head_dim, metadata.block_size,
        )  # fmt: skip

    def attend(
        self,
        layer: AttentionLayer | CrossAttentionLayer,
        q: torch.Tensor,
        kv_cache: LayerCache,
        metadata: CpuMetadata,
    ) -> torch.Tensor:
        width = layer.num_heads * layer.head_dim
        out = new_floats(q.shape[0], width)
        window, bias = layer.window or 0, layer.bias
        bias_data, reach = (None, 0) if bias is None else (bias.data_ptr(), bias.shape[1] // 2)
        failed = self._kernels.ratoon_attention(
            q.data_ptr(), q.stride(0), out.data_ptr(), width, *_memory(kv_cache),
            metadata.block_table, metadata.table_width, metadata.query_start, metadata.seq_lens, metadata.shared,
            metadata.num_requests, layer.num_heads, layer.num_kv_heads, layer.head_dim, metadata.block_size, window,
            layer.causal, metadata.visible_ends, bias_data, reach, layer.scale, layer.soft_cap or 0.0,
            None if layer.sinks is None else layer.sinks.data_ptr(),
        )  # fmt: skip
        if failed:
            raise MemoryError("the attention kernel ran out of memory")
        return out


class LatentCpuBackend(CpuAttentionBackend):
    """The CPU backend of latent attention (layers/native/latent.c): a block has its vectors in panels of 16 numbers."""

    @staticmethod
    def reasons_against_latent(needs: AttentionNeeds) -> list[str]:
        reasons, value_dim = [], needs.value_dim or needs.head_dim
        if needs.head_dim % _TILE or value_dim % _TILE or needs.head_dim > _MAX_LATENT:
            found = f"not {needs.head_dim} and {value_dim}"
            reasons.append(
                f"latent vectors and their values must be multiples of {_TILE} up to {_MAX_LATENT} long, {found}"
            )
        if not needs.causal or needs.window is not None or needs.has_bias or needs.has_soft_cap:
            reasons.append("latent attention can't have a window, a bias or a soft cap")
        return reasons

    def page_shapes(self, spec: KVCacheSpec) -> list[tuple[int, ...]]:
        return [(math.prod(tensor.shape),) for tensor in spec.tensors]

    def store(
        self,
        layer: AttentionLayer | CrossAttentionLayer,
        k: torch.Tensor,
        v: torch.Tensor,
        kv_cache: LayerCache,
        metadata: CpuMetadata,
    ) -> None:
        self._kernels.ratoon_store_latent(
            k.data_ptr(), k.stride(0), *_memory(kv_cache), metadata.slots, metadata.num_tokens, layer.head_dim,
            metadata.block_size,
        )  # fmt: skip

    def attend(
        self,
        layer: AttentionLayer | CrossAttentionLayer,
        q: torch.Tensor,
        kv_cache: LayerCache,
        metadata: CpuMetadata,
    ) -> torch.Tensor:
        width = layer.num_heads * layer.value_dim
        out = new_floats(q.shape[0], width)
        failed = self._kernels.ratoon_latent_attention(
            q.data_ptr(), q.stride(0), out.data_ptr(), width, *_memory(kv_cache),
            metadata.block_table, metadata.table_width, metadata.query_start, metadata.seq_lens, metadata.shared,
            metadata.num_requests, layer.num_heads, _groups_of_heads(layer.num_heads), layer.head_dim,
            layer.value_dim, metadata.block_size, metadata.visible_ends, layer.scale,
            None if layer.sinks is None else layer.sinks.data_ptr(),
        )  # fmt: skip
        if failed:
            raise MemoryError("the attention kernel ran out of memory")
        return out


@functools.cache
def _groups_of_heads(num_heads: int) -> int:
    """The fewest equal groups that are computed together."""
    return next(
        count for count in range(1, num_heads + 1) if num_heads % count == 0 and num_heads <= count * _MOST_LATENT_ROWS
    )


class RoundedCpuBackend(CpuAttentionBackend):
    """An encoder's attention to its own input by the matrix unit of x86, in bf16 (layers/native/attention_bf16.c). It
    reads keys and values where the layer has them: nothing is stored."""

    name = "cpu, rounding to bf16"

    @staticmethod
    def can_serve(needs: AttentionNeeds) -> bool:
        is_other = needs.causal or needs.has_bias or needs.has_soft_cap or needs.has_sinks or needs.window is not None
        plain = not is_other and needs.num_heads == needs.num_kv_heads
        return needs.may_round and plain and has_bf16_matrices(needs.head_dim)

    def forward(
        self,
        layer: AttentionLayer,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        kv_cache: LayerCache,
        metadata: CpuMetadata,
        transform: HeadTransform | None = None,
    ) -> torch.Tensor:
        if transform is not None:
            transform.apply(q, k)
        rows, requests, heads = q.shape[0], metadata.num_requests, layer.num_heads
        out = new_floats(rows, heads * layer.head_dim)
        size = self._kernels.ratoon_attention_bf16_scratch(rows, requests, heads, layer.head_dim)
        scratch = new_bytes(size)
        self._kernels.ratoon_attention_bf16(
            q.data_ptr(), q.stride(0), k.data_ptr(), k.stride(0), v.data_ptr(), v.stride(0), out.data_ptr(),
            out.stride(0), metadata.query_start, requests, heads, layer.scale, scratch.data_ptr(),
        )  # fmt: skip
        return out


def _memory(kv_cache: LayerCache) -> tuple[int, int, int, int | None, int]:
    """Describes a layer's cache to the kernels: what keys and values are kept as; the address of the first block and
    the bytes to the next, of them and of their scales."""
    cache, *rest = kv_cache
    scales = rest[0] if rest else None
    return (
        _KINDS[cache.dtype],
        cache.data_ptr(),
        cache.stride(0) * cache.itemsize,
        None if scales is None else scales.data_ptr(),
        0 if scales is None else scales.stride(0) * scales.itemsize,
    )
