"""A connector is a tier behind host memory: what one engine saves, another one loads, and what can't be loaded is
computed. The answers are those without it."""

from __future__ import annotations

import threading
from collections.abc import Mapping, Sequence
from typing import Any

import pytest

from ratoon.api.llm import LLM
from ratoon.core import kv_connector
from ratoon.core.errors import ConfigError
from ratoon.core.kv import KVFingerprint
from ratoon.core.kv_connector import BlockIndex, BlockMover, KVConnector
from ratoon.core.params import SamplingParams
from tests.depths import both_depths
from tests.golden.engines import engine, greedy, run, scheduler_of, tokens_of
from tests.golden.tiny_models import random_token_ids
from tests.waiting import PATIENCE

FAMILY = "llama with grouped heads"
PROMPTS = [random_token_ids(length, seed=length) for length in (70, 33, 90, 50, 64, 81)]
OTHERS = [random_token_ids(90, seed=1000 + index) for index in range(3)]  # that push the first ones out
SETTINGS: dict[str, Any] = {"num_blocks": 20, "swap_memory": "1MiB", "kv_connector": "memory"}


class Memory(KVConnector):
    """Keeps blocks in a dictionary of the test, and counts calls."""

    blocks: dict[tuple[str, bytes], bytes]
    damaged: bool  # loads fail
    raises: bool

    def __init__(self, options: Mapping[str, Any]) -> None:
        if options:
            raise ValueError("there are no options")

    @classmethod
    def reset(cls) -> None:
        cls.blocks, cls.damaged, cls.raises = {}, False, False
        cls.num_loads = cls.num_saves = cls.num_closed = 0

    def open_index(self, fingerprint: KVFingerprint) -> BlockIndex:
        return Index(fingerprint.digest)

    def open_mover(self, fingerprint: KVFingerprint) -> BlockMover:
        return Mover(fingerprint.digest)


class Index(BlockIndex):
    def __init__(self, kind: str) -> None:
        self._kind = kind

    def find(self, key: bytes) -> bool:
        return (self._kind, key) in Memory.blocks

    def offer(self, key: bytes) -> bool:
        return not self.find(key)

    def close(self) -> None:
        Memory.num_closed += 1


class Mover(BlockMover):
    def __init__(self, kind: str) -> None:
        self._kind = kind

    def save(self, key: bytes, parts: Sequence[memoryview]) -> None:
        if Memory.raises:
            raise OSError("no space left on the device")
        Memory.num_saves += 1
        Memory.blocks[self._kind, key] = b"".join(parts)

    def load(self, key: bytes, parts: Sequence[memoryview]) -> bool:
        if Memory.raises:
            raise OSError("a bad sector")
        Memory.num_loads += 1
        data = Memory.blocks[self._kind, key]
        for part in parts:
            part[:] = data[: part.nbytes] if not Memory.damaged else bytes(part.nbytes)
            data = data[part.nbytes :]
        assert not data
        return not Memory.damaged

    def close(self) -> None:
        Memory.num_closed += 1


@pytest.fixture(autouse=True)
def registered(monkeypatch: pytest.MonkeyPatch) -> None:
    Memory.reset()
    found = {"memory": Memory, "other": lambda options: object()}
    monkeypatch.setattr(kv_connector, "find_plugin", lambda group, name, is_fit, needed: found.get(name))


def expected_tokens(prompts: list[list[int]], params: Any) -> list[list[int]]:
    with engine(FAMILY) as llm:
        return tokens_of(run(llm, prompts, params))


def fill(llm: LLM) -> None:
    """Prompts one after the other, each of which takes the blocks of those before."""
    for prompt in [*PROMPTS, *OTHERS]:
        run(llm, [prompt], greedy(4))


@both_depths
def test_what_one_engine_saved_another_one_loads() -> None:
    expected = expected_tokens(PROMPTS, greedy(6))
    with engine(FAMILY, **SETTINGS) as llm:
        fill(llm)
        assert Memory.num_saves and not Memory.num_loads
    assert Memory.num_closed == 2, "both halves"
    saved = dict(Memory.blocks)
    with engine(FAMILY, **SETTINGS) as llm:
        found = run(llm, PROMPTS[:3], greedy(6))
        assert tokens_of(found) == expected[:3]
        assert [output.num_cached_tokens for output in found] == [64, 32, 80]
        assert Memory.num_loads == sum(output.num_cached_tokens for output in found) // 16
        assert all(Memory.blocks[key] == data for key, data in saved.items()), "they are the same bytes"


def test_blocks_of_another_kind_are_not_found() -> None:
    with engine(FAMILY, **SETTINGS) as llm:
        fill(llm)
    with engine(FAMILY, **SETTINGS, block_size=32) as llm:
        assert [output.num_cached_tokens for output in run(llm, PROMPTS[:3], greedy(6))] == [0, 0, 0]
    assert not Memory.num_loads


@both_depths
@pytest.mark.parametrize("failure", ["damaged", "raises"])
def test_what_cannot_be_loaded_is_computed(failure: str, caplog: pytest.LogCaptureFixture) -> None:
    expected = expected_tokens(PROMPTS, greedy(6))
    with engine(FAMILY, **SETTINGS) as llm:
        fill(llm)
    setattr(Memory, failure, True)
    with engine(FAMILY, **SETTINGS) as llm:
        found = run(llm, PROMPTS[:3], greedy(6))
        assert tokens_of(found) == expected[:3]
        assert [output.num_cached_tokens for output in found] == [0, 0, 0]
        # As long as no block is evicted again, nothing more is tried; what is computed now is found on the device.
        assert tokens_of(run(llm, PROMPTS[:1], greedy(6))) == expected[:1]
    assert ("can't be loaded from the connector" in caplog.text) == (failure == "raises")


@both_depths
def test_a_host_tier_of_few_slots_passes_blocks_on() -> None:
    """More blocks than host memory holds, with several choices, preemption and windows of one pool."""
    prompts = [*PROMPTS, *PROMPTS]
    params = [SamplingParams(n=2, seed=3, max_tokens=20, ignore_eos=True), *[greedy(20)] * (len(prompts) - 1)]
    with engine(FAMILY) as llm:
        expected = [[list(one.token_ids) for one in output.outputs] for output in run(llm, prompts, params)]
    for _ in range(2):
        with engine(FAMILY, **(SETTINGS | {"num_blocks": 24, "swap_memory": "40KiB"})) as llm:
            assert llm.describe()["swap_bytes"] < 12 * 8192
            found = [[list(one.token_ids) for one in output.outputs] for output in run(llm, prompts, params)]
            assert found == expected
    assert Memory.num_saves and Memory.num_loads


@pytest.mark.parametrize(
    ("settings", "problem"),
    [
        ({"swap_memory": 0}, "kv_connector: the blocks of 'memory' pass through host memory, .*swap_memory above 0"),
        ({"preemption_mode": "recompute"}, "pass through host memory"),
        ({"enable_prefix_caching": False}, "leave enable_prefix_caching on"),
        ({"swap_memory": 100}, "swap_memory: 100 bytes hold no block"),
        ({"kv_connector": "memmory"}, "no package registers 'memmory'"),
        ({"kv_connector": "other"}, "'other' makes a object, not a KVConnector"),
        ({"kv_connector_options": {"a": 1}}, "kv_connector_options: memory refuses {'a': 1}: there are no options"),
        ({"kv_connector": None, "kv_connector_options": {"a": 1}}, "set kv_connector too"),
    ],
)
def test_settings_that_do_not_fit_are_refused(settings: dict[str, Any], problem: str) -> None:
    with pytest.raises(ConfigError, match=problem), engine(FAMILY, **(SETTINGS | settings)):
        pass


@both_depths
def test_steps_of_others_go_on_while_blocks_are_loaded(monkeypatch: pytest.MonkeyPatch) -> None:
    """The connector gives nothing until another request, which came later, has its whole answer."""
    expected = expected_tokens([PROMPTS[0], OTHERS[0]], greedy(12))
    with engine(FAMILY, **SETTINGS) as llm:
        fill(llm)
    other_ended = threading.Event()
    load = Mover.load
    monkeypatch.setattr(Mover, "load", lambda *arguments: other_ended.wait(PATIENCE) and load(*arguments))
    with engine(FAMILY, **SETTINGS) as llm:
        core = llm._running()
        core.add_request("waits", {"prompt_token_ids": PROMPTS[0]}, greedy(12))
        core.add_request("other", {"prompt_token_ids": OTHERS[0]}, greedy(12), cache_salt="finds nothing")
        ended: dict[str, list[int]] = {}
        while len(ended) < 2:
            for output in core.step():
                if output.finished:
                    ended[output.request_id] = list(output.outputs[0].token_ids)
                    assert "other" in ended, "a step has waited for the connector"
                    other_ended.set()
        assert Memory.num_loads == 64 // 16
    assert [ended["waits"], ended["other"]] == expected


def test_an_engine_with_nothing_else_to_do_waits_for_its_blocks_and_takes_new_requests(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with engine(FAMILY, **SETTINGS) as llm:
        fill(llm)
    began, may_end = threading.Event(), threading.Event()
    load = Mover.load

    def slow(*arguments: Any) -> bool:
        began.set()
        return may_end.wait(PATIENCE) and load(*arguments)

    monkeypatch.setattr(Mover, "load", slow)
    with engine(FAMILY, **SETTINGS) as llm:
        core = llm._running()
        core.add_request("waits", {"prompt_token_ids": PROMPTS[0]}, greedy(4))
        while not began.is_set():
            assert core.step() == []
        assert core.step() == [], "it returns although nothing has come"
        core.add_request("late", {"prompt_token_ids": OTHERS[0]}, greedy(4), cache_salt="finds nothing")
        ended: list[str] = []
        while not ended:
            ended += [output.request_id for output in core.step() if output.finished]
        assert ended == ["late"]
        core.abort_request(["waits"])
        may_end.set()
        while scheduler_of(llm).has_requests():  # its blocks arrive without it
            assert core.step() == []
