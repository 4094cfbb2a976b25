"""Arrays for a step on the host, and small copies to the device and back that wait for nothing."""

from __future__ import annotations

from collections import defaultdict, deque
from typing import ClassVar

import numpy as np
import torch

from ratoon.layers.torch_internals import record


def indices_on(device: torch.device, indices: list[int]) -> torch.Tensor:
    """A short list of numbers as a device tensor, without waiting for the device (the host side is pinned)."""
    host = torch.tensor(indices, dtype=torch.int64, pin_memory=device.type == "cuda")
    return host.to(device, non_blocking=True)


class PinnedMemory:
    """Memory for copies to the host, and the event at which one is there."""

    __slots__ = ("array", "copied", "words")

    def __init__(self, num_words: int, on_cuda: bool) -> None:
        self.words = torch.empty(num_words, dtype=torch.int32, pin_memory=on_cuda)
        self.array: np.ndarray = self.words.numpy()  # made now: later the device may have to wait for the host
        self.copied = torch.cuda.Event() if on_cuda else None


class HostCopy:
    """A copy of a CUDA tensor in pinned memory, on its way. One thread starts it, another one may take it.

    The memory is kept for later copies: to free it, torch would record an event on the stream of the copy, from the
    thread that took it, and the stream may be capturing a graph by then.
    """

    _memory: PinnedMemory | None = None
    _kept: ClassVar[dict[tuple[int, bool], deque[PinnedMemory]]] = defaultdict(deque)  # by words, a power of two

    def __init__(self, tensor: torch.Tensor) -> None:
        on_cuda, num_bytes = tensor.is_cuda, tensor.nbytes
        self._key = 1 << max((num_bytes + 3) // 4 - 1, 63).bit_length(), on_cuda
        try:
            self._memory = memory = self._kept[self._key].pop()
        except IndexError:
            self._memory = memory = PinnedMemory(*self._key)
        self._dtype, self._shape, self._num_bytes = tensor.dtype, tensor.shape, num_bytes
        self._view(memory).copy_(tensor, non_blocking=True)
        if memory.copied is not None:
            record(memory.copied)

    def __del__(self) -> None:
        # Also where it was never taken: a later copy is later on the stream as well.
        if self._memory is not None:
            self._kept[self._key].append(self._memory)

    def _view(self, memory: PinnedMemory) -> torch.Tensor:
        if self._dtype is torch.int32 and len(self._shape) == 1:  # tokens
            return memory.words[: self._shape[0]]
        return memory.words.view(torch.uint8)[: self._num_bytes].view(self._dtype).view(self._shape)

    def wait(self) -> None:
        """Until it is there."""
        if self._memory is not None and self._memory.copied is not None:
            self._memory.copied.synchronize()

    def to_numpy(self) -> np.ndarray:
        """What arrived."""
        self.wait()
        assert self._memory is not None
        if self._dtype is torch.int32 and len(self._shape) == 1:
            return self._memory.array[: self._shape[0]].copy()
        return self._view(self._memory).numpy().copy()

    def to_tensor(self) -> torch.Tensor:
        """Returns what arrived as a tensor, which may have a type that numpy has not."""
        self.wait()
        assert self._memory is not None
        return self._view(self._memory).clone()


class StepBuffer:
    """Host memory that is allocated once: `array` is written with numpy, the model reads the same as a tensor; on
    another device a copy of it."""

    __slots__ = ("_device", "_tensor", "array")

    def __init__(self, memory: torch.Tensor, device: torch.device) -> None:
        """`memory`: on the host."""
        self._device = None if device.type == "cpu" else device
        self._tensor = memory
        self.array: np.ndarray = memory.numpy()

    def parts(self) -> list[StepBuffer]:
        """One for each entry of the first dimension, in the same memory."""
        device = self._tensor.device if self._device is None else self._device
        return [StepBuffer(part, device) for part in self._tensor]

    def tensor(self, count: int) -> torch.Tensor:
        """The first `count` entries."""
        return self._bring(self._tensor[:count])

    def columns(self, count: int) -> torch.Tensor:
        """The first `count` columns of all rows."""
        return self._bring(self._tensor[:, :count])

    def _bring(self, entries: torch.Tensor) -> torch.Tensor:
        return entries if self._device is None else entries.to(self._device)
