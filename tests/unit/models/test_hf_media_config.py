"""Configs of models that read images: nested and flat, with defaults left out, with wrong fields, and with the files of
preprocessing beside them."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import save_file

from ratoon.core.errors import ModelError
from ratoon.core.media import MediaConfig, VisionConfig
from ratoon.models.build import collect_shapes
from ratoon.models.hf_config import parse_hf_config
from ratoon.models.hf_media_config import CLIP_MEAN, CLIP_STD, with_processor
from ratoon.models.source import resolve_model

# As published: fields of the text model beside those of the whole
QWEN2_VL = {
    "architectures": ["Qwen2VLForConditionalGeneration"],
    "model_type": "qwen2_vl",
    "attention_dropout": 0.0,
    "bos_token_id": 151643, "eos_token_id": 151645, "vision_start_token_id": 151652, "vision_end_token_id": 151653,
    "vision_token_id": 151654, "image_token_id": 151655, "video_token_id": 151656,
    "hidden_act": "silu", "hidden_size": 1536, "initializer_range": 0.02, "intermediate_size": 8960,
    "max_position_embeddings": 32768, "max_window_layers": 28, "num_attention_heads": 12, "num_hidden_layers": 28,
    "num_key_value_heads": 2, "rms_norm_eps": 1e-06, "rope_theta": 1000000.0, "sliding_window": 32768,
    "tie_word_embeddings": True, "torch_dtype": "bfloat16", "use_cache": True, "use_sliding_window": False,
    "vision_config": {
        "depth": 32, "embed_dim": 1280, "mlp_ratio": 4, "num_heads": 16, "in_chans": 3, "hidden_size": 1536,
        "patch_size": 14, "spatial_merge_size": 2, "spatial_patch_size": 14, "temporal_patch_size": 2,
    },
    "rope_scaling": {"type": "mrope", "mrope_section": [16, 24, 24]},
    "vocab_size": 151936,
}  # fmt: skip
QWEN2_5_VL = QWEN2_VL | {
    "architectures": ["Qwen2_5_VLForConditionalGeneration"],
    "model_type": "qwen2_5_vl",
    "hidden_size": 2048, "intermediate_size": 11008, "num_attention_heads": 16, "num_hidden_layers": 36,
    "max_position_embeddings": 128000,
    "vision_config": {
        "depth": 32, "hidden_act": "silu", "hidden_size": 1280, "intermediate_size": 3420, "num_heads": 16,
        "in_chans": 3, "out_hidden_size": 2048, "patch_size": 14, "spatial_merge_size": 2, "spatial_patch_size": 14,
        "window_size": 112, "fullatt_block_indexes": [7, 15, 23, 31], "tokens_per_second": 2, "temporal_patch_size": 2,
    },
}  # fmt: skip
SMOLVLM = {
    "architectures": ["SmolVLMForConditionalGeneration"],
    "model_type": "smolvlm",
    "image_token_id": 49190,
    "scale_factor": 4,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
    "text_config": {
        "architectures": ["VLlama3ForCausalLM"], "head_dim": 64, "hidden_size": 576, "intermediate_size": 1536,
        "is_llama_config": True, "max_position_embeddings": 8192, "model_type": "llama", "num_attention_heads": 9,
        "num_hidden_layers": 30, "num_key_value_heads": 3, "pad_token_id": 2, "rms_norm_eps": 1e-05,
        "rope_theta": 100000, "torch_dtype": "bfloat16", "vocab_size": 49280,
    },
    "vision_config": {
        "hidden_size": 768, "image_size": 512, "max_image_size": {"longest_edge": 512}, "model_type": "smolvlm_vision",
        "num_attention_heads": 12, "patch_size": 16, "size": {"longest_edge": 2048}, "use_base_siglip": True,
    },
    "vocab_size": 49280,
}  # fmt: skip


def test_the_flat_config_of_qwen2_vl() -> None:
    config = parse_hf_config(QWEN2_VL, "config.json")
    assert config.architecture == "Qwen2VLForConditionalGeneration"
    assert (config.hidden_size, config.num_layers, config.head_dim, config.num_kv_heads) == (1536, 28, 128, 2)
    assert (config.rope_scaling.kind, config.rope_scaling.sections, config.rope_axes) == ("default", (16, 24, 24), 3)
    assert (config.rope_theta, config.sliding_window, config.tie_word_embeddings) == (1e6, None, True)
    assert (config.attention_bias, config.attention_output_bias, config.checkpoint_dtype) == (True, False, "bfloat16")
    assert config.eos_token_ids == (151645,)
    assert config.media == MediaConfig(
        family="qwen2_vl",
        vision=VisionConfig(
            1280, 5120, 32, 16, 14, activation="quick_gelu", temporal_patch_size=2, merge_size=2
        ),
        image_token_id=151655,
        video_token_id=151656,
        mean=CLIP_MEAN,
        std=CLIP_STD,
    )  # fmt: skip


def test_the_flat_config_of_qwen2_5_vl() -> None:
    media = parse_hf_config(QWEN2_5_VL, "config.json").media
    assert media is not None and media.family == "qwen2_5_vl"
    assert media.vision == VisionConfig(
        1280, 3420, 32, 16, 14, activation="silu", temporal_patch_size=2, merge_size=2, window_size=112,
        full_attention_layers=(7, 15, 23, 31), tokens_per_second=2,
    )  # fmt: skip


def test_the_config_of_smolvlm_with_defaults_left_out() -> None:
    config = parse_hf_config(SMOLVLM, "config.json")
    assert (config.architecture, config.rope_axes) == ("SmolVLMForConditionalGeneration", 0)
    assert (config.hidden_size, config.num_kv_heads, config.rope_theta, config.norm_eps) == (576, 3, 1e5, 1e-5)
    assert config.media == MediaConfig(
        family="idefics3",
        vision=VisionConfig(768, 3072, 12, 12, 16, 512, activation="gelu_pytorch_tanh", merge_size=4),
        image_token_id=49190,
        num_rows=64,
    )


@pytest.mark.parametrize("raw", [QWEN2_VL, QWEN2_5_VL, SMOLVLM], ids=["qwen2_vl", "qwen2_5_vl", "smolvlm"])
def test_what_transformers_saves_is_the_same_config(raw: dict[str, Any]) -> None:
    names = {"qwen2_vl": "Qwen2VL", "qwen2_5_vl": "Qwen2_5_VL", "smolvlm": "SmolVLM"}
    config_class = getattr(transformers, names[raw["model_type"]] + "Config")
    nested = config_class(**raw).to_dict()
    assert "text_config" in nested
    ours = parse_hf_config(raw, "published")
    theirs = parse_hf_config(nested | {"architectures": raw["architectures"]}, "saved")
    if raw is SMOLVLM:  # transformers writes Llama's default tokens, which are not those of this file's vocabulary
        theirs = replace(theirs, bos_token_id=None, eos_token_ids=())
    assert theirs == ours


@pytest.mark.parametrize("raw", [QWEN2_VL, QWEN2_5_VL, SMOLVLM], ids=["qwen2_vl", "qwen2_5_vl", "smolvlm"])
def test_tensors_are_those_of_transformers_with_their_shapes(raw: dict[str, Any]) -> None:
    names = {"qwen2_vl": "Qwen2VL", "qwen2_5_vl": "Qwen2_5_VL", "smolvlm": "SmolVLM"}
    with torch.device("meta"):
        name = names[raw["model_type"]]
        oracle = getattr(transformers, name + "ForConditionalGeneration")(getattr(transformers, name + "Config")(**raw))
    expected = {
        name.replace("model.visual.", "visual.").replace("model.language_model.", "model."): tuple(tensor.shape)
        for name, tensor in oracle.state_dict().items()
    }
    if raw["tie_word_embeddings"]:
        expected.pop("lm_head.weight", None)
    assert collect_shapes(parse_hf_config(raw, "config.json")) == expected


def test_scalings_of_long_contexts_keep_the_sections() -> None:
    rope = {"type": "yarn", "mrope_section": [16, 24, 24], "factor": 4, "original_max_position_embeddings": 32768}
    scaling = parse_hf_config(QWEN2_VL | {"rope_scaling": rope}, "config.json").rope_scaling
    assert (scaling.kind, scaling.factor, scaling.sections) == ("yarn", 4.0, (16, 24, 24))


@pytest.mark.parametrize(
    ("raw", "changed", "named"),
    [
        (QWEN2_VL, {"rope_scaling": {"type": "mrope"}}, "mrope_section is missing"),
        (QWEN2_VL, {"rope_scaling": {"type": "mrope", "mrope_section": [16, 24]}}, "mrope_section is"),
        (QWEN2_VL, {"rope_scaling": {"type": "mrope", "mrope_section": [16, 24, 25]}}, "add up to 64"),
        (QWEN2_VL, {"image_token_id": 151936}, "image_token_id is 151936"),
        (QWEN2_VL, {"vision_config": {"hidden_size": 3584}}, "vision_config.hidden_size is 3584"),
        (QWEN2_VL, {"vision_config": {"hidden_size": 1536, "num_heads": 7}}, "multiple of num_heads"),
        (QWEN2_VL, {"vision_config": {"hidden_size": 1536, "embed_dim": 96}}, "multiple of 4 numbers, not of 6"),
        (QWEN2_VL, {"vision_config": {"hidden_size": 1536, "rope_parameters": {"rope_theta": 5}}}, "rope_theta is 5"),
        (QWEN2_VL, {"vision_config": {"hidden_size": 1536, "patch_size": 2000}}, "patch_size of 2000"),
        (QWEN2_VL, {"vision_config": {"hidden_size": 1536, "depth": 5000}}, "depth is 5000"),
        (QWEN2_5_VL, {"vision_config": {"out_hidden_size": 2048, "window_size": 20}}, "window_size is 20"),
        (
            QWEN2_5_VL,
            {"vision_config": {"out_hidden_size": 2048, "fullatt_block_indexes": "all"}},
            "fullatt_block_indexes",
        ),
        (SMOLVLM, {"scale_factor": 5}, "multiple of scale_factor"),
        (SMOLVLM, {"vision_config": []}, ""),
        (SMOLVLM, {"vision_config": "x"}, "vision_config is"),
    ],
)
def test_wrong_fields_are_named(raw: dict[str, Any], changed: dict[str, Any], named: str) -> None:
    if not named:
        assert parse_hf_config(raw | changed | {"scale_factor": 1}, "config.json").media is not None, "all defaults"
        return
    with pytest.raises(ModelError, match=named.replace("[", r"\[")):
        parse_hf_config(raw | changed, "config.json")


# ---- preprocessing ----


def media_of(raw: dict[str, Any]) -> MediaConfig:
    media = parse_hf_config(raw, "config.json").media
    assert media is not None
    return media


def test_mean_and_deviation_come_from_the_file_and_are_of_pixels_from_0_to_1() -> None:
    media, mean, std = media_of(SMOLVLM), [0.1, 0.2, 0.3], [0.4, 0.5, 0.6]
    given = {"image_mean": mean, "image_std": std, "rescale_factor": 0.00392156862745098, "size": {"longest_edge": 99}}
    found = with_processor(media, given, "preprocessor_config.json")
    assert (found.mean, found.std, found.processor) == (tuple(mean), tuple(std), given)
    pixels = torch.arange(256.0)
    for factor, changed in ((1 / 128, {"rescale_factor": 1 / 128}), (1.0, {"do_rescale": False})):
        found = with_processor(media, given | changed, "preprocessor_config.json")
        torch.testing.assert_close((pixels / 255 - found.mean[1]) / found.std[1], (pixels * factor - 0.2) / 0.5)
    found = with_processor(media, given | {"do_normalize": False}, "preprocessor_config.json")
    assert (found.mean, found.std) == ((0.0,) * 3, (1.0,) * 3)


@pytest.mark.parametrize(
    ("given", "named"),
    [
        ({"image_mean": [0.5]}, "image_mean has 1 numbers"),
        ({"image_mean": "0.5"}, "image_mean is"),
        ({"image_std": [0.5, 0, 0.5]}, "image_std is"),
        ({"patch_size": 16}, "patch_size is 16"),
        ({"merge_size": 4}, "merge_size is 4"),
        ({"rescale_factor": -1}, "rescale_factor is -1"),
    ],
)
def test_wrong_fields_of_preprocessing_are_named(given: dict[str, Any], named: str) -> None:
    with pytest.raises(ModelError, match=named):
        with_processor(media_of(QWEN2_VL), given, "preprocessor_config.json")


@pytest.mark.parametrize("together", [False, True])
def test_a_folder_has_preprocessing_in_one_file_or_in_several(tmp_path: Path, together: bool) -> None:
    image, video = {"image_mean": [0.1, 0.2, 0.3], "min_pixels": 3136}, {"fps": 2.0}
    if together:
        (tmp_path / "processor_config.json").write_text(
            json.dumps({"image_processor": image, "video_processor": video})
        )
    else:
        (tmp_path / "preprocessor_config.json").write_text(json.dumps(image))
        (tmp_path / "video_preprocessor_config.json").write_text(json.dumps(video))
    (tmp_path / "config.json").write_text(json.dumps(QWEN2_VL))
    save_file({"x": torch.zeros(1)}, tmp_path / "model.safetensors")
    media = resolve_model(str(tmp_path)).config.media
    assert media is not None and media.mean == (0.1, 0.2, 0.3) and media.std == CLIP_STD
    assert media.processor == image | {"video_processor": video}
    assert hash(media) == hash(media), "a config may be a key"


def test_a_folder_without_files_of_preprocessing_has_the_defaults_of_its_family(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(QWEN2_VL))
    save_file({"x": torch.zeros(1)}, tmp_path / "model.safetensors")
    assert resolve_model(str(tmp_path)).config.media == media_of(QWEN2_VL)
