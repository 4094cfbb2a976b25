"""Several arrays in one piece of memory: written with numpy on the host, brought to the device by a single copy."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import torch

ALIGNMENT = 16  # bytes; kernels load aligned addresses faster

Layout = Mapping[str, tuple[int, torch.dtype]]  # by name: number of elements, type


class PackedBuffer:
    """The device's side keeps its address. The host's side is pinned, and there are two of them, to which steps write
    in turn: a copy under way still reads the other one."""

    def __init__(self, layout: Layout, device: torch.device) -> None:
        size = sum(_aligned(count * dtype.itemsize) for count, dtype in layout.values())
        on_cuda = device.type == "cuda"
        sides = [torch.zeros(size, dtype=torch.uint8, pin_memory=on_cuda) for _ in range(2)]
        self._memory = torch.zeros(size, dtype=torch.uint8, device=device)
        self.device = _views(self._memory, layout)
        self._sides = [(side, {name: view.numpy() for name, view in _views(side, layout).items()}) for side in sides]
        self._events = [torch.cuda.Event() for _ in sides] if on_cuda else []
        self._current = 0
        self._ends = _ends(layout)

    def turn(self) -> None:
        """Switch sides for a new step."""
        self._current = 1 - self._current
        if self._events:
            self._events[self._current].synchronize()  # at once, unless the copy before the last one is under way

    @property
    def host(self) -> Mapping[str, np.ndarray]:
        """The arrays of this step."""
        return self._sides[self._current][1]

    def send(self, last: str, count: int) -> None:
        """Copy everything up to `count` elements of the array `last` to the device."""
        start, itemsize = self._ends[last]
        end = start + count * itemsize
        self._memory[:end].copy_(self._sides[self._current][0][:end], non_blocking=True)
        if self._events:
            self._events[self._current].record()


def _aligned(num_bytes: int) -> int:
    return -(-num_bytes // ALIGNMENT) * ALIGNMENT


def _views(memory: torch.Tensor, layout: Layout) -> dict[str, torch.Tensor]:
    views, start = {}, 0
    for name, (count, dtype) in layout.items():
        end = start + count * dtype.itemsize
        views[name] = memory[start:end].view(dtype)
        start += _aligned(count * dtype.itemsize)
    return views


def _ends(layout: Layout) -> dict[str, tuple[int, int]]:
    """By name: where an array begins, and the size of its elements."""
    found, start = {}, 0
    for name, (count, dtype) in layout.items():
        found[name] = (start, dtype.itemsize)
        start += _aligned(count * dtype.itemsize)
    return found
