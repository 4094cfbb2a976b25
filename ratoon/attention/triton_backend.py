"""The CUDA backend: kernels in Triton (triton_kernels.py, triton_decode.py, triton_store.py) for any mixture of
prefill, decode and continuations.

Here: what it supports, tiles, grids, splits of keys, scratch memory. A step needs no host synchronisation, and every
launch depends only on tensors on the device and on upper bounds, so it can be captured in a CUDA graph.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from functools import cache
from importlib.util import find_spec
from typing import Any

import numpy as np
import torch

from ratoon.attention.interface import AttentionBackend, AttentionNeeds, CommonAttentionMetadata, LayerCache
from ratoon.attention.shared_prefix import group_prefixes, shared_prefixes
from ratoon.attention.triton_prefill import LongPages, Prefill, find_long_pages, has_wgmma, serves, widen
from ratoon.core.kv import AttentionSpec, KVCacheSpec
from ratoon.layers.attention import AttentionLayer, CrossAttentionLayer, HeadTransform

Tensor = torch.Tensor

LOG2_E = 1.4426950408889634
_DTYPES = (torch.float32, torch.bfloat16, torch.float16)
_MAX_HEAD_DIM = 256
_MIN_CAPABILITY = (8, 0)  # of a CUDA device: bfloat16 in tensor cores
_MIN_FP8_CAPABILITY = (8, 9)
_SHORT_ROWS = 64  # query tokens × query heads of a KV head: up to here a request's keys are split among programs
_MAX_SHARED_REQUESTS = 64  # of a step, up to which programs are divided among requests by their keys
_PROGRAMS_PER_SM = 1  # that splitting aims at
_MAX_SPLITS = 32
_MAX_FUSED_TILES_PER_SM = 2  # requests × KV heads: up to here one kernel transforms, stores and attends
_CHUNK = 256  # keys of a split that is the same in any batch
_MERGED_ELEMENTS = 8192  # that a program merges at a time
_MAX_TILES = 2**18  # that can be split in one launch
_MAX_PARTS = 2**20  # of split keys: rows × splits; half a GiB of scratch with heads of 128
_MIN_SHARED = 64  # keys of a prefix that requests attend to together
_MIN_SAVED = 2**14  # keys that are read less often because of it: fewer are not worth the launches


@dataclass(frozen=True, slots=True)
class Tiles:
    """How attention_kernel is compiled for one kind of request."""

    block_m: int  # rows: query tokens × query heads of a KV head
    block_n: int  # keys
    num_warps: int
    num_stages: int
    clear_loop: bool  # tiles without masks have a loop of their own


def choose_tiles(
    head_dim: int, dtype: torch.dtype, max_rows: int | None, batch_invariant: bool = False, has_bias: bool = False,
    longest: int | None = None,
) -> Tiles:  # fmt: skip
    """`max_rows`: of the longest request whose keys are split; None: requests of any length, not split. `longest`: keys
    of a request, if that is known."""
    dim = _power_of_two(head_dim)
    if dtype == torch.float32:  # multiplied without tensor cores, to full precision
        block_m = 16 if max_rows is not None and not batch_invariant else 32
        return Tiles(block_m, 32 if dim <= 128 else 16, 4 if dim <= 64 else 8, 2, False)
    if batch_invariant:  # one shape for all requests: another one may sum in another order
        return Tiles(64, 64 if dim <= 128 else 32, 4, 3, False)
    if max_rows is not None:
        block_m = min(max(16, _power_of_two(max_rows)), _SHORT_ROWS)
        if block_m == 16 and longest is not None and longest <= 32:  # many small programs
            return Tiles(block_m, 32, 1, 2, False)
        return Tiles(block_m, 128 if dim <= 64 else 64 if dim <= 128 else 32, 4, 3, False)
    if dim <= 64 and not has_bias:  # a bias takes shared memory too
        return Tiles(128, 128, 8, 3, True)
    if dim <= 128:
        return Tiles(128, 64, 8, 3, True)
    return Tiles(128, 32, 8, 2, True)


def choose_decode_stages(num_tiles: int, device: torch.device) -> int:
    """Of the kernel for requests of one token. A few programs have one tile each, which is loaded before the others;
    where they fill the device, two of them on each multiprocessor keep it busy with more loads at a time."""
    return 2 if num_tiles <= num_multiprocessors(device) // 2 else 4


def choose_store_tile(num_tokens: int) -> tuple[int, int]:
    """Tokens and heads that one program of store_kernel transforms and writes."""
    return (1, 4) if num_tokens <= 512 else (4, 4)


def choose_num_splits(num_tiles: int, num_kv_heads: int, max_seq_len: int, block_n: int, num_sms: int) -> int:
    """In how many parts keys are divided, so that a small batch occupies the device too. A function of upper bounds
    only: a captured step has these programs for sequences of any length, and those without keys end at once."""
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
    if max_query_len <= (limit if query_lens is not None else max(limit, _MAX_SHARED_REQUESTS)):
        return LaunchPlan(max_query_len, False)
    if query_lens is None:
        return LaunchPlan(limit, True)
    return LaunchPlan(int(query_lens[query_lens <= limit].max(initial=0)), True)


@dataclass(slots=True)
class Cascade:
    """Short requests of a step in runs that share a prefix: it is attended to by all rows of a run together. A request
    without one is a run of its own, with a prefix of no keys."""

    num_runs: int
    starts: Tensor  # [runs + 1] query_start_loc of runs
    prefix_lens: Tensor  # [runs]
    tables: Tensor  # [runs, max_blocks] of each run's first request
    begins: Tensor  # [R] the first key of each request behind its prefix
    longest_prefix: int
    longest_suffix: int


def find_cascade(inputs: CommonAttentionMetadata, longest_short: int, causal: bool) -> Cascade | None:
    """None: too little would be saved."""
    query_lens = np.diff(inputs.query_start_loc)
    shared = shared_prefixes(inputs.block_table, inputs.seq_lens, inputs.block_size)
    if shared.sum() < _MIN_SAVED:
        return None
    # A prefix is what all queries of a run see: it ends before the first of them.
    limits = inputs.seq_lens - query_lens if causal else inputs.seq_lens
    firsts, prefixes = group_prefixes(shared, np.where(query_lens <= longest_short, limits, 0), _MIN_SHARED)
    sizes = np.diff(np.append(firsts, len(shared)))
    if (prefixes * (sizes - 1)).sum() < _MIN_SAVED:
        return None
    begins = np.repeat(prefixes, sizes)
    starts = inputs.query_start_loc[np.append(firsts, len(shared))]
    suffixes = (inputs.seq_lens - begins)[query_lens <= longest_short]
    parts = _copy_together((starts, prefixes, begins, firsts), inputs.seq_lens_device.device)
    tables = inputs.block_table_device.index_select(0, parts[3])
    return Cascade(len(firsts), parts[0], parts[1], tables, parts[2], int(prefixes.max()), max(1, int(suffixes.max())))


def _copy_together(arrays: tuple[np.ndarray, ...], device: torch.device) -> list[Tensor]:
    """Arrays on the device as int32, by one copy; each aligned to 16 bytes, as kernels expect of all tensors."""
    sizes = [-(-len(array) // 4) * 4 for array in arrays]
    packed = torch.zeros(sum(sizes), dtype=torch.int32, pin_memory=device.type == "cuda")
    for array, part in zip(arrays, packed.split(sizes), strict=True):
        part[: len(array)] = torch.from_numpy(array.astype(np.int32))
    parts = packed.to(device, non_blocking=True).split(sizes)
    return [part[: len(array)] for array, part in zip(arrays, parts, strict=True)]


@dataclass(slots=True)
class TritonMetadata:
    inputs: CommonAttentionMetadata
    num_requests: int
    query_lens: np.ndarray | None  # None: they differ when a captured step is replayed
    plans: dict[int, LaunchPlan]  # by query heads per KV head
    cascades: dict[tuple[int, bool], Cascade | None]  # by the longest short request, and whether layers are causal
    long_pages: dict[int, LongPages | None] = field(default_factory=dict)  # by the shortest long request

    def plan(self, group: int) -> LaunchPlan:
        if group not in self.plans:
            self.plans[group] = plan_launches(self.query_lens, self.inputs.max_query_len, group)
        return self.plans[group]

    def cascade(self, longest_short: int, causal: bool) -> Cascade | None:
        if self.query_lens is None:
            return None
        key = longest_short, causal
        if key not in self.cascades:
            self.cascades[key] = find_cascade(self.inputs, longest_short, causal)
        return self.cascades[key]

    def pages_of_long(self, shortest: int) -> LongPages | None:
        if shortest not in self.long_pages:
            self.long_pages[shortest] = find_long_pages(self.inputs, shortest)
        return self.long_pages[shortest]


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
    """`batch_invariant`: a row's result is the same to the bit in any batch and any chunk. The others are for
    measurements, instead of what is chosen here."""

    name = "triton"
    supports_graphs = True

    def __init__(
        self,
        batch_invariant: bool = False,
        tiles: Tiles | None = None,
        num_splits: int | None = None,
        min_share: int = 1,
        fused_store: bool | None = None,
        cascade: bool = True,
        dependent_launch: bool = True,
        early_loads: bool = True,
    ) -> None:
        # triton may be absent, see `reasons_against`
        from ratoon.attention import triton_decode, triton_kernels, triton_store
        from ratoon.layers.triton.launch import launch

        self._kernels: Any = triton_kernels
        self._decode_kernel: Any = triton_decode.decode_kernel
        self._store_kernel: Any = triton_store.store_kernel
        self._launch_kernel = launch
        self._batch_invariant = batch_invariant
        self._tiles = tiles
        self._num_splits = num_splits
        self._min_share = min_share
        self._fused_store = False if batch_invariant else fused_store
        self._cascade = cascade and not batch_invariant
        self._dependent = dependent_launch and can_launch_dependently()
        self._early_loads = early_loads
        self._scratch = Scratch()
        # Given tiles, and results with the same bits in any batch, are attention_kernel's alone.
        self._prefill = Prefill() if not batch_invariant and tiles is None and has_wgmma() else None

    @classmethod
    def reasons_against(cls, needs: AttentionNeeds) -> list[str]:
        reasons = []
        if needs.device_type != "cuda":
            reasons.append(f"runs on CUDA, not on {needs.device_type}")
        elif torch.cuda.is_available():
            major, minor = _MIN_CAPABILITY if needs.kv_dtype is None else _MIN_FP8_CAPABILITY
            if torch.cuda.get_device_capability() < (major, minor):
                what = "it" if needs.kv_dtype is None else "fp8"
                reasons.append(f"{what} needs compute capability {major}.{minor} or newer")
        if find_spec("triton") is None:
            reasons.append("triton is not installed")
        if needs.dtype not in _DTYPES:
            reasons.append(f"computes in float32, bfloat16 or float16, not in {needs.dtype}")
        if needs.kv_dtype not in (None, torch.float8_e4m3fn):
            reasons.append(f"keeps keys and values in {needs.dtype} or float8_e4m3fn, not in {needs.kv_dtype}")
        if needs.head_dim > _MAX_HEAD_DIM:
            reasons.append(f"head_dim must be at most {_MAX_HEAD_DIM}, not {needs.head_dim}")
        if needs.content != AttentionSpec.content:
            reasons.append(f"reads {AttentionSpec.content}, not {needs.content}")
        return reasons

    @classmethod
    def create(cls, needs: AttentionNeeds) -> TritonAttentionBackend:
        return cls(batch_invariant=needs.batch_invariant)

    def page_shapes(self, spec: KVCacheSpec) -> list[tuple[int, ...]]:
        ((parts, block_size, num_kv_heads, head_dim),) = super().page_shapes(spec)
        return [(parts, num_kv_heads, block_size, head_dim)]

    def build_metadata(self, inputs: CommonAttentionMetadata) -> TritonMetadata:
        query_lens = None if inputs.is_padded else np.diff(inputs.query_start_loc)
        return TritonMetadata(inputs, inputs.seq_lens_device.shape[0], query_lens, {}, {})

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
        if self._is_decode(layer, q, metadata):
            return self._decode(layer, q, k, v, kv_cache, metadata, transform)
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
            cascade = self._find_cascade(layer, q, metadata, plan.longest_short)
            if cascade is None:
                self._attend_short(layer, q, out, kv_cache, metadata, plan.longest_short)
            else:
                self._attend_cascade(layer, q, out, kv_cache, metadata, plan.longest_short, cascade)
        return out

    def _find_cascade(
        self, layer: AttentionLayer | CrossAttentionLayer, q: Tensor, metadata: TritonMetadata, longest: int
    ) -> Cascade | None:
        fits = 2 * q.shape[0] * layer.num_heads <= _MAX_PARTS
        if not self._cascade or not fits or layer.window is not None or layer.bias is not None:
            return None
        return metadata.cascade(longest, layer.causal)

    def _is_decode(self, layer: AttentionLayer, q: Tensor, metadata: TritonMetadata) -> bool:
        """Whether one kernel can transform, store and attend."""
        num_tiles = metadata.num_requests * layer.num_kv_heads
        is_small = num_tiles <= _MAX_FUSED_TILES_PER_SM * num_multiprocessors(q.device)
        if not (is_small if self._fused_store is None else self._fused_store):
            return False
        if metadata.inputs.max_query_len > 1 or layer.num_heads // layer.num_kv_heads > _SHORT_ROWS:
            return False
        return layer.causal and layer.bias is None and self._find_cascade(layer, q, metadata, 1) is None

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
        self._launch_kernel(
            self._store_kernel, (-(-num_tokens // tokens), num_blocks),
            q, k, v, pages, slots, slots if rotary is None or transform is None else transform.positions,
            k if rotary is None else rotary.cos_sin, k if q_norm is None else q_norm.weight,
            k if k_norm is None else k_norm.weight, 0.0 if q_norm is None else q_norm.eps,
            0.0 if k_norm is None else k_norm.eps, num_tokens, q.stride(0), k.stride(0), v.stride(0), q.stride(1),
            k.stride(1), v.stride(1), pages.stride(0), Q_HEADS=q_heads, KV_HEADS=layer.num_kv_heads,
            HEAD_DIM=layer.head_dim, BLOCK_SIZE=metadata.inputs.block_size, HALF=half, HALF_PAD=_power_of_two(half),
            REST_PAD=_power_of_two(max(1, layer.head_dim - 2 * half)), HAS_Q_NORM=q_norm is not None,
            HAS_K_NORM=k_norm is not None, HAS_ROTARY=rotary is not None, TOKENS=tokens, HEADS=heads,
            DEPENDENT=self._dependent, num_warps=4, **self._launch_options,
        )  # fmt: skip

    def _decode(
        self,
        layer: AttentionLayer,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        kv_cache: LayerCache,
        metadata: TritonMetadata,
        transform: HeadTransform | None,
    ) -> Tensor:
        """Transform, store and attend, for requests of one token."""
        (pages,) = kv_cache
        inputs = metadata.inputs
        out = torch.empty(q.shape[0], layer.num_heads * layer.head_dim, dtype=q.dtype, device=q.device)
        rotary = None if transform is None else transform.rotary
        q_norm = None if transform is None else transform.q_norm
        k_norm = None if transform is None else transform.k_norm
        half = -(-layer.head_dim // 2) if rotary is None else rotary.cos_sin.shape[1] // 2
        group, dim = layer.num_heads // layer.num_kv_heads, _power_of_two(layer.head_dim)
        tiles = self._tiles or choose_tiles(layer.head_dim, q.dtype, group)
        num_requests, num_rows = metadata.num_requests, q.shape[0] * layer.num_heads
        if self._tiles is None and q.dtype != torch.float32:
            tiles = replace(tiles, num_stages=choose_decode_stages(num_requests * layer.num_kv_heads, q.device))
        num_splits = self._splits_of(layer, metadata, num_requests, tiles.block_n, q.device)
        num_splits = limit_splits(num_splits, num_rows, False)
        if num_requests * layer.num_kv_heads > _MAX_TILES:
            num_splits = 1
        parts = (out,) * 4 if num_splits == 1 else self._scratch.take(num_rows * num_splits, layer.head_dim, q.device)
        splits_pad = 1 << (num_splits - 1).bit_length()
        table = inputs.block_table_device
        self._launch_kernel(
            self._decode_kernel, (num_requests, layer.num_kv_heads, num_splits),
            q, k, v, out, pages, table, inputs.query_start_loc_device, inputs.seq_lens_device, inputs.slot_mapping,
            inputs.slot_mapping if transform is None else transform.positions, q if rotary is None else rotary.cos_sin,
            q if q_norm is None else q_norm.weight, q if k_norm is None else k_norm.weight, *parts,
            0.0 if q_norm is None else q_norm.eps, 0.0 if k_norm is None else k_norm.eps, layer.scale * LOG2_E,
            q.stride(0), k.stride(0), v.stride(0), q.stride(1), k.stride(1), v.stride(1), pages.stride(0),
            table.stride(0), layer.window or 0, num_splits, self._min_share, HEAD_DIM=layer.head_dim, DIM_PAD=dim,
            HALF=half, GROUP=group, KV_HEADS=layer.num_kv_heads, BLOCK_SIZE=inputs.block_size, BLOCK_M=tiles.block_m,
            BLOCK_N=tiles.block_n, HAS_Q_NORM=q_norm is not None, HAS_K_NORM=k_norm is not None,
            HAS_ROTARY=rotary is not None, HAS_WINDOW=layer.window is not None, SPLIT=num_splits > 1,
            MERGE_ROWS=rows_merged_at_once(splits_pad, dim, group), SPLITS_PAD=splits_pad,
            PAIRED=is_paired(pages, q), LOADED=self._early_loads, DEPENDENT=self._dependent, num_warps=tiles.num_warps,
            num_stages=tiles.num_stages, **self._launch_options,
        )  # fmt: skip
        return out

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
        if self._attend_on_hopper(layer, q, out, kv_cache, metadata, shortest):
            return
        group = layer.num_heads // layer.num_kv_heads
        tiles = self._tiles or choose_tiles(
            layer.head_dim, q.dtype, None, self._batch_invariant, layer.bias is not None
        )
        # An upper bound: see _find_request
        grid = (q.shape[0] * group // tiles.block_m + metadata.num_requests, layer.num_kv_heads, 1)
        self._launch(
            grid, layer, q, out, kv_cache, metadata, tiles, (shortest, 2**31 - 1), (out, out, out, out), 1,
            CAUSAL=layer.causal, TILES=0, REQUESTS_PAD=0, SPLIT=False, MERGE_ROWS=1, SPLITS_PAD=1,
            PREFIX_TILE=0, KEEP_PARTS=False,
        )  # fmt: skip

    def _attend_on_hopper(
        self,
        layer: AttentionLayer | CrossAttentionLayer,
        q: Tensor,
        out: Tensor,
        kv_cache: LayerCache,
        metadata: TritonMetadata,
        shortest: int,
    ) -> bool:
        """As _attend_long, where the kernel of triton_prefill.py can do it; returns whether it did."""
        (pages,) = kv_cache
        inputs = metadata.inputs
        if self._prefill is None or not serves(layer, q.dtype, pages, inputs.block_size):
            return False
        table = inputs.block_table_device
        if pages.dtype != q.dtype:
            long_pages = metadata.pages_of_long(shortest)
            widened = None if long_pages is None else widen(pages, long_pages.blocks, q.dtype)
            if long_pages is None or widened is None:
                return False
            pages, table = widened, long_pages.table
        self._prefill.attend(
            layer, q, out, pages, table, inputs, shortest, num_multiprocessors(q.device), self._dependent
        )  # fmt: skip
        return True

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
        is_shared = not self._batch_invariant and longest > 1 and metadata.num_requests <= _MAX_SHARED_REQUESTS
        rows = group if is_shared and metadata.query_lens is None else longest * group
        tiles = self._tiles or choose_tiles(layer.head_dim, q.dtype, rows, self._batch_invariant)
        tiles_each = -(-longest * group // tiles.block_m)
        num_tiles = min(tiles_each * metadata.num_requests, q.shape[0] * -(-group // tiles.block_m))
        num_splits = self._splits_of(layer, metadata, 1 if is_shared else num_tiles, tiles.block_n, q.device)
        num_splits = limit_splits(num_splits, q.shape[0] * layer.num_heads, self._batch_invariant)
        if num_splits == 1 or num_tiles * layer.num_kv_heads > _MAX_TILES:
            grid = (tiles_each * metadata.num_requests, layer.num_kv_heads, 1)
            self._launch(
                grid, layer, q, out, kv_cache, metadata, tiles, (1, longest), (out, out, out, out), 1,
                CAUSAL=layer.causal, TILES=tiles_each, REQUESTS_PAD=0, SPLIT=False, MERGE_ROWS=1, SPLITS_PAD=1,
                PREFIX_TILE=0, KEEP_PARTS=False,
            )  # fmt: skip
            return
        parts = self._scratch.take(q.shape[0] * layer.num_heads * num_splits, layer.head_dim, q.device)
        splits_pad = 1 if self._batch_invariant else 1 << (num_splits - 1).bit_length()
        grid, requests_pad = (tiles_each * metadata.num_requests, layer.num_kv_heads, num_splits), 0
        if is_shared:
            requests_pad = _power_of_two(metadata.num_requests)
            num_places = num_tiles + -(-_PROGRAMS_PER_SM * num_multiprocessors(q.device) // layer.num_kv_heads)
            grid = (num_places, layer.num_kv_heads, 1)
        self._launch(
            grid, layer, q, out, kv_cache, metadata, tiles, (1, longest), parts, num_splits, CAUSAL=layer.causal,
            TILES=tiles_each, REQUESTS_PAD=requests_pad, SPLIT=True,
            MERGE_ROWS=rows_merged_at_once(splits_pad, dim, tiles.block_m), SPLITS_PAD=splits_pad, PREFIX_TILE=0,
            KEEP_PARTS=False,
        )  # fmt: skip

    def _attend_cascade(
        self,
        layer: AttentionLayer | CrossAttentionLayer,
        q: Tensor,
        out: Tensor,
        kv_cache: LayerCache,
        metadata: TritonMetadata,
        longest: int,
        cascade: Cascade,
    ) -> None:
        """As _attend_short, but all rows of a run attend to its prefix together, then each request to its own keys."""
        group, dim = layer.num_heads // layer.num_kv_heads, _power_of_two(layer.head_dim)
        prefix_tiles = choose_tiles(layer.head_dim, q.dtype, None)
        num_prefix_tiles = q.shape[0] * group // prefix_tiles.block_m + cascade.num_runs
        num_sms = num_multiprocessors(q.device)
        prefix_splits = choose_num_splits(
            num_prefix_tiles, layer.num_kv_heads, cascade.longest_prefix, prefix_tiles.block_n, num_sms
        )
        tiles = choose_tiles(layer.head_dim, q.dtype, longest * group, longest=cascade.longest_suffix)
        tiles_each = -(-longest * group // tiles.block_m)
        num_tiles = tiles_each * metadata.num_requests
        suffix_splits = choose_num_splits(num_tiles, layer.num_kv_heads, cascade.longest_suffix, tiles.block_n, num_sms)
        num_rows = q.shape[0] * layer.num_heads
        suffix_splits = limit_splits(suffix_splits, 2 * num_rows, False)
        if num_tiles * layer.num_kv_heads > _MAX_TILES:
            suffix_splits = 1
        prefix_splits = min(prefix_splits, _MAX_PARTS // num_rows - suffix_splits)
        num_slots = prefix_splits + suffix_splits
        parts = self._scratch.take(num_rows * num_slots, layer.head_dim, q.device)
        runs = replace(
            metadata,
            num_requests=cascade.num_runs,
            inputs=replace(
                metadata.inputs,
                query_start_loc_device=cascade.starts,
                seq_lens_device=cascade.prefix_lens,
                block_table_device=cascade.tables,
            ),
        )
        self._launch(
            (num_prefix_tiles, layer.num_kv_heads, prefix_splits), layer, q, out, kv_cache, runs, prefix_tiles,
            (1, 2**31 - 1), parts, prefix_splits, (0, num_slots), CAUSAL=False, TILES=0, REQUESTS_PAD=0, SPLIT=True,
            MERGE_ROWS=1, SPLITS_PAD=1, PREFIX_TILE=0, KEEP_PARTS=True,
        )  # fmt: skip
        splits_pad = 1 << (num_slots - 1).bit_length()
        self._launch(
            (num_tiles, layer.num_kv_heads, suffix_splits), layer, q, out, kv_cache, metadata, tiles, (1, longest),
            parts, suffix_splits, (prefix_splits, num_slots), cascade.begins, CAUSAL=layer.causal, TILES=tiles_each,
            REQUESTS_PAD=0, SPLIT=suffix_splits > 1, MERGE_ROWS=rows_merged_at_once(splits_pad, dim, tiles.block_m),
            SPLITS_PAD=splits_pad, PREFIX_TILE=prefix_tiles.block_n, KEEP_PARTS=False,
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
        slots: tuple[int, int] | None = None,
        begins: Tensor | None = None,
        **constants: Any,
    ) -> None:
        """`slots`: how many parts earlier launches left at most, and how many a row has. `begins`: the first key of
        each request."""
        (pages,) = kv_cache
        inputs, bias = metadata.inputs, layer.bias
        table = inputs.block_table_device
        self._launch_kernel(
            self._kernels.attention_kernel, grid,
            q, out, pages, table, inputs.query_start_loc_device, inputs.seq_lens_device, out if bias is None else bias,
            *parts, inputs.seq_lens_device if begins is None else begins, layer.scale * LOG2_E, q.stride(0),
            q.stride(1), pages.stride(0), table.stride(0), metadata.num_requests, *query_lens, layer.window or 0,
            0 if bias is None else bias.shape[1] // 2, num_splits, self._min_share, *(slots or (0, num_splits)),
            HEAD_DIM=layer.head_dim,
            DIM_PAD=_power_of_two(layer.head_dim), GROUP=layer.num_heads // layer.num_kv_heads,
            KV_HEADS=layer.num_kv_heads, BLOCK_SIZE=inputs.block_size, BLOCK_M=tiles.block_m, BLOCK_N=tiles.block_n,
            HAS_WINDOW=layer.window is not None, HAS_BIAS=bias is not None, PAIRED=is_paired(pages, q),
            CLEAR_LOOP=tiles.clear_loop,
            CHUNK=self._chunk, DEPENDENT=self._dependent, num_warps=tiles.num_warps,
            num_stages=tiles.num_stages, **constants, **self._launch_options,
        )  # fmt: skip

    @property
    def _launch_options(self) -> dict[str, bool]:
        return {"launch_pdl": True} if self._dependent else {}

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


def is_paired(pages: Tensor, q: Tensor) -> bool:
    """Whether kernels read fp8 in pairs, and multiply in float16."""
    return pages.dtype == torch.float8_e4m3fn and q.dtype != torch.float32 and pages.shape[-1] % 2 == 0


def rows_merged_at_once(splits_pad: int, dim: int, num_rows: int) -> int:
    """A power of two. `num_rows`: of a tile."""
    return min(max(1, _MERGED_ELEMENTS // (splits_pad * dim)), 1 << (num_rows - 1).bit_length(), 16)


@cache
def can_launch_dependently() -> bool:
    """Whether a kernel may begin while the one before it still runs (programmatic dependent launch)."""
    return torch.cuda.is_available() and torch.cuda.get_device_capability() >= (9, 0)


@cache
def num_multiprocessors(device: torch.device) -> int:
    if device.type == "meta" and torch.cuda.is_available():  # kernels are compiled for the current device
        device = torch.device("cuda")
    if device.type != "cuda":  # the interpreter
        return 8
    return torch.cuda.get_device_properties(device).multi_processor_count


def _power_of_two(number: int) -> int:
    """The next one; at least 16, the smallest side of a product in tensor cores."""
    return max(16, 1 << (number - 1).bit_length())
