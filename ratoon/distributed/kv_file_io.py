"""How the bytes of files of blocks are read and written (kv_files.py): by calls of the system, or by the POSIX backend
of NIXL, which hands them to the asynchronous interfaces of Linux.

What the system has in memory is read by one call of the CPU kernels, where these are built for Linux: otherwise a block
of 2 MiB takes the interpreter a dozen times, for which readers wait in turn, and passes through the processor twice.

One object is used by one thread. What goes wrong is an OSError. NIXL is an extra of the package (`ratoon[nixl]`), and
is imported where it is asked for.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import secrets
import time
from collections.abc import Sequence
from typing import Any, Protocol

from ratoon.core.errors import ConfigError
from ratoon.layers.native import BlockPart, library

SYSTEM, NIXL = FILE_IO = ("system", "nixl")
BACKEND = "POSIX"
SECONDS_BETWEEN_LOOKS = 0.0002

BLOCK_UNKNOWN = 2  # of kernels.h

Buffer = bytearray | memoryview
Bytes = bytes | Buffer


class FileIO(Protocol):
    def write(self, handle: int, parts: Sequence[Bytes]) -> None:
        """Writes all parts, one after another, to an empty file."""
        ...

    def read(self, handle: int, parts: Sequence[Buffer]) -> bool:
        """Fills all parts with the bytes of a file. False: it has more or fewer."""
        ...

    def read_cached_block(self, handle: int, head: bytes, key: bytes, parts: Sequence[memoryview]) -> bool | None:
        """Fills all parts with the content of an open file, which has the right size, if no device has to be waited
        for. `head`: what the file begins with, before the key. False: it is not what it should be. None: that is not
        known, and some parts may have been written."""
        ...


class SystemIO:
    def write(self, handle: int, parts: Sequence[Bytes]) -> None:
        """A write may be cut short, for example where the disk is full: the next one then says why."""
        left = [memoryview(part) for part in parts]
        while left:
            num_written = os.writev(handle, left)
            while left and num_written >= left[0].nbytes:
                num_written -= left.pop(0).nbytes
            if left:
                left[0] = left[0][num_written:]

    def read(self, handle: int, parts: Sequence[Buffer]) -> bool:
        left = [memoryview(part) for part in parts if part]
        while left:
            num_read = os.readv(handle, left)
            if not num_read:
                return False
            while left and num_read >= left[0].nbytes:
                num_read -= left.pop(0).nbytes
            if left:
                left[0] = left[0][num_read:]
        return not os.read(handle, 1)

    def read_cached_block(self, handle: int, head: bytes, key: bytes, parts: Sequence[memoryview]) -> bool | None:
        kernels = library()
        if kernels is None:
            return None
        listed = (BlockPart * len(parts))(*[BlockPart(_address_of(part), part.nbytes) for part in parts])
        outcome = kernels.functions["ratoon_read_block"](handle, head + key, len(key), listed, len(parts))
        return None if outcome == BLOCK_UNKNOWN else bool(outcome)


def _address_of(part: memoryview) -> int:
    return ctypes.addressof(ctypes.c_char.from_buffer(part))


class NixlIO:
    """The bytes of a file pass through memory that is registered with NIXL, and is made larger when a file needs it."""

    def __init__(self) -> None:
        from nixl._api import nixl_agent, nixl_agent_config

        self._agent = nixl_agent(f"ratoon-files-{secrets.token_hex(8)}", nixl_agent_config(backends=[]))
        self._agent.create_backend(BACKEND)
        self._memory: mmap.mmap | None = None
        self._registered: Any = None
        self._address = 0

    def write(self, handle: int, parts: Sequence[Bytes]) -> None:
        size = sum(len(part) for part in parts)
        memory = self._memory_of(size)
        start = 0
        for part in parts:
            memory[start : start + len(part)] = part
            start += len(part)
        self._move("WRITE", handle, size)
        if os.fstat(handle).st_size != size:
            raise OSError(f"NIXL has written {os.fstat(handle).st_size} of {size} bytes")

    def read(self, handle: int, parts: Sequence[Buffer]) -> bool:
        size = sum(len(part) for part in parts)
        if os.fstat(handle).st_size != size:
            return False
        memory = self._memory_of(size)
        self._move("READ", handle, size)
        start = 0
        for part in parts:
            part[:] = memory[start : start + len(part)]
            start += len(part)
        return True

    def read_cached_block(self, handle: int, head: bytes, key: bytes, parts: Sequence[memoryview]) -> None:
        """NIXL does not say what is in memory."""

    def _memory_of(self, size: int) -> mmap.mmap:
        if self._memory is None or len(self._memory) < size:
            if self._registered is not None:
                self._agent.deregister_memory(self._registered)
            self._memory = mmap.mmap(-1, size)
            self._address = ctypes.addressof(ctypes.c_char.from_buffer(self._memory))
            self._registered = self._agent.register_memory([(self._address, size, 0, "")], "DRAM", backends=[BACKEND])
        return self._memory

    def _move(self, operation: str, handle: int, size: int) -> None:
        agent = self._agent
        try:
            file = agent.register_memory([(0, size, handle, "")], "FILE", backends=[BACKEND])
            try:
                own = agent.get_xfer_descs([(self._address, size, 0)], "DRAM")
                others = agent.get_xfer_descs([(0, size, handle)], "FILE")
                transfer = agent.initialize_xfer(operation, own, others, agent.name)
                try:
                    state = agent.transfer(transfer)
                    while state == "PROC":  # also for long: the memory is not free before
                        time.sleep(SECONDS_BETWEEN_LOOKS)
                        state = agent.check_xfer_state(transfer)
                finally:
                    agent.release_xfer_handle(transfer)
            finally:
                agent.deregister_memory(file)
        except OSError:
            raise
        except Exception as error:  # of the library, which has classes of its own
            raise OSError(f"NIXL can't {operation.lower()} a file: {error}") from error
        if state != "DONE":
            raise OSError(f"NIXL can't {operation.lower()} a file: its state is {state}")


def open_file_io(name: str) -> FileIO:
    """For the thread that calls this."""
    return NixlIO() if name == NIXL else SystemIO()


def verify_file_io(name: object) -> str:
    """Returns the name of a way to read and write files. ConfigError: there is none, or it can't be had here."""
    if name not in FILE_IO:
        raise ConfigError("kv_files_io", f"{name!r} is unknown", f"one of these: {', '.join(FILE_IO)}")
    if name == NIXL:
        try:
            NixlIO()
        except ImportError as error:
            raise ConfigError(
                "kv_files_io", f"NIXL can't be imported ({error})", "pip install 'ratoon[nixl]'"
            ) from None
        except Exception as error:  # of the library: it was built without the backend, or the system refuses it
            raise ConfigError("kv_files_io", f"NIXL has no {BACKEND} backend here ({error})", SYSTEM) from None
    return str(name)
