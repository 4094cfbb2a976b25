"""Checkpoints of GPTQ, AWQ and compressed-tensors: a layer is read as one weight, and multiplied in its own bits."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

from ratoon.core.errors import ModelError
from ratoon.layers.linear import make_product
from ratoon.layers.native import library
from ratoon.layers.native_ops import NativeOps
from ratoon.layers.stored import StoredTensor, TensorSlice
from ratoon.models.packed_source import PackedSource, read_scheme
from ratoon.models.safetensors_source import SafetensorsSource
from ratoon.models.source import resolve_model
from tests.golden import tiny_models

Tensor = torch.Tensor
OUT, IN, GROUP = 48, 128, 64
NUM_GROUPS = IN // GROUP


class Layer:
    """Random codes, scales and zero points, and the weight that they stand for, by the definition."""

    def __init__(self, bits: int = 4, symmetric: bool = False, shuffled: bool = False, dtype: Any = torch.float16):
        generator = np.random.default_rng(bits)
        middle = 2 ** (bits - 1)
        self.bits = bits
        self.codes = generator.integers(0, 2**bits, (OUT, IN))
        self.zeros = np.full((OUT, NUM_GROUPS), middle)
        if not symmetric:
            self.zeros = generator.integers(0, 2**bits, (OUT, NUM_GROUPS))
        self.scales = torch.from_numpy(generator.uniform(0.001, 0.02, (OUT, NUM_GROUPS))).to(dtype)
        self.group_of = np.arange(IN) // GROUP
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

    def compressed(self, packed_zeros: bool = True) -> dict[str, Tensor]:
        tensors = {
            "weight_packed": words(self.codes, self.bits, 1),
            "weight_scale": self.scales,
            "weight_shape": torch.tensor([OUT, IN]),
            "weight_g_idx": torch.from_numpy(self.group_of).int(),
        }
        if (self.zeros != 2 ** (self.bits - 1)).any():
            signed = torch.from_numpy(self.zeros - 2 ** (self.bits - 1)).to(torch.int8)
            tensors["weight_zero_point"] = words(self.zeros, self.bits, 0) if packed_zeros else signed
        return tensors


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


def open_layer(folder: Path, tensors: dict[str, Tensor], config: dict[str, Any]) -> PackedSource:
    other = {"norm.weight": torch.ones(IN), "layer.bias": torch.zeros(OUT)}
    save_file({f"layer.{name}": part for name, part in tensors.items()} | other, folder / "model.safetensors")
    scheme = read_scheme(config, "a folder")
    assert scheme is not None
    return PackedSource(SafetensorsSource(folder), scheme)


CASES: dict[str, tuple[Callable[[], Layer], Callable[[Layer], dict[str, Tensor]], dict[str, Any]]] = {
    "gptq": (Layer, Layer.gptq, config_of("gptq")),
    "gptq, symmetric": (lambda: Layer(symmetric=True), Layer.gptq, config_of("gptq")),
    "gptq, 8 bits": (lambda: Layer(8), Layer.gptq, config_of("gptq", 8)),
    "gptq in its second format": (
        Layer, lambda layer: layer.gptq(True), config_of("gptq", checkpoint_format="gptq_v2")
    ),
    "gptq, inputs in the order of their activations": (lambda: Layer(shuffled=True), Layer.gptq, config_of("gptq")),
    "awq": (Layer, Layer.awq, config_of("awq", version="gemm")),
    "compressed, symmetric": (lambda: Layer(symmetric=True), Layer.compressed, config_of("compressed-tensors")),
    "compressed, 8 bits": (
        lambda: Layer(8, dtype=torch.bfloat16), Layer.compressed, config_of("compressed-tensors", 8)
    ),
    "compressed, with zero points": (Layer, Layer.compressed, config_of("compressed-tensors")),
    "compressed, with zero points as bytes": (
        Layer, lambda layer: layer.compressed(False), config_of("compressed-tensors")
    ),
    "compressed, ordered": (lambda: Layer(shuffled=True), Layer.compressed, config_of("compressed-tensors")),
}  # fmt: skip


@pytest.mark.parametrize("case", CASES)
def test_the_parts_of_a_layer_are_one_weight(case: str, tmp_path: Path) -> None:
    make, pack, config = CASES[case]
    layer = make()
    source = open_layer(tmp_path, pack(layer), config)
    assert source.shapes() == {"layer.weight": (OUT, IN), "layer.bias": (OUT,), "norm.weight": (IN,)}
    stored = source.read("layer.weight")
    assert stored.format == f"INT{layer.bits}"
    assert torch.equal(stored.floats().double(), layer.weight)
    rows = source.read("layer.weight", TensorSlice(0, 16, 40))
    assert rows.format == stored.format and torch.equal(rows.floats().double(), layer.weight[16:40])
    columns = source.read("layer.weight", TensorSlice(1, 32, 96))
    assert torch.equal(columns.floats().double(), layer.weight[:, 32:96])
    assert torch.equal(source.read("norm.weight").floats(), torch.ones(IN))


@pytest.mark.skipif(library() is None, reason="no kernels for this processor; `make setup` builds them")
@pytest.mark.parametrize("case", CASES)
def test_a_product_is_that_of_the_weight_and_activations_of_8_bits(case: str, tmp_path: Path) -> None:
    make, pack, config = CASES[case]
    layer, ops = make(), NativeOps()
    stored = open_layer(tmp_path, pack(layer), config).read("layer.weight")
    other = open_layer(tmp_path, pack(Layer(layer.bits)), config).read("layer.weight")  # its inputs in their order
    x = torch.randn(5, IN, generator=torch.Generator().manual_seed(1))
    multiply = make_product(ops, [stored, other], torch.ones(2 * OUT))
    expected = torch.cat([x.double() @ part.floats().double().T for part in (stored, other)], 1) + 1
    assert (multiply(x) - expected).norm() < 0.02 * expected.norm()
    assert {one["format"] for one in ops.kept_formats()} == {f"INT{layer.bits}"}


def test_bytes_and_8_bit_floats_with_a_scale_for_each_output(tmp_path: Path) -> None:
    scales = torch.rand(OUT, 1) * 0.1
    codes = torch.randint(-128, 128, (OUT, IN), dtype=torch.int8)
    config = config_of("compressed-tensors", 8, format="int-quantized")
    stored = open_layer(tmp_path, {"weight": codes, "weight_scale": scales}, config).read("layer.weight")
    assert stored.format == "INT8" and torch.equal(stored.floats(), codes.float() * scales)
    halves = torch.randn(OUT, IN).to(torch.float8_e4m3fn)
    config = config_of("compressed-tensors", 8, format="float-quantized")
    parts = {"weight": halves, "weight_scale": scales, "input_scale": torch.ones(1)}
    source = open_layer(tmp_path, parts, config)
    assert "layer.input_scale" not in source.shapes()
    assert torch.equal(source.read("layer.weight").floats(), halves.float() * scales)
    assert torch.equal(source.read("layer.weight", TensorSlice(0, 4, 9)).floats(), (halves.float() * scales)[4:9])


def test_a_layer_whose_blocks_are_not_whole_is_read_as_floats(tmp_path: Path) -> None:
    codes, scales = torch.randint(-8, 8, (16, 40), dtype=torch.int8), torch.rand(16, 1)
    config = config_of("compressed-tensors", 8, format="int-quantized")
    stored = open_layer(tmp_path, {"weight": codes, "weight_scale": scales}, config).read("layer.weight")
    assert stored.format == "F32" and torch.equal(stored.floats(), codes.float() * scales)


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
            r"4 and 8 bits",
        ),
        ({"quant_method": "compressed-tensors", "config_groups": [1]}, r"an unknown number of bits"),
    ],
)
def test_other_ways_are_refused_by_name(config: dict[str, Any], message: str) -> None:
    with pytest.raises(ModelError, match=message):
        read_scheme({"quantization_config": config or {"x": 1}}, "a folder")


@pytest.mark.parametrize(
    "damage",
    [
        {"scales": torch.ones(3, OUT)},
        {"qzeros": torch.zeros(NUM_GROUPS, 1, dtype=torch.int32)},
        {"g_idx": torch.zeros(IN, dtype=torch.int32)},
        {"qzeros": None},
    ],
)
def test_parts_that_do_not_fit_are_an_error_with_the_name_of_the_layer(damage: dict[str, Any], tmp_path: Path) -> None:
    parts = {name: part for name, part in (Layer().gptq() | damage).items() if part is not None}
    with pytest.raises(ModelError, match=r"the parts of 'layer' do not fit|lacks 'layer.qzeros'"):
        open_layer(tmp_path, parts, config_of("gptq")).read("layer.weight")


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
