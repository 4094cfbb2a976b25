"""Checkpoints of GPTQ, AWQ and compressed-tensors: a layer is read as one weight, and multiplied in its own bits."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

from ratoon.core.errors import ModelError
from ratoon.layers.linear import ColumnParallelLinear
from ratoon.layers.native import library
from ratoon.layers.native_ops import NativeOps
from ratoon.layers.products import make_product
from ratoon.layers.stored import StoredTensor, TensorSlice
from ratoon.layers.weights import TensorSource, Weights
from ratoon.models.config_fields import ConfigFields
from ratoon.models.packed_source import PackedSource, read_scheme
from ratoon.models.safetensors_source import SafetensorsSource
from ratoon.models.source import resolve_model
from ratoon.models.weight_formats import read_weight_format
from tests.golden import tiny_models

Tensor = torch.Tensor
OUT, IN, GROUP = 48, 128, 64
needs_kernels = pytest.mark.skipif(library() is None, reason="no kernels for this processor; `make setup` builds them")
GROUPS = (16, 32, 64, IN)  # inputs; those of 16 are fewer than kernels take


class Layer:
    """Random codes, scales and zero points, and the weight that they stand for, by the definition."""

    def __init__(
        self,
        bits: int = 4,
        symmetric: bool = False,
        shuffled: bool = False,
        group: int = GROUP,
        dtype: Any = torch.float16,
    ):
        generator = np.random.default_rng(bits)
        middle, num_groups = 2 ** (bits - 1), IN // group
        self.bits, self.group = bits, group
        self.codes = generator.integers(0, 2**bits, (OUT, IN))
        self.zeros = np.full((OUT, num_groups), middle)
        if not symmetric:
            self.zeros = generator.integers(0, 2**bits, (OUT, num_groups))
        self.scales = torch.from_numpy(generator.uniform(0.001, 0.02, (OUT, num_groups))).to(dtype)
        self.group_of = np.arange(IN) // group
        if shuffled:
            generator.shuffle(self.group_of)
        zeros = torch.from_numpy(self.zeros[:, self.group_of]).double()
        scales = self.scales.double()[:, torch.from_numpy(self.group_of)]
        self.weight = (torch.from_numpy(self.codes).double() - zeros) * scales

    def gptq(self, second_format: bool = False) -> dict[str, Tensor]:
        zeros = self.zeros.T if second_format else (self.zeros.T - 1) % 2**self.bits
        return {
            "qweight": words(self.codes.T, self.bits, 0),
            "qzeros": words(zeros, self.bits, 1),
            "scales": self.scales.t().contiguous(),
            "g_idx": torch.from_numpy(self.group_of).int(),
        }

    def awq(self) -> dict[str, Tensor]:
        order = np.arange(OUT).reshape(-1, 8)[:, [0, 2, 4, 6, 1, 3, 5, 7]].flatten()
        return {
            "qweight": words(self.codes.T[:, order], 4, 1),
            "qzeros": words(self.zeros.T[:, order], 4, 1),
            "scales": self.scales.t().contiguous(),
        }

    def packed(self, packed_zeros: bool = True) -> dict[str, Tensor]:
        """Of compressed-tensors: numbers of so many bits, the least of which is code 0, in words."""
        tensors = {
            "weight_packed": words(self.codes, self.bits, 1),
            "weight_scale": self.scales,
            "weight_shape": torch.tensor([OUT, IN]),
            "weight_g_idx": torch.from_numpy(self.group_of).int(),
        }
        if (self.zeros != 2 ** (self.bits - 1)).any():
            tensors["weight_zero_point"] = words(self.zeros, self.bits, 0) if packed_zeros else self.signed(self.zeros)
        return tensors

    def plain(self, zero_dtype: Any = torch.int8) -> dict[str, Tensor]:
        """Of compressed-tensors: the same numbers as bytes."""
        return {
            "weight": self.signed(self.codes),
            "weight_scale": self.scales,
            "weight_zero_point": self.signed(self.zeros).to(zero_dtype),
            "weight_g_idx": torch.from_numpy(self.group_of).int(),
        }

    def signed(self, codes: np.ndarray) -> Tensor:
        return torch.from_numpy(codes - 2 ** (self.bits - 1)).to(torch.int8)


def words(codes: np.ndarray, bits: int, dim: int) -> Tensor:
    """So many codes in a word, from the lowest bits on, along a dimension."""
    along = np.moveaxis(codes, dim, -1)
    along = along.reshape(*along.shape[:-1], -1, 32 // bits).astype(np.uint64)
    packed = (along << (np.arange(32 // bits, dtype=np.uint64) * np.uint64(bits))).sum(-1).astype(np.uint32)
    return torch.from_numpy(np.ascontiguousarray(np.moveaxis(packed.view(np.int32), -1, dim)))


def config_of(method: str, bits: int = 4, **more: Any) -> dict[str, Any]:
    if method == "compressed-tensors":
        more = {"format": "pack-quantized", "config_groups": {"group_0": {"weights": {"num_bits": bits}}}} | more
        return {"quantization_config": {"quant_method": method} | more}
    return {"quantization_config": {"quant_method": method, "bits": bits, "group_size": GROUP} | more}


def compressed(stored: str, bits: int, symmetric: bool = True, **more: Any) -> dict[str, Any]:
    """As the library writes it."""
    weights = {"num_bits": bits, "type": "int", "symmetric": symmetric, "strategy": "group"} | more
    groups = {"group_0": {"targets": ["Linear"], "weights": weights}}
    return config_of("compressed-tensors", format=stored, config_groups=groups)


def open_layer(folder: Path, tensors: dict[str, Tensor], config: dict[str, Any]) -> PackedSource:
    other = {"norm.weight": torch.ones(IN), "layer.bias": torch.zeros(OUT)}
    save_file({f"layer.{name}": part for name, part in tensors.items()} | other, folder / "model.safetensors")
    scheme = read_scheme(ConfigFields(config, "a folder").below("quantization_config"))
    assert scheme is not None
    return PackedSource(SafetensorsSource(folder), scheme)


Case = tuple[Layer, dict[str, Tensor], dict[str, Any]]  # what is stored, its tensors, and its config


def all_cases() -> Iterator[tuple[str, Callable[[], Case]]]:
    """Every method, bits, symmetry, size and order of groups, and form of zero points."""
    for bits, symmetric, group, shuffled in product((4, 8), (True, False), GROUPS, (False, True)):
        if shuffled and group == IN:
            continue
        make = partial(Layer, bits, symmetric, shuffled, group)
        what = f"{bits} bits, {'symmetric, ' if symmetric else ''}groups of {group}{', ordered' if shuffled else ''}"
        for form in ("gptq", "gptq_v2"):
            yield f"{form}, {what}", partial(gptq_case, make, form)
        if bits == 4 and not shuffled:
            yield f"awq, {what}", lambda make=make: ((layer := make()), layer.awq(), config_of("awq", version="gemm"))
        yield f"pack-quantized, {what}", partial(packed_case, make, True, bits, symmetric)
        if not symmetric:
            yield f"pack-quantized with bytes of zero points, {what}", partial(packed_case, make, False, bits, False)
        for stored, dtype in product(("int-quantized", "naive-quantized"), (torch.int8, torch.int32)):
            yield (
                f"{stored} with zero points in {dtype}, {what}",
                partial(plain_case, make, stored, dtype, bits, symmetric),
            )


def gptq_case(make: Callable[[], Layer], form: str) -> Case:
    layer = make()
    return layer, layer.gptq(form == "gptq_v2"), config_of("gptq", layer.bits, checkpoint_format=form)


def packed_case(make: Callable[..., Layer], packed_zeros: bool, bits: int, symmetric: bool) -> Case:
    layer = make(dtype=torch.bfloat16)
    return layer, layer.packed(packed_zeros), compressed("pack-quantized", bits, symmetric)


def plain_case(make: Callable[..., Layer], stored: str, zero_dtype: Any, bits: int, symmetric: bool) -> Case:
    layer = make(dtype=torch.float32)
    return layer, layer.plain(zero_dtype), compressed(stored, bits, symmetric)


CASES = dict(all_cases())


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES)
@pytest.mark.one_in(5)
def test_the_parts_of_a_layer_are_one_weight(case: str, tmp_path: Path) -> None:
    layer, tensors, config = CASES[case]()
    source = open_layer(tmp_path, tensors, config)
    assert source.shapes() == {"layer.weight": (OUT, IN), "layer.bias": (OUT,), "norm.weight": (IN,)}
    stored = source.read("layer.weight")
    assert stored.format == f"INT{layer.bits}"
    expected = layer.weight.float()  # the difference is exact, the product is rounded once
    assert torch.equal(stored.floats(), expected)
    rows = source.read("layer.weight", TensorSlice(0, 16, 40))
    assert rows.format == stored.format and torch.equal(rows.floats(), expected[16:40])
    for start, stop in ((32, 96), (64, 128), (64, 96), (48, 80)):
        columns = source.read("layer.weight", TensorSlice(1, start, stop))
        assert torch.equal(columns.floats(), expected[:, start:stop])
        between = start % layer.group == stop % layer.group == 0 or layer.group == IN
        inside = start // layer.group == (stop - 1) // layer.group
        is_ordered = bool((layer.group_of != np.arange(IN) // layer.group).any())
        stays = not is_ordered and (between or (inside and start % 32 == 0))
        assert (columns.format == stored.format) == stays, "codes that are cut between groups stay codes"
    assert torch.equal(source.read("norm.weight").floats(), torch.ones(IN))


class CountingSource:
    """Implements TensorSource. Counts the bytes that are read of another one."""

    def __init__(self, source: TensorSource) -> None:
        self._source = source
        self.name, self.shapes, self.num_bytes = source.name, source.shapes, 0

    def read(self, name: str, part: TensorSlice | None = None, destination: Any = None) -> StoredTensor:
        stored = self._source.read(name, part, destination)
        self.num_bytes += stored.data.nbytes
        return stored


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES)
@pytest.mark.one_in(5)
def test_a_part_of_a_weight_reads_that_part_of_the_file(case: str, tmp_path: Path) -> None:
    """Unless words or groups would be divided, or inputs are in another order."""
    layer, tensors, config = CASES[case]()
    source = open_layer(tmp_path, tensors, config)
    source._source = counting = CountingSource(source._source)
    whole = source.read("layer.weight").floats()
    of_whole, counting.num_bytes = counting.num_bytes, 0
    order = sum(part.nbytes for name, part in tensors.items() if name.endswith("g_idx"))
    half = source.read("layer.weight", TensorSlice(0, OUT // 2, OUT))
    assert torch.equal(half.floats(), whole[OUT // 2 :])
    assert counting.num_bytes <= of_whole // 2 + order
    counting.num_bytes = 0
    half = source.read("layer.weight", TensorSlice(1, IN // 2, IN))
    assert torch.equal(half.floats(), whole[:, IN // 2 :])
    is_in_order = not (layer.group_of != np.arange(IN) // layer.group).any()
    if is_in_order and (IN // 2) % layer.group == 0:
        assert counting.num_bytes <= of_whole // 2 + order


@pytest.mark.slow
@needs_kernels
@pytest.mark.parametrize("case", CASES)
@pytest.mark.one_in(3)
def test_a_product_is_that_of_the_weight_kept_in_its_bits_or_decoded(case: str, tmp_path: Path) -> None:
    layer, tensors, config = CASES[case]()
    source = open_layer(tmp_path, tensors, config)
    x = torch.randn(5, IN, generator=torch.Generator().manual_seed(1))
    expected = x.double() @ layer.weight.T
    # Kept: activations are rounded to 8 bits, so that a product errs by about 1 in 2 · 127 · √3 of its largest input
    for ops, allowed in ((NativeOps(), 0.01), (NativeOps(False), 1e-5)):
        weights = Weights(source, ops, torch.device("cpu"), torch.float32)
        multiply = ColumnParallelLinear(weights / "layer", IN, OUT, True)
        assert (multiply(x) - expected).norm() < allowed * expected.norm()
        is_kept = allowed == 0.01 and layer.group % 32 == 0
        assert {one["format"] for one in ops.kept_formats()} == ({f"INT{layer.bits}"} if is_kept else set())


@needs_kernels
@pytest.mark.parametrize("bits", [4, 8])
def test_layers_that_are_one_product_may_have_their_inputs_in_different_orders(bits: int, tmp_path: Path) -> None:
    layers = [Layer(bits, shuffled=True), Layer(bits), Layer(bits, symmetric=True, group=32)]
    parts = [open_layer(tmp_path, layer.gptq(), config_of("gptq", bits)).read("layer.weight") for layer in layers]
    x = torch.randn(5, IN, generator=torch.Generator().manual_seed(1))
    expected = torch.cat([x.double() @ layer.weight.T for layer in layers], 1)
    assert (make_product(NativeOps(), parts, None)(x) - expected).norm() < 0.01 * expected.norm()


@pytest.mark.parametrize("scale_shape", [(OUT, 1), (OUT,), (1,), ()], ids=str)
@pytest.mark.parametrize("bits", [4, 8])
def test_bytes_with_a_scale_for_each_output_or_for_all(bits: int, scale_shape: tuple[int, ...], tmp_path: Path) -> None:
    scales = torch.rand(scale_shape, generator=torch.Generator().manual_seed(bits)) * 0.1
    codes = torch.randint(-(2 ** (bits - 1)), 2 ** (bits - 1), (OUT, IN), dtype=torch.int8)
    strategy = "channel" if OUT in scale_shape else "tensor"
    config = compressed("int-quantized", bits, strategy=strategy)
    stored = open_layer(tmp_path, {"weight": codes, "weight_scale": scales}, config).read("layer.weight")
    expected = codes.float() * (scales.view(-1, 1) if scale_shape else scales)
    assert stored.format == f"INT{bits}" and torch.equal(stored.floats(), expected)


@pytest.mark.parametrize("scale_shape", [(OUT, 1), (OUT,), (1,), ()], ids=str)
@pytest.mark.parametrize("stored_as", ["float-quantized", "naive-quantized"])
def test_8_bit_floats_with_a_scale_for_each_output_or_for_all(
    stored_as: str, scale_shape: tuple[int, ...], tmp_path: Path
) -> None:
    scales = torch.rand(scale_shape, generator=torch.Generator().manual_seed(1)) * 0.1
    numbers = torch.randn(OUT, IN).to(torch.float8_e4m3fn)
    config = compressed(stored_as, 8, type="float", strategy="channel" if OUT in scale_shape else "tensor")
    parts = {"weight": numbers, "weight_scale": scales, "input_scale": torch.ones(1)}
    source = open_layer(tmp_path, parts, config)
    assert "layer.input_scale" not in source.shapes()
    expected = numbers.float() * (scales.view(-1, 1) if scale_shape else scales)
    assert torch.equal(source.read("layer.weight").floats(), expected)
    for part in (TensorSlice(0, 4, 9), TensorSlice(1, 3, 40)):
        found = source.read("layer.weight", part)
        assert found.format == source.read("layer.weight").format, "a part stays in 8 bits"
        assert torch.equal(found.floats(), expected[part.slices()])


def test_an_order_that_was_never_filled_is_none(tmp_path: Path) -> None:
    layer = Layer(4, symmetric=True)
    parts = layer.packed() | {"weight_g_idx": torch.full((IN,), -1, dtype=torch.int32)}
    stored = open_layer(tmp_path, parts, compressed("pack-quantized", 4)).read("layer.weight")
    assert torch.equal(stored.floats().double(), layer.weight)


@pytest.mark.parametrize("bits", [4, 8])
def test_a_layer_whose_blocks_are_not_whole_is_read_as_floats(bits: int, tmp_path: Path) -> None:
    codes, scales = torch.randint(-8, 8, (16, 40), dtype=torch.int8), torch.rand(16, 5)
    config = compressed("int-quantized", bits)
    stored = open_layer(tmp_path, {"weight": codes, "weight_scale": scales}, config).read("layer.weight")
    assert stored.format == "F32"
    assert torch.equal(stored.floats(), codes.float() * scales.repeat_interleave(8, dim=1))


def changed(stored: str, bits: Any, **weights: Any) -> dict[str, Any]:
    """What compressed-tensors would write."""
    config: dict[str, Any] = compressed(stored, bits, **weights)["quantization_config"]
    return config


def mixed(stored: str, own: str) -> dict[str, Any]:
    config = changed(stored, 8)
    config["config_groups"]["group_1"] = config["config_groups"]["group_0"] | {"format": own}
    return config


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"quant_method": "bitsandbytes"}, r"is quantised with bitsandbytes; .*GPTQ, AWQ or compressed-tensors"),
        ({}, r"an unknown method"),
        ({"quant_method": "gptq", "bits": 3}, r"gptq, 3 bits"),
        ({"quant_method": "awq", "bits": 4, "version": "gemv"}, r"version gemv"),
        ({"quant_method": "gptq", "bits": "4"}, r"bits"),
        ({"quant_method": "compressed-tensors", "format": "marlin-24"}, r"marlin-24, an unknown number of bits"),
        ({"quant_method": "compressed-tensors", "config_groups": {"a": {"weights": {"num_bits": 3}}}}, r"3 bits"),
        (
            {
                "quant_method": "compressed-tensors",
                "config_groups": {"a": {"weights": {"num_bits": 4}}, "b": {"weights": {"num_bits": 8}}},
            },
            r"int of 4 and int of 8 bits",
        ),
        ({"quant_method": "compressed-tensors", "config_groups": [1]}, r"an unknown number of bits"),
        ({"quant_method": "awq", "backend": "llm-awq"}, r"awq, backend llm-awq; backend autoawq"),
        ({"quant_method": "gptq", "checkpoint_format": "marlin"}, r"checkpoint_format marlin; .*gptq or gptq_v2"),
        ({"quant_method": "gptq", "is_marlin_format": True}, r"checkpoint_format marlin"),
        ({"quant_method": "gptq", "dynamic": {"+:.*up": {"bits": 8}}}, r"gptq, 4 bits, and 8 for \+:\.\*up"),
        (changed("pack-quantized", 4, type="float"), r"pack-quantized, float of 4 bits, .*; pack-quantized, int-q"),
        (changed("pack-quantized", [4]), r"int of \[4\] bits"),
        (changed("float-quantized", 8), r"float-quantized, int of 8 bits"),
        (changed("naive-quantized", 4, type="float"), r"float of 4 bits"),
        (changed("int-quantized", 8, strategy="block"), r"int of 8 bits, a scale for each block of int"),
        (changed("float-quantized", 8, type="float", strategy="group"), r"a scale for each group of float"),
        (changed("nvfp4-pack-quantized", 4, type="float"), r"nvfp4-pack-quantized, float of 4 bits"),
        (changed("int-quantized", 8) | {"sparsity_config": {"format": "sparse-24-bitmask"}}, r"bits, sparsity_config"),
        (changed("int-quantized", 8) | {"transform_config": {"config_groups": {"a": 1}}}, r"bits, transform_config"),
        (mixed("int-quantized", "pack-quantized"), r"int-quantized, int of 8 bits, a group in pack-quantized"),
    ],
)
def test_other_ways_are_refused_by_name(config: dict[str, Any], message: str) -> None:
    with pytest.raises(ModelError, match=message):
        read_weight_format({"quantization_config": config or {"x": 1}}, "a folder")


@pytest.mark.parametrize(
    "damage",
    [
        {"scales": torch.ones(3, OUT)},
        {"qzeros": torch.zeros(IN // GROUP, 1, dtype=torch.int32)},
        {"g_idx": torch.zeros(IN, dtype=torch.int32)},
        {"qweight": torch.zeros(IN // 8, OUT, dtype=torch.int64)},
        {"qzeros": None},
    ],
)
def test_parts_that_do_not_fit_are_an_error_with_the_name_of_the_layer(damage: dict[str, Any], tmp_path: Path) -> None:
    parts = {name: part for name, part in (Layer().gptq() | damage).items() if part is not None}
    with pytest.raises(ModelError, match=r"the parts of 'layer' do not fit|lacks 'layer.qzeros'"):
        open_layer(tmp_path, parts, config_of("gptq")).read("layer.weight")


@pytest.mark.parametrize(
    ("config", "damage", "message"),
    [
        (compressed("int-quantized", 4), {"weight": torch.full((OUT, IN), 9, dtype=torch.int8)}, r"from 9 to 9, more"),
        (compressed("int-quantized", 4), {"weight": torch.full((OUT, IN), -9, dtype=torch.int8)}, r"from -9 to -9"),
        (compressed("int-quantized", 4, False), {"weight_zero_point": None}, r"no zero points"),
        (compressed("int-quantized", 8), {"weight": torch.ones(OUT, IN, dtype=torch.int16)}, r"torch.int16"),
        (compressed("float-quantized", 8, type="float", strategy="channel"), {}, r"weights in torch.int8"),
        (
            compressed("float-quantized", 8, type="float", strategy="channel"),
            {"weight": torch.ones(OUT, IN).to(torch.float8_e5m2)},
            r"weights in torch.float8_e5m2",
        ),
        (compressed("int-quantized", 8), {"weight": torch.ones(OUT, IN).to(torch.float8_e4m3fn)}, r"float8_e4m3fn"),
    ],
)
def test_numbers_that_are_not_those_of_the_config_are_an_error(
    config: dict[str, Any], damage: dict[str, Any], message: str, tmp_path: Path
) -> None:
    parts = {name: part for name, part in (Layer(4).plain() | damage).items() if part is not None}
    with pytest.raises(ModelError, match=rf"the parts of 'layer' do not fit together: .*{message}"):
        open_layer(tmp_path, parts, config).read("layer.weight")


def test_a_layer_without_its_codes_is_named(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"lacks 'layer.weight'"):
        open_layer(tmp_path, {"weight_scale": torch.ones(OUT, 1)}, compressed("int-quantized", 8))


def test_a_folder_of_gptq_gives_the_numbers_of_its_weights(tmp_path: Path) -> None:
    tiny = tiny_models.tiny_llama()
    tiny.oracle.save_pretrained(tmp_path)
    tensors, expected = {}, {}
    for name, tensor in tiny.source.tensors.items():
        if not name.endswith("proj.weight"):
            tensors[name] = tensor.contiguous()
            continue
        codes = (tensor / 0.02 + 8).round().clamp(0, 15).int().numpy()
        scales = torch.full((1, len(tensor)), 0.02, dtype=torch.float16)
        zeros = np.full((1, len(tensor)), 7)
        parts = {"qweight": words(codes.T, 4, 0), "qzeros": words(zeros, 4, 1), "scales": scales}
        tensors |= {name.removesuffix("weight") + part: value for part, value in parts.items()}
        expected[name] = (torch.from_numpy(codes) - 8.0) * scales[0, 0].float()
    save_file(tensors, tmp_path / "model.safetensors")
    config = json.loads((tmp_path / "config.json").read_text()) | config_of("gptq", group_size=-1)
    (tmp_path / "config.json").write_text(json.dumps(config))
    source = resolve_model(str(tmp_path)).tensors
    assert dict(source.shapes()) == dict(tiny.source.shapes())
    for name, weight in expected.items():
        stored = source.read(name)
        assert isinstance(stored, StoredTensor) and torch.equal(stored.floats(), weight)
