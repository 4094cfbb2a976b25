"""The StepContext that layers use in a forward pass: attention wired to backends, metadata and caches."""

from __future__ import annotations

from typing import Any

import torch

from ratoon.attention.interface import AttentionBackend, LayerCache
from ratoon.execution.inputs.step_inputs import ReadRows
from ratoon.execution.kv.kv_tensors import KVTensors, LayerCaches
from ratoon.execution.passes.cross_weights import CrossWeightRows
from ratoon.layers.adapters import AdapterRows
from ratoon.layers.attention import (
    AttentionLayer,
    CrossAttentionLayer,
    HeadTransform,
    LatentAttentionLayer,
    LatentProducts,
    StateSpaceLayer,
)

Tensor = torch.Tensor


class PagedStep:
    """One forward pass of a decoder over the paged cache. `metadata`: of each KV group; `cross`: of its
    cross-attention. `read`: the rows that are read, where the last layer attends with these only.
    `weights`: gets queries of cross-attention, where ends read its weights."""

    __slots__ = ("_cross", "_kv", "_metadata", "_read", "_rows", "_weights", "adapters")

    def __init__(
        self,
        kv: LayerCaches,
        metadata: list[Any],
        cross: Any = None,
        read: ReadRows | None = None,
        rows: Tensor | None = None,
        adapters: AdapterRows | None = None,
        weights: CrossWeightRows | None = None,
    ) -> None:
        self.adapters = adapters
        self._kv = kv
        self._metadata = metadata
        self._cross = cross
        self._weights = weights
        self._read = read
        self._rows = rows  # those of `read`, in the pass of the last layer

    def attend(self, layer: AttentionLayer, q: Tensor, k: Tensor, v: Tensor, transform: HeadTransform | None) -> Tensor:
        index, kv = layer.index, self._kv
        group = kv.group_of_layer[index]
        backend, cache, metadata = kv.backends[group], kv.of_layer[index], self._metadata[group]
        if self._read is None or self._rows is None:
            return backend.forward(layer, q, k, v, cache, metadata, transform)
        alone = self._metadata_of_rows(backend, group, self._read, self._rows)
        return backend.forward_rows(layer, q, k, v, cache, metadata, transform, self._rows, alone)

    def attend_latent(
        self,
        layer: LatentAttentionLayer,
        queries: Tensor,
        k: Tensor,
        transform: HeadTransform | None,
        products: LatentProducts,
    ) -> Tensor:
        index, kv = layer.index, self._kv
        group = kv.group_of_layer[index]
        backend, cache, metadata = kv.backends[group], kv.of_layer[index], self._metadata[group]
        if self._read is None or self._rows is None:
            return backend.forward_latent(layer, queries, k, cache, metadata, transform, products)
        alone = self._metadata_of_rows(backend, group, self._read, self._rows)
        return backend.forward_latent_rows(layer, queries, k, cache, metadata, transform, products, self._rows, alone)

    @staticmethod
    def _metadata_of_rows(backend: AttentionBackend, group: int, read: ReadRows, rows: Tensor) -> Any:
        """Made in the pass of the last layer, when those before are launched: a device is busy with them meanwhile."""
        return backend.build_metadata(read.as_requests(group, rows)) if read.rows else None

    def scan(self, layer: StateSpaceLayer, projected: Tensor) -> Tensor:
        index, kv = layer.index, self._kv
        group = kv.group_of_layer[index]
        found = kv.backends[group].scan(layer, projected, kv.of_layer[index], self._metadata[group])
        return found if self._rows is None else found[self._rows]

    def reading(self, rows: Tensor) -> PagedStep | None:
        if self._read is None:
            return None
        return PagedStep(self._kv, self._metadata, self._cross, self._read, rows, self.adapters, self._weights)

    def attend_across(self, layer: CrossAttentionLayer, q: Tensor) -> Tensor:
        backend, cache = self._kv.cross_backend, self._kv.of_cross_layer[layer.index]
        if self._weights is not None:
            self._weights.observe(layer, q, backend, cache)
        return backend.attend(layer, q, cache, self._cross)

    def store_across(self, layer: CrossAttentionLayer, k: Tensor, v: Tensor) -> None:
        raise RuntimeError("only an encoder's pass stores what cross-attention reads")


class EncoderPass:
    """One pass of an encoder: self-attention uses a scratch cache; keys and values for cross-attention go to the paged
    one."""

    __slots__ = ("_backend", "_kv", "_metadata", "_scratch", "_stored", "adapters")

    def __init__(
        self,
        backend: AttentionBackend,
        kv: KVTensors,
        scratch: LayerCache,
        metadata: Any,
        stored: Any,
        adapters: AdapterRows | None = None,
    ) -> None:
        self.adapters = adapters
        self._backend = backend
        self._kv = kv
        self._scratch = scratch
        self._metadata = metadata
        self._stored = stored  # metadata with the slots of the cross tables

    def attend(self, layer: AttentionLayer, q: Tensor, k: Tensor, v: Tensor, transform: HeadTransform | None) -> Tensor:
        return self._backend.forward(layer, q, k, v, self._scratch, self._metadata, transform)

    def attend_latent(
        self,
        layer: LatentAttentionLayer,
        queries: Tensor,
        k: Tensor,
        transform: HeadTransform | None,
        products: LatentProducts,
    ) -> Tensor:
        raise RuntimeError("an encoder has no latent vectors")

    def scan(self, layer: StateSpaceLayer, projected: Tensor) -> Tensor:
        raise RuntimeError("an encoder has no states")

    def reading(self, rows: Tensor) -> None:
        """An encoder's rows are all read."""

    def attend_across(self, layer: CrossAttentionLayer, q: Tensor) -> Tensor:
        raise RuntimeError("an encoder attends to nothing but its own input")

    def store_across(self, layer: CrossAttentionLayer, k: Tensor, v: Tensor) -> None:
        self._kv.cross_backend.store(layer, k, v, self._kv.of_cross_layer[layer.index], self._stored)
