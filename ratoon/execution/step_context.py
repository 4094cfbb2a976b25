"""What the layers see of a step: `attend`, wired to the backend, the group's metadata and the layer's cache."""

from __future__ import annotations

from typing import Any

import torch

from ratoon.attention.interface import AttentionBackend
from ratoon.execution.kv_tensors import KVTensors
from ratoon.layers.attention import AttentionLayer


class PagedStep:
    """One forward pass over the paged cache."""

    __slots__ = ("_caches", "_forward", "_metadata_of_layer")

    def __init__(self, backend: AttentionBackend, kv: KVTensors, metadata: list[Any]) -> None:
        self._forward = backend.forward
        self._caches = kv.of_layer
        self._metadata_of_layer = {layer: metadata[group] for layer, group in kv.group_of_layer.items()}

    def attend(self, layer: AttentionLayer, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        index = layer.index
        return self._forward(layer, q, k, v, self._caches[index], self._metadata_of_layer[index])
