"""Decode steps of the whole engine on one GPU: time per step, what the host spends, how long the device waits.

    python3 bench/gpu/decode.py                                  # both shapes, random weights, under 90 s on an H200
    python3 bench/gpu/decode.py --models qwen3-0.6b --batches 1 32 --contexts 128 1024 --steps 64
    python3 bench/gpu/decode.py --no-graphs --depths 1 2

For each batch and context, requests of that length are decoded for some steps through EngineCore. `step_ms` is the wall
time of a step; `device_ms` the time between the first and the last work of a step on the device, by CUDA events, and
`idle_share` what is left of the wall time; `launch_ms` is what the thread of steps spends on a step, `core_ms` what the
core's thread spends beside waiting. Floors: weights, and keys and values, read at 4.39 TB/s. One line `RESULT {json}` a
figure.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from pathlib import Path
from typing import Any

import torch

from ratoon import SamplingParams
from ratoon.core.config import CacheConfig, EngineConfig, SchedulerConfig
from ratoon.core.outputs import ModelRunnerOutput
from ratoon.core.plan import SchedulerOutput
from ratoon.core.request import EngineCoreRequest
from ratoon.distributed.uniproc import StepOutput, UniProcExecutor
from ratoon.engine.core import EngineCore
from ratoon.models.build import collect_shapes
from ratoon.models.dummy_source import DummySource
from ratoon.models.hf_config import parse_hf_config
from ratoon.observe.startup import StartupTimer

BYTES_A_SECOND = 4.39e12
FOLDER = Path(__file__).resolve().parent
TOKEN_BUDGET = 16_384
WARM_UP_STEPS = 4  # after the prompts: one runs as it is, one is captured


class TimedExecutor(UniProcExecutor):
    """Measures each step: on the thread that launches it, on the device, and how long its caller waits."""

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self.launch_seconds: list[float] = []
        self.events: list[tuple[torch.cuda.Event, torch.cuda.Event]] = []
        self.waited = 0.0

    def execute_model(self, plan: SchedulerOutput) -> None:
        self._began = time.perf_counter()
        self._first = torch.cuda.Event(enable_timing=True)
        self._first.record()
        super().execute_model(plan)

    def sample_tokens(self) -> StepOutput:
        output = super().sample_tokens()
        last = torch.cuda.Event(enable_timing=True)
        last.record()
        self.events.append((self._first, last))
        self.launch_seconds.append(time.perf_counter() - self._began)
        return output

    def submit(self, plan: SchedulerOutput) -> Any:
        return TimedHandle(self, super().submit(plan))


class TimedHandle:
    def __init__(self, executor: TimedExecutor, handle: Any) -> None:
        self._executor, self._handle = executor, handle
        self.launch = handle.launch

    def result(self) -> ModelRunnerOutput:
        begin = time.perf_counter()
        try:
            return self._handle.result()
        finally:
            self._executor.waited += time.perf_counter() - begin


def make_core(model: str, depth: int, cuda_graphs: bool, max_batch: int, max_context: int) -> EngineCore:
    config = EngineConfig(
        model=model,
        device="cuda",
        dtype="bfloat16",
        max_model_len=max_context,
        cuda_graphs=cuda_graphs,
        cache=CacheConfig(num_blocks=max_batch * (max_context // 16 + 1) + 1, enable_prefix_caching=False),
        scheduler=SchedulerConfig(
            max_num_batched_tokens=TOKEN_BUDGET, max_num_seqs=max_batch, max_steps_in_flight=depth
        ),
    )
    path = FOLDER / "models" / model / "config.json"
    model_config = parse_hf_config(json.loads(path.read_text()), str(path))
    tensors = DummySource(collect_shapes(model_config))
    return EngineCore(config, TimedExecutor(config, model_config, tensors, StartupTimer()))


def floor_ms(core: EngineCore, batch: int, context: int) -> float:
    facts = core.executor.facts
    kv_bytes = batch * context * facts.kv_config.bytes_per_block / facts.kv_config.block_size
    return (facts.weight_bytes + kv_bytes) / BYTES_A_SECOND * 1e3


def measure(core: EngineCore, batch: int, context: int, steps: int, temperature: float) -> dict[str, float]:
    executor = core.executor
    assert isinstance(executor, TimedExecutor)
    # The first requests decode while the prompts of the others are computed.
    max_tokens = steps + WARM_UP_STEPS + batch * context // TOKEN_BUDGET + 8
    for index in range(batch):
        tokens = [(31 * index + place) % 5000 + 10 for place in range(context)]
        params = SamplingParams(temperature=temperature, max_tokens=max_tokens, ignore_eos=True, seed=index)
        core.add_request(EngineCoreRequest(f"{batch}-{context}-{temperature}-{index}", tokens, params))
    begun: set[str] = set()
    while len(begun) < batch:  # the prompts
        begun |= {output.request_id for output in core.step().outputs}
    for _ in range(WARM_UP_STEPS):
        core.step()
    executor.launch_seconds.clear()
    executor.events.clear()
    executor.waited = 0.0
    begin = time.perf_counter()
    for _ in range(steps):
        core.step()
    wall = time.perf_counter() - begin
    waited = executor.waited
    launch = statistics.median(executor.launch_seconds[:steps])
    while core.has_work():
        core.step()
    torch.cuda.synchronize()
    busy = [first.elapsed_time(last) for first, last in executor.events[: steps - 1]]
    gaps = [
        max(0.0, before[1].elapsed_time(after[0]))
        for before, after in zip(executor.events[: steps - 1], executor.events[1:steps])
    ]
    return {
        "step_ms": wall / steps * 1e3,
        "device_ms": statistics.median(busy),
        "gap_ms": statistics.median(gaps),
        "idle_share": sum(gaps) / (sum(gaps) + sum(busy)),
        "launch_ms": launch * 1e3,
        "core_ms": (wall - waited) / steps * 1e3,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--models", nargs="+", default=["qwen3-0.6b", "llama3-8b"])
    parser.add_argument("--batches", type=int, nargs="+", default=[1, 32, 256])
    parser.add_argument("--contexts", type=int, nargs="+", default=[128, 1024])
    parser.add_argument("--depths", type=int, nargs="+", default=[2])
    parser.add_argument("--temperatures", type=float, nargs="+", default=[0.0])
    parser.add_argument("--steps", type=int, default=64)
    parser.add_argument("--no-graphs", action="store_true")
    arguments = parser.parse_args()
    for model in arguments.models:
        for depth in arguments.depths:
            begin = time.perf_counter()
            max_context = max(arguments.contexts) + arguments.steps + 64
            core = make_core(model, depth, not arguments.no_graphs, max(arguments.batches), max_context)
            print(f"# {model}, {depth} in flight: started in {time.perf_counter() - begin:.1f} s", flush=True)
            for batch in arguments.batches:
                for context in arguments.contexts:
                    for temperature in arguments.temperatures:
                        figures = measure(core, batch, context, arguments.steps, temperature)
                        shown = {name: round(value, 3) for name, value in figures.items()}
                        shown["floor_ms"] = round(floor_ms(core, batch, context), 3)
                        settings = {
                            "model": model, "depth": depth, "batch": batch, "context": context,
                            "temperature": temperature, "graphs": not arguments.no_graphs,
                        }  # fmt: skip
                        print("RESULT", json.dumps({"what": "decode", **settings, **shown}), flush=True)
            graphs = core.executor._worker.runner.graphs  # type: ignore[attr-defined]
            if graphs is not None:
                stats = graphs.stats
                cost = {"graphs": stats.num_graphs, "bytes": stats.num_bytes, "seconds": round(stats.seconds, 3)}
                print("RESULT", json.dumps({"what": "graphs", "model": model, "depth": depth, **cost}), flush=True)
            core.shutdown()
            del core
            torch.cuda.empty_cache()


if __name__ == "__main__":
    main()
