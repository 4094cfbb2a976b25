"""The prefill kernel of Hopper GPUs, which no interpreter runs, against products in float64."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch

from ratoon.attention import triton_prefill
from ratoon.attention.triton_backend import TritonAttentionBackend
from ratoon.layers.attention import AttentionLayer, CrossAttentionLayer
from ratoon.layers.gpu import has_wgmma
from tests.cuda.test_attention import LLAMA, QWEN, TOLERANCES, Step, error_of, replace_cache

pytestmark = pytest.mark.skipif(not has_wgmma(), reason="needs a Hopper GPU")

BF16, FP8 = torch.bfloat16, torch.float8_e4m3fn
# Cached and new tokens: a tile that ends with a block, one that does not, several tiles, and short ones between them
MIXED = ([0, 96, 1023, 0, 777, 2000, 5, 640], [700, 32, 1, 128, 129, 300, 1, 640])


@pytest.fixture(autouse=True)
def served(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """How many launches there were; a test that ran on the other kernel would prove nothing."""
    launches: list[int] = []
    attend = triton_prefill.Prefill.attend

    def count(*args: object) -> None:
        launches.append(1)
        attend(*args)  # type: ignore[arg-type]

    monkeypatch.setattr(triton_prefill.Prefill, "attend", count)
    return launches


LAYERS = {
    "llama": LLAMA,
    "qwen": QWEN,
    "7 heads of 64": AttentionLayer(0, 14, 2, 64, 0.125),
    "alone": AttentionLayer(0, 3, 3, 128, 0.1),
    "80": AttentionLayer(0, 4, 4, 80, 0.1),
    "sinks": AttentionLayer(
        0, 64, 8, 64, 0.125, window=128, sinks=torch.linspace(-4, 4, 64, device="cuda" if has_wgmma() else "cpu")
    ),
}


@pytest.mark.parametrize(
    ("name", "dtype"),
    [*((name, BF16) for name in LAYERS), ("llama", torch.float16), ("7 heads of 64", torch.float16)],
    ids=str,
)
def test_mixed_requests(name: str, dtype: torch.dtype, served: list[int]) -> None:
    step = Step(LAYERS[name], *MIXED, dtype)
    assert error_of(step.run(TritonAttentionBackend()), step.exact()) < TOLERANCES[dtype]
    assert served


@pytest.mark.parametrize("window", [1, 100, 129, 500, 5000])
def test_a_window_over_freed_blocks(window: int, served: list[int]) -> None:
    step = Step(replace(LLAMA, window=window), *MIXED, BF16)
    for row, computed in enumerate(step.computed):
        step.tables[row, : max(0, computed - window + 1) // 16] = 0
    expected = replace_cache(step).exact()
    assert error_of(step.run(TritonAttentionBackend()), expected) < 1e-2
    assert served


@pytest.mark.parametrize("block_size", [8, 32, 128, 256])
def test_blocks_of_other_sizes(block_size: int, served: list[int]) -> None:
    step = Step(LLAMA, *MIXED, BF16, block_size)
    assert error_of(step.run(TritonAttentionBackend()), step.exact()) < 1e-2
    assert served


def test_rows_that_see_all_keys(served: list[int]) -> None:
    lengths = [700, 31, 512, 128]
    step = Step(AttentionLayer(0, 12, 12, 64, 0.125, causal=False), lengths, lengths, BF16)
    assert error_of(step.run(TritonAttentionBackend()), step.exact()) < 1e-2
    step = Step(CrossAttentionLayer(0, 12, 64, 0.125), [1500, 31, 512], [90, 400, 200], BF16)
    assert error_of(step.run(TritonAttentionBackend()), step.exact()) < 1e-2
    assert len(served) == 2


def test_values_behind_the_sequence_are_not_read(served: list[int]) -> None:
    """The rest of a request's last block may hold anything."""
    step = Step(LLAMA, [0, 600], [700, 45], BF16)
    exact = step.exact()
    for row, length in enumerate(step.lengths):
        step.cache[step.tables[row, (length - 1) // 16], :, :, length % 16 :] = float("nan")
    assert error_of(step.run(TritonAttentionBackend()), exact) < 1e-2
    assert served


def test_more_tiles_than_multiprocessors(served: list[int]) -> None:
    step = Step(LLAMA, [0] * 16, [500] * 16, BF16)
    backend = TritonAttentionBackend()
    first = step.run(backend)
    assert error_of(first, step.exact()) < 1e-2
    assert all(torch.equal(first, step.run(backend)) for _ in range(20))  # nothing races
    assert served


@pytest.mark.parametrize("layer", [LLAMA, replace(LLAMA, window=300)], ids=["full", "window"])
def test_keys_and_values_in_8_bits_are_widened(layer: AttentionLayer, served: list[int]) -> None:
    step = Step(layer, [0, 100, 1023, 777], [700, 300, 1, 400], BF16, kv_dtype=FP8)
    assert error_of(step.run(TritonAttentionBackend()), step.exact()) < 1e-2
    assert served


def test_a_captured_step_with_other_lengths(served: list[int]) -> None:
    step = Step(LLAMA, [100, 2000, 333, 64], [60, 50, 300, 70], BF16)
    backend = TritonAttentionBackend()
    inputs = replace(step.inputs(), is_padded=True, max_query_len=480)
    backend.attend(LLAMA, step.q, (step.cache,), backend.build_metadata(inputs))
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = backend.attend(LLAMA, step.q, (step.cache,), backend.build_metadata(inputs))
    for computed, scheduled in (([0, 5, 0, 0], [60, 50, 300, 70]), ([7, 1700, 3, 9], [1, 250, 200, 29])):
        step.scheduled, step.lengths = scheduled, np.add(computed, scheduled).astype(np.int32)
        now = step.inputs()
        inputs.query_start_loc_device.copy_(now.query_start_loc_device)
        inputs.seq_lens_device.copy_(now.seq_lens_device)
        out.fill_(float("nan"))
        graph.replay()
        assert error_of(out, step.exact()) < 1e-2
    assert served
