"""Attention inside runs of rows and encoders of pictures on a GPU, against the same on the CPU."""

from __future__ import annotations

import pytest
import torch

from ratoon.attention.segments import FlashSegments, attend_in_runs, build_segment_attention
from ratoon.layers.cuda_ops import CudaOps
from tests.golden.tiny_media_models import FAMILIES, qwen_input, tile_input

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")

LENGTHS = [[1], [64], [3, 3, 3, 5], [16, 16, 4, 16, 16, 4, 8, 8, 2], [33, 1, 400], [2100, 2000]]
# ‖out − exact‖ / ‖exact‖
TOLERANCES = {torch.float32: 3e-6, torch.float16: 2e-3, torch.bfloat16: 1e-2}


def distance(found: torch.Tensor, exact: torch.Tensor) -> float:
    return float((found.double().cpu() - exact.double()).norm() / exact.double().norm())


@pytest.mark.parametrize("dtype", TOLERANCES, ids=str)
@pytest.mark.parametrize("head_dim", [64, 72, 80, 100])
@pytest.mark.parametrize("lengths", LENGTHS, ids=str)
def test_runs_of_rows(lengths: list[int], head_dim: int, dtype: torch.dtype) -> None:
    fused = torch.randn(sum(lengths), 9, head_dim, generator=torch.Generator().manual_seed(0)).to(dtype)
    q, k, v = fused.float().split(3, 1)
    exact = attend_in_runs(q, k, v, lengths)
    q, k, v = fused.cuda().split(3, 1)
    attend = build_segment_attention(torch.device("cuda"), dtype)
    assert isinstance(attend, FlashSegments) == (dtype != torch.float32)
    for _ in range(2):  # the second time with the same runs
        assert distance(attend(q, k, v, lengths), exact) < TOLERANCES[dtype]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", FAMILIES)
@torch.inference_mode()
def test_encoders_give_the_rows_of_the_cpu(name: str, dtype: torch.dtype) -> None:
    tiny = FAMILIES[name]()
    if "qwen" in name:
        inputs = [qwen_input(tiny.config, (1, 8, 12)), qwen_input(tiny.config, (2, 6, 10), video=True)]
    else:
        inputs = [tile_input(tiny.config, 24, 24, seed) for seed in range(3)]
    results = []
    for model in (tiny.build(), tiny.build(CudaOps(), dtype, "cuda")):
        assert model.media_encoder is not None
        results.append(model.media_encoder.encode(inputs, build_segment_attention(model.device, model.dtype)))
    tolerance = {torch.float32: 1e-5, torch.bfloat16: 5e-2}[dtype]
    for exact, rows in zip(*results, strict=True):
        assert distance(rows, exact) < tolerance
