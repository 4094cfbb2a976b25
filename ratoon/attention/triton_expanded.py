"""The expanded form of latent attention by the "triton" backend: which requests of a step it is for, and its launches
(triton_expanded_kernels.py). All others, and captured steps, have the absorbed form (triton_latent.py).

In the absorbed form a pair of a query and a key costs a head two products of some 500 numbers; here it costs two of
some 100 to 200, after keys and values of all heads were computed from the vectors. That pays where many queries see the
same keys. Keys and values are computed for a segment of the context at a time, so that their memory has a bound that
does not depend on the context: no step takes more than the absorbed form takes for as many rows, and that is what is
allocated for any, so that a step that is measured stands for all of its size.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch

from ratoon.attention.interface import CommonAttentionMetadata
from ratoon.attention.triton_plan import copy_together, power_of_two
from ratoon.layers.attention import LatentAttentionLayer, LatentProducts

Tensor = torch.Tensor

LOG2_E = 1.4426950408889634
MIN_ROWS = 128  # of a request: a tile
MIN_SEGMENT = 4096  # keys: fewer would not fill the device
GATHERED_KEYS = 16  # of a program
_MAX_HEAD_DIM, _MAX_ROPE_DIM = 128, 64  # by the shared memory of a multiprocessor, with numbers of 16 bits
_HEADS_SIDE_BY_SIDE = 16  # whose keys and values stay in the cache of the device together


class ExpandedTiles(NamedTuple):
    """How expanded_kernel is compiled."""

    block_m: int  # rows
    block_n: int  # keys
    num_warps: int
    num_stages: int


def choose_expanded_tiles(dtype: torch.dtype) -> ExpandedTiles:
    return ExpandedTiles(32, 16, 8, 1) if dtype == torch.float32 else ExpandedTiles(128, 64, 8, 3)


class ExpandedSizes(NamedTuple):
    """The numbers of a head, and of a vector."""

    heads: int
    rope: int
    nope: int  # of the part of a key that is a head's own
    value: int
    rank: int

    @classmethod
    def of(cls, layer: LatentAttentionLayer, products: LatentProducts) -> ExpandedSizes | None:
        """None: the form is not for this layer, whose weights are kept in another layout or whose heads are too
        large."""
        keys, values = products.absorb.weight, products.expand.weight
        if keys is None or values is None:
            return None
        sizes = cls(layer.num_heads, layer.rope_dim, keys.shape[1], values.shape[2], layer.value_dim)
        is_small = max(sizes.nope, sizes.value) <= _MAX_HEAD_DIM and sizes.rope <= _MAX_ROPE_DIM
        return sizes if is_small else None

    def pays(self, query_lens: np.ndarray, seq_lens: np.ndarray) -> np.ndarray:
        """For which requests the expanded form takes fewer operations. The absorbed one also multiplies the queries and
        results of heads with the weights with which the other multiplies all vectors."""
        queries, keys = query_lens.astype(np.int64), seq_lens.astype(np.int64)
        pairs = queries * keys - queries * (queries - 1) // 2
        of_row = self.rank * (self.nope + self.value)
        absorbed = pairs * (self.rope + 2 * self.rank) + queries * of_row
        expanded = pairs * (self.rope + self.nope + self.value) + keys * of_row
        return (query_lens >= MIN_ROWS) & (expanded < absorbed)

    def segment(self, num_rows: int, itemsize: int) -> int:
        """Returns the keys of a segment, for so many rows. Absorbed, these would take memory for queries and
        results."""
        absorbed = num_rows * self.heads * (self.rope + 2 * self.rank) * itemsize
        states = num_rows * self.heads * (self.value + 2) * 4
        of_key = (self.heads * (self.nope + self.value) + self.rope + self.rank) * itemsize
        return max(MIN_SEGMENT, (absorbed - states) // of_key)


@dataclass(frozen=True, slots=True)
class Others:
    """The requests of a step that are not expanded."""

    rows: Tensor  # [T'] their rows of the step
    inputs: CommonAttentionMetadata  # in which they are all there is


@dataclass(frozen=True, slots=True)
class Expansion:
    """The requests of a step that have the expanded form, N of them, and the others."""

    row_starts: Tensor  # [N + 1] the first of their rows, counted without those of others
    q_starts: Tensor  # [N] the same in the step
    key_starts: Tensor  # [N + 1] the first of their keys
    table: Tensor  # [N, max_blocks]
    num_rows: int
    num_keys: int
    others: Others | None  # None: there are none

    @property
    def num_requests(self) -> int:
        return self.q_starts.shape[0]


def find_expansion(inputs: CommonAttentionMetadata, sizes: ExpandedSizes) -> Expansion | None:
    """None: no request has the expanded form, or the step is a captured one, whose lengths are not known."""
    if inputs.is_padded:
        return None
    starts, query_lens = inputs.query_start_loc, np.diff(inputs.query_start_loc)
    is_expanded = sizes.pays(query_lens, inputs.seq_lens)
    if not is_expanded.any():
        return None
    device = inputs.block_table_device.device
    (chosen,) = np.nonzero(is_expanded)
    row_starts, key_starts = (np.concatenate([[0], np.cumsum(x[chosen])]) for x in (query_lens, inputs.seq_lens))
    arrays = row_starts, starts[:-1][chosen], key_starts, chosen
    row_starts_device, q_starts, key_starts_device, requests = copy_together(arrays, device)
    table, others = inputs.block_table_device, None
    if len(chosen) < len(query_lens):
        table = table[requests.long()]
        others = _find_others(inputs, query_lens, np.nonzero(~is_expanded)[0])
    num_rows, num_keys = int(row_starts[-1]), int(key_starts[-1])
    return Expansion(row_starts_device, q_starts, key_starts_device, table, num_rows, num_keys, others)


def _find_others(inputs: CommonAttentionMetadata, query_lens: np.ndarray, requests: np.ndarray) -> Others | None:
    counts, seq_lens = query_lens[requests], inputs.seq_lens[requests]
    starts = np.concatenate([[0], np.cumsum(counts)]).astype(np.int32)
    if not starts[-1]:
        return None
    rows = np.arange(starts[-1]) + np.repeat(inputs.query_start_loc[requests] - starts[:-1], counts)
    arrays = rows, starts, seq_lens, requests
    rows_device, starts_device, seq_lens_device, places = copy_together(arrays, inputs.block_table_device.device)
    return Others(
        rows_device.long(),
        CommonAttentionMetadata(
            query_start_loc=starts,
            seq_lens=seq_lens,
            block_table=inputs.block_table[requests],
            query_start_loc_device=starts_device,
            seq_lens_device=seq_lens_device,
            block_table_device=inputs.block_table_device[places.long()],
            slot_mapping=inputs.slot_mapping,  # of all rows: they are stored with the others
            block_size=inputs.block_size,
            max_query_len=int(counts.max()),
            max_seq_len=int(seq_lens.max()),
        ),
    )


def attend_expanded(
    layer: LatentAttentionLayer,
    queries: Tensor,
    pages: Tensor,
    block_size: int,
    expansion: Expansion,
    sizes: ExpandedSizes,
    products: LatentProducts,
    out: Tensor,
) -> None:
    """Attends with the rows of the expanded requests: queries [T, heads, rope + nope] → those rows of out [T, heads ·
    value]. Their vectors have been stored."""
    from ratoon.attention.triton_expanded_kernels import expanded_kernel, gather_kernel
    from ratoon.layers.triton.launch import launch

    w_keys, w_values = products.absorb.weight, products.expand.weight
    assert w_keys is not None and w_values is not None
    heads, rope, nope, value, rank = sizes
    num_requests, num_rows, num_keys = expansion.num_requests, expansion.num_rows, expansion.num_keys
    segment = sizes.segment(num_rows, queries.dtype.itemsize)
    vectors = queries.new_empty(segment, layer.head_dim)
    keys, values = queries.new_empty(segment, heads * nope), queries.new_empty(segment, heads, value)
    acc = torch.empty(num_rows * heads, value, dtype=torch.float32, device=queries.device)
    sums = torch.empty(2, num_rows * heads, dtype=torch.float32, device=queries.device)
    sinks, has_sinks = (out, False) if layer.sinks is None else (layer.sinks, True)
    tiles, side_by_side = choose_expanded_tiles(queries.dtype), min(heads, _HEADS_SIDE_BY_SIDE)
    grid = side_by_side, num_rows // tiles.block_m + num_requests, -(-heads // side_by_side)
    for first in range(0, num_keys, segment):
        last = min(first + segment, num_keys)
        launch(
            gather_kernel, (-(-(last - first) // GATHERED_KEYS),),
            pages, expansion.table, expansion.key_starts, vectors, num_requests, first, last, pages.stride(0),
            expansion.table.stride(0), ROPE=rope, VALUE=rank, ROPE_PAD=power_of_two(rope), VALUE_PAD=power_of_two(rank),
            BLOCK_SIZE=block_size, KEYS=GATHERED_KEYS, num_warps=4,
        )  # fmt: skip
        latent = vectors[: last - first, rope:]
        torch.mm(latent, w_keys.view(heads * nope, rank).t(), out=keys[: last - first])
        torch.bmm(latent.expand(heads, -1, -1), w_values, out=values[: last - first].transpose(0, 1))
        launch(
            expanded_kernel, grid,
            queries, keys, vectors, values, out, acc, sums[0], sums[1], sinks, expansion.row_starts, expansion.q_starts,
            expansion.key_starts, layer.scale * LOG2_E, num_requests, first, last, queries.stride(0), queries.stride(1),
            HEADS=heads, TILE_HEADS=side_by_side, WIDTH=layer.head_dim, ROPE=rope, NOPE=nope, VALUE=value,
            ROPE_PAD=power_of_two(rope), NOPE_PAD=power_of_two(nope), VALUE_PAD=power_of_two(value),
            BLOCK_M=tiles.block_m, BLOCK_N=tiles.block_n, IN_SEGMENTS=num_keys > segment,
            PRECISION="ieee" if queries.dtype == torch.float32 else "tf32", HAS_SINKS=has_sinks,
            num_warps=tiles.num_warps, num_stages=tiles.num_stages,
        )  # fmt: skip
