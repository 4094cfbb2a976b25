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

import torch

from ratoon.layers.native import QuantisedWeight, library
from ratoon.layers.native_choices import IN_REGISTERS, MATRICES, NEVER, UNPACKED, KernelChoices, RowCounts
from ratoon.layers.native_formats import BLOCK, PANEL, SCRATCH_ROOM, PackedWeight

logger = logging.getLogger(__name__)

LIMIT = 0.08  # seconds for all shapes; those that are left keep the default until the next start
ROW_COUNTS = (2, 4, 6, 8, 9, 12, 16, 24, 32, 48, 64, 96)
ROUNDS = 3
NEEDED_GAIN = 0.03  # of the time: a smaller one is noise, and the default stays
STEADY = 1.25  # a second shortest time is above the shortest by no more, in most cases; otherwise nothing is decided
STRIP = 16  # rows that the matrix unit takes at once: STRIP of quantised_call.h
PART_NUMBERS = 2**18  # of a weight, for each thread
MOST_PARTS = 64
OUTLIER_BLOCKS = 20  # one in so many has numbers that are rounded to 15 bits, as in a model

Kernel = int
Times = dict[int, dict[Kernel, float]]  # seconds, by rows and kernel
Timer = Callable[[int, Kernel], float]
Clock = Callable[[], float]


def measure_kernels(
    choices: KernelChoices, num_threads: int, clock: Clock = time.perf_counter, limit: float = LIMIT
) -> None:
    """Choose for all weights that nothing is known about, and keep that."""
    unknown, deadline, count = choices.unknown(), clock() + limit, 0
    for shape, weights in unknown.items():
        timer = ProductTimer(weights, num_threads, clock)
        times = time_kernels(timer, timer.kernels, clock, deadline)
        if times is not None:
            choices.settle(shape, choose_row_counts(times, timer.default_kernel))
            count += 1
        if clock() > deadline:
            break
    if unknown:
        later = ", the rest at the next start" if count < len(unknown) else ""
        seconds = clock() - deadline + limit
        logger.info("kernels for %d of %d shapes were measured in %.3f s%s", count, len(unknown), seconds, later)
        choices.keep()


def time_kernels(timer: Timer, kernels: Sequence[Kernel], clock: Clock, deadline: float) -> Times | None:
    """The shortest time of each. None: there was not enough time, or other work disturbed too much."""
    times: dict[int, dict[Kernel, list[float]]] = {rows: {kernel: [] for kernel in kernels} for rows in ROW_COUNTS}
    for turn in range(ROUNDS):
        for rows in ROW_COUNTS:
            for i in range(len(kernels)):
                if clock() > deadline:
                    return None
                kernel = kernels[(i + turn) % len(kernels)]
                times[rows][kernel].append(timer(rows, kernel))
    if not is_steady([some for by_kernel in times.values() for some in by_kernel.values()]):
        return None
    return {rows: {kernel: min(some) for kernel, some in by_kernel.items()} for rows, by_kernel in times.items()}


def is_steady(times: Sequence[Sequence[float]]) -> bool:
    """Whether repeated times agree: the shortest of a few is that of undisturbed work then."""
    return statistics.median(second / first for first, second, *_ in map(sorted, times)) < STEADY


def choose_row_counts(times: Mapping[int, Mapping[Kernel, float]], default: Callable[[int], Kernel]) -> RowCounts:
    """Those with the lowest sum of times, each in proportion to the best for so many rows. `default`: the kernel that
    is taken without a choice."""

    def cost(choose: Callable[[int], Kernel]) -> float:
        return sum(by_kernel[choose(rows)] / min(by_kernel.values()) for rows, by_kernel in times.items()) / len(times)

    last, has_matrices = max(times), all(MATRICES in by_kernel for by_kernel in times.values())
    starts = [*sorted(times), last + 1]
    found = [
        RowCounts(unpack_from, matrices_from)
        for matrices_from in (starts if has_matrices else [NEVER])
        for unpack_from in starts
    ]
    costs = {counts: cost(lambda rows, counts=counts: kernel_of(counts, rows)) for counts in found}  # type: ignore[misc]
    best = min(costs, key=costs.__getitem__)
    if costs[best] > cost(default) * (1 - NEEDED_GAIN):
        return RowCounts()
    if best.matrices_from > last and (not has_matrices or times[last][UNPACKED] < times[last][MATRICES]):
        best = best._replace(matrices_from=NEVER)
    return best


def kernel_of(counts: RowCounts, rows: int) -> Kernel:
    """As ratoon_quantised_kernel, for a weight that the matrix unit can multiply."""
    if rows >= counts.matrices_from:
        return MATRICES
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
    def kernels(self) -> list[Kernel]:
        """Those that the kernel set has for these weights."""
        part = self._parts[0]
        part.unpack_from, part.matrices_from = counts_for(1, MATRICES)
        has_matrices = self._functions.ratoon_quantised_kernel(ctypes.addressof(part), 1) == MATRICES
        return [IN_REGISTERS, UNPACKED, MATRICES] if has_matrices else [IN_REGISTERS, UNPACKED]

    def default_kernel(self, rows: int) -> Kernel:
        part = self._parts[0]
        part.unpack_from, part.matrices_from = RowCounts()
        return int(self._functions.ratoon_quantised_kernel(ctypes.addressof(part), rows))

    def __call__(self, rows: int, kernel: Kernel) -> float:
        part = self._parts[self._next]
        self._next = (self._next + 1) % len(self._parts)
        part.unpack_from, part.matrices_from = counts_for(rows, kernel)
        arguments = (
            ctypes.addressof(part), self._x.data_ptr(), self._x.stride(0), rows, self._scratch.data_ptr(),
            self._y.data_ptr(), self._y.stride(0),
        )  # fmt: skip
        start = self._clock()
        self._functions.ratoon_quantised_linear(*arguments)
        return self._clock() - start


def counts_for(rows: int, kernel: Kernel) -> RowCounts:
    """That make a product with so many rows take this kernel. Rows behind the last strip of the matrix unit go by
    another one, as they do in a pass."""
    if kernel == MATRICES:
        return RowCounts(NEVER, min(rows, STRIP))
    return RowCounts(NEVER if kernel == IN_REGISTERS else 1, NEVER)


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
