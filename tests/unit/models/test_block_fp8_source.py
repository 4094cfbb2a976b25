"""Weights in 8-bit floats with a scale for each block: read whole and in parts, and refused by name where weights and
scales do not fit together, before a tensor is read."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from ratoon.core.errors import ModelError
from ratoon.layers import fp8
from ratoon.layers.native import library
from ratoon.layers.native_ops import NativeOps
from ratoon.layers.ops import WeightUse
from ratoon.layers.stored import TensorSlice
from ratoon.layers.torch_ops import TorchOps
from ratoon.layers.weights import TensorRequest, WeightNotes, read_tensor
from ratoon.models.block_fp8_source import Block, BlockFp8Source, read_block
from ratoon.models.config_fields import ConfigFields
from ratoon.models.safetensors_source import SafetensorsSource
from ratoon.models.source import resolve_model
from tests.golden.block_fp8_files import QUANTISED, Encoded, decode, encode
from tests.golden.tiny_models import tiny_llama

Tensor = torch.Tensor
OUT, IN = 300, 160
NAME = "layer.weight"
SQUARE = Block(128, 128)
needs_kernels = pytest.mark.skipif(library() is None, reason="no kernels for this processor; `make setup` builds them")


def make_weight(out: int = OUT, inputs: int = IN) -> Encoded:
    """Blocks differ in size, so that a scale of another block would be seen."""
    generator = torch.Generator().manual_seed(out)
    weight = torch.randn(out, inputs, generator=generator)
    return encode(weight * torch.exp2(torch.arange(out) // 128).unsqueeze(1) * (1 + torch.arange(inputs) // 128 * 8))


def open_source(folder: Path, tensors: dict[str, Tensor], block: Block = SQUARE) -> BlockFp8Source:
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, folder / "model.safetensors")
    return BlockFp8Source(SafetensorsSource(folder), block)


def tensors_of(encoded: Encoded) -> dict[str, Tensor]:
    return {NAME: encoded.numbers, f"{NAME}_scale_inv": encoded.scales, "norm.weight": torch.ones(IN)}


@pytest.mark.parametrize("scale_dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize(("out", "inputs"), [(OUT, IN), (128, 256), (5, 3), (129, 1)])
def test_a_weight_and_its_scales_are_one_tensor(
    out: int, inputs: int, scale_dtype: torch.dtype, tmp_path: Path
) -> None:
    encoded = make_weight(out, inputs)
    encoded = encoded._replace(scales=encoded.scales.to(scale_dtype))
    source = open_source(tmp_path, tensors_of(encoded))
    assert source.shapes() == {NAME: (out, inputs), "norm.weight": (IN,)}
    torch.testing.assert_close(source.read(NAME).floats(), decode(encoded), rtol=2**-23, atol=0)  # one product
    assert torch.equal(source.read("norm.weight").floats(), torch.ones(IN))


@pytest.mark.parametrize(
    "part",
    [
        TensorSlice(0, 0, 128), TensorSlice(0, 128, 300), TensorSlice(0, 60, 61), TensorSlice(0, 100, 290),
        TensorSlice(1, 0, 80), TensorSlice(1, 80, 160), TensorSlice(1, 127, 129),
    ],
    ids=str,
)  # fmt: skip
def test_a_part_has_the_scales_of_its_own_blocks(part: TensorSlice, tmp_path: Path) -> None:
    source = open_source(tmp_path, tensors_of(make_weight()))
    found = source.read(NAME, part)
    assert found.shape == part.shape((OUT, IN)) and found.data.dtype == fp8.DTYPE
    assert torch.equal(found.floats(), source.read(NAME).floats()[part.slices()])


def test_blocks_need_not_be_square(tmp_path: Path) -> None:
    numbers, scales = torch.randn(6, 8).to(fp8.DTYPE), torch.rand(3, 2)
    source = open_source(tmp_path, tensors_of(Encoded(numbers, scales)), Block(2, 5))
    expected = numbers.float() * scales.repeat_interleave(2, 0).repeat_interleave(5, 1)[:, :8]
    assert torch.equal(source.read(NAME).floats(), expected)
    assert torch.equal(source.read(NAME, TensorSlice(1, 3, 7)).floats(), expected[:, 3:7])


def test_at_a_destination_numbers_and_scales_are_there_before_they_are_decoded(tmp_path: Path) -> None:
    source = open_source(tmp_path, tensors_of(make_weight()))
    where: Any = SimpleNamespace(device=torch.device("meta"), read=None)  # another device than that of the files
    found = source.read(NAME, destination=where)
    assert found.data.device.type == found.extras["scales"].device.type == "meta"
    assert found.data.dtype == fp8.DTYPE, "it travels in 8 bits"


def damaged(change: str) -> tuple[dict[str, Tensor], str]:
    encoded = make_weight()
    tensors, scales = tensors_of(encoded), f"{NAME}_scale_inv"
    match change:
        case "missing":
            del tensors[scales]
            return tensors, "lacks 'layer.weight_scale_inv', the scales of 'layer.weight'"
        case "left over":
            del tensors[NAME]
            return tensors, "holds 'layer.weight_scale_inv' without 'layer.weight'"
        case "of floats":
            tensors[NAME] = torch.ones(OUT, IN)
            return tensors, "holds 'layer.weight_scale_inv', and 'layer.weight' is stored as F32"
        case "too few":
            tensors[scales] = encoded.scales[:2]
            return tensors, r"'layer.weight_scale_inv' has shape \(2, 2\); \(3, 2\), one for each 128 x 128"
        case "one for each row":
            tensors[scales] = torch.ones(OUT, 1)
            return tensors, r"'layer.weight_scale_inv' has shape \(300, 1\); \(3, 2\)"
        case "integers":
            tensors[scales] = torch.ones(3, 2, dtype=torch.int32)
            return tensors, "'layer.weight_scale_inv' is stored as I32; one of F32, BF16, F16"
    tensors[NAME] = encoded.numbers[None]
    return tensors, r"'layer.weight' with scales has shape \(1, 300, 160\); two dimensions"


@pytest.mark.parametrize(
    "change", ["missing", "left over", "of floats", "too few", "one for each row", "integers", "a third dimension"]
)
def test_scales_that_do_not_fit_are_an_error_with_their_name_before_tensors_are_read(
    change: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tensors, message = damaged(change)
    monkeypatch.setattr(SafetensorsSource, "read", None)  # not called
    with pytest.raises(ModelError, match=message):
        open_source(tmp_path, tensors)


@pytest.mark.parametrize(
    ("change", "shown"),
    [
        ({"fmt": "e5m2"}, "fmt e5m2"),
        ({"activation_scheme": "static"}, "activation_scheme static"),
        ({"weight_block_size": None}, "weight_block_size None"),
        ({"weight_block_size": [128]}, r"weight_block_size \[128\]"),
        ({"weight_block_size": [128, 0]}, r"weight_block_size \[128, 0\]"),
        ({"weight_block_size": [128, True]}, r"weight_block_size \[128, True\]"),
    ],
)
def test_other_forms_of_fp8_are_refused_by_name(change: dict[str, Any], shown: str) -> None:
    assert read_block(ConfigFields(QUANTISED, "a folder")) == (128, 128)
    with pytest.raises(ModelError, match=f"is quantised with fp8, .*{shown}.*; fmt e4m3, activation_scheme dynamic"):
        read_block(ConfigFields(QUANTISED | change, "a folder"))


def test_a_folder_whose_scales_are_missing_is_an_error_when_it_is_opened(tmp_path: Path) -> None:
    tiny = tiny_llama()
    tiny.oracle.save_pretrained(tmp_path)
    name = "model.layers.1.mlp.up_proj.weight"
    weights = {other: tensor.contiguous() for other, tensor in tiny.source.tensors.items()}
    save_file(weights | {name: encode(weights[name]).numbers}, tmp_path / "model.safetensors")
    config = json.loads((tmp_path / "config.json").read_text()) | {"quantization_config": QUANTISED}
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(ModelError, match=f"lacks '{name}_scale_inv'"):
        _ = resolve_model(str(tmp_path)).tensors


# ---- what devices keep ----


def read(source: BlockFp8Source, ops: Any, use: WeightUse, notes: WeightNotes | None = None) -> Any:
    return read_tensor(source, ops, TensorRequest(NAME, as_stored=True, use=use), notes=notes)


def test_without_products_of_8_bits_it_is_decoded(tmp_path: Path) -> None:
    source = open_source(tmp_path, tensors_of(make_weight()))
    found = read(source, TorchOps(), WeightUse.LINEAR)
    assert found.format == "F32" and torch.equal(found.data, source.read(NAME).floats())


@needs_kernels
def test_a_cpu_keeps_as_many_bits_where_32_divides_the_inputs(tmp_path: Path) -> None:
    source, notes = open_source(tmp_path, tensors_of(make_weight())), WeightNotes()
    exact = source.read(NAME).floats()
    kept = read(source, NativeOps(), WeightUse.LINEAR, notes)
    # Half of a place, of which the largest of 32 numbers has 127, and the rounding of that scale to a half
    allowed = exact.unflatten(1, (-1, 32)).abs().amax(-1, keepdim=True) * (0.5 / 127 + 2**-11)
    assert kept.format == "Q8_0" and ((kept.floats() - exact).unflatten(1, (-1, 32)).abs() <= allowed).all()
    assert read(source, NativeOps(bits=4), WeightUse.EXPERT).format == "Q4_1"
    assert read(source, NativeOps(bits=4), WeightUse.VOCABULARY).format == "Q8_0"
    for ops, use in ((NativeOps(keep_formats=False), WeightUse.LINEAR), (NativeOps(), WeightUse.OTHER)):
        assert torch.equal(read(source, ops, use).data, exact)
    assert notes.lines() == []
    odd = open_source(tmp_path, tensors_of(make_weight(OUT, 150)))
    assert read(odd, NativeOps(), WeightUse.LINEAR, notes).format == "F32"
    assert notes.lines() == [f"decoded to floats, since 32 does not divide the inputs: {NAME}"]


def test_a_gpu_decodes_it_or_scales_rows(tmp_path: Path) -> None:
    pytest.importorskip("triton")
    from ratoon.layers.cuda_ops import CudaOps

    source = open_source(tmp_path, tensors_of(make_weight(304, 160)))
    exact = source.read(NAME).floats()
    assert torch.equal(read(source, CudaOps(), WeightUse.LINEAR).data, exact)
    rows = read(source, CudaOps(quantization="fp8"), WeightUse.LINEAR)
    assert rows.format == fp8.FORMAT
    torch.testing.assert_close(rows.floats(), exact, rtol=2**-4, atol=float(exact.abs().max()) * 2**-9)
    assert torch.equal(read(source, CudaOps(quantization="fp8"), WeightUse.EXPERT).data, exact)
