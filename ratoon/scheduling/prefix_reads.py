"""Texts that have ended and whose hidden states are read: each turns into an extraction over its own blocks.

Where the front end may have found a stop string in the text, its blocks are kept here until it tells how many tokens
count; they are the first to be freed if memory is short. The extraction itself is in kinds/extraction.py.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from ratoon.core.readings import awaits_count, reading_id, reading_of
from ratoon.core.request import EngineCoreRequest
from ratoon.memory.kv_cache_manager import KVCacheManager
from ratoon.memory.sequence import TokenSequence
from ratoon.scheduling.branch import Request


class PendingText(NamedTuple):
    """A text whose length is not certain yet."""

    sequence: TokenSequence
    request: Request
    choice: int


class PrefixReads:
    # Set by the kind that extracts: start this extraction over the blocks of a sequence. The number is its order.
    start: Callable[[EngineCoreRequest, int, TokenSequence], None]

    def __init__(self, kv_cache: KVCacheManager) -> None:
        self._kv_cache = kv_cache
        self._pending: dict[str, PendingText] = {}  # by the id of the reading

    def text_ended(self, ended: TokenSequence, request: Request, choice: int, num_tokens: int | None = None) -> None:
        """A text has ended. It still has its memory, which is shared here. `num_tokens`: the front end cut it after
        that many generated tokens."""
        if request.original is None:
            return
        if num_tokens is not None or not awaits_count(request.original.params):
            self._start(ended, request, choice, num_tokens)
            return
        kept = TokenSequence(reading_id(ended.branch_id), ended.token_ids, ended.extra_keys)
        self._kv_cache.inherit_blocks_from_parent(ended, kept, ended.num_computed_tokens, num_left=0)
        self._pending[kept.branch_id] = PendingText(kept, request, choice)

    def tell(self, name: str, num_tokens: int) -> bool:
        """Takes note of how many tokens of an ended text count. False: it is not waited for."""
        text = self._pending.pop(name, None)
        if text is None:
            return False
        self._start(text.sequence, text.request, text.choice, num_tokens)
        self._kv_cache.free(text.sequence)
        return True

    def _start(self, ended: TokenSequence, request: Request, choice: int, num_tokens: int | None) -> None:
        assert request.original is not None
        reading = reading_of(request.original, choice, ended.token_ids[request.num_prompt_tokens :][:num_tokens])
        if reading is not None:
            self.start(reading, request.sequence_number, ended)

    def drop(self, some_id: str) -> None:
        """A request, or a reading, was aborted: texts of it that wait here are not read."""
        for name, text in list(self._pending.items()):
            if some_id in (name, text.request.request_id):
                self._kv_cache.free(self._pending.pop(name).sequence)

    def free_one(self) -> bool:
        """Free the blocks of one text, which are then computed again. False: there are none."""
        for text in self._pending.values():
            if text.sequence.block_tables:
                self._kv_cache.free(text.sequence)
                return True
        return False

    def held(self) -> list[TokenSequence]:
        """The sequences that hold blocks here, for checks."""
        return [text.sequence for text in self._pending.values()]
