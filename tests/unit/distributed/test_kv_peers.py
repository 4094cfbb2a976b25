"""Blocks between two exchanges: they come as they are computed, are kept until they have come, and what is damaged,
lost or late is not found."""

from __future__ import annotations

import os
import secrets
from collections.abc import Callable, Iterator

import pytest

from ratoon.distributed import kv_exchange
from ratoon.distributed.kv_boxes import Inbox, MappedOutbox, Outbox
from ratoon.distributed.kv_exchange import PeerExchange
from ratoon.distributed.kv_peers import PeersConnector
from tests.waiting import PATIENCE, wait_until

NUM_BYTES = 96
FINGERPRINT = "f"
SECRET = "a secret of many characters"


def block(number: int) -> tuple[bytes, list[memoryview]]:
    content = bytearray(number * 7 % 256 for _ in range(NUM_BYTES))
    return b"key-%d" % number, [memoryview(content)[:32], memoryview(content)[32:]]


Make = Callable[..., PeerExchange]


@pytest.fixture(params=["folder", "network"])
def make(request, tmp_path) -> Iterator[Make]:
    made: list[PeerExchange] = []

    def make_one(num_blocks: int = 100, fingerprint: str = FINGERPRINT) -> PeerExchange:
        is_network = request.param == "network"
        address = "tcp://127.0.0.1:0" if is_network else str(tmp_path)
        one = PeerExchange(address, SECRET if is_network else None, NUM_BYTES, num_blocks * NUM_BYTES, fingerprint, [])
        for other in made:
            one._peers.add(other.address)
            other._peers.add(one.address)
        made.append(one)
        return one

    yield make_one
    for one in made:
        one.close()


def send(sender: PeerExchange, name: str, numbers: range) -> None:
    for number in numbers:
        key, parts = block(number)
        if sender.send(name, key):
            sender.save(key, parts)


def nothing_is_there(key: bytes) -> bool:
    return False


def test_blocks_come_while_others_are_computed_and_are_kept_until_then(make):
    sender, receiver = make(), make()
    done = receiver.receive("a", sender.address, nothing_is_there)
    sender.begin_sending("a")
    send(sender, "a", range(3))
    wait_until("the first blocks have come", lambda: len(receiver.inbox) == 3)
    assert not done.done()
    wait_until("they are not kept any more", lambda: sender.outbox.num_kept == 0)
    send(sender, "a", range(2, 5))
    sender.end_sending("a")
    done.result(PATIENCE)
    assert [bytes(receiver.inbox.take(block(number)[0]) or b"") for number in range(5)] == [
        b"".join(block(number)[1]) for number in range(5)
    ]
    wait_until("nothing is kept", lambda: sender.outbox.num_kept == 0 and not sender._sending)


def test_what_is_kept_for_a_receiver_that_comes_later_is_sent_then(make):
    sender, receiver = make(), make()
    sender.begin_sending("a")
    send(sender, "a", range(4))
    sender.end_sending("a")
    receiver.receive("a", sender.address, lambda key: key == b"key-1").result(PATIENCE)
    assert [block(number)[0] in receiver.inbox for number in range(4)] == [True, False, True, True]
    again = receiver.receive("a", sender.address, nothing_is_there)
    assert again.done()


def test_a_damaged_block_is_not_found(make, monkeypatch):
    sender, receiver = make(), make()
    sender.begin_sending("a")
    send(sender, "a", range(4))
    for number in (1, 2):
        kept = sender.outbox.find(block(number)[0])
        assert kept is not None
        sender.outbox.view(kept.slot)[17 * number] ^= 4
    sender.end_sending("a")
    receiver.receive("a", sender.address, nothing_is_there).result(PATIENCE)
    assert [block(number)[0] in receiver.inbox for number in range(4)] == [True, False, False, True]
    assert receiver.num_bad_blocks == 2
    wait_until("nothing is kept", lambda: sender.outbox.num_kept == 0)


def test_without_room_the_first_blocks_come_and_the_transfer_ends(make, monkeypatch):
    monkeypatch.setattr(kv_exchange, "SECONDS_FOR_LAST_BLOCKS", 0.1)
    sender, receiver = make(num_blocks=2), make()
    sender.begin_sending("a")
    send(sender, "a", range(4))
    sender.end_sending("a")
    receiver.receive("a", sender.address, nothing_is_there).result(PATIENCE)
    assert [block(number)[0] in receiver.inbox for number in range(4)] == [True, True, False, False]


def test_two_transfers_of_the_same_block_keep_it_once(make):
    sender, first, second = make(), make(), make()
    for name in ("a", "b"):
        sender.begin_sending(name)
        send(sender, name, range(3))
        sender.end_sending(name)
    assert sender.outbox.num_kept == 3
    first.receive("a", sender.address, nothing_is_there).result(PATIENCE)
    second.receive("b", sender.address, nothing_is_there).result(PATIENCE)
    assert len(first.inbox) == len(second.inbox) == 3
    wait_until("nothing is kept", lambda: sender.outbox.num_kept == 0)


def test_a_receiver_does_not_wait_for_a_sender_that_is_gone(make, monkeypatch):
    monkeypatch.setattr(kv_exchange, "SECONDS_OF_SILENCE", 1.0)
    sender, receiver = make(), make()
    sender.begin_sending("a")
    send(sender, "a", range(2))
    done = receiver.receive("a", sender.address, nothing_is_there)
    wait_until("blocks have come", lambda: len(receiver.inbox) == 2)
    sender.close()
    done.result(PATIENCE)
    assert len(receiver.inbox) == 2  # what has come is of use


def test_nothing_is_kept_for_a_receiver_that_is_silent_or_never_comes(make, monkeypatch):
    monkeypatch.setattr(kv_exchange, "SECONDS_OF_SILENCE", 1.0)
    monkeypatch.setattr(kv_exchange, "SECONDS_WITHOUT_RECEIVER", 0.5)
    sender, receiver = make(), make()
    sender.begin_sending("a")
    receiver.receive("a", sender.address, nothing_is_there)
    wait_until("it has subscribed", lambda: sender._sending["a"].receiver is not None)
    receiver.close()
    send(sender, "a", range(3))
    sender.begin_sending("b")
    send(sender, "b", range(3, 5))
    sender.end_sending("b")
    assert sender.outbox.num_kept == 5
    wait_until("nothing is kept", lambda: sender.outbox.num_kept == 0 and not sender._sending)
    assert not sender.send("a", b"key-9")  # the request goes on, and its blocks are not kept


def test_a_transfer_that_is_over_unknown_or_of_another_model_is_not_waited_for(make, monkeypatch, caplog):
    monkeypatch.setattr(kv_exchange, "SECONDS_TO_BEGIN", 0.5)
    sender, receiver, other_model = make(), make(), make(fingerprint="another")
    sender.begin_sending("a")
    send(sender, "a", range(2))
    sender.end_sending("a")
    other_model.receive("a", sender.address, nothing_is_there).result(PATIENCE)
    assert len(other_model.inbox) == 0
    assert caplog.messages == [
        f"the KV transfer a is refused: {kv_exchange.OF_ANOTHER_KIND}",
        f"blocks of the KV transfer a are computed here: {kv_exchange.OF_ANOTHER_KIND}",
    ]
    receiver.receive("a", sender.address, nothing_is_there).result(PATIENCE)
    assert len(receiver.inbox) == 2
    receiver.receive("unknown", sender.address, nothing_is_there).result(PATIENCE)


def test_a_request_waits_for_a_transfer_that_does_not_end_for_a_limited_time(make, monkeypatch):
    monkeypatch.setattr(kv_exchange, "SECONDS_OF_A_TRANSFER", 1.0)
    sender, receiver = make(), make()
    sender.begin_sending("a")
    early = receiver.receive("a", sender.address, nothing_is_there, is_awaited=False)
    wait_until("it has subscribed", lambda: sender._sending["a"].receiver is not None)
    assert not early.done()
    receiver.receive("a", sender.address, nothing_is_there).result(PATIENCE)


def test_an_engine_speaks_with_those_alone_that_it_knows(make):
    receiver = make()
    for address in ("tcp://127.0.0.1:9", "ipc:///tmp/x", f"{receiver.address}/../kv-x", receiver.address):
        with pytest.raises(ValueError):
            receiver.receive("a", address, nothing_is_there)


def test_another_secret_gets_nothing(tmp_path, monkeypatch):
    monkeypatch.setattr(kv_exchange, "SECONDS_OF_SILENCE", 1.0)
    sender = PeerExchange("tcp://127.0.0.1:0", SECRET, NUM_BYTES, 10 * NUM_BYTES, FINGERPRINT, [])
    stranger = PeerExchange(
        "tcp://127.0.0.1:0", "another secret of theirs", NUM_BYTES, 10 * NUM_BYTES, FINGERPRINT, [sender.address]
    )
    try:
        sender.begin_sending("a")
        send(sender, "a", range(2))
        sender.end_sending("a")
        stranger.receive("a", sender.address, nothing_is_there).result(PATIENCE)
        assert len(stranger.inbox) == 0
        assert sender.outbox.num_kept == 2
    finally:
        sender.close()
        stranger.close()


def test_only_an_outbox_is_mapped(tmp_path):
    file = tmp_path / "secrets"
    file.write_bytes(secrets.token_bytes(200))
    with pytest.raises(OSError), open(file, "rb") as opened:
        MappedOutbox(f"/proc/{os.getpid()}/fd/{opened.fileno()}", 100)


def test_boxes_are_bounded():
    outbox, inbox = Outbox(NUM_BYTES, 2 * NUM_BYTES), Inbox(2 * NUM_BYTES)
    for number in range(3):
        key, parts = block(number)
        assert not outbox.keep(key, parts)  # no transfer has it
        outbox.use(key, "a")
        assert outbox.keep(key, parts) == (number < 2)
        inbox.put(key, bytearray(NUM_BYTES))
    assert [block(number)[0] in inbox for number in range(3)] == [False, True, True]
    outbox.release(block(0)[0], "a")
    assert outbox.keep(*block(2))
    outbox.close()


@pytest.mark.parametrize(
    ("options", "problem"),
    [
        ({}, "either"),
        ({"folder": "/a", "listen": "tcp://h:1"}, "either"),
        ({"folder": 3}, "no address"),
        ({"folder": "/a", "other": 1}, "other is unknown"),
        ({"listen": "http://h:1"}, "tcp://HOST:PORT"),
        ({"listen": "tcp://127.0.0.1:0", "secret_file": "/nowhere"}, "can't be read"),
        ({"listen": "tcp://127.0.0.1:0"}, "RATOON_CLUSTER_SECRET"),
        ({"folder": "/a", "max_bytes": "much"}, "max_bytes"),
        ({"folder": "/a", "peers": ["ipc:///x"]}, "peers"),
    ],
)
def test_options_that_do_not_fit_are_refused(options, problem, monkeypatch):
    monkeypatch.delenv("RATOON_CLUSTER_SECRET", raising=False)
    with pytest.raises(ValueError, match=problem):
        PeersConnector(options)
