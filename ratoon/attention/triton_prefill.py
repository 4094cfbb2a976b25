"""Attention of long queries on Hopper GPUs: what the kernel of triton_prefill_kernels.py serves, and its launch.

Other GPUs, float32, biases, soft caps, other sizes of heads, and results with the same bits in any batch stay
with attention_kernel of triton_kernels.py.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import torch

from ratoon.attention.early_kernels import BLOCK_M, HEAD_DIMS, prefill_box, prefill_constants
from ratoon.attention.interface import CommonAttentionMetadata
from ratoon.attention.page_lines import PageLines
from ratoon.layers.attention import AttentionLayer, CrossAttentionLayer

Tensor = torch.Tensor

LOG2_E = 1.4426950408889634
_DTYPES = (torch.bfloat16, torch.float16)
_FP8 = torch.float8_e4m3fn
_MIN_BLOCK_SIZE = 8  # keys: rows of a swizzled box
_MIN_QUERIES = 64  # per key that is widened from 8 bits: below, the copy takes longer than it saves
_MAX_WIDENED_BYTES = 2**30


@dataclass(frozen=True, slots=True)
class LongPages:
    """The blocks of the long requests of a step, one behind the other."""

    blocks: Tensor  # [N] block ids
    table: Tensor  # [R, max_blocks] where each request's blocks are among them


def find_long_pages(inputs: CommonAttentionMetadata, shortest: int) -> LongPages | None:
    """None: a copy of them would not be worth it, or the step is a captured one, whose lengths are not known."""
    if inputs.is_padded:
        return None
    query_lens = np.diff(inputs.query_start_loc).astype(np.int64)
    lengths = np.where(query_lens >= shortest, inputs.seq_lens, 0).astype(np.int64)
    if (lengths * query_lens).sum() < _MIN_QUERIES * lengths.sum():
        return None
    counts = -(-lengths // inputs.block_size)
    starts = np.cumsum(counts) - counts
    columns = np.arange(counts.max())
    table = np.where(columns < counts[:, None], starts[:, None] + columns, 0)
    blocks = inputs.block_table[:, : len(columns)][columns < counts[:, None]]
    device = inputs.block_table_device.device
    return LongPages(*(torch.from_numpy(x.astype(np.int32)).to(device) for x in (blocks, table)))


def widen(pages: Tensor, blocks: Tensor, dtype: torch.dtype) -> Tensor | None:
    """Blocks of pages in 8 bits → their copy in `dtype`; None: it would be too large."""
    if blocks.shape[0] * pages[0].numel() * dtype.itemsize > _MAX_WIDENED_BYTES:
        return None
    return pages.view(torch.uint8).index_select(0, blocks).view(pages.dtype).to(dtype)


def serves(layer: AttentionLayer | CrossAttentionLayer, dtype: torch.dtype, pages: Tensor, block_size: int) -> bool:
    return (
        layer.bias is None
        and layer.soft_cap is None
        and (layer.causal or layer.window is None)
        and layer.head_dim in HEAD_DIMS
        and dtype in _DTYPES
        and pages.dtype in (dtype, _FP8)
        and block_size >= _MIN_BLOCK_SIZE
        and block_size & (block_size - 1) == 0
        and pages.stride(0) % layer.head_dim == 0
        and pages.data_ptr() % 16 == 0
    )


class Prefill:
    """Launches of prefill_kernel."""

    def __init__(self) -> None:
        from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

        from ratoon.attention import triton_prefill_kernels
        from ratoon.layers.triton.dependent import launch_options
        from ratoon.layers.triton.launch import launch

        self._kernel: Any = triton_prefill_kernels.prefill_kernel
        self._lines = PageLines(partial(TensorDescriptor, layout=triton_prefill_kernels.TILE_LAYOUT.value))
        self._launch, self._launch_options = launch, launch_options

    def attend(
        self,
        layer: AttentionLayer | CrossAttentionLayer,
        q: Tensor,
        out: Tensor,
        pages: Tensor,
        table: Tensor,
        inputs: CommonAttentionMetadata,
        shortest: int,
        num_programs: int,
        dependent: bool,
    ) -> None:
        """The rows of `out` [T, heads · head_dim] that belong to requests of `shortest` or more query tokens. `table`:
        where their blocks are in `pages`. `num_programs`: that run at once, one on each multiprocessor."""
        group, block_size = layer.num_heads // layer.num_kv_heads, inputs.block_size
        num_requests = inputs.seq_lens_device.shape[0]
        num_places = (q.shape[0] * group // BLOCK_M + num_requests) * layer.num_kv_heads  # see _find_request
        lines_each = pages.stride(0) // layer.head_dim
        num_lines = (pages.shape[0] - 1) * lines_each + 2 * layer.num_kv_heads * block_size
        lines = self._lines.describe(pages, num_lines, layer.head_dim, prefill_box(block_size))
        self._launch(
            self._kernel, (min(num_places, num_programs),),
            q, out, lines, table, inputs.query_start_loc_device, inputs.seq_lens_device,
            q if layer.sinks is None else layer.sinks, layer.scale * LOG2_E, q.stride(0), q.stride(1), lines_each,
            table.stride(0), num_places, num_requests, shortest, layer.window or 0,
            **prefill_constants(
                layer.num_heads, layer.num_kv_heads, layer.head_dim, block_size, layer.causal, layer.window is not None,
                layer.sinks is not None,
            ), **self._launch_options(dependent),
        )  # fmt: skip
