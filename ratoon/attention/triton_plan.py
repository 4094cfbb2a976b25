"""Which launches a step of the "triton" backend has: tiles, splits of keys, requests that share a prefix, and what is
known of the requests (TritonMetadata). Arithmetic alone: triton_launch.py launches.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import NamedTuple

import numpy as np
import torch

from ratoon.attention.interface import CommonAttentionMetadata, SharedPrefixes
from ratoon.attention.shared_prefix import find_runs, shared_prefixes
from ratoon.attention.triton_balanced import EvenPlan
from ratoon.attention.triton_prefill import LongPages, find_long_pages
from ratoon.layers.attention import AttentionLayer, CrossAttentionLayer

Tensor = torch.Tensor

MAX_TILES = 2**18  # that can be split in one launch
MAX_PARTS = 2**20  # of split keys: rows × splits; half a GiB of scratch with heads of 128
MAX_FEW_ROWS = 32  # FEW_TOKENS × query heads of a KV head: up to here one kernel transforms, stores and attends
SHORT_ROWS = 64  # query tokens × query heads of a KV head: up to here a request's keys are split among programs
MAX_SHARED_REQUESTS = 64  # of a step, up to which programs are divided among requests by their keys
LONGEST = 2**31 - 1  # query tokens
PROGRAMS_PER_SM = 1  # that splitting aims at
_MAX_SPLITS = 32


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
    dim = power_of_two(head_dim)
    if dtype == torch.float32:  # multiplied without tensor cores, to full precision
        block_m = 16 if max_rows is not None and not batch_invariant else 32
        return Tiles(block_m, 32 if dim <= 128 else 16, 4 if dim <= 64 else 8, 2, False)
    if batch_invariant:  # as many keys for all requests: sums of 16 bits depend on no other side of a tile
        if max_rows is None and dim <= 128:
            return Tiles(128, 64, 8, 3, False)
        rows = 64 if max_rows is None else min(max(16, power_of_two(max_rows)), 64)
        return Tiles(rows, 64 if dim <= 128 else 32, 4, 3, False)
    if max_rows is not None:
        block_m = min(max(16, power_of_two(max_rows)), SHORT_ROWS)
        if block_m == 16 and longest is not None and longest <= 32:  # many small programs
            return Tiles(block_m, 32, 1, 2, False)
        return Tiles(block_m, 128 if dim <= 64 else 64 if dim <= 128 else 32, 4, 3, False)
    if dim <= 64 and not has_bias:  # a bias takes shared memory too
        return Tiles(128, 128, 8, 3, True)
    if dim <= 128:
        return Tiles(128, 64, 8, 3, True)
    return Tiles(128, 32, 8, 2, True)


def choose_few_tiles(head_dim: int, dtype: torch.dtype, num_rows: int) -> Tiles:
    """Chooses the tiles of few_tokens_kernel. It holds its rows' rotations in registers: more rows need more warps."""
    tiles = choose_tiles(head_dim, dtype, num_rows)
    return tiles if dtype == torch.float32 else replace(tiles, num_warps=4 if tiles.block_m == 16 else 8)


def choose_decode_stages(num_tiles: int, num_sms: int) -> int:
    """Chooses how many loads the kernel for requests of one token has in flight. A few programs have one tile each,
    which is loaded before the others; where they fill the device, two of them on each multiprocessor keep it busy with
    more loads at a time."""
    return 2 if num_tiles <= num_sms // 2 else 4


def choose_tile_programs(num_tiles: int, num_key_tiles: int, num_sms: int) -> int:
    """Chooses how many programs share the tiles of keys of a request and a KV head, where results have the same bits in
    any batch. With one, nothing is exchanged."""
    wanted = 2 * num_sms // max(1, num_tiles)
    return 1 if wanted < 3 else min(wanted, num_key_tiles)


def choose_store_tile(num_tokens: int) -> tuple[int, int]:
    """Tokens and heads that one program of store_kernel transforms and writes."""
    return (1, 4) if num_tokens <= 512 else (4, 4)


def choose_num_splits(num_tiles: int, num_kv_heads: int, max_seq_len: int, block_n: int, num_sms: int) -> int:
    """Chooses in how many parts keys are divided, so that a small batch occupies the device too. A function of upper
    bounds only: a captured step has these programs for sequences of any length, and those without keys end at once."""
    wanted = PROGRAMS_PER_SM * num_sms // max(1, num_tiles * num_kv_heads)
    return max(1, min(wanted, _MAX_SPLITS, -(-max_seq_len // block_n)))


def limit_splits(num_splits: int, num_rows: int, batch_invariant: bool) -> int:
    """Reduces the number of splits to what the scratch may hold. The scratch's rows are those of all tokens of a step:
    beside a long prompt, many splits of a few short requests would take gigabytes. Splits that must be the same in any
    batch are all made or none."""
    if num_rows * num_splits <= MAX_PARTS:
        return num_splits
    return 1 if batch_invariant else max(1, MAX_PARTS // num_rows)


@dataclass(frozen=True, slots=True)
class LaunchPlan:
    """Which requests there are in a step, for layers with as many query heads per KV head."""

    longest_short: int  # query tokens of the longest request whose keys are split; 0: there is none
    has_long: bool


def plan_launches(query_lens: np.ndarray | None, max_query_len: int, group: int) -> LaunchPlan:
    """`query_lens`: None if a captured step will run with others."""
    limit = max(1, SHORT_ROWS // group)
    if max_query_len <= (limit if query_lens is not None else max(limit, MAX_SHARED_REQUESTS)):
        return LaunchPlan(max_query_len, False)
    if query_lens is None:
        return LaunchPlan(limit, True)
    return LaunchPlan(int(query_lens[query_lens <= limit].max(initial=0)), True)


@dataclass(slots=True)
class Cascade:
    """Short requests of a step in runs that share a prefix, and upper bounds for their keys."""

    prefixes: SharedPrefixes
    tables: Tensor  # [runs, max_blocks] of each run's first request
    longest_prefix: int
    longest_suffix: int

    @classmethod
    def of(
        cls, prefixes: SharedPrefixes, inputs: CommonAttentionMetadata, longest_prefix: int, longest_suffix: int
    ) -> Cascade:
        return cls(prefixes, inputs.block_table_device.index_select(0, prefixes.firsts), longest_prefix, longest_suffix)

    @property
    def num_runs(self) -> int:
        return self.prefixes.firsts.shape[0]

    def runs_of(self, metadata: TritonMetadata) -> TritonMetadata:
        """Runs in place of requests, and their prefixes in place of all keys."""
        inputs = replace(
            metadata.inputs,
            query_start_loc_device=self.prefixes.starts,
            seq_lens_device=self.prefixes.prefix_lens,
            block_table_device=self.tables,
        )
        return replace(metadata, num_requests=self.num_runs, inputs=inputs)


def find_cascade(inputs: CommonAttentionMetadata, longest_short: int, causal: bool) -> Cascade | None:
    """None: too little would be saved. The runs of a padded step come with its inputs."""
    if inputs.is_padded:
        if inputs.shared_prefixes is None or not causal:
            return None
        return Cascade.of(inputs.shared_prefixes, inputs, inputs.max_seq_len, inputs.max_seq_len)
    shared = shared_prefixes(inputs.block_table, inputs.seq_lens, inputs.block_size)
    if not shared.any():
        return None
    query_lens = np.diff(inputs.query_start_loc)
    # A prefix is what all queries of a run see: it ends before the first of them.
    limits = inputs.seq_lens - query_lens if causal else inputs.seq_lens
    runs = find_runs(shared, np.where(query_lens <= longest_short, limits, 0), inputs.query_start_loc)
    if runs is None:
        return None
    suffixes = (inputs.seq_lens - runs.begins)[query_lens <= longest_short]
    prefixes = SharedPrefixes(*copy_together(runs, inputs.seq_lens_device.device))
    return Cascade.of(prefixes, inputs, int(runs.prefix_lens.max()), max(1, int(suffixes.max())))


def copy_together(arrays: tuple[np.ndarray, ...], device: torch.device) -> list[Tensor]:
    """Arrays on the device as int32, by one copy; each aligned to 16 bytes, as kernels expect of all tensors."""
    sizes = [-(-len(array) // 4) * 4 for array in arrays]
    packed = torch.zeros(sum(sizes), dtype=torch.int32, pin_memory=device.type == "cuda")
    for array, part in zip(arrays, packed.split(sizes), strict=True):
        part[: len(array)] = torch.from_numpy(array.astype(np.int32))
    parts = packed.to(device, non_blocking=True).split(sizes)
    return [part[: len(array)] for array, part in zip(arrays, parts, strict=True)]


class Prefix(NamedTuple):
    """Keys before those of a launch, whose results an earlier one left in parts."""

    begins: Tensor  # [R] the first key behind it, of each request
    tile: int  # keys of a tile of that launch
    num_splits: int
    num_slots: int  # of a row, for the parts of both launches


@dataclass(slots=True)
class TritonMetadata:
    inputs: CommonAttentionMetadata
    num_requests: int
    query_lens: np.ndarray | None  # None: they differ when a captured step is replayed
    plans: dict[int, LaunchPlan]  # by query heads per KV head
    cascades: dict[tuple[int, bool], Cascade | None]  # by the longest short request, and whether layers are causal
    long_pages: dict[int, LongPages | None] = field(default_factory=dict)  # by the shortest long request
    # How keys are divided evenly: by the keys of a tile, the window and the lines of a page
    balanced: dict[tuple[int, int | None, int], EvenPlan | None] = field(default_factory=dict)

    def plan(self, group: int) -> LaunchPlan:
        if group not in self.plans:
            self.plans[group] = plan_launches(self.query_lens, self.inputs.max_query_len, group)
        return self.plans[group]

    def cascade(self, longest_short: int, causal: bool) -> Cascade | None:
        key = longest_short, causal
        if key not in self.cascades:
            self.cascades[key] = find_cascade(self.inputs, longest_short, causal)
        return self.cascades[key]

    def pages_of_long(self, shortest: int) -> LongPages | None:
        if shortest not in self.long_pages:
            self.long_pages[shortest] = find_long_pages(self.inputs, shortest)
        return self.long_pages[shortest]


@dataclass(frozen=True, slots=True)
class Operands:
    """What a layer attends with, in one step."""

    layer: AttentionLayer | CrossAttentionLayer
    q: Tensor  # [T, heads, head_dim]
    out: Tensor  # [T, heads · head_dim]
    pages: Tensor
    metadata: TritonMetadata

    @property
    def group(self) -> int:
        """Query heads of a KV head."""
        return self.layer.num_heads // self.layer.num_kv_heads

    @property
    def dim(self) -> int:
        return power_of_two(self.layer.head_dim)

    @property
    def num_rows(self) -> int:
        """The number of query rows, one for each token and head."""
        return self.q.shape[0] * self.layer.num_heads


def power_of_two(number: int) -> int:
    """The next one; at least 16, the smallest side of a product in tensor cores."""
    return max(16, 1 << (number - 1).bit_length())
