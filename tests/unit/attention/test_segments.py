"""Attention inside runs of rows, against softmax written out in float64."""

from __future__ import annotations

import pytest
import torch

from ratoon.attention.segments import attend_in_runs, attend_rounded, build_segment_attention
from ratoon.layers.native import has_bf16_matrices

Tensor = torch.Tensor
LENGTHS = [
    [1], [64], [3, 3, 3, 5], [16, 16, 4, 16, 16, 4, 8, 8, 2], [33, 1, 40],
]  # fmt: skip


def expected(q: Tensor, k: Tensor, v: Tensor, lengths: list[int]) -> Tensor:
    parts = []
    for one_q, one_k, one_v in zip(*(x.double().split(lengths) for x in (q, k, v)), strict=True):
        scores = torch.einsum("thd,shd->hts", one_q, one_k) * q.shape[-1] ** -0.5
        parts.append(torch.einsum("hts,shd->thd", scores.softmax(-1), one_v).flatten(1))
    return torch.cat(parts)


def views_of_one_product(rows: int, heads: int, head_dim: int) -> tuple[Tensor, ...]:
    fused = torch.randn(rows, 3 * heads, head_dim, generator=torch.Generator().manual_seed(rows))
    return fused.split(heads, 1)


@pytest.mark.parametrize("head_dim", [8, 64, 72, 80])
@pytest.mark.parametrize("lengths", LENGTHS, ids=str)
def test_rows_attend_to_all_rows_of_their_run_and_to_no_others(lengths: list[int], head_dim: int) -> None:
    q, k, v = views_of_one_product(sum(lengths), 3, head_dim)
    attend = build_segment_attention(torch.device("cpu"), torch.float32)
    found = attend(q, k, v, lengths)
    assert found.shape == (sum(lengths), 3 * head_dim)
    torch.testing.assert_close(found.double(), expected(q, k, v, lengths), atol=2e-6, rtol=0)


def test_a_run_has_the_same_bits_in_any_batch() -> None:
    lengths = [16, 16, 4, 16, 9]
    q, k, v = views_of_one_product(sum(lengths), 2, 80)
    together = attend_in_runs(q, k, v, lengths).split(lengths)
    for index, parts in enumerate(zip(*(x.split(lengths) for x in (q, k, v)), strict=True)):
        assert torch.equal(attend_in_runs(*parts, [lengths[index]]), together[index])


@pytest.mark.parametrize("lengths", LENGTHS, ids=str)
def test_rounded_attention_is_within_the_error_of_bf16(lengths: list[int]) -> None:
    q, k, v = views_of_one_product(sum(lengths), 3, 64)
    attend = build_segment_attention(torch.device("cpu"), torch.float32, may_round=True)
    error = (attend(q, k, v, lengths).double() - expected(q, k, v, lengths)).abs().max()
    assert error < 2**-5, "values of up to 4, scores of up to 30 / 8 from products of numbers of 8 bits"
    assert (error > 1e-6) == has_bf16_matrices(64) or lengths == [1]


def test_rounded_attention_serves_heads_that_its_kernel_does_not() -> None:
    q, k, v = views_of_one_product(20, 2, 72)
    assert torch.equal(attend_rounded(q, k, v, [12, 8]), attend_in_runs(q, k, v, [12, 8]))
