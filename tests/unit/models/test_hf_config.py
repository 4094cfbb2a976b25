"""Hugging Face configs that are wrong, unknown or unusual. tests/golden compares the usual ones with transformers."""

from __future__ import annotations

from typing import Any

import pytest

from ratoon.core.config import ModelConfig
from ratoon.core.errors import ModelError
from ratoon.models.hf_config import parse_hf_config
from tests.unit.models.model_files import LLAMA_CONFIG

GPT2_CONFIG = {
    "architectures": ["GPT2LMHeadModel"], "vocab_size": 60, "n_embd": 32, "n_head": 4, "n_layer": 2, "n_positions": 64
}  # fmt: skip


def parse(config: dict[str, Any], **changes: Any) -> ModelConfig:
    return parse_hf_config({**config, **changes}, "somewhere")


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"hidden_size": None}, r"somewhere: config field hidden_size is missing; expected a whole number above 0"),
        ({"vocab_size": "many"}, r"config field vocab_size is 'many'"),
        ({"num_hidden_layers": 0}, r"config field num_hidden_layers is 0"),
        ({"num_hidden_layers": True}, r"config field num_hidden_layers is True"),
        ({"max_position_embeddings": None}, r"config field max_position_embeddings is missing"),
        ({"rms_norm_eps": -1}, r"config field rms_norm_eps is -1"),
        ({"num_attention_heads": 5, "num_key_value_heads": 5}, r"hidden_size is 32; expected a multiple of num_atten"),
        ({"num_key_value_heads": 3}, r"num_attention_heads is 4; expected a multiple of num_key_value_heads \(3\)"),
        ({"torch_dtype": "int8"}, r"config field dtype is 'int8'; expected float32 or float16 or bfloat16"),
        ({"eos_token_id": "</s>"}, r"config field eos_token_id is '</s>'"),
        ({"tie_word_embeddings": "yes"}, r"config field tie_word_embeddings is 'yes'; expected true or false"),
        ({"rope_scaling": {"type": "spiral"}}, r"rope_scaling.rope_type is 'spiral'; expected one of default, li"),
        (
            {"rope_scaling": {"type": "longrope"}},
            r"rope_scaling.short_factor is missing; expected a list of \d+ numbers",
        ),
        (
            {"rope_scaling": {"type": "longrope", "short_factor": [1.0]}},
            r"rope_scaling.short_factor has 1 entries; expected a list",
        ),
        ({"rope_scaling": {"rope_type": "linear"}}, r"config field rope_scaling.factor is missing"),
        ({"rope_scaling": "linear"}, r"config field rope_scaling is 'linear'; expected an object"),
        ({"rope_parameters": {"full_attention": {"rope_theta": 1.0}}}, r"rope_parameters differs between kinds"),
    ],
)
def test_a_wrong_field_is_named_with_what_would_be_right(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ModelError, match=message):
        parse(LLAMA_CONFIG, **changes)


def test_an_unknown_architecture_is_named_and_the_known_ones_listed() -> None:
    known = "…ForCausalLM of .*Falcon, GPTNeoX, .*; …ForConditionalGeneration of Bart, .*GPT2LMHeadModel, MarianMTModel"
    with pytest.raises(ModelError, match=rf"architecture 'ParrotForMaskedLM' is not supported; known: {known}"):
        parse(LLAMA_CONFIG, architectures=["ParrotForMaskedLM"])
    with pytest.raises(ModelError, match=r"neither architectures nor model_type"):
        parse({})


def test_the_model_type_stands_in_for_a_missing_architecture() -> None:
    assert parse(LLAMA_CONFIG, architectures=None, model_type="qwen2").architecture == "Qwen2ForCausalLM"


@pytest.mark.parametrize(
    ("value", "wanted"), [(None, ()), (2, (2,)), ([2, 5], (2, 5)), (-1, ())]
)  # fmt: skip
def test_eos_may_be_one_token_several_or_none(value: Any, wanted: tuple[int, ...]) -> None:
    assert parse(LLAMA_CONFIG, eos_token_id=value).eos_token_ids == wanted


def test_a_window_that_reaches_no_layer_is_no_window() -> None:
    config = parse(
        LLAMA_CONFIG, architectures=["Qwen2ForCausalLM"], use_sliding_window=True, sliding_window=8, max_window_layers=2
    )
    assert (config.sliding_window, config.sliding_layers) == (None, None)


def test_layer_types_must_fit_the_layers() -> None:
    changes = {"architectures": ["Qwen3ForCausalLM"], "use_sliding_window": True, "sliding_window": 8, "head_dim": 8}
    with pytest.raises(ModelError, match=r"layer_types .* expected a list of 2 layer types"):
        parse(LLAMA_CONFIG, **changes, layer_types=["full_attention"])
    with pytest.raises(ModelError, match=r"layer_types holds \['chunked_attention'\]"):
        parse(LLAMA_CONFIG, **changes, layer_types=["full_attention", "chunked_attention"])


@pytest.mark.parametrize("field", ["scale_attn_by_inverse_layer_idx", "add_cross_attention"])
def test_forms_of_gpt2_that_compute_something_else_are_refused(field: str) -> None:
    assert parse(GPT2_CONFIG).intermediate_size == 128
    with pytest.raises(ModelError, match=rf"config field {field} is True; expected False"):
        parse(GPT2_CONFIG, **{field: True})
