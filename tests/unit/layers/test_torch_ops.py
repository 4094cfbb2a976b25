"""TorchOps against formulas written out in float64."""

from __future__ import annotations

import math

import pytest
import torch

from ratoon.layers.torch_ops import TorchOps

Tensor = torch.Tensor
ops = TorchOps()

# Error of one rounding to the dtype, with room for the sums inside.
TOLERANCES = {torch.float32: 2e-6, torch.float16: 4e-3, torch.bfloat16: 3e-2, torch.float64: 1e-6}
dtypes = pytest.mark.parametrize("dtype", TOLERANCES, ids=str)


def random(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def assert_close(actual: Tensor, exact: Tensor, dtype: torch.dtype) -> None:
    assert actual.dtype == dtype
    tolerance = TOLERANCES[dtype]
    torch.testing.assert_close(actual.double(), exact, atol=tolerance, rtol=tolerance)


def exact_rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    x = x.double()
    return x / (x.square().mean(-1, keepdim=True) + eps).sqrt() * weight.double()


def exact_layer_norm(x: Tensor, weight: Tensor, bias: Tensor, eps: float) -> Tensor:
    x = x.double()
    centred = x - x.mean(-1, keepdim=True)
    return centred / (centred.square().mean(-1, keepdim=True) + eps).sqrt() * weight.double() + bias.double()


def exact_rotary(x: Tensor, positions: Tensor, cos_sin: Tensor) -> Tensor:
    """Pairs (i, i + half) of each head are complex numbers, and turning is a multiplication."""
    half = cos_sin.shape[1] // 2
    x = x.double()
    pairs = torch.complex(x[..., :half], x[..., half : 2 * half])
    turns = torch.complex(cos_sin[:, :half].double(), cos_sin[:, half:].double())[positions][:, None]
    turned = pairs * turns
    return torch.cat([turned.real, turned.imag, x[..., 2 * half :]], dim=-1)


@dtypes
def test_linear_multiplies_by_the_rows_of_the_weight_and_adds_the_bias(dtype: torch.dtype) -> None:
    x, weight, bias = random(3, 8, dtype=dtype), random(5, 8, dtype=dtype, seed=1), random(5, dtype=dtype, seed=2)
    product = x.double() @ weight.double().T
    assert_close(ops.make_linear(weight, None)(x), product, dtype)
    assert_close(ops.make_linear(weight, bias)(x), product + bias.double(), dtype)


def test_embedding_gives_new_memory_that_may_be_written_to() -> None:
    table = random(6, 4)
    rows = ops.embedding(table, torch.tensor([5, 0, 5]))
    assert torch.equal(rows, table[[5, 0, 5]])
    before = table.clone()
    rows.add_(1)
    assert torch.equal(table, before)


@dtypes
def test_rms_norm_divides_by_the_root_of_the_mean_square(dtype: torch.dtype) -> None:
    x, weight = random(4, 32, dtype=dtype) * 3, random(32, dtype=dtype, seed=1)
    assert_close(ops.rms_norm(x, weight, 1e-3), exact_rms_norm(x, weight, 1e-3), dtype)


def test_rms_norm_of_values_whose_squares_overflow_float16_is_finite() -> None:
    x = random(2, 16, dtype=torch.float16) * 1000
    weight = torch.ones(16, dtype=torch.float16)
    assert_close(ops.rms_norm(x, weight, 1e-6), exact_rms_norm(x, weight, 1e-6), torch.float16)


def test_rms_norm_in_bfloat16_rounds_before_the_weight_is_applied() -> None:
    x, weight = random(64, 64, dtype=torch.bfloat16), random(64, dtype=torch.bfloat16, seed=1)
    rounded = exact_rms_norm(x, torch.ones(64), 1e-6).to(torch.bfloat16)
    assert torch.equal(ops.rms_norm(x, weight, 1e-6), weight * rounded)


def test_rms_norm_in_bfloat16_with_a_weight_in_float32_rounds_once() -> None:
    x, weight = random(64, 64, dtype=torch.bfloat16), 1 + random(64, seed=1) / 50
    found = ops.rms_norm(x, weight, 1e-6)
    assert found.dtype == torch.bfloat16
    assert (found != exact_rms_norm(x, weight, 1e-6).to(torch.bfloat16)).float().mean() < 0.01


@dtypes
def test_layer_norm_takes_mean_and_deviation_away(dtype: torch.dtype) -> None:
    x = random(4, 32, dtype=dtype) + 2
    weight, bias = random(32, dtype=dtype, seed=1), random(32, dtype=dtype, seed=2)
    assert_close(ops.layer_norm(x, weight, bias, 1e-3), exact_layer_norm(x, weight, bias, 1e-3), dtype)
    assert_close(ops.layer_norm(x, weight, None, 1e-3), exact_layer_norm(x, weight, 0 * bias, 1e-3), dtype)


def test_fused_norms_add_to_the_residual_in_place_and_leave_the_update_alone() -> None:
    x, weight, bias = random(4, 32), random(32, seed=2), random(32, seed=3)
    untouched = x.clone()
    residual = random(4, 32, seed=1)
    total = residual.double() + x.double()
    normed = ops.add_rms_norm(x, residual, weight, 1e-6)
    assert_close(residual, total, torch.float32)
    assert_close(normed, exact_rms_norm(total, weight, 1e-6), torch.float32)
    residual = random(4, 32, seed=1)
    normed = ops.add_layer_norm(x, residual, weight, bias, 1e-6)
    assert_close(residual, total, torch.float32)
    assert_close(normed, exact_layer_norm(total, weight, bias, 1e-6), torch.float32)
    assert torch.equal(x, untouched)


@dtypes
def test_head_norm_changes_a_strided_view_and_nothing_beside_it(dtype: torch.dtype) -> None:
    fused, weight = random(3, 5, 16, dtype=dtype), random(16, dtype=dtype, seed=1)
    before = fused.clone()
    ops.head_rms_norm(fused[:, 1:3], weight, 1e-6)
    assert_close(fused[:, 1:3], exact_rms_norm(before[:, 1:3], weight, 1e-6), dtype)
    assert torch.equal(fused[:, :1], before[:, :1])
    assert torch.equal(fused[:, 3:], before[:, 3:])


@dtypes
def test_each_head_may_have_a_weight_of_its_own(dtype: torch.dtype) -> None:
    fused, weight = random(3, 15, 20, dtype=dtype), random(9, 20, dtype=dtype, seed=1)
    before = fused.clone()
    ops.head_rms_norm(fused[:, 2:11], weight, 1e-6)
    for head in range(9):
        expected = exact_rms_norm(before[:, 2 + head], weight[head], 1e-6)
        assert_close(fused[:, 2 + head], expected, dtype)
    assert torch.equal(fused[:, :2], before[:, :2]) and torch.equal(fused[:, 11:], before[:, 11:])


@dtypes
@pytest.mark.parametrize("rotary_dim", [16, 8])
def test_rotary_turns_strided_queries_and_keys_in_place_and_leaves_values(dtype: torch.dtype, rotary_dim: int) -> None:
    fused = random(3, 4 + 2 + 2, 16, dtype=dtype)
    before = fused.clone()
    angles = torch.arange(50)[:, None] * torch.logspace(0, -3, rotary_dim // 2)
    cos_sin = torch.cat([angles.cos(), angles.sin()], dim=1)  # [50, rotary_dim]
    positions = torch.tensor([7, 0, 49])
    q, k, v = fused.split([4, 2, 2], dim=1)
    ops.rotary(q, k, positions, cos_sin)
    assert_close(fused[:, :6], exact_rotary(before[:, :6], positions, cos_sin), dtype)
    assert torch.equal(v, before[:, 6:])
    assert torch.equal(fused[1], before[1])  # position 0 is not turned
    assert torch.equal(fused[:, :6, rotary_dim:], before[:, :6, rotary_dim:])


@dtypes
def test_silu_and_mul_gates_the_second_half_with_the_first(dtype: torch.dtype) -> None:
    x = random(3, 20, dtype=dtype)
    gate, up = x[:, :10].double(), x[:, 10:].double()
    before = x.clone()
    assert_close(ops.silu_and_mul(x), gate / (1 + (-gate).exp()) * up, dtype)
    assert torch.equal(x, before)


def test_activations_follow_their_formulas() -> None:
    x = random(5, 40) * 3
    wide = x.double()
    inner = math.sqrt(2 / math.pi) * (wide + 0.044715 * wide**3)
    tanh_form = 0.5 * wide * (1 + inner.tanh())
    expected = {
        "silu": wide / (1 + (-wide).exp()),
        "relu": wide.clamp(min=0),
        "gelu": 0.5 * wide * (1 + torch.erf(wide / math.sqrt(2))),
        "gelu_new": tanh_form,
        "gelu_pytorch_tanh": tanh_form,
        "quick_gelu": wide / (1 + (-1.702 * wide).exp()),
    }
    for kind, exact in expected.items():
        assert_close(ops.activation(x, kind), exact, torch.float32)


def test_every_operation_runs_on_the_meta_device() -> None:
    def meta(*shape: int) -> Tensor:
        return torch.empty(*shape, device="meta")

    ids = torch.empty(3, dtype=torch.int64, device="meta")
    x, residual, weight = meta(3, 8), meta(3, 8), meta(8)
    assert ops.embedding(meta(9, 8), ids).shape == (3, 8)
    assert ops.make_linear(meta(5, 8), meta(5))(x).shape == (3, 5)
    assert ops.rms_norm(x, weight, 1e-6).shape == ops.add_rms_norm(x, residual, weight, 1e-6).shape == (3, 8)
    assert ops.layer_norm(x, weight, weight, 1e-6).shape == (3, 8)
    assert ops.add_layer_norm(x, residual, weight, weight, 1e-6).shape == (3, 8)
    ops.head_rms_norm(meta(3, 2, 8), weight, 1e-6)
    ops.rotary(meta(3, 4, 8), meta(3, 2, 8), ids, meta(16, 8))
    assert ops.silu_and_mul(x).shape == (3, 4)
    assert ops.activation(x, "gelu_new").device.type == "meta"
