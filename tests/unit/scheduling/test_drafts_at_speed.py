"""What drafts are worth, simulated: the scheduler plans, and a device takes as long for each step as an H200 does.

Text counts, and a prompt has the tokens that will follow with wrong ones between, as in bench/gpu/speculation.py.
"""

from __future__ import annotations

import random
from bisect import bisect_left
from collections import deque
from typing import NamedTuple

import pytest

from ratoon.core.outputs import ModelRunnerOutput
from ratoon.core.plan import SchedulerOutput
from ratoon.core.speculation import SpeculationConfig
from ratoon.scheduling.drafters.own_text import NgramDrafter
from ratoon.scheduling.speculation import Speculation
from tests.unit.scheduling.steps import request_of, scheduler_of

NUM_TOKENS, NUM_REQUESTS, NUM_ROUNDS = 128, 32, 3
FIRST_TOKEN, LAST_TOKEN = 1000, 100_000
HOST_SECONDS = 0.95e-3  # from a result of all requests to their next plan
CAPTURE_SECONDS = 0.05
PROMPT_SECONDS = 19e-6  # a token

# Milliseconds of steps by their rows: one for each request, or several, which are padded to a power of two
Times = tuple[dict[int, float], dict[int, float]]
LARGE: Times = ({1: 3.75, 8: 4.2, 16: 4.4, 32: 4.85}, {8: 4.2, 16: 4.4, 32: 4.8, 64: 6.4, 128: 7.2, 256: 8.7})
SMALL: Times = ({1: 0.57, 8: 1.0, 16: 1.25, 32: 1.52}, {8: 1.05, 16: 1.2, 32: 1.4, 64: 2.1, 128: 2.75, 256: 3.0})


class InFlight(NamedTuple):
    plan: SchedulerOutput
    end: float
    has_prepared: bool


class Engine:
    """Two steps in flight, on a device that computes one after the other."""

    def __init__(self, times: Times) -> None:
        self.scheduler = scheduler_of(
            num_blocks=40_000, max_model_len=2048, caching=False, max_num_batched_tokens=16384, max_num_seqs=1024
        )
        self._times = times
        self._random = random.Random(0)
        self._now = self._device_is_free = 0.0
        self._in_flight: deque[InFlight] = deque()
        self._captured: set[tuple[bool, int]] = set()
        self._last: dict[str, int] = {}
        self._num_requests = 0

    def run(self, speculation: Speculation, acceptance: float) -> float:
        """Seconds of a token, the mean of all requests: where they end at different times, others would come in."""
        scheduler = self.scheduler
        scheduler.state.speculation = speculation
        for _ in range(NUM_REQUESTS):
            self._num_requests += 1
            name, prompt = f"r{self._num_requests}", self._prompt(acceptance)
            self._last[name] = prompt[-1]
            scheduler.add_request(request_of(name, prompt, max_tokens=NUM_TOKENS, ignore_eos=True))
        begin, ends = None, []
        while scheduler.has_unfinished_requests():
            while len(self._in_flight) < 2 and scheduler.can_plan and self._submit():
                pass
            num_before = len(scheduler.state.requests)
            if self._finish_oldest() and begin is None:
                begin = self._now
            ends += [self._now] * (num_before - len(scheduler.state.requests))
        assert begin is not None and len(ends) == NUM_REQUESTS
        return (sum(ends) / NUM_REQUESTS - begin) / NUM_TOKENS

    def _prompt(self, acceptance: float) -> list[int]:
        choose = self._random
        first, text = choose.randrange(FIRST_TOKEN, LAST_TOKEN), []
        for token in range(first, first + NUM_TOKENS):
            text += [token] if choose.random() < acceptance else [token, choose.randrange(FIRST_TOKEN, LAST_TOKEN)]
        return [*text, first]

    def _submit(self) -> bool:
        plan = self.scheduler.schedule()
        if plan.is_void:
            return False
        num_rows, num_requests = plan.total_num_scheduled_tokens, len(plan.num_scheduled_tokens)
        has_several, seconds = num_rows > num_requests, num_rows * PROMPT_SECONDS
        has_prepared = False
        if num_rows <= 256:
            times = self._times[has_several]
            size = list(times)[bisect_left(list(times), num_rows)]
            has_prepared = (has_several, size) not in self._captured
            self._captured.add((has_several, size))
            seconds = times[size] / 1e3 * (1 + 0.02 * self._random.random()) + has_prepared * CAPTURE_SECONDS
        self._device_is_free = max(self._now, self._device_is_free) + seconds
        self._in_flight.append(InFlight(plan, self._device_is_free, has_prepared))
        return True

    def _finish_oldest(self) -> int:
        """Returns how many tokens it brought."""
        step = self._in_flight.popleft()
        plan, result = step.plan, ModelRunnerOutput()
        self._now = max(self._now, step.end)
        for name in plan.sampled_req_ids:
            tokens = []
            for draft in [*plan.scheduled_spec_decode_tokens.get(name, ()), None]:
                self._last[name] += 1
                tokens.append(self._last[name])
                if draft != tokens[-1]:
                    break
            result.req_ids.append(name)
            result.sampled_token_ids.append(tokens)
        self.scheduler.step_done(plan, self._now, step.has_prepared)
        self.scheduler.tick(self._now)
        self.scheduler.update_from_output(plan, result)
        self._now += HOST_SECONDS * len(result.req_ids) / NUM_REQUESTS
        self.scheduler.tick(self._now)
        return len(result.req_ids)


@pytest.mark.parametrize(
    ("times", "acceptance", "least"),
    [
        (LARGE, 0.0, 0.98),
        (LARGE, 0.6, 1.0),  # a step brings twice the tokens, and takes nearly twice as long
        (LARGE, 0.9, 2.5),
        (LARGE, 1.0, 3.4),
        (SMALL, 0.0, 0.98),
        (SMALL, 0.6, 0.97),
        (SMALL, 0.9, 1.9),
        (SMALL, 1.0, 2.6),
    ],
)
def test_drafts_of_many_requests_are_made_where_they_are_worth_it(
    times: Times, acceptance: float, least: float
) -> None:
    engine = Engine(times)
    state = engine.scheduler.state
    config = SpeculationConfig(num_tokens=7)
    without, drafting = (
        Speculation(config, drafters, state.pace, state.config.max_num_seqs) for drafters in ([], [NgramDrafter(1, 16)])
    )
    ratios = []
    for _ in range(NUM_ROUNDS):
        before = engine.run(without, acceptance)
        ratios.append(before / engine.run(drafting, acceptance))
    assert ratios[-1] >= least, ratios  # by then all sizes are captured
