"""Encoders of pictures and video make the rows of embeddings that transformers makes, in float32; quantised ones stay
close."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch

from ratoon.attention.segments import build_segment_attention
from ratoon.core.errors import ModelError
from ratoon.core.media import MediaInput
from ratoon.execution.passes.media import black_pictures, encode_most
from ratoon.layers.native import library
from ratoon.layers.native_ops import NativeOps
from ratoon.layers.ops import Product
from ratoon.layers.shard import ModelPart, Shard, Stage
from ratoon.layers.torch_ops import TorchOps
from ratoon.models.base import LanguageModel
from ratoon.models.build import build_model
from tests.golden.tiny_media_models import (
    FAMILIES,
    TinyMediaModel,
    normalised,
    qwen_input,
    tile_input,
    tiny_gemma3_with_images,
    tiny_idefics3,
    tiny_qwen2_5_vl,
    tiny_qwen2_vl,
)
from tests.golden.tiny_models import DictSource
from tests.triton_interpreter import repair_interpreter
from tests.unit.execution.test_model_runner import interpreted

repair_interpreter()

Tensor = torch.Tensor
TOLERANCE = 5e-5  # of rows that reach about 10, behind sums of up to 256 terms that cancel
GRIDS = [(1, 2, 2), (1, 4, 6), (1, 8, 8), (1, 2, 14), (1, 10, 4), (1, 18, 22)]
VIDEOS = [(1, 4, 4), (3, 6, 4), (2, 10, 14)]
needs_kernels = pytest.mark.skipif(library() is None, reason="no kernels were built for this processor")
OPS = ["torch", pytest.param("native", marks=needs_kernels)]


def ops_of(name: str) -> TorchOps | NativeOps:
    return TorchOps() if name == "torch" else NativeOps(keep_formats=False)


class RoundedProductsOps(TorchOps):
    """Has products of encoders with 16 bits of each number, as the kernel for AMX makes them, on any processor."""

    def for_encoders(self) -> TorchOps:
        return RoundedProducts()


class RoundedProducts(TorchOps):
    def make_linear(self, weight: Tensor, bias: Tensor | None) -> Product:
        first, second = _parts(weight)

        def multiply(x: Tensor) -> Tensor:
            high, low = _parts(x)
            y = high @ first.T + (high @ second.T + low @ first.T)
            return y if bias is None else y + bias

        return multiply


def _parts(x: Tensor) -> tuple[Tensor, Tensor]:
    """Two numbers in bf16, whose sum has 16 bits of each number."""
    first = x.bfloat16().float()
    return first, (x - first).bfloat16().float()


def a_picture(tiny: TinyMediaModel) -> MediaInput:
    assert tiny.config.media is not None
    is_tile = tiny.config.media.family in ("idefics3", "gemma3")
    return tile_input(tiny.config, 24, 24) if is_tile else qwen_input(tiny.config, (1, 6, 10))


@torch.inference_mode()
def encode(model: LanguageModel, inputs: Sequence[MediaInput], may_round: bool = False) -> list[Tensor]:
    assert model.media_encoder is not None
    attend = build_segment_attention(model.device, model.dtype, may_round)
    found = model.media_encoder.encode(inputs, attend)
    assert [rows.shape for rows in found] == [(media.num_rows, model.config.hidden_size) for media in inputs]
    return found


@torch.inference_mode()
def oracle_rows(tiny: TinyMediaModel, media: MediaInput) -> Tensor:
    pixels = normalised(tiny.config, media)
    assert tiny.config.media is not None
    if tiny.config.media.family == "idefics3":
        found = tiny.oracle.model.get_image_features(pixels[None, None], return_dict=True)
    elif tiny.config.media.family == "gemma3":
        found = tiny.oracle.model.get_image_features(pixels[None], return_dict=True)
    else:
        found = tiny.oracle.model.get_image_features(pixels, torch.tensor([media.grid]), return_dict=True)
    return found.pooler_output[0]


@pytest.mark.parametrize("ops", OPS)
@pytest.mark.parametrize("family", [tiny_qwen2_vl, tiny_qwen2_5_vl])
@pytest.mark.one_in(3)
def test_pictures_and_videos_of_many_sizes_give_the_rows_of_transformers(family, ops: str) -> None:
    tiny = family()
    model = tiny.build(ops_of(ops))
    inputs = [qwen_input(tiny.config, grid, seed) for seed, grid in enumerate(GRIDS)]
    inputs += [qwen_input(tiny.config, grid, seed, video=True) for seed, grid in enumerate(VIDEOS)]
    expected = [oracle_rows(tiny, media) for media in inputs]
    alone = [encode(model, [media])[0] for media in inputs]
    torch.testing.assert_close(alone, expected, atol=TOLERANCE, rtol=0)
    together = encode(model, inputs[::2] + inputs[1::2])  # kinds and sizes mixed
    torch.testing.assert_close(together, expected[::2] + expected[1::2], atol=TOLERANCE, rtol=0)


@pytest.mark.parametrize("ops", OPS)
@pytest.mark.parametrize("smolvlm", [False, True])
def test_tiles_give_the_rows_of_transformers(smolvlm: bool, ops: str) -> None:
    tiny = tiny_idefics3(smolvlm)
    model = tiny.build(ops_of(ops))
    inputs = [tile_input(tiny.config, side, side, seed) for seed, side in enumerate((24, 24, 8, 16, 24))]
    expected = [oracle_rows(tiny, media) for media in inputs]
    torch.testing.assert_close(encode(model, inputs), expected, atol=TOLERANCE, rtol=0)
    torch.testing.assert_close(encode(model, inputs[2:3]), expected[2:3], atol=TOLERANCE, rtol=0)


@pytest.mark.parametrize("side", range(1, 80))
def test_positions_on_the_borders_of_a_table_are_those_of_transformers(side: int) -> None:
    """A full picture has a patch on every border, where the last bit of a product decides."""
    from transformers.models.idefics3.modeling_idefics3 import Idefics3VisionConfig, Idefics3VisionEmbeddings

    from ratoon.models.vision.vit import positions_of_patches

    config = Idefics3VisionConfig(hidden_size=1, image_size=80, patch_size=1, num_channels=1)
    oracle = Idefics3VisionEmbeddings(config)
    with torch.inference_mode():
        oracle.patch_embedding.weight.zero_(), oracle.patch_embedding.bias.zero_()
        oracle.position_embedding.weight.copy_(torch.arange(80.0 * 80)[:, None])
        found = oracle(torch.zeros(1, 1, side, 80), torch.ones(1, side, 80, dtype=torch.bool))
    assert torch.equal(found.flatten().long(), positions_of_patches(side, 80, 80))


@pytest.mark.parametrize("name", FAMILIES)
def test_heads_whose_size_the_attention_of_decoders_does_not_take(name: str) -> None:
    tiny = {
        "qwen2_vl": lambda: tiny_qwen2_vl(72, 2),
        "qwen2_5_vl": lambda: tiny_qwen2_5_vl(80, 1),
        "idefics3": lambda: tiny_idefics3(num_heads=8),
        "smolvlm": lambda: tiny_idefics3(True, num_heads=1),
        "gemma3": lambda: tiny_gemma3_with_images(num_heads=8),
    }[name]()
    media = a_picture(tiny)
    torch.testing.assert_close(encode(tiny.build(), [media])[0], oracle_rows(tiny, media), atol=TOLERANCE, rtol=0)


@pytest.mark.parametrize("name", FAMILIES)
def test_products_of_encoders_have_16_bits_of_each_number(name: str) -> None:
    """A product is off by 2^-19 of the size of its terms, in root mean square, and each layer has four of them."""
    tiny = FAMILIES[name]()
    media = a_picture(tiny)
    expected = oracle_rows(tiny, media)
    found = encode(tiny.build(RoundedProductsOps()), [media])[0]
    assert 2**-19 < (found - expected).norm() / expected.norm() < 2**-14


@needs_kernels
@pytest.mark.parametrize("name", FAMILIES)
def test_encoders_by_default_stay_within_16_bits_of_each_number(name: str) -> None:
    tiny = FAMILIES[name]()
    media = a_picture(tiny)
    expected = oracle_rows(tiny, media)
    found = encode(tiny.build(NativeOps()), [media])[0]
    assert (found - expected).norm() / expected.norm() < 2**-14


@needs_kernels
@pytest.mark.parametrize("bits", [8, 4])
@pytest.mark.parametrize("name", FAMILIES)
def test_quantised_encoders_stay_close(name: str, bits: int) -> None:
    tiny = FAMILIES[name]()
    media = a_picture(tiny)
    expected = oracle_rows(tiny, media)
    found = encode(tiny.build(NativeOps(bits=bits)), [media], may_round=True)[0]
    error = (found - expected).norm() / expected.norm()
    assert 1e-4 < error < {8: 0.03, 4: 0.3}[bits]


@pytest.mark.slow
@interpreted
@pytest.mark.parametrize("name", FAMILIES)
@pytest.mark.one_in(3)
def test_the_kernels_of_gpus_give_the_rows_of_transformers(name: str) -> None:
    from ratoon.layers.cuda_ops import CudaOps

    tiny = FAMILIES[name]()
    if "qwen" in name:  # many rows, and products of few
        inputs = [qwen_input(tiny.config, grid) for grid in ((1, 4, 6), (1, 2, 2))]
    elif name == "gemma3":  # which has one size
        inputs = [a_picture(tiny)]
    else:
        inputs = [tile_input(tiny.config, side, side) for side in (16, 8)]
    model = tiny.build(CudaOps())
    for media in inputs:
        torch.testing.assert_close(encode(model, [media])[0], oracle_rows(tiny, media), atol=TOLERANCE, rtol=0)


@pytest.mark.parametrize("name", FAMILIES)
def test_encoders_in_16_bits_stay_close(name: str) -> None:
    tiny = FAMILIES[name]()
    media = a_picture(tiny)
    expected = oracle_rows(tiny, media)
    error = (encode(tiny.build(dtype=torch.bfloat16), [media])[0] - expected).norm() / expected.norm()
    assert 1e-4 < error < 0.05


@pytest.mark.parametrize("name", FAMILIES)
def test_every_rank_has_the_whole_encoder_and_the_first_stage_alone(name: str) -> None:
    class Sum:
        can_be_captured = can_be_recorded = False

        def all_reduce(self, x: Tensor) -> Tensor:
            raise AssertionError("an encoder does not communicate")

        all_gather = all_reduce

    tiny = FAMILIES[name]()
    media = a_picture(tiny)
    expected = encode(tiny.build(), [media])[0]

    def build(part: ModelPart) -> LanguageModel:
        return build_model(tiny.config, tiny.source, TorchOps(), torch.device("cpu"), torch.float32, part=part)

    for rank in range(2):
        model = build(ModelPart(Shard(rank, 2, Sum())))
        assert torch.equal(encode(model, [media])[0], expected)
        assert not any("vis" in target for target in model.adapter_targets), "adapters do not change an encoder"
    assert torch.equal(encode(build(ModelPart(stage=Stage(0, 2))), [media])[0], expected)
    assert build(ModelPart(stage=Stage(1, 2))).media_encoder is None


@pytest.mark.parametrize("name", ["qwen2_vl", "qwen2_5_vl"])
def test_files_with_the_names_of_modules_are_read_as_well(name: str) -> None:
    tiny = FAMILIES[name]()
    other = tiny._replace(source=DictSource(tiny.oracle.state_dict()))
    assert set(other.source.tensors) != set(tiny.source.tensors)
    media = qwen_input(tiny.config, (1, 4, 6))
    assert torch.equal(encode(other.build(), [media])[0], encode(tiny.build(), [media])[0])


def test_a_size_that_is_padded_is_compared_with_that_of_the_file() -> None:
    tiny = tiny_qwen2_5_vl(inner_size=100)
    name = "visual.blocks.2.mlp.down_proj.weight"
    wrong = DictSource(tiny.source.tensors | {name: torch.zeros(64, 128)})
    with pytest.raises(ModelError, match=r"down_proj.weight' has shape \(64, 128\); the config asks for \(64, 100\)"):
        tiny._replace(source=wrong).build()
    assert wrong.num_reads == 0


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("num_rows", [1, 9, 40])
@pytest.mark.one_in(3)
def test_black_pictures_have_the_rows_that_a_step_may_have(family: str, num_rows: int) -> None:
    """By them the memory of the largest step is measured."""
    tiny = FAMILIES[family]()
    model = tiny.build()
    pictures = black_pictures(tiny.config.media, num_rows)
    with torch.inference_mode():
        outputs = model.media_encoder.encode(pictures, build_segment_attention(model.device, model.dtype))
        encode_most(model, num_rows)
    assert [len(rows) for rows in outputs] == [one.num_rows for one in pictures]
    assert num_rows <= sum(one.num_rows for one in pictures) < num_rows + 9
