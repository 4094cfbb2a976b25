"""The floors that GPU figures are compared with, against numbers worked out by hand."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

GPU_FOLDER = Path(__file__).parents[3] / "bench" / "gpu"


@pytest.fixture
def floors(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(str(GPU_FOLDER))
    from compare_parts import floors

    return floors


@pytest.mark.parametrize(
    ("name", "layer_weights", "head_weights", "bytes_per_token"),
    [
        # a layer: q, k, v and o; gate, up and down
        ("qwen3-0.6b", 28 * (6144 * 1024 + 9216 * 1024), 151936 * 1024, 28 * 2 * 8 * 128 * 2),
        ("llama3-8b", 32 * (10240 * 4096 + 43008 * 4096), 128256 * 4096, 32 * 2 * 8 * 128 * 2),
    ],
)
def test_shapes_are_counted_from_their_configs(
    floors: Any, name: str, layer_weights: int, head_weights: int, bytes_per_token: int
) -> None:
    shape = floors.Shape.read(GPU_FOLDER / "models" / name)
    assert (shape.layer_weights, shape.head_weights) == (layer_weights, head_weights)
    assert 2 * shape.numbers_per_token == bytes_per_token


def test_a_decode_step_reads_weights_and_context_and_a_prefill_multiplies(floors: Any) -> None:
    shape = floors.Shape.read(GPU_FOLDER / "models" / "qwen3-0.6b")
    bf16, fp8 = floors.Precision(), floors.Precision(1, 1)
    weights = 2 * (shape.layer_weights + shape.head_weights)
    assert floors.decode([0.0]).seconds(shape, bf16) == pytest.approx(weights / 4.39e12)
    context = 32 * 256 * 114_688
    assert floors.decode([256.0] * 32).seconds(shape, bf16) == pytest.approx((weights + context) / 4.39e12)
    assert floors.decode([256.0] * 32).seconds(shape, fp8) == pytest.approx((weights + context) / 2 / 4.39e12)
    operations = 2 * (8192 * shape.layer_weights + shape.head_weights) + 4 * (8192 * 8193 / 2) * 28 * 16 * 128
    assert floors.prefill(8192).seconds(shape, bf16) == pytest.approx(operations / 790e12)


def test_beams_read_their_prompt_once(floors: Any) -> None:
    shape = floors.Shape.read(GPU_FOLDER / "models" / "qwen3-0.6b")
    one = floors.beam_search(1, 700, 1, 3, shape, floors.Precision())
    many = floors.beam_search(1, 700, 32, 3, shape, floors.Precision())
    own = 2 * 31 * 114_688 * (1 + 2) / 2 / 4.39e12  # tokens of 31 more beams, in the second and third step
    assert many - one == pytest.approx(own, rel=1e-6)


def test_throughput_ends_with_the_longest_answer(floors: Any) -> None:
    shape = floors.Shape.read(GPU_FOLDER / "models" / "qwen3-0.6b")
    alone = floors.throughput([(1, 100)], shape, floors.Precision())
    with_short = floors.throughput([(1, 100), (1, 1)], shape, floors.Precision())
    assert with_short == pytest.approx(alone * 101 / 100, rel=1e-3)


def test_only_models_that_read_all_they_have_in_a_step_have_a_floor(floors: Any) -> None:
    described = {folder.name for folder in (GPU_FOLDER / "models").iterdir() if floors.Shape.describes(folder)}
    assert {"qwen3-0.6b", "llama3-8b"} <= described
    assert described.isdisjoint({"qwen3-30b-a3b", "deepseek-v2-lite", "gpt-oss-20b", "gemma3-4b", "granite4-h-350m"})
