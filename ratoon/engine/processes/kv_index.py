"""An index of the blocks of the KV cache that engines hold, made from what they tell. Pure: no clock, no sockets.

A block is known by the last 64 bits of its hash, as in the events that are published (core/kv_events.py), and to each
belongs a mask with a bit for every engine in which it can be found. Messages of an engine are numbered. If one is
missing, what is known of this engine is forgotten, and it is to be asked to tell all of it again: no engine is thought
to hold what it no longer has for longer than that takes.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from ratoon.core.kv_events import AllBlocksCleared, BlockRemoved, BlockStored, Event, external_hash
from ratoon.core.messages import BlocksTold
from ratoon.memory.hashing import ROOT_DIGEST, ExtraKeys, hash_block, pack_tokens

MOST_BLOCKS = 1 << 18  # of an engine, of some 200 bytes each; beyond, those that it told of first are forgotten


@dataclass(slots=True)
class Holder:
    """The blocks that an engine is known to hold, and the number of its next message."""

    blocks: dict[int, None] = field(default_factory=dict)  # a set, in the order in which they were told of
    next_number: int = 0  # of its messages
    has_missed: bool = False  # the engine is to tell of all blocks again; until it does, nothing is known of it


class KVIndex:
    def __init__(self, most_blocks: int = MOST_BLOCKS) -> None:
        self._most_blocks = most_blocks
        self._masks: dict[int, int] = {}  # by the hash of a block
        self._holders: dict[int, Holder] = {}  # by the engine's index
        self._block_size = 0  # of engines, which have the same settings; 0: none has told of a block

    @property
    def num_blocks(self) -> int:
        """Returns how many different blocks are known."""
        return len(self._masks)

    def num_blocks_of(self, engine: int) -> int:
        return len(self._holder(engine).blocks)

    def take(self, engine: int, told: BlocksTold) -> bool:
        """Takes what an engine tells. False: something was lost before it, and it must be asked to tell all again."""
        holder = self._holder(engine)
        is_next = told.number == holder.next_number
        holder.next_number = told.number + 1
        if told.events and isinstance(told.events[0], AllBlocksCleared):
            holder.has_missed = False
        elif not is_next:
            self._clear(engine)
            holder.has_missed = True
        if not holder.has_missed:
            for event in told.events:
                self._note(engine, event)
        return is_next or not holder.has_missed

    def forget(self, engine: int) -> None:
        """Forgets all of an engine that has ended. The next run of it begins with the first number again."""
        self._clear(engine)
        self._holders[engine] = Holder()

    def held(self, token_ids: Sequence[int], keys: ExtraKeys) -> Iterator[tuple[int, int]]:
        """Yields which engines hold blocks of the beginning of a text: each engine with the number of tokens that it
        holds, the ones that hold the least first. No more of the text is hashed than one of them holds."""
        size, digest, has_media = self._block_size, ROOT_DIGEST, bool(keys.media)
        engines, num_tokens = -1, 0  # those that hold all blocks so far: at first, every engine
        while engines and size and num_tokens + size <= len(token_ids):
            end = num_tokens + size
            own = keys.of_block(num_tokens, end) if has_media else keys.encoded
            digest = hash_block(digest, pack_tokens(token_ids[num_tokens:end]), own)
            holding = engines & self._masks.get(external_hash(digest), 0)
            if num_tokens and holding != engines:
                yield from ((engine, num_tokens) for engine in _engines_in(engines & ~holding))
            engines, num_tokens = holding, end
        if num_tokens:
            yield from ((engine, num_tokens) for engine in _engines_in(engines))

    def _holder(self, engine: int) -> Holder:
        return self._holders.setdefault(engine, Holder())

    def _note(self, engine: int, event: Event) -> None:
        holder = self._holder(engine)
        if isinstance(event, AllBlocksCleared):
            self._clear(engine)
        elif isinstance(event, BlockRemoved):
            for block in event.block_hashes:
                self._remove(engine, holder, block)
        elif isinstance(event, BlockStored):
            self._block_size = event.block_size
            bit, masks = 1 << engine, self._masks
            for block in event.block_hashes:
                masks[block] = masks.get(block, 0) | bit
                holder.blocks[block] = None
            while len(holder.blocks) > self._most_blocks:
                self._remove(engine, holder, next(iter(holder.blocks)))

    def _remove(self, engine: int, holder: Holder, block: int) -> None:
        if block not in holder.blocks:
            return  # the block was forgotten before
        del holder.blocks[block]
        rest = self._masks[block] & ~(1 << engine)
        if rest:
            self._masks[block] = rest
        else:
            del self._masks[block]

    def _clear(self, engine: int) -> None:
        holder = self._holder(engine)
        for block in list(holder.blocks):
            self._remove(engine, holder, block)


def _engines_in(mask: int) -> Iterator[int]:
    while mask:
        lowest = mask & -mask
        yield lowest.bit_length() - 1
        mask ^= lowest
