"""What memory a model's layers ask for, and how the pool is cut for them. Declarations only: no tensors.

A layer declares a spec. Layers with equal specs form a group; every group has its own block table for each branch. All
groups draw block ids from one pool. The j-th layers of all groups share one tensor: a block id belongs to one group at
a time, so they never meet, and no group has memory that another could have used.
"""

from __future__ import annotations

import msgspec

NULL_BLOCK = 0  # never handed out: padding rows write to it, and freed places in a table point at it


class KVCacheSpec(msgspec.Struct, frozen=True, tag=True):
    """The memory of one attention layer. Subclasses say how it grows."""

    block_size: int  # tokens in a block
    num_kv_heads: int
    head_dim: int
    dtype_bytes: int

    @property
    def bytes_per_block(self) -> int:
        """Keys and values of one block of one layer."""
        return 2 * self.block_size * self.num_kv_heads * self.head_dim * self.dtype_bytes


class FullAttentionSpec(KVCacheSpec, frozen=True, tag=True):
    """Grows with the sequence; every block stays readable."""


class SlidingWindowSpec(KVCacheSpec, frozen=True, tag=True):
    """Only the last `window` tokens are read; blocks that fell out of the window are given back."""

    window: int


class CrossAttentionSpec(KVCacheSpec, frozen=True, tag=True):
    """As long as the encoder's input; written once, before any decoder row reads it, and never again."""


class KVCacheGroup(msgspec.Struct, frozen=True):
    spec: FullAttentionSpec | SlidingWindowSpec | CrossAttentionSpec
    layers: tuple[int, ...]  # attention-layer indices


class KVCacheConfig(msgspec.Struct, frozen=True):
    """The pool as it was cut: the same on the accounting side and on the tensor side."""

    num_blocks: int  # the null block included
    block_size: int
    groups: tuple[KVCacheGroup, ...]  # those whose tables grow with the sequence
    cross: KVCacheGroup | None = None  # of an encoder-decoder model: its tables are as long as encoder inputs
    num_host_blocks: int = 0  # of the same size, in host memory, for what is swapped out

    @property
    def all_groups(self) -> tuple[KVCacheGroup, ...]:
        return self.groups if self.cross is None else (*self.groups, self.cross)

    @property
    def bytes_per_block(self) -> int:
        """What one block id costs, over all tensors."""
        return bytes_per_block(self.all_groups)


def group_layers(specs: list[FullAttentionSpec | SlidingWindowSpec]) -> tuple[KVCacheGroup, ...]:
    """Layers with equal specs form a group; groups are ordered by their first layer."""
    layers_by_spec: dict[FullAttentionSpec | SlidingWindowSpec, list[int]] = {}
    for layer, spec in enumerate(specs):
        layers_by_spec.setdefault(spec, []).append(layer)
    return tuple(KVCacheGroup(spec, tuple(layers)) for spec, layers in layers_by_spec.items())


def bytes_per_block(groups: tuple[KVCacheGroup, ...]) -> int:
    """The j-th layers of all groups share a tensor, so the group with the most layers sets the price of a block id."""
    return max(group.spec.bytes_per_block for group in groups) * max(len(group.layers) for group in groups)
