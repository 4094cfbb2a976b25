"""The KV cache memory that a model's layers declare, and how the pool is divided among them. No tensors.

A layer declares a spec: the tensors of one block, and the name of its rule for allocating and freeing blocks. Layers
with equal specs form a group; every group has its own block table for each branch. All groups draw block ids from one
pool, and an id belongs to one group at a time, so groups share the memory behind the ids: the scheduler counts one kind
of block, and no memory is reserved for one group.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from hashlib import blake2b
from typing import Any, ClassVar

import msgspec

from ratoon.core.prepared import prepared

IN_MEMORY, A_DAY = RETENTIONS = ("in_memory", "24h")  # how long a request asks to keep its blocks
NULL_BLOCK = 0  # never allocated: padding rows write to it, and freed table entries point to it
PAGE_ALIGNMENT = 16  # bytes; of every tensor in a page
KV_FORMAT_VERSION = 1  # of the bytes of a block, to be raised when the same spec and layout come to mean other bytes
STATE_INTERVAL = 512  # tokens between the checkpoints of states, about: the next multiple of the block size
DTYPE_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2, "float8_e4m3fn": 1, "int8": 1}


class PageTensor(msgspec.Struct, frozen=True):
    """The part of one tensor of one layer that belongs to one block. A backend chooses the order of its elements."""

    shape: tuple[int, ...]
    dtype: str

    @property
    def num_bytes(self) -> int:
        size = math.prod(self.shape) * DTYPE_BYTES[self.dtype]
        return -(-size // PAGE_ALIGNMENT) * PAGE_ALIGNMENT


class KVCacheSpec(msgspec.Struct, frozen=True, tag=True):
    """The memory of one layer. Each kind of layer is a subclass; no other code refers to subclasses by name. Encoded, a
    spec has the name of its class in `type`."""

    content: ClassVar[str]  # what is kept per token; attention backends declare which contents they read
    growth: ClassVar[str]  # the rule of memory/growth.py for allocation, freeing and prefix cache hits

    block_size: int  # tokens in a block

    @property
    def tensors(self) -> tuple[PageTensor, ...]:
        raise NotImplementedError

    @property
    def page_size_bytes(self) -> int:
        """One block of one layer, over all its tensors."""
        return sum(tensor.num_bytes for tensor in self.tensors)


class AttentionSpec(KVCacheSpec, frozen=True):
    """Keys and values of every token, in one tensor; as integers, with a scale for each head in another."""

    content: ClassVar[str] = "keys and values"

    num_kv_heads: int
    head_dim: int
    dtype: str

    @property
    def tensors(self) -> tuple[PageTensor, ...]:
        numbers = PageTensor((2, self.block_size, self.num_kv_heads, self.head_dim), self.dtype)
        if self.dtype != "int8":
            return (numbers,)
        return numbers, PageTensor(numbers.shape[:-1], "float32")


class FullAttentionSpec(AttentionSpec, frozen=True):
    """Grows with the sequence; every block stays readable."""

    growth: ClassVar[str] = "full"


class SlidingWindowSpec(AttentionSpec, frozen=True):
    """The memory of a layer that reads only the last `window` tokens: blocks before the window are freed."""

    growth: ClassVar[str] = "window"

    window: int


class CrossAttentionSpec(AttentionSpec, frozen=True):
    """The memory of cross-attention: as long as the encoder's input, and written once, before any decoder row reads
    it."""

    growth: ClassVar[str] = "cross"


class LatentSpec(KVCacheSpec, frozen=True):
    """The memory of latent attention: one vector of every token, which all heads read as their key and, without its
    first numbers, as their value. Grows with the sequence."""

    content: ClassVar[str] = "latent vectors"
    growth: ClassVar[str] = "full"

    width: int
    dtype: str

    @property
    def tensors(self) -> tuple[PageTensor, ...]:
        numbers = PageTensor((self.block_size, self.width), self.dtype)
        if self.dtype != "int8":
            return (numbers,)
        return numbers, PageTensor((self.block_size,), "float32")


class StateSpec(KVCacheSpec, frozen=True):
    """The memory of a state-space layer: a block is what is needed to go on behind its last token, the running state
    and the last inputs of the convolution. The block of a sequence's last tokens is updated in place; one that is full
    is a checkpoint."""

    content: ClassVar[str] = "a state"
    growth: ClassVar[str] = "state"

    num_heads: int
    head_dim: int
    state_size: int
    num_channels: int  # of the convolution
    num_inputs: int  # that the convolution reads before a token's own
    # Layers with equal states form several groups where a block of all would be larger than one of attention
    part: int = 0

    @property
    def tensors(self) -> tuple[PageTensor, ...]:
        state = PageTensor((self.num_heads, self.head_dim, self.state_size), "float32")
        return state, PageTensor((self.num_inputs, self.num_channels), "float32")


class KVCacheGroup(msgspec.Struct, frozen=True):
    spec: KVCacheSpec
    layers: tuple[int, ...]  # attention-layer indices

    def cut(self, layers: range) -> KVCacheGroup:
        """The group on a worker that has these layers alone, which it counts from 0. It may have none: block tables
        have the same groups on all workers."""
        return KVCacheGroup(self.spec, tuple(layer - layers.start for layer in self.layers if layer in layers))


class AttachedGroup(msgspec.Struct, frozen=True):
    """Layers of a model that drafts beside the engine's own. Their keys and values lie in the blocks of one of the
    groups, in bytes that no other layer has, so they have no block table: what happens to a block (forks, prefix hits,
    copies, swaps) happens to them."""

    spec: KVCacheSpec
    layers: tuple[int, ...]  # attention-layer indices of the model that drafts
    table: int = 0  # the group whose blocks they lie in


class PageLayout(msgspec.Struct, frozen=True):
    """The memory behind one block id: a row in each of several tensors, divided among the layers of every group."""

    tensor_bytes: tuple[int, ...]  # of a row, by tensor
    places: tuple[tuple[tuple[int, int], ...], ...]  # by group, for each of its layers: tensor, first byte in the row
    attached: tuple[tuple[tuple[int, int], ...], ...] = ()  # the same of attached groups


class KVFingerprint(msgspec.Struct, frozen=True):
    """What must be equal for the bytes of a block to mean the same keys and values: with equal hashes, a block of one
    engine can then be used by another. Plain data, made once at start-up."""

    weights: str = ""  # a digest
    dtype: str = ""  # in which the model computes
    # What else changes its numbers: formats that its weights have in memory, choices between kernels or frequencies
    arithmetic: tuple[str, ...] = ()
    specs: tuple[str, ...] = ()  # of the KV groups: kind, sizes, dtype of keys and values
    layout: PageLayout = PageLayout((), ())
    page_orders: tuple[str, ...] = ()  # of the KV groups: how a backend arranges the elements of a page
    part: str = ""  # of the model that a worker has, by its rank and stage; empty: all of it
    version: int = KV_FORMAT_VERSION

    @property
    def digest(self) -> str:
        """A name for blocks of this kind, for storage that holds several kinds."""
        return blake2b(msgspec.msgpack.encode(self), digest_size=16).hexdigest()

    def differences(self, other: KVFingerprint) -> str:
        """The fields that differ, for error messages."""
        names = [name for name in self.__struct_fields__ if getattr(self, name) != getattr(other, name)]
        return ", ".join(f"{name} is {getattr(self, name)!r}, not {getattr(other, name)!r}" for name in names)


class KVCacheConfig(msgspec.Struct, frozen=True):
    """The resolved pool. Block accounting and the runner's tensors use the same one."""

    num_blocks: int  # the null block included
    block_size: int  # the setting, from which layers choose their own: that of a group is in its spec
    groups: tuple[KVCacheGroup, ...]  # those whose tables grow with the sequence
    cross: KVCacheGroup | None = None  # of an encoder-decoder model: its tables are as long as encoder inputs
    num_host_blocks: int = 0  # of the same size, in host memory: the first tier of the block store
    sized_by: str = "num_blocks"  # the setting that num_blocks follows from
    fingerprint: KVFingerprint = KVFingerprint()
    attached: tuple[AttachedGroup, ...] = ()  # of a model that drafts

    @property
    def all_groups(self) -> tuple[KVCacheGroup, ...]:
        return self.groups if self.cross is None else (*self.groups, self.cross)

    @property
    def whole_blocks(self) -> int:
        """Tokens at whose multiples all groups have whole blocks: prefixes are found in the cache by as many."""
        return math.lcm(*(group.spec.block_size for group in self.groups))

    @property
    def capacity(self) -> int:
        """Tokens of a sequence that keeps all its blocks and is alone in the pool."""
        return tokens_in(self.num_blocks - 1, self.groups)

    @property
    def bytes_per_token(self) -> int:
        """The memory that a token adds to a text. Where groups have blocks of different sizes, it is counted in those
        that keep all of their blocks."""
        if all(group.spec.block_size == self.block_size for group in self.groups):
            return self.bytes_per_block // self.block_size
        growing = [group.spec.block_size for group in self.groups if group.spec.growth == "full"]
        return sum(self.bytes_per_block // size for size in growing)

    @property
    def bytes_per_block(self) -> int:
        """Memory of one block id, over all tensors."""
        return bytes_per_block(self.all_groups, self.attached)


class SwapCosts(msgspec.Struct, frozen=True):
    """What the memory of a preempted sequence costs on this device: seconds, measured at start-up."""

    block: float  # to fetch one from the host; the copy to the host runs beside steps and delays none
    token: float  # to compute one again


def kv_config_of(data: Mapping[str, Any]) -> KVCacheConfig:
    """The config that was encoded. Specs are of any class that this process has defined; ValueError for another one."""
    kinds = {kind.__name__: kind for kind in _subclasses(KVCacheSpec)}

    def spec_of(group: Mapping[str, Any]) -> KVCacheSpec:
        spec = group["spec"]
        if spec["type"] not in kinds:
            raise ValueError(f"a KV cache spec of the unknown kind {spec['type']!r}; known: {', '.join(kinds)}")
        return msgspec.convert(spec, prepared(kinds[spec["type"]]))

    def group_of(group: Mapping[str, Any]) -> KVCacheGroup:
        return KVCacheGroup(spec_of(group), tuple(group["layers"]))

    groups, cross = tuple(map(group_of, data["groups"])), data["cross"]
    attached = tuple(AttachedGroup(spec_of(one), tuple(one["layers"]), one["table"]) for one in data["attached"])
    others = msgspec.convert({**data, "groups": (), "cross": None, "attached": ()}, prepared(KVCacheConfig))
    return msgspec.structs.replace(
        others, groups=groups, cross=None if cross is None else group_of(cross), attached=attached
    )


def _subclasses(kind: type[KVCacheSpec]) -> list[type[KVCacheSpec]]:
    return [found for below in kind.__subclasses__() for found in (below, *_subclasses(below))]


def group_layers(specs: Sequence[KVCacheSpec]) -> tuple[KVCacheGroup, ...]:
    """Layers with equal specs form a group; groups are ordered by their first layer."""
    layers_by_spec: dict[KVCacheSpec, list[int]] = {}
    for layer, spec in enumerate(specs):
        layers_by_spec.setdefault(spec, []).append(layer)
    return tuple(KVCacheGroup(spec, tuple(layers)) for spec, layers in layers_by_spec.items())


def divide_states(specs: Sequence[KVCacheSpec], block_size: int, interval: int | None) -> list[KVCacheSpec]:
    """The specs of a model's layers, with blocks that fit together where some of the layers have states.

    A state is often as large as the keys and values of hundreds of tokens, and all groups draw from one pool. So the
    blocks of states are `interval` tokens apart (None: the default), those of attention become the longest that divide
    them and are no larger than a state, and layers with states form as many groups as make their blocks as large as
    those of attention.
    """
    states = [spec for spec in specs if isinstance(spec, StateSpec)]
    if not states:
        return list(specs)
    if interval is None:
        interval = -(-STATE_INTERVAL // block_size) * block_size
    others = [spec for spec in specs if not isinstance(spec, StateSpec)]
    state_bytes = max(spec.page_size_bytes for spec in states)
    sizes = [size for size in range(block_size, interval + 1, block_size) if interval % size == 0]

    def lengthen(spec: KVCacheSpec) -> KVCacheSpec:
        candidates = [msgspec.structs.replace(spec, block_size=size) for size in sizes]
        fitting = [one for one in candidates if one.page_size_bytes <= state_bytes]
        return max(fitting or candidates[:1], key=lambda one: one.block_size)

    longer = {spec: lengthen(spec) for spec in others}
    per_group = len(specs)
    if others:
        largest, num_layers = max((longer[spec].page_size_bytes, others.count(spec)) for spec in longer)
        per_group = num_layers * max(1, largest // state_bytes)
    divided: list[KVCacheSpec] = []
    counts: Counter[KVCacheSpec] = Counter()
    for spec in specs:
        if isinstance(spec, StateSpec):
            part, counts[spec] = counts[spec] // per_group, counts[spec] + 1
            divided.append(msgspec.structs.replace(spec, block_size=interval, part=part))
        else:
            divided.append(longer[spec])
    return divided


def lay_out_pages(groups: Sequence[KVCacheGroup], attached: Sequence[AttachedGroup] = ()) -> PageLayout:
    """Places for the layers of all groups, those with the largest pages first.

    A layer takes the next wide enough place in a tensor created for another group, or a new tensor if there is none. So
    layers with equal pages share tensors one to one, and several small pages lie in one row of a tensor that is as wide
    as a large page. Attached layers have tensors of their own: a block of their group has its pages in the others.
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
    beside = []
    for group in attached:
        first = len(tensor_bytes)
        tensor_bytes += [group.spec.page_size_bytes] * len(group.layers)
        beside.append(tuple((first + index, 0) for index in range(len(group.layers))))
    return PageLayout(tuple(tensor_bytes), tuple(places[number] for number in range(len(groups))), tuple(beside))


def tokens_in(num_blocks: int, groups: Sequence[KVCacheGroup]) -> int:
    """Tokens of a sequence that so many blocks hold in all of these groups."""
    sizes = [group.spec.block_size for group in groups]
    whole = math.lcm(*sizes)
    return num_blocks // sum(whole // size for size in sizes) * whole


def bytes_per_block(groups: Sequence[KVCacheGroup], attached: Sequence[AttachedGroup] = ()) -> int:
    return sum(lay_out_pages(groups, attached).tensor_bytes)
