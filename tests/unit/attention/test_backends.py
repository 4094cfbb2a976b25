"""Every backend against the reference, and the reference against attention that is written out in float64."""

import numpy as np
import pytest
import torch

from ratoon.attention.cpu import CpuAttentionBackend
from ratoon.attention.interface import AttentionNeeds, CommonAttentionMetadata
from ratoon.attention.select import select_backend
from ratoon.attention.torch_reference import TorchReferenceBackend
from ratoon.attention.triton_backend import TritonAttentionBackend
from ratoon.core.errors import ConfigError
from ratoon.core.kv import FullAttentionSpec
from ratoon.execution.inputs.step_inputs import ReadRows
from ratoon.layers.attention import AttentionLayer, CrossAttentionLayer

needs_kernels = pytest.mark.skipif(
    bool(CpuAttentionBackend.reasons_against(AttentionNeeds("cpu", torch.float32, 16, 64, 4, 4))),
    reason="no kernels for this processor; `make setup` builds them",
)


NOT_ON_CUDA = TritonAttentionBackend.reasons_against(AttentionNeeds("cpu", torch.float32, 16, 64, 4, 4))


class Batch:
    """Sequences in a paged cache: history first, then a step of new tokens for each. `images`: the first and the last
    position of rows that see each other, in every sequence that is so long; a step has all of one or nothing."""

    def __init__(
        self,
        computed,
        scheduled,
        layer,
        block_size,
        seed=0,
        device="cpu",
        dtype=torch.float32,
        kept="float32",
        images=(),
    ):
        generator = torch.Generator().manual_seed(seed)
        self.images = images
        self.kept = kept
        self.layer, self.block_size, self.device, self.dtype = layer, block_size, device, dtype
        self.computed, self.scheduled = computed, scheduled
        lengths = [c + s for c, s in zip(computed, scheduled, strict=True)]
        self.sequences = [
            torch.randn(length, layer.num_heads + 2 * layer.num_kv_heads, layer.head_dim, generator=generator).to(dtype)
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
        ends = None
        if self.images:
            ends = np.array([self.end_of(position, seq_lens[i]) for position, i in zip(positions, owner)], np.int32)
        return CommonAttentionMetadata(
            query_start, seq_lens, self.tables, torch.from_numpy(query_start).to(self.device),
            torch.from_numpy(seq_lens).to(self.device), torch.from_numpy(self.tables).to(self.device),
            torch.from_numpy(slots.astype(np.int64)).to(self.device), self.block_size, int(max(counts)),
            int(seq_lens.max()), visible_ends=ends,
            visible_ends_device=None if ends is None else torch.from_numpy(ends).to(self.device),
        )  # fmt: skip

    def end_of(self, position, length):
        """The last position that a row sees in a sequence of this length."""
        return next((last for first, last in self.images if first <= position <= last < length), position)

    def run(self, backend, chunks=1, apart=False):
        """History in one step, then the scheduled tokens in `chunks` steps; rows of sequence i in out[i]. `apart`: the
        pages of the layer are parts of wider rows."""
        cache = self.cache_of(backend, apart)
        self.step(backend, cache, [0] * len(self.computed), self.computed)
        outputs = [[] for _ in self.computed]
        for chunk in range(chunks):
            begin = [c + s * chunk // chunks for c, s in zip(self.computed, self.scheduled, strict=True)]
            end = [c + s * (chunk + 1) // chunks for c, s in zip(self.computed, self.scheduled, strict=True)]
            counts = [e - b for b, e in zip(begin, end, strict=True)]
            for index, rows in enumerate(self.step(backend, cache, begin, counts)):
                outputs[index].append(rows)
        return [torch.cat(rows) for rows in outputs]

    def run_rows(self, backend, rows, transform=None):
        """History, then all scheduled tokens, of which only these rows attend: what they get, and the cache."""
        cache, layer = self.cache_of(backend), self.layer
        self.step(backend, cache, [0] * len(self.computed), self.computed)
        inputs = self.inputs(self.computed, self.scheduled)
        parts = [sequence[start:] for sequence, start in zip(self.sequences, self.computed, strict=True)]
        q, k, v = self.split(torch.cat(parts).to(self.device))
        places = torch.tensor(rows, dtype=torch.int64, device=self.device)
        alone = backend.build_metadata(ReadRows(rows, [inputs]).as_requests(0, places)) if rows else None
        step = backend.build_metadata(inputs)
        out = backend.forward_rows(layer, q, k, v, cache, step, transform, places, alone)
        return out.cpu(), cache

    def split(self, rows):
        """Queries, keys and values [T, heads, head_dim] of rows of a sequence."""
        return rows.split([self.layer.num_heads, *[self.layer.num_kv_heads] * 2], dim=1)

    def spec(self):
        return FullAttentionSpec(self.block_size, self.layer.num_kv_heads, self.layer.head_dim, self.kept)

    def cache_of(self, backend, apart=False):
        spec = self.spec()
        # What was never written must not be read, and what lies between the pages is of other layers
        caches = []
        for tensor, shape in zip(spec.tensors, backend.page_shapes(spec), strict=True):
            dtype = self.dtype if self.kept == "float32" else getattr(torch, tensor.dtype)
            wide = self.filled(self.num_blocks, 3 if apart else 1, *shape, dtype=dtype)
            caches.append(wide[:, 1] if apart else wide[:, 0])
        return tuple(caches)

    def filled(self, *shape, dtype=None):
        dtype = dtype or self.dtype
        return torch.full(shape, float("nan") if dtype.is_floating_point else 77, device=self.device, dtype=dtype)

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
        rows = torch.cat([self.sequences[i][starts[i] : starts[i] + counts[i]] for i in taking_part]).to(self.device)
        q, k, v = self.split(rows)
        out = backend.forward(layer, q, k, v, cache, metadata).cpu().split([counts[i] for i in taking_part])
        results = [torch.empty(0, layer.num_heads * layer.value_dim)] * len(counts)
        for place, index in enumerate(taking_part):
            results[index] = out[place]
        return results

    def written_out(self):
        """Straight from the definition, in float64."""
        results = []
        layer = self.layer
        for sequence, computed in zip(self.sequences, self.computed, strict=True):
            q, k, v = self.split(sequence.double())
            rows = []
            for position in range(computed, len(sequence)):
                first = 0 if layer.window is None else max(0, position - layer.window + 1)
                end = self.end_of(position, len(sequence)) + 1 if layer.causal else len(sequence)
                if layer.window is not None and not layer.causal:
                    end = min(end, position + layer.window)
                heads = []
                for head in range(layer.num_heads):
                    kv_head = head * layer.num_kv_heads // layer.num_heads
                    scores = k[first:end, kv_head] @ q[position, head] * layer.scale
                    if layer.soft_cap is not None:
                        scores = torch.tanh(scores / layer.soft_cap) * layer.soft_cap
                    if layer.bias is not None:
                        reach = layer.bias.shape[1] // 2
                        scores += layer.bias[head, reach - position + first : reach - position + end].double().cpu()
                    if layer.sinks is not None:
                        scores = torch.cat((scores, layer.sinks[head : head + 1].double().cpu()))
                    heads.append(scores.softmax(0)[: end - first] @ v[first:end, kv_head])
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
BIAS = torch.randn(4, 2 * 200 + 1, generator=torch.Generator().manual_seed(3))
BIASED = [AttentionLayer(0, 4, 2, 32, 0.2, bias=BIAS), AttentionLayer(0, 4, 4, 64, 0.125, bias=BIAS)]
NOT_CAUSAL = [
    AttentionLayer(0, 6, 6, 64, 0.125, causal=False),
    AttentionLayer(0, 4, 2, 16, 0.25, causal=False, bias=BIAS),
    AttentionLayer(0, 4, 2, 16, 0.25, causal=False, window=9),
    AttentionLayer(0, 6, 6, 64, 0.125, causal=False, window=65),
]
# Caps that most scores come near to, and one that few do
CAPPED = [
    AttentionLayer(0, 8, 4, 32, 0.4, soft_cap=1.5),
    AttentionLayer(0, 4, 2, 256, 0.0625, window=20, soft_cap=50.0),
    AttentionLayer(0, 4, 2, 32, 0.2, bias=BIAS, soft_cap=1.0),
]
# Scores without a value: some take nearly all of the softmax, some nothing
SINKS = torch.tensor([-60.0, -1.0, 0.5, 3.0, 90.0, 0.0, 2.0, -3.0])
WITH_SINKS = [
    AttentionLayer(0, 8, 2, 64, 0.125, sinks=SINKS),
    AttentionLayer(0, 4, 4, 32, 0.17, window=20, sinks=SINKS[:4]),
]
MIXED = ([0, 54, 145, 3, 63, 64], [130, 1, 1, 40, 1, 65])


@pytest.mark.parametrize("layer", [*SHAPES, *CAPPED, *WITH_SINKS], ids=str)
@pytest.mark.parametrize("backend", [TorchReferenceBackend, pytest.param(CpuAttentionBackend, marks=needs_kernels)])
@pytest.mark.parametrize("block_size", [16, 48])
@pytest.mark.one_in(3)
def test_paged_attention_equals_its_definition(backend, layer, block_size):
    batch = Batch(*MIXED, layer, block_size)
    for got, expected in zip(batch.run(backend()), batch.written_out(), strict=True):
        torch.testing.assert_close(got.double(), expected, rtol=0, atol=2e-6)


@needs_kernels
@pytest.mark.parametrize("layer", [*SHAPES, CAPPED[0]], ids=str)
def test_on_the_cpu_a_row_is_the_same_to_the_bit_in_any_batch_and_any_chunk(layer):
    batch = Batch(*MIXED, layer, 16)
    together = batch.run(CpuAttentionBackend())
    for got, expected in zip(batch.run(CpuAttentionBackend(), chunks=7), together, strict=True):
        assert torch.equal(got, expected)
    for index in range(len(together)):
        alone = Batch([batch.computed[index]], [batch.scheduled[index]], layer, 16, seed=99)
        alone.sequences = [batch.sequences[index]]
        assert torch.equal(alone.run(CpuAttentionBackend())[0], together[index])


# In the history, in the step, within a stretch of keys and over several, at both ends of a step
IMAGES = [(2, 9), (20, 44), (50, 53), (64, 128), (129, 129)]
WITH_IMAGES = ([0, 54, 145, 3, 63, 64, 0, 30], [130, 1, 1, 42, 1, 66, 54, 15])


@pytest.mark.parametrize("layer", [*SHAPES, AttentionLayer(0, 4, 1, 256, 0.06, window=9), BIASED[0]], ids=str)
@pytest.mark.parametrize("backend", [TorchReferenceBackend, pytest.param(CpuAttentionBackend, marks=needs_kernels)])
@pytest.mark.one_in(3)
def test_rows_of_an_image_see_each_other_and_what_is_before_them(backend, layer):
    batch = Batch(*WITH_IMAGES, layer, 16, images=IMAGES)
    for got, expected in zip(batch.run(backend()), batch.written_out(), strict=True):
        torch.testing.assert_close(got.double(), expected, rtol=0, atol=2e-6)


@needs_kernels
@pytest.mark.parametrize("layer", SHAPES, ids=str)
def test_on_the_cpu_a_row_of_an_image_is_the_same_to_the_bit_in_any_batch(layer):
    batch = Batch(*WITH_IMAGES, layer, 16, images=IMAGES)
    together = batch.run(CpuAttentionBackend())
    for index in range(len(together)):
        alone = Batch([batch.computed[index]], [batch.scheduled[index]], layer, 16, seed=99, images=IMAGES)
        alone.sequences = [batch.sequences[index]]
        assert torch.equal(alone.run(CpuAttentionBackend())[0], together[index])


@needs_kernels
@pytest.mark.parametrize("kept", ["float16", "int8"])
def test_rows_of_an_image_see_each_other_in_fewer_bits_too(kept):
    batch = Batch(*WITH_IMAGES, SHAPES[4], 16, kept=kept, images=IMAGES)
    for got, expected in zip(batch.run(CpuAttentionBackend()), batch.run(TorchReferenceBackend()), strict=True):
        torch.testing.assert_close(got, expected, rtol=0, atol=5e-6)


def test_a_backend_without_rows_that_see_ahead_is_not_taken_for_them(monkeypatch):
    monkeypatch.setattr(CpuAttentionBackend, "sees_ahead", False)
    needs = AttentionNeeds("cpu", torch.float32, 16, 64, 4, 4, sees_ahead=True)
    choice = select_backend("auto", needs, "layers 0-3")
    assert choice.backend.name == "torch"
    assert choice.reasons_against["cpu"][-1] == "the rows of an image can't see those behind them"


def test_a_backend_without_soft_caps_is_not_taken_for_them(monkeypatch):
    monkeypatch.setattr(CpuAttentionBackend, "caps_scores", False)
    needs = AttentionNeeds("cpu", torch.float32, 16, 64, 4, 4, has_soft_cap=True)
    choice = select_backend("auto", needs, "layers 0-3")
    assert choice.backend.name == "torch"
    assert choice.reasons_against["cpu"][-1] == "scores can't have a soft cap"


def test_a_backend_without_sinks_is_not_taken_for_them(monkeypatch):
    monkeypatch.setattr(CpuAttentionBackend, "has_sinks", False)
    needs = AttentionNeeds("cpu", torch.float32, 16, 64, 4, 4, has_sinks=True)
    choice = select_backend("auto", needs, "layers 0-3")
    assert choice.backend.name == "torch"
    assert choice.reasons_against["cpu"][-1] == "heads can't have sinks"


KEPT = ["float16", "int8"]
KEPT_LAYERS = [*SHAPES, *BIASED, NOT_CAUSAL[0], CAPPED[0], WITH_SINKS[0]]


@needs_kernels
@pytest.mark.parametrize("layer", KEPT_LAYERS, ids=str)
@pytest.mark.parametrize("kept", KEPT)
@pytest.mark.parametrize("apart", [False, True], ids=["together", "apart"])
@pytest.mark.one_in(3)
def test_keys_and_values_in_fewer_bits_are_those_of_the_reference(layer, kept, apart):
    steps = MIXED if layer.causal else ([0] * 4, [1, 70, 16, 131])
    batch = Batch(*steps, layer, 32, kept=kept)
    expected = batch.run(TorchReferenceBackend())
    for got, right in zip(batch.run(CpuAttentionBackend(), apart=apart), expected, strict=True):
        torch.testing.assert_close(got, right, rtol=0, atol=4e-6)


@needs_kernels
@pytest.mark.parametrize(("kept", "share"), [("float16", 2**-11), ("int8", 1 / 254)])
def test_keys_and_values_are_as_exact_as_their_bits_allow(kept, share):
    """Keys and values of up to 5, rounded by `share` of the largest of a head: an error of a value counts as it is, one
    of keys by 64 products of 0.125 times a query, which add up as a random walk does, in a softmax."""
    layer = SHAPES[0]
    batch = Batch(*MIXED, layer, 16, kept=kept)
    error = torch.cat(batch.run(CpuAttentionBackend())).double() - torch.cat(batch.written_out())
    assert 0 < error.square().mean().sqrt() < share * 5 * (1 + 64**0.5 * 0.125)


@needs_kernels
@pytest.mark.parametrize("kept", KEPT)
@pytest.mark.parametrize("layer", [SHAPES[0], SHAPES[5], BIASED[0]], ids=str)
def test_with_fewer_bits_a_row_is_the_same_to_the_bit_in_any_batch_and_any_chunk(layer, kept):
    batch = Batch(*MIXED, layer, 16, kept=kept)
    together = batch.run(CpuAttentionBackend())
    for got, expected in zip(batch.run(CpuAttentionBackend(), chunks=7), together, strict=True):
        assert torch.equal(got, expected)
    for index in range(len(together)):
        alone = Batch([batch.computed[index]], [batch.scheduled[index]], layer, 16, seed=99, kept=kept)
        alone.sequences = [batch.sequences[index]]
        assert torch.equal(alone.run(CpuAttentionBackend())[0], together[index])


@needs_kernels
@pytest.mark.parametrize("kept", KEPT)
@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_values_that_are_no_numbers_stay_visible_in_fewer_bits_and_zeros_stay_zeros(kept, bad):
    layer = SHAPES[1]
    batch = Batch([0, 0, 0], [20, 20, 20], layer, 16, kept=kept)
    batch.sequences[0][7, layer.num_heads + layer.num_kv_heads, 3] = bad  # of a value
    batch.sequences[2][:, layer.num_heads :] = 0.0
    broken, whole, zero = batch.run(CpuAttentionBackend())
    assert not broken[7:, 3].isfinite().any()
    assert whole.isfinite().all() and not zero.any()


READ = [129, 0, 130, 171, 131, 237, 237, 64]  # of MIXED, in any order, a row twice


@pytest.mark.parametrize("layer", [*SHAPES, *BIASED], ids=str)
@pytest.mark.parametrize("backend", [TorchReferenceBackend, pytest.param(CpuAttentionBackend, marks=needs_kernels)])
def test_rows_that_attend_alone_get_what_they_get_among_all(backend, layer):
    batch = Batch(*MIXED, layer, 16)
    expected = torch.cat(batch.run(backend()))[READ]
    got, _ = batch.run_rows(backend(), READ)
    torch.testing.assert_close(got, expected, rtol=0, atol=0.0 if backend is CpuAttentionBackend else 2e-6)


@pytest.mark.parametrize("backend", [TorchReferenceBackend, pytest.param(CpuAttentionBackend, marks=needs_kernels)])
@pytest.mark.parametrize("rows", [[], [129]], ids=["no row", "one row"])
def test_keys_and_values_are_stored_of_all_rows_whichever_attend(backend, rows):
    batch = Batch(*MIXED, SHAPES[0], 16)
    (expected,) = batch.run_rows(backend(), list(range(238)))[1]
    got, (cache,) = batch.run_rows(backend(), rows)
    assert got.shape == (len(rows), 9 * 64)
    torch.testing.assert_close(cache, expected, rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("backend", [TorchReferenceBackend, pytest.param(CpuAttentionBackend, marks=needs_kernels)])
@pytest.mark.parametrize("layer", BIASED, ids=["grouped", "plain"])
def test_a_bias_by_distance_is_added_to_the_scores(backend, layer):
    batch = Batch(*MIXED, layer, 16)
    for got, expected in zip(batch.run(backend()), batch.written_out(), strict=True):
        torch.testing.assert_close(got.double(), expected, rtol=0, atol=2e-6)


@needs_kernels
def test_on_the_cpu_a_biased_row_is_the_same_to_the_bit_in_any_chunk():
    batch = Batch(*MIXED, BIASED[0], 16)
    for got, expected in zip(batch.run(CpuAttentionBackend(), chunks=5), batch.run(CpuAttentionBackend()), strict=True):
        assert torch.equal(got, expected)


@pytest.mark.parametrize("backend", [TorchReferenceBackend, pytest.param(CpuAttentionBackend, marks=needs_kernels)])
@pytest.mark.parametrize("layer", NOT_CAUSAL, ids=["plain", "bias", "narrow window", "window"])
def test_without_causality_a_row_sees_all_of_its_own_sequence_and_nothing_else(backend, layer):
    lengths = [1, 70, 16, 131, 64, 3]
    batch = Batch([0] * len(lengths), lengths, layer, 16)
    for got, expected in zip(batch.run(backend()), batch.written_out(), strict=True):
        torch.testing.assert_close(got.double(), expected, rtol=0, atol=2e-6)


class CrossBatch:
    """Queries of requests over encoder inputs that are in the cache; `source[i]`: whose input request i reads."""

    def __init__(self, encoder_lens, source, query_lens, layer, block_size=16, device="cpu"):
        self.device = device
        generator = torch.Generator().manual_seed(1)
        self.layer, self.block_size, self.query_lens, self.source = layer, block_size, query_lens, source
        self.encoded = [torch.randn(n, 2, layer.num_heads, layer.head_dim, generator=generator) for n in encoder_lens]
        self.q = torch.randn(sum(query_lens), layer.num_heads, layer.head_dim, generator=generator)
        counts = [-(-length // block_size) for length in encoder_lens]
        order = iter((torch.randperm(sum(counts), generator=generator) + 1).tolist())
        self.tables = [[next(order) for _ in range(count)] for count in counts]
        self.num_blocks = sum(counts) + 1

    def group_inputs(self, tables, seq_lens, query_lens, slots):
        table = np.zeros((len(tables), max(map(len, tables))), np.int32)
        for row, blocks in enumerate(tables):
            table[row, : len(blocks)] = blocks
        query_start = np.concatenate([[0], np.cumsum(query_lens)]).astype(np.int32)
        lens = np.array(seq_lens, np.int32)
        return CommonAttentionMetadata(
            query_start, lens, table, torch.from_numpy(query_start).to(self.device),
            torch.from_numpy(lens).to(self.device), torch.from_numpy(table).to(self.device),
            torch.tensor(slots, dtype=torch.int64).to(self.device), self.block_size, max(query_lens), max(seq_lens),
        )  # fmt: skip

    def run(self, backend):
        spec = self.layer.kv_spec(self.block_size, "float32")
        cache = tuple(
            torch.full((self.num_blocks, *shape), float("nan"), device=self.device)
            for shape in backend.page_shapes(spec)
        )
        lens = [len(part) for part in self.encoded]
        slots = [
            table[position // self.block_size] * self.block_size + position % self.block_size
            for table, length in zip(self.tables, lens, strict=True)
            for position in range(length)
        ]
        stored = backend.build_metadata(self.group_inputs(self.tables, lens, lens, slots))
        keys, values = torch.cat(self.encoded).to(self.device).unbind(1)
        backend.store(self.layer, keys, values, cache, stored)
        tables, seq_lens = [self.tables[i] for i in self.source], [lens[i] for i in self.source]
        read = backend.build_metadata(self.group_inputs(tables, seq_lens, self.query_lens, []))
        return backend.attend(self.layer, self.q.to(self.device), cache, read).cpu()

    def written_out(self):
        owners = np.repeat(self.source, self.query_lens)
        rows = []
        for q, owner in zip(self.q.double(), owners, strict=True):
            keys, values = self.encoded[owner].double().unbind(1)  # [S, heads, head_dim]
            weights = (torch.einsum("hd,shd->hs", q, keys) * self.layer.scale).softmax(-1)
            rows.append(torch.einsum("hs,shd->hd", weights, values).flatten())
        return torch.stack(rows)


@pytest.mark.parametrize("backend", [TorchReferenceBackend, pytest.param(CpuAttentionBackend, marks=needs_kernels)])
@pytest.mark.parametrize(
    ("encoder_lens", "source", "query_lens"),
    [
        ([100], [0], [1]),
        ([1, 150, 64, 130], [0, 1, 2, 3], [4, 1, 7, 40]),
        ([100, 128, 200], [0, 0, 0, 1, 1, 2, 2, 2, 2, 2, 0], [1] * 11),  # requests that read the same input
        ([150, 90], [0, 0, 1, 1], [1, 3, 1, 1]),
    ],
)
def test_cross_attention_sees_all_of_the_rows_own_encoder_input(backend, encoder_lens, source, query_lens):
    batch = CrossBatch(encoder_lens, source, query_lens, CrossAttentionLayer(0, 6, 64, 0.125))
    torch.testing.assert_close(batch.run(backend()).double(), batch.written_out(), rtol=0, atol=2e-6)


@needs_kernels
@pytest.mark.parametrize("num_readers", [1, 2, 5, 33])
def test_on_the_cpu_readers_of_one_encoder_input_get_what_each_gets_alone_to_the_bit(num_readers):
    layer = CrossAttentionLayer(0, 6, 64, 0.125)
    together = CrossBatch([150], [0] * num_readers, [1] * num_readers, layer)
    result = together.run(CpuAttentionBackend())
    queries = together.q
    for index in range(num_readers):
        alone = CrossBatch([150], [0], [1], layer)
        alone.encoded, alone.q = together.encoded, queries[index : index + 1]
        assert torch.equal(alone.run(CpuAttentionBackend())[0], result[index])


@needs_kernels
def test_the_fastest_backend_that_fits_is_chosen():
    needs = AttentionNeeds("cpu", torch.float32, 16, 64, 9, 3)
    chosen = select_backend("auto", needs, "layers 0-3")
    assert (chosen.backend.name, chosen.reasons_against) == ("cpu", {"triton": NOT_ON_CUDA, "torch": ["cpu is faster"]})
    chosen = select_backend("torch", needs, "layers 0-3")
    assert (chosen.backend.name, chosen.reasons_against) == (
        "torch",
        {"cpu": ["torch was asked for"], "triton": NOT_ON_CUDA},
    )
    chosen = select_backend("auto", AttentionNeeds("cpu", torch.float32, 8, 24, 9, 3), "layers 0-3")
    assert chosen.backend.name == "torch"
    assert [why.split(" must")[0] for why in chosen.reasons_against["cpu"]] == ["block_size", "head_dim"]
    assert str(chosen).startswith("layers 0-3: torch (not cpu: block_size must be a multiple of 16, not 8, head_dim")


@pytest.mark.parametrize(
    ("needs", "reason"),
    [
        (AttentionNeeds("cuda", torch.float32, 16, 64, 4, 4), "not on cuda"),
        (AttentionNeeds("cpu", torch.bfloat16, 16, 64, 4, 4), "float32"),
        (AttentionNeeds("cpu", torch.float32, 8, 64, 4, 4), "block_size must be a multiple of 16, not 8"),
        (AttentionNeeds("cpu", torch.float32, 16, 72, 4, 4), "head_dim must be a multiple of 16"),
        (AttentionNeeds("cpu", torch.float32, 16, 272, 4, 4), "up to 256, not 272"),
        (AttentionNeeds("cpu", torch.float32, 16, 64, 4, 4, content="a latent vector"), "not a latent vector"),
        (AttentionNeeds("cpu", torch.float32, 16, 64, 64, 1), "share a KV head"),
        (AttentionNeeds("cpu", torch.float32, 16, 64, 4, 4, kv_dtype=torch.bfloat16), "not in torch.bfloat16"),
    ],
)
def test_a_backend_that_was_asked_for_and_cannot_says_why(needs, reason):
    with pytest.raises(ConfigError, match=reason) as refused:
        select_backend("cpu", needs, "layers 4-7")
    assert "can't serve layers 4-7" in str(refused.value)


def test_an_unknown_backend_is_refused_with_the_known_ones():
    with pytest.raises(ConfigError, match="auto, cpu, triton, torch"):
        select_backend("warp", AttentionNeeds("cpu", torch.float32, 16, 64, 4, 4), "layers 0-3")


def test_where_no_backend_fits_every_reason_is_told():
    needs = AttentionNeeds("cuda", torch.float32, 16, 64, 4, 4, content="a latent vector")
    with pytest.raises(ConfigError, match=r"cpu: .*not on cuda.*torch: reads keys and values, not a latent vector"):
        select_backend("auto", needs, "layers 0-3")


@needs_kernels
@pytest.mark.parametrize("backend", [CpuAttentionBackend, TorchReferenceBackend])
def test_pages_that_are_parts_of_wider_rows_hold_the_same(backend):
    """As the pages of a group do whose blocks are smaller than another's."""
    batch = Batch([40, 0, 16], [1, 20, 3], AttentionLayer(0, 4, 2, 32, 0.2), 16)
    for alone, apart in zip(batch.run(backend()), batch.run(backend(), apart=True), strict=True):
        assert torch.equal(alone, apart)
