"""Masks of bits over tokens, applied to logits: one bit a token, 32 in a word."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from ratoon.layers.triton.launch import launch

Tensor = torch.Tensor

CHUNK = 2048


def allow_bits(
    logits: Tensor,  # [R, V] float32, changed in place
    rows: Tensor,  # [N] int64: the rows to change
    words: Tensor,  # [N, W] int32: the lowest bit of the first word is token 0
) -> None:
    """Tokens whose bit is not set are forbidden."""
    num_columns = logits.shape[1]
    launch(
        _allow, (triton.cdiv(num_columns, CHUNK), len(rows)), logits, logits.stride(0), num_columns, rows, words,
        words.stride(0), CHUNK, num_warps=4,
    )  # fmt: skip


@triton.jit
def _allow(logits, row_stride, num_columns, rows, words, words_stride, CHUNK: tl.constexpr):
    entry = tl.program_id(1)
    columns = tl.program_id(0) * CHUNK + tl.arange(0, CHUNK)
    inside = columns < num_columns
    word = tl.load(words + entry * words_stride + columns // 32, mask=inside, other=-1)
    forbidden = inside & (((word >> (columns % 32)) & 1) == 0)
    # Nothing is read: logits that stay are left alone
    forbidden_value = tl.full((CHUNK,), float("-inf"), tl.float32)
    tl.store(logits + tl.load(rows + entry) * row_stride + columns, forbidden_value, mask=forbidden)
