"""Sums, concatenations and exchanges of rows over the ranks of a stage: through shared memory between CPU ranks of one
host, otherwise by torch.distributed, which is gloo between CPUs and NCCL between GPUs. It also takes rows to the next
stage, and by it alone ranks find each other.

NCCL's kernels run on the current stream, so they are a part of CUDA graphs like any other. torch's symmetric memory,
which is faster than NCCL for the small sums of a decode, is not used: it needs several GPUs that reach each other's
memory, and has not been measured here.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from datetime import timedelta

import torch
import torch.distributed as dist
from torch.nn import functional

from ratoon.core.ranks import WorkerLaunch
from ratoon.distributed.host_collective import HostCollective
from ratoon.distributed.host_links import HostLinks
from ratoon.distributed.shared_memory import MemoryHandover, SharedMemoryCollective, identity_of_host, new_memory
from ratoon.layers.native import library
from ratoon.layers.shard import Collective, ModelPart, Shard, Stage, StageLink

Tensor = torch.Tensor

TCP = "tcp://"
SECONDS_TO_MEET = 120.0  # for all ranks of a group to have come up, or to a sum


class GroupCollective(Collective):
    """The collective of a process group. A sum has the same bits on every rank: each part of it is made by one."""

    can_be_recorded = False

    def __init__(self, group: dist.ProcessGroup, on_cuda: bool) -> None:
        self.can_be_captured = on_cuda  # NCCL's calls run on the current stream
        self._group = group
        self._rank, self._world_size = dist.get_rank(group), dist.get_world_size(group)

    def all_reduce(self, x: Tensor) -> Tensor:
        x = x.contiguous()
        dist.all_reduce(x, group=self._group)
        return x

    def all_gather(self, x: Tensor, size: int) -> Tensor:
        width = -(-size // self._world_size)  # the last ranks may have fewer columns than the others
        x = functional.pad(x, (0, width - x.shape[1])).contiguous()
        parts = x.new_empty(self._world_size * len(x), width)  # [ranks · T, width]
        dist.all_gather_into_tensor(parts, x, group=self._group)
        return parts.view(-1, *x.shape).transpose(0, 1).reshape(len(x), -1)[:, :size]

    def all_to_all(self, x: Tensor, counts: Sequence[Sequence[int]]) -> Tensor:
        sizes = [of_rank[self._rank] for of_rank in counts]
        y = x.new_empty(sum(sizes), x.shape[1])
        dist.all_to_all_single(y, x.contiguous(), sizes, list(counts[self._rank]), group=self._group)
        return y


class GroupLink(StageLink):
    """The neighbours of a rank in the stages before and behind its own."""

    def __init__(self, before: int, behind: int) -> None:
        self._before, self._behind = before, behind  # ranks
        self._sending: tuple[dist.Work, Tensor] | None = None

    def send(self, rows: Tensor) -> None:
        if self._sending is not None:
            self._sending[0].wait()
        work = dist.isend(rows.contiguous(), self._behind)
        assert work is not None
        self._sending = work, rows  # whose memory is read until then

    def receive(self, rows: Tensor) -> None:
        dist.recv(rows, self._before)


class JoinedLink(StageLink):
    """A link whose sides go different ways: one to this host, one to another."""

    def __init__(self, before: StageLink, behind: StageLink) -> None:
        self._before, self._behind = before, behind

    def send(self, rows: Tensor) -> None:
        self._behind.send(rows)

    def receive(self, rows: Tensor) -> None:
        self._before.receive(rows)


def join_group(launch: WorkerLaunch, rendezvous: str, links: HostLinks | None) -> ModelPart:
    """Meets the other ranks of this host, or of a cluster, at `rendezvous`. `links`: the ways to ranks of other
    hosts. Returns what this rank has of the model."""
    config, num_shards = launch.config, launch.config.tensor_parallel_size
    index = launch.rank // num_shards
    has_stages = config.pipeline_parallel_size > 1
    stage = Stage(index, config.pipeline_parallel_size, links if has_stages else None)
    world_size, own = launch.num_local_ranks, launch.rank - launch.first_rank
    num_together = min(num_shards, world_size)  # ranks of a stage on this host
    if world_size == 1:
        return ModelPart(make_shard(launch, None, links, num_together), stage)
    device = config.device
    on_cuda = device.startswith("cuda")
    if on_cuda:
        torch.cuda.set_device(torch.device(device))  # before anything of NCCL is made, which would be on the first one
    store = open_store(rendezvous, own, world_size)
    dist.init_process_group(
        "nccl" if on_cuda else "gloo",
        store=store,
        rank=own,
        world_size=world_size,
        timeout=timedelta(seconds=SECONDS_TO_MEET),
        device_id=torch.device(device) if on_cuda else None,
    )
    # Every rank makes the groups of all stages, in the same order, as torch asks for.
    groups = [dist.new_group(range(first, first + num_together)) for first in range(0, world_size, num_together)]
    collective = None if num_together == 1 else open_collective(groups[own // num_together], on_cuda)
    if has_stages:
        here = GroupLink(own - num_shards, own + num_shards)
        before = here if own >= num_shards or links is None else links
        behind = here if own + num_shards < world_size or links is None else links
        stage = Stage(index, config.pipeline_parallel_size, JoinedLink(before, behind))
    return ModelPart(make_shard(launch, collective, links, num_together), stage)


def make_shard(launch: WorkerLaunch, own: Collective | None, links: HostLinks | None, num_together: int) -> Shard:
    """A rank of a stage, of whose ranks `num_together` are on this host and have the collective `own`."""
    num_shards = launch.config.tensor_parallel_size
    if num_shards > num_together:
        assert links is not None, "a stage is on several hosts"
        own = HostCollective(links, own, launch.rank % num_shards, num_shards, num_together)
    config = launch.config
    is_expert_parallel = config.enable_expert_parallel and num_shards > 1
    return Shard(launch.rank % num_shards, num_shards, own, is_expert_parallel, config.expert_parallel_dispatch)


def open_collective(group: dist.ProcessGroup, on_cuda: bool) -> Collective:
    """The fastest collective of a group, the same kind on all of its ranks, which call this at the same time."""
    if not on_cuda:
        shared = share_memory(group)
        if shared is not None:
            return shared
    return GroupCollective(group, on_cuda)


def share_memory(group: dist.ProcessGroup) -> SharedMemoryCollective | None:
    """None: the ranks of the group are on several hosts, or have no kernels."""
    rank, world_size = dist.get_rank(group), dist.get_world_size(group)
    handover = MemoryHandover()
    listener = handover.listen() if rank == 0 else None
    try:
        told = torch.frombuffer(bytearray(identity_of_host() + handover.name), dtype=torch.uint8)
        heard = [torch.empty_like(told) for _ in range(world_size)]
        dist.all_gather(heard, told, group=group)
        (first, name), *others = [(found[:32], found[32:]) for found in (bytes(each.tolist()) for each in heard)]
        kernels = library()
        if kernels is None or any(identity != first for identity, _ in others):
            return None
        if listener is not None:
            descriptor = new_memory(kernels, world_size)
            handover.give(listener, descriptor, world_size - 1, SECONDS_TO_MEET)
        else:
            descriptor = handover.take(name, SECONDS_TO_MEET)
        try:
            return SharedMemoryCollective(descriptor, rank, world_size)
        finally:
            os.close(descriptor)
    finally:
        if listener is not None:
            listener.close()


def open_store(rendezvous: str, rank: int, world_size: int) -> dist.Store:
    """Where the ranks find each other: a file, or "tcp://HOST:PORT", an address of the first rank's host."""
    if not rendezvous.startswith(TCP):
        return dist.FileStore(rendezvous, world_size)
    host, _, port = rendezvous.removeprefix(TCP).rpartition(":")
    timeout = timedelta(seconds=SECONDS_TO_MEET)
    return dist.TCPStore(host.strip("[]"), int(port), world_size, is_master=rank == 0, timeout=timeout)


def leave_group() -> None:
    if dist.is_initialized():
        dist.destroy_process_group()
