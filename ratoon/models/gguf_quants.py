"""Decodes GGUF's quantised blocks to floats. Works on bytes, independent of files and models.

A tensor is a sequence of equal blocks: a few scales, then small packed integers. Common types are decoded here, on
whole tensors with torch; the others by the `gguf` package, which takes four times as long.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, NamedTuple

from ratoon.core.errors import ModelError

if TYPE_CHECKING:
    import torch


class BlockLayout(NamedTuple):
    format: str
    length: int  # numbers in a block
    num_bytes: int


# By the number of the type in a file. Each is tested against its definition; others are refused.
LAYOUTS = {
    0: BlockLayout("F32", 1, 4), 1: BlockLayout("F16", 1, 2), 2: BlockLayout("Q4_0", 32, 18),
    3: BlockLayout("Q4_1", 32, 20), 6: BlockLayout("Q5_0", 32, 22), 7: BlockLayout("Q5_1", 32, 24),
    8: BlockLayout("Q8_0", 32, 34), 10: BlockLayout("Q2_K", 256, 84), 11: BlockLayout("Q3_K", 256, 110),
    12: BlockLayout("Q4_K", 256, 144), 13: BlockLayout("Q5_K", 256, 176), 14: BlockLayout("Q6_K", 256, 210),
    16: BlockLayout("IQ2_XXS", 256, 66), 17: BlockLayout("IQ2_XS", 256, 74), 18: BlockLayout("IQ3_XXS", 256, 98),
    19: BlockLayout("IQ1_S", 256, 50), 20: BlockLayout("IQ4_NL", 32, 18), 21: BlockLayout("IQ3_S", 256, 110),
    22: BlockLayout("IQ2_S", 256, 82), 23: BlockLayout("IQ4_XS", 256, 136), 29: BlockLayout("IQ1_M", 256, 56),
    30: BlockLayout("BF16", 1, 2), 34: BlockLayout("TQ1_0", 256, 54), 35: BlockLayout("TQ2_0", 256, 66),
    39: BlockLayout("MXFP4", 32, 17),
}  # fmt: skip
TYPES = {layout.format: type_id for type_id, layout in LAYOUTS.items()}
F16, BF16 = TYPES["F16"], TYPES["BF16"]


def block_layout(type_id: int, source: str, tensor: str) -> BlockLayout:
    """How a tensor type is stored. The names are for messages."""
    if type_id not in LAYOUTS:
        problem = f"tensor {tensor!r} has the type {_name_of(type_id)}"
        raise ModelError(source, problem, f"known: {', '.join(sorted(TYPES))}")
    return LAYOUTS[type_id]


def _name_of(type_id: int) -> str:
    from gguf.constants import GGMLQuantizationType

    try:
        return f"{GGMLQuantizationType(type_id).name} ({type_id})"
    except ValueError:
        return str(type_id)


def plain_dtype(type_id: int) -> torch.dtype | None:
    """The dtype of a type that stores plain floats."""
    import torch

    return {TYPES["F32"]: torch.float32, F16: torch.float16, BF16: torch.bfloat16}.get(type_id)


def dequantize(blocks: torch.Tensor, type_id: int) -> torch.Tensor:
    """[…, bytes of a block] to a flat tensor of float32."""
    if type_id in _DEQUANTIZERS:
        return _DEQUANTIZERS[type_id](blocks.reshape(-1, blocks.shape[-1])).view(-1)
    return _dequantize_with_package(blocks.reshape(-1), type_id)


def _dequantize_q8_0(blocks: torch.Tensor) -> torch.Tensor:
    """One scale, 32 signed bytes."""
    import torch

    return blocks[:, 2:].view(torch.int8) * _half_floats(blocks[:, :2])


def _dequantize_q4_0(blocks: torch.Tensor) -> torch.Tensor:
    """One scale, 32 numbers from -8 to 7."""
    return _unpack_nibbles(blocks[:, 2:], 16).sub_(8).mul_(_half_floats(blocks[:, :2])[:, :, None, None])


def _dequantize_q4_1(blocks: torch.Tensor) -> torch.Tensor:
    """A scale and the least value, 32 numbers from 0 to 15."""
    scale, least = _half_floats(blocks[:, :4])[:, :, None, None, None].unbind(1)
    return _unpack_nibbles(blocks[:, 4:], 16).mul_(scale).add_(least)


def _dequantize_q4_k(blocks: torch.Tensor) -> torch.Tensor:
    """Eight sub-blocks of 32 numbers; each has a scale and a minimum of 6 bits, packed into 12 bytes for all eight."""
    import torch

    whole = _half_floats(blocks[:, :4])  # [blocks, 2]: factors of the small scales and minima
    first, second, high = blocks[:, 4:16].view(-1, 3, 4).unbind(1)
    scales = torch.cat((first & 63, (high & 15) | (first >> 6 << 4)), 1) * whole[:, 0:1]  # [blocks, 8]
    minima = torch.cat((second & 63, (high >> 4) | (second >> 6 << 4)), 1) * whole[:, 1:2]
    values = _unpack_nibbles(blocks[:, 16:], 32)  # [blocks, 4, 2, 32]
    return values.mul_(scales.view(-1, 4, 2, 1)).sub_(minima.view(-1, 4, 2, 1))


def _dequantize_q6_k(blocks: torch.Tensor) -> torch.Tensor:
    """Numbers of 6 bits from -32 to 31: the low 4 in one place, the high 2 in another; a signed scale for each 16."""
    import torch

    low = blocks[:, :128].view(-1, 2, 1, 64)
    high = blocks[:, 128:192].view(-1, 2, 1, 32)
    low = torch.cat((low & 15, low >> 4), 2).view(-1, 2, 4, 32)  # in the order of the numbers
    high = torch.cat([(high >> shift & 3) << 4 for shift in (0, 2, 4, 6)], 2)
    values = (low | high).float().sub_(32).view(-1, 16, 16)
    scales = blocks[:, 192:208].view(torch.int8) * _half_floats(blocks[:, 208:])  # [blocks, 16]
    return values.mul_(scales[:, :, None])


_DEQUANTIZERS: dict[int, Callable[[torch.Tensor], torch.Tensor]] = {
    TYPES["Q8_0"]: _dequantize_q8_0,
    TYPES["Q4_0"]: _dequantize_q4_0,
    TYPES["Q4_1"]: _dequantize_q4_1,
    TYPES["Q4_K"]: _dequantize_q4_k,
    TYPES["Q6_K"]: _dequantize_q6_k,
}


def _half_floats(columns: torch.Tensor) -> torch.Tensor:
    """[blocks, 2 n] bytes → [blocks, n] floats."""
    import torch

    return columns.contiguous().view(torch.float16).float()


def _unpack_nibbles(packed: torch.Tensor, width: int) -> torch.Tensor:
    """[blocks, n · width] bytes → [blocks, n, 2, width] floats: the low halves of `width` bytes, then the high ones."""
    import torch

    packed = packed.reshape(packed.shape[0], -1, width)
    values = torch.empty((*packed.shape[:2], 2, width), dtype=torch.float32)
    values[:, :, 0] = packed & 15
    values[:, :, 1] = packed >> 4
    return values


def _dequantize_with_package(data: torch.Tensor, type_id: int) -> torch.Tensor:
    import torch
    from gguf.constants import GGMLQuantizationType
    from gguf.quants import dequantize as gguf_dequantize

    return torch.from_numpy(gguf_dequantize(data.numpy(), GGMLQuantizationType(type_id)))
