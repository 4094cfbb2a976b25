"""Random weights of given shapes, as a TensorSource: for tests, benchmarks and sizing without files.

A tensor depends only on the seed, its name and its shape, so that two runs, and two ranks, have the same model.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping

from ratoon.layers.stored import StoredTensor, TensorSlice

STANDARD_DEVIATION = 0.02  # what the families here are initialised with


class DummySource:
    """Implements TensorSource. The shapes are those of `models.build.collect_shapes`."""

    def __init__(self, shapes: Mapping[str, tuple[int, ...]], seed: int = 0, name: str = "random weights") -> None:
        self.name = name
        self.seed = seed
        self._shapes = dict(shapes)

    def shapes(self) -> Mapping[str, tuple[int, ...]]:
        return self._shapes

    def read(self, name: str, part: TensorSlice | None = None) -> StoredTensor:
        import torch

        shape = self._shapes[name]
        if name.endswith("bias"):
            tensor = torch.zeros(shape)
        elif len(shape) == 1 and ("norm" in name.lower() or "ln_" in name):
            tensor = torch.ones(shape)
        else:
            digest = hashlib.sha256(f"{self.seed}:{name}".encode()).digest()
            generator = torch.Generator().manual_seed(int.from_bytes(digest[:7], "little"))
            tensor = torch.empty(shape).normal_(0.0, STANDARD_DEVIATION, generator=generator)
        return StoredTensor.of_floats(tensor, part)
