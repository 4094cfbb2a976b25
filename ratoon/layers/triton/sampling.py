"""Choosing tokens on a GPU: the greedy choice, the draw and its filters, in a few passes over the logits.

Nothing waits for the device, and shapes depend on the arguments' shapes alone: CUDA graphs can hold every function. A
row is cut into chunks of fixed length, whatever the batch, so that a row's token does not depend on other rows.
layers/sampling.py has the definitions; there the sums are exact, here they are rounded, so that a number that falls
within about 1e-7 of a token's border may give its neighbour.

One pass over the logits gives maxima and sums. A row with filters then lists its largest tokens, and usually all that
the filters leave is among them. Otherwise, if only top_p cuts, a sample of the row tells about where its threshold is,
and a second pass lists what is near it; the sums of that pass show whether the sample was right. Rows for which all
this was not enough are searched in several passes.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from ratoon.layers.triton.dependent import launch_options, wait_for_kernel_before
from ratoon.layers.triton.launch import launch
from ratoon.layers.triton.sampling_filters import draw_from_list, draw_others, list_largest, list_near
from ratoon.layers.triton.sampling_parts import INF, bits_of, choose_unfiltered, is_finite, load_divisor, load_logits

Tensor = torch.Tensor

CHUNK = 4096  # columns that one program reads
# The list of the largest tokens
GROUP = 32  # columns whose maximum is stored
GROUPED = 8  # groups whose maxima are compared together
WANTED = 256  # tokens of a list, at least, where top_k does not tell how many are needed
GROUP_ROOM = 512  # groups that may hold them; more are possible only where many are equal
LIST_ROOM = 1024  # tokens of a list
SHORT_LIST = 256  # tokens that are drawn from in less time
GROUPS_AT_ONCE = 64
# The list of tokens near the threshold
SAMPLED_GROUPS = 256
NEAR_ROOM = 1024  # tokens of each chunk
NEAR_AT_ONCE = 64  # of each chunk
NEARER_ROOM = 4096  # tokens of all chunks
NEAR_PROGRAMS = 1024  # that list them, for all rows
# Other rows are read several times.
PIVOTS = 8  # thresholds that are examined in one pass over a row
BLOCK = 2048  # columns at a time in such a pass


def sample_plain(
    logits: Tensor,  # [R, V] float32, bfloat16 or float16
    temperature: Tensor,  # [R] float32; 0: greedy
    top_k: Tensor,  # [R] int64
    top_p: Tensor,  # [R] float64
    min_p: Tensor,  # [R] float32
    uniforms: Tensor,  # [R] float64
    draws: bool,  # whether a row may have a temperature
    filters: bool,  # whether such a row may have filters
    masks: tuple[Tensor, Tensor] | None = None,  # see layers/sampling.py
) -> tuple[Tensor, Tensor]:
    """Token ids [R] int64 and bad rows [R] bool; see layers/sampling.py."""
    num_rows, num_columns = logits.shape
    num_chunks = triton.cdiv(num_columns, CHUNK)
    token_ids = torch.empty(num_rows, dtype=torch.int64, device=logits.device)
    bad = torch.empty(num_rows, dtype=torch.bool, device=logits.device)
    if num_rows == 0:
        return token_ids, bad

    def scratch(dtype: torch.dtype, *shape: int) -> Tensor:
        return torch.empty(num_rows, *shape, dtype=dtype, device=logits.device)

    maxima, sums = scratch(torch.float32, num_chunks), scratch(torch.float32, num_chunks)
    row = (logits, logits.stride(0), num_columns, temperature)
    reduced = (maxima, sums, num_chunks)
    sizes = {"CHUNK": CHUNK, "CHUNKS": triton.next_power_of_2(num_chunks)}
    early = launch_options(logits.device.type != "cpu")
    num_groups = triton.cdiv(num_columns, GROUP) if filters else 0
    of_groups = scratch(torch.float32, num_groups) if filters else maxima  # not read
    mask_of, words = (token_ids.view(torch.int32),) * 2 if masks is None else masks  # not read
    num_words = 0 if masks is None else words.shape[1]
    launch(
        _reduce_chunks, (num_chunks, num_rows),
        *row, *reduced, of_groups, num_groups, mask_of, words, num_words, draws, CHUNK, GROUP, num_warps=4,
    )  # fmt: skip
    if not filters:
        launch(_pick, (num_rows,), *row, *reduced, uniforms, token_ids, bad, draws, **sizes, **early, num_warps=8)
        return token_ids, bad
    wanted, found = (top_k, top_p, min_p, uniforms), (token_ids, bad)
    threshold, between = scratch(torch.int32), scratch(torch.int32, 2)
    listed, listed_ids = scratch(torch.float32, NEARER_ROOM), scratch(torch.int32, LIST_ROOM)
    launch(
        list_largest, (num_rows,),
        *row, *reduced, *wanted, *found, threshold, between, of_groups, num_groups, scratch(torch.int32, GROUP_ROOM),
        listed, listed_ids, GROUP, triton.next_power_of_2(triton.cdiv(num_groups, GROUPED)), GROUPED, WANTED,
        GROUP_ROOM, NEARER_ROOM, LIST_ROOM, GROUPS_AT_ONCE, SAMPLED_GROUPS, **sizes, **early, num_warps=8,
    )  # fmt: skip
    launch(
        draw_from_list, (num_rows,),
        *row[2:], *reduced, *wanted, *found, threshold, between, listed, listed_ids, NEARER_ROOM, LIST_ROOM, SHORT_LIST,
        CHUNKS=sizes["CHUNKS"], **early, num_warps=1,
    )  # fmt: skip
    masses, near = scratch(torch.float64, num_chunks, 3), scratch(torch.float32, num_chunks, NEAR_ROOM)
    num_near = scratch(torch.int32, num_chunks)
    num_programs = min(num_chunks, max(NEAR_PROGRAMS // num_rows, 1))  # of a row
    launch(
        list_near, (num_programs, num_rows), *row, *reduced, threshold, between, masses, near, num_near, NEAR_ROOM,
        **sizes, **early, num_warps=4,
    )  # fmt: skip
    launch(
        draw_others, (num_rows,),
        *row, *reduced, *wanted, *found, threshold, between, masses, near, num_near, listed,
        NEAR_ROOM, NEAR_AT_ONCE, NEARER_ROOM, BLOCK, PIVOTS, LIST_ROOM, **sizes, **early, num_warps=8,
    )  # fmt: skip
    return token_ids, bad


def greedy(logits: Tensor) -> tuple[Tensor, Tensor]:
    """Chooses the most probable token of each row, where all rows are greedy."""
    # Not read; of the types for which the kernels are compiled
    numbers, uniforms = (logits.new_empty(0, dtype=dtype) for dtype in (torch.float32, torch.float64))
    return sample_plain(logits, *(numbers,) * 4, uniforms, draws=False, filters=False)


@triton.jit(do_not_specialize=["num_groups", "num_words"])
def _reduce_chunks(
    logits, row_stride, num_columns, temperature, maxima, sums, num_chunks, of_groups, num_groups, mask_of, words,
    num_words, DRAWS: tl.constexpr, CHUNK: tl.constexpr, GROUP: tl.constexpr,
):  # fmt: skip
    """Computes the largest logit of each chunk, the sum of exponentials over the temperature with that logit
    subtracted, and the largest logit of each of the first `num_groups` groups of columns. With and without groups the
    same binary runs, so that sums are rounded alike and a row draws the same whether others of its batch have filters
    or not. A NaN is seen in the sum.

    Where there are masks, of `num_words` words, tokens without their bit are made impossible first, here and for the
    kernels that follow."""
    chunk, row = tl.program_id(0), tl.program_id(1).to(tl.int64)
    place = row * num_chunks + chunk
    logits += row * row_stride
    if num_words > 0:
        entry = tl.load(mask_of + row).to(tl.int64)
        if entry >= 0:
            _forbid(logits, num_columns, words + entry * num_words, chunk, CHUNK)
            tl.debug_barrier()  # what follows reads it with other threads
    if DRAWS:
        groups = chunk * (CHUNK // GROUP) + tl.arange(0, CHUNK // GROUP)
        columns = groups[:, None] * GROUP + tl.arange(0, GROUP)[None, :]
        x = tl.load(logits + columns, mask=columns < num_columns, other=-INF).to(tl.float32)
        tops = tl.max(x, 1)
        tl.store(of_groups + row * num_groups + groups, tops, mask=groups < num_groups)
        top = tl.max(tops, 0)
        # log2(e) / temperature as a sum of two numbers. Both are above 0, so that -inf stays -inf.
        exact = tl.full([], 1.4426950408889634, tl.float64) / load_divisor(temperature, row).to(tl.float64)
        scale = (bits_of(exact.to(tl.float32)) - 1).to(tl.float32, bitcast=True)
        rest = (exact - scale.to(tl.float64)).to(tl.float32)
        below = x - tl.where(is_finite(top), top, 0.0)
        tl.store(sums + place, tl.sum(tl.sum(tl.exp2(tl.fma(below, scale, below * rest)), 1), 0))
    else:
        columns = chunk * CHUNK + tl.arange(0, CHUNK)
        top = tl.max(load_logits(logits, columns, num_columns), 0)
    tl.store(maxima + place, top)


@triton.jit
def _forbid(logits, num_columns, words, chunk, CHUNK: tl.constexpr):
    """Only what is forbidden is written, and nothing of the row is read."""
    columns = chunk * CHUNK + tl.arange(0, CHUNK)
    inside = columns < num_columns
    word = tl.load(words + columns // 32, mask=inside, other=-1)
    forbidden = inside & (((word >> (columns % 32)) & 1) == 0)
    tl.store(logits + columns, tl.full((CHUNK,), -INF, tl.float32).to(logits.dtype.element_ty), mask=forbidden)


@triton.jit
def _pick(
    logits, row_stride, num_columns, temperature, maxima, sums, num_chunks, uniforms, token_ids, bad,
    DRAWS: tl.constexpr, CHUNK: tl.constexpr, CHUNKS: tl.constexpr, DEPENDENT: tl.constexpr,
):  # fmt: skip
    if DEPENDENT:
        wait_for_kernel_before()
    row = tl.program_id(0).to(tl.int64)
    logits += row * row_stride
    choose_unfiltered(
        logits, num_columns, temperature, maxima, sums, num_chunks, uniforms, token_ids, bad, row, DRAWS, CHUNK, CHUNKS
    )
