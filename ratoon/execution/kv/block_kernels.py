"""A Triton kernel that copies blocks of the KV cache, in all tensors at once, within the device's memory. Imported on
CUDA only."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
import triton
import triton.language as tl

from ratoon.execution.inputs.cells import to_device
from ratoon.layers.triton.launch import launch

Tensor = torch.Tensor

WORDS_OF_PROGRAM = 1024
FEW_BLOCKS = 2  # for which a launch each takes less time than bringing their numbers to the device


class Pages:
    """Tensors [blocks, words] of int64, each of whose rows is contiguous, and a table of them on the device."""

    def __init__(self, tensors: Sequence[Tensor], device: torch.device) -> None:
        self.tensors = list(tensors)  # the addresses stay valid
        self.max_words = max((tensor.shape[1] for tensor in tensors), default=0)
        table = np.array([[tensor.data_ptr(), tensor.shape[1], tensor.stride(0)] for tensor in tensors], np.int64)
        self.table = to_device(table, device)


def copy_blocks(source: Pages, target: Pages, blocks: Sequence[tuple[int, int]]) -> None:
    """Copy each block (from, to) in all tensors, on the current stream. No block may be both copied and written to."""
    if not blocks:
        return
    if len(blocks) <= FEW_BLOCKS:
        num_parts = triton.cdiv(source.max_words, WORDS_OF_PROGRAM)
        tables = (source.table, target.table)
        for block, copy in blocks:
            launch(_copy_block, (len(source.tensors), num_parts), *tables, block, copy, NUM_WORDS=WORDS_OF_PROGRAM)
        return
    copy_listed_blocks(source, target, to_device(np.array(blocks, np.int32).reshape(-1), source.table.device))


def copy_listed_blocks(source: Pages, target: Pages, pairs: Tensor) -> None:
    """Copies blocks as `copy_blocks` does, by numbers (from, to) that are on the device: `pairs` [2N] int32."""
    grid = (len(source.tensors), triton.cdiv(source.max_words, WORDS_OF_PROGRAM), len(pairs) // 2)
    launch(_copy_blocks, grid, source.table, target.table, pairs, NUM_WORDS=WORDS_OF_PROGRAM)


@triton.jit(do_not_specialize=["block", "copy"])
def _copy_block(sources, targets, block, copy, NUM_WORDS: tl.constexpr):  # type: ignore[no-untyped-def]
    _copy_part(sources, targets, block, copy, NUM_WORDS)


@triton.jit
def _copy_blocks(sources, targets, pairs, NUM_WORDS: tl.constexpr):  # type: ignore[no-untyped-def]
    pair = tl.program_id(2)
    _copy_part(sources, targets, tl.load(pairs + 2 * pair), tl.load(pairs + 2 * pair + 1), NUM_WORDS)


@triton.jit
def _copy_part(sources, targets, block, copy, NUM_WORDS: tl.constexpr):  # type: ignore[no-untyped-def]
    """Program (tensor, part): NUM_WORDS words of a block in one of the tensors."""
    tensor, part = tl.program_id(0), tl.program_id(1)
    num_words = tl.load(sources + 3 * tensor + 1)
    source_row = block * tl.load(sources + 3 * tensor + 2)
    target_row = copy * tl.load(targets + 3 * tensor + 2)
    source = tl.load(sources + 3 * tensor).to(tl.pointer_type(tl.int64)) + source_row
    target = tl.load(targets + 3 * tensor).to(tl.pointer_type(tl.int64)) + target_row
    words = part * NUM_WORDS + tl.arange(0, NUM_WORDS)
    inside = words < num_words
    tl.store(target + words, tl.load(source + words, mask=inside, other=0), mask=inside)
