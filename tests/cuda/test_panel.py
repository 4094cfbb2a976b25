"""Products of up to 64 rows by tensor cores (triton/panel.py) against float64. The kernel needs a GPU."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("triton")

from ratoon.layers import fp8
from ratoon.layers.cuda_ops import CudaLinear
from ratoon.layers.ops import RMSWeights
from ratoon.layers.product_choices import Panel, ProductKey, default_choice
from ratoon.layers.triton.panel import panel_product

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")

Tensor = torch.Tensor
BF16 = torch.bfloat16
CUDA = torch.device("cuda")
WHOLE = [Panel(32, 8, 1, 1), Panel(64, 8, 2, 1), Panel(16, 8, 1, 1)]
SHARED = [Panel(32, 8, 1, 3), Panel(32, 4, 2, 2)]  # sums of several programs


def random(*shape: int, dtype: torch.dtype = BF16, scale: float = 1.0) -> Tensor:
    return torch.randn(*shape, device=CUDA).mul_(scale).to(dtype)


def arrivals_of(weight: Tensor) -> Tensor:
    return torch.zeros(-(-len(weight) // 16), dtype=torch.int32, device=CUDA)


def assert_near(actual: Tensor, exact: Tensor, limit: float = 5e-3) -> None:
    found = ((actual.double() - exact.double()).norm() / exact.double().norm()).item()
    assert found < limit, found


def exact_norm(x: Tensor, norm: RMSWeights) -> Tensor:
    wide = x.double()
    return wide / (wide.square().mean(1, keepdim=True) + norm.eps).sqrt() * norm.weight.double()


@pytest.mark.parametrize(
    ("panel", "shape", "dtype"),  # of the shapes [out, in] one has no whole tiles
    [
        *((panel, shape, BF16) for panel in (*WHOLE, *SHARED) for shape in ((1024, 2048), (1000, 1056))),
        *((panel, (1000, 1056), torch.float16) for panel in (WHOLE[0], SHARED[0])),
    ],
    ids=str,
)
def test_products_are_those_of_float64(panel: Panel, shape: tuple[int, int], dtype: torch.dtype) -> None:
    outputs, inputs = shape
    weight, bias = random(outputs, inputs, dtype=dtype, scale=0.02), random(outputs, dtype=dtype)
    arrivals = arrivals_of(weight)
    for rows, dependent in ((1, False), (13, True), (64, True)):
        x = random(rows, inputs + 8, dtype=dtype)[:, :inputs]
        residual = random(rows, outputs, dtype=dtype)
        product = x.double() @ weight.double().t()
        found = panel_product(x, weight, bias, panel, arrivals, dependent=dependent)
        assert_near(found, product + bias.double())
        expected = residual.double() + product
        added = panel_product(x, weight, None, panel, arrivals, residual=residual, dependent=dependent)
        assert added is residual
        assert_near(added, expected)
    assert not arrivals.any()


@pytest.mark.parametrize("panel", WHOLE, ids=str)
@pytest.mark.parametrize("rows", [1, 20, 64])
def test_norms_and_gates_are_part_of_the_product(panel: Panel, rows: int) -> None:
    x, weight, bias = random(rows, 1024, scale=3.0), random(1216, 1024, scale=0.02), random(1216)
    norm = RMSWeights(random(1024), 1e-6)
    product = exact_norm(x, norm) @ weight.double().t() + bias.double()
    gate, up = product.chunk(2, dim=1)
    dependent = rows > 1
    found = panel_product(x, weight, bias, panel, arrivals_of(weight), norm=norm, dependent=dependent)
    assert_near(found, product)
    found = panel_product(x, weight, bias, panel, arrivals_of(weight), norm=norm, gated=True, dependent=dependent)
    assert found.shape == (rows, 608)
    assert_near(found, torch.nn.functional.silu(gate) * up, 1e-2)


@pytest.mark.parametrize("panel", [*WHOLE, *SHARED], ids=str)
def test_a_row_has_the_same_bits_among_any_others(panel: Panel) -> None:
    x, weight = random(64, 2048), random(512, 2048, scale=0.02)
    arrivals = arrivals_of(weight)
    together = panel_product(x, weight, None, panel, arrivals)
    for first, rows in ((0, 1), (5, 8), (63, 1), (10, 30), (0, 64)):
        part = slice(first, first + rows)
        assert torch.equal(panel_product(x[part], weight, None, panel, arrivals), together[part])


@pytest.mark.parametrize("panel", [*WHOLE, *SHARED], ids=str)
@pytest.mark.parametrize("rows", [1, 32])
def test_weights_in_8_bits_are_the_numbers_they_stand_for(panel: Panel, rows: int) -> None:
    x, residual = random(rows, 2048), random(rows, 1024)
    numbers = torch.arange(256, dtype=torch.uint8, device=CUDA)
    numbers[[127, 255]] = 0  # no numbers
    data = numbers[torch.randint(0, 256, (1024, 2048), device=CUDA)].view(fp8.DTYPE)  # also the smallest
    scales = torch.rand(1024, device=CUDA) / 1000
    weight = data.double() * scales.double()[:, None]
    expected = residual.double() + x.double() @ weight.t()
    found = panel_product(x, data, None, panel, arrivals_of(data), scales=scales, residual=residual)
    assert_near(found, expected)


@pytest.mark.parametrize("shape", [(4096, 1024), (1024, 3072), (6144, 4096), (4096, 14336)], ids=str)
@pytest.mark.parametrize("dtype", ["bfloat16", "float8_e4m3fn"])
def test_the_default_choices_of_real_shapes_run(shape: tuple[int, int], dtype: str) -> None:
    outputs, inputs = shape
    weight, scales = random(outputs, inputs, scale=0.02), None
    exact = weight.double()
    if dtype != "bfloat16":
        stored = fp8.quantize_weight(weight)
        weight, scales, exact = stored.data, stored.extras["scales"], stored.floats().double()
    for rows in (1, 32, 64):
        choices = [default_choice(ProductKey("linear", outputs, inputs, dtype, rows))] * (rows + 1)
        linear = CudaLinear(weight, None, choices, scales=scales, dependent=True)
        x = random(rows, inputs)
        assert_near(linear(x), x.double() @ exact.t(), 5e-3 if isinstance(choices[0], Panel) else 4e-2)
