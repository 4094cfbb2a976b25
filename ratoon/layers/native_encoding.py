"""Weights of floats to 8 or 4 bits while they are loaded, in formats that native_formats.py keeps: Q8_0, and Q4_1 with
the scales and offsets of least squared error. For checkpoints that hold floats.
"""

from __future__ import annotations

from functools import partial

import torch

from ratoon.layers.native import library
from ratoon.layers.native_formats import BLOCK, BLOCK_READERS
from ratoon.layers.stored import StoredTensor

Tensor = torch.Tensor

FORMATS = {8: "Q8_0", 4: "Q4_1"}  # by bits


def can_encode(stored: StoredTensor) -> bool:
    """Whether it is a weight [out, in] of floats that blocks divide."""
    return stored.decode is None and len(stored.shape) == 2 and stored.shape[1] % BLOCK == 0


def encode(weight: Tensor, bits: int) -> StoredTensor:
    """A weight [out, in] in GGUF's blocks. Numbers that halves can't scale (infinite, NaN) give unusable scales, and so
    unusable results, as they would in floats."""
    kernels = library()
    assert kernels is not None
    numbers = weight.float().contiguous()
    blocks = (len(numbers), numbers.shape[1] // BLOCK)
    scales, offsets = torch.empty(blocks), torch.empty(blocks) if bits == 4 else None
    num_blocks = blocks[0] * blocks[1]
    kernels.ratoon_fit_scales(
        numbers.data_ptr(), num_blocks, bits, scales.data_ptr(), None if offsets is None else offsets.data_ptr()
    )
    halves = [part.half() for part in (scales, offsets) if part is not None]
    rounded = [part.float() for part in halves]
    codes = torch.empty(*blocks, BLOCK * bits // 8, dtype=torch.uint8)
    kernels.ratoon_encode(
        numbers.data_ptr(), num_blocks, bits, rounded[0].data_ptr(),
        rounded[1].data_ptr() if offsets is not None else None, codes.data_ptr(),
    )  # fmt: skip
    data = torch.cat([part[..., None].view(torch.uint8) for part in halves] + [codes], -1)
    return StoredTensor(tuple(weight.shape), FORMATS[bits], data, partial(_decode, FORMATS[bits]))


def _decode(name: str, blocks: Tensor) -> Tensor:
    return BLOCK_READERS[name](blocks).floats().flatten()
