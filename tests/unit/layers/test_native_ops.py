"""The CPU kernels against float64, and their promise: a row's result depends on nothing but the row."""

import pytest
import torch

from ratoon.core.worker import LOOKED_UP
from ratoon.layers.native_ops import NativeOps, encode, native_ops_reasons, set_native_threads
from ratoon.layers.ops import WeightUse
from ratoon.layers.products import make_product
from ratoon.layers.stored import StoredTensor
from ratoon.layers.torch_ops import TorchOps

pytestmark = pytest.mark.skipif(
    bool(native_ops_reasons(torch.device("cpu"), torch.float32)),
    reason="no kernels for this processor; `make setup` builds them",
)

UNIT = 2.0**-24  # the largest relative error of one rounding


@pytest.fixture
def ops():
    return NativeOps()


def random(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("rows", [1, 2, 3, 4, 5, 7, 8, 31, 97, 200])
@pytest.mark.parametrize(("inner", "outer"), [(576, 960), (63, 50), (1, 1), (130, 17)])
@pytest.mark.parametrize("with_bias", [False, True])
def test_linear_equals_the_float64_product(ops, rows, inner, outer, with_bias):
    x, weight, bias = random(rows, inner), random(outer, inner, seed=1) / inner**0.5, random(outer, seed=2)
    got = ops.make_linear(weight, bias if with_bias else None)(x)
    expected = x.double() @ weight.double().T + (bias.double() if with_bias else 0)
    # No order of a sum is off by more than a rounding of its terms' sizes for each addition that a term goes through.
    sizes = x.double().abs() @ weight.double().abs().T + (bias.double().abs() if with_bias else 0)
    additions = min(inner, 64) + -(-inner // 64) + 1
    assert ((got - expected).abs() <= additions * UNIT * sizes).all()


# Outputs that end within a tile of one, two and three panels; depths that end within a stretch, a piece and a sum.
@pytest.mark.parametrize(("inner", "outer"), [(576, 960), (63, 50), (1536, 576), (131, 33), (1700, 80), (769, 70)])
def test_a_row_of_a_product_is_the_same_to_the_bit_in_any_batch(ops, inner, outer):
    x = random(200, inner)
    multiply = ops.make_linear(random(outer, inner, seed=1), random(outer, seed=2))
    whole = multiply(x)
    for first, last in [(0, 1), (5, 7), (17, 20), (3, 8), (60, 125), (199, 200)]:
        assert torch.equal(multiply(x[first:last]), whole[first:last])


@pytest.mark.parametrize("rows", [1, 7, 40, 200])
def test_a_product_is_the_same_to_the_bit_on_any_number_of_threads(ops, rows):
    x, weight = random(rows, 800), random(650, 800, seed=1)
    try:
        set_native_threads(1)
        alone = ops.make_linear(weight, None)(x)
        for threads in (2, 3, 8, 17):
            set_native_threads(threads)
            assert torch.equal(ops.make_linear(weight, None)(x), alone)
    finally:
        set_native_threads(2)


def test_linear_reads_rows_of_a_wider_tensor(ops):
    wide = random(6, 100)
    multiply = ops.make_linear(random(20, 40, seed=1), None)
    assert torch.equal(multiply(wide[:, 10:50]), multiply(wide[:, 10:50].contiguous()))


@pytest.mark.parametrize("width", [576, 61, 3])
@pytest.mark.parametrize("rows", [1, 5, 300])
def test_norms_equal_the_reference_and_add_to_the_residual(ops, rows, width):
    reference = TorchOps()
    x, residual, weight, bias = (
        random(rows, width),
        random(rows, width, seed=1),
        random(width, seed=2),
        random(width, seed=3),
    )
    torch.testing.assert_close(ops.rms_norm(x, weight, 1e-5), reference.rms_norm(x, weight, 1e-5), rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(
        ops.layer_norm(x, weight, bias, 1e-5), reference.layer_norm(x, weight, bias, 1e-5), rtol=1e-5, atol=1e-5
    )
    for name, arguments in [("add_rms_norm", (weight, 1e-5)), ("add_layer_norm", (weight, bias, 1e-5))]:
        ours, theirs = residual.clone(), residual.clone()
        got = getattr(ops, name)(x, ours, *arguments)
        torch.testing.assert_close(got, getattr(reference, name)(x, theirs, *arguments), rtol=1e-5, atol=1e-5)
        assert torch.equal(ours, theirs)


def test_rotation_and_head_norm_work_in_place_on_views_of_the_fused_product(ops):
    reference = TorchOps()
    fused = random(7, 15, 64)
    copy = fused.clone()
    positions, table = torch.tensor([0, 5, 9, 3, 2, 31, 7]), random(32, 48, seed=1)
    for implementation, tensor in ((ops, fused), (reference, copy)):
        q, k, _ = tensor.split([9, 3, 3], dim=1)
        implementation.head_rms_norm(q, torch.linspace(0.5, 2, 64), 1e-6)
        implementation.rotary(q, k, positions, table)
    torch.testing.assert_close(fused, copy, rtol=1e-5, atol=1e-5)
    assert torch.equal(fused[:, 12:], copy[:, 12:])


def test_each_head_may_have_a_weight_of_its_own(ops):
    fused, weight = random(7, 15, 64), random(9, 64, seed=1)
    copy = fused.clone()
    ops.head_rms_norm(fused[:, 2:11], weight, 1e-6)
    for head in range(9):
        ops.head_rms_norm(copy[:, 2 + head : 3 + head], weight[head], 1e-6)
    assert torch.equal(fused, copy)


@pytest.mark.parametrize("width", [1536, 37])
def test_activations_equal_the_float64_functions(ops, width):
    """Each rounds about four times for an element, and none is steeper than its argument is large. The polynomial of
    the error function rounds twice more."""
    exact, x = TorchOps(), random(9, 2 * width) * 8
    gate, up = x.double().chunk(2, dim=1)
    error = (ops.silu_and_mul(x) - exact.silu_and_mul(x.double())).abs()
    assert (error <= 5 * UNIT * (gate * up).abs()).all()
    for kind in ("silu", "relu", "gelu", "gelu_new", "gelu_pytorch_tanh", "quick_gelu"):
        error = (ops.activation(x, kind) - exact.activation(x.double(), kind)).abs()
        num_roundings = 6 if kind == "gelu" else 4
        assert (error <= num_roundings * UNIT * x.double().abs()).all(), kind


def test_extreme_inputs_stay_finite(ops):
    x = torch.tensor([[-1e30, -200.0, -88.0, 0.0, 88.0, 200.0, 1e30, 5.0]])
    torch.testing.assert_close(ops.activation(x, "silu"), TorchOps().activation(x, "silu"), rtol=1e-5, atol=1e-6)


def test_kernels_say_why_they_cannot_serve():
    reasons = " ".join(native_ops_reasons(torch.device("cuda"), torch.bfloat16))
    assert "not for cuda" in reasons and "float32" in reasons


@pytest.mark.parametrize("rows", [1, 5, 130])
@pytest.mark.parametrize("with_bias", [False, True])
def test_the_gated_mlp_in_one_call_gives_the_bits_of_its_parts(ops, rows, with_bias):
    x = random(rows, 40)
    gate_up = ops.make_linear(random(2 * 37, 40, seed=1), random(2 * 37, seed=2) if with_bias else None)
    down = ops.make_linear(random(24, 37, seed=3), random(24, seed=4) if with_bias else None)
    expected = down(ops.silu_and_mul(gate_up(x)))
    assert torch.equal(ops.make_gated_mlp(gate_up, down)(x), expected)


def stored_16(dtype, *shape, seed=0):
    """All finite numbers of the type may occur, small ones most often."""
    bits = torch.randint(-(2**15), 2**15, shape, generator=torch.Generator().manual_seed(seed), dtype=torch.int16)
    numbers = bits.view(dtype)
    numbers[~numbers.isfinite()] = 1.5
    numbers[numbers.abs() > 1e4] = 2.0**-15
    return StoredTensor.of_floats(numbers)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize(("inner", "outer"), [(576, 96), (63, 50), (1, 1), (1700, 17)])
def test_a_product_with_weights_in_16_bits_has_the_bits_of_their_float32(ops, dtype, inner, outer):
    weight, bias = ops.quantize(stored_16(dtype, outer, inner), WeightUse.LINEAR), random(outer, seed=2)
    assert weight.data.dtype == dtype
    kept, widened = make_product(ops, [weight], bias), ops.make_linear(weight.floats(), bias)
    for rows in (1, 2, 3, 5, 8, 9, 16, 17, 33, 97, 200):
        x = random(rows, inner, seed=rows)
        assert torch.equal(kept(x), widened(x))


def test_weights_in_16_bits_take_half_the_memory_and_are_counted_once(ops):
    table = ops.quantize(stored_16(torch.bfloat16, 64, 40), WeightUse.VOCABULARY)
    kept = ops.find_format(table)
    lookup, ids = kept.make_embedding(table), torch.tensor([3, 63, 0, 3])
    assert torch.equal(lookup(ids), table.data.float()[ids])
    head = make_product(ops, [table], None)
    assert head._packed.nbytes - 64 == table.data.nbytes
    make_product(ops, [ops.quantize(stored_16(torch.float16, 32, 40), WeightUse.LINEAR)] * 2, None)
    first, second = ops.kept_formats()
    assert (first["format"], first["num_weights"], first["num_bytes"]) == ("BF16", 64 * 40, 2 * 64 * 40)
    assert (second["format"], second["num_weights"]) == ("F16", 2 * 32 * 40)
    assert "float32" in first["product"]


@pytest.mark.parametrize("is_tied", [False, True])
def test_a_table_in_the_bits_of_its_file_is_counted_once_and_as_what_it_takes(ops, is_tied):
    table, head = encode(random(64, 96), 8), encode(random(64, 96), 8)
    kept = ops.find_format(table)
    kept.make_embedding(table)
    make_product(ops, [table if is_tied else head], None)
    found = [(one["num_weights"], one["product"] == LOOKED_UP) for one in ops.kept_formats()]
    assert found == [(64 * 96, False)] + [(64 * 96, True)] * (not is_tied)
    if not is_tied:
        assert ops.kept_formats()[1]["num_bytes"] == 64 * 96 // 32 * 34


def test_only_weights_of_products_and_tables_stay_in_16_bits(ops):
    weight = stored_16(torch.bfloat16, 32, 64)
    assert ops.quantize(weight, WeightUse.OTHER) is weight
    norm = stored_16(torch.bfloat16, 64)
    assert ops.quantize(norm, WeightUse.LINEAR) is norm
    floats = StoredTensor.of_floats(random(32, 64))
    assert ops.quantize(floats, WeightUse.LINEAR) is floats
    assert NativeOps(bits=8).quantize(weight, WeightUse.LINEAR).format == "Q8_0"
    assert ops.note_on(ops.quantize(weight, WeightUse.LINEAR), WeightUse.LINEAR) is None
    narrow = NativeOps(bits=8).quantize(stored_16(torch.bfloat16, 32, 40), WeightUse.LINEAR)  # 32 does not divide 40
    assert narrow.format == "BF16" and "32" in str(NativeOps(bits=8).note_on(narrow, WeightUse.LINEAR))
    transposed = ops.quantize(weight.t(), WeightUse.LINEAR)
    assert torch.equal(
        make_product(ops, [transposed], None)(random(3, 32)),
        ops.make_linear(weight.data.float().t(), None)(random(3, 32)),
    )


@pytest.mark.parametrize("rows", [1, 20])
def test_a_gated_mlp_takes_weights_of_any_width(ops, rows):
    x, gate_up, down = random(rows, 40), stored_16(torch.bfloat16, 2 * 37, 40), random(24, 37, seed=3)
    halves = make_product(ops, [ops.quantize(gate_up, WeightUse.LINEAR)], None)
    wide, narrow = ops.make_linear(gate_up.data.float(), None), ops.make_linear(down, None)
    assert torch.equal(ops.make_gated_mlp(halves, narrow)(x), ops.make_gated_mlp(wide, narrow)(x))


def test_a_soft_cap_is_exact_for_small_and_large_numbers(ops):
    numbers = torch.cat([random(3 * 37) * 10.0**power for power in range(-6, 5)]).view(-1, 37)  # 37: no whole vectors
    numbers[0, :3] = torch.tensor([0.0, float("inf"), float("-inf")])
    expected = torch.tanh(numbers.double() / 30.0) * 30.0
    got = ops.soft_cap(numbers.clone(), 30.0)
    # Four roundings: the quotient and its divisor's, the product, and tanh's own of about two.
    assert ((got - expected).abs() <= 6 * UNIT * expected.abs()).all()
    assert ops.soft_cap(torch.full((1, 20), float("nan")), 30.0).isnan().all()


def test_rows_are_added_in_place(ops):
    x, y = random(5, 40), random(5, 40, seed=1)
    whole, expected = torch.zeros(5, 64), x + y
    whole[:, :40] = x
    assert torch.equal(ops.add(whole[:, :40], y), expected) and not whole[:, 40:].any()
