"""Attention of encoders of pictures: every row attends to all rows of its own run, in both directions. Nothing is kept.

torch's own attention does it: one call for neighbours of equal length, or on a GPU one call for all runs. On a CPU it
takes as long as the kernel over pages (cpu.py) with heads of 64, and 0.6 to 0.8 times as long with heads of 80,
and takes heads of any size; that kernel would first copy keys and values to pages.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import groupby

import numpy as np
import torch
from torch.nn.functional import scaled_dot_product_attention

from ratoon.layers.native import has_bf16_matrices, library
from ratoon.layers.native.recording import new_bytes, new_floats

Tensor = torch.Tensor
# q, k, v [T, heads, head_dim], which may be strided views, and lengths of runs that sum to T → [T, heads · head_dim]
SegmentAttention = Callable[[Tensor, Tensor, Tensor, Sequence[int]], Tensor]

_FLASH_DTYPES = (torch.float16, torch.bfloat16)
_FLASH_MULTIPLE = 8  # of the size of heads
_MAX_FLASH_HEAD_DIM = 256
_MIN_BATCH_ROWS = 2048  # of neighbours of equal length, on a GPU: from here on a launch of its own pays


def build_segment_attention(device: torch.device, dtype: torch.dtype, may_round: bool = False) -> SegmentAttention:
    """The fastest attention inside runs of rows for a device. `may_round`: what is multiplied may be rounded to bf16,
    as where the weights are quantised."""
    if device.type == "cuda" and dtype in _FLASH_DTYPES:
        return FlashSegments(device)
    if device.type == "cpu" and dtype == torch.float32 and may_round:
        return attend_rounded
    return attend_in_runs


def attend_in_runs(q: Tensor, k: Tensor, v: Tensor, lengths: Sequence[int]) -> Tensor:
    """Runs on any device, in any dtype. Neighbours of equal length are one batch, without a copy of their rows."""
    out = q.new_empty(q.shape)  # [T, heads, head_dim]
    start = 0
    for length, equal in groupby(lengths):
        count = sum(1 for _ in equal)
        rows = slice(start, start + count * length)
        # [rows, heads, head_dim] → [runs, heads, length, head_dim]
        batch = [x[rows].unflatten(0, (count, length)).transpose(1, 2) for x in (q, k, v)]
        attended = scaled_dot_product_attention(*batch)
        out[rows].unflatten(0, (count, length)).copy_(attended.transpose(1, 2))
        start = rows.stop
    return out.flatten(1)


class FlashSegments:
    """Many short runs in one launch, by torch's attention over sequences of different lengths: for 100 windows of 5,476
    rows in all it takes a tenth of the time of `attend_in_runs`, for one run of as many 1.5 times (H200)."""

    def __init__(self, device: torch.device) -> None:
        from torch.nn.attention.varlen import varlen_attn

        self._attend = varlen_attn
        self._device = device
        self._lengths: list[int] = []
        self._starts = torch.empty(0)

    def __call__(self, q: Tensor, k: Tensor, v: Tensor, lengths: Sequence[int]) -> Tensor:
        head_dim = q.shape[-1]
        num_batches = sum(1 for _ in groupby(lengths))
        is_long = num_batches == 1 or len(q) >= _MIN_BATCH_ROWS * num_batches
        if is_long or head_dim % _FLASH_MULTIPLE or head_dim > _MAX_FLASH_HEAD_DIM:
            return attend_in_runs(q, k, v, lengths)
        if self._lengths != lengths:  # layers with the same runs follow each other
            starts = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int32)
            self._starts, self._lengths = torch.from_numpy(starts).to(self._device), list(lengths)
        longest = max(lengths)
        attended = self._attend(q, k, v, self._starts, self._starts, longest, longest)
        assert isinstance(attended, Tensor)
        return attended.flatten(1)


def attend_rounded(q: Tensor, k: Tensor, v: Tensor, lengths: Sequence[int]) -> Tensor:
    """Attends by the matrix unit of x86, in bf16 (layers/native/attention_bf16.c), where it serves heads of this
    size."""
    rows, heads, head_dim = q.shape
    if not has_bf16_matrices(head_dim):
        return attend_in_runs(q, k, v, lengths)
    kernels = library()
    assert kernels is not None
    starts = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int32)
    out = new_floats(rows, heads * head_dim)
    scratch = new_bytes(kernels.ratoon_attention_bf16_scratch(rows, len(lengths), heads, head_dim))
    kernels.ratoon_attention_bf16(
        q.data_ptr(), q.stride(0), k.data_ptr(), k.stride(0), v.data_ptr(), v.stride(0), out.data_ptr(), out.stride(0),
        starts.ctypes.data, len(lengths), heads, head_dim**-0.5, scratch.data_ptr(),
    )  # fmt: skip
    return out
