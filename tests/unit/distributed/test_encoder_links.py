"""Outputs of encoders between two engines of different hosts: they are fetched once, whole and only by engines with the
secret, and one that does not come is waited for no longer than some seconds."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from contextlib import suppress

import pytest
import torch
import zmq

from ratoon.core.errors import ConfigError
from ratoon.core.kv_connector import BlockMover
from ratoon.core.media import IMAGE, MediaInput
from ratoon.core.wire import WireTensor
from ratoon.distributed import encoder_links
from ratoon.distributed.encoder_links import EncoderExchange, Kept
from ratoon.distributed.kv_peers import PeersConnector
from ratoon.execution.passes.encoder_store import EncoderStore, name_of
from tests.waiting import PATIENCE, wait_until

SECRET = "a secret of many characters"
NUM_BYTES = 5000
HERE = "tcp://127.0.0.1:0"

Make = Callable[..., EncoderExchange]


@pytest.fixture
def make() -> Iterator[Make]:
    made: list[EncoderExchange] = []

    def make_one(encodes: bool, num_outputs: int = 100, secret: str = SECRET, kind: str = "k") -> EncoderExchange:
        made.append(EncoderExchange(HERE if encodes else None, secret, kind, num_outputs * NUM_BYTES))
        return made[-1]

    yield make_one
    for one in made:
        one.close()


def content(number: int) -> bytearray:
    return bytearray(random.Random(number).randbytes(NUM_BYTES))


def save(exchange: EncoderExchange, *numbers: int) -> None:
    for number in numbers:
        exchange.save(b"%d" % number, [memoryview(content(number))])


def fetch(exchange: EncoderExchange, address: str, *numbers: int) -> None:
    exchange.fetch({b"%d" % number: address for number in numbers}).result(PATIENCE)


def loaded(exchange: EncoderExchange, *numbers: int) -> list[bytearray | None]:
    found = [bytearray(NUM_BYTES) for _ in numbers]
    return [part if exchange.load(b"%d" % number, [memoryview(part)]) else None for number, part in zip(numbers, found)]


def test_outputs_are_fetched_in_pieces_and_loaded_again_and_again(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(encoder_links, "PIECE_BYTES", 1024)
    maker, reader = make(encodes=True), make(encodes=False)
    save(maker, 1, 2, 3)
    assert loaded(reader, 1) == [None]
    fetch(reader, maker.address, 1, 2, 9)
    for _ in range(2):
        assert loaded(reader, 1, 2, 3, 9) == [content(1), content(2), None, None]
    assert reader.fetch({b"1": maker.address}).done(), "it is here"
    save(reader, 7)
    assert loaded(reader, 7) == [None], "it encodes for no others"


def test_two_requests_that_wait_for_an_output_fetch_it_once_and_one_may_end(make: Make) -> None:
    maker, reader = make(encodes=True), make(encodes=False)
    with maker.kept._lock:  # its answer waits
        first = reader.fetch({b"1": maker.address})
        second = reader.fetch({b"1": maker.address})
        assert len(reader._fetches) == 1
        first.cancel()
        maker.kept._kept[b"1"] = Kept(content(1), encoder_links.checksum_of(b"1", content(1)))
    second.result(PATIENCE)
    assert loaded(reader, 1) == [content(1)] and not reader._fetches


def test_those_that_were_not_used_for_the_longest_time_give_way(make: Make) -> None:
    maker, reader = make(encodes=True, num_outputs=3), make(encodes=False, num_outputs=2)
    save(maker, 1, 2, 3)
    assert loaded(maker, 1) == [content(1)]
    save(maker, 4)
    fetch(reader, maker.address, 1, 2, 3, 4)
    assert [one is not None for one in loaded(maker, 1, 2, 3, 4)] == [True, False, True, True]
    assert len(reader.kept) == 2


def test_a_damaged_output_and_one_of_another_encoder_are_not_loaded(make: Make) -> None:
    maker, reader, other = make(encodes=True), make(encodes=False), make(encodes=False, kind="other")
    save(maker, 1, 2)
    kept = maker.kept.find(b"1")
    assert kept is not None
    maker.kept.put(b"1", Kept(bytes(reversed(kept.content)), kept.checksum))
    fetch(reader, maker.address, 1, 2)
    assert loaded(reader, 1, 2) == [None, content(2)] and reader.num_bad == 1
    fetch(other, maker.address, 2)
    assert loaded(other, 2) == [None]


@pytest.mark.parametrize("kind", ["gone", "of another secret", "silent"])
def test_an_engine_that_gives_nothing_is_waited_for_once(
    make: Make, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    monkeypatch.setattr(encoder_links, "SECONDS_OF_SILENCE", 0.5)
    maker, reader = (
        make(encodes=True, secret=SECRET if kind != "of another secret" else SECRET * 2),
        make(encodes=False),
    )
    save(maker, 1)
    if kind == "gone":
        maker.close()
    elif kind == "silent":
        monkeypatch.setattr(maker, "_give", lambda *arguments: None)
    fetch(reader, maker.address, 1)
    assert loaded(reader, 1) == [None]
    assert reader.fetch({b"1": maker.address}).done(), "it is left alone for a while"
    wait_until("the connection is closed", lambda: not reader._links)


def test_what_is_awaited_when_an_engine_ends_is_not_waited_for(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    maker, reader = make(encodes=True), make(encodes=False)
    monkeypatch.setattr(maker, "_give", lambda *arguments: None)
    awaited = reader.fetch({b"1": maker.address})
    reader.close()
    awaited.result(PATIENCE)
    assert reader.fetch({b"2": maker.address}).done()


def test_messages_that_can_not_be_read_are_ignored(make: Make) -> None:
    maker, reader = make(encodes=True), make(encodes=False)
    save(maker, 1)
    stranger = reader._context.connect(zmq.DEALER, maker.address)
    for frames in ([b"no message"], [b"\x81"], [b"", b""]):
        stranger.send_multipart(frames)
    fetch(reader, maker.address, 1)
    assert loaded(reader, 1) == [content(1)]


def test_an_address_that_is_none_of_this_host_is_an_error_of_the_setting() -> None:
    with pytest.raises(ConfigError, match=r"encode_engines: outputs .* can't be fetched at tcp://192\.0\.2\.1"):
        EncoderExchange("tcp://192.0.2.1:0", SECRET, "k", NUM_BYTES)


def test_the_connector_has_a_store_where_engines_encode_for_others(monkeypatch: pytest.MonkeyPatch) -> None:
    from ratoon.core.kv import KVFingerprint, PageLayout

    monkeypatch.setenv("RATOON_CLUSTER_SECRET", SECRET)
    kind = KVFingerprint(weights="w", layout=PageLayout((64,), ()))
    assert PeersConnector({"listen": HERE}).open_encoder_store(kind) is None
    for encodes in (True, False):
        store = PeersConnector({"listen": HERE, "encodes": encodes}).open_encoder_store(kind)
        assert store is not None and store.address.startswith("tcp://127.0.0.1:") == encodes
        store.close()


# ---- behind the encoder ----


class InMemory(BlockMover):
    def __init__(self) -> None:
        self.items: dict[bytes, bytes] = {}

    def save(self, key, parts) -> None:
        self.items[key] = b"".join(parts)

    def load(self, key, parts) -> bool:
        with suppress(KeyError):
            parts[0][:] = self.items[key]
            return True
        return False


def test_what_a_folder_has_from_an_earlier_run_can_be_fetched(make: Make) -> None:
    maker, reader, folder = make(encodes=True), make(encodes=False), InMemory()
    media = MediaInput(IMAGE, 2, WireTensor("uint8", (0,), b""))
    rows = torch.arange(6.0).view(2, 3)
    EncoderStore([folder]).save("image", rows)
    store = EncoderStore([maker, folder])
    assert store.address == maker.address
    assert torch.equal(store.load({"image": media}, 3, torch.float32)["image"], rows)
    reading = EncoderStore([reader, InMemory()])
    assert reading.address == "" and not reading.load({"image": media}, 3, torch.float32)
    fetched = reading.fetch({"image": store.address})
    assert fetched is not None
    fetched.result(PATIENCE)
    assert torch.equal(reading.load({"image": media}, 3, torch.float32)["image"], rows)
    assert EncoderStore([folder]).fetch({"image": store.address}) is None
    store.save("another", rows)
    assert name_of("another") in folder.items and maker.kept.find(name_of("another")) is not None
