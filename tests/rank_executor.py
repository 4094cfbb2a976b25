"""An executor with workers of which each is a rank of a tensor-parallel group on a thread of its own. Plans reach them
as frames, as between processes. Named in the `executor` setting of engines under test."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from typing import Any

from ratoon.core.config import EngineConfig, ModelConfig
from ratoon.core.outputs import ModelRunnerOutput
from ratoon.core.plan import SchedulerOutput
from ratoon.core.wire import Decoder, encode
from ratoon.distributed.executor import bring_up
from ratoon.distributed.uniproc import ThreadedExecutor
from ratoon.execution.worker import Worker
from ratoon.layers.shard import ModelPart, Shard
from ratoon.layers.weights import TensorSource
from ratoon.observe.startup import StartupTimer
from tests.framed_executor import as_bytes
from tests.unit.layers.ranks import Meeting, Rank

NAME = f"{__name__}:RankExecutor"
WORLD_SIZE = 2


class RankExecutor(ThreadedExecutor):
    def __init__(self, config: EngineConfig, model: ModelConfig, tensors: TensorSource, timer: StartupTimer) -> None:
        super().__init__()
        size, dispatch = WORLD_SIZE, config.expert_parallel_dispatch
        meeting = Meeting(size)
        self._threads = [ThreadPoolExecutor(1, f"rank-{rank}") for rank in range(size)]
        self.workers = [
            Worker(
                config,
                model,
                tensors,
                StartupTimer(),
                ModelPart(Shard(rank, size, Rank(meeting, rank), config.enable_expert_parallel, dispatch)),
            )
            for rank in range(size)
        ]
        self.facts, *_ = self.rank_facts = bring_up(self._on_all)
        self._on_all("enter_thread")

    def _on_all(self, method: str, *arguments: Any) -> list[Any]:
        pairs = zip(self._threads, self.workers, strict=True)
        futures = [thread.submit(getattr(worker, method), *arguments) for thread, worker in pairs]
        return [future.result() for future in futures]

    def execute_model(self, plan: SchedulerOutput) -> None:
        frames = as_bytes(encode(plan))
        pairs = zip(self._threads, self.workers, strict=True)
        plans = Decoder(SchedulerOutput)
        futures = [thread.submit(worker.execute_model, plans.decode(frames)) for thread, worker in pairs]
        for future in futures:
            future.result()

    def sample_tokens(self) -> ModelRunnerOutput:
        first, *others = self._on_all("sample_tokens")
        assert all(other == first for other in others), "every rank chooses the same"
        return first

    def sleep(self, level: int) -> None:
        self._on_all("sleep", level)

    def wake_up(self) -> None:
        self._on_all("wake_up")

    def close(self) -> None:
        super().close()
        self._on_all("close")
        for thread in self._threads:
            thread.shutdown()
