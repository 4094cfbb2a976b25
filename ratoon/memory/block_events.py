"""Collects what happens to the blocks of the first KV group, for those that keep an index of it elsewhere.

A block is told of when it can be found by its hash, and again when it no longer can. A text that is found in the cache
is told of once, however many requests share it.
"""

from __future__ import annotations

from collections.abc import Sequence
from hashlib import blake2b

from ratoon.core.kv_events import AllBlocksCleared, BlockRemoved, BlockStored, Event, external_hash
from ratoon.memory.hashing import NO_EXTRA_KEYS, ExtraKeys

GROUP = 0


def _extra_keys_of(keys: ExtraKeys, blocks: range, block_size: int) -> list[list[str] | None] | None:
    """Returns what each of the blocks is hashed with beside tokens and adapter, as digests: a subscriber tells such
    blocks from plain text, and does not learn the salt of a tenant."""
    if keys is NO_EXTRA_KEYS:
        return None
    plain = ExtraKeys([one for one in keys.tagged if one[0] == "adapter"]).encoded
    found: list[list[str] | None] = []
    for block in blocks:
        own = keys.of_block(block * block_size, (block + 1) * block_size)
        found.append(None if own == plain else [blake2b(own, digest_size=16).hexdigest()])
    return found if any(found) else None


class BlockEvents:
    def __init__(self, medium: str) -> None:
        self._medium = medium
        self._told: dict[bytes, None] = {}  # a set in order: blocks come behind those that they continue
        self._block_size = 0  # of the blocks that were told of
        self._events: list[Event] = [AllBlocksCleared()]  # of an engine that was there before, under the same address

    def stored(
        self,
        hashes: Sequence[bytes],
        first: int,
        token_ids: Sequence[int],
        block_size: int,
        keys: ExtraKeys = NO_EXTRA_KEYS,
    ) -> None:
        """The blocks of a text from `first` on can be found now. `hashes`, `token_ids` and `keys` are those of the
        whole text."""
        adapter = next((value for tag, value in keys.tagged if tag == "adapter"), None)
        told, start = self._told, first
        self._block_size = block_size
        while start < len(hashes):
            if hashes[start] in told:
                start += 1
                continue
            end = start + 1
            while end < len(hashes) and hashes[end] not in told:
                end += 1
            run = hashes[start:end]
            told.update(dict.fromkeys(run))
            self._events.append(
                BlockStored(
                    [external_hash(one) for one in run],
                    None if start == 0 else external_hash(hashes[start - 1]),
                    list(token_ids[start * block_size : end * block_size]),
                    block_size,
                    None if adapter is None else external_hash(bytes.fromhex(adapter)),
                    self._medium,
                    adapter,
                    _extra_keys_of(keys, range(start, end), block_size),
                )
            )
            start = end

    def removed(self, block_hash: bytes, group: int) -> None:
        if group == GROUP and block_hash in self._told:
            del self._told[block_hash]
            last = self._events[-1] if self._events else None
            if isinstance(last, BlockRemoved):
                last.block_hashes.append(external_hash(block_hash))
            else:
                self._events.append(BlockRemoved([external_hash(block_hash)], medium=self._medium))

    def cleared(self) -> None:
        self._told.clear()
        self._events = [AllBlocksCleared()]

    def take(self) -> list[Event]:
        """Each event is returned once."""
        events, self._events = self._events, []
        return events

    def known(self) -> list[Event]:
        """Returns events that tell one who knows nothing, or has missed something, which blocks were told of by what
        `take` has returned: by hash alone, without tokens."""
        hashes = [external_hash(one) for one in self._told]
        stored: list[Event] = [BlockStored(hashes, None, [], self._block_size, medium=self._medium)] if hashes else []
        return [AllBlocksCleared(), *stored]
