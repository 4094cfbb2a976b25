"""Events of the KV cache: a subscriber that follows them knows at any time which blocks can be found in the engine."""

from __future__ import annotations

import time
from typing import Any

import msgspec
import pytest
import zmq

from ratoon.core.errors import ConfigError
from ratoon.core.kv_events import AllBlocksCleared, BlockRemoved, EventBatch, external_hash
from ratoon.core.settings import engine_config
from ratoon.engine.kv_events import END, KVEventPublisher, with_port_of
from ratoon.memory.block_events import BlockEvents
from ratoon.memory.hashing import NO_EXTRA_KEYS, ExtraKeys, MediaSpan
from tests.golden.engines import engine, greedy, run, scheduler_of
from tests.golden.tiny_models import random_token_ids
from tests.ports import free_ports
from tests.waiting import PATIENCE, wait_until

FAMILY = "llama with grouped heads"


def free_addresses(num_engines: int = 1) -> tuple[str, str]:
    """Returns addresses of the first engine's events and of its replays; those of other engines follow each."""
    ports = free_ports(2 * num_engines)
    return f"tcp://127.0.0.1:{ports[0]}", f"tcp://127.0.0.1:{ports[num_engines]}"


class Router:
    """Follows events, from the first one on: it asks for what it missed before it was connected."""

    def __init__(self, address: str, replay: str) -> None:
        self.context = zmq.Context()
        self.subscriber: Any = self.context.socket(zmq.SUB)
        self.subscriber.connect(address)
        self.subscriber.subscribe(b"topic")
        self.replay: Any = self.context.socket(zmq.REQ)
        self.replay.connect(replay)
        self.known: dict[int, tuple[int | None, tuple[int, ...]]] = {}  # hash → parent and tokens
        self.num_seen = 0

    def catch_up(self) -> None:
        """Takes what the engine still keeps, by asking for it."""
        dealer = self.context.socket(zmq.DEALER)
        dealer.connect(self.replay.getsockopt(zmq.LAST_ENDPOINT))
        dealer.send_multipart([b"", self.num_seen.to_bytes(8, "big")])
        while True:
            assert dealer.poll(PATIENCE * 1000)
            _, number, payload = dealer.recv_multipart()
            if number == END:
                break
            assert int.from_bytes(number, "big") == self.num_seen
            self.take(payload)
        dealer.close(0)

    def take(self, payload: bytes) -> None:
        self.num_seen += 1
        for event in msgspec.msgpack.decode(payload, type=EventBatch).events:
            if isinstance(event, AllBlocksCleared):
                self.known = {}
            elif isinstance(event, BlockRemoved):
                for one in event.block_hashes:
                    del self.known[one]
            else:
                assert event.medium == "CPU" and len(event.token_ids) == len(event.block_hashes) * event.block_size
                parent = event.parent_block_hash
                for place, one in enumerate(event.block_hashes):
                    tokens = event.token_ids[place * event.block_size : (place + 1) * event.block_size]
                    self.known[one] = parent, tuple(tokens)
                    parent = one

    def close(self) -> None:
        self.context.destroy(linger=0)


def found_in(llm: Any) -> set[int]:
    return {external_hash(one) for one in scheduler_of(llm).kv_cache.pool.cached_blocks(0)}


def test_a_router_knows_which_blocks_can_be_found(tmp_path):
    address, replay = free_addresses()
    settings = {"kv_events": address, "kv_events_replay": replay, "kv_events_topic": "topic", "num_blocks": 24}
    with engine(FAMILY, **settings) as llm:
        router = Router(address, replay)
        prompts = [random_token_ids(length, seed=length) for length in (70, 33, 90, 120, 64)]
        for prompt in [*prompts, *prompts[:2]]:
            run(llm, [prompt], greedy(20))
            wait_until("the events are there", lambda: router.catch_up() or set(router.known) == found_in(llm))
        # Blocks are chained, and have the tokens of the text.
        run(llm, prompts[:1], greedy(20))
        wait_until("the events are there", lambda: router.catch_up() or set(router.known) == found_in(llm))
        text: list[int] = []
        parent = None
        while len(text) < 64:
            rest = prompts[0][len(text) :]
            (parent,) = [one for one in router.known if is_next(router, one, parent, rest)]
            text += router.known[parent][1]
        assert text == prompts[0][:64]
        assert llm.reset_prefix_cache()
        wait_until("nothing is left", lambda: router.catch_up() or not router.known)
        router.close()


def is_next(router: Router, block: int, parent: int | None, tokens: list[int]) -> bool:
    before, own = router.known[block]
    return before == parent and tuple(tokens[: len(own)]) == own


def test_subscribers_get_messages_with_topic_and_numbers():
    address, replay = free_addresses()
    publisher = KVEventPublisher(address, replay, "topic", rank=3)
    router = Router(address, replay)
    deadline = time.monotonic() + PATIENCE
    events = BlockEvents("GPU")
    while not router.subscriber.poll(20):  # until it is connected
        assert time.monotonic() < deadline
        publisher.publish(events.take() or [AllBlocksCleared()])
    topic, number, payload = router.subscriber.recv_multipart()
    batch = msgspec.msgpack.decode(payload)
    assert topic == b"topic" and len(number) == 8 and batch[2] == 3
    events.stored([b"a" * 32, b"b" * 32], 0, list(range(8)), 4)
    events.stored([b"a" * 32, b"b" * 32, b"c" * 32], 0, list(range(12)), 4)
    events.removed(b"a" * 32, 0)
    events.removed(b"x" * 32, 0)
    publisher.publish(events.take())
    while True:
        assert router.subscriber.poll(PATIENCE * 1000)
        _, _, payload = router.subscriber.recv_multipart()
        batch = msgspec.msgpack.decode(payload)
        if batch[1] != [["AllBlocksCleared"]]:
            break
    a, b, c = (external_hash(one * 32) for one in (b"a", b"b", b"c"))
    assert batch[1] == [
        ["BlockStored", [a, b], None, list(range(8)), 4, None, "GPU", None, None],
        ["BlockStored", [c], b, list(range(8, 12)), 4, None, "GPU", None, None],
        ["BlockRemoved", [a], "GPU"],
    ]
    with pytest.raises(ConfigError, match=r"kv_events: .*can't be bound"):
        KVEventPublisher(address)
    router.close()
    publisher.close()


def test_blocks_of_adapters_salts_and_images_are_told_from_plain_text():
    events = BlockEvents("GPU")
    events.take()
    adapter = "ab" * 16
    image = [MediaSpan(5, 2, "of an image")]
    texts = [
        NO_EXTRA_KEYS,
        ExtraKeys([("adapter", adapter)]),
        ExtraKeys([("salt", "secret"), ("adapter", adapter)]),
        ExtraKeys([], image),
    ]
    for number, keys in enumerate(texts):
        events.stored([bytes([number, block] * 16) for block in range(2)], 0, list(range(8)), 4, keys)
    plain, adapted, salted, shown = msgspec.msgpack.decode(msgspec.msgpack.encode(events.take()))
    assert plain[5:] == [None, "GPU", None, None]
    assert adapted[5:8] == [int("ab" * 8, 16), "GPU", adapter] and adapted[8] is None
    assert salted[5:8] == adapted[5:8] and len(salted[8]) == 2 and all(salted[8])
    assert "secret" not in repr(salted)
    assert shown[5:8] == [None, "GPU", None]
    assert shown[8][0] is None and len(shown[8][1]) == 1, "the block before the image is plain text"


def test_engines_of_a_service_have_ports_of_their_own():
    assert with_port_of("tcp://*:5557", 0) == "tcp://*:5557" and with_port_of("tcp://*:5557", 2) == "tcp://*:5559"
    assert with_port_of("inproc://name", 2) == "inproc://name"


def test_vllms_object_is_understood():
    cache = engine_config("m", kv_events_config={"enable_kv_cache_events": True, "topic": "t"}).cache
    assert (cache.kv_events, cache.kv_events_topic) == ("tcp://*:5557", "t")
    assert engine_config("m", kv_events_config={"topic": "t"}).cache.kv_events is None
    for wrong in ({"publisher": "kafka"}, {"enable_kv_cache_events": True, "port": 3}):
        with pytest.raises(ConfigError, match="kv_events_config"):
            engine_config("m", kv_events_config=wrong)
    with pytest.raises(ConfigError, match="kv_events_replay"):
        engine_config("m", kv_events_replay="tcp://*:1")
    with pytest.raises(ConfigError, match="kv_events"):
        engine_config("m", kv_events="tcp://*:1", enable_prefix_caching=False)
