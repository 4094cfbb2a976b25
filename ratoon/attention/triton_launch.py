"""The launches of the "triton" backend's kernels: attention_kernel, decode_kernel, store_kernel, and the scratch memory
of split keys. Which of them a step has, and in what tiles and splits, is triton_backend.py's. Imports Triton.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch

from ratoon.attention.interface import FEW_TOKENS, CommonAttentionMetadata
from ratoon.attention.triton_decode import decode_kernel, tiled_decode_kernel
from ratoon.attention.triton_few import few_tokens_kernel
from ratoon.attention.triton_kernels import attention_kernel
from ratoon.attention.triton_plan import (
    MAX_SHARED_REQUESTS,
    MAX_TILES,
    Operands,
    Prefix,
    Tiles,
    power_of_two,
)
from ratoon.attention.triton_store import store_kernel
from ratoon.layers.attention import AttentionLayer, CrossAttentionLayer, HeadTransform
from ratoon.layers.triton.launch import launch

Tensor = torch.Tensor
Parts = tuple[Tensor, Tensor, Tensor, Tensor]

LOG2_E = 1.4426950408889634
_MERGED_ELEMENTS = 8192  # that a program merges at a time
_SPLITS_PAD = 16  # parts of a row among them, at least: for each number another kernel is compiled


class Scratch:
    """Partial results of split keys, and how many programs of a tile have arrived. Grows; what it was before stays
    allocated, because captured graphs hold its addresses."""

    def __init__(self) -> None:
        self._outgrown: list[tuple[Tensor, Tensor]] = []
        self._acc: Tensor | None = None
        self._sums: Tensor | None = None
        self._arrived: Tensor | None = None

    def take(self, num_parts: int, head_dim: int, device: torch.device) -> Parts:
        """→ weighted sums [num_parts, head_dim], maxima and sums [num_parts] each, counters (all zero)."""
        if self._arrived is None:
            self._arrived = torch.zeros(MAX_TILES, dtype=torch.int32, device=device)
        if self._acc is None or self._sums is None or self._acc.numel() < num_parts * head_dim:
            if self._acc is not None and self._sums is not None:
                self._outgrown.append((self._acc, self._sums))
            size = max(power_of_two(num_parts), 2**14)
            self._acc = torch.empty(size * head_dim, dtype=torch.float32, device=device)
            self._sums = torch.empty(2, size, dtype=torch.float32, device=device)
        return self._acc, self._sums[0], self._sums[1], self._arrived


class HeadArguments(NamedTuple):
    """A HeadTransform as kernels take it. In place of a tensor that there is not, another one is given."""

    tensors: tuple[Tensor, ...]  # positions, cos_sin, axes of the rotation, weights of both norms
    numbers: tuple[int, float, float]  # how far apart axes of positions lie; the epsilons of both norms
    constants: dict[str, Any]

    @classmethod
    def of(cls, transform: HeadTransform | None, head_dim: int, q: Tensor, slots: Tensor) -> HeadArguments:
        if transform is None:
            transform = HeadTransform(slots, None, None, None)
        rotary, q_norm, k_norm = transform.rotary, transform.q_norm, transform.k_norm
        axes = None if rotary is None else rotary.axes
        return cls(
            (
                transform.positions,
                q if rotary is None else rotary.cos_sin,
                q if axes is None else axes,
                q if q_norm is None else q_norm.weight,
                q if k_norm is None else k_norm.weight,
            ),
            (
                0 if axes is None else transform.positions.stride(0),
                0.0 if q_norm is None else q_norm.eps,
                0.0 if k_norm is None else k_norm.eps,
            ),
            {
                "HALF": -(-head_dim // 2) if rotary is None else rotary.cos_sin.shape[1] // 2,
                "HAS_Q_NORM": q_norm is not None,
                "HAS_K_NORM": k_norm is not None,
                "HAS_ROTARY": rotary is not None,
                "HAS_AXES": axes is not None,
            },
        )


class Launches:
    """`dependent`: kernels start while those before them run. `batch_invariant`: tiles of keys are attended to by
    themselves, and a split is one of them. `min_share`: tiles of keys that a split has at least."""

    def __init__(self, dependent: bool, batch_invariant: bool, min_share: int) -> None:
        self._batch_invariant = batch_invariant
        self._min_share = min_share
        self._options: dict[str, Any] = {"DEPENDENT": dependent}
        if dependent:
            self._options["launch_pdl"] = True

    def store(
        self,
        layer: AttentionLayer | CrossAttentionLayer,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        pages: Tensor,
        inputs: CommonAttentionMetadata,
        transform: HeadTransform | None,
        tile: tuple[int, int],
    ) -> None:
        """Transform the heads of q, in place, and those of k; write k and v to their pages. `tile`: tokens and heads of
        a program."""
        (tokens, heads), num_tokens = tile, k.shape[0]
        head = HeadArguments.of(transform, layer.head_dim, q, inputs.slot_mapping)
        half = head.constants["HALF"]
        q_heads = layer.num_heads if head.constants["HAS_ROTARY"] or head.constants["HAS_Q_NORM"] else 0
        num_blocks = -(-q_heads // heads) + 2 * -(-layer.num_kv_heads // heads)
        launch(
            store_kernel, (-(-num_tokens // tokens), num_blocks),
            q, k, v, pages, inputs.slot_mapping, *head.tensors, *head.numbers, num_tokens, q.stride(0), k.stride(0),
            v.stride(0), q.stride(1), k.stride(1), v.stride(1), pages.stride(0), Q_HEADS=q_heads,
            KV_HEADS=layer.num_kv_heads, Q_DIM=layer.head_dim, HEAD_DIM=layer.head_dim, BLOCK_SIZE=inputs.block_size,
            HALF_PAD=power_of_two(half), REST_PAD=power_of_two(max(1, layer.head_dim - 2 * half)), TOKENS=tokens,
            HEADS=heads, EXACT=self._batch_invariant and q.dtype != torch.float32, num_warps=4, **head.constants,
            **self._options,
        )  # fmt: skip

    def decode(
        self,
        operands: Operands,
        k: Tensor,
        v: Tensor,
        transform: HeadTransform | None,
        tiles: Tiles,
        num_splits: int,
        parts: Parts,
    ) -> None:
        """Transform, store and attend, for requests of one token, or of FEW_TOKENS at most."""
        layer, q, pages, inputs = operands.layer, operands.q, operands.pages, operands.metadata.inputs
        head = HeadArguments.of(transform, layer.head_dim, q, inputs.slot_mapping)
        table = inputs.block_table_device
        splits_pad = next_power_of_two(num_splits)
        if inputs.max_query_len == 1:
            # Fewer heads would take more registers, up to a stack: a thread has more of each.
            num_heads = max(4 if is_paired(pages, q) else 2, next_power_of_two(operands.group))
            kernel, num_rows, own = decode_kernel, operands.group, {"GROUP_PAD": num_heads}
        else:
            kernel, num_rows, own = few_tokens_kernel, tiles.block_m, {"NEW": power_of_two(FEW_TOKENS)}
        launch(
            kernel, (operands.metadata.num_requests, layer.num_kv_heads, num_splits),
            q, k, v, operands.out, pages, table, inputs.query_start_loc_device, inputs.seq_lens_device,
            inputs.slot_mapping, *head.tensors, *parts, _sinks_of(layer, q), *head.numbers,
            layer.scale * LOG2_E, q.stride(0), k.stride(0), v.stride(0), q.stride(1), k.stride(1), v.stride(1),
            pages.stride(0), table.stride(0), layer.window or 0, num_splits, self._min_share,
            SPLIT=num_splits > 1, SPLITS_PAD=splits_pad,
            MERGE_ROWS=rows_merged_at_once(splits_pad, operands.dim, num_rows), **own, **head.constants,
            **self._constants(operands, tiles),
        )  # fmt: skip

    def decode_in_tiles(
        self,
        operands: Operands,
        k: Tensor,
        v: Tensor,
        transform: HeadTransform | None,
        tiles: Tiles,
        num_programs: int,
        num_slots: int,
        parts: Parts,
    ) -> None:
        """Launches the kernel for requests of one token whose results have the same bits in any batch. `num_programs`
        programs share a request's tiles of keys, of which each has one of `num_slots` in `parts`."""
        layer, q, pages, inputs = operands.layer, operands.q, operands.pages, operands.metadata.inputs
        head = HeadArguments.of(transform, layer.head_dim, q, inputs.slot_mapping)
        table = inputs.block_table_device
        launch(
            tiled_decode_kernel, (operands.metadata.num_requests, layer.num_kv_heads, num_programs),
            q, k, v, operands.out, pages, table, inputs.query_start_loc_device, inputs.seq_lens_device,
            inputs.slot_mapping, *head.tensors, *parts, _sinks_of(layer, q), *head.numbers,
            layer.scale * LOG2_E, q.stride(0), k.stride(0), v.stride(0), q.stride(1), k.stride(1), v.stride(1),
            pages.stride(0), table.stride(0), layer.window or 0, num_slots, SPLIT=num_programs > 1,
            GROUP_PAD=max(2, next_power_of_two(operands.group)),  # one head would take more registers
            **head.constants, **self._constants(operands, tiles),
        )  # fmt: skip

    def attend(
        self,
        operands: Operands,
        grid: tuple[int, int, int],
        tiles: Tiles,
        query_lens: tuple[int, int],
        *,
        tiles_each: int | None = None,
        is_shared: bool = False,
        num_splits: int = 1,
        parts: Parts | None = None,
        prefix: Prefix | None = None,
        keep_slots: int = 0,
    ) -> None:
        """Attend to what is stored, for requests of so many query tokens. `tiles_each`: of a request; None: as many as
        it needs. `is_shared`: programs are divided among requests by their keys. `parts`: where those of splits are
        kept. `prefix`: what an earlier launch attended to. `keep_slots` > 0: this is that launch, and a row has so many
        slots."""
        layer, q, out, pages = operands.layer, operands.q, operands.out, operands.pages
        inputs, bias = operands.metadata.inputs, layer.bias
        assert bias is None or layer.sinks is None, "the kernel has a place for one of them"
        by_head = layer.sinks if bias is None else bias
        table = inputs.block_table_device
        begins, prefix_tile, *numbers = prefix or (inputs.seq_lens_device, 0, 0, keep_slots or num_splits)
        is_split = num_splits > 1 or keep_slots > 0
        ends = inputs.visible_ends_device
        splits_pad = max(next_power_of_two(numbers[1]), _SPLITS_PAD)
        if self._batch_invariant or keep_slots or not is_split:  # nothing is merged, or one part after the other
            splits_pad = 1
        launch(
            attention_kernel, grid,
            q, out, pages, table, inputs.query_start_loc_device, inputs.seq_lens_device,
            out if by_head is None else by_head,
            *(parts or (out,) * 4), begins, begins if ends is None else ends, layer.scale * LOG2_E, q.stride(0),
            q.stride(1), pages.stride(0), table.stride(0), operands.metadata.num_requests, *query_lens,
            layer.window or 0, 0 if bias is None else bias.shape[1] // 2, num_splits, self._min_share, tiles_each or 0,
            *numbers, CAUSAL=layer.causal and not keep_slots, HAS_BIAS=bias is not None, CLEAR_LOOP=tiles.clear_loop,
            TILES="shared" if is_shared else "found" if tiles_each is None else "each",
            REQUESTS_PAD=MAX_SHARED_REQUESTS if is_shared else 0, SPLIT=is_split,
            CHUNK=tiles.block_n if self._batch_invariant else 0,
            MERGE_ROWS=rows_merged_at_once(splits_pad, operands.dim, tiles.block_m), SPLITS_PAD=splits_pad,
            PREFIX_TILE=prefix_tile, KEEP_PARTS=keep_slots > 0, HAS_ENDS=ends is not None,
            **self._constants(operands, tiles),
        )  # fmt: skip

    def _constants(self, operands: Operands, tiles: Tiles) -> dict[str, Any]:
        """The constants that decode_kernel and attention_kernel are compiled with."""
        layer = operands.layer
        return {
            "HEAD_DIM": layer.head_dim,
            "DIM_PAD": operands.dim,
            "GROUP": operands.group,
            "KV_HEADS": layer.num_kv_heads,
            "BLOCK_SIZE": operands.metadata.inputs.block_size,
            "BLOCK_M": tiles.block_m,
            "BLOCK_N": tiles.block_n,
            "HAS_WINDOW": layer.window is not None,
            "SOFT_CAP": (layer.soft_cap or 0.0) * LOG2_E,
            "HAS_SINKS": layer.sinks is not None,
            "PAIRED": is_paired(operands.pages, operands.q),
            "num_warps": tiles.num_warps,
            "num_stages": tiles.num_stages,
            **self._options,
        }


def _sinks_of(layer: AttentionLayer | CrossAttentionLayer, other: Tensor) -> Tensor:
    """The sinks of a layer, or another tensor in their place, which is not read."""
    return other if layer.sinks is None else layer.sinks


def is_paired(pages: Tensor, q: Tensor) -> bool:
    """Whether kernels read fp8 in pairs, and multiply in float16."""
    return pages.dtype == torch.float8_e4m3fn and q.dtype != torch.float32 and pages.shape[-1] % 2 == 0


def next_power_of_two(number: int) -> int:
    return 1 << (number - 1).bit_length()


def rows_merged_at_once(splits_pad: int, dim: int, num_rows: int) -> int:
    """A power of two. `num_rows`: of a tile."""
    return min(max(1, _MERGED_ELEMENTS // (splits_pad * dim)), next_power_of_two(num_rows), 16)
