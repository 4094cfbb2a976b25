"""Sums, concatenations and exchanges of rows over ranks that are processes of one host, by kernels
(layers/native/ranks.c).

The memory has no name: the first rank makes it and hands its descriptor to the others through a socket, so that it is
gone when the last of them ends, however that ends. Linux alone has both.
"""

from __future__ import annotations

import ctypes
import hashlib
import mmap
import os
import secrets
import socket
import struct
import weakref
from collections.abc import Sequence
from pathlib import Path

import torch

from ratoon.core.errors import DeviceLostError, EngineError
from ratoon.layers.native import Kernels, library
from ratoon.layers.native.recording import RANK_LOST, new_floats
from ratoon.layers.shard import Collective

Tensor = torch.Tensor

SECONDS_TO_WAIT = 120.0  # of a call, for another rank: longer than a process may be stopped

_CREDENTIALS = struct.Struct("3i")  # process, user, group
_NAME_BYTES = 16


class SharedMemoryCollective(Collective):
    """The collective of ranks on one host. A sum adds the ranks' numbers in their order, each element by itself: it has
    the same bits on every rank and in any batch."""

    can_be_captured = False
    can_be_recorded = True

    def __init__(self, descriptor: int, rank: int, world_size: int, seconds: float = SECONDS_TO_WAIT) -> None:
        """`descriptor`: memory for so many ranks, all zero at first, which may be closed afterwards."""
        kernels = library()
        assert kernels is not None
        self._kernels, self._rank = kernels, rank
        self._memory = mmap.mmap(descriptor, kernels.ratoon_group_bytes(world_size))
        address = ctypes.addressof(ctypes.c_char.from_buffer(self._memory))
        self._group = kernels.ratoon_open_group(address, rank, world_size, int(seconds * 1e9))
        if not self._group:
            raise EngineError(f"rank {rank} of {world_size} can't be one of a group in shared memory")
        weakref.finalize(self, kernels.ratoon_close_group, self._group).atexit = False

    def all_reduce(self, x: Tensor) -> Tensor:
        if x.dtype != torch.float32:
            return x.copy_(self.all_reduce(x.float()))
        x = x.contiguous()
        if self._kernels.ratoon_all_reduce(self._group, x.data_ptr(), x.numel()):
            raise DeviceLostError(RANK_LOST)
        return x

    def all_gather(self, x: Tensor, size: int) -> Tensor:
        if x.dtype != torch.float32:
            return self.all_gather(x.float(), size).to(x.dtype)
        x = x if x.stride(1) == 1 else x.contiguous()
        y = new_floats(len(x), size)
        if self._kernels.ratoon_all_gather(self._group, x.data_ptr(), x.stride(0), len(x), size, y.data_ptr()):
            raise DeviceLostError(RANK_LOST)
        return y

    def all_to_all(self, x: Tensor, counts: Sequence[Sequence[int]]) -> Tensor:
        if x.dtype != torch.float32:
            return self.all_to_all(x.float(), counts).to(x.dtype)
        x, table = x.contiguous(), torch.tensor(counts, dtype=torch.int64)
        y = new_floats(sum(of_rank[self._rank] for of_rank in counts), x.shape[1])
        if self._kernels.ratoon_all_to_all(self._group, x.data_ptr(), x.shape[1], table.data_ptr(), y.data_ptr()):
            raise DeviceLostError(RANK_LOST)
        return y


def new_memory(kernels: Kernels, world_size: int) -> int:
    """A descriptor of memory for this many ranks."""
    descriptor = os.memfd_create("ratoon-ranks")
    os.ftruncate(descriptor, kernels.ratoon_group_bytes(world_size))
    return descriptor


def identity_of_host() -> bytes:
    """Returns bytes that are the same in processes that can share memory: those of one user of one running system, in
    one network namespace, with the same kernels. Where there are no kernels, no two are the same."""
    kernels = library()
    if kernels is None or not hasattr(os, "memfd_create"):
        return secrets.token_bytes(32)
    boot = Path("/proc/sys/kernel/random/boot_id").read_bytes()
    namespace = os.stat("/proc/self/ns/net").st_ino
    about = [boot, str(namespace).encode(), str(os.getuid()).encode(), kernels.ratoon_sources()]
    return hashlib.blake2b(b"\0".join(about), digest_size=32).digest()


class MemoryHandover:
    """The first rank's memory on its way to the others: a socket without a file, under a name that only ranks know."""

    def __init__(self) -> None:
        self.name = secrets.token_bytes(_NAME_BYTES)

    @staticmethod
    def _address(name: bytes) -> bytes:
        return b"\0ratoon-ranks-" + name.hex().encode()

    def listen(self) -> socket.socket:
        """Returns the listening socket. It is called before another rank learns the name."""
        listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        listener.bind(self._address(self.name))
        listener.listen()
        return listener

    @staticmethod
    def give(listener: socket.socket, descriptor: int, count: int, seconds: float) -> None:
        """Hands the memory to so many ranks."""
        listener.settimeout(seconds)
        while count:
            connection, _ = listener.accept()
            with connection:
                found = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
                if _CREDENTIALS.unpack(found)[1] != os.getuid():
                    continue
                socket.send_fds(connection, [b"m"], [descriptor])
                count -= 1

    @classmethod
    def take(cls, name: bytes, seconds: float) -> int:
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as connection:
            connection.settimeout(seconds)
            connection.connect(cls._address(name))
            _, descriptors, _, _ = socket.recv_fds(connection, 1, 1)
        if not descriptors:
            raise EngineError("the first rank is gone")
        return descriptors[0]
