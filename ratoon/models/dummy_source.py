"""Random weights of given shapes, as a TensorSource: for tests, benchmarks and sizing without files.

A tensor depends only on the seed, its name, its shape and the type of the device, so that two runs, and two ranks, have
the same model. On a GPU it is made there: a CPU would need most of a minute for eight billion numbers.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Mapping
from typing import TYPE_CHECKING

from ratoon.layers.stored import StoredTensor, TensorSlice

if TYPE_CHECKING:
    import torch

    from ratoon.layers.weights import Destination

STANDARD_DEVIATION = 0.02  # what the families here are initialised with
NUMBERS_AT_ONCE = 2**22  # made on a GPU by one pass: the steps between stay in its cache


class DummySource:
    """Implements TensorSource. The shapes are those of `models.build.collect_shapes`."""

    def __init__(self, shapes: Mapping[str, tuple[int, ...]], seed: int = 0, name: str = "random weights") -> None:
        self.name = name
        self.seed = seed
        self._shapes = dict(shapes)

    def shapes(self) -> Mapping[str, tuple[int, ...]]:
        return self._shapes

    def read(self, name: str, part: TensorSlice | None = None, destination: Destination | None = None) -> StoredTensor:
        import torch

        device = None if destination is None else destination.device
        shape = self._shapes[name]
        if name.endswith("bias"):
            tensor = torch.zeros(shape, device=device)
        elif len(shape) == 1 and ("norm" in name.lower() or "ln_" in name):
            tensor = torch.ones(shape, device=device)
        else:
            digest = hashlib.sha256(f"{self.seed}:{name}".encode()).digest()
            seed = int.from_bytes(digest[:7], "little")
            if device is None:
                generator = torch.Generator().manual_seed(seed)
                tensor = torch.empty(shape).normal_(0.0, STANDARD_DEVIATION, generator=generator)
            else:
                tensor = counted_normals(seed, shape, device).mul_(STANDARD_DEVIATION)
        return StoredTensor.of_floats(tensor, part)


def counted_normals(seed: int, shape: tuple[int, ...], device: torch.device) -> torch.Tensor:
    """Standard normal numbers in float32, each a function of the seed and its index alone. torch's own generator for
    GPUs depends on how many multiprocessors the GPU has."""
    import torch

    count = math.prod(shape)
    numbers = torch.empty(count, device=device)
    low, high = seed & 0xFFFFFFFF, (seed >> 32) & 0xFFFFFFFF
    for start in range(0, count, NUMBERS_AT_ONCE):
        stop = min(start + NUMBERS_AT_ONCE, count)
        index = torch.arange(start, stop, device=device)  # int64; all below keep 32 bits of it
        bits = _mix(_mix(index & 0xFFFFFFFF ^ low) ^ (index >> 32) ^ high)
        # The middles of 2²³ equal parts of (-1, 1): float32 holds them exactly, and none is 1
        uniform = (bits >> 9).float().add_(0.5).mul_(2.0**-22).sub_(1.0)
        torch.erfinv(uniform, out=numbers[start:stop])
    return numbers.mul_(math.sqrt(2)).view(shape)


def _mix(bits: torch.Tensor) -> torch.Tensor:
    """A permutation of the 32-bit numbers in which every bit of the result depends on every bit given."""
    bits = (bits ^ (bits >> 16)).mul_(0x7FEB352D).bitwise_and_(0xFFFFFFFF)
    bits = (bits ^ (bits >> 15)).mul_(0x31848BAB).bitwise_and_(0xFFFFFFFF)
    return bits ^ (bits >> 16)
