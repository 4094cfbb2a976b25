"""The CUDA backend: kernels in Triton (triton_kernels.py) for any mixture of prefill, decode and continuations.

Here: what it supports, tiles, grids, splits of keys, scratch memory. A step needs no host synchronisation, and every
launch depends only on tensors on the device and on upper bounds, so it can be captured in a CUDA graph.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from importlib.util import find_spec
from typing import Any

import numpy as np
import torch

from ratoon.attention.interface import AttentionBackend, AttentionNeeds, CommonAttentionMetadata, LayerCache
from ratoon.core.kv import AttentionSpec, KVCacheSpec
from ratoon.layers.attention import AttentionLayer, CrossAttentionLayer, HeadTransform

Tensor = torch.Tensor

LOG2_E = 1.4426950408889634
_DTYPES = (torch.float32, torch.bfloat16, torch.float16)
_MAX_HEAD_DIM = 256
_MIN_CAPABILITY = (8, 0)  # of a CUDA device: bfloat16 in tensor cores
_SHORT_ROWS = 64  # query tokens × query heads of a KV head: up to here a request's keys are split among programs
_PROGRAMS_PER_SM = 4  # that splitting aims at
_MAX_SPLITS = 32
_CHUNK = 256  # keys of a split that is the same in any batch
_MERGED_ELEMENTS = 8192  # that a program merges at a time
_MAX_TILES = 2**18  # that can be split in one launch
_MAX_PARTS = 2**20  # of split keys: rows × splits; half a GiB of scratch with heads of 128


@dataclass(frozen=True, slots=True)
class Tiles:
    """How attention_kernel is compiled for one kind of request."""

    block_m: int  # rows: query tokens × query heads of a KV head
    block_n: int  # keys
    num_warps: int
    num_stages: int
    clear_loop: bool  # tiles without masks have a loop of their own


def choose_tiles(head_dim: int, dtype: torch.dtype, max_rows: int | None, batch_invariant: bool = False) -> Tiles:
    """`max_rows`: of the longest request whose keys are split; None: requests of any length, not split."""
    dim = _power_of_two(head_dim)
    if dtype == torch.float32:  # multiplied without tensor cores, to full precision
        block_m = 16 if max_rows is not None and not batch_invariant else 32
        return Tiles(block_m, 32 if dim <= 128 else 16, 4 if dim <= 64 else 8, 2, False)
    if batch_invariant:  # one shape for all requests: another one may sum in another order
        return Tiles(64, 64 if dim <= 128 else 32, 4, 3, False)
    if max_rows is not None:
        block_m = min(max(16, _power_of_two(max_rows)), _SHORT_ROWS)
        return Tiles(block_m, 128 if dim <= 64 else 64 if dim <= 128 else 32, 4, 3, False)
    if dim <= 64:
        return Tiles(128, 128, 8, 3, True)
    if dim <= 128:
        return Tiles(128, 64, 8, 3, True)
    return Tiles(128, 32, 8, 2, True)


def choose_store_tile(num_tokens: int) -> tuple[int, int]:
    """Tokens and heads that one program of store_kernel transforms and writes."""
    return (1, 4) if num_tokens <= 512 else (4, 4)


def choose_num_splits(num_tiles: int, num_kv_heads: int, max_seq_len: int, block_n: int, num_sms: int) -> int:
    """In how many parts keys are divided, so that a small batch occupies the device too. A function of upper bounds
    only: the parts of a captured step stay when its sequences grow."""
    wanted = _PROGRAMS_PER_SM * num_sms // max(1, num_tiles * num_kv_heads)
    return max(1, min(wanted, _MAX_SPLITS, -(-max_seq_len // block_n)))


@dataclass(frozen=True, slots=True)
class LaunchPlan:
    """Which requests there are in a step, for layers with as many query heads per KV head."""

    longest_short: int  # query tokens of the longest request whose keys are split; 0: there is none
    has_long: bool


def plan_launches(query_lens: np.ndarray | None, max_query_len: int, group: int) -> LaunchPlan:
    """`query_lens`: None if a captured step will run with others."""
    limit = max(1, _SHORT_ROWS // group)
    if max_query_len <= limit:
        return LaunchPlan(max_query_len, False)
    if query_lens is None:
        return LaunchPlan(limit, True)
    return LaunchPlan(int(query_lens[query_lens <= limit].max(initial=0)), True)


@dataclass(slots=True)
class TritonMetadata:
    inputs: CommonAttentionMetadata
    num_requests: int
    query_lens: np.ndarray | None  # None: they differ when a captured step is replayed
    plans: dict[int, LaunchPlan]  # by query heads per KV head

    def plan(self, group: int) -> LaunchPlan:
        if group not in self.plans:
            self.plans[group] = plan_launches(self.query_lens, self.inputs.max_query_len, group)
        return self.plans[group]


class Scratch:
    """Partial results of split keys, and how many programs of a tile have arrived. Grows; what it was before stays
    allocated, because captured graphs hold its addresses."""

    def __init__(self) -> None:
        self._outgrown: list[tuple[Tensor, Tensor]] = []
        self._acc: Tensor | None = None
        self._sums: Tensor | None = None
        self._arrived: Tensor | None = None

    def take(self, num_parts: int, head_dim: int, device: torch.device) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """→ weighted sums [num_parts, head_dim], maxima and sums [num_parts] each, counters (all zero)."""
        if self._arrived is None:
            self._arrived = torch.zeros(_MAX_TILES, dtype=torch.int32, device=device)
        if self._acc is None or self._sums is None or self._acc.numel() < num_parts * head_dim:
            if self._acc is not None and self._sums is not None:
                self._outgrown.append((self._acc, self._sums))
            size = max(_power_of_two(num_parts), 2**14)
            self._acc = torch.empty(size * head_dim, dtype=torch.float32, device=device)
            self._sums = torch.empty(2, size, dtype=torch.float32, device=device)
        return self._acc, self._sums[0], self._sums[1], self._arrived


class TritonAttentionBackend(AttentionBackend):
    """`batch_invariant`: a row's result is the same to the bit in any batch and any chunk. `tiles`, `num_splits`,
    `fused_merge`: for measurements, instead of what is chosen here."""

    name = "triton"
    supports_graphs = True

    def __init__(
        self,
        batch_invariant: bool = False,
        tiles: Tiles | None = None,
        num_splits: int | None = None,
        fused_merge: bool = True,
    ) -> None:
        from ratoon.attention import triton_kernels  # triton may be absent, see `reasons_against`

        self._kernels: Any = triton_kernels
        self._batch_invariant = batch_invariant
        self._tiles = tiles
        self._num_splits = num_splits
        self._fused_merge = fused_merge
        self._scratch = Scratch()

    @classmethod
    def reasons_against(cls, needs: AttentionNeeds) -> list[str]:
        reasons = []
        if needs.device_type != "cuda":
            reasons.append(f"runs on CUDA, not on {needs.device_type}")
        elif torch.cuda.is_available() and torch.cuda.get_device_capability() < _MIN_CAPABILITY:
            reasons.append(f"needs compute capability {_MIN_CAPABILITY[0]}.{_MIN_CAPABILITY[1]} or newer")
        if find_spec("triton") is None:
            reasons.append("triton is not installed")
        if needs.dtype not in _DTYPES:
            reasons.append(f"computes in float32, bfloat16 or float16, not in {needs.dtype}")
        if needs.head_dim > _MAX_HEAD_DIM:
            reasons.append(f"head_dim must be at most {_MAX_HEAD_DIM}, not {needs.head_dim}")
        if needs.content != AttentionSpec.content:
            reasons.append(f"reads {AttentionSpec.content}, not {needs.content}")
        return reasons

    def page_shapes(self, spec: KVCacheSpec) -> list[tuple[int, ...]]:
        ((parts, block_size, num_kv_heads, head_dim),) = super().page_shapes(spec)
        return [(parts, num_kv_heads, block_size, head_dim)]

    def build_metadata(self, inputs: CommonAttentionMetadata) -> TritonMetadata:
        query_lens = None if inputs.is_padded else np.diff(inputs.query_start_loc)
        return TritonMetadata(inputs, inputs.seq_lens_device.shape[0], query_lens, {})

    def store(
        self,
        layer: AttentionLayer | CrossAttentionLayer,
        k: Tensor,
        v: Tensor,
        kv_cache: LayerCache,
        metadata: TritonMetadata,
    ) -> None:
        self._store(layer, k, k, v, kv_cache, metadata, None)

    def forward(
        self,
        layer: AttentionLayer,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        kv_cache: LayerCache,
        metadata: TritonMetadata,
        transform: HeadTransform | None = None,
    ) -> Tensor:
        self._store(layer, q, k, v, kv_cache, metadata, transform)
        return self.attend(layer, q, kv_cache, metadata)

    def attend(
        self,
        layer: AttentionLayer | CrossAttentionLayer,
        q: Tensor,
        kv_cache: LayerCache,
        metadata: TritonMetadata,
    ) -> Tensor:
        out = torch.empty(q.shape[0], layer.num_heads * layer.head_dim, dtype=q.dtype, device=q.device)
        plan = metadata.plan(layer.num_heads // layer.num_kv_heads)
        if plan.has_long:
            self._attend_long(layer, q, out, kv_cache, metadata, plan.longest_short + 1)
        if plan.longest_short:
            self._attend_short(layer, q, out, kv_cache, metadata, plan.longest_short)
        return out

    # ---- launches ----

    def _store(
        self,
        layer: AttentionLayer | CrossAttentionLayer,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        kv_cache: LayerCache,
        metadata: TritonMetadata,
        transform: HeadTransform | None,
    ) -> None:
        (pages,) = kv_cache
        num_tokens = k.shape[0]
        rotary = None if transform is None else transform.rotary
        q_norm = None if transform is None else transform.q_norm
        k_norm = None if transform is None else transform.k_norm
        half = -(-layer.head_dim // 2) if rotary is None else rotary.cos_sin.shape[1] // 2
        q_heads = layer.num_heads if rotary is not None or q_norm is not None else 0
        tokens, heads = choose_store_tile(num_tokens)
        num_blocks = -(-q_heads // heads) + 2 * -(-layer.num_kv_heads // heads)
        slots = metadata.inputs.slot_mapping
        self._kernels.store_kernel[(-(-num_tokens // tokens), num_blocks)](
            q, k, v, pages, slots, slots if rotary is None or transform is None else transform.positions,
            k if rotary is None else rotary.cos_sin, k if q_norm is None else q_norm.weight,
            k if k_norm is None else k_norm.weight, 0.0 if q_norm is None else q_norm.eps,
            0.0 if k_norm is None else k_norm.eps, num_tokens, q.stride(0), k.stride(0), v.stride(0), q.stride(1),
            k.stride(1), v.stride(1), pages.stride(0), Q_HEADS=q_heads, KV_HEADS=layer.num_kv_heads,
            HEAD_DIM=layer.head_dim, BLOCK_SIZE=metadata.inputs.block_size, HALF=half, HALF_PAD=_power_of_two(half),
            REST_PAD=_power_of_two(max(1, layer.head_dim - 2 * half)), HAS_Q_NORM=q_norm is not None,
            HAS_K_NORM=k_norm is not None, HAS_ROTARY=rotary is not None, TOKENS=tokens, HEADS=heads, num_warps=4,
        )  # fmt: skip

    def _attend_long(
        self,
        layer: AttentionLayer | CrossAttentionLayer,
        q: Tensor,
        out: Tensor,
        kv_cache: LayerCache,
        metadata: TritonMetadata,
        shortest: int,
    ) -> None:
        """Requests of `shortest` or more query tokens. A program attends to all keys of its tile."""
        group = layer.num_heads // layer.num_kv_heads
        tiles = self._tiles or choose_tiles(layer.head_dim, q.dtype, None, self._batch_invariant)
        # An upper bound: see _find_request
        grid = (q.shape[0] * group // tiles.block_m + metadata.num_requests, layer.num_kv_heads, 1)
        self._launch(
            grid, layer, q, out, kv_cache, metadata, tiles, (shortest, 2**31 - 1), (out, out, out, out), 1,
            TILES=0, SPLIT=False, MERGE_ROWS=0, SPLITS_PAD=1,
        )  # fmt: skip

    def _attend_short(
        self,
        layer: AttentionLayer | CrossAttentionLayer,
        q: Tensor,
        out: Tensor,
        kv_cache: LayerCache,
        metadata: TritonMetadata,
        longest: int,
    ) -> None:
        """Requests of up to `longest` query tokens. Their keys are split among programs."""
        group, dim = layer.num_heads // layer.num_kv_heads, _power_of_two(layer.head_dim)
        tiles = self._tiles or choose_tiles(layer.head_dim, q.dtype, longest * group, self._batch_invariant)
        tiles_each = -(-longest * group // tiles.block_m)
        num_tiles = tiles_each * metadata.num_requests
        num_splits = self._splits_of(layer, metadata, num_tiles, tiles.block_n, q.device)
        num_splits = limit_splits(num_splits, q.shape[0] * layer.num_heads, self._batch_invariant)
        if num_splits == 1 or num_tiles * layer.num_kv_heads > _MAX_TILES:
            grid = (num_tiles, layer.num_kv_heads, 1)
            self._launch(
                grid, layer, q, out, kv_cache, metadata, tiles, (1, longest), (out, out, out, out), 1,
                TILES=tiles_each, SPLIT=False, MERGE_ROWS=0, SPLITS_PAD=1,
            )  # fmt: skip
            return
        parts = self._scratch.take(q.shape[0] * layer.num_heads * num_splits, layer.head_dim, q.device)
        splits_pad = 1 if self._batch_invariant else _power_of_two(max(num_splits, 16))
        merge_rows = min(max(1, _MERGED_ELEMENTS // (splits_pad * dim)), tiles.block_m, 16)
        self._launch(
            (num_tiles, layer.num_kv_heads, num_splits), layer, q, out, kv_cache, metadata, tiles, (1, longest), parts,
            num_splits, TILES=tiles_each, SPLIT=True, MERGE_ROWS=merge_rows if self._fused_merge else 0,
            SPLITS_PAD=splits_pad,
        )  # fmt: skip
        if self._fused_merge:
            return
        acc, peak, total, _ = parts
        inputs = metadata.inputs
        self._kernels.merge_kernel[(num_tiles, layer.num_kv_heads, -(-tiles.block_m // merge_rows))](
            out, inputs.query_start_loc_device, inputs.seq_lens_device, acc, peak, total, longest, layer.window or 0,
            num_splits, HEAD_DIM=layer.head_dim, DIM_PAD=dim, GROUP=group, KV_HEADS=layer.num_kv_heads,
            BLOCK_M=tiles.block_m, BLOCK_N=tiles.block_n, CAUSAL=layer.causal, HAS_WINDOW=layer.window is not None,
            TILES=tiles_each, CHUNK=self._chunk, MERGE_ROWS=merge_rows, SPLITS_PAD=splits_pad, num_warps=4,
        )  # fmt: skip

    def _launch(
        self,
        grid: tuple[int, int, int],
        layer: AttentionLayer | CrossAttentionLayer,
        q: Tensor,
        out: Tensor,
        kv_cache: LayerCache,
        metadata: TritonMetadata,
        tiles: Tiles,
        query_lens: tuple[int, int],
        parts: tuple[Tensor, Tensor, Tensor, Tensor],
        num_splits: int,
        **constants: Any,
    ) -> None:
        (pages,) = kv_cache
        inputs, bias = metadata.inputs, layer.bias
        table = inputs.block_table_device
        self._kernels.attention_kernel[grid](
            q, out, pages, table, inputs.query_start_loc_device, inputs.seq_lens_device, out if bias is None else bias,
            *parts, layer.scale * LOG2_E, q.stride(0), q.stride(1), pages.stride(0), table.stride(0),
            metadata.num_requests, *query_lens, layer.window or 0, 0 if bias is None else bias.shape[1] // 2,
            num_splits, HEAD_DIM=layer.head_dim, DIM_PAD=_power_of_two(layer.head_dim),
            GROUP=layer.num_heads // layer.num_kv_heads, KV_HEADS=layer.num_kv_heads, BLOCK_SIZE=inputs.block_size,
            BLOCK_M=tiles.block_m, BLOCK_N=tiles.block_n, CAUSAL=layer.causal, HAS_WINDOW=layer.window is not None,
            HAS_BIAS=bias is not None, CLEAR_LOOP=tiles.clear_loop, CHUNK=self._chunk, num_warps=tiles.num_warps,
            num_stages=tiles.num_stages, **constants,
        )  # fmt: skip

    @property
    def _chunk(self) -> int:
        return _CHUNK if self._batch_invariant else 0

    def _splits_of(
        self,
        layer: AttentionLayer | CrossAttentionLayer,
        metadata: TritonMetadata,
        num_tiles: int,
        block_n: int,
        device: torch.device,
    ) -> int:
        inputs = metadata.inputs
        if self._batch_invariant:
            longest = inputs.max_seq_len
            if layer.window is not None:  # a window may begin inside a chunk
                longest = min(longest, layer.window + inputs.max_query_len + _CHUNK)
            return -(-longest // _CHUNK)
        if self._num_splits is not None:
            return self._num_splits
        num_sms = num_multiprocessors(device)
        return choose_num_splits(num_tiles, layer.num_kv_heads, inputs.max_seq_len, block_n, num_sms)


def limit_splits(num_splits: int, num_rows: int, batch_invariant: bool) -> int:
    """As many as the scratch may hold. Its rows are those of all tokens of a step: beside a long prompt, many splits of
    a few short requests would take gigabytes. Splits that must be the same in any batch are all made or none."""
    if num_rows * num_splits <= _MAX_PARTS:
        return num_splits
    return 1 if batch_invariant else max(1, _MAX_PARTS // num_rows)


@cache
def num_multiprocessors(device: torch.device) -> int:
    if device.type != "cuda":  # the interpreter
        return 8
    return torch.cuda.get_device_properties(device).multi_processor_count


def _power_of_two(number: int) -> int:
    """The next one; at least 16, the smallest side of a product in tensor cores."""
    return max(16, 1 << (number - 1).bit_length())
