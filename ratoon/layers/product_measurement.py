"""Measures which kernel is the fastest for the products of a model on this GPU (`ratoon bench products`).

Each product is timed as a CUDA graph of calls with weights that are not in the cache, as a model has them. It takes
seconds for each shape, most of them Triton's compiler, so it is done on request and kept (product_choices.py).
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from typing import NamedTuple

import torch

from ratoon.layers import fp8
from ratoon.layers.product_choices import (
    MAX_ROWS,
    ROW_COUNTS,
    Choice,
    ProductChoices,
    ProductKey,
    Split,
    Tile,
    dtype_name,
    panels_of,
    streams_of,
)

CACHE_BYTES = 150e6  # more than the L2 cache of any GPU
CALLS = 24  # in one graph
REPEATS = 7
OLDEST_WITH_DEPENDENT_LAUNCH = (9, 0)  # compute capability
NEEDED_GAIN = 0.98  # of the library's time: a difference below this is noise


class Measured(NamedTuple):
    key: ProductKey
    library: float  # microseconds of one call
    best: Choice
    best_time: float


Timer = Callable[[ProductKey, Choice], float]


def measure_products(keys: Iterable[ProductKey], timer: Timer, has_wgmma: bool = False) -> Iterator[Measured]:
    """The fastest for each key, one after the other. `has_wgmma`: kernels for Hopper can run."""
    for key in keys:
        library = timer(key, None)
        times = {choice: timer(key, choice) for choice in candidates(key, has_wgmma)}
        best = min(times, key=times.__getitem__, default=None)
        if best is None or times[best] > library * NEEDED_GAIN:
            yield Measured(key, library, None, library)
        else:
            yield Measured(key, library, best, times[best])


def as_choices(measured: Iterable[Measured]) -> ProductChoices:
    return ProductChoices({str(one.key): one.best for one in measured})


def keys_of(kind: str, outputs: int, inputs: int, dtype: str) -> list[ProductKey]:
    return [ProductKey(kind, outputs, inputs, dtype, rows) for rows in ROW_COUNTS if rows]


def candidates(key: ProductKey, has_wgmma: bool = False) -> list[Choice]:
    found: list[Choice] = [*panels_of(key), *(streams_of(key) if has_wgmma else [])]
    if key.rows == 1:
        found += [Tile(1, 1024, 4), Tile(2, 1024, 4), Tile(4, 1024, 4), Tile(1, 2048, 8)]
    is_whole = key.dtype != dtype_name(fp8.DTYPE)
    if (
        is_whole and key.rows > MAX_ROWS and key.kind == "linear" and key.outputs <= 8192
    ):  # with more outputs no sum has to be cut
        found += [Split(max(16, key.rows), 64, 128, splits, 4, 4) for splits in (4, 8) if key.inputs >= 128 * splits]
    return found


class GraphTimer:
    """Times calls on a GPU. It keeps the weights of the last shape: those of one follow each other."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._shape: tuple[int, int, str] | None = None
        self._weights: list[torch.Tensor] = []

    @torch.inference_mode()
    def __call__(self, key: ProductKey, choice: Choice) -> float:
        from ratoon.layers.cuda_ops import CudaGatedMLP, CudaLinear  # imports triton

        dtype = getattr(torch, key.dtype)
        scales = torch.ones(key.outputs, device=self._device) if dtype == fp8.DTYPE else None
        dependent = torch.cuda.get_device_capability(self._device) >= OLDEST_WITH_DEPENDENT_LAUNCH  # as engines do
        x = self._random((key.rows, key.inputs), torch.bfloat16 if scales is not None else dtype)
        calls: list[Callable[[torch.Tensor], torch.Tensor]] = []
        for weight in self._weights_of(key, dtype):
            linear = CudaLinear(weight, None, (), choice, dependent, scales)
            if key.kind == "gated":  # with the activation, which is apart where the choice is the library's
                calls.append(partial(CudaGatedMLP.gate, CudaGatedMLP(linear, linear, [choice] * (key.rows + 1))))
            else:
                calls.append(linear)
        rounds = max(1, CALLS // len(calls))

        def work() -> None:
            for call in calls * rounds:
                call(x)

        return 1000 * time_graph(work) / (rounds * len(calls))

    def _weights_of(self, key: ProductKey, dtype: torch.dtype) -> list[torch.Tensor]:
        shape = (key.outputs, key.inputs, key.dtype)
        if shape != self._shape:
            self._shape, self._weights = shape, []
            count = int(CACHE_BYTES / (key.outputs * key.inputs * dtype.itemsize)) + 1
            self._weights = [self._random(shape[:2], dtype) for _ in range(count)]
        return self._weights

    def _random(self, shape: tuple[int, int], dtype: torch.dtype) -> torch.Tensor:
        return torch.randn(shape, device=self._device, dtype=torch.bfloat16).mul_(0.02).to(dtype)


def time_graph(work: Callable[[], object]) -> float:
    """Milliseconds of one replay of the work as a graph: the median. It runs once before, to compile and allocate."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        work()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        work()
    graph.replay()
    times = []
    for _ in range(REPEATS):
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        graph.replay()
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end))
    return statistics.median(times)
