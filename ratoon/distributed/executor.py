"""How a plan reaches the workers. Here: one worker, in this process."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Protocol

from ratoon.core.config import EngineConfig, ModelConfig
from ratoon.core.errors import ConfigError
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

    def sleep(self, level: int) -> None:
        """Give memory back: the KV cache, and from level 2 on the weights. Nothing is executed until `wake_up`."""

    def wake_up(self) -> None: ...

    def shutdown(self) -> None: ...


ExecutorClass = Callable[[EngineConfig, ModelConfig, TensorSource, StartupTimer], Executor]


def executor_class(name: str) -> ExecutorClass:
    """The class that a config names: "uniproc", or "module:Class" for one from elsewhere."""
    if name == "uniproc":
        return UniProcExecutor
    module_name, _, class_name = name.partition(":")
    try:
        found: ExecutorClass = getattr(importlib.import_module(module_name), class_name)
    except (ImportError, AttributeError, ValueError) as error:
        raise ConfigError("executor", f"{name!r} can't be loaded ({error})", 'uniproc, or "module:Class"') from None
    return found


class UniProcExecutor:
    def __init__(self, config: EngineConfig, model: ModelConfig, tensors: TensorSource, timer: StartupTimer) -> None:
        self._worker = Worker(config, model, tensors, timer)
        self.facts = self._worker.facts

    @property
    def num_computed_tokens(self) -> int:
        """What has gone through the model since the start, in the runner's own count."""
        return self._worker.runner.num_computed_tokens

    def execute_model(self, plan: SchedulerOutput) -> None:
        self._worker.execute_model(plan)

    def sample_tokens(self, grammar: object | None = None) -> ModelRunnerOutput:
        return self._worker.sample_tokens(grammar)

    def sleep(self, level: int) -> None:
        self._worker.sleep(level)

    def wake_up(self) -> None:
        self._worker.wake_up()

    def shutdown(self) -> None:
        del self._worker
