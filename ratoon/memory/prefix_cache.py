"""The prefix cache over the pool: full blocks of sequences are hashed and added to it, and the longest prefix is found.

Which sequence holds which block is not known here: kv_cache_manager.py has the tables.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Sequence

from ratoon.core.stats import PrefixCacheStats
from ratoon.memory.block_events import GROUP, BlockEvents
from ratoon.memory.block_pool import Block, BlockPool
from ratoon.memory.block_store import Lookup
from ratoon.memory.growth import GrowthRule
from ratoon.memory.hashing import BlockHasher
from ratoon.memory.sequence import TokenSequence

GroupBlocks = tuple[list[Block], ...]  # one list of table entries for each KV group

MANY_BLOCKS = 32  # full blocks of one allocation from which on they are added later


class PrefixCache:
    def __init__(self, pool: BlockPool, rules: Sequence[GrowthRule], is_enabled: bool) -> None:
        self.is_enabled = is_enabled and all(rule.is_cacheable for rule in rules)
        self._pool = pool
        self._rules = rules
        self._sizes = [rule.block_size for rule in rules]
        self.unit = math.gcd(*self._sizes)
        # At multiples of this many tokens all groups have whole blocks: hits are as long
        self.block_size = math.lcm(*self._sizes)
        self._hashers = [BlockHasher(size) for size in dict.fromkeys(self._sizes)]
        self._groups_by_size = [
            (hasher.block_size, hasher, [g for g, size in enumerate(self._sizes) if size == hasher.block_size])
            for hasher in self._hashers
        ]
        self._adds_behind_plan = any(rule.is_overwritten for rule in rules)
        self._gives_back = any(rule.gives_back for rule in rules)
        self.stats = PrefixCacheStats()
        self.events: BlockEvents | None = None  # what happens to blocks, for an index elsewhere
        # The sequence whose full blocks are added later, and up to which token
        self._unregistered: tuple[TokenSequence, int] | None = None
        # Sequences with states, and up to which token their full blocks are added when the plan is made: a state that a
        # step writes can't be read in the same step, as keys and values can
        self._written: dict[TokenSequence, int] = {}

    # ---- finding ----

    def longest_prefix(
        self, branch: TokenSequence, max_tokens: int | None, lookups: Sequence[Lookup]
    ) -> tuple[GroupBlocks, int]:
        """The longest prefix that `lookups` find, one for each group: its table entries for each group, and its length
        in tokens. At least one token is left to compute."""
        limit = self.hashed_limit(branch, max_tokens, lookups)
        if not limit:
            return tuple([] for _ in self._rules), 0
        # A hit must hold for every group. A shorter limit can change what a window group finds, so repeat until no
        # group shortens it any more.
        while True:
            hits, longest = [], limit
            for rule, size, lookup in zip(self._rules, self._sizes, lookups):
                hit = rule.longest_hit(branch.block_hashes[size], limit // size, lookup, self._pool.null_block)
                limit = self.whole_blocks(branch, len(hit) * size)
                hits.append(hit)
            if limit == longest:
                return tuple(hits), limit

    def hashed_limit(self, branch: TokenSequence, max_tokens: int | None, lookups: Sequence[Lookup]) -> int:
        """The most tokens that a hit can have. Their blocks are hashed then. 0: there is none."""
        limit = branch.num_tokens - 1 if max_tokens is None else min(branch.num_tokens - 1, max_tokens)
        limit = self.whole_blocks(branch, limit)
        if not self.is_enabled or limit <= 0 or not self._begins_with_hit(branch, lookups):
            return 0
        self.hash_blocks(branch, limit)
        return limit

    def whole_blocks(self, branch: TokenSequence, num_tokens: int) -> int:
        """The most of the first `num_tokens` of a sequence that are whole blocks of all groups, and end in no image
        that is computed in one step."""
        num_tokens -= num_tokens % self.block_size
        while (outside := branch.extra_keys.before_part(num_tokens)) < num_tokens:
            num_tokens = outside - outside % self.block_size
        return num_tokens

    def _begins_with_hit(self, branch: TokenSequence, lookups: Sequence[Lookup]) -> bool:
        """Whether its first block is found. Without that only windows have hits, and of a new prompt no further block
        need be hashed before its step is launched."""
        self.hash_blocks(branch, self.block_size if len(self._hashers) > 1 else self.unit)
        firsts = [branch.block_hashes[size][0] for size in self._sizes]
        return all(
            rule.gives_back or lookup(first) is not None for rule, lookup, first in zip(self._rules, lookups, firsts)
        )

    def hash_blocks(self, branch: TokenSequence, num_tokens: int) -> None:
        """Hashes the full blocks of the first `num_tokens`, in all sizes that groups have."""
        for hasher in self._hashers:
            size = hasher.block_size
            hasher.extend(branch.block_hashes[size], branch.token_ids, num_tokens // size, branch.extra_keys)

    # ---- adding ----

    @property
    def has_unregistered_blocks(self) -> bool:
        return self._unregistered is not None

    def add_written(self, branch: TokenSequence, num_tokens: int) -> None:
        """Adds the full blocks of the first `num_tokens`, which are computed or will be by the step being planned: now,
        later (`add_unregistered`), or when the plan is made (`plan_is_made`)."""
        num_unregistered = (num_tokens - branch.num_registered_tokens) // self.unit
        if self._adds_behind_plan:
            self._written[branch] = num_tokens
        elif num_unregistered >= MANY_BLOCKS and not self._gives_back:  # those could be given back before
            self._unregistered = branch, num_tokens
        elif num_unregistered > 0:
            self.add(branch, num_tokens)

    def add_unregistered(self, but: TokenSequence | None = None) -> None:
        """Adds what was left for later, unless it is of the sequence `but`."""
        if self._unregistered is not None and self._unregistered[0] is not but:
            branch, num_tokens = self._unregistered
            self._unregistered = None
            self.add(branch, num_tokens)

    def plan_is_made(self) -> None:
        """Adds what the step of a plan writes: the steps behind it can find that."""
        written, self._written = self._written, {}
        for branch, num_tokens in written.items():
            self.add(branch, num_tokens)

    def forget_written(self, branch: TokenSequence) -> None:
        """The step being planned does not write what `add_written` was told of."""
        self._written.pop(branch, None)

    def add(self, branch: TokenSequence, num_tokens: int) -> None:
        """Adds the new full blocks of the first `num_tokens`. A block that decoding fills is added when the next one is
        allocated (or the sequence is freed), so that a decoding branch calls the manager once per block and not twice.
        """
        first = branch.num_registered_tokens
        num_tokens -= num_tokens % self.unit
        if num_tokens <= first or not self.is_enabled:
            return
        null, cache_full_block, tables = self._pool.null_block, self._pool.cache_full_block, branch.block_tables
        for size, hasher, groups in self._groups_by_size:
            block_hashes, num_full = branch.block_hashes[size], num_tokens // size
            hasher.extend(block_hashes, branch.token_ids, num_full, branch.extra_keys)
            for group in groups:
                table = tables[group]
                for place in range(first // size, num_full):
                    block = table[place]
                    if block is not null:
                        cache_full_block(block, block_hashes[place], group, branch.stays_in_memory)
            if self.events is not None and GROUP in groups:  # now: a block may have taken the place of another one
                self.events.stored(block_hashes[:num_full], first // size, branch.token_ids, size, branch.extra_keys)
        branch.num_registered_tokens = num_tokens

    # ---- telling ----

    def count_lookup(self, num_tokens: int, num_hit_tokens: int) -> None:
        self.stats.queries += num_tokens
        self.stats.hits += num_hit_tokens

    def collect_events(self, events: BlockEvents) -> None:
        """Tells what happens to blocks that can be found from now on."""
        self.events = events
        self._pool.on_forget = events.removed
        self._pool.on_reset = events.cleared


def hashes_up_to(sequence: TokenSequence, num_tokens: int) -> defaultdict[int, list[bytes]]:
    """The hashes of the full blocks of its first `num_tokens`, by block size."""
    hashes = {size: hashes[: num_tokens // size] for size, hashes in sequence.block_hashes.items()}
    return defaultdict(list, hashes)
