"""A line in the log every ten seconds of work: tokens a second, running and waiting requests, KV cache usage.

It has vLLM's form, so that tools for vLLM's log can read it. One line for each engine; nothing while there is no
work, but for a last line that shows that it is done.
"""

from __future__ import annotations

import time
from collections.abc import Callable

from ratoon.core.stats import SchedulerStats
from ratoon.observe.logging import get_logger

INTERVAL = 10.0  # seconds
LINE = (
    "Engine %03d: Avg prompt throughput: %.1f tokens/s, Avg generation throughput: %.1f tokens/s, "
    "Running: %d reqs, Waiting: %d reqs, KV cache usage: %.1f%%, Prefix cache hit rate: %.1f%%"
)

logger = get_logger(__name__)


class _Engine:
    __slots__ = ("num_generated_tokens", "num_prompt_tokens", "said_busy", "since", "stats")

    def __init__(self, now: float) -> None:
        self.since = now
        self.num_prompt_tokens = 0
        self.num_generated_tokens = 0
        self.stats = SchedulerStats()
        self.said_busy = False  # the last line had requests in it

    @property
    def is_busy(self) -> bool:
        return self.stats.num_running > 0 or self.stats.num_waiting > 0


class ThroughputLog:
    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._engines: dict[int, _Engine] = {}

    def record_engine(self, index: int, stats: SchedulerStats) -> None:
        """An engine's snapshot after a step."""
        self._engine(index).stats = stats

    def record_tokens(self, index: int, num_prompt_tokens: int, num_generated_tokens: int) -> None:
        """A step brought tokens for a request; those of the prompt are counted with the first."""
        engine = self._engine(index)
        engine.num_prompt_tokens += num_prompt_tokens
        engine.num_generated_tokens += num_generated_tokens

    def _engine(self, index: int) -> _Engine:
        engine = self._engines.get(index)
        if engine is None:
            engine = self._engines[index] = _Engine(self._clock())
        return engine

    def write(self) -> None:
        """A line for each engine that has worked since the last one, or that has just come to rest."""
        now = self._clock()
        for index, engine in sorted(self._engines.items()):
            if engine.num_prompt_tokens or engine.num_generated_tokens or engine.is_busy or engine.said_busy:
                self._write_line(index, engine, max(now - engine.since, 1e-6))
            self._begin_interval(engine, now)

    def write_when_due(self, idle: bool) -> None:
        """Writes the line if it is due; a caller without a timer calls this after every step. `idle`: the step was the
        last one for now."""
        now = self._clock()
        if any(now - engine.since >= INTERVAL or (idle and engine.said_busy) for engine in self._engines.values()):
            self.write()

    def begin_work(self) -> None:
        """Counts time from now on; a caller without a timer calls this when it begins to work."""
        now = self._clock()
        for engine in self._engines.values():
            self._begin_interval(engine, now)

    def _write_line(self, index: int, engine: _Engine, seconds: float) -> None:
        stats = engine.stats
        logger.info(
            LINE,
            index,
            engine.num_prompt_tokens / seconds,
            engine.num_generated_tokens / seconds,
            stats.num_running,
            stats.num_waiting,
            stats.kv_usage * 100,
            stats.prefix_cache.hit_rate * 100,
        )
        engine.said_busy = engine.is_busy

    @staticmethod
    def _begin_interval(engine: _Engine, now: float) -> None:
        engine.since = now
        engine.num_prompt_tokens = engine.num_generated_tokens = 0
