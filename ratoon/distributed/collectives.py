"""Sums and concatenations over the ranks of one replica, by torch.distributed: gloo on CPUs, NCCL on GPUs."""

from __future__ import annotations

from datetime import timedelta

import torch
import torch.distributed as dist

from ratoon.layers.shard import Collective, ModelPart, Shard

Tensor = torch.Tensor

SECONDS_TO_MEET = 120.0  # for all ranks of a group to have come up


class GroupCollective(Collective):
    """The collective of a process group. A sum has the same bits on every rank: each part of it is made by one."""

    can_be_recorded = False

    def __init__(self, group: dist.ProcessGroup, on_cuda: bool) -> None:
        self.can_be_captured = on_cuda  # NCCL's calls run on the current stream
        self._group = group
        self._world_size = dist.get_world_size(group)

    def all_reduce(self, x: Tensor) -> Tensor:
        x = x.contiguous()
        dist.all_reduce(x, group=self._group)
        return x

    def all_gather(self, x: Tensor) -> Tensor:
        parts = [torch.empty_like(x) for _ in range(self._world_size)]
        dist.all_gather(parts, x.contiguous(), group=self._group)
        return torch.cat(parts, dim=1)


def join_group(rank: int, world_size: int, rendezvous: str, device: str) -> ModelPart:
    """Meets the other ranks through a file that all can write to, in a directory of the service's own. Returns what
    this rank has of the model."""
    if world_size == 1:
        return ModelPart()
    on_cuda = device.startswith("cuda")
    store = dist.FileStore(rendezvous, world_size)
    dist.init_process_group(
        "nccl" if on_cuda else "gloo",
        store=store,
        rank=rank,
        world_size=world_size,
        timeout=timedelta(seconds=SECONDS_TO_MEET),
        device_id=torch.device(device) if on_cuda else None,
    )
    group = dist.group.WORLD
    assert group is not None
    return ModelPart(Shard(rank, world_size, GroupCollective(group, on_cuda)))


def leave_group() -> None:
    if dist.is_initialized():
        dist.destroy_process_group()
