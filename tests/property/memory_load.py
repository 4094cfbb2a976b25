"""Memory as a scheduler uses it, in any valid order: sequences arrive, run, fork, are saved, loaded and end, and steps
that are carried out, or fail, in whole or for single blocks. Every sequence must always find what is its own.
"""

from __future__ import annotations

from collections.abc import Callable

from hypothesis import event

from ratoon.core.encoder import EncoderInput, tokens_for_encoder
from ratoon.core.kv import KVCacheConfig, SlidingWindowSpec
from ratoon.core.outputs import TransferReport
from ratoon.core.plan import SchedulerOutput
from ratoon.memory.hashing import ExtraKeys, MediaSpan
from ratoon.memory.kv_cache_manager import KVCacheManager
from ratoon.memory.leases import LeaseTable
from ratoon.memory.sequence import TokenSequence
from tests.property.block_store import BlockStore, OutsideIndex, Transfer

INPUTS: list[EncoderInput | None] = [None, *(tokens_for_encoder([number] * number) for number in (1, 5, 9))]
BEGINNINGS = [[1, 2, 3, 4, 1, 2, 3, 4, 1, 2], [1, 2, 3, 4, 4, 4], []]
SALTS = ["x", "x", "y"]
IMAGES = [(), (MediaSpan(2, 3, "a"),), (MediaSpan(2, 3, "b"),), (MediaSpan(0, 1, "a"), MediaSpan(5, 4, "b"))]


class MemoryLoad:
    """Operations are chosen by numbers: `which` of the possible sequences, and further choices."""

    def __init__(self, config: KVCacheConfig, caching: bool, lease_fraction: float, connected: bool = False) -> None:
        """`connected`: there is a connector behind host memory, if there is host memory."""
        self.config = config
        self.windows = [g.spec.window if isinstance(g.spec, SlidingWindowSpec) else None for g in config.groups]
        self.manager = KVCacheManager(config, max_model_len=1000, enable_caching=caching)
        self.leases = LeaseTable(self.manager, int(self.manager.num_usable_blocks * lease_fraction))
        self.sizes = [group.spec.block_size for group in config.groups]
        self.store = BlockStore(max(group.spec.block_size for group in config.all_groups))
        if connected and config.num_host_blocks:
            self.manager.store.connect(OutsideIndex(self.store))
        self.sequences: list[TokenSequence] = []  # that have not ended
        self.inputs: dict[TokenSequence, EncoderInput | None] = {}
        self.salts: dict[TokenSequence, str] = {}
        self.draft: dict[TokenSequence, int] = {}  # sequences in the step being planned → tokens
        self.loading: dict[TokenSequence, set[int]] = {}  # sequences that wait for blocks → those lost so far
        self.loaded: set[TokenSequence] = set()  # that were loaded, and did not run yet
        self.num_made = 0
        self.time = 0.0

    # ---- sequences arrive, run and end ----

    def arrive(self, which: int, other: int, most: int) -> None:
        beginning = BEGINNINGS[other % len(BEGINNINGS)]
        rest = [which % 3, other % 5][: 1 + which % 2]
        images = IMAGES[other // 9 % len(IMAGES)]
        sequence = self.make(beginning + rest, INPUTS[which % len(INPUTS)], SALTS[other // 3 % len(SALTS)], images)
        self.sequences.append(sequence)
        self.admit(sequence, most)

    def admit_again(self, which: int, other: int, most: int) -> None:
        """A sequence that was refused, or preempted and not swapped out."""
        sequence = self.choose(which, [one for one in self.waiting() if not self.manager.is_swapped(one)])
        if sequence is not None:
            self.admit(sequence, most)

    def load_prefix(self, which: int, other: int, most: int) -> None:
        """What the store has of a sequence that has not begun."""
        sequence = self.choose(which, [one for one in self.waiting() if not self.manager.is_swapped(one)])
        if sequence is not None and sequence.cross is None and self.manager.load_prefix(sequence, most, None):
            event("prefix loaded")
            self.wait_for(sequence)

    def lose_outside(self, which: int, other: int, most: int) -> None:
        """Blocks of the connector go, though some may have been found."""
        for key in [key for key in self.store.outside if key[-1] % 3 == which % 3]:
            del self.store.outside[key]

    def forget_inside(self, which: int, other: int, most: int) -> None:
        """Device and host lose the content that no sequence references, as in an engine that starts anew."""
        tier = self.manager.store.tier
        for pool in [self.manager.pool, *([] if tier is None else [tier])]:
            for block in pool.blocks[1:]:
                if block.ref_cnt == 0 and block.block_hash is not None:
                    pool.uncache(block)

    def run(self, which: int, other: int, most: int) -> None:
        sequence = self.choose(which, [one for one in self.running() if one not in self.draft])
        if sequence is None:
            return
        if sequence.num_computed_tokens == sequence.num_tokens:
            self.append(sequence, other % 5)
        self.schedule(sequence, most)

    def fork(self, which: int, other: int, most: int) -> None:
        """As choices of one request do, between steps."""
        parent = None if self.draft else self.choose(which, [one for one in self.running() if one not in self.loaded])
        if parent is None:
            return
        count = parent.num_computed_tokens - other % min(4, parent.num_computed_tokens)
        child = self.make(parent.token_ids[:count], self.inputs[parent], self.salts[parent], parent.extra_keys.media)
        try:
            self.manager.fork(parent, child, count)
        except ValueError:
            return  # into a window that is gone
        assert child.cross is parent.cross
        self.append(child, other % 5)
        self.sequences.append(child)
        event("forked")

    def go_on(self, which: int, other: int, most: int) -> None:
        """As a continuation does, from a running or leased sequence, while a step is planned."""
        parents = [*self.running(), *self.leases.sequences()]
        parent = self.choose(which, [one for one in parents if self.is_settled(one)])
        if parent is None:
            return
        encoder_input = self.inputs[parent] if other % 4 else INPUTS[other // 4 % len(INPUTS)]
        count = parent.num_tokens - other % min(4, parent.num_tokens)
        images = parent.extra_keys.media if other % 3 else IMAGES[other // 9 % len(IMAGES)]
        child = self.make([*parent.token_ids[:count], other % 5], encoder_input, self.salts[parent], images)
        inherited = self.manager.inherit_blocks_from_parent(parent, child, count)
        assert not inherited or encoder_input == self.inputs[parent], "inherited what another input has made"
        assert not inherited or self.content(child, 0, inherited - 1) == self.content(parent, 0, inherited - 1)
        self.sequences.append(child)
        if not inherited:
            self.admit(child, most)
            return
        event("inherited")
        if not self.attach(child) or not self.schedule(child, most):
            self.manager.free(child)

    def end(self, which: int, other: int, most: int) -> None:
        sequence = self.choose(which, [one for one in self.sequences if self.may_leave(one)])
        if sequence is not None:
            if other % 2 and sequence not in self.draft and sequence not in self.loaded:
                self.manager.offer_text(sequence)
            self.manager.free(sequence)
            self.remove(sequence)

    def lease(self, which: int, other: int, most: int) -> None:
        ready = [one for one in self.sequences if one not in self.loaded and one not in self.loading]
        sequence = None if self.draft else self.choose(which, ready)
        if sequence is None:
            return
        self.manager.offer_text(sequence)
        if self.leases.grant(sequence, self.time + other % 20):
            kept = self.leases.find(sequence.branch_id)
            if kept is not None:  # it may have gone at once
                self.inputs[kept], self.salts[kept] = self.inputs[sequence], self.salts[sequence]
        else:
            self.manager.free(sequence)
        self.remove(sequence)

    def wait(self, which: int, other: int, most: int) -> None:
        self.time += most
        self.leases.expire(self.time)

    def evict_lease(self, which: int, other: int, most: int) -> None:
        num_free, num_reclaimable = self.manager.num_free_blocks, self.leases.num_reclaimable_blocks()
        while self.leases.evict_one():
            event("leases evicted")
        assert self.manager.num_free_blocks == num_free + num_reclaimable

    def preempt(self, which: int, other: int, most: int) -> None:
        sequence = self.choose(which, [one for one in self.running() if self.may_leave(one)])
        if sequence is None:
            return
        if sequence in self.loaded:
            event("given up after it was loaded")
            self.loaded.remove(sequence)
            self.manager.unload(sequence)
            return
        if sequence.num_computed_tokens == sequence.num_tokens:  # there is always a token to run
            self.append(sequence, other % 5)
        hashes = sequence.block_hashes
        if not (other % 4 and self.is_settled(sequence) and self.swap_out(sequence)):
            self.manager.free(sequence)
        self.draft.pop(sequence, None)
        assert sequence.block_tables == [] and sequence.cross is None and sequence.block_hashes is hashes
        assert sequence.num_computed_tokens == sequence.num_registered_tokens == sequence.write_limit == 0

    def swap_out(self, sequence: TokenSequence) -> bool:
        manager = self.manager
        before = (manager.num_free_blocks, manager.num_free_slots, manager.block_ids(sequence), sequence.cross)
        if manager.swap_out(sequence):
            event("swapped out in the step that it came in" if sequence in self.draft else "swapped out")
            assert manager.is_swapped(sequence)
            return True
        event("not swapped out")
        assert not manager.is_swapped(sequence)
        after = (manager.num_free_blocks, manager.num_free_slots, manager.block_ids(sequence), sequence.cross)
        assert before == after, "refused, and something changed"
        return False

    def swap_in(self, which: int, other: int, most: int) -> None:
        sequence = self.choose(which, [one for one in self.waiting() if self.manager.is_swapped(one)])
        if sequence is None:
            return
        num_free, num_wanted = self.manager.num_free_blocks, self.manager.num_blocks_to_swap_in(sequence)
        fits = self.manager.load(sequence)
        assert fits == (num_wanted <= num_free) and self.manager.is_swapped(sequence)
        assert self.manager.num_free_blocks == num_free - (num_wanted if fits else 0)
        if not fits:
            assert sequence.block_tables == [] and sequence.cross is None
            return
        event("swapped in")
        self.wait_for(sequence)

    def wait_for(self, sequence: TokenSequence) -> None:
        encoder_input = self.inputs[sequence]
        if encoder_input is not None:
            self.manager.load_cross(sequence, encoder_input)
        self.loading[sequence] = set()
        self.settle(set())

    def settle(self, lost: set[int]) -> None:
        """Sequences whose blocks have arrived, or failed to, can go on."""
        for sequence, lost_before in list(self.loading.items()):
            lost_before |= lost
            if self.manager.is_arriving(sequence):
                continue
            self.manager.settle(sequence, self.loading.pop(sequence))
            if lost_before:
                event("settled without some blocks")
            if sequence.block_tables:
                self.loaded.add(sequence)
            elif sequence.cross is not None:
                self.manager.free_cross(sequence)

    def reset(self, which: int, other: int, most: int) -> None:
        self.leases.end_all()
        assert self.manager.reset(self.sequences)
        self.sequences, self.draft, self.loading, self.loaded = [], {}, {}, set()
        assert self.manager.num_free_blocks == self.manager.num_usable_blocks
        assert self.manager.num_free_slots == self.config.num_host_blocks
        assert self.manager.take_encoder_writes() == [] and self.manager.take_block_copies() == []
        assert self.manager.store.take_transfers() == ([], []) and self.manager.store.snapshot().num_blocks == 0
        assert self.manager.store.take_connector_transfers() == ([], [])

    # ---- steps ----

    def step(self, which: int, other: int, most: int) -> None:
        """Of some steps the transfers from and to some slots fail."""
        _, report = self.execute(lambda transfer: other % 4 == 0 and transfer.slot % 5 == which % 5)
        self.draft = {}
        self.settle(self.manager.take_report(report))
        self.check_contents()

    def failing_step(self, which: int, other: int, most: int) -> None:
        """Sequences in it, and those that loaded something, are computed again; others are not affected."""
        plan, _ = self.execute()
        spared = {block for one in self.holders() if one not in self.draft for block in self.blocks_of(one)}
        spoilt = {block for one in self.draft for block in self.blocks_of(one)} - spared
        self.store.spoil(spoilt.union(load.block for load in plan.loads), plan.stores)
        self.manager.invalidate_writes(plan)
        for sequence in self.loading:
            self.manager.free(sequence)
        for sequence in self.loaded:
            self.manager.unload(sequence)
        self.loading, self.loaded = {}, set()
        for sequence in self.draft:
            self.manager.free(sequence, trusted=False)
        self.draft = {}
        self.check_contents()

    def execute(self, fails: Callable[[Transfer], bool] = lambda _: False) -> tuple[SchedulerOutput, TransferReport]:
        """In the order that core/plan.py says."""
        manager, store = self.manager, self.store
        stores, loads = manager.store.take_transfers()
        fetches, saves = manager.store.take_connector_transfers()
        plan = SchedulerOutput(
            block_copies=manager.take_block_copies(), stores=stores, loads=loads, fetches=fetches, saves=saves
        )
        self.check_moves(plan)
        report = store.move(plan, fails)
        for holder_id, table in manager.take_encoder_writes():
            (holder,) = [one for one in self.draft if one.branch_id == holder_id]
            assert table.encoder_input == self.inputs[holder] and table.block_ids == holder.cross.block_ids
            for index, block in enumerate(table.block_ids):
                store.fill(block, self.cross_content(holder, index))
        for sequence, count in self.draft.items():
            for position in range(sequence.num_computed_tokens, sequence.num_computed_tokens + count):
                for group, (blocks, size) in enumerate(zip(manager.block_ids(sequence), self.sizes)):
                    store.write(blocks[position // size], position % size, self.content(sequence, group, position))
            sequence.num_computed_tokens += count
        return plan, report

    def check_moves(self, plan: SchedulerOutput) -> None:
        copied, loaded = [copy.dst for copy in plan.block_copies], [load.block for load in plan.loads]
        targets = copied + loaded
        assert len(set(targets)) == len(targets), "a block is the target of two transfers"
        stored, fetched = {store.slot for store in plan.stores}, {fetch.slot for fetch in plan.fetches}
        assert len(stored) == len(plan.stores) and len(fetched) == len(plan.fetches) and stored.isdisjoint(fetched)
        assert fetched <= {load.slot for load in plan.loads}
        saved = {save.slot for save in plan.saves}
        if not stored.issuperset(saved):
            event("blocks of host memory saved to a connector")
        tier = self.manager.store.tier
        assert tier is None or all(tier.blocks[slot].block_hash is not None for slot in saved - stored)
        if plan.fetches:
            event("blocks of a connector loaded")
        if plan.saves:
            event("blocks saved to a connector")
        used = {block for sequence in self.holders() for block in self.blocks_of(sequence)}
        assert used.issuperset(copied), "a written block has no holder"
        running = {block for sequence in self.draft for block in self.blocks_of(sequence)}
        assert running.isdisjoint(loaded), "a sequence runs while its blocks arrive"
        if plan.loads and plan.stores:
            event("loads and stores in a step")
        if plan.loads and plan.block_copies:
            event("loads and copies in a step")

    def check_contents(self) -> None:
        for sequence in self.holders():
            if sequence not in self.loading:
                self.check_content(sequence)

    def check_content(self, sequence: TokenSequence) -> None:
        store = self.store
        for group, blocks in enumerate(self.manager.block_ids(sequence)):
            window = self.windows[group]
            first = 0 if window is None else max(0, sequence.num_computed_tokens - window + 1)
            for position in range(first, sequence.num_computed_tokens):
                size = self.sizes[group]
                found = store.read(blocks[position // size], position % size)
                assert found == self.content(sequence, group, position), f"{sequence.branch_id} at {position}"
        encoder_input = self.inputs[sequence]
        if encoder_input is not None and not (sequence.cross is None and sequence in self.loaded):
            assert sequence.cross is not None and sequence.cross.encoder_input is None
            assert len(sequence.cross.blocks) == self.manager.num_cross_blocks(encoder_input.num_positions)
            for index, block in enumerate(sequence.cross.block_ids):
                for offset in range(store.block_size):
                    assert store.read(block, offset) == self.cross_content(sequence, index), f"cross block {index}"

    def content(self, sequence: TokenSequence, group: int, position: int) -> object:
        keys = sequence.extra_keys
        images = tuple(span for span in keys.media if span.offset <= position)
        return group, keys.tagged, images, tuple(sequence.token_ids[: position + 1])

    def cross_content(self, sequence: TokenSequence, index: int) -> object:
        encoder_input = self.inputs[sequence]
        assert encoder_input is not None
        return self.salts[sequence], encoder_input.content_hash, index

    def check(self) -> None:
        """The invariants between any two operations."""
        all_sequences = [*self.sequences, *self.leases.sequences()]
        self.manager.check(all_sequences)
        self.leases.check()
        used = {block for sequence in all_sequences for block in self.blocks_of(sequence)}
        arriving = self.manager.store.arriving_blocks
        used.update(arriving)
        assert self.manager.num_free_blocks == self.manager.num_usable_blocks - len(used)
        tables = {sequence.cross for sequence in all_sequences if sequence.cross is not None}
        blocks = [block for table in tables for block in table.blocks]
        assert all(block.ref_cnt == 1 + (block.block_id in arriving) for block in blocks)
        keys = [table.key for table in tables if table.is_findable]
        assert len(set(keys)) == len(keys), "one input has two tables that can be found"

    # ---- helpers ----

    def make(
        self, token_ids: list[int], encoder_input: EncoderInput | None, salt: str, images: tuple[MediaSpan, ...] = ()
    ) -> TokenSequence:
        keys = [("salt", salt)]
        if encoder_input is not None:
            keys.append(("encoder input", encoder_input.content_hash.hex()))
        sequence = TokenSequence(f"s{self.num_made}", list(token_ids), ExtraKeys(keys, images))
        self.num_made += 1
        self.inputs[sequence], self.salts[sequence] = encoder_input, salt
        return sequence

    def append(self, sequence: TokenSequence, token: int) -> None:
        sequence.token_ids.append(token)
        sequence.num_tokens += 1

    def remove(self, sequence: TokenSequence) -> None:
        self.sequences.remove(sequence)
        self.draft.pop(sequence, None)
        self.loading.pop(sequence, None)
        self.loaded.discard(sequence)

    def choose(self, which: int, those: list[TokenSequence]) -> TokenSequence | None:
        return those[which % len(those)] if those else None

    def waiting(self) -> list[TokenSequence]:
        return [one for one in self.sequences if not one.block_tables and one not in self.loading]

    def running(self) -> list[TokenSequence]:
        return [sequence for sequence in self.sequences if sequence.num_computed_tokens]

    def holders(self) -> list[TokenSequence]:
        return [one for one in [*self.sequences, *self.leases.sequences()] if one.block_tables]

    def blocks_of(self, sequence: TokenSequence) -> set[int]:
        cross = [] if sequence.cross is None else sequence.cross.block_ids
        return {block for blocks in self.manager.block_ids(sequence) for block in blocks if block} | set(cross)

    def attach(self, sequence: TokenSequence) -> bool:
        encoder_input = self.inputs[sequence]
        if encoder_input is None or sequence.cross is not None:
            return True
        num_free, is_there = self.manager.num_free_blocks, self.manager.has_cross(sequence, encoder_input)
        if not self.manager.attach_cross(sequence, encoder_input):
            assert self.manager.num_free_blocks == num_free
            return False
        assert sequence.cross is not None and self.manager.has_cross(sequence, encoder_input)
        if self.manager.is_arriving(sequence):
            event("encoder input arrives")
            return False
        is_new = sequence.cross.encoder_input is not None and len(sequence.cross.holders) == 1
        assert is_there != is_new
        event("encoder input is " + ("new" if is_new else "there"))
        return True

    def admit(self, sequence: TokenSequence, most: int) -> None:
        if self.attach(sequence):
            hit_blocks, num_hit_tokens = self.manager.get_computed_blocks(sequence)
            count = min(most, sequence.num_tokens - num_hit_tokens)
            if self.manager.allocate_slots(sequence, count, hit_blocks, num_hit_tokens) is not None:
                sequence.num_computed_tokens = num_hit_tokens
                self.draft[sequence] = count
                return
        self.manager.free(sequence)

    def schedule(self, sequence: TokenSequence, most: int) -> bool:
        count = min(most, sequence.num_tokens - sequence.num_computed_tokens)
        had_cross = sequence.cross is not None
        if not self.attach(sequence) or self.manager.is_arriving(sequence):
            if not had_cross:  # it does not wait for its table here
                self.manager.free_cross(sequence)
            return False
        if self.manager.allocate_slots(sequence, count) is None:
            if not had_cross:
                self.manager.free_cross(sequence)
            return False
        self.manager.resumed(sequence)
        self.loaded.discard(sequence)
        self.draft[sequence] = count
        return True

    def written(self, sequence: TokenSequence) -> set[int]:
        """Blocks that get content of a sequence in the step that is being planned."""
        end = sequence.num_computed_tokens + self.draft.get(sequence, 0)
        return {
            block
            for blocks, size in zip(self.manager.block_ids(sequence), self.sizes)
            for block in blocks[sequence.num_computed_tokens // size : -(-end // size)]
        }

    def may_leave(self, sequence: TokenSequence) -> bool:
        """A sequence that is about to write blocks that others have already hit is not freed."""
        written = self.written(sequence)
        return all(written.isdisjoint(self.blocks_of(other)) for other in self.sequences if other is not sequence)

    def is_settled(self, sequence: TokenSequence) -> bool:
        """Whether none of its prefix hits are yet to be written. Otherwise it can't be saved, or copied in parts."""
        others = {block for other in self.draft if other is not sequence for block in self.written(other)}
        return others.isdisjoint(self.blocks_of(sequence))
