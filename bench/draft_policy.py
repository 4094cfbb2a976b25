"""Drafts in virtual time: how fast the policy of `scheduling/speculation.py` gets, and how long it takes to learn.

    python bench/draft_policy.py                        # both shapes, 1 and 32 requests, acceptance 0, 0.6, 0.9 and 1
    python bench/draft_policy.py --shapes 8b --batches 32 --acceptances 0.9 --rounds 8 --trace

What is real: the scheduler, with its pace, its rules for drafts and its steps in flight. What is modelled: the device,
by the time of a step of so many rows (an H200's, from `gpu/in_graphs.py` and `gpu/speculation.py`), and the host, by a
time for each result. A source guesses every next token rightly with a known probability. A figure is how many times as
fast a round of requests is as without drafts; the first rounds are those in which costs are still learned. "best" is
what the best fixed length of drafts would give, if all requests had a draft in every step.
"""

from __future__ import annotations

import argparse
import random
from bisect import bisect_right
from collections import Counter, deque
from collections.abc import Sequence
from dataclasses import dataclass

from harness import align

from ratoon.core.config import CacheConfig, SchedulerConfig
from ratoon.core.kv import FullAttentionSpec, KVCacheConfig, KVCacheGroup
from ratoon.core.outputs import ModelRunnerOutput
from ratoon.core.params import SamplingParams
from ratoon.core.plan import SchedulerOutput
from ratoon.core.request import EngineCoreRequest
from ratoon.core.speculation import GPU_FREE_ROWS, SpeculationConfig
from ratoon.scheduling.branch import Branch
from ratoon.scheduling.scheduler import Scheduler
from ratoon.scheduling.speculation import Speculation

TOKEN = 7  # that requests generate
BLOCK_SIZE = 16
FIRST_OF_SIZE = 0.01  # seconds more, for the first step of a size: its graph is captured


@dataclass(frozen=True)
class Device:
    """Milliseconds of a step by its rows: between these points time grows evenly, behind them in proportion."""

    points: tuple[tuple[int, float], ...]
    host: float  # from a result to the next plan, and as much from a plan to its launch

    def milliseconds(self, num_rows: int) -> float:
        sizes = [size for size, _ in self.points]
        index = bisect_right(sizes, num_rows)
        if index == len(sizes):
            return self.points[-1][1] * num_rows / sizes[-1]
        if index == 0:
            return self.points[0][1]
        (low, fast), (high, slow) = self.points[index - 1 : index + 1]
        return fast + (slow - fast) * (num_rows - low) / (high - low)


OF_8B = ((1, 3.9), (16, 4.0), (32, 4.3), (64, 4.6), (128, 5.2), (256, 7.2), (512, 12.0), (8192, 160.0))
OF_0_6B = ((1, 0.62), (16, 0.9), (32, 1.08), (64, 1.96), (128, 2.3), (288, 2.85), (512, 5.0), (8192, 40.0))
DEVICES = {"8b": Device(OF_8B, 0.1), "0.6b": Device(OF_0_6B, 0.1)}


class KnownDrafter:
    """Guesses the next tokens of a text that is one token again and again, each rightly with the same probability."""

    name = "known"

    def __init__(self, acceptance: float, token: int) -> None:
        self._acceptance, self._token = acceptance, token
        self._rng = random.Random(0)

    def propose(self, branch: Branch, max_tokens: int) -> Sequence[int]:
        return [self._token + (self._rng.random() >= self._acceptance) for _ in range(max_tokens)]

    def num_matched(self, branch: Branch) -> int:
        return 0  # it matches no text

    def drop(self, branch: Branch) -> None:
        """Nothing is kept."""


class Engine:
    """A scheduler and a device in virtual time."""

    def __init__(self, device: Device, acceptance: float | None, depth: int, draft: int) -> None:
        groups = (KVCacheGroup(FullAttentionSpec(BLOCK_SIZE, 1, 8, "float16"), (0,)),)
        self.scheduler = Scheduler(
            SchedulerConfig(max_num_batched_tokens=8192, max_steps_in_flight=depth),
            CacheConfig(block_size=BLOCK_SIZE, enable_prefix_caching=False),
            KVCacheConfig(20_000, BLOCK_SIZE, groups),
            4096,
        )
        state = self.scheduler.state
        drafters = [] if acceptance is None else [KnownDrafter(acceptance, TOKEN)]
        config = SpeculationConfig(num_tokens=draft, free_rows=GPU_FREE_ROWS)
        self.speculation = Speculation(config, drafters, state.pace, state.config.max_num_seqs)
        state.speculation = self.speculation
        self._device, self._depth = device, depth
        self._free_at = self._now = 0.0
        self._in_flight: deque[tuple[SchedulerOutput, float, bool]] = deque()
        self._sizes: set[int] = set()
        self._num_requests = 0
        self.steps: Counter[tuple[int, int]] = Counter()  # by branches and rows

    def round(self, batch: int, prompt: int, tokens: int) -> float:
        """Returns the seconds in which so many requests are answered, from the first token of all on."""
        for _ in range(batch):
            self._num_requests += 1
            ids = [1000 + self._num_requests] * prompt
            params = SamplingParams(max_tokens=tokens, ignore_eos=True)
            self.scheduler.add_request(EngineCoreRequest(str(self._num_requests), ids, params, arrival_time=self._now))
        self.steps.clear()
        begun = None
        while self.scheduler.has_requests() or self._in_flight:
            self._turn()
            if begun is None and all(branch.num_output_tokens for branch in self.scheduler.state.running):
                begun = self._now
        return self._now - (begun or 0.0)

    def _turn(self) -> None:
        scheduler = self.scheduler
        scheduler.tick(self._now)
        while len(self._in_flight) < self._depth and scheduler.has_requests() and scheduler.can_plan:
            plan = scheduler.schedule()
            if plan.is_void:
                break
            num_rows = plan.total_num_scheduled_tokens
            self._now += self._device.host * 1e-3
            size = 1 << (num_rows - 1).bit_length() if num_rows else 0
            is_first = size not in self._sizes
            self._sizes.add(size)
            begin = max(self._now, self._free_at)
            seconds = self._device.milliseconds(num_rows) * 1e-3 if num_rows else 0.0
            self._free_at = begin + seconds + is_first * FIRST_OF_SIZE
            self._in_flight.append((plan, self._free_at, is_first))
            self.steps[len(plan.num_scheduled_tokens), num_rows] += 1
        if not self._in_flight:
            return
        plan, done, is_first = self._in_flight.popleft()
        self._now = max(self._now, done)
        scheduler.step_done(plan, self._now, is_first)
        scheduler.update_from_output(plan, self._result(plan))
        self._now += self._device.host * 1e-3

    def _result(self, plan: SchedulerOutput) -> ModelRunnerOutput:
        result = ModelRunnerOutput()
        for name in plan.sampled_req_ids:
            drafts = plan.scheduled_spec_decode_tokens.get(name, [])
            right = next((place for place, token in enumerate(drafts) if token != TOKEN), len(drafts))
            result.req_ids.append(name)
            result.sampled_token_ids.append([TOKEN] * (right + 1))
        return result


def best_fixed(device: Device, batch: int, acceptance: float, draft: int, plain: float) -> float:
    """Returns the tokens of a request in the time of a step, for the best length of drafts."""
    best = 1.0
    for count in range(1, draft + 1):
        tokens = sum(acceptance**place for place in range(count + 1))
        step = device.milliseconds(batch * (1 + count)) + 2 * device.host  # nothing is planned ahead of it
        best = max(best, tokens * plain / step)
    return best


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shapes", default=",".join(DEVICES), help="of " + ", ".join(DEVICES))
    parser.add_argument("--batches", default="1,32")
    parser.add_argument("--acceptances", default="0,0.6,0.9,1")
    parser.add_argument("--rounds", type=int, default=6)
    parser.add_argument("--prompt", type=int, default=128)
    parser.add_argument("--tokens", type=int, default=256)
    parser.add_argument("--draft", type=int, default=8, help="most tokens of a draft (default %(default)s)")
    parser.add_argument("--depth", type=int, default=2, help="steps in flight (default %(default)s)")
    parser.add_argument("--trace", action="store_true", help="prints the steps of each round, by branches and rows")
    return parser.parse_args()


def main() -> None:
    args = parse_arguments()
    lines = [["", *(f"round {index + 1}" for index in range(args.rounds)), "best"]]
    for shape in args.shapes.split(","):
        device = DEVICES[shape]
        for batch in map(int, args.batches.split(",")):
            without = Engine(device, None, args.depth, args.draft)
            plain = min(without.round(batch, args.prompt, args.tokens) for _ in range(2))
            for acceptance in map(float, args.acceptances.split(",")):
                engine = Engine(device, acceptance, args.depth, args.draft)
                ratios = []
                for index in range(args.rounds):
                    ratios.append(plain / engine.round(batch, args.prompt, args.tokens))
                    if args.trace:
                        print(f"# {shape}, {batch}, {acceptance:g}, round {index + 1}: {engine.steps.most_common(12)}")
                best = best_fixed(device, batch, acceptance, args.draft, 1e3 * plain / args.tokens)
                label = f"{shape}, {batch} requests, {acceptance:g} right"
                lines.append([label, *(f"{ratio:.2f}" for ratio in ratios), f"{best:.2f}"])
    print(align(lines))


if __name__ == "__main__":
    main()
