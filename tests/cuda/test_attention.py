"""Attention in Triton at the sizes of real models, against products of gathered keys and values in float32."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from ratoon.attention.interface import CommonAttentionMetadata
from ratoon.attention.torch_reference import to_fp8
from ratoon.attention.triton_backend import TritonAttentionBackend
from ratoon.execution.inputs.step_inputs import ReadRows
from ratoon.layers.attention import AttentionLayer, CrossAttentionLayer, HeadTransform
from ratoon.layers.norm import HeadRMSNorm
from ratoon.layers.rotary import Rotary
from ratoon.layers.torch_ops import TorchOps

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")

Tensor = torch.Tensor
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
LLAMA = AttentionLayer(0, 32, 8, 128, 128**-0.5)
QWEN = AttentionLayer(0, 16, 8, 128, 128**-0.5)
# ‖out − exact‖ / ‖exact‖: rounding of the weights and of the output
TOLERANCES = {torch.float32: 2e-6, torch.float16: 2e-3, torch.bfloat16: 1e-2}


class Step:
    """Requests over a cache in which every block is written, except the null block: that one is full of NaN."""

    def __init__(
        self,
        layer: Any,
        computed: list[int],
        scheduled: list[int],
        dtype: torch.dtype,
        block_size: int = 16,
        seed: int = 0,
        kv_dtype: torch.dtype | None = None,
        images: tuple[tuple[int, int], ...] = (),
    ) -> None:
        """`images`: the first and the last position of rows that see each other, of every request whose step has them
        whole."""
        torch.manual_seed(seed)
        self.images = images
        self.layer, self.block_size, self.computed, self.scheduled = layer, block_size, computed, scheduled
        lengths = np.array(computed) + scheduled if layer.causal else np.array(computed)
        counts = -(-lengths // block_size)
        order = np.random.default_rng(seed).permutation(int(counts.sum())) + 1
        self.tables = np.zeros((len(lengths), int(counts.max())), np.int32)
        ends = np.cumsum(counts)
        for row, (count, end) in enumerate(zip(counts, ends, strict=True)):
            self.tables[row, :count] = order[end - count : end]
        self.lengths = lengths.astype(np.int32)
        shape = (int(counts.sum()) + 1, 2, layer.num_kv_heads, block_size, layer.head_dim)
        self.cache = torch.randn(shape, device="cuda").to(kv_dtype or dtype)
        self.cache[0] = float("nan")
        self.q = torch.randn(sum(scheduled), layer.num_heads, layer.head_dim, device="cuda").to(dtype)

    def inputs(self) -> CommonAttentionMetadata:
        starts = np.concatenate([[0], np.cumsum(self.scheduled)]).astype(np.int32)
        ends = np.concatenate([self.ends_of(row) for row in range(len(self.lengths))]) if self.images else None
        return CommonAttentionMetadata(
            starts, self.lengths, self.tables, torch.from_numpy(starts).cuda(), torch.from_numpy(self.lengths).cuda(),
            torch.from_numpy(self.tables).cuda(), torch.zeros(0, dtype=torch.int64, device="cuda"), self.block_size,
            max(self.scheduled), int(self.lengths.max()), visible_ends=ends,
            visible_ends_device=None if ends is None else torch.from_numpy(ends).cuda(),
        )  # fmt: skip

    def ends_of(self, row: int) -> np.ndarray:
        """The last position that each query of a request sees."""
        length = int(self.lengths[row])
        ends = np.arange(length - self.scheduled[row], length, dtype=np.int32)
        for first, last in self.images:
            if last < length:
                ends[(ends >= first) & (ends <= last)] = last
        return ends

    def run(self, backend: TritonAttentionBackend) -> Tensor:
        return backend.attend(self.layer, self.q, (self.cache,), backend.build_metadata(self.inputs()))

    def exact(self) -> Tensor:
        layer, group = self.layer, self.layer.num_heads // self.layer.num_kv_heads
        results = []
        for row, q in enumerate(self.q.double().split(self.scheduled)):
            length = int(self.lengths[row])
            pages = self.cache[torch.from_numpy(self.tables[row, : -(-length // self.block_size)]).cuda().long()]
            keys, values = pages.double().transpose(0, 1).transpose(2, 3).flatten(1, 2)[:, :length]  # [S, kv_heads, D]
            keys, values = (part.repeat_interleave(group, dim=1) for part in (keys, values))
            positions = torch.arange(length - len(q), length, device="cuda")[:, None]
            distances = torch.arange(length, device="cuda") - positions
            hidden = torch.zeros_like(distances, dtype=torch.bool) if not layer.causal else distances > 0
            if self.images:
                hidden = torch.arange(length, device="cuda") > torch.from_numpy(self.ends_of(row)).cuda()[:, None]
            if layer.window is not None:
                hidden |= distances <= -layer.window
            scores = torch.einsum("qhd,khd->hqk", q, keys) * layer.scale
            if layer.bias is not None:
                scores += layer.bias[:, distances + layer.bias.shape[1] // 2]
            scores = scores.masked_fill(hidden, float("-inf"))
            if layer.sinks is not None:
                scores = torch.cat((scores, layer.sinks.double()[:, None, None].expand(-1, len(q), 1)), -1)
            weights = scores.softmax(-1)[..., :length]
            results.append(torch.einsum("hqk,khd->qhd", weights, values).flatten(1))
        return torch.cat(results)


def error_of(got: Tensor, exact: Tensor) -> float:
    return float((got.double() - exact).norm() / exact.norm())


MIXED = ([0, 1023, 300, 777, 5, 2000], [700, 1, 5, 40, 1, 300])


F32, F16, BF16 = TOLERANCES
LAYERS = {
    "llama": LLAMA,
    "qwen": QWEN,
    "smollm": AttentionLayer(0, 9, 3, 64, 0.125),
    "80": AttentionLayer(0, 12, 12, 80, 0.11),
    "96": AttentionLayer(0, 8, 1, 96, 0.1),
    "256": AttentionLayer(0, 8, 2, 256, 1 / 16),
    "window": replace(LLAMA, window=500),
}


@pytest.mark.parametrize(
    ("name", "dtype"),
    [  # A kernel is compiled for seconds: all layers in bfloat16, some of them in another one
        *((name, BF16) for name in LAYERS),
        *((name, F32) for name in ("llama", "80", "256", "window")),
        *((name, F16) for name in ("smollm", "96")),
    ],
    ids=str,
)
def test_a_mixed_batch_is_as_exact_as_its_dtype(name: str, dtype: torch.dtype) -> None:
    layer = LAYERS[name]
    step = Step(layer, *MIXED, dtype)
    if layer.window is not None:  # freed blocks
        for row, computed in enumerate(step.computed):
            step.tables[row, : max(0, computed - layer.window + 1) // 16] = 0
        filled = Step.exact(replace_cache(step))
    else:
        filled = step.exact()
    assert error_of(step.run(TritonAttentionBackend()), filled) < TOLERANCES[dtype]


@pytest.mark.parametrize("batch_invariant", [False, True])
@pytest.mark.parametrize("window", [None, 200])
@pytest.mark.parametrize("layer", [AttentionLayer(0, 8, 4, 256, 1 / 16), LLAMA], ids=["gemma", "llama"])
def test_rows_of_an_image_see_each_other(layer: AttentionLayer, window: int | None, batch_invariant: bool) -> None:
    images = ((10, 265), (300, 555), (600, 603))
    step = Step(replace(layer, window=window), [0, 1023, 300, 600], [700, 1, 300, 4], BF16, images=images)
    backend = TritonAttentionBackend(batch_invariant=batch_invariant)
    assert error_of(step.run(backend), step.exact()) < TOLERANCES[BF16]


def replace_cache(step: Step) -> Step:
    """With a null block that is finite: weights of zero times NaN would be NaN in the exact product."""
    step.cache[0] = 0.0
    exact_step = object.__new__(Step)
    exact_step.__dict__ |= step.__dict__ | {"cache": step.cache.clone()}
    step.cache[0] = float("nan")
    return exact_step


@pytest.mark.parametrize("batch_invariant", [False, True])
@pytest.mark.parametrize(("batch", "length"), [(1, 1), (1, 17), (1, 8191), (7, 1000), (32, 1024), (257, 333)])
def test_decoding_is_exact_for_any_number_of_splits(batch: int, length: int, batch_invariant: bool) -> None:
    step = Step(LLAMA, [length - 1] * batch, [1] * batch, torch.bfloat16)
    backend = TritonAttentionBackend(batch_invariant=batch_invariant)
    assert error_of(step.run(backend), step.exact()) < 1e-2
    again = step.run(backend)
    assert all(torch.equal(again, step.run(backend)) for _ in range(20))  # counters are reset, nothing races


@pytest.mark.parametrize("block_size", [16, 32, 100, 128])
def test_any_block_size_serves(block_size: int) -> None:
    step = Step(LLAMA, *MIXED, torch.bfloat16, block_size)
    assert error_of(step.run(TritonAttentionBackend()), step.exact()) < 1e-2


@pytest.mark.parametrize("dtype", [F32, BF16], ids=str)
def test_biased_and_unmasked_attention(dtype: torch.dtype) -> None:
    bias = torch.randn(12, 2 * 1024 + 1, device="cuda")
    layer = AttentionLayer(0, 12, 12, 64, 1.0 / 8, causal=False, bias=bias)
    step = Step(layer, [700, 31, 512], [700, 31, 512], dtype)
    assert error_of(step.run(TritonAttentionBackend()), step.exact()) < TOLERANCES[dtype]
    step = Step(replace(layer, causal=True), [0, 600, 500], [700, 31, 1], dtype)
    assert error_of(step.run(TritonAttentionBackend()), step.exact()) < TOLERANCES[dtype]
    cross = Step(CrossAttentionLayer(0, 12, 64, 0.125), [1500, 31, 512], [1, 4, 200], dtype)
    assert error_of(cross.run(TritonAttentionBackend()), cross.exact()) < TOLERANCES[dtype]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("layer", [LLAMA, replace(LLAMA, window=600)], ids=["full", "window"])
def test_batch_invariant_rows_are_the_same_to_the_bit(layer: AttentionLayer, dtype: torch.dtype) -> None:
    """The rows of a prompt: at once, as decoding one token, and in a batch with others."""
    backend = TritonAttentionBackend(batch_invariant=True)
    whole = Step(layer, [0], [1400], dtype)
    expected = whole.run(backend)
    for computed, scheduled in ((1399, 1), (1000, 1), (900, 13), (700, 500)):
        part = object.__new__(Step)
        tables = np.zeros((2, 100), np.int32)
        tables[0, : whole.tables.shape[1]] = tables[1, : whole.tables.shape[1]] = whole.tables[0]
        for lens, rows in (([scheduled], slice(0, 1)), ([scheduled, 2], slice(0, 2)), ([scheduled, 100], slice(0, 2))):
            starts = [computed, 200][: len(lens)]
            queries = [whole.q[start : start + count] for start, count in zip(starts, lens, strict=True)]
            part.__dict__ |= whole.__dict__ | {
                "computed": starts, "scheduled": lens, "tables": tables[rows], "q": torch.cat(queries),
                "lengths": (np.array(starts) + lens).astype(np.int32),
            }  # fmt: skip
            got = part.run(backend)[:scheduled]
            assert torch.equal(got, expected[computed : computed + scheduled])


@pytest.mark.parametrize(
    ("name", "dtype"), [("llama", BF16), ("qwen", BF16), ("smollm", BF16), ("qwen", F16), ("smollm", F32)], ids=str
)
def test_searches_with_a_shared_prefix(name: str, dtype: torch.dtype) -> None:
    step = Step(LAYERS[name], [703 + row % 5 for row in range(96)] + [50, 300], [1] * 97 + [200], dtype)
    for row in range(96):
        if row % 32:
            step.tables[row, :43] = step.tables[row - 1, :43]
    metadata = TritonAttentionBackend().build_metadata(step.inputs())
    cascade = metadata.cascade(1, True)
    assert cascade is not None
    assert cascade.prefixes.prefix_lens.tolist() == [688] * 3
    assert error_of(step.run(TritonAttentionBackend()), step.exact()) < TOLERANCES[dtype]


@pytest.mark.parametrize("window", [None, 128])
@pytest.mark.parametrize("lengths", [MIXED, ([0] * 64, [1] * 64), ([1500] * 40, [1] * 40)], ids=["mixed", "new", "old"])
def test_heads_with_sinks(lengths: tuple[list[int], list[int]], window: int | None) -> None:
    """The sizes of gpt-oss, in every kernel that its steps have: long prompts, few and many decodes, prefixes."""
    layer = AttentionLayer(0, 64, 8, 64, 0.125, window=window, sinks=torch.randn(64, device="cuda") * 2)
    step = Step(layer, *lengths, BF16)
    assert error_of(step.run(TritonAttentionBackend()), step.exact()) < TOLERANCES[BF16]
    assert error_of(step.run(TritonAttentionBackend(batch_invariant=True)), step.exact()) < TOLERANCES[BF16]
    if len(set(lengths[0])) == 1 and lengths[0][0]:
        step.tables[1:, :90] = step.tables[0, :90]
        assert error_of(step.run(TritonAttentionBackend()), step.exact()) < TOLERANCES[BF16]


@pytest.mark.parametrize("layer", [LLAMA, AttentionLayer(0, 12, 12, 80, 0.11)], ids=["llama", "80"])
def test_keys_and_values_in_fp8(layer: AttentionLayer) -> None:
    step = Step(layer, *MIXED, torch.bfloat16, kv_dtype=torch.float8_e4m3fn)
    assert error_of(step.run(TritonAttentionBackend()), step.exact()) < 1e-2
    step = Step(layer, [1000] * 9, [1] * 9, torch.bfloat16, kv_dtype=torch.float8_e4m3fn)
    assert error_of(step.run(TritonAttentionBackend()), step.exact()) < 1e-2
    k, v = torch.randn(2, 32, layer.num_kv_heads, layer.head_dim, device="cuda", dtype=torch.bfloat16) * 100
    inputs = replace(step.inputs(), slot_mapping=torch.arange(16, 48, device="cuda"))
    backend = TritonAttentionBackend()
    backend.store(layer, k, v, (step.cache,), backend.build_metadata(inputs))
    stored = step.cache[1:3].transpose(2, 3).transpose(0, 1).flatten(1, 2).float()  # [2, 32, kv_heads, head_dim]
    for got, expected in zip(stored, (k, v), strict=True):
        assert torch.equal(got, to_fp8(expected).float())


@pytest.mark.parametrize("kv_dtype", [torch.bfloat16, torch.float8_e4m3fn], ids=str)
@pytest.mark.parametrize("layer", [LLAMA, QWEN, replace(QWEN, window=300)], ids=["llama", "qwen", "window"])
@pytest.mark.parametrize("batch", [1, 33])
@pytest.mark.parametrize("most", [1, 8], ids=["one token", "a few"])
def test_one_kernel_does_what_store_and_attention_do(
    layer: AttentionLayer, batch: int, kv_dtype: torch.dtype, most: int
) -> None:
    lengths, counts = [(97 * row) % 1500 for row in range(batch)], [most - row % most for row in range(batch)]
    owner = np.repeat(np.arange(batch), counts)
    places = np.concatenate([length + np.arange(count) for length, count in zip(lengths, counts)])
    results = []
    for fused in (True, False):
        step = Step(layer, lengths, counts, torch.bfloat16, kv_dtype=kv_dtype)
        product = torch.randn(sum(counts), layer.num_heads + 16, 128, device="cuda").bfloat16()
        slots = torch.from_numpy(step.tables[owner, places // 16].astype(np.int64) * 16 + places % 16).cuda()
        inputs = replace(step.inputs(), slot_mapping=slots, max_query_len=most, max_seq_len=9216, is_padded=True)
        ops = TorchOps()
        norms = [
            HeadRMSNorm(
                SimpleNamespace(take=lambda name, size: torch.ones(size, device="cuda").bfloat16() * 2, ops=ops),
                128,
                1e-6,
            )
            for _ in range(2)
        ]
        rotary = object.__new__(Rotary)
        angles = torch.arange(2000, device="cuda")[:, None] * torch.rand(64, device="cuda")
        rotary.cos_sin, rotary.rotate = torch.cat([angles.cos(), angles.sin()], dim=1), ops.rotary
        rotary.axes = None
        transform = HeadTransform(
            torch.from_numpy(places).cuda(), rotary, *(norms if layer is not LLAMA else [None] * 2)
        )
        backend = TritonAttentionBackend(fused_store=fused)
        q, k, v = product.split([layer.num_heads, 8, 8], dim=1)
        metadata = backend.build_metadata(inputs)
        results.append((backend.forward(layer, q, k, v, (step.cache,), metadata, transform), step.cache[1:].float()))
    (out, cache), (expected, expected_cache) = results
    assert error_of(out, expected.double()) < 1e-2
    assert error_of(cache, expected_cache.double()) < 1e-4  # a few last bits of a norm


def test_a_decode_step_loads_keys_before_it_waits() -> None:
    """Triton begins to load in front of the loop, and the loop waits. Another version of it might not."""
    if torch.cuda.get_device_capability() < (9, 0):
        pytest.skip("only newer kernels wait")
    from ratoon.layers.triton.compilation import launches_go_to

    step, code = Step(LLAMA, [500] * 32, [1] * 32, torch.bfloat16), []

    def compile_only(kernel: Any, run: Any, args: tuple[Any, ...], options: dict[str, Any]) -> None:
        code.append(run(kernel, *args, grid=(1,), warmup=True, **options).asm["ptx"])

    with launches_go_to(compile_only):
        backend = TritonAttentionBackend(fused_store=True)
        metadata = backend.build_metadata(step.inputs())
        backend.forward(LLAMA, step.q, step.q[:, :8], step.q[:, 8:16], (step.cache,), metadata)
    (kernel,) = code
    before, _, behind = kernel.partition("griddepcontrol.wait")
    assert behind and before.count("cp.async.cg") > behind.count("cp.async.cg")


@pytest.mark.parametrize("kv_dtype", [torch.bfloat16, torch.float8_e4m3fn], ids=str)
@pytest.mark.parametrize("scheduled", [[8192], [500] * 40, [700, 1, 1, 300]], ids=["one", "many", "mixed"])
def test_rows_that_attend_alone_read_what_was_just_stored(scheduled: list[int], kv_dtype: torch.dtype) -> None:
    """They are a decode step, which loads earlier keys while the kernel before it still runs."""
    step = Step(QWEN, [0] * len(scheduled), scheduled, torch.bfloat16, kv_dtype=kv_dtype)
    rows = (np.cumsum(scheduled) - 1).tolist()
    owner = np.repeat(np.arange(len(scheduled)), scheduled)
    places = np.concatenate([np.arange(count) for count in scheduled])
    slots = step.tables[owner, places // 16].astype(np.int64) * 16 + places % 16
    inputs = replace(step.inputs(), slot_mapping=torch.from_numpy(slots).cuda())
    product = torch.randn(sum(scheduled), 32, 128, device="cuda").bfloat16()
    rotary = object.__new__(Rotary)
    angles = torch.arange(9000, device="cuda")[:, None] * torch.rand(64, device="cuda")
    rotary.cos_sin, rotary.rotate = torch.cat([angles.cos(), angles.sin()], dim=1), TorchOps().rotary
    rotary.axes = None
    transform = HeadTransform(torch.from_numpy(places).cuda(), rotary, None, None)
    backend = TritonAttentionBackend()
    metadata, rows_device = backend.build_metadata(inputs), torch.tensor(rows, device="cuda")
    alone = backend.build_metadata(ReadRows(rows, [inputs]).as_requests(0, rows_device))

    def split() -> tuple[Tensor, Tensor, Tensor]:
        return product.clone().split([16, 8, 8], dim=1)

    expected = backend.forward(QWEN, *split(), (step.cache,), metadata, transform)[rows_device].double()
    for _ in range(10):
        step.cache.view(torch.uint8).fill_(0xFF)  # NaN
        q, k, v = split()
        out = backend.forward_rows(QWEN, q, k, v, (step.cache,), metadata, transform, rows_device, alone)
        assert error_of(out, expected) < 1e-2


@pytest.mark.parametrize("layer", [LLAMA, QWEN], ids=["llama", "qwen"])
def test_padded_continuations_take_one_launch(layer: AttentionLayer) -> None:
    """A step of 24 tokens at most, whatever requests they belong to."""
    for scheduled in ([17, 1, 1, 1, 1, 1, 1, 1], [24], [1] * 24, [3, 5, 9, 1, 6]):
        computed = [(688 + 400 * row) % 3000 for row in range(len(scheduled))]
        step = Step(layer, computed, scheduled, torch.bfloat16)
        backend = TritonAttentionBackend()
        inputs = step.inputs()
        missing = 24 - len(scheduled)
        starts = torch.cat([inputs.query_start_loc_device, inputs.query_start_loc_device[-1:].expand(missing)])
        lens = torch.cat([inputs.seq_lens_device, inputs.seq_lens_device.new_zeros(missing)])
        table = torch.cat(
            [
                inputs.block_table_device,
                inputs.block_table_device.new_zeros(missing, inputs.block_table_device.shape[1]),
            ]
        )
        padded = replace(
            inputs, query_start_loc_device=starts.contiguous(), seq_lens_device=lens, block_table_device=table,
            max_query_len=24, max_seq_len=9216, is_padded=True,
        )  # fmt: skip
        metadata = backend.build_metadata(padded)
        assert not metadata.plan(layer.num_heads // 8).has_long
        for _ in range(3):
            out = backend.attend(layer, step.q, (step.cache,), metadata)
            assert error_of(out, step.exact()) < 1e-2


@pytest.mark.parametrize("padded", [False, True])
def test_kernels_that_begin_early_wait_for_what_they_read(padded: bool) -> None:
    """Layers that read what the one before them wrote, in a graph: the same bits with dependent launch and without. A
    padded step has launches in which no program has work."""
    results = []
    for dependent in (True, False):
        step = Step(LLAMA, [500, 3, 1200], [1, 40 if padded else 1, 1], torch.bfloat16)
        # Where the new tokens belong: what earlier tokens left is read before the layer in front has ended.
        owner = np.repeat(np.arange(3), step.scheduled)
        places = np.concatenate([np.arange(c, c + s) for c, s in zip(step.computed, step.scheduled, strict=True)])
        slots = step.tables[owner, places // 16].astype(np.int64) * 16 + places % 16
        inputs = replace(step.inputs(), is_padded=padded, slot_mapping=torch.from_numpy(slots).cuda())
        backend = TritonAttentionBackend(dependent_launch=dependent)
        step.cache[0] = 0.0

        def layers(backend: Any = backend, step: Any = step, inputs: Any = inputs) -> Tensor:
            metadata, q = backend.build_metadata(inputs), step.q
            for _ in range(20):
                out = backend.forward(LLAMA, q, q[:, :8], q[:, 8:16], (step.cache,), metadata)
                q = torch.nn.functional.rms_norm(out.view_as(q).float(), (LLAMA.head_dim,)).bfloat16()
            return q

        layers()
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            out = layers()
        for _ in range(10):
            graph.replay()
        results.append(out.clone())
    assert results[0].isfinite().all()
    assert torch.equal(*results)


def test_a_captured_step_follows_the_numbers_on_the_device() -> None:
    step = Step(LLAMA, [100, 2000, 333, 64], [1] * 4, torch.bfloat16)
    backend = TritonAttentionBackend()
    inputs = replace(step.inputs(), max_seq_len=8192)
    step.run(backend)  # compiles, allocates
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = backend.attend(LLAMA, step.q, (step.cache,), backend.build_metadata(inputs))
    for lengths in ([101, 2001, 334, 65], [1, 1777, 200, 16], [90, 5, 1, 33]):
        step.lengths = np.array(lengths, np.int32)
        inputs.seq_lens_device.copy_(torch.from_numpy(step.lengths))
        out.fill_(float("nan"))
        graph.replay()
        assert error_of(out, step.exact()) < 1e-2


UNEVEN = [1, 2, 15, 16, 17, 31, 32, 33, 63, 64, 65, 9000, *np.random.default_rng(0).integers(1, 700, 60).tolist()]


@pytest.mark.parametrize("kv_dtype", [torch.bfloat16, torch.float8_e4m3fn], ids=str)
@pytest.mark.parametrize(
    "layer",
    [
        LLAMA, QWEN, replace(QWEN, window=300), AttentionLayer(0, 16, 1, 64, 0.125), AttentionLayer(0, 6, 3, 32, 0.2),
        replace(QWEN, sinks=torch.linspace(-3, 3, QWEN.num_heads, device=DEVICE)),
    ],
    ids=["llama", "qwen", "window", "one KV head", "3 KV heads", "sinks"],
)  # fmt: skip
def test_many_requests_of_one_token_and_any_length(layer: AttentionLayer, kv_dtype: torch.dtype) -> None:
    """Their keys are divided evenly among programs, which cuts requests anywhere."""
    step = Step(layer, [length - 1 for length in UNEVEN], [1] * len(UNEVEN), torch.bfloat16, kv_dtype=kv_dtype)
    backend = TritonAttentionBackend()
    assert error_of(step.run(backend), step.exact()) < TOLERANCES[torch.bfloat16]
    # Parts and counters are left as they were found.
    assert error_of(step.run(backend), step.exact()) < TOLERANCES[torch.bfloat16]


def test_many_requests_of_a_captured_step_get_other_lengths() -> None:
    step = Step(QWEN, [length - 1 for length in UNEVEN], [1] * len(UNEVEN), torch.bfloat16)
    backend, inputs = TritonAttentionBackend(), replace(step.inputs(), is_padded=True)
    graph = torch.cuda.CUDAGraph()
    backend.attend(QWEN, step.q, (step.cache,), backend.build_metadata(inputs))  # compiles
    with torch.cuda.graph(graph):
        metadata = backend.build_metadata(inputs)
        outs = [backend.attend(QWEN, step.q, (step.cache,), metadata) for _ in range(3)]
    for seed in range(3):
        lengths = np.minimum(step.lengths, np.random.default_rng(seed).integers(1, 9000, len(step.lengths)))
        inputs.seq_lens_device.copy_(torch.from_numpy(lengths.astype(np.int32)))
        graph.replay()
        shorter = object.__new__(Step)
        shorter.__dict__ |= step.__dict__ | {"lengths": lengths}
        for out in outs:
            assert error_of(out, shorter.exact()) < TOLERANCES[torch.bfloat16]


@pytest.mark.parametrize("num_tokens", [1, 37, 1000])
@pytest.mark.parametrize(
    ("head_dim", "rotary_dim", "num_axes"), [(128, 128, 1), (128, None, 1), (80, 32, 1), (64, 64, 1), (128, 128, 3)]
)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_norm_rotation_and_store_round_as_the_reference(
    dtype: torch.dtype, head_dim: int, rotary_dim: int | None, num_axes: int, num_tokens: int
) -> None:
    torch.manual_seed(0)
    ops, layer = TorchOps(), AttentionLayer(0, 8, 2, head_dim, 0.1)
    weights: list[Any] = [
        SimpleNamespace(take=lambda name, size: torch.randn(size, device="cuda").to(dtype), ops=ops) for _ in range(2)
    ]
    norms = [HeadRMSNorm(weight, head_dim, 1e-6) for weight in weights]
    rotary = None
    if rotary_dim is not None:
        rotary = object.__new__(Rotary)
        angles = torch.randn(5000, rotary_dim // 2, device="cuda") * 100
        rotary.cos_sin, rotary.rotate = torch.cat([angles.cos(), angles.sin()], dim=1), ops.rotary
        rotary.axes = None
        if num_axes > 1:
            rotary.axes = torch.randint(0, num_axes, (rotary_dim // 2,), dtype=torch.int32, device="cuda")
    positions = torch.randint(0, 5000, (num_axes, num_tokens + 3), device="cuda")[:, :num_tokens]
    transform = HeadTransform(positions if num_axes > 1 else positions[0], rotary, *norms)
    product = torch.randn(num_tokens, 12, head_dim, device="cuda").to(dtype)
    slots = torch.randperm(16 * 70, device="cuda")[:num_tokens] + 16
    pages = torch.full((71, 2, 2, 16, head_dim), float("nan"), dtype=dtype, device="cuda")
    inputs = replace(Step(layer, [0], [num_tokens], dtype).inputs(), slot_mapping=slots)
    backend = TritonAttentionBackend()
    q, k, v = product.clone().split([8, 2, 2], dim=1)
    backend._store(layer, q, k, v, (pages,), backend.build_metadata(inputs), transform)
    expected_q, expected_k, expected_v = product.split([8, 2, 2], dim=1)
    transform.apply(expected_q, expected_k)
    stored = pages[slots // 16, :, :, slots % 16]  # [T, 2, kv_heads, head_dim]
    assert torch.equal(stored[:, 1], expected_v)
    for got, expected in ((q, expected_q), (stored[:, 0], expected_k)):
        assert error_of(got, expected.double()) < {torch.float32: 1e-6, torch.bfloat16: 5e-4}[dtype]  # few last bits
