"""Triton kernels that prepare a step's inputs on the device, from the rows that lie there. Imported on CUDA only.

The arithmetic is that of step_inputs.py. Every kernel works on memory at fixed addresses and reads the numbers of
requests and tokens from it, so that a captured graph can be replayed for any step that is not larger.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl

from ratoon.layers.triton.launch import launch

Tensor = torch.Tensor

TABLE_COLUMNS = 1024  # that are copied at a time
TOKENS_OF_PROGRAM = (1, 64, 1024)  # few sizes: each is compiled on its first use
CELLS_OF_PROGRAM = 1024
WORDS_OF_PROGRAM = 512  # few: they come over a bus, and many programs wait for it at the same time


@triton.jit(do_not_specialize=["count"])
def _scatter(memory, cells, values, count, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    places = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = places < count
    cell = tl.load(cells + places, mask=inside, other=0)
    value = tl.load(values + places, mask=inside, other=0)
    tl.store(memory + cell, value, mask=inside)


@triton.jit(do_not_specialize=["num_words", "further_start", "num_further", "cells_start", "values_start", "num_cells"])
def _receive(  # type: ignore[no-untyped-def]
    host, device, num_words, further_start, num_further, memory, cells_start, values_start, num_cells,
    BLOCK: tl.constexpr,
):  # fmt: skip
    places = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    is_word, is_further, is_cell = places < num_words, places < num_further, places < num_cells
    word = tl.load(host + places, mask=is_word, other=0)
    further = tl.load(host + further_start + places, mask=is_further, other=0)
    cell = tl.load(host + cells_start + places, mask=is_cell, other=0)
    value = tl.load(host + values_start + places, mask=is_cell, other=0)
    tl.store(device + places, word, mask=is_word)
    tl.store(device + further_start + places, further, mask=is_further)
    tl.store(memory + cell, value, mask=is_cell)


def receive(
    host: Tensor,
    device: Tensor,
    num_words: int,
    further_start: int,
    num_further: int,
    memory: Tensor,
    cells_start: int,
    values_start: int,
    num_cells: int,
) -> None:
    """Copy the first words of `host`, which is pinned, and some further ones to the same places of `device`, and write
    cells of `memory`: their numbers and values lie further back in `host`. One launch takes less time than a copy and
    what follows it."""
    grid = (triton.cdiv(max(num_words, num_further, num_cells), WORDS_OF_PROGRAM),)
    launch(
        _receive, grid, host, device, num_words, further_start, num_further, memory, cells_start, values_start,
        num_cells, BLOCK=WORDS_OF_PROGRAM,
    )  # fmt: skip


def scatter(memory: Tensor, cells: Tensor, values: Tensor) -> None:
    """memory[cells] = values. A cell may occur several times, always with the same value."""
    count = len(cells)
    launch(_scatter, (triton.cdiv(count, CELLS_OF_PROGRAM),), memory, cells, values, count, BLOCK=CELLS_OF_PROGRAM)


@triton.jit(do_not_specialize=["num_padded_tokens", "num_padded_reqs"])
def _prepare(  # type: ignore[no-untyped-def]
    memory,  # the rows: token ids, block tables of the groups, cross tables
    tables_start,  # where in `memory` they begin
    cross_start,
    counts,  # of the step: requests, tokens
    rows,  # [R] and so on: what the host says of each request
    num_computed,
    query_starts,  # [R + 1]
    unwritten,
    encoder_lens,
    rope_lens,  # of tokens whose rope positions are in `memory`
    rope_deltas,
    adapter_slots,
    rope_start,  # where in `memory` they begin
    input_ids,  # [T] and so on: what the model reads
    positions,
    rope_positions,  # [axes, capacity]
    rope_stride,
    token_adapters,
    slots,  # [groups, capacity]
    slots_stride,
    query_start_loc,
    seq_lens,
    tables,  # [groups, capacity, max_blocks]
    tables_stride,
    cross_lens,
    cross_tables,
    num_padded_tokens,
    num_padded_reqs,
    max_rows,
    max_model_len,
    max_blocks,
    max_cross_blocks,
    block_sizes,  # of the groups
    NUM_GROUPS: tl.constexpr,
    ROPE_AXES: tl.constexpr,  # 0: rope positions are those in the sequence
    HAS_ADAPTERS: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,  # 0: groups have different ones
    NUM_TOKENS: tl.constexpr,
    NUM_COLUMNS: tl.constexpr,
):
    """One program for a request, a group (the last: cross-attention) and NUM_TOKENS of the request's tokens.

    Requests behind the step's are padding: the padded tokens are divided among them. Their tokens, positions and slots
    are 0, and their tables are the null block.
    """
    request, group, part = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    num_reqs, num_tokens = tl.load(counts), tl.load(counts + 1)
    is_real = request < num_reqs
    row = tl.load(rows + request, mask=is_real, other=0).to(tl.int64)
    computed = tl.load(num_computed + request, mask=is_real, other=0)
    padding = tl.cdiv(num_padded_tokens - num_tokens, tl.maximum(num_padded_reqs - num_reqs, 1))  # of a request
    padding_start = num_tokens + (request - num_reqs) * padding
    start = tl.load(query_starts + request, mask=is_real, other=0)
    end = tl.load(query_starts + request + 1, mask=is_real, other=0)
    start = tl.where(is_real, start, tl.minimum(padding_start, num_padded_tokens))
    end = tl.where(is_real, end, tl.minimum(padding_start + padding, num_padded_tokens))
    length = end - start
    seq_len = computed + length
    if BLOCK_SIZE == 0:
        block_size = tl.load(block_sizes + group)
    else:
        block_size = BLOCK_SIZE

    if group < NUM_GROUPS:
        offsets = part * NUM_TOKENS + tl.arange(0, NUM_TOKENS)
        inside = offsets < length
        position = tl.where(is_real, computed + offsets, 0)
        if group == 0:
            token_place = row * max_model_len + position
            token = tl.load(memory + token_place, mask=inside & is_real, other=0)
            tl.store(input_ids + start + offsets, token.to(tl.int64), mask=inside)
            tl.store(positions + start + offsets, position.to(tl.int64), mask=inside)
            if ROPE_AXES > 0:
                is_listed = is_real & (position < tl.load(rope_lens + request, mask=is_real, other=0))
                shifted = position + tl.load(rope_deltas + request, mask=is_real, other=0)
                for axis in tl.static_range(ROPE_AXES):
                    place = rope_start + (row * ROPE_AXES + axis) * max_model_len + position
                    listed = tl.load(memory + place, mask=inside & is_listed, other=0)
                    out_place = rope_positions + axis * rope_stride + start + offsets
                    tl.store(out_place, tl.where(is_listed, listed, shifted).to(tl.int64), mask=inside)
            if HAS_ADAPTERS:
                adapter = tl.load(adapter_slots + request, mask=is_real, other=-1)
                tl.store(token_adapters + start + offsets, tl.where(inside, adapter, -1), mask=inside)
            if part == 0:
                tl.store(seq_lens + request, seq_len)
                tl.store(query_start_loc + request, start)
                tl.store(query_start_loc + request + 1, end, mask=request == num_padded_reqs - 1)
        table = memory + tables_start + (group.to(tl.int64) * max_rows + row) * max_blocks
        block = tl.load(table + position // block_size, mask=inside & is_real, other=0)
        is_kept = is_real & (tl.load(unwritten + request, mask=is_real, other=1) == 0)
        slot = tl.where(is_kept, block.to(tl.int64) * block_size + position % block_size, 0)
        tl.store(slots + group * slots_stride + start + offsets, slot, mask=inside)
        out = tables + group * tables_stride + request.to(tl.int64) * max_blocks
        num_keys = seq_len
    else:
        table = memory + cross_start + row * max_cross_blocks
        out = cross_tables + request.to(tl.int64) * max_cross_blocks
        num_keys = tl.load(encoder_lens + request, mask=is_real, other=0)
        num_keys = tl.where(is_real, num_keys, tl.minimum(length, 1))  # an encoder's input may be short
        if part == 0:
            tl.store(cross_lens + request, num_keys)

    if part == 0:
        num_columns = (num_keys + block_size - 1) // block_size
        first = 0
        while first < num_columns:
            columns = first + tl.arange(0, NUM_COLUMNS)
            inside_table = columns < num_columns
            entries = tl.load(table + columns, mask=inside_table & is_real, other=0)
            tl.store(out + columns, entries, mask=inside_table)
            first += NUM_COLUMNS


def prepare(
    num_padded_reqs: int,
    max_query_len: int,
    *arguments: Any,
    num_groups: int,
    rope_axes: int,
    has_cross: bool,
    has_adapters: bool,
    block_size: int,
) -> None:
    """`arguments`: all of the kernel's that are no constants. `block_size`: that of all groups; 0: they differ."""
    num_tokens = next((size for size in TOKENS_OF_PROGRAM if size >= max_query_len), TOKENS_OF_PROGRAM[-1])
    grid = (num_padded_reqs, num_groups + has_cross, triton.cdiv(max_query_len, num_tokens))
    launch(
        _prepare,
        grid,
        *arguments,
        NUM_GROUPS=num_groups,
        ROPE_AXES=rope_axes,
        HAS_ADAPTERS=has_adapters,
        BLOCK_SIZE=block_size,
        NUM_TOKENS=num_tokens,
        NUM_COLUMNS=TABLE_COLUMNS,
    )


@triton.jit(do_not_specialize=["count"])
def _append_tokens(memory, cells, token_ids, bad, results, count, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    places = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = places < count
    cell = tl.load(cells + places, mask=inside, other=-1)
    token = tl.load(token_ids + places, mask=inside, other=0).to(tl.int32)
    is_bad = tl.load(bad + places, mask=inside, other=0) != 0
    tl.store(memory + cell, token, mask=inside & (cell >= 0))
    tl.store(results + places, tl.where(is_bad, -1, token), mask=inside)


def append_tokens(memory: Tensor, cells: Tensor, token_ids: Tensor, bad: Tensor, results: Tensor) -> None:
    """Write each token [N] to its cell of `memory`, unless that is -1, and to `results`; -1 there: it is bad."""
    count = len(token_ids)
    grid = (triton.cdiv(count, CELLS_OF_PROGRAM),)
    launch(_append_tokens, grid, memory, cells, token_ids, bad, results, count, BLOCK=CELLS_OF_PROGRAM)
