"""Latent attention by the CUDA backend: on a GPU where there is one, otherwise under Triton's interpreter on the CPU
(tests/conftest.py). Sizes are small because the interpreter is slow."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

pytest.importorskip("triton")

from ratoon.attention import triton_latent
from ratoon.attention.interface import AttentionNeeds
from ratoon.attention.torch_reference import TorchReferenceBackend
from ratoon.attention.triton_backend import TritonAttentionBackend
from ratoon.attention.triton_latent import (
    TritonLatentBackend,
    choose_latent_splits,
    choose_latent_tiles,
)
from ratoon.core.config import ModelConfig
from ratoon.core.kv import LatentSpec
from ratoon.layers.attention import HeadTransform, LatentAttentionLayer
from ratoon.layers.rotary import Rotary
from ratoon.layers.torch_ops import TorchOps
from ratoon.layers.weights import Weights
from ratoon.models.dummy_source import DummySource
from tests.triton_interpreter import repair_interpreter
from tests.unit.attention.test_backends import SINKS
from tests.unit.attention.test_latent_backends import LatentBatch

pytestmark = pytest.mark.slow  # Triton's interpreter

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
MIXED = ([0, 40, 33], [35, 1, 4])  # cached and new tokens: prefill, decode, a continuation
DECODES = ([40, 7, 90], [1, 1, 1])
SMALL = LatentAttentionLayer(0, 4, 1, 64, 0.2, rope_dim=16)
ODD = LatentAttentionLayer(0, 3, 1, 58, 0.25, rope_dim=10)
MANY = LatentAttentionLayer(0, 20, 1, 48, 0.25, rope_dim=16)  # more heads than a tile has
WITH_SINKS = replace(SMALL, sinks=SINKS[:4].to(DEVICE))
NEEDS = AttentionNeeds.of(
    [LatentAttentionLayer(0, 16, 1, 576, 0.07, rope_dim=64)], LatentSpec(16, 576, "bfloat16"), torch.device("cuda"),
    torch.bfloat16,
)  # fmt: skip

repair_interpreter()


@pytest.fixture(autouse=True)
def large_programs(monkeypatch: pytest.MonkeyPatch) -> None:
    """The time of the interpreter is that of its programs, whatever their size."""
    monkeypatch.setattr(triton_latent, "choose_store_tile", lambda num_tokens: (16, 4))
    monkeypatch.setattr(triton_latent, "MERGED_PART", 512)
    if DEVICE == "cpu":
        choose = choose_latent_tiles
        monkeypatch.setattr(
            triton_latent, "choose_latent_tiles", lambda *sizes: choose(*sizes)._replace(block_n=16 if sizes[3] else 32)
        )


def check(batch: LatentBatch, backend: TritonLatentBackend, tolerance: float = 1e-5) -> None:
    for got, expected in zip(batch.run(backend), batch.written_out(), strict=True):
        torch.testing.assert_close(got.double(), expected, rtol=0, atol=tolerance)


@pytest.mark.parametrize(
    ("layer", "steps", "num_splits"),
    [
        (SMALL, MIXED, 1),
        (SMALL, MIXED, 3),
        (ODD, MIXED, 2),
        (ODD, DECODES, 1),
        (MANY, ([40, 7], [1, 1]), 3),
        (MANY, MIXED, 1),
        (WITH_SINKS, MIXED, 1),
        (WITH_SINKS, MIXED, 3),
    ],
    ids=["small", "small, split", "odd", "odd decodes", "many heads, split", "many heads", "sinks", "sinks, split"],
)
@pytest.mark.one_in(3)
def test_any_mixture_of_requests_equals_the_definition(
    layer: LatentAttentionLayer, steps: tuple[list[int], list[int]], num_splits: int
) -> None:
    check(LatentBatch(*steps, layer, 16, device=DEVICE), TritonLatentBackend(num_splits=num_splits))


def test_splits_are_chosen_where_there_is_little_to_do() -> None:
    check(LatentBatch(*DECODES, SMALL, 16, device=DEVICE), TritonLatentBackend())
    assert choose_latent_splits(1, 16, 4096, 64, 132) == 32
    assert choose_latent_splits(1, 16, 100_000, 64, 132) == 64
    assert choose_latent_splits(400, 6400, 100_000, 64, 132) == 1
    assert choose_latent_splits(1, 2**17, 100_000, 64, 132) == 2  # what would not fit into the scratch


# The interpreter has no products in bfloat16
@pytest.mark.parametrize("dtype", [torch.float16, *([torch.bfloat16] if DEVICE == "cuda" else [])])
def test_sixteen_bits_are_as_near_as_the_reference(dtype: torch.dtype) -> None:
    batch = LatentBatch(*MIXED, SMALL, 16, device=DEVICE, dtype=dtype)
    tolerance = 4 * torch.finfo(dtype).eps  # of weights and results that reach about 3
    check(batch, TritonLatentBackend(num_splits=2), tolerance)


def test_vectors_may_be_kept_in_eight_bits() -> None:
    """They are stored as the reference does it, but for the interpreter's rounding, and read back as it does."""
    batch = LatentBatch([33, 0], [1, 20], SMALL, 16, device=DEVICE, kept="float8_e4m3fn")
    ours, reference = TritonLatentBackend(), TorchReferenceBackend.create(replace(NEEDS, device_type=DEVICE))
    inputs, rows = batch.inputs([0, 0], [34, 20]), torch.cat(batch.sequences)
    rows[0, SMALL.num_heads, 20] = 1000.0  # beyond the format's largest
    rows[:, : SMALL.num_heads, 20] = 0.0  # no score has it: the exponents of large ones have few digits
    q, k, v = batch.split(rows.to(DEVICE))
    pages, expected = (
        torch.zeros(batch.num_blocks, *backend.page_shapes(batch.spec())[0], dtype=torch.float8_e4m3fn, device=DEVICE)
        for backend in (ours, reference)
    )
    ours.store(SMALL, k, v, (pages,), ours.build_metadata(inputs))
    reference.store(SMALL, k, v, (expected,), reference.build_metadata(inputs))
    stored, wanted = pages.float(), expected.float()
    assert stored.isfinite().all() and stored.max() == 448.0
    # The interpreter rounds up to a power of two without a carry into the exponent.
    right = torch.ones_like(wanted, dtype=torch.bool) if DEVICE == "cuda" else wanted.frexp().mantissa.abs() != 0.5
    torch.testing.assert_close(stored[right], wanted[right], rtol=2**-3, atol=2**-9)
    out = ours.attend(SMALL, q, (pages,), ours.build_metadata(inputs))
    written = reference.attend(SMALL, q.double(), (pages,), reference.build_metadata(inputs))
    torch.testing.assert_close(out.double(), written, rtol=1e-5, atol=1e-5)


def test_a_row_has_the_same_bits_in_any_batch_and_any_chunk() -> None:
    batch, backend = LatentBatch(*MIXED, SMALL, 16, device=DEVICE), TritonLatentBackend(batch_invariant=True)
    together = batch.run(backend)
    for got, expected in zip(batch.run(backend, chunks=3), together, strict=True):
        assert torch.equal(got, expected)
    alone = LatentBatch([40], [1], SMALL, 16, seed=99, device=DEVICE)
    alone.sequences = [batch.sequences[1]]
    assert torch.equal(alone.run(backend)[0], together[1])


def test_the_rotation_is_a_part_of_the_store() -> None:
    config = ModelConfig("test", 8, 8, 8, 1, 4, 1, SMALL.head_dim, 128, rotary_dim=SMALL.rope_dim)
    rotary = Rotary(Weights(DummySource({}), TorchOps(), torch.device(DEVICE), torch.float32), config, 128)
    rows, results = [0, 34, 35, 39], []
    for backend in (TritonLatentBackend(), TorchReferenceBackend.create(replace(NEEDS, device_type=DEVICE))):
        batch = LatentBatch(*MIXED, SMALL, 16, device=DEVICE)
        positions = torch.cat([torch.arange(c, c + s) for c, s in zip(*MIXED)]).to(DEVICE)
        out, (pages,) = batch.run_rows(backend, rows, HeadTransform(positions, rotary, None, None))
        results.append((out, pages.cpu()))
    torch.testing.assert_close(results[0][0], results[1][0], rtol=0, atol=1e-5)
    torch.testing.assert_close(results[0][1], results[1][1], rtol=0, atol=1e-6, equal_nan=True)


def test_requests_without_a_query_are_skipped_in_a_padded_step() -> None:
    batch, backend = LatentBatch([40, 7, 90], [1, 1, 1], SMALL, 16, device=DEVICE), TritonLatentBackend()
    cache = batch.cache_of(backend)
    batch.step(backend, cache, [0, 0, 0], batch.computed)
    inputs = batch.inputs([40, 7, 90], [1, 1, 1])
    rows = torch.stack([batch.sequences[index][-1] for index in range(3)]).to(DEVICE)
    q, k, v = batch.split(rows)
    expected = backend.forward(SMALL, q, k, v, cache, backend.build_metadata(inputs))
    # Of a step that is padded to five requests and four rows the last ones have nothing
    starts, lens = torch.tensor([0, 1, 2, 3, 3, 3]), torch.tensor([41, 8, 91, 0, 0])
    tables = torch.nn.functional.pad(inputs.block_table_device, (0, 0, 0, 2))
    padded = replace(
        inputs, query_start_loc_device=starts.int().to(DEVICE), seq_lens_device=lens.int().to(DEVICE),
        block_table_device=tables, slot_mapping=torch.nn.functional.pad(inputs.slot_mapping, (0, 1)), is_padded=True,
        max_seq_len=200,
    )  # fmt: skip
    q, k = torch.nn.functional.pad(q, (0, 0, 0, 0, 0, 1)), torch.nn.functional.pad(k, (0, 0, 0, 0, 0, 1))
    got = backend.forward(SMALL, q, k, k[..., SMALL.rope_dim :], cache, backend.build_metadata(padded))
    torch.testing.assert_close(got[:3], expected, rtol=0, atol=1e-6)


def test_what_it_can_t_serve_has_reasons() -> None:
    def reasons(**changes: object) -> list[str]:
        return TritonAttentionBackend.reasons_against(replace(NEEDS, **changes))

    assert not [why for why in reasons() if "latent" in why]
    assert "at most 512 numbers, not 1024" in " ".join(reasons(head_dim=1088, value_dim=1024))
    assert "can't have a window" in " ".join(reasons(window=9))
    assert "can't see those behind" in " ".join(reasons(sees_ahead=True))


def test_tiles_have_the_rows_of_a_request() -> None:
    for num_heads in (1, 4, 16, 128):
        for max_query_len in (1, 4, 512):
            for dtype in (torch.float32, torch.bfloat16):
                tiles = choose_latent_tiles(num_heads, max_query_len, dtype, False)
                assert tiles.tokens * tiles.heads in (16, 32, 64) and tiles.tokens >= 1
    assert choose_latent_tiles(16, 512, torch.bfloat16, True) == choose_latent_tiles(16, 1, torch.bfloat16, True)
