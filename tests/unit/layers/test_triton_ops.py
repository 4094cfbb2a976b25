"""CudaOps against TorchOps and against formulas in float64: on the GPU where there is one, otherwise under Triton's
interpreter on the CPU (tests/conftest.py). Sizes are odd, inputs random, outputs poisoned where they are given."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("triton")

from ratoon.layers import fp8, product_choices
from ratoon.layers.adapters import AdapterRows
from ratoon.layers.cuda_ops import CudaGatedMLP, CudaLinear, CudaOps
from ratoon.layers.ops import RMSWeights
from ratoon.layers.product_choices import (
    MAX_ROWS,
    Choice,
    Panel,
    ProductChoices,
    ProductKey,
    Split,
    Stream,
    Tile,
    default_choice,
    kernel_set,
    panels_of,
    read_choices,
    streams_of,
    write_choices,
)
from ratoon.layers.product_measurement import as_choices, candidates, keys_of, measure_products
from ratoon.layers.torch_ops import TorchOps
from ratoon.layers.triton.gemv import gemv
from ratoon.layers.triton.matmul import matmul
from ratoon.layers.triton.quantize import quantize_rows
from ratoon.models.base import LanguageModel, StreamObserver
from ratoon.models.build import build_model, collect_products, collect_shapes
from ratoon.models.dummy_source import DummySource
from tests.golden.dense_step import DenseStep
from tests.golden.tiny_models import DictSource
from tests.unit.layers.test_torch_ops import exact_layer_norm, exact_rms_norm, exact_rotary
from tests.unit.models.test_build_model import GPT2, LLAMA

Tensor = torch.Tensor
DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
SMALL = Tile(2, 16, 1)


class FewPrograms(ProductChoices):
    """Large tiles: the interpreter takes a millisecond for each program."""

    def of(self, kind: str, weight: Tensor) -> list[Choice]:
        return [None, *[Tile(16, 32, 1)] * MAX_ROWS]


ours = CudaOps(FewPrograms())
reference = TorchOps()

# Error of one or two roundings to the dtype, with room for sums and approximate functions inside.
TOLERANCES = {torch.float32: 4e-6, torch.float16: 4e-3, torch.bfloat16: 3e-2}
dtypes = pytest.mark.parametrize("dtype", TOLERANCES, ids=str)
# Triton's interpreter cuts a number off where it converts it to bfloat16.
ROUNDED = {torch.float32, torch.float16} | ({torch.bfloat16} if DEVICE.type == "cuda" else set())
KINDS = ("silu", "relu", "gelu", "gelu_new", "gelu_pytorch_tanh", "quick_gelu")


def random(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(DEVICE, dtype)


def strided(rows: int, width: int, dtype: torch.dtype, seed: int = 0) -> Tensor:
    """Rows with a gap between them."""
    return random(rows, width + 5, dtype=dtype, seed=seed)[:, :width]


def assert_close(actual: Tensor, exact: Tensor, dtype: torch.dtype) -> None:
    assert actual.dtype == dtype
    tolerance = TOLERANCES[dtype]
    torch.testing.assert_close(actual.double(), exact.double(), atol=tolerance, rtol=tolerance)


def assert_sum(total: Tensor, first: Tensor, second: Tensor) -> None:
    """With the rounding of the dtype."""
    if total.dtype in ROUNDED:
        assert torch.equal(total, first + second)
    else:
        assert_close(total, first + second, total.dtype)


@dtypes
@pytest.mark.parametrize("width", [1, 20, 37])
def test_rms_norms_follow_the_formula_and_add_in_place(dtype: torch.dtype, width: int) -> None:
    x, weight = strided(3, width, dtype) * 3, random(width, dtype=dtype, seed=1)
    residual = strided(3, width, dtype, seed=2)
    before, untouched = residual.clone(), x.clone()
    assert_close(ours.rms_norm(x, weight, 1e-3), exact_rms_norm(x, weight, 1e-3), dtype)
    normed = ours.add_rms_norm(x, residual, weight, 1e-3)
    assert_sum(residual, before, x)
    assert_close(normed, exact_rms_norm(residual, weight, 1e-3), dtype)
    assert torch.equal(x, untouched)


@pytest.mark.parametrize("dtype", sorted(ROUNDED - {torch.float32}, key=str), ids=str)
def test_rms_norm_of_16_bits_rounds_before_the_weight_is_applied(dtype: torch.dtype) -> None:
    x, weight = random(16, 64, dtype=dtype), random(64, dtype=dtype, seed=1)
    rounded = exact_rms_norm(x, torch.ones_like(weight), 1e-6).to(dtype)
    differing = ours.rms_norm(x, weight, 1e-6) != weight * rounded
    assert differing.float().mean() < 0.01  # what lies between two numbers may fall to the other side


@pytest.mark.parametrize("dtype", sorted(ROUNDED - {torch.float32}, key=str), ids=str)
def test_rms_norms_with_weights_in_float32_round_once(dtype: torch.dtype) -> None:
    x, weight = random(16, 64, dtype=dtype), 1 + random(64, seed=1) / 50
    expected = exact_rms_norm(x, weight, 1e-6).to(dtype)
    heads = x.reshape(4, 4, 64).clone()
    ours.head_rms_norm(heads, weight, 1e-6)
    for found in (ours.rms_norm(x, weight, 1e-6), heads.view(16, 64)):
        assert (found != expected).float().mean() < 0.01  # what lies between two numbers may fall to the other side


@dtypes
def test_layer_norms_follow_the_formula_and_add_in_place(dtype: torch.dtype) -> None:
    x, weight, bias = strided(3, 37, dtype) + 2, random(37, dtype=dtype, seed=1), random(37, dtype=dtype, seed=2)
    residual = strided(3, 37, dtype, seed=3)
    before = residual.clone()
    assert_close(ours.layer_norm(x, weight, bias, 1e-3), exact_layer_norm(x, weight, bias, 1e-3), dtype)
    assert_close(ours.layer_norm(x, weight, None, 1e-3), exact_layer_norm(x, weight, 0 * bias, 1e-3), dtype)
    normed = ours.add_layer_norm(x, residual, weight, bias, 1e-3)
    assert_sum(residual, before, x)
    assert_close(normed, exact_layer_norm(residual, weight, bias, 1e-3), dtype)


@dtypes
def test_head_norm_changes_a_strided_view_and_nothing_beside_it(dtype: torch.dtype) -> None:
    fused, weight = random(3, 15, 20, dtype=dtype), random(20, dtype=dtype, seed=1)
    before = fused.clone()
    ours.head_rms_norm(fused[:, 1:12], weight, 1e-6)
    assert_close(fused[:, 1:12], exact_rms_norm(before[:, 1:12], weight, 1e-6), dtype)
    assert torch.equal(fused[:, :1], before[:, :1])
    assert torch.equal(fused[:, 12:], before[:, 12:])


@dtypes
def test_each_head_may_have_a_weight_of_its_own(dtype: torch.dtype) -> None:
    fused, weight = random(3, 15, 20, dtype=dtype), random(9, 20, dtype=dtype, seed=1)
    before = fused.clone()
    ours.head_rms_norm(fused[:, 2:11], weight, 1e-6)
    for head in range(9):
        expected = exact_rms_norm(before[:, 2 + head], weight[head], 1e-6)
        assert_close(fused[:, 2 + head], expected, dtype)
    assert torch.equal(fused[:, :2], before[:, :2]) and torch.equal(fused[:, 11:], before[:, 11:])


@dtypes
@pytest.mark.parametrize("rotary_dim", [20, 12])
def test_rotary_turns_strided_queries_and_keys_in_place_and_leaves_values(dtype: torch.dtype, rotary_dim: int) -> None:
    fused = random(3, 3 + 2 + 2, 20, dtype=dtype)
    before = fused.clone()
    angles = torch.arange(50)[:, None] * torch.logspace(0, -3, rotary_dim // 2)
    cos_sin = torch.cat([angles.cos(), angles.sin()], dim=1).to(DEVICE)  # [50, rotary_dim]
    positions = torch.tensor([7, 0, 49], device=DEVICE)
    q, k, v = fused.split([3, 2, 2], dim=1)
    ours.rotary(q, k, positions, cos_sin)
    assert_close(fused[:, :5], exact_rotary(before[:, :5], positions, cos_sin), dtype)
    assert torch.equal(v, before[:, 5:])
    assert torch.equal(fused[1], before[1])  # position 0 is not turned
    assert torch.equal(fused[:, :5, rotary_dim:], before[:, :5, rotary_dim:])


@pytest.mark.parametrize("rotary_dim", [20, 12])
def test_rotary_turns_each_pair_by_the_position_on_its_axis(rotary_dim: int) -> None:
    heads = [random(4, count, 20, seed=count) for count in (3, 2)]
    cos_sin = random(50, rotary_dim, seed=1)
    positions = torch.randint(0, 50, (3, 9), generator=torch.Generator().manual_seed(0)).to(DEVICE)[:, :4]
    axes = torch.tensor([0, 2, 1, 1, 0, 2, 2, 0, 1, 1][: rotary_dim // 2], dtype=torch.int32, device=DEVICE)
    expected = [tensor.clone() for tensor in heads]
    TorchOps().rotary(*expected, positions, cos_sin, axes)
    ours.rotary(*heads, positions, cos_sin, axes)
    for got, wanted in zip(heads, expected, strict=True):
        assert_close(got, wanted.double(), torch.float32)


@pytest.mark.slow  # Triton's interpreter
@dtypes
@pytest.mark.parametrize("kind", KINDS)
def test_activations_alone_and_gating_are_those_of_torch(dtype: torch.dtype, kind: str) -> None:
    x = strided(3, 42, dtype) * 3
    assert_close(ours.activation(x, kind), reference.activation(x, kind), dtype)
    assert_close(ours.gated_activation(x, kind), reference.gated_activation(x, kind), dtype)
    if kind == "silu":
        assert_close(ours.silu_and_mul(x), reference.silu_and_mul(x), dtype)


def test_no_rows_are_no_error() -> None:
    x, weight = random(0, 16), random(16, seed=1)
    assert ours.rms_norm(x, weight, 1e-6).shape == (0, 16)
    assert ours.make_linear(random(5, 16), None)(x).shape == (0, 5)
    assert ours.silu_and_mul(x).shape == (0, 8)


def exact_linear(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    product = x.double() @ weight.double().T
    return product if bias is None else product + bias.double()


@pytest.mark.slow  # Triton's interpreter
@dtypes
@pytest.mark.parametrize("rows", [1, 2, 3, 4])
@pytest.mark.parametrize(("outputs", "width"), [(7, 37), (4, 32)])
@pytest.mark.one_in(5)
def test_products_of_few_rows_follow_the_formula(dtype: torch.dtype, rows: int, outputs: int, width: int) -> None:
    x, weight = strided(rows, width, dtype), random(outputs, width, dtype=dtype, seed=1)
    bias = random(outputs, dtype=dtype, seed=2)
    scaled = 4 * TOLERANCES[dtype]  # sums of `width` terms
    for own_bias in (None, bias):
        product = gemv(x, weight, own_bias, SMALL)
        assert product.dtype == dtype
        torch.testing.assert_close(product.double(), exact_linear(x, weight, own_bias), atol=scaled, rtol=scaled)


@pytest.mark.slow  # Triton's interpreter
@dtypes
@pytest.mark.parametrize("rows", [1, 3])
@pytest.mark.one_in(5)
def test_fused_products_give_what_their_parts_give(dtype: torch.dtype, rows: int) -> None:
    x, weight, bias = random(rows, 37, dtype=dtype), random(10, 37, dtype=dtype, seed=1), random(10, dtype=dtype)
    norm = RMSWeights(random(37, dtype=dtype, seed=3), 1e-5)
    scaled = 8 * TOLERANCES[dtype]

    def check(actual: Tensor, expected: Tensor) -> None:
        torch.testing.assert_close(actual, expected, atol=scaled, rtol=scaled)

    normed = reference.rms_norm(x, *norm)
    product = reference.make_linear(weight, bias)(normed)
    check(gemv(x, weight, bias, SMALL, norm=norm), product)
    check(gemv(x, weight, bias, SMALL, norm=norm, gated="silu"), reference.silu_and_mul(product))
    residual = random(rows, 10, dtype=dtype, seed=4)
    expected = residual + product
    assert gemv(normed, weight, bias, SMALL, residual=residual) is residual
    check(residual, expected)


@pytest.mark.slow  # Triton's interpreter
@pytest.mark.parametrize("rows", [1, 4, 5, 9])
def test_linear_layers_and_gated_halves_agree_with_torch_for_any_number_of_rows(rows: int) -> None:
    x, gate_up, down = random(rows, 24), random(2 * 20, 24, seed=1), random(24, 20, seed=2)
    bias = random(40, seed=3)
    by_ours = ours.make_gated_mlp(ours.make_linear(gate_up, bias), ours.make_linear(down, None))
    by_torch = reference.make_gated_mlp(reference.make_linear(gate_up, bias), reference.make_linear(down, None))
    torch.testing.assert_close(by_ours(x), by_torch(x), atol=2e-4, rtol=2e-5)
    torch.testing.assert_close(ours.make_linear(gate_up, bias)(x), reference.make_linear(gate_up, bias)(x))
    other = lambda y: y[:, :20]  # noqa: E731 – a product of another format
    mixed = ours.make_gated_mlp(ours.make_linear(gate_up, bias), other)
    torch.testing.assert_close(mixed(x), other(reference.silu_and_mul(x @ gate_up.T + bias)), atol=2e-4, rtol=2e-5)


@pytest.mark.slow  # Triton's interpreter
@pytest.mark.parametrize("dtype", sorted(ROUNDED, key=str), ids=str)  # the interpreter multiplies no bfloat16 tiles
@pytest.mark.parametrize("splits", [1, 4])
@pytest.mark.one_in(3)
def test_products_by_tiles_follow_the_formula_and_a_row_has_the_same_bits_in_any_batch(
    dtype: torch.dtype, splits: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    tile = Split(rows=16, outputs=16, inputs=16, splits=splits, num_warps=4, num_stages=2)
    x, weight = strided(19, 75, dtype), random(21, 75, dtype=dtype, seed=1)
    bias, residual = random(21, dtype=dtype, seed=2), random(19, 21, dtype=dtype, seed=3)
    scaled = 8 * TOLERANCES[dtype]
    product = exact_linear(x, weight, bias)
    few = [matmul(row, weight, bias, tile) for row in x.split(7)]  # with several splits: parts, then their sum
    monkeypatch.setattr("ratoon.layers.triton.matmul.ENOUGH_TILES", 1)  # one program for a tile
    many = matmul(x, weight, bias, tile)
    torch.testing.assert_close(many.double(), product, atol=scaled, rtol=scaled)
    assert torch.equal(torch.cat(few), many)
    expected = residual.double() + product
    assert matmul(x, weight, bias, tile, residual) is residual
    torch.testing.assert_close(residual.double(), expected, atol=scaled, rtol=scaled)


def test_batch_invariant_operations_give_a_row_the_same_bits_alone_and_among_others() -> None:
    invariant = CudaOps(batch_invariant=True)
    gate_up, down = random(2 * 20, 24, seed=1), random(24, 20, seed=2)
    mlp = invariant.make_gated_mlp(invariant.make_linear(gate_up, None), invariant.make_linear(down, None))
    x = random(6, 24)
    together = mlp(x)
    torch.testing.assert_close(together, reference.silu_and_mul(x @ gate_up.T) @ down.T, atol=2e-4, rtol=2e-5)
    for row in range(0, 6, 2):
        assert torch.equal(mlp(x[row : row + 1])[0], together[row])


def test_weights_in_8_bits_are_within_a_sixteenth_of_each_number_or_of_the_smallest_step() -> None:
    weight = random(32, 48, seed=1) * torch.logspace(-3, 3, 32, device=DEVICE)[:, None]
    weight[5] = 0
    stored = fp8.quantize_weight(weight)
    error = (stored.floats() - weight).abs()
    smallest = stored.extras["scales"][:, None] * 2.0**-9
    assert stored.format == fp8.FORMAT and stored.data.dtype == torch.float8_e4m3fn
    assert (error <= torch.maximum(weight.abs() / 16, smallest)).all()
    assert fp8.can_quantize((32, 48)) and not fp8.can_quantize((32, 40)) and not fp8.can_quantize((32,))


def test_operations_quantise_linear_layers_and_neither_tables_nor_the_head() -> None:
    config = replace(LLAMA, vocab_size=32, hidden_size=16, intermediate_size=32, num_kv_heads=2, head_dim=8)
    source = DummySource(collect_shapes(config))
    model = build_model(config, source, CudaOps(quantization="fp8"), DEVICE, torch.bfloat16)
    attention, mlp = model.layers[0].attention, model.layers[0].mlp
    products = (attention.qkv.linear, attention.output, mlp.gate_up, mlp.down)
    assert all(linear.multiply.weight.dtype == torch.float8_e4m3fn for linear in products)
    assert all(len(linear.multiply.scales) == len(linear.multiply.weight) for linear in products)
    assert model.embed.weight.data.dtype == model.lm_head.multiply.weight.dtype == torch.bfloat16
    plain = build_model(config, source, CudaOps(), DEVICE, torch.bfloat16)
    weight, linear = plain.layers[1].mlp.down.multiply.weight, model.layers[1].mlp.down.multiply
    torch.testing.assert_close(linear.weight.float() * linear.scales[:, None], weight.float(), rtol=0.08, atol=1e-3)


@pytest.mark.slow  # Triton's interpreter
@pytest.mark.parametrize("rows", [1, 3])
def test_products_of_few_rows_with_weights_in_8_bits_are_those_of_the_numbers_they_stand_for(rows: int) -> None:
    x, norm = random(rows, 48), RMSWeights(random(48, seed=3), 1e-5)
    stored, bias = fp8.quantize_weight(random(32, 48, seed=1)), random(32, seed=2)
    scales, exact = stored.extras["scales"], reference.make_linear(stored.floats(), bias)
    product = gemv(x, stored.data, bias, SMALL, scales=scales)
    torch.testing.assert_close(product, exact(x), atol=1e-4, rtol=1e-5)
    gated = gemv(x, stored.data, bias, SMALL, scales=scales, norm=norm, gated="silu")
    expected = reference.silu_and_mul(exact(reference.rms_norm(x, *norm)))
    torch.testing.assert_close(gated, expected, atol=1e-4, rtol=1e-5)


@pytest.mark.parametrize("in_8_bits", [False, True])
def test_a_stream_gets_normed_rows_in_the_bits_of_its_weight(monkeypatch: pytest.MonkeyPatch, in_8_bits: bool) -> None:
    """The kernel itself needs a GPU (tests/cuda/test_stream.py)."""
    given: list[tuple[Tensor, dict[str, Any]]] = []

    def multiply(x: Tensor, *args: Any, **options: Any) -> Tensor:
        given.append((x, options))
        return random(3, 16)

    monkeypatch.setattr("ratoon.layers.triton.stream.stream_product", multiply)
    x, norm, stored = random(3, 48), RMSWeights(random(48, seed=3), 1e-5), fp8.quantize_weight(random(32, 48, seed=1))
    scales = stored.extras["scales"] if in_8_bits else None
    linear = CudaLinear(stored.data if in_8_bits else stored.floats(), None, (), scales=scales)
    CudaGatedMLP(linear, linear, [Stream(64, 128, 4, 4, 1)] * 4).gate(x, norm)
    ((rows, options),) = given
    assert options["gated"] and options["scales"] is scales
    if in_8_bits:
        assert rows.dtype == torch.float8_e4m3fn
        rows = rows.float() * options["row_scales"]
    tolerance = {"rtol": 0.6, "atol": 0.1} if in_8_bits else {"rtol": 1e-5, "atol": 1e-5}  # as the interpreter rounds
    torch.testing.assert_close(rows, reference.rms_norm(x, *norm), **tolerance)


@pytest.mark.parametrize("with_norm", [False, True])
def test_rows_in_8_bits_use_the_whole_range_and_are_near_what_they_were(with_norm: bool) -> None:
    x, norm = strided(5, 37, torch.float32) * 100, RMSWeights(random(37, seed=1), 1e-5)
    x[3] = 0
    numbers, scales = quantize_rows(x, norm if with_norm else None)
    exact = reference.rms_norm(x, *norm) if with_norm else x
    assert numbers.dtype == torch.float8_e4m3fn and scales.shape == (5, 1)
    assert numbers.float().abs().amax(1).tolist() == [448.0, 448.0, 448.0, 0.0, 448.0]
    torch.testing.assert_close(scales[:, 0], (exact.abs().amax(1) / 448).clamp(min=1e-12))
    if DEVICE.type == "cuda":  # the interpreter rounds some numbers up to half of what they are
        error = (numbers.float() * scales - exact).abs()
        assert (error <= torch.maximum(exact.abs() / 15, scales * 2.0**-9)).all()


def test_rows_in_8_bits_after_a_gate_are_those_of_its_activation() -> None:
    x = strided(5, 74, torch.float32)
    numbers, scales = quantize_rows(x, is_gate=True)
    expected, expected_scales = quantize_rows(reference.silu_and_mul(x))
    torch.testing.assert_close(scales, expected_scales)
    assert (numbers.float() - expected.float()).abs().mean() < 0.1  # of up to 448: few fall to the other side


# The operations in models: norms before products and additions behind them are theirs, except under adapters.


class Recorder(StreamObserver):
    """The residual stream after each layer, and how often an update was left to the next one."""

    num_layers_read = 0

    def __init__(self) -> None:
        self.streams: list[Tensor] = []
        self.num_updates = 0

    def observe(self, layer: int, stream: Tensor, update: Tensor | None) -> None:
        self.num_updates += update is not None
        self.streams.append(stream.clone() if update is None else stream + update)


def run(model: LanguageModel, lengths: list[int], slots: Tensor | None = None) -> tuple[Tensor, Recorder]:
    """Steps of these lengths over one sequence: the logits of all tokens."""
    step, recorder, logits, start = DenseStep(), Recorder(), [], 0
    for length in lengths:
        positions = torch.arange(start, start + length)
        step.adapters = None if slots is None else AdapterRows(slots[positions])
        states = model.forward(positions % 11, positions, step, observers=[recorder])
        logits.append(model.compute_logits(states.normed, step.adapters))
        start += length
    return torch.cat(logits), recorder


@pytest.mark.slow  # Triton's interpreter
@pytest.mark.skipif(DEVICE.type == "cuda", reason="the dense step is on the CPU; tests/cuda has engines")
@pytest.mark.parametrize("family", ["Qwen3ForCausalLM", "GPT2LMHeadModel"])
@torch.inference_mode()
def test_models_give_the_same_logits_and_streams_with_either_operations(family: str) -> None:
    config = replace(GPT2 if family == GPT2.architecture else LLAMA, architecture=family, num_layers=2)
    random_weights = DummySource(collect_shapes(config), seed=5)
    source = DictSource({name: random_weights.read(name).data * 5 for name in random_weights.shapes()})
    models = [build_model(config, source, ops, DEVICE, torch.float32) for ops in (ours, reference)]
    close = {"atol": 1e-5, "rtol": 1e-5}
    (logits, recorder), (expected, expected_recorder) = (run(model, [1, 5]) for model in models)
    torch.testing.assert_close(logits, expected, **close)
    torch.testing.assert_close(recorder.streams, expected_recorder.streams, **close)
    assert recorder.num_updates == 0 and expected_recorder.num_updates > 0
    for model in models:
        generator = torch.Generator().manual_seed(1)
        for target in model.adapter_targets.values():
            num_outputs, num_inputs = target._shape
            target.open_slots(1, 2, DEVICE, torch.float32)
            a, b = (torch.randn(*shape, generator=generator) for shape in ((2, num_inputs), (num_outputs, 2)))
            target.load(0, a, b)
    slots = torch.tensor([0, -1, 0, 0, -1], dtype=torch.int32)
    (logits, _), (adapted, _) = (run(model, [5], slots) for model in models)
    torch.testing.assert_close(logits, adapted, **close)
    assert not torch.allclose(adapted, expected[:5])


# The choice between kernels


def test_the_default_choice_depends_on_the_key_alone_and_zero_rows_have_no_kernel() -> None:
    key = ProductKey("linear", 4096, 1024, "bfloat16", 1)
    assert default_choice(key) == default_choice(key) is not None
    assert default_choice(key._replace(rows=0)) is None
    assert isinstance(default_choice(key._replace(rows=64)), Panel)
    assert default_choice(key._replace(rows=65)) is None
    large = key._replace(outputs=4096, inputs=14336)
    assert isinstance(default_choice(large), Tile)
    assert default_choice(large._replace(rows=2)) is None  # the library's is faster
    assert isinstance(default_choice(key._replace(dtype="float32")), Tile)
    assert isinstance(default_choice(key._replace(inputs=1000)), Tile)  # no whole steps
    weight = torch.empty(4096, 1024, dtype=torch.bfloat16, device="meta")
    assert ProductChoices().of("linear", weight)[1] == default_choice(key)


def test_large_weights_stream_on_gpus_that_can() -> None:
    key = ProductKey("linear", 4096, 14336, "bfloat16", 32)
    assert isinstance(default_choice(key, has_wgmma=True), Stream)
    assert default_choice(key, has_wgmma=False) is None
    assert isinstance(default_choice(key._replace(rows=1), has_wgmma=True), Tile)
    assert isinstance(default_choice(key._replace(rows=1, dtype="float8_e4m3fn"), has_wgmma=True), Stream)
    assert isinstance(default_choice(key._replace(rows=64, dtype="float8_e4m3fn"), has_wgmma=True), Stream)
    assert default_choice(key._replace(rows=64), has_wgmma=True) is None  # the library's is as fast
    assert default_choice(key._replace(outputs=128256), has_wgmma=True) is None
    assert default_choice(key._replace(dtype="float32"), has_wgmma=True) is None
    assert default_choice(key._replace(inputs=14337), has_wgmma=True) is None  # rows that can't be copied in boxes
    assert isinstance(default_choice(key._replace(inputs=1024), has_wgmma=True), Panel)
    weight = torch.empty(4096, 14336, dtype=torch.bfloat16, device="meta")
    assert ProductChoices(has_wgmma=True).of("linear", weight)[32] == default_choice(key, has_wgmma=True)
    assert any(isinstance(choice, Stream) for choice in candidates(key, has_wgmma=True))
    assert not any(isinstance(choice, Stream) for choice in candidates(key))


@pytest.mark.parametrize("kind", ["linear", "gated"])
@pytest.mark.parametrize("rows", [1, 8, 16, 32, 64])
@pytest.mark.parametrize("dtype", ["bfloat16", "float8_e4m3fn"])
def test_streams_fit_into_shared_memory_and_survive_a_file(kind: str, rows: int, dtype: str, tmp_path: Path) -> None:
    key = ProductKey(kind, 28672 if kind == "gated" else 4096, 4096, dtype, rows)
    streams = streams_of(key)
    assert streams and len(set(streams)) == len(streams)
    for stream in streams:
        weight_rows = stream.outputs * (2 if kind == "gated" else 1)
        stages = stream.stages * stream.step_bytes * (weight_rows + max(8, rows))
        assert stream.stages >= 2 and stages + 2048 <= 232448
        assert stream.outputs % (16 * stream.num_warps) == 0 and stream.num_warps % 4 == 0
        write_choices(tmp_path / "choices.json", ProductChoices({str(key): stream}))
        assert read_choices(tmp_path / "choices.json").measured == {str(key): stream}


@pytest.mark.parametrize("kind", ["linear", "gated"])
@pytest.mark.parametrize("rows", [1, 16, 32, 64])
@pytest.mark.parametrize("dtype", ["bfloat16", "float8_e4m3fn"])
@pytest.mark.parametrize(("outputs", "inputs"), [(4096, 1024), (1024, 2048), (6144, 1024), (1024, 3072), (576, 576)])
def test_panels_cover_a_weight_and_fit_into_registers(
    kind: str, rows: int, dtype: str, outputs: int, inputs: int
) -> None:
    panels = panels_of(ProductKey(kind, outputs, inputs, dtype, rows))
    assert len(set(panels)) == len(panels)
    for panel in panels:
        num_outputs = 2 * panel.outputs if kind == "gated" else panel.outputs
        num_warps = panel.k_warps * panel.out_warps
        assert num_warps <= 16 and panel.outputs % (16 * panel.out_warps) == 0
        assert num_outputs * inputs / panel.splits <= 256 * 32 * num_warps
        assert kind == "linear" or panel.splits == 1  # a gate needs whole sums


def test_measured_choices_replace_the_defaults_and_survive_a_file(tmp_path: Path) -> None:
    weight = torch.empty(48, 32, device="meta")
    keys = [ProductKey("linear", 48, 32, "float32", rows) for rows in range(5)]
    eight = keys[0]._replace(rows=8)
    file = tmp_path / "deep" / "choices.json"
    write_choices(
        file,
        ProductChoices({str(keys[1]): Panel(32, 8, 1, 3), str(keys[2]): None, str(eight): Split(16, 64, 64, 4, 4, 3)}),
    )
    choices = read_choices(file).of("linear", weight)
    assert choices[1] == Panel(32, 8, 1, 3)
    assert choices[2] is None  # the library's
    assert choices[3:5] == [default_choice(key) for key in keys[3:]]
    assert choices[5:9] == [Split(16, 64, 64, 4, 4, 3)] * 4  # up to the number of rows that was measured
    assert choices[9:] == [None] * 56
    assert [path.name for path in file.parent.iterdir()] == ["choices.json"]


def file_of(products: object, kernels: str | None = None) -> str:
    return json.dumps({"kernels": kernels or kernel_set(), "products": products})


GARBAGE = ["", "{", "null", "[]", json.dumps({"kernels": kernel_set()}), '{"products": {}}', file_of([1])]
GARBAGE += [file_of({"a": tile}) for tile in (5, [1, 2], [3, 16, 4], ["1", 16, 4], [16, 8, 2, 1])]
GARBAGE += [
    file_of({"a": tile})
    for tile in ([128, 64, 4, 4, 1], [32, 128, 4, 4, 1], [64, 128, 4, 8, 1], [128, 128, 16, 4, 1], [128, 128, 4, 2, 1])
]


def test_choices_that_were_measured_with_other_kernels_are_not_used(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "choices.json"
    file.write_text(file_of({"a": [2, 1024, 4]}))
    assert read_choices(file).measured == {"a": Tile(2, 1024, 4)}
    file.write_text(file_of({"a": [2, 1024, 4]}, kernels="others"))
    assert read_choices(file).measured == {} and "measure again: ratoon bench products" in caplog.text
    before = kernel_set()
    monkeypatch.setitem(product_choices.KERNELS, Tile, "panel")  # another source
    kernel_set.cache_clear()
    assert kernel_set() != before
    monkeypatch.undo()
    kernel_set.cache_clear()
    assert kernel_set() == before


@pytest.mark.parametrize("content", GARBAGE)
def test_a_damaged_file_of_choices_is_ignored(tmp_path: Path, content: str) -> None:
    file = tmp_path / "choices.json"
    file.write_text(content)
    assert read_choices(file).measured == {}
    assert read_choices(tmp_path / "missing").measured == {}
    assert read_choices(tmp_path).measured == {}  # a folder


def test_a_measurement_takes_the_fastest_and_the_library_where_the_gain_is_noise() -> None:
    keys = keys_of("linear", 64, 1024, "bfloat16")
    assert [key.rows for key in keys] == [1, 2, 3, 4, 8, 16, 32, 64]
    assert [key.rows for key in keys_of("gated", 64, 1024, "bfloat16")] == [1, 2, 3, 4, 8, 16, 32, 64]
    best = {1: Tile(2, 1024, 4), 8: Split(16, 64, 128, 4, 4, 4)}

    def timer(key: ProductKey, choice: Choice) -> float:
        if choice is None:
            return 10.0
        return 5.0 if choice == best.get(key.rows) else 9.9

    choices = as_choices(measure_products(keys, timer)).of("linear", torch.empty(64, 1024, dtype=torch.bfloat16))
    assert choices[1] == best[1]
    assert choices[2:5] == [None] * 3
    assert choices[5:9] == [best[8]] * 4
    assert choices[9:] == [None] * 56


def test_the_products_of_a_model_are_those_that_it_fuses() -> None:
    config = replace(LLAMA, tie_word_embeddings=False)  # hidden 8, inner 12, 2 heads and 1 of keys of 4, vocabulary 11
    expected = [("linear", 16, 8), ("linear", 8, 8), ("linear", 24, 8), ("linear", 8, 12), ("gated", 24, 8)]
    assert collect_products(config) == [*expected, ("linear", 11, 8)]
