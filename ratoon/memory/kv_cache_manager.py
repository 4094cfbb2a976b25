"""Block tables of sequences: prefix hits, allocation, copy-on-write, forks. Accounting only; no tensor is touched here.

Decides which block holds which tokens. The scheduler decides when to run, preempt or refuse.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from ratoon.core.encoder import EncoderInput
from ratoon.core.kv import NULL_BLOCK, KVCacheConfig
from ratoon.core.plan import BlockCopy, BlockIds, BlockSwap, SchedulerOutput
from ratoon.core.stats import PrefixCacheStats
from ratoon.memory.block_pool import Block, BlockPool
from ratoon.memory.cross_tables import CrossTables
from ratoon.memory.growth import rule_for
from ratoon.memory.hashing import BlockHasher
from ratoon.memory.host_pool import HostPool
from ratoon.memory.sequence import CrossTable, TokenSequence
from ratoon.memory.swap import SwapSpace, Tables
from ratoon.memory.transfers import Transfers

TablePlace = tuple[int, int]  # KV group, index into its table
GroupBlocks = tuple[list[Block], ...]  # one list of table entries for each KV group

MANY_BLOCKS = 32  # full blocks of one allocation from which on they are added to the prefix cache later


class KVCacheManager:
    """The block tables of all sequences over one pool. A table entry is a reference; the null block marks an entry
    without one."""

    def __init__(self, kv_config: KVCacheConfig, max_model_len: int, enable_caching: bool = True) -> None:
        for group in kv_config.all_groups:
            if group.spec.block_size != kv_config.block_size:
                raise ValueError(
                    f"a group has blocks of {group.spec.block_size} tokens, the pool has {kv_config.block_size}"
                )
        self.block_size = kv_config.block_size
        self.max_model_len = max_model_len
        self.rules = [rule_for(group.spec) for group in kv_config.groups]
        self.num_groups = len(self.rules)
        self.enable_caching = enable_caching and all(rule.is_cacheable for rule in self.rules)
        self._returning = [(group, rule) for group, rule in enumerate(self.rules) if rule.gives_back]
        self.has_cross_group = kv_config.cross is not None
        self.has_host_pool = kv_config.num_host_blocks > 0
        self.pool = BlockPool(kv_config.num_blocks, enable_caching, len(kv_config.all_groups))
        self.prefix_cache_stats = PrefixCacheStats()
        self._given_back: list[Block] = []
        self._unregistered: tuple[TokenSequence, int] | None = None  # whose full blocks are added later, and how many
        self._hasher = BlockHasher(self.block_size)
        self._host = HostPool(kv_config.num_host_blocks)
        self._transfers = Transfers(self.pool, self._host)
        self._swap = SwapSpace(self.pool, self._host, self._transfers)
        cross_rule = None if kv_config.cross is None else rule_for(kv_config.cross.spec)
        self.cross_tables = CrossTables(self.pool, self._swap, self._transfers, cross_rule, self.num_groups)

    # ---- figures ----

    @property
    def usage(self) -> float:
        return self.pool.usage

    @property
    def num_free_blocks(self) -> int:
        return self.pool.num_free_blocks

    @property
    def num_usable_blocks(self) -> int:
        return self.pool.num_usable_blocks

    @property
    def num_usable_tokens(self) -> int:
        """Tokens that fit in the empty pool, for sequences that keep all their blocks."""
        return self.num_usable_blocks // self.num_groups * self.block_size

    @property
    def num_free_host_blocks(self) -> int:
        return self._host.num_free_blocks

    def block_ids(self, branch: TokenSequence) -> BlockIds:
        return tuple([block.block_id for block in table] for table in branch.block_tables)

    def required_blocks(self, num_tokens: int, max_step_tokens: int | None = None) -> int:
        """The most blocks that a sequence holds until `num_tokens` are computed, without sharing."""
        step = num_tokens if max_step_tokens is None else max_step_tokens
        return sum(rule.most_blocks(num_tokens, step) for rule in self.rules)

    def missing_blocks(
        self, num_tokens: int, num_hit_tokens: int, hit_blocks: GroupBlocks | None, max_step_tokens: int
    ) -> int:
        """The most free blocks that a sequence takes until `num_tokens` are computed, given these prefix cache hits."""
        columns = -(-num_tokens // self.block_size) - num_hit_tokens // self.block_size
        missing = self.num_groups * columns + (0 if hit_blocks is None else self._count_free(hit_blocks))
        return min(missing, self.required_blocks(num_tokens, max_step_tokens))

    # ---- prefix cache ----

    @property
    def gives_blocks_back(self) -> bool:
        """Whether any group frees blocks while the sequence runs, such as those before a sliding window."""
        return bool(self._returning)

    def get_computed_blocks(self, branch: TokenSequence, max_tokens: int | None = None) -> tuple[GroupBlocks, int]:
        """The longest cached prefix: its table entries for each group, and its length in tokens, `max_tokens` at most.

        Full blocks only, and at least one token is left to compute, whose state is sampled from. Nothing is changed;
        allocate_slots takes the references.
        """
        self.register_blocks()
        limit = (branch.num_tokens - 1) // self.block_size
        if max_tokens is not None:
            limit = min(limit, max_tokens // self.block_size)
        if not self.enable_caching or limit <= 0 or not self._begins_in_cache(branch):
            return tuple([] for _ in self.rules), 0
        self._hasher.extend(branch.block_hashes, branch.token_ids, limit, branch.extra_keys)
        # A hit must hold for every group. A shorter limit can change what a window group finds, so repeat until no
        # group shortens it any more.
        while True:
            hits = []
            for group, rule in enumerate(self.rules):
                hit = rule.longest_hit(branch.block_hashes, limit, self.pool.cached_blocks(group), self.pool.null_block)
                limit = len(hit)
                hits.append(hit)
            if all(len(hit) == limit for hit in hits):
                return tuple(hits), limit * self.block_size

    def _begins_in_cache(self, branch: TokenSequence) -> bool:
        """Whether its first block is cached. Without that only windows have hits, and of a new prompt no further block
        need be hashed before its step is launched."""
        self._hasher.extend(branch.block_hashes, branch.token_ids, 1, branch.extra_keys)
        first = branch.block_hashes[0]
        return all(
            rule.gives_back or self.pool.get_cached_block(first, group) is not None
            for group, rule in enumerate(self.rules)
        )

    @property
    def has_unregistered_blocks(self) -> bool:
        return self._unregistered is not None

    def register_blocks(self) -> None:
        """Add to the prefix cache what the last allocation left for later. To be called while a step runs; before the
        manager does anything that depends on it, it does so itself."""
        if self._unregistered is not None:
            branch, num_full_blocks = self._unregistered
            self._unregistered = None
            self._register_full_blocks(branch, num_full_blocks)

    def count_lookup(self, num_tokens: int, num_hit_tokens: int) -> None:
        self.prefix_cache_stats.queries += num_tokens
        self.prefix_cache_stats.hits += num_hit_tokens

    def reset_prefix_cache(self) -> bool:
        """Drop all cached blocks and their statistics. Refused (False) while any block is in use."""
        self.register_blocks()
        if not self.pool.reset_prefix_cache():
            return False
        self.prefix_cache_stats = PrefixCacheStats()
        return True

    # ---- memory of a sequence ----

    def allocate_slots(
        self,
        branch: TokenSequence,
        num_new_tokens: int,
        new_computed_blocks: GroupBlocks | None = None,
        num_new_computed_tokens: int = 0,
    ) -> BlockIds | None:
        """Make room for the tokens of a step. Returns the ids appended to each table, or None (and nothing changed).

            |  computed  |  new computed  |         new          |
            | in the     | prefix hit:    | written in this step |
            | tables     | by reference   |                      |
                                          ^ num_computed         ^ num_total

        A written block that is shared or in the prefix cache is first replaced by a copy (copy-on-write).
        """
        if self._unregistered is not None and self._unregistered[0] is not branch:
            self.register_blocks()
        block_size = self.block_size
        num_computed = branch.num_computed_tokens + num_new_computed_tokens
        num_total = num_computed + num_new_tokens
        num_blocks = -(-num_total // block_size)
        tables = branch.block_tables or [[] for _ in self.rules]
        num_held = len(tables[0])  # the tables of all groups have the same length
        if new_computed_blocks is not None:
            num_held += len(new_computed_blocks[0])
        num_missing = num_blocks - num_held if num_blocks > num_held else 0

        # Count first, so that a refusal changes nothing. A decoding branch at the end of a block, the most frequent
        # case, needs none of the three helpers.
        num_wanted, num_available = num_missing * self.num_groups, self.pool.num_free_blocks
        to_copy: list[TablePlace] = []
        unread: list[TablePlace] = []
        if num_computed // block_size < len(tables[0]):
            to_copy = self._places_to_copy(tables, num_computed // block_size, num_blocks)
            num_wanted += len(to_copy)
        if self._returning:
            unread = self._unread_places(tables, num_computed)
            num_available += sum(tables[group][place].ref_cnt == 1 for group, place in unread)
        if new_computed_blocks is not None:
            num_available -= self._count_free(new_computed_blocks)
        if num_wanted > num_available:
            return None

        branch.block_tables = tables
        if unread:
            self._give_back(tables, unread)
        if new_computed_blocks is not None:
            for table, blocks in zip(tables, new_computed_blocks):
                self.pool.touch(blocks)
                table.extend(blocks)
        for group, place in to_copy:
            self._copy_on_write(branch, group, place)
        appended = tuple([self._append_blocks(table, num_missing) for table in tables])
        branch.write_limit = (num_held + num_missing) * block_size
        num_known = num_total if num_total < branch.num_tokens else branch.num_tokens  # a pending token has no hash
        num_unregistered = num_known // block_size - branch.num_registered_blocks
        if num_unregistered >= MANY_BLOCKS and not self._returning:  # those could be given back before
            self._unregistered = branch, num_known // block_size
        elif num_unregistered > 0:
            self._register_full_blocks(branch, num_known // block_size)
        return appended

    def fork(self, parent: TokenSequence, child: TokenSequence, num_tokens: int) -> None:
        """Let `child` share the first `num_tokens` computed tokens of `parent`, the partial last block included.

        Takes no memory, so it can't fail. The first to write into the shared last block gets a copy of it
        (allocate_slots); the last holder writes in place.
        """
        if num_tokens > parent.num_computed_tokens:
            raise ValueError(
                f"{num_tokens} tokens asked for, {parent.branch_id} has computed {parent.num_computed_tokens}"
            )
        self.register_blocks()
        num_blocks = -(-num_tokens // self.block_size)
        if not self._holds(parent, num_tokens):
            raise ValueError(f"token {num_tokens} of {parent.branch_id} reads blocks that were freed")
        self.cross_tables.share(parent, child)
        child.block_tables = [table[:num_blocks] for table in parent.block_tables]
        for table in child.block_tables:
            self.pool.touch(table)
        num_full = num_tokens // self.block_size
        child.block_hashes = parent.block_hashes[:num_full]
        child.num_registered_blocks = min(parent.num_registered_blocks, num_full)
        child.num_computed_tokens = num_tokens
        parent.write_limit = child.write_limit = 0  # the last block is shared now: both must allocate before they write

    def free(self, branch: TokenSequence, trusted: bool = True) -> None:
        """Free all memory of a sequence. Full, computed blocks stay in the prefix cache until they are evicted.
        `trusted=False` is for a sequence whose step failed: every block it holds leaves the prefix cache, shared ones
        included, because one bad block in a shared prefix would fail every request that hits it.
        """
        self._swap.forget(branch)
        self.cross_tables.release(branch, trusted)
        self._free_tables(branch, trusted)

    def _free_tables(self, branch: TokenSequence, trusted: bool = True) -> None:
        self.register_blocks()
        num_valid = branch.num_computed_tokens // self.block_size if trusted else 0
        self._register_full_blocks(branch, num_valid)
        for table in branch.block_tables:
            # Blocks of a branch that is removed from a plan were registered for a step that does not run.
            for block in table[num_valid : branch.num_registered_blocks if trusted else None]:
                self.pool.uncache(block)
            self.pool.free_blocks(reversed(table))
        self._transfers.forget_copies(branch.branch_id)
        branch.block_tables = []
        branch.num_computed_tokens = 0
        branch.num_registered_blocks = 0
        branch.write_limit = 0

    def roll_back(self, branch: TokenSequence, num_tokens: int) -> None:
        """Discard the last `num_tokens` computed tokens: blocks that hold nothing else are freed."""
        self.register_blocks()
        branch.num_computed_tokens -= num_tokens
        num_kept = -(-branch.num_computed_tokens // self.block_size)
        num_full = branch.num_computed_tokens // self.block_size
        for table in branch.block_tables:
            for block in table[num_full : branch.num_registered_blocks]:  # registered before the step
                self.pool.uncache(block)
            self.pool.free_blocks(reversed(table[num_kept:]))
            del table[num_kept:]
        branch.num_registered_blocks = min(branch.num_registered_blocks, num_full)
        branch.write_limit = 0

    def take_back_last(self, branch: TokenSequence) -> None:
        """The last computed token will be computed again: in its block, which leaves the prefix cache until then, or,
        where others share it, in a copy."""
        self.register_blocks()
        branch.num_computed_tokens -= 1
        num_full = branch.num_computed_tokens // self.block_size
        for table in branch.block_tables:
            for block in table[num_full : branch.num_registered_blocks]:
                if block.ref_cnt == 1:
                    self.pool.uncache(block)
        branch.num_registered_blocks = min(branch.num_registered_blocks, num_full)
        branch.write_limit = 0

    def invalidate_writes(self, plan: SchedulerOutput) -> None:
        """A plan was not executed, or failed midway: remove the blocks that it should have written from the prefix
        cache, even if their sequence is gone."""
        written = [copy.dst for copy in plan.block_copies]
        written += [block_id for _, block_id in plan.swapped_in]
        written += [block_id for step in plan.encoder_steps for block_id in step.block_ids]
        self.uncache(self.pool.blocks[block_id] for block_id in written)
        if self.has_host_pool:
            self.invalidate_swaps(plan.swapped_out)

    def uncache(self, blocks: Iterable[Block]) -> None:
        """Remove these blocks from the prefix cache. Sequences that hold them keep them."""
        self.register_blocks()
        for block in blocks:
            self.pool.uncache(block)

    def detach(self, branch: TokenSequence) -> TokenSequence:
        """Move what an ended sequence holds to a new, read-only sequence. The branch holds nothing afterwards."""
        self.register_blocks()
        self._swap.forget(branch)  # a swapped-out one has no device blocks to keep
        self._register_full_blocks(branch, branch.num_computed_tokens // self.block_size)
        kept = TokenSequence(branch.branch_id, branch.token_ids, branch.extra_keys)
        kept.block_tables, branch.block_tables = branch.block_tables, []
        kept.block_hashes = branch.block_hashes
        kept.num_computed_tokens, branch.num_computed_tokens = branch.num_computed_tokens, 0
        kept.num_registered_blocks, branch.num_registered_blocks = branch.num_registered_blocks, 0
        branch.write_limit = 0
        self.cross_tables.hand_over(branch, kept)
        return kept

    def inherit_blocks_from_parent(
        self, parent: TokenSequence, child: TokenSequence, num_tokens: int, num_left: int = 1
    ) -> int:
        """Let `child` share the first tokens of `parent`, as many of `num_tokens` as are computed: blocks by reference,
        the partial last one by copy-on-write. Returns how many tokens it has; 0 if their prefixes differ, or if the
        parent freed blocks that are needed (sliding window). The child's last `num_left` tokens are not inherited but
        computed, so that there is a state to sample from.
        """
        count = min(num_tokens, parent.num_computed_tokens, parent.num_tokens, child.num_tokens - num_left)
        if count <= 0 or not parent.extra_keys.agree(child.extra_keys, count):
            return 0
        if parent.token_ids[:count] != child.token_ids[:count]:
            return 0
        try:
            self.fork(parent, child, count)
        except ValueError:
            return 0
        return count

    def copy_block(self, branch_id: str, group: int, place: int, shared: Block) -> Block:
        """A new block that replaces a shared one in a table, with its content. There must be a free one."""
        (own,) = self.pool.get_new_blocks(1)
        self.pool.free_blocks((shared,))
        self._transfers.copy(branch_id, group, place, shared.block_id, own.block_id)
        return own

    def take_block_copies(self) -> list[BlockCopy]:
        """The copies to execute before the next forward pass, in order. Each is returned once."""
        return self._transfers.take_copies()

    # ---- encoder inputs and swapping: see cross_tables.py and swap.py ----

    def num_cross_blocks(self, num_positions: int) -> int:
        return self.cross_tables.num_blocks(num_positions)

    def has_cross(self, sequence: TokenSequence, encoder_input: EncoderInput) -> bool:
        """Whether this input's cross table exists, or is written in the step being planned."""
        return self.cross_tables.is_there(sequence, encoder_input)

    def attach_cross(self, sequence: TokenSequence, encoder_input: EncoderInput) -> bool:
        """Give a sequence its cross table. False: not enough memory, and nothing changed."""
        return self.cross_tables.attach(sequence, encoder_input)

    def free_cross(self, sequence: TokenSequence) -> None:
        """Free the cross table only, on device or host; `free` includes it."""
        self._swap.forget_cross(sequence)
        self.cross_tables.release(sequence)

    def take_encoder_writes(self) -> list[tuple[str, CrossTable]]:
        """The tables to write in the step being planned, each with the id of a holder. Each is returned once."""
        return self.cross_tables.take_writes()

    def is_swapped(self, sequence: TokenSequence) -> bool:
        """Do not cache the answer: once its host copy is lost, the sequence has no memory and is computed again."""
        return sequence in self._swap

    def swap_out(self, branch: TokenSequence, tails: Sequence[Tables] = (), num_tail_tokens: int = 0) -> bool:
        """Move all that a sequence holds to the host, and copy `tails` there: the tables of its beams, each with
        `num_tail_tokens` computed. False: not enough host memory, or its cross table is not written or not valid, and
        nothing changed. Not for a sequence with prefix cache hits of the current step, which may not be written before
        it."""
        self.register_blocks()
        if not self._swap.save(branch, tails, num_tail_tokens):
            return False
        self.cross_tables.release(branch)
        self._free_tables(branch)
        return True

    def num_blocks_to_swap_out(self, branch: TokenSequence, tails: Sequence[Tables] = ()) -> int:
        """Blocks that a sequence and its beams hold, without a cross table."""
        every = {block.block_id for tables in (branch.block_tables, *tails) for table in tables for block in table}
        return len(every - {NULL_BLOCK})

    def num_tokens_to_recompute(self, branch: TokenSequence) -> int:
        """Computed tokens that are lost if a sequence is freed: without those that others hold too, in blocks that the
        prefix cache finds."""
        self.register_blocks()
        num_shared = 0
        if self.enable_caching:
            for entries in zip(*branch.block_tables):
                if not all(block.ref_cnt > 1 and block.block_hash is not None for block in entries):
                    break
                num_shared += self.block_size
        return max(branch.num_computed_tokens - num_shared, 0)

    def num_blocks_to_swap_in(self, branch: TokenSequence, num_tokens: int = 0) -> int:
        """Device blocks needed to swap a sequence in, and to go on to `num_tokens`. With sliding windows, which free
        blocks on the way, new blocks are not counted."""
        num_columns = 0 if self._returning else -(-num_tokens // self.block_size)
        num_new = self.num_groups * max(0, num_columns - self._swap.num_columns_of(branch))
        return self._swap.num_blocks_of(branch) + self.cross_tables.num_missing_for(branch) + num_new

    def swap_in(self, branch: TokenSequence, max_new_tokens: int = 0) -> bool:
        """Restore what a sequence held when it was swapped out. False: not enough memory, and nothing changed. It must
        run in the step being planned, so that a failure of that step marks its content as invalid. It needs room for
        `max_new_tokens` as well; otherwise it would be swapped out again at once."""
        num_tokens = min(branch.num_tokens, self._swap.num_computed_tokens_of(branch) + max_new_tokens)
        if self.num_blocks_to_swap_in(branch, num_tokens) > self.pool.num_free_blocks:
            return False
        self.cross_tables.attach_swapped(branch)
        self._swap.restore(branch)
        return True

    def num_tail_tokens_on_host(self, trunk: TokenSequence) -> int:
        """Computed tokens of each beam of a swapped trunk; 0: they are not on the host. May change between calls."""
        return self._swap.num_tail_tokens_of(trunk)

    def swap_in_with_tails(self, trunk: TokenSequence) -> list[Tables]:
        """Restore what a trunk held when it was swapped out with its beams, and return the beams' tables. There must be
        enough free blocks for all of it, and they must run in the step being planned."""
        self.cross_tables.attach_swapped(trunk)
        tails = self._swap.restore(trunk)
        self._register_full_blocks(trunk, trunk.num_computed_tokens // self.block_size)
        return tails

    def take_swaps(self) -> tuple[list[BlockSwap], list[BlockSwap]]:
        """The blocks to swap out and in before the next forward pass. Each is returned once."""
        return self._transfers.take_swaps()

    def invalidate_swaps(self, swapped_out: list[BlockSwap]) -> None:
        """The step with these swaps failed: sequences with these host copies, or swapped out since, are computed
        again."""
        self._swap.forget_invalid([host_block for _, host_block in swapped_out])

    def reset(self, sequences: Iterable[TokenSequence]) -> bool:
        """Free all these, and drop all cached blocks and pending transfers. False: other holders remain."""
        for sequence in sequences:
            self.free(sequence)
        self.take_encoder_writes(), self.take_block_copies(), self.take_swaps()
        return self.reset_prefix_cache()

    def check(self, branches: Iterable[TokenSequence]) -> None:
        """Raise AssertionError unless references are exactly the table entries of `branches`, and the pool is sound."""
        self.register_blocks()
        branches = list(branches)
        self.pool.check()
        self._swap.check(branches)
        tables = self.cross_tables.check(branches)
        num_references = {block_id: 1 for table in tables for block_id in table.block_ids}
        for branch in branches:
            lengths = {len(table) for table in branch.block_tables}
            assert len(lengths) <= 1, f"{branch.branch_id} has tables of different lengths: {sorted(lengths)}"
            num_covered = max(lengths, default=0) * self.block_size
            assert branch.num_computed_tokens <= num_covered, (
                f"{branch.branch_id}: {branch.num_computed_tokens} tokens computed, memory for {num_covered}"
            )
            assert branch.write_limit <= num_covered, f"{branch.branch_id} may write beyond its blocks"
            for table in branch.block_tables:
                for block in table:
                    if block is not self.pool.null_block:
                        num_references[block.block_id] = num_references.get(block.block_id, 0) + 1
        for block in self.pool.blocks[1:]:
            expected = num_references.get(block.block_id, 0)
            assert block.ref_cnt == expected, (
                f"block {block.block_id}: {block.ref_cnt} references, {expected} table entries"
            )

    # ---- helpers ----

    def _places_to_copy(self, tables: list[list[Block]], first_written: int, num_blocks: int) -> list[TablePlace]:
        """Blocks to be written that are shared, or may be found in the prefix cache."""
        return [
            (group, place)
            for group, table in enumerate(tables)
            for place in range(first_written, min(len(table), num_blocks))
            if table[place].ref_cnt > 1 or table[place].block_hash is not None
        ]

    def _unread_places(self, tables: list[list[Block]], num_computed_tokens: int) -> list[TablePlace]:
        """Blocks that neither the next token nor any later one reads."""
        places = []
        for group, rule in self._returning:
            table = tables[group]
            # From the right: everything before the first null block was freed earlier.
            for place in range(min(rule.num_unread_blocks(num_computed_tokens), len(table)) - 1, -1, -1):
                if table[place] is self.pool.null_block:
                    break
                places.append((group, place))
        return places

    def _holds(self, sequence: TokenSequence, num_tokens: int) -> bool:
        """Whether the sequence has every block that the token after `num_tokens` reads."""
        return all(
            rule.holds(sequence.block_tables[group], sequence.num_computed_tokens, num_tokens, self.pool.null_block)
            for group, rule in self._returning
        )

    def _count_free(self, blocks_by_group: GroupBlocks) -> int:
        null = self.pool.null_block
        return sum(block.ref_cnt == 0 and block is not null for blocks in blocks_by_group for block in blocks)

    def take_given_back(self) -> list[Block]:
        """The blocks freed since the last call by running sequences, because no later token reads them."""
        blocks, self._given_back = self._given_back, []
        return blocks

    def _give_back(self, tables: list[list[Block]], places: list[TablePlace]) -> None:
        blocks = [tables[group][place] for group, place in places]
        self.pool.free_blocks(blocks)
        self._given_back += blocks
        for group, place in places:
            tables[group][place] = self.pool.null_block

    def _append_blocks(self, table: list[Block], count: int) -> list[int]:
        if count == 0:
            return []
        blocks = self.pool.get_new_blocks(count)
        table += blocks
        return [block.block_id for block in blocks]

    def _copy_on_write(self, branch: TokenSequence, group: int, place: int) -> None:
        table = branch.block_tables[group]
        table[place] = self.copy_block(branch.branch_id, group, place, table[place])

    def _register_full_blocks(self, branch: TokenSequence, num_full_blocks: int) -> None:
        """Add the new full blocks to the prefix cache. A block that decoding fills is added when the next one is
        allocated (or the sequence is freed), so that a decoding branch calls the manager once per block and not twice.
        """
        first = branch.num_registered_blocks
        if num_full_blocks <= first or not self.enable_caching:
            return
        block_hashes, null = branch.block_hashes, self.pool.null_block
        self._hasher.extend(block_hashes, branch.token_ids, num_full_blocks, branch.extra_keys)
        cache_full_block = self.pool.cache_full_block
        for group, table in enumerate(branch.block_tables):
            for place in range(first, num_full_blocks):
                block = table[place]
                if block is not null:
                    cache_full_block(block, block_hashes[place], group)
        branch.num_registered_blocks = num_full_blocks
