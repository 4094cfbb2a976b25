"""What an executor, its worker processes and the other hosts of its ranks send each other, apart from plans and named
calls (core/worker.py). Ranks are counted stage by stage, and hosts ("nodes") have equally many, in their order."""

from __future__ import annotations

import enum
from typing import Any

import msgspec

from ratoon.core.config import EngineConfig
from ratoon.core.messages import Fault
from ratoon.core.outputs import ModelRunnerOutput
from ratoon.core.worker import WorkerStats


class LinkKeys(msgspec.Struct, frozen=True):
    """How ranks of one engine run reach those of its other hosts: keys of this run alone."""

    public: str
    secret: str = msgspec.field()

    def __repr__(self) -> str:
        return f"LinkKeys({self.public!r}, …)"


class WorkerLaunch(msgspec.Struct, frozen=True):
    """What a worker process is started with."""

    config: EngineConfig
    rank: int
    first_rank: int  # of this host
    num_local_ranks: int
    engine: int  # the process whose executor it belongs to
    address: str = ""  # of this host, where ranks of others reach it
    keys: LinkKeys | None = None  # None: there is no other host

    @property
    def has_results(self) -> bool:
        return self.rank == output_rank(self.config)


def output_rank(config: EngineConfig) -> int:
    """The rank whose results are read: the first of the last stage, all of whose ranks have the same."""
    return config.num_ranks - config.tensor_parallel_size


def ranks_of_node(config: EngineConfig, node_rank: int) -> range:
    count = config.num_ranks // config.nnodes
    return range(node_rank * count, (node_rank + 1) * count)


class ToWorker(enum.Enum):
    """The first frame of a message to all workers."""

    PLAN = b"p"  # a SchedulerOutput
    CALL = b"c"  # the number of the call, then core/worker.py's frames
    CLOSE = b"e"


class StepResult(msgspec.Struct, array_like=True):
    """A step has ended. Ranks other than the one whose output is read send their failures, and what became of blocks
    that a connector was asked for."""

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


# ---- between hosts: a kind, the engine run, then what follows ----


class NodeHello(msgspec.Struct, frozen=True):
    """A host asks for its ranks."""

    version: str
    node_rank: int
    nnodes: int
    settings: dict[str, Any]  # those that it was given, by their names


class NodeLaunch(msgspec.Struct, frozen=True):
    """A host gets its ranks."""

    config: EngineConfig
    engine: int
    keys: LinkKeys


class FromNode(enum.Enum):
    HELLO = b"h"  # a NodeHello
    MESSAGE = b"m"  # a rank, then what its worker sends
    BEAT = b"b"
    LOST = b"x"  # a sentence: its workers can execute no step any more


class ToNode(enum.Enum):
    LAUNCH = b"l"  # a NodeLaunch
    REFUSE = b"r"  # a Fault
    MESSAGE = b"m"  # what all workers get
    BEAT = b"b"
    END = b"e"  # this run is over, or not known here
