"""`ratoon bench products`: the table, the file it keeps, and what it says without a GPU."""

import argparse
import json
from pathlib import Path

import pytest
import torch

from ratoon.benchmarks import bench_products
from ratoon.core.errors import ConfigError
from ratoon.layers.product_choices import Panel, ProductKey, Tile, read_choices
from ratoon.layers.product_measurement import Measured

MODEL = Path(__file__).parents[3] / "bench" / "gpu" / "models" / "qwen3-0.6b"


def options(**given: object) -> argparse.Namespace:
    return argparse.Namespace(
        **{"model": str(MODEL), "device": "cuda", "dtype": "auto", "quantization": "none", "json": False, **given}
    )


def test_a_device_without_a_choice_is_refused() -> None:
    with pytest.raises(ConfigError, match="a CUDA device"):
        bench_products.run(options(device="cpu"))


def test_a_row_names_both_times_and_the_choice() -> None:
    key = ProductKey("linear", 4096, 1024, "bfloat16", 1)
    row = bench_products.format_row(Measured(key, 5.4, Tile(2, 1024, 4), 3.25))
    assert "linear 4096x1024 bfloat16 1" in row and "5.40" in row and "3.25" in row and "tile 2x1024x4" in row
    assert bench_products.format_row(Measured(key, 5.4, None, 5.4)).endswith("cuBLAS")


def test_what_was_measured_is_added_to_what_was_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("triton")
    monkeypatch.setenv("RATOON_CACHE_ROOT", str(tmp_path))
    monkeypatch.setattr("ratoon.execution.devices.resolve_device", torch.device)
    monkeypatch.setattr("ratoon.execution.devices.resolve_dtype", lambda name, device, model: getattr(torch, name))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "NVIDIA H200")
    monkeypatch.setattr(
        "ratoon.layers.product_measurement.GraphTimer",
        lambda device: lambda key, choice: 2.0 if choice is None else 1.0,
    )
    bench_products.run(options(json=True, dtype="bfloat16"))
    first = json.loads(capsys.readouterr().out)
    bench_products.run(options(json=True, dtype="float32"))
    second = json.loads(capsys.readouterr().out)
    assert first["file"] == second["file"] and "NVIDIA-H200" in first["file"]
    bench_products.run(options(json=True, quantization="fp8"))
    third = json.loads(capsys.readouterr().out)
    kept = read_choices(Path(first["file"])).measured
    assert len(kept) == sum(len(one["products"]) for one in (first, second, third)) > 75
    assert kept["linear 1024x2048 bfloat16 1"] == Panel(16, 8, 1, 1)
    assert kept["linear 1024x2048 float8_e4m3fn 1"] == Panel(16, 8, 1, 1)
