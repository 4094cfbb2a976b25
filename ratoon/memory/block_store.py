"""The block store: blocks outside the device pool, found by hash. Accounting only; a step's plan moves the contents.

A tier holds blocks in another memory: host memory and, behind it, a KV connector (core/kv_connector.py), whose blocks
pass through host memory. A tier has three verbs: it is *offered* a block that leaves the device pool, it is asked to
*find* a hash, and it *loads* a block into one of the device. Hashes
say what tokens a block stands for; the fingerprint says what its bytes mean, and is compared once, when a tier is
attached. Which sequences wait for a load is known to the callers.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass

from ratoon.core.kv import KVFingerprint, SwapCosts
from ratoon.core.kv_connector import BlockIndex, TransferIndex, block_key
from ratoon.core.outputs import TransferReport
from ratoon.core.plan import BlockTransfer, ConnectorTransfer
from ratoon.core.stats import StoreStats
from ratoon.memory.block_copies import BlockCopies
from ratoon.memory.block_pool import FIRST, Block, BlockPool
from ratoon.memory.fetch_times import FetchTimes

Lookup = Callable[[bytes], Block | None]
OUTSIDE = -1  # the number of a block that is in a connector alone


class HostTier(BlockPool):
    """Blocks in host memory, in a pool like the device's: those with a hash and without references are kept until they
    are the least recently used, references keep what belongs to one sequence."""

    def __init__(self, num_blocks: int, num_groups: int, fingerprint: KVFingerprint) -> None:
        super().__init__(num_blocks + 1, num_groups=num_groups)  # slots begin with 1, as on the device
        self.fingerprint = fingerprint

    @property
    def num_filled_blocks(self) -> int:
        """At least so many have content: a slot is found by its hash, or a sequence keeps it, or both."""
        return max(self.num_cached_blocks, self.num_usable_blocks - self.num_free_blocks)


@dataclass(slots=True)
class Arrival:
    """A load under way. It references its device block and its slot until a step's result says how it ended."""

    block: Block
    slot: Block
    block_hash: bytes | None  # of the slot when the load began; None: the content belongs to one sequence
    is_valid: bool = True  # False: the slot turned out to be without content


class BlockStore:
    """A plan executes its stores before its loads, and plans are executed in order, so a slot can be found as soon as
    its store is planned. Without a tier nothing is stored or found."""

    def __init__(self, pool: BlockPool, copies: BlockCopies, fingerprint: KVFingerprint) -> None:
        self.tier: HostTier | None = None
        self.index: BlockIndex | None = None  # the tier behind it
        self.fingerprint = fingerprint
        # Called with the number of slots that must be free, if fewer are: others may give theirs up
        self.make_room: Callable[[int], None] | None = None
        self.fetch_times = FetchTimes()  # of the connector
        self._stats = StoreStats()
        self._pool = pool
        self._copies = copies
        self._stores: dict[int, int] = {}  # slot → device block that is read in the next plan
        self._loads: list[BlockTransfer] = []  # of the next plan
        self._saves: dict[int, bytes] = {}  # slot → key, of stores of the next plan that the connector keeps
        self._sends: dict[int, bytes] = {}  # the same, of those that go to another engine
        self._fetches: dict[int, bytes] = {}  # slot → key, of loads of the next plan
        self._fetching: dict[int, bytes] = {}  # the same, of loads under way
        self._arriving: dict[int, Arrival] = {}  # by device block
        self._arriving_hashes: dict[tuple[int, bytes], Block] = {}  # group and hash → device block

    def attach(self, tier: HostTier) -> None:
        """Blocks that are evicted from the device are offered to this tier from now on. Raises ValueError if the bytes
        of its blocks mean something else than those of the device."""
        if tier.fingerprint != self.fingerprint:
            raise ValueError(f"the tier's blocks are of another kind: {tier.fingerprint.differences(self.fingerprint)}")
        self.tier = tier
        self._pool.on_evict = self.offer

    def connect(self, index: BlockIndex) -> None:
        """Full blocks that go to host memory are offered to a connector as well, and what host memory has not is looked
        for there. Raises ValueError without host memory."""
        if self.tier is None:
            raise ValueError("the blocks of a connector pass through host memory, and there is none")
        self.index = index

    # ---- offer ----

    def offer(self, block: Block, block_hash: bytes) -> None:
        """A full block of the device pool is about to get other content: keep this one, if there is room. One that only
        superseded roots need takes the place of nothing else."""
        if block.zone == FIRST:
            assert self.tier is not None
            if self.tier.has_empty_block and self.tier.get_cached_block(block_hash, block.group) is None:
                self.tier.free_blocks([self._store(block, block_hash, block.group, is_saved=False)])
                self.tier.put_first(block_hash, block.group)
            return
        slots = self.keep([(block, block_hash, block.group)])
        if slots is not None:
            self.release(slots)  # it is the most recently used one now

    @property
    def keeps_ended_texts(self) -> bool:
        return self.index is not None and self.index.keeps_ended_texts

    def offer_kept(self, blocks: Iterable[tuple[Block, bytes | None, int]]) -> None:
        """Full blocks of a text that has ended, each with its hash and the number of its group: those that the
        connector does not have are offered to it now, because the engine may end before they leave the device."""
        assert self.index is not None
        for block, block_hash, group in blocks:
            if block_hash is not None and not self.index.find(block_key(group, block_hash)):
                slots = self.keep([(block, block_hash, group)])
                if slots is None:
                    return
                slots[0].in_memory = False
                if slots[0].block_id not in self._saves and self.index.offer(block_key(group, block_hash)):
                    self._saves[slots[0].block_id] = block_key(group, block_hash)  # it was in host memory already
                self.release(slots)

    def prolong(self, blocks: Iterable[Block]) -> None:
        """These blocks of the device, which have a hash, are kept by the connector for a day, if it has them."""
        assert self.index is not None
        for block in blocks:
            assert block.block_hash is not None
            self.index.prolong(block_key(block.group, block.block_hash))

    def keep_leased(self, blocks: Iterable[tuple[Block, bytes | None, int]], seconds: float) -> None:
        """A lease holds these blocks, each with its hash and the number of its group: the connector keeps those that it
        has for so long."""
        assert self.index is not None
        for _, block_hash, group in blocks:
            if block_hash is not None:
                self.index.keep(block_key(group, block_hash), seconds)

    def send(self, name: str, blocks: Iterable[Block]) -> None:
        """Full blocks of a transfer that are written: those that were not sent yet go to the connector with the next
        plan. Without room for them they are not sent."""
        index = self.index
        assert isinstance(index, TransferIndex)
        for block in blocks:
            assert block.block_hash is not None
            if index.send(name, key := block_key(block.group, block.block_hash)):
                slots = self.keep([(block, block.block_hash, block.group)])
                if slots is None:
                    index.skip(name, key)
                else:
                    self._sends[slots[0].block_id] = key
                    self.release(slots)

    def has(self, key: bytes) -> bool:
        """Whether a block is on the device or in host memory. From any thread."""
        group, block_hash = int.from_bytes(key[:2], "big"), key[2:]
        on_device = self._pool.get_cached_block(block_hash, group)
        return on_device is not None or (
            self.tier is not None and self.tier.get_cached_block(block_hash, group) is not None
        )

    def keep(self, blocks: Sequence[tuple[Block, bytes | None, int]]) -> list[Block] | None:
        """Slots with the content of these device blocks, each with a reference for the caller. A full block comes with
        its hash and the number of its group; others, without a hash, are of use to the caller only. None: there is no
        room for all, and nothing changed."""
        tier = self.tier
        if tier is None:
            return None
        found = [name and tier.get_cached_block(name, group) for _, name, group in blocks]
        num_wanted = sum(not slot or slot.ref_cnt == 0 for slot in found)
        if num_wanted > tier.num_free_blocks and self.make_room is not None:
            self.make_room(num_wanted)
            found = [name and tier.get_cached_block(name, group) for _, name, group in blocks]
            num_wanted = sum(not slot or slot.ref_cnt == 0 for slot in found)
        if num_wanted > tier.num_free_blocks:
            return None
        tier.touch(slot for slot in found if slot)  # before new slots are taken, which may evict them
        return [slot or self._store(block, name, group) for (block, name, group), slot in zip(blocks, found)]

    def forget(self, block_hash: bytes | None, group: int) -> None:
        """The content of this hash is not to be trusted: it is not found any more."""
        slot = None if self.tier is None or block_hash is None else self.tier.get_cached_block(block_hash, group)
        if slot is not None:
            assert self.tier is not None
            self.tier.uncache(slot)

    def _store(self, block: Block, block_hash: bytes | None, group: int, is_saved: bool = True) -> Block:
        """A new slot, with one reference. `is_saved`: the connector is offered it, too."""
        assert self.tier is not None
        (slot,) = self.tier.get_new_blocks(1)
        self._forget_saves(slot.block_id)  # of the content before, in the same plan
        if block_hash is not None:
            self.tier.cache_full_block(slot, block_hash, group, block.in_memory)
            if self.index is not None and is_saved and not block.in_memory:
                key = block_key(group, block_hash)
                if self.index.offer(key):
                    self._saves[slot.block_id] = key
        self._stores[slot.block_id] = self._copies.source_of(block.block_id)
        return slot

    def _forget_saves(self, slot: int) -> None:
        self._saves.pop(slot, None)
        self._sends.pop(slot, None)

    @property
    def null_slot(self) -> Block:
        """It has the place of a slot where a table has the null block."""
        assert self.tier is not None
        return self.tier.null_block

    def reference(self, slots: Iterable[Block]) -> None:
        assert self.tier is not None
        self.tier.touch(slots)

    def release(self, slots: Sequence[Block]) -> None:
        """Drop a reference to each slot. The last ones of a sequence are evicted first. Without a prefix cache, blocks
        are found only as long as a sequence keeps them."""
        assert self.tier is not None
        self.tier.free_blocks(reversed(slots))
        if not self._pool.enable_caching:
            for slot in slots:
                if slot.ref_cnt == 0:
                    self.tier.uncache(slot)

    # ---- find ----

    def lookup(self, group: int, with_connector: bool = False) -> Lookup:
        """A function from a hash to a block of the device, which may be arriving, or to a slot of the tier;
        `with_connector`: or to a block that only the connector has, for which `bring` finds a slot."""
        on_device = self._pool.cached_blocks(group).get
        if self.tier is None:
            return on_device
        in_tier = self.tier.cached_blocks(group).get

        def find(block_hash: bytes) -> Block | None:
            return on_device(block_hash) or self._arriving_hashes.get((group, block_hash)) or in_tier(block_hash)

        index = self.index
        if index is None or not with_connector:
            return find

        def find_anywhere(block_hash: bytes) -> Block | None:
            found = find(block_hash)
            if found is None and index.find(block_key(group, block_hash)):
                return Block(OUTSIDE, block_hash=block_hash, group=group)
            return found

        return find_anywhere

    def look_ahead(self, group: int, block_hashes: Sequence[bytes]) -> None:
        """These blocks are about to be looked up: the connector is told of those that are neither on the device nor in
        host memory."""
        if self.index is not None and self.index.looks_ahead:
            find = self.lookup(group)
            self.index.look_ahead([block_key(group, one) for one in block_hashes if find(one) is None])

    def find_on_device(self, slot: Block) -> Block | None:
        """A device block with the content of this slot, which may be arriving."""
        if slot.block_hash is None:
            return None
        cached = self._pool.get_cached_block(slot.block_hash, slot.group)
        return cached or self._arriving_hashes.get((slot.group, slot.block_hash))

    def has_room_for(self, found: Sequence[Block]) -> bool:
        """Whether the tier has slots for those that `lookup` found in the connector, beside those that it found in the
        tier."""
        num_outside = sum(block.block_id == OUTSIDE for block in found)
        if not num_outside:
            return True
        assert self.tier is not None
        num_kept = sum(self.is_slot(block) and block.ref_cnt == 0 for block in found) - num_outside
        return num_outside + num_kept <= self.tier.num_free_blocks

    def is_slot(self, block: Block) -> bool:
        """Whether a block that `lookup` found is in a tier, and not on the device."""
        blocks = self._pool.blocks
        return block.block_id >= len(blocks) or blocks[block.block_id] is not block

    # ---- load ----

    def is_worth_loading(self, found: Sequence[Block], num_tokens: int, costs: SwapCosts | None) -> bool:
        """Whether what `lookup` found is on the device sooner than `num_tokens` of it are computed. None: it is not
        known how long either takes."""
        num_slots = sum(map(self.is_slot, found))
        if not num_slots or costs is None:
            return True
        num_outside = sum(block.block_id == OUTSIDE for block in found)
        seconds = num_slots * costs.block + self.fetch_times.estimate(num_outside)
        if seconds <= num_tokens * costs.token:
            return True
        if num_outside:
            self.fetch_times.forget_a_little()
        return False

    def load(self, slots: Sequence[Block], in_memory: bool = False) -> list[Block]:
        """Device blocks that get the content of these slots, each with a reference for the caller. They arrive with the
        result of a step. There must be as many free blocks. `in_memory`: what comes from the connector is not to be
        written to files."""
        tier = self.tier
        assert tier is not None
        tier.touch(slot for slot in slots if slot.block_id != OUTSIDE)  # before slots are taken, which may evict them
        slots = [self._fetch(slot, in_memory) if slot.block_id == OUTSIDE else slot for slot in slots]
        # All slots have references before blocks are taken: what these evict is offered to the tier.
        blocks = self._pool.get_new_blocks(len(slots))
        self._pool.touch(blocks)
        for block, slot in zip(blocks, slots):
            self._copies.forget_target(block.block_id)
            self._loads.append(BlockTransfer(block.block_id, slot.block_id))
            self._arriving[block.block_id] = Arrival(block, slot, slot.block_hash)
            if slot.block_hash is not None:
                self._arriving_hashes[slot.group, slot.block_hash] = block
        return blocks

    def _fetch(self, wanted: Block, in_memory: bool) -> Block:
        """A new slot, with one reference, for a block of the connector."""
        assert self.tier is not None and wanted.block_hash is not None
        (slot,) = self.tier.get_new_blocks(1)
        self._stores.pop(slot.block_id, None)  # of the content before, in the same plan
        self._forget_saves(slot.block_id)
        self.tier.cache_full_block(slot, wanted.block_hash, wanted.group, in_memory)
        key = block_key(wanted.group, wanted.block_hash)
        self._fetches[slot.block_id] = self._fetching[slot.block_id] = key
        return slot

    def bring(self, found: Sequence[Block], in_memory: bool = False) -> list[Block]:
        """The blocks that `lookup` found, all on the device: slots are loaded, as `load` does. Each has a reference for
        the caller."""
        self._pool.touch(block for block in found if not self.is_slot(block))  # before blocks are taken
        slots = [block for block in found if self.is_slot(block)]
        loaded = iter(self.load(slots, in_memory) if slots else ())
        return [next(loaded) if self.is_slot(block) else block for block in found]

    @property
    def arriving_blocks(self) -> Collection[int]:
        """The device blocks that are being loaded."""
        return self._arriving.keys()

    def is_arriving(self, blocks: Iterable[Block]) -> bool:
        return any(block.block_id in self._arriving for block in blocks)

    # ---- plans and results ----

    @property
    def unwritten_slots(self) -> set[int]:
        """Slots that the next plan writes."""
        return set(self._stores)

    def take_transfers(self) -> tuple[list[BlockTransfer], list[BlockTransfer]]:
        """The stores and loads of the next plan. Each is returned once."""
        stores = [BlockTransfer(block, slot) for slot, block in self._stores.items()]
        loads, self._loads = self._loads, []
        self._stores.clear()
        return stores, loads

    def take_connector_transfers(self) -> tuple[list[ConnectorTransfer], list[ConnectorTransfer]]:
        """The fetches and saves of the next plan. Each is returned once."""
        fetches = [ConnectorTransfer(slot, key) for slot, key in self._fetches.items()]
        saves = [
            ConnectorTransfer(slot, key, slot in self._saves, slot in self._sends)
            for slot, key in (self._saves | self._sends).items()
        ]
        self._fetches.clear()
        self._saves.clear()
        self._sends.clear()
        return fetches, saves

    def take_report(self, report: TransferReport) -> set[int]:
        """Blocks arrived, or not. Returns those of the device whose content is not there."""
        if report.num_fetched:
            self.fetch_times.note(report.num_fetched, report.fetch_seconds)
        self._stats.stored += len(report.stored)
        self.lose_slots(report.failed_stores)
        return self._end_loads(report.loaded) | self._end_loads(report.failed_loads, failed=True)

    def plan_failed(self, stores: Sequence[BlockTransfer], loads: Sequence[BlockTransfer]) -> set[int]:
        """A plan was not executed, or failed midway. Returns the device blocks whose content is not there. What was to
        be stored since is not trusted either."""
        self.lose_slots([store.slot for store in stores])
        self.lose_slots(list(self._stores))
        return self._end_loads([load.block for load in loads], failed=True)

    def fail_loads(self) -> None:
        """A step failed, and with it all loads under way: what waits for them is computed."""
        self._end_loads(list(self._arriving), failed=True)
        self._loads.clear()
        self._fetches.clear()

    def lose_slots(self, slots: Iterable[int]) -> None:
        """The content of these slots is undefined: they are not found any more, and loads from them fail."""
        lost = set(slots)
        if not lost:
            return
        assert self.tier is not None
        self._stats.failed += len(lost)
        for slot in lost:
            self.tier.uncache(self.tier.blocks[slot])
            if slot in self._fetching and self.index is not None:
                self.index.lose(self._fetching[slot])
            self._stores.pop(slot, None)
            self._forget_saves(slot)
        for arrival in self._arriving.values():
            arrival.is_valid = arrival.is_valid and arrival.slot.block_id not in lost

    def _end_loads(self, block_ids: Iterable[int], failed: bool = False) -> set[int]:
        lost = set()
        for block_id in block_ids:
            arrival = self._arriving.pop(block_id)
            block, slot, block_hash = arrival.block, arrival.slot, arrival.block_hash
            assert self.tier is not None
            self._fetching.pop(slot.block_id, None)
            if block_hash is not None:
                self._arriving_hashes.pop((slot.group, block_hash), None)
            if failed or not arrival.is_valid:
                lost.add(block_id)
                self._stats.failed += 1
                self.tier.uncache(slot)  # the next sequence computes the block, and does not try again
            else:
                self._stats.loaded += 1
                if block_hash is not None:
                    self._pool.cache_full_block(block, block_hash, slot.group, slot.in_memory)
            self._pool.free_blocks((block,))
            self.tier.free_blocks((slot,))
        return lost

    # ---- figures and checks ----

    def snapshot(self) -> StoreStats:
        tier, stats = self.tier, self._stats
        return StoreStats(0 if tier is None else tier.num_cached_blocks, stats.stored, stats.loaded, stats.failed)

    def reset(self) -> bool:
        """Forget all hashes. Refused (False) while slots have references."""
        return self.tier is None or self.tier.reset_prefix_cache()

    def check(self, slot_references: Iterable[Block]) -> list[int]:
        """Raise AssertionError unless slots are referenced exactly by these, each entry a reference, and by loads.
        Returns the device blocks that loads reference."""
        if self.tier is None:
            return []
        self.tier.check()
        expected: dict[int, int] = {}
        for slot in [*slot_references, *(arrival.slot for arrival in self._arriving.values())]:
            assert self.tier.blocks[slot.block_id] is slot, "a reference to a block that is no slot"
            expected[slot.block_id] = expected.get(slot.block_id, 0) + 1
        for slot in self.tier.blocks[1:]:
            wanted = expected.get(slot.block_id, 0)
            assert slot.ref_cnt == wanted, f"slot {slot.block_id}: {slot.ref_cnt} references, {wanted} holders"
        for block_id, arrival in self._arriving.items():
            assert arrival.block.block_hash is None, f"block {block_id} can be found before it has arrived"
        return list(self._arriving)
