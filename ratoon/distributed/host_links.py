"""The way of a rank's rows to and from other hosts: an encrypted connection from each rank to its neighbour in the next
stage, and where a stage is on several hosts to the ranks in the same place on these, with keys of the engine run.

torch.distributed has no encryption that its packages bring along, and rows of the residual stream tell the text of a
request. Rows of a GPU pass through host memory here.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
import zmq

from ratoon.core.errors import EngineError
from ratoon.core.ranks import LinkKeys, WorkerLaunch
from ratoon.distributed.cluster import EncryptedContext
from ratoon.layers.shard import StageLink

Tensor = torch.Tensor

SECONDS_OF_A_STEP = 120.0  # for the stage before to send its rows


class HostLinks(StageLink):
    def __init__(self, launch: WorkerLaunch, keys: LinkKeys) -> None:
        self._rank, self._width = launch.rank, launch.config.tensor_parallel_size
        self._address = launch.address
        local = range(launch.first_rank, launch.first_rank + launch.num_local_ranks)
        before, behind = self._rank - self._width, self._rank + self._width
        self._listens = before >= 0 and before not in local
        self._connects = behind < launch.config.num_ranks and behind not in local
        # The ranks of the stage in the same place on each of its hosts, this one among them
        first = self._rank // self._width * self._width
        own_place = (self._rank - first) % len(local)
        self._stage_ranks = [first + host + own_place for host in range(0, self._width, len(local))]
        self._context = EncryptedContext(keys)
        self._before: zmq.Socket[bytes] | None = None
        self._behind: zmq.Socket[bytes] | None = None
        self._parts: zmq.Socket[bytes] | None = None  # of tensors, from other ranks of the stage
        self._part_takers: list[zmq.Socket[bytes]] = []
        self._early_parts: dict[int, deque[Any]] = {rank: deque() for rank in self._stage_ranks}

    def listen(self) -> list[str]:
        """Returns the addresses where the neighbour in the stage before and other ranks of the stage can connect; an
        empty one, if all of those are on this host."""
        endpoints = ["", ""]
        if self._listens:
            self._before, endpoints[0] = self._context.listen(zmq.PULL, self._address)
        if len(self._stage_ranks) > 1:
            self._parts, endpoints[1] = self._context.listen(zmq.PULL, self._address)
        return endpoints

    def connect(self, endpoints: list[list[str]]) -> None:
        """Gets what `listen` has returned on every rank."""
        if self._connects:
            self._behind = self._context.connect(zmq.PUSH, endpoints[self._rank + self._width][0])
        others = [rank for rank in self._stage_ranks if rank != self._rank]
        self._part_takers = [self._context.connect(zmq.PUSH, endpoints[rank][1]) for rank in others]

    def send(self, rows: Tensor) -> None:
        assert self._behind is not None, "the next stage is on this host"
        self._behind.send(as_bytes(rows.cpu()))

    def receive(self, rows: Tensor) -> None:
        assert self._before is not None, "the stage before is on this host"
        if not self._before.poll(int(1000 * SECONDS_OF_A_STEP)):
            raise EngineError(f"the stage before rank {self._rank} has sent nothing for {SECONDS_OF_A_STEP:g} seconds")
        frame = self._before.recv(copy=False)
        found = np.frombuffer(frame.buffer, np.uint8)
        if found.nbytes != rows.nbytes:
            raise EngineError(f"{found.nbytes} bytes of rows have come for {list(rows.shape)} of {rows.dtype}")
        on_host = torch.empty_like(rows, device="cpu") if rows.is_cuda else rows
        as_bytes(on_host)[:] = found
        if rows.is_cuda:
            rows.copy_(on_host)

    def exchange(self, x: Tensor) -> list[Tensor]:
        """Returns the tensors of all hosts of the stage, in their order. They have the same shape and dtype."""
        x = x.contiguous()
        self._send_parts([as_bytes(x.cpu())] * len(self._part_takers))
        return [x if rank == self._rank else self._part_of(rank, x) for rank in self._stage_ranks]

    def exchange_rows(self, parts: Sequence[Tensor], counts: Sequence[int]) -> list[Tensor]:
        """Sends each host of the stage its own part, [n, H]; returns what each has sent here, of which it is known how
        many rows they are."""
        others = [part for part, rank in zip(parts, self._stage_ranks, strict=True) if rank != self._rank]
        self._send_parts([as_bytes(part.cpu()) for part in others])
        return [
            part if rank == self._rank else self._part_of(rank, part.new_empty(count, part.shape[1]))
            for part, count, rank in zip(parts, counts, self._stage_ranks, strict=True)
        ]

    def _send_parts(self, parts: Sequence[Any]) -> None:
        name = self._rank.to_bytes(4, "little")
        for taker, data in zip(self._part_takers, parts, strict=True):
            taker.send_multipart([name, data])

    def _part_of(self, rank: int, like: Tensor) -> Tensor:
        assert self._parts is not None, "the stage is on this host"
        while not self._early_parts[rank]:  # another host may be a sum ahead
            if not self._parts.poll(int(1000 * SECONDS_OF_A_STEP)):
                raise EngineError(f"rank {rank} has sent nothing to a sum for {SECONDS_OF_A_STEP:g} seconds")
            name, frame = self._parts.recv_multipart(copy=False)
            self._early_parts[int.from_bytes(name.bytes, "little")].append(frame)
        found = np.frombuffer(self._early_parts[rank].popleft().buffer, np.uint8)
        if found.nbytes != like.nbytes:
            raise EngineError(f"{found.nbytes} bytes have come for {list(like.shape)} of {like.dtype}")
        part = torch.empty_like(like, device="cpu")
        as_bytes(part)[:] = found
        return part.to(like.device)

    def close(self) -> None:
        self._context.close()


def as_bytes(rows: Tensor) -> Any:
    """The memory of a tensor on the host, as an array of bytes."""
    return rows.contiguous().view(torch.uint8).numpy().reshape(-1)
