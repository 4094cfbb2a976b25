"""What short KV memory costs on a GPU: the same requests with enough blocks, and with a few, swapped or computed again.

    python3 bench/gpu/preemption.py                          # Qwen3-0.6B
    python3 bench/gpu/preemption.py --model llama3-8b

Each figure is a line `RESULT {json}`: output tokens a second, preemptions, blocks that were swapped, and what was
measured at start-up.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from time import perf_counter
from typing import Any

from ratoon import LLM, SamplingParams
from ratoon.core.plan import SchedulerOutput
from ratoon.scheduling.planner import StepPlanner

MODELS = Path(__file__).parent / "models"
MODES = ("swap", "recompute", "auto")
MAX_MODEL_LEN = 4096


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="qwen3-0.6b", help="a folder in models/, or any other")
    parser.add_argument("--requests", type=int, default=64)
    parser.add_argument("--input-len", type=int, default=200)
    parser.add_argument("--output-len", type=int, default=500)
    parser.add_argument("--share", type=float, default=0.5, help="of the blocks that all requests need")
    parser.add_argument("--device", default="cuda")
    args = parser.parse_args()
    swapped: list[SchedulerOutput] = []
    watch_plans(swapped)
    num_needed = args.requests * -(-(args.input_len + args.output_len) // 16) + 1
    for mode, num_blocks in [*((mode, int(num_needed * args.share)) for mode in MODES), (None, num_needed)]:
        show(args, mode, num_blocks, swapped)


def watch_plans(swapped: list[SchedulerOutput]) -> None:
    plan_step = StepPlanner.plan

    def plan_and_note(planner: StepPlanner) -> SchedulerOutput:
        plan = plan_step(planner)
        if plan.swapped_in or plan.swapped_out:
            swapped.append(plan)
        return plan

    StepPlanner.plan = plan_and_note  # type: ignore[method-assign]


def show(args: argparse.Namespace, mode: str | None, num_blocks: int, swapped: list[SchedulerOutput]) -> None:
    settings: dict[str, Any] = {"device": args.device, "load_format": "dummy", "skip_tokenizer": True}
    settings |= {"max_model_len": MAX_MODEL_LEN, "num_blocks": num_blocks, "enable_prefix_caching": False}
    if mode is not None:
        settings |= {"swap_memory": "3GiB", "preemption_mode": mode}
    begin = perf_counter()
    folder = MODELS / args.model if (MODELS / args.model).exists() else Path(args.model)
    with LLM(str(folder), **settings) as llm:
        started = perf_counter() - begin
        prompts = [[(7 * i + j) % 1000 + 10 for j in range(args.input_len)] for i in range(args.requests)]
        params = SamplingParams(temperature=0.0, max_tokens=args.output_len, ignore_eos=True)
        llm.generate(prompts, SamplingParams(temperature=0.0, max_tokens=4), progress=False)  # compiles
        swapped.clear()
        begin = perf_counter()
        outputs = llm.generate(prompts, params, progress=False)
        seconds = perf_counter() - begin
        assert all(len(output.outputs[0].token_ids) == args.output_len for output in outputs)
        costs = llm.describe()["swap_costs"]
        figures = {
            "mode": mode or "enough memory", "tok_per_s": round(args.requests * args.output_len / seconds),
            "seconds": round(seconds, 3), "startup": round(started, 2), "preemptions": llm.stats().num_preemptions,
            "blocks_out": sum(len(plan.swapped_out) for plan in swapped),
            "blocks_in": sum(len(plan.swapped_in) for plan in swapped),
            "costs_us": None if costs is None else {name: round(1e6 * cost, 2) for name, cost in costs.items()},
        }  # fmt: skip
    print("RESULT " + json.dumps({"bench": "preemption", "model": args.model, **figures}), flush=True)


if __name__ == "__main__":
    main()
