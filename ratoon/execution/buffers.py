"""Arrays that live on the host and on the device: written with numpy, read by the model, allocated once."""

from __future__ import annotations

import numpy as np
import torch


def indices_on(device: torch.device, indices: list[int]) -> torch.Tensor:
    """A short list of numbers as a device tensor, without waiting for the device (the host side is pinned)."""
    host = torch.tensor(indices, dtype=torch.int64, pin_memory=device.type == "cuda")
    return host.to(device, non_blocking=True)


class StepBuffer:
    """`array` and the host tensor share memory. On a CPU the device tensor is the host tensor; elsewhere it is a copy
    that `to_device` brings up to date without waiting (the host side is pinned)."""

    __slots__ = ("_device", "_host", "array")

    def __init__(self, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> None:
        self._host = torch.zeros(shape, dtype=dtype, pin_memory=device.type == "cuda")
        self._device = self._host if device.type == "cpu" else torch.zeros(shape, dtype=dtype, device=device)
        self.array: np.ndarray = self._host.numpy()

    def to_device(self, count: int) -> torch.Tensor:
        """The first `count` entries, on the device."""
        if self._device is not self._host:
            self._device[:count].copy_(self._host[:count], non_blocking=True)
        return self._device[:count]
