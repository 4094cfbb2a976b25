"""Several arrays in one piece of memory: written with numpy on the host, and brought to the device at once."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import torch

from ratoon.layers.torch_internals import record

ALIGNMENT = 16  # bytes; kernels load aligned addresses faster
WORD = torch.int32

Layout = Mapping[str, tuple[int, torch.dtype]]  # by name: number of elements, type


class PackedBuffer:
    """The device's side keeps its address. The host's side is pinned, so that kernels can read it where it lies, and
    there are two of them, to which steps write in turn: a kernel that has not run yet still reads the other one."""

    def __init__(self, layout: Layout, device: torch.device) -> None:
        size = sum(_aligned(count * dtype.itemsize) for count, dtype in layout.values())
        on_cuda = device.type == "cuda"
        sides = [torch.zeros(size, dtype=torch.uint8, pin_memory=on_cuda) for _ in range(2)]
        memory = torch.zeros(size, dtype=torch.uint8, device=device)
        self.device = _views(memory, layout)
        self.device_words = memory.view(WORD)  # all of it
        self._sides = [
            (side.view(WORD), {name: view.numpy() for name, view in _views(side, layout).items()}) for side in sides
        ]
        self._events = [torch.cuda.Event() for _ in sides] if on_cuda else []
        self._current = 0
        self._is_noted = True  # that what reads the current side is launched
        self._starts = _starts(layout)
        self._ends = dict(zip(layout, [*list(self._starts.values())[1:], size // WORD.itemsize]))

    def turn(self) -> None:
        """Switch sides for a new step."""
        self.note_read()  # of a step that failed
        self._is_noted = False
        self._current = 1 - self._current
        if self._events:
            self._events[self._current].synchronize()  # at once, unless the step before the last one has not begun

    @property
    def host(self) -> Mapping[str, np.ndarray]:
        """The arrays of this step."""
        return self._sides[self._current][1]

    @property
    def host_words(self) -> torch.Tensor:
        """All of the host's memory of this step."""
        return self._sides[self._current][0]

    def start_of(self, name: str) -> int:
        """Where an array begins, in words."""
        return self._starts[name]

    def end_of(self, name: str) -> int:
        """Where the next one begins."""
        return self._ends[name]

    def note_read(self) -> None:
        """What reads the host's side in this step is launched. May be said once the rest of the step is, too: the
        device has work then."""
        if self._events and not self._is_noted:
            record(self._events[self._current])
        self._is_noted = True


def _aligned(num_bytes: int) -> int:
    return -(-num_bytes // ALIGNMENT) * ALIGNMENT


def _views(memory: torch.Tensor, layout: Layout) -> dict[str, torch.Tensor]:
    views, start = {}, 0
    for name, (count, dtype) in layout.items():
        end = start + count * dtype.itemsize
        views[name] = memory[start:end].view(dtype)
        start += _aligned(count * dtype.itemsize)
    return views


def _starts(layout: Layout) -> dict[str, int]:
    """By name: where an array begins, in words."""
    found, start = {}, 0
    for name, (count, dtype) in layout.items():
        found[name] = start // WORD.itemsize
        start += _aligned(count * dtype.itemsize)
    return found
