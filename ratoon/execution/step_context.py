"""What the layers see of a pass: `attend` and its kin, wired to the backend, the metadata and the caches."""

from __future__ import annotations

from typing import Any

import torch

from ratoon.attention.interface import AttentionBackend
from ratoon.execution.kv_tensors import KVTensors
from ratoon.layers.attention import AttentionLayer, CrossAttentionLayer

Tensor = torch.Tensor


class PagedStep:
    """One forward pass of a decoder over the paged cache. `cross`: metadata of what its cross-attention reads."""

    __slots__ = ("_backend", "_caches", "_cross", "_cross_caches", "_metadata_of_layer")

    def __init__(self, backend: AttentionBackend, kv: KVTensors, metadata: list[Any], cross: Any = None) -> None:
        self._backend = backend
        self._caches = kv.of_layer
        self._cross_caches = kv.of_cross_layer
        self._cross = cross
        self._metadata_of_layer = {layer: metadata[group] for layer, group in kv.group_of_layer.items()}

    def attend(self, layer: AttentionLayer, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        index = layer.index
        return self._backend.forward(layer, q, k, v, self._caches[index], self._metadata_of_layer[index])

    def attend_across(self, layer: CrossAttentionLayer, q: Tensor) -> Tensor:
        return self._backend.attend(layer, q, self._cross_caches[layer.index], self._cross)

    def store_across(self, layer: CrossAttentionLayer, k: Tensor, v: Tensor) -> None:
        raise RuntimeError("only an encoder's pass stores what cross-attention reads")


class EncoderPass:
    """One pass of an encoder: its own attention goes through a scratch cache, and what it leaves to the paged one."""

    __slots__ = ("_backend", "_cross_caches", "_metadata", "_scratch", "_stored")

    def __init__(self, backend: AttentionBackend, kv: KVTensors, scratch: Tensor, metadata: Any, stored: Any) -> None:
        self._backend = backend
        self._cross_caches = kv.of_cross_layer
        self._scratch = scratch
        self._metadata = metadata
        self._stored = stored  # metadata with the slots of the cross tables

    def attend(self, layer: AttentionLayer, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return self._backend.forward(layer, q, k, v, self._scratch, self._metadata)

    def attend_across(self, layer: CrossAttentionLayer, q: Tensor) -> Tensor:
        raise RuntimeError("an encoder attends to nothing but its own input")

    def store_across(self, layer: CrossAttentionLayer, k: Tensor, v: Tensor) -> None:
        self._backend.store(layer, k, v, self._cross_caches[layer.index], self._stored)
