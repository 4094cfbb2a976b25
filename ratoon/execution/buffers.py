"""Arrays on the host and on the device: written with numpy, read by the model, allocated once."""

from __future__ import annotations

from collections import deque

import numpy as np
import torch


def indices_on(device: torch.device, indices: list[int]) -> torch.Tensor:
    """A short list of numbers as a device tensor, without waiting for the device (the host side is pinned)."""
    host = torch.tensor(indices, dtype=torch.int64, pin_memory=device.type == "cuda")
    return host.to(device, non_blocking=True)


class StepBuffer:
    """`array` and a host tensor share memory. On a CPU the device tensor is the host tensor; elsewhere it is a copy
    that `to_device` updates asynchronously (the host side is pinned). There are then two host sides, to which steps
    write in turn, because a copy in flight still reads the other one."""

    __slots__ = ("_device", "_host", "_other", "array")

    def __init__(self, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> None:
        on_cpu, pinned = device.type == "cpu", device.type == "cuda"
        self._host = torch.zeros(shape, dtype=dtype, pin_memory=pinned)
        self._other = self._host if on_cpu else torch.zeros(shape, dtype=dtype, pin_memory=pinned)
        self._device = self._host if on_cpu else torch.zeros(shape, dtype=dtype, device=device)
        self.array: np.ndarray = self._host.numpy()

    def turn(self) -> None:
        """Switch sides for a new step."""
        if self._other is not self._host:
            self._host, self._other = self._other, self._host
            self.array = self._host.numpy()

    def to_device(self, count: int) -> torch.Tensor:
        """The first `count` entries, on the device."""
        if self._device is not self._host:
            self._device[:count].copy_(self._host[:count], non_blocking=True)
        return self._device[:count]


class StepBuffers:
    """The buffers of all inputs of a step. Call `turn` before a step writes to them, and `copied` after its last
    copy."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._all: list[StepBuffer] = []
        # Recorded after the copies of the last two steps
        self._copied: deque[torch.cuda.Event] = deque(maxlen=2)

    def make(self, *shape: int, dtype: torch.dtype) -> StepBuffer:
        buffer = StepBuffer(shape, dtype, self._device)
        self._all.append(buffer)
        return buffer

    def turn(self) -> None:
        if len(self._copied) == 2:
            self._copied[0].synchronize()  # the step that used this side
        for buffer in self._all:
            buffer.turn()

    def copied(self) -> None:
        if self._device.type == "cuda":
            event = torch.cuda.Event()
            event.record()
            self._copied.append(event)
