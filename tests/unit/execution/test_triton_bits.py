"""Masks of bits by the kernel for GPUs: on the GPU where there is one, otherwise under Triton's interpreter."""

from __future__ import annotations

import numpy as np
import pytest
import torch

pytest.importorskip("triton")

from ratoon.layers.triton import bits

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")


@pytest.mark.parametrize("vocab_size", [31, 97, 2500])
def test_tokens_without_their_bit_are_forbidden(vocab_size: int) -> None:
    chance = np.random.default_rng(vocab_size)
    logits = torch.from_numpy(chance.standard_normal((4, vocab_size)).astype(np.float32))
    words = chance.integers(-(2**31), 2**31, (3, -(-vocab_size // 32))).astype(np.int32)
    words[0] = -1
    allowed = np.unpackbits(words.view(np.uint8), axis=1, bitorder="little")[:, :vocab_size] != 0
    rows = np.array([0, 1, 3])
    expected = logits.numpy().copy()
    expected[rows] = np.where(allowed, expected[rows], -np.inf)
    changed = logits.clone().to(DEVICE)
    bits.allow_bits(changed, torch.from_numpy(rows).to(DEVICE), torch.from_numpy(words).to(DEVICE))
    np.testing.assert_array_equal(changed.cpu().numpy(), expected)
