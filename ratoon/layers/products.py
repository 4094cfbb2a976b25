"""Products of an Ops with weights in their stored formats: one or several, concatenated by rows.

Which weights these are, and which part of them a rank has, is decided by the layers (linear.py, experts.py).
"""

from __future__ import annotations

from itertools import groupby

import torch

from ratoon.layers.ops import Ops, Product
from ratoon.layers.stored import StoredTensor

Tensor = torch.Tensor


def make_product(ops: Ops, parts: list[StoredTensor], bias: Tensor | None) -> Product:
    """The product with weights [out, in] concatenated by rows, each in its stored format."""
    groups = [list(group) for _, group in groupby(parts, key=lambda part: part.format)]
    if len(groups) > 1:
        sizes = [sum(part.shape[0] for part in group) for group in groups]
        biases = [None] * len(groups) if bias is None else bias.split(sizes)
        products = [make_product(ops, group, own) for group, own in zip(groups, biases, strict=True)]
        return ops.join(products)
    kept = ops.find_format(parts[0])
    if kept is not None:
        return kept.make_linear(parts, bias)
    return ops.make_linear(join_rows([part.data for part in parts]), bias)


def join_rows(parts: list[Tensor]) -> Tensor:
    """Concatenates tensors by their first dimension."""
    if len(parts) == 1:
        return parts[0].contiguous()
    if parts[0].device.type == "meta":  # torch.cat of meta tensors imports torch's compiler, which takes two seconds
        return parts[0].new_empty(sum(map(len, parts)), *parts[0].shape[1:])
    return torch.cat(parts)
