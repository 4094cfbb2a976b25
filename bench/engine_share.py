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
import time
from collections.abc import Callable
from typing import Any, ClassVar

from cpu_peers import QUIET_LIMIT_SECONDS, say
from peers.machine import wait_for_quiet_machine
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


def show(title: str, unit: str, arguments: argparse.Namespace, rows: dict[int, dict[int, list[float]]]) -> None:
    print(f"\n{title}\n")
    print(
        f"{'branches':>8}  " + "  ".join(f"{f'{depth} in flight':>30}" for depth in arguments.depths) + "  last/first"
    )
    for num_branches, found in rows.items():
        cells = [
            f"{statistics.median(figures):10.1f} {unit} ({min(figures):.1f} … {max(figures):.1f})"
            for figures in found.values()
        ]
        first, *_, last = [statistics.median(figures) for figures in found.values()]
        print(f"{num_branches:>8}  " + "  ".join(f"{cell:>30}" for cell in cells) + f"  {last / first:10.3f}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--branches", type=int, nargs="+", default=[1, 32, 256, 1000], help="requests at once")
    parser.add_argument("--depths", type=int, nargs="+", default=[1, 2], help="steps in flight")
    parser.add_argument("--step-ms", type=float, default=20.0, help="what the device takes for a step")
    parser.add_argument("--tokens", type=int, default=48, help="of every answer")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--model", help="measure the real kernels with this model as well")
    parser.add_argument("--model-branches", type=int, nargs="+", default=[1, 32], help="requests at once, with it")
    parser.add_argument("--no-wait", action="store_true", help="do not wait for a quiet machine")
    arguments = parser.parse_args()
    if len(arguments.depths) < 2:
        parser.error("--depths: at least two, to compare")

    if not arguments.no_wait:
        say("waiting for a quiet machine")
        wait_for_quiet_machine(QUIET_LIMIT_SECONDS)
    BusyDevice.step_seconds = arguments.step_ms / 1e3
    rows = {
        num_branches: compare(waiting_of_device, arguments, num_branches, executor=f"{__name__}:BusyDevice")
        for num_branches in arguments.branches
    }
    title = f"a device that takes {arguments.step_ms:g} ms for a step waits, per step:"
    show(title, "µs", arguments, rows)
    if arguments.model is not None:
        rows = {
            num_branches: compare(tokens_per_second, arguments, num_branches, model=arguments.model)
            for num_branches in arguments.model_branches
        }
        show(f"{arguments.model} on this machine's cores:", "tok/s", arguments, rows)


if __name__ == "__main__":
    main()
