"""Ranks as threads of one process, for tests of what they compute together."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from threading import Barrier
from typing import TypeVar

import torch

from ratoon.layers.shard import Shard

Tensor = torch.Tensor
Result = TypeVar("Result")
PATIENCE = 60  # seconds: a rank that fails does not leave the others waiting forever


class Meeting:
    """A Collective for each rank: they lay down their tensors, wait for each other and take what all laid down."""

    def __init__(self, world_size: int) -> None:
        self.barrier = Barrier(world_size, timeout=PATIENCE)
        self.laid_down: list[Tensor] = [torch.empty(0)] * world_size
        self.num_calls = 0

    def exchange(self, rank: int, x: Tensor) -> list[Tensor]:
        self.laid_down[rank] = x.clone()
        self.barrier.wait()
        found = list(self.laid_down)
        self.num_calls += rank == 0
        self.barrier.wait()
        return found


class Rank:
    can_be_captured = can_be_recorded = False

    def __init__(self, meeting: Meeting, rank: int) -> None:
        self.meeting = meeting
        self.rank = rank

    def all_reduce(self, x: Tensor) -> Tensor:
        return torch.stack(self.meeting.exchange(self.rank, x)).sum(0)

    def all_gather(self, x: Tensor, size: int) -> Tensor:
        found = torch.cat(self.meeting.exchange(self.rank, x), dim=1)
        assert found.shape[1] == size
        return found

    def all_to_all(self, x: Tensor, counts: Sequence[Sequence[int]]) -> Tensor:
        assert len(x) == sum(counts[self.rank])
        found = self.meeting.exchange(self.rank, x)
        return torch.cat([part.split(list(sizes))[self.rank] for part, sizes in zip(found, counts, strict=True)])


def on_all_ranks(world_size: int, work: Callable[[Shard], Result]) -> list[Result]:
    """What `work` returns on each rank, all of them running at once."""
    meeting = Meeting(world_size)

    def run(rank: int) -> Result:
        try:
            return work(Shard(rank, world_size, Rank(meeting, rank)))
        except BaseException:
            meeting.barrier.abort()
            raise

    with ThreadPoolExecutor(world_size) as pool:
        futures = [pool.submit(run, rank) for rank in range(world_size)]
        failures = [future.exception() for future in futures]
        first = next(
            (failure for failure in failures if type(failure).__name__ != "BrokenBarrierError" and failure), None
        )
        if first is not None:
            raise first
        return [future.result() for future in futures]
