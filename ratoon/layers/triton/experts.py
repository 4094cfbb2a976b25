"""Mixtures of experts on a GPU: routes, and grouped products of the rows of each expert.

Pairs of a row and one of its experts are sorted by expert into blocks of so many rows, of which each belongs to one
expert and may not be full. How many blocks there are is known on the device alone; as many programs are launched as
there can be at most, and those without a block end at once. So shapes depend on the number of rows only, and all of it
can be in a CUDA graph. A row's result is the sum of its experts' results in the order in which they were chosen.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl

from ratoon.layers.ops import ExpertGate, Routes, RoutingRule
from ratoon.layers.triton.elementwise import activate
from ratoon.layers.triton.internals import INTERPRETED
from ratoon.layers.triton.launch import launch

Tensor = torch.Tensor

MOST_PAIRS_OF_A_KERNEL = 16384  # that sorts them; more are sorted by torch
SMALLEST_CHUNK, LARGEST_CHUNK = 32, 1024  # pairs that a program of it takes at a time
BLOCK_OF_SUM = 1024


class GroupedTile(NamedTuple):
    """The tile of a program of a grouped product."""

    rows: int
    outputs: int
    inputs: int
    num_warps: int
    num_stages: int


SMALL_TILE = GroupedTile(16, 64, 64, 4, 4)
TILES = (SMALL_TILE, GroupedTile(64, 64, 64, 4, 4), GroupedTile(128, 128, 64, 8, 3))
INTERPRETED_TILE = GroupedTile(16, 128, 128, 4, 1)  # for Triton's interpreter, which takes a millisecond a program


class SortedPairs(NamedTuple):
    """Pairs by expert, in blocks."""

    order: Tensor  # [blocks · rows of a block] int32: the pairs of a block; what is behind its last one is undefined
    experts: Tensor  # [blocks] int32: of each block
    counts: Tensor  # [blocks] int32: pairs of each block; 0: it is not used
    block: int  # rows


def tile_of(num_pairs: int, num_experts: int) -> GroupedTile:
    """The more rows an expert has, the larger are tiles."""
    rows = num_pairs / num_experts
    return TILES[0] if rows <= 16 else TILES[1] if rows <= 96 else TILES[2]


def route(rule: RoutingRule, bias: Tensor | None, counts: Tensor | None, logits: Tensor) -> Routes:
    """The routes of `Ops.make_router` in one kernel, of a rule without groups."""
    rows = logits.shape[0]
    experts = torch.empty((rows, rule.top_k), dtype=torch.int32, device=logits.device)
    weights = torch.empty((rows, rule.top_k), dtype=torch.float32, device=logits.device)
    launch(
        _route_kernel, (rows,),
        logits, logits if bias is None else bias, experts if counts is None else counts, experts, weights,
        logits.stride(0), rule.num_experts, rule.scale,
        TOP_K=rule.top_k, SIGMOID=rule.scoring == "sigmoid", BIAS=bias is not None, RENORMALISE=rule.renormalise,
        COUNT=counts is not None, BLOCK=triton.next_power_of_2(rule.num_experts), num_warps=1,
    )  # fmt: skip
    return Routes(experts, weights)


def sort_pairs(experts: Tensor, own: range, block: int) -> SortedPairs:
    """experts [T, k] int32, of which this device has `own`."""
    num_pairs, num_own = experts.numel(), len(own)
    num_blocks = num_pairs // block + min(num_pairs, num_own)  # at most: one of each expert may not be full
    if num_pairs > MOST_PAIRS_OF_A_KERNEL:
        return _sort_by_torch(experts, own, block, num_blocks)
    order = torch.empty(num_blocks * block, dtype=torch.int32, device=experts.device)
    of_blocks = torch.empty((2, num_blocks), dtype=torch.int32, device=experts.device)
    chunk = min(max(triton.next_power_of_2(num_pairs), SMALLEST_CHUNK), LARGEST_CHUNK)
    launch(
        _sort_kernel, (num_own,),
        experts, order, of_blocks, num_pairs, num_blocks, own.start, num_own,
        BINS=triton.next_power_of_2(num_own + 1), CHUNK=chunk, ROWS=block, num_warps=4,
    )  # fmt: skip
    return SortedPairs(order, of_blocks[0], of_blocks[1], block)


def _sort_by_torch(experts: Tensor, own: range, block: int, num_blocks: int) -> SortedPairs:
    """Sorts pairs as `sort_pairs` does, for more pairs than one kernel takes. Nothing of it waits for the device."""
    num_own, device = len(own), experts.device
    places = experts.flatten().long() - own.start
    places = places.masked_fill((places < 0) | (places >= num_own), num_own)  # of other ranks: behind all
    ordered, order = places.sort(stable=True)
    pairs = torch.zeros(num_own + 1, dtype=torch.int64, device=device)
    pairs.scatter_add_(0, places, torch.ones_like(places))
    blocks = (pairs + block - 1) // block
    ends, starts = blocks.cumsum(0), pairs.cumsum(0) - pairs
    first = ends - blocks
    within = torch.arange(len(order), device=device) - starts[ordered]
    # Pairs of other ranks go behind the last place, which is cut off.
    targets = torch.where(ordered < num_own, first[ordered] * block + within, num_blocks * block)
    padded = torch.zeros(num_blocks * block + 1, dtype=torch.int64, device=device).scatter_(0, targets, order)
    numbers = torch.arange(num_blocks, device=device)
    of_blocks = torch.searchsorted(ends[:num_own].contiguous(), numbers, right=True).clamp_(max=num_own - 1)
    counts = (pairs[of_blocks] - (numbers - first[of_blocks]) * block).clamp_(0, block)
    counts = torch.where(numbers < ends[num_own - 1], counts, 0)
    return SortedPairs(padded[:-1].int(), of_blocks.int(), counts.int(), block)


class TritonExperts:
    """Implements ExpertProducts with weights [E, 2·I, H] and [E, H, I] of floats."""

    __slots__ = ("_biases", "_down", "_gate", "_gate_up", "_one_tile", "_own")

    def __init__(
        self,
        gate_up: Tensor,
        down: Tensor,
        biases: tuple[Tensor, Tensor] | None,
        own: range,
        gate: ExpertGate,
        one_tile: bool = False,
    ) -> None:
        """`biases`: [E, 2·I] and [E, H]. `one_tile`: a row's sums have the same order in any batch."""
        self._gate_up, self._down, self._biases = gate_up, down, biases
        self._own, self._gate, self._one_tile = own, gate, one_tile

    def __call__(self, x: Tensor, routes: Routes) -> Tensor:
        rows, top_k = routes.experts.shape
        num_pairs, (hidden, inner) = rows * top_k, self._down.shape[1:]
        tile = SMALL_TILE if self._one_tile else tile_of(num_pairs, len(self._own))
        if INTERPRETED:
            tile = INTERPRETED_TILE
        pairs = sort_pairs(routes.experts, self._own, tile.rows)
        biases = (None, None) if self._biases is None else self._biases
        activated = x.new_empty((len(pairs.order), inner))
        _multiply(x, self._gate_up, biases[0], pairs, activated, tile, inner, top_k=top_k, gate=self._gate)
        results = x.new_empty((num_pairs, hidden))
        _multiply(activated, self._down, biases[1], pairs, results, tile, hidden)
        y = x.new_empty((rows, hidden))
        launch(
            _combine_kernel, (rows, triton.cdiv(hidden, BLOCK_OF_SUM)),
            results, routes.experts, routes.weights, y, hidden, self._own.start, self._own.stop,
            TOP_K=top_k, BLOCK=BLOCK_OF_SUM, num_warps=4,
        )  # fmt: skip
        return y


def _multiply(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    pairs: SortedPairs,
    y: Tensor,
    tile: GroupedTile,
    outputs: int,
    top_k: int = 1,
    gate: ExpertGate | None = None,
) -> None:
    """With `gate`, x has the rows of tokens, weight [E, 2·outputs, in] makes gate and up, and y gets their product,
    sorted. Without, x is sorted, and y gets the rows of pairs."""
    launch(
        _grouped_kernel, (len(pairs.experts), triton.cdiv(outputs, tile.outputs)),
        x, weight, weight if bias is None else bias, y, pairs.order, pairs.experts, pairs.counts,
        x.stride(0), outputs, 0.0 if gate is None else gate.limit,
        WIDTH=weight.shape[2], TOP_K=top_k, GATE="" if gate is None else gate.kind, BIAS=bias is not None,
        BLOCK_ROWS=tile.rows, BLOCK_OUT=tile.outputs, BLOCK_IN=tile.inputs,
        num_warps=tile.num_warps, num_stages=tile.num_stages,
    )  # fmt: skip


@triton.jit
def _route_kernel(
    logits, bias, counts, experts, weights, logits_stride, num_experts, scale,
    TOP_K: tl.constexpr, SIGMOID: tl.constexpr, BIAS: tl.constexpr, RENORMALISE: tl.constexpr, COUNT: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    expert = tl.arange(0, BLOCK)
    inside = expert < num_experts
    scores = tl.load(logits + row * logits_stride + expert, mask=inside, other=float("-inf")).to(tl.float32)
    if SIGMOID:
        scores = tl.sigmoid(scores)
    else:
        scores = tl.exp(scores - tl.max(scores, 0))
        scores = scores / tl.sum(scores, 0)
    choice = scores
    if BIAS:
        choice += tl.load(bias + expert, mask=inside, other=0.0)
    choice = tl.where(inside, choice, float("-inf"))
    total = 0.0
    for place in range(TOP_K):
        best = tl.argmax(choice, 0)
        score = tl.sum(tl.where(expert == best, scores, 0.0), 0)
        total += score
        tl.store(experts + row * TOP_K + place, best.to(tl.int32))
        tl.store(weights + row * TOP_K + place, score)
        choice = tl.where(expert == best, float("-inf"), choice)
        if COUNT:
            tl.atomic_add(counts + best, tl.full((), 1, tl.int64))
    factor = scale
    if RENORMALISE:
        factor = scale / (total + 1e-20)
    tl.debug_barrier()
    for place in range(TOP_K):
        places = weights + row * TOP_K + place
        tl.store(places, tl.load(places) * factor)


@triton.jit(do_not_specialize=["num_pairs", "num_blocks"])
def _sort_kernel(
    experts, order, of_blocks, num_pairs, num_blocks, first_expert, num_own,
    BINS: tl.constexpr, CHUNK: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """A program lists the pairs and the blocks of one expert. It counts those of all experts, to know where they begin:
    so no program waits for another."""
    mine = tl.program_id(0)
    bins = tl.arange(0, BINS)  # one for each expert, and one for those of other ranks
    counts = tl.zeros((BINS,), tl.int32)
    for start in range(0, num_pairs, CHUNK):
        pair = start + tl.arange(0, CHUNK)
        own = tl.load(experts + pair, mask=pair < num_pairs, other=-1) - first_expert
        counts += tl.histogram(tl.where((pair < num_pairs) & (own >= 0) & (own < num_own), own, BINS - 1), BINS)
    blocks = tl.where(bins < num_own, (counts + ROWS - 1) // ROWS, 0)
    first = tl.sum(tl.where(bins < mine, blocks, 0), 0)
    end = first + tl.sum(tl.where(bins == mine, blocks, 0), 0)
    num_mine = tl.sum(tl.where(bins == mine, counts, 0), 0)
    within = tl.arange(0, CHUNK)
    for start in range(first, end, CHUNK):
        number = start + within
        tl.store(of_blocks + number, tl.zeros((CHUNK,), tl.int32) + mine, mask=number < end)
        left = tl.minimum(num_mine - (number - first) * ROWS, ROWS)
        tl.store(of_blocks + num_blocks + number, left, mask=number < end)
    if mine == num_own - 1:  # the blocks behind the last one that is used
        for start in range(end, num_blocks, CHUNK):
            number = start + within
            tl.store(of_blocks + num_blocks + number, tl.zeros((CHUNK,), tl.int32), mask=number < num_blocks)
    place = first * ROWS
    if num_mine > 0:
        for start in range(0, num_pairs, CHUNK):
            pair = start + within
            is_mine = tl.load(experts + pair, mask=pair < num_pairs, other=-1) - first_expert == mine
            is_mine = is_mine & (pair < num_pairs)
            ones = is_mine.to(tl.int32)
            tl.store(order + place + tl.cumsum(ones, 0) - ones, pair, mask=is_mine)
            place += tl.sum(ones, 0)


@triton.jit
def _grouped_kernel(
    x, weight, bias, y, order, experts, counts, x_stride, outputs, limit,
    WIDTH: tl.constexpr, TOP_K: tl.constexpr, GATE: tl.constexpr, BIAS: tl.constexpr,
    BLOCK_ROWS: tl.constexpr, BLOCK_OUT: tl.constexpr, BLOCK_IN: tl.constexpr,
):  # fmt: skip
    block = tl.program_id(0)
    count = tl.load(counts + block)
    if count == 0:
        return
    expert = tl.load(experts + block).to(tl.int64)
    within = tl.arange(0, BLOCK_ROWS)
    is_row = within < count
    place = block.to(tl.int64) * BLOCK_ROWS + within
    pair = tl.load(order + place, mask=is_row, other=0).to(tl.int64)
    output = tl.program_id(1) * BLOCK_OUT + tl.arange(0, BLOCK_OUT)
    is_output = output < outputs
    gated: tl.constexpr = GATE != ""
    source = pair // TOP_K if gated else place
    inputs = x + source[:, None] * x_stride  # [R, 1]
    num_rows = 2 * outputs if gated else outputs  # of an expert's weight
    first = weight + (expert * num_rows + output.to(tl.int64))[None, :] * WIDTH  # [1, O]
    second = first + outputs.to(tl.int64) * WIDTH
    total = tl.zeros((BLOCK_ROWS, BLOCK_OUT), tl.float32)
    ups = tl.zeros((BLOCK_ROWS, BLOCK_OUT), tl.float32)
    for step in range(0, WIDTH, BLOCK_IN):
        column = step + tl.arange(0, BLOCK_IN)
        is_column = column < WIDTH
        left = tl.load(inputs + column[None, :], mask=is_row[:, None] & is_column[None, :], other=0.0)
        is_weight = is_column[:, None] & is_output[None, :]
        right = tl.load(first + column[:, None], mask=is_weight, other=0.0)
        total = tl.dot(left, right, total, input_precision="ieee")
        if gated:
            right = tl.load(second + column[:, None], mask=is_weight, other=0.0)
            ups = tl.dot(left, right, ups, input_precision="ieee")
    if BIAS:
        biases = bias + expert * num_rows + output
        total += tl.load(biases, mask=is_output, other=0.0).to(tl.float32)[None, :]
        if gated:
            ups += tl.load(biases + outputs, mask=is_output, other=0.0).to(tl.float32)[None, :]
    kind = y.dtype.element_ty
    if GATE == "clamped_swiglu":
        gates = tl.minimum(total.to(kind).to(tl.float32), limit)
        ups = tl.minimum(tl.maximum(ups.to(kind).to(tl.float32), -limit), limit)
        total = gates * tl.sigmoid(1.702 * gates) * (ups + 1.0)
    elif gated:
        total = activate(total.to(kind).to(tl.float32), GATE).to(kind).to(tl.float32) * ups.to(kind).to(tl.float32)
    target = place if gated else pair
    tl.store(y + target[:, None] * outputs + output[None, :], total.to(kind), mask=is_row[:, None] & is_output[None, :])


@triton.jit
def _combine_kernel(
    results, experts, weights, y, width, first_expert, end_expert, TOP_K: tl.constexpr, BLOCK: tl.constexpr
):
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < width
    total = tl.zeros((BLOCK,), tl.float32)
    for place in range(TOP_K):
        pair = row * TOP_K + place
        expert = tl.load(experts + pair)
        is_own = (expert >= first_expert) & (expert < end_expert)
        found = tl.load(results + pair * width + column, mask=inside & is_own, other=0.0).to(tl.float32)
        total += found * tl.load(weights + pair)
    tl.store(y + row * width + column, total.to(y.dtype.element_ty), mask=inside)
