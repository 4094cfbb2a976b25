"""The three roles of a backend: its capabilities, the metadata of a step, and the forward pass of one layer.

A backend serves a KV group, or the attention of an encoder; a model may have several.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch

from ratoon.core.kv import AttentionSpec, KVCacheSpec, LatentSpec, StateSpec
from ratoon.layers.attention import (
    AttentionLayer,
    CrossAttentionLayer,
    HeadTransform,
    LatentAttentionLayer,
    LatentProducts,
    StateSpaceLayer,
)

# Tokens that a request of a padded step has at most, where it is neither a decode nor holds a prompt: backends may have
# a kernel of their own for such steps.
FEW_TOKENS = 8
LayerCache = tuple[torch.Tensor, ...]  # of one layer: the tensors that its spec names, each [blocks, …]


@dataclass(frozen=True, slots=True)
class AttentionNeeds:
    """What layers with one memory spec, on a device, require of a backend."""

    device_type: str
    dtype: torch.dtype
    block_size: int
    head_dim: int
    num_heads: int
    num_kv_heads: int
    window: int | None = None
    causal: bool = True
    has_bias: bool = False  # a bias by distance, added to scores
    has_soft_cap: bool = False  # scores approach a bound by tanh
    has_sinks: bool = False  # scores without a value are in each softmax
    content: str = AttentionSpec.content  # what is kept for a token
    kv_dtype: torch.dtype | None = None  # that it is kept in, where it is not `dtype`
    batch_invariant: bool = False  # a row's result has the same bits in any batch and any chunk
    # Of an encoder's attention to its own input: what is multiplied may be rounded to bf16.
    may_round: bool = False
    sees_ahead: bool = False  # some queries see keys behind their own position (`visible_ends`)
    value_dim: int | None = None  # of a head, where it is not `head_dim`

    @property
    def is_latent(self) -> bool:
        """Whether latent vectors are kept, in the place of keys and values."""
        return self.content == LatentSpec.content

    @property
    def is_known_content(self) -> bool:
        """Whether keys and values are kept, or latent vectors: what the backends here read."""
        return self.content in (AttentionSpec.content, LatentSpec.content)

    @classmethod
    def of(
        cls,
        layers: Sequence[AttentionLayer | CrossAttentionLayer | StateSpaceLayer],
        spec: KVCacheSpec,
        device: torch.device,
        dtype: torch.dtype,
        batch_invariant: bool = False,
        may_round: bool = False,
        sees_ahead: bool = False,
    ) -> AttentionNeeds:
        """The needs of layers that share this spec. They may differ in fields that the spec does not have."""
        first, kept = layers[0], getattr(torch, spec.tensors[0].dtype)
        return cls(
            device.type,
            dtype,
            spec.block_size,
            first.head_dim,
            max(layer.num_heads for layer in layers),
            first.num_kv_heads,
            next((layer.window for layer in layers if layer.window is not None), None),
            all(layer.causal for layer in layers),
            any(layer.bias is not None for layer in layers),
            any(layer.soft_cap is not None for layer in layers),
            any(layer.sinks is not None for layer in layers),
            spec.content,
            None if kept == dtype else kept,
            batch_invariant,
            may_round,
            sees_ahead,
            None if first.value_dim == first.head_dim else first.value_dim,
        )


class SharedPrefixes(NamedTuple):
    """On the device: the runs of requests of a step that share a prefix (shared_prefix.PrefixRuns)."""

    starts: torch.Tensor  # [runs + 1]
    firsts: torch.Tensor  # [runs]
    prefix_lens: torch.Tensor  # [runs]
    begins: torch.Tensor  # [R]


@dataclass(slots=True)
class CommonAttentionMetadata:
    """One KV group's view of a step. Host arrays and device tensors hold the same numbers."""

    query_start_loc: np.ndarray  # [R + 1]
    seq_lens: np.ndarray  # [R] after this step
    block_table: np.ndarray  # [R, max_blocks]
    query_start_loc_device: torch.Tensor
    seq_lens_device: torch.Tensor
    block_table_device: torch.Tensor
    # [S] on the device: block · block_size + offset; padding rows point into block 0. Only for rows that are stored:
    # those of the queries, or none for cross-attention.
    slot_mapping: torch.Tensor
    block_size: int
    max_query_len: int
    max_seq_len: int
    # Whether a graph of the step may be replayed for another one: then only the tensors on the device hold its numbers,
    # and the two lengths are upper bounds.
    is_padded: bool = False
    # Of a padded step: a backend that attends to prefixes together finds those of other steps by itself.
    shared_prefixes: SharedPrefixes | None = None
    # [T] int32: the last position that each query of a causal layer sees, within its sequence, never falling within a
    # request. Where that is before its own position, as for padding, it sees up to its own. None: all see up to their
    # own. Of a padded step only the device has it.
    visible_ends: np.ndarray | None = None
    visible_ends_device: torch.Tensor | None = None


class AttentionBackend(ABC):
    """Created once per KV group of an engine; holds no state of a step."""

    name: str
    # Whether `build_metadata` and `forward` may be captured in a CUDA graph: with padded inputs they use only the
    # device's tensors, which keep their addresses, and the two upper bounds; nothing waits for the device, and requests
    # with no query are skipped.
    supports_graphs: bool = False
    # Whether it reads `shared_prefixes` of padded inputs: rows of one token attend to a common prefix together.
    shares_prefixes: bool = False
    # Whether `forward` and `attend` may be recorded, for `update_metadata`.
    supports_recording: bool = False
    # Whether it reads `visible_ends`: queries that see keys behind their own position.
    sees_ahead: bool = False
    # Whether it reads `soft_cap` of layers.
    caps_scores: bool = False
    # Whether it reads `sinks` of layers.
    has_sinks: bool = False

    @classmethod
    @abstractmethod
    def reasons_against(cls, needs: AttentionNeeds) -> list[str]:
        """Why this backend can't serve these needs; empty when it can."""

    @classmethod
    def create(cls, needs: AttentionNeeds) -> AttentionBackend:
        return cls()

    def page_shapes(self, spec: KVCacheSpec) -> list[tuple[int, ...]]:
        """The shape of one block in each tensor of one layer. A block is one contiguous span, so that blocks can be
        copied, swapped and sent as bytes. The layout inside it is the backend's."""
        return [tensor.shape for tensor in spec.tensors]

    @abstractmethod
    def build_metadata(self, inputs: CommonAttentionMetadata) -> Any:
        """Called once per step and group; passed to every `forward` of its layers."""

    def update_metadata(self, metadata: Any, inputs: CommonAttentionMetadata) -> bool:
        """Bring metadata up to date that `build_metadata` made for an earlier step of the same shape, without moving
        what it points to. False: the inputs are in other places now."""
        raise NotImplementedError

    @abstractmethod
    def store(
        self,
        layer: AttentionLayer | CrossAttentionLayer,
        k: torch.Tensor,
        v: torch.Tensor,
        kv_cache: LayerCache,
        metadata: Any,
    ) -> None:
        """Write k [T, kv_heads, head_dim] and v [T, kv_heads, value_dim] at the step's slots. For latent attention v is
        a part of k."""

    @abstractmethod
    def attend(
        self, layer: AttentionLayer | CrossAttentionLayer, q: torch.Tensor, kv_cache: LayerCache, metadata: Any
    ) -> torch.Tensor:
        """q [T, heads, head_dim] → [T, heads · value_dim], over the keys and values of each row's own request: up to
        its own position, or all of them where the layer is not causal."""

    def read_keys(
        self, layer: AttentionLayer | CrossAttentionLayer, kv_cache: LayerCache, blocks: torch.Tensor
    ) -> torch.Tensor:
        """The keys that are stored in these blocks [B], as float32 [kv_heads, B · block_size, head_dim]. This is for
        blocks that lie as the spec says; a backend with another layout overrides it."""
        return _floats(kv_cache, blocks).permute(2, 0, 1, 3).flatten(1, 2)  # of [B, block_size, kv_heads, head_dim]

    def forward(
        self,
        layer: AttentionLayer,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        kv_cache: LayerCache,
        metadata: Any,
        transform: HeadTransform | None = None,
    ) -> torch.Tensor:
        """Transform, store, attend: self-attention. Shapes as in StepContext.attend. A backend that does some of it in
        one kernel overrides this."""
        if transform is not None:
            transform.apply(q, k)
        self.store(layer, k, v, kv_cache, metadata)
        return self.attend(layer, q, kv_cache, metadata)

    def scan(
        self, layer: StateSpaceLayer, projected: torch.Tensor, kv_cache: LayerCache, metadata: Any
    ) -> torch.Tensor:
        """Go on with states, as StepContext.scan says: only of a backend that keeps states."""
        raise NotImplementedError(f"{self.name} keeps no states")

    def forward_rows(
        self,
        layer: AttentionLayer,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        kv_cache: LayerCache,
        metadata: Any,
        transform: HeadTransform | None,
        rows: torch.Tensor,
        metadata_of_rows: Any,
    ) -> torch.Tensor:
        """Attends as `forward` of a causal layer does, but with these `rows` [R] only: → [R, heads · value_dim].
        `metadata_of_rows`: that of a step in which each of them is a request of one token."""
        if transform is not None:
            transform.apply(q, k)
        self.store(layer, k, v, kv_cache, metadata)
        if not rows.shape[0]:
            return q.new_empty(0, layer.num_heads * layer.value_dim)
        return self.attend(layer, q[rows], kv_cache, metadata_of_rows)

    def forward_latent(
        self,
        layer: LatentAttentionLayer,
        queries: torch.Tensor,
        k: torch.Tensor,
        kv_cache: LayerCache,
        metadata: Any,
        transform: HeadTransform | None,
        products: LatentProducts,
    ) -> torch.Tensor:
        """Transforms, stores and attends. Shapes as in StepContext.attend_latent. This is the absorbed form; a backend
        that has another one, where it is cheaper, overrides this."""
        values = k[..., layer.rope_dim :]
        found = self.forward(layer, products.absorb(queries), k, values, kv_cache, metadata, transform)
        return products.values_of(found, layer.num_heads)

    def forward_latent_rows(
        self,
        layer: LatentAttentionLayer,
        queries: torch.Tensor,
        k: torch.Tensor,
        kv_cache: LayerCache,
        metadata: Any,
        transform: HeadTransform | None,
        products: LatentProducts,
        rows: torch.Tensor,
        metadata_of_rows: Any,
    ) -> torch.Tensor:
        """Attends as `forward_latent` does, but with these `rows` [R] only, as `forward_rows` does."""
        values = k[..., layer.rope_dim :]
        found = self.forward_rows(
            layer, products.absorb(queries), k, values, kv_cache, metadata, transform, rows, metadata_of_rows
        )
        return products.values_of(found, layer.num_heads)


def _floats(kv_cache: LayerCache, blocks: torch.Tensor) -> torch.Tensor:
    """The keys of blocks in float32, as they lie there; codes are multiplied by their scales."""
    cache, *scales = kv_cache
    keys = cache[blocks.long(), 0].float()
    return keys * scales[0][blocks.long(), 0].float()[..., None] if scales else keys


class StateBackend(AttentionBackend):
    """A backend of layers that keep states and attend to nothing: `scan` is its forward pass."""

    @staticmethod
    def reasons_of_content(needs: AttentionNeeds) -> list[str]:
        """Returns the reason against a group of layers that keep something else than states."""
        return [] if needs.content == StateSpec.content else [f"reads {StateSpec.content}, not {needs.content}"]

    def store(self, layer: Any, k: torch.Tensor, v: torch.Tensor, kv_cache: LayerCache, metadata: Any) -> None:
        raise NotImplementedError("a state-space layer has no keys and values")

    def attend(self, layer: Any, q: torch.Tensor, kv_cache: LayerCache, metadata: Any) -> torch.Tensor:
        raise NotImplementedError("a state-space layer does not attend")
