"""The executor whose workers are actors of a Ray cluster, one for each rank, on one node or on several.

It differs from the executor of processes (multiproc.py) in where workers run and how messages reach them: a placement
group holds the room for all ranks, plans and calls are sent to each actor, and a thread for each takes its messages. An
actor that ends, with its process or with its node, ends the executor. When this process ends, Ray ends the actors.
"""

from __future__ import annotations

import contextlib
import os
import threading
import time
from typing import Any

import msgspec

from ratoon.core.config import EngineConfig
from ratoon.core.errors import EngineError
from ratoon.core.ranks import WorkerLaunch
from ratoon.core.wire import Buffer
from ratoon.distributed.local_ranks import SECONDS_TO_END, RankMessages
from ratoon.distributed.multiproc import MultiprocExecutor
from ratoon.distributed.ray_cluster import connect_to_ray, room_of_rank, wait_for_group
from ratoon.distributed.ray_worker import THREADS, RankActor
from ratoon.observe.startup import StartupTimer

SECONDS_TO_START = 120.0  # for the processes of actors: they import torch


class RayExecutor(MultiprocExecutor):
    """One actor for each of `tensor_parallel_size` × `pipeline_parallel_size` ranks."""

    def _start_workers(self, config: EngineConfig, timer: StartupTimer) -> None:
        ranks = RayRanks(config, self)
        self._groups.append(ranks)
        with timer.phase("start actors"):
            ranks.start(config)


class RayRanks:
    """The workers of all ranks: a group as multiproc.py knows it."""

    def __init__(self, config: EngineConfig, messages: RankMessages) -> None:
        self._messages = messages
        self._num_ranks = config.num_ranks
        self._ray = ray = connect_to_ray("executor")
        self._num_sent = 0
        self._device, each = room_of_rank(ray, config.device, config.num_threads, self._num_ranks)
        self._placement = ray.util.placement_group([each] * self._num_ranks, strategy="PACK")
        wait_for_group(ray, self._placement, "executor", self._num_ranks, each)
        self._each = each
        self._workers: list[RayRank] = []

    def start(self, config: EngineConfig) -> None:
        ray, ranks = self._ray, range(self._num_ranks)
        config = config.with_(device=self._device, num_threads=config.num_threads or int(self._each["CPU"]))
        actors = [self._make_actor(rank) for rank in ranks]
        try:
            rendezvous = ""
            if self._num_ranks > 1:
                rendezvous = ray.get(actors[0].rendezvous.remote(), timeout=SECONDS_TO_START)
            launches = [WorkerLaunch(config, rank, ranks.start, self._num_ranks, os.getpid()) for rank in ranks]
            encoded = map(msgspec.msgpack.encode, launches)
            starts = [actor.start.remote(launch, rendezvous) for actor, launch in zip(actors, encoded)]
            ray.get(starts, timeout=SECONDS_TO_START)
        except Exception as error:
            for actor in actors:
                ray.kill(actor)
            raise EngineError(f"a worker can't be started on the Ray cluster: {error}") from None
        self._workers += [RayRank(rank, ray, actor, self._messages) for rank, actor in enumerate(actors)]

    def _make_actor(self, rank: int) -> Any:
        from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

        place = PlacementGroupSchedulingStrategy(self._placement, placement_group_bundle_index=rank)
        remote = self._ray.remote(concurrency_groups=THREADS)(RankActor)
        options = {"num_cpus": self._each["CPU"], "num_gpus": self._each.get("GPU", 0)}
        return remote.options(scheduling_strategy=place, max_restarts=0, **options).remote()

    def send(self, frames: list[Buffer], seconds: float) -> None:
        """Never waits. What an actor that is gone does not get is told by its `take`."""
        message = [bytes(frame) for frame in frames]
        number, self._num_sent = self._num_sent, self._num_sent + 1
        for worker in self._workers:
            worker.put(number, message)

    @property
    def end(self) -> str | None:
        return next((worker.end for worker in self._workers if worker.end is not None), None)

    def kill(self) -> None:
        for worker in self._workers:
            worker.kill()

    def close(self) -> None:
        deadline = time.monotonic() + SECONDS_TO_END
        for worker in self._workers:
            worker.close(max(0.0, deadline - time.monotonic()))
        with contextlib.suppress(Exception):  # the cluster may be gone
            self._ray.util.remove_placement_group(self._placement)


class RayRank:
    """An actor, and the thread that takes its messages."""

    def __init__(self, rank: int, ray: Any, actor: Any, messages: RankMessages) -> None:
        self._rank = rank
        self._ray = ray
        self._actor = actor
        self._messages = messages
        self.end: str | None = None  # how it has ended; None: it runs
        self._thread = threading.Thread(target=self._read, name=f"worker-{rank}", daemon=True)
        self._thread.start()

    def put(self, number: int, message: list[bytes]) -> None:
        self._actor.put.options(concurrency_group="to_worker").remote(number, message)

    def _read(self) -> None:
        try:
            while True:
                taken = self._actor.take.options(concurrency_group="from_worker").remote()
                messages = self._ray.get(taken)
                if messages is None:
                    self.end = f"worker {self._rank} has ended"
                    break
                for message in messages:
                    self._messages.take(self._rank, message)
        except Exception as error:  # of Ray: the actor, its node or the cluster is gone
            first, *_ = str(error).strip().splitlines() or [type(error).__name__]
            self.end = f"worker {self._rank} has ended ({first})"
        self._messages.lost(self.end)

    def kill(self) -> None:
        with contextlib.suppress(Exception):  # it has ended
            self._ray.kill(self._actor)

    def close(self, seconds: float) -> None:
        self._thread.join(seconds)
        self.kill()
        self._thread.join()
