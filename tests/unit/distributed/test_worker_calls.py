"""The calls of workers: a table of names, arguments and results that are data, and how an executor makes them."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from concurrent.futures import Future
from inspect import signature
from typing import Any

import pytest

from ratoon.core.errors import ConfigError, EngineError, RequestError
from ratoon.core.kv import FullAttentionSpec, KVCacheConfig, KVCacheGroup, SlidingWindowSpec, SwapCosts, kv_config_of
from ratoon.core.media import MediaInput
from ratoon.core.structured import StructuredOutput
from ratoon.core.wire import WireError, WireTensor
from ratoon.core.worker import (
    WORKER_METHODS,
    FunctionTimings,
    Measurements,
    PoolSize,
    WeightFacts,
    WorkerChoices,
    WorkerFacts,
    agree_on_choices,
    agree_on_pool,
    decode_call,
    decode_result,
    encode_call,
    encode_result,
)
from ratoon.distributed.executor import bring_up
from ratoon.distributed.host_links import HostLinks
from ratoon.distributed.uniproc import ThreadedExecutor, UniProcExecutor
from ratoon.execution.worker import Worker

GROUPS = (
    KVCacheGroup(FullAttentionSpec(4, 1, 8, "float32"), (0, 2)),
    KVCacheGroup(SlidingWindowSpec(4, 1, 8, "float32", 12), (1,)),
)
CHOICES = WorkerChoices(64, "cpu", "float32", "native", [{"layers": "0", "backend": "cpu", "reasons_against": {}}], 2)
FACTS = WorkerFacts(
    KVCacheConfig(9, 4, GROUPS, None, 3), 64, "cpu", "float32", "native", [], 2, 10, 20, swap_costs=SwapCosts(0.1, 0.2)
)
ARGUMENTS: dict[str, list[Any]] = {
    "connect": [[[""], ["tcp://127.0.0.1:5"]]],
    "allocate": [PoolSize(7, 2)],
    "prepare_grammar": [StructuredOutput(regex="a+"), "owner"],
    "encode_media": [{"a key": MediaInput("image", 2, WireTensor("uint8", (3,), b"abc"), (1, 2, 1))}],
    "fetch_media": [{"a key": "tcp://127.0.0.1:5"}],
    "sleep": [2],
    "start_profile": [True],
    "stop_profile": ["/a/file"],
}
RESULTS: dict[str, Any] = {
    "listen": ["tcp://127.0.0.1:5"],
    "choose": CHOICES,
    "load": WeightFacts(12),
    "measure": Measurements(PoolSize(9, 3), 5, 0.25),
    "allocate": FACTS,
    "stop_profile": FunctionTimings({("a.py", 1, "f"): (1, 2, 0.5, 1.5, {("b.py", 3, "g"): (1, 1, 0.25, 0.5)})}),
}


def as_bytes(frames: list[Any]) -> list[bytes]:
    return [bytes(frame) for frame in frames]


@pytest.mark.parametrize("name", WORKER_METHODS)
def test_every_call_and_its_result_cross_a_process(name: str) -> None:
    arguments = ARGUMENTS.get(name, [])
    assert decode_call(as_bytes(encode_call(name, arguments))) == (name, arguments)
    assert decode_result(name, as_bytes(encode_result(RESULTS.get(name)))) == RESULTS.get(name)


@pytest.mark.parametrize("name", WORKER_METHODS)
def test_every_name_of_the_table_is_a_method_with_as_many_arguments(name: str) -> None:
    owner: Any = next(kind for kind in (UniProcExecutor, Worker, HostLinks) if hasattr(kind, name))
    assert len(signature(getattr(owner, name)).parameters) == 1 + len(WORKER_METHODS[name].arguments)


def test_names_and_arguments_that_are_not_in_the_table_are_refused(executor: ThreadedExecutor) -> None:
    for name in ("execute_model", "run_on_thread", "__class__", "close"):
        with pytest.raises(EngineError, match=f"no method '{name}'"):
            executor.collective_rpc(name)
        with pytest.raises(EngineError, match="no method"):
            encode_call(name, [])
    with pytest.raises(EngineError, match="does not serve 'load'"):
        executor.collective_rpc("load").result()
    with pytest.raises(EngineError, match="sleep was called with 0 arguments; it has 1"):
        executor.collective_rpc("sleep")
    with pytest.raises(WireError, match="Expected `int`, got `str`"):
        decode_call(as_bytes(encode_call("sleep", ["now"])))
    with pytest.raises(NotImplementedError, match="function does not travel"):
        encode_call("sleep", [lambda: 1])


def test_a_spec_of_an_unknown_kind_is_refused() -> None:
    data = {"num_blocks": 1, "block_size": 4, "cross": None, "groups": [{"spec": {"type": "Other"}, "layers": [0]}]}
    with pytest.raises(ValueError, match=r"unknown kind 'Other'; known: .*FullAttentionSpec"):
        kv_config_of(data)
    frames = as_bytes(encode_result({"kv_config": data}))
    with pytest.raises(WireError, match="no facts of a worker"):
        decode_result("allocate", frames)


# ---- phases ----


def test_workers_agree_on_the_largest_pool_that_all_have_room_for() -> None:
    assert agree_on_pool([Measurements(PoolSize(9, 1)), Measurements(PoolSize(7, 4))]) == PoolSize(7, 1)


def test_workers_that_chose_differently_are_refused() -> None:
    other = WorkerChoices(64, "cuda:1", "bfloat16", "cuda", [], 2)
    agree_on_choices([CHOICES, CHOICES])
    with pytest.raises(ConfigError, match="dtype: the workers have chosen 'float32' and 'bfloat16'"):
        agree_on_choices([CHOICES, other])


def test_a_phase_begins_when_the_one_before_has_ended_on_all_workers() -> None:
    calls: list[tuple[Any, ...]] = []
    sizes = [PoolSize(9), PoolSize(5)]

    def call(*phase: Any) -> list[Any]:
        calls.append(phase)
        return [Measurements(size) for size in sizes] if phase[0] == "measure" else [RESULTS.get(phase[0])] * 2

    assert bring_up(call) == [FACTS, FACTS]
    assert calls == [("choose",), ("load",), ("measure",), ("allocate", PoolSize(5)), ("warm_up",)]


# ---- calls of an executor ----


class Recording(ThreadedExecutor):
    def __init__(self) -> None:
        super().__init__()
        self.log: list[Any] = []
        self.grammar: Future[Any] = Future()

    def sleep(self, level: int) -> None:
        self.log.append((level, threading.current_thread().name))

    def prepare_grammar(self, asked: StructuredOutput, owner: str | None) -> Future[Any]:
        return self.grammar


@pytest.fixture
def executor() -> Iterator[Recording]:
    made = Recording()
    yield made
    made.close()


def test_a_call_runs_on_the_thread_of_the_steps_and_behind_them(executor: Recording) -> None:
    may_end = threading.Event()
    before = executor._enqueue(may_end.wait)
    call = executor.collective_rpc("sleep", 2)
    assert not call.done() and executor.log == []
    may_end.set()
    assert before.result() and call.result() == [None]
    [(level, thread)] = executor.log
    assert level == 2 and thread.startswith("steps")


def test_a_grammar_is_prepared_beside_steps_and_only_its_end_is_told(executor: Recording) -> None:
    may_end = threading.Event()
    step = executor._enqueue(may_end.wait)
    call = executor.collective_rpc("prepare_grammar", StructuredOutput(regex="a"), None)
    executor.grammar.set_result(object())
    assert call.result(10) == [None] and not step.done()
    may_end.set()


@pytest.mark.parametrize("end", ["raises", "is cancelled"])
def test_what_becomes_of_a_grammar_is_told_both_ways(executor: Recording, end: str) -> None:
    call = executor.collective_rpc("prepare_grammar", StructuredOutput(regex="a"), None)
    if end == "raises":
        executor.grammar.set_exception(RequestError("structured_output", "is bad", "another"))
        with pytest.raises(RequestError, match="is bad"):
            call.result()
    else:
        assert call.cancel() and executor.grammar.cancelled()


def test_what_a_call_raises_is_in_its_future() -> None:
    executor = ThreadedExecutor()
    call = executor.collective_rpc("prepare_grammar", StructuredOutput(regex="a"), None)
    with pytest.raises(RequestError, match="no grammars"):
        call.result()
    executor.close()
