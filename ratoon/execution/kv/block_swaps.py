"""Loads and stores of blocks on CUDA: copies between the KV cache and pinned host memory, on a stream of their own.

Blocks that leave the device are gathered in a staging buffer on the stream of the steps, which takes microseconds, and
travel from there beside the steps that follow: these may overwrite the blocks at once. Blocks that return travel into
the staging buffer beside the steps before, and the step that reads them waits, then scatters them. Imported on CUDA
only.
"""

from __future__ import annotations

import mmap
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import islice
from typing import Any, Protocol

import numpy as np
import torch

from ratoon.core.errors import ConfigError
from ratoon.core.plan import BlockTransfer
from ratoon.execution.kv.block_kernels import Pages, copy_blocks

Tensor = torch.Tensor


class CopyStream(Protocol):
    """Copies beside the steps, in the order in which they were submitted."""

    def mark(self) -> Any:
        """The end of what the steps have launched so far."""
        ...

    def submit(self, copy: Callable[[], None], after: Any = None) -> Any:
        """Run a copy, after a mark if there is one. Returns its end."""
        ...

    def wait(self, end: Any) -> None:
        """What the steps launch from now on runs after this end of a copy. The host does not wait."""

    def drain(self) -> None:
        """Wait until all copies have ended."""


class CudaCopyStream:
    def __init__(self, device: torch.device) -> None:
        self._stream = torch.cuda.Stream(device)

    def mark(self) -> torch.cuda.Event:
        return torch.cuda.current_stream().record_event()

    def submit(self, copy: Callable[[], None], after: torch.cuda.Event | None = None) -> torch.cuda.Event:
        if after is not None:
            self._stream.wait_event(after)
        with torch.cuda.stream(self._stream):
            copy()
        return self._stream.record_event()

    def wait(self, end: torch.cuda.Event) -> None:
        torch.cuda.current_stream().wait_event(end)

    def drain(self) -> None:
        self._stream.synchronize()


@dataclass(slots=True)
class StagingPart:
    """Some rows of the staging buffer."""

    first_row: int
    # The last accesses to it: of a copy, and of the steps
    copied: Any = None
    used: Any = None


class BlockSwaps:
    def __init__(self, pages: Pages, host_rows: Tensor, staging_rows: Tensor, part_size: int, stream: CopyStream):
        """`host_rows` [host blocks, words] and `staging_rows` [blocks, words]: a row is a block of all tensors of
        `pages`, one after the other. `part_size`: blocks of the staging buffer that are filled and emptied together."""
        self._pages = pages
        self.host_rows = host_rows
        self._staging_rows = staging_rows
        self._staging = Pages(
            split_rows(staging_rows, [tensor.shape[1] for tensor in pages.tensors]), pages.table.device
        )
        self._stream = stream
        self._part_size = part_size
        # Used in turn
        self._parts = [StagingPart(row) for row in range(0, len(staging_rows) - part_size + 1, part_size)]
        weakref.finalize(self, _drain, stream).atexit = False  # before its memory is freed

    def store(self, stores: Sequence[BlockTransfer]) -> None:
        """Copy blocks of the device to the host, with their content at this point of the steps."""
        for part, transfers in self._in_parts(stores):
            if part.copied is not None:
                self._stream.wait(part.copied)
            rows = range(part.first_row, part.first_row + len(transfers))
            copy_blocks(self._pages, self._staging, [(one.block, row) for one, row in zip(transfers, rows)])
            runs = runs_of(rows, [one.slot for one in transfers])
            part.used = self._stream.mark()
            part.copied = self._stream.submit(copying(self._staging_rows, self.host_rows, runs), after=part.used)

    def load(self, loads: Sequence[BlockTransfer]) -> None:
        """Copy blocks of the host to the device. What the steps launch from now on finds them there."""
        for part, transfers in self._in_parts(loads):
            rows = range(part.first_row, part.first_row + len(transfers))
            runs = runs_of([one.slot for one in transfers], rows)
            part.copied = self._stream.submit(copying(self.host_rows, self._staging_rows, runs), after=part.used)
            self._stream.wait(part.copied)
            copy_blocks(self._staging, self._pages, [(row, one.block) for one, row in zip(transfers, rows)])
            part.used = self._stream.mark()

    def drain(self) -> None:
        self._stream.drain()

    def measure(self) -> float:
        """Seconds to fetch a block from the host. The way there is not counted: it takes as long, but no step waits for
        it. Before the first swap: it reads and writes any blocks of the host and the staging buffer."""
        num_blocks = min(self._part_size, len(self.host_rows) - 1)
        fetch = copying(self.host_rows, self._staging_rows, [(row + 1, row, 1) for row in range(num_blocks)])
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        for copy in (fetch, begin.record, fetch, end.record):  # the first turn is not counted
            self._stream.submit(copy)
        self._stream.drain()
        return begin.elapsed_time(end) / 1e3 / num_blocks

    def _in_parts(self, transfers: Sequence[BlockTransfer]) -> Iterator[tuple[StagingPart, list[BlockTransfer]]]:
        """The transfers in parts that fit in a part of the staging buffer, each with the one that was used least
        recently. Sorted by the block on the host, so that neighbours are copied together."""
        ordered = iter(sorted(transfers, key=lambda transfer: transfer.slot))
        while some := list(islice(ordered, self._part_size)):
            part = self._parts.pop(0)
            self._parts.append(part)
            yield part, some


Run = tuple[int, int, int]  # first row, first row of the target, number of rows


def runs_of(sources: Sequence[int], targets: Sequence[int]) -> list[Run]:
    """Rows that follow each other in source and target, as runs."""
    runs: list[Run] = []
    for source, target in zip(sources, targets, strict=True):
        if runs and (source, target) == (runs[-1][0] + runs[-1][2], runs[-1][1] + runs[-1][2]):
            runs[-1] = (*runs[-1][:2], runs[-1][2] + 1)
        else:
            runs.append((source, target, 1))
    return runs


def copying(source: Tensor, target: Tensor, runs: Sequence[Run]) -> Callable[[], None]:
    def copy() -> None:
        for first, first_target, count in runs:
            target[first_target : first_target + count].copy_(source[first : first + count], non_blocking=True)

    return copy


def split_rows(rows: Tensor, widths: Sequence[int]) -> list[Tensor]:
    """[rows, words] as tensors of so many words each, which lie one after the other in every row."""
    return list(rows.split_with_sizes(list(widths), dim=1))


def pinned_rows(num_rows: int, num_words: int) -> Tensor:
    """[rows, words] of int64 in host memory that the device copies from and to by itself. torch's own allocator would
    round the size up to a power of two."""
    size, cudart = num_rows * num_words * 8, torch.cuda.cudart()
    try:
        memory = mmap.mmap(-1, size)
        with suppress(OSError, AttributeError):  # where the system has large pages
            memory.madvise(mmap.MADV_HUGEPAGE)
        array = np.frombuffer(memory, np.int64)
        torch.from_numpy(array).zero_()  # by several threads: pages that are there are pinned faster
        error = cudart.cudaHostRegister(array.ctypes.data, size, 0)
        problem = cudart.cudaGetErrorString(error) if int(error) else None
    except OSError as failure:
        problem = str(failure)
    if problem is not None:
        raise ConfigError("swap_memory", f"{size / 2**30:.1f} GiB of host memory can't be pinned: {problem}", "less")
    weakref.finalize(array, _unpin, array.ctypes.data).atexit = False
    return torch.from_numpy(array).view(num_rows, num_words)


def _unpin(address: int) -> None:
    """No copy may use the memory any more."""
    torch.cuda.cudart().cudaHostUnregister(address)


def _drain(stream: CopyStream) -> None:
    """Waits for nothing else: another engine of this process may be capturing a graph."""
    with suppress(RuntimeError):  # a device that was lost
        stream.drain()
