"""Blocks between host memory and a connector, beside the steps: what waits for what."""

from __future__ import annotations

import threading
from collections.abc import Sequence

import pytest

from ratoon.core.kv_connector import BlockMover
from ratoon.core.plan import BlockTransfer, ConnectorTransfer
from ratoon.execution.kv.connector_moves import ConnectorMoves
from tests.waiting import PATIENCE, wait_until


class Slots:
    """Host memory of slots with a byte each."""

    def __init__(self) -> None:
        self.data = bytearray(10)
        self.num_asked = 0

    def host_parts(self, slots: Sequence[int]) -> list[list[memoryview]]:
        self.num_asked += 1
        return [[memoryview(self.data)[slot : slot + 1]] for slot in slots]


class GatedMover(BlockMover):
    """Saves and loads wait until the test lets them."""

    def __init__(self) -> None:
        self.blocks = {b"a": b"A", b"b": b"B"}
        self.sent: list[bytes] = []
        self.may_load, self.may_save = threading.Event(), threading.Event()
        self.raises = False

    def save(self, key: bytes, parts: Sequence[memoryview]) -> None:
        assert self.may_save.wait(PATIENCE)
        self.blocks[key] = b"".join(parts)

    def send(self, key: bytes, parts: Sequence[memoryview]) -> None:
        self.sent.append(b"".join(parts))

    def load(self, key: bytes, parts: Sequence[memoryview]) -> bool:
        assert self.may_load.wait(PATIENCE)
        if key not in self.blocks:
            return False
        parts[0][:] = self.blocks[key]
        return True

    def load_all(self, wanted: Sequence[tuple[bytes, Sequence[memoryview]]]) -> list[bool]:
        if self.raises:
            raise OSError("the storage is gone")
        return super().load_all(wanted)


@pytest.fixture
def parts():
    slots, mover = Slots(), GatedMover()
    moves = ConnectorMoves(mover, slots)
    yield moves, mover, slots
    mover.may_load.set()
    mover.may_save.set()
    moves.close()


def test_loads_wait_for_their_fetch_and_others_do_not(parts):
    moves, mover, slots = parts
    now = moves.fetch(
        [ConnectorTransfer(1, b"a"), ConnectorTransfer(2, b"gone")],
        [BlockTransfer(11, 1), BlockTransfer(12, 2), BlockTransfer(13, 3)],
    )
    assert now == [BlockTransfer(13, 3)]
    assert moves.is_fetching and moves.take_arrived().num_fetched == 0
    assert moves.take_arrived(waits=True).num_fetched == 0, "it waits for a moment, not for the end"
    mover.may_load.set()
    arrived = None
    while arrived is None or not arrived.num_fetched:
        arrived = moves.take_arrived(waits=True)
    assert (arrived.loads, arrived.lost) == ([BlockTransfer(11, 1)], [BlockTransfer(12, 2)])
    assert arrived.num_fetched == 2 and slots.data[1:2] == b"A" and not moves.is_fetching


def test_many_blocks_are_fetched_in_pieces_and_told_as_one_fetch():
    slots, mover, asked = Slots(), GatedMover(), []
    mover.blocks = {b"%d" % slot: b"%d" % slot for slot in (1, 2, 4, 5)}
    mover.may_load.set()
    third = threading.Event()
    load_all = mover.load_all

    def load_pieces(wanted):
        asked.append([key for key, _ in wanted])
        assert len(asked) < 3 or third.wait(PATIENCE)
        return load_all(wanted)

    mover.load_all = load_pieces
    moves = ConnectorMoves(mover, slots, piece_size=2)
    try:
        fetches = [ConnectorTransfer(slot, b"%d" % slot) for slot in range(1, 6)]
        assert moves.fetch(fetches, [BlockTransfer(10 + slot, slot) for slot in range(1, 7)]) == [BlockTransfer(16, 6)]
        loads, lost = [], []
        while len(loads) + len(lost) < 4:
            arrived = moves.take_arrived(waits=True)
            loads += arrived.loads
            lost += arrived.lost
            assert not arrived.num_fetched, "some are missing"
        assert (loads, lost) == ([BlockTransfer(10 + slot, slot) for slot in (1, 2, 4)], [BlockTransfer(13, 3)])
        assert bytes(slots.data[1:6]) == b"12\x004\x00" and moves.is_fetching
        third.set()
        arrived = moves.take_arrived(waits=True)
        while arrived.is_empty:
            arrived = moves.take_arrived(waits=True)
        assert asked == [[b"1", b"2"], [b"3", b"4"], [b"5"]]
        assert arrived.loads == [BlockTransfer(15, 5)] and arrived.num_fetched == 5 and arrived.seconds > 0
        assert slots.num_asked == 1, "pieces wait for copies that the loads of earlier ones have begun"
    finally:
        third.set()
        moves.close()


def test_a_slot_is_not_written_before_it_is_saved_and_what_was_saved_can_be_fetched(parts):
    moves, mover, slots = parts
    mover.may_load.set()
    slots.data[4:5] = b"X"
    moves.save([ConnectorTransfer(4, b"x")])
    assert moves.fetch([ConnectorTransfer(5, b"x")], [BlockTransfer(15, 5)]) == [], "no step waits for either"
    writer = threading.Thread(target=lambda: (moves.settle([4]), slots.data.__setitem__(4, 0)))
    writer.start()
    moves.settle([6])  # of another slot
    mover.may_save.set()
    writer.join(PATIENCE)
    assert mover.blocks[b"x"] == b"X"
    wait_until("the block is fetched", lambda: moves.take_arrived().loads)
    assert slots.data[5:6] == b"X"


def test_a_slot_that_is_needed_before_its_turn_is_not_saved(parts):
    moves, mover, slots = parts
    moves.save([ConnectorTransfer(slot, b"key %d" % slot) for slot in (4, 5, 6)])
    wait_until("the first is being saved", lambda: moves._saving[4][0].future.running())
    moves.settle([5])  # waits for nothing
    slots.data[5:6] = b"?"
    mover.may_save.set()
    moves.drain()
    assert [name for name in (b"key 4", b"key 5", b"key 6") if name in mover.blocks] == [b"key 4", b"key 6"]


def test_what_is_sent_waits_for_nothing_that_is_kept(parts):
    moves, mover, slots = parts
    slots.data[4:6] = b"KS"
    moves.save([ConnectorTransfer(4, b"k"), ConnectorTransfer(5, b"s", is_sent=True, is_kept=False)])
    moves.settle([5])  # the other engine waits for it, so this does, too
    assert mover.sent == [b"S"] and b"k" not in mover.blocks


def test_after_a_failed_step_no_load_is_made_and_no_slot_is_written(parts):
    moves, mover, _ = parts
    moves.fetch([ConnectorTransfer(1, b"a")], [BlockTransfer(11, 1)])
    mover.may_load.set()
    moves.drop_fetches()
    assert not moves.is_fetching and moves.take_arrived().loads == []


def test_a_connector_that_raises_for_all_loses_all(parts):
    moves, mover, _ = parts
    mover.raises = True
    moves.fetch([ConnectorTransfer(1, b"a")], [BlockTransfer(11, 1)])
    moves.drain()
    assert moves.take_arrived().lost == [BlockTransfer(11, 1)]
