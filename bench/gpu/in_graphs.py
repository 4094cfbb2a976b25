"""What a decode step of many requests costs with more in it, on a GPU: milliseconds against the plain step, in turns.

    python3 bench/gpu/in_graphs.py [--model qwen3-0.6b] [--requests 32] [--steps 200] [--rounds 5]

states: the hidden states of the last token of every request, which the step computes, are read out after the final
norm. prefix: the requests share a prefix of 4,096 tokens, which attention reads once for all of them; the plain step
reads it for each. drafts: the step checks drafts of every request, of which none is right; its result is waited for,
as that of the plain step beside it. Steps are hand-written plans, otherwise two in flight, and the weights are random.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
import time
from collections import deque
from collections.abc import Callable
from pathlib import Path
from typing import Any

from compare_parts.models import prepare_model

from ratoon import LLM, SamplingParams
from ratoon.core.plan import CachedRequestData, CaptureStep, NewRequestData, SchedulerOutput
from ratoon.distributed.uniproc import UniProcExecutor
from ratoon.execution.model_runner import ModelRunner

SHAPES = Path(__file__).parent / "models"
BLOCK_SIZE = 16
PREFIX = 4096  # tokens
OWN = 64  # of a request, behind the prefix
PROMPT = 128  # of a request whose states are read
MAX_MODEL_LEN = 8192
WRONG = 3  # a token that the model does not choose


class Batch:
    """Requests that decode, by plans: one token each in every step."""

    def __init__(self, executor: UniProcExecutor, num_requests: int, length: int, shared: int) -> None:
        """`length`: tokens of each that are computed; `shared`: of those, how many are in blocks of all of them."""
        self._executor = executor
        self._names = [f"r{index}" for index in range(num_requests)]
        self._computed = length
        num_shared = shared // BLOCK_SIZE
        each = MAX_MODEL_LEN // BLOCK_SIZE - num_shared
        prefix = list(range(1, num_shared + 1))
        self._tables = [
            prefix + list(range(1 + num_shared + index * each, 1 + num_shared + (index + 1) * each))
            for index in range(num_requests)
        ]
        plan = SchedulerOutput()
        params = SamplingParams(temperature=0.0, ignore_eos=True)
        for name, table in zip(self._names, self._tables):
            plan.scheduled_new_reqs.append(
                NewRequestData(name, [7] * (length + 1), length, params, 0, (table,), length)
            )
        self._fill(plan)
        executor.submit(plan).result()
        self._computed += 1

    def _fill(self, plan: SchedulerOutput) -> None:
        plan.num_scheduled_tokens = dict.fromkeys(self._names, 1)
        plan.sampled_req_ids = list(self._names)
        plan.total_num_scheduled_tokens = len(self._names)

    def decode(self, captured_layer: int | None) -> SchedulerOutput:
        plan = SchedulerOutput()
        self._fill(plan)
        count = len(self._names)
        plan.scheduled_cached_reqs = CachedRequestData(self._names, [self._computed] * count, [None] * count)
        if captured_layer is not None:
            for name in self._names:
                plan.captures.append(
                    CaptureStep(f"{name} states", [], [], (), [0], [captured_layer], "bfloat16", branch_id=name)
                )
        self._computed += 1
        return plan

    def seconds_a_step(self, num_steps: int, captured_layer: int | None = None) -> float:
        in_flight: deque[Any] = deque()
        begin = time.perf_counter()
        for _ in range(num_steps):
            in_flight.append(self._executor.submit(self.decode(captured_layer)))
            if len(in_flight) > 1:
                in_flight.popleft().result()
        while in_flight:
            in_flight.popleft().result()
        return (time.perf_counter() - begin) / num_steps

    def seconds_a_check(self, num_steps: int, num_drafts: int) -> float:
        """Of a step that is waited for, and in which every request has so many drafts. None is kept."""
        begin = time.perf_counter()
        for _ in range(num_steps):
            plan = self.decode(None)
            if num_drafts:
                plan.num_scheduled_tokens = dict.fromkeys(self._names, 1 + num_drafts)
                plan.total_num_scheduled_tokens *= 1 + num_drafts
                plan.scheduled_spec_decode_tokens = {name: [WRONG] * num_drafts for name in self._names}
            self._executor.submit(plan).result()
        return (time.perf_counter() - begin) / num_steps

    def end(self) -> None:
        self._executor.submit(SchedulerOutput(finished_req_ids=self._names)).result()


def compare(name: str, rounds: int, ways: dict[str, Callable[[], float]]) -> None:
    """Prints the milliseconds of each way, and the ratio of the last one to the first."""
    found: dict[str, list[float]] = {way: [] for way in ways}
    for number in range(rounds + 1):
        for way, measure in ways.items():
            seconds = measure()
            if number:  # the first round compiles and captures
                found[way].append(1e3 * seconds)
    plain, other = (statistics.median(times) for times in found.values())
    spreads = {way: [round(min(times), 3), round(max(times), 3)] for way, times in found.items()}
    medians = {way: round(statistics.median(times), 3) for way, times in found.items()}
    print("RESULT", json.dumps({"what": name, "ms": medians, "spread": spreads, "ratio": round(other / plain, 3)}))


def compare_states(executor: UniProcExecutor, args: argparse.Namespace) -> None:
    last = len(runner_of(executor).model.layers) + 1

    def measure(captured_layer: int | None) -> float:
        batch = Batch(executor, args.requests, PROMPT, 0)
        batch.seconds_a_step(5, captured_layer)
        seconds = batch.seconds_a_step(args.steps, captured_layer)
        batch.end()
        return seconds

    ways = {"plain": lambda: measure(None), "with states": lambda: measure(last)}
    compare(f"states of the last token of {args.requests} requests", args.rounds, ways)


def compare_prefix(executor: UniProcExecutor, args: argparse.Namespace, prefix: int) -> None:
    backends = runner_of(executor).kv.backends
    length = prefix + OWN

    def measure(together: bool) -> float:
        for backend in backends:
            backend.shares_prefixes = together
        graphs = runner_of(executor).graphs
        assert graphs is not None
        graphs.clear()
        batch = Batch(executor, args.requests, length, prefix)
        batch.seconds_a_step(5)
        seconds = batch.seconds_a_step(args.steps)
        batch.end()
        return seconds

    ways = {"each by itself": lambda: measure(False), "together": lambda: measure(True)}
    compare(f"{args.requests} requests behind {prefix:,} common tokens", args.rounds, ways)


def compare_drafts(executor: UniProcExecutor, args: argparse.Namespace, num_requests: int, num_drafts: int) -> None:
    def measure(count: int) -> float:
        batch = Batch(executor, num_requests, PROMPT, 0)
        batch.seconds_a_check(5, count)
        seconds = batch.seconds_a_check(args.steps, count)
        batch.end()
        return seconds

    ways = {"plain": lambda: measure(0), "with drafts": lambda: measure(num_drafts)}
    compare(f"{num_drafts} drafts of each of {num_requests} requests", args.rounds, ways)


def runner_of(executor: UniProcExecutor) -> ModelRunner:
    return executor._worker.runner


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="qwen3-0.6b", help="a shape in models/")
    parser.add_argument("--requests", type=int, default=32)
    parser.add_argument("--prefixes", default=str(PREFIX), help="lengths, with commas (default %(default)s)")
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--device", default="cuda")
    args = parser.parse_args()
    settings = {
        "max_num_seqs": 256,
        "max_model_len": MAX_MODEL_LEN,
        "block_size": BLOCK_SIZE,
        "disable_log_stats": True,
    }
    with tempfile.TemporaryDirectory() as scratch:
        folder = prepare_model(SHAPES / args.model, Path(scratch))
        with LLM(str(folder), load_format="dummy", device=args.device, **settings) as llm:
            executor = llm._client.core.executor
            assert isinstance(executor, UniProcExecutor)
            for num_requests in sorted({1, args.requests}):
                for num_drafts in (3, 7):
                    compare_drafts(executor, args, num_requests, num_drafts)
            compare_states(executor, args)
            for prefix in map(int, args.prefixes.split(",")):
                compare_prefix(executor, args, prefix)


if __name__ == "__main__":
    main()
