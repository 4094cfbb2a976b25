"""Recorded passes: the kernels that a pass called, with their arguments, replayed by one call. What a CUDA graph is on
a GPU, this is on a CPU.

A recording is right for a later pass if that would make the same calls. So all memory has to stay where it is: what is
allocated meanwhile (`new_floats`, `new_bytes`) comes from an arena that is never freed, and the caller's own inputs
have fixed places. And nothing but kernels may compute: an operation of torch other than a view or a plain copy, or a
kernel without a recordable form, is an obstacle, and then there is no program.
"""

from __future__ import annotations

import ctypes
import struct
import threading
import weakref
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch

from ratoon.core.errors import DeviceLostError
from ratoon.layers.native import Kernels, library
from ratoon.layers.native.pages import new_pages
from ratoon.layers.torch_internals import QuickDispatchMode

Tensor = torch.Tensor

ALIGNMENT = 64  # bytes: a cache line, and the widest vector
CHUNK_BYTES = 1 << 20  # that an arena grows by at least; larger chunks are powers of two
# From here on an allocator returns what is freed to the system, and each layer of a prompt would have its pages cleared
# and mapped anew: a fifth of the time of a prompt.
LARGE_BYTES = 128 << 10
RANK_LOST = "another rank did not come to a sum in time"
NO_SUCH_ROW = "an id is outside of the table, which is the vocabulary's or that of positions"

_open: Recording | None = None  # one at a time in a process
_lock = threading.Lock()


def new_floats(rows: int, width: int) -> Tensor:
    """[rows, width], not initialised."""
    recording = _open
    if recording is not None and recording.is_of_this_thread:
        return recording.arena.take_floats(rows, width)
    if 4 * rows * width < LARGE_BYTES:
        return torch.empty(rows, width, dtype=torch.float32)
    with _large_lock:
        return _large.take_floats(rows, width)


def new_bytes(count: int) -> Tensor:
    """[count] uint8, not initialised; aligned as floats are."""
    recording = _open
    if recording is not None and recording.is_of_this_thread:
        return recording.arena.take(count)
    if count < LARGE_BYTES:
        return torch.empty(count, dtype=torch.uint8)
    with _large_lock:
        return _large.take(count)


# The name of a kernel that can be recorded, and its arguments as words
RecordedCall = tuple[str, list[int]]


class Program:
    """The calls of a recorded pass."""

    def __init__(self, kernels: Kernels, calls: Sequence[RecordedCall]) -> None:
        self.names = [name for name, _ in calls]
        self._words = [np.array(words, np.int64) for _, words in calls]
        pairs = [(kernels.words[name], words.ctypes.data) for (name, _), words in zip(calls, self._words, strict=True)]
        self._calls = np.array(pairs, np.uint64).reshape(-1, 2)
        self._calls_pointer = self._calls.ctypes.data
        self._run = kernels.functions["ratoon_run_program"]
        self._time = kernels.functions["ratoon_time_program"]

    def __len__(self) -> int:
        return len(self.names)

    def run(self) -> None:
        failed = self._run(self._calls_pointer, len(self.names))
        if failed >= 0:
            raise self._error_of(failed)

    def run_timed(self) -> list[int]:
        """Run, and say when each call had ended: nanoseconds after the begin."""
        ends = np.zeros(len(self.names), np.int64)
        failed = self._time(self._calls_pointer, len(self.names), ends.ctypes.data)
        if failed >= 0:
            raise self._error_of(failed)
        return ends.tolist()

    def _error_of(self, call: int) -> Exception:
        name = self.names[call]
        if name in ("ratoon_embed", "ratoon_embed_part"):
            return IndexError(NO_SUCH_ROW)
        if name in ("ratoon_all_reduce", "ratoon_all_gather"):
            return DeviceLostError(RANK_LOST)
        return MemoryError("a kernel ran out of memory")


class Arena:
    """Memory that stays where it is. What is taken returns when its last tensor is gone, and is handed out again: so a
    pass needs no more than it has in use at a time, and passes that never run together share it."""

    def __init__(self, chunk_bytes: int = CHUNK_BYTES) -> None:
        """`chunk_bytes`: that it grows by at least."""
        self._chunk_bytes = chunk_bytes
        self._chunks: list[np.ndarray] = []
        self._returned: deque[tuple[int, int, int]] = deque()  # by finalizers, which may run at any time
        self._free: list[tuple[int, int, int]] = []  # (chunk, first byte, bytes), in order, none beside another
        self.num_bytes = 0

    def take(self, count: int) -> Tensor:
        """[count] uint8."""
        return self._lend(self._reserve(count), np.uint8, (count,))

    def take_floats(self, rows: int, width: int) -> Tensor:
        """The view is made by numpy: while a pass is recorded, each view that torch makes takes 20 µs."""
        return self._lend(self._reserve(4 * rows * width), np.float32, (rows, width))

    def _reserve(self, count: int) -> tuple[int, int, int]:
        size = max(-(-count // ALIGNMENT), 1) * ALIGNMENT
        self._join_returned()
        place = next((index for index, (_, _, room) in enumerate(self._free) if room >= size), None)
        if place is None:
            place = self._grow(size)
        chunk, first, room = self._free[place]
        self._free[place : place + 1] = [(chunk, first + size, room - size)] if room > size else []
        return chunk, first, size

    def _lend(self, place: tuple[int, int, int], dtype: Any, shape: tuple[int, ...]) -> Tensor:
        chunk, first, _ = place
        piece = np.ndarray(shape, dtype, self._chunks[chunk], first)
        # The tensor's storage holds this array; views of the tensor hold the storage.
        weakref.finalize(piece, self._give_back, *place).atexit = False
        return torch.from_numpy(piece)

    def _grow(self, size: int) -> int:
        # A power of two, so that prompts that are longer each time do not leave a chunk for every length behind. What
        # is above `size` takes no memory before it is written.
        size = max(1 << (size - 1).bit_length(), self._chunk_bytes)
        self._chunks.append(new_pages(size).numpy())
        self._free.append((len(self._chunks) - 1, 0, size))
        self.num_bytes += size
        return len(self._free) - 1

    def _give_back(self, chunk: int, first: int, size: int) -> None:
        self._returned.append((chunk, first, size))

    def _join_returned(self) -> None:
        if not self._returned:
            return
        joined: list[tuple[int, int, int]] = []
        for piece in sorted([*self._free, *(self._returned.popleft() for _ in range(len(self._returned)))]):
            if joined and joined[-1][0] == piece[0] and joined[-1][1] + joined[-1][2] == piece[1]:
                joined[-1] = (piece[0], joined[-1][1], joined[-1][2] + piece[2])
            else:
                joined.append(piece)
        self._free = joined


_large = Arena()  # of passes that are not recorded
_large_lock = threading.Lock()


class Recording(QuickDispatchMode):
    """`with Recording(arena) as recording:` a pass, and then `recording.program()`. The pass is executed as well."""

    def __init__(self, arena: Arena) -> None:
        super().__init__()
        kernels = library()
        assert kernels is not None
        self.arena = arena
        self.obstacles: list[str] = []  # why there is no program
        self._kernels = kernels
        self.calls: list[RecordedCall] = []
        self._thread = threading.get_ident()

    @property
    def is_of_this_thread(self) -> bool:
        return threading.get_ident() == self._thread

    def __enter__(self) -> Recording:
        global _open
        _lock.acquire()
        try:
            self._kernels.replace({name: self._wrap(name, call) for name, call in self._kernels.functions.items()})
            _open = self
            super().__enter__()
        except BaseException:
            self._close()
            raise
        return self

    def __exit__(self, *error: Any) -> None:
        try:
            super().__exit__(*error)
        finally:
            self._close()

    def _close(self) -> None:
        global _open
        _open = None
        self._kernels.replace(self._kernels.functions)
        _lock.release()

    def __torch_dispatch__(
        self, function: Any, types: Any, arguments: tuple[Any, ...] = (), settings: dict[str, Any] | None = None
    ) -> Any:
        if function is torch.ops.aten.copy_.default and _is_plain_copy(*arguments[:2]):
            target, source = arguments[:2]
            self.calls.append(("ratoon_copy", [target.data_ptr(), source.data_ptr(), source.nbytes]))
        elif not function.is_view:
            self.obstacles.append(str(function))
        return function(*arguments, **(settings or {}))

    def _wrap(self, name: str, call: Callable[..., Any]) -> Callable[..., Any]:
        types = call.argtypes  # type: ignore[attr-defined]

        def record(*arguments: Any) -> Any:
            if self.is_of_this_thread:  # kernels are those of the process; another engine may run meanwhile
                if name in self._kernels.words:
                    words = [_as_word(value, kind) for value, kind in zip(arguments, types, strict=True)]
                    self.calls.append((name, words))
                else:
                    self.obstacles.append(name)
            return call(*arguments)

        return record

    def program(self) -> Program | None:
        return join_recordings(self)


def join_recordings(*recordings: Recording) -> Program | None:
    """One after the other. None: one of them has an obstacle."""
    if any(recording.obstacles for recording in recordings):
        return None
    kernels = library()
    assert kernels is not None
    return Program(kernels, [call for recording in recordings for call in recording.calls])


def _is_plain_copy(target: Tensor, source: Tensor) -> bool:
    alike = target.dtype == source.dtype and target.shape == source.shape
    return alike and target.is_contiguous() and source.is_contiguous()


def _as_word(value: Any, kind: Any) -> int:
    if kind is ctypes.c_float:
        return int(struct.unpack("<i", struct.pack("<f", value))[0])
    return 0 if value is None else int(value)
