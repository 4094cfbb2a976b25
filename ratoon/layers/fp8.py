"""Weights in 8 bits (e4m3): each row [in] of a weight [out, in] has its own scale. Halves what a decode step reads.
Files may have a scale for each block of a weight instead: no product takes these as they are.

Activations are quantised by row where many rows are multiplied; that, and the products, are in cuda_ops.py and triton/.
"""

from __future__ import annotations

import torch

from ratoon.layers.stored import StoredTensor

Tensor = torch.Tensor

FORMAT = "F8_E4M3_ROWS"
BLOCKS_FORMAT = "F8_E4M3_BLOCKS"
FORMATS = (FORMAT, BLOCKS_FORMAT)
DTYPE = torch.float8_e4m3fn
LARGEST = 448.0
MULTIPLE = 16  # of inputs and outputs that the library's product takes
SMALLEST_SCALE = 1e-12  # of rows that are zero


def can_quantize(shape: tuple[int, ...]) -> bool:
    return len(shape) == 2 and not any(size % MULTIPLE for size in shape)


def quantize_weight(weight: Tensor) -> StoredTensor:
    """A weight [out, in] of floats as 8-bit numbers with a scale for each output."""
    wide = weight.float()
    scales = wide.abs().amax(dim=1).div_(LARGEST).clamp_(min=SMALLEST_SCALE)  # [out]
    return stored_rows((wide / scales[:, None]).clamp_(-LARGEST, LARGEST).to(DTYPE), scales)


def stored_rows(data: Tensor, scales: Tensor) -> StoredTensor:
    """8-bit numbers [out, in] with their scales [out] float32."""

    def decode(data: Tensor) -> Tensor:
        return data.float() * scales[:, None].to(data.device)

    return StoredTensor(tuple(data.shape), FORMAT, data, decode, extras={"scales": scales})


def stored_blocks(
    data: Tensor, scales: Tensor, block: tuple[int, int], first: tuple[int, int] = (0, 0)
) -> StoredTensor:
    """8-bit numbers [out, in] with a scale [row blocks, column blocks] float32 for each block of so many rows and
    columns. `first`: where the first row and the first column are in their blocks, of a part of a weight."""

    def decode(data: Tensor) -> Tensor:
        rows, columns = (
            (torch.arange(size, device=data.device) + start) // side
            for size, start, side in zip(data.shape, first, block, strict=True)
        )
        by_rows = scales.to(data.device).index_select(0, rows)  # [out, column blocks]
        return data.float().mul_(by_rows.index_select(1, columns))

    return StoredTensor(tuple(data.shape), BLOCKS_FORMAT, data, decode, extras={"scales": scales})


def join(parts: list[Tensor]) -> Tensor:
    """Weights in 8 bits, one above the other. torch joins bytes on any device."""
    return torch.cat([part.view(torch.uint8) for part in parts]).view(DTYPE)
