"""Penalties on tokens that occurred before, from what is kept on the device: how often each row's text has each token.

An entry of the state is 0 for a token that did not occur. Its lower bits count the output, one bit says that the prompt
has the token. layers/sampling.py has the same arithmetic for lists of tokens.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from ratoon.layers.triton.launch import launch

Tensor = torch.Tensor

IN_PROMPT = 1 << 14
MAX_COUNT = IN_PROMPT - 1  # a count stays there
CHUNK = 2048
_IN_PROMPT = tl.constexpr(IN_PROMPT)
_MAX_COUNT = tl.constexpr(MAX_COUNT)


def apply_penalties(
    logits: Tensor,  # [R, V] float32, changed in place
    rows: Tensor,  # [N] int64: the rows to change
    states: Tensor,  # [N] int64: the entry of `occurred` of each
    weights: Tensor,  # [N, 3] float32: repetition, frequency, presence
    occurred: Tensor,  # [S, V] int16
) -> None:
    num_columns = logits.shape[1]
    launch(
        _apply, (triton.cdiv(num_columns, CHUNK), len(rows)), logits, logits.stride(0), num_columns, rows, states,
        weights, occurred, CHUNK, num_warps=4,
    )  # fmt: skip


def count_tokens(occurred: Tensor, states: Tensor, rows: Tensor, token_ids: Tensor) -> None:
    """Add a token to each of these entries: that of rows[i] to states[i]."""
    launch(_count, (len(states),), occurred, occurred.shape[1], states, rows, token_ids, num_warps=1)


@triton.jit
def _apply(logits, row_stride, num_columns, rows, states, weights, occurred, CHUNK: tl.constexpr):
    entry = tl.program_id(1)
    columns = tl.program_id(0) * CHUNK + tl.arange(0, CHUNK)
    inside = columns < num_columns
    seen = tl.load(occurred + tl.load(states + entry) * num_columns + columns, mask=inside, other=0).to(tl.int32)
    repetition = tl.load(weights + entry * 3)
    frequency, presence = tl.load(weights + entry * 3 + 1), tl.load(weights + entry * 3 + 2)
    place = logits + tl.load(rows + entry) * row_stride + columns
    values = tl.load(place, mask=inside & (seen != 0), other=0.0)
    count = seen & _MAX_COUNT
    values = tl.where(values > 0, tl.math.div_rn(values, repetition), values * repetition)
    values = values - frequency * count.to(tl.float32)
    values = values - tl.where(count > 0, presence, 0.0)
    tl.store(place, values, mask=inside & (seen != 0))


@triton.jit
def _count(occurred, num_columns, states, rows, token_ids):
    entry = tl.program_id(0)
    token = tl.load(token_ids + tl.load(rows + entry))
    place = occurred + tl.load(states + entry) * num_columns + token
    seen = tl.load(place).to(tl.int32)
    tl.store(place, tl.where((seen & _MAX_COUNT) == _MAX_COUNT, seen, seen + 1).to(tl.int16))
