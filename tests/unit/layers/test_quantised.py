"""Weights in 4 and 8 bits on a CPU: the kernels against float64, the formats against the files' own numbers."""

from __future__ import annotations

from dataclasses import replace

import gguf
import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType as Type

from ratoon.layers.grouped import grouped_tensor
from ratoon.layers.native import library
from ratoon.layers.native.recording import Arena, Recording
from ratoon.layers.native_formats import (
    BLOCK_READERS,
    Blocks,
    Groups,
    KeptFormats,
    PackedWeight,
    QuantisedGatedMLP,
    QuantisedLinear,
)
from ratoon.layers.native_ops import NativeOps, set_native_threads
from ratoon.layers.ops import WeightUse
from ratoon.layers.products import make_product
from ratoon.layers.stored import StoredTensor

pytestmark = pytest.mark.skipif(library() is None, reason="no kernels for this processor; `make setup` builds them")

Tensor = torch.Tensor
FORMATS = {name: KeptFormats().by_name[name] for name in BLOCK_READERS}
UNIT = 2.0**-24  # the largest relative error of one rounding
BLOCK_BYTES = {name: gguf.GGML_QUANT_SIZES[Type[name]][1] for name in FORMATS}
BLOCK_LENGTH = {name: gguf.GGML_QUANT_SIZES[Type[name]][0] for name in FORMATS}
# Where the halves are in a block: random bytes there could be infinite or NaN.
HALVES = {"Q4_0": [0], "Q4_1": [0, 2], "Q5_0": [0], "Q5_1": [0, 2], "Q8_0": [0], "Q4_K": [0, 2], "Q5_K": [0, 2],
          "Q6_K": [208]}  # fmt: skip
# (bits, group, offsets)
FORMS = [(4, 32, False), (4, 32, True), (8, 32, False), (8, 32, True), (8, 16, False)]


def stored_tensor(name: str, rows: int, length: int, seed: int = 0) -> StoredTensor:
    """Random codes and scales: all bits of a format are used, also those that a quantiser seldom sets."""
    generator = np.random.default_rng(seed)
    blocks = generator.integers(0, 256, (rows, length // BLOCK_LENGTH[name], BLOCK_BYTES[name]), dtype=np.uint8)
    for place in HALVES[name]:
        halves = generator.uniform(-0.02, 0.02, blocks.shape[:2]).astype(np.float16)
        blocks[..., place : place + 2] = halves[..., None].view(np.uint8)

    def decode(data: Tensor) -> Tensor:
        return torch.from_numpy(gguf.quants.dequantize(data.reshape(len(data), -1).numpy(), Type[name])).flatten()

    return StoredTensor((rows, length), name, torch.from_numpy(blocks), decode)


def random_groups(bits: int, group: int, offsets: bool, out: int, length: int, seed: int = 1) -> Groups:
    generator = torch.Generator().manual_seed(seed)
    codes = torch.randint(0, 256, (out, length // 32, 4 * bits), generator=generator, dtype=torch.uint8)
    scales = torch.randn(out, length // group, generator=generator).half() / 64
    return Groups(codes, scales, torch.randn(out, length // group, generator=generator).half() if offsets else None)


def decoded(groups: Groups) -> Tensor:
    """The numbers, in float64."""
    codes = groups.codes.long()
    if groups.bits == 4:
        codes = torch.cat((codes & 15, codes >> 4), -1) - (8 if groups.offsets is None else 0)
    else:
        codes = codes - 128
    numbers = codes.flatten(1).view(len(codes), -1, groups.group) * groups.scales.double()[..., None]
    if groups.offsets is not None:
        numbers = numbers + groups.offsets.double()[..., None]
    return numbers.flatten(1)


def rounded(x: Tensor) -> Tensor:
    """Activations in 8 bits, and in 15 where a block has outliers, by the definition, in float64."""
    blocks = x.unflatten(1, (-1, 32))
    largest = blocks.abs().amax(-1, keepdim=True)
    factor, scale = torch.where(largest > 0, 127.0 / largest, 0), largest / 127.0
    codes = (blocks * factor).round().double()  # float32, half to even
    is_large = scale**2 > 4 * (scale**2).mean(1, keepdim=True)
    codes += torch.where(is_large, ((blocks.double() * factor.double() - codes) * 128).round() / 128, 0)
    return (codes * scale.double()).flatten(1)


def random(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def assert_close(y: Tensor, x: Tensor, weight: Tensor, bias: Tensor | None = None) -> None:
    """No result is off by more than a rounding of its terms' sizes for each operation that a term goes through."""
    expected = rounded(x) @ weight.T
    sizes = rounded(x).abs() @ weight.abs().T * 4  # codes and offset apart are larger than the weight that they make
    if bias is not None:
        expected, sizes = expected + bias.double(), sizes + bias.double().abs()
    operations = 2 * x.shape[1] // 16 + 4
    assert ((y - expected).abs() <= operations * UNIT * (sizes + sizes.mean())).all()


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize(("length", "out"), [(32, 1), (96, 50), (576, 33), (1536, 16)])
@pytest.mark.parametrize("with_bias", [False, True])
@pytest.mark.one_in(3)
def test_a_product_equals_that_of_the_rounded_activations(
    form: tuple[int, int, bool], length: int, out: int, with_bias: bool
) -> None:
    groups, bias = random_groups(*form, out, length), random(out, seed=5) if with_bias else None
    multiply, weight = QuantisedLinear(PackedWeight(groups, bias)), decoded(groups)
    for rows in (1, 2, 3, 7, 8, 9, 40, 97):
        x = random(rows, length, seed=rows)
        assert_close(multiply(x), x, weight, bias)
        x[::3, length // 2] *= 50  # outliers in some rows
        assert_close(multiply(x), x, weight, bias)


@pytest.mark.parametrize("form", FORMS)
def test_a_row_is_the_same_to_the_bit_in_any_batch_and_on_any_number_of_threads(form: tuple[int, int, bool]) -> None:
    multiply, x = QuantisedLinear(PackedWeight(random_groups(*form, 300, 800), None)), random(130, 800)
    x[::3, 400] *= 50  # blocks with outliers have finer codes; so a row may be alone in having them, or not
    whole = multiply(x)
    wide = torch.cat((x, x), dim=1)
    try:
        for threads in (1, 2, 3):
            set_native_threads(threads)
            for first, last in [(0, 1), (5, 7), (17, 20), (3, 8), (60, 125), (129, 130)]:
                assert torch.equal(multiply(x[first:last]), whole[first:last])
                assert torch.equal(multiply(wide[first:last, 800:]), whole[first:last])
    finally:
        set_native_threads(2)


def test_zeros_tiny_and_unusable_activations_have_defined_results() -> None:
    groups = random_groups(4, 32, True, 20, 64)
    multiply, x = QuantisedLinear(PackedWeight(groups, None)), random(5, 64)
    x[0], x[1, :32] = 0, 1e-38
    x[2, 3], x[3, 40] = float("nan"), float("inf")
    y = multiply(x)
    assert (y[0] == 0).all()
    assert y[2:4].isnan().all()
    assert y[[1, 4]].isfinite().all()
    assert torch.equal(multiply(x[4:]), y[4:])


@pytest.mark.parametrize("name", FORMATS)
def test_a_format_holds_the_numbers_of_the_file(name: str) -> None:
    stored = stored_tensor(name, 35, 512)
    groups, exact = BLOCK_READERS[name](stored.data), stored.floats().double()
    torch.testing.assert_close(decoded(groups), exact, rtol=4 * UNIT, atol=1e-6 * float(exact.abs().max()))
    packed = PackedWeight(groups, None)
    x = random(9, 512)
    # Scales of the K formats are rounded to halves.
    held = groups._replace(scales=_as_halves(groups.scales, packed))
    if groups.offsets is not None:
        held = held._replace(offsets=_as_halves(groups.offsets, packed))
    torch.testing.assert_close(decoded(held), exact, rtol=0, atol=2.0**-11 * float(exact.abs().max() * 2))
    assert_close(QuantisedLinear(packed)(x), x, decoded(held))


@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize("rows", [1, 35, 64])
def test_a_files_blocks_are_packed_as_their_groups_are(name: str, rows: int) -> None:
    data = stored_tensor(name, rows, 512).data
    packed, expected = PackedWeight(Blocks(name, data), None), PackedWeight(BLOCK_READERS[name](data), None)
    sizes = ("out_features", "in_features", "bits", "multiplier", "num_bytes")
    assert [getattr(packed, size) for size in sizes] == [getattr(expected, size) for size in sizes]
    assert (packed.structure.bits, packed.structure.group) == (expected.structure.bits, expected.structure.group)
    for one, other in zip(packed._tensors, expected._tensors, strict=True):
        assert (one is None) == (other is None)
        if one is not None:
            assert torch.equal(one.flatten().view(torch.uint8), other.flatten().view(torch.uint8))


def _as_halves(numbers: Tensor, packed: PackedWeight) -> Tensor:
    return (numbers.float() / packed.multiplier).half().double() * packed.multiplier


def test_scales_far_outside_the_range_of_halves_keep_their_precision() -> None:
    groups = random_groups(8, 16, False, 16, 64)
    for size in (1e-9, 1e9):
        scaled = groups._replace(scales=groups.scales.float() * size)
        x = random(3, 64)
        y = QuantisedLinear(PackedWeight(scaled, None))(x)
        expected = rounded(x) @ decoded(scaled).T
        assert ((y - expected).abs() <= 2.0**-10 * expected.abs().max()).all()


def test_memory_is_that_of_the_file_for_formats_of_4_bits() -> None:
    for name, bits in {"Q4_0": 4.5, "Q4_1": 5.0, "Q4_K": 5.0, "Q8_0": 8.5, "Q6_K": 9.0}.items():
        packed = PackedWeight(BLOCK_READERS[name](stored_tensor(name, 64, 512).data), None)
        assert packed.num_bytes * 8 == bits * 64 * 512


@pytest.mark.parametrize("name", FORMATS)
def test_rows_of_a_table_are_the_files_numbers(name: str) -> None:
    table = stored_tensor(name, 40, 256)
    ids = torch.tensor([3, 39, 0, 3])
    assert torch.equal(FORMATS[name].make_embedding(table)(ids), table.floats()[ids])


def test_an_id_outside_of_a_table_is_refused() -> None:
    lookup = FORMATS["Q4_0"].make_embedding(stored_tensor("Q4_0", 40, 256))
    for ids in ([0, 40], [-1]):
        with pytest.raises(IndexError, match="outside of the table"):
            lookup(torch.tensor(ids))


def test_parts_of_a_format_are_one_product_and_others_stand_beside_it() -> None:
    ops, x, bias = NativeOps(), random(5, 256), random(60, seed=3)
    parts = [stored_tensor("Q4_0", 20, 256, seed=1), stored_tensor("Q4_0", 10, 256, seed=2)]
    fused = make_product(ops, parts, bias[:30])
    assert isinstance(fused, QuantisedLinear)
    alone = [make_product(ops, [part], None)(x) for part in parts]
    assert torch.equal(fused(x), torch.cat(alone, 1) + bias[:30])
    mixed = make_product(ops, [*parts, stored_tensor("Q6_K", 30, 256)], bias)
    assert torch.equal(mixed(x)[:, :30], fused(x))


def test_a_gated_mlp_is_one_call_and_equals_its_parts() -> None:
    ops, x = NativeOps(), random(11, 64)
    gate_up = make_product(ops, [stored_tensor("Q4_1", 96, 64, seed=1), stored_tensor("Q4_1", 96, 64, seed=2)], None)
    down = make_product(ops, [stored_tensor("Q8_0", 64, 96)], random(64, seed=4))
    together = ops.make_gated_mlp(gate_up, down)
    assert isinstance(together, QuantisedGatedMLP)
    expected = down(ops.silu_and_mul(gate_up(x)))
    assert torch.equal(together(x), expected)
    plain = ops.make_linear(stored_tensor("Q8_0", 64, 96).floats(), None)
    assert ops.make_gated_mlp(gate_up, plain)(x).shape == (11, 64)


def test_products_in_several_formats_can_be_recorded() -> None:
    parts = [
        stored_tensor("Q4_K", 20, 256),
        stored_tensor("Q6_K", 30, 256),
        StoredTensor.of_floats(torch.randn(12, 256)),
    ]
    multiply, x = make_product(NativeOps(), parts, torch.randn(62)), torch.randn(3, 256)
    with Recording(Arena()) as recording:
        y = multiply(x)
    program = recording.program()
    assert program is not None and len(program) == 3
    x.copy_(torch.randn(3, 256))
    program.run()
    assert torch.equal(y, multiply(x))


def test_formats_are_decoded_where_they_are_not_to_be_kept() -> None:
    stored = stored_tensor("Q4_0", 16, 64)
    assert NativeOps().find_format(stored) is not None
    assert NativeOps(keep_formats=False).find_format(stored) is None
    assert NativeOps().find_format(stored.t()) is None
    assert NativeOps().find_format(StoredTensor.of_floats(stored.floats())) is None


def test_a_weight_that_is_not_kept_or_not_usable_has_a_note() -> None:
    ops, kept = NativeOps(bits=8), stored_tensor("Q4_0", 16, 64)
    use = WeightUse.LINEAR
    assert ops.note_on(kept, use) is None
    assert ops.note_on(StoredTensor.of_floats(random(16, 64)), use) is None
    notes = {
        "decoded to floats, since the file has the weight transposed": kept.t(),
        "decoded to floats, since there are no products with Q2_K": replace(kept, format="Q2_K"),
        "decoded to floats, since 32 does not divide the inputs": replace(kept, shape=(16, 60)),
        "kept as floats, since 32 does not divide the inputs": StoredTensor.of_floats(random(16, 60)),
    }
    for note, stored in notes.items():
        assert ops.note_on(stored, use) == note
        assert ops.note_on(stored, WeightUse.OTHER) is None
        assert ops.find_format(stored) is None
    groups = grouped_tensor(torch.zeros(4, 64, dtype=torch.uint8), torch.ones(4, 4), torch.ones(4, 4), 4)
    assert ops.note_on(groups, use) == "decoded to floats, since groups are no multiples of 32 inputs"
    assert NativeOps(keep_formats=False).note_on(kept.t(), use) is None


@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_scales_that_are_no_numbers_are_noted_and_spoil_their_columns_alone(name: str, value: float) -> None:
    stored, x = stored_tensor(name, 20, 512), random(12, 512)
    place = HALVES[name][-1]
    stored.data[3, 1, place : place + 2] = torch.tensor([value]).half().view(torch.uint8)
    ops = NativeOps()
    assert ops.note_on(stored, WeightUse.LINEAR) == "scales are NaN or infinite, and answers will fail"
    multiply, others = make_product(ops, [stored], None), [row for row in range(20) if row != 3]
    for y in (multiply(x), multiply(x[:1])):
        assert not y[:, 3].isfinite().any()
        assert y[:, others].isfinite().all()


def test_what_is_kept_is_counted() -> None:
    ops = NativeOps()
    make_product(ops, [stored_tensor("Q4_0", 16, 64), stored_tensor("Q4_0", 16, 64)], None)
    make_product(ops, [stored_tensor("Q6_K", 16, 256)], None)
    assert ops.formats is not None
    first, second = ops.formats.facts()
    assert (first["format"], first["num_weights"], first["num_bytes"]) == ("Q4_0", 32 * 64, 32 * 36)
    assert (second["format"], second["num_weights"]) == ("Q6_K", 16 * 256)
    assert "8-bit weights" in second["product"]
