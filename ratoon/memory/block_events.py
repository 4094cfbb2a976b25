"""Collects what happens to the blocks of the first KV group, for those that keep an index of it elsewhere.

A block is told of when it can be found by its hash, and again when it no longer can. A text that is found in the cache
is told of once, however many requests share it.
"""

from __future__ import annotations

from collections.abc import Sequence

from ratoon.core.kv_events import AllBlocksCleared, BlockRemoved, BlockStored, Event, external_hash

GROUP = 0


class BlockEvents:
    def __init__(self, medium: str) -> None:
        self._medium = medium
        self._told: set[bytes] = set()
        self._events: list[Event] = [AllBlocksCleared()]  # of an engine that was there before, under the same address

    def stored(self, hashes: Sequence[bytes], first: int, token_ids: Sequence[int], block_size: int) -> None:
        """The blocks of a text from `first` on can be found now. `hashes` and `token_ids` are those of the whole
        text."""
        told, start = self._told, first
        while start < len(hashes):
            if hashes[start] in told:
                start += 1
                continue
            end = start + 1
            while end < len(hashes) and hashes[end] not in told:
                end += 1
            run = hashes[start:end]
            told.update(run)
            self._events.append(
                BlockStored(
                    [external_hash(one) for one in run],
                    None if start == 0 else external_hash(hashes[start - 1]),
                    list(token_ids[start * block_size : end * block_size]),
                    block_size,
                    medium=self._medium,
                )
            )
            start = end

    def removed(self, block_hash: bytes, group: int) -> None:
        if group == GROUP and block_hash in self._told:
            self._told.discard(block_hash)
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
