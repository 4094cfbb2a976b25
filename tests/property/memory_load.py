"""Memory as a scheduler uses it, in any valid order: sequences arrive, run, fork, are swapped and end, and steps that
are carried out, or fail, on blocks with contents. Every sequence must always find what is its own.
"""

from __future__ import annotations

from hypothesis import event

from ratoon.core.encoder import EncoderInput, tokens_for_encoder
from ratoon.core.kv import KVCacheConfig, SlidingWindowSpec
from ratoon.core.plan import SchedulerOutput
from ratoon.memory.hashing import ExtraKeys, MediaSpan
from ratoon.memory.kv_cache_manager import KVCacheManager
from ratoon.memory.leases import LeaseTable
from ratoon.memory.sequence import TokenSequence
from tests.property.block_store import BlockStore

INPUTS: list[EncoderInput | None] = [None, *(tokens_for_encoder([number] * number) for number in (1, 5, 9))]
BEGINNINGS = [[1, 2, 3, 4, 1, 2, 3, 4, 1, 2], [1, 2, 3, 4, 4, 4], []]
SALTS = ["x", "x", "y"]
IMAGES = [(), (MediaSpan(2, 3, "a"),), (MediaSpan(2, 3, "b"),), (MediaSpan(0, 1, "a"), MediaSpan(5, 4, "b"))]


class MemoryLoad:
    """Operations are chosen by numbers: `which` of the possible sequences, and further choices."""

    def __init__(self, config: KVCacheConfig, caching: bool, lease_fraction: float) -> None:
        self.config = config
        self.windows = [g.spec.window if isinstance(g.spec, SlidingWindowSpec) else None for g in config.groups]
        self.manager = KVCacheManager(config, max_model_len=1000, enable_caching=caching)
        self.leases = LeaseTable(self.manager, int(self.manager.num_usable_blocks * lease_fraction))
        self.store = BlockStore(config.block_size)
        self.sequences: list[TokenSequence] = []  # that have not ended
        self.inputs: dict[TokenSequence, EncoderInput | None] = {}
        self.salts: dict[TokenSequence, str] = {}
        self.draft: dict[TokenSequence, int] = {}  # sequences in the step being planned → tokens
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

    def run(self, which: int, other: int, most: int) -> None:
        sequence = self.choose(which, [one for one in self.running() if one not in self.draft])
        if sequence is None:
            return
        if sequence.num_computed_tokens == sequence.num_tokens:
            self.append(sequence, other % 5)
        self.schedule(sequence, most)

    def fork(self, which: int, other: int, most: int) -> None:
        """As choices of one request do, between steps."""
        parent = None if self.draft else self.choose(which, self.running())
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
            self.manager.free(sequence)
            self.remove(sequence)

    def lease(self, which: int, other: int, most: int) -> None:
        sequence = None if self.draft else self.choose(which, self.sequences)
        if sequence is None:
            return
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
        hashes = sequence.block_hashes
        if not (other % 4 and self.is_settled(sequence) and self.swap_out(sequence)):
            self.manager.free(sequence)
        self.draft.pop(sequence, None)
        assert sequence.block_tables == [] and sequence.cross is None and sequence.block_hashes is hashes
        assert sequence.num_computed_tokens == sequence.num_registered_blocks == sequence.write_limit == 0

    def swap_out(self, sequence: TokenSequence) -> bool:
        manager = self.manager
        before = (manager.num_free_blocks, manager.num_free_host_blocks, manager.block_ids(sequence), sequence.cross)
        if manager.swap_out(sequence):
            event("swapped out in the step that it came in" if sequence in self.draft else "swapped out")
            assert manager.is_swapped(sequence)
            return True
        event("not swapped out")
        assert not manager.is_swapped(sequence)
        after = (manager.num_free_blocks, manager.num_free_host_blocks, manager.block_ids(sequence), sequence.cross)
        assert before == after, "refused, and something changed"
        return False

    def swap_in(self, which: int, other: int, most: int) -> None:
        sequence = self.choose(which, [one for one in self.waiting() if self.manager.is_swapped(one)])
        if sequence is None:
            return
        num_free, num_wanted = self.manager.num_free_blocks, self.manager.num_blocks_to_swap_in(sequence)
        fits = self.manager.swap_in(sequence)
        assert fits == (num_wanted <= num_free) and self.manager.is_swapped(sequence) != fits
        assert self.manager.num_free_blocks == num_free - (num_wanted if fits else 0)
        if not fits:
            assert sequence.block_tables == [] and sequence.cross is None
            return
        event("swapped in")
        assert (sequence.cross is not None) == (self.inputs[sequence] is not None)
        if sequence.num_computed_tokens == sequence.num_tokens:
            self.append(sequence, 1)
        if not self.schedule(sequence, most):  # it must run in this step, or go
            event("swapped in and out again")
            assert self.manager.swap_out(sequence), "there is no room where it has just been"

    def reset(self, which: int, other: int, most: int) -> None:
        self.leases.end_all()
        assert self.manager.reset(self.sequences)
        self.sequences, self.draft = [], {}
        assert self.manager.num_free_blocks == self.manager.num_usable_blocks
        assert self.manager.num_free_host_blocks == self.config.num_host_blocks
        assert self.manager.take_encoder_writes() == [] and self.manager.take_block_copies() == []
        assert self.manager.take_swaps() == ([], [])

    # ---- steps ----

    def step(self, which: int, other: int, most: int) -> None:
        self.execute()
        self.draft = {}
        for sequence in self.holders():
            self.check_content(sequence)

    def failing_step(self, which: int, other: int, most: int) -> None:
        """Sequences in it are computed again; others are not affected."""
        plan = self.execute()
        spared = {block for one in self.holders() if one not in self.draft for block in self.blocks_of(one)}
        spoilt = {block for one in self.draft for block in self.blocks_of(one)} - spared
        self.store.spoil(spoilt, plan.swapped_out)
        self.manager.invalidate_swaps(plan.swapped_out)
        for sequence in self.draft:
            self.manager.free(sequence, trusted=False)
        self.draft = {}
        for sequence in self.holders():
            self.check_content(sequence)

    def execute(self) -> SchedulerOutput:
        """In the order that core/plan.py says."""
        manager, store = self.manager, self.store
        swapped_out, swapped_in = manager.take_swaps()
        plan = SchedulerOutput(block_copies=manager.take_block_copies(), swapped_out=swapped_out, swapped_in=swapped_in)
        self.check_moves(plan)
        store.move(plan)
        for holder_id, table in manager.take_encoder_writes():
            (holder,) = [one for one in self.draft if one.branch_id == holder_id]
            assert table.encoder_input == self.inputs[holder] and table.block_ids == holder.cross.block_ids
            for index, block in enumerate(table.block_ids):
                store.fill(block, self.cross_content(holder, index))
        for sequence, count in self.draft.items():
            for position in range(sequence.num_computed_tokens, sequence.num_computed_tokens + count):
                place, offset = divmod(position, store.block_size)
                for group, blocks in enumerate(manager.block_ids(sequence)):
                    store.write(blocks[place], offset, self.content(sequence, group, position))
            sequence.num_computed_tokens += count
        return plan

    def check_moves(self, plan: SchedulerOutput) -> None:
        targets = [copy.dst for copy in plan.block_copies] + [device for _, device in plan.swapped_in]
        assert len(set(targets)) == len(targets), "a block is the target of two transfers"
        assert len({host for _, host in plan.swapped_out}) == len(plan.swapped_out)
        used = {block for sequence in self.holders() for block in self.blocks_of(sequence)}
        assert used.issuperset(targets), "a written block has no holder"
        if plan.swapped_in and plan.swapped_out:
            event("swapped both ways in a step")
        if plan.swapped_in and plan.block_copies:
            event("swapped in and copied in a step")

    def check_content(self, sequence: TokenSequence) -> None:
        store = self.store
        for group, blocks in enumerate(self.manager.block_ids(sequence)):
            window = self.windows[group]
            first = 0 if window is None else max(0, sequence.num_computed_tokens - window + 1)
            for position in range(first, sequence.num_computed_tokens):
                found = store.read(blocks[position // store.block_size], position % store.block_size)
                assert found == self.content(sequence, group, position), f"{sequence.branch_id} at {position}"
        encoder_input = self.inputs[sequence]
        if encoder_input is not None:
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
        assert self.manager.num_free_blocks == self.manager.num_usable_blocks - len(used)
        tables = {sequence.cross for sequence in all_sequences if sequence.cross is not None}
        assert all(block.ref_cnt == 1 for table in tables for block in table.blocks)
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

    def choose(self, which: int, those: list[TokenSequence]) -> TokenSequence | None:
        return those[which % len(those)] if those else None

    def waiting(self) -> list[TokenSequence]:
        return [sequence for sequence in self.sequences if not sequence.block_tables]

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
        if self.manager.allocate_slots(sequence, count) is None:
            return False
        self.draft[sequence] = count
        return True

    def written(self, sequence: TokenSequence) -> set[int]:
        """Blocks that get content of a sequence in the step that is being planned."""
        end = sequence.num_computed_tokens + self.draft.get(sequence, 0)
        first, last = sequence.num_computed_tokens // self.store.block_size, -(-end // self.store.block_size)
        return {block for blocks in self.manager.block_ids(sequence) for block in blocks[first:last]}

    def may_leave(self, sequence: TokenSequence) -> bool:
        """A sequence that is about to write blocks that others have already hit is not freed."""
        written = self.written(sequence)
        return all(written.isdisjoint(self.blocks_of(other)) for other in self.sequences if other is not sequence)

    def is_settled(self, sequence: TokenSequence) -> bool:
        """Whether none of its prefix hits are yet to be written. Otherwise it can't be saved, or copied in parts."""
        others = {block for other in self.draft if other is not sequence for block in self.written(other)}
        return others.isdisjoint(self.blocks_of(sequence))
