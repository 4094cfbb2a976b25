"""The expanded form of latent attention by the CUDA backend: on a GPU where there is one, otherwise under Triton's
interpreter on the CPU (tests/conftest.py). Sizes are small because the interpreter is slow."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

pytest.importorskip("triton")

from ratoon.attention import triton_expanded, triton_latent
from ratoon.attention.triton_expanded import ExpandedSizes, ExpandedTiles, find_expansion
from ratoon.attention.triton_latent import TritonLatentBackend
from ratoon.core.config import ModelConfig
from ratoon.layers.attention import HeadTransform, LatentAttentionLayer, LatentProducts
from ratoon.layers.rotary import Rotary
from ratoon.layers.torch_ops import TorchOps
from ratoon.layers.weights import Weights
from ratoon.models.dummy_source import DummySource
from tests.triton_interpreter import repair_interpreter
from tests.unit.attention.test_backends import SINKS
from tests.unit.attention.test_latent_backends import LatentBatch

pytestmark = pytest.mark.slow  # Triton's interpreter

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
DEEPSEEK = ExpandedSizes(heads=16, rope=64, nope=128, value=128, rank=512)
NOPE, VALUE = 24, 32
SMALL = LatentAttentionLayer(0, 4, 1, 64, 0.2, rope_dim=16)
ODD = LatentAttentionLayer(0, 3, 1, 58, 0.25, rope_dim=10)
WITH_SINKS = replace(SMALL, sinks=SINKS[:4].to(DEVICE))
# Cached and new tokens: a prompt, a decode, a continuation of more than one tile, one of few tokens, a prompt
MIXED = ([0, 40, 33, 11, 0], [35, 1, 40, 4, 17])

repair_interpreter()


class Expanding(LatentBatch):
    """Queries are the first numbers of those of a LatentBatch, before the products. `long`: from how many new tokens on
    a request is expanded."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        layer, generator = self.layer, torch.Generator().manual_seed(1)
        shapes = (layer.num_heads, NOPE, layer.value_dim), (layer.num_heads, layer.value_dim, VALUE)
        self.w_keys, self.w_values = (
            (torch.randn(shape, generator=generator) / shape[1] ** 0.5).to(self.dtype) for shape in shapes
        )
        ops = TorchOps()
        weights = [weight.transpose(1, 2).to(self.device) for weight in (self.w_keys, self.w_values)]
        self.products = LatentProducts(
            ops.make_head_product(weights[0], layer.rope_dim), ops.make_head_product(weights[1])
        )

    def written_out(self) -> list[torch.Tensor]:
        """Keys and values of all heads, in float64."""
        results, rope = [], self.layer.rope_dim
        for sequence, computed in zip(self.sequences, self.computed, strict=True):
            q, k, vectors = self.split(sequence.double())
            own = torch.einsum("kr,hnr->khn", vectors[:, 0], self.w_keys.double())
            keys = torch.cat((k[..., :rope].expand(-1, self.layer.num_heads, -1), own), -1)
            values = torch.einsum("kr,hrv->khv", vectors[:, 0], self.w_values.double())
            scores = torch.einsum("qhd,khd->hqk", q[computed:, :, : rope + NOPE], keys) * self.layer.scale
            is_later = torch.ones(len(sequence), len(sequence), dtype=torch.bool).triu(1)[computed:]
            scores = scores.masked_fill(is_later, float("-inf"))
            if self.layer.sinks is not None:
                sinks = self.layer.sinks.double().cpu()[:, None, None].expand(-1, scores.shape[1], 1)
                scores = torch.cat((scores, sinks), -1)
            weights = scores.softmax(-1)[..., : len(sequence)]
            results.append(torch.einsum("hqk,khd->qhd", weights, values).flatten(1))
        return results


class WithProducts:
    """A backend that is given queries before the products."""

    def __init__(self, batch: Expanding, backend: TritonLatentBackend | None = None) -> None:
        self.backend = backend or TritonLatentBackend()
        self.products, self.size = batch.products, batch.layer.rope_dim + NOPE

    def __getattr__(self, name: str) -> Any:
        return getattr(self.backend, name)

    def forward(self, layer: Any, q: Any, k: Any, v: Any, cache: Any, metadata: Any, transform: Any = None) -> Any:
        queries = q[..., : self.size].clone()
        return self.backend.forward_latent(layer, queries, k, cache, metadata, transform, self.products)

    def forward_rows(
        self, layer: Any, q: Any, k: Any, v: Any, cache: Any, metadata: Any, transform: Any, *rows: Any
    ) -> Any:
        queries = q[..., : self.size].clone()
        return self.backend.forward_latent_rows(layer, queries, k, cache, metadata, transform, self.products, *rows)


@pytest.fixture(autouse=True)
def small_steps(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Requests of 16 tokens and more are long here. Collects in how many segments they were computed."""
    found: list[int] = []
    attend = triton_latent.attend_expanded

    def note(*args: Any) -> None:
        expansion, sizes = args[4], args[5]
        found.append(-(-expansion.num_keys // sizes.segment(expansion.num_rows, args[1].dtype.itemsize)))
        attend(*args)

    monkeypatch.setattr(triton_latent, "attend_expanded", note)
    monkeypatch.setattr(ExpandedSizes, "pays", lambda self, query_lens, seq_lens: query_lens >= 16)
    monkeypatch.setattr(triton_latent, "choose_store_tile", lambda num_tokens: (16, 4))
    monkeypatch.setattr(triton_latent, "MERGED_PART", 512)
    monkeypatch.setattr(triton_expanded, "GATHERED_KEYS", 64)
    if DEVICE == "cpu":
        tiles = triton_latent.choose_latent_tiles
        monkeypatch.setattr(
            triton_latent, "choose_latent_tiles", lambda *sizes: tiles(*sizes)._replace(block_n=16 if sizes[3] else 32)
        )
        monkeypatch.setattr(triton_expanded, "choose_expanded_tiles", lambda dtype: ExpandedTiles(32, 16, 4, 1))
    return found


def check(batch: Expanding, tolerance: float = 1e-5, **how: Any) -> None:
    for got, expected in zip(batch.run(WithProducts(batch), **how), batch.written_out(), strict=True):
        torch.testing.assert_close(got.double(), expected, rtol=0, atol=tolerance)


@pytest.mark.parametrize("layer", [ODD, WITH_SINKS], ids=["odd", "sinks"])
def test_long_requests_beside_others_equal_the_definition(layer: LatentAttentionLayer, small_steps: list[int]) -> None:
    check(Expanding(*MIXED, layer, 16, device=DEVICE))
    assert small_steps == [1, 1]  # of the step that computes what is cached, too


def test_keys_may_be_computed_in_segments(small_steps: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    """Requests begin and end within them, and rows see no key of some."""
    monkeypatch.setattr(ExpandedSizes, "segment", lambda self, num_rows, itemsize: 26)
    check(Expanding([0, 33], [35, 40], WITH_SINKS, 16, device=DEVICE))
    assert small_steps == [2, 5]


def test_chunks_of_a_prompt_and_pages_apart(small_steps: list[int]) -> None:
    check(Expanding([5, 0], [40, 33], SMALL, 16, device=DEVICE), chunks=2, apart=True)
    assert len(small_steps) == 2  # the second has a chunk of 17 tokens beside one of 20, the first 16 beside 20


# The interpreter has no products in bfloat16
@pytest.mark.parametrize("dtype", [torch.float16, *([torch.bfloat16] if DEVICE == "cuda" else [])])
def test_sixteen_bits_are_near_the_definition(dtype: torch.dtype) -> None:
    tolerance = 8 * torch.finfo(dtype).eps  # of keys and values, weights and results, that reach about 3
    check(Expanding(*MIXED, SMALL, 16, device=DEVICE, dtype=dtype), tolerance)


def test_vectors_in_eight_bits_are_read_as_the_absorbed_form_reads_them(monkeypatch: pytest.MonkeyPatch) -> None:
    batch = Expanding([20, 0], [17, 20], SMALL, 16, device=DEVICE, kept="float8_e4m3fn")
    expanded = torch.cat(batch.run(WithProducts(batch)))
    monkeypatch.setattr(ExpandedSizes, "of", classmethod(lambda cls, layer, products: None))
    torch.testing.assert_close(torch.cat(batch.run(WithProducts(batch))), expanded, rtol=0, atol=1e-5)


def test_rows_that_are_read_and_the_rotation() -> None:
    """The last layer attends with few rows. Both forms rotate the queries where they are."""
    config = ModelConfig("test", 8, 8, 8, 1, 4, 1, SMALL.head_dim, 128, rotary_dim=SMALL.rope_dim)
    rotary = Rotary(Weights(DummySource({}), TorchOps(), torch.device(DEVICE), torch.float32), config, 128)
    batch = Expanding([33, 0], [20, 3], SMALL, 16, device=DEVICE)
    positions = torch.cat([torch.arange(c, c + s) for c, s in zip(batch.computed, batch.scheduled)]).to(DEVICE)
    transform, rows = HeadTransform(positions, rotary, None, None), [19, 22]
    backend = WithProducts(batch)
    some, cache = batch.run_rows(backend, rows, transform)
    metadata = backend.build_metadata(batch.inputs(batch.computed, batch.scheduled))
    parts = [sequence[start:] for sequence, start in zip(batch.sequences, batch.computed, strict=True)]
    q, k, v = batch.split(torch.cat(parts).to(DEVICE))
    whole = backend.forward(SMALL, q, k, v, cache, metadata, transform)
    torch.testing.assert_close(whole.cpu()[rows], some, rtol=0, atol=1e-5)
    # The definition has no rotation of its own: its inputs are rotated first.
    queries = torch.cat([sequence[start:, :4] for sequence, start in zip(batch.sequences, batch.computed)]).to(DEVICE)
    keys = torch.cat([sequence[start:, 4:5] for sequence, start in zip(batch.sequences, batch.computed)]).to(DEVICE)
    transform.apply(queries, keys)
    for index, (part, key) in enumerate(zip(queries.cpu().split(batch.scheduled), keys.cpu().split(batch.scheduled))):
        start = batch.computed[index]
        batch.sequences[index][start:, :4], batch.sequences[index][start:, 4:5] = part, key
    expected = torch.cat(batch.written_out())
    torch.testing.assert_close(whole.cpu().double(), expected, rtol=0, atol=1e-5)


def test_captured_steps_and_products_with_fixed_bits_stay_absorbed(small_steps: list[int]) -> None:
    batch = Expanding([0], [20], SMALL, 16, device=DEVICE)
    inputs = replace(batch.inputs([0], [20]), is_padded=True)
    sizes = ExpandedSizes.of(SMALL, batch.products)
    assert sizes is not None and find_expansion(inputs, sizes) is None
    assert ExpandedSizes.of(replace(SMALL, rope_dim=30, head_dim=78), batch.products) is not None
    assert ExpandedSizes.of(replace(SMALL, rope_dim=80, head_dim=128), batch.products) is None  # too large
    invariant = WithProducts(batch, TritonLatentBackend(batch_invariant=True))
    torch.testing.assert_close(batch.run(invariant)[0].double(), batch.written_out()[0], rtol=0, atol=1e-5)
    assert not small_steps


@pytest.mark.parametrize(
    ("new", "cached", "expected"),
    [(8192, 0, True), (128, 0, True), (127, 0, False), (1, 4096, False), (512, 100_000, True), (128, 100_000, False)],
)
def test_the_form_with_fewer_operations_is_chosen(
    new: int, cached: int, expected: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.undo()
    assert DEEPSEEK.pays(np.array([new]), np.array([new + cached])).tolist() == [expected]


def test_no_step_takes_more_memory_than_absorbed() -> None:
    for sizes in (DEEPSEEK, DEEPSEEK._replace(heads=128)):
        for num_rows in (4096, 8192, 50_000):
            heads, rope, nope, value, rank = sizes
            scratch = sizes.segment(num_rows, 2) * (heads * (nope + value) + rope + rank) * 2
            scratch += num_rows * heads * (value + 2) * 4
            assert scratch <= num_rows * heads * (rope + 2 * rank) * 2
        assert sizes.segment(128, 2) == triton_expanded.MIN_SEGMENT
