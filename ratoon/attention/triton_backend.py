"""The CUDA backend: kernels in Triton (triton_kernels.py, triton_decode.py, triton_balanced.py, triton_store.py) for
any mixture of prefill, decode and continuations.

Here: what it supports, and which launches (triton_launch.py) a step has, by what triton_plan.py computes. A step needs
no host synchronisation, and every launch depends only on tensors on the device and on upper bounds, so it can be
captured in a CUDA graph.
"""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from importlib.util import find_spec

import numpy as np
import torch

from ratoon.attention import triton_balanced
from ratoon.attention.interface import (
    FEW_TOKENS,
    AttentionBackend,
    AttentionNeeds,
    CommonAttentionMetadata,
    LayerCache,
)
from ratoon.attention.triton_balanced import Balance, BalancedDecode
from ratoon.attention.triton_latent import TritonLatentBackend
from ratoon.attention.triton_plan import (
    LONGEST,
    MAX_FEW_ROWS,
    MAX_PARTS,
    MAX_SHARED_REQUESTS,
    MAX_TILES,
    PROGRAMS_PER_SM,
    SHORT_ROWS,
    Cascade,
    Operands,
    Prefix,
    Tiles,
    TritonMetadata,
    choose_decode_stages,
    choose_few_tiles,
    choose_num_splits,
    choose_store_tile,
    choose_tile_programs,
    choose_tiles,
    limit_splits,
)
from ratoon.attention.triton_prefill import Prefill, serves, widen
from ratoon.core.kv import AttentionSpec, KVCacheSpec
from ratoon.layers.attention import AttentionLayer, CrossAttentionLayer, HeadTransform
from ratoon.layers.gpu import has_wgmma, num_multiprocessors

Tensor = torch.Tensor

_DTYPES = (torch.float32, torch.bfloat16, torch.float16)
_MAX_HEAD_DIM = 256
_FP8_HEAD_DIM_ABOVE = 16  # it is read in pairs, and a product sums over 16 of them at least
_MIN_CAPABILITY = (8, 0)  # of a CUDA device: bfloat16 in tensor cores
_MIN_FP8_CAPABILITY = (8, 9)
_MAX_FUSED_TILES_PER_SM = 2  # requests × KV heads: up to here one kernel transforms, stores and attends


class TritonAttentionBackend(AttentionBackend):
    """`batch_invariant`: a row's result is the same to the bit in any batch and any chunk. The others are for
    measurements, instead of what is chosen here."""

    name = "triton"
    sees_ahead = True
    caps_scores = True
    has_sinks = True
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
        balance: Balance | bool = True,
    ) -> None:
        # triton may be absent, see `reasons_against`
        from ratoon.attention.triton_launch import Launches, Scratch

        self._batch_invariant = batch_invariant
        self._tiles = tiles
        self._num_splits = num_splits
        self._fused_store = fused_store
        self.shares_prefixes = cascade and not batch_invariant
        self._dependent = dependent_launch and can_launch_dependently()
        self._launches = Launches(self._dependent, batch_invariant, min_share)
        self._scratch = Scratch()
        # Given tiles, and results with the same bits in any batch, are attention_kernel's alone.
        self._prefill = Prefill() if not batch_invariant and tiles is None and has_wgmma() else None
        self._balanced: BalancedDecode | None = None
        given = balance if isinstance(balance, Balance) else None
        is_chosen = balance and tiles is None and num_splits is None and not batch_invariant
        if is_chosen and (given is not None or has_wgmma()):
            self._balanced = BalancedDecode(given)

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
        elif needs.kv_dtype is not None and needs.dtype != torch.float32 and needs.head_dim <= _FP8_HEAD_DIM_ABOVE:
            reasons.append(f"fp8 needs heads of more than {_FP8_HEAD_DIM_ABOVE}, not of {needs.head_dim}")
        if needs.is_latent:
            reasons += TritonLatentBackend.reasons_against(needs)
        elif needs.head_dim > _MAX_HEAD_DIM:
            reasons.append(f"head_dim must be at most {_MAX_HEAD_DIM}, not {needs.head_dim}")
        if not needs.is_known_content:
            reasons.append(f"reads {AttentionSpec.content}, not {needs.content}")
        return reasons

    @classmethod
    def create(cls, needs: AttentionNeeds) -> AttentionBackend:
        if needs.is_latent:
            return TritonLatentBackend(needs.batch_invariant)
        return cls(
            batch_invariant=needs.batch_invariant,
            cascade=needs.window is None and not needs.has_bias,
        )

    def page_shapes(self, spec: KVCacheSpec) -> list[tuple[int, ...]]:
        ((parts, block_size, num_kv_heads, head_dim),) = super().page_shapes(spec)
        return [(parts, num_kv_heads, block_size, head_dim)]

    def read_keys(self, layer: AttentionLayer | CrossAttentionLayer, kv_cache: LayerCache, blocks: Tensor) -> Tensor:
        (cache,) = kv_cache
        return cache[blocks.long(), 0].float().transpose(0, 1).flatten(1, 2)  # of [B, kv_heads, block_size, head_dim]

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
        operands = operands_of(layer, q, kv_cache, metadata)
        if self._is_decode(operands):
            self._decode(operands, k, v, transform)
        else:
            self._store(layer, q, k, v, kv_cache, metadata, transform)
            self._attend(operands)
        return operands.out

    def forward_rows(
        self,
        layer: AttentionLayer,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        kv_cache: LayerCache,
        metadata: TritonMetadata,
        transform: HeadTransform | None,
        rows: Tensor,
        metadata_of_rows: TritonMetadata,
    ) -> Tensor:
        """A decode step of the rows behind the store of all. It stores theirs again, with the same bits."""
        queries = q[rows]  # before the store transforms them in place
        self._store(layer, q, k, v, kv_cache, metadata, transform)
        if not rows.shape[0]:
            return q.new_empty(0, layer.num_heads * layer.head_dim)
        # Selected behind the store, by torch's kernels, which end after it: decode_kernel loads the keys of earlier
        # tokens, here just stored, before it waits for the kernel ahead.
        own = queries, k[rows], v[rows]
        return self.forward(
            layer, *own, kv_cache, metadata_of_rows, None if transform is None else transform.of_rows(rows)
        )

    def attend(
        self,
        layer: AttentionLayer | CrossAttentionLayer,
        q: Tensor,
        kv_cache: LayerCache,
        metadata: TritonMetadata,
    ) -> Tensor:
        operands = operands_of(layer, q, kv_cache, metadata)
        self._attend(operands)
        return operands.out

    # ---- which launches a step has ----

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
        self._launches.store(layer, q, k, v, pages, metadata.inputs, transform, choose_store_tile(k.shape[0]))

    def _attend(self, operands: Operands) -> None:
        plan = operands.metadata.plan(operands.group)
        if plan.has_long:
            self._attend_long(operands, plan.longest_short + 1)
        if plan.longest_short:
            cascade = self._find_cascade(operands, plan.longest_short)
            if cascade is None:
                self._attend_short(operands, plan.longest_short)
            else:
                self._attend_cascade(operands, plan.longest_short, cascade)

    def _find_cascade(self, operands: Operands, longest: int) -> Cascade | None:
        layer, fits = operands.layer, 2 * operands.num_rows <= MAX_PARTS
        is_plain = layer.window is None and layer.bias is None
        if not self.shares_prefixes or not fits or not is_plain:
            return None
        return operands.metadata.cascade(longest, layer.causal)

    def _is_decode(self, operands: Operands) -> bool:
        """Whether one kernel can transform, store and attend."""
        layer, metadata = operands.layer, operands.metadata
        num_tiles = metadata.num_requests * layer.num_kv_heads
        is_small = num_tiles <= _MAX_FUSED_TILES_PER_SM * num_multiprocessors(operands.q.device)
        if metadata.inputs.visible_ends_device is not None:
            return False
        if self._batch_invariant and (operands.q.dtype == torch.float32 or operands.pages.dtype != operands.q.dtype):
            return False  # a norm would have another order; the new key can't be placed among pairs of fp8
        if not (is_small if self._fused_store is None else self._fused_store):
            return False
        longest = metadata.inputs.max_query_len
        if operands.group > SHORT_ROWS or (longest > 1 and not self._takes_few(operands)):
            return False
        return layer.causal and layer.bias is None and self._find_cascade(operands, longest) is None

    def _takes_few(self, operands: Operands) -> bool:
        """Whether one kernel can do so for requests of several tokens."""
        fits = FEW_TOKENS * operands.group <= min(MAX_FEW_ROWS, self._decode_tiles(operands).block_m)
        is_plain = not self._batch_invariant and operands.pages.dtype == operands.q.dtype
        return fits and is_plain and operands.metadata.inputs.max_query_len <= FEW_TOKENS

    def _decode_tiles(self, operands: Operands) -> Tiles:
        layer, dtype, group = operands.layer, operands.q.dtype, operands.group
        if self._tiles is not None:
            return self._tiles
        if operands.metadata.inputs.max_query_len > 1:
            return choose_few_tiles(layer.head_dim, dtype, FEW_TOKENS * group)
        tiles = choose_tiles(layer.head_dim, dtype, group)
        if dtype == torch.float32:
            return tiles
        num_tiles = operands.metadata.num_requests * layer.num_kv_heads
        return replace(tiles, num_stages=choose_decode_stages(num_tiles, num_multiprocessors(operands.q.device)))

    def _decode(self, operands: Operands, k: Tensor, v: Tensor, transform: HeadTransform | None) -> None:
        if self._batch_invariant:
            self._decode_in_tiles(operands, k, v, transform)
            return
        layer, q = operands.layer, operands.q
        tiles = self._decode_tiles(operands)
        num_tiles = operands.metadata.num_requests * layer.num_kv_heads
        num_splits = self._splits_of(operands, operands.metadata.num_requests, tiles.block_n)
        num_splits = limit_splits(num_splits, operands.num_rows, False)
        if num_tiles > MAX_TILES:
            num_splits = 1
        parts = (operands.out,) * 4
        if num_splits > 1:
            parts = self._scratch.take(operands.num_rows * num_splits, layer.head_dim, q.device)
        self._launches.decode(operands, k, v, transform, tiles, num_splits, parts)

    def _decode_in_tiles(self, operands: Operands, k: Tensor, v: Tensor, transform: HeadTransform | None) -> None:
        layer, q = operands.layer, operands.q
        tiles = choose_tiles(layer.head_dim, q.dtype, operands.group, batch_invariant=True)
        num_tiles = operands.metadata.num_requests * layer.num_kv_heads
        num_slots = self._splits_of(operands, num_tiles, tiles.block_n)
        num_programs = choose_tile_programs(num_tiles, num_slots, num_multiprocessors(q.device))
        if limit_splits(num_slots, operands.num_rows, True) == 1 or num_tiles > MAX_TILES:
            num_programs = 1
        parts = (operands.out,) * 4
        if num_programs > 1:
            parts = self._scratch.take(operands.num_rows * num_slots, layer.head_dim, q.device)
        self._launches.decode_in_tiles(operands, k, v, transform, tiles, num_programs, num_slots, parts)

    def _attend_long(self, operands: Operands, shortest: int) -> None:
        """Requests of `shortest` or more query tokens. A program attends to all keys of its tile."""
        if self._attend_on_hopper(operands, shortest):
            return
        layer, q = operands.layer, operands.q
        tiles = self._tiles or choose_tiles(
            layer.head_dim, q.dtype, None, self._batch_invariant, layer.bias is not None
        )
        # An upper bound: see _find_request
        num_tiles = q.shape[0] * operands.group // tiles.block_m + operands.metadata.num_requests
        self._launches.attend(operands, (num_tiles, layer.num_kv_heads, 1), tiles, (shortest, LONGEST))

    def _attend_on_hopper(self, operands: Operands, shortest: int) -> bool:
        """Does the work of _attend_long where the kernel of triton_prefill.py can; returns whether it did."""
        layer, q, pages, inputs = operands.layer, operands.q, operands.pages, operands.metadata.inputs
        if self._prefill is None or not serves(layer, q.dtype, pages, inputs.block_size):
            return False
        if inputs.visible_ends_device is not None:  # that kernel has no column of it
            return False
        table = inputs.block_table_device
        if pages.dtype != q.dtype:
            long_pages = operands.metadata.pages_of_long(shortest)
            widened = None if long_pages is None else widen(pages, long_pages.blocks, q.dtype)
            if long_pages is None or widened is None:
                return False
            pages, table = widened, long_pages.table
        self._prefill.attend(
            layer, q, operands.out, pages, table, inputs, shortest, num_multiprocessors(q.device), self._dependent
        )
        return True

    def _attend_short(self, operands: Operands, longest: int) -> None:
        """Requests of up to `longest` query tokens. Their keys are split among programs."""
        if longest == 1 and self._attend_balanced(operands):
            return
        layer, q, group, metadata = operands.layer, operands.q, operands.group, operands.metadata
        is_shared = not self._batch_invariant and longest > 1 and metadata.num_requests <= MAX_SHARED_REQUESTS
        rows = group if is_shared and metadata.query_lens is None else longest * group
        tiles = self._tiles or choose_tiles(layer.head_dim, q.dtype, rows, self._batch_invariant)
        tiles_each = -(-longest * group // tiles.block_m)
        num_tiles = min(tiles_each * metadata.num_requests, q.shape[0] * -(-group // tiles.block_m))
        num_splits = self._splits_of(operands, 1 if is_shared else num_tiles, tiles.block_n)
        num_splits = limit_splits(num_splits, operands.num_rows, self._batch_invariant)
        is_busy = self._batch_invariant and 2 * num_tiles * layer.num_kv_heads >= num_multiprocessors(q.device)
        if num_tiles * layer.num_kv_heads > MAX_TILES or is_busy:  # one program does all tiles, with the same bits
            num_splits = 1
        grid = (tiles_each * metadata.num_requests, layer.num_kv_heads, num_splits)
        if num_splits == 1:
            self._launches.attend(operands, grid, tiles, (1, longest), tiles_each=tiles_each)
            return
        if is_shared:
            num_places = num_tiles + -(-PROGRAMS_PER_SM * num_multiprocessors(q.device) // layer.num_kv_heads)
            grid = (num_places, layer.num_kv_heads, 1)
        parts = self._scratch.take(operands.num_rows * num_splits, layer.head_dim, q.device)
        self._launches.attend(
            operands, grid, tiles, (1, longest), tiles_each=tiles_each, is_shared=is_shared, num_splits=num_splits,
            parts=parts,
        )  # fmt: skip

    def _attend_balanced(self, operands: Operands) -> bool:
        """Requests of one token, where the kernel of triton_balanced.py can do it; returns whether it did."""
        layer, q, pages, inputs = operands.layer, operands.q, operands.pages, operands.metadata.inputs
        if self._balanced is None:
            return False
        balance = self._balanced.balance(pages.dtype)
        if not triton_balanced.serves(layer, q.dtype, pages, inputs.block_size, balance.block_n):
            return False
        num_programs = max(balance.programs_per_sm * num_multiprocessors(q.device), layer.num_kv_heads)
        plans, key = operands.metadata.balanced, (balance.block_n, layer.window, pages.stride(0) // layer.head_dim)
        if key not in plans:
            plans[key] = self._balanced.plan(inputs, *key, self._dependent)
        plan = plans[key]
        if plan is None:
            return False
        parts = self._scratch.take(2 * num_programs * operands.group, layer.head_dim, q.device)
        self._balanced.attend(
            layer, q, operands.out, pages, inputs.block_size, plan, parts, num_programs, self._dependent
        )
        return True

    def _attend_cascade(self, operands: Operands, longest: int, cascade: Cascade) -> None:
        """Does the work of _attend_short in two parts: all rows of a run attend to its prefix together, then each
        request attends to its own keys."""
        layer, q, group, metadata = operands.layer, operands.q, operands.group, operands.metadata
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
        suffix_splits = limit_splits(suffix_splits, 2 * operands.num_rows, False)
        if num_tiles * layer.num_kv_heads > MAX_TILES:
            suffix_splits = 1
        prefix_splits = min(prefix_splits, MAX_PARTS // operands.num_rows - suffix_splits)
        num_slots = prefix_splits + suffix_splits
        parts = self._scratch.take(operands.num_rows * num_slots, layer.head_dim, q.device)
        self._launches.attend(
            replace(operands, metadata=cascade.runs_of(metadata)),
            (num_prefix_tiles, layer.num_kv_heads, prefix_splits), prefix_tiles, (1, LONGEST),
            num_splits=prefix_splits, parts=parts, keep_slots=num_slots,
        )  # fmt: skip
        self._launches.attend(
            operands, (num_tiles, layer.num_kv_heads, suffix_splits), tiles, (1, longest), tiles_each=tiles_each,
            num_splits=suffix_splits, parts=parts,
            prefix=Prefix(cascade.prefixes.begins, prefix_tiles.block_n, prefix_splits, num_slots),
        )  # fmt: skip

    def _splits_of(self, operands: Operands, num_tiles: int, block_n: int) -> int:
        layer, inputs = operands.layer, operands.metadata.inputs
        if self._batch_invariant:
            longest = inputs.max_seq_len
            if layer.window is not None:  # a window may begin inside a tile
                width = layer.window if layer.causal else 2 * layer.window
                longest = min(longest, width + inputs.max_query_len + block_n)
            return -(-longest // block_n)
        if self._num_splits is not None:
            return self._num_splits
        num_sms = num_multiprocessors(operands.q.device)
        return choose_num_splits(num_tiles, layer.num_kv_heads, inputs.max_seq_len, block_n, num_sms)


def operands_of(
    layer: AttentionLayer | CrossAttentionLayer, q: Tensor, kv_cache: LayerCache, metadata: TritonMetadata
) -> Operands:
    (pages,) = kv_cache
    out = torch.empty(q.shape[0], layer.num_heads * layer.head_dim, dtype=q.dtype, device=q.device)
    return Operands(layer, q, out, pages, metadata)


@cache
def can_launch_dependently() -> bool:
    """Whether a kernel may begin while the one before it still runs (programmatic dependent launch)."""
    if not torch.cuda.is_available() or torch.cuda.get_device_capability() < (9, 0):
        return False
    from ratoon.layers.triton.dependent import CAN_START_EARLY

    return CAN_START_EARLY
