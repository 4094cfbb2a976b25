"""Attention of many requests of one token, with all programs equally busy: what the kernels of
triton_balanced_kernels.py serve, and their launches.

Steps with few requests run in triton_decode.py. Other GPUs, float32, biases, soft caps, other sizes of heads, and
results with the same bits in any batch are triton_kernels.py's.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

from ratoon.attention.interface import CommonAttentionMetadata
from ratoon.layers.attention import AttentionLayer, CrossAttentionLayer

Tensor = torch.Tensor

LOG2_E = 1.4426950408889634
_DTYPES = (torch.bfloat16, torch.float16)
_FP8 = torch.float8_e4m3fn
_HEAD_DIMS = (16, 32, 64, 128)  # a power of two; fp8 is read in pairs, of which a product takes 16 at least
_HEADS = 8  # columns of products: query heads of a KV head
_STEP = 256  # requests, tiles or boxes that a program of plan_kernel reads or writes at a time
_NUMBERS = 4  # that plan_kernel writes for a tile, and 16 at the beginning
_MAX_LINES = 2**31  # heads of one key or value, of all pages
_MAX_TILES = 2**19  # of a KV head, by the bound of lengths: the plan has room for all


@dataclass(frozen=True, slots=True)
class Balance:
    """How balanced_kernel is compiled, and how many of its programs a multiprocessor holds at once: more would begin
    when the others end."""

    block_n: int  # keys of a tile
    num_stages: int
    programs_per_sm: int
    num_warps: int = 4
    max_registers: int | None = None


def choose_balance(kv_dtype: torch.dtype) -> Balance:
    return Balance(128, 3, 2) if kv_dtype == _FP8 else Balance(64, 4, 2)


def serves(
    layer: AttentionLayer | CrossAttentionLayer, dtype: torch.dtype, pages: Tensor, block_size: int, block_n: int
) -> bool:
    return (
        layer.causal
        and layer.bias is None
        and layer.soft_cap is None
        and layer.num_heads // layer.num_kv_heads <= _HEADS
        and layer.head_dim in (_HEAD_DIMS[1:] if pages.dtype == _FP8 else _HEAD_DIMS)
        and dtype in _DTYPES
        and pages.dtype in (dtype, _FP8)
        and pages.stride(0) % layer.head_dim == 0
        and pages.shape[0] * (pages.stride(0) // layer.head_dim) < _MAX_LINES
        and (block_size % block_n == 0 or block_n % block_size == 0)
    )


class EvenPlan(NamedTuple):
    """How the keys of a step are divided among programs."""

    tiles: Tensor  # see plan_kernel
    boxes: Tensor
    capacity: int


class BalancedDecode:
    """Launches of plan_kernel and balanced_kernel."""

    def __init__(self, balance: Balance | None = None) -> None:
        """`balance`: instead of what is chosen here."""
        from ratoon.attention import triton_balanced_kernels
        from ratoon.layers.triton.dependent import launch_options
        from ratoon.layers.triton.launch import launch

        self._kernels: Any = triton_balanced_kernels
        self._balance = balance
        self._launch, self._launch_options = launch, launch_options

    def balance(self, kv_dtype: torch.dtype) -> Balance:
        return self._balance or choose_balance(kv_dtype)

    def plan(
        self, inputs: CommonAttentionMetadata, block_n: int, window: int | None, lines_each: int, dependent: bool
    ) -> EvenPlan | None:
        """Returns the plan of a step, which all layers with these numbers share. `lines_each`: heads of one key or
        value that a page has room for. None: there could be too many tiles."""
        lengths, table, box = inputs.seq_lens_device, inputs.block_table_device, min(block_n, inputs.block_size)
        longest = inputs.max_seq_len if window is None else min(inputs.max_seq_len, window + block_n)
        capacity = lengths.shape[0] * -(-longest // block_n)
        if capacity > _MAX_TILES:
            return None
        tiles = torch.empty(16 + _NUMBERS * capacity, dtype=torch.int32, device=lengths.device)
        boxes = torch.empty(capacity * (block_n // box), dtype=torch.int32, device=lengths.device)
        self._launch(
            self._kernels.plan_kernel, (lengths.shape[0],),
            inputs.query_start_loc_device, lengths, table, tiles, boxes, table.stride(0), lines_each, lengths.shape[0],
            window or 0, capacity, BLOCK_SIZE=inputs.block_size, BLOCK_N=block_n, BOX=box,
            HAS_WINDOW=window is not None, STEP=_STEP, num_warps=4, **self._launch_options(dependent),
        )  # fmt: skip
        return EvenPlan(tiles, boxes, capacity)

    def attend(
        self,
        layer: AttentionLayer | CrossAttentionLayer,
        q: Tensor,
        out: Tensor,
        pages: Tensor,
        block_size: int,
        plan: EvenPlan,
        parts: tuple[Tensor, Tensor, Tensor, Tensor],
        num_programs: int,
        dependent: bool,
    ) -> None:
        """The rows of `out` [T, heads · head_dim] that belong to requests of one token. `parts`: see Scratch; two for
        each program and query head of a KV head. `num_programs`: as many as there are KV heads, or more."""
        group, balance = layer.num_heads // layer.num_kv_heads, self.balance(pages.dtype)
        registers = {} if balance.max_registers is None else {"maxnreg": balance.max_registers}
        self._launch(
            self._kernels.balanced_kernel, (num_programs // layer.num_kv_heads, layer.num_kv_heads),
            q, out, pages, plan.tiles, plan.boxes, *parts, q if layer.sinks is None else layer.sinks,
            layer.scale * LOG2_E, q.stride(0), q.stride(1), plan.capacity,
            HEAD_DIM=layer.head_dim, GROUP=group, HEADS=_HEADS, KV_HEADS=layer.num_kv_heads,
            BLOCK_SIZE=block_size, BLOCK_N=balance.block_n, BOX=min(balance.block_n, block_size),
            HAS_WINDOW=layer.window is not None, PAIRED=pages.dtype == _FP8, STAGES=balance.num_stages,
            HAS_SINKS=layer.sinks is not None,
            num_warps=balance.num_warps, num_stages=balance.num_stages, **registers,
            **self._launch_options(dependent),
        )  # fmt: skip
