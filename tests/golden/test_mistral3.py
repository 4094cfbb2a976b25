"""Mistral 3, whose files hold an encoder of pictures that is not built: names of tensors, and what a config may say."""

from __future__ import annotations

import logging
from dataclasses import replace
from typing import Any

import pytest
import torch

from ratoon.core.errors import ModelError
from ratoon.models.hf_config import parse_hf_config
from ratoon.models.source import with_overrides
from tests.golden.dense_step import dense_logits
from tests.golden.test_model_logits import TOLERANCE
from tests.golden.tiny_decoder_models import tiny_ministral3, tiny_mistral3
from tests.golden.tiny_models import DictSource, TinyModel, random_token_ids


def as_published(tiny: TinyModel) -> TinyModel:
    """The tensors under the names that the published files have."""
    names = {
        name: name.removeprefix("model.").replace("language_model.", "language_model.model.")
        if name.startswith("model.")
        else f"language_model.{name}"
        for name in tiny.source.tensors
    }
    return tiny._replace(source=DictSource({names[name]: part for name, part in tiny.source.tensors.items()}))


def test_published_files_are_read_and_what_reads_pictures_is_left_out_with_lines_in_the_log(
    caplog: pytest.LogCaptureFixture,
) -> None:
    tiny, token_ids = tiny_mistral3(), random_token_ids(20)
    published = as_published(tiny)
    assert "language_model.lm_head.weight" in published.source.tensors
    with caplog.at_level(logging.INFO, "ratoon.models.build"):
        model = published.build()
    assert torch.equal(dense_logits(model, token_ids), dense_logits(tiny.build(), token_ids))
    for name in ("vision_tower", "multi_modal_projector"):
        count = sum(tensor.startswith(f"{name}.") for tensor in published.source.tensors)
        assert count and f"the {count} tensors of {name} read pictures, and are left out" in caplog.text
    assert published.source.num_reads < len(published.source.tensors)


def test_other_tensors_beside_the_text_model_are_still_an_error() -> None:
    tiny = tiny_mistral3()
    tiny.source.tensors["model.audio_tower.weight"] = torch.zeros(1)
    with pytest.raises(ModelError, match=r"model\.audio_tower\.weight"):
        tiny.build()


def test_a_head_in_the_file_is_used_whatever_the_flag_says() -> None:
    """transformers writes the flag with its default, true, beside heads of their own."""
    tiny, token_ids = tiny_mistral3(), random_token_ids(9)
    flagged = tiny._replace(config=replace(tiny.config, tie_word_embeddings=True))
    assert torch.equal(dense_logits(flagged.build(), token_ids), dense_logits(tiny.build(), token_ids))
    del flagged.source.tensors["lm_head.weight"]
    flagged.build()


def published_config(**text: Any) -> dict[str, Any]:
    """Returns a config of the form of Mistral Small 3.1, with the fields that matter."""
    fields = {
        "model_type": "mistral", "head_dim": 128, "hidden_size": 5120, "intermediate_size": 32768,
        "max_position_embeddings": 131072, "num_attention_heads": 32, "num_hidden_layers": 40,
        "num_key_value_heads": 8, "rms_norm_eps": 1e-5, "rope_theta": 1e9, "sliding_window": None,
        "vocab_size": 131072,
    }  # fmt: skip
    return {
        "architectures": ["Mistral3ForConditionalGeneration"], "model_type": "mistral3", "torch_dtype": "bfloat16",
        "text_config": fields | text, "vision_config": {"model_type": "pixtral"},
    }  # fmt: skip


def test_the_config_of_a_published_model_is_that_of_its_text_model() -> None:
    config = parse_hf_config(published_config(), "config")
    assert (config.head_dim, config.num_kv_heads, config.rope_theta, config.sliding_window) == (128, 8, 1e9, None)
    assert config.checkpoint_dtype == "bfloat16" and not config.tie_word_embeddings and config.media is None


def test_a_text_model_that_is_none_of_these_is_refused_by_name() -> None:
    with pytest.raises(ModelError, match=r"text_config\.model_type is 'mistral4'; expected one of mistral, ministral3"):
        parse_hf_config(published_config(model_type="mistral4"), "config")


def test_a_rope_scaling_that_is_set_takes_the_place_of_the_text_models_and_keeps_its_base() -> None:
    rope = {"rope_type": "yarn", "rope_theta": 5e5, "factor": 2.0, "llama_4_scaling_beta": 0.1,
            "original_max_position_embeddings": 16384}  # fmt: skip
    raw = published_config(model_type="ministral3", rope_parameters=rope)
    assert parse_hf_config(raw, "config").rope_scaling.query_beta == 0.1
    changed = parse_hf_config(with_overrides(raw, {"rope_scaling": {"rope_type": "linear", "factor": 3.0}}), "config")
    assert (changed.rope_scaling.kind, changed.rope_scaling.factor, changed.rope_theta) == ("linear", 3.0, 5e5)
    assert changed.rope_scaling.query_beta is None


def test_a_scale_of_queries_without_an_original_length_is_refused() -> None:
    rope = {"rope_type": "default", "llama_4_scaling_beta": 0.1}
    with pytest.raises(ModelError, match="original_max_position_embeddings is missing"):
        parse_hf_config(published_config(model_type="ministral3", rope_parameters=rope), "config")


def test_no_operation_is_added_where_no_position_is_behind_the_original_length() -> None:
    tiny = tiny_ministral3()
    within, beyond = tiny.build(max_position=16), tiny.build(max_position=17)
    assert within.layers[0].attention.query_scale is None
    assert beyond.layers[0].attention.query_scale is not None
    token_ids = random_token_ids(16)
    assert torch.equal(dense_logits(within, token_ids), dense_logits(beyond, token_ids))


def test_the_text_model_may_be_ministral3() -> None:
    tiny, token_ids = tiny_mistral3("ministral3"), random_token_ids(40)
    parsed = parse_hf_config(tiny.oracle.config.to_dict(), "config")
    logits = dense_logits(tiny._replace(config=parsed).build(), token_ids)
    torch.testing.assert_close(logits, tiny.oracle_logits(token_ids), atol=TOLERANCE, rtol=0)
