"""Small steps from fixed memory: sizes, when a graph is captured, and the same tokens with padding as without.

A graph is replaced by its function, which runs again; the kernels of the inputs run under Triton's interpreter.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest

pytest.importorskip("triton")

from ratoon.attention import shared_prefix
from ratoon.core.config import ModelConfig
from ratoon.core.outputs import ModelRunnerOutput
from ratoon.core.params import SamplingParams
from ratoon.core.plan import BeamStep, BlockCopy, CaptureStep, NewRequestData
from ratoon.execution.kv.block_kernels import Pages
from ratoon.execution.passes import graphs
from ratoon.execution.passes.ends import BeamKeys, End, InnerLayers, Layers, Logits, States, Tokens
from ratoon.execution.passes.graphs import (
    PaddedEnd,
    ProgramKey,
    StepGraphs,
    graph_sizes,
    max_prefill_tokens,
    padded_read,
    padded_reqs,
    sampling_key,
)
from ratoon.execution.readers import beams as beam_candidates
from ratoon.execution.worker import Worker
from ratoon.layers.beams import SearchShape
from ratoon.layers.cuda_ops import CudaOps
from ratoon.layers.sampling import Mode
from tests.golden.adapter_driver import AdapterDriver, Answer
from tests.golden.peft_oracle import PeftAdapter
from tests.triton_interpreter import repair_interpreter
from tests.unit.execution.test_model_runner import (
    BLOCK_SIZE,
    CPU,
    LLAMA,
    NAN_TOKEN,
    OTHER,
    PROMPT,
    TWO_GROUPS,
    Driver,
    interpreted,
    launch,
    needs_kernels,
    oracle_greedy,
    poisoned,
    token_of,
)
from tests.unit.execution.test_pooling import pooled_branch

repair_interpreter()


class RunAgain:
    def __init__(self, function: Callable[[], Any]) -> None:
        self.replay = function


def fail(function: Callable[[], Any]) -> Any:
    raise RuntimeError("operation not permitted when stream is capturing")


def test_sizes_rise_and_reach_what_is_asked_for() -> None:
    assert graph_sizes(10_000) == graph_sizes(2048) and graph_sizes(2048)[-1] == 2048 and graph_sizes(1024)[-1] == 1024
    assert graph_sizes(512)[:9] == [1, 2, 4, 8, 16, 24, 32, 40, 48]
    assert graph_sizes(1) == [1] and graph_sizes(3) == [1, 2, 4] and graph_sizes(257)[-1] == 320
    sizes = graph_sizes(2048)
    assert sizes == sorted(set(sizes)) and all(b / a <= 1.25 for a, b in pairwise(sizes) if a >= 32)


def test_rows_that_are_read_are_padded_to_few_numbers() -> None:
    assert [padded_read(count, 64) for count in (0, 1, 2, 8, 9, 33, 64)] == [0, 1, 8, 8, 32, 64, 64]
    assert padded_read(3, 4) == 4 and padded_read(129, 512) == 512


def test_padding_has_requests_of_its_own_unless_all_have_one_token() -> None:
    assert [padded_reqs(count, 1, 64, 96) for count in (1, 7, 8, 32, 33, 63)] == [2, 9, 9, 33, 64, 64]
    assert padded_reqs(1, 1, 4, 96) == 2 and padded_reqs(2, 1, 4, 96) == 4
    assert padded_reqs(200, 1, 2048, 96) == 1024 and padded_reqs(1024, 1, 2048, 96) is None
    assert padded_reqs(1, 60, 512, 50) == 512 and padded_reqs(1, 60, 2048, 50) is None, "too long for a request"


KEY, OTHER_KEY = sampling_key(8, None, None, Mode.GREEDY), ProgramKey(8, 8, (PaddedEnd(Logits(), 1),))


def make_graphs(capture: Callable[..., Any]) -> tuple[StepGraphs, list[ProgramKey]]:
    ran: list[ProgramKey] = []
    return StepGraphs([1, 2, 8], ran.append, capture), ran  # type: ignore[arg-type]


def test_a_step_is_padded_to_the_next_size() -> None:
    made, _ = make_graphs(RunAgain)
    assert [made.size_for(count) for count in (1, 2, 3, 8, 9)] == [1, 2, 8, 8, None]


def test_prompts_are_padded_up_to_fewer_tokens_than_decodes() -> None:
    made = StepGraphs(graph_sizes(2048), lambda key: None, RunAgain, 100)
    assert made.size_for(100, is_decode=False) == 112 and made.size_for(101, is_decode=False) is None
    assert made.size_for(1000) == 1024 and made.size_for(1025) is None
    small = StepGraphs(graph_sizes(2048), lambda key: None, RunAgain)
    assert small.size_for(1025, is_decode=False) == 1152 and small.size_for(2049, is_decode=False) is None


def test_a_step_with_prompts_is_padded_if_launching_it_takes_longer_than_computing_it() -> None:
    def shape(hidden: int, intermediate: int, heads: int, layers: int) -> ModelConfig:
        return replace(LLAMA.config, hidden_size=hidden, intermediate_size=intermediate, num_heads=heads, head_dim=128,
                       num_kv_heads=8, num_layers=layers)  # fmt: skip

    small, large = max_prefill_tokens(shape(1024, 3072, 16, 28)), max_prefill_tokens(shape(4096, 14336, 32, 32))
    assert small > 2048 and 256 < large < 512


def test_a_graph_is_captured_when_its_key_occurs_again() -> None:
    made, ran = make_graphs(RunAgain)
    made.run(KEY)
    made.run(OTHER_KEY)
    assert made.stats.num_graphs == 0 and ran == [KEY, OTHER_KEY]
    made.run(KEY)
    made.run(KEY)
    assert made.stats.num_graphs == 1 and ran[2:] == [KEY, KEY], "captured once, replayed twice"
    made.clear()
    made.run(KEY)
    assert made.stats.num_graphs == 0


def test_a_step_says_whether_later_ones_like_it_take_less_time() -> None:
    made, _ = make_graphs(RunAgain)
    found = []
    for _ in range(4):
        made.run(KEY)
        found.append(made.has_prepared)
    assert found == [True, True, False, False], "compiled, captured, replayed"

    def fail(function: Callable[[], object]) -> RunAgain:
        raise RuntimeError("no graph")

    made, _ = make_graphs(fail)
    found = []
    for _ in range(3):
        made.run(KEY)
        found.append(made.has_prepared)
    assert found == [True, False, False], "without a graph it runs as it is"


def test_steps_that_ran_once_are_captured_in_advance_the_latest_first() -> None:
    made, ran = make_graphs(RunAgain)
    assert not made.can_capture_next and not made.capture_next()
    made.run(KEY)
    made.run(OTHER_KEY)
    assert made.can_capture_next and made.capture_next() and list(made._graphs) == [OTHER_KEY]
    assert made.capture_next() and not made.can_capture_next and not made.capture_next()
    assert ran == [KEY, OTHER_KEY], "nothing is executed"
    made.run(KEY)
    assert made.stats.num_graphs == 2


def test_steps_of_short_continuations_run_ahead_in_each_way_of_sampling_that_was_used() -> None:
    ran: list[ProgramKey] = []
    sent: list[int] = []
    made = StepGraphs(graph_sizes(24), ran.append, RunAgain, send_padding=lambda: sent.append(len(ran)))  # type: ignore
    assert not made.can_run_ahead and not made.run_ahead()
    short = [sampling_key(size, 2, 1, Mode.GREEDY) for size in (8, 16, 24)]
    made.run(KEY)
    made.run(short[1])
    while made.can_run_ahead:
        made.run_ahead()
    assert ran == [KEY, short[1], short[0], short[2]], "what has run is not run again"
    assert sent == [2, 3], "with padding alone"
    while made.can_capture_next:
        assert made.capture_next()
    assert made.stats.num_graphs == 4
    made.run(sampling_key(1, None, None, Mode.RANDOM))
    assert made.can_run_ahead and made.run_ahead() and ran[-1] == sampling_key(8, 2, 1, Mode.RANDOM)
    made.clear()
    assert not made.can_run_ahead


def test_a_warm_up_has_the_first_steps_run_ahead_and_captured_in_each_way_to_choose() -> None:
    ran: list[ProgramKey] = []
    made = StepGraphs(graph_sizes(24), ran.append, RunAgain, send_padding=lambda: None)  # type: ignore[arg-type]
    made.expect_first_steps()
    assert ran == [], "a start does not wait for it"
    while made.can_run_ahead:
        assert made.run_ahead()
    first = [sampling_key(1, None, None, mode) for mode in (Mode.GREEDY, Mode.RANDOM, Mode.FILTERED)]
    first.append(ProgramKey(1, None, (PaddedEnd(Logits(), None),)))
    assert ran == first, "short continuations follow the first request of their kind"
    while made.can_capture_next:
        assert made.capture_next()
    assert set(made._graphs) == set(first)


def test_a_step_that_can_not_be_run_ahead_costs_no_request() -> None:
    def run(key: ProgramKey) -> None:
        if key.num_reqs is not None:
            raise RuntimeError("out of memory")

    made = StepGraphs(graph_sizes(64), run, RunAgain, send_padding=lambda: None)
    made.run(KEY)
    for _ in range(graphs.MAX_FAILURES):
        assert made.can_run_ahead and not made.run_ahead()
    assert not made.can_run_ahead
    made.run(KEY)


def test_nothing_runs_ahead_before_its_kernels_are_compiled() -> None:
    """A request that came meanwhile would wait for that."""
    worker = Worker.__new__(Worker)
    worker.runner = cast("Any", SimpleNamespace(graphs=SimpleNamespace(can_capture_next=False, can_run_ahead=True)))
    worker.grammars = cast("Any", SimpleNamespace(can_open_ahead=False))
    for kernels, expected in (
        (None, False),
        (SimpleNamespace(has_ended=False), False),
        (SimpleNamespace(has_ended=True), True),
    ):
        worker._kernels = cast("Any", kernels)
        assert worker.has_idle_work == expected and not worker.has_work_of_steps


def test_grammars_are_loaded_behind_likely_requests_and_before_steps_of_all_sizes() -> None:
    """The sizes take seconds, and the first grammar would wait for its library meanwhile."""
    done: list[str] = []
    left = {"capture": 1, "rehearse": 2, "grammars": 1, "run ahead": 2}

    def expect_grammars() -> None:
        left["rehearse"] += 1

    def piece(name: str) -> Callable[[], bool]:
        def work() -> bool:
            done.append(name)
            left[name] -= 1
            return True

        return work

    class Left(SimpleNamespace):
        can_capture_next = property(lambda self: left["capture"] > 0)
        can_run_ahead = property(lambda self: left["run ahead"] > 0)
        can_go_on = property(lambda self: left["rehearse"] > 0)
        can_open_ahead = property(lambda self: left["grammars"] > 0)

    worker = Worker.__new__(Worker)
    made = Left(capture_next=piece("capture"), run_ahead=piece("run ahead"))
    worker.runner, worker._stream = cast("Any", SimpleNamespace(graphs=made)), None
    worker.grammars = cast("Any", Left(open_ahead=piece("grammars")))
    worker._rehearsal = cast("Any", Left(run_next=piece("rehearse"), expect_grammars=expect_grammars))
    worker._kernels = cast("Any", SimpleNamespace(has_ended=True))
    while worker.work_when_idle():
        pass
    assert done == ["capture", "rehearse", "rehearse", "grammars", "rehearse", "run ahead", "run ahead"]


class BusyStream:
    """Of a device that executes nothing until it is waited for."""

    def __init__(self) -> None:
        self.num_pending = 0

    def query(self) -> bool:
        return self.num_pending == 0

    def synchronize(self) -> None:
        self.num_pending = 0


def test_what_runs_ahead_does_not_keep_the_next_piece_from_being_done() -> None:
    """The device is busy with it for a while."""
    stream = BusyStream()

    def run(key: ProgramKey) -> None:
        stream.num_pending += 1

    made = StepGraphs(graph_sizes(32), run, lambda function: RunAgain(lambda: None), send_padding=lambda: None)
    worker = Worker.__new__(Worker)
    worker.runner = cast("Any", SimpleNamespace(graphs=made))
    worker.grammars = cast("Any", SimpleNamespace(can_open_ahead=False))
    worker._kernels, worker._stream = cast("Any", SimpleNamespace(has_ended=True)), cast("Any", stream)
    made.run(KEY)
    assert worker.is_busy and not worker.work_when_idle(), "of a step"
    stream.synchronize()
    while worker.work_when_idle():
        pass
    assert len(made._graphs) == 1 + len(graphs.SHORT_SIZES) and not worker.has_idle_work


def test_nothing_is_captured_in_advance_once_captures_fail() -> None:
    made, _ = make_graphs(fail)
    made.run(KEY)
    for _ in range(graphs.MAX_FAILURES):
        assert made.can_capture_next and not made.capture_next()
    assert not made.can_capture_next


def test_a_step_that_raised_is_not_captured_the_next_time() -> None:
    errors = [RuntimeError("out of memory")]

    def run(key: ProgramKey) -> None:
        if errors:
            raise errors.pop()

    made = StepGraphs([8], run, RunAgain)
    with pytest.raises(RuntimeError):
        made.run(KEY)
    made.run(KEY)
    assert made.stats.num_graphs == 0
    made.run(KEY)
    assert made.stats.num_graphs == 1


def test_what_cannot_be_captured_runs_as_it_is(caplog: pytest.LogCaptureFixture) -> None:
    made, ran = make_graphs(fail)
    for _ in range(10):
        made.run(KEY)
    assert ran == [KEY] * 10 and made.stats.num_graphs == 0
    assert len(caplog.records) == graphs.MAX_FAILURES and "can't be captured" in caplog.text


def test_the_number_of_graphs_is_limited(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(graphs, "MAX_GRAPHS", 1)
    made, ran = make_graphs(RunAgain)
    for key in (KEY, OTHER_KEY) * 3:
        made.run(key)
    assert made.stats.num_graphs == 1 and len(ran) == 6


@pytest.mark.parametrize(("free", "captured"), [(2**20, 0), (2**40, 1)])
def test_nothing_is_captured_when_memory_is_short(free: int, captured: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(graphs, "free_bytes", lambda: free)
    made, _ = make_graphs(RunAgain)
    for _ in range(3):
        made.run(KEY)
    assert made.stats.num_graphs == captured


# ---- the runner ----


def padded_driver(*arguments: Any) -> tuple[Driver, list[ProgramKey]]:
    """Also the keys of the steps that it runs."""
    driver = Driver(*arguments, inputs_on_device=True, capture=RunAgain)
    keys: list[ProgramKey] = []
    assert driver.runner.graphs is not None
    run = driver.runner.graphs.run
    driver.runner.graphs.run = lambda key: (keys.append(key), run(key))[1]  # type: ignore[method-assign]
    return driver, keys


@interpreted
@pytest.mark.parametrize("backend", ["torch", pytest.param("native", marks=needs_kernels)])
def test_padded_steps_give_the_tokens_of_the_model(backend: str) -> None:
    """Three branches, one of which ends: mixed steps, then decodes of three and of two padded to four and two."""
    driver, keys = padded_driver(TWO_GROUPS, backend)
    prompts = {"a": PROMPT, "b": OTHER, "c": OTHER[:5]}
    outputs = [
        driver.step(new=[driver.new(name, tokens, 1 + 4 * i) for i, (name, tokens) in enumerate(prompts.items())])
    ]
    outputs += [driver.step(known={name: len(tokens) + i for name, tokens in prompts.items()}) for i in range(3)]
    for i in range(3, 6):
        ended = {"finished_req_ids": ["a"]} if i == 3 else {}
        outputs.append(driver.step(known={name: len(prompts[name]) + i for name in ("c", "b")}, **ended))
    for name, tokens in prompts.items():
        found = [token_of(output, name) for output in outputs if name in output.req_ids]
        assert found == oracle_greedy(TWO_GROUPS, tokens, 4 if name == "a" else 7)
    assert keys == [
        sampling_key(64, 9, 8, Mode.GREEDY),
        *[sampling_key(4, None, None, Mode.GREEDY)] * 3,
        *[sampling_key(2, None, None, Mode.GREEDY)] * 3,
    ]
    assert driver.runner.num_computed_tokens == 63 + 9 + 6


def hide_host_arrays(driver: Driver) -> None:
    """From attention, which a graph repeats with the tensors on the device alone."""
    padded = driver.runner.inputs.padded

    def without_host(*arguments: int | None) -> Any:
        step = padded(*arguments)
        step.groups[0].query_start_loc = step.groups[0].seq_lens = step.groups[0].block_table = None  # type: ignore
        return step

    driver.runner.inputs.padded = without_host


@interpreted
@pytest.mark.slow
def test_padded_steps_need_nothing_but_tensors_on_the_device_with_the_triton_backend() -> None:
    driver, keys = padded_driver(LLAMA, "triton")
    hide_host_arrays(driver)
    prompts = {"a": OTHER[:3], "b": OTHER[:2]}
    outputs = [driver.step(new=[driver.new("a", prompts["a"], 1), driver.new("b", prompts["b"], 5)])]
    outputs += [driver.step(known={"b": 2 + i, "a": 3 + i}) for i in range(2)]
    for name, tokens in prompts.items():
        assert [token_of(output, name) for output in outputs] == oracle_greedy(LLAMA, tokens, 3)
    assert keys == [sampling_key(8, 8, 8, Mode.GREEDY), *[sampling_key(2, None, None, Mode.GREEDY)] * 2]


@pytest.fixture
def small_prefixes_count(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shared_prefix, "MIN_SHARED", BLOCK_SIZE)
    monkeypatch.setattr(shared_prefix, "MIN_SAVED", BLOCK_SIZE)


def behind_prefix(driver: Driver, name: str, tokens: list[int], first_block: int, prefix: list[int]) -> NewRequestData:
    """A branch whose first blocks are these, which are computed."""
    new = driver.new(name, tokens, first_block, computed=len(prefix) * BLOCK_SIZE)
    new.block_ids[0][: len(prefix)] = prefix
    return new


@interpreted
@pytest.mark.slow
@pytest.mark.usefixtures("small_prefixes_count")
def test_requests_of_a_padded_step_attend_to_a_shared_prefix_together() -> None:
    """Three behind the prefix of the first and one alone, then two of them: the graph of the same key has other runs.
    What the host knows is not looked at: a graph finds runs and prefixes on the device."""
    driver, keys = padded_driver(LLAMA, "triton")
    hide_host_arrays(driver)
    prompts = {"a": PROMPT[:34], "b": PROMPT[:33], "alone": OTHER[:2], "c": PROMPT[:32] + OTHER[:2]}
    first = driver.step(new=[driver.new("a", prompts["a"], 1)])
    later = [
        behind_prefix(driver, "b", prompts["b"], 10, [1, 2]),
        driver.new("alone", prompts["alone"], 20),
        behind_prefix(driver, "c", prompts["c"], 30, [1, 2]),
    ]
    outputs = [driver.step(new=later)]
    outputs += [driver.step(known={name: len(tokens) + i for name, tokens in prompts.items()}) for i in range(2)]
    outputs += [driver.step(known={name: len(prompts[name]) + i for name in ("c", "b", "alone")}) for i in (2, 3)]
    for name, tokens in prompts.items():
        found = [token_of(output, name) for output in [first, *outputs] if name in output.req_ids]
        assert found == oracle_greedy(LLAMA, tokens, 3 if name == "a" else 5)
    assert [key.num_runs for key in keys] == [None, None, 1, 1, 1, 1]
    assert {key.size for key in keys[2:]} == {4}


@interpreted
def test_only_the_rows_that_are_read_are_sampled_in_a_padded_step() -> None:
    """A prompt in two parts beside branches that decode; then all get tokens, in another order."""
    driver, keys = padded_driver()
    driver.step(new=[driver.new("a", OTHER, 1), driver.new("b", OTHER[:9], 5)])
    long = driver.new("long", PROMPT, 9)
    mixed = driver.step(
        new=[long], known={"b": 9, "a": len(OTHER)}, counts={"long": 20, "b": 1, "a": 1}, sampled=["a", "b"]
    )
    assert mixed.req_ids == ["a", "b"]
    assert driver.step(known={"long": 20}, counts={"long": 10}, sampled=[]) == ModelRunnerOutput(has_prepared=True)
    last = driver.step(
        known={"a": len(OTHER) + 1, "long": 30, "b": 10}, counts={"a": 1, "long": 7, "b": 1}, sampled=["long", "b", "a"]
    )
    for name, tokens in {"a": OTHER, "b": OTHER[:9]}.items():
        assert [token_of(output, name) for output in (mixed, last)] == oracle_greedy(LLAMA, tokens, 3)[1:]
    assert token_of(last, "long") == oracle_greedy(LLAMA, PROMPT, 1)[0]
    assert keys[1:] == [
        sampling_key(24, 9, 8, Mode.GREEDY),
        ProgramKey(16, 2, ()),
        sampling_key(16, 9, 16, Mode.GREEDY)._replace(has_few=True),
    ]


PARAMS = {
    "greedy": SamplingParams(temperature=0.0),
    "random": SamplingParams(temperature=1.5),
    "top_k": SamplingParams(temperature=1.5, top_k=7),
    "top_p": SamplingParams(temperature=0.8, top_p=0.7),
    "min_p": SamplingParams(temperature=2.0, min_p=0.1),
    "penalised": SamplingParams(temperature=0.9, repetition_penalty=1.4),
    "logprobs": SamplingParams(temperature=0.9, logprobs=2),
}


@pytest.mark.slow
@interpreted
@pytest.mark.parametrize(
    ("names", "mode"),
    [
        (["greedy", "greedy", "greedy"], Mode.GREEDY),
        (["random", "greedy", "random"], Mode.RANDOM),
        (["top_k", "greedy", "top_p", "min_p", "random"], Mode.FILTERED),
        (["random", "penalised", "top_k"], None),
        (["logprobs", "greedy", "random"], None),
    ],
)
def test_every_way_of_sampling_draws_the_same_tokens_in_padded_steps(names: list[str], mode: Mode | None) -> None:
    results = []
    padded, keys = padded_driver()
    for driver in (Driver(), padded):
        new = [
            driver.new(str(index), OTHER[: 5 + index], 1 + 4 * index, params=PARAMS[name], seed=index)
            for index, name in enumerate(names)
        ]
        outputs = [driver.step(new=new)]
        known = {branch.req_id: len(branch.token_ids) for branch in new}
        outputs += [driver.step(known={name: count + step for name, count in known.items()}) for step in range(5)]
        results.append([(output.req_ids, output.sampled_token_ids, sorted(output.logprobs)) for output in outputs])
    assert results[0] == results[1]
    end = Logits() if mode is None else Tokens(mode)
    assert {key.ends for key in keys[1:]} == {(PaddedEnd(end, None),)} and all(key.num_reqs is None for key in keys[1:])


@interpreted
def test_padded_steps_are_launched_before_tokens_are_taken() -> None:
    driver, _ = padded_driver()
    pending = [launch(driver, [driver.new("a", PROMPT, 1), driver.new("b", OTHER, 21)])]
    pending += [launch(driver, known={"a": len(PROMPT) + i, "b": len(OTHER) + i}) for i in range(4)]
    outputs = [output.get_output() for output in pending]
    assert [token_of(output, "a") for output in outputs] == oracle_greedy(LLAMA, PROMPT, 5)
    assert [token_of(output, "b") for output in outputs] == oracle_greedy(LLAMA, OTHER, 5)


@interpreted
@pytest.mark.parametrize("params", [PARAMS["greedy"], PARAMS["top_k"]], ids=["greedy", "top_k"])
def test_steps_that_run_ahead_change_no_token(params: SamplingParams) -> None:
    """Between the steps of a branch, and one of them is pending."""
    results = []
    for ahead in (False, True):
        driver, _ = padded_driver()
        made = driver.runner.graphs
        assert made is not None
        made.expect_first_steps()
        pending = [launch(driver, [driver.new("a", PROMPT, 1, params=params, seed=3)])]
        for i in range(3):
            while ahead and made.can_run_ahead:
                assert made.run_ahead()
            pending.append(launch(driver, known={"a": len(PROMPT) + i}))
        results.append([token_of(output.get_output(), "a") for output in pending])
        assert made.can_run_ahead == (not ahead)
    assert results[0] == results[1]


@interpreted
def test_a_branch_whose_logits_are_nan_fails_alone_in_a_padded_step() -> None:
    driver, keys = padded_driver(poisoned(LLAMA))
    bad = driver.new("bad", [*OTHER, NAN_TOKEN], 6, computed=0)
    driver.step(new=[driver.new("a", PROMPT, 1), bad], counts={"a": len(PROMPT), "bad": len(OTHER)}, sampled=["a"])
    output = driver.step(known={"a": len(PROMPT), "bad": len(OTHER)})
    assert keys[-1] == sampling_key(2, None, None, Mode.GREEDY)
    assert set(output.errors) == {"bad"} and output.req_ids == ["a"]
    assert token_of(output, "a") == oracle_greedy(LLAMA, PROMPT, 2)[1]


@interpreted
def test_copies_of_blocks_travel_with_the_numbers_of_their_step(monkeypatch: pytest.MonkeyPatch) -> None:
    """Three branches go on from the prompt of a fourth, whose last block they copy; the step after copies nothing."""
    results = []
    moved: list[int] = []
    for by_kernel in (False, True):
        driver, keys = padded_driver()
        kv = driver.runner.kv
        if by_kernel:
            kv._pages = Pages(kv._tensors, CPU)
            monkeypatch.setattr(kv, "move_blocks", lambda plan: moved.append(len(plan.block_copies)))
        driver.step(new=[driver.new("a", OTHER, 1)])
        shared = [*range(1, 1 + len(OTHER) // BLOCK_SIZE)]
        children, copies = [], []
        for index, token in enumerate((3, 4, 5)):
            own = 20 + 2 * index
            child = driver.new(f"a#{index}", [*OTHER, token], 1, computed=len(OTHER))
            child.block_ids = ([*shared, own, own + 1],)
            children.append(child)
            copies.append(BlockCopy(child.req_id, 0, len(shared), len(shared) + 1, own))
        outputs = [driver.step(known={"a": len(OTHER)}, new=children, block_copies=copies)]
        known = {"a": len(OTHER) + 1} | {child.req_id: len(OTHER) + 1 for child in children}
        outputs.append(driver.step(known=known))
        results.append([(output.req_ids, output.sampled_token_ids) for output in outputs])
        assert moved == ([0, 0] if by_kernel else []) and keys[-1] == sampling_key(4, None, None, Mode.GREEDY)
        assert len(OTHER) % BLOCK_SIZE, "the last block is shared"
    assert results[0] == results[1]
    assert results[0][0][1][:3] == [[oracle_greedy(LLAMA, [*OTHER, token], 1)[0]] for token in (3, 4, 5)]


def ends_of(key: ProgramKey) -> list[End]:
    return [padded.end for padded in key.ends]


@interpreted
def test_log_probabilities_of_a_prompt_are_read_in_a_padded_step() -> None:
    results = []
    padded, keys = padded_driver()
    for driver in (Driver(), padded):
        params = SamplingParams(temperature=0.0, prompt_logprobs=1)
        output = driver.step(new=[driver.new("a", OTHER, 1, params=params), driver.new("b", OTHER[:5], 9)])
        tokens = [token_of(output, "a"), *driver.decode("a", len(OTHER), 2)]
        results.append((tokens, output.prompt_logprobs["a"].rows.token_ids, token_of(output, "b")))
    assert results[0] == results[1] and results[0][0] == oracle_greedy(LLAMA, OTHER, 3)
    assert ends_of(keys[0]) == [Tokens(Mode.GREEDY), States()] and len(keys) == 3


@interpreted
@pytest.mark.parametrize("layers", [[0, 2], [1, 3, 4], [4]], ids=str)
def test_hidden_states_are_read_in_a_padded_step_beside_branches_that_decode(layers: list[int]) -> None:
    """Of the last token of a running branch, and of rows that are not there yet."""
    results = []
    padded, keys = padded_driver()
    for driver in (Driver(), padded):
        driver.step(new=[driver.new("a", OTHER, 1), driver.new("b", OTHER[:5], 9)])
        table = driver.new("x", OTHER, 1).block_ids
        last = len(OTHER) - 1
        capture = CaptureStep("x", [OTHER[-1]], [(last, 1, False)], table, [0], layers, "float32")
        output = driver.step(known={"a": len(OTHER), "b": 5}, captures=[capture], total_num_scheduled_tokens=3)
        found = output.hidden_states["x"]
        results.append((token_of(output, "a"), token_of(output, "b"), np.frombuffer(found.data, np.float32)))
    assert results[0][:2] == results[1][:2] and results[0][0] == oracle_greedy(LLAMA, OTHER, 2)[1]
    np.testing.assert_allclose(results[0][2], results[1][2], rtol=0, atol=1e-5)
    tokens, captured = ends_of(keys[-1])
    assert tokens == Tokens(Mode.GREEDY) and isinstance(captured, Layers) and captured.layers == tuple(layers)
    assert keys[-1].num_reqs is None and keys[-1].num_layers is None


@interpreted
def test_a_padded_step_ends_behind_the_last_layer_that_is_read() -> None:
    padded, keys = padded_driver()
    padded.step(new=[padded.new("a", OTHER, 1)])
    table = padded.new("x", OTHER, 1).block_ids
    capture = CaptureStep("x", OTHER[:2], [(0, 2, False)], table, [0, 1], [0, 1], "float32")
    output = padded.step(captures=[capture], total_num_scheduled_tokens=2)
    assert output.hidden_states["x"].shape[:2] == (2, 2) and keys[-1].num_layers == 1


@interpreted
@pytest.mark.parametrize("kind", ["mean", "last"])
def test_vectors_and_tokens_come_from_one_padded_step(kind: str) -> None:
    results = []
    padded, keys = padded_driver()
    for driver in (Driver(), padded):
        output = driver.step(
            new=[driver.new("a", OTHER[:7], 1), pooled_branch(driver, "p", OTHER[:5], 9, kind)],
            sampled=["a"],
            pooled_req_ids=["p"],
        )
        results.append((token_of(output, "a"), np.frombuffer(output.pooled["p"].data, np.float32)))
    assert results[0][0] == results[1][0]
    np.testing.assert_allclose(results[0][1], results[1][1], rtol=0, atol=1e-5)
    assert ends_of(keys[0]) == [Tokens(Mode.GREEDY), States()]


@interpreted
def test_all_kinds_of_results_come_from_one_padded_step(monkeypatch: pytest.MonkeyPatch) -> None:
    """Branches that decode, a prompt with log-probabilities, a search, a vector, hidden states of two extractions."""
    results = []
    padded, keys = padded_driver()
    for driver in (Driver(), padded):
        if driver is padded:
            monkeypatch.setattr(beam_candidates, "chosen_by_keys", lambda device, searches: True)
        driver.step(new=[driver.new("a", OTHER, 1), driver.new("b", OTHER[:5], 5, params=PARAMS["top_k"], seed=7)])
        table = driver.new("x", OTHER, 1).block_ids
        spans = [(3, 2, False)]
        captures = [
            CaptureStep("x", OTHER[3:5], spans, table, [0, 1], [1], "float32"),
            CaptureStep("y", OTHER[3:5], spans, table, [1], [0, 4], "float32"),
        ]
        prompt = driver.new("c", OTHER[2:9], 9, params=SamplingParams(temperature=0.0, prompt_logprobs=1))
        output = driver.step(
            known={"a": len(OTHER), "b": 5},
            new=[prompt, driver.new("s", OTHER[:4], 13), pooled_branch(driver, "p", OTHER[:6], 17, "mean")],
            sampled=["c", "a", "b"],
            beam_steps=[BeamStep("s", num_candidates=3, scores=[-0.5])],
            pooled_req_ids=["p"],
            captures=captures,
            total_num_scheduled_tokens=2 + 7 + 4 + 6 + 4,
        )
        assert not output.errors
        exact = (
            {name: token_of(output, name) for name in "abc"},
            output.candidates["s"].token_ids,
            output.prompt_logprobs["c"].rows.token_ids,
        )
        tensors = [output.hidden_states["x"], output.hidden_states["y"], output.pooled["p"]]
        results.append((exact, [np.frombuffer(tensor.data, np.float32) for tensor in tensors]))
    assert results[0][0] == results[1][0]
    for ours, theirs in zip(results[0][1], results[1][1]):
        np.testing.assert_allclose(ours, theirs, rtol=0, atol=1e-5)
    kinds = [type(end) for end in ends_of(keys[-1])]
    assert kinds == [Tokens, BeamKeys, States, States, Layers, InnerLayers]


@interpreted
@pytest.mark.parametrize("sizes", [(3,), (2, 3, 1)], ids=str)
def test_the_candidates_of_beams_are_chosen_in_a_padded_step(
    sizes: tuple[int, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first steps of searches, whose trunks are read; one of them is a part of its prompt only."""
    results = []
    padded, keys = padded_driver()
    for driver in (Driver(), padded):
        new = [driver.new(str(index), OTHER[: 4 + index], 1 + 4 * index) for index in range(len(sizes) + 1)]
        steps = [BeamStep(str(index), num_candidates=size, scores=[-0.5]) for index, size in enumerate(sizes)]
        if driver is padded:
            monkeypatch.setattr(beam_candidates, "chosen_by_keys", lambda device, searches: True)
        output = driver.step(new=new, sampled=[], beam_steps=steps)
        results.append({name: (found.beams, found.token_ids) for name, found in output.candidates.items()})
    assert results[0] == results[1] and len(results[0]) == len(sizes)
    (padded_end,) = keys[0].ends
    assert padded_end.end == BeamKeys(SearchShape(1 if len(sizes) == 1 else 4, 1, 4))


@interpreted
def test_a_search_without_a_usable_logit_fails_alone_in_a_padded_step(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(beam_candidates, "chosen_by_keys", lambda device, searches: True)
    driver, _ = padded_driver(poisoned(LLAMA))
    new = [driver.new("good", OTHER[:5], 1), driver.new("bad", [*OTHER[:5], NAN_TOKEN], 5)]
    steps = [BeamStep(branch.req_id, num_candidates=2, scores=[0.0]) for branch in new]
    output = driver.step(new=new, sampled=[], beam_steps=steps)
    assert set(output.candidates) == {"good"} and set(output.errors) == {"bad"}


def test_a_thread_has_its_own_handle_for_products_before_it_captures_one(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[str] = []

    class Graph:
        def capture_begin(self, **options: Any) -> None:
            calls.append("begin")

        def capture_end(self) -> None:
            calls.append("end")

    monkeypatch.setattr(graphs.torch.cuda, "CUDAGraph", Graph)
    monkeypatch.setattr(graphs.torch.cuda, "current_blas_handle", lambda: calls.append("handle"))
    graphs.CudaGraph(lambda: None, pool=None)
    assert calls == ["handle", "begin", "end"]


def test_a_graph_is_brought_to_the_device_when_it_is_captured(monkeypatch: pytest.MonkeyPatch) -> None:
    uploads: list[tuple[int | None, int | None]] = []
    library = SimpleNamespace(cuGraphUpload=lambda graph, stream: uploads.append((graph.value, stream.value)))
    monkeypatch.setattr(graphs, "load_library", lambda: library)
    monkeypatch.setattr(graphs.torch.cuda, "current_stream", lambda: SimpleNamespace(cuda_stream=7))
    graphs.upload(SimpleNamespace(raw_cuda_graph_exec=lambda: 5))  # type: ignore[arg-type]
    graphs.upload(SimpleNamespace())  # type: ignore[arg-type]  # of a torch that does not tell
    assert uploads == [(5, 7)]


@interpreted
def test_adapters_are_a_part_of_the_key_and_slots_may_be_loaded_behind_a_capture(tmp_path: Path) -> None:
    """Rows of padding have none. A graph of some adapters is the graph of all: it reads which row has which."""
    oracles = {slot: PeftAdapter(LLAMA, tmp_path / str(slot), slot, r=3, size=0.2) for slot in range(3)}
    sizes = {"num_slots": 3, "max_rank": 16}  # every slot has programs of its own in the interpreter
    plain = AdapterDriver(LLAMA, "native", **sizes)
    made = AdapterDriver(LLAMA, "resident", capture=RunAgain, ops=CudaOps(), **sizes)
    first = {slot: oracles[slot].inspect(LLAMA) for slot in (0, 2)}
    plain.load(first)
    made.load(first)
    batch = [(OTHER[:7], 0), (PROMPT[:5], -1), (OTHER[:3], 2)]
    assert tokens(made.generate(batch, 3)) == tokens(plain.generate(batch, 3))
    assert made.runner.graphs is not None
    keys = [key for key in made.runner.graphs._graphs if key.chosen is None]
    assert keys and all(key.columns == {"adapter_slots"} for key in keys)
    # Another mix, in which one slot has another adapter: the same keys.
    for driver in (plain, made):
        driver.load({2: oracles[1].inspect(LLAMA)})
    changed = [(OTHER[:7], 2), (PROMPT[:5], 0), (OTHER[:3], -1)]
    assert tokens(made.generate(changed, 3)) == tokens(plain.generate(changed, 3)) != tokens(plain.generate(batch, 3))
    decodes = [key for key in made.runner.graphs._graphs if key.num_reqs is None]
    assert decodes == [key for key in keys if key.num_reqs is None]
    alone = [(prompt, -1) for prompt, _ in batch]
    assert tokens(made.generate(alone, 3)) == tokens(plain.generate(alone, 3))
    assert any(not key.columns for key in made.runner.graphs._graphs)


def tokens(answers: list[Answer]) -> list[list[int]]:
    return [answer.tokens for answer in answers]
