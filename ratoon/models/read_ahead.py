"""Reading tensors on another thread while the model is built from those before: reading waits for disks and
dequantises, building copies and packs, and both leave the interpreter free.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import torch

from ratoon.layers.weights import TensorSource

TENSORS_AHEAD = 4  # read but not yet taken: what this costs in memory


class ReadAhead:
    """A TensorSource that expects its tensors to be read once each, in the given order. Others are read when asked."""

    def __init__(self, source: TensorSource, order: Iterable[str]) -> None:
        self.name = source.name
        self._source = source
        self._to_come = deque(order)
        self._reading: deque[tuple[str, Future[torch.Tensor]]] = deque()
        self._executor = ThreadPoolExecutor(1, thread_name_prefix="ratoon-weights")

    def __enter__(self) -> ReadAhead:
        return self

    def __exit__(self, *details: Any) -> None:
        self._executor.shutdown(cancel_futures=True)

    def shapes(self) -> Mapping[str, tuple[int, ...]]:
        return self._source.shapes()

    def read(self, name: str) -> torch.Tensor:
        while self._to_come and len(self._reading) <= TENSORS_AHEAD:
            upcoming = self._to_come.popleft()
            self._reading.append((upcoming, self._executor.submit(self._source.read, upcoming)))
        if self._reading and self._reading[0][0] == name:
            return self._reading.popleft()[1].result()
        return self._source.read(name)
