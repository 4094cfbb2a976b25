"""Attention of many requests of one token, with all programs equally busy: what the kernels of
triton_balanced_kernels.py serve, and their launches.

Steps with few requests run in triton_decode.py. So many requests that programs end together anyway, other GPUs,
float32, biases, other sizes of heads, and results with the same bits in any batch are triton_kernels.py's.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from ratoon.attention.interface import CommonAttentionMetadata
from ratoon.attention.page_lines import PageLines
from ratoon.layers.attention import AttentionLayer, CrossAttentionLayer

Tensor = torch.Tensor

LOG2_E = 1.4426950408889634
_DTYPES = (torch.bfloat16, torch.float16)
_FP8 = torch.float8_e4m3fn
_HEAD_DIMS = (16, 32, 64, 128)  # a power of two: columns of a box; of fp8 pairs, of which a product takes 16 at least
_MIN_BOX = 16  # keys of a box, which a product sums over
_BLOCK_M = 16  # rows of a product in tensor cores, here query heads of a KV head
_STEP = 256  # requests or programs that a program of plan_kernel reads or writes at a time
MAX_TILES_PER_SM = 5  # requests × KV heads; more are as even without this, and attention_kernel's loop is faster


@dataclass(frozen=True, slots=True)
class Balance:
    """How balanced_kernel is compiled, and how many of its programs a multiprocessor holds at once: more would begin
    when the others end."""

    block_n: int  # keys of a tile
    num_stages: int
    programs_per_sm: int


def choose_balance(kv_dtype: torch.dtype) -> Balance:
    return Balance(32, 3, 8) if kv_dtype == _FP8 else Balance(16, 4, 7)


def serves(
    layer: AttentionLayer | CrossAttentionLayer, dtype: torch.dtype, pages: Tensor, block_size: int, block_n: int
) -> bool:
    return (
        layer.causal
        and layer.bias is None
        and layer.num_heads // layer.num_kv_heads <= _BLOCK_M
        and layer.head_dim in (_HEAD_DIMS[1:] if pages.dtype == _FP8 else _HEAD_DIMS)
        and dtype in _DTYPES
        and pages.dtype in (dtype, _FP8)
        and (block_size % block_n == 0 or (2 * block_size == block_n and block_size >= _MIN_BOX))
        and pages.stride(0) % layer.head_dim == 0
        and pages.data_ptr() % 16 == 0
    )


class BalancedDecode:
    """Launches of plan_kernel and balanced_kernel."""

    def __init__(self, balance: Balance | None = None) -> None:
        """`balance`: instead of what is chosen here."""
        from triton.tools.tensor_descriptor import TensorDescriptor

        from ratoon.attention import triton_balanced_kernels
        from ratoon.layers.triton.dependent import INTERPRETED, launch_options
        from ratoon.layers.triton.launch import launch

        self._kernels: Any = triton_balanced_kernels
        self._balance = balance
        self._lines = PageLines(TensorDescriptor, keeps_tensors=INTERPRETED)
        self._launch, self._launch_options = launch, launch_options

    def balance(self, kv_dtype: torch.dtype) -> Balance:
        return self._balance or choose_balance(kv_dtype)

    def plan(
        self,
        inputs: CommonAttentionMetadata,
        num_kv_heads: int,
        block_n: int,
        window: int | None,
        num_programs: int,
        dependent: bool,
    ) -> Tensor:
        """How the keys of a step are divided among programs; the same for all layers with these numbers."""
        num_requests = inputs.seq_lens_device.shape[0]
        plan = torch.empty(num_requests + 1 + num_programs, dtype=torch.int32, device=inputs.seq_lens_device.device)
        self._launch(
            self._kernels.plan_kernel, (num_requests,),
            inputs.query_start_loc_device, inputs.seq_lens_device, plan, num_requests, num_programs, window or 0,
            KV_HEADS=num_kv_heads, BLOCK_N=block_n, HAS_WINDOW=window is not None, STEP=_STEP, num_warps=4,
            **self._launch_options(dependent),
        )  # fmt: skip
        return plan

    def attend(
        self,
        layer: AttentionLayer | CrossAttentionLayer,
        q: Tensor,
        out: Tensor,
        pages: Tensor,
        inputs: CommonAttentionMetadata,
        plan: Tensor,
        parts: tuple[Tensor, Tensor, Tensor, Tensor],
        num_programs: int,
        dependent: bool,
    ) -> None:
        """The rows of `out` [T, heads · head_dim] that belong to requests of one token. `parts`: see Scratch; two for
        each program and query head of a KV head."""
        group, balance, table = (
            layer.num_heads // layer.num_kv_heads,
            self.balance(pages.dtype),
            inputs.block_table_device,
        )
        self._launch(
            self._kernels.balanced_kernel, (num_programs,),
            q, out, pages, self._describe(layer, pages, inputs.block_size, balance.block_n), table,
            inputs.query_start_loc_device, inputs.seq_lens_device, plan, *parts, layer.scale * LOG2_E, q.stride(0),
            q.stride(1), pages.stride(0), pages.stride(0) // layer.head_dim, table.stride(0),
            inputs.seq_lens_device.shape[0], layer.window or 0, HEAD_DIM=layer.head_dim, GROUP=group,
            GROUP_PAD=1 << (group - 1).bit_length(), KV_HEADS=layer.num_kv_heads, BLOCK_SIZE=inputs.block_size,
            BLOCK_M=_BLOCK_M, BLOCK_N=balance.block_n, BOX=min(balance.block_n, inputs.block_size),
            STAGES=balance.num_stages, HAS_WINDOW=layer.window is not None, PAIRED=pages.dtype == _FP8,
            num_warps=1, **self._launch_options(dependent),
        )  # fmt: skip

    def _describe(
        self, layer: AttentionLayer | CrossAttentionLayer, pages: Tensor, block_size: int, block_n: int
    ) -> Any:
        """The pages as lines, which are copied in boxes of a page or a tile."""
        width, dtype = layer.head_dim, pages.dtype
        num_lines = ((pages.shape[0] - 1) * pages.stride(0)) // width + 2 * layer.num_kv_heads * block_size
        if dtype == _FP8:
            width, dtype = width // 2, torch.uint16  # pairs
        return self._lines.describe(pages, num_lines, width, [min(block_size, block_n), width], dtype)
