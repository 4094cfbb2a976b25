"""What memory a model's layers ask for, and how the pool is cut for them. Declarations only: no tensors.

A layer declares a spec: the tensors of one block, and the name of the rule by which blocks come and go. Layers with
equal specs form a group; every group has its own block table for each branch. All groups draw block ids from one pool,
and an id belongs to one group at a time, so groups share the memory behind the ids: the scheduler counts one kind of
block, and no group has memory that another could have used.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import ClassVar

import msgspec

NULL_BLOCK = 0  # never handed out: padding rows write to it, and freed places in a table point at it
PAGE_ALIGNMENT = 16  # bytes; of every tensor in a page
DTYPE_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}


class PageTensor(msgspec.Struct, frozen=True):
    """One tensor of one layer, as far as one block goes. A backend may order the elements in its own way."""

    shape: tuple[int, ...]
    dtype: str

    @property
    def num_bytes(self) -> int:
        size = math.prod(self.shape) * DTYPE_BYTES[self.dtype]
        return -(-size // PAGE_ALIGNMENT) * PAGE_ALIGNMENT


class KVCacheSpec(msgspec.Struct, frozen=True):
    """The memory of one layer. A kind of layer is a subclass; nothing else needs to know it by name."""

    content: ClassVar[str]  # what is kept for a token: a backend says whether it can read it
    growth: ClassVar[str]  # the rule of memory/growth.py by which blocks are taken, given back and found again

    block_size: int  # tokens in a block

    @property
    def tensors(self) -> tuple[PageTensor, ...]:
        raise NotImplementedError

    @property
    def page_size_bytes(self) -> int:
        """One block of one layer, over all its tensors."""
        return sum(tensor.num_bytes for tensor in self.tensors)


class AttentionSpec(KVCacheSpec, frozen=True):
    """Keys and values of every token, in one tensor."""

    content: ClassVar[str] = "keys and values"

    num_kv_heads: int
    head_dim: int
    dtype: str

    @property
    def tensors(self) -> tuple[PageTensor, ...]:
        return (PageTensor((2, self.block_size, self.num_kv_heads, self.head_dim), self.dtype),)


class FullAttentionSpec(AttentionSpec, frozen=True):
    """Grows with the sequence; every block stays readable."""

    growth: ClassVar[str] = "full"


class SlidingWindowSpec(AttentionSpec, frozen=True):
    """Only the last `window` tokens are read; blocks that fell out of the window are given back."""

    growth: ClassVar[str] = "window"

    window: int


class CrossAttentionSpec(AttentionSpec, frozen=True):
    """As long as the encoder's input; written once, before any decoder row reads it, and never again."""

    growth: ClassVar[str] = "cross"


class KVCacheGroup(msgspec.Struct, frozen=True):
    spec: KVCacheSpec
    layers: tuple[int, ...]  # attention-layer indices


class PageLayout(msgspec.Struct, frozen=True):
    """The memory behind one block id: a row in each of several tensors, which the layers of every group divide."""

    tensor_bytes: tuple[int, ...]  # of a row, by tensor
    places: tuple[tuple[tuple[int, int], ...], ...]  # by group, for each of its layers: tensor, first byte in the row


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


def group_layers(specs: Sequence[KVCacheSpec]) -> tuple[KVCacheGroup, ...]:
    """Layers with equal specs form a group; groups are ordered by their first layer."""
    layers_by_spec: dict[KVCacheSpec, list[int]] = {}
    for layer, spec in enumerate(specs):
        layers_by_spec.setdefault(spec, []).append(layer)
    return tuple(KVCacheGroup(spec, tuple(layers)) for spec, layers in layers_by_spec.items())


def lay_out_pages(groups: Sequence[KVCacheGroup]) -> PageLayout:
    """Places for the layers of all groups, those with the largest pages first.

    A layer takes the next place that is wide enough in a tensor that is there for another group, and a tensor of its
    own where none is left. So layers with equal pages share tensors one to one, and several small pages lie in one row
    of a tensor that is as wide as a large page.
    """
    tensor_bytes: list[int] = []
    places: dict[int, tuple[tuple[int, int], ...]] = {}
    for number in sorted(range(len(groups)), key=lambda number: -groups[number].spec.page_size_bytes):
        size, count = groups[number].spec.page_size_bytes, len(groups[number].layers)
        free = [
            (tensor, start) for tensor, width in enumerate(tensor_bytes) for start in range(0, width - size + 1, size)
        ]
        num_new = max(0, count - len(free))
        free += [(len(tensor_bytes) + index, 0) for index in range(num_new)]
        tensor_bytes += [size] * num_new
        places[number] = tuple(free[:count])
    return PageLayout(tuple(tensor_bytes), tuple(places[number] for number in range(len(groups))))


def bytes_per_block(groups: Sequence[KVCacheGroup]) -> int:
    return sum(lay_out_pages(groups).tensor_bytes)
