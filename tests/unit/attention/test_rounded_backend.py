"""An encoder's attention in bf16: who gets it, and what it computes."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from ratoon.attention.cpu import CpuAttentionBackend, RoundedCpuBackend
from ratoon.attention.interface import AttentionNeeds
from ratoon.layers import native
from ratoon.layers.attention import AttentionLayer
from tests.unit.attention.test_backends import Batch, needs_kernels

NEEDS = AttentionNeeds("cpu", torch.float32, 16, 64, 2, 2, causal=False, may_round=True)
LAYER = AttentionLayer(0, 2, 2, 64, 0.125, causal=False)
needs_matrices = pytest.mark.skipif(not native.has_bf16_matrices(64), reason="this processor has no matrix unit")


@needs_matrices
@pytest.mark.parametrize(
    "change",
    [{"may_round": False}, {"causal": True}, {"has_bias": True}, {"head_dim": 80}, {"num_heads": 4}],
    ids=lambda change: next(iter(change)),
)
def test_it_is_taken_where_rounding_is_allowed_and_nothing_else_is_asked_for(change: dict[str, Any]) -> None:
    assert isinstance(CpuAttentionBackend.create(NEEDS), RoundedCpuBackend)
    assert not isinstance(CpuAttentionBackend.create(replace(NEEDS, **change)), RoundedCpuBackend)


@needs_kernels
def test_a_processor_without_the_instructions_computes_in_float32(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ratoon.attention.cpu.has_bf16_matrices", lambda head_dim: False)
    assert type(CpuAttentionBackend.create(NEEDS)) is CpuAttentionBackend


@needs_matrices
def test_results_differ_by_roundings_to_bf16_and_do_not_depend_on_the_batch() -> None:
    lengths = [1, 70, 300, 33]
    batch = Batch([0] * len(lengths), lengths, LAYER, 16)
    rounded = batch.run(RoundedCpuBackend())
    for index, (found, exact) in enumerate(zip(rounded, batch.run(CpuAttentionBackend()), strict=True)):
        # Two roundings of each of 64 products of a score, three of each term of the sum: 2⁻⁹ of a number each
        assert (found - exact).square().mean().sqrt() < 8 * 2**-9 * exact.square().mean().sqrt()
        alone = Batch([0], lengths[index : index + 1], LAYER, 16)
        alone.sequences = [batch.sequences[index]]
        assert torch.equal(alone.run(RoundedCpuBackend())[0], found)
