"""An executor with two stages of a pipeline, one after the other on one thread: steps can be looked into, which they
can't where each stage is a process. Named in the `executor` setting of engines under test."""

from __future__ import annotations

from collections import deque
from typing import Any

import torch

from ratoon.core.config import EngineConfig, ModelConfig
from ratoon.core.outputs import ModelRunnerOutput
from ratoon.core.plan import SchedulerOutput
from ratoon.distributed.executor import bring_up
from ratoon.distributed.uniproc import ThreadedExecutor
from ratoon.execution.worker import Worker
from ratoon.layers.shard import ModelPart, Stage, StageLink
from ratoon.layers.weights import TensorSource
from ratoon.observe.startup import StartupTimer

NAME = f"{__name__}:StageExecutor"
NUM_STAGES = 2


class Between(StageLink):
    """What one stage has sent, and the next one has not received. A real link reads the memory of rows until the next
    ones are sent: here it is checked that they are not changed before."""

    def __init__(self) -> None:
        self._rows: deque[torch.Tensor] = deque()
        self._last = torch.empty(0), torch.empty(0)  # the rows that were sent last, and their copy

    def send(self, rows: torch.Tensor) -> None:
        sent, copy = self._last
        assert torch.equal(sent, copy), "rows were changed while they were sent"
        self._last = rows, rows.clone()
        self._rows.append(rows)

    def receive(self, rows: torch.Tensor) -> None:
        rows.copy_(self._rows.popleft())


class StageExecutor(ThreadedExecutor):
    def __init__(self, config: EngineConfig, model: ModelConfig, tensors: TensorSource, timer: StartupTimer) -> None:
        super().__init__()
        between = Between()
        self.workers = [
            Worker(config, model, tensors, StartupTimer(), ModelPart(stage=Stage(index, NUM_STAGES, between)))
            for index in range(NUM_STAGES)
        ]
        self.facts, *_ = bring_up(self._on_all)

    def _on_all(self, method: str, *arguments: Any) -> list[Any]:
        return [getattr(worker, method)(*arguments) for worker in self.workers]

    def execute_model(self, plan: SchedulerOutput) -> None:
        self._on_all("execute_model", plan)

    def sample_tokens(self) -> ModelRunnerOutput:
        *_, last = self._on_all("sample_tokens")
        return last

    def close(self) -> None:
        super().close()
        self._on_all("close")
