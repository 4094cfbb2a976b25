"""What only encoders have: convolution over time as a product, and the bias by distance."""

from __future__ import annotations

import pytest
import torch

from ratoon.core.config import RelativePositions
from ratoon.layers.conv import TimeConvolution
from ratoon.layers.embedding import SinusoidalPositions
from ratoon.layers.linear import ColumnParallelLinear, RowParallelLinear
from ratoon.layers.mlp import ACTIVATIONS, MLP
from ratoon.layers.native.recording import Arena, Recording
from ratoon.layers.native_ops import NativeOps, native_ops_reasons
from ratoon.layers.ops import Ops
from ratoon.layers.relative_positions import bucket_of_distance, relative_bias
from ratoon.layers.torch_ops import TorchOps
from ratoon.layers.weights import Weights
from tests.unit.layers.test_layers import RandomSource, weights_of

CPU = torch.device("cpu")
ALL_OPS: list[Ops] = [TorchOps()]
if not native_ops_reasons(CPU, torch.float32):
    ALL_OPS.append(NativeOps())


@pytest.mark.parametrize("ops", ALL_OPS, ids=lambda ops: ops.name)
@pytest.mark.parametrize(("stride", "frames"), [(1, 10), (2, 10), (2, 7), (1, 1)])
def test_a_convolution_over_time_is_that_of_torch_with_channels_last(ops: Ops, stride: int, frames: int) -> None:
    source = RandomSource(weight=(6, 5, 3), bias=(6,))
    convolution = TimeConvolution(Weights(source, ops, CPU, torch.float32), 5, 6, stride)
    x = torch.randn(3, 5, frames)
    expected = torch.conv1d(x, source.tensors["weight"], source.tensors["bias"], stride=stride, padding=1)
    torch.testing.assert_close(convolution(x.transpose(1, 2)), expected.transpose(1, 2), atol=1e-5, rtol=0)


@pytest.mark.skipif(len(ALL_OPS) == 1, reason="no kernels for this processor")
def test_a_convolution_is_in_few_bits_where_linear_layers_are() -> None:
    ops = NativeOps(bits=8)
    source = RandomSource(weight=(6, 32, 3), bias=(6,))
    convolution = TimeConvolution(Weights(source, ops, CPU, torch.float32), 32, 6, 2)
    assert [kept["format"] for kept in ops.kept_formats()] == ["Q8_0"]
    x = torch.randn(2, 32, 10)
    expected = torch.conv1d(x, source.tensors["weight"], source.tensors["bias"], stride=2, padding=1)
    error = convolution(x.transpose(1, 2)) - expected.transpose(1, 2)
    # Of 96 products each factor is off by up to half a step of 1/127 of the largest number
    assert error.square().mean().sqrt() < 2 / 127 * expected.square().mean().sqrt()


# ---- products of encoders ----


@pytest.mark.skipif(len(ALL_OPS) == 1, reason="no kernels for this processor")
def test_a_product_of_an_encoder_has_16_bits_at_least_and_a_row_the_same_ones_in_any_batch() -> None:
    random = torch.Generator().manual_seed(0)
    weight, bias = torch.randn(70, 600, generator=random), torch.randn(70, generator=random)
    x = torch.randn(300, 600, generator=random)
    multiply = NativeOps().for_encoders().make_linear(weight, bias)
    found = multiply(x)
    terms = x.double().abs() @ weight.double().abs().T + bias.abs()
    error = (found - (x.double() @ weight.double().T + bias)).abs() / terms
    assert error.max() < 2**-16 and error.square().mean().sqrt() < 2**-19
    for rows in (slice(0, 1), slice(5, 22), slice(40, 299)):
        assert torch.equal(multiply(x[rows]), found[rows])


@pytest.mark.skipif(len(ALL_OPS) == 1, reason="no kernels for this processor")
def test_numbers_stay_as_they_are_where_the_setting_says_so() -> None:
    ops = NativeOps(keep_formats=False)
    weight, x = torch.randn(40, 96), torch.randn(20, 96)
    assert ops.for_encoders() is ops
    assert torch.equal(ops.for_encoders().make_linear(weight, None)(x), NativeOps().make_linear(weight, None)(x))


@pytest.mark.skipif(len(ALL_OPS) == 1, reason="no kernels for this processor")
@pytest.mark.parametrize("kind", ACTIVATIONS)
def test_the_activation_of_an_encoder_is_a_part_of_its_product(kind: str) -> None:
    ops = NativeOps().for_encoders()
    source = RandomSource(**{"up.weight": (70, 48), "up.bias": (70,), "down.weight": (48, 70)})
    weights = Weights(source, ops, CPU, torch.float32)
    up = ColumnParallelLinear(weights / "up", 48, 70, bias=True)
    mlp = MLP(up, RowParallelLinear(weights / "down", 70, 48), ops, kind)
    x = torch.randn(37, 48)
    with_a_kernel_of_its_own = mlp.down(ops.activation(mlp.up(x), kind))
    with Recording(Arena()) as recording:
        found = mlp(x)
    assert [name for name, _ in recording.calls] == ["ratoon_encoder_linear"] * 2 and not recording.obstacles
    assert torch.equal(found, with_a_kernel_of_its_own)


def test_sinusoidal_positions_are_made_in_the_asked_dtype() -> None:
    positions = SinusoidalPositions(weights_of(RandomSource(), torch.bfloat16), 6, 4)
    rows = positions(torch.tensor([0, 3]))
    assert rows.dtype == torch.bfloat16
    assert rows[0].tolist() == [0, 0, 1, 1]
    torch.testing.assert_close(rows[1].float(), torch.tensor([0.1411, 0.0300, -0.9900, 0.9996]), atol=5e-3, rtol=0)


def test_buckets_are_single_distances_at_first_then_widen_and_end() -> None:
    relative = RelativePositions(num_buckets=8, max_distance=16)
    back = bucket_of_distance(-torch.arange(20), relative, both_ways=False).tolist()
    assert back == [0, 1, 2, 3, 4, 4, 5, 5, 6, 6, 6, 6, 7, 7, 7, 7, 7, 7, 7, 7]
    both = bucket_of_distance(torch.tensor([-30, -2, -1, 0, 1, 2, 30]), relative, both_ways=True).tolist()
    assert both == [3, 2, 1, 0, 5, 6, 7]


def test_the_bias_of_a_distance_stands_as_far_from_the_middle_of_the_table() -> None:
    source = RandomSource(weight=(8, 2))
    relative = RelativePositions(num_buckets=8, max_distance=16)
    bias = relative_bias(weights_of(source), relative, num_heads=2, max_position=5, both_ways=True)
    table = source.tensors["weight"]
    assert bias.shape == (2, 9)
    assert torch.equal(bias[:, 4], table[0])  # the query's own key
    assert torch.equal(bias[:, 3], table[1])  # the key before it
    assert torch.equal(bias[:, 5], table[5])  # the key behind it
