"""Growth rules: which blocks a KV group allocates for a sequence, which it frees early, and what is a prefix cache hit.

A spec names its rule (`KVCacheSpec.growth`). A new kind of layer uses one of these or adds one to GROWTH_RULES. Rules
have no state; the KVCacheManager applies them.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from ratoon.core.kv import KVCacheSpec
from ratoon.memory.block_pool import Block


class GrowthRule:
    """The rule of layers that read all tokens: every block stays readable, and a prefix hit is an unbroken run of
    cached blocks from the first."""

    gives_back = False  # whether blocks are freed while the sequence still runs
    is_overwritten = False  # whether a token overwrites in place what the token before it left in the same block
    is_cacheable = True  # whether full blocks enter the prefix cache; one group with False turns it off for all

    def __init__(self, spec: Any) -> None:
        self.block_size: int = spec.block_size

    def num_blocks(self, num_tokens: int) -> int:
        return -(-num_tokens // self.block_size)

    def most_blocks(self, num_tokens: int, max_step_tokens: int) -> int:
        """The most blocks that a sequence of `num_tokens` holds at one time, computed in steps of `max_step_tokens`."""
        return self.num_blocks(num_tokens)

    def num_unread_blocks(self, num_computed_tokens: int) -> int:
        """The number of leading blocks that no later token reads."""
        return 0

    def holds(self, table: list[Block], num_computed_tokens: int, num_tokens: int, null: Block) -> bool:
        """Whether the table still has all blocks that the token after the first `num_tokens` reads."""
        return True

    def longest_hit(
        self, block_hashes: list[bytes], limit: int, lookup: Callable[[bytes], Block | None], null: Block
    ) -> list[Block]:
        """The table entries of the longest hit of at most `limit` blocks."""
        hit = []
        for index in range(limit):
            block = lookup(block_hashes[index])
            if block is None:
                break
            hit.append(block)
        return hit


class SlidingWindowRule(GrowthRule):
    """The rule of layers that read only the last `window` tokens: a prefix hit needs the blocks of that window
    alone."""

    gives_back = True

    def __init__(self, spec: Any) -> None:
        super().__init__(spec)
        self.window: int = spec.window

    def most_blocks(self, num_tokens: int, max_step_tokens: int) -> int:
        # The window and the tokens of one step, at any offset within a block.
        span = self.window + max_step_tokens
        return min(self.num_blocks(num_tokens), (span + self.block_size - 2) // self.block_size + 1)

    def num_unread_blocks(self, num_computed_tokens: int) -> int:
        # The next token has position num_computed_tokens and reads itself and the window - 1 tokens before it.
        return max(0, num_computed_tokens - self.window + 1) // self.block_size

    def holds(self, table: list[Block], num_computed_tokens: int, num_tokens: int, null: Block) -> bool:
        return null not in table[self.num_unread_blocks(num_tokens) : self.num_blocks(num_tokens)]

    def longest_hit(
        self, block_hashes: list[bytes], limit: int, lookup: Callable[[bytes], Block | None], null: Block
    ) -> list[Block]:
        # From the right: the first run of cached blocks as wide as the window, or a run that reaches the first block.
        num_wanted = self.num_blocks(self.window)
        run: list[Block] = []  # in reverse
        for index in range(limit - 1, -1, -1):
            block = lookup(block_hashes[index])
            if block is None:
                run = []
                continue
            run.append(block)
            if len(run) == num_wanted:
                return [null] * index + run[::-1]
        return run[::-1]


class StateRule(GrowthRule):
    """The rule of layers whose block is the state behind its last token: the next token reads the block of the token
    before it, and a prefix hit needs the last block alone, a checkpoint. The last block is updated in place, so that a
    sequence can be taken up again where it ends, and at the ends of full blocks that it still has."""

    gives_back = True
    is_overwritten = True

    def most_blocks(self, num_tokens: int, max_step_tokens: int) -> int:
        # The block that a step reads, and those that it writes.
        return min(self.num_blocks(num_tokens), 1 + self.num_blocks(max_step_tokens))

    def num_unread_blocks(self, num_computed_tokens: int) -> int:
        return max(0, num_computed_tokens - 1) // self.block_size

    def holds(self, table: list[Block], num_computed_tokens: int, num_tokens: int, null: Block) -> bool:
        if num_tokens == 0:
            return True
        is_kept = num_tokens == num_computed_tokens or num_tokens % self.block_size == 0
        return is_kept and table[(num_tokens - 1) // self.block_size] is not null

    def longest_hit(
        self, block_hashes: list[bytes], limit: int, lookup: Callable[[bytes], Block | None], null: Block
    ) -> list[Block]:
        for index in range(limit - 1, -1, -1):
            block = lookup(block_hashes[index])
            if block is not None:
                return [null] * index + [block]
        return []


GROWTH_RULES: dict[str, type[GrowthRule]] = {
    "full": GrowthRule,
    "window": SlidingWindowRule,
    "state": StateRule,
    "cross": GrowthRule,
}


def rule_for(spec: KVCacheSpec) -> GrowthRule:
    rule, known = GROWTH_RULES.get(spec.growth), ", ".join(GROWTH_RULES)
    if rule is None:
        raise ValueError(f"{type(spec).__name__} grows by the rule {spec.growth!r}, which is not one of {known}")
    return rule(spec)
