"""Requests whose block tables share a prefix are computed together on the CPU, with bit-identical results."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from ratoon.attention.cpu import CpuAttentionBackend
from ratoon.attention.interface import AttentionBackend, AttentionNeeds, CommonAttentionMetadata, LayerCache
from ratoon.attention.shared_prefix import shared_prefixes
from ratoon.attention.torch_reference import TorchReferenceBackend
from ratoon.core.kv import FullAttentionSpec
from ratoon.layers.attention import AttentionLayer
from ratoon.layers.native import library

pytestmark = pytest.mark.skipif(
    bool(CpuAttentionBackend.reasons_against(AttentionNeeds("cpu", torch.float32, 16, 64, 4, 4))),
    reason="no kernels for this processor; `make setup` builds them",
)

SMOLLM2 = AttentionLayer(0, 9, 3, 64, 0.125)
LAYERS = [
    SMOLLM2,
    AttentionLayer(0, 3, 3, 16, 0.25),  # a query head for each KV head
    AttentionLayer(0, 4, 1, 128, 0.09),
    AttentionLayer(0, 8, 1, 64, 0.125),
    AttentionLayer(0, 20, 1, 32, 0.17),  # a unit has room for one request only
]


@dataclass(frozen=True)
class Request:
    shared: int  # tokens of the request before it that it begins with; only full blocks are taken over
    own: int
    query_len: int = 1  # the last ones of its own


class Step:
    """A step over a cache in which every block is written, except the null block: that one is full of NaN."""

    def __init__(self, requests: list[Request], layer: AttentionLayer, block_size: int = 16) -> None:
        self.layer, self.block_size = layer, block_size
        self.tables: list[list[int]] = []
        self.seq_lens: list[int] = []
        self.query_lens = [min(request.own, request.query_len) for request in requests]
        self.num_blocks = 1
        table: list[int] = []
        for request in requests:
            kept = min(len(table), request.shared // block_size)
            new = -(-request.own // block_size)
            table = table[:kept] + list(range(self.num_blocks, self.num_blocks + new))
            self.num_blocks += new
            self.tables.append(table)
            self.seq_lens.append(kept * block_size + request.own)
        generator = torch.Generator().manual_seed(len(requests))
        heads = layer.num_heads + 2 * layer.num_kv_heads
        self.history = torch.randn(self.num_blocks * block_size, heads, layer.head_dim, generator=generator)
        self.rows = torch.randn(sum(self.query_lens), heads, layer.head_dim, generator=generator)

    def inputs(self, tables: list[list[int]], seq_lens: list[int], query_lens: list[int]) -> CommonAttentionMetadata:
        width = max(map(len, tables))
        block_table = np.array([table + [0] * (width - len(table)) for table in tables], dtype=np.int32)
        query_start = np.concatenate([[0], np.cumsum(query_lens)]).astype(np.int32)
        lengths = np.array(seq_lens, dtype=np.int32)
        positions = np.concatenate([np.arange(s - q, s) for s, q in zip(seq_lens, query_lens, strict=True)])
        owner = np.repeat(np.arange(len(tables)), query_lens)
        slots = block_table[owner, positions // self.block_size] * self.block_size + positions % self.block_size
        return CommonAttentionMetadata(
            query_start, lengths, block_table, torch.from_numpy(query_start), torch.from_numpy(lengths),
            torch.from_numpy(block_table), torch.from_numpy(slots.astype(np.int64)),
            self.block_size, max(query_lens), max(seq_lens),
        )  # fmt: skip

    def cache(self, backend: AttentionBackend) -> LayerCache:
        """Written through the backend, as if each block were the prompt of a request of its own."""
        spec = FullAttentionSpec(self.block_size, self.layer.num_kv_heads, self.layer.head_dim, "float32")
        cache = tuple(torch.full((self.num_blocks, *shape), float("nan")) for shape in backend.page_shapes(spec))
        count = self.num_blocks - 1
        inputs = self.inputs([[block] for block in range(1, self.num_blocks)], *[[self.block_size] * count] * 2)
        self.forward(backend, cache, self.history[self.block_size :], inputs)
        return cache

    def forward(
        self, backend: AttentionBackend, cache: LayerCache, rows: torch.Tensor, inputs: CommonAttentionMetadata
    ) -> torch.Tensor:
        layer = self.layer
        q, k, v = rows.split([layer.num_heads, layer.num_kv_heads, layer.num_kv_heads], dim=1)
        return backend.forward(layer, q, k, v, cache, backend.build_metadata(inputs))

    def together(self, backend: AttentionBackend) -> torch.Tensor:
        inputs = self.inputs(self.tables, self.seq_lens, self.query_lens)
        return self.forward(backend, self.cache(backend), self.rows, inputs)

    def one_by_one(self, backend: AttentionBackend) -> torch.Tensor:
        """Each request alone, but all new keys and values are there, as in a step of all."""
        cache, results = self.cache(backend), []
        for _ in range(2):
            parts = self.rows.split(self.query_lens)
            each = zip(self.tables, self.seq_lens, self.query_lens, parts, strict=True)
            results = [self.forward(backend, cache, rows, self.inputs([t], [s], [q])) for t, s, q, rows in each]
        return torch.cat(results)

    def check(self) -> None:
        got = self.together(CpuAttentionBackend())
        assert torch.equal(got, self.one_by_one(CpuAttentionBackend()))
        torch.testing.assert_close(got, self.together(TorchReferenceBackend()), rtol=0, atol=3e-6)


@pytest.fixture(autouse=True, params=[1, 3], ids=lambda threads: f"threads{threads}")
def _threads(request: pytest.FixtureRequest) -> Iterator[None]:
    """How requests are put together depends on the number of threads; results do not."""
    kernels = library()
    assert kernels is not None
    kernels.ratoon_set_threads(request.param)
    yield
    kernels.ratoon_set_threads(1)


def beams(count: int, prefix: int, own: int = 3) -> list[Request]:
    return [Request(0, prefix // 16 * 16 + own)] + [Request(prefix, own)] * (count - 1)


@pytest.mark.parametrize("layer", LAYERS, ids=str)
@pytest.mark.parametrize("block_size", [16, 48, 64, 128])
@pytest.mark.one_in(7)
def test_beams_get_what_each_gets_alone(layer: AttentionLayer, block_size: int) -> None:
    Step([Request(0, 300)] + [Request(290, 21)] * 12, layer, block_size).check()


@pytest.mark.parametrize("prefix", [16, 48, 63, 64, 65, 79, 80, 112, 127, 128, 129, 191, 192, 193, 256])
@pytest.mark.parametrize("own", [1, 16, 70])
@pytest.mark.one_in(7)
def test_any_length_of_the_common_prefix_and_of_what_follows(prefix: int, own: int) -> None:
    Step(beams(5, prefix, own), SMOLLM2).check()


def test_all_blocks_are_shared_but_the_last_one() -> None:
    Step(beams(6, 640, own=1), SMOLLM2).check()
    Step(beams(6, 640, own=16), SMOLLM2).check()


def test_beams_of_different_lengths() -> None:
    own = [1, 40, 3, 64, 17, 130, 2]
    Step([Request(0, 256)] + [Request(256, length) for length in own], SMOLLM2).check()


def test_a_tree_of_beams_parts_where_its_tables_part() -> None:
    forks = [0, 256, 192, 256, 64, 64, 192, 128, 256]
    Step([Request(shared, 300 - shared) for shared in forks], SMOLLM2).check()


def test_two_families_side_by_side_and_strangers_between_them() -> None:
    Step([*beams(4, 128), Request(0, 50), Request(0, 200), *beams(11, 320), Request(0, 1)], SMOLLM2).check()


def test_beams_in_a_batch_with_prompts() -> None:
    prompt, chunk, verified = Request(0, 90, 90), Request(128, 40, 25), Request(128, 5, 5)
    family = beams(3, 128)
    Step([prompt, *family, chunk, Request(128, 4), Request(128, 4), verified, *family, prompt], SMOLLM2).check()


def test_with_a_window_every_request_is_on_its_own() -> None:
    for window in (20, 70, 200):
        Step(beams(5, 256), AttentionLayer(0, 4, 2, 32, 0.17, window=window)).check()


requests_of_a_batch = st.lists(
    st.builds(
        Request,
        shared=st.one_of(st.integers(0, 320), st.sampled_from([63, 64, 65, 128, 192, 256, 1000])),
        own=st.one_of(st.integers(1, 20), st.integers(1, 150)),
        query_len=st.sampled_from([1, 1, 1, 1, 2, 30]),
    ),
    min_size=1,
    max_size=14,
)


@pytest.mark.slow
@settings(max_examples=40)
@given(
    requests=requests_of_a_batch,
    first=st.integers(1, 400),
    layer=st.sampled_from(LAYERS),
    block_size=st.sampled_from([16, 32, 48, 64]),
)
@pytest.mark.one_in(2)
def test_whoever_shares_with_whom_each_gets_what_it_gets_alone(
    requests: list[Request], first: int, layer: AttentionLayer, block_size: int
) -> None:
    Step([Request(0, first), *requests], layer, block_size).check()


def test_common_keys_are_read_through_one_table() -> None:
    """The later of eight beams lose the beginning of their tables, which is not read."""
    step, backend = Step(beams(8, 128), SMOLLM2), CpuAttentionBackend()
    expected = step.together(backend)
    inputs = step.inputs(step.tables, step.seq_lens, step.query_lens)
    metadata = backend.build_metadata(inputs)
    own = np.flatnonzero(inputs.block_table[1] != inputs.block_table[0])[0] * step.block_size
    assert own == 128
    inputs.block_table[[1, 3, 5, 7], : own // step.block_size] = 0  # units have an even number of requests
    q, k, v = step.rows.split([9, 3, 3], dim=1)
    assert torch.equal(backend.forward(SMOLLM2, q, k, v, step.cache(backend), metadata), expected)


@pytest.mark.parametrize(
    ("tables", "seq_lens", "expected"),
    [
        ([[5, 6, 7]], [40], [0]),
        ([[5, 6, 7], [8, 6, 7]], [40, 40], [0, 0]),  # alike after the first block only: other keys came before
        ([[5, 6, 7], [5, 6, 8]], [40, 40], [0, 32]),
        ([[5, 6, 7], [5, 9, 7]], [40, 40], [0, 16]),
        ([[5, 6, 7], [5, 6, 7]], [48, 48], [0, 48]),
        ([[5, 6, 7], [5, 6, 7]], [48, 41], [0, 41]),
        ([[0, 6, 7], [0, 6, 7]], [40, 40], [0, 0]),  # a sliding window has freed the first block
        ([[5, 6, 0], [5, 6, 0]], [20, 32], [0, 20]),  # entries beyond the end do not count
        ([[5, 6, 7, 0], [5, 6, 8, 9], [5, 6, 8, 4], [3, 6, 8, 4], [3, 1, 0, 0]], [48, 60, 49, 64, 17],
         [0, 32, 48, 0, 16]),
    ],
)  # fmt: skip
def test_what_a_request_shares_with_the_one_before_it(
    tables: list[list[int]], seq_lens: list[int], expected: list[int]
) -> None:
    shared = shared_prefixes(np.array(tables, dtype=np.int32), np.array(seq_lens, dtype=np.int32), 16)
    assert shared.dtype == np.int32
    assert shared.tolist() == expected


def test_padding_without_keys_shares_nothing_whatever_its_tables_hold() -> None:
    table = np.array([[1, 2], [5, 6], [5, 6]], np.int32)  # the last two are those of an earlier step
    assert shared_prefixes(table, np.array([20, 0, 0], np.int32), 16).tolist() == [0, 0, 0]
    assert shared_prefixes(table, np.array([20, 17, 0], np.int32), 16).tolist() == [0, 0, 0]
