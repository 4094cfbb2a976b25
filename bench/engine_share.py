"""The engine's own share of a step: how long the device waits between two steps, and what the same costs on this CPU.

    .venv/bin/python bench/engine_share.py [--branches 1 32 256 1000] [--depths 1 2] [--step-ms 20] [--model NAME]

First with a device that is busy for a given time in every step and uses no core meanwhile, as a GPU would be: the time
per step that is not the device's is everything else, planning, input, output, detokenising. With one step in flight all
of it is added to the device's time; with two it runs beside the next step. Then, with --model, with real kernels on
this machine's cores: tokens per second. Depths take turns in every round; medians and spreads are shown.
"""

from __future__ import annotations

import argparse
import gc
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from typing import Any, ClassVar

from harness import Program, align, count, positive
from stub_executor import StubExecutor

from ratoon import LLM, SamplingParams
from ratoon.core.outputs import ModelRunnerOutput
from ratoon.core.plan import SchedulerOutput

STUB_MODEL = "smollm2-135m"  # its tokenizer and config; its weights are not read
PROMPT_TOKENS = 16


class BusyDevice(StubExecutor):
    """A device that takes `step_seconds` for every step that runs tokens, and measures how long it was busy: the stub's
    own work, which stands for kernels, is the device's too."""

    step_seconds: ClassVar[float] = 0.02
    busy_seconds: ClassVar[float] = 0.0
    num_steps: ClassVar[int] = 0

    def execute_model(self, plan: SchedulerOutput) -> None:
        self._began = time.perf_counter()
        super().execute_model(plan)

    def sample_tokens(self) -> ModelRunnerOutput:
        if not self._plan.is_empty:
            time.sleep(self.step_seconds)
            BusyDevice.num_steps += 1
        result = super().sample_tokens()
        BusyDevice.busy_seconds += time.perf_counter() - self._began
        return result


def make_llm(depth: int, num_branches: int, **settings: Any) -> LLM:
    return LLM(
        settings.pop("model", STUB_MODEL),
        max_steps_in_flight=depth,
        max_num_seqs=num_branches,
        max_num_batched_tokens=max(2048, PROMPT_TOKENS * num_branches),
        enable_prefix_caching=False,
        disable_log_stats=True,
        **settings,
    )


def generate(llm: LLM, num_branches: int, num_tokens: int) -> float:
    """Seconds for so many answers at once."""
    prompts = [[1000 + (31 * branch + place) % 500 for place in range(PROMPT_TOKENS)] for branch in range(num_branches)]
    params = SamplingParams(temperature=0.0, max_tokens=num_tokens, ignore_eos=True)
    start = time.perf_counter()
    llm.generate(prompts, params, progress=False)
    return time.perf_counter() - start


def waiting_of_device(llm: LLM, num_branches: int, num_tokens: int) -> float:
    """Microseconds of a step that are not the device's."""
    BusyDevice.busy_seconds, BusyDevice.num_steps = 0.0, 0
    seconds = generate(llm, num_branches, num_tokens)
    return (seconds - BusyDevice.busy_seconds) / BusyDevice.num_steps * 1e6


def tokens_per_second(llm: LLM, num_branches: int, num_tokens: int) -> float:
    return num_branches * num_tokens / generate(llm, num_branches, num_tokens)


def compare(
    measure: Callable[[LLM, int, int], float], arguments: argparse.Namespace, num_branches: int, **settings: Any
) -> dict[int, list[float]]:
    """Figures of all rounds by depth. The engines stand beside each other and take turns."""
    engines = {depth: make_llm(depth, num_branches, **settings) for depth in arguments.depths}
    found: dict[int, list[float]] = {depth: [] for depth in engines}
    for number in range(arguments.rounds + 1):
        order = list(engines) if number % 2 else list(reversed(engines))
        for depth in order:
            gc.collect()
            figure = measure(engines[depth], num_branches, arguments.tokens)
            if number > 0:  # the first round warms up
                found[depth].append(figure)
    for llm in engines.values():
        llm.close()
    return found


class EngineShare(Program):
    doc = __doc__
    rounds = 3
    threads = False

    def add_options(self, parser: argparse.ArgumentParser) -> None:
        parser.add_argument("--branches", type=positive, nargs="+", default=[1, 32, 256, 1000], help="requests at once")
        parser.add_argument("--depths", type=positive, nargs="+", default=[1, 2], help="steps in flight")
        parser.add_argument("--step-ms", type=float, default=20.0, help="what the device takes for a step")
        count(parser, "--tokens", 48, "of every answer")
        parser.add_argument("--model", help="measure the real kernels with this model as well")
        parser.add_argument("--model-branches", type=positive, nargs="+", default=[1, 32], help="the same, with it")

    def check_options(self, parser: argparse.ArgumentParser, args: argparse.Namespace) -> None:
        if len(args.depths) < 2:
            parser.error("--depths: at least two, to compare")

    def measure(self) -> None:
        args = self.args
        BusyDevice.step_seconds = args.step_ms / 1e3
        stub = {"executor": f"{__name__}:BusyDevice"}
        self.found["waiting_us"] = {num: compare(waiting_of_device, args, num, **stub) for num in args.branches}
        if args.model is not None:
            real = {num: compare(tokens_per_second, args, num, model=args.model) for num in args.model_branches}
            self.found["tokens_per_second"] = real

    def report(self) -> Iterator[str]:
        titles = {
            "waiting_us": f"a device that takes {self.args.step_ms:g} ms for a step waits, µs per step:",
            "tokens_per_second": f"{self.args.model} on this machine's cores, tok/s:",
        }
        for key, rows in self.found.items():
            table = [["branches", *(f"{depth} in flight" for depth in self.args.depths), "last/first"]]
            for num_branches, found in rows.items():
                medians = [statistics.median(figures) for figures in found.values()]
                cells = [
                    f"{median:.1f} ({min(figures):.1f} … {max(figures):.1f})"
                    for median, figures in zip(medians, found.values())
                ]
                table.append([str(num_branches), *cells, f"{medians[-1] / medians[0]:.3f}"])
            yield f"{titles[key]}\n\n{align(table)}"

    def figures(self) -> dict[str, Any]:
        return self.found


if __name__ == "__main__":
    sys.exit(EngineShare().run())
