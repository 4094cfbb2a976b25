"""EngineCore: the loop of schedule, execute, sample, update. It knows tokens, not text."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from typing import TYPE_CHECKING

from ratoon.core.config import EngineConfig
from ratoon.core.errors import RequestError
from ratoon.core.request import EngineCoreOutput, EngineCoreOutputs, EngineCoreRequest
from ratoon.core.stats import SchedulerStats
from ratoon.scheduling.scheduler import Scheduler

if TYPE_CHECKING:
    from ratoon.distributed.executor import Executor

logger = logging.getLogger(__name__)


class EngineCore:
    def __init__(self, config: EngineConfig, executor: Executor, clock: Callable[[], float] = time.monotonic) -> None:
        self.config = config
        self.executor = executor
        facts = executor.facts
        self.scheduler = Scheduler(config.scheduler, config.cache, facts.kv_config, facts.max_model_len)
        self._clock = clock
        self._pending: list[EngineCoreOutput] = []  # outputs that no step brought: aborts
        self.paused = False
        self.asleep = False

    def add_request(self, request: EngineCoreRequest) -> None:
        """RequestError when it can never be served; nothing is kept of it then."""
        self.scheduler.add_request(request)

    def abort_requests(self, request_ids: list[str]) -> None:
        self._pending += self.scheduler.abort_requests(request_ids)

    def stop_requests(self, request_ids: list[str]) -> None:
        """A stop string ended them on the other side."""
        self._pending += self.scheduler.abort_requests(request_ids, keep=True)

    def has_work(self) -> bool:
        return bool(self._pending) or self.scheduler.has_requests()

    @property
    def can_step(self) -> bool:
        """Is there something to do, and is it wanted now?"""
        return self.has_work() and not self.paused and not self.asleep

    def step(self) -> EngineCoreOutputs:
        """One turn. An exception while executing fails the request that it belongs to, and the engine goes on: if there
        are several in the step, each is tried alone to find out."""
        self.expire_leases()
        outputs, self._pending = self._pending, []
        if self.scheduler.has_requests():
            plan = self.scheduler.schedule()
            try:
                self.executor.execute_model(plan)
                result = self.executor.sample_tokens(None)
            except Exception as error:
                logger.exception("a step failed")
                self.scheduler.say_again(plan)
                if not self.scheduler.try_apart(plan):
                    message = f"{type(error).__name__}: {error}"
                    outputs += self.scheduler.fail_requests(plan.req_ids, message)
            else:
                outputs += self.scheduler.update_from_output(plan, result)
        return EngineCoreOutputs(outputs, self.scheduler.stats())

    def expire_leases(self) -> None:
        self._pending += self.scheduler.tick(self._clock())

    def seconds_to_expiry(self) -> float | None:
        """Until the next lease or deadline ends; None: there is none."""
        expiry = self.scheduler.next_expiry()
        return None if expiry is None else max(0.0, expiry - self._clock())

    def end_leases(self, branch_ids: list[str]) -> int:
        """Give the memory of ended branches back now. How many there were."""
        return sum(self.scheduler.leases.end(branch_id) for branch_id in branch_ids)

    def reset_prefix_cache(self) -> bool:
        """False while requests hold blocks."""
        return self.scheduler.reset_prefix_cache()

    def stats(self) -> SchedulerStats:
        return self.scheduler.stats()

    def pause(self) -> None:
        """Take no further step. Requests keep their place and their memory, and new ones queue up."""
        self.paused = True

    def resume(self) -> None:
        self.paused = False

    def sleep(self, level: int = 1) -> None:
        """Give memory back while nobody needs it: the KV cache (1), the weights as well (2)."""
        if level not in (1, 2):
            raise RequestError("level", f"{level!r} is unknown", "1: free the KV cache; 2: free the weights as well")
        if self.asleep:
            return
        if self.scheduler.has_unfinished_requests():
            raise RequestError("sleep", "requests are under way", "wait for their end, or abort them")
        if self.scheduler.has_requests():
            self.step()  # rows of ended requests that the runner should still drop
        if not self.scheduler.reset_prefix_cache():
            raise RequestError("sleep", "blocks of the KV cache are held", "wait for what holds them")
        self.executor.sleep(level)
        self.asleep = True

    def wake_up(self) -> None:
        """Take the memory again; requests that came meanwhile are answered."""
        if self.asleep:
            self.executor.wake_up()
            self.asleep = False

    def shutdown(self) -> None:
        self.executor.shutdown()
