"""Memory of blocks on their way between engines: the outbox of the one that sends, the inbox of the one that receives.

An outbox lies in memory without a name that other processes of the same user can map, so that a block does not pass
through a socket on the way to another engine of the host. It is gone when the last process that has mapped it ends,
however that ends. Each block has a checksum over its key and its bytes. What is not here: who gets what, and when.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import threading
from collections import OrderedDict
from collections.abc import Sequence
from contextlib import suppress
from typing import NamedTuple

import xxhash

from ratoon.distributed.block_bytes import copy_bytes, joined

NAME = "ratoon-kv-outbox"
CHECKSUM_BYTES = 16


def checksum_of(key: bytes, content: memoryview | bytearray | bytes) -> bytes:
    digest = xxhash.xxh3_128(key)
    digest.update(content)
    return digest.digest()


class Kept(NamedTuple):
    slot: int
    checksum: bytes


class Outbox:
    """Blocks that are kept until all transfers that have them are over. Calls come from several threads."""

    def __init__(self, block_bytes: int, max_bytes: int) -> None:
        self.block_bytes = block_bytes
        self.num_slots = max(1, max_bytes // block_bytes)
        self._descriptor = os.memfd_create(NAME, os.MFD_CLOEXEC)
        os.ftruncate(self._descriptor, self.num_slots * block_bytes)  # pages are taken when they are written
        self._memory = mmap.mmap(self._descriptor, self.num_slots * block_bytes)
        self._lock = threading.Lock()
        self._free = list(range(self.num_slots - 1, -1, -1))
        self._kept: dict[bytes, Kept] = {}
        self._users: dict[bytes, set[str]] = {}  # names of transfers, by key

    @property
    def path(self) -> str:
        """Where other processes of this host and user open the memory."""
        return f"/proc/{os.getpid()}/fd/{self._descriptor}"

    @property
    def memory(self) -> tuple[int, int]:
        """The address of the first slot in this process, and the bytes of all slots."""
        return ctypes.addressof(ctypes.c_char.from_buffer(self._memory)), len(self._memory)

    @property
    def num_kept(self) -> int:
        return len(self._kept)

    def find(self, key: bytes) -> Kept | None:
        return self._kept.get(key)

    def use(self, key: bytes, name: str) -> None:
        """A transfer has this block, which may not be kept yet."""
        with self._lock:
            self._users.setdefault(key, set()).add(name)

    def keep(self, key: bytes, parts: Sequence[memoryview]) -> bool:
        """Copies a block. False: no transfer has it, or there is no room."""
        with self._lock:
            if key in self._kept:
                return True
            if key not in self._users or not self._free:
                return False
            slot = self._free.pop()
        place = self.view(slot)
        start = 0
        for part in parts:
            copy_bytes(place[start : start + part.nbytes], part)
            start += part.nbytes
        kept = Kept(slot, checksum_of(key, place))
        with self._lock:
            if key not in self._users:  # its transfers are over
                self._free.append(slot)
                return False
            self._kept[key] = kept
        return True

    def view(self, slot: int) -> memoryview:
        return memoryview(self._memory)[slot * self.block_bytes : (slot + 1) * self.block_bytes]

    def release(self, key: bytes, name: str) -> None:
        """A transfer does not need this block any more."""
        with self._lock:
            users = self._users.get(key)
            if users is None:
                return
            users.discard(name)
            if not users:
                del self._users[key]
                kept = self._kept.pop(key, None)
                if kept is not None:
                    self._free.append(kept.slot)

    def close(self) -> None:
        with suppress(OSError):
            os.close(self._descriptor)
        with suppress(BufferError):  # a block is being copied in another thread
            self._memory.close()


class MappedOutbox:
    """The outbox of another engine of this host, to be read. Raises OSError if it can't be mapped."""

    def __init__(self, path: str, block_bytes: int) -> None:
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        try:
            if NAME not in os.readlink(path):
                raise OSError(f"{path} is no outbox")
            self._num_bytes = os.fstat(descriptor).st_size
            self._memory = mmap.mmap(descriptor, self._num_bytes, prot=mmap.PROT_READ)
        finally:
            os.close(descriptor)
        self._block_bytes = block_bytes

    def read(self, slot: int) -> bytearray:
        start = slot * self._block_bytes
        if not 0 <= start <= self._num_bytes - self._block_bytes:
            return bytearray()
        return joined([memoryview(self._memory)[start : start + self._block_bytes]])

    def close(self) -> None:
        with suppress(BufferError):
            self._memory.close()


class Inbox:
    """Blocks that have come and are not loaded yet. Those that wait for the longest time give way."""

    def __init__(self, max_bytes: int) -> None:
        self._max_bytes = max_bytes
        self._num_bytes = 0
        self._blocks: OrderedDict[bytes, bytearray] = OrderedDict()
        self._lock = threading.Lock()

    def __contains__(self, key: bytes) -> bool:
        return key in self._blocks

    def __len__(self) -> int:
        return len(self._blocks)

    def put(self, key: bytes, content: bytearray) -> None:
        with self._lock:
            self._remove(key)
            self._blocks[key] = content
            self._num_bytes += len(content)
            while self._num_bytes > self._max_bytes and len(self._blocks) > 1:
                self._remove(next(iter(self._blocks)))

    def take(self, key: bytes) -> bytearray | None:
        """Returns a block, which is not here any more then: it goes to host memory and to the device."""
        with self._lock:
            content = self._blocks.get(key)
            self._remove(key)
            return content

    def _remove(self, key: bytes) -> None:
        content = self._blocks.pop(key, None)
        if content is not None:
            self._num_bytes -= len(content)
