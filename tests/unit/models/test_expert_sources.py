"""Experts of fused tensors, and of MXFP4, have the numbers that the file has, whole and in parts."""

from __future__ import annotations

import pytest
import torch

from ratoon.core.errors import ModelError
from ratoon.layers.native_formats import KeptFormats
from ratoon.layers.stored import TensorSlice
from ratoon.models.expert_source import ExpertSource
from ratoon.models.mxfp4_source import Mxfp4Source, decode_codes
from ratoon.models.weight_formats import read_weight_format
from tests.golden.tiny_models import DictSource

NUMBERS = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)  # of 4 bits with 2 for the exponent and 1 behind the point


def random(*shape: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(0))


def test_fused_experts_are_taken_apart() -> None:
    gate_up, down = random(3, 8, 6), random(3, 6, 4)
    source = ExpertSource(DictSource({"m.experts.gate_up_proj": gate_up, "m.experts.down_proj": down, "m.x": down[0]}))
    shapes = dict(source.shapes())
    assert len(shapes) == 3 * 3 + 1 and shapes["m.experts.2.up_proj.weight"] == (4, 6) and shapes["m.x"] == (6, 4)
    assert torch.equal(source.read("m.experts.1.gate_proj.weight").floats(), gate_up[1, :4])
    assert torch.equal(source.read("m.experts.1.up_proj.weight", TensorSlice(0, 1, 3)).floats(), gate_up[1, 5:7])
    assert torch.equal(source.read("m.experts.2.down_proj.weight", TensorSlice(1, 2, 4)).floats(), down[2, :, 2:])
    assert torch.equal(source.read("m.x").floats(), down[0])


def test_gate_and_up_that_take_turns_are_taken_apart() -> None:
    gate_up, bias = random(2, 6, 8), random(2, 8)
    tensors = {"m.experts.gate_up_proj": gate_up, "m.experts.gate_up_proj_bias": bias}
    source = ExpertSource(DictSource(tensors), interleaved=True)
    assert torch.equal(source.read("m.experts.1.up_proj.weight").floats(), gate_up[1, :, 1::2].T)
    assert torch.equal(source.read("m.experts.0.gate_proj.bias").floats(), bias[0, ::2])
    assert torch.equal(source.read("m.experts.0.up_proj.bias", TensorSlice(0, 1, 3)).floats(), bias[0, 3:7:2])


def packed(experts: int, out: int, width: int) -> tuple[dict[str, torch.Tensor], torch.Tensor]:
    """Blocks and scales of random numbers, and these, written out."""
    generator = torch.Generator().manual_seed(1)
    codes = torch.randint(0, 16, (experts, out, width), dtype=torch.uint8, generator=generator)
    scales = torch.randint(115, 130, (experts, out, width // 32), dtype=torch.uint8, generator=generator)
    values = torch.tensor([*NUMBERS, *(-number for number in NUMBERS)])[codes.long()]
    values = values * (2.0 ** (scales.float() - 127)).repeat_interleave(32, -1)
    blocks = (codes[..., ::2] | codes[..., 1::2] << 4).view(experts, out, width // 32, 16)
    return {"blocks": blocks, "scales": scales}, values


def test_numbers_of_mxfp4_are_kept_as_they_are() -> None:
    tensors, values = packed(2, 8, 64)
    down, down_values = packed(2, 6, 96)
    files = {f"m.experts.gate_up_proj_{name}": tensor for name, tensor in tensors.items()}
    files |= {f"m.experts.down_proj_{name}": tensor for name, tensor in down.items()}
    wrap = read_weight_format({"quantization_config": {"quant_method": "mxfp4"}}, "config")
    assert wrap is not None
    source = wrap(DictSource({**files, "m.norm": random(4)}))
    assert isinstance(source, Mxfp4Source) and len(source.shapes()) == 2 * 3 + 1
    stored = source.read("m.experts.1.up_proj.weight")
    assert torch.equal(stored.floats(), values[1, 1::2])
    assert KeptFormats().find(stored) is not None, "the kernels of a CPU take it"
    part = source.read("m.experts.0.gate_proj.weight", TensorSlice(0, 1, 3))
    assert torch.equal(part.floats(), values[0, 2:6:2])
    for start, stop in [(32, 96), (16, 48)]:  # whole blocks, and others
        part = source.read("m.experts.1.down_proj.weight", TensorSlice(1, start, stop))
        assert torch.equal(part.floats(), down_values[1, :, start:stop])


def test_blocks_without_scales_are_refused() -> None:
    tensors, _ = packed(1, 4, 32)
    with pytest.raises(ModelError, match="gate_up_proj have the shapes"):
        Mxfp4Source(DictSource({"m.experts.gate_up_proj_blocks": tensors["blocks"]}))


def test_all_codes_are_numbers_of_the_format() -> None:
    blocks = torch.arange(16, dtype=torch.uint8).view(1, 1, 16) * 17  # each code twice
    stored = decode_codes(blocks, torch.tensor([[127]], dtype=torch.uint8))
    wanted = torch.tensor([*NUMBERS, *(-number for number in NUMBERS)]).repeat_interleave(2)
    assert torch.equal(stored.floats()[0], wanted)
