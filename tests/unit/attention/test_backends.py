"""Every backend against the reference, and the reference against attention that is written out in float64."""

import numpy as np
import pytest
import torch

from ratoon.attention.cpu import CpuAttentionBackend
from ratoon.attention.interface import AttentionNeeds, GroupInputs
from ratoon.attention.select import select_backend
from ratoon.attention.torch_reference import TorchReferenceBackend
from ratoon.core.errors import ConfigError
from ratoon.core.kv import FullAttentionSpec
from ratoon.layers.attention import AttentionLayer

needs_kernels = pytest.mark.skipif(
    bool(CpuAttentionBackend.reasons_against(AttentionNeeds("cpu", torch.float32, 16, 64, 4, 4))),
    reason="no kernels for this processor; `make setup` builds them",
)


class Batch:
    """Sequences in a paged cache: history first, then a step of new tokens for each."""

    def __init__(self, computed, scheduled, layer, block_size, seed=0):
        generator = torch.Generator().manual_seed(seed)
        self.layer, self.block_size = layer, block_size
        self.computed, self.scheduled = computed, scheduled
        lengths = [c + s for c, s in zip(computed, scheduled, strict=True)]
        self.sequences = [
            torch.randn(length, layer.num_heads + 2 * layer.num_kv_heads, layer.head_dim, generator=generator)
            for length in lengths
        ]
        width = max(-(-length // block_size) for length in lengths)
        order = (torch.randperm(len(lengths) * width, generator=generator) + 1).to(torch.int32).numpy()
        self.tables = order.reshape(len(lengths), width)
        self.num_blocks = len(lengths) * width + 1

    def inputs(self, starts, counts):
        """The step in which sequence i runs tokens starts[i] … starts[i] + counts[i]."""
        positions = np.concatenate([np.arange(s, s + c) for s, c in zip(starts, counts, strict=True)])
        owner = np.repeat(np.arange(len(counts)), counts)
        slots = self.tables[owner, positions // self.block_size] * self.block_size + positions % self.block_size
        query_start = np.concatenate([[0], np.cumsum(counts)]).astype(np.int32)
        seq_lens = (np.array(starts) + counts).astype(np.int32)
        return GroupInputs(
            query_start, seq_lens, self.tables, torch.from_numpy(query_start), torch.from_numpy(seq_lens),
            torch.from_numpy(self.tables), torch.from_numpy(slots.astype(np.int64)), torch.from_numpy(positions),
            self.block_size, int(max(counts)), int(seq_lens.max()),
        )  # fmt: skip

    def run(self, backend, chunks=1):
        """History in one step, then the scheduled tokens in `chunks` steps; rows of sequence i in out[i]."""
        spec = FullAttentionSpec(self.block_size, self.layer.num_kv_heads, self.layer.head_dim, 4)
        cache = torch.full(
            backend.kv_shape(self.num_blocks, spec), float("nan")
        )  # what was never written must not be read
        self.step(backend, cache, [0] * len(self.computed), self.computed)
        outputs = [[] for _ in self.computed]
        for chunk in range(chunks):
            begin = [c + s * chunk // chunks for c, s in zip(self.computed, self.scheduled, strict=True)]
            end = [c + s * (chunk + 1) // chunks for c, s in zip(self.computed, self.scheduled, strict=True)]
            counts = [e - b for b, e in zip(begin, end, strict=True)]
            for index, rows in enumerate(self.step(backend, cache, begin, counts)):
                outputs[index].append(rows)
        return [torch.cat(rows) for rows in outputs]

    def step(self, backend, cache, starts, counts):
        taking_part = [index for index, count in enumerate(counts) if count]
        if not taking_part:
            return [torch.empty(0)] * len(counts)
        whole, tables = self.tables, self.tables[taking_part]
        self.tables = np.ascontiguousarray(tables)
        metadata = backend.build_metadata(
            self.inputs([starts[i] for i in taking_part], [counts[i] for i in taking_part])
        )
        self.tables = whole
        layer = self.layer
        rows = torch.cat([self.sequences[i][starts[i] : starts[i] + counts[i]] for i in taking_part])
        q, k, v = rows.split([layer.num_heads, layer.num_kv_heads, layer.num_kv_heads], dim=1)
        out = backend.forward(layer, q, k, v, cache, metadata).split([counts[i] for i in taking_part])
        results = [torch.empty(0, layer.num_heads * layer.head_dim)] * len(counts)
        for place, index in enumerate(taking_part):
            results[index] = out[place]
        return results

    def written_out(self):
        """Straight from the definition, in float64."""
        results = []
        layer = self.layer
        for sequence, computed in zip(self.sequences, self.computed, strict=True):
            q, k, v = sequence.double().split([layer.num_heads, layer.num_kv_heads, layer.num_kv_heads], dim=1)
            rows = []
            for position in range(computed, len(sequence)):
                first = 0 if layer.window is None else max(0, position - layer.window + 1)
                heads = []
                for head in range(layer.num_heads):
                    kv_head = head * layer.num_kv_heads // layer.num_heads
                    scores = k[first : position + 1, kv_head] @ q[position, head] * layer.scale
                    heads.append(scores.softmax(0) @ v[first : position + 1, kv_head])
                rows.append(torch.cat(heads))
            results.append(torch.stack(rows))
        return results


SHAPES = [
    AttentionLayer(0, 9, 3, 64, 0.125),
    AttentionLayer(0, 4, 4, 16, 0.25),
    AttentionLayer(0, 8, 1, 32, 0.2),
    AttentionLayer(0, 2, 1, 128, 0.09),
    AttentionLayer(0, 4, 2, 80, 0.11, window=20),
    AttentionLayer(0, 4, 2, 32, 0.17, window=70),
]
MIXED = ([0, 54, 145, 3, 63, 64], [130, 1, 1, 40, 1, 65])


@pytest.mark.parametrize("layer", SHAPES, ids=str)
@pytest.mark.parametrize("backend", [TorchReferenceBackend, pytest.param(CpuAttentionBackend, marks=needs_kernels)])
@pytest.mark.parametrize("block_size", [16, 48])
def test_paged_attention_equals_its_definition(backend, layer, block_size):
    batch = Batch(*MIXED, layer, block_size)
    for got, expected in zip(batch.run(backend()), batch.written_out(), strict=True):
        torch.testing.assert_close(got.double(), expected, rtol=0, atol=2e-6)


@needs_kernels
@pytest.mark.parametrize("layer", SHAPES, ids=str)
def test_on_the_cpu_a_row_is_the_same_to_the_bit_in_any_batch_and_any_chunk(layer):
    batch = Batch(*MIXED, layer, 16)
    together = batch.run(CpuAttentionBackend())
    for got, expected in zip(batch.run(CpuAttentionBackend(), chunks=7), together, strict=True):
        assert torch.equal(got, expected)
    for index in range(len(together)):
        alone = Batch([batch.computed[index]], [batch.scheduled[index]], layer, 16, seed=99)
        alone.sequences = [batch.sequences[index]]
        assert torch.equal(alone.run(CpuAttentionBackend())[0], together[index])


@needs_kernels
def test_the_fastest_backend_that_fits_is_chosen():
    needs = AttentionNeeds("cpu", torch.float32, 16, 64, 9, 3)
    assert select_backend("auto", needs).name == "cpu"
    assert select_backend("torch", needs).name == "torch"
    assert select_backend("auto", AttentionNeeds("cpu", torch.float32, 16, 24, 9, 3)).name == "torch"


@pytest.mark.parametrize(
    ("needs", "reason"),
    [
        (AttentionNeeds("cuda", torch.float32, 16, 64, 4, 4), "not on cuda"),
        (AttentionNeeds("cpu", torch.bfloat16, 16, 64, 4, 4), "float32"),
        (AttentionNeeds("cpu", torch.float32, 8, 64, 4, 4), "block_size must be a multiple of 16, not 8"),
        (AttentionNeeds("cpu", torch.float32, 16, 72, 4, 4), "head_dim must be a multiple of 16"),
        (AttentionNeeds("cpu", torch.float32, 16, 64, 64, 1), "share a KV head"),
    ],
)
def test_a_backend_that_was_asked_for_and_cannot_says_why(needs, reason):
    with pytest.raises(ConfigError, match=reason):
        select_backend("cpu", needs)


def test_an_unknown_backend_is_refused_with_the_known_ones():
    with pytest.raises(ConfigError, match="auto, cpu, torch"):
        select_backend("warp", AttentionNeeds("cpu", torch.float32, 16, 64, 4, 4))
