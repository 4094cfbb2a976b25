"""What decides about the prefill kernel; the kernel itself runs on a GPU alone (tests/cuda/test_prefill.py)."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch

from ratoon.attention import triton_prefill
from ratoon.attention.interface import CommonAttentionMetadata
from ratoon.attention.triton_prefill import find_long_pages, serves, widen
from ratoon.layers import gpu
from ratoon.layers.attention import AttentionLayer

LAYER = AttentionLayer(0, 8, 2, 64, 0.125)
FP8 = torch.float8_e4m3fn


def step(query_lens: list[int], seq_lens: list[int], block_size: int = 4) -> CommonAttentionMetadata:
    counts = -(-np.array(seq_lens) // block_size)
    table = np.zeros((len(seq_lens), counts.max() + 2), np.int32)  # wider than needed, as the runner's
    for row, count in enumerate(counts):
        table[row, :count] = 100 * (row + 1) + np.arange(count)
    starts = np.cumsum([0, *query_lens]).astype(np.int32)
    lengths = np.array(seq_lens, np.int32)
    tensors = [torch.from_numpy(array) for array in (starts, lengths, table)]
    return CommonAttentionMetadata(
        starts, lengths, table, *tensors, torch.zeros(0), block_size, max(query_lens), max(seq_lens)
    )


def test_blocks_of_long_requests_lie_one_behind_the_other(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(triton_prefill, "_MIN_QUERIES", 3)
    found = find_long_pages(step([5, 1, 4], [5, 40, 9]), shortest=2)
    assert found is not None
    assert found.blocks.tolist() == [100, 101, 300, 301, 302]
    assert found.table.tolist() == [[0, 1, 0], [0, 0, 0], [2, 3, 4]]


def test_few_queries_behind_many_keys_are_not_worth_a_copy() -> None:
    assert find_long_pages(step([70], [300]), shortest=17) is not None
    assert find_long_pages(step([40], [300]), shortest=17) is None
    assert find_long_pages(replace(step([70], [300]), is_padded=True), shortest=17) is None


def test_a_copy_in_more_bits_has_the_same_numbers(monkeypatch: pytest.MonkeyPatch) -> None:
    pages = torch.randn(6, 2, 2, 4, 8).to(FP8)
    blocks = torch.tensor([4, 1, 4], dtype=torch.int32)
    copied = widen(pages, blocks, torch.bfloat16)
    assert copied is not None
    assert torch.equal(copied, pages.to(torch.bfloat16)[[4, 1, 4]])
    monkeypatch.setattr(triton_prefill, "_MAX_WIDENED_BYTES", 3 * 2 * 2 * 4 * 8 * 2 - 1)
    assert widen(pages, blocks, torch.bfloat16) is None


def test_what_the_kernel_serves() -> None:
    pages = torch.zeros(3, 2, 2, 16, 64, dtype=torch.bfloat16)
    assert serves(LAYER, torch.bfloat16, pages, 16)
    assert serves(replace(LAYER, window=5), torch.bfloat16, pages, 16)
    assert serves(replace(LAYER, causal=False), torch.bfloat16, pages, 16)
    assert serves(replace(LAYER, head_dim=80), torch.bfloat16, torch.zeros(3, 2, 2, 16, 80).bfloat16(), 16)
    assert serves(LAYER, torch.bfloat16, pages.to(FP8), 16)
    assert not serves(LAYER, torch.float16, pages, 16)  # pages of another type
    assert not serves(LAYER, torch.float32, pages.float(), 16)
    assert not serves(replace(LAYER, head_dim=256), torch.bfloat16, torch.zeros(3, 2, 2, 16, 256).bfloat16(), 16)
    assert not serves(replace(LAYER, head_dim=36), torch.bfloat16, torch.zeros(3, 2, 2, 16, 36).bfloat16(), 16)
    assert not serves(replace(LAYER, bias=torch.zeros(8, 3)), torch.bfloat16, pages, 16)
    assert not serves(replace(LAYER, window=5, causal=False), torch.bfloat16, pages, 16)
    assert not serves(LAYER, torch.bfloat16, pages, 100)
    assert not serves(LAYER, torch.bfloat16, pages, 4)


@pytest.mark.parametrize(
    ("capability", "is_known", "expected"),
    [((9, 0), True, True), ((9, 0), False, False), ((10, 0), True, False)],
)
def test_the_kernel_is_for_one_generation_of_gpus_and_one_version_of_an_experimental_language(
    monkeypatch: pytest.MonkeyPatch, capability: tuple[int, int], is_known: bool, expected: bool
) -> None:
    pytest.importorskip("triton")
    from ratoon.layers.triton import internals

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: capability)
    monkeypatch.setattr(internals, "IS_KNOWN", is_known)
    assert gpu.has_wgmma.__wrapped__() is expected
