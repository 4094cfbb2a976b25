"""Block tables of sequences: allocation, copy-on-write, forks. Accounting only; no tensor is touched here. What can be
found by hashes is in prefix_cache.py.

Decides which block holds which tokens. The scheduler decides when to run, preempt or refuse.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from itertools import islice, takewhile

from ratoon.core.encoder import EncoderInput
from ratoon.core.kv import A_DAY, IN_MEMORY, NULL_BLOCK, KVCacheConfig, SwapCosts
from ratoon.core.kv_connector import block_key
from ratoon.core.outputs import TransferReport
from ratoon.core.plan import BlockCopy, BlockIds, SchedulerOutput
from ratoon.core.stats import PrefixCacheStats
from ratoon.memory.block_copies import BlockCopies
from ratoon.memory.block_pool import Block, BlockPool
from ratoon.memory.block_store import BlockStore, HostTier
from ratoon.memory.cross_tables import CrossTables
from ratoon.memory.growth import rule_for
from ratoon.memory.hashing import ExtraKeys
from ratoon.memory.prefix_cache import GroupBlocks, PrefixCache, hashes_up_to
from ratoon.memory.sequence import CrossTable, TokenSequence
from ratoon.memory.sessions import SessionKey, SessionTable
from ratoon.memory.swap import SavedSequences, Tables, entries_of

TablePlace = tuple[int, int]  # KV group, index into its table


class KVCacheManager:
    """The block tables of all sequences over one pool. A table entry is a reference; the null block marks an entry
    without one."""

    def __init__(self, kv_config: KVCacheConfig, max_model_len: int, enable_caching: bool = True) -> None:
        self.max_model_len = max_model_len
        self.rules = [rule_for(group.spec) for group in kv_config.groups]
        self._sizes = [rule.block_size for rule in self.rules]
        self._one_size = self._sizes[0] if len(set(self._sizes)) == 1 else 0  # 0: groups have different ones
        self.num_groups = len(self.rules)
        self._returning = [(group, rule) for group, rule in enumerate(self.rules) if rule.gives_back]
        self._overwritten = [group for group, rule in enumerate(self.rules) if rule.is_overwritten]
        self.has_cross_group = kv_config.cross is not None
        self.pool = BlockPool(kv_config.num_blocks, enable_caching, len(kv_config.all_groups))
        self.prefix_cache = PrefixCache(self.pool, self.rules, enable_caching)
        self.enable_caching = self.prefix_cache.is_enabled
        self.block_size = self.prefix_cache.block_size
        self._unit = self.prefix_cache.unit
        self._given_back: list[Block] = []
        self._copies = BlockCopies()
        self.store = BlockStore(self.pool, self._copies, kv_config.fingerprint)
        if kv_config.num_host_blocks:
            num_groups = len(kv_config.all_groups)
            self.store.attach(HostTier(kv_config.num_host_blocks, num_groups, kv_config.fingerprint))
        self._saved = SavedSequences(self.pool, self.store)
        self.sessions = SessionTable(self.pool, self.store, self._sizes, len(kv_config.all_groups))
        self._loading: dict[TokenSequence, int] = {}  # tokens whose blocks are in its tables, or will arrive there
        cross_rule = None if kv_config.cross is None else rule_for(kv_config.cross.spec)
        self.cross_tables = CrossTables(self.pool, self.store, cross_rule, self.num_groups)

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
        return self.num_usable_blocks // sum(self.block_size // size for size in self._sizes) * self.block_size

    @property
    def sizes_of_blocks(self) -> str:
        """The tokens of a block, for messages."""
        return " or ".join(map(str, dict.fromkeys(self._sizes)))

    @property
    def num_slots(self) -> int:
        """Places in the block store."""
        return 0 if self.store.tier is None else self.store.tier.num_usable_blocks

    @property
    def num_free_slots(self) -> int:
        """Places in the block store that no sequence keeps for itself."""
        return 0 if self.store.tier is None else self.store.tier.num_free_blocks

    @property
    def has_tier(self) -> bool:
        """Whether the block store has a place for blocks outside the device."""
        return self.store.tier is not None

    def block_ids(self, branch: TokenSequence) -> BlockIds:
        return tuple([block.block_id for block in table] for table in branch.block_tables)

    def required_blocks(self, num_tokens: int, max_step_tokens: int | None = None) -> int:
        """The most blocks that a sequence holds until `num_tokens` are computed, without sharing."""
        step = num_tokens if max_step_tokens is None else max_step_tokens
        return sum(rule.most_blocks(num_tokens, step) for rule in self.rules)

    def missing_blocks(
        self, branch: TokenSequence, num_hit_tokens: int, hit_blocks: GroupBlocks | None, max_step_tokens: int
    ) -> int:
        """The most free blocks that a sequence takes until all its tokens are computed, given these prefix cache hits
        and what it holds already."""
        num_tokens = branch.num_tokens
        missing = sum(-(-num_tokens // size) - num_hit_tokens // size for size in self._sizes)
        missing += 0 if hit_blocks is None else self._count_free(hit_blocks)
        num_own = sum(block.ref_cnt == 1 for block in entries_of(branch.block_tables))
        return min(missing, self.required_blocks(num_tokens, max_step_tokens) - num_own)

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
        lookups = [self.pool.cached_blocks(group).get for group in range(self.num_groups)]
        return self.prefix_cache.longest_prefix(branch, max_tokens, lookups)

    def register_blocks(self) -> None:
        """Add to the prefix cache what the last allocation left for later. To be called while a step runs; before the
        manager does anything that depends on it, it does so itself."""
        self.prefix_cache.add_unregistered()

    def reset_prefix_cache(self) -> bool:
        """Drop all cached blocks and their statistics. Refused (False) while any block is in use."""
        self.register_blocks()
        if not self.pool.reset_prefix_cache() or not self.store.reset():
            return False
        self.sessions.clear()
        self.prefix_cache.stats = PrefixCacheStats()
        return True

    # ---- memory of a sequence ----

    def allocate_slots(
        self,
        branch: TokenSequence,
        num_new_tokens: int,
        new_computed_blocks: GroupBlocks | None = None,
        num_new_computed_tokens: int = 0,
        num_lookahead_tokens: int = 0,
    ) -> BlockIds | None:
        """Make room for the tokens of a step. Returns the ids appended to each table, or None (and nothing changed).

            |  computed  |  new computed  |         new          |  lookahead        |
            | in the     | prefix hit:    | written in this step | for drafts behind |
            | tables     | by reference   |                      | the step's end    |
                                          ^ num_computed         ^ num_total         ^ num_slots

        A written block that is shared or in the prefix cache is first replaced by a copy (copy-on-write). If memory is
        short, one that no other sequence holds leaves the prefix cache instead and is written in place, so that a
        sequence alone in the pool never takes more than `required_blocks`.
        """
        self.prefix_cache.add_unregistered(but=branch)
        num_computed = branch.num_computed_tokens + num_new_computed_tokens
        num_total = num_computed + num_new_tokens
        num_slots = num_total + num_lookahead_tokens
        tables = branch.block_tables or [[] for _ in self._sizes]

        # Count first, so that a refusal changes nothing. A decoding branch at the end of a block, the most frequent
        # case, needs none of the helpers.
        size = self._one_size
        if size:
            num_held = len(tables[0])  # the tables of all groups have the same length
            writes_held = num_computed // size < num_held
            if new_computed_blocks is not None:
                num_held += len(new_computed_blocks[0])
            num_blocks = -(-num_slots // size)
            missing = num_blocks - num_held if num_blocks > num_held else 0
            num_missing, num_wanted = (missing,) * self.num_groups, missing * self.num_groups
            write_limit = (num_held + missing) * size
        else:
            num_missing, writes_held, write_limit = self._count_by_group(
                tables, num_computed, num_slots, new_computed_blocks
            )
            num_wanted = sum(num_missing)
        num_available = self.pool.num_free_blocks
        to_copy: list[TablePlace] = []
        to_uncache: list[TablePlace] = []
        unread: list[TablePlace] = []
        if writes_held:
            to_copy = self._places_to_copy(tables, num_computed, num_slots)
            num_wanted += len(to_copy)
        if self._returning:
            unread = self._unread_places(tables, num_computed)
            num_available += sum(tables[group][place].ref_cnt == 1 for group, place in unread)
        if new_computed_blocks is not None:
            num_available -= self._count_free(new_computed_blocks)
        if num_wanted > num_available:
            to_uncache = [(group, place) for group, place in to_copy if tables[group][place].ref_cnt == 1]
            if num_wanted - len(to_uncache) > num_available:
                return None

        branch.block_tables = tables
        if unread:
            self._give_back(tables, unread)
        if new_computed_blocks is not None:
            for table, blocks in zip(tables, new_computed_blocks):
                self.pool.touch(blocks)
                table.extend(blocks)
        if to_copy:
            self._copy_on_write(branch, to_copy, to_uncache)
        appended = tuple(map(self._append_blocks, tables, num_missing))
        branch.write_limit = write_limit
        num_known = num_total if num_total < branch.num_tokens else branch.num_tokens  # a pending token has no hash
        self.prefix_cache.add_written(branch, num_known)
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
        if not self.holds(parent, num_tokens):
            raise ValueError(f"token {num_tokens} of {parent.branch_id} reads blocks that were freed")
        self.cross_tables.share(parent, child)
        child.block_tables = [table[: -(-num_tokens // size)] for table, size in zip(parent.block_tables, self._sizes)]
        for table in child.block_tables:
            self.pool.touch(table)
        child.block_hashes = hashes_up_to(parent, num_tokens)
        child.num_registered_tokens = min(parent.num_registered_tokens, num_tokens - num_tokens % self._unit)
        child.num_computed_tokens = num_tokens
        parent.write_limit = child.write_limit = 0  # the last block is shared now: both must allocate before they write

    def holds(self, sequence: TokenSequence, num_tokens: int) -> bool:
        """Whether the sequence has every block that the token after `num_tokens` reads."""
        return all(
            rule.holds(sequence.block_tables[group], sequence.num_computed_tokens, num_tokens, self.pool.null_block)
            for group, rule in self._returning
        )

    def free(self, branch: TokenSequence, trusted: bool = True) -> None:
        """Free all memory of a sequence. Full, computed blocks stay in the prefix cache until they are evicted.
        `trusted=False` is for a sequence whose step failed: every block it holds leaves the prefix cache, shared ones
        included, because one bad block in a shared prefix would fail every request that hits it.
        """
        self._saved.forget(branch)
        self.cross_tables.release(branch, trusted)
        self._free_tables(branch, trusted)

    def shares_unwritten_blocks(self, branch: TokenSequence) -> bool:
        """Whether other sequences hold blocks that this one writes in the step being planned: it must not leave the
        step."""
        num_computed = branch.num_computed_tokens
        return any(
            block.ref_cnt > 1 and block.block_hash is not None
            for table, size in zip(branch.block_tables, self._sizes)
            for block in table[num_computed // size :]
        )

    def offer_text(
        self, ended: TokenSequence, retention: str | None = None, lease_seconds: float | None = None
    ) -> None:
        """A text has ended: what outlives the engine is offered its full blocks, unless it is to stay in memory. It
        still has its memory. `lease_seconds`: that it is to be leased for."""
        if not self.store.keeps_ended_texts or retention == IN_MEMORY:
            return
        self.register_blocks()
        self.prefix_cache.add(ended, ended.num_computed_tokens)
        for table, size in zip(ended.block_tables, self._sizes):
            full = [one for one in table[: ended.num_computed_tokens // size] if one.block_hash is not None]
            for block in full:
                block.in_memory = False  # what a text that was to stay in memory has in common with this one
            named: list[tuple[Block, bytes | None, int]] = [(one, one.block_hash, one.group) for one in full]
            self.store.offer_kept(named)
            if retention == A_DAY:
                self.store.prolong(full)
            if lease_seconds is not None:
                self.store.keep_leased(named, lease_seconds)
        if ended.cross is not None and ended.cross.is_settled:
            named = list(self.cross_tables.named_blocks(ended.cross))
            self.store.offer_kept(named)
            if lease_seconds is not None:
                self.store.keep_leased(named, lease_seconds)

    def last_key_of(self, token_ids: list[int], extra_keys: ExtraKeys) -> bytes | None:
        """The key of the last full block of a text whose last token is not computed. None: it has none."""
        text = TokenSequence("", token_ids, extra_keys)
        num_tokens = self.prefix_cache.whole_blocks(text, len(token_ids) - 1)
        if num_tokens <= 0:
            return None
        group = len(self._sizes) - 1
        self.prefix_cache.hash_blocks(text, num_tokens)
        return block_key(group, text.block_hashes[self._sizes[group]][num_tokens // self._sizes[group] - 1])

    def end_in_session(
        self, key: SessionKey, ended: TokenSequence, num_prompt_tokens: int, request_id: str, is_branch: bool = False
    ) -> list[str]:
        """A text has ended in a session, and still has its memory. See SessionTable.add."""
        if not self.enable_caching:
            return []
        self.register_blocks()
        self.prefix_cache.add(ended, ended.num_computed_tokens)
        return self.sessions.add(key, ended, num_prompt_tokens, request_id, is_branch)

    def send_blocks(self, branch: TokenSequence, name: str) -> None:
        """The full blocks of a sequence's computed tokens, which plans before the next one have written, go to another
        engine."""
        self.register_blocks()
        self.prefix_cache.add(branch, branch.num_computed_tokens)
        for table, size in zip(branch.block_tables, self._sizes):
            full = table[: branch.num_computed_tokens // size]
            self.store.send(name, [block for block in full if block.block_hash is not None])

    def _free_tables(self, branch: TokenSequence, trusted: bool = True) -> None:
        self.register_blocks()
        num_valid = branch.num_computed_tokens if trusted else 0
        self.prefix_cache.add(branch, num_valid)
        for table, size in zip(branch.block_tables, self._sizes):
            # Blocks of a branch that is removed from a plan were registered for a step that does not run.
            for block in table[num_valid // size : branch.num_registered_tokens // size if trusted else None]:
                if not trusted:
                    self.store.forget(block.block_hash, block.group)
                self.pool.uncache(block)
            self.pool.free_blocks(reversed(table))
        self._copies.forget_branch(branch.branch_id)
        self._loading.pop(branch, None)
        self.prefix_cache.forget_written(branch)
        branch.block_tables = []
        branch.num_computed_tokens = 0
        branch.num_registered_tokens = 0
        branch.write_limit = 0

    def roll_back(self, branch: TokenSequence, num_tokens: int) -> None:
        """Discard the last `num_tokens` computed tokens: blocks that hold nothing else are freed, and those that were
        registered before their step leave the prefix cache. So is the last block of a group in which these tokens have
        overwritten what was before them: from there the sequence can't go on."""
        self._uncompute(branch, num_tokens, keeps_shared=False)
        for group in self._overwritten if num_tokens else ():
            table = branch.block_tables[group]
            place, num_in_block = divmod(branch.num_computed_tokens, self._sizes[group])
            if num_in_block and table[place] is not self.pool.null_block:
                self.pool.free_blocks((table[place],))
                table[place] = self.pool.null_block
        for table, size in zip(branch.block_tables, self._sizes):
            num_kept = -(-branch.num_computed_tokens // size)
            self.pool.free_blocks(reversed(table[num_kept:]))
            del table[num_kept:]

    def take_back(self, branch: TokenSequence, num_tokens: int = 1, keeps_shared: bool = True) -> None:
        """The last computed tokens count as not computed. What follows is written in their blocks, which stay and leave
        the prefix cache until then, or, where others share them (`keeps_shared`), in copies. Not for a model with
        states: what a token has overwritten in place is gone."""
        assert not self._overwritten, f"{branch.branch_id} has states, which tokens can't be taken back from"
        self._uncompute(branch, num_tokens, keeps_shared)

    def _uncompute(self, branch: TokenSequence, num_tokens: int, keeps_shared: bool) -> None:
        self.register_blocks()
        self.prefix_cache.forget_written(branch)
        branch.num_computed_tokens -= num_tokens
        num_left = branch.num_computed_tokens
        for table, size in zip(branch.block_tables, self._sizes):
            for block in table[num_left // size : branch.num_registered_tokens // size]:
                if block.ref_cnt == 1 or not keeps_shared:
                    self.pool.uncache(block)
        branch.num_registered_tokens = min(branch.num_registered_tokens, num_left - num_left % self._unit)
        branch.write_limit = 0

    def invalidate_writes(self, plan: SchedulerOutput) -> set[int]:
        """A plan was not executed, or failed midway: remove the blocks that it should have written from the prefix
        cache, even if their sequence is gone. Returns the device blocks that it should have loaded."""
        written = [copy.dst for copy in plan.block_copies]
        written += [block_id for step in plan.encoder_steps for block_id in step.block_ids]
        self.uncache(self.pool.blocks[block_id] for block_id in written)
        if not self.has_tier:
            return set()
        self._saved.forget_lost(self.store.unwritten_slots.union(store.slot for store in plan.stores))
        return self.store.plan_failed(plan.stores, plan.loads)

    def uncache(self, blocks: Iterable[Block]) -> None:
        """Remove these blocks from the prefix cache. Sequences that hold them keep them."""
        self.register_blocks()
        for block in blocks:
            self.pool.uncache(block)

    def detach(self, branch: TokenSequence) -> TokenSequence:
        """Move what an ended sequence holds to a new, read-only sequence. The branch holds nothing afterwards."""
        self.register_blocks()
        self._saved.forget(branch)  # a swapped-out one has no device blocks to keep
        self.prefix_cache.add(branch, branch.num_computed_tokens)
        self.prefix_cache.forget_written(branch)
        kept = TokenSequence(branch.branch_id, branch.token_ids, branch.extra_keys)
        kept.stays_in_memory = branch.stays_in_memory
        kept.block_tables, branch.block_tables = branch.block_tables, []
        kept.block_hashes = branch.block_hashes
        kept.num_computed_tokens, branch.num_computed_tokens = branch.num_computed_tokens, 0
        kept.num_registered_tokens, branch.num_registered_tokens = branch.num_registered_tokens, 0
        branch.write_limit = 0
        self.cross_tables.hand_over(branch, kept)
        return kept

    def inherit_blocks_from_parent(
        self, parent: TokenSequence, child: TokenSequence, num_tokens: int, num_left: int = 1
    ) -> int:
        """Let `child` share the first tokens of `parent`, as many of `num_tokens` as are computed: blocks by reference,
        the partial last one by copy-on-write. Returns how many tokens it has; 0 if their prefixes differ, or if the
        parent freed blocks that are needed (sliding window). Where the parent has states, they are those up to the
        nearest checkpoint that it still holds. The child's last `num_left` tokens are not inherited but computed, so
        that there is a state to sample from.
        """
        count = min(num_tokens, parent.num_computed_tokens, parent.num_tokens, child.num_tokens - num_left)
        count = child.extra_keys.before_part(count)
        if count <= 0 or not parent.extra_keys.agree(child.extra_keys, count):
            return 0
        if parent.token_ids[:count] != child.token_ids[:count]:
            return 0
        self.register_blocks()
        if not self.holds(parent, count):
            count = self._last_checkpoint(parent, child, count) if self._overwritten else 0
        if not count:
            return 0
        try:
            self.fork(parent, child, count)
        except ValueError:  # another encoder input
            return 0
        return count

    def _last_checkpoint(self, parent: TokenSequence, child: TokenSequence, num_tokens: int) -> int:
        """The most of the first `num_tokens` behind which the child can go on with blocks of the parent. 0: none."""
        num_tokens = self.prefix_cache.whole_blocks(child, num_tokens)
        while num_tokens > 0 and not self.holds(parent, num_tokens):
            num_tokens = self.prefix_cache.whole_blocks(child, num_tokens - 1)
        return num_tokens

    def copy_block(self, branch_id: str, group: int, place: int, shared: Block) -> Block:
        """A new block that replaces a shared one in a table, with its content. There must be a free one."""
        (own,) = self.pool.get_new_blocks(1)
        self.pool.free_blocks((shared,))
        self._copies.add(branch_id, group, place, shared.block_id, own.block_id)
        return own

    def take_block_copies(self) -> list[BlockCopy]:
        """The copies to execute before the next forward pass, in order. Each is returned once. The plan is made: what
        its step writes can be found by those behind it."""
        self.prefix_cache.plan_is_made()
        return self._copies.take()

    # ---- encoder inputs: see cross_tables.py ----

    def num_cross_blocks(self, num_positions: int) -> int:
        return self.cross_tables.num_blocks(num_positions)

    def num_missing_cross_blocks(self, sequence: TokenSequence, encoder_input: EncoderInput) -> int:
        """The free blocks that the sequence's cross table takes: none if another sequence holds it."""
        return self.cross_tables.num_missing(sequence, encoder_input)

    def has_cross(self, sequence: TokenSequence, encoder_input: EncoderInput, may_load: bool = True) -> bool:
        """Whether this input's cross table exists, on the device or, if it may be loaded, in the block store, or is
        written in the step being planned."""
        return self.cross_tables.is_there(sequence, encoder_input, may_load)

    def attach_cross(self, sequence: TokenSequence, encoder_input: EncoderInput, may_load: bool = True) -> bool:
        """Give a sequence its cross table, which may be arriving. False: not enough memory, and nothing changed."""
        return self.cross_tables.attach(sequence, encoder_input, may_load)

    def free_cross(self, sequence: TokenSequence) -> None:
        """Free the cross table only; `free` includes it."""
        self.cross_tables.release(sequence)

    def take_encoder_writes(self) -> list[tuple[str, CrossTable]]:
        """The tables to write in the step being planned, each with the id of a holder. Each is returned once."""
        return self.cross_tables.take_writes()

    # ---- sequences in the block store: saved when they are preempted, and loaded ----

    def is_swapped(self, sequence: TokenSequence) -> bool:
        """Whether its blocks are kept in the store. Do not cache the answer: once one is lost, the sequence is computed
        again."""
        return self._saved.find(sequence) is not None

    def swap_out(self, branch: TokenSequence, tails: Sequence[Tables] = (), num_tail_tokens: int = 0) -> bool:
        """Move all that a sequence holds to the store, and copy `tails` there: the tables of its beams, each with
        `num_tail_tokens` computed. False: not enough room, or its cross table is not written or not valid, and nothing
        changed. Not for a sequence with prefix cache hits of the current step, which may not be written before it."""
        self.register_blocks()
        cross, num_tokens = branch.cross, branch.num_computed_tokens
        if cross is not None and not cross.is_settled:
            return False
        tables = [table[: rule.num_blocks(num_tokens)] for rule, table in zip(self.rules, branch.block_tables)]
        num_full = [num_tokens // rule.block_size for rule in self.rules]
        own_cross = self.cross_tables.named_blocks(cross) if cross is not None and len(cross.holders) == 1 else ()
        if not self._saved.save(branch, tables, num_full, tails, num_tail_tokens, own_cross):
            return False
        self.cross_tables.release(branch)
        self._free_tables(branch)
        return True

    def num_blocks_to_swap_out(self, branch: TokenSequence, tails: Sequence[Tables] = ()) -> int:
        """Blocks that a sequence and its beams hold, without a cross table."""
        every = {block.block_id for block in entries_of(branch.block_tables, *tails)}
        return len(every - {NULL_BLOCK})

    def num_tokens_to_recompute(self, branch: TokenSequence) -> int:
        """Computed tokens that are lost if a sequence is freed: without those that others hold too, in blocks that the
        prefix cache finds."""
        self.register_blocks()
        num_shared = 0
        if self.enable_caching:
            num_shared = min(_num_shared(table) * size for table, size in zip(branch.block_tables, self._sizes))
        return max(branch.num_computed_tokens - num_shared, 0)

    def num_blocks_to_swap_in(self, branch: TokenSequence, num_tokens: int = 0) -> int:
        """Free blocks needed to load a saved sequence, and to go on to `num_tokens`. With sliding windows, which free
        blocks on the way, new blocks are not counted."""
        saved = self._saved.find(branch)
        assert saved is not None
        num_new = 0
        if not self._returning:
            num_new = sum(
                max(0, rule.num_blocks(num_tokens) - len(table)) for rule, table in zip(self.rules, saved.tables)
            )
        return self._saved.num_blocks_to_load(saved) + num_new

    def load(self, branch: TokenSequence, max_new_tokens: int = 0, num_to_come: int = 0) -> bool:
        """Begin to load a saved sequence. False: not enough memory, and nothing changed. It needs room for
        `max_new_tokens` and `num_to_come` further blocks as well; otherwise it would be saved again at once. It waits
        until `is_arriving` is False, and is settled then."""
        saved = self._saved.find(branch)
        assert saved is not None
        num_tokens = min(branch.num_tokens, saved.num_computed_tokens + max_new_tokens)
        if self.num_blocks_to_swap_in(branch, num_tokens) + num_to_come > self.pool.num_free_blocks:
            return False
        self._saved.load(branch)
        self._loading[branch] = saved.num_computed_tokens
        return True

    def load_prefix(self, branch: TokenSequence, num_new_tokens: int, costs: SwapCosts | None) -> bool:
        """Begin to load what the store has of a sequence's prefix, if that is longer than what the device has, takes
        less time than to compute it, and there is memory for it and for `num_new_tokens` after it. False: nothing
        changed."""
        self.register_blocks()
        for with_connector in (True, False):  # whose blocks need slots of host memory
            lookups = [self.store.lookup(group, with_connector) for group in range(self.num_groups)]
            if with_connector and (limit := self.prefix_cache.hashed_limit(branch, None, lookups)):
                for group, size in enumerate(self._sizes):
                    self.store.look_ahead(group, branch.block_hashes[size][: limit // size])
            hit_blocks, num_tokens = self.prefix_cache.longest_prefix(branch, None, lookups)
            found = entries_of(hit_blocks)
            if self.store.has_room_for(found):
                break
        num_slots = sum(map(self.store.is_slot, found))
        if not num_slots and not self.store.is_arriving(found):
            return False
        num_more = num_tokens - self.get_computed_blocks(branch)[1]
        if num_more <= 0 or not self.store.is_worth_loading(found, num_more, costs):
            return False
        last = min(branch.num_tokens, num_tokens + num_new_tokens)
        num_wanted = sum(rule.num_blocks(last) - rule.num_blocks(num_tokens) for rule in self.rules)
        num_free = self._count_free(([block for block in found if not self.store.is_slot(block)],))
        if num_slots + num_free + num_wanted > self.pool.num_free_blocks:
            return False
        blocks = iter(self.store.bring(found, branch.stays_in_memory))
        branch.block_tables = [list(islice(blocks, len(hit))) for hit in hit_blocks]
        self._loading[branch] = num_tokens
        return True

    def load_cross(self, branch: TokenSequence, encoder_input: EncoderInput) -> None:
        """Give a sequence that is loaded its cross table at once, if that is there or in the store, and there is memory
        for it."""
        if self.cross_tables.is_settled(branch, encoder_input):
            self.cross_tables.attach(branch, encoder_input)

    def is_arriving(self, sequence: TokenSequence) -> bool:
        """Whether blocks that it holds are still being loaded."""
        if not self.store.arriving_blocks:
            return False
        cross = [] if sequence.cross is None else sequence.cross.blocks
        return self.store.is_arriving([*entries_of(sequence.block_tables, *self.loaded_tails(sequence)), *cross])

    def settle(self, branch: TokenSequence, lost: set[int]) -> None:
        """What a sequence waited for has arrived, except the blocks `lost`: it has computed what is there."""
        cross, saved = branch.cross, self._saved.find(branch)
        if cross is not None and not lost.isdisjoint(cross.block_ids):
            self.cross_tables.release(branch, trusted=False)
        if saved is not None and not lost.isdisjoint(block.block_id for block in entries_of(*saved.loaded_tails)):
            self._saved.forget_tails(branch)
        if branch not in self._loading:
            return
        branch.num_computed_tokens = num_tokens = self._loading.pop(branch)
        for rule, table in zip(self.rules, branch.block_tables):
            first_lost = next((place for place, block in enumerate(table) if block.block_id in lost), None)
            if first_lost is not None:
                num_tokens = min(num_tokens, first_lost * rule.block_size)
        if num_tokens < branch.num_computed_tokens:
            self._saved.forget(branch)
        if not self.num_tail_tokens(branch):  # a token is left to run
            num_tokens = min(num_tokens, branch.num_tokens - 1)
        num_tokens = branch.extra_keys.before_part(num_tokens)
        if not self.holds(branch, num_tokens):
            branch.num_computed_tokens = 0  # what is lost must not enter the prefix cache
            self._free_tables(branch)
        elif num_tokens < branch.num_computed_tokens:
            self.roll_back(branch, branch.num_computed_tokens - num_tokens)
        self.prefix_cache.add(branch, branch.num_computed_tokens)

    def unload(self, branch: TokenSequence) -> None:
        """Free the device blocks of a sequence that was loaded and did not run yet. What is saved of it stays so."""
        self._saved.unload(branch)
        self.cross_tables.release(branch)
        self._free_tables(branch)

    def num_tail_tokens(self, trunk: TokenSequence) -> int:
        """Computed tokens of each beam that is saved with its trunk; 0: there are none. May change between calls."""
        saved = self._saved.find(trunk)
        return 0 if saved is None else saved.num_tail_tokens

    def loaded_tails(self, trunk: TokenSequence) -> list[Tables]:
        """The tables of beams that were loaded with their trunk. They belong to the store until `resumed`."""
        saved = self._saved.find(trunk)
        return [] if saved is None else saved.loaded_tails

    def resumed(self, branch: TokenSequence) -> None:
        """A sequence runs again, and has taken over the tables of its beams: nothing is kept for it in the store."""
        self._saved.forget(branch, keep_tails=True)

    def take_report(self, report: TransferReport) -> set[int]:
        """A step's news of loads and stores. Returns the device blocks whose content could not be loaded."""
        if report.failed_stores:
            self._saved.forget_lost(set(report.failed_stores))
        return self.store.take_report(report)

    def reset(self, sequences: Iterable[TokenSequence]) -> bool:
        """Free all these, and drop all cached blocks and pending transfers. False: other holders remain."""
        for sequence in sequences:
            self.free(sequence)
        self.take_encoder_writes(), self.take_block_copies(), self.store.take_transfers()
        self.store.take_connector_transfers()
        return self.reset_prefix_cache()

    def full_blocks(self, sequence: TokenSequence) -> list[tuple[Block, bytes, int]]:
        """The blocks of a sequence that can be found by their hashes, each with its hash and its group."""
        self.register_blocks()
        self.prefix_cache.add(sequence, sequence.num_computed_tokens)
        return [
            (block, block.block_hash, block.group)
            for table, size in zip(sequence.block_tables, self._sizes)
            for block in table[: sequence.num_computed_tokens // size]
            if block.block_hash is not None
        ]

    def check(self, branches: Iterable[TokenSequence], slot_references: Iterable[Block] = ()) -> None:
        """Raise AssertionError unless references are exactly the table entries of `branches`, and the pool is sound.
        `slot_references`: slots of host memory that others hold, one entry for each reference."""
        self.register_blocks()
        branches = list(branches)
        self.pool.check()
        self.sessions.check()
        slots, tails = self._saved.check(branches)
        references = self.store.check([*slots, *slot_references])
        references += [block_id for table in self.cross_tables.check(branches) for block_id in table.block_ids]
        references += [block.block_id for block in entries_of(*tails) if block is not self.pool.null_block]
        num_references = Counter(references)
        for branch in branches:
            lengths = [len(table) * size for table, size in zip(branch.block_tables, self._sizes)]
            num_covered = min(lengths, default=0)
            differ = 0 if self._one_size else 2 * max(self._sizes)  # a tail begins and ends within a block
            assert max(lengths, default=0) - num_covered <= differ, (
                f"{branch.branch_id} has tables of different lengths: {lengths}"
            )
            assert branch.num_computed_tokens <= num_covered, (
                f"{branch.branch_id}: {branch.num_computed_tokens} tokens computed, memory for {num_covered}"
            )
            assert branch.write_limit <= num_covered, f"{branch.branch_id} may write beyond its blocks"
            for table in branch.block_tables:
                for block in table:
                    if block is not self.pool.null_block:
                        num_references[block.block_id] += 1
        for block in self.pool.blocks[1:]:
            expected = num_references[block.block_id]
            assert block.ref_cnt == expected, (
                f"block {block.block_id}: {block.ref_cnt} references, {expected} table entries"
            )

    # ---- helpers ----

    def _count_by_group(
        self, tables: list[list[Block]], num_computed: int, num_total: int, hit_blocks: GroupBlocks | None
    ) -> tuple[tuple[int, ...], bool, int]:
        """The blocks that each group misses, whether blocks in the tables are written, and up to which token there is
        room then."""
        num_missing, writes_held, write_limits = [], False, []
        for group, (table, size) in enumerate(zip(tables, self._sizes)):
            num_held = len(table) + (0 if hit_blocks is None else len(hit_blocks[group]))
            missing = max(0, -(-num_total // size) - num_held)
            num_missing.append(missing)
            write_limits.append((num_held + missing) * size)
            writes_held = writes_held or num_computed // size < len(table)
        return tuple(num_missing), writes_held, min(write_limits)

    def _places_to_copy(self, tables: list[list[Block]], num_computed: int, num_total: int) -> list[TablePlace]:
        """Blocks to be written that are shared, or may be found in the prefix cache."""
        return [
            (group, place)
            for group, (table, size) in enumerate(zip(tables, self._sizes))
            for place in range(num_computed // size, min(len(table), -(-num_total // size)))
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

    def _copy_on_write(self, branch: TokenSequence, to_copy: list[TablePlace], to_uncache: list[TablePlace]) -> None:
        """Make these blocks writable: replace them by copies, or remove those in `to_uncache` from the prefix cache."""
        for group, place in to_copy:
            table = branch.block_tables[group]
            if (group, place) in to_uncache:
                self.pool.uncache(table[place])
            else:
                table[place] = self.copy_block(branch.branch_id, group, place, table[place])


def _num_shared(table: list[Block]) -> int:
    """Leading blocks that other sequences hold, too, and that the prefix cache finds."""
    is_shared = (block.ref_cnt > 1 and block.block_hash is not None for block in table)
    return sum(1 for _ in takewhile(bool, is_shared))
