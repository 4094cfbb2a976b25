"""The engine on CUDA gives the same texts with graphs and without, with one step in flight and with two, and those of
the CPU; nothing waits for the device."""

from __future__ import annotations

import time
from functools import cache
from threading import Thread
from typing import Any

import msgspec
import pytest
import torch

pytest.importorskip("triton")

from ratoon import BeamSearchParams, SamplingParams
from ratoon.attention import shared_prefix
from ratoon.core.config import CacheConfig, EngineConfig, SchedulerConfig
from ratoon.core.request import EngineCoreRequest
from ratoon.distributed.uniproc import UniProcExecutor
from ratoon.engine.core import EngineCore
from ratoon.execution.model_runner import ModelRunner
from ratoon.execution.passes import graphs
from ratoon.execution.passes.graphs import sampling_key
from ratoon.execution.passes.program import StepProgram
from ratoon.execution.worker import Worker
from ratoon.layers.sampling import Mode
from ratoon.observe.startup import StartupTimer
from tests.golden import tiny_models
from tests.golden.test_cuda import FAMILIES, LENGTHS, run_to_the_end, without_waiting
from tests.golden.tiny_models import TinyModel, random_token_ids

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")

# By request. Random draws are compared among engines on CUDA only: a CPU rounds differently.
PARAMS: dict[str, Any] = {
    "greedy": SamplingParams(temperature=0.0, max_tokens=24),
    "choices": SamplingParams(temperature=0.0, max_tokens=20, n=3),
    "beams": BeamSearchParams(beam_width=3, n=2, max_tokens=12),
    "penalised": SamplingParams(temperature=0.0, max_tokens=20, repetition_penalty=1.3),
    "logprobs": SamplingParams(temperature=0.0, max_tokens=20, logprobs=2),
    "wide": BeamSearchParams(beam_width=8, n=8, max_tokens=6),
    "random": SamplingParams(temperature=1.4, max_tokens=24, seed=3),
    "filtered": SamplingParams(temperature=1.1, max_tokens=24, seed=4, top_k=20, top_p=0.8),
    "both": SamplingParams(temperature=0.9, max_tokens=12, seed=5, n=2, min_p=0.05),
}
DRAWN = ("random", "filtered", "both")


def core_of(tiny: TinyModel, device: str, depth: int, cuda_graphs: bool, **cache: Any) -> EngineCore:
    config = EngineConfig(
        model="tiny",
        device=device,
        dtype="float32",
        max_model_len=96,
        cuda_graphs=cuda_graphs,
        cache=CacheConfig(**({"num_blocks": 300} | cache)),
        scheduler=SchedulerConfig(max_num_batched_tokens=48, max_num_seqs=32, max_steps_in_flight=depth),
    )
    return EngineCore(config, UniProcExecutor(config, tiny.config, tiny.source, StartupTimer()))


def runner_of(core: EngineCore) -> ModelRunner:
    assert isinstance(core.executor, UniProcExecutor)
    return core.executor._worker.runner


def texts(
    tiny: TinyModel, device: str = "cuda", depth: int = 2, cuda_graphs: bool = True, **cache: Any
) -> tuple[dict[tuple[str, int], list[int]], EngineCore]:
    """Of all kinds of requests at once, then of continuations of two of them."""
    core = core_of(tiny, device, depth, cuda_graphs, **cache)
    prompts = {name: random_token_ids(LENGTHS[i % len(LENGTHS)], seed=i) for i, name in enumerate(PARAMS)}
    for name, params in PARAMS.items():
        core.add_request(EngineCoreRequest(name, prompts[name], params, retain_kv=60.0))
    found = run_to_the_end(core)
    for parent, choice in (("greedy", 0), ("beams", 1)):
        tokens = prompts[parent] + found[parent, choice]
        child = EngineCoreRequest(f"after {parent}", [*tokens, 7, 8, 9], SamplingParams(temperature=0.0, max_tokens=8))
        origin = parent if choice == 0 else f"{parent}#{choice}"
        core.add_request(msgspec.structs.replace(child, continuation_of=origin, continuation_token_ids=[7, 8, 9]))
    found |= run_to_the_end(core)
    return found, core


@cache
def texts_without_graphs() -> dict[tuple[str, int], list[int]]:
    return texts(tiny_models.tiny_llama(), cuda_graphs=False)[0]


@pytest.mark.parametrize("make", FAMILIES, ids=lambda make: make.__name__)
def test_texts_are_the_same_with_and_without_graphs_and_as_on_the_cpu(make: Any) -> None:
    tiny = make()
    expected, plain = texts(tiny, cuda_graphs=False, depth=1)
    assert runner_of(plain).graphs is None
    for depth in (1, 2):
        found, core = texts(tiny, depth=depth)
        made = runner_of(core).graphs
        assert made is not None and made.stats.num_graphs > 3 and made._num_failures == 0
        assert found == expected, f"graphs, {depth} in flight"
    assert texts(tiny, cuda_graphs=False, depth=2)[0] == expected
    on_cpu, _ = texts(tiny, "cpu")
    for name, choice in on_cpu:
        if name not in DRAWN:
            assert expected[name, choice] == on_cpu[name, choice], name


def test_requests_attend_to_a_shared_prefix_together_within_graphs(monkeypatch: pytest.MonkeyPatch) -> None:
    """The texts are those of an engine that reads the prefix for each, and of the CPU."""
    monkeypatch.setattr(shared_prefix, "MIN_SAVED", 128)
    tiny, prompt = tiny_models.tiny_llama(), random_token_ids(70, seed=1)

    def texts_of(device: str, together: bool = True) -> tuple[dict[tuple[str, int], list[int]], set[int | None]]:
        core = core_of(tiny, device, 2, True)
        for backend in runner_of(core).kv.backends:
            backend.shares_prefixes = backend.shares_prefixes and together
        params = SamplingParams(temperature=0.0, max_tokens=20, n=6)
        core.add_request(EngineCoreRequest("choices", prompt, params))
        for index in range(3):
            core.add_request(EngineCoreRequest(f"r{index}", [*prompt, index], params))
        found = run_to_the_end(core)
        made = runner_of(core).graphs
        assert made is None or made._num_failures == 0
        return found, set() if made is None else {key.num_runs for key in made._graphs}

    expected, _ = texts_of("cpu")
    alone, runs = texts_of("cuda", together=False)
    assert alone == expected and runs == {None}
    found, runs = texts_of("cuda")
    assert found == expected and {1} < runs | {None}, "decodes of all choices have one run"


def test_nothing_waits_for_the_device_in_a_plain_step(monkeypatch: pytest.MonkeyPatch) -> None:
    core = core_of(tiny_models.tiny_qwen3(), "cuda", 2, True)
    for phase in ("execute_model", "sample_tokens"):
        monkeypatch.setattr(runner_of(core), phase, without_waiting(getattr(runner_of(core), phase)))
    for index, length in enumerate(LENGTHS):
        params = SamplingParams(temperature=index % 2, top_p=1.0 - index / 10, max_tokens=20, seed=index)
        core.add_request(EngineCoreRequest(str(index), random_token_ids(length, seed=index), params))
    run_to_the_end(core)


def test_results_are_pending_while_the_next_step_is_launched(monkeypatch: pytest.MonkeyPatch) -> None:
    core = core_of(tiny_models.tiny_llama(), "cuda", 2, True)
    kinds = []
    sample = runner_of(core).sample_tokens

    def note() -> Any:
        output = sample()
        kinds.append(type(output).__name__)
        return output

    monkeypatch.setattr(runner_of(core), "sample_tokens", note)
    core.add_request(EngineCoreRequest("a", random_token_ids(5, seed=1), SamplingParams(temperature=0.0, max_tokens=9)))
    run_to_the_end(core)
    assert kinds[:9] == ["PendingOutput"] * 9


def test_a_capture_that_fails_costs_no_request(monkeypatch: pytest.MonkeyPatch) -> None:
    expected = texts_without_graphs()
    run = StepProgram.run

    def wait_in_it(*arguments: Any) -> Any:
        if torch.cuda.is_current_stream_capturing():
            torch.zeros(1, device="cuda").item()  # not allowed there
        return run(*arguments)

    monkeypatch.setattr(StepProgram, "run", wait_in_it)
    found, core = texts(tiny_models.tiny_llama())
    made = runner_of(core).graphs
    assert made is not None and made.stats.num_graphs == 0 and made._num_failures == graphs.MAX_FAILURES
    assert found == expected


def test_steps_that_ran_once_are_captured_when_there_is_nothing_to_do(monkeypatch: pytest.MonkeyPatch) -> None:
    """And once kernels are compiled, those of short continuations, and of a first request in each way to choose."""
    monkeypatch.setattr(Worker, "_has_kernels", True)
    core = core_of(tiny_models.tiny_llama(), "cuda", 2, True)
    core.executor.collective_rpc("allow_idle_work").result()
    made = runner_of(core).graphs
    assert made is not None
    results = []
    for name in ("first", "second"):
        prompt = random_token_ids(12, seed=1)
        core.add_request(EngineCoreRequest(name, prompt, SamplingParams(temperature=0.0, max_tokens=2)))
        results.append(run_to_the_end(core)[name, 0])
        short = {sampling_key(size, graphs.REQUEST_SIZES[0], 1, Mode.GREEDY) for size in graphs.SHORT_SIZES}
        first = {sampling_key(1, None, None, mode) for mode in (Mode.GREEDY, Mode.RANDOM, Mode.FILTERED)}
        expected = {*first, *short}
        deadline = time.monotonic() + 30
        while not expected <= made._graphs.keys() and time.monotonic() < deadline:  # requests are rehearsed, too
            time.sleep(0.05)
        assert expected <= made._graphs.keys() and made._num_failures == 0
    assert results[0] == results[1]


def test_the_second_call_finds_a_graph_of_each_step_of_the_first() -> None:
    core = core_of(tiny_models.tiny_llama(), "cuda", 2, True)
    made = runner_of(core).graphs
    assert made is not None
    for number in range(2):
        prompt = random_token_ids(12, seed=number)
        core.add_request(EngineCoreRequest(str(number), prompt, SamplingParams(temperature=0.0, max_tokens=1)))
        run_to_the_end(core)
        core.work_between_calls()
        assert list(made._graphs) == [sampling_key(16, graphs.REQUEST_SIZES[0], 1, Mode.GREEDY)]


def test_graphs_are_made_anew_after_sleep() -> None:
    tiny = tiny_models.tiny_llama()
    core = core_of(tiny, "cuda", 2, True)
    prompt = random_token_ids(12, seed=1)
    results = []
    for name in ("before", "after"):
        core.add_request(EngineCoreRequest(name, prompt, SamplingParams(temperature=0.0, max_tokens=20)))
        results.append(run_to_the_end(core)[name, 0])
        made = runner_of(core).graphs
        assert made is not None and made.stats.num_graphs > 0
        if name == "before":
            core.sleep(2)
            assert made.stats.num_graphs == 0
            core.wake_up()
    assert results[0] == results[1]


def test_a_thread_that_has_multiplied_nothing_can_capture_a_product() -> None:
    """Steps may run on the caller's thread, and are captured by another one when there is nothing to do."""
    captured: list[Any] = []
    x, w = torch.randn(128, 256, device="cuda"), torch.randn(64, 256, device="cuda")
    expected = torch.nn.functional.linear(x, w)

    def capture() -> None:
        with torch.cuda.stream(torch.cuda.Stream()):
            captured.append(graphs.CudaCapture()(lambda: torch.nn.functional.linear(x, w)))
            captured.append(captured[0].replay())
            torch.cuda.synchronize()

    thread = Thread(target=capture)
    thread.start()
    thread.join()
    assert torch.equal(captured[1], expected)
