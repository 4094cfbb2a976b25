"""Arrays for a step on the host, and small copies to the device and back that wait for nothing."""

from __future__ import annotations

import numpy as np
import torch


def indices_on(device: torch.device, indices: list[int]) -> torch.Tensor:
    """A short list of numbers as a device tensor, without waiting for the device (the host side is pinned)."""
    host = torch.tensor(indices, dtype=torch.int64, pin_memory=device.type == "cuda")
    return host.to(device, non_blocking=True)


def copy_to_host(tensor: torch.Tensor) -> tuple[torch.Tensor, torch.cuda.Event]:
    """A copy of a CUDA tensor in pinned memory, and the event after which it is there."""
    host = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
    host.copy_(tensor, non_blocking=True)
    copied = torch.cuda.Event()
    copied.record()
    return host, copied


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
