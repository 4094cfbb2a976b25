"""How a plan reaches the workers. Here: one worker, in this process."""

from __future__ import annotations

from typing import Protocol

from ratoon.core.config import EngineConfig, ModelConfig
from ratoon.core.outputs import ModelRunnerOutput
from ratoon.core.plan import SchedulerOutput
from ratoon.execution.worker import Worker, WorkerFacts
from ratoon.layers.weights import TensorSource
from ratoon.observe.startup import StartupTimer


class Executor(Protocol):
    """Two phases, as the runner has them. `execute_model` may return before the device is done."""

    facts: WorkerFacts

    def execute_model(self, plan: SchedulerOutput) -> None: ...

    def sample_tokens(self, grammar: object | None = None) -> ModelRunnerOutput: ...

    def shutdown(self) -> None: ...


class UniProcExecutor:
    def __init__(self, config: EngineConfig, model: ModelConfig, tensors: TensorSource, timer: StartupTimer) -> None:
        self._worker = Worker(config, model, tensors, timer)
        self.facts = self._worker.facts

    def execute_model(self, plan: SchedulerOutput) -> None:
        self._worker.execute_model(plan)

    def sample_tokens(self, grammar: object | None = None) -> ModelRunnerOutput:
        return self._worker.sample_tokens(grammar)

    def shutdown(self) -> None:
        del self._worker
