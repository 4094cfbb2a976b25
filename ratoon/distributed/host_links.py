"""The way of a rank's rows to and from stages on other hosts: an encrypted connection from each rank to its neighbour
in the next stage, with keys of the engine run.

torch.distributed has no encryption that its packages bring along, and rows of the residual stream tell the text of a
request. Rows of a GPU pass through host memory here.
"""

from __future__ import annotations

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
        self._context = EncryptedContext(keys)
        self._before: zmq.Socket[bytes] | None = None
        self._behind: zmq.Socket[bytes] | None = None

    def listen(self) -> str:
        """Returns the address where the neighbour in the stage before can connect; nothing, if that is on this host."""
        if not self._listens:
            return ""
        self._before, endpoint = self._context.listen(zmq.PULL, self._address)
        return endpoint

    def connect(self, endpoints: list[str]) -> None:
        """Gets what `listen` has returned on every rank."""
        if self._connects:
            self._behind = self._context.connect(zmq.PUSH, endpoints[self._rank + self._width])

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

    def close(self) -> None:
        self._context.close()


def as_bytes(rows: Tensor) -> Any:
    """The memory of a tensor on the host, as an array of bytes."""
    return rows.contiguous().view(torch.uint8).numpy().reshape(-1)
