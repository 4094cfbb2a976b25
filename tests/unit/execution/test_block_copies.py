"""Copies of blocks on a CPU: all sources are read before a target is written."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from ratoon.execution.kv.kv_tensors import KVTensors


def moved(copies: list[tuple[int, int]]) -> list[list[int]]:
    contents = [torch.arange(12).view(6, 2), torch.arange(6).view(6, 1)]
    tensors: Any = SimpleNamespace(_tensors=contents, _pages=None, _connector=None)
    tensors._move = lambda plan: KVTensors._move(tensors, plan)
    tensors._copy_rows = lambda plan: KVTensors._copy_rows(tensors, plan)
    blocks = [SimpleNamespace(src=source, dst=target) for source, target in copies]
    plan: Any = SimpleNamespace(block_copies=blocks, fetches=[], stores=[], loads=[])
    KVTensors.move_blocks(tensors, plan)
    assert torch.equal(tensors._tensors[0][:, 0], 2 * tensors._tensors[1][:, 0])
    return tensors._tensors[1].flatten().tolist()


@pytest.mark.parametrize(
    ("copies", "expected"),
    [
        ([(1, 4), (1, 5), (0, 2)], [0, 1, 0, 3, 1, 1]),
        ([(1, 2), (2, 3)], [0, 1, 1, 2, 4, 5]),  # a source is a target, too
        ([(1, 2), (2, 1)], [0, 2, 1, 3, 4, 5]),
        ([], [0, 1, 2, 3, 4, 5]),
    ],
)
def test_every_target_has_what_its_source_held_before(copies: list[tuple[int, int]], expected: list[int]) -> None:
    assert moved(copies) == expected
