"""Arrays for a step on the host, and small copies to the device and back that wait for nothing."""

from __future__ import annotations

from collections import defaultdict, deque
from typing import ClassVar

import numpy as np
import torch


def indices_on(device: torch.device, indices: list[int]) -> torch.Tensor:
    """A short list of numbers as a device tensor, without waiting for the device (the host side is pinned)."""
    host = torch.tensor(indices, dtype=torch.int64, pin_memory=device.type == "cuda")
    return host.to(device, non_blocking=True)


class HostCopy:
    """A copy of a CUDA tensor in pinned memory, on its way. One thread starts it, another one may take it.

    The memory is kept for later copies: to free it, torch would record an event on the stream of the copy, from the
    thread that took it, and the stream may be capturing a graph by then.
    """

    _memory: torch.Tensor | None = None
    _kept: ClassVar[dict[int, deque[torch.Tensor]]] = defaultdict(deque)  # by size, a power of two

    def __init__(self, tensor: torch.Tensor) -> None:
        num_bytes = tensor.numel() * tensor.element_size()
        size = 1 << max(num_bytes - 1, 255).bit_length()
        try:
            self._memory = self._kept[size].pop()
        except IndexError:
            self._memory = torch.empty(size, dtype=torch.uint8, pin_memory=tensor.is_cuda)
        self._copy = self._memory[:num_bytes].view(tensor.dtype).view(tensor.shape)
        self._copy.copy_(tensor, non_blocking=True)
        # Now: later the device may have to wait for the host
        self._array = None if tensor.dtype is torch.bfloat16 else self._copy.numpy()
        self._copied: torch.cuda.Event | None = None
        if tensor.is_cuda:
            self._copied = torch.cuda.Event()
            self._copied.record()

    def __del__(self) -> None:
        # Also where it was never taken: a later copy is later on the stream as well.
        if self._memory is not None:
            self._kept[len(self._memory)].append(self._memory)

    def wait(self) -> None:
        if self._copied is not None:
            self._copied.synchronize()

    def to_numpy(self) -> np.ndarray:
        """What arrived; `wait` first, or for something later on the stream."""
        assert self._array is not None, "numpy has no such type"
        return self._array.copy()

    def to_tensor(self) -> torch.Tensor:
        """The same for types that numpy has not."""
        return self._copy.clone()


class StepBuffer:
    """Host memory that is allocated once: `array` is written with numpy, the model reads the same as a tensor; on
    another device a copy of it."""

    __slots__ = ("_device", "_tensor", "array")

    def __init__(self, *shape: int, dtype: torch.dtype, device: torch.device) -> None:
        self._device = None if device.type == "cpu" else device
        self._tensor = torch.zeros(shape, dtype=dtype)
        self.array: np.ndarray = self._tensor.numpy()

    def tensor(self, count: int) -> torch.Tensor:
        """The first `count` entries."""
        entries = self._tensor[:count]
        return entries if self._device is None else entries.to(self._device)
