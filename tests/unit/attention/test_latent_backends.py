"""Latent attention: every backend against its definition in float64, and against the reference."""

import pytest
import torch

from ratoon.attention.cpu import CpuAttentionBackend
from ratoon.attention.interface import AttentionNeeds
from ratoon.attention.select import select_backend
from ratoon.attention.torch_reference import TorchReferenceBackend
from ratoon.core.errors import ConfigError
from ratoon.core.kv import LatentSpec
from ratoon.layers.attention import LatentAttentionLayer
from tests.unit.attention.test_backends import MIXED, SINKS, Batch


def needs_of(layer, block_size=16, kept=None, **changes):
    spec = LatentSpec(block_size, layer.head_dim, kept or "float32")
    return AttentionNeeds.of([layer], spec, torch.device("cpu"), torch.float32, **changes)


TOLERANCE = 1e-5  # sums of 576 products that reach 16, rounded to 24 bits, in exponents

DEEPSEEK = LatentAttentionLayer(0, 16, 1, 576, 0.07, rope_dim=64)
SHAPES = [
    DEEPSEEK,
    LatentAttentionLayer(0, 3, 1, 64, 0.2, rope_dim=16),
    LatentAttentionLayer(0, 7, 1, 48, 0.3, rope_dim=16),
    LatentAttentionLayer(0, 128, 1, 48, 0.3, rope_dim=32),  # more heads than are computed together
    LatentAttentionLayer(0, 8, 1, 64, 0.2, rope_dim=16, sinks=SINKS),
    LatentAttentionLayer(0, 128, 1, 48, 0.3, rope_dim=32, sinks=SINKS.repeat(16)),
]
needs_kernels = pytest.mark.skipif(
    bool(CpuAttentionBackend.reasons_against(needs_of(SHAPES[1]))), reason="no kernels for this processor"
)


class LatentBatch(Batch):
    def split(self, rows):
        layer = self.layer
        q, k = rows[:, : layer.num_heads], rows[:, layer.num_heads : layer.num_heads + 1]
        return q, k, k[..., layer.rope_dim :]

    def spec(self):
        return LatentSpec(self.block_size, self.layer.head_dim, self.kept)

    def written_out(self):
        """The definition in float64, all heads at once."""
        results = []
        for sequence, computed in zip(self.sequences, self.computed, strict=True):
            q, k, v = self.split(sequence.double())
            scores = torch.einsum("qhd,kd->hqk", q[computed:], k[:, 0]) * self.layer.scale
            is_later = torch.ones(len(sequence), len(sequence), dtype=torch.bool).triu(1)[computed:]
            scores = scores.masked_fill(is_later, float("-inf"))
            if self.layer.sinks is not None:
                sinks = self.layer.sinks.double().cpu()[:, None, None].expand(-1, scores.shape[1], 1)
                scores = torch.cat((scores, sinks), -1)
            weights = scores.softmax(-1)[..., : len(sequence)]
            results.append(torch.einsum("hqk,kd->qhd", weights, v[:, 0]).flatten(1))
        return results


def backend_of(kind, layer):
    return kind.create(needs_of(layer))


@pytest.mark.parametrize("layer", SHAPES, ids=str)
@pytest.mark.parametrize("kind", [TorchReferenceBackend, pytest.param(CpuAttentionBackend, marks=needs_kernels)])
@pytest.mark.parametrize("block_size", [16, 48])
@pytest.mark.one_in(5)
def test_paged_latent_attention_equals_its_definition(kind, layer, block_size):
    batch = LatentBatch(*MIXED, layer, block_size)
    for got, expected in zip(batch.run(backend_of(kind, layer)), batch.written_out(), strict=True):
        torch.testing.assert_close(got.double(), expected, rtol=0, atol=TOLERANCE)


@needs_kernels
@pytest.mark.parametrize("layer", SHAPES[:3], ids=str)
def test_on_the_cpu_a_row_is_the_same_to_the_bit_in_any_batch_and_any_chunk(layer):
    batch, backend = LatentBatch(*MIXED, layer, 16), backend_of(CpuAttentionBackend, layer)
    together = batch.run(backend)
    for got, expected in zip(batch.run(backend, chunks=7), together, strict=True):
        assert torch.equal(got, expected)
    for index in range(len(together)):
        alone = LatentBatch([batch.computed[index]], [batch.scheduled[index]], layer, 16, seed=99)
        alone.sequences = [batch.sequences[index]]
        assert torch.equal(alone.run(backend)[0], together[index])


@needs_kernels
@pytest.mark.parametrize("kept", ["float16", "int8"])
def test_vectors_in_fewer_bits_are_read_as_the_reference_reads_them(kept):
    for layer in SHAPES[:2]:
        batch = LatentBatch(*MIXED, layer, 16, kept=kept)
        got = batch.run(backend_of(CpuAttentionBackend, layer), apart=True)
        for rows, expected in zip(got, batch.run(backend_of(TorchReferenceBackend, layer)), strict=True):
            torch.testing.assert_close(rows, expected, rtol=0, atol=1e-5)


@needs_kernels
def test_sequences_with_a_common_prefix_read_it_together():
    layer = SHAPES[1]
    batch, backend = LatentBatch([130, 130, 130], [1, 1, 1], layer, 16), backend_of(CpuAttentionBackend, layer)
    for index in (1, 2):  # 128 tokens are in common blocks
        batch.sequences[index][:128] = batch.sequences[0][:128]
        batch.tables[index, :8] = batch.tables[0, :8]
    for got, expected in zip(batch.run(backend), batch.written_out(), strict=True):
        torch.testing.assert_close(got.double(), expected, rtol=0, atol=TOLERANCE)


def test_a_vector_takes_the_place_of_keys_and_values():
    spec = LatentSpec(16, 576, "bfloat16")
    assert spec.page_size_bytes == 16 * 576 * 2
    assert LatentSpec(16, 576, "int8").page_size_bytes == 16 * 576 + 16 * 4


def test_the_backend_is_chosen_by_the_sizes_of_vectors():
    odd = LatentAttentionLayer(0, 4, 1, 40, 0.2, rope_dim=8)
    choice = select_backend("auto", needs_of(odd), "layers 0-3")
    assert choice.backend.name == "torch"
    assert any("multiples of 16 up to 640 long, not 40 and 32" in why for why in choice.reasons_against["cpu"])
    with pytest.raises(ConfigError, match="the order of its sums depends on the batch"):
        select_backend("torch", needs_of(odd, batch_invariant=True), "layers 0-3")


def test_rows_that_are_read_alone_get_what_they_get_in_a_step():
    layer = SHAPES[1]
    batch, backend = LatentBatch([5, 20], [9, 4], layer, 16), backend_of(TorchReferenceBackend, layer)
    rows = [0, 8, 12]
    alone, _ = batch.run_rows(backend, rows)
    torch.testing.assert_close(alone, torch.cat(batch.run(backend))[rows], rtol=0, atol=1e-6)
