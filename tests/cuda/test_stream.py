"""Products whose weight streams through shared memory (triton/stream.py) against float64. The kernel needs a Hopper
GPU."""

from __future__ import annotations

import pytest
import torch
from torch.nn import functional

pytest.importorskip("triton")

from ratoon.layers import fp8
from ratoon.layers.cuda_ops import CudaGatedMLP, CudaLinear
from ratoon.layers.gpu import has_wgmma
from ratoon.layers.ops import RMSWeights
from ratoon.layers.product_choices import ProductKey, Stream, streams_of

pytestmark = pytest.mark.skipif(not has_wgmma(), reason="needs a Hopper GPU")

Tensor = torch.Tensor
BF16 = torch.bfloat16
CUDA = torch.device("cuda")
STREAMS = [Stream(128, 128, 4, 4, 1), Stream(64, 256, 3, 4, 6)]
SHAPES = [
    (1024, 2048),
    (1000, 1064),
    (9000, 72),
]  # [out, in]; in the last there are fewer steps than programs that would share a tile


def random(*shape: int, dtype: torch.dtype = BF16, scale: float = 1.0) -> Tensor:
    return torch.randn(*shape, device=CUDA).mul_(scale).to(dtype)


def multiply(x: Tensor, weight: Tensor, choice: Stream, arrivals: Tensor, **options: object) -> Tensor:
    from ratoon.layers.triton.stream import stream_product

    bias = options.pop("bias", None)
    return stream_product(x, weight, bias, choice, arrivals, **options)  # type: ignore[arg-type]


def arrivals_of(weight: Tensor) -> Tensor:
    return torch.zeros(-(-len(weight) // 16), dtype=torch.int32, device=CUDA)


def assert_near(actual: Tensor, exact: Tensor, limit: float = 5e-3) -> None:
    found = ((actual.double() - exact.double()).norm() / exact.double().norm()).item()
    assert found < limit, found


@pytest.mark.parametrize(
    ("choice", "shape", "dtype"),
    [
        *((choice, shape, BF16) for choice in STREAMS for shape in SHAPES),
        *((choice, SHAPES[1], torch.float16) for choice in STREAMS),
    ],
    ids=str,
)
def test_products_are_those_of_float64(choice: Stream, shape: tuple[int, int], dtype: torch.dtype) -> None:
    outputs, inputs = shape
    weight, bias = random(outputs, inputs, dtype=dtype, scale=0.02), random(outputs, dtype=dtype)
    arrivals = arrivals_of(weight)
    for rows, dependent in ((1, False), (13, True), (64, True)):
        x = random(rows, inputs + 8, dtype=dtype)[:, :inputs]
        residual = random(rows, outputs, dtype=dtype)
        product = x.double() @ weight.double().t()
        found = multiply(x, weight, choice, arrivals, bias=bias, dependent=dependent)
        assert_near(found, product + bias.double())
        expected = residual.double() + product
        added = multiply(x, weight, choice, arrivals, residual=residual, dependent=dependent)
        assert added is residual
        assert_near(added, expected)
    assert not arrivals.any()


@pytest.mark.parametrize("rows", [1, 20, 64])
@pytest.mark.parametrize("choice", [Stream(64, 128, 4, 4, 1), Stream(64, 128, 3, 4, 3)], ids=str)
def test_a_gate_is_part_of_the_product_and_a_norm_comes_before(choice: Stream, rows: int) -> None:
    x, weight, bias = random(rows, 1024, scale=3.0), random(1216, 1024, scale=0.02), random(1216)
    norm = RMSWeights(random(1024), 1e-6)
    wide = x.double()
    normed = wide / (wide.square().mean(1, keepdim=True) + norm.eps).sqrt() * norm.weight.double()
    gate, up = (normed @ weight.double().t() + bias.double()).chunk(2, dim=1)
    linear = CudaLinear(weight, bias, (), dependent=rows > 1)
    found = CudaGatedMLP(linear, linear, [choice] * 65).gate(x, norm)
    assert found.shape == (rows, 608)
    assert_near(found, functional.silu(gate) * up, 1e-2)


@pytest.mark.parametrize("rows", [1, 32])
@pytest.mark.parametrize("choice", STREAMS, ids=str)
def test_inputs_and_weights_in_8_bits_are_the_numbers_they_stand_for(choice: Stream, rows: int) -> None:
    numbers = torch.arange(256, dtype=torch.uint8, device=CUDA)
    numbers[[127, 255]] = 0  # no numbers

    def any_numbers(*shape: int) -> Tensor:  # also the smallest
        return numbers[torch.randint(0, 256, shape, device=CUDA)].view(fp8.DTYPE)

    x, weight, residual = any_numbers(rows, 2048), any_numbers(1024, 2048), random(rows, 1024)
    scales, row_scales = torch.rand(1024, device=CUDA) / 1000, torch.rand(rows, 1, device=CUDA)
    product = (x.double() * row_scales.double()) @ (weight.double() * scales.double()[:, None]).t()
    expected = residual.double() + product
    found = multiply(
        x, weight, choice, arrivals_of(weight), scales=scales, row_scales=row_scales, residual=residual
    )  # fmt: skip
    assert_near(found, expected, 1e-2)  # sums of 8-bit numbers have 14 bits on this GPU


@pytest.mark.parametrize("choice", STREAMS, ids=str)
def test_the_same_input_gives_the_same_bits(choice: Stream) -> None:
    x, weight = random(40, 4096), random(2048, 4096, scale=0.02)
    arrivals = arrivals_of(weight)
    first = multiply(x, weight, choice, arrivals, dependent=True)
    for _ in range(20):  # programs that share a tile arrive in another order
        assert torch.equal(multiply(x, weight, choice, arrivals, dependent=True), first)


@pytest.mark.parametrize(("kind", "shape"), [("linear", (4096, 4096)), ("gated", (28672, 4096))], ids=str)
@pytest.mark.parametrize("dtype", ["bfloat16", "float8_e4m3fn"])
def test_the_default_choices_of_real_shapes_run(kind: str, shape: tuple[int, int], dtype: str) -> None:
    weight, scales = random(*shape, scale=0.02), None
    exact = weight.double()
    if dtype != "bfloat16":
        stored = fp8.quantize_weight(weight)
        weight, scales, exact = stored.data, stored.extras["scales"], stored.floats().double()
    for rows in (1, 16, 32, 64):
        choice = streams_of(ProductKey(kind, *shape, dtype, rows))[0]
        linear = CudaLinear(weight, None, [choice] * (rows + 1), scales=scales, dependent=True)
        x = random(rows, shape[1])
        product = x.double() @ exact.t()
        if kind == "gated":
            gate, up = product.chunk(2, dim=1)
            found, product = CudaGatedMLP(linear, linear, linear.choices).gate(x), functional.silu(gate) * up
        else:
            found = linear(x)
        assert_near(found, product, 1e-2 if scales is None else 8e-2)
