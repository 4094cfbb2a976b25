"""An engine in virtual time: the scheduler plans, and a device takes as long for each step as an H200 does.

What is real: the scheduler, with its pace, its rules for drafts, its n-grams and its steps in flight. What is modelled:
the device, by the time of a step of so many rows, and the host, by a time for each result. Text counts, and a prompt
has the tokens that will follow with wrong ones between, as in gpu/speculation.py.
"""

from __future__ import annotations

import random
from bisect import bisect_left
from collections import Counter, deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from ratoon.core.config import CacheConfig, SchedulerConfig
from ratoon.core.kv import FullAttentionSpec, KVCacheConfig, KVCacheGroup
from ratoon.core.outputs import ModelRunnerOutput
from ratoon.core.params import SamplingParams
from ratoon.core.plan import SchedulerOutput
from ratoon.core.request import EngineCoreRequest
from ratoon.core.speculation import GPU_FREE_ROWS, SpeculationConfig
from ratoon.scheduling.drafters.own_text import NgramDrafter
from ratoon.scheduling.scheduler import Scheduler
from ratoon.scheduling.speculation import Speculation

BLOCK_SIZE = 16
FIRST_TOKEN, LAST_TOKEN = 1000, 100_000
CAPTURE_SECONDS = 0.05  # of the first step of a size
LEAST, MOST = 1, 16  # last tokens that are compared


@dataclass(frozen=True)
class Device:
    """Milliseconds of steps by their rows, which are padded to the next of these sizes."""

    one_each: dict[int, float]  # every request has one row
    several: dict[int, float]  # some have more
    prompt_token: float  # where rows are more than these
    host: float  # from a result of 32 requests to their next plan; of fewer in proportion

    def milliseconds(self, num_rows: int, num_requests: int) -> tuple[float, int]:
        """Returns the time of a step, and the size that it is padded to; 0: it is not padded."""
        sizes = self.one_each if num_rows == num_requests else self.several
        index = bisect_left(list(sizes), num_rows)
        if index == len(sizes):
            return num_rows * self.prompt_token, 0
        size = list(sizes)[index]
        return sizes[size], size


# `gpu/speculation.py` on an H200, by the times at which the scheduler planned and got results
DEVICES = {
    "8b": Device(
        {1: 3.75, 2: 3.9, 4: 3.95, 8: 4.2, 16: 4.4, 32: 4.85},
        {8: 4.2, 16: 4.4, 32: 4.8, 64: 6.4, 128: 7.2, 256: 8.7},
        0.019,
        0.95,
    ),
    "0.6b": Device(
        {1: 0.57, 2: 0.7, 4: 0.79, 8: 1.0, 16: 1.25, 32: 1.52},
        {8: 1.05, 16: 1.2, 32: 1.4, 64: 2.1, 128: 2.75, 256: 3.0},
        0.002,
        0.95,
    ),
}


class InFlight(NamedTuple):
    plan: SchedulerOutput
    end: float
    has_prepared: bool


class Engine:
    def __init__(self, device: Device, depth: int = 2, draft: int = 7) -> None:
        """`depth`: steps in flight. `draft`: most tokens of one."""
        groups = (KVCacheGroup(FullAttentionSpec(BLOCK_SIZE, 1, 8, "float16"), (0,)),)
        self.scheduler = Scheduler(
            SchedulerConfig(max_num_batched_tokens=16384, max_num_seqs=1024, max_steps_in_flight=depth),
            CacheConfig(block_size=BLOCK_SIZE, enable_prefix_caching=False),
            KVCacheConfig(40_000, BLOCK_SIZE, groups),
            4096,
        )
        self.steps: Counter[tuple[int, int]] = Counter()  # of the newest round, by branches and rows
        self._config = SpeculationConfig(num_tokens=draft, free_rows=GPU_FREE_ROWS)
        self._device, self._depth = device, depth
        self._random = random.Random(0)
        self._now = self._device_is_free = 0.0
        self._in_flight: deque[InFlight] = deque()
        self._captured: set[tuple[bool, int]] = set()
        self._last: dict[str, int] = {}
        self._num_requests = 0

    def policy(self, drafts: bool = True) -> Speculation:
        """It learns the costs of steps with others, and its waits and shares for itself."""
        state = self.scheduler.state
        drafters = [NgramDrafter(LEAST, MOST)] if drafts else []
        return Speculation(self._config, drafters, state.pace, state.config.max_num_seqs)

    def round(self, speculation: Speculation, batch: int, tokens: int, acceptance: float) -> float:
        """Returns the seconds of a token, the mean of all requests: where they end at different times, others would
        come in."""
        scheduler = self.scheduler
        scheduler.state.speculation = speculation
        self.steps.clear()
        for _ in range(batch):
            self._num_requests += 1
            name, prompt = str(self._num_requests), self._prompt(tokens, acceptance)
            self._last[name] = prompt[-1]
            params = SamplingParams(max_tokens=tokens, ignore_eos=True)
            scheduler.add_request(EngineCoreRequest(name, prompt, params, arrival_time=self._now))
        begin, ends = None, []
        while scheduler.has_unfinished_requests():
            num_before = len(scheduler.state.requests)
            self._turn()
            if begin is None and all(branch.num_output_tokens for branch in scheduler.state.running):
                begin = self._now
            ends += [self._now] * (num_before - len(scheduler.state.requests))
        assert begin is not None and len(ends) == batch
        return (sum(ends) / batch - begin) / tokens

    def _prompt(self, num_tokens: int, acceptance: float) -> Sequence[int]:
        choose = self._random
        first = choose.randrange(FIRST_TOKEN, LAST_TOKEN)
        text: list[int] = []
        for token in range(first, first + num_tokens):
            text += [token] if choose.random() < acceptance else [token, choose.randrange(FIRST_TOKEN, LAST_TOKEN)]
        return [*text, first]

    def _turn(self) -> None:
        self.scheduler.tick(self._now)
        while len(self._in_flight) < self._depth and self.scheduler.can_plan:
            plan = self.scheduler.schedule()
            if plan.is_void:
                break
            self._submit(plan)
        self._finish_oldest()

    def _submit(self, plan: SchedulerOutput) -> None:
        num_rows, num_requests = plan.total_num_scheduled_tokens, len(plan.num_scheduled_tokens)
        milliseconds, size = self._device.milliseconds(num_rows, num_requests) if num_rows else (0.0, 0)
        kind = (num_rows == num_requests, size)
        has_prepared = size > 0 and kind not in self._captured
        self._captured.add(kind)
        seconds = milliseconds / 1e3 * (1 + 0.02 * self._random.random()) + has_prepared * CAPTURE_SECONDS
        self._device_is_free = max(self._now, self._device_is_free) + seconds
        self._in_flight.append(InFlight(plan, self._device_is_free, has_prepared))
        self.steps[num_requests, num_rows] += 1

    def _finish_oldest(self) -> None:
        if not self._in_flight:
            return
        step = self._in_flight.popleft()
        plan, result = step.plan, ModelRunnerOutput()
        self._now = max(self._now, step.end)
        for name in plan.sampled_req_ids:
            result.req_ids.append(name)
            result.sampled_token_ids.append(self._tokens_of(name, plan.scheduled_spec_decode_tokens.get(name, ())))
        self.scheduler.step_done(plan, self._now, step.has_prepared)
        self.scheduler.update_from_output(plan, result)
        self._now += self._device.host / 1e3 * len(result.req_ids) / 32

    def _tokens_of(self, name: str, drafts: Sequence[int]) -> list[int]:
        """Returns the tokens that are right, and one more."""
        tokens = []
        for draft in [*drafts, None]:
            self._last[name] += 1
            tokens.append(self._last[name])
            if draft != tokens[-1]:
                break
        return tokens
