"""Configs of Gemma 3 with images: as published, with most fields left out, and as transformers saves it."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import transformers

from ratoon.core.errors import ModelError
from ratoon.core.media import MediaConfig, VisionConfig
from ratoon.models.build import collect_shapes
from ratoon.models.hf_config import parse_hf_config

PUBLISHED: dict[str, Any] = {
    "architectures": ["Gemma3ForConditionalGeneration"],
    "boi_token_index": 255999, "eoi_token_index": 256000, "eos_token_id": [1, 106], "image_token_index": 262144,
    "mm_tokens_per_image": 256,
    "model_type": "gemma3",
    "text_config": {
        "hidden_size": 2560, "intermediate_size": 10240, "model_type": "gemma3_text", "num_hidden_layers": 34,
        "rope_scaling": {"factor": 8.0, "rope_type": "linear"}, "sliding_window": 1024,
    },
    "torch_dtype": "bfloat16",
    "vision_config": {
        "hidden_size": 1152, "image_size": 896, "intermediate_size": 4304, "model_type": "siglip_vision_model",
        "num_attention_heads": 16, "num_hidden_layers": 27, "patch_size": 14, "vision_use_head": False,
    },
}  # fmt: skip


def test_the_published_config_with_defaults_left_out() -> None:
    config = parse_hf_config(PUBLISHED, "config.json")
    assert (config.architecture, config.vocab_size) == ("Gemma3ForConditionalGeneration", 262208)
    assert (config.num_layers, config.num_heads, config.num_kv_heads, config.head_dim) == (34, 8, 4, 256)
    assert (config.rope_theta, config.local_rope_theta, config.attention_scale) == (1e6, 1e4, 256**-0.5)
    assert (config.rope_scaling.kind, config.rope_scaling.factor, config.max_position) == ("linear", 8.0, 131072)
    assert [config.window_of_layer(layer) for layer in range(7)] == [*[1024] * 5, None, 1024]
    assert (config.tie_word_embeddings, config.checkpoint_dtype, config.eos_token_ids) == (True, "bfloat16", (1, 106))
    assert config.media == MediaConfig(
        family="gemma3",
        vision=VisionConfig(1152, 4304, 27, 16, 14, 896, activation="gelu_pytorch_tanh"),
        image_token_id=262144,
        num_rows=256,
        attends_both_ways=True,
    )
    assert config.sees_ahead and config.rope_axes == 0


def test_what_transformers_saves_is_the_same_config() -> None:
    saved = transformers.Gemma3Config(**PUBLISHED).to_dict() | {"architectures": PUBLISHED["architectures"]}
    saved["text_config"] |= {"eos_token_id": [1, 106]}
    assert parse_hf_config(saved, "saved") == parse_hf_config(PUBLISHED, "published")


def test_tensors_are_those_of_transformers_with_their_shapes() -> None:
    with torch.device("meta"):
        oracle = transformers.Gemma3ForConditionalGeneration(transformers.Gemma3Config(**PUBLISHED))
    expected = {name: tuple(tensor.shape) for name, tensor in oracle.state_dict().items() if name != "lm_head.weight"}
    assert collect_shapes(parse_hf_config(PUBLISHED, "config.json")) == expected


@pytest.mark.parametrize(
    ("changes", "problem"),
    [
        ({"mm_tokens_per_image": 250}, r"mm_tokens_per_image is 250; expected the square of a number that divides 64"),
        ({"mm_tokens_per_image": 9}, r"mm_tokens_per_image is 9; expected the square of a number that divides 64"),
        ({"image_token_index": 262208}, r"image_token_id is 262208; expected a token of the vocabulary"),
        ({"text_config": {"final_logit_softcapping": 30.0}}, r"text_config.final_logit_softcapping is 30.0"),
        ({"vision_config": {"hidden_size": 100, "num_attention_heads": 16}}, r"vision_config.hidden_size is 100"),
    ],
)
def test_a_wrong_field_is_named(changes: dict[str, Any], problem: str) -> None:
    with pytest.raises(ModelError, match=problem):
        parse_hf_config(PUBLISHED | changes, "config.json")
