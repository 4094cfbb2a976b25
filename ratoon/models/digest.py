"""A digest by which workers on several hosts notice that they read different models."""

from __future__ import annotations

import math
from hashlib import blake2b

import torch

from ratoon.core.config import ModelConfig
from ratoon.layers.weights import TensorSource

TENSORS_TO_READ = 16  # the smallest: norms and biases, which differ between versions of a model


def digest_of_model(config: ModelConfig, tensors: TensorSource) -> str:
    """Returns a digest of the config, of the names and shapes of all tensors, and of the numbers of the smallest."""
    shapes = tensors.shapes()
    digest = blake2b(repr(config).encode(), digest_size=16)
    for name, shape in sorted(shapes.items()):
        digest.update(f"{name} {tuple(shape)}\0".encode())
    for name in sorted(shapes, key=lambda name: (math.prod(shapes[name]), name))[:TENSORS_TO_READ]:
        data = tensors.read(name).data.contiguous()
        digest.update(data.view(torch.uint8).numpy().tobytes() if data.dim() else repr(data.item()).encode())
    return digest.hexdigest()
