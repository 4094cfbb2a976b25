"""Measures which kernel is the fastest for the products of a model's quantised weights, by number of rows.

It is done when an engine starts with weights of a shape that was not measured on this machine before, within a fixed
time. Parts of the model's own weights are multiplied in turns, so that they are not in the caches more than they are in
a pass. Kernels take turns too, and the shortest of several times counts: other load makes times longer, never shorter.
"""

from __future__ import annotations

import ctypes
import logging
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from itertools import product

import torch

from ratoon.layers.native import QuantisedWeight, library
from ratoon.layers.native_choices import IN_REGISTERS, MATRICES, NEVER, UNPACKED, KernelChoices, RowCounts
from ratoon.layers.native_formats import BLOCK, PANEL, SCRATCH_ROOM, PackedWeight

logger = logging.getLogger(__name__)

LIMIT = 0.08  # seconds for all shapes; those that are left keep the default until the next start
ROW_COUNTS = (6, 9, 12, 16, 24, 30, 48)
ROUNDS = 3
ATTEMPTS = 2  # where times did not agree, and there is time
NEEDED_GAIN = 0.05  # of the time: a smaller one is noise, and the default stays
STEADY = 1.25  # a second shortest time is above the shortest by no more, in most cases; otherwise nothing is decided
STRIP = 16  # rows that the matrix unit takes at once: STRIP of quantised_call.h
PART_NUMBERS = 2**20  # of a weight, for each thread
MOST_PARTS = 32
OUTLIER_BLOCKS = 20  # one in so many has numbers that are rounded to 15 bits, as in a model

WHOLE_STRIPS = 3  # beside the kernels: the matrix unit, but for the rows behind the last whole strip

Kernel = int
Times = dict[int, dict[Kernel, float]]  # seconds, by rows and kernel
Timer = Callable[[int, Kernel], float]
Clock = Callable[[], float]


def measure_kernels(
    choices: KernelChoices, num_threads: int, clock: Clock = time.perf_counter, limit: float | None = None
) -> None:
    """Choose for all weights that nothing is known about, and keep that."""
    start, unknown = clock(), choices.unknown()
    deadline = start + (LIMIT if limit is None else limit)
    left = dict(unknown)
    for shape, weights in [*unknown.items()] * ATTEMPTS:
        if shape not in left or clock() > deadline:
            continue
        timer = ProductTimer(weights, num_threads, clock)
        times = time_kernels(timer, timer.has_matrices, clock, deadline)
        if times is not None:
            choices.settle(shape, choose_row_counts(times, timer.default))
            del left[shape]
    if unknown:
        count, rest = len(unknown) - len(left), ", the rest at the next start" if left else ""
        logger.info("kernels for %d of %d shapes were measured in %.3f s%s", count, len(unknown), clock() - start, rest)
        choices.keep()


def time_kernels(timer: Timer, has_matrices: bool, clock: Clock, deadline: float) -> Times | None:
    """The shortest time of each. None: there was not enough time, or other work disturbed too much."""
    times: dict[int, dict[Kernel, list[float]]] = {
        rows: {kernel: [] for kernel in kernels_for(rows, has_matrices)} for rows in ROW_COUNTS
    }
    for kernel in times[max(ROW_COUNTS)]:  # wakes threads, and maps the memory of results
        timer(max(ROW_COUNTS), kernel)
    for turn in range(ROUNDS):
        for rows, by_kernel in times.items():
            kernels = list(by_kernel)
            for i in range(len(kernels)):
                if clock() > deadline:
                    return None
                kernel = kernels[(i + turn) % len(kernels)]
                by_kernel[kernel].append(timer(rows, kernel))
    if not is_steady([some for by_kernel in times.values() for some in by_kernel.values()]):
        return None
    return {rows: {kernel: min(some) for kernel, some in by_kernel.items()} for rows, by_kernel in times.items()}


def kernels_for(rows: int, has_matrices: bool) -> list[Kernel]:
    if not has_matrices:
        return [IN_REGISTERS, UNPACKED]
    has_rest = rows > STRIP and rows % STRIP > 0
    return [IN_REGISTERS, UNPACKED, MATRICES] + ([WHOLE_STRIPS] if has_rest else [])


def is_steady(times: Sequence[Sequence[float]]) -> bool:
    """Whether repeated times agree: the shortest of a few is that of undisturbed work then."""
    return statistics.median(second / first for first, second, *_ in map(sorted, times)) < STEADY


def choose_row_counts(times: Mapping[int, Mapping[Kernel, float]], default: RowCounts) -> RowCounts:
    """Chooses the counts with the lowest sum of times, each time in proportion to the best for so many rows."""

    def cost(counts: RowCounts) -> float:
        parts = [some[kernel_of(counts, rows)] / min(some.values()) for rows, some in times.items()]
        return sum(parts) / len(parts)

    last, has_matrices = max(times), all(MATRICES in some for some in times.values())
    starts = [*sorted(times), last + 1]
    matrix_starts = starts if has_matrices else [NEVER]
    costs = {counts: cost(counts) for counts in map(RowCounts._make, product(starts, matrix_starts))}
    best = min(costs, key=costs.__getitem__)
    default = default if has_matrices else default._replace(matrices_from=NEVER)
    if costs[best] > cost(default) * (1 - NEEDED_GAIN):
        return RowCounts()
    if best.matrices_from > last and (not has_matrices or times[last][UNPACKED] < times[last][MATRICES]):
        best = best._replace(matrices_from=NEVER)
    return best


def kernel_of(counts: RowCounts, rows: int) -> Kernel:
    """What quantised.c takes."""
    if rows >= counts.matrices_from:
        is_whole = rows <= STRIP or rows % STRIP == 0 or rows % STRIP >= counts.matrices_from
        return MATRICES if is_whole else WHOLE_STRIPS
    return UNPACKED if rows >= counts.unpack_from else IN_REGISTERS


class ProductTimer:
    """Times products with parts of weights of one shape: some columns, all inputs."""

    def __init__(self, weights: Sequence[PackedWeight], num_threads: int, clock: Clock = time.perf_counter) -> None:
        kernels = library()
        assert kernels is not None
        self._functions, self._clock, self._weights = kernels, clock, weights
        inputs = weights[0].in_features
        num_panels = -(-num_threads * PART_NUMBERS // (PANEL * inputs))
        self._parts = [part for weight in weights for part in parts_of(weight, num_panels)][:MOST_PARTS]
        self._next = 0
        most = max(ROW_COUNTS)
        self._x = torch.arange(most * inputs).mul(0.7).sin().view(most, inputs)  # any numbers but zeros
        self._x.view(most, -1, BLOCK)[:, ::OUTLIER_BLOCKS] *= 16
        scratch_bytes = kernels.ratoon_quantised_scratch(inputs)
        self._scratch = torch.empty((most + SCRATCH_ROOM) * scratch_bytes, dtype=torch.uint8)
        self._y = torch.empty(most, max(part.out_features for part in self._parts))

    @property
    def has_matrices(self) -> bool:
        """Whether the kernel set has a matrix unit for these weights."""
        return self._kernel_of(RowCounts(NEVER, 1), 1) == MATRICES

    @property
    def default(self) -> RowCounts:
        """What weights without a choice have."""
        kinds = (RowCounts(0, NEVER), UNPACKED), (RowCounts(NEVER, 0), MATRICES)
        return RowCounts._make(self._first_rows(counts, kernel) for counts, kernel in kinds)

    def _first_rows(self, counts: RowCounts, kernel: Kernel) -> int:
        """Returns from how many rows on a product takes this kernel."""
        return next((rows for rows in range(1, max(ROW_COUNTS) + 2) if self._kernel_of(counts, rows) == kernel), NEVER)

    def _kernel_of(self, counts: RowCounts, rows: int) -> Kernel:
        part = self._parts[0]
        part.unpack_from, part.matrices_from = counts
        return int(self._functions.ratoon_quantised_kernel(ctypes.addressof(part), rows))

    def __call__(self, rows: int, kernel: Kernel) -> float:
        part = self._parts[self._next]
        self._next = (self._next + 1) % len(self._parts)
        part.unpack_from, part.matrices_from = counts_for(kernel)
        arguments = (
            ctypes.addressof(part), self._x.data_ptr(), self._x.stride(0), rows, self._scratch.data_ptr(),
            self._y.data_ptr(), self._y.stride(0),
        )  # fmt: skip
        start = self._clock()
        self._functions.ratoon_quantised_linear(*arguments)
        return self._clock() - start


def counts_for(kernel: Kernel) -> RowCounts:
    """Returns the counts with which a product takes this kernel."""
    return {
        IN_REGISTERS: RowCounts(NEVER, NEVER),
        UNPACKED: RowCounts(1, NEVER),
        MATRICES: RowCounts(NEVER, 1),
        WHOLE_STRIPS: RowCounts(NEVER, STRIP),
    }[kernel]


def parts_of(weight: PackedWeight, num_panels: int) -> list[QuantisedWeight]:
    """Columns of a weight as weights of their own, without the bias. They point to its memory."""
    whole = weight.structure
    found = []
    for first in range(0, max(weight.out_features // PANEL // num_panels, 1) * num_panels, num_panels):
        part = QuantisedWeight.from_buffer_copy(whole)
        part.codes = whole.codes + first * PANEL * whole.in_features * whole.bits // 8
        halves = 2 * first * PANEL * (whole.in_features // whole.group)  # bytes of them
        part.scales = whole.scales + halves
        part.offsets = whole.offsets + halves if whole.offsets else None
        part.bias = None
        part.out_features = min(num_panels * PANEL, whole.out_features - first * PANEL)
        found.append(part)
    return found
