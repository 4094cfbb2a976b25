"""Weights of floats in 8 and 4 bits: what a block loses, and which weights are encoded."""

from __future__ import annotations

import gguf
import pytest
import torch
from gguf import GGMLQuantizationType as Type

from ratoon.layers.native import library
from ratoon.layers.native_formats import QuantisedLinear
from ratoon.layers.native_ops import NativeOps
from ratoon.layers.ops import WeightUse
from ratoon.layers.products import make_product
from ratoon.layers.stored import StoredTensor

pytestmark = pytest.mark.skipif(library() is None, reason="no kernels for this processor; `make setup` builds them")

Tensor = torch.Tensor
HALF = 2.0**-11  # the largest relative error of a half


def weight_of(kind: str, rows: int = 67, length: int = 96) -> Tensor:
    numbers = torch.randn(rows, length, generator=torch.Generator().manual_seed(3))
    if kind == "with outliers":
        numbers[:, ::32] *= 20
    if kind == "far from zero":
        numbers += 5
    if kind == "small":
        numbers *= 1e-3
    return numbers


def encoded(numbers: Tensor, bits: int) -> StoredTensor:
    return NativeOps(bits=bits).quantize(StoredTensor.of_floats(numbers), WeightUse.LINEAR)


def blocks_of(numbers: Tensor) -> Tensor:
    return numbers.double().unflatten(1, (-1, 32))


@pytest.mark.parametrize("kind", ["normal", "with outliers", "far from zero", "small"])
def test_8_bits_are_off_by_half_a_step_at_most(kind: str) -> None:
    numbers = weight_of(kind)
    error = (blocks_of(encoded(numbers, 8).floats()) - blocks_of(numbers)).abs()
    step = blocks_of(numbers).abs().amax(-1, keepdim=True) / 127
    assert (error <= step * (0.5 + 127 * HALF)).all()  # a scale that was rounded down cuts the largest number


@pytest.mark.parametrize("kind", ["normal", "with outliers", "far from zero", "small"])
def test_4_bits_lose_less_than_an_even_grid_over_the_range(kind: str) -> None:
    numbers = weight_of(kind)
    blocks = blocks_of(numbers)
    low, high = blocks.amin(-1, keepdim=True), blocks.amax(-1, keepdim=True)
    step = (high - low) / 15
    even = ((blocks - low) / step).round() * step + low
    lost = (blocks_of(encoded(numbers, 4).floats()) - blocks).square().sum(-1)
    # Rounding an offset to a half moves a whole block.
    moved = 32 * (HALF * blocks.abs().amax(-1)).square() + 2 * (lost * 32).sqrt() * HALF * blocks.abs().amax(-1)
    assert (lost <= (even - blocks).square().sum(-1) + moved).all()
    assert lost.sum() < 0.95 * (even - blocks).square().sum()


@pytest.mark.parametrize("bits", [4, 8])
def test_the_blocks_are_those_of_gguf(bits: int) -> None:
    stored = encoded(weight_of("normal"), bits)
    blocks = stored.data.reshape(len(stored.data), -1).numpy()
    assert torch.equal(torch.from_numpy(gguf.quants.dequantize(blocks, Type[stored.format])), stored.floats())


@pytest.mark.parametrize("bits", [4, 8])
def test_constant_blocks_are_kept_and_numbers_that_are_none_do_not_spread(bits: int) -> None:
    numbers = weight_of("normal")
    numbers[0], numbers[1, :32], numbers[2, 40] = 0, 0.375, float("nan")
    numbers[3, 0] = float("inf")
    found = encoded(numbers, bits).floats()
    assert (found[0] == 0).all()
    assert torch.allclose(found[1, :32], numbers[1, :32], rtol=2 * HALF)
    assert not found[2, 32:64].isfinite().any()
    assert not found[3, :32].isfinite().any()
    others = torch.ones_like(numbers, dtype=torch.bool)
    others[2, 32:64], others[3, :32] = False, False
    assert found[others].isfinite().all()


def test_linear_layers_get_the_bits_that_were_asked_for_and_the_vocabulary_8() -> None:
    numbers = StoredTensor.of_floats(weight_of("normal"))
    ops = NativeOps(bits=4)
    assert ops.quantize(numbers, WeightUse.LINEAR).format == "Q4_1"
    assert ops.quantize(numbers, WeightUse.VOCABULARY).format == "Q8_0"
    assert ops.quantize(numbers, WeightUse.OTHER) is numbers
    assert NativeOps().quantize(numbers, WeightUse.LINEAR) is numbers
    odd = StoredTensor.of_floats(torch.randn(8, 40))  # blocks of 32 do not divide its inputs
    assert ops.quantize(odd, WeightUse.LINEAR) is odd


@pytest.mark.parametrize(("bits", "allowed"), [(8, 0.02), (4, 0.15)])
def test_a_product_is_near_that_of_the_floats(bits: int, allowed: float) -> None:
    weight, x = weight_of("normal", 200, 512), torch.randn(7, 512, generator=torch.Generator().manual_seed(5))
    ops = NativeOps(bits=bits)
    multiply = make_product(ops, [ops.quantize(StoredTensor.of_floats(weight), WeightUse.LINEAR)], None)
    assert isinstance(multiply, QuantisedLinear)
    expected = x @ weight.T
    assert (multiply(x) - expected).norm() < allowed * expected.norm()
