"""The CUDA backend: on a GPU where there is one, otherwise under Triton's interpreter on the CPU (tests/conftest.py).

Sizes are small because the interpreter is slow; tests/cuda has real ones.
"""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

pytest.importorskip("triton")

from hypothesis import given, settings
from hypothesis import strategies as st

from ratoon.attention import shared_prefix, triton_backend, triton_launch
from ratoon.attention.interface import AttentionNeeds, CommonAttentionMetadata, SharedPrefixes
from ratoon.attention.select import select_backend
from ratoon.attention.shared_prefix import group_prefixes
from ratoon.attention.torch_reference import TorchReferenceBackend
from ratoon.attention.triton_backend import TritonAttentionBackend
from ratoon.attention.triton_balanced import Balance
from ratoon.attention.triton_launch import Scratch
from ratoon.attention.triton_plan import (
    LaunchPlan,
    Tiles,
    choose_num_splits,
    choose_tile_programs,
    choose_tiles,
    limit_splits,
    plan_launches,
)
from ratoon.core.errors import ConfigError
from ratoon.layers.attention import AttentionLayer, CrossAttentionLayer, HeadTransform
from ratoon.layers.norm import HeadRMSNorm
from ratoon.layers.rotary import Rotary
from ratoon.layers.torch_ops import TorchOps
from tests.triton_interpreter import repair_interpreter
from tests.unit.attention.test_backends import BIAS, SINKS, Batch, CrossBatch

pytestmark = pytest.mark.slow  # Triton's interpreter

Tensor = torch.Tensor
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
NEEDS = AttentionNeeds("cuda", torch.bfloat16, 16, 128, 32, 8)
MIXED = ([0, 40, 33], [35, 1, 4])  # cached and new tokens: prefill, decode, a continuation
GROUPED = AttentionLayer(0, 2, 1, 16, 0.25)

repair_interpreter()


@pytest.fixture(autouse=True)
def large_store_tiles(monkeypatch: pytest.MonkeyPatch) -> None:
    """The time of the interpreter is that of its programs, whatever their size."""
    monkeypatch.setattr(triton_backend, "choose_store_tile", lambda num_tokens: (16, 4))


@pytest.fixture(autouse=True)
def poisoned_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """What a kernel does not write stays NaN, or a number that is no place."""
    empty = torch.empty

    def poisoned(*shape: int, dtype: torch.dtype = torch.float32, **how: Any) -> Tensor:
        poison = float("nan") if dtype.is_floating_point else min(123456789, torch.iinfo(dtype).max)
        return empty(*shape, dtype=dtype, **how).fill_(poison)

    monkeypatch.setattr(triton_backend.torch, "empty", poisoned)


def assert_as_defined(batch: Batch, backend: TritonAttentionBackend, tolerance: float = 2e-6, **how: Any) -> None:
    for got, expected in zip(batch.run(backend, **how), batch.written_out(), strict=True):
        torch.testing.assert_close(got.double(), expected, rtol=0, atol=tolerance)


# ---- attention ----


@pytest.mark.parametrize(
    ("layer", "lengths", "block_size"),
    [
        (AttentionLayer(0, 4, 2, 16, 0.25), MIXED, 16),
        (AttentionLayer(0, 3, 1, 80, 0.11), MIXED, 16),  # neither heads nor head_dim are powers of two
        (AttentionLayer(0, 2, 1, 32, 0.17, window=20), MIXED, 16),
        (AttentionLayer(0, 2, 1, 32, 0.17, window=5), MIXED, 24),
        (AttentionLayer(0, 4, 2, 16, 0.2, bias=BIAS.to(DEVICE)), ([0, 33], [33, 1]), 16),
        (AttentionLayer(0, 4, 2, 16, 0.4, window=20, soft_cap=1.5), MIXED, 16),
        (AttentionLayer(0, 4, 2, 16, 0.4, window=20, sinks=SINKS[:4].to(DEVICE)), MIXED, 16),
        (AttentionLayer(0, 70, 1, 16, 0.2), ([0, 20], [2, 1]), 8),  # more rows for a token than a tile has
    ],
    ids=["grouped", "odd", "window", "narrow window", "bias", "soft cap", "sinks", "many heads"],
)
@pytest.mark.one_in(2)
def test_a_mixed_batch_equals_the_definition(
    layer: AttentionLayer, lengths: tuple[list[int], list[int]], block_size: int
) -> None:
    assert_as_defined(Batch(*lengths, layer, block_size, device=DEVICE), TritonAttentionBackend())


@pytest.mark.parametrize("window", [50, None])
@pytest.mark.one_in(2)
def test_keys_of_a_short_request_are_split_and_merged(window: int | None) -> None:
    batch = Batch([130, 60, 0], [1, 3, 1], replace(GROUPED, window=window), 16, device=DEVICE)
    assert_as_defined(batch, TritonAttentionBackend(num_splits=3))


def test_a_sink_is_added_when_splits_are_merged() -> None:
    layer = replace(GROUPED, sinks=SINKS[: GROUPED.num_heads].to(DEVICE))
    batch = Batch([130, 60, 0], [1, 3, 1], layer, 16, device=DEVICE)
    assert_as_defined(batch, TritonAttentionBackend(num_splits=3))


@pytest.mark.full
def test_more_splits_are_merged_than_a_kernel_is_usually_compiled_for() -> None:
    batch = Batch([640], [2], replace(GROUPED, head_dim=8), 16, device=DEVICE)
    assert_as_defined(batch, TritonAttentionBackend(num_splits=19))


@pytest.mark.parametrize("bias", [None, BIAS.to(DEVICE)], ids=["plain", "bias"])
def test_without_causality_a_row_sees_all_of_its_sequence(bias: Tensor | None) -> None:
    layer = replace(GROUPED, causal=False, bias=bias)
    assert_as_defined(Batch([0, 0, 0], [1, 40, 16], layer, 16, device=DEVICE), TritonAttentionBackend())


@pytest.mark.parametrize("window", [7, 33])
def test_without_causality_a_window_is_to_both_sides(window: int) -> None:
    layer = replace(GROUPED, causal=False, window=window)
    assert_as_defined(Batch([0, 0, 0], [1, 90, 16], layer, 16, device=DEVICE), TritonAttentionBackend())


def test_cross_attention_sees_the_rows_own_encoder_input() -> None:
    batch = CrossBatch([3, 70, 64], [0, 1, 1, 2], [4, 1, 30, 1], CrossAttentionLayer(0, 2, 16, 0.25), device=DEVICE)
    got = batch.run(TritonAttentionBackend())
    torch.testing.assert_close(got.double(), batch.written_out(), rtol=0, atol=2e-6)


def test_half_precision_stays_within_its_rounding() -> None:
    batch = Batch([60, 0], [1, 40], GROUPED, 16, device=DEVICE, dtype=torch.float16)
    assert_as_defined(batch, TritonAttentionBackend(), tolerance=4e-3)


def test_pages_that_are_parts_of_wider_rows_hold_the_same() -> None:
    assert_as_defined(Batch([20, 0], [1, 18], GROUPED, 16, device=DEVICE), TritonAttentionBackend(), apart=True)


@settings(max_examples=3)
@given(st.lists(st.tuples(st.integers(0, 70), st.integers(1, 30)), min_size=1, max_size=4), st.sampled_from([None, 9]))
def test_any_lengths_equal_the_definition(lengths: list[tuple[int, int]], window: int | None) -> None:
    computed, scheduled = zip(*lengths, strict=True)
    batch = Batch(list(computed), list(scheduled), replace(GROUPED, window=window), 16, device=DEVICE)
    assert_as_defined(batch, TritonAttentionBackend())


IMAGES = [(2, 9), (20, 44), (64, 69)]


@pytest.mark.parametrize(
    ("layer", "lengths", "settings"),
    [
        (AttentionLayer(0, 4, 2, 16, 0.25), ([0, 54, 20, 64], [50, 1, 27, 7]), {}),
        (AttentionLayer(0, 2, 1, 32, 0.17, window=7), ([0, 54, 20, 64], [50, 1, 27, 7]), {}),
        (AttentionLayer(0, 2, 1, 256, 0.06, window=30), ([0, 64], [45, 7]), {}),
        (AttentionLayer(0, 4, 2, 16, 0.25), ([64, 64, 1], [6, 1, 9]), {"num_splits": 3}),
        (AttentionLayer(0, 4, 2, 16, 0.25, window=20), ([0, 64], [46, 6]), {"batch_invariant": True}),
        (AttentionLayer(0, 4, 1, 16, 0.25), ([2], [8]), {}),  # as few tokens as one kernel may have
    ],
    ids=["grouped", "narrow window", "heads of 256", "splits", "batch invariant", "few tokens"],
)
@pytest.mark.one_in(5)
def test_rows_of_an_image_see_each_other(
    layer: AttentionLayer, lengths: tuple[list[int], list[int]], settings: dict[str, Any]
) -> None:
    batch = Batch(*lengths, layer, 16, device=DEVICE, images=IMAGES)
    assert_as_defined(batch, TritonAttentionBackend(**settings))


def test_rows_of_an_image_see_each_other_behind_a_shared_prefix() -> None:
    batch = Batch([64, 64, 64], [6, 8, 6], GROUPED, 16, device=DEVICE, images=IMAGES)
    for index in (1, 2):
        batch.sequences[index][:64] = batch.sequences[0][:64]
        batch.tables[index, :4] = batch.tables[0, :4]
    assert_as_defined(batch, TritonAttentionBackend())


@pytest.mark.parametrize(("padding_queries", "max_query_len"), [(0, 1), (1, 1), (1, 40)])
@pytest.mark.one_in(2)
@pytest.mark.parametrize("images", [(), [(21, 40), (45, 50)]], ids=["tokens", "images"])
def test_padding_requests_over_the_null_block_change_nothing(
    padding_queries: int, max_query_len: int, images: list[tuple[int, int]]
) -> None:
    """As in a captured step: upper bounds instead of the step's own numbers, and requests that are not there."""
    batch = Batch([30, 21], [1, max_query_len], GROUPED, 16, device=DEVICE, images=images)
    backend = TritonAttentionBackend()
    expected = torch.cat(batch.run(backend))
    inputs = batch.inputs(batch.computed, batch.scheduled)
    cache = torch.full((batch.num_blocks, *backend.page_shapes(GROUPED.kv_spec(16, "float32"))[0]), float("nan"))
    batch.step(backend, (cache := cache.to(DEVICE),), [0, 0], batch.computed)
    starts = np.append(inputs.query_start_loc, [inputs.query_start_loc[-1] + padding_queries * n for n in (1, 2)])
    padding = int(starts[-1] - inputs.query_start_loc[-1])
    table = torch.zeros(4, inputs.block_table.shape[1] + 3, dtype=torch.int32)
    table[:2, : inputs.block_table.shape[1]] = torch.from_numpy(inputs.block_table)
    padded = replace(
        inputs,
        query_start_loc=starts,
        query_start_loc_device=torch.from_numpy(starts.astype(np.int32)).to(DEVICE),
        seq_lens_device=torch.tensor([*inputs.seq_lens.tolist(), 1, 1], dtype=torch.int32, device=DEVICE),
        block_table_device=table.to(DEVICE),
        slot_mapping=torch.cat([inputs.slot_mapping, inputs.slot_mapping.new_zeros(padding)]),
        max_seq_len=500,
        visible_ends=None,
        visible_ends_device=None
        if inputs.visible_ends_device is None
        else torch.cat([inputs.visible_ends_device, inputs.visible_ends_device.new_full((padding,), -1)]),
    )
    metadata = replace(backend.build_metadata(padded), query_lens=None)
    rows = torch.cat([sequence[start:] for sequence, start in zip(batch.sequences, batch.computed, strict=True)])
    q, k, v = torch.cat([rows, rows[:padding]]).to(DEVICE).split([2, 1, 1], dim=1)
    got = backend.forward(GROUPED, q, k, v, (cache,), metadata)[: len(expected)]
    torch.testing.assert_close(got.cpu(), expected, rtol=0, atol=1e-6)


# ---- the same numbers in any batch ----


@pytest.mark.parametrize("layer", [GROUPED, replace(GROUPED, window=33)], ids=["full", "window"])
@pytest.mark.one_in(2)
def test_batch_invariant_rows_are_the_same_to_the_bit_in_any_batch_and_chunk(
    layer: AttentionLayer, monkeypatch: pytest.MonkeyPatch
) -> None:
    batch = Batch([0, 66], [36, 4], layer, 16, device=DEVICE)
    together = batch.run(TritonAttentionBackend(batch_invariant=True))
    for got, expected in zip(together, batch.written_out(), strict=True):
        torch.testing.assert_close(got.double(), expected, rtol=0, atol=2e-6)
    in_chunks = batch.run(TritonAttentionBackend(batch_invariant=True), chunks=2)
    alone = Batch([66], [4], layer, 16, seed=99, device=DEVICE)
    alone.sequences = [batch.sequences[1]]
    one_by_one = alone.run(TritonAttentionBackend(batch_invariant=True), chunks=4)
    for got, expected in zip([*in_chunks, *one_by_one], [*together, together[1]], strict=True):
        assert torch.equal(got, expected)


def test_batch_invariant_rows_with_sinks_are_the_same_to_the_bit() -> None:
    """In a split, a program adds its tiles up alone, and sinks are added behind the last of them in any case."""
    layer = AttentionLayer(0, 4, 2, 16, 0.25, sinks=SINKS[2:6].to(DEVICE))
    batch = Batch([0, 66], [36, 4], layer, 16, device=DEVICE)
    together = batch.run(TritonAttentionBackend(batch_invariant=True))
    for got, expected in zip(together, batch.written_out(), strict=True):
        torch.testing.assert_close(got.double(), expected, rtol=0, atol=2e-6)
    alone = Batch([66], [4], layer, 16, seed=99, device=DEVICE)
    alone.sequences = [batch.sequences[1]]
    (one_by_one,) = alone.run(TritonAttentionBackend(batch_invariant=True), chunks=4)
    assert torch.equal(one_by_one, together[1])


# ---- norm, rotation and store in one kernel ----


def make_transform(
    head_dim: int,
    rotary_dim: int | None,
    has_norm: bool,
    num_tokens: int,
    dtype: torch.dtype,
    num_axes: int = 1,
    norm_dtype: torch.dtype | None = None,
) -> HeadTransform:
    """`num_axes`: of positions; each pair of a head turns by the position on one of them. `norm_dtype`: of the norms'
    weights, if not `dtype`."""
    generator = torch.Generator().manual_seed(5)
    ops = TorchOps()

    def norm() -> HeadRMSNorm | None:
        weight = torch.randn(head_dim, generator=generator).to(DEVICE, norm_dtype or dtype)
        weights: Any = SimpleNamespace(take=lambda name, size: weight, ops=ops)
        return HeadRMSNorm(weights, head_dim, 1e-5) if has_norm else None

    positions = torch.randint(0, 50, (num_tokens,), generator=generator).to(DEVICE)
    if rotary_dim is None:
        return HeadTransform(positions, None, norm(), norm())
    angles = torch.randn(50, rotary_dim // 2, generator=generator)
    rotary = Rotary.__new__(Rotary)
    rotary.cos_sin, rotary.rotate = torch.cat([angles.cos(), angles.sin()], dim=1).to(DEVICE), ops.rotary
    rotary.axes = None
    if num_axes > 1:
        rotary.axes = torch.randint(0, num_axes, (rotary_dim // 2,), generator=generator, dtype=torch.int32).to(DEVICE)
        wide = torch.randint(0, 50, (num_axes, num_tokens + 5), generator=generator).to(DEVICE)
        positions = wide[:, :num_tokens]  # as a step has them: in memory that is longer
    return HeadTransform(positions, rotary, norm(), norm())


@pytest.mark.parametrize(
    ("head_dim", "rotary_dim", "has_norm", "dtype", "num_axes", "norm_dtype"),
    [
        (32, 32, True, torch.float32, 1, None),
        (80, 32, True, torch.bfloat16, 1, None),
        (32, None, True, torch.float32, 1, None),
        (96, 96, False, torch.bfloat16, 1, None),
        (24, None, False, torch.float32, 1, None),
        (48, 48, False, torch.float32, 3, None),
        (40, 24, True, torch.float32, 3, None),
        (256, 256, True, torch.bfloat16, 1, torch.float32),
    ],
)
def test_norm_rotation_and_store_are_those_of_the_reference(
    head_dim: int, rotary_dim: int | None, has_norm: bool, dtype: torch.dtype, num_axes: int, norm_dtype: Any
) -> None:
    layer, num_tokens, block_size = AttentionLayer(0, 6, 3, head_dim, 0.1), 11, 8
    generator = torch.Generator().manual_seed(1)
    product = torch.randn(num_tokens, 12, head_dim, generator=generator).to(DEVICE, dtype)
    slots = torch.randperm(4 * block_size, generator=generator)[:num_tokens] + block_size
    slots[-2:] = 0  # padding rows
    inputs = CommonAttentionMetadata(
        np.array([0, num_tokens]), np.array([num_tokens]), np.zeros((1, 1)), torch.zeros(2, device=DEVICE),
        torch.zeros(1, device=DEVICE), torch.zeros(1, 1, device=DEVICE), slots.to(DEVICE), block_size, 1, 1,
    )  # fmt: skip
    transform = None
    if rotary_dim is not None or has_norm:
        transform = make_transform(head_dim, rotary_dim, has_norm, num_tokens, dtype, num_axes, norm_dtype)
    backend = TritonAttentionBackend()
    pages = torch.full((5, 2, 3, block_size, head_dim), 7.0, dtype=dtype, device=DEVICE)
    q, k, v = product.clone().split([6, 3, 3], dim=1)
    backend._store(layer, q, k, v, (pages,), backend.build_metadata(inputs), transform)

    expected_q, expected_k, expected_v = product.clone().split([6, 3, 3], dim=1)
    if transform is not None:
        transform.apply(expected_q, expected_k)
    expected = torch.full((5, 2, block_size, 3, head_dim), 7.0, dtype=dtype, device=DEVICE)
    reference = TorchReferenceBackend()
    reference.store(layer, expected_k, expected_v, (expected,), reference.build_metadata(inputs))
    # The interpreter cuts bits off where it should round: after the norm, its weight and the rotation.
    tolerance = float(expected_q.abs().max()) * {torch.float32: 1e-6, torch.bfloat16: 2**-6}[dtype]
    torch.testing.assert_close(q, expected_q, rtol=0, atol=tolerance)
    torch.testing.assert_close(pages.transpose(2, 3)[1:], expected[1:], rtol=0, atol=tolerance)


# ---- norm, rotation, store and attention in one kernel, for requests of one token ----


class DecodeStep:
    """Requests of one token behind others, or of several, then padding: a request of one token, and one without any.
    Cache cells that no request wrote are NaN."""

    def __init__(
        self,
        layer: AttentionLayer,
        lengths: list[int],
        dtype: torch.dtype,
        kv_dtype: torch.dtype,
        queries: list[int] | None = None,
    ) -> None:
        generator = torch.Generator().manual_seed(2)
        self.layer, self.block_size = layer, 8
        queries = queries or [1] * len(lengths)
        self.starts = np.cumsum([0, *queries, 1, 0]).astype(np.int32)
        self.max_query_len = max(queries)
        num_tokens, width = sum(queries) + 1, -(-max(lengths) // self.block_size)
        tables = torch.randperm(len(lengths) * width, generator=generator).view(-1, width) + 1
        self.tables = torch.cat([tables, torch.zeros(2, width, dtype=torch.int64)]).to(torch.int32)
        self.seq_lens = torch.tensor([*lengths, 1, 0], dtype=torch.int32)
        shape = (len(lengths) * width + 1, 2, layer.num_kv_heads, self.block_size, layer.head_dim)
        self.pages = torch.full(shape, float("nan"))
        for table, length, count in zip(tables.tolist(), lengths, queries, strict=True):
            for key in range(length - count):
                size = (2, layer.num_kv_heads, layer.head_dim)
                self.pages[table[key // 8], :, :, key % 8] = torch.randn(size, generator=generator)
        self.pages = self.pages.to(kv_dtype)
        heads = layer.num_heads + 2 * layer.num_kv_heads
        self.product = torch.randn(num_tokens, heads, layer.head_dim, generator=generator).to(dtype)
        requests = torch.repeat_interleave(torch.arange(len(queries) + 1), torch.tensor([*queries, 1]))
        behind = torch.from_numpy(self.starts[1:-1]).long()[requests] - torch.arange(num_tokens)
        self.positions = self.seq_lens.long()[requests] - behind
        self.slots = self.tables[requests, self.positions // 8].long() * 8 + self.positions % 8

    def run(self, backend: TritonAttentionBackend, transform: HeadTransform | None) -> tuple[Tensor, Tensor]:
        """→ what the requests get, and the cache behind the null block."""
        return self.run_layer(self.layer, backend, transform)

    def run_layer(
        self, layer: AttentionLayer, backend: TritonAttentionBackend, transform: HeadTransform | None = None
    ) -> tuple[Tensor, Tensor]:
        inputs = CommonAttentionMetadata(
            self.starts, self.seq_lens.numpy(), self.tables.numpy(), torch.from_numpy(self.starts).to(DEVICE),
            self.seq_lens.to(DEVICE), self.tables.to(DEVICE), self.slots.to(DEVICE), self.block_size,
            self.max_query_len, 500, True,
        )  # fmt: skip
        pages = self.pages.to(DEVICE, copy=True)
        q, k, v = self.product.to(DEVICE, copy=True).split([layer.num_heads, *[layer.num_kv_heads] * 2], dim=1)
        out = backend.forward(layer, q, k, v, (pages,), backend.build_metadata(inputs), transform)
        return out[: len(self.slots) - 1].float(), pages[1:].float()


@pytest.mark.parametrize(
    ("layer", "rotary_dim", "has_norm", "dtype", "kv_dtype"),
    [
        (AttentionLayer(0, 4, 2, 32, 0.2), 32, True, torch.float32, torch.float32),
        (AttentionLayer(0, 3, 1, 40, 0.2, window=20), 24, True, torch.float32, torch.float32),
        (AttentionLayer(0, 4, 2, 32, 0.2), 16, False, torch.bfloat16, torch.float8_e4m3fn),
        (AttentionLayer(0, 2, 2, 16, 0.2), None, False, torch.float16, torch.float16),
        (AttentionLayer(0, 4, 2, 16, 0.4, soft_cap=1.5), 16, False, torch.float32, torch.float32),
    ],
    ids=["norm", "window", "fp8", "plain", "soft cap"],
)
@pytest.mark.parametrize("num_splits", [1, 3])
@pytest.mark.one_in(3)
def test_one_kernel_does_what_store_and_attention_do(
    layer: AttentionLayer, rotary_dim: int | None, has_norm: bool, dtype: torch.dtype, kv_dtype: torch.dtype,
    num_splits: int, monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    step = DecodeStep(layer, [1, 8, 9, 70], dtype, kv_dtype)
    transform = None
    if rotary_dim is not None or has_norm:
        transform = make_transform(layer.head_dim, rotary_dim, has_norm, len(step.slots), dtype)
    tiles = Tiles(16, 16, 4, 2, False)
    expected_out, expected_pages = step.run(TritonAttentionBackend(fused_store=False, tiles=tiles), transform)
    monkeypatch.setattr(TritonAttentionBackend, "_store", None)  # not called
    out, pages = step.run(TritonAttentionBackend(tiles=tiles, num_splits=num_splits), transform)
    torch.testing.assert_close(pages, expected_pages, rtol=0, atol=1e-6, equal_nan=True)
    tolerance = {torch.float32: 2e-6, torch.float16: 4e-3, torch.bfloat16: 3e-2}[dtype]
    torch.testing.assert_close(out, expected_out, rtol=0, atol=tolerance)


@pytest.mark.parametrize(
    ("layer", "rotary_dim", "has_norm", "dtype", "kv_dtype"),
    [
        (AttentionLayer(0, 4, 2, 32, 0.2), 32, True, torch.bfloat16, torch.bfloat16),
        (AttentionLayer(0, 3, 1, 40, 0.2, window=100), 24, True, torch.float16, torch.float16),
        (AttentionLayer(0, 2, 2, 16, 0.2), None, False, torch.bfloat16, torch.bfloat16),
        (AttentionLayer(0, 2, 2, 16, 0.4, soft_cap=1.5), None, False, torch.float16, torch.float16),
    ],
    ids=["norm", "window", "plain", "soft cap"],
)
@pytest.mark.parametrize("num_programs", [1, 2, 4])
@pytest.mark.one_in(5)
def test_one_kernel_for_any_batch_does_what_store_and_attention_do(
    layer: AttentionLayer, rotary_dim: int | None, has_norm: bool, dtype: torch.dtype, kv_dtype: torch.dtype,
    num_programs: int, monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    monkeypatch.setattr(triton_backend, "choose_tile_programs", lambda *sizes: num_programs)
    step = DecodeStep(layer, [1, 64, 65, 200], dtype, kv_dtype)
    transform = None
    if rotary_dim is not None:
        transform = make_transform(layer.head_dim, rotary_dim, has_norm, len(step.slots), dtype)
    expected = step.run(TritonAttentionBackend(batch_invariant=True, fused_store=False), transform)
    monkeypatch.setattr(TritonAttentionBackend, "_store", None)  # not called
    out, pages = step.run(TritonAttentionBackend(batch_invariant=True), transform)
    torch.testing.assert_close(pages, expected[1], rtol=0, atol=0, equal_nan=True)
    torch.testing.assert_close(out, expected[0], rtol=0, atol=1e-5)


@pytest.mark.parametrize(
    ("layer", "rotary_dim", "has_norm", "dtype", "num_axes"),
    [
        (AttentionLayer(0, 4, 2, 32, 0.2), 32, True, torch.float32, 1),
        (AttentionLayer(0, 3, 1, 40, 0.2, window=20), 24, True, torch.bfloat16, 1),
        (AttentionLayer(0, 4, 2, 32, 0.2, window=3), 24, False, torch.float32, 3),
        (AttentionLayer(0, 4, 1, 16, 0.2), None, False, torch.float16, 1),
        (AttentionLayer(0, 4, 2, 16, 0.4, soft_cap=1.5), 16, False, torch.float32, 1),
    ],
    ids=["norm", "window", "narrow window", "plain", "soft cap"],
)
@pytest.mark.parametrize("num_splits", [1, 3])
@pytest.mark.one_in(3)
def test_one_kernel_does_what_store_and_attention_do_for_a_few_tokens(
    layer: AttentionLayer, rotary_dim: int | None, has_norm: bool, dtype: torch.dtype, num_axes: int, num_splits: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    step = DecodeStep(layer, [3, 8, 11, 70, 33], dtype, dtype, [3, 8, 2, 5, 1])
    transform = None
    if rotary_dim is not None:
        transform = make_transform(layer.head_dim, rotary_dim, has_norm, len(step.slots), dtype, num_axes)
    tiles = Tiles(32, 16, 4, 2, False)
    expected_out, expected_pages = step.run(TritonAttentionBackend(fused_store=False, tiles=tiles), transform)
    monkeypatch.setattr(TritonAttentionBackend, "_store", None)  # not called
    out, pages = step.run(TritonAttentionBackend(tiles=tiles, num_splits=num_splits), transform)
    # The interpreter cuts bits off where it should round: after the norm, its weight and the rotation.
    tolerance = {torch.float32: 1e-6, torch.float16: 0, torch.bfloat16: 2**-5}[dtype]
    torch.testing.assert_close(pages, expected_pages, rtol=0, atol=tolerance, equal_nan=True)
    tolerance = {torch.float32: 2e-6, torch.float16: 4e-3, torch.bfloat16: 4e-2}[dtype]
    torch.testing.assert_close(out, expected_out, rtol=0, atol=tolerance)


@pytest.mark.parametrize("is_invariant", [False, True])
def test_one_kernel_rotates_by_several_axes_of_positions(is_invariant: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    layer = AttentionLayer(0, 4, 2, 32, 0.2)
    dtype = torch.bfloat16 if is_invariant else torch.float32
    options: dict[str, Any] = {"batch_invariant": True} if is_invariant else {"tiles": Tiles(16, 16, 4, 2, False)}
    step = DecodeStep(layer, [1, 64, 65, 70], dtype, dtype)
    transform = make_transform(layer.head_dim, 24, True, len(step.slots), dtype, num_axes=3)
    expected_out, expected_pages = step.run(TritonAttentionBackend(fused_store=False, **options), transform)
    monkeypatch.setattr(TritonAttentionBackend, "_store", None)  # not called
    out, pages = step.run(TritonAttentionBackend(**options), transform)
    torch.testing.assert_close(pages, expected_pages, rtol=0, atol=0 if is_invariant else 1e-6, equal_nan=True)
    torch.testing.assert_close(out, expected_out, rtol=0, atol=1e-5)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_squares_of_16_bits_are_summed_without_rounding(dtype: torch.dtype) -> None:
    layer, generator = AttentionLayer(0, 1, 1, 128, 0.1), torch.Generator().manual_seed(1)
    numbers = torch.randn(1, 3, 128, generator=generator) * torch.exp2(
        torch.randint(-9, 9, (128,), generator=generator)
    )
    inputs = CommonAttentionMetadata(
        np.array([0, 1]), np.array([1]), np.zeros((1, 1)), torch.zeros(2, device=DEVICE), torch.zeros(1, device=DEVICE),
        torch.zeros(1, 1, device=DEVICE), torch.tensor([8], device=DEVICE), 8, 1, 1,
    )  # fmt: skip
    transform = make_transform(128, None, True, 1, dtype)
    assert transform.q_norm is not None
    transform.q_norm.weight.fill_(1.0)
    backend = TritonAttentionBackend(batch_invariant=True)
    results = []
    for order in (torch.arange(128), torch.randperm(128, generator=generator)):
        q, k, v = numbers[:, :, order].to(DEVICE, dtype).split(1, dim=1)
        pages = torch.zeros(2, 2, 1, 8, 128, dtype=dtype, device=DEVICE)
        backend._store(layer, q, k, v, (pages,), backend.build_metadata(inputs), transform)
        results.append(q[0, 0, order.argsort()])
    assert torch.equal(*results)


@pytest.mark.parametrize(("fused", "read"), [(True, [34, 3, 39]), (False, [34, 35, 39, 39])])
@pytest.mark.parametrize("has_norm", [False, True], ids=["plain", "norm"])
@pytest.mark.one_in(3)
def test_rows_that_attend_alone_get_what_they_get_among_all(fused: bool, read: list[int], has_norm: bool) -> None:
    """Behind the store of all rows, those that are read are a decode step."""
    batch = Batch(*MIXED, GROUPED, 16, device=DEVICE)
    transform = make_transform(16, 16, True, 40, torch.float32) if has_norm else None
    expected, expected_pages = batch.run_rows(TorchReferenceBackend(), list(range(40)), transform)
    got, pages = batch.run_rows(TritonAttentionBackend(fused_store=fused), read, transform)
    torch.testing.assert_close(got, expected[read], rtol=0, atol=2e-6)
    torch.testing.assert_close(pages[0].transpose(2, 3)[1:], expected_pages[0][1:], rtol=0, atol=2e-6, equal_nan=True)
    _, stored = batch.run_rows(TritonAttentionBackend(), [], transform)
    torch.testing.assert_close(stored[0], pages[0], rtol=0, atol=2e-6, equal_nan=True)


@pytest.mark.parametrize("num_splits", [1, 3])
@pytest.mark.parametrize(
    ("queries", "dtype", "kv_dtype"),
    [
        ([1, 1, 1], torch.float32, torch.float32),
        ([1, 1, 1], torch.float16, torch.float8_e4m3fn),
        ([3, 8, 1], torch.float32, torch.float32),
    ],
    ids=["one token", "one token over fp8", "a few"],
)
@pytest.mark.one_in(5)
def test_one_kernel_adds_sinks_once(
    queries: list[int], dtype: torch.dtype, kv_dtype: torch.dtype, num_splits: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Steps that decode, and steps that check drafts: several rows of a branch."""
    layer = AttentionLayer(0, 4, 2, 32, 0.2, window=40, sinks=SINKS[2:6].to(DEVICE))
    step, tiles = DecodeStep(layer, [3, 11, 70], dtype, kv_dtype, queries), Tiles(32, 16, 4, 2, False)
    expected, _ = step.run(TritonAttentionBackend(fused_store=False, tiles=tiles), None)
    without, _ = step.run_layer(replace(layer, sinks=None), TritonAttentionBackend(fused_store=False, tiles=tiles))
    monkeypatch.setattr(TritonAttentionBackend, "_store", None)  # not called
    out, _ = step.run(TritonAttentionBackend(tiles=tiles, num_splits=num_splits), None)
    torch.testing.assert_close(out, expected, rtol=0, atol=2e-6 if dtype == torch.float32 else 4e-3)
    assert float((out - without).abs().max()) > 0.1, "a sink of 3 takes most of a sum"


@pytest.mark.parametrize("num_programs", [1, 3])
def test_one_kernel_for_any_batch_adds_sinks_once(num_programs: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(triton_backend, "choose_tile_programs", lambda *sizes: num_programs)
    layer = AttentionLayer(0, 4, 2, 16, 0.2, sinks=SINKS[2:6].to(DEVICE))
    step = DecodeStep(layer, [1, 65, 200], torch.float16, torch.float16)
    expected, _ = step.run(TritonAttentionBackend(batch_invariant=True, fused_store=False), None)
    monkeypatch.setattr(TritonAttentionBackend, "_store", None)  # not called
    out, _ = step.run(TritonAttentionBackend(batch_invariant=True), None)
    torch.testing.assert_close(out, expected, rtol=0, atol=1e-5)


def test_splits_of_few_keys_are_left_to_one_program() -> None:
    """A captured step has programs for long sequences too."""
    batch = Batch([70, 3], [1, 1], GROUPED, 16, device=DEVICE)
    tiles = Tiles(16, 16, 4, 2, False)
    expected = batch.run(TritonAttentionBackend(tiles=tiles, num_splits=1))
    got = batch.run(TritonAttentionBackend(tiles=tiles, num_splits=4, min_share=5))
    assert all(torch.equal(*pair) for pair in zip(got, expected, strict=True))
    assert_as_defined(batch, TritonAttentionBackend(tiles=tiles, num_splits=4, min_share=2))


# ---- what is chosen ----


def test_it_is_chosen_on_cuda_and_says_why_not_elsewhere(monkeypatch: pytest.MonkeyPatch) -> None:
    assert select_backend("auto", NEEDS, "layers 0-3").backend.name == "triton"
    reasons = TritonAttentionBackend.reasons_against
    assert reasons(NEEDS) == []
    assert reasons(replace(NEEDS, device_type="cpu")) == ["runs on CUDA, not on cpu"]
    assert "at most 256, not 512" in reasons(replace(NEEDS, head_dim=512))[0]
    assert "not a latent vector" in reasons(replace(NEEDS, content="a latent vector"))[0]
    assert "not in torch.float64" in reasons(replace(NEEDS, dtype=torch.float64))[0]
    monkeypatch.setattr(triton_backend, "find_spec", lambda name: None)
    assert reasons(NEEDS) == ["triton is not installed"]
    assert select_backend("auto", NEEDS, "layers 0-3").backend.name == "torch"


def test_small_batches_are_split_and_large_ones_are_not() -> None:
    splits = [choose_num_splits(requests, 8, 8192, 64, 132) for requests in (1, 4, 32, 66, 67, 512)]
    assert splits == [16, 4, 1, 1, 1, 1]
    assert choose_num_splits(1, 8, 100, 64, 132) == 2  # a part is at least a tile of keys


def test_the_scratch_of_a_few_short_requests_beside_a_long_prompt_is_bounded() -> None:
    decode, beside_a_prompt = 32 * 32, (8192 + 4) * 32  # rows: tokens of the step × heads
    assert limit_splits(8, decode, False) == limit_splits(8, decode, True) == 8
    assert limit_splits(32, beside_a_prompt, False) == 3
    assert limit_splits(32, beside_a_prompt, True) == 1, "all of the fixed splits, or none"
    assert limit_splits(32, 2**22, False) == 1


def test_short_and_long_requests_are_told_apart_by_rows() -> None:
    lens = np.array([1, 16, 17, 300])
    assert plan_launches(lens, 300, group=4) == LaunchPlan(16, True)
    assert plan_launches(lens[3:], 300, group=4) == LaunchPlan(0, True)
    assert plan_launches(lens[:2], 16, group=4) == LaunchPlan(16, False)
    assert plan_launches(None, 300, group=8) == LaunchPlan(8, True)
    assert plan_launches(None, 24, group=8) == LaunchPlan(24, False), "of a few tokens there are no long requests"
    assert plan_launches(np.array([1, 2]), 2, group=100) == LaunchPlan(1, True)


def test_batch_invariant_tiles_have_as_many_keys_in_any_batch() -> None:
    for dtype in (torch.float32, torch.bfloat16):
        tiles = [choose_tiles(128, dtype, rows, batch_invariant=True) for rows in (None, 1, 16, 64)]
        assert len({tile.block_n for tile in tiles}) == 1
        assert dtype != torch.float32 or len(set(tiles)) == 1, "sums of weights depend on all of a tile"


def test_programs_share_the_keys_of_few_requests() -> None:
    assert choose_tile_programs(8, 36, 132) == 33
    assert choose_tile_programs(8, 4, 132) == 4
    assert choose_tile_programs(256, 36, 132) == 1


def test_outgrown_scratch_stays_allocated_for_captured_graphs() -> None:
    scratch = Scratch()
    device = torch.device(DEVICE)
    small = scratch.take(10, 16, device)
    assert scratch.take(10, 16, device)[0] is small[0]
    large = scratch.take(2**15, 16, device)
    assert large[0].numel() >= 2**15 * 16 and large[3] is small[3]
    assert scratch._outgrown[0][0] is small[0]


def kinds_of_launches(
    monkeypatch: pytest.MonkeyPatch, query_lens: list[int], seq_len: int, is_padded: bool = True, **options: Any
) -> set[tuple[Any, ...]]:
    """The kernels of a step with the constants that they are compiled for, as on a GPU with 132 multiprocessors that is
    no Hopper, unless `balance` is given. Nothing is launched."""
    layer = AttentionLayer(0, 32, 8, 128, 128**-0.5)
    kinds: set[tuple[Any, ...]] = set()
    starts = np.cumsum([0, *query_lens]).astype(np.int32)
    lengths = np.full(len(query_lens), seq_len, np.int32)
    table = np.zeros((len(query_lens), -(-seq_len // 16)), np.int32)
    inputs = CommonAttentionMetadata(
        starts, lengths, table, *(torch.from_numpy(x) for x in (starts, lengths, table)),
        torch.zeros(starts[-1], dtype=torch.int64), 16, max(query_lens), seq_len, is_padded=is_padded,
    )  # fmt: skip
    q, k, v = torch.zeros(int(starts[-1]), 48, 128, dtype=torch.bfloat16).split([32, 8, 8], 1)
    pages = torch.zeros(2, 2, 8, 16, 128, dtype=torch.bfloat16)

    def note(kernel: Any, grid: tuple[int, ...], *args: Any, **constants: Any) -> None:
        kinds.add((kernel.fn.__name__, *sorted(constants.items())))

    monkeypatch.setattr(triton_backend, "num_multiprocessors", lambda device: 132)
    monkeypatch.setattr(triton_backend, "has_wgmma", lambda: False)
    monkeypatch.setattr(triton_launch, "launch", note)
    backend = TritonAttentionBackend(cascade=False, **options)
    if backend._balanced is not None:
        backend._balanced._launch = note
    backend.forward(layer, q, k, v, (pages,), backend.build_metadata(inputs))
    return kinds


def test_steps_of_other_sizes_need_no_other_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    """A kernel is compiled for a second or more, while a request waits."""
    short = [kinds_of_launches(monkeypatch, lens, 9216) for lens in ([5, 1], [17] + [1] * 7, [64], [8] * 8 + [1] * 40)]
    assert len(set().union(*short)) == 3, "one that stores, one that attends, one that does both for a few tokens"
    beside = [
        kinds_of_launches(monkeypatch, [1] * count, 300 * count, is_padded=False, fused_store=False)
        for count in (1, 2, 5)
    ]
    assert len(set().union(*beside)) == 2, "decodes beside a prompt"
    balanced = [
        kinds_of_launches(monkeypatch, [1] * count, 9216, is_padded=False, fused_store=False, balance=Balance(16, 4, 7))
        for count in (1, 2, 40, 300)
    ]
    assert len(set().union(*balanced)) == 3, "one that stores, one that divides the keys, one that attends"


# ---- prefixes that requests share ----


class SharedStep:
    """Requests of which each begins with so many blocks of the one before it, over a cache that is written whole except
    for the null block: that one is full of NaN."""

    def __init__(
        self, layer: AttentionLayer | CrossAttentionLayer, shared: list[int], own: list[int], queries: list[int]
    ) -> None:
        self.layer, self.block_size = layer, 8
        tables: list[list[int]] = [[]]
        num_blocks = 1
        for blocks, tokens in zip(shared, own, strict=True):
            new = -(-tokens // self.block_size)
            tables.append(tables[-1][:blocks] + list(range(num_blocks, num_blocks + new)))
            num_blocks += new
        self.tables = np.zeros((len(own), max(map(len, tables))), np.int32)
        for row, table in enumerate(tables[1:]):
            self.tables[row, : len(table)] = table
        self.seq_lens = np.array([b * self.block_size + o for b, o in zip(shared, own, strict=True)], np.int32)
        self.queries = queries
        torch.manual_seed(0)
        pages = torch.randn(num_blocks, 2, layer.num_kv_heads, self.block_size, layer.head_dim)
        pages[0] = float("nan")
        self.pages, self.q = pages.to(DEVICE), torch.randn(sum(queries), layer.num_heads, layer.head_dim).to(DEVICE)

    def inputs(self) -> CommonAttentionMetadata:
        starts = np.concatenate([[0], np.cumsum(self.queries)]).astype(np.int32)
        return CommonAttentionMetadata(
            starts, self.seq_lens, self.tables, torch.from_numpy(starts).to(DEVICE),
            torch.from_numpy(self.seq_lens).to(DEVICE), torch.from_numpy(self.tables).to(DEVICE),
            torch.zeros(0, dtype=torch.int64, device=DEVICE), self.block_size, max(self.queries),
            int(self.seq_lens.max()),
        )  # fmt: skip

    def assert_exact(self, inputs: CommonAttentionMetadata | None = None) -> None:
        backend, reference = TritonAttentionBackend(), TorchReferenceBackend()
        got = backend.attend(self.layer, self.q, (self.pages,), backend.build_metadata(inputs or self.inputs()))
        metadata = reference.build_metadata(self.inputs())
        pages = self.pages.transpose(2, 3).double()
        expected = reference.attend(self.layer, self.q.double(), (pages,), metadata)
        torch.testing.assert_close(got.double(), expected, rtol=0, atol=2e-6)


@pytest.fixture
def launches_of_prefixes(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Small prefixes count as large ones."""
    lengths: list[int] = []
    attend = TritonAttentionBackend._attend_cascade
    monkeypatch.setattr(shared_prefix, "MIN_SHARED", 16)
    monkeypatch.setattr(shared_prefix, "MIN_SAVED", 32)
    monkeypatch.setattr(
        TritonAttentionBackend,
        "_attend_cascade",
        lambda *args: lengths.extend(args[-1].prefixes.prefix_lens.tolist()) or attend(*args),
    )
    return lengths


def test_requests_that_share_a_prefix_attend_to_it_together(launches_of_prefixes: list[int]) -> None:
    """Two searches, one of which goes on with several tokens, between requests that share nothing; a prefill too."""
    shared, own, queries = [0, 4, 4, 0, 0, 6, 5, 0], [40, 9, 1, 20, 53, 3, 17, 50], [1, 1, 1, 1, 2, 1, 3, 50]
    SharedStep(GROUPED, shared, own, queries).assert_exact()
    assert launches_of_prefixes == [32, 0, 40]


def test_heads_with_sinks_attend_to_a_shared_prefix_together(launches_of_prefixes: list[int]) -> None:
    """Beams, some of which check drafts. A sink is in the sum of prefix and own keys once, also where there are none
    of the latter but the newest."""
    layer = AttentionLayer(0, 4, 2, 16, 0.25, sinks=SINKS[2:6].to(DEVICE))
    SharedStep(layer, [0, 4, 4, 0, 5], [40, 9, 1, 50, 20], [1, 1, 1, 1, 3]).assert_exact()
    assert launches_of_prefixes == [32, 40]


def test_readers_of_one_encoder_input_read_it_together(launches_of_prefixes: list[int]) -> None:
    """All of their keys are shared: nothing is left for each alone."""
    step = SharedStep(CrossAttentionLayer(0, 2, 16, 0.25), [0, 0, 0, 0], [37, 37, 37, 20], [1, 2, 1, 1])
    step.tables[1] = step.tables[2] = step.tables[0]
    step.assert_exact()
    assert launches_of_prefixes == [37]


def test_short_prefixes_and_captured_steps_without_runs_take_the_plain_way(launches_of_prefixes: list[int]) -> None:
    SharedStep(GROUPED, [0, 1, 1], [30, 20, 20], [1, 1, 1]).assert_exact()
    backend, step = TritonAttentionBackend(), SharedStep(GROUPED, [0, 5], [50, 20], [1, 1])
    backend.attend(step.layer, step.q, (step.pages,), backend.build_metadata(replace(step.inputs(), is_padded=True)))
    assert launches_of_prefixes == []


def test_runs_of_captured_steps_come_with_their_inputs(launches_of_prefixes: list[int]) -> None:
    """Padded to four, of which two have no token; the last request is behind all runs."""
    step = SharedStep(GROUPED, [0, 5, 5, 0], [50, 20, 9, 33], [1, 1, 1, 1])
    runs = [[0, 3, 3, 3, 3], [0, 0, 0, 0], [40, 0, 0, 0], [40, 40, 40, 0]]
    prefixes = SharedPrefixes(*(torch.tensor(values, dtype=torch.int32, device=DEVICE) for values in runs))
    step.assert_exact(replace(step.inputs(), is_padded=True, max_seq_len=500, shared_prefixes=prefixes))
    assert launches_of_prefixes == [40, 0, 0, 0]


@pytest.mark.parametrize(
    ("shared", "limits", "firsts", "prefixes"),
    [
        ([0, 64, 64], [99, 99, 99], [0], [64]),
        ([0, 64, 0, 80, 96], [99] * 5, [0, 2], [64, 80]),
        ([0, 96, 32], [99] * 3, [0, 2], [96, 0]),  # joining would cut the run's prefix by more than half
        ([0, 96, 96], [99, 70, 99], [0], [70]),  # not beyond a request's own first query
        ([0, 96, 96], [99, 99, 0], [0, 2], [96, 0]),  # a long request does not take part
        ([0, 15], [99, 99], [0, 1], [0, 0]),
    ],
)
def test_runs_of_shared_prefixes(shared: list[int], limits: list[int], firsts: list[int], prefixes: list[int]) -> None:
    found = group_prefixes(np.array(shared), np.array(limits), min_shared=16)
    assert (found[0].tolist(), found[1].tolist()) == (firsts, prefixes)


# ---- keys and values in fp8 ----


def test_keys_and_values_in_fp8_are_those_of_the_reference() -> None:
    """What is stored is the same but for rounding, a number beyond the format's largest included; so is what is read
    back, in pages that both wrote."""
    layer, dtype = AttentionLayer(0, 4, 2, 40, 0.15), torch.float8_e4m3fn
    batch = Batch([33, 0], [1, 20], layer, 8, device=DEVICE)
    inputs = batch.inputs([0, 0], [34, 20])
    rows = torch.cat(batch.sequences)
    rows[0, 5] = 1000.0
    q, k, v = rows.to(DEVICE).split([4, 2, 2], dim=1)
    ours, reference = TritonAttentionBackend(), TorchReferenceBackend()
    spec = layer.kv_spec(8, "float8_e4m3fn")
    pages, expected_pages = (
        torch.zeros(batch.num_blocks, *backend.page_shapes(spec)[0], dtype=dtype, device=DEVICE)
        for backend in (ours, reference)
    )
    ours.store(layer, k, v, (pages,), ours.build_metadata(inputs))
    reference.store(layer, k, v, (expected_pages,), reference.build_metadata(inputs))
    stored, expected = pages.float().transpose(2, 3), expected_pages.float()
    assert stored.isfinite().all() and stored.max() == 448.0
    # The interpreter rounds up to a power of two without a carry into the exponent.
    right = torch.ones_like(expected, dtype=torch.bool) if DEVICE == "cuda" else expected.frexp().mantissa.abs() != 0.5
    torch.testing.assert_close(stored[right], expected[right], rtol=2**-3, atol=2**-9)
    expected_pages.copy_(stored.to(dtype))
    out = ours.attend(layer, q, (pages,), ours.build_metadata(inputs))
    written = reference.attend(layer, q.double(), (expected_pages,), reference.build_metadata(inputs))
    torch.testing.assert_close(out.double(), written, rtol=1e-6, atol=2e-6)


def test_backends_refuse_dtypes_of_keys_and_values_that_they_do_not_read() -> None:
    fp8 = replace(NEEDS, kv_dtype=torch.float8_e4m3fn)
    assert select_backend("auto", fp8, "layers 0-3").backend.name == "triton"
    on_cpu = replace(fp8, device_type="cpu", dtype=torch.float32)
    chosen = select_backend("auto", on_cpu, "layers 0-3")
    assert chosen.backend.name == "torch"
    assert (
        "keeps keys and values in float32, float16 or int8, not in torch.float8_e4m3fn" in chosen.reasons_against["cpu"]
    )
    with pytest.raises(ConfigError, match=r"not in torch\.int8"):
        select_backend("auto", replace(NEEDS, kv_dtype=torch.int8), "layers 0-3")
    narrow = replace(fp8, dtype=torch.bfloat16, head_dim=16)
    assert "fp8 needs heads of more than 16, not of 16" in TritonAttentionBackend.reasons_against(narrow)


def test_gpus_that_are_too_old_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (7, 5))
    assert TritonAttentionBackend.reasons_against(NEEDS) == ["it needs compute capability 8.0 or newer"]
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (8, 0))
    assert TritonAttentionBackend.reasons_against(NEEDS) == []
    fp8 = replace(NEEDS, kv_dtype=torch.float8_e4m3fn)
    assert TritonAttentionBackend.reasons_against(fp8) == ["fp8 needs compute capability 8.9 or newer"]


def test_where_rows_must_not_depend_on_the_batch_the_reference_is_refused() -> None:
    needs = replace(NEEDS, batch_invariant=True)
    chosen = select_backend("auto", needs, "layers 0-3")
    assert isinstance(chosen.backend, TritonAttentionBackend)
    assert chosen.backend._batch_invariant
    assert chosen.reasons_against["torch"] == ["the order of its sums depends on the batch"]
    with pytest.raises(ConfigError, match="order of its sums"):
        select_backend("torch", needs, "layers 0-3")
