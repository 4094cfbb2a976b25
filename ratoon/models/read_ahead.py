"""Reading tensors on another thread while the model is built from those before: reading waits for disks and
dequantises, building copies and packs, and both leave the interpreter free.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

from ratoon.layers.stored import StoredTensor
from ratoon.layers.weights import TensorRequest

TENSORS_AHEAD = 4  # read but not yet taken: what this costs in memory


class ReadAhead:
    """Called as `read` is. It expects requests in the given order; others are answered when they are made."""

    def __init__(self, read: Callable[[TensorRequest], StoredTensor], order: Iterable[TensorRequest]) -> None:
        self._read = read
        self._to_come = deque(order)
        self._reading: deque[tuple[TensorRequest, Future[StoredTensor]]] = deque()
        self._executor = ThreadPoolExecutor(1, thread_name_prefix="ratoon-weights")

    def __enter__(self) -> ReadAhead:
        return self

    def __exit__(self, *details: Any) -> None:
        self._executor.shutdown(cancel_futures=True)

    def __call__(self, request: TensorRequest) -> StoredTensor:
        while self._to_come and len(self._reading) <= TENSORS_AHEAD:
            upcoming = self._to_come.popleft()
            self._reading.append((upcoming, self._executor.submit(self._read, upcoming)))
        if self._reading and self._reading[0][0] == request:
            return self._reading.popleft()[1].result()
        return self._read(request)
