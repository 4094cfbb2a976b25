"""What an executor and its worker processes send each other, apart from plans and named calls (core/worker.py)."""

from __future__ import annotations

import enum

import msgspec

from ratoon.core.config import EngineConfig
from ratoon.core.messages import Fault
from ratoon.core.outputs import ModelRunnerOutput
from ratoon.core.worker import WorkerStats


class WorkerLaunch(msgspec.Struct, frozen=True):
    """What a worker process is started with."""

    config: EngineConfig
    rank: int
    world_size: int
    engine: int  # the process whose executor it belongs to

    @property
    def has_results(self) -> bool:
        return self.rank == output_rank(self.config)


def output_rank(config: EngineConfig) -> int:
    """The rank whose results are read: the first of the last stage, all of whose ranks have the same."""
    return config.num_ranks - config.tensor_parallel_size


class ToWorker(enum.Enum):
    """The first frame of a message to all workers."""

    PLAN = b"p"  # a SchedulerOutput
    CALL = b"c"  # the number of the call, then core/worker.py's frames
    CLOSE = b"e"


class StepResult(msgspec.Struct, array_like=True):
    """A step has ended. Ranks other than the one whose output is read send their failures alone."""

    step: int
    output: ModelRunnerOutput | None = None
    fault: Fault | None = None
    was_skipped: bool = False
    stats: WorkerStats | None = None


class CallResult(msgspec.Struct, array_like=True):
    """The end of a call; its result is in further frames, as core/worker.py encodes it."""

    number: int
    fault: Fault | None = None


class FromWorker(enum.Enum):
    """The first frame of a message of a worker."""

    STEP = b"s"
    CALL = b"c"
