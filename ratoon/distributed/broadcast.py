"""A ring of messages in shared memory: one process writes, several read, and each reader gets all of them in order.

The memory has no name: it is inherited by its descriptor, and is gone when the last process that has it ends, however
that ends. A slot is written when every reader has released it. The semaphores of the C library order the accesses, let
a process sleep, and work between processes. What does not fit into a slot travels in memory of its own, whose
descriptor is sent through a socket. Linux alone has all of these.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import mmap
import os
import socket
import struct
import time
from collections.abc import Iterator, Sequence

from ratoon.core.errors import EngineError
from ratoon.core.wire import Buffer

SLOT_BYTES = 1 << 16
NUM_SLOTS = 16
SPIN_SECONDS = 50e-6  # that a reader looks for the next message before it sleeps
LONGEST_SLEEP = 0.5  # seconds, after which a waiting process looks whether its time is over
MAX_FRAMES = 4096  # of a message

_SEMAPHORE_BYTES = 64  # at least a sem_t of any C library, and a line of the cache
_HEAD = struct.Struct("<II")  # whether the message is elsewhere, and the number of its frames
_HERE, _ELSEWHERE = 0, 1
_SIZE = struct.Struct("<Q")


class RingTimeoutError(EngineError):
    """A process has not read, or nothing was written, for too long."""


class _Timespec(ctypes.Structure):
    _fields_ = (("seconds", ctypes.c_long), ("nanoseconds", ctypes.c_long))


class Semaphores:
    """Semaphores in shared memory, by number."""

    def __init__(self, memory: mmap.mmap, count: int) -> None:
        self._library = ctypes.CDLL(None, use_errno=True)
        first = ctypes.addressof(ctypes.c_char.from_buffer(memory))
        self._addresses = [ctypes.c_void_p(first + _SEMAPHORE_BYTES * number) for number in range(count)]

    def begin(self, number: int, value: int) -> None:
        """To be called once, by the process that made the memory."""
        self._check(self._library.sem_init(self._addresses[number], 1, value))

    def post(self, number: int) -> None:
        self._check(self._library.sem_post(self._addresses[number]))

    def wait(self, number: int, seconds: float, spin_seconds: float = 0.0) -> bool:
        """Whether there was a post within this time."""
        library, address = self._library, self._addresses[number]
        now = time.monotonic()
        deadline, end_of_spin = now + seconds, now + min(spin_seconds, seconds)
        while True:
            if library.sem_trywait(address) == 0:
                return True
            now = time.monotonic()
            if now >= deadline:
                return False
            if now >= end_of_spin and self._sleep(address, min(deadline - now, LONGEST_SLEEP)):
                return True

    def _sleep(self, address: ctypes.c_void_p, seconds: float) -> bool:
        end = time.clock_gettime_ns(time.CLOCK_REALTIME) + int(seconds * 1e9)
        until = _Timespec(end // 10**9, end % 10**9)
        if self._library.sem_timedwait(address, ctypes.byref(until)) == 0:
            return True
        if ctypes.get_errno() not in (errno.ETIMEDOUT, errno.EINTR):
            self._check(-1)
        return False

    @staticmethod
    def _check(result: int) -> None:
        if result != 0:
            number = ctypes.get_errno()
            raise OSError(number, os.strerror(number))


class Ring:
    """The memory of both sides: for each reader a semaphore that counts messages and one that counts free slots, then
    the slots."""

    def __init__(self, descriptor: int, num_readers: int, num_slots: int, slot_bytes: int) -> None:
        self.num_readers, self.num_slots, self.slot_bytes = num_readers, num_slots, slot_bytes
        self._first = 2 * num_readers * _SEMAPHORE_BYTES
        self.memory = mmap.mmap(descriptor, self.num_bytes(num_readers, num_slots, slot_bytes))
        self.semaphores = Semaphores(self.memory, 2 * num_readers)

    @staticmethod
    def num_bytes(num_readers: int, num_slots: int, slot_bytes: int) -> int:
        return 2 * num_readers * _SEMAPHORE_BYTES + num_slots * slot_bytes

    def slot(self, number: int) -> memoryview:
        start = self._first + number % self.num_slots * self.slot_bytes
        return memoryview(self.memory)[start : start + self.slot_bytes]


class RingWriter:
    """`fileno` and `sides` are for the readers' processes to inherit: the memory, and a socket for each."""

    def __init__(self, num_readers: int, num_slots: int = NUM_SLOTS, slot_bytes: int = SLOT_BYTES) -> None:
        self.fileno = os.memfd_create("ratoon-plans")
        os.ftruncate(self.fileno, Ring.num_bytes(num_readers, num_slots, slot_bytes))
        self._ring = Ring(self.fileno, num_readers, num_slots, slot_bytes)
        for reader in range(num_readers):
            self._ring.semaphores.begin(2 * reader, 0)
            self._ring.semaphores.begin(2 * reader + 1, num_slots)
        pairs = [socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET) for _ in range(num_readers)]
        self._sockets = [ours for ours, _ in pairs]
        self.sides = [theirs for _, theirs in pairs]
        self._num_written = 0

    def write(self, frames: Sequence[Buffer], seconds: float) -> None:
        """Raises RingTimeoutError if a reader has released no slot within this time. The ring can't be used then: other
        readers may have one free already."""
        ring = self._ring
        deadline = time.monotonic() + seconds
        for reader in range(ring.num_readers):
            if not ring.semaphores.wait(2 * reader + 1, max(0.0, deadline - time.monotonic())):
                raise RingTimeoutError(f"worker {reader} has read nothing for {seconds:g} seconds")
        if self._put(ring.slot(self._num_written), frames, _HERE) is None:
            self._send_elsewhere(ring.slot(self._num_written), frames)
        self._num_written += 1
        for reader in range(ring.num_readers):
            ring.semaphores.post(2 * reader)

    def _send_elsewhere(self, slot: memoryview, frames: Sequence[Buffer]) -> None:
        size = _HEAD.size + sum(_SIZE.size + memoryview(frame).nbytes for frame in frames)
        descriptor = os.memfd_create("ratoon-message")
        try:
            os.ftruncate(descriptor, size)
            with mmap.mmap(descriptor, size) as memory, memoryview(memory) as whole:
                self._put(whole, frames, _HERE)
            for each in self._sockets:
                socket.send_fds(each, [_SIZE.pack(size)], [descriptor])
        finally:
            os.close(descriptor)
        _HEAD.pack_into(slot, 0, _ELSEWHERE, 0)

    @staticmethod
    def _put(memory: memoryview, frames: Sequence[Buffer], kind: int) -> int | None:
        """The bytes that were written; None: there is no room."""
        views = [memoryview(frame).cast("B") for frame in frames]
        start = _HEAD.size + _SIZE.size * len(views)
        end = start + sum(view.nbytes for view in views)
        if end > len(memory) or len(views) > MAX_FRAMES:
            return None
        _HEAD.pack_into(memory, 0, kind, len(views))
        for number, view in enumerate(views):
            _SIZE.pack_into(memory, _HEAD.size + _SIZE.size * number, view.nbytes)
            memory[start : start + view.nbytes] = view
            start += view.nbytes
        return end

    def close_sides(self) -> None:
        """The readers' ends, once their processes have them."""
        for side in self.sides:
            side.close()

    def close(self) -> None:
        self.close_sides()
        for each in self._sockets:
            each.close()
        os.close(self.fileno)


class RingReader:
    """The reader of this number. `side`: its socket."""

    def __init__(
        self,
        descriptor: int,
        number: int,
        num_readers: int,
        side: socket.socket,
        num_slots: int = NUM_SLOTS,
        slot_bytes: int = SLOT_BYTES,
        spin_seconds: float = SPIN_SECONDS,
    ) -> None:
        self._ring = Ring(descriptor, num_readers, num_slots, slot_bytes)
        self._number = number
        self._side = side
        self._spin_seconds = spin_seconds
        self._num_read = 0

    @contextlib.contextmanager
    def read(self, seconds: float) -> Iterator[list[Buffer]]:
        """The frames of the next message. The first is valid within the `with` block alone, where it is decoded; the
        others are copies. Raises RingTimeoutError."""
        semaphores = self._ring.semaphores
        if not semaphores.wait(2 * self._number, seconds, self._spin_seconds):
            raise RingTimeoutError(f"no plan has come for {seconds:g} seconds")
        slot = self._ring.slot(self._num_read)
        self._num_read += 1
        try:
            kind, _ = _HEAD.unpack_from(slot)
            if kind == _HERE:
                yield self._frames(slot)
            else:
                with self._elsewhere() as memory:
                    yield self._frames(memory)
        finally:
            semaphores.post(2 * self._number + 1)

    @contextlib.contextmanager
    def _elsewhere(self) -> Iterator[memoryview]:
        message, descriptors, _, _ = socket.recv_fds(self._side, _SIZE.size, 1)
        if not descriptors:
            raise EngineError("the writer of plans is gone")
        try:
            (size,) = _SIZE.unpack(message)
            memory = mmap.mmap(descriptors[0], size)
        finally:
            os.close(descriptors[0])
        yield memoryview(memory)

    @staticmethod
    def _frames(memory: memoryview) -> list[Buffer]:
        _, count = _HEAD.unpack_from(memory)
        start = _HEAD.size + _SIZE.size * count
        frames: list[Buffer] = []
        for number in range(count):
            (size,) = _SIZE.unpack_from(memory, _HEAD.size + _SIZE.size * number)
            frame = memory[start : start + size]
            frames.append(bytes(frame) if number else frame)
            start += size
        return frames
