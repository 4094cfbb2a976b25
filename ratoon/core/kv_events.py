"""What happens to blocks of the KV cache, in the format that vLLM publishes, so that routers written for it can tell
which engine has which prefix.

A message is three frames: a topic, the number of the message in eight bytes (the highest first), and an EventBatch in
msgpack. Structs are arrays on the wire, events with their name first. Fields may be added at the end only.
"""

from __future__ import annotations

import msgspec


class KVCacheEvent(msgspec.Struct, array_like=True, omit_defaults=True, gc=False, tag=True):
    """The base of all events."""


class BlockStored(KVCacheEvent):
    """These blocks, one behind the other, can be found by their hashes from now on."""

    block_hashes: list[int]
    parent_block_hash: int | None  # of the block before the first of them; None: they begin a text
    token_ids: list[int]  # of all of them
    block_size: int
    lora_id: int | None = None  # a number of the adapter that the text has; None: it has none
    medium: str | None = None
    lora_name: str | None = None  # the digest of the adapter's files
    # Of each block, what it is hashed with beside tokens and adapter: a salt, an encoder's input, images. None of a
    # block, or of all: nothing
    extra_keys: list[list[str] | None] | None = None


class BlockRemoved(KVCacheEvent):
    """These blocks can't be found any more."""

    block_hashes: list[int]
    medium: str | None = None


class AllBlocksCleared(KVCacheEvent):
    """No block can be found any more."""


Event = BlockStored | BlockRemoved | AllBlocksCleared


class EventBatch(msgspec.Struct, array_like=True, omit_defaults=True, gc=False):
    ts: float  # seconds since 1970
    events: list[Event]
    data_parallel_rank: int | None = None


def external_hash(block_hash: bytes) -> int:
    """The hash of a block as subscribers see it: its last 64 bits."""
    return int.from_bytes(block_hash[-8:], "big")
