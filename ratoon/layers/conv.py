"""Convolution over time, as the product of a matrix with windows of the input. Only for encoders that read audio."""

from __future__ import annotations

import torch
from torch.nn import functional

from ratoon.layers.ops import WeightUse
from ratoon.layers.products import make_product
from ratoon.layers.stored import StoredTensor
from ratoon.layers.weights import Weights

Tensor = torch.Tensor

KERNEL = 3  # frames in a window; the input is padded by one frame of zeros at each end


class TimeConvolution:
    """[N, frames, in_channels] → [N, frames / stride, out_channels]. Channels are last, so a window is one row."""

    __slots__ = ("multiply", "stride")

    def __init__(self, weights: Weights, in_channels: int, out_channels: int, stride: int) -> None:
        self.stride = stride
        weight = weights.take("weight", out_channels, in_channels, KERNEL)
        weight = weight.transpose(1, 2).reshape(out_channels, KERNEL * in_channels)
        stored = StoredTensor.of_floats(weight)
        if weights.device.type != "meta":
            stored = weights.ops.quantize(stored, WeightUse.LINEAR)
        self.multiply = make_product(weights.ops, [stored], weights.take("bias", out_channels))

    def __call__(self, x: Tensor) -> Tensor:
        count, frames, channels = x.shape
        padded = functional.pad(x, (0, 0, 1, 1)).contiguous()  # [N, frames + 2, in]
        # A window is KERNEL consecutive frames in memory: rows overlap, and nothing is copied.
        shape = (count, (frames - 1) // self.stride + 1, KERNEL * channels)
        windows = padded.as_strided(shape, (padded.stride(0), self.stride * channels, 1))
        results = [self.multiply(item) for item in windows]  # N times [windows, 3 · in] → [windows, out]
        return torch.stack(results) if count > 1 else results[0][None]
