"""Masks of grammars as an input of sampling: a thread fills them while the device computes the logits.

The sampling kernels read the masks from pinned memory of the host. They are launched before the masks are there: the
device's stream waits for a number in the host's memory, which the thread writes when it is done. So no thread that
plans or launches steps waits for a grammar. Where a stream can't wait for memory, masks are filled before the launch.
"""

from __future__ import annotations

import ctypes
import sys
from collections.abc import Callable
from queue import SimpleQueue
from threading import Lock, Thread
from typing import Any

import numpy as np
import torch

from ratoon.execution.passes.cuda_driver import load_library

Fill = Callable[[np.ndarray], None]

# The device waits for the thread of the masks, which must not wait for long until another thread of this interpreter
# lets it go on: Python's own interval is five steps of a small model.
SWITCH_SECONDS = 0.00005
AT_LEAST = 0  # CU_STREAM_WAIT_VALUE_GEQ: the difference is not negative, so that numbers may wrap around


class Filling:
    """The masks of a step, on their way."""

    __slots__ = ("_error", "_fill", "_is_running", "_number", "_table")

    def __init__(self, number: int, table: np.ndarray, fill: Fill) -> None:
        self._number = number
        self._table = table
        self._fill = fill
        self._error: BaseException | None = None
        self._is_running = Lock()
        self._is_running.acquire()

    def run(self, filled: np.ndarray) -> None:
        """Fill them and write the step's number. Raises nothing: the device waits for the number."""
        try:
            self._fill(self._table)
        except BaseException as error:
            self._error = error
        filled[0] = self._number
        self._is_running.release()

    def wait(self) -> None:
        """Until they are filled, or that has failed."""
        with self._is_running:
            pass

    def result(self) -> None:
        """Waits until the masks are filled, and raises what went wrong."""
        self.wait()
        if self._error is not None:
            raise self._error


class MaskColumn:
    """The table of masks. `max_rows`: the most rows of a step that is sampled with them."""

    def __init__(self, max_rows: int, device: torch.device) -> None:
        self.max_rows = max_rows
        self._on_cuda = device.type == "cuda"
        self.words = torch.zeros(0, 0, dtype=torch.int32)  # [max_rows, W] once there is a grammar; its address stays
        self._number = 0  # of the step
        filled = torch.zeros(1, dtype=torch.int32, pin_memory=self._on_cuda)
        self._filled_address = filled.data_ptr()
        self._filled = filled.numpy().view(np.uint32)  # the number of the last step whose masks are there
        self._wait_for_memory = find_wait() if self._on_cuda else None
        self._queue: SimpleQueue[Filling] = SimpleQueue()
        self._thread: Thread | None = None
        self._last: Filling | None = None

    def begin(self, num_rows: int, num_words: int, fill: Fill) -> Filling:
        """Let `fill` write the masks [num_rows, num_words] of a step, once the device has read those of the step
        before: that is its own affair. Kernels of the current stream that are launched from now on see them filled."""
        if not len(self.words):
            self.words = torch.zeros(self.max_rows, num_words, dtype=torch.int32, pin_memory=self._on_cuda)
        self._number = (self._number + 1) % 2**32
        self._last = filling = Filling(self._number, self.words.numpy()[:num_rows], fill)
        if self._wait_for_memory is None:
            filling.run(self._filled)
            return filling
        if self._thread is None:
            self._thread = Thread(target=self._run, name="masks", daemon=True)
            self._thread.start()
            sys.setswitchinterval(min(sys.getswitchinterval(), SWITCH_SECONDS))
        self._queue.put(filling)
        self._wait_for_memory(self._filled_address, self._number)
        return filling

    def finish(self) -> None:
        """Wait until all masks are filled that were begun."""
        if self._last is not None:
            self._last.wait()
            self._last = None

    def _run(self) -> None:
        while True:
            self._queue.get().run(self._filled)


def find_wait() -> Callable[[int, int], None] | None:
    """A function that makes the current stream wait until the word at an address is a number, or one behind it. None:
    the driver has none."""
    function: Any = getattr(load_library(), "cuStreamWaitValue32_v2", None)
    if function is None:
        return None

    def wait(address: int, number: int) -> None:
        stream = torch.cuda.current_stream().cuda_stream
        error = function(ctypes.c_void_p(stream), ctypes.c_uint64(address), ctypes.c_uint32(number), AT_LEAST)
        if error != 0:
            raise RuntimeError(f"the CUDA driver can't let a stream wait for memory (error {error})")

    return wait
