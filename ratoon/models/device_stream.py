"""Ranges of files to a device, through a few pinned buffers: what is read is never in host memory as a whole.

Several threads may read at once. Each fills a buffer while the copies of others are under way.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from queue import SimpleQueue
from threading import Lock

import torch

from ratoon.models.damage import reading

CHUNK_BYTES = 16 * 2**20  # disks and buses are at their full speed with less
NUM_BUFFERS = 12  # more than the threads that fill them, because a copy ends some time after it was started


@contextmanager
def open_destination(device: torch.device) -> Iterator[DeviceStream | None]:
    """Where the tensors of a model go while it is built. None for a CPU: sources read into memory by themselves."""
    if device.type != "cuda":
        yield None
        return
    stream = DeviceStream(device)
    try:
        yield stream
    finally:
        stream.close()
        torch.cuda.empty_cache()  # parts that were joined, and numbers between: the KV cache takes what is free


class DeviceStream:
    """Implements Destination."""

    def __init__(self, device: torch.device, chunk_bytes: int = CHUNK_BYTES, num_buffers: int = NUM_BUFFERS) -> None:
        self.device = device
        self._chunk_bytes = chunk_bytes
        self._files: dict[Path, int] = {}
        self._lock = Lock()
        self._free: SimpleQueue[_Buffer] = SimpleQueue()
        self._to_allocate = num_buffers

    def read(self, file: Path, offset: int, num_bytes: int) -> torch.Tensor:
        """[num_bytes] uint8 on the device. The copy is ordered before what the device's current stream does next."""
        descriptor = self._open(file)
        target = torch.empty(num_bytes, dtype=torch.uint8, device=self.device)
        for start in range(0, num_bytes, self._chunk_bytes):
            size = min(self._chunk_bytes, num_bytes - start)
            buffer = self._take_buffer()
            try:
                with reading(str(file)):
                    buffer.fill(descriptor, offset + start, size)
                buffer.copy_to(target[start : start + size])
            finally:
                self._free.put(buffer)
        return target

    def close(self) -> None:
        """Reading has ended."""
        for descriptor in self._files.values():
            os.close(descriptor)
        self._files.clear()

    def _open(self, file: Path) -> int:
        with self._lock:
            if file not in self._files:
                with reading(str(file)):
                    self._files[file] = os.open(file, os.O_RDONLY | os.O_CLOEXEC)
            return self._files[file]

    def _take_buffer(self) -> _Buffer:
        """The one that was given back first. They are allocated when they are first needed: pinning takes time."""
        with self._lock:
            allocate = self._to_allocate > 0 and self._free.empty()
            self._to_allocate -= allocate
        return _Buffer(self._chunk_bytes, self.device) if allocate else self._free.get()


class _Buffer:
    def __init__(self, num_bytes: int, device: torch.device) -> None:
        self._device = device
        self._on_gpu = device.type == "cuda"
        self._memory = torch.empty(num_bytes, dtype=torch.uint8, pin_memory=self._on_gpu)
        self._bytes = self._memory.numpy().data
        self._copied = torch.cuda.Event() if self._on_gpu else None

    def fill(self, descriptor: int, offset: int, size: int) -> None:
        if self._copied is not None:
            self._copied.synchronize()  # of what it held before
        done = 0
        while done < size:
            count = os.preadv(descriptor, [self._bytes[done:size]], offset + done)
            if count == 0:
                raise EOFError(f"the file ends before byte {offset + size:,}")
            done += count

    def copy_to(self, target: torch.Tensor) -> None:
        target.copy_(self._memory[: len(target)], non_blocking=True)
        if self._copied is not None:
            self._copied.record(torch.cuda.current_stream(self._device))
