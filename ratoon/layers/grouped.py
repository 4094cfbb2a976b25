"""Weights as integer codes in groups that share a scale and a zero point: one form for what GPTQ, AWQ and
compressed-tensors store. Where the files keep them in other orders, models/packed_source.py brings them into this one.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial

import torch

from ratoon.layers.stored import StoredTensor

Tensor = torch.Tensor

FORMATS = {4: "INT4", 8: "INT8"}  # by bits
BLOCK = 32  # inputs whose codes are packed together


def grouped_tensor(
    codes: Tensor, scales: Tensor, zeros: Tensor, bits: int, order: Tensor | None = None
) -> StoredTensor:
    """A weight [out, in] that is scale · (code - zero).

    codes [out, in] uint8; scales and zeros [out, groups]: the inputs of a row are divided among groups of equal size.
    `order` [in]: column i of the codes belongs to input order[i] of the layer. The codes are kept in blocks of 32
    inputs: bytes, or 16 bytes with code i in the low half of byte i and code 16 + i in the high one.
    """
    extras = {"scales": scales.contiguous(), "zeros": zeros.contiguous()}
    if order is not None:
        extras["order"] = order
    blocks = codes.unflatten(1, (-1, BLOCK))
    if bits == 4:
        blocks = blocks[..., : BLOCK // 2] | blocks[..., BLOCK // 2 :] << 4
    decode = partial(_decode, extras)
    return StoredTensor(tuple(codes.shape), FORMATS[bits], blocks.contiguous(), decode, extras=extras)


def take_rows(stored: StoredTensor, start: int, stop: int) -> StoredTensor:
    """Some of the outputs of a grouped tensor."""
    rows = slice(start, stop)
    extras = {name: part if name == "order" else part[rows] for name, part in stored.extras.items()}
    shape = (stop - start, stored.shape[1])
    return StoredTensor(shape, stored.format, stored.data[rows], partial(_decode, extras), extras=extras)


def take_inputs(stored: StoredTensor, start: int, stop: int) -> StoredTensor | None:
    """Some of the inputs of a grouped tensor: whole blocks, and whole groups or a part of one. None: it can't be cut
    there, or its inputs are in another order."""
    scales = stored.extras["scales"]
    group = stored.shape[1] // scales.shape[1]
    is_whole = start % group == stop % group == 0 or start // group == (stop - 1) // group
    if "order" in stored.extras or start % BLOCK or stop % BLOCK or not is_whole:
        return None
    groups = slice(start // group, -(-stop // group))
    extras = {name: part[:, groups] for name, part in stored.extras.items()}
    blocks = stored.data[:, start // BLOCK : stop // BLOCK]
    shape = (stored.shape[0], stop - start)
    return StoredTensor(shape, stored.format, blocks, partial(_decode, extras), extras=extras)


def _decode(extras: Mapping[str, Tensor], blocks: Tensor) -> Tensor:
    scales, zeros = (extras[name].to(blocks.device, torch.float32) for name in ("scales", "zeros"))
    codes = blocks
    if blocks.shape[-1] == BLOCK // 2:
        codes = torch.cat((blocks & 15, blocks >> 4), -1)
    groups = codes.flatten(1).float().unflatten(1, (scales.shape[1], -1))
    numbers = groups.sub_(zeros[..., None]).mul_(scales[..., None]).flatten(1)
    if "order" in extras:
        order = extras["order"].to(blocks.device)
        numbers = torch.empty_like(numbers).index_copy_(1, order, numbers)
    return numbers.flatten()
