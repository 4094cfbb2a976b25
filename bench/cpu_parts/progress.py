"""Prints results as they come, and says how long the rest of a run will take.

The first estimate is from rates of two Sapphire Rapids cores with SmolLM2-135M, scaled by weights and threads; what is
done corrects it. Nothing here runs an engine.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

from workloads import Call

from cpu_parts.engines import FLOAT32, QUANTISED

WEIGHTS, THREADS = 106_168_320, 2  # that the rates are of: weights of the linear layers, without the head
START_SECONDS, SLOW_START_SECONDS = 3.0, 130.0  # the second of engines that compile their model at each start
SLOW_TO_START = ("vllm",)


@dataclass(frozen=True)
class Rates:
    """Means over the engines of a part."""

    prompt_tokens: float  # a second
    step_seconds: float  # for one token of every request
    request_seconds: float  # in addition, for each request in the step


RATES = {QUANTISED: Rates(1000, 0.006, 0.003), FLOAT32: Rates(500, 0.03, 0.007)}


def start_seconds(engine: str) -> float:
    return SLOW_START_SECONDS if engine in SLOW_TO_START else START_SECONDS


def call_seconds(calls: list[Call], part: str, num_weights: int, threads: int) -> float:
    """What an engine is expected to take for these calls."""
    rates = RATES[part]
    prompt = sum(len(prompt) for call in calls for prompt in call.prompts) / rates.prompt_tokens
    steps = sum(
        (call.num_tokens - 1) * (rates.step_seconds + rates.request_seconds * len(call.prompts) * call.width)
        for call in calls
    )
    return (prompt + steps) * num_weights / WEIGHTS * THREADS / threads


class Progress:
    """Of all comparisons of a run."""

    def __init__(self, expected_seconds: float, clock: Callable[[], float] = time.monotonic) -> None:
        self._expected_left = expected_seconds
        self._expected_done = 0.0
        self._clock = clock
        self._begin = clock()

    @property
    def seconds(self) -> float:
        return self._clock() - self._begin

    @property
    def seconds_left(self) -> float:
        factor = self.seconds / self._expected_done if self._expected_done else 1.0
        return max(self._expected_left, 0.0) * factor

    def note(self, expected_seconds: float) -> None:
        """Something that was expected to take this long is done."""
        self._expected_left -= expected_seconds
        self._expected_done += expected_seconds

    def show(self, result: str) -> None:
        print(f"{result} ({format_duration(self.seconds)}; {format_duration(self.seconds_left)} left)", flush=True)


def format_duration(seconds: float) -> str:
    return f"{int(seconds) // 60}:{int(seconds) % 60:02}"
