"""How exact the CPU attention kernel is over many keys: its error against float64, beside torch's own attention.

A kernel whose sums over keys are one long chain fails here, long before a model's answers show it.
"""

import pytest
import torch
from torch.nn import functional

from ratoon.attention.cpu import CpuAttentionBackend
from ratoon.layers.attention import AttentionLayer
from tests.unit.attention.test_backends import Batch, needs_kernels

SAMPLING = 1.15  # two root mean squares of some thousand errors each differ by less than this when nothing else does


def root_mean_square(error: torch.Tensor) -> float:
    return float(error.double().pow(2).mean().sqrt())


@pytest.mark.slow
@needs_kernels
@pytest.mark.parametrize("head_dim", [64, 256])
@pytest.mark.parametrize("num_keys", [100, 1000, 4000])
def test_attention_is_as_exact_as_torch_over_any_number_of_keys(head_dim: int, num_keys: int) -> None:
    layer = AttentionLayer(0, 8, 8, head_dim, head_dim**-0.5)
    batch = Batch([num_keys - 4], [4], layer, 16)
    sequence = batch.sequences[0]
    sequence[:, 16:] += 1.0  # values that do not cancel: their sum grows with the keys, and so would a chain's error
    (got,) = batch.run(CpuAttentionBackend())

    def by_torch(dtype: torch.dtype) -> torch.Tensor:
        q, k, v = sequence.to(dtype).split([8, 8, 8], dim=1)  # [keys, heads, head_dim]
        visible = torch.ones(4, num_keys, dtype=torch.bool).tril(num_keys - 4)
        q, k, v = q[-4:].transpose(0, 1), k.transpose(0, 1), v.transpose(0, 1)
        out = functional.scaled_dot_product_attention(q, k, v, attn_mask=visible)
        return out.transpose(0, 1).reshape(4, -1)

    exact = by_torch(torch.float64)
    assert root_mean_square(got - exact) < SAMPLING * root_mean_square(by_torch(torch.float32) - exact)
