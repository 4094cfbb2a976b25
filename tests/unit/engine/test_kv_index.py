"""The index of the blocks that engines tell of: a message that is lost is noticed, and the index's memory is
bounded."""

from __future__ import annotations

import random

import pytest

from ratoon.core.kv_events import AllBlocksCleared, BlockRemoved, BlockStored, Event, external_hash
from ratoon.core.messages import BlocksTold
from ratoon.core.params import SamplingParams
from ratoon.core.request import EngineCoreRequest
from ratoon.engine.processes.balancer import LoadBalancer
from ratoon.engine.processes.kv_index import KVIndex
from ratoon.memory.block_events import BlockEvents
from ratoon.memory.hashing import NO_EXTRA_KEYS, BlockHasher, ExtraKeys, MediaSpan

SIZE = 4
SALTED = ExtraKeys([("salt", "one")])


def hashes_of(tokens: list[int], keys: ExtraKeys = NO_EXTRA_KEYS) -> list[bytes]:
    hashes: list[bytes] = []
    BlockHasher(SIZE).extend(hashes, tokens, len(tokens) // SIZE, keys)
    return hashes


class Engine:
    """A stand-in for an engine, which tells the index of its blocks as an engine's process does."""

    def __init__(self, index: KVIndex, number: int) -> None:
        self.index, self.number = index, number
        self.events = BlockEvents("CPU")
        self.num_told = 0

    def store(self, tokens: list[int], keys: ExtraKeys = NO_EXTRA_KEYS) -> None:
        self.events.stored(hashes_of(tokens, keys), 0, tokens, SIZE, keys)

    def evict(self, tokens: list[int], first: int) -> None:
        for one in hashes_of(tokens)[first:]:
            self.events.removed(one, 0)

    def tell(self, is_lost: bool = False) -> bool:
        return self.send(self.events.take(), is_lost)

    def tell_all(self, is_lost: bool = False) -> bool:
        self.events.take()
        return self.send(self.events.known(), is_lost)

    def send(self, events: list[Event], is_lost: bool) -> bool:
        told = BlocksTold(self.num_told, events)
        self.num_told += 1
        return is_lost or self.index.take(self.number, told)


def held(index: KVIndex, tokens: list[int], keys: ExtraKeys = NO_EXTRA_KEYS) -> dict[int, int]:
    return dict(index.held(tokens, keys))


def test_each_engine_is_known_with_the_part_of_a_text_that_it_holds() -> None:
    index = KVIndex()
    text = list(range(40))
    engines = [Engine(index, number) for number in range(4)]
    for engine, length in zip(engines, (40, 12, 3, 12)):
        engine.store(text[:length])
        assert engine.tell()
    assert held(index, text) == {0: 40, 1: 12, 3: 12}
    assert held(index, [*text[:20], *range(100, 140)]) == {0: 20, 1: 12, 3: 12}
    assert held(index, text[:3]) == {} and held(index, [7, *text]) == {}
    engines[0].evict(text, first=5)
    engines[3].evict(text, first=0)
    for engine in engines:
        engine.tell()
    assert held(index, text) == {0: 20, 1: 12}


def test_a_text_without_its_beginning_is_of_no_use() -> None:
    index = KVIndex()
    engine, text = Engine(index, 0), list(range(40))
    engine.store(text)
    engine.events.removed(hashes_of(text)[0], 0)
    engine.tell()
    assert index.num_blocks == 9 and held(index, text) == {}


def test_salts_and_images_are_told_apart() -> None:
    index = KVIndex()
    text, shown = list(range(16)), ExtraKeys([], [MediaSpan(6, 4, "of an image")])
    one, other = Engine(index, 0), Engine(index, 1)
    one.store(text, SALTED)
    other.store(text, shown)
    one.tell()
    other.tell()
    assert held(index, text, SALTED) == {0: 16} and held(index, text, shown) == {1: 16}
    assert held(index, text) == {1: 4}, "the block before the image is plain text"


def test_a_message_that_is_missing_is_noticed_and_all_is_told_again() -> None:
    index = KVIndex()
    engine, other, text = Engine(index, 0), Engine(index, 1), list(range(40))
    for one in (engine, other):
        one.store(text[:20])
        assert one.tell()
    engine.evict(text[:20], first=0)
    assert engine.tell(is_lost=True)
    engine.store(text[:8])
    assert not engine.tell(), "it is to be asked"
    assert held(index, text) == {1: 20}, "and until it answers, nothing is known of it"
    engine.store(text[:12])
    assert engine.tell(), "it has been asked"
    assert held(index, text) == {1: 20}
    assert engine.tell_all(is_lost=True)
    engine.store(text[:16])
    assert not engine.tell(), "what it answered was lost as well"
    assert engine.tell_all()
    assert held(index, text) == {0: 16, 1: 20}
    engine.store(text)
    assert engine.tell() and held(index, text) == {0: 40, 1: 20}


def test_the_cleared_cache_of_an_engine_and_one_that_ended_hold_nothing() -> None:
    index = KVIndex()
    text = list(range(40))
    engines = [Engine(index, number) for number in range(2)]
    for engine in engines:
        engine.store(text)
        engine.tell()
    engines[0].events.cleared()
    engines[0].tell()
    assert held(index, text) == {1: 40}
    index.forget(1)
    assert index.num_blocks == 0
    again = Engine(index, 1)
    again.store(text[:8])
    assert again.tell(), "a new run counts from the beginning"
    assert held(index, text) == {1: 8}


def test_memory_is_bounded_for_each_engine() -> None:
    index = KVIndex(most_blocks=50)
    for number in range(3):
        engine = Engine(index, number)
        for text in range(40):
            engine.store([*range(1000 * text, 1000 * text + 5 * SIZE)])
        engine.tell()
        assert index.num_blocks_of(number) == 50
        engine.evict([*range(5 * SIZE)], first=0)  # the index has forgotten these blocks
        assert engine.tell()
    assert index.num_blocks == 50, "the engines hold the same ones"


@pytest.mark.drawn
def test_the_index_is_what_the_engines_hold_whatever_is_lost() -> None:
    draw = random.Random(7)
    index = KVIndex()
    texts = [[draw.randrange(3) for _ in range(32)] for _ in range(30)]
    engines = [Engine(index, number) for number in range(3)]
    for _ in range(600):
        engine = draw.choice(engines)
        what = draw.random()
        if what < 0.6:
            engine.store(draw.choice(texts)[: draw.randrange(33)])
        elif what < 0.97:
            engine.evict(draw.choice(texts), draw.randrange(8))
        else:
            engine.events.cleared()
        if draw.random() < 0.7 and not engine.tell(is_lost=draw.random() < 0.1):
            engine.tell_all()
    for engine in engines:
        engine.tell()
        if not engine.send([BlockRemoved([0])], is_lost=False):
            engine.tell_all()
        known = engine.events.known()
        told = known[1].block_hashes if len(known) > 1 and isinstance(known[1], BlockStored) else []
        assert isinstance(known[0], AllBlocksCleared) and len(told) == index.num_blocks_of(engine.number)
        for text in texts:
            hashes = [external_hash(one) in told for one in hashes_of(text)]
            length = SIZE * (hashes.index(False) if False in hashes else len(hashes))
            assert held(index, text).get(engine.number, 0) == length


# ---- the balancer ----


def request(name: str, tokens: list[int], salt: str | None = None) -> EngineCoreRequest:
    return EngineCoreRequest(name, tokens, SamplingParams(), cache_salt=salt)


def test_what_is_told_chooses_and_not_what_was_sent() -> None:
    index = KVIndex()
    two = LoadBalancer(2, SIZE, index)
    text = list(range(400))
    engine = Engine(index, 1)
    assert two.choose(request("first", text), [0, 1]) == 0
    two.started("first")
    two.ended("first")  # and the engine has told of none of it
    engine.store(text[:200])
    engine.tell()
    assert two.choose(request("next", text), [0, 1]) == 1
    assert two.loads[1].num_tokens == 200 + 64, "what is left of the prompt, and the answer"
    assert two.choose(request("salted", text, "one"), [0, 1]) == 0


def test_prompts_on_their_way_are_known_until_their_engine_tells_of_them() -> None:
    index = KVIndex()
    two = LoadBalancer(2, SIZE, index)
    engine, text = Engine(index, 0), list(range(2000))
    assert two.choose(request("first", text), [0]) == two.choose(request("second", text), [0]) == 0
    assert two.known(request("next", text))[0] > 2000 * 7 / 8
    engine.store(text[:400])
    engine.tell()
    assert two.known(request("next", text))[0] > 2000 * 7 / 8, "the rest is being computed"
    engine.store(text)
    engine.tell()
    for name in ("first", "second"):
        two.started(name)
        assert two.known(request("next", text)) == {0: 2000}
    engine.evict(text, first=100)
    engine.tell()
    assert two.known(request("next", text)) == {0: 400}
    two.choose(request("third", text), [1])
    two.ended("third")  # before its prompt was computed
    assert two.known(request("next", text)) == {0: 400} and not two._homes


def test_what_engines_evict_to_their_host_memory_is_still_there() -> None:
    index = KVIndex()
    two = LoadBalancer(2, SIZE, index, keeps_evicted=True)
    engine, text = Engine(index, 0), list(range(400))
    two.choose(request("first", text), [0, 1])
    two.started("first")
    two.ended("first")
    engine.store(text)
    engine.evict(text, first=0)
    engine.tell()
    assert two.choose(request("next", text), [0, 1]) == 0


def test_an_engine_that_is_started_again_holds_nothing() -> None:
    index = KVIndex()
    two = LoadBalancer(2, SIZE, index)
    engine, text = Engine(index, 0), list(range(400))
    engine.store(text)
    engine.tell()
    assert two.known(request("x", text)) == {0: 400}
    two.forget(0)
    assert two.known(request("x", text)) == {}
