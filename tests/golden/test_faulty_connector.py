"""A connector that is slow, forgets, refuses and fails, by chance: answers are those of an engine without one, nothing
waits forever, and no block is left behind."""

from __future__ import annotations

import random
import time
from collections.abc import Mapping, Sequence
from typing import Any

import pytest

from ratoon.core import kv_connector
from ratoon.core.kv import KVFingerprint
from ratoon.core.kv_connector import BlockIndex, BlockMover, KVConnector
from ratoon.execution.kv import kv_tensors
from tests.depths import both_depths
from tests.golden.engines import engine, greedy, run, scheduler_of, tokens_of
from tests.golden.tiny_models import random_token_ids

FAMILY = "llama with grouped heads"
PROMPTS = [random_token_ids(length, seed=length) for length in (70, 33, 90, 50, 64, 81, 120, 40)]
NUM_ROUNDS = 12
MOST_ROUNDS = 10 * NUM_ROUNDS  # which fault comes up depends on which blocks are still there, and so on other threads


class Faulty(KVConnector):
    """A dictionary, of which about every third call goes wrong in one way or another."""

    draws: random.Random
    blocks: dict[bytes, bytes]
    happened: dict[str, int]

    def __init__(self, options: Mapping[str, Any]) -> None: ...

    def open_index(self, fingerprint: KVFingerprint) -> BlockIndex:
        return FaultyIndex()

    def open_mover(self, fingerprint: KVFingerprint) -> BlockMover:
        return FaultyMover()

    @classmethod
    def chance(cls, name: str, one_in: int) -> bool:
        happens = cls.draws.randrange(one_in) == 0
        cls.happened[name] = cls.happened.get(name, 0) + happens
        return happens


class FaultyIndex(BlockIndex):
    keeps_ended_texts = True

    def find(self, key: bytes) -> bool:
        return (key in Faulty.blocks and not Faulty.chance("overlooked", 20)) or Faulty.chance("imagined", 40)

    def offer(self, key: bytes) -> bool:
        return not Faulty.chance("refused", 10)

    def lose(self, key: bytes) -> None:
        if Faulty.chance("dropped", 2):
            Faulty.blocks.pop(key, None)


class FaultyMover(BlockMover):
    def save(self, key: bytes, parts: Sequence[memoryview]) -> None:
        if Faulty.chance("slow save", 10):
            time.sleep(0.002)
        if Faulty.chance("failed save", 8):
            raise OSError("no space left on the device")
        if not Faulty.chance("lost save", 8):
            Faulty.blocks[key] = b"".join(parts)

    def load(self, key: bytes, parts: Sequence[memoryview]) -> bool:
        if Faulty.chance("slow load", 10):
            time.sleep(0.002)
        data, start = Faulty.blocks.get(key), 0
        is_torn = Faulty.chance("torn load", 6)
        for part in parts:
            if data is not None:
                part[:] = bytes(part.nbytes) if is_torn else data[start : start + part.nbytes]
                start += part.nbytes
        if Faulty.chance("failed load", 6):
            raise TimeoutError("a bad sector")
        return data is not None and not is_torn


@both_depths
@pytest.mark.parametrize(("seed", "piece_bytes"), [(1, kv_tensors.FETCHED_PIECE_BYTES), (2, 1)])
def test_answers_are_those_without_it_and_nothing_is_left(
    seed: int, piece_bytes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(kv_tensors, "FETCHED_PIECE_BYTES", piece_bytes)
    monkeypatch.setitem(kv_connector.BUILT_IN, "faulty", f"{__name__}:Faulty")
    Faulty.draws, Faulty.blocks, Faulty.happened = random.Random(seed), {}, {}
    with engine(FAMILY) as llm:
        expected = tokens_of(run(llm, PROMPTS, greedy(12)))
    choose = random.Random(seed)
    with engine(FAMILY, num_blocks=24, swap_memory="64KiB", kv_connector="faulty") as llm:
        store = scheduler_of(llm).kv_cache.store
        monkeypatch.setattr(store, "is_worth_loading", lambda *arguments: True)  # however slow loads are
        for number in range(MOST_ROUNDS):
            if number >= NUM_ROUNDS and all(Faulty.happened.values()):
                break
            chosen = choose.sample(range(len(PROMPTS)), 4)
            outputs = run(llm, [PROMPTS[prompt] for prompt in chosen], greedy(12))
            assert tokens_of(outputs) == [expected[prompt] for prompt in chosen]
        assert store.snapshot().loaded > 0
    assert all(Faulty.happened.values()), f"some faults never came up: {Faulty.happened}"
