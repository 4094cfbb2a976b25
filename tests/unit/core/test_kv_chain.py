"""Two connectors as one: blocks are sent by the first and kept by the second, and looked for in both."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future

import pytest

from ratoon.core.errors import ConfigError
from ratoon.core.kv import KVFingerprint
from ratoon.core.kv_chain import ChainedConnector
from ratoon.core.kv_connector import (
    BlockIndex,
    BlockMover,
    KVConnector,
    TransferIndex,
    TransferIndexOfRanks,
    open_index,
)

KIND = KVFingerprint()


class Kept(BlockIndex):
    keeps_ended_texts = True

    def __init__(self) -> None:
        self.keys: set[bytes] = set()
        self.told: list[tuple[str, bytes]] = []

    def find(self, key: bytes) -> bool:
        return key in self.keys

    def offer(self, key: bytes) -> bool:
        self.keys.add(key)
        return True

    def lose(self, key: bytes) -> None:
        self.keys.discard(key)

    def supersede(self, key: bytes) -> None:
        self.told.append(("superseded", key))

    def prolong(self, key: bytes) -> None:
        self.told.append(("prolonged", key))


class Moving(Kept, TransferIndex):
    keeps_ended_texts = False

    def __init__(self, address: str = "here", is_kept: bool = False) -> None:
        super().__init__()
        self.address = address
        self.is_kept = is_kept  # what is sent is there already
        self.calls: list[tuple[str, ...]] = []
        self.received: Future[None] = Future()

    def offer(self, key: bytes) -> bool:
        raise AssertionError("what leaves the device is not for others")

    def begin_sending(self, name: str) -> None:
        self.calls.append(("begin", name))

    def send(self, name: str, key: bytes) -> bool:
        self.calls.append(("send", name))
        return not self.is_kept

    def skip(self, name: str, key: bytes) -> None:
        self.calls.append(("skip", name))

    def end_sending(self, name: str) -> None:
        self.calls.append(("end", name))

    def receive(
        self, name: str, address: str, is_there: Callable[[bytes], bool], is_awaited: bool = True
    ) -> Future[None]:
        self.calls.append(("receive", address))
        return self.received


class Box(BlockMover):
    def __init__(self) -> None:
        self.blocks: dict[bytes, bytes] = {}

    def save(self, key: bytes, parts: object) -> None:
        self.blocks[key] = b"".join(parts)  # type: ignore[call-overload]

    def load(self, key: bytes, parts: object) -> bool:
        if key in self.blocks:
            parts[0][:] = self.blocks[key]  # type: ignore[index]
        return key in self.blocks


class Connector(KVConnector):
    def __init__(self, index: BlockIndex, mover: BlockMover | None = None) -> None:
        self.index, self.mover = index, mover or Box()

    def open_index(self, fingerprint: KVFingerprint) -> BlockIndex:
        return self.index

    def open_mover(self, fingerprint: KVFingerprint) -> BlockMover:
        return self.mover


def test_blocks_are_found_in_both_and_offered_to_the_second_alone() -> None:
    moving, kept = Moving(), Kept()
    index = ChainedConnector(Connector(moving), Connector(kept)).open_index(KIND)
    assert index.keeps_ended_texts and index.address == "here"
    assert index.offer(b"a") and index.find(b"a")
    moving.keys.add(b"b")
    assert index.find(b"b") and not index.find(b"c")
    index.supersede(b"a")
    index.prolong(b"b")
    assert kept.told == [("superseded", b"a"), ("prolonged", b"b")] and not moving.told
    index.lose(b"a")
    index.lose(b"b")
    assert not index.find(b"a") and not index.find(b"b")
    index.begin_sending("x")
    assert index.send("x", b"a") and not kept.find(b"a"), "what is sent is not kept for that reason"


def test_what_is_sent_and_what_is_kept_go_different_ways_and_are_loaded_from_either() -> None:
    sent, kept = Box(), Box()
    mover = ChainedConnector(Connector(Moving(), sent), Connector(Kept(), kept)).open_mover(KIND)
    mover.send(b"a", [memoryview(b"1")])
    mover.save(b"b", [memoryview(b"2")])
    assert (sent.blocks, kept.blocks) == ({b"a": b"1"}, {b"b": b"2"})
    parts = [[memoryview(bytearray(1))] for _ in range(3)]
    assert mover.load_all([(key, part) for key, part in zip((b"b", b"none", b"a"), parts)]) == [True, False, True]
    assert [bytes(part[0]) for part in parts] == [b"2", b"\0", b"1"]
    assert mover.load(b"a", parts[0]) and mover.load(b"b", parts[1]) and not mover.load(b"c", parts[2])


def test_a_first_connector_that_moves_nothing_is_refused() -> None:
    with pytest.raises(ConfigError, match="kv_connector: the first of two connectors moves no blocks"):
        ChainedConnector(Connector(Kept()), Connector(Kept())).open_index(KIND)


# ---- ranks ----


def test_parts_of_ranks_go_to_the_same_ranks_and_have_come_when_all_have() -> None:
    ranks = [Moving("one"), Moving("two", is_kept=True)]
    made = iter(ranks)

    class OfRanks(Connector):
        def open_index(self, fingerprint: KVFingerprint) -> BlockIndex:
            return next(made)

    index = open_index(OfRanks(Kept()), [KIND, KIND])
    assert isinstance(index, TransferIndexOfRanks) and index.address == "one,two"
    assert index.send("x", b"a"), "one of them lacks it: all save their part"
    done = index.receive("x", "three,four", lambda key: False)
    assert [rank.calls for rank in ranks] == [
        [("send", "x"), ("receive", "three")],
        [("send", "x"), ("receive", "four")],
    ]
    ranks[1].received.set_result(None)
    assert not done.done()
    ranks[0].received.set_result(None)
    assert done.done() and done.result() is None
    ranks[0].keys.add(b"a")
    assert not index.find(b"a"), "a part is missing"
    ranks[1].keys.add(b"a")
    assert index.find(b"a")
    index.supersede(b"a")
    index.prolong(b"a")
    assert ranks[0].told == ranks[1].told == [("superseded", b"a"), ("prolonged", b"a")]
    with pytest.raises(ValueError, match="parts of 3 ranks, those of this engine in 2"):
        index.receive("y", "a,b,c", lambda key: False)
