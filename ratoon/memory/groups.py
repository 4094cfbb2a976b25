"""What differs between kinds of attention: which blocks of a sequence are still read, and what makes a prefix hit.

A rule for each KVCacheSpec kind, without state of its own; the KVCacheManager applies them.
"""

from __future__ import annotations

from ratoon.core.kv import FullAttentionSpec, KVCacheSpec, SlidingWindowSpec
from ratoon.memory.block_pool import Block


class FullAttentionRule:
    """Every block stays readable; a prefix hit is an unbroken run of cached blocks from the first."""

    def __init__(self, spec: FullAttentionSpec) -> None:
        self.block_size = spec.block_size

    def num_unread_tokens(self, num_computed_tokens: int) -> int:
        """How many tokens at the start no later token reads."""
        return 0

    def longest_hit(
        self, block_hashes: list[bytes], limit: int, cached: dict[bytes, Block], null: Block
    ) -> list[Block]:
        """The table entries of the longest hit of at most `limit` blocks."""
        hit = []
        lookup = cached.get
        for index in range(limit):
            block = lookup(block_hashes[index])
            if block is None:
                break
            hit.append(block)
        return hit

    def most_blocks(self, num_tokens: int, max_step_tokens: int) -> int:
        """The most blocks that a sequence of `num_tokens` holds at one time, computed in steps of `max_step_tokens`."""
        return -(-num_tokens // self.block_size)


class SlidingWindowRule:
    """Only the last `window` tokens are read; a prefix hit needs the blocks of that window alone."""

    def __init__(self, spec: SlidingWindowSpec) -> None:
        self.block_size = spec.block_size
        self.window = spec.window

    def num_unread_tokens(self, num_computed_tokens: int) -> int:
        # The next token stands at position num_computed_tokens and reads itself and the window - 1 tokens before it.
        return max(0, num_computed_tokens - self.window + 1)

    def longest_hit(
        self, block_hashes: list[bytes], limit: int, cached: dict[bytes, Block], null: Block
    ) -> list[Block]:
        # From the right: the first run of cached blocks as wide as the window, or a run that reaches the first block.
        num_wanted = -(-self.window // self.block_size)
        run: list[Block] = []  # in reverse
        for index in range(limit - 1, -1, -1):
            block = cached.get(block_hashes[index])
            if block is None:
                run = []
                continue
            run.append(block)
            if len(run) == num_wanted:
                return [null] * index + run[::-1]
        return run[::-1]

    def most_blocks(self, num_tokens: int, max_step_tokens: int) -> int:
        # The window and the tokens of one step, wherever in a block they begin.
        span = self.window + max_step_tokens
        return min(-(-num_tokens // self.block_size), (span + self.block_size - 2) // self.block_size + 1)


GroupRule = FullAttentionRule | SlidingWindowRule


def rule_for(spec: KVCacheSpec) -> GroupRule:
    if isinstance(spec, SlidingWindowSpec):
        return SlidingWindowRule(spec)
    if isinstance(spec, FullAttentionSpec):
        return FullAttentionRule(spec)
    raise TypeError(f"no rule for KV caches of type {type(spec).__name__}")
