"""EngineCore: the loop of schedule, execute, sample, update. It knows tokens, not text."""

from __future__ import annotations

import logging

from ratoon.core.config import EngineConfig
from ratoon.core.request import EngineCoreOutput, EngineCoreOutputs, EngineCoreRequest
from ratoon.core.stats import SchedulerStats
from ratoon.distributed.executor import Executor
from ratoon.scheduling.scheduler import Scheduler

logger = logging.getLogger(__name__)


class EngineCore:
    def __init__(self, config: EngineConfig, executor: Executor) -> None:
        self.config = config
        self.executor = executor
        facts = executor.facts
        self.scheduler = Scheduler(config.scheduler, config.cache, facts.kv_config, facts.max_model_len)
        self._pending: list[EngineCoreOutput] = []  # outputs that no step brought: aborts

    def add_request(self, request: EngineCoreRequest) -> None:
        """RequestError when it can never be served; nothing is kept of it then."""
        self.scheduler.add_request(request)

    def abort_requests(self, request_ids: list[str]) -> None:
        self._pending += self.scheduler.abort_requests(request_ids)

    def has_work(self) -> bool:
        return bool(self._pending) or self.scheduler.has_requests()

    def step(self) -> EngineCoreOutputs:
        """One turn. An exception while executing fails the requests of this step, and the engine goes on."""
        outputs, self._pending = self._pending, []
        if self.scheduler.has_requests():
            plan = self.scheduler.schedule()
            try:
                self.executor.execute_model(plan)
                result = self.executor.sample_tokens(None)
            except Exception as error:
                logger.exception("a step failed")
                message = f"{type(error).__name__}: {error}"
                outputs += self.scheduler.fail_requests(list(plan.num_scheduled_tokens), message)
            else:
                outputs += self.scheduler.update_from_output(plan, result)
        return EngineCoreOutputs(outputs, self.scheduler.stats())

    def reset_prefix_cache(self) -> bool:
        """False while requests hold blocks."""
        return self.scheduler.reset_prefix_cache()

    def stats(self) -> SchedulerStats:
        return self.scheduler.stats()

    def shutdown(self) -> None:
        self.executor.shutdown()
