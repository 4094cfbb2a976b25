"""Attention bias by distance, T5's: a small table of buckets from the checkpoint, expanded to all distances once.

The attention backend adds it to the scores (`AttentionLayer.bias`).
"""

from __future__ import annotations

import math

import torch

from ratoon.core.config import RelativePositions
from ratoon.layers.stored import TensorSlice
from ratoon.layers.weights import Weights

Tensor = torch.Tensor


def relative_bias(
    weights: Weights, relative: RelativePositions, num_heads: int, max_position: int, both_ways: bool
) -> Tensor:
    """AttentionLayer.bias for sequences of up to `max_position` tokens: [heads, 2 · reach + 1] in float32, of this
    rank's heads."""
    part = TensorSlice.of_range(1, weights.shard.cut("attention heads", num_heads), num_heads)
    table = weights.take("weight", relative.num_buckets, num_heads, part=part, dtype=torch.float32)
    reach = max_position - 1
    if table.device.type == "meta":
        return torch.empty(table.shape[1], 2 * reach + 1, device=table.device)
    buckets = bucket_of_distance(torch.arange(-reach, reach + 1), relative, both_ways)
    return table[buckets.to(table.device)].t().contiguous()


def bucket_of_distance(distances: Tensor, relative: RelativePositions, both_ways: bool) -> Tensor:
    """The row of the table for a distance (key's position minus query's): [D] → [D].

    The first half of the buckets are single distances; those of the other half widen, and the last one takes all from
    `max_distance` on. With `both_ways`, one half of all buckets is for keys after the query. Otherwise such keys are
    masked, and their row does not matter.
    """
    count = relative.num_buckets // 2 if both_ways else relative.num_buckets
    first = (distances > 0) * count if both_ways else torch.zeros_like(distances)
    length = distances.abs() if both_ways else -distances.clamp(max=0)
    num_single = count // 2
    widening = torch.log(length.clamp(min=1).float() / num_single) / math.log(relative.max_distance / num_single)
    wide = (num_single + (widening * (count - num_single)).long()).clamp(max=count - 1)
    return first + torch.where(length < num_single, length, wide)
