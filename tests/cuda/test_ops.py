"""The operations of CudaOps at the sizes of real models, against float64: eagerly, with programmatic dependent launch,
and in a CUDA graph."""

from __future__ import annotations

import math
import statistics
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

pytest.importorskip("triton")

from ratoon.layers.cuda_ops import CudaOps
from ratoon.layers.ops import RMSWeights, WeightUse
from ratoon.layers.product_choices import Split, Tile
from ratoon.layers.stored import StoredTensor
from ratoon.layers.torch_ops import TorchOps
from ratoon.layers.triton.gemv import gemv
from ratoon.layers.triton.matmul import matmul
from ratoon.models.device_stream import DeviceStream
from ratoon.models.dummy_source import STANDARD_DEVIATION, DummySource, counted_normals
from ratoon.models.safetensors_source import SafetensorsSource

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")

Tensor = torch.Tensor
BF16, F16 = torch.bfloat16, torch.float16
SHAPES = [(4096, 1024), (1024, 2048), (6144, 1024), (1024, 3072), (4096, 14336), (4099, 1000)]  # [out, in]
CUDA = torch.device("cuda")


def random(*shape: int, dtype: torch.dtype = BF16, scale: float = 1.0) -> Tensor:
    return torch.randn(*shape, device=CUDA).mul_(scale).to(dtype)


def distance(actual: Tensor, exact: Tensor) -> float:
    """Relative to the size of the exact result; NaN where a number is one."""
    exact = exact.double()
    return ((actual.double() - exact).norm() / exact.norm()).item()


def assert_near(actual: Tensor, exact: Tensor, limit: float = 1e-2) -> None:
    found = distance(actual, exact)
    assert found < limit, found


@pytest.mark.parametrize(
    ("shape", "dtype"),
    [*((shape, BF16) for shape in SHAPES), *((SHAPES[i], dtype) for i in (1, -1) for dtype in (torch.float32, F16))],
    ids=str,
)
def test_products_of_few_rows_are_those_of_float64(shape: tuple[int, int], dtype: torch.dtype) -> None:
    outputs, inputs = shape
    weight, bias = random(outputs, inputs, dtype=dtype, scale=0.02), random(outputs, dtype=dtype)
    linear = CudaOps().make_linear(weight, bias)
    limit = 1e-6 if dtype == torch.float32 else 5e-3
    for rows in (1, 2, 3, 4, 5, 64):
        x = random(rows, inputs + 8, dtype=dtype)[:, :inputs]
        assert_near(linear(x), x.double() @ weight.double().t() + bias.double(), limit)


@pytest.mark.parametrize("rows", [1, 4])
@pytest.mark.parametrize("tile", [Tile(1, 1024, 4), Tile(2, 512, 2), Tile(4, 1024, 8), Tile(8, 256, 4)], ids=str)
def test_fused_products_of_all_tiles_follow_the_formula_with_and_without_dependent_launch(
    rows: int, tile: Tile
) -> None:
    x, weight = random(rows, 1024), random(6144, 1024, scale=0.02)
    norm = RMSWeights(random(1024), 1e-6)
    wide = x.double()
    normed = wide / (wide.square().mean(1, keepdim=True) + norm.eps).sqrt() * norm.weight.double()
    product = normed @ weight.double().t()
    gate, up = product.chunk(2, dim=1)
    residual = random(rows, 6144)
    expected = {"plain": product, "gated": torch.nn.functional.silu(gate) * up, "added": residual.double() + product}
    for dependent in (False, True):
        found = {
            "plain": gemv(x, weight, None, tile, norm=norm, dependent=dependent),
            "gated": gemv(x, weight, None, tile, norm=norm, gated="silu", dependent=dependent),
            "added": gemv(x, weight, None, tile, norm=norm, residual=residual.clone(), dependent=dependent),
        }
        for name, result in found.items():
            assert_near(result, expected[name])


@pytest.mark.parametrize("width", [1024, 4096, 5000])
@pytest.mark.parametrize("rows", [1, 33])
def test_norms_are_those_of_torch(width: int, rows: int) -> None:
    ours, reference = CudaOps(), TorchOps()
    x, residual, weight, bias = random(rows, width), random(rows, width), random(width), random(width)
    assert_near(ours.rms_norm(x, weight, 1e-6), reference.rms_norm(x, weight, 1e-6), 1e-3)
    assert_near(ours.layer_norm(x, weight, bias, 1e-6), reference.layer_norm(x, weight, bias, 1e-6), 1e-3)
    other = residual.clone()
    assert_near(ours.add_rms_norm(x, residual, weight, 1e-6), reference.add_rms_norm(x, other, weight, 1e-6), 1e-3)
    assert torch.equal(residual, other)
    heads = random(rows, 24, 128)
    expected = heads.clone()
    reference.head_rms_norm(expected[:, 3:20], weight[:128], 1e-6)
    ours.head_rms_norm(heads[:, 3:20], weight[:128], 1e-6)
    assert_near(heads, expected, 1e-3)


def stack(ops: CudaOps, num_layers: int, hidden: int, inner: int):
    """Layers without attention, as a model has them."""
    layers = []
    for _ in range(num_layers):
        linears = [
            ops.make_linear(random(*shape, scale=0.02), None)
            for shape in ((2 * hidden, hidden), (hidden, 2 * hidden), (2 * inner, hidden), (hidden, inner))
        ]
        first, second = ops.fuse(linears[0]), ops.fuse(linears[1])
        mlp = ops.fuse(ops.make_gated_mlp(linears[2], linears[3]))
        assert first is not None and second is not None and mlp is not None
        layers.append((first, second, mlp, RMSWeights(random(hidden), 1e-6), RMSWeights(random(hidden), 1e-6)))

    def run(x: Tensor) -> Tensor:
        stream = x.clone()
        for first, second, mlp, norm, mlp_norm in layers:
            second(first(stream, norm, None), None, stream)
            mlp(stream, mlp_norm, stream)
        return stream

    return run


@pytest.mark.parametrize("rows", [1, 3, 4, 8, 40])
@pytest.mark.parametrize("dependent", [False, True])
@torch.inference_mode()
def test_a_stack_of_layers_gives_the_same_bits_in_a_graph(rows: int, dependent: bool) -> None:
    torch.manual_seed(1)
    run = stack(CudaOps(dependent_launch=dependent), 4, 1024, 3072)
    x = random(rows, 1024)
    expected = run(x)  # also compiles what the graph uses
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        run(x)
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        result = run(x)
    for _ in range(3):
        result.fill_(float("nan"))
        graph.replay()
        torch.cuda.synchronize()
        assert torch.equal(result, expected)
    torch.manual_seed(1)
    other = stack(CudaOps(dependent_launch=not dependent), 4, 1024, 3072)
    assert torch.equal(other(x), expected)  # a dependent launch changes the time, not the numbers


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_batch_invariant_products_have_the_same_bits_for_a_row_in_any_batch(shape: tuple[int, int]) -> None:
    outputs, inputs = shape
    weight, x = random(outputs, inputs, scale=0.02), random(2500, inputs)
    linear = CudaOps(batch_invariant=True).make_linear(weight, None)
    together = linear(x)
    assert_near(together, x.double() @ weight.double().t(), 5e-3)
    for first, rows in ((0, 1), (7, 1), (2499, 1), (3, 2), (100, 5), (64, 64), (1, 300), (900, 1600)):
        part = slice(first, first + rows)
        assert torch.equal(linear(x[part]), together[part]), rows


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("sizes", [(1024, 3072), (4096, 14336), (576, 1536), (200, 264)], ids=str)
def test_batch_invariant_layers_have_the_same_bits_for_a_row_in_any_batch(
    sizes: tuple[int, int], dtype: torch.dtype
) -> None:
    """With the norm before, and the activation and the addition behind, by all kernels that there are for them."""
    hidden, inner = sizes
    ops = CudaOps(batch_invariant=True, dependent_launch=True)
    gate_up, down = random(2 * inner, hidden, scale=0.02).to(dtype), random(hidden, inner, scale=0.02).to(dtype)
    mlp = ops.make_gated_mlp(ops.make_linear(gate_up, None), ops.make_linear(down, None))
    qkv = ops.make_linear(gate_up[: inner + 8], random(inner + 8).to(dtype))
    norm = RMSWeights(random(hidden).to(dtype), 1e-6)
    x, residual = random(700, hidden).to(dtype), random(700, hidden).to(dtype)
    together = ops.fuse(mlp)(x, norm, residual.clone()), ops.fuse(qkv)(x, norm, None)
    assert all(part.isfinite().all() for part in together)
    for first, rows in ((0, 1), (699, 1), (3, 8), (11, 9), (64, 32), (5, 64), (7, 65), (100, 128), (1, 256), (8, 511)):
        part = slice(first, first + rows)
        got = ops.fuse(mlp)(x[part], norm, residual[part].clone()), ops.fuse(qkv)(x[part], norm, None)
        assert torch.equal(got[0], together[0][part]) and torch.equal(got[1], together[1][part]), rows


@pytest.mark.parametrize("rows", [5, 8, 33, 64])
def test_products_with_a_split_sum_are_those_of_float64(rows: int) -> None:
    x, weight, residual = random(rows, 3072), random(1024, 3072, scale=0.02), random(rows, 1024)
    tile = Split(rows=16 if rows <= 16 else 64, outputs=64, inputs=128, splits=8, num_warps=4, num_stages=4)
    expected = residual.double() + x.double() @ weight.double().t()
    assert_near(matmul(x, weight, None, tile, residual), expected, 5e-3)


@pytest.mark.parametrize("rows", [1, 4, 5, 64, 257, 1000])
def test_products_with_weights_in_8_bits_are_near_those_of_the_numbers_they_stand_for(rows: int) -> None:
    ops = CudaOps(quantization="fp8")
    x, residual, norm = random(rows, 1024), random(rows, 3072), RMSWeights(random(1024), 1e-6)
    stored = ops.quantize(StoredTensor.of_floats(random(3072, 1024, scale=0.02)), WeightUse.LINEAR)
    kept = ops.find_format(stored)
    assert kept is not None
    linear = kept.make_linear([stored], None)
    weight = stored.floats().double()
    limit = 5e-3 if rows <= 64 else 4e-2  # of more rows the activations have 8 bits too
    assert_near(linear(x), x.double() @ weight.t(), limit)
    normed = TorchOps().rms_norm(x, *norm).double()
    expected = residual.double() + normed @ weight.t()
    fused = ops.fuse(linear)
    assert fused is not None
    assert_near(fused(x, norm, residual), expected, limit)
    down = ops.quantize(StoredTensor.of_floats(random(512, 1536)), WeightUse.LINEAR)
    mlp = ops.make_gated_mlp(linear, kept.make_linear([down], None))
    assert mlp(x).shape == (rows, 512) and mlp(x).isfinite().all()


def test_random_weights_are_made_on_the_device_and_depend_on_seed_and_name() -> None:
    shapes = {"a.weight": (5000, 1000), "b.weight": (5000, 1000), "norm.weight": (8,)}
    source, there = DummySource(shapes, seed=1), DeviceStream(CUDA)
    first = source.read("a.weight", destination=there).data
    assert first.is_cuda
    assert torch.equal(first, DummySource(shapes, seed=1).read("a.weight", destination=there).data)
    assert not torch.equal(first, source.read("b.weight", destination=there).data)
    assert first.std().item() == pytest.approx(STANDARD_DEVIATION, rel=0.01)
    assert abs(first.mean().item()) < 1e-4
    torch.testing.assert_close(
        counted_normals(3, (1000,), CUDA).cpu(), counted_normals(3, (1000,), torch.device("cpu")), atol=1e-5, rtol=1e-4
    )
    times = []
    for _ in range(3):
        torch.cuda.synchronize()
        start = time.perf_counter()
        source.read("a.weight", destination=there)
        torch.cuda.synchronize()
        times.append(time.perf_counter() - start)
    numbers_a_second = math.prod(shapes["a.weight"]) / statistics.median(times)
    assert numbers_a_second > 5e8  # the aim is 8e9 numbers in a few seconds


def test_files_are_streamed_to_the_device(tmp_path: Path) -> None:
    tensors = {f"{index}.weight": random(3000, 1111, dtype=dtype).cpu() for index, dtype in enumerate([BF16] * 6)}
    save_file(tensors, tmp_path / "model.safetensors")
    source, stream = SafetensorsSource(tmp_path), DeviceStream(CUDA, chunk_bytes=2**20 + 1, num_buffers=3)
    with ThreadPoolExecutor(4) as threads:
        found = list(threads.map(lambda name: source.read(name, None, stream), tensors))
    for stored, expected in zip(found, tensors.values(), strict=True):
        assert stored.data.is_cuda
        assert torch.equal(stored.data.cpu(), expected)
    stream.close()
